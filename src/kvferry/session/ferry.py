"""One consumer rank's loads, on a thread of their own: read, check the lease's words, and only then say that it is done.

    waiting ──> fetching ──> checking ──> loaded
       └────────────┴────────────┴──> letting go ──> failed

Nothing is said of a load before its destination is safe: a read that failed may still land, and a fill that was begun may not
have ended. The engine's thread hands in meetings and loads and takes outcomes; the transport is touched in turns.

The thread sleeps as long as it can: it shares an interpreter with the engine. Where reads may be made from any thread, the
engine's own begins a load when it is handed in and looks after it when outcomes are asked for, if the ferry's thread is not at
it: a copy that takes less than a millisecond would otherwise wait longer for the interpreter than for its bytes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvferry.errors import BadReferenceError, KVFerryError, SessionError, TransportError, plain
from kvferry.plan import Fills, Request
from kvferry.plan.explain import costs
from kvferry.session.bell import Bell
from kvferry.session.consumer import PeerKey
from kvferry.session.crossing import Crossing, Filled, Link, Load, Outcome, Tables, is_lent
from kvferry.session.fills import joined
from kvferry.session.links import Links
from kvferry.session.meeting import Meeting
from kvferry.session.reference import Lease
from kvferry.session.words import Words, tiles_of_words
from kvferry.strided import Ints
from kvferry.transport import Read, State, Transport
from kvferry.transport.contract import read_together

logger = logging.getLogger("kvferry.session")

_BUSY_S: Final = 0.0005
"""Between two looks at loads that have just moved on: a tenth of a decode step, and less than a short load takes."""
_LONGEST_S: Final = 0.002
"""Between two looks at loads that take long: a small part of what they take already."""
_PATIENCE: Final = 4
"""A load is looked at again after this part of the time in which nothing was seen of it."""
_READ_S: Final = 0.0015
"""Between two calls that let others read from this rank, where no thread of the transport's does that: emulated paths move
some megabytes at each, and connections take some calls to come about."""
_HURRIED_S: Final = 0.0003
"""Between two such calls while others wait for what this rank gathers for them, or have just fetched it."""
_LENT_S: Final = 0.005
"""Between two looks at loads that the engine's own thread looks after."""
_AT_LEAST: Final = 400e9
"""Bytes a second."""
_TOGETHER: Final = 2 << 30
"""Bytes of loads that are copied together where no step waits for all of them: a millisecond or two on a device."""
_SETTLING_S: Final = 0.00005
"""Between two looks at loads that a step waits for."""
_FILLED: Final = 500
"""Runs of several loads that are filled together: NumPy lets go of Python's lock for more."""
_IDLE_S: Final = 0.05
"""Between two looks at nothing: for consumers that connect before anything is prefilled for them, who can wait."""


