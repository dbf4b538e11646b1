"""The kernels of the strategies, in Triton: one launch moves what a load's table says, one zeroes a list of runs.

Addresses come as numbers, since the memory may be another process's. Every program walks all jobs of its launch and takes
its share of each, so that a few programs can be told to do the work and the rest of the device is left to the engine.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from kvferry.strategy import moves
from kvferry.strategy.moves import Form

WARPS: Final = 8
FIELDS: Final = tl.constexpr(moves.FIELDS)
KINDS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Elements of so many bytes."""


@triton.jit(do_not_specialize=["at", "jobs"])  # type: ignore[untyped-decorator]
def move(
    pieces,
    table,
    at,
    jobs,
    moved,
    KIND: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """Copies, for `jobs` rows of the load's table from `at` on, every piece at every tile; says how many bytes it moved."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    rows = tl.arange(0, ROWS).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    elements = tl.zeros((ROWS,), tl.int64)
    for j in range(jobs):
        job = table + at + j * FIELDS
        first = tl.load(job)
        count = tl.load(job + 1)
        tiles = tl.load(job + 2)
        places = tl.load(job + 3)
        turn = tl.load(job + 4) % programs
        items = count * tiles
        for start in range(((program + programs - turn) % programs) * ROWS, items, programs * ROWS):
            item = start + rows
            there = item < items
            tile = item // count
            piece = pieces + (first + item - tile * count) * FIELDS
            src = tl.load(piece, there, 0) + tl.load(table + places + tl.load(piece + 3, there, 0) * tiles + tile, there, 0)
            dst = tl.load(piece + 1, there, 0) + tl.load(table + places + tl.load(piece + 4, there, 0) * tiles + tile, there, 0)
            length = tl.multiple_of(tl.load(piece + 2, there, 0), UNIT // WIDTH)
            inside = columns[None, :] < length[:, None]
            source = tl.multiple_of(src, UNIT).to(tl.pointer_type(KIND))[:, None] + columns[None, :]
            target = tl.multiple_of(dst, UNIT).to(tl.pointer_type(KIND))[:, None] + columns[None, :]
            tl.store(target, tl.load(source, inside, eviction_policy="evict_first"), inside)
            elements += length
    tl.store(moved + program, tl.sum(elements, 0) * WIDTH)


@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]
def zero(table, runs, COLUMNS: tl.constexpr):  # noqa: N803
    """Zeroes `runs` stretches of memory: an address and a number of bytes each."""
    columns = tl.arange(0, COLUMNS)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(table + 2 * run).to(tl.pointer_type(tl.int8))
        length = tl.load(table + 2 * run + 1)
        for start in range(0, length, COLUMNS):
            tl.store(target + start + columns, tl.zeros((COLUMNS,), tl.int8), start + columns < length)


def launch(programs: int, pieces: Any, table: Any, at: int, jobs: int, moved: Any, form: Form) -> None:
    """Moves of one form by so many programs; `moved` gets the bytes that each of them moved."""
    move[(programs,)](
        pieces, table, at, jobs, moved,
        KIND=KINDS[form.width], UNIT=form.unit, WIDTH=form.width, COLUMNS=form.columns, ROWS=form.rows, num_warps=WARPS,
    )  # fmt: skip
