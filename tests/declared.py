"""What a transfer must leave in memory, read off manifests as data: plain loops over blocks, entries and elements.

Imports nothing from kvferry and shares no line with it: a manifest and a request are whatever has their fields. Where
`oracle` knows layer kinds and spells out their pages, this knows only what docs/formats.md says of declared memory.
Data bytes lie in [1, 128), garbage in [128, 256) and fills are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Tables = Mapping[int, Sequence[int] | int]

HOLE = -1


def places(digits: Iterable[tuple[int, int]]) -> Places:
    """Offsets of all indices of an axis, the last digit counting fastest."""
    out = np.zeros(1, np.int64)
    for count, stride in digits:
        out = (out[:, None] + np.arange(count) * stride).reshape(-1)
    return out


def live_of(axis: Any) -> int:
    return axis.size if axis.live is None else axis.live


@dataclass(frozen=True)
class Spots:
    """Where one part of a rank lies: offsets of its entries in a block, and of its elements, axes ordered by name, with
    the global indices that it owns of each."""

    part: Any
    blocks: int
    item: int
    per_entry: int
    partial: bool
    entries: Places
    elements: Places
    owned: tuple[tuple[int, int], ...]
    live: tuple[int, ...]

    @property
    def written(self) -> tuple[slice, ...]:
        """The owned indices that prefill writes, as slices of global indices."""
        ends = zip(self.owned, self.live, strict=True)
        return tuple(slice(start, max(start, min(stop, live))) for (start, stop), live in ends)

    @property
    def empty(self) -> bool:
        return any(s.start >= s.stop for s in self.written)

    def bytes_of(self, block: int, entry: int | None = None, live: bool = False) -> Places:
        """Addresses of [entry,] element, byte; all entries if none is given; all elements, or those that are written."""
        elements = self.elements
        if live:
            inside = zip(self.written, self.owned, strict=True)
            elements = elements[tuple(slice(s.start - start, s.stop - start) for s, (start, _) in inside)]
        first = self.part.offset + block * self.part.block_stride
        at = (self.entries if entry is None else self.entries[entry : entry + 1]) + first
        flat: Places = (at[:, None] + elements.reshape(-1))[..., None] + np.arange(self.item)
        return flat


def spots(manifest: Any) -> dict[tuple[str, str], Spots]:
    out = {}
    blocks = {group.id: group.blocks for group in manifest.groups}
    for layer in manifest.layers:
        for part in layer.parts:
            shape = manifest.shapes[part.shape]
            axes = sorted(shape.axes, key=lambda a: a.name)
            elements = np.zeros((), np.int64)
            for axis in axes:
                elements = elements[..., None] + places(axis.digits)
            out[layer.name, part.name] = Spots(
                part,
                blocks[layer.group],
                shape.element.bytes,
                shape.token.per_entry if shape.token else 0,
                bool(shape.token and getattr(shape.token, "partial", False)),
                places(shape.token.digits) if shape.token else np.zeros(1, np.int64),
                elements,
                tuple((a.start, a.stop) for a in axes),
                tuple(live_of(a) for a in axes),
            )
    return out


def contradiction(manifest: Any) -> str | None:
    """What is wrong with a manifest, found by marking every byte of every block with its owners."""
    groups = {group.id: group for group in manifest.groups}
    for layer in manifest.layers:
        group = groups[layer.group]
        if not keeps_enough(group.keeps, layer.reach):
            return f"{layer.name} looks back further than its table keeps"
        for part in layer.parts:
            wrong = _wrong_shape(manifest.shapes[part.shape], getattr(group.paging, "tokens", 0))
            if wrong:
                return f"{layer.name} {part.name}: {wrong}"
    found = spots(manifest)
    owner = [np.full(region.length, -1, np.int64) for region in manifest.regions]
    taken = {(g, i): np.zeros(region.length, np.int64) for g in groups for i, region in enumerate(manifest.regions)}
    for layer in manifest.layers:
        for part in layer.parts:
            where = f"{layer.name} {part.name}"
            for block in range(found[layer.name, part.name].blocks):
                at = found[layer.name, part.name].bytes_of(block).reshape(-1)
                if at.max() >= len(owner[part.region]):
                    return f"{where} reaches byte {at.max()}"
                np.add.at(taken[layer.group, part.region], at, 1)
                if (taken[layer.group, part.region][at] > 1).any():
                    return f"{where}: block {block} has bytes that are its group's already"
                if (~np.isin(owner[part.region][at], (-1, block))).any():
                    return f"{where}: block {block} has bytes of another block"
                owner[part.region][at] = block
    return None


@cache
def keeps_enough(keeps: Any, reach: Any) -> bool:
    """Whether whatever a layer looks at is kept, for every length up to the period of two chunks."""
    return all(first(keeps, n) <= first(reach, n) for n in range(400))


def _wrong_shape(shape: Any, tokens: int) -> str | None:
    for axis in shape.axes:
        if not 0 <= axis.start < axis.stop <= axis.size or live_of(axis) > axis.size:
            return f"axis {axis.name} owns [{axis.start}, {axis.stop}) of {axis.size}, {live_of(axis)} live"
        if prod(count for count, _ in axis.digits) != axis.stop - axis.start:
            return f"axis {axis.name}: digits {axis.digits} are not {axis.stop - axis.start} indices"
    entries = prod(count for count, _ in shape.token.digits) * shape.token.per_entry if shape.token else 0
    return None if entries == tokens else f"a block of {tokens} tokens, but entries for {entries}"


def first(reach: Any, n: int) -> int:
    """The lowest token that computing token `n` looks at."""
    match type(reach).__name__:
        case "Window":
            return max(0, n - reach.tokens + 1)
        case "Chunk":
            return n - n % reach.tokens
    return 0


def garbage(manifest: Any, seed: Sequence[int]) -> list[Bytes]:
    rng = np.random.default_rng([*seed, manifest.identity.rank.pp, manifest.identity.rank.tp])
    return [rng.integers(128, 256, region.length, np.uint8) for region in manifest.regions]


def table_of(tables: Tables, group: int) -> list[int]:
    found = tables[group]
    return [int(found)] if isinstance(found, int) else [int(block) for block in found]


@dataclass
class Truth:
    """The model's tensors as an engine without parallelism would hold them, for a request of so many tokens."""

    tokens: int
    seed: int
    _known: dict[tuple[str, str], Bytes] = field(default_factory=dict)

    def tensor(self, layer: str, name: str, lying: Spots) -> Bytes:
        """[entry, *axes by name, byte]; a state is one entry."""
        if (layer, name) not in self._known:
            entries = -(-self.tokens // lying.per_entry) if lying.per_entry else 1
            rng = np.random.default_rng([self.seed, *layer.encode(), 0, *name.encode()])
            self._known[layer, name] = rng.integers(1, 128, (entries, *lying.live, lying.item), np.uint8)
        return self._known[layer, name]

    def entry(self, layer: str, name: str, lying: Spots, entry: int) -> Bytes:
        """What a rank has written of one entry, flat."""
        return self.tensor(layer, name, lying)[(entry, *lying.written)].reshape(1, -1, lying.item)


def prefilled(manifest: Any, tables: Tables, truth: Truth) -> list[Bytes]:
    """A producer rank's memory after the request's tokens went through it."""
    memory = garbage(manifest, (truth.seed, 1))
    tokens = {group.id: getattr(group.paging, "tokens", 0) for group in manifest.groups}
    found = spots(manifest)
    for layer in manifest.layers:
        table, per_block = table_of(tables, layer.group), tokens[layer.group]
        for part in layer.parts:
            lying = found[layer.name, part.name]
            if not per_block:
                spot = lying.bytes_of(table[0], live=True)
                memory[part.region][spot] = truth.entry(layer.name, part.name, lying, 0)
                continue
            whole, rest = divmod(truth.tokens, lying.per_entry)
            for entry in range(whole + (1 if rest and lying.partial else 0)):
                at = place(entry * lying.per_entry, per_block, table)
                if at is not None:
                    spot = lying.bytes_of(at[0], at[1] // lying.per_entry, live=True)
                    memory[part.region][spot] = truth.entry(layer.name, part.name, lying, entry)
    return memory


def place(token: int, per_block: int, table: Sequence[int]) -> tuple[int, int] | None:
    """A token's block and its place in it, or None where the table has a hole or ends."""
    position, inside = divmod(token, per_block)
    return None if position >= len(table) or table[position] == HOLE else (table[position], inside)


@dataclass
class Image:
    """What a consumer rank must hold afterwards, how many bytes must travel, and by group the table positions of blocks
    that no hash may find."""

    memory: list[Bytes]
    moved: int = 0
    unhashable: dict[int, set[int]] = field(default_factory=dict)


def image(consumer: Any, producers: Sequence[Any], request: Any, truth: Truth, before: list[Bytes]) -> Image:
    """`before`, a consumer rank's memory, as the request must leave it."""
    out = Image([region.copy() for region in before])
    if request.start == request.tokens:
        return out
    groups_there = {layer.name: layer.group for producer in producers for layer in producer.layers}
    tokens_there = {group.id: getattr(group.paging, "tokens", 0) for producer in producers for group in producer.groups}
    found = spots(consumer)
    for group in consumer.groups:
        held = [
            (layer, part, found[layer.name, part.name])
            for layer in consumer.layers
            if layer.group == group.id
            for part in layer.parts
        ]
        table = table_of(request.dst, group.id)
        per_block = getattr(group.paging, "tokens", 0)
        if not per_block:
            for layer, part, lying in held:
                out.memory[part.region][lying.bytes_of(table[0])] = 0
                if layer.name in groups_there and not lying.empty:
                    spot = lying.bytes_of(table[0], live=True)
                    out.memory[part.region][spot] = truth.entry(layer.name, part.name, lying, 0)
                    out.moved += spot.size
            continue
        lows, copies, lost = [], [], set()
        for layer, part, lying in held:
            if layer.name not in groups_there or lying.empty:
                continue
            source = groups_there[layer.name]
            wanted = range_of(layer.reach, lying, group, request)
            lows.append(wanted.start * lying.per_entry)
            for entry in wanted:
                token = entry * lying.per_entry
                there = place(token, tokens_there[source], table_of(request.src, source))
                here = place(token, per_block, table)
                if there and here:
                    copies.append((layer, part, lying, entry, here))
                elif here and group.hashed and (token // per_block + 1) * per_block <= request.tokens:
                    lost.add(token // per_block)
        lowest = min(lows, default=max(request.start, first(group.keeps, request.tokens)))
        for position in range(lowest // per_block, -(-request.tokens // per_block)):
            for _, part, lying in held if table[position] != HOLE else ():
                out.memory[part.region][lying.bytes_of(table[position])] = 0
        for layer, part, lying, entry, (block, inside) in copies:
            spot = lying.bytes_of(block, inside // lying.per_entry, live=True)
            out.memory[part.region][spot] = truth.entry(layer.name, part.name, lying, entry)
            out.moved += spot.size
        if lost:
            out.unhashable[group.id] = lost
    return out


def range_of(reach: Any, lying: Spots, group: Any, request: Any) -> range:
    """The entries of a part that the consumer must get where both sides have a block for them."""
    low = first(reach, request.tokens)
    if group.hashed:
        per_block = group.paging.tokens
        low = min(low, first(group.keeps, request.tokens)) // per_block * per_block
    low = max(low, request.start) // lying.per_entry
    whole, rest = divmod(request.tokens, lying.per_entry)
    return range(low, max(low, whole + (1 if rest and lying.partial else 0)))


def differences(got: Sequence[Bytes], wanted: Sequence[Bytes]) -> Iterator[str]:
    """Every region in which memory is not as it must be, with the first byte that is not."""
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        bad = np.flatnonzero(one != other)
        if len(bad):
            at = int(bad[0])
            yield f"region {i}: {len(bad)} of {len(one)} bytes differ, the first at {at}: {one[at]}, not {other[at]}"
