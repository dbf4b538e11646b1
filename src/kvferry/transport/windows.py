"""Cuts a read's index arrays into windows, each within a cap on descriptors after neighbours have been merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.plan.rows import Numbers, PreparedRows, Rows
from kvferry.strided import Ints


@dataclass(frozen=True)
class Window:
    """Elements to post together, and at most how many descriptors they are."""

    src: npt.NDArray[np.int32]
    dst: npt.NDArray[np.int32]
    descriptors: int


def small(cap: int) -> int:
    """Up to how many descriptors a read is so small that it is not worth counting them, nor letting it wait."""
    return max(1, cap // 64)


@dataclass(frozen=True)
class _Side:
    ends: Ints
    dense: npt.NDArray[np.bool_]

    def row(self, index: Numbers) -> Ints:
        return np.searchsorted(self.ends, index, side="right")


class Merging:
    """Which neighbouring elements become one descriptor: consecutive on both sides, in rows without gaps."""

    def __init__(self, prepared: PreparedRows) -> None:
        self._prepared = prepared

    @cached_property
    def _sides(self) -> tuple[_Side, _Side]:
        return _side(self._prepared.src), _side(self._prepared.dst)

    def windows(self, src: Numbers, dst: Numbers, cap: int) -> Iterator[Window]:
        """One window where `cap` descriptors suffice, else windows of half of it, so that two are in flight."""
        theirs, ours = src.astype(np.int32, copy=False), dst.astype(np.int32, copy=False)
        if len(src) <= small(cap):
            yield Window(theirs, ours, len(src))
            return
        low, count, dense = self._stretches(src, dst)
        total = int(np.where(dense, 1, count).sum())
        if total <= cap:
            yield Window(theirs, ours, total)
            return
        reached = np.cumsum(_starts(low, count, dense))
        cuts = np.searchsorted(reached, np.arange(1, total + 1, max(1, cap // 2))).tolist()
        for start, stop in zip(cuts, [*cuts[1:], len(src)], strict=True):
            yield Window(theirs[start:stop], ours[start:stop], int(reached[stop - 1] - reached[start]) + 1)

    def starts(self, src: Numbers, dst: Numbers) -> npt.NDArray[np.bool_]:
        """For every element whether it may begin a descriptor; never fewer than really do."""
        return _starts(*self._stretches(src, dst))

    def _stretches(self, src: Numbers, dst: Numbers) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Stretches of elements that are consecutive on both sides: first, count, and whether they are one descriptor."""
        breaks = ((src[1:] - src[:-1]) != 1) | ((dst[1:] - dst[:-1]) != 1)
        low = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        count = np.diff(low, append=len(src))
        dense = np.ones(len(low), np.bool_)
        several = np.flatnonzero(count > 1)
        first, last = low[several], low[several] + count[several] - 1
        for side, index in zip(self._sides, (src, dst), strict=True):
            row = side.row(index[first])
            dense[several] &= side.dense[row] & (row == side.row(index[last]))
        return low, count, dense


def _starts(low: Ints, count: Ints, dense: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    out: npt.NDArray[np.bool_] = np.repeat(~dense, count)
    out[low] = True
    return out


def _side(rows: Rows) -> _Side:
    return _Side(np.cumsum(rows.count), (rows.stride == rows.length) | (rows.count == 1))
