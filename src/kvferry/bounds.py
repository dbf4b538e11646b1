"""What it means that something stays in its region: the one place that adds up offsets, strides and lengths of a peer.

Single numbers are added in Python's integers, which do not wrap. Columns are compared without a sum: each number is taken from
the room that is left. Pure arithmetic: knows no manifest, no plan, no transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.strided import Ints, span


class Stretch(Protocol):
    """Memory from an address on: a region, or a storage that regions lie in."""

    @property
    def address(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def memory(self) -> str: ...

    @property
    def device(self) -> int: ...


Outer = TypeVar("Outer", bound=Stretch)


def end(offset: int, length: int, *steps: Iterable[tuple[int, int]]) -> int:
    """The byte behind the last one of `length` bytes at `offset`, repeated by all steps of (count, stride)."""
    return offset + length + sum(span(some) for some in steps)


def leaves(offset: Ints, length: Ints, count: Ints, stride: Ints, limit: Ints) -> npt.NDArray[np.bool_]:
    """Which rows of `count` elements end behind their limit. No number is negative; they may be as large as 64 bits allow."""
    room = limit - offset
    # Where the first comparison holds, the rest may have wrapped, and does not matter.
    rest = room - length
    return (room < length) | ((stride > 0) & (count - 1 > rest // np.maximum(stride, 1)))


def holds(outer: Stretch, inner: Stretch) -> bool:
    """Whether all of `inner` lies in `outer`, in the same memory."""
    inside = outer.address <= inner.address and inner.address + inner.length <= outer.address + outer.length
    return inside and (outer.memory, outer.device) == (inner.memory, inner.device)


def holder(outer: Iterable[Outer], inner: Stretch) -> Outer | None:
    """The first that holds all of `inner`."""
    return next((one for one in outer if holds(one, inner)), None)
