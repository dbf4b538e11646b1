"""A plan's runs from one source by way of staging: two plans that meet there, for whoever gathers, covers, scatters, extracts.

    packed    `there` lays the runs of a tile behind each other in staging, in the order of the source's memory
    staged    `there` reads stretches that cover the runs of a tile, whatever else lies between them
    either    `here` takes the runs out of staging and puts them in their places

Both are plans like any other: staging is a region whose blocks are tiles, and edge i of both is part i. A part is some runs of
one grain, few enough that a tile of them is small beside the room there is; of a tile that is not, several parts are made.
A load walks through its parts and takes as many tiles of each as there is room for, piece after piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvferry.errors import TransportError
from kvferry.manifest.schema import FULL, Group, Identity, Region, StatePaged
from kvferry.plan.schema import Edge, Grain, Lane, Need, Plan, Repeats, Run, Side
from kvferry.plan.tiles import Tiles
from kvferry.strided import fold

Key = tuple[int, int]

MAX_PARTS: Final = 4096
_NEED: Final = Need(FULL, 0, False, 0, ("staging",))
_WIDEST: Final = 16
"""What lies in staging is aligned as its runs' lengths are, up to here: movers copy by the widest unit that fits."""


@dataclass(frozen=True)
class Part:
    """Runs of one grain, by (edge, level) of the plan; a tile of them takes `size` bytes of staging, `bytes` of which are its
    runs', which are `runs` in the plan, `gathered` on the way into staging and `scattered` on the way out of it."""

    key: Key
    size: int
    bytes: int
    runs: int
    gathered: int
    scattered: int


@dataclass(frozen=True)
class Detour:
    parts: tuple[Part, ...]
    there: Plan
    here: Plan


@dataclass(frozen=True)
class Share:
    """Tiles [first, first + count) of a part's, which lie in staging from `block` on, counted in tiles of the part."""

    part: int
    first: int
    count: int
    block: int


@dataclass(frozen=True)
class Piece:
    """What is in staging at a time, which takes the bytes [`start`, `stop`) of it."""

    shares: tuple[Share, ...]
    start: int
    stop: int


