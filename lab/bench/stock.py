"""A model of how vLLM 0.32's NIXL connector prepares and indexes, as the baseline to beat; nothing of it is vLLM's code.

Modelled: one dense list per rank with a whole-page descriptor per kernel block and region (K and V are one unit), then one
per state part, block and region; all groups span all regions. The consumer's list is made once, and again for every source
rank when the producer has more ranks: sliced in a Python loop over descriptors. A source's list is made per source rank.
Per request, logical block ids become lists of kernel block ids, and these index arrays. Whole blocks move, however few tokens
of them are needed. The conv state's parts are read as if each were dealt evenly to ranks.

Left out: scheduling, handshake messages, prefix-cache trimming, heartbeats, statistics: everything that would slow it down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from kvferry.errors import MeasureError
from kvferry.manifest import HOLE, Manifest
from kvferry.manifest.schema import Group, Layer, Part, TokenPaged
from kvferry.models import Side
from kvferry.plan import Request
from kvferry.plan.tables import Table

Descriptors = npt.NDArray[np.uint64]
Piece = tuple[int, int]


class RefusedError(MeasureError):
    """What the modelled connector would not carry, or what the model leaves out."""


@dataclass(frozen=True)
class Pool:
    """What the connector knows of one rank: pages of kernel blocks, and pieces (offset, length) of a state."""

    bases: tuple[int, ...]
    blocks: int
    kernel_blocks: int
    page: int
    pieces: tuple[Piece, ...]
    groups: tuple[Group, ...]

    @property
    def pages(self) -> int:
        """Descriptors of attention, all regions together; those of states come behind them."""
        return len(self.bases) * self.blocks * self.kernel_blocks

    @property
    def stride(self) -> int:
        return self.page * self.kernel_blocks


def pool_of(manifest: Manifest) -> Pool:
    by_group = {layer.group: layer for layer in manifest.layers}
    tokens = [g for g in manifest.groups if isinstance(g.paging, TokenPaged) and g.id in by_group]
    states = [by_group[g.id] for g in manifest.groups if not g.tokens and g.id in by_group]
    strides = {part.block_stride for layer in manifest.layers for part in layer.parts}
    if not tokens or len(strides) != 1 or len(manifest.regions) == 1 < len(manifest.layers):
        raise RefusedError("pools other than one region per layer with pages of one size are not modelled")
    paging = tokens[0].paging
    kernel_blocks = paging.kernel_blocks if isinstance(paging, TokenPaged) else 1
    pieces = tuple(_piece(manifest, part) for part in states[0].parts) if states else ()
    bases = tuple(region.address for region in manifest.regions)
    return Pool(bases, tokens[0].blocks, kernel_blocks, strides.pop() // kernel_blocks, pieces, manifest.groups)


def _piece(manifest: Manifest, part: Part) -> Piece:
    shape = manifest.shapes[part.shape]
    return part.offset, shape.element.bytes * prod(axis.stop - axis.start for axis in shape.axes)


def refuse(prefill: Side, decode: Side, layers: Sequence[Layer]) -> None:
    """Raise where the connector stops with an assertion or an error of its own, or where this model has nothing to say."""
    hybrid = any(part.name.startswith(("conv", "ssm")) for layer in layers for part in layer.parts)
    if prefill.pp > 1 or decode.pp > 1:
        raise RefusedError("stock does not pull across pipeline stages")
    if prefill.tp % decode.tp and decode.tp % prefill.tp:
        raise RefusedError("stock needs tensor-parallel sizes that divide each other")
    if prefill.layout != decode.layout:
        raise RefusedError("stock refuses sides of different layouts")
    if prefill.tp == decode.tp:
        return
    if prefill.layout.order != "head" or prefill.layout.kv != "packed":
        raise RefusedError("slices of other than head-major, packed pages are not modelled")
    if hybrid and prefill.layout.conv != "ds":
        raise RefusedError("stock refuses a conv state in the order (tap, channel)")


class Stock:
    """The consumer's lists and indices; `local` belongs to rank `rank` of `size`, `remote` are the sources it reads."""

    def __init__(self, local: Manifest, remote: Sequence[Manifest]) -> None:
        self.local = pool_of(local)
        self.remote = tuple(pool_of(m) for m in remote)
        self._rank = local.identity.rank.tp
        self.splits = len(remote)
        here, there = local.identity.rank.tp_size, remote[0].identity.rank.tp_size
        self.slices = max(here // there, 1)
        for pool in self.remote:
            if pool.page * there != self.local.page * here or [n * there for _, n in pool.pieces] != [
                n * here for _, n in self.local.pieces
            ]:
                raise RefusedError("pages or states that are not dealt evenly to ranks are not modelled")

    def local_list(self) -> Descriptors:
        pool = self.local
        return _dense(pool, [(0, pool.page)], pool.pieces)

    def split_lists(self, whole: Descriptors) -> Iterator[list[tuple[int, int, int]]]:
        """For more source ranks than one: every local descriptor cut for every source, one at a time."""
        for source in range(self.splits):
            cut = []
            for address, length, device in whole.tolist():
                share = length // self.splits
                cut.append((address + source * share, share, device))
            yield cut

    def remote_list(self, source: int) -> Descriptors:
        pool = self.remote[source]
        if self.slices == 1:
            return _dense(pool, [(0, pool.page)], pool.pieces)
        at = self._rank % self.slices
        pieces = [(offset + at * (n // self.slices), n // self.slices) for offset, n in pool.pieces]
        return _dense(pool, [(at * self.local.page, self.local.page)], pieces)

    def indices(self, request: Request) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Per source, what to read: remote and local descriptor numbers."""
        here, there = _kernel_ids(self.local, request.dst), _kernel_ids(self.remote[0], request.src)
        shortest = {g: min(len(here[g]), len(there[g])) for g in here}
        here = {g: ids[: shortest[g]] for g, ids in here.items()}
        there = {g: there[g][:count] for g, count in shortest.items()}
        return [(_numbers(pool, there), _numbers(self.local, here)) for pool in self.remote]

    def bytes(self, request: Request) -> int:
        lengths = self.local_list()[:, 1].astype(np.int64) // self.splits
        return sum(int(lengths[local].sum()) for _, local in self.indices(request))


def _dense(pool: Pool, page: Sequence[Piece], pieces: Sequence[Piece]) -> Descriptors:
    """Attention by region and kernel block, then states by region, piece and block."""
    kernel = np.arange(pool.blocks * pool.kernel_blocks, dtype=np.uint64) * np.uint64(pool.page)
    blocks = np.arange(pool.blocks, dtype=np.uint64) * np.uint64(pool.stride)
    parts = [_columns(base + offset + kernel, length) for base in pool.bases for offset, length in page]
    parts += [_columns(base + offset + blocks, length) for base in pool.bases for offset, length in pieces]
    return np.concatenate(parts)


def _columns(addresses: npt.NDArray[np.uint64], length: int) -> Descriptors:
    out = np.empty((len(addresses), 3), np.uint64)
    out[:, 0] = addresses
    out[:, 1] = length
    out[:, 2] = 0
    return out


def _kernel_ids(pool: Pool, tables: Mapping[int, Table]) -> dict[int, list[int]]:
    """Logical to kernel block ids, as lists; a state's block stays as it is, holes before a window are cut off."""
    inner = np.arange(pool.kernel_blocks)
    found: dict[int, list[int]] = {}
    for group in pool.groups:
        table = tables[group.id]
        if not isinstance(table, list):
            raise MeasureError("stock takes block tables as lists")
        ids = table[table.count(HOLE) :]
        if group.tokens and pool.kernel_blocks > 1:
            ids = (np.array(ids)[:, None] * pool.kernel_blocks + inner).reshape(-1).tolist()
        found[group.id] = ids
    return found


def _numbers(pool: Pool, ids: Mapping[int, list[int]]) -> npt.NDArray[np.int64]:
    """Descriptor numbers of every group over all regions."""
    parts = []
    regions = np.arange(len(pool.bases))[:, None] * (pool.blocks * pool.kernel_blocks)
    states = pool.pages + np.arange(len(pool.bases) * len(pool.pieces))[:, None] * pool.blocks
    for group in pool.groups:
        first = regions if group.tokens else states
        parts.append((first + np.asarray(ids[group.id], np.int32)[None, :]).ravel())
    return np.concatenate(parts)
