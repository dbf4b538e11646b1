"""A plan's runs from one source as tables that a kernel reads: pieces once for a peer, places of tiles for each load.

    item = (piece, tile):   address = piece's address + place of the tile in the piece's lane, on either side

Pieces are runs of one tile, cut evenly where they are longer than the widest row; their addresses are absolute. A lane's places
are the offsets of a load's tiles. So a load uploads its tiles, once for each lane, and never its runs. Pure arithmetic: knows
no device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

import numpy as np

from kvferry.bounds import end
from kvferry.errors import TransportError
from kvferry.plan import Plan, Tiles
from kvferry.plan.columns import Columns, expanded
from kvferry.plan.schema import Lane, Run
from kvferry.strided import Ints, split

UNITS: Final = (16, 4, 2, 1)
ROWS: Final[Mapping[int, int]] = {8: 256, 128: 16, 1024: 4, 4096: 1}
"""Elements of a row, the narrowest first, and how many such rows a program has under way at a time. The widest holds whole
lines, be its elements bytes."""
COLUMNS: Final = tuple(ROWS)
"""Few units and few widths of a row: each pair that occurs is a kernel to be compiled, and a launch of each load."""
LINE: Final = 128
"""Bytes at whose multiples runs are cut: a line of the device's cache, which two programs would write in turns."""
FIELDS: Final = 5
"""Columns of both tables. Pieces: source, destination, length in elements, source lane, destination lane. Jobs: first piece,
pieces, tiles, first place, turn."""

