"""A plan's runs from one source as tables that a kernel reads: pieces once for a peer, places of tiles for each load.

    item = (piece, tile):   address = piece's address + place of the tile in the piece's lane, on either side

Pieces are runs of one tile, cut to at most 2,048 elements; their addresses are absolute. A lane's places are the offsets of a
load's tiles. So a load uploads its tiles, once for each lane, and never its runs. Pure arithmetic: knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan import Plan, Tiles
from kvferry.plan.columns import Columns, expanded
from kvferry.plan.schema import Lane
from kvferry.strided import Ints, offsets, span

UNITS: Final = (16, 4, 2, 1)
COLUMNS: Final = (8, 128, 2048)
"""Few units and few widths of a row: each pair that occurs is a kernel to be compiled, and a launch of each load."""
FIELDS: Final = 5
"""Columns of both tables. Pieces: source, destination, length in elements, source lane, destination lane. Jobs: first piece,
pieces, tiles, first place, turn."""

Base = Callable[[int], int]
Key = tuple[int, int]


@dataclass(frozen=True, order=True)
class Form:
    """How a kernel walks pieces: `rows` of them at a time, `columns` elements each, everything aligned to `unit` bytes."""

    unit: int
    columns: int
    rows: int

    @property
    def width(self) -> int:
        """Bytes of an element; machines have none of 16."""
        return min(self.unit, 8)


@dataclass(frozen=True)
class _Job:
    """Pieces [first, first + count) of one grain, all of one form; `lanes` are those that their table's columns number."""

    key: Key
    form: Form
    first: int
    count: int
    bytes: int
    src_lanes: tuple[int, ...]
    dst_lanes: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """Jobs of one form: rows of the load's table from `at` on."""

    form: Form
    at: int
    jobs: int


@dataclass(frozen=True)
class Bound:
    """One load: its table, what to launch, and what that moves."""

    table: Ints
    launches: tuple[Launch, ...]
    bytes: int
    runs: int


