"""A plan's runs as strided rows to be prepared once, and a request as index arrays into them.

A row is (region, offset, length, stride, count): `count` elements of `length` bytes, `stride` apart. Rows do not multiply
with blocks: a run's blocks, its places in a block and its repeats are laid along rows where their strides continue each
other, and only what does not continue makes further rows. Elements are numbered row after row, on each side by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransportError
from kvferry.plan.overlay import Ids
from kvferry.plan.schema import Plan, Repeats, Run
from kvferry.plan.tiles import Tiles
from kvferry.strided import Digits, Ints, Whole, split, spread

Dim = tuple[int, int]
Alike = tuple[int, int, int, Repeats]
Numbers = npt.NDArray[np.signedinteger[Any]]
"""Element numbers: 32 bits wide where that is enough, since writing them is most of the work of a request."""

MAX_ROWS: Final = 1 << 22
"""Rows of a plan's runs from one source, on one side."""
_NARROW: Final = np.iinfo(np.int32).max
_ONE: Final = np.zeros(1, np.int64)
_ONE.setflags(write=False)


@dataclass(frozen=True)
class Rows:
    """Strided rows of one side, as columns, and how many elements they have together."""

    region: Ints
    offset: Ints
    length: Ints
    stride: Ints
    count: Ints
    elements: int

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, eq=False)
class _Form:
    """How every run of one length, in one lane and with the same repeats lies along rows of `count` elements.

    `rows` are the offsets of a run's rows from its first byte and `elements` how many elements they have together;
    `block` and `digits` are the steps in element numbers from block to block and from digit to digit of a tile, and
    `repeats` the numbers of its repeats in tile 0 of block 0.
    """

    length: int
    stride: int
    count: int
    rows: Ints
    elements: int
    block: int
    digits: Digits
    repeats: Ints


Laid = list[tuple[_Form, int]]
"""One grain's runs on one side: forms, and how many runs in a row have each."""


@dataclass(frozen=True)
class _Steps:
    """Runs [start, stop) that move alike: numbers from block to block, and from digit to digit of a tile."""

    start: int
    stop: int
    block: int
    digits: Digits


@dataclass(frozen=True)
class _Numbering:
    """Element numbers of one grain's runs, repeats expanded: of block 0, tile 0, and the steps from there."""

    first: Numbers
    steps: tuple[_Steps, ...]


class PreparedRows:
    """The rows of everything a plan reads from one source, on both sides."""

    def __init__(self, plan: Plan, source: int) -> None:
        self.plan = plan
        forms = _Forms(plan)
        there, here = ({group.id: group.blocks for group in side.groups} for side in (plan.sources[source], plan.consumer))
        keys: list[tuple[int, int]] = []
        src: list[Laid] = []
        dst: list[Laid] = []
        places: list[tuple[int, int, int, int]] = []
        for i, edge in enumerate(plan.edges):
            if edge.source != source:
                continue
            for level, grain in enumerate(edge.grains):
                alike = [(form, len(list(same))) for form, same in groupby(grain.runs, key=_form_of)]
                keys.append((i, level))
                src.append([(forms.of(form, 0, there[edge.src_group]), runs) for form, runs in alike])
                dst.append([(forms.of(form, 1, here[edge.dst_group]), runs) for form, runs in alike])
                places += [(r.src_region, r.src_offset, r.dst_region, r.dst_offset) for r in grain.runs]
        columns = np.array(places, np.int64).reshape(-1, 4).T
        self.src = _rows(src, columns[0], columns[1])
        self.dst = _rows(dst, columns[2], columns[3])
        most = max(self.src.elements, self.dst.elements)
        self._dtype: type[np.signedinteger[Any]] = np.int32 if most <= _NARROW else np.int64
        theirs = _numbered(src, self._dtype)
        ours = theirs if src == dst else _numbered(dst, self._dtype)
        self._numbered = dict(zip(keys, zip(theirs, ours, strict=True), strict=True))

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


def _write(out: Numbers, numbering: _Numbering, block: Ids, tile: Ids) -> None:
    """Every run at every tile, each number written once."""
    places = out.reshape(len(numbering.first), len(block))
    block, tile = block.astype(out.dtype, copy=False), tile.astype(out.dtype, copy=False)
    for steps in numbering.steps:
        moved = block * steps.block
        for step, digit in split(steps.digits, tile):
            moved += digit if step == 1 else digit * step
        np.add(numbering.first[steps.start : steps.stop, None], moved, out=places[steps.start : steps.stop])


