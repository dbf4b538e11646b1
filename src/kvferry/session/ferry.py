"""One consumer rank's loads, on a thread of their own: read, check the lease's words, and only then say that it is done.

    waiting ──> fetching ──> checking ──> loaded
       └────────────┴────────────┴──> letting go ──> failed

Nothing is said of a load before its destination is safe: a read that failed may still land. The engine's thread hands in
meetings and loads and takes outcomes; only the ferry's thread touches the transport.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvferry.errors import BadReferenceError, KVFerryError, SessionError, TransportError, plain
from kvferry.plan import Binder, Fills, Loading, Request
from kvferry.session.consumer import PeerKey
from kvferry.session.meeting import Meeting
from kvferry.session.reference import Lease
from kvferry.session.words import Words
from kvferry.transport import Prepared, Read, State, Telemetry, Transport

logger = logging.getLogger("kvferry.session")

_BUSY_S: Final = 0.0002
_IDLE_S: Final = 0.002

Tables = Mapping[int, list[int] | int]


@dataclass(frozen=True)
class Load:
    """Bring a request's tokens [start, tokens) and its state from a producer's blocks into ours."""

    request: str
    peer: PeerKey
    lease: Lease
    tokens: int
    start: int
    src: Tables
    dst: Tables


@dataclass(frozen=True)
class Outcome:
    """How a load ended on this rank; `error` is empty where all arrived and the lease still stood. Then `predicted` is what
    the plan said would move and `moved` what the transport saw; `unhashable` are blocks, by group, that must not become
    findable by their hash."""

    request: str
    error: str = ""
    tokens: int = 0
    predicted: int = 0
    moved: int = 0
    runs: int = 0
    posting_s: float = 0.0
    wire_s: float = 0.0
    total_s: float = 0.0
    unhashable: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class _Link:
    """A connection to those ranks of a producer that this one reads: what reads their data and their words, by source of the
    plan. `lost` says why it is no longer used."""

    names: tuple[str, ...]
    data: tuple[Prepared, ...]
    words: tuple[tuple[Binder, Prepared], ...]
    lost: str = ""


@dataclass(eq=False)
class _Peer:
    """A producer as this rank reads it; without a link until the first load, and after one was lost."""

    meeting: Meeting
    binder: Binder
    link: _Link | None = None
    told: bool = False


@dataclass(eq=False)
class _Crossing:
    """A load under way; without a link until it may depart."""

    load: Load
    peer: _Peer
    loading: Loading
    started: float
    link: _Link | None = None
    reads: list[Read] = field(default_factory=list)
    landings: list[int] = field(default_factory=list)
    seen: list[Telemetry] = field(default_factory=list)
    checking: bool = False
    waits: bool = False
    error: str = ""


class Ferry:
    """`rank` is this rank's ordinal; `fill` zeroes destination runs of this rank's regions before anybody may read them.

    A load from a producer whose connection broke waits until nothing of that connection is under way, `patience_s` at most.
    """

    def __init__(
        self,
        transport: Transport,
        words: Words,
        rank: int,
        fill: Callable[[Fills], None],
        patience_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._words, self._rank, self._fill = transport, words, rank, fill
        self._patience_s, self._clock = patience_s, clock
        self._commands: deque[Meeting | Load | PeerKey] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._peers: dict[PeerKey, _Peer] = {}
        self._crossings: list[_Crossing] = []
        self._spent: list[Read] = []
        self._landings = deque(range(words.slots))
        self._stumbled = ""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-ferry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def meet(self, meeting: Meeting) -> None:
        self._hand_in(meeting)

    def load(self, load: Load) -> None:
        self._hand_in(load)

    def forget(self, peer: PeerKey) -> None:
        """Let go of a producer from which nothing more is to be loaded, unless it is met again."""
        self._hand_in(peer)

    def _hand_in(self, command: Meeting | Load | PeerKey) -> None:
        self._commands.append(command)
        self._wake.set()

    def outcomes(self) -> list[Outcome]:
        out = []
        while self._outcomes:
            out.append(self._outcomes.popleft())
        return out

    def close(self, limit_s: float = 10.0) -> None:
        """End the thread and the transport; loads under way are never reported. A thread that is held up in the transport keeps
        it: both end with the process."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.error(
                "rank %d: the transport has not returned in %g s; it is left to the process's end", self._rank, limit_s
            )
            return
        self._transport.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception as error:
                if str(error) != self._stumbled:
                    logger.exception("the ferry stumbled; it goes on")
                self._stumbled = str(error)
                time.sleep(_IDLE_S)
            if self._crossings:
                time.sleep(_BUSY_S)
            else:
                self._wake.wait(_IDLE_S)
                self._wake.clear()

    def step(self) -> None:
        """Take in what was handed in, and move every load on; also what a producer needs to be read from."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Load):
                self._embark(command)
            elif isinstance(command, Meeting):
                self._know(command)
            else:
                self._forget(command)
        for crossing in tuple(self._crossings):
            self._attempt(crossing, self._advance)
        self._sweep()
        self._transport.notifications()

    def _know(self, meeting: Meeting) -> None:
        """Cards do not change while a producer runs, so that a second meeting says nothing new."""
        if meeting.peer in self._peers:
            return
        try:
            self._peers[meeting.peer] = _Peer(meeting, Binder(meeting.plans[self._rank]))
        except Exception:
            logger.exception("nothing can be read from %s by rank %d", meeting.peer, self._rank)

    def _forget(self, key: PeerKey) -> None:
        peer = self._peers.get(key)
        if peer is not None and peer.link is not None:
            self._lose(peer.link, f"{key} was forgotten here")
        self._peers.pop(key, None)

    def _embark(self, load: Load) -> None:
        started = self._clock()
        try:
            peer = self._peers.get(load.peer)
            if peer is None:
                raise BadReferenceError(f"{load.peer} was never met")
            loading = peer.binder.load(Request(load.tokens, load.src, load.dst, load.start))
        except KVFerryError as error:
            self._outcomes.append(Outcome(load.request, str(error)))
        except Exception as error:
            logger.exception("a load failed unexpectedly")
            self._outcomes.append(Outcome(load.request, _described(error)))
        else:
            self._crossings.append(_Crossing(load, peer, loading, started))

    def _attempt(self, crossing: _Crossing, action: Callable[[_Crossing], None]) -> None:
        """Whatever goes wrong fails this load, and no other unless the connection is lost."""
        try:
            action(crossing)
        except TransportError as error:
            self._break_off(crossing, str(error))
        except KVFerryError as error:
            crossing.error = crossing.error or str(error)
        except Exception as error:
            if not crossing.error:
                logger.exception("a load failed unexpectedly")
            crossing.error = crossing.error or _described(error)

    def _break_off(self, crossing: _Crossing, reason: str) -> None:
        link = crossing.link
        lost = (link.lost if link is not None else "") or reason
        peer = crossing.load.peer
        gone = f"{peer} since its start {plain(peer.incarnation)} is gone or out of reach: {lost}"
        crossing.error = crossing.error or gone
        if link is not None:
            self._lose(link, reason)

    def _advance(self, crossing: _Crossing) -> None:
        if crossing.error:
            self._let_go(crossing)
            return
        if crossing.link is None:
            self._depart(crossing)
            return
        states = [self._transport.poll(read) for read in crossing.reads]
        if State.FAILED in states:
            self._break_off(crossing, crossing.reads[states.index(State.FAILED)].error)
            return
        if State.RUNNING in states:
            return
        if not crossing.checking:
            crossing.seen = [self._transport.telemetry(read) for read in crossing.reads]
        self._spent += crossing.reads
        crossing.reads = []
        self._sweep()
        if not crossing.checking:
            self._check(crossing, crossing.link)
        else:
            self._disembark(crossing, crossing.link)

    def _depart(self, crossing: _Crossing) -> None:
        """Post the reads, over a new connection if need be, once no read of a broken one can still land."""
        peer, key = crossing.peer, crossing.load.peer
        if peer.link is None:
            broken = (c for c in self._crossings if c.link is not None and c.link.lost)
            if any(c.reads and _one_start(c.load.peer, key) for c in broken):
                if self._clock() - crossing.started >= self._patience_s:
                    raise TransportError(
                        f"{key}: its connection broke, and reads over it have not ended in {self._patience_s:g} s; "
                        f"is it stopped or overloaded?"
                    )
                return
            peer.link = self._connect(peer)
        crossing.link = peer.link
        self._fill(crossing.loading.fills)
        for prepared in peer.link.data:
            crossing.reads.append(self._transport.read(prepared, crossing.loading.tiles))

    def _connect(self, peer: _Peer) -> _Link:
        """To all ranks that are read, or to none."""
        plan = peer.binder.plan
        cards = {card.caches.identity: card for card in peer.meeting.cards}
        names: list[str] = []
        data: list[Prepared] = []
        words: list[tuple[Binder, Prepared]] = []
        try:
            for index, source in enumerate(plan.sources):
                card = cards[source.identity]
                names.append(self._transport.connect(card.transport))
                word_plan = self._words.plan(card.words)
                data.append(self._transport.prepare(plan, index, names[-1]))
                words.append((Binder(word_plan), self._transport.prepare(word_plan, 0, names[-1])))
        except Exception:
            self._drop(set(names) - {name for other in self._peers.values() if other.link for name in other.link.names})
            raise
        return _Link(tuple(names), tuple(data), tuple(words))

    def _check(self, crossing: _Crossing, link: _Link) -> None:
        """All data has been seen to arrive: now the words are read, which say whether it was still the lease's."""
        crossing.checking = True
        lease = crossing.load.lease
        for binder, prepared in link.words:
            if not self._landings:
                raise SessionError("no landing place for a generation word is free: too many loads at a time")
            landing = self._landings.popleft()
            crossing.landings.append(landing)
            self._words.wipe(landing)
            asked = Request(1, {0: lease.slot}, {0: landing})
            crossing.reads.append(self._transport.read(prepared, binder.tiles(asked)))

    def _disembark(self, crossing: _Crossing, link: _Link) -> None:
        load, seen = crossing.load, crossing.seen
        found = [self._words.landed(landing) for landing in crossing.landings]
        if found != [load.lease.generation] * len(crossing.peer.binder.plan.sources):
            crossing.error = f"{load.peer} has given the blocks of the reference away: it came too late, or for a second time"
            return
        moved, predicted = sum(t.bytes for t in seen), crossing.loading.bytes
        if moved != predicted:
            crossing.error = (
                f"{load.peer}: {moved} bytes were moved, the plan says {predicted}; report this with both manifests"
            )
            return
        tables = {group: table for group, table in load.dst.items() if isinstance(table, list)}
        self._end(
            crossing,
            Outcome(
                load.request,
                tokens=load.tokens - load.start,
                predicted=predicted,
                moved=moved,
                runs=sum(t.runs for t in seen),
                posting_s=sum(t.posting_s for t in seen),
                wire_s=max((t.wire_s for t in seen), default=0.0),
                total_s=self._clock() - crossing.started,
                unhashable={g: tuple(tables[g][i] for i in at.tolist()) for g, at in crossing.loading.unhashable.items()},
            ),
        )
        self._tell(crossing.peer, link)

    def _let_go(self, crossing: _Crossing) -> None:
        crossing.reads = [read for read in crossing.reads if not self._transport.release(read)]
        if not crossing.reads:
            self._end(crossing, Outcome(crossing.load.request, crossing.error, total_s=self._clock() - crossing.started))
        elif not crossing.waits:
            crossing.waits = True
            waits = "it waits until nothing can land in its blocks any more, until the producer goes on or dies"
            logger.error("request %s: %s; %s", crossing.load.request, crossing.error, waits)

    def _end(self, crossing: _Crossing, outcome: Outcome) -> None:
        self._landings.extend(crossing.landings)
        self._crossings.remove(crossing)
        self._outcomes.append(outcome)

    def _sweep(self) -> None:
        """Give back reads that are done; the transport may need to be asked more than once."""
        self._spent = [read for read in self._spent if not self._transport.release(read)]

    def _lose(self, link: _Link, reason: str) -> None:
        """Connect anew for the next load. Other loads over the connection fail too, and are let go one by one."""
        if link.lost:
            return
        names = set(link.names)
        for peer in self._peers.values():
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

    def _tell(self, peer: _Peer, link: _Link) -> None:
        if peer.told or self._rank or not link.names:
            return
        peer.told = True
        try:
            path = self._transport.path(link.names[0])
        except TransportError as error:
            logger.debug("%s: how it is read is not known: %s", peer.meeting.peer, error)
            return
        remedy = f" ({path.remedy})" if path.slow and path.remedy else ""
        logger.info("%s; carried by %s%s", peer.meeting, path.name, remedy)


def _one_start(one: PeerKey, other: PeerKey) -> bool:
    """Whether both are the same engine since the same start, by whichever address."""
    return (one.engine, one.incarnation) == (other.engine, other.incarnation)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
