"""Producers with a ring to send from, as a consumer sees them: each has a board of words, which is read into a note here.

Whoever waits for a word shares one look at the board. A note is kept until nothing can land in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import TransportError
from kvferry.strategy.staging import Boards, Offer, Staging, Words, board_plan, noting, ring_plan
from kvferry.transport.contract import Prepared, Read, State, Transport


@dataclass(eq=False)
class Source:
    """A producer with a ring: its board as it was last read, by the `seen`th of the `begun` reads of it."""

    peer: str
    offer: Offer
    note: int
    ring: Prepared
    board: Prepared
    words: Words
    begun: int = 0
    seen: int = 0
    looking: Read | None = None
    introduced: set[bytes] = field(default_factory=set)
    dropped: bool = False


class Sources:
    """Boards read off `wire` into notes of `boards`; rings are read into the one of `staging`."""

    def __init__(self, wire: Transport, staging: Staging, boards: Boards) -> None:
        self._wire, self._staging, self._boards = wire, staging, boards
        self._looks: list[tuple[Read, int]] = []

    def meet(self, peer: str, offer: Offer) -> Source:
        note = self._boards.take_note()
        try:
            ring = self._wire.prepare(ring_plan(offer, self._staging), 0, peer)
            board = self._wire.prepare(board_plan(offer, self._boards.notes), 0, peer)
        except TransportError:
            self._boards.give_note(note)
            raise
        return Source(peer, offer, note, ring, board, np.zeros(offer.slots, np.int64))

    def leave(self, source: Source) -> None:
        """Nothing more is read of a producer; its note is kept until nothing can land in it."""
        source.dropped = True
        if source.looking is None:
            self._boards.give_note(source.note)
        else:
            self._looks.append((source.looking, source.note))

    def look(self, source: Source, wanted: bool) -> bool:
        """Whether the board was seen anew; begins to read it if it is wanted and nobody does."""
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
