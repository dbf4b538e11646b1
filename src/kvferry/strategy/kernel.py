"""The kernels of the strategies, in Triton: one launch moves what a load's table says, one zeroes a list of runs.

Addresses come as numbers, since the memory may be another process's. Every program walks all jobs of its launch and takes
its share of each, so that a few programs can be told to do the work and the rest of the device is left to the engine.

A program's share of a job is round after round of a form's rows. What bounds it is waiting: for a piece, for the places of its
tile, for the bytes. So it looks up where the next round goes while this one's bytes are under way, and these are many.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from kvferry.strategy import moves
from kvferry.strategy.moves import Form

WARPS: Final = 16
FIELDS: Final = tl.constexpr(moves.FIELDS)
KINDS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Elements of so many bytes."""
MOVE_ARGUMENTS: Final = (8, 8, 4, 4, 8)
ZERO_ARGUMENTS: Final = (8, 4)
"""Bytes of what the kernels are launched with: addresses, and numbers that are never specialised."""


@triton.jit
def placed(pieces, table, first, count, tiles, places, item):
    """Source, destination and length of items; none of an item beyond the last, which is looked up like the last."""
    known = tl.minimum(item, count * tiles - 1)
    tile = known // count
    piece = pieces + (first + known - tile * count) * FIELDS
    src = tl.load(piece) + tl.load(table + places + tl.load(piece + 3) * tiles + tile)
    dst = tl.load(piece + 1) + tl.load(table + places + tl.load(piece + 4) * tiles + tile)
    return src, dst, tl.where(item == known, tl.load(piece + 2), 0)


@triton.jit  # type: ignore[untyped-decorator]
def elements(address, length, columns, KIND: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    """Pointers, and which of them are inside. The compiler is told how pointers are aligned, and that whole units are inside:
    of numbers that become pointers it would not know, and 16 bytes would be two accesses."""
    pointers = tl.multiple_of(address.to(tl.pointer_type(KIND)), UNIT)[:, None] + columns[None, :]
    return pointers, (columns // (UNIT // WIDTH))[None, :] < (length // (UNIT // WIDTH))[:, None]


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
    copied = tl.zeros((ROWS,), tl.int64)
    step = programs * ROWS
    for j in range(jobs):
        job = table + at + j * FIELDS
        first = tl.load(job)
        count = tl.load(job + 1)
        tiles = tl.load(job + 2)
        places = tl.load(job + 3)
        turn = tl.load(job + 4) % programs
        items = count * tiles
        begin = ((program + programs - turn) % programs) * ROWS
        if begin < items:
            src, dst, length = placed(pieces, table, first, count, tiles, places, begin + rows)
            for start in range(begin, items, step):
                pointers, inside = elements(src, length, columns, KIND, UNIT, WIDTH)
                data = tl.load(pointers, inside, eviction_policy="evict_first")
                src, next_dst, next_length = placed(pieces, table, first, count, tiles, places, start + step + rows)
                pointers, inside = elements(dst, length, columns, KIND, UNIT, WIDTH)
                tl.store(pointers, data, inside)
                copied += length
                dst, length = next_dst, next_length
    tl.store(moved + program, tl.sum(copied, 0) * WIDTH)


@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]
def zero(table, runs, COLUMNS: tl.constexpr):  # noqa: N803
    """Zeroes `runs` stretches of memory: an address and a number of bytes each."""
    columns = tl.arange(0, COLUMNS)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(table + 2 * run).to(tl.pointer_type(tl.int8))
        length = tl.load(table + 2 * run + 1)
        for start in range(0, length, COLUMNS):
            tl.store(target + start + columns, tl.zeros((COLUMNS,), tl.int8), start + columns < length)


def launch(programs: int, pieces: Any, table: Any, at: int, jobs: int, moved: Any, form: Form, warps: int = WARPS) -> Any:
    """Moves of one form by so many programs; `moved` gets the bytes that each of them moved. Returns the kernel as Triton made
    it."""
    return move[(programs,)](
        pieces, table, at, jobs, moved,
        KIND=KINDS[form.width], UNIT=form.unit, WIDTH=form.width, COLUMNS=form.columns, ROWS=form.rows,
        num_warps=warps,
    )  # fmt: skip


def zeroing(programs: int, table: Any, runs: int) -> Any:
    """The kernel that did it, as Triton made it."""
    return zero[(programs,)](table, runs, COLUMNS=4096)