_HELD: Final = 500
"""Numbers up to which NumPy keeps Python's lock. The engine's thread would wait for milliseconds to have it back while requests
arrive, once for every sum of more."""

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

    def __init__(self, plan: Plan, source: int, src: Base, dst: Base, rows: Mapping[int, int] = ROWS) -> None:
        if max(rows) % LINE:
            raise ValueError(
                f"rows of {max(rows)} elements at most: the widest must be a multiple of {LINE}, to hold whole lines"
            )
        self._lanes = plan.lanes
        self._jobs: list[_Job] = []
        self._tile: dict[Key, tuple[int, int]] = {}
        tables: list[Ints] = []
        first = 0
        sides = plan.sources[source], plan.consumer
        lengths = [[region.length for region in side.regions] for side in sides]
        for key, runs, blocks in _grains(plan, source):
            for side, name in enumerate(("source", "destination")):
                _inside(runs, side, blocks[side], plan.lanes, lengths[side], name)
            columns = expanded(runs)
            moved = 0
            for form, src_lanes, dst_lanes, table in _pieces(columns, plan.lanes, src, dst, rows):
                moved += int(table[:, 2].sum()) * form.width
                self._jobs.append(_Job(key, form, first, len(table), src_lanes, dst_lanes))
                tables.append(table)
                first += len(table)
            self._tile[key] = moved, len(columns)
        self._jobs.sort(key=lambda job: job.form)
        self.pieces: Ints = np.concatenate(tables) if tables else np.empty((0, FIELDS), np.int64)

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple(sorted({job.form for job in self._jobs}))

    def bind(self, tiles: Mapping[Key, Tiles], src_shift: int = 0, dst_shift: int = 0) -> Bound:
        """The table of one load: jobs first, form by form, then the places that they refer to; on either side so many bytes
        further on, which are a multiple of the widest unit."""
        jobs = [job for job in self._jobs if job.key in tiles and len(tiles[job.key].src_block)]
        rows: list[int] = []
        starts: dict[tuple[Key, tuple[int, ...], tuple[int, ...]], int] = {}
        launches: list[Launch] = []
        at = len(jobs) * FIELDS
        for form, alike in groupby(jobs, attrgetter("form")):
            first, turn = len(rows), 0
            for job in alike:
                count = len(tiles[job.key].src_block)
                known = job.key, job.src_lanes, job.dst_lanes
                if known not in starts:
                    starts[known] = at
                    at += (len(job.src_lanes) + len(job.dst_lanes)) * count
                rows += (job.first, job.count, count, starts[known], turn)
                turn += -(-job.count * count // form.rows)
            launches.append(Launch(form, first, (len(rows) - first) // FIELDS))
        table: Ints = np.empty(at, np.int64)
        table[: len(rows)] = rows
        for (key, src_lanes, dst_lanes), start in starts.items():
            placed = tiles[key]
            count = len(placed.src_block)
            here = start + len(src_lanes) * count
            for number, index in enumerate(src_lanes):
                _place(table[start + number * count :], self._lanes[index], placed.src_block, placed.src_tile, src_shift)
            for number, index in enumerate(dst_lanes):
                _place(table[here + number * count :], self._lanes[index], placed.dst_block, placed.dst_tile, dst_shift)
        return Bound(table, tuple(launches), *self.size(tiles))

    def size(self, tiles: Mapping[Key, Tiles]) -> tuple[int, int]:
        """Bytes and runs of a load."""
        moved = runs = 0
        for key, placed in tiles.items():
            each = self._tile.get(key)
            if each is not None:
                moved += each[0] * len(placed.src_block)
                runs += each[1] * len(placed.src_block)
        return moved, runs


def joined(loads: Sequence[Mapping[Key, Tiles]]) -> Mapping[Key, Tiles]:
    """Tiles of several loads as one's."""
    if len(loads) == 1:
        return loads[0]
    parts: dict[Key, list[Tiles]] = defaultdict(list)
    for tiles in loads:
        for key, one in tiles.items():
            parts[key].append(one)
    return {
        key: Tiles(
            np.concatenate([one.src_block for one in some]), np.concatenate([one.src_tile for one in some]),
            np.concatenate([one.dst_block for one in some]), np.concatenate([one.dst_tile for one in some]),
        )
        for key, some in parts.items()
    }  # fmt: skip


def _grains(plan: Plan, source: int) -> Iterator[tuple[Key, Sequence[Run], tuple[int, int]]]:
    there = {group.id: group.blocks for group in plan.sources[source].groups}
    here = {group.id: group.blocks for group in plan.consumer.groups}
    for i, edge in enumerate(plan.edges):
        if edge.source == source:
            for level, grain in enumerate(edge.grains):
                yield (i, level), grain.runs, (there[edge.src_group], here[edge.dst_group])


def _inside(runs: Sequence[Run], side: int, blocks: int, lanes: Sequence[Lane], lengths: Sequence[int], name: str) -> None:
    """Raises TransportError for runs that would leave their region in some tile of some block."""
    reach = [end(0, 0, ((blocks, lane.block_stride),), lane.digits) for lane in lanes]
    for run in runs:
        region, offset, lane = (
            (run.dst_region, run.dst_offset, run.dst_lane) if side else (run.src_region, run.src_offset, run.src_lane)
        )
        if region >= len(lengths) or lane >= len(lanes):
            raise TransportError(f"a run in region {region} and lane {lane} of the {name}, which the plan does not have")
        repeats = [(repeat[0], repeat[1 + side]) for repeat in run.repeats]
        if end(offset, run.length, repeats) + reach[lane] > lengths[region]:
            raise TransportError(f"runs leave region {region} of the {name}; prove the plan before preparing it")


def _pieces(
    columns: Columns, lanes: Sequence[Lane], src: Base, dst: Base, rows: Mapping[int, int]
) -> Iterator[tuple[Form, tuple[int, ...], tuple[int, ...], Ints]]:
    """The pieces of a grain by form, with the lanes that their last two columns number: those of the source first."""
    there, here = _based(columns.src_region, columns.src_offset, src), _based(columns.dst_region, columns.dst_offset, dst)
    strides = np.array([_common(lane) for lane in lanes], np.int64)
    steps = strides[columns.src_lane], strides[columns.dst_lane]
    aligned = np.gcd.reduce([np.full_like(there, UNITS[0]), there, here, columns.length, *steps])
    unit = np.select([aligned % one == 0 for one in UNITS], UNITS)
    run, step, length = _cut(columns.length, np.minimum(unit, 8) * max(rows))
    there, here, unit = there[run] + step, here[run] + step, unit[run]
    src_lane, dst_lane = columns.src_lane[run], columns.dst_lane[run]
    widths = np.array(sorted(rows))
    wide = widths[np.searchsorted(widths, length // np.minimum(unit, 8))]
    for one, columns_of in np.unique(np.stack([unit, wide], axis=1), axis=0).tolist():
        of = np.flatnonzero((unit == one) & (wide == columns_of))
        form = Form(one, columns_of, rows[columns_of])
        src_lanes, theirs = np.unique(src_lane[of], return_inverse=True)
        dst_lanes, ours = np.unique(dst_lane[of], return_inverse=True)
        table = np.stack([there[of], here[of], length[of] // form.width, theirs, ours + len(src_lanes)], axis=1)
        yield form, tuple(src_lanes.tolist()), tuple(dst_lanes.tolist()), table


def _cut(length: Ints, most: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs in as few pieces of at most so many bytes as can be, as even as whole lines are: of every piece its run, where it
    begins there, and its length."""
    lines, counts = -(-length // LINE), -(-length // most)
    run = np.repeat(np.arange(len(length)), counts)
    number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * lines[run] // counts[run] * LINE
    stop = np.minimum((number + 1) * lines[run] // counts[run] * LINE, length[run])
    return run, start, stop - start


def _based(region: Ints, offset: Ints, base: Base) -> Ints:
    used, which = np.unique(region, return_inverse=True)
    return np.array([base(index) for index in used.tolist()], np.int64)[which] + offset


def _common(lane: Lane) -> int:
    """What divides every step of a lane."""
    return int(np.gcd.reduce([lane.block_stride, *(stride for _, stride in lane.digits)]))


def _place(table: Ints, lane: Lane, block: Ints, tile: Ints, shift: int) -> None:
    """A lane's places, at the beginning of a table: a few at a time, and into it at once."""
    # To NumPy a number is an array that it makes anew in every call.
    apart = np.array(lane.block_stride)
    for at in range(0, len(block), _HELD):
        some = slice(at, min(at + _HELD, len(block)))
        far = table[some]
        np.multiply(block[some], apart, far, dtype=np.int64)
        if lane.digits:
            for stride, digit in split(lane.digits, tile[some].astype(np.int64, copy=False)):
                far += digit * stride
        if shift:
            far += shift
