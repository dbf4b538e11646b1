"""The ways that a plan was prepared to go from one peer, and which of them a load takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.plan import Tiles
from kvferry.strategy import cost
from kvferry.strategy.cost import Counter, Counts, Rates, Way
from kvferry.strategy.flights import Detoured
from kvferry.strategy.landing import Landing, piece_bytes
from kvferry.strategy.staging import Offer
from kvferry.transport.contract import Prepared


@dataclass(eq=False)
class Connection:
    """A peer from when it was connected until it is forgotten; `gone`: because it has died."""

    digest: bytes
    offer: Offer | None
    gone: bool = False


@dataclass(frozen=True, eq=False)
class ScatteredPrepared:
    """The ways that a plan can go; `direct` is None where the transport cannot prepare it."""

    peer: str
    rows: int
    direct: Prepared | None
    detours: Mapping[Way, Detoured]
    counter: Counter
    rates: Rates
    landing: Landing
    connection: Connection
    anywhere: bool = False

    def costs(self, tiles: Mapping[tuple[int, int], Tiles]) -> dict[Way, float]:
        """Seconds that the load would take by each way."""
        return self._by_descriptors(tiles, self.counter.count) | self._through_staging(tiles)

    def way(self, tiles: Mapping[tuple[int, int], Tiles]) -> Way:
        """The best by those costs. Whether descriptors are is asked of some tiles first where there are many, since to count
        their runs takes longest."""
        if not self.detours or (self.direct is None and self.refused):
            return "direct"
        staged = self._through_staging(tiles)
        if sum(len(found.src_block) for found in tiles.values()) > cost.SOME:
            way = cost.best(self._by_descriptors(tiles, self.counter.least) | staged)
            if way != "direct":
                return way
        return cost.best(self._by_descriptors(tiles, self.counter.count) | staged)

    @property
    def refused(self) -> str:
        """Why there is no way through staging: the producer refuses to gather, and it was to."""
        reasons = [
            found.source.refused.get(found.digest, "") if found.source is not None else "" for found in self.detours.values()
        ]
        return "; ".join(reasons) if all(reasons) else ""

    def _by_descriptors(
        self, tiles: Mapping[tuple[int, int], Tiles], count: Callable[[Mapping[tuple[int, int], Tiles]], Counts]
    ) -> dict[Way, float]:
        return {"direct": cost.direct_s(count(tiles), self.rates)} if self.direct is not None else {}

    def _through_staging(self, tiles: Mapping[tuple[int, int], Tiles]) -> dict[Way, float]:
        """Nothing goes by way of slots to land in while nobody may land there, unless there is no other way."""
        out: dict[Way, float] = {}
        slot, cut = self.landing.staging.slot, self.landing.staging.cut
        closed = self.direct is not None and self.landing.is_stuck
        for way, found in self.detours.items():
            if found.source is not None and found.digest in found.source.refused:
                continue
            if closed and (found.source is None or found.source.berths is None):
                continue
            load = cost.through(found.detour, tiles)
            if found.source is not None:
                piece = piece_bytes(load.staged, self.landing.room(found.source), cut)
                slots = self.landing.berths(found.source)
                out[way] = cost.packed_s(load, self.rates, piece, slots, found.mapped is not None)
            else:
                out[way] = cost.staged_s(load, self.rates, piece_bytes(load.staged, slot, cut))
        return out