class Moves:
    """Everything that a plan reads from one source; `src` and `dst` say where a region begins in this process."""

    def __init__(self, plan: Plan, source: int, src: Base, dst: Base) -> None:
        self._lanes = plan.lanes
        self._jobs: list[_Job] = []
        self._runs: dict[Key, int] = {}
        tables: list[Ints] = []
        first = 0
        regions = plan.sources[source].regions, plan.consumer.regions
        for key, columns, blocks in _grains(plan, source):
            self._runs[key] = len(columns)
            for side, number in enumerate(("source", "destination")):
                _inside(columns, side, blocks[side], plan.lanes, [r.length for r in regions[side]], number)
            for form, src_lanes, dst_lanes, table in _pieces(columns, plan.lanes, src, dst):
                moved = int(table[:, 2].sum()) * form.width
                self._jobs.append(_Job(key, form, first, len(table), moved, src_lanes, dst_lanes))
                tables.append(table)
                first += len(table)
        self._jobs.sort(key=lambda job: job.form)
        self.pieces: Ints = np.concatenate(tables) if tables else np.empty((0, FIELDS), np.int64)

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple(sorted({job.form for job in self._jobs}))

    def bind(self, tiles: Mapping[Key, Tiles], src_shift: int = 0, dst_shift: int = 0) -> Bound:
        """The table of one load: jobs first, form by form, then the places that they refer to; on either side so many bytes
        further on, which are a multiple of the widest unit."""
        jobs = [job for job in self._jobs if job.key in tiles and len(tiles[job.key].src_block)]
        table = np.empty((len(jobs), FIELDS), np.int64)
        places: list[Ints] = []
        starts: dict[tuple[Key, tuple[int, ...], tuple[int, ...]], int] = {}
        launches: list[Launch] = []
        at, turn = table.size, 0
        for row, job in enumerate(jobs):
            placed = tiles[job.key]
            count = len(placed.src_block)
            known = job.key, job.src_lanes, job.dst_lanes
            if known not in starts:
                starts[known] = at
                found = [*_offsets(self._lanes, job.src_lanes, placed.src_block, placed.src_tile, src_shift)]
                found += _offsets(self._lanes, job.dst_lanes, placed.dst_block, placed.dst_tile, dst_shift)
                places += found
                at += len(found) * count
            if not launches or launches[-1].form != job.form:
                launches.append(Launch(job.form, row * FIELDS, 0))
                turn = 0
            launches[-1] = Launch(job.form, launches[-1].at, launches[-1].jobs + 1)
            table[row] = job.first, job.count, count, starts[known], turn
            turn += -(-job.count * count // job.form.rows)
        return Bound(np.concatenate([table.reshape(-1), *places]), tuple(launches), *self.size(tiles))

    def size(self, tiles: Mapping[Key, Tiles]) -> tuple[int, int]:
        """Bytes and runs of a load."""
        moved = sum(job.bytes * len(tiles[job.key].src_block) for job in self._jobs if job.key in tiles)
        return moved, sum(runs * len(tiles[key].src_block) for key, runs in self._runs.items() if key in tiles)


def joined(loads: Sequence[Mapping[Key, Tiles]]) -> Mapping[Key, Tiles]:
    """Tiles of several loads as one's."""
    if len(loads) == 1:
        return loads[0]
    out: dict[Key, Tiles] = {}
    for key in dict.fromkeys(key for tiles in loads for key in tiles):
        parts = [tiles[key] for tiles in loads if key in tiles]
        columns = zip(*((one.src_block, one.src_tile, one.dst_block, one.dst_tile) for one in parts), strict=True)
        out[key] = Tiles(*map(np.concatenate, columns))
    return out


def _grains(plan: Plan, source: int) -> Iterator[tuple[Key, Columns, tuple[int, int]]]:
    there = {group.id: group.blocks for group in plan.sources[source].groups}
    here = {group.id: group.blocks for group in plan.consumer.groups}
    for i, edge in enumerate(plan.edges):
        if edge.source == source:
            for level, grain in enumerate(edge.grains):
                yield (i, level), expanded(grain.runs), (there[edge.src_group], here[edge.dst_group])


def _inside(columns: Columns, side: int, blocks: int, lanes: Sequence[Lane], lengths: Sequence[int], name: str) -> None:
    """Raises TransportError for runs that would leave their region in some tile of some block."""
    region = columns.dst_region if side else columns.src_region
    offset = columns.dst_offset if side else columns.src_offset
    lane = columns.dst_lane if side else columns.src_lane
    reach = np.array([(blocks - 1) * one.block_stride + span(one.digits) for one in lanes], np.int64)
    outside = offset + reach[lane] + columns.length > np.array(lengths, np.int64)[region]
    if outside.any():
        index = int(region[np.argmax(outside)])
        raise TransportError(f"runs leave region {index} of the {name}; prove the plan before preparing it")


def _pieces(
    columns: Columns, lanes: Sequence[Lane], src: Base, dst: Base
) -> Iterator[tuple[Form, tuple[int, ...], tuple[int, ...], Ints]]:
    """The pieces of a grain by form, with the lanes that their last two columns number: those of the source first."""
    there, here = _based(columns.src_region, columns.src_offset, src), _based(columns.dst_region, columns.dst_offset, dst)
    strides = np.array([_common(lane) for lane in lanes], np.int64)
    steps = strides[columns.src_lane], strides[columns.dst_lane]
    aligned = np.gcd.reduce([np.full_like(there, UNITS[0]), there, here, columns.length, *steps])
    unit = np.select([aligned % one == 0 for one in UNITS], UNITS)
    most = np.minimum(unit, 8) * COLUMNS[-1]
    counts = -(-columns.length // most)
    run = np.repeat(np.arange(len(columns)), counts)
    step = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[run]
    length = np.minimum(columns.length[run] - step, most[run])
    there, here, unit = there[run] + step, here[run] + step, unit[run]
    src_lane, dst_lane = columns.src_lane[run], columns.dst_lane[run]
    wide = np.array(COLUMNS)[np.searchsorted(COLUMNS, length // np.minimum(unit, 8))]
    for one, columns_of in np.unique(np.stack([unit, wide], axis=1), axis=0).tolist():
        of = np.flatnonzero((unit == one) & (wide == columns_of))
        form = Form(one, columns_of, COLUMNS[-1] // columns_of)
        src_lanes, theirs = np.unique(src_lane[of], return_inverse=True)
        dst_lanes, ours = np.unique(dst_lane[of], return_inverse=True)
        table = np.stack([there[of], here[of], length[of] // form.width, theirs, ours + len(src_lanes)], axis=1)
        yield form, tuple(src_lanes.tolist()), tuple(dst_lanes.tolist()), table


def _based(region: Ints, offset: Ints, base: Base) -> Ints:
    used, which = np.unique(region, return_inverse=True)
    return np.array([base(index) for index in used.tolist()], np.int64)[which] + offset


def _common(lane: Lane) -> int:
    """What divides every step of a lane."""
    return int(np.gcd.reduce([lane.block_stride, *(stride for _, stride in lane.digits)]))


def _offsets(lanes: Sequence[Lane], used: Sequence[int], block: Ints, tile: Ints, shift: int) -> Iterator[Ints]:
    wide = block.astype(np.int64, copy=False)
    for index in used:
        lane = lanes[index]
        yield wide * lane.block_stride + ((offsets(lane.digits, tile) if lane.digits else 0) + shift)
