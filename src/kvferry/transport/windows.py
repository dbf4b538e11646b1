"""Cuts a read's index arrays into windows, each within a cap on descriptors after neighbours have been merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.plan.rows import PreparedRows, Rows
from kvferry.strided import Ints


@dataclass(frozen=True)
class Window:
    """Elements to post together, and at most how many descriptors they are."""

    src: npt.NDArray[np.int32]
    dst: npt.NDArray[np.int32]
    descriptors: int


@dataclass(frozen=True)
class _Side:
    ends: Ints
    dense: npt.NDArray[np.bool_]

    def row(self, index: Ints) -> Ints:
        return np.searchsorted(self.ends, index, side="right")


class Merging:
    """Which neighbouring elements become one descriptor: consecutive on both sides, in rows without gaps."""

    def __init__(self, prepared: PreparedRows) -> None:
        self._src, self._dst = _side(prepared.src), _side(prepared.dst)

    def starts(self, src: Ints, dst: Ints) -> npt.NDArray[np.bool_]:
        """For every element whether it may begin a descriptor; never fewer than really do."""
        first = np.ones(len(src), np.bool_)
        first[1:] = (np.diff(src) != 1) | (np.diff(dst) != 1)
        low = np.flatnonzero(first)
        high = np.append(low[1:], len(src)) - 1
        dense = np.ones(len(low), np.bool_)
        for side, index in ((self._src, src), (self._dst, dst)):
            row = side.row(index[low])
            dense &= side.dense[row] & (row == side.row(index[high]))
        out: npt.NDArray[np.bool_] = first | np.repeat(~dense, high - low + 1)
        return out

    def windows(self, src: Ints, dst: Ints, cap: int) -> Iterator[Window]:
        """One window where `cap` descriptors suffice, else windows of half of it, so that two are in flight."""
        theirs, ours = src.astype(np.int32), dst.astype(np.int32)
        if len(src) <= cap:
            yield Window(theirs, ours, len(src))
            return
        reached = np.cumsum(self.starts(src, dst))
        total = int(reached[-1])
        step = total if total <= cap else max(1, cap // 2)
        cuts = np.searchsorted(reached, np.arange(1, total + 1, step)).tolist()
        for start, stop in zip(cuts, [*cuts[1:], len(src)], strict=True):
            yield Window(theirs[start:stop], ours[start:stop], int(reached[stop - 1] - reached[start]) + 1)


def _side(rows: Rows) -> _Side:
    return _Side(np.cumsum(rows.count), (rows.stride == rows.length) | (rows.count == 1))
