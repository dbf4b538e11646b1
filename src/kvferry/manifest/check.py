"""Does one manifest make sense by itself: digits fill extents, parts lie in their regions, nothing shares a byte.

Whatever passes here can be turned into addresses without further bounds checks than block ids.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import isfinite, prod
from typing import Final

import numpy as np

from kvferry.bounds import end
from kvferry.errors import ManifestError
from kvferry.manifest.schema import DTYPE_BYTES, MAX_BYTES, Axis, Group, Layer, Manifest, Part, Shape, TokenPaged
from kvferry.strided import Digits, Ints, canonical, footprint, size, span, spread

MAX_PIECES: Final = 1 << 16
MAX_SPELLED: Final = 1 << 20
"""Pieces of shapes whose strides interleave: each is looked at, to see that they are apart."""
MAX_MARKS: Final = 1 << 20
MAX_TOKENS: Final = 1 << 18
MAX_ADDRESS: Final = 1 << 63

Footprint = tuple[int, Digits]


def check_manifest(manifest: Manifest) -> None:
    """Raise ManifestError, naming layer and part, unless the manifest is well formed."""
    _check_place(manifest)
    _check_body(manifest)


def check_all(manifests: Iterable[Manifest]) -> list[int]:
    """Like `check_manifest` of each, with what only rank and addresses tell apart looked at once: returns, for each, the number
    of its body."""
    bodies: dict[Manifest, int] = {}
    numbers = []
    for manifest in manifests:
        _check_place(manifest)
        known = len(bodies)
        numbers.append(bodies.setdefault(manifest.body, known))
        if numbers[-1] == known:
            _check_body(manifest)
    return numbers


def _check_place(manifest: Manifest) -> None:
    """What depends on the rank, and on where its regions lie."""
    _check_rank(manifest)
    _check_regions(manifest)


def _check_body(manifest: Manifest) -> None:
    groups = _groups(manifest)
    users = _users(manifest, groups)
    footprints, left = [], MAX_SPELLED
    for i, shape in enumerate(manifest.shapes):
        where = users.get(i, f"shape {i}")
        footprints.append(_check_shape(where, shape))
        left -= size(footprints[-1][1]) if not _nested(*footprints[-1]) else 0
        if left < 0:
            raise ManifestError(
                f"{where}: strides interleave in more than {MAX_SPELLED:,} pieces of all shapes: too many to check"
            )
    for layer in manifest.layers:
        if not groups[layer.group].keeps.covers(layer.reach):
            raise ManifestError(f"{layer.name}: looks back further than the block table of group {layer.group} keeps")
        for part in layer.parts:
            _check_part(manifest, layer, part, groups[layer.group], footprints[part.shape])
    _check_disjoint(manifest, groups, footprints)


def _check_rank(manifest: Manifest) -> None:
    rank = manifest.identity.rank
    if rank.tp >= rank.tp_size or rank.pp >= rank.pp_size:
        raise ManifestError(f"{manifest.identity}: a rank of {rank} does not exist")


def _check_regions(manifest: Manifest) -> None:
    """Regions whose address is given are apart; an address of 0 is not known yet, and nothing lies in an empty region."""
    known = (r for r in manifest.regions if r.address and r.length)
    placed = sorted((r.memory, r.device, r.address, r.address + r.length, r.name) for r in known)
    for _, _, _, stop, name in placed:
        if stop > MAX_ADDRESS:
            raise ManifestError(f"region {name} ends at address {stop:#x}, past any address")
    for (*space, _, stop, one), (*other_space, start, _, other) in pairwise(placed):
        if space == other_space and start < stop:
            raise ManifestError(f"regions {one} and {other} share memory; declare one region and offsets in it")


def _groups(manifest: Manifest) -> dict[int, Group]:
    groups = {g.id: g for g in manifest.groups}
    if len(groups) < len(manifest.groups):
        raise ManifestError("two groups have the same id")
    for group in manifest.groups:
        if group.tokens > MAX_TOKENS:
            raise ManifestError(f"group {group.id}: a block of {group.tokens:,} tokens; at most {MAX_TOKENS:,} are accepted")
        if isinstance(group.paging, TokenPaged) and group.paging.tokens % group.paging.kernel_blocks:
            raise ManifestError(
                f"group {group.id}: {group.paging.tokens} tokens cannot be cut into {group.paging.kernel_blocks} kernel blocks"
            )
    return groups


def _users(manifest: Manifest, groups: dict[int, Group]) -> dict[int, str]:
    """Check that names are unique and that indices refer to something; the first part of each shape, for errors."""
    users: dict[int, str] = {}
    seen: set[str] = set()
    for layer in manifest.layers:
        if layer.name in seen:
            raise ManifestError(f"layer {layer.name} is declared twice")
        seen.add(layer.name)
        if layer.group not in groups:
            raise ManifestError(f"{layer.name}: group {layer.group} is not declared")
        names: set[str] = set()
        for part in layer.parts:
            where = f"{layer.name} {part.name}"
            if part.name in names:
                raise ManifestError(f"{where} is declared twice")
            names.add(part.name)
            if part.shape >= len(manifest.shapes):
                raise ManifestError(f"{where}: shape {part.shape} is not declared")
            if part.region >= len(manifest.regions):
                raise ManifestError(f"{where}: region {part.region} is not declared")
            users.setdefault(part.shape, where)
    return users


def _check_shape(where: str, shape: Shape) -> Footprint:
    """Check a shape and return the bytes it touches within one block, as a run length and repeats."""
    element = shape.element
    if not element.opaque and DTYPE_BYTES.get(element.dtype) != element.bytes:
        raise ManifestError(
            f"{where}: dtype {element.dtype} of {element.bytes} bytes is unknown; known: {', '.join(DTYPE_BYTES)}"
        )
    if not all(isfinite(s) for s in element.scales):
        raise ManifestError(f"{where}: scales {element.scales} are not numbers")
    if len({a.name for a in shape.axes}) < len(shape.axes) or any(a.name == "token" for a in shape.axes):
        raise ManifestError(f"{where}: an axis is named twice, or a plain axis is named 'token'")
    for axis in shape.axes:
        _check_axis(where, axis)
    if prod(a.size for a in shape.axes) * element.bytes > MAX_BYTES:
        raise ManifestError(f"{where}: more than {MAX_BYTES:,} bytes over all ranks")
    digits = [d for axis in shape.axes for d in axis.digits]
    if shape.token:
        if shape.token.per_entry > 1 and shape.token.partial is None:
            raise ManifestError(
                f"{where}: an entry stands for {shape.token.per_entry} tokens, but it is not declared whether an "
                "incomplete one holds anything yet; set `partial` of the token axis"
            )
        digits += shape.token.digits
    return _touched(where, digits, element.bytes)


def _touched(where: str, digits: Sequence[tuple[int, int]], length: int) -> Footprint:
    """A run and its repeats; strides that interleave, so that nesting does not show that they are apart, are spelled out."""
    try:
        return footprint(digits, length)
    except ValueError as error:
        repeats = tuple(d for d in digits if d[0] > 1)
        if any(stride < length for _, stride in repeats) or size(repeats) > MAX_PIECES:
            raise ManifestError(f"{where}: {error}") from None
        if (np.diff(np.sort(spread(0, repeats))) < length).any():
            raise ManifestError(f"{where}: {error}") from None
        return length, repeats


def _nested(length: int, repeats: Digits) -> bool:
    """Whether repeats lie inside each other, so that nothing had to be spelled out."""
    try:
        footprint(repeats, length)
    except ValueError:
        return False
    return True


def _check_axis(where: str, axis: Axis) -> None:
    if not 0 <= axis.start < axis.stop <= axis.size:
        raise ManifestError(f"{where}: axis {axis.name}: [{axis.start}, {axis.stop}) is not inside [0, {axis.size})")
    if size(axis.digits) != axis.stop - axis.start:
        raise ManifestError(
            f"{where}: axis {axis.name}: digits hold {size(axis.digits)} indices, [{axis.start}, {axis.stop}) has "
            f"{axis.stop - axis.start}"
        )
    if axis.stop - axis.start > MAX_PIECES and len(canonical(axis.digits)) > 1:
        raise ManifestError(f"{where}: axis {axis.name}: more than {MAX_PIECES:,} indices in several digits")
    if axis.live is not None and axis.live > axis.size:
        raise ManifestError(f"{where}: axis {axis.name}: {axis.live} live indices of {axis.size}")


def _check_part(manifest: Manifest, layer: Layer, part: Part, group: Group, touched: Footprint) -> None:
    where = f"{layer.name} {part.name}"
    token = manifest.shapes[part.shape].token
    if (token is None) != (group.tokens == 0):
        raise ManifestError(f"{where}: has {'no' if token is None else 'a'} token axis, but group {group.id} is not paged so")
    if token is not None and token.entries * token.per_entry != group.tokens:
        raise ManifestError(
            f"{where}: {token.entries} entries of {token.per_entry} tokens do not make the group's {group.tokens} tokens"
        )
    length, repeats = touched
    reached = end(part.offset, length, ((group.blocks, part.block_stride),), repeats)
    region = manifest.regions[part.region]
    if reached > region.length:
        raise ManifestError(f"{where}: reaches byte {reached:,} of region {region.name}, which has {region.length:,}")


@dataclass
class _Panel:
    """Parts of one group that lie behind each other and repeat alike, as one footprint."""

    group: Group
    stride: int
    offset: int
    length: int
    repeats: Digits
    parts: list[str]

    @property
    def pieces(self) -> int:
        return size(self.repeats)

    @property
    def end(self) -> int:
        return end(self.offset, self.length, ((self.group.blocks, self.stride),), self.repeats)

    @property
    def within_block(self) -> bool:
        """Whether the panel ends before its next block begins: its own pieces are known to be apart."""
        return self.group.blocks == 1 or span(self.repeats) + self.length <= self.stride

    def extended(self, other: _Panel) -> bool:
        """Take in `other` if it continues this panel and no run of both reaches into the next block."""
        if (other.group.id, other.stride, other.repeats) != (self.group.id, self.stride, self.repeats):
            return False
        if other.offset != self.offset + self.length:
            return False
        try:
            length, repeats = footprint(self.repeats, self.length + other.length)
        except ValueError:
            return False
        if length > self.stride and self.group.blocks > 1:
            return False
        self.length, self.repeats = length, repeats
        self.parts += other.parts
        return True


def _check_disjoint(manifest: Manifest, groups: dict[int, Group], footprints: Sequence[Footprint]) -> None:
    """No byte belongs to two blocks, or twice to one block of one group; groups may overlay each other block by block."""
    placed: dict[int, list[_Panel]] = defaultdict(list)
    for layer in manifest.layers:
        for part in layer.parts:
            name = f"{layer.name} {part.name}"
            panel = _Panel(groups[layer.group], part.block_stride, part.offset, *footprints[part.shape], [name])
            if panel.length > panel.stride and panel.group.blocks > 1:
                where = manifest.regions[part.region].name
                raise ManifestError(f"region {where}: {name} is longer than its block stride of {panel.stride} bytes")
            placed[part.region].append(panel)
    left, marks = MAX_PIECES, MAX_MARKS
    for region, parts in placed.items():
        name = manifest.regions[region].name
        for panels in _apart(_joined(parts)):
            left -= sum(p.pieces for p in panels)
            if left < 0:
                worst = max(panels, key=lambda p: p.pieces)
                raise ManifestError(f"{worst.parts[0]}: more than {MAX_PIECES:,} separate pieces in one block")
            if len(panels) == 1 and panels[0].within_block:
                continue
            stride = _common_stride(panels)
            if stride is None:
                marks -= sum(p.pieces * p.group.blocks for p in panels)
                if marks < 0:
                    raise ManifestError(
                        f"region {name}: {panels[0].parts[0]} and others lie between each other with different block strides, "
                        f"in more than {MAX_MARKS:,} pieces: too many to check"
                    )
            suspects = _clash(panels, stride) if stride is not None else _marked_clash(panels)
            if suspects:
                raise ManifestError(f"region {name}: {_blamed(parts, suspects, stride)}")


def _blamed(parts: Sequence[_Panel], clash: tuple[_Panel, _Panel], stride: int | None) -> str:
    """The parts that share a byte, of the panels that do."""
    suspects = [p for p in parts if any(p.parts[0] in panel.parts for panel in clash)]
    if stride is None:
        one, other = _marked_clash(suspects) or clash
    else:
        one, other = (_clash(suspects, stride) if sum(p.pieces for p in suspects) <= MAX_PIECES else None) or clash
    if one.stride != other.stride and stride is None:
        return f"{one.parts[0]} and {other.parts[0]} overlap with different block strides"
    return f"{one.parts[0]} and {other.parts[0]} share bytes of a block, or of different blocks"


def _joined(parts: Iterable[_Panel]) -> list[_Panel]:
    """The same bytes in fewer panels: a packed page becomes one, and so do pages behind each other."""
    out: list[_Panel] = []
    for part in sorted(parts, key=lambda p: (p.group.id, p.stride, p.offset)):
        out.append(_Panel(part.group, part.stride, part.offset, part.length, part.repeats, list(part.parts)))
        while len(out) > 1 and out[-2].extended(out[-1]):
            out.pop()
    return out


def _apart(panels: Sequence[_Panel]) -> Iterator[list[_Panel]]:
    """Panels whose stretches of the region overlap, together; tensors that lie behind each other, each alone."""
    together: list[_Panel] = []
    end = 0
    for panel in sorted(panels, key=lambda p: p.offset):
        if together and panel.offset >= end:
            yield together
            together = []
        together.append(panel)
        end = max(end, panel.end)
    if together:
        yield together


def _common_stride(panels: Sequence[_Panel]) -> int | None:
    """The one block stride that all panels can be said to have, or None; that of a single block has no meaning."""
    strides = {p.stride for p in panels if p.group.blocks > 1}
    if not strides:
        return max(p.end for p in panels)
    stride = strides.pop()
    return None if strides or any(p.length > stride for p in panels) else stride


def _marked_clash(panels: Sequence[_Panel]) -> tuple[_Panel, _Panel] | None:
    """Two panels that share a byte, unless they are the same block seen by two groups, whatever their strides: every piece of
    every block is looked at."""
    pieces = [spread(p.offset, ((p.group.blocks, p.stride), *p.repeats)) for p in panels]
    start = np.concatenate(pieces)
    owner = np.repeat(np.arange(len(panels)), [len(p) for p in pieces])
    block = np.concatenate([np.repeat(np.arange(p.group.blocks), p.pieces) for p in panels])
    end = start + np.array([p.length for p in panels], np.int64)[owner]
    group = np.array([p.group.id for p in panels], np.int64)[owner]
    by_group = np.lexsort((start, group))
    before, after = by_group[:-1], by_group[1:]
    twice = np.flatnonzero((group[before] == group[after]) & (start[after] < end[before]))
    if len(twice):
        return _pair(panels, owner[before[twice[0]]], owner[after[twice[0]]])
    order = np.argsort(start, kind="stable")
    start, end, block, owner = start[order], end[order], block[order], owner[order]
    reached = np.maximum.accumulate(end)
    furthest = np.maximum.accumulate(np.where(end == reached, np.arange(len(end)), 0))
    # Of the first piece that meets another block's, the one before it that reaches furthest is another block's too.
    others = np.flatnonzero((start[1:] < reached[:-1]) & (block[1:] != block[furthest[:-1]]))
    if len(others):
        at = int(others[0])
        return _pair(panels, owner[furthest[at]], owner[at + 1])
    return None


def _pair(panels: Sequence[_Panel], one: int, other: int) -> tuple[_Panel, _Panel]:
    return panels[min(one, other)], panels[max(one, other)]


def _clash(panels: Sequence[_Panel], stride: int) -> tuple[_Panel, _Panel] | None:
    """Two panels that share a byte, unless they are the same block seen by two groups.

    A piece is a rectangle: bytes [low, high) of every block's stride, in strides [turn, turn + blocks). Pieces that meet
    in both hold different blocks if their turns differ, and the same block if not.
    """
    owner, low, high, turn = _rectangles(panels, stride)
    opened: dict[int, dict[int, int]] = defaultdict(dict)
    turns: list[int] = []
    closing: list[tuple[int, int, int]] = []
    for i in np.lexsort((high, low)).tolist():
        at, here, panel = int(low[i]), int(turn[i]), int(owner[i])
        while closing and closing[0][0] <= at:
            _, old, group = heappop(closing)
            del opened[old][group]
            if not opened[old]:
                del opened[old]
                turns.pop(bisect_left(turns, old))
        group = panels[panel].group.id
        place = bisect_left(turns, here)
        if place and turns[place - 1] + max(panels[p].group.blocks for p in opened[turns[place - 1]].values()) > here:
            return panels[next(iter(opened[turns[place - 1]].values()))], panels[panel]
        if group in opened[here]:
            return panels[opened[here][group]], panels[panel]
        after = place + 1 if place < len(turns) and turns[place] == here else place
        if after < len(turns) and here + panels[panel].group.blocks > turns[after]:
            return panels[next(iter(opened[turns[after]].values()))], panels[panel]
        if not opened[here]:
            insort(turns, here)
        opened[here][group] = panel
        heappush(closing, (int(high[i]), here, group))
    return None


def _rectangles(panels: Sequence[_Panel], stride: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Every piece of the panels as (panel, low, high, turn); one that crosses a multiple of the stride becomes two."""
    pieces = [spread(p.offset, p.repeats) for p in panels]
    start = np.concatenate(pieces)
    owner = np.repeat(np.arange(len(panels)), [len(p) for p in pieces])
    length = np.array([p.length for p in panels], np.int64)[owner]
    turn, low = np.divmod(start, stride)
    high = low + length
    over = high > stride
    return (
        np.concatenate([owner, owner[over]]),
        np.concatenate([low, np.zeros(int(over.sum()), np.int64)]),
        np.concatenate([np.minimum(high, stride), high[over] - stride]),
        np.concatenate([turn, turn[over] + 1]),
    )