class _Forms:
    """Forms of runs, each worked out once: the two sides, the grains and the layers have few of them."""

    def __init__(self, plan: Plan) -> None:
        self._lanes = plan.lanes
        self._known: dict[tuple[int, int, Sequence[Dim]], _Form] = {}

    def of(self, alike: Alike, side: int, blocks: int) -> _Form:
        """The form, on one side, of runs that differ in nothing but their place."""
        src_lane, dst_lane, length, repeats = alike
        lane = self._lanes[dst_lane if side else src_lane]
        dims = ((blocks, lane.block_stride), *lane.digits, *[(repeat[0], repeat[1 + side]) for repeat in repeats])
        key = length, len(lane.digits), dims
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _form(*key)
        return known


def _form(length: int, digits: int, dims: Sequence[Dim]) -> _Form:
    """Lay a run along as long rows as there are; `dims` are its blocks, then so many digits of a tile, then repeats."""
    chain = _longest(dims, length)
    others = [i for i, (count, _) in enumerate(dims) if count > 1 and i not in chain]
    _refuse_many(prod(dims[i][0] for i in others))
    steps = [0] * len(dims)
    count = prod([dims[i][0] for i in chain])
    running = 1
    for i in (*chain, *reversed(others)):
        steps[i] = running
        running *= dims[i][0]
    numbers = [(dim[0], step) for dim, step in zip(dims, steps, strict=True)]
    return _Form(
        length,
        dims[chain[0]][1] if chain else length,
        count,
        spread(0, [dims[i] for i in others]) if others else _ONE,
        running,
        steps[0],
        tuple(numbers[1 : 1 + digits]),
        spread(0, numbers[1 + digits :]) if len(dims) > 1 + digits else _ONE,
    )


def _refuse_many(rows: int) -> None:
    if rows > MAX_ROWS:
        raise TransportError(
            f"{rows:,} rows of elements that lie equally far apart, and at most {MAX_ROWS:,} are prepared: blocks, tiles and "
            "layers of one side continue each other nowhere; keep caches in another order there"
        )


def _longest(dims: Sequence[Dim], length: int) -> list[int]:
    """Of the dimensions whose strides continue each other, those that have the most elements together. Elements of a row do not
    overlap, as those of different rows may: what covers a tile may reach into the next."""
    long = [i for i, (count, stride) in enumerate(dims) if count > 1 and stride >= length]
    after = {dims[i][1]: i for i in reversed(long)}
    best: list[int] = []
    most = 1
    for start in long:
        chain, size = [start], dims[start][0]
        while (following := after.get(dims[start][1] * size, start)) not in chain:
            chain.append(following)
            size *= dims[following][0]
        if size > most:
            best, most = chain, size
    return best


def _rows(grains: Sequence[Laid], region: Ints, offset: Ints) -> Rows:
    """The rows of all runs of one side, which begin at the given places."""
    laid = [piece for grain in grains for piece in grain]
    sizes = [len(form.rows) * runs for form, runs in laid]
    _refuse_many(sum(sizes))
    if sum(sizes) > len(region):
        ends = np.cumsum([runs for _, runs in laid])
        region = np.repeat(region, np.repeat([len(form.rows) for form, _ in laid], [runs for _, runs in laid]))
        offset = np.concatenate(
            [_sums(offset[end - runs : end], form.rows) for end, (form, runs) in zip(ends, laid, strict=True)]
        )
    shapes = np.array([(form.length, form.stride, form.count) for form, _ in laid], np.int64).reshape(-1, 3)
    length, stride, count = shapes.repeat(sizes, axis=0).T
    return Rows(region, offset, length, stride, count, sum([form.elements * runs for form, runs in laid]))


def _numbered(grains: Sequence[Laid], dtype: type[np.signedinteger[Any]]) -> list[_Numbering]:
    """Element numbers by grain: rows, and the elements in them, are counted through."""
    out, elements = [], 0
    for grain in grains:
        first: list[Numbers] = []
        found: list[_Steps] = []
        start = 0
        for form, runs in grain:
            numbers: Numbers = np.arange(elements, elements + runs * form.elements, form.elements, dtype=dtype)
            first.append(_sums(numbers, form.repeats.astype(dtype)) if len(form.repeats) > 1 else numbers)
            elements += runs * form.elements
            stop = start + len(first[-1])
            if found and (found[-1].block, found[-1].digits) == (form.block, form.digits):
                start = found.pop().start
            found.append(_Steps(start, stop, form.block, form.digits))
            start = stop
        out.append(_Numbering(first[0] if len(first) == 1 else np.concatenate(first), tuple(found)))
    return out


def _form_of(run: Run) -> Alike:
    return run.src_lane, run.dst_lane, run.length, run.repeats


def _sums(outer: npt.NDArray[Whole], inner: npt.NDArray[Whole]) -> npt.NDArray[Whole]:
    return (outer[:, None] + inner).reshape(-1)
