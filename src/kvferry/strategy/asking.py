"""What a consumer says to producers with a ring: by which plan it will ask, what they are to gather, and what is free again."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final

import numpy as np
from msgspec import structs

from kvferry.errors import TransportError
from kvferry.plan.detour import tiles_there
from kvferry.strategy.flights import Detoured, DetouredRead, Flight, Stage
from kvferry.strategy.gathering import AGAIN, MOST, Ask, Asks, Free, Introduction, pack
from kvferry.strategy.sources import Source
from kvferry.transport.contract import State, Transport

logger = logging.getLogger("kvferry.strategy")

AGAIN_S: Final = 2.0
"""After so long without an answer a producer is told once more what to gather, and by which plan: it may have forgotten it."""
_REMINDERS: Final = (MOST - AGAIN) // AGAIN
"""So often a ticket can be asked for again; then there is a new one."""
_TRIES: Final = 4


class Asking:
    """Pieces that are to be asked for, and tickets that are free again, until producers are told of them. Reminders are spread
    over `timeout_s`, how long a read may wait."""

    def __init__(self, wire: Transport, clock: Callable[[], float], timeout_s: float) -> None:
        self._wire, self._clock = wire, clock
        self._later_s = max(AGAIN_S, timeout_s / _REMINDERS)
        self._unsaid: list[tuple[DetouredRead, Source, Ask]] = []
        self._freed: dict[Source, list[int]] = {}

    def introduce(self, detoured: Detoured) -> None:
        source = detoured.source
        if source is not None and detoured.digest not in source.introduced:
            self._wire.notify(source.peer, pack(Introduction(source.offer.secret, detoured.plan)))
            source.introduced[detoured.digest] = self._clock()

    def ask(self, read: DetouredRead, flight: Flight, source: Source) -> None:
        """With others, when they are said."""
        self._unsaid.append((read, source, self._ask(read, flight, source)))

    def _ask(self, read: DetouredRead, flight: Flight, source: Source) -> Ask:
        """What is to be said for a flight, by a ticket that nobody else has."""
        found = tiles_there(flight.piece, read.detoured.detour.parts, read.tiles)
        shares = [
            (share.part, share.block, _numbers(tiles.src_block), _numbers(tiles.src_tile) if tiles.src_tile.any() else b"")
            for share, tiles in zip(flight.piece.shares, found.values(), strict=True)
        ]
        flight.ticket = 1 + secrets.randbelow(AGAIN - 1)
        flight.ask = Ask(source.offer.secret, read.detoured.digest, flight.ticket, tuple(shares))
        flight.asked_at, flight.after = self._clock(), 0
        return flight.ask

    def say(self) -> Iterator[DetouredRead]:
        """What a producer is asked for by one plan, by one message. The reads that fail since it cannot be told, as they do."""
        unsaid, self._unsaid = self._unsaid, []
        several: dict[tuple[Source, bytes], list[tuple[DetouredRead, Ask]]] = {}
        for read, source, ask in (one for one in unsaid if one[0].state is State.RUNNING):
            several.setdefault((source, ask.plan), []).append((read, ask))
        for (source, plan), found in several.items():
            asks = [ask for _, ask in found]
            pieces = tuple((ask.ticket, ask.shares) for ask in asks)
            try:
                self._wire.notify(source.peer, pack(asks[0] if len(asks) == 1 else Asks(source.offer.secret, plan, pieces)))
            except TransportError as error:
                for read, _ in found:
                    read.fail(str(error))
                    yield read

    def remind(self, read: DetouredRead, flight: Flight, source: Source) -> None:
        """Ask once more for what has not been gathered for long: a look at the board that began then has not found it. Whoever
        looks rarely finds what is there before it asks for it under another word. A producer whose slots others hold hears so
        that this end still waits, for as long as the read may take."""
        now, patience_s = self._clock(), AGAIN_S if flight.ticket < AGAIN else self._later_s
        if flight.ask is None or now - flight.asked_at <= patience_s:
            return
        flight.after = flight.after or source.begun + 1
        if source.seen < flight.after:
            return
        if flight.ticket > MOST - AGAIN:
            self.freed(source, flight.ticket)
            ask = self._ask(read, flight, source)
        else:
            flight.asked_at, flight.ticket, flight.after = now, flight.ticket + AGAIN, 0
            ask = flight.ask = structs.replace(flight.ask, ticket=flight.ticket)
        if now - source.introduced.get(read.detoured.digest, -inf) > AGAIN_S:
            source.introduced.pop(read.detoured.digest, None)
            self.introduce(read.detoured)
        self._wire.notify(source.peer, pack(ask))

    def again(self, read: DetouredRead, flight: Flight, source: Source, reason: str) -> None:
        """Ask anew for what was gathered and lost."""
        if flight.tries >= _TRIES:
            read.fail(f"{reason}, {flight.tries} times; give the producer more staging_bytes")
            return
        flight.tries += 1
        flight.stage = Stage.ASKED
        self._wire.notify(source.peer, pack(self._ask(read, flight, source)))

    def freed(self, source: Source, ticket: int) -> None:
        """The producer is told with others, by `tell_freed`."""
        self._freed.setdefault(source, []).append(ticket)

    def tell_freed(self) -> None:
        """Best effort: what a producer is not told of, it takes back when its time is up."""
        if not self._freed:
            return
        freed, self._freed = self._freed, {}
        for source, tickets in freed.items():
            self._tell(source, tickets)

    def _tell(self, source: Source, tickets: Sequence[int]) -> None:
        try:
            self.free(source, tickets)
        except TransportError as error:
            logger.debug("peer %s is not told what is free: %s", source.peer, error)

    def free(self, source: Source, tickets: Sequence[int]) -> None:
        self._wire.notify(source.peer, pack(Free(source.offer.secret, tuple(tickets))))

    def leave(self, source: Source) -> None:
        """It is not told what is free any more."""
        self._freed.pop(source, None)


def _numbers(column: np.ndarray) -> bytes:
    return column.astype(np.int32, copy=False).tobytes()