class Pieces:
    """A load, piece after piece; `counts` are its tiles by grain."""

    def __init__(self, parts: Sequence[Part], counts: Mapping[Key, int]) -> None:
        self._left = [(index, part.size, counts[part.key]) for index, part in enumerate(parts) if counts.get(part.key)]
        self._left.reverse()
        self._first = 0

    @property
    def over(self) -> bool:
        return not self._left

    def take(self, start: int, room: int) -> Piece:
        """The next piece, in `room` bytes of staging from `start` on; a tile lies at a multiple of its size."""
        shares: list[Share] = []
        used = start
        while self._left:
            index, size, count = self._left[-1]
            block = -(-used // size)
            fits = min(count - self._first, (start + room) // size - block)
            if fits <= 0:
                break
            shares.append(Share(index, self._first, fits, block))
            used = (block + fits) * size
            self._first += fits
            if self._first == count:
                self._left.pop()
                self._first = 0
        if self._left and not shares:
            raise TransportError(f"a tile of {self._left[-1][1]:,} bytes does not fit {room:,} bytes of staging")
        return Piece(tuple(shares), start, used)


def tiles_there(piece: Piece, parts: Sequence[Part], tiles: Mapping[Key, Tiles]) -> dict[Key, Tiles]:
    """A piece's tiles for the plan that leads into staging."""
    return {(share.part, 0): _into(share, tiles[parts[share.part].key]) for share in piece.shares}


def tiles_here(piece: Piece, parts: Sequence[Part], tiles: Mapping[Key, Tiles]) -> dict[Key, Tiles]:
    """A piece's tiles for the plan that leads out of staging."""
    out = {}
    for share in piece.shares:
        found, mine = tiles[parts[share.part].key], slice(share.first, share.first + share.count)
        out[share.part, 0] = Tiles(*staged_tiles(share), found.dst_block[mine], found.dst_tile[mine])
    return out


def _into(share: Share, found: Tiles) -> Tiles:
    mine = slice(share.first, share.first + share.count)
    return Tiles(found.src_block[mine], found.src_tile[mine], *staged_tiles(share))


def staged_tiles(share: Share) -> tuple[np.ndarray, np.ndarray]:
    block = np.arange(share.block, share.block + share.count, dtype=np.int64)
    return block, np.zeros_like(block)


def packed(plan: Plan, source: int, room: int, most: int) -> Detour:
    """The runs of a tile laid close together; `most` bytes of them at most are a part."""
    made = _Making(plan, source, room)
    for key, edge, grain in _grains(plan, source):
        taken: list[Run] = []
        held = 0
        for run in (piece for whole in grain.runs for piece in _cut(whole, most, _bytes)):
            if taken and held + _bytes(run) > most:
                made.close(key, edge, grain, taken)
                taken, held = [], 0
            taken.append(run)
            held += _bytes(run)
        if taken:
            made.close(key, edge, grain, taken)
    return made.detour()


def staged(plan: Plan, source: int, room: int, most: int, gap: int) -> Detour:
    """Stretches that cover the runs of a tile: of `most` bytes at most, across gaps of `gap` at most between strided runs."""
    made = _Making(plan, source, room)
    for key, edge, grain in _grains(plan, source):
        runs = sorted((piece for run in grain.runs for piece in _cut(run, most, _reach)), key=_by_place)
        taken: list[_Cover] = []
        held = 0
        for cover in _covers(runs, most, gap):
            if taken and held + cover.length > most:
                made.cover(key, edge, grain, taken)
                taken, held = [], 0
            taken.append(cover)
            held += cover.length
        if taken:
            made.cover(key, edge, grain, taken)
    return made.detour()


@dataclass
class _Cover:
    """Bytes [start, stop) of a region, which hold these runs."""

    runs: list[Run]
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def _covers(runs: Iterable[Run], most: int, gap: int) -> Iterator[_Cover]:
    cover: _Cover | None = None
    for run in runs:
        stop = run.src_offset + _reach(run)
        if cover is not None:
            one = cover.runs[0]
            together = (run.src_region, run.src_lane) == (one.src_region, one.src_lane)
            if together and run.src_offset - cover.stop <= gap and max(stop, cover.stop) - cover.start <= most:
                cover.runs.append(run)
                cover.stop = max(stop, cover.stop)
                continue
            yield cover
        cover = _Cover([run], run.src_offset, stop)
    if cover is not None:
        yield cover


class _Making:
    """Parts as they are found. Staging is one region; a group of it has tiles of one size as its blocks."""

    def __init__(self, plan: Plan, source: int, room: int) -> None:
        self._plan, self._source, self._room = plan, plan.sources[source], room
        self._lanes = list(plan.lanes)
        self._groups: dict[int, int] = {}
        self._parts: list[Part] = []
        self._there: list[Edge] = []
        self._here: list[Edge] = []

    def close(self, key: Key, edge: Edge, grain: Grain, runs: Sequence[Run]) -> None:
        """A part of runs that are laid behind each other."""
        at = 0
        placed = []
        for run in runs:
            ordered = replace(run, repeats=_by_source(run.repeats))
            at = _aligned(at, run.length)
            placed.append((ordered, at, _dense(ordered)))
            at += _bytes(run)
        size = max(_aligned(at, run.length) for run in runs)
        lane = self._lane(size)
        there = [_joined(r, r.src_region, r.src_offset, 0, o, r.src_lane, lane, s, d) for r, o, s, d in _sides(placed, 0)]
        here = [_joined(r, 0, o, r.dst_region, r.dst_offset, lane, r.dst_lane, s, d) for r, o, s, d in _sides(placed, 1)]
        self._part(key, edge, grain, size, sum(map(_bytes, runs)), sum(map(_count, runs)), there, here)

    def cover(self, key: Key, edge: Edge, grain: Grain, covers: Sequence[_Cover]) -> None:
        """A part of stretches as they lie in the source."""
        at = 0
        starts = []
        for cover in covers:
            # As in the source, modulo the widest unit: then what was aligned there is aligned here.
            at += (cover.start - at) % _WIDEST
            starts.append(at)
            at += cover.length
        size = _aligned(at, _WIDEST)
        lane = self._lane(size)
        there, here = [], []
        for cover, at in zip(covers, starts, strict=True):
            one = cover.runs[0]
            there.append(Run(one.src_region, cover.start, 0, at, cover.length, (), one.src_lane, lane))
            here += [replace(r, src_region=0, src_offset=at + r.src_offset - cover.start, src_lane=lane) for r in cover.runs]
        runs = [run for cover in covers for run in cover.runs]
        self._part(key, edge, grain, size, sum(map(_bytes, runs)), sum(map(_count, runs)), there, here)

    def _lane(self, size: int) -> int:
        if size not in self._groups:
            self._groups[size] = len(self._groups)
            self._lanes.append(Lane(size, ()))
        return len(self._plan.lanes) + self._groups[size]

    def _part(
        self, key: Key, edge: Edge, grain: Grain, size: int, length: int, runs: int, there: Sequence[Run], here: Sequence[Run]
    ) -> None:
        if size > self._room:
            raise TransportError(f"a tile of {size:,} bytes does not fit {self._room:,} bytes of staging")
        group = self._groups[size]
        self._there.append(Edge(0, edge.src_group, group, 0, (Grain(grain.tokens, tuple(there)),)))
        self._here.append(Edge(0, group, edge.dst_group, 0, (Grain(grain.tokens, tuple(here)),)))
        self._parts.append(Part(key, size, length, runs, sum(map(_count, there)), sum(map(_count, here))))

    def detour(self) -> Detour:
        if len(self._parts) > MAX_PARTS:
            raise TransportError(
                f"{len(self._parts):,} parts in {self._room:,} bytes of staging are too many; give it more bytes"
            )
        groups = tuple(Group(i, StatePaged(), self._room // size, hashed=False) for size, i in self._groups.items())
        staging = Side(Identity("staging", "1", "staging"), (Region("staging", self._room),), groups)
        lanes = tuple(self._lanes)
        source = Side(self._source.identity, self._source.regions, self._source.groups)
        return Detour(
            tuple(self._parts),
            Plan(staging, (source,), lanes, (_NEED,), tuple(self._there), ()),
            Plan(self._plan.consumer, (staging,), lanes, (_NEED,), tuple(self._here), ()),
        )


def _grains(plan: Plan, source: int) -> Iterator[tuple[Key, Edge, Grain]]:
    for i, edge in enumerate(plan.edges):
        if edge.source == source:
            for level, grain in enumerate(edge.grains):
                yield (i, level), edge, grain


def _cut(run: Run, most: int, measure: Callable[[Run], int]) -> Iterator[Run]:
    """The same bytes in runs of at most `most`, as they are measured."""
    whole = measure(run)
    if whole <= most:
        yield run
        return
    if not run.repeats:
        for at in range(0, run.length, most):
            length = min(most, run.length - at)
            yield replace(run, src_offset=run.src_offset + at, dst_offset=run.dst_offset + at, length=length)
        return
    (count, src, dst), *rest = max(_rotations(run.repeats), key=lambda found: found[0][1])
    one = measure(replace(run, repeats=tuple(rest)))
    step = max(1, (most - one) // ((whole - one) // (count - 1)) + 1)
    for first in range(0, count, step):
        times = min(step, count - first)
        repeats = ((times, src, dst), *rest) if times > 1 else tuple(rest)
        moved = replace(run, src_offset=run.src_offset + first * src, dst_offset=run.dst_offset + first * dst, repeats=repeats)
        yield from _cut(moved, most, measure)


def _rotations(repeats: Repeats) -> Iterator[tuple[tuple[int, int, int], ...]]:
    for i, repeat in enumerate(repeats):
        yield (repeat, *repeats[:i], *repeats[i + 1 :])


def _by_source(repeats: Repeats) -> Repeats:
    return tuple(sorted(repeats, key=lambda repeat: -repeat[1]))


def _by_place(run: Run) -> tuple[int, int, int]:
    return run.src_region, run.src_lane, run.src_offset


def _count(run: Run) -> int:
    return prod(count for count, _, _ in run.repeats)


def _bytes(run: Run) -> int:
    return run.length * _count(run)


def _reach(run: Run) -> int:
    """Bytes from a run's first one in the source to its last."""
    return run.length + sum((count - 1) * src for count, src, _ in run.repeats)


def _aligned(at: int, length: int) -> int:
    unit = min(_WIDEST, length & -length)
    return -(-at // unit) * unit


def _dense(run: Run) -> list[int]:
    """Strides of a run's repeats where they lie behind each other."""
    strides, running = [], run.length
    for count, _, _ in reversed(run.repeats):
        strides.append(running)
        running *= count
    return strides[::-1]


def _sides(placed: Sequence[tuple[Run, int, list[int]]], side: int) -> Iterator[tuple[Run, int, list[int], list[int]]]:
    """Runs with their place in staging, and the strides of their repeats where they come from and where they go."""
    for run, at, dense in placed:
        outer = [repeat[1 + side] for repeat in run.repeats]
        yield (run, at, dense, outer) if side else (run, at, outer, dense)


def _joined(
    run: Run, src_region: int, src: int, dst_region: int, dst: int, src_lane: int, dst_lane: int, s: list[int], d: list[int]
) -> Run:
    """A run between staging and elsewhere, as long as it is there."""
    counts = (count for count, _, _ in run.repeats)
    length, repeats = fold(run.length, zip(counts, s, d, strict=True))
    return Run(src_region, src, dst_region, dst, length, repeats, src_lane, dst_lane)
