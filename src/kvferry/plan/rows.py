"""A plan's runs as strided rows to be prepared once, and a request as index arrays into them.

A row is (region, offset, length, stride, count): `count` elements of `length` bytes, `stride` apart. Rows do not multiply
with blocks: a run's blocks, its places in a block and its repeats are laid along rows where their strides continue each
other, and only what does not continue makes further rows. Elements are numbered row after row, on each side by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.plan.bind import Tiles
from kvferry.plan.schema import Plan, Run
from kvferry.strided import Ints, spread

Dim = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """Strided rows of one side, as columns."""

    region: Ints
    offset: Ints
    length: Ints
    stride: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.count)

    @property
    def elements(self) -> int:
        return int(self.count.sum())


@dataclass(frozen=True)
class _Numbering:
    """Element numbers of one grain's runs, repeats expanded: of block 0, tile 0, and the steps from there."""

    first: Ints
    block: Ints
    digits: tuple[Ints, ...]
    lane: Ints


class PreparedRows:
    """The rows of everything a plan reads from one source, on both sides."""

    def __init__(self, plan: Plan, source: int) -> None:
        self.plan = plan
        src, dst = _Builder(), _Builder()
        self._numbered: dict[tuple[int, int], tuple[_Numbering, _Numbering]] = {}
        for i, edge in enumerate(plan.edges):
            if edge.source != source:
                continue
            src_blocks = plan.sources[source].group(edge.src_group).blocks
            dst_blocks = plan.consumer.group(edge.dst_group).blocks
            for level, grain in enumerate(edge.grains):
                self._numbered[i, level] = (
                    _number(plan, grain.runs, src, src_blocks, 0),
                    _number(plan, grain.runs, dst, dst_blocks, 1),
                )
        self.src, self.dst = src.rows(), dst.rows()

    def indices(self, tiles: Mapping[tuple[int, int], Tiles]) -> tuple[Ints, Ints]:
        """Element numbers to copy, source and destination side by side; a run's blocks lie behind each other."""
        pairs = []
        for key, (src, dst) in self._numbered.items():
            placed = tiles.get(key)
            if placed is not None:
                pairs.append(
                    (
                        self._at(src, placed.src_block, placed.src_tile),
                        self._at(dst, placed.dst_block, placed.dst_tile),
                    )
                )
        if not pairs:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([s for s, _ in pairs]), np.concatenate([d for _, d in pairs])

    def _at(self, numbering: _Numbering, block: Ints, tile: Ints) -> Ints:
        out: Ints = numbering.first[:, None] + numbering.block[:, None] * block
        for lane in np.unique(numbering.lane).tolist():
            mine = numbering.lane == lane
            rest = tile
            digits = self.plan.lanes[lane].digits
            for place in range(len(digits) - 1, -1, -1):
                rest, low = np.divmod(rest, digits[place][0])
                out[mine] += numbering.digits[place][mine][:, None] * low
        return out.reshape(-1)


class _Builder:
    """Collects rows and hands out element numbers."""

    def __init__(self) -> None:
        self._columns: list[tuple[int, Ints, int, int, int]] = []
        self._elements = 0

    def add(self, region: int, offset: int, length: int, dims: Sequence[Dim]) -> tuple[int, list[int]]:
        """Lay one run along rows; returns its first element's number and the step of each dimension."""
        chain = max((_chain(dims, start) for start in range(len(dims))), key=lambda c: _size(dims, c), default=[])
        stride = dims[chain[0]][1] if chain else length
        count = _size(dims, chain)
        others = [i for i in range(len(dims)) if i not in chain and dims[i][0] > 1]
        steps = [0] * len(dims)
        running = 1
        for i in chain:
            steps[i] = running
            running *= dims[i][0]
        for i in reversed(others):
            steps[i] = running
            running *= dims[i][0]
        first = self._elements
        offsets = spread(offset, [dims[i] for i in others])
        self._columns.append((region, offsets, length, stride, count))
        self._elements += running
        return first, steps

    def rows(self) -> Rows:
        sizes = [len(c[1]) for c in self._columns]

        def column(place: int) -> Ints:
            return np.repeat(np.array([c[place] for c in self._columns], np.int64), sizes)

        offset = np.concatenate([c[1] for c in self._columns]) if self._columns else np.empty(0, np.int64)
        return Rows(column(0), offset, column(2), column(3), column(4))


def _size(dims: Sequence[Dim], chain: Sequence[int]) -> int:
    count = 1
    for i in chain:
        count *= dims[i][0]
    return count


def _chain(dims: Sequence[Dim], start: int) -> list[int]:
    """Dimensions whose strides continue each other, from `start` on."""
    if dims[start][0] == 1:
        return []
    chain = [start]
    reach = dims[start][0] * dims[start][1]
    while True:
        following = next(
            (i for i, (count, stride) in enumerate(dims) if count > 1 and stride == reach and i not in chain), None
        )
        if following is None:
            return chain
        chain.append(following)
        reach *= dims[following][0]


def _number(plan: Plan, runs: Sequence[Run], builder: _Builder, blocks: int, side: int) -> _Numbering:
    first: list[Ints] = []
    block: list[Ints] = []
    lanes: list[Ints] = []
    depth = max((len(lane.digits) for lane in plan.lanes), default=0)
    digits: list[list[Ints]] = [[] for _ in range(depth)]
    for run in runs:
        index = (run.src_lane, run.dst_lane)[side]
        lane = plan.lanes[index]
        region, offset = ((run.src_region, run.src_offset), (run.dst_region, run.dst_offset))[side]
        repeats = [(r[0], r[1 + side]) for r in run.repeats]
        dims = [(blocks, lane.block_stride), *lane.digits, *repeats]
        start, steps = builder.add(region, offset, run.length, dims)
        inner = steps[1 + len(lane.digits) :]
        numbers = spread(start, [(count, step) for (count, _), step in zip(repeats, inner, strict=True)])
        first.append(numbers)
        block.append(np.full(len(numbers), steps[0], np.int64))
        lanes.append(np.full(len(numbers), index, np.int64))
        for place in range(depth):
            step = steps[1 + place] if place < len(lane.digits) else 0
            digits[place].append(np.full(len(numbers), step, np.int64))
    return _Numbering(_flat(first), _flat(block), tuple(_flat(d) for d in digits), _flat(lanes))


def _flat(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
