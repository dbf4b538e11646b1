"""Rows of a plan as absolute addresses, each region checked against what was registered before it becomes an address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvferry.bounds import holder, leaves
from kvferry.errors import TransportError
from kvferry.manifest.schema import Region
from kvferry.plan.rows import Rows
from kvferry.strided import Ints
from kvferry.transport.contract import Storage
from kvferry.transport.metadata import StorageEntry

MAX_DENSE: Final = 1 << 24
"""Descriptors in a list that is not strided: some seconds and about a gigabyte."""


@dataclass(frozen=True)
class Placed:
    """One side's rows in memory: all in one kind of memory, each on its device."""

    address: Ints
    device: Ints
    memory: Literal["dram", "vram"]


def place(rows: Rows, regions: Sequence[Region], storages: Sequence[Storage | StorageEntry], owner: str) -> Placed:
    """Where the rows lie; raises TransportError for a region that is not registered, or for mixed memory."""
    used = sorted(set(rows.region.tolist()))
    kinds = sorted({regions[i].memory for i in used})
    if len(kinds) > 1:
        named = {kind: next(regions[i].name for i in used if regions[i].memory == kind) for kind in kinds}
        found = ", ".join(f"region {name} in {kind}" for kind, name in named.items())
        raise TransportError(
            f"{owner}: one read cannot touch several kinds of memory ({found}); publish a manifest per kind of memory"
        )
    for index in used:
        _registered(regions[index], storages, owner)
    of_region: Ints = np.array([(r.address, r.length, r.device) for r in regions], np.int64).reshape(-1, 3)[rows.region]
    outside = leaves(rows.offset, rows.length, rows.count, rows.stride, of_region[:, 1])
    if outside.any():
        index = int(rows.region[np.argmax(outside)])
        raise TransportError(f"{owner}: rows leave region {regions[index].name}; prove the plan before preparing it")
    memory: Literal["dram", "vram"] = "vram" if kinds == ["vram"] else "dram"
    return Placed(of_region[:, 0] + rows.offset, of_region[:, 2], memory)


def strided(rows: Rows, placed: Placed) -> npt.NDArray[np.uint64]:
    """What NIXL prepares: address, length, device, stride and count of each row."""
    out: npt.NDArray[np.uint64] = np.empty((len(rows), 5), np.uint64)
    for i, column in enumerate((placed.address, rows.length, placed.device, rows.stride, rows.count)):
        out[:, i] = column
    return out


def dense(rows: Rows, placed: Placed, owner: str) -> npt.NDArray[np.uint64]:
    """What a NIXL without strided lists prepares: address, length and device of each element, row after row."""
    if rows.elements > MAX_DENSE:
        raise TransportError(
            f"{owner}: this NIXL takes no strided lists, and would hold {rows.elements:,} descriptors; {MAX_DENSE:,} are "
            f"allowed: install NIXL 1.5 or later, or use fewer blocks or larger ones"
        )
    count = rows.count
    place = np.arange(rows.elements) - np.repeat(np.cumsum(count) - count, count)
    out: npt.NDArray[np.uint64] = np.empty((rows.elements, 3), np.uint64)
    out[:, 0] = np.repeat(placed.address, count) + place * np.repeat(rows.stride, count)
    out[:, 1], out[:, 2] = np.repeat(rows.length, count), np.repeat(placed.device, count)
    return out


def _registered(region: Region, storages: Sequence[Storage | StorageEntry], owner: str) -> None:
    if holder(storages, region) is not None:
        return
    raise TransportError(
        f"{owner}: region {region.name} ({region.length:,} bytes of {region.memory} {region.device} at {region.address:#x}) "
        f"lies in no registered storage; register it before metadata() is exported"
    )
