"""One consumer rank's loads, on a thread of their own: read, check the lease's words, and only then say that it is done.

    fetching ──> checking ──> loaded
        └────────────┴──> letting go ──> failed

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

from kvferry.errors import BadReferenceError, KVFerryError, TransportError
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


@dataclass
class _Peer:
    """A producer as this rank reads it; `data` and `words` are by source of the plan, empty until it is connected."""

    meeting: Meeting
    binder: Binder
    names: list[str] = field(default_factory=list)
    data: list[Prepared] = field(default_factory=list)
    words: list[tuple[Binder, Prepared]] = field(default_factory=list)
    told: bool = False


@dataclass(eq=False)
class _Crossing:
    load: Load
    peer: _Peer
    loading: Loading
    started: float
    reads: list[Read] = field(default_factory=list)
    landings: list[int] = field(default_factory=list)
    seen: list[Telemetry] = field(default_factory=list)
    checking: bool = False
    error: str = ""


class Ferry:
    """`rank` is this rank's ordinal; `fill` zeroes destination runs of this rank's regions before anybody may read them."""

    def __init__(self, transport: Transport, words: Words, rank: int, fill: Callable[[Fills], None]) -> None:
        self._transport, self._words, self._rank, self._fill = transport, words, rank, fill
        self._commands: deque[Meeting | Load] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._peers: dict[PeerKey, _Peer] = {}
        self._crossings: list[_Crossing] = []
        self._landings = deque(range(words.slots))
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-ferry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def meet(self, meeting: Meeting) -> None:
        self._hand_in(meeting)

    def load(self, load: Load) -> None:
        self._hand_in(load)

    def _hand_in(self, command: Meeting | Load) -> None:
        self._commands.append(command)
        self._wake.set()

    def outcomes(self) -> list[Outcome]:
        out = []
        while self._outcomes:
            out.append(self._outcomes.popleft())
        return out

    def close(self) -> None:
        """End the thread and the transport; loads under way are never reported."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception:
                logger.exception("the ferry stumbled; it goes on")
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
            if isinstance(command, Meeting):
                self._peers[command.peer] = _Peer(command, Binder(command.plans[self._rank]))
            else:
                self._guarded(command, lambda load=command: self._embark(load))  # type: ignore[misc]
        for crossing in tuple(self._crossings):
            self._guarded(crossing, lambda c=crossing: self._advance(c))  # type: ignore[misc]
        self._transport.notifications()

    def _guarded(self, what: Load | _Crossing, action: Callable[[], None]) -> None:
        try:
            action()
        except KVFerryError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("a load failed unexpectedly")
            reason = f"{type(error).__name__}: {error}"
        else:
            return
        if isinstance(what, _Crossing):
            what.error = what.error or reason
            return
        crossing = next((c for c in self._crossings if c.load is what), None)
        if crossing is not None:
            crossing.error = crossing.error or reason
        else:
            self._outcomes.append(Outcome(what.request, reason))

    def _embark(self, load: Load) -> None:
        peer = self._peers.get(load.peer)
        if peer is None:
            raise BadReferenceError(f"{load.peer} was never met")
        loading = peer.binder.load(Request(load.tokens, load.src, load.dst, load.start))
        crossing = _Crossing(load, peer, loading, time.monotonic())
        self._crossings.append(crossing)
        self._connect(peer)
        self._fill(loading.fills)
        for prepared in peer.data:
            crossing.reads.append(self._transport.read(prepared, loading.tiles))

    def _connect(self, peer: _Peer) -> None:
        """All sources or none: a peer that is connected in part would be read in part."""
        if peer.names:
            return
        plan = peer.binder.plan
        cards = {card.caches.identity: card for card in peer.meeting.cards}
        names: list[str] = []
        data, words = [], []
        try:
            for index, source in enumerate(plan.sources):
                card = cards[source.identity]
                names.append(self._transport.connect(card.transport))
                word_plan = self._words.plan(card.words)
                data.append(self._transport.prepare(plan, index, names[-1]))
                words.append((Binder(word_plan), self._transport.prepare(word_plan, 0, names[-1])))
        except BaseException:
            for name in names:
                self._transport.forget(name)
            raise
        peer.names, peer.data, peer.words = names, data, words

    def _advance(self, crossing: _Crossing) -> None:
        if crossing.error:
            self._let_go(crossing)
            return
        states = [self._transport.poll(read) for read in crossing.reads]
        if State.FAILED in states:
            failed = next(r for r, state in zip(crossing.reads, states, strict=True) if state is State.FAILED)
            crossing.error = failed.error
            self._lose(crossing.peer)
            self._let_go(crossing)
            if crossing in self._crossings:
                logger.error(
                    "request %s: %s. It waits until nothing can land in its blocks any more: until %s goes on or dies",
                    crossing.load.request,
                    crossing.error,
                    crossing.load.peer,
                )
            return
        if State.RUNNING in states:
            return
        if not crossing.checking:
            crossing.seen += [self._transport.telemetry(read) for read in crossing.reads]
        for read in crossing.reads:
            self._transport.release(read)
        crossing.reads = []
        if not crossing.checking:
            self._check(crossing)
        else:
            self._disembark(crossing)

    def _check(self, crossing: _Crossing) -> None:
        """All data has been seen to arrive: now the words are read, which say whether it was still the lease's."""
        crossing.checking = True
        lease = crossing.load.lease
        for binder, prepared in crossing.peer.words:
            if not self._landings:
                raise TransportError("no landing place for a generation word is free")
            landing = self._landings.popleft()
            crossing.landings.append(landing)
            self._words.wipe(landing)
            asked = Request(1, {0: lease.slot}, {0: self._words.landing(landing)})
            crossing.reads.append(self._transport.read(prepared, binder.tiles(asked)))

    def _disembark(self, crossing: _Crossing) -> None:
        load, seen = crossing.load, crossing.seen
        found = [self._words.landed(landing) for landing in crossing.landings]
        if any(word != load.lease.generation for word in found):
            crossing.error = f"{load.peer} has given the blocks of the reference away: it came too late, or for a second time"
            return
        self._free(crossing)
        self._tell(crossing.peer)
        tables = {group: table for group, table in load.dst.items() if isinstance(table, list)}
        self._outcomes.append(
            Outcome(
                load.request,
                tokens=load.tokens - load.start,
                predicted=crossing.loading.bytes,
                moved=sum(t.bytes for t in seen),
                runs=sum(t.runs for t in seen),
                posting_s=sum(t.posting_s for t in seen),
                wire_s=max((t.wire_s for t in seen), default=0.0),
                total_s=time.monotonic() - crossing.started,
                unhashable={g: tuple(tables[g][i] for i in at.tolist()) for g, at in crossing.loading.unhashable.items()},
            )
        )

    def _let_go(self, crossing: _Crossing) -> None:
        crossing.reads = [read for read in crossing.reads if not self._transport.release(read)]
        if not crossing.reads:
            self._free(crossing)
            self._outcomes.append(Outcome(crossing.load.request, crossing.error, total_s=time.monotonic() - crossing.started))

    def _free(self, crossing: _Crossing) -> None:
        self._landings.extend(crossing.landings)
        self._crossings.remove(crossing)

    def _lose(self, peer: _Peer) -> None:
        """A read failed: connect anew for the next load."""
        for name in peer.names:
            self._transport.forget(name)
        peer.names, peer.data, peer.words = [], [], []

    def _tell(self, peer: _Peer) -> None:
        if peer.told or self._rank or not peer.names:
            return
        peer.told = True
        path = self._transport.path(peer.names[0])
        remedy = f" ({path.remedy})" if path.slow and path.remedy else ""
        logger.info("%s; carried by %s%s", peer.meeting, path.name, remedy)
