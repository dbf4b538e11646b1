"""Rows of a plan as absolute addresses, each region checked against what was registered before it becomes an address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.bounds import holder, leaves
from kvferry.errors import TransportError
from kvferry.manifest.schema import Region
from kvferry.plan.rows import Rows
from kvferry.strided import Ints
from kvferry.transport.contract import Storage
from kvferry.transport.metadata import StorageEntry


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


def _registered(region: Region, storages: Sequence[Storage | StorageEntry], owner: str) -> None:
    if holder(storages, region) is not None:
        return
    raise TransportError(
        f"{owner}: region {region.name} ({region.length:,} bytes of {region.memory} {region.device} at {region.address:#x}) "
        f"lies in no registered storage; register it before metadata() is exported"
    )
