"""Zeroing runs of memory, many at a time: for NumPy arrays and for anything else that is indexed like one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from kvferry.plan import Fills
from kvferry.strided import Ints

_LONG: Final = 1 << 12
_AT_ONCE: Final = 1 << 20


class Bytes(Protocol):
    """Flat memory: a NumPy array or a torch tensor of bytes, on whichever device."""

    def __setitem__(self, place: Any, value: int) -> None: ...


def joined(fills: Sequence[Fills]) -> Fills:
    """Those of several requests, one after the other."""
    region, offset, length = ([getattr(one, name) for one in fills] for name in ("region", "offset", "length"))
    return Fills(np.concatenate(region), np.concatenate(offset), np.concatenate(length))


def apply_fills(fills: Fills, memories: Sequence[Bytes]) -> None:
    """Zero a request's fills; `memories` are the rank's regions."""
    for region in np.unique(fills.region).tolist():
        of = fills.region == region
        zero(memories[region], fills.offset[of], fills.length[of])


def zero(memory: Bytes, offset: Ints, length: Ints) -> None:
    """Zero [offset, offset + length) for every run; short runs of one length together, long ones each."""
    for size in np.unique(length[length > 0]).tolist():
        starts = offset[length == size]
        if size >= _LONG:
            for start in starts.tolist():
                memory[start : start + size] = 0
            continue
        within = np.arange(size)
        step = max(1, _AT_ONCE // size)
        for first in range(0, len(starts), step):
            memory[(starts[first : first + step, None] + within).reshape(-1)] = 0