class Ferry:
    """`rank` is this rank's ordinal. `fill` begins to zero destination runs of this rank's regions, and returns what says
    whether that is done, or None if it is already; it is only called where there is something to fill.

    A load from a producer whose connection broke waits until nothing of that connection is under way, `patience_s` at most.
    `tended` is a transport that lets others read from this rank only while it is called, and `hurried` says when they wait for
    that: what they ask this rank to gather is begun, and seen to be complete, on this thread, in its calls of the transport.
    """

    def __init__(
        self,
        transport: Transport,
        words: Words,
        rank: int,
        fill: Callable[[Fills], Filled | None],
        patience_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        tended: bool = True,
        hurried: Callable[[], bool] = bool,
    ) -> None:
        self._transport, self._words, self._rank, self._fill = transport, words, rank, fill
        self._patience_s, self._clock, self._tended, self._hurried = patience_s, clock, tended, hurried
        self._commands: deque[Meeting | Load | PeerKey] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._crossings: list[Crossing] = []
        self._spent: list[Read] = []
        self._moved_at = self._heard_at = self._pledged = -math.inf
        self._landings = deque(range(words.slots))
        self._links = Links(transport, words, rank, self._landings)
        self._stumbled = ""
        self._wake = Bell()
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-ferry", daemon=True)
        words.watch(self._wake.set)

    def start(self) -> None:
        self._thread.start()

    def meet(self, meeting: Meeting) -> None:
        self._hand_in(meeting)

    def load(self, *loads: Load) -> None:
        hurried = [load for load in loads if load.in_step]
        self._pledge_until(max((load.pledged for load in hurried), default=-math.inf))
        if hurried:
            self._load_in_step(hurried)
        for load in self._begun([load for load in loads if not load.in_step]):
            self._hand_in(load)

    def pledge(self, key: PeerKey, lease: Lease, tokens: int, src: Tables) -> float | None:
        """Until when the blocks of a lease will be as they are, whatever becomes of it or of its producer. A load in the next
        step that is made until then cannot fail: its producer's memory is mapped, and nothing is let go of before that step's
        loads are settled. None where nothing can be pledged."""
        with self._turn:
            if not self._keeps_all:
                self._take_in()
            peer = self._links.mapped(key)
            if peer is None or peer.link is None or not peer.meeting.grace_s or not 0 <= lease.slot < peer.slots:
                return None
            until = self._clock() + peer.meeting.grace_s
            try:
                peer.binder.insist_on_source(tokens, src)
                if not self._links.stands(peer.link, lease):
                    return None
            except KVFerryError as error:
                logger.debug("nothing is pledged of %s: %s", key, error)
                return None
            except Exception:
                logger.exception("nothing is pledged of %s", key)
                return None
            self._pledged = max(self._pledged, until)
            return until

    @property
    def _keeps_all(self) -> bool:
        """Whether loads are pledged: nothing is let go of until they are settled."""
        return self._clock() < self._pledged

    def _pledge_until(self, until: float) -> None:
        """What was handed in meanwhile has waited."""
        self._pledged = until
        if self._commands:
            self._wake.set()

    def _load_in_step(self, loads: Sequence[Load]) -> None:
        """What is not begun here and now fails: the step does not wait for a connection, nor for a read that may never end."""
        with self._turn:
            if not self._keeps_all:
                self._take_in()
            self._depart_together([crossing for load in loads if (crossing := self._embark(load)) is not None])

    def _depart_together(self, crossings: Sequence[Crossing]) -> None:
        """Out of mapped memory, by one launch for all loads from a producer, none of which is over before all are."""
        ready: dict[Link, list[Crossing]] = {}
        for crossing in crossings:
            link = crossing.peer.link
            if link is None or not link.anywhere:
                crossing.error = f"{crossing.load.peer} is no longer read out of mapped memory"
            else:
                ready.setdefault(link, []).append(crossing)
        for link, found in ready.items():
            self._attempt_all(found, link, self._post)
        self._check_together(crossings)
        for crossing in crossings:
            self._attempt(crossing, self._advance)

    def pace(self, key: PeerKey) -> float | None:
        """Seconds a token at a pace that any device's memory has, of a producer that any thread may read from."""
        peer = self._links.mapped(key)
        return None if peer is None else sum(cost.bytes_per_token for cost in costs(peer.binder.plan)) / _AT_LEAST

    def linger(self, limit_s: float) -> None:
        """Wait until the loads that were begun on the engine's own thread are over, and no longer than this."""
        deadline = self._clock() + limit_s
        while self._lent_move_on() and self._clock() < deadline:
            time.sleep(_SETTLING_S)

    def settle(self, requests: Collection[str], limit_s: float) -> None:
        """Wait until the loads of these requests, which were made in a step, are over. Raises SessionError if they are not in
        such a time: whatever copies them is stuck."""
        deadline = self._clock() + limit_s
        while True:
            with self._turn:
                waited_for = [crossing for crossing in self._crossings if crossing.load.request in requests]
                self._check_together(waited_for)
                for crossing in waited_for:
                    self._attempt(crossing, self._advance)
            if not waited_for:
                self._pledge_until(-math.inf)
                return
            if self._clock() > deadline:
                said = ", ".join(plain(crossing.load.request) for crossing in waited_for[:3])
                raise SessionError(f"copies of {said} have not ended in {limit_s:g} s, and a step waits for them")
            time.sleep(_SETTLING_S)

    def _check_together(self, crossings: Sequence[Crossing]) -> None:
        """Begin to check those whose data has arrived, by one read for all from a producer that any thread may read; as many as
        there are landing places for."""
        arrived: dict[Link, list[Crossing]] = {}

        def look(crossing: Crossing) -> None:
            link = crossing.link
            if link is None or not link.anywhere or crossing.checking or crossing.error or self._is_pledged(crossing):
                return
            if all(self._transport.poll(read) is State.DONE for read in crossing.reads):
                arrived.setdefault(link, []).append(crossing)

        for crossing in crossings:
            self._attempt(crossing, look)
        for link, found in arrived.items():
            some = found[: len(self._landings) // max(1, len(link.words))]
            if some:
                self._attempt_all(some, link, self._check)

    def _attempt_all(
        self, crossings: Sequence[Crossing], link: Link, action: Callable[[Sequence[Crossing], Link], None]
    ) -> None:
        """Whatever goes wrong fails all of them, but for what the action itself found wrong with one."""
        first, *others = crossings
        ended = False

        def act(_: Crossing) -> None:
            nonlocal ended
            action(crossings, link)
            ended = True

        self._attempt(first, act)
        for crossing in others if not ended else ():
            crossing.error = crossing.error or first.error

    def _begun(self, loads: Sequence[Load]) -> Sequence[Load]:
        """Those that could not begin here and now, as loads out of mapped memory do; none does before anything that was handed
        in earlier."""
        if not loads or self._commands or not self._turn.acquire(blocking=False):
            return loads
        try:
            left = [load for load in loads if self._links.mapped(load.peer) is None]
            ready = (self._embark(load) for load in loads if self._links.mapped(load.peer) is not None)
            crossings = [crossing for crossing in ready if crossing is not None]
            for several in _convoys(crossings):
                self._depart_together(several)
            for crossing in crossings:
                self._call_for_help(crossing)
            return left
        finally:
            self._turn.release()

    def _call_for_help(self, crossing: Crossing) -> None:
        """What went wrong is for the ferry's thread to clear up."""
        if crossing.error:
            self._wake.set()

    def forget(self, peer: PeerKey) -> None:
        """Let go of a producer from which nothing more is to be loaded, unless it is met again."""
        self._hand_in(peer)

    def _hand_in(self, command: Meeting | Load | PeerKey) -> None:
        self._commands.append(command)
        self._wake.set()

    def outcomes(self) -> list[Outcome]:
        self._lent_move_on()
        out = []
        while self._outcomes:
            out.append(self._outcomes.popleft())
        return out

    def _lent_move_on(self) -> bool:
        """Whether there are loads that the engine's own thread looks after, which it has just done."""
        if not self._crossings or not self._turn.acquire(blocking=False):
            return False
        try:
            lent, under_way = [crossing for crossing in self._crossings if is_lent(crossing)], len(self._crossings)
            self._check_together(lent)
            for crossing in lent:
                self._attempt(crossing, self._advance)
                self._call_for_help(crossing)
            return under_way - len(self._crossings) < len(lent)
        finally:
            self._turn.release()

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
            self._wake.wait(self._pause())

    def _pause(self) -> float:
        """How long nothing needs to be done, unless something is handed in."""
        rest = self._listening
        if self._crossings and not self._links.warming and not self._spent and all(map(is_lent, self._crossings)):
            return min(rest, _LENT_S)
        if self._crossings or self._links.warming or self._spent:
            rest = min(rest, _LONGEST_S, max(_BUSY_S, (self._clock() - self._moved_at) / _PATIENCE))
        return rest

    @property
    def _listening(self) -> float:
        """How long others who read from this rank, or connect to it, may go without a call."""
        if self._hurried():
            return _HURRIED_S
        return _READ_S if self._tended and self._words.alive else _IDLE_S

    def step(self) -> None:
        """Take in what was handed in, and move every load on; also what a producer needs to be read from. While loads are
        pledged, only these: what else is let go of here they may need."""
        with self._turn:
            if not self._keeps_all:
                self._step()
                return
            for crossing in [crossing for crossing in self._crossings if crossing.load.is_pledged]:
                self._attempt(crossing, self._advance)

    def _take_in(self) -> None:
        if self._commands:
            self._moved_at = self._clock()
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Load):
                self._embark(command)
            elif isinstance(command, Meeting):
                self._links.know(command, self._crossings)
            else:
                self._links.forget(command)

    def _step(self) -> None:
        self._take_in()
        for crossing in tuple(self._crossings):
            self._attempt(crossing, self._advance)
        self._links.look_after(self._crossings)
        if self._spent:
            self._sweep()
        now = self._clock()
        if now - self._heard_at >= self._listening / 2:
            self._heard_at = now
            self._transport.notifications()

    def _embark(self, load: Load) -> Crossing | None:
        started = self._clock()
        try:
            peer = self._links.peers.get(load.peer)
            if peer is None:
                raise BadReferenceError(f"{load.peer} was never met")
            if not 0 <= load.lease.slot < peer.slots:
                raise BadReferenceError(
                    f"{load.peer} has {peer.slots} slots for leases, and the reference names {load.lease.slot}"
                )
            loading = peer.binder.load(Request(load.tokens, load.src, load.dst, load.start))
        except KVFerryError as error:
            self._outcomes.append(Outcome(load.request, str(error)))
        except Exception as error:
            logger.exception("a load failed unexpectedly")
            self._outcomes.append(Outcome(load.request, _described(error)))
        else:
            self._crossings.append(Crossing(load, peer, loading, started))
            return self._crossings[-1]
        return None

    def _attempt(self, crossing: Crossing, action: Callable[[Crossing], None]) -> None:
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

    def _break_off(self, crossing: Crossing, reason: str) -> None:
        link = crossing.link
        lost = (link.lost if link is not None else "") or reason
        peer = crossing.load.peer
        gone = f"{peer} since its start {plain(peer.incarnation)} is gone or out of reach: {lost}"
        crossing.error = crossing.error or gone
        if link is not None:
            self._links.lose(link, reason)

    def _advance(self, crossing: Crossing) -> None:
        if crossing.error:
            self._let_go(crossing)
            return
        link = crossing.link or self._depart(crossing)
        if link is None or crossing.error or not self._arrived(crossing):
            return
        if not crossing.checking and self._is_pledged(crossing):
            self._arrive(crossing)
            crossing.sure = True
        elif not crossing.checking:
            self._check([crossing], link)
            if crossing.error or not self._arrived(crossing):
                return
        self._spend(crossing)
        if self._filled(crossing):
            self._disembark(crossing, link)

    def _is_pledged(self, crossing: Crossing) -> bool:
        return self._clock() < crossing.load.pledged

    def _arrive(self, crossing: Crossing) -> None:
        crossing.seen = [self._transport.telemetry(read) for read in crossing.reads]
        self._spend(crossing)
        crossing.checking = True

    def _arrived(self, crossing: Crossing) -> bool:
        """Whether all that is under way has arrived; it may have while it was posted."""
        states = [self._transport.poll(read) for read in crossing.reads]
        if State.FAILED in states:
            self._break_off(crossing, crossing.reads[states.index(State.FAILED)].error)
            return False
        return State.RUNNING not in states

    def _spend(self, crossing: Crossing) -> None:
        if crossing.reads:
            self._moved_at = self._clock()
            self._spent += [read for read in crossing.reads if not self._transport.release(read)]
            crossing.reads = []

    def _filled(self, crossing: Crossing) -> bool:
        if crossing.filled is not None and crossing.filled():
            crossing.filled = None
        return crossing.filled is None

    def _depart(self, crossing: Crossing) -> Link | None:
        """Post the reads, over a new connection if need be, once no read of a broken one can still land."""
        peer, key = crossing.peer, crossing.load.peer
        if peer.link is None:
            if self._links.lingers(key, self._crossings):
                if self._clock() - crossing.started >= self._patience_s:
                    raise TransportError(
                        f"{key}: its connection broke, and reads over it have not ended in {self._patience_s:g} s; "
                        f"is it stopped or overloaded?"
                    )
                return None
            peer.link = self._links.connect(peer)
        self._post([crossing], peer.link)
        return crossing.link

    def _post(self, crossings: Sequence[Crossing], link: Link) -> None:
        """What is to be filled, and the reads of the data; of several loads at once, if the transport can."""
        for crossing in crossings:
            crossing.link = link
        self._begin_to_fill([crossing for crossing in crossings if len(crossing.loading.fills)])
        sound = [crossing for crossing in crossings if not crossing.error]
        loads = [crossing.loading.tiles for crossing in sound]
        for prepared in link.data if sound else ():
            for crossing, read in zip(sound, read_together(self._transport, prepared, loads), strict=True):
                crossing.reads.append(read)

    def _begin_to_fill(self, crossings: Sequence[Crossing]) -> None:
        """All at once, unless there are many runs; if that fails, one by one: to fill twice does no harm."""
        fills = [crossing.loading.fills for crossing in crossings]
        if len(fills) > 1 and sum(map(len, fills)) <= _FILLED:
            try:
                filled = self._fill(joined(fills))
            except KVFerryError as error:
                logger.debug("%d loads cannot be filled together: %s", len(crossings), error)
            else:
                for crossing in crossings:
                    crossing.filled = filled
                return
        for crossing in crossings:
            self._attempt(crossing, self._fill_one)

    def _fill_one(self, crossing: Crossing) -> None:
        crossing.filled = self._fill(crossing.loading.fills)

    def _check(self, crossings: Sequence[Crossing], link: Link) -> None:
        """All data has been seen to arrive: now the words are read, which say whether it was still the lease's; of several
        loads by one read that all of them wait for."""
        for crossing in crossings:
            self._arrive(crossing)
            self._attempt(crossing, self._find_landings)
        sound = [crossing for crossing in crossings if not crossing.error]
        slots = [crossing.load.lease.slot for crossing in sound]
        for source, (first, prepared) in enumerate(link.words if sound else ()):
            landings = [crossing.landings[source] for crossing in sound]
            read = self._transport.read(prepared, tiles_of_words(first, slots, landings))
            for crossing in sound:
                crossing.reads.append(read)

    def _find_landings(self, crossing: Crossing) -> None:
        """A place for a word of every rank that is read."""
        for _ in crossing.peer.binder.plan.sources:
            if not self._landings:
                raise SessionError("no landing place for a generation word is free: too many loads at a time")
            crossing.landings.append(self._landings.popleft())
            self._words.wipe(crossing.landings[-1])

    def _disembark(self, crossing: Crossing, link: Link) -> None:
        load, seen = crossing.load, crossing.seen
        found = [self._words.landed(landing) for landing in crossing.landings]
        if not crossing.sure and found != [load.lease.generation] * len(crossing.peer.binder.plan.sources):
            crossing.error = f"{load.peer} has given the blocks of the reference away: it came too late, or for a second time"
            return
        moved, predicted = sum(t.bytes for t in seen), crossing.loading.bytes
        if moved != predicted:
            crossing.error = (
                f"{load.peer}: {moved} bytes were moved, the plan says {predicted}; report this with both manifests"
            )
            return
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
                unhashable={g: _blocks(load.dst[g], at) for g, at in crossing.loading.unhashable.items()},
                anywhere=link.anywhere,
            ),
        )
        self._links.tell(crossing.peer, link)

    def _let_go(self, crossing: Crossing) -> None:
        crossing.reads = [read for read in crossing.reads if not self._transport.release(read)]
        if not crossing.reads and self._filled(crossing):
            self._end(crossing, Outcome(crossing.load.request, crossing.error, total_s=self._clock() - crossing.started))
        elif crossing.reads and not crossing.waits:
            crossing.waits = True
            waits = "it waits until nothing can land in its blocks any more, until the producer goes on or dies"
            logger.error("request %s: %s; %s", crossing.load.request, crossing.error, waits)

    def _end(self, crossing: Crossing, outcome: Outcome) -> None:
        self._landings.extend(crossing.landings)
        self._crossings.remove(crossing)
        self._outcomes.append(outcome)

    def _sweep(self) -> None:
        """Give back reads that are done; the transport may need to be asked more than once."""
        self._spent = [read for read in self._spent if not self._transport.release(read)]


def _convoys(crossings: Sequence[Crossing]) -> list[list[Crossing]]:
    """In turn, as many together as are copied in a moment: a short load does not wait for long ones."""
    out: list[list[Crossing]] = []
    size = _TOGETHER
    for crossing in crossings:
        if size + crossing.loading.bytes > _TOGETHER:
            out.append([])
            size = 0
        out[-1].append(crossing)
        size += crossing.loading.bytes
    return out


def _blocks(table: list[int] | int, places: Ints) -> tuple[int, ...]:
    return tuple(table[place] for place in places.tolist()) if isinstance(table, list) else ()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
