"""Half-open intervals of tokens as two columns, starts and stops: joined, subtracted, and cut into aligned tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.strided import Ints

Intervals = tuple[Ints, Ints]


def interval(low: int, high: int) -> Intervals:
    """[low, high) alone, or nothing."""
    return (np.array([low]), np.array([high])) if low < high else (np.empty(0, np.int64), np.empty(0, np.int64))


def union(*sets: Intervals) -> Intervals:
    """Intervals of several sets, sorted; they may overlap."""
    start, stop = (np.concatenate(c) for c in zip(*sets, strict=True))
    order = np.argsort(start, kind="stable")
    return start[order], stop[order]


def subtract(low: int, high: int, bad: Intervals) -> Intervals:
    """[low, high) less the sorted intervals `bad`."""
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
        if not len(start):
            out.append((start, stop))
            continue
        low, high = -(-start // tokens), stop // tokens
        some = low < high
        found = low[some], high[some]
        out.append(found)
        start, stop = (
            np.concatenate([start, found[1] * tokens]),
            np.concatenate([np.where(some, low * tokens, stop), stop[some]]),
        )
        rest = start < stop
        start, stop = start[rest], stop[rest]
    return out
