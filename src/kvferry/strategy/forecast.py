"""What a load would cost by each strategy over a path, before anybody is connected: from plans and the path's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.errors import TransportError
from kvferry.plan import Binder, Plan, Request, Tiles
from kvferry.plan.detour import packed, staged
from kvferry.strategy import cost
from kvferry.strategy.cost import Counter, Rates, Through, Way
from kvferry.strategy.landing import piece_bytes
from kvferry.strategy.staging import BUDGET, DEVICE_CUT, HOST_CUT, Cut, sized

MAPPED: Final = ("same GPU", "NVLink", "PCIe", "shared memory")
"""Paths inside one machine, where a producer's memory may be mapped, or its ring alone."""
USUAL: Final[Mapping[str, Rates]] = {
    **{path: cost.usual(path, cost.DEVICE, cost.DEVICE) for path in ("same GPU", "NVLink", "PCIe", "NIC")},
    **{path: cost.usual(path) for path in ("shared memory", "TCP")},
}
_PARTS: Final = 8


@dataclass(frozen=True)
class Forecast:
    """Seconds of the slowest decode rank by each strategy, and the one that is chosen."""

    path: str
    seconds: Mapping[Way, float]
    chosen: Way


def forecasts(
    plans: Sequence[Plan], request: Request, rates: Mapping[str, Rates] = USUAL, budget: int = BUDGET
) -> tuple[Forecast, ...]:
    """Through rings of half a budget, as ends have that send and land alike; through one of the whole it is rather faster."""
    loads = [(plan, Binder.of_sessions(plan).tiles(request)) for plan in plans]
    return tuple(_forecast(name, found, loads, budget) for name, found in rates.items())


def _forecast(name: str, rates: Rates, loads: Sequence[tuple[Plan, Mapping[tuple[int, int], Tiles]]], budget: int) -> Forecast:
    ranks = []
    for plan, tiles in loads:
        sources = [_costs(plan, source, tiles, rates, budget) for source in range(len(plan.sources))]
        ways = [way for way in cost.WAYS if all(way in found for found in sources)]
        ranks.append({way: sum(found[way] for found in sources) for way in ways})
    ways = [way for way in cost.WAYS if all(way in found for found in ranks)]
    seconds = {way: max(found[way] for found in ranks) for way in ways}
    return Forecast(name, seconds, cost.best(seconds))


def _costs(plan: Plan, source: int, tiles: Mapping[tuple[int, int], Tiles], rates: Rates, budget: int) -> dict[Way, float]:
    sizes = sized(budget, _cut(rates))
    load = Counter(plan, source).count(tiles)
    out: dict[Way, float] = {"direct": cost.direct_s(load, rates)}
    if rates.path in MAPPED:
        out["mapped"] = cost.mapped_s(load, rates)
    found = detours(plan, source, tiles, rates, budget)
    if found is not None:
        by_packing, by_covering = found
        piece = piece_bytes(by_packing.staged, sizes.slot, _cut(rates))
        out["packed"] = cost.packed_s(by_packing, rates, piece, sizes.landing, rates.path in MAPPED)
        out["staged"] = cost.staged_s(by_covering, rates, piece_bytes(by_covering.staged, sizes.slot, _cut(rates)))
    return out


def _cut(rates: Rates) -> Cut:
    return DEVICE_CUT if rates.scattering.beside else HOST_CUT


def detours(
    plan: Plan, source: int, tiles: Mapping[tuple[int, int], Tiles], rates: Rates = USUAL["NIC"], budget: int = BUDGET
) -> tuple[Through, Through] | None:
    """A load by way of staging, packed and staged; None where the plan cannot go that way."""
    sizes = sized(budget, _cut(rates))
    slot = sizes.slot
    gap = int(min(slot // _PARTS, rates.wire.descriptor_s / max(rates.wire.byte_s, 1e-15)))
    try:
        by_packing = packed(plan, source, slot, slot // _PARTS)
        by_covering = staged(plan, source, slot * sizes.landing, slot // _PARTS, gap)
    except TransportError:
        return None
    return cost.through(by_packing, tiles), cost.through(by_covering, tiles)
