"""A plan's runs as strided rows to be prepared once, and a request as index arrays into them.

A row is (region, offset, length, stride, count): `count` elements of `length` bytes, `stride` apart. Rows do not multiply
with blocks: a run's blocks, its places in a block and its repeats are laid along rows where their strides continue each
other, and only what does not continue makes further rows. Elements are numbered row after row, on each side by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.plan.bind import Ids, Tiles
from kvferry.plan.schema import Plan, Repeats, Run
from kvferry.strided import Ints, split, spread

Dim = tuple[int, int]
Numbers = npt.NDArray[np.signedinteger[Any]]
"""Element numbers: 32 bits wide where that is enough, since writing them is most of the work of a request."""


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
class _Steps:
    """Runs [start, stop) that move alike: numbers from block to block, and from digit to digit of a tile."""

    start: int
    stop: int
    block: int
    digits: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Numbering:
    """Element numbers of one grain's runs, repeats expanded: of block 0, tile 0, and the steps from there."""

    first: Numbers
    steps: tuple[_Steps, ...]


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
        most = max(self.src.elements, self.dst.elements)
        self._dtype: type[np.signedinteger[Any]] = np.int32 if most <= np.iinfo(np.int32).max else np.int64
        for key, (there, here) in self._numbered.items():
            self._numbered[key] = (_narrowed(there, self._dtype), _narrowed(here, self._dtype))

    def indices(self, tiles: Mapping[tuple[int, int], Tiles]) -> tuple[Numbers, Numbers]:
        """Element numbers to copy, source and destination side by side; a run's blocks lie behind each other."""
        found = [(src, dst, tiles[key]) for key, (src, dst) in self._numbered.items() if key in tiles]
        total = sum(len(src.first) * len(placed.src_block) for src, _, placed in found)
        theirs, ours = np.empty((2, total), self._dtype)
        at = 0
        for src, dst, placed in found:
            stop = at + len(src.first) * len(placed.src_block)
            _write(theirs[at:stop], src, placed.src_block, placed.src_tile)
            _write(ours[at:stop], dst, placed.dst_block, placed.dst_tile)
            at = stop
        return theirs, ours


def _narrowed(numbering: _Numbering, dtype: type[np.signedinteger[Any]]) -> _Numbering:
    return replace(numbering, first=numbering.first.astype(dtype, copy=False))


def _write(out: Numbers, numbering: _Numbering, block: Ids, tile: Ids) -> None:
    """Every run at every tile, each number written once."""
    places = out.reshape(len(numbering.first), len(block))
    block, tile = block.astype(out.dtype, copy=False), tile.astype(out.dtype, copy=False)
    for steps in numbering.steps:
        moved = block * steps.block
        for step, digit in split(steps.digits, tile):
            moved += digit if step == 1 else digit * step
        np.add(numbering.first[steps.start : steps.stop, None], moved, out=places[steps.start : steps.stop])


class _Builder:
    """Collects rows and hands out element numbers."""

    def __init__(self) -> None:
        self._columns: list[tuple[Ints, Ints, int, int, int]] = []
        self._elements = 0

    def add(self, regions: Ints, starts: Ints, length: int, dims: Sequence[Dim]) -> tuple[Ints, list[int]]:
        """Lay runs of one form along rows; returns their first elements' numbers and the step of each dimension."""
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
        within = spread(0, [dims[i] for i in others])
        self._columns.append((np.repeat(regions, len(within)), _sums(starts, within), length, stride, count))
        first = self._elements + np.arange(len(starts), dtype=np.int64) * running
        self._elements += running * len(starts)
        return first, steps

    def rows(self) -> Rows:
        sizes = [len(c[1]) for c in self._columns]
        region, offset = _joined([c[0] for c in self._columns]), _joined([c[1] for c in self._columns])
        forms = np.array([c[2:] for c in self._columns], np.int64).reshape(-1, 3)
        length, stride, count = np.repeat(forms, sizes, axis=0).T
        return Rows(region, offset, length, stride, count)


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
    """Runs that differ in nothing but their place, as those of equal layers do, are laid out together."""
    first: list[Ints] = []
    found: list[_Steps] = []
    at = 0
    for (index, length, repeats), same in groupby(runs, key=_source_form if side == 0 else _destination_form):
        lane = plan.lanes[index]
        places = [(run.src_region, run.src_offset) if side == 0 else (run.dst_region, run.dst_offset) for run in same]
        regions, starts = np.array(places, np.int64).T
        inner = [(r[0], r[1 + side]) for r in repeats]
        firsts, steps = builder.add(regions, starts, length, [(blocks, lane.block_stride), *lane.digits, *inner])
        depth = 1 + len(lane.digits)
        within = spread(0, [(count, step) for (count, _), step in zip(inner, steps[depth:], strict=True)])
        digits = tuple((count, step) for (count, _), step in zip(lane.digits, steps[1:depth], strict=True))
        stop = at + len(firsts) * len(within)
        if found and (found[-1].block, found[-1].digits) == (steps[0], digits):
            found[-1] = replace(found[-1], stop=stop)
        else:
            found.append(_Steps(at, stop, steps[0], digits))
        first.append(_sums(firsts, within))
        at = stop
    return _Numbering(_joined(first), tuple(found))


def _source_form(run: Run) -> tuple[int, int, Repeats]:
    return run.src_lane, run.length, run.repeats


def _destination_form(run: Run) -> tuple[int, int, Repeats]:
    return run.dst_lane, run.length, run.repeats


def _sums(outer: Ints, inner: Ints) -> Ints:
    return (outer[:, None] + inner).reshape(-1)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
