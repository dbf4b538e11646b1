"""Half-open intervals of tokens as two columns, starts and stops: joined, subtracted, and cut into aligned tiles.

One interval is nearly always all there is, and an array of one number costs ten times what the number does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvferry.strided import Ints

Intervals = tuple[Ints, Ints]

_NONE: Final = np.empty(0, np.int64)
_NONE.setflags(write=False)
NOTHING: Final[Intervals] = (_NONE, _NONE)


def interval(low: int, high: int) -> Intervals:
    """[low, high) alone, or nothing."""
    return (np.array([low]), np.array([high])) if low < high else NOTHING


def union(*sets: Intervals) -> Intervals:
    """Intervals of several sets, sorted; they may overlap."""
    some = [one for one in sets if len(one[0])]
    if not some:
        return NOTHING
    if len(some) == len(some[0][0]) == 1:
        return some[0]
    start, stop = (np.concatenate(c) for c in zip(*some, strict=True))
    order = np.argsort(start, kind="stable")
    return start[order], stop[order]


def subtract(low: int, high: int, bad: Intervals) -> Intervals:
    """[low, high) less the sorted intervals `bad`."""
    if not len(bad[0]):
        return interval(low, high)
    if len(bad[0]) == 1:
        return _around(low, min(int(bad[0][0]), high), max(low, int(bad[1][0])), high)
    reached = np.maximum.accumulate(np.concatenate([[low], np.minimum(bad[1], high)]))
    until = np.concatenate([np.minimum(bad[0], high), [high]])
    keep = reached < until
    return reached[keep], until[keep]


def integers(start: Ints, stop: Ints) -> Ints:
    """All integers of the half-open ranges, one range after the other."""
    if len(start) == 1:
        return np.arange(int(start[0]), int(stop[0]), dtype=np.int64)
    count = np.maximum(stop - start, 0)
    total = int(count.sum())
    ahead: Ints = np.repeat(start - (np.cumsum(count) - count), count)
    return ahead + np.arange(total, dtype=np.int64)


def cut_at(intervals: Intervals, grains: Sequence[int]) -> list[Intervals]:
    """The tiles that make up the intervals, by grain, each as coarse as it can be; numbered from the sequence's start."""
    start, stop = intervals
    out = []
    for tokens in grains:
        if len(start) > 1:
            low, high = -(-start // tokens), stop // tokens
            some = low < high
            found = low[some], high[some]
            start, stop = (
                np.concatenate([start, found[1] * tokens]),
                np.concatenate([np.where(some, low * tokens, stop), stop[some]]),
            )
            rest = start < stop
            start, stop = start[rest], stop[rest]
        elif len(start):
            first, last = int(start[0]), int(stop[0])
            found = interval(-(-first // tokens), last // tokens)
            if len(found[0]):
                start, stop = _around(first, -(-first // tokens) * tokens, last // tokens * tokens, last)
        else:
            found = NOTHING
        out.append(found)
    return out


def _around(low: int, first: int, last: int, high: int) -> Intervals:
    """[low, first) and [last, high), as far as they are not empty."""
    if last >= high:
        return interval(low, first)
    if low >= first:
        return interval(last, high)
    return np.array([low, last]), np.array([first, high])
