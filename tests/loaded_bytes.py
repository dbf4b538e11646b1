"""A request of every way to be scattered, as it lies in memory after a load: run by run out of the binding's own addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from kvferry.doctor.memory import Bytes, pattern
from kvferry.plan import Binder, Plan
from lab.bench.case import placed, size_of
from lab.bench.scatters import SCATTERS

NAMES = tuple(scatter.name for scatter in SCATTERS)
HERE = 1 << 20


@dataclass(frozen=True)
class Loaded:
    """`taken`: which bytes the load writes."""

    plan: Plan
    tiles: dict
    bytes: Bytes
    taken: Bytes


@cache
def loaded(name: str, tokens: int = 36) -> Loaded:
    scatter = next(scatter for scatter in SCATTERS if scatter.name == name)
    case = replace(scatter, layers=2).case(scatter.tokens or tokens)
    producers = [placed(m, (1 + rank) << 40) for rank, m in enumerate(case.producers)]
    plan = case.plan(producers, placed(case.consumers[0], HERE))
    binder = Binder(plan)
    found = np.zeros(size_of(case.consumers[0]), np.uint8)
    taken = np.zeros_like(found)
    for side, copies in zip(plan.sources, binder.bind(case.request).copies, strict=True):
        rank = side.identity.rank.ordinal
        source = pattern(rank, size_of(case.producers[rank]))
        columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
        for a, at, c, to, length in zip(*(column.tolist() for column in columns), strict=True):
            start = side.regions[a].address + at - ((1 + rank) << 40)
            stop = plan.consumer.regions[c].address + to - HERE
            found[stop : stop + length] = source[start : start + length]
            taken[stop : stop + length] = 1
    return Loaded(plan, dict(binder.tiles(case.request)), found, taken)
