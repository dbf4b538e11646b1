"""The producers that one consumer rank reads, and its links to them: met, warmed up, lost, connected to anew, forgotten.

A producer is connected to, and one of its words read, when it is met: the first load then finds what later ones find. A link
that was lost is never used again; the next load has a new one, once nothing of the old one is under way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from kvferry.errors import KVFerryError, TransportError
from kvferry.plan import Binder, Request, Tiles
from kvferry.session.consumer import PeerKey
from kvferry.session.crossing import Crossing, Link, Peer, Warming, is_one_start
from kvferry.session.meeting import Meeting
from kvferry.session.words import Words, tiles_of_words
from kvferry.transport import Prepared, State, Transport

logger = logging.getLogger("kvferry.session")

_WARMING: Final = 1024
"""How often a word is read to warm a connection up: as often as it takes for a transport that posts from several threads, each
with connections of its own, to use them all."""


class Links:
    """`rank` is this rank's ordinal; `landings` are its free places for words, of which each read that warms up holds one.

    Whoever calls it has the ferry's turn, but for `mapped`, which the engine's thread asks without it. `crossings` are all
    loads under way: what they still read over a link that was lost is waited for.
    """

    def __init__(self, transport: Transport, words: Words, rank: int, landings: deque[int]) -> None:
        self._transport, self._words, self._rank, self._landings = transport, words, rank, landings
        self.peers: dict[PeerKey, Peer] = {}
        self.warming: list[Warming] = []

    def know(self, meeting: Meeting, crossings: Sequence[Crossing]) -> None:
        """Cards do not change while a producer runs, so that a second meeting says nothing new."""
        if meeting.peer in self.peers:
            return
        try:
            peer = self.peers[meeting.peer] = Peer(meeting, Binder.of_sessions(meeting.plans[self._rank]).ready())
        except Exception:
            logger.exception("nothing can be read from %s by rank %d", meeting.peer, self._rank)
            return
        if self.lingers(meeting.peer, crossings):
            return
        try:
            self._warm_up(peer)
        except KVFerryError as error:
            logger.info("%s cannot be read from yet; the first load tries again: %s", meeting.peer, error)
        except Exception:
            logger.exception("%s cannot be read from yet; the first load tries again", meeting.peer)
        else:
            return
        if peer.link is not None:
            self.lose(peer.link, f"{meeting.peer} could not be read from when it was met")

    def forget(self, key: PeerKey) -> None:
        """A connection that another start, or the same one by another address, is read over is kept."""
        peer = self.peers.pop(key, None)
        if peer is None or peer.link is None:
            return
        if not any(other.link is not None and set(other.link.names) & set(peer.link.names) for other in self.peers.values()):
            self.lose(peer.link, f"{key} was forgotten here")
            peer.link = None

    def mapped(self, key: PeerKey) -> Peer | None:
        """A producer that any thread may read from."""
        peer = self.peers.get(key)
        link = peer.link if peer is not None else None
        return peer if link is not None and link.anywhere else None

    def lingers(self, key: PeerKey, crossings: Sequence[Crossing]) -> bool:
        """Whether something of a broken connection to the same start of a producer is still under way."""
        broken = (c.load.peer for c in crossings if c.link is not None and c.link.lost and c.reads)
        cold = (warming.peer for warming in self.warming if warming.link.lost)
        return any(is_one_start(peer, key) for peer in (*broken, *cold))

    def connect(self, peer: Peer) -> Link:
        """To all ranks that are read, or to none."""
        plan = peer.binder.plan
        cards = {card.caches.identity: card for card in peer.meeting.cards}
        names: list[str] = []
        data: list[Prepared] = []
        words: list[tuple[Mapping[tuple[int, int], Tiles], Prepared]] = []
        try:
            for index, source in enumerate(plan.sources):
                card = cards[source.identity]
                names.append(self._transport.connect(card.transport))
                word_plan = self._words.plan(card.words)
                data.append(self._transport.prepare(plan, index, names[-1]))
                first = Binder(word_plan).tiles(Request(1, {0: 0}, {0: 0}))
                words.append((first, self._transport.prepare(word_plan, 0, names[-1])))
        except Exception:
            self._drop(set(names) - {name for other in self.peers.values() if other.link for name in other.link.names})
            raise
        anywhere = all(prepared.anywhere for prepared in (*data, *(prepared for _, prepared in words)))
        return Link(tuple(names), tuple(data), tuple(words), anywhere)

    def _warm_up(self, peer: Peer) -> None:
        """Connect, and read words that are of no interest over connections that nobody has used."""
        used = {name for other in self.peers.values() if other.link is not None for name in other.link.names}
        link = peer.link = self.connect(peer)
        for name, (first, prepared) in zip(link.names, link.words, strict=True):
            if name in used or not self._landings:
                continue
            landing = self._landings.popleft()
            try:
                often = tiles_of_words(first, [0] * _WARMING, [landing] * _WARMING)
                self.warming.append(Warming(peer.meeting.peer, link, self._transport.read(prepared, often), landing))
            except Exception:
                self._landings.append(landing)
                raise

    def look_after(self, crossings: Sequence[Crossing]) -> None:
        """Let go of reads that have warmed up, and of connections that they found broken."""
        if self.warming:
            self.warming = [warming for warming in self.warming if not self._warmed(warming, crossings)]

    def _warmed(self, warming: Warming, crossings: Sequence[Crossing]) -> bool:
        """Whether nothing is left of it. A connection that does not come about is given up, unless loads will find out."""
        try:
            if self._transport.poll(warming.read) is State.RUNNING:
                return False
            if warming.read.error and not any(crossing.link is warming.link for crossing in crossings):
                self.lose(warming.link, warming.read.error)
            if not self._transport.release(warming.read):
                return False
        except Exception:
            logger.debug("%s: a read that warmed its connection up is still held", warming.peer, exc_info=True)
            return False
        peer = self.peers.get(warming.peer)
        if peer is not None and peer.link is warming.link and warming.link.anywhere:
            self.tell(peer, warming.link)
        self._landings.append(warming.landing)
        return True

    def lose(self, link: Link, reason: str) -> None:
        """Connect anew for the next load. Other loads over the connection fail too, and are let go one by one."""
        if link.lost:
            return
        names = set(link.names)
        for peer in self.peers.values():
            if peer.link is not None and names & set(peer.link.names):
                names |= set(peer.link.names)
                peer.link.lost = reason
                peer.link = None
        link.lost = reason
        self._drop(names)

    def _drop(self, names: set[str]) -> None:
        for name in sorted(names):
            self._drop_one(name)

    def _drop_one(self, name: str) -> None:
        try:
            self._transport.forget(name)
        except Exception:
            logger.exception("%s cannot be forgotten", name)

    def tell(self, peer: Peer, link: Link) -> None:
        if peer.told or self._rank or not link.names:
            return
        peer.told = True
        try:
            path = self._transport.path(link.names[0])
        except TransportError as error:
            logger.debug("%s: how it is read is not known: %s", peer.meeting.peer, error)
            return
        remedy = f" ({path.remedy})" if path.slow and path.remedy else ""
        logger.info("%s: reads are carried by %s%s", peer.meeting.peer, path.name, remedy)
