"""Whether every byte arrived, found out where the bytes are: nothing is brought to the host, and there is no second copy.

What a byte must be follows from its source's rank and place, which the plan tells (`pattern`). What was compared is wiped, so
that whatever is left in memory at the end is something that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import numpy as np

from kvferry.doctor.memory import ODD, Memory, salt
from kvferry.plan import Plan, Tiles
from kvferry.plan.schema import Run
from kvferry.strided import Ints

_WORD: Final = 8


@dataclass(frozen=True)
class Compared:
    """`wrong`: places that the plan copies to, in elements of 1 to 8 bytes, which hold something else than it says; `stray`:
    something was written elsewhere."""

    wrong: int
    stray: bool

    @property
    def right(self) -> bool:
        return not self.wrong and not self.stray


def stamp(memory: Memory, rank: int) -> None:
    """Writes the pattern of a rank, as `pattern` has it."""
    words = memory.view(_WORD)
    for at in range(0, len(words), memory.at_once):
        stop = min(at + memory.at_once, len(words))
        words[at:stop] = _words(at + memory.place(np.arange(stop - at)), rank)
    whole = len(words) * _WORD
    ends = memory.view(1)[whole:]
    ends[:] = _elements(whole + memory.place(np.arange(len(ends))), rank, 1) & 0xFF


def compared(plan: Plan, tiles: Mapping[tuple[int, int], Tiles], memory: Memory) -> Compared:
    """After a load into memory that was cleared before; it is cleared again. Sources hold the pattern of their rank's number,
    and their regions lie behind each other, as the consumer's do in `memory`."""
    wrong: Any = 0
    for (index, level), found in tiles.items():
        for run in plan.edges[index].grains[level].runs:
            wrong = wrong + _run(plan, plan.edges[index].source, run, found, memory)
    words = memory.view(_WORD)
    stray = bool(words.any()) or bool(memory.view(1)[len(words) * _WORD :].any())
    if stray:
        memory.clear()
    return Compared(int(wrong), stray)


def _run(plan: Plan, source: int, run: Run, tiles: Tiles, memory: Memory) -> Any:
    """How many elements of a run are wrong, over all tiles; some tiles at a time."""
    there, here = plan.sources[source].regions, plan.consumer.regions
    theirs = there[run.src_region].address - there[0].address + run.src_offset
    ours = here[run.dst_region].address - here[0].address + run.dst_offset
    unit = _unit(plan, run, theirs, ours)
    view, rank = memory.view(unit), plan.sources[source].identity.rank.ordinal
    within = [np.arange(run.length // unit)] * 2
    for count, *steps in reversed(run.repeats):
        within = [(np.arange(count)[:, None] * (step // unit) + w).reshape(-1) for step, w in zip(steps, within, strict=True)]
    src, dst = (memory.place(column) for column in within)
    from_, to = (
        memory.place((first + _places(plan, lane, tiles, side)) // unit)
        for side, (first, lane) in enumerate(((theirs, run.src_lane), (ours, run.dst_lane)))
    )
    wrong: Any = 0
    mask = _signed((1 << 8 * unit) - 1)
    step = max(1, memory.at_once // len(src))
    for at in range(0, len(to), step):
        few = slice(at, at + step)
        place = to[few, None] + dst
        differing = view[place] ^ _elements(from_[few, None] + src, rank, unit)
        wrong = wrong + (differing & mask != 0).sum()
        view[place] = 0
    return wrong


def _unit(plan: Plan, run: Run, *places: int) -> int:
    """The longest element, up to a word, of which all of a run's places are multiples."""
    lanes = [plan.lanes[lane] for lane in (run.src_lane, run.dst_lane)]
    strides = [n for lane in lanes for n in (lane.block_stride, *(stride for _, stride in lane.digits))]
    return gcd(_WORD, run.length, *places, *strides, *(n for _, *steps in run.repeats for n in steps))


def _places(plan: Plan, lane: int, tiles: Tiles, side: int) -> Ints:
    """Where tiles lie, digit by digit."""
    block, rest = (tiles.dst_block, tiles.dst_tile) if side else (tiles.src_block, tiles.src_tile)
    found: Ints = block.astype(np.int64) * plan.lanes[lane].block_stride
    for count, stride in reversed(plan.lanes[lane].digits):
        found = found + rest % count * stride
        rest = rest // count
    return found


def _words(index: Any, rank: int) -> Any:
    """Words of the pattern at the numbers given, as signed ones: NumPy and torch both let them wrap around."""
    return (index + 1) * _signed(ODD) ^ _signed(salt(rank))


def _elements(index: Any, rank: int, unit: int) -> Any:
    """Elements of the pattern; above each there is more, which whoever looks at it masks away."""
    if unit == _WORD:
        return _words(index, rank)
    several = _WORD // unit
    return _words(index // several, rank) >> (index % several * (8 * unit))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
