"""Producers with a ring to send from, as a consumer sees them: each has a board of words, which is read into a note here.

Whoever waits for a word shares one look at the board. A note is kept until nothing can land in it. Where a producer's ring and
board can be mapped, which is found out by opening them, a look is a copy of the words, and the ring is copied from as it is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import TransportError
from kvferry.strategy.mapped import Mapped, PeerGoneError
from kvferry.strategy.staging import (
    Boards,
    Memory,
    Offer,
    Slots,
    Staging,
    Words,
    board_of,
    board_plan,
    noting,
    ring_of,
    ring_plan,
)
from kvferry.transport.contract import Prepared, Read, State, Transport

logger = logging.getLogger("kvferry.strategy")


@dataclass(eq=False)
class Source:
    """A producer with a ring: its board as it was last read, by the `seen`th of the `begun` reads of it. `berths`: where its
    ring is mapped, who may ask for a piece of it; as many as it has slots. `introduced`: plans by digest, and when. `refused`:
    plans by which it does not gather, and why."""

    peer: str
    offer: Offer
    note: int
    ring: Prepared
    board: Prepared
    words: Words
    berths: Slots | None = None
    begun: int = 0
    seen: int = 0
    looking: Read | None = None
    introduced: dict[bytes, float] = field(default_factory=dict)
    refused: dict[bytes, str] = field(default_factory=dict)
    dropped: bool = False


class Sources:
    """Boards read off `wire` into notes of `boards`; rings are read into the one of `staging`. `rings`: those that are mapped
    here; None: none is."""

    def __init__(self, wire: Transport, staging: Staging, boards: Boards, rings: Mapped | None = None) -> None:
        self._wire, self._staging, self._boards, self._rings = wire, staging, boards, rings
        self._looks: list[tuple[Read, int]] = []

    def meet(self, peer: str, offer: Offer, memory: Memory) -> Source:
        """Raises TransportError where a producer's ring cannot be read. It is mapped where it can be, and is of the `memory`
        that this end copies in."""
        berths = self._opened(peer, offer) if offer.memory == memory else None
        note: int | None = None
        try:
            note = self._boards.take_note()
            ring = self._wire.prepare(ring_plan(offer, self._staging), 0, peer)
            board = self._wire.prepare(board_plan(offer, self._boards.notes), 0, peer)
        except TransportError:
            if note is not None:
                self._boards.give_note(note)
            self._close(peer)
            raise
        return Source(peer, offer, note, ring, board, np.zeros(offer.slots, np.int64), berths)

    def _opened(self, peer: str, offer: Offer) -> Slots | None:
        """Raises PeerGoneError for a producer that has died: over the transport it cannot be read either."""
        if self._rings is None or not offer.tokens:
            return None
        try:
            self._rings.connect(peer, offer.tokens)
            for region in (ring_of(offer), board_of(offer)):
                self._rings.where(peer, region)
        except PeerGoneError:
            raise
        except TransportError as error:
            self._close(peer)
            logger.info("the ring of peer %s cannot be mapped (%s): it is read over the transport", peer, error)
            return None
        return Slots(offer.slots)

    def _close(self, peer: str) -> None:
        if self._rings is not None:
            self._rings.forget(peer)

    def leave(self, source: Source) -> None:
        """Nothing more is read of a producer; its note is kept until nothing can land in it."""
        source.dropped = True
        self._close(source.peer)
        if source.looking is None:
            self._boards.give_note(source.note)
        else:
            self._looks.append((source.looking, source.note))

    def look(self, source: Source, wanted: bool) -> bool:
        """Whether the board was seen anew; begins to read it if it is wanted and nobody does."""
        if self._rings is not None and source.berths is not None:
            if not wanted or source.dropped:
                return False
            board = board_of(source.offer)
            source.words = np.frombuffer(self._rings.peek(source.peer, board, 0, board.length), np.int64)
            source.begun += 1
            source.seen = source.begun
            return True
        if source.looking is None:
            if not wanted or source.dropped:
                return False
            source.begun += 1
            source.looking = self._wire.read(source.board, noting(source.note))
        state = self._wire.poll(source.looking)
        if state is State.RUNNING:
            return False
        if state is State.FAILED:
            raise TransportError(source.looking.error)
        if not self._wire.release(source.looking):
            return False
        source.looking = None
        source.words = self._boards.noted(source.note, source.offer.slots)
        source.seen = source.begun
        return True

    def tidy(self) -> None:
        """Take back notes that nothing can land in any more."""
        if self._looks:
            waiting, self._looks = self._looks, []
            for look, note in waiting:
                if self._wire.release(look):
                    self._boards.give_note(note)
                else:
                    self._looks.append((look, note))
