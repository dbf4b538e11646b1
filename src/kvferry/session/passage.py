"""What becomes of a load once it is taken in: read, check the lease's words, and only then say that it is done.

    waiting ──> fetching ──> checking ──> loaded
       └────────────┴────────────┴──> letting go ──> failed

Nothing is said of a load before its destination is safe: a read that failed may still land, and a fill that was begun may not
have ended. Whoever calls has the ferry's turn.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvferry.errors import BadReferenceError, KVFerryError, SessionError, TransportError, plain
from kvferry.plan import Fills, Request
from kvferry.session.consumer import PeerKey
from kvferry.session.crossing import Crossing, Filled, Link, Load, Outcome
from kvferry.session.fills import joined
from kvferry.session.links import Links
from kvferry.session.words import Words, tiles_of_words
from kvferry.strided import Ints
from kvferry.transport import Read, State, Transport
from kvferry.transport.contract import read_together

logger = logging.getLogger("kvferry.session")

_FILLED: Final = 500
"""Runs of several loads that are filled together: NumPy lets go of Python's lock for more."""


class Passage:
    """The loads of one consumer rank that are `under_way`, and how others ended. `fill` begins to zero destination runs, and
    returns what says whether that is done, or None if it is already. `spent`: reads that the transport still holds.
    `moved_at`: when something was last seen to arrive."""

    def __init__(
        self,
        transport: Transport,
        words: Words,
        rank: int,
        fill: Callable[[Fills], Filled | None],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport, self._words, self._fill = transport, words, fill
        self._patience_s, self._clock = patience_s, clock
        self.landings = deque(range(words.slots))
        self.links = Links(transport, words, rank, self.landings)
        self.under_way: list[Crossing] = []
        self.outcomes: deque[Outcome] = deque()
        self.spent: list[Read] = []
        self.moved_at = -math.inf

    def embark(self, load: Load) -> Crossing | None:
        started = self._clock()
        try:
            peer = self.links.peers.get(load.peer)
            if peer is None:
                raise BadReferenceError(f"{load.peer} was never met")
            if not 0 <= load.lease.slot < peer.slots:
                raise BadReferenceError(
                    f"{load.peer} has {peer.slots} slots for leases, and the reference names {load.lease.slot}"
                )
            loading = peer.binder.load(Request(load.tokens, load.src, load.dst, load.start))
        except KVFerryError as error:
            self.outcomes.append(Outcome(load.request, str(error)))
        except Exception as error:
            logger.exception("a load failed unexpectedly")
            self.outcomes.append(Outcome(load.request, _described(error)))
        else:
            self.under_way.append(Crossing(load, peer, loading, started))
            return self.under_way[-1]
        return None

    def forget(self, key: PeerKey) -> None:
        """Let go of a producer. Loads that have not set out fail: they would open a connection that is never closed."""
        peer = self.links.peers.get(key)
        self.links.forget(key)
        for crossing in self.under_way:
            if crossing.peer is peer and crossing.link is None:
                self._break_off(crossing, f"{key} was forgotten here")

    def depart_together(self, crossings: Sequence[Crossing]) -> None:
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
        self.check_together(crossings)
        for crossing in crossings:
            self.move_on(crossing)

    def check_together(self, crossings: Sequence[Crossing]) -> None:
        """Begin to check those whose data has arrived, by one read for all from a producer that any thread may read."""
        arrived: dict[Link, list[Crossing]] = {}

        def look(crossing: Crossing) -> None:
            link = crossing.link
            if link is None or not link.anywhere or crossing.checking or crossing.error:
                return
            if all(self._transport.poll(read) is State.DONE for read in crossing.reads):
                arrived.setdefault(link, []).append(crossing)

        for crossing in crossings:
            self._attempt(crossing, look)
        for link, found in arrived.items():
            self._check_some(found, link)

    def _check_some(self, crossings: Sequence[Crossing], link: Link) -> None:
        """As many as there are landing places for."""
        some = crossings[: len(self.landings) // max(1, len(link.words))]
        if some:
            self._attempt_all(some, link, self._check)

    def _attempt_all(
        self, crossings: Sequence[Crossing], link: Link, action: Callable[[Sequence[Crossing], Link], None]
    ) -> None:
        """Together; if that fails, each alone, so that what is wrong with one load fails that load. An action that is called
        again goes on where it broke off."""
        if len(crossings) > 1:
            try:
                action(crossings, link)
            except Exception:
                logger.debug("%d loads cannot go on together; each does alone", len(crossings), exc_info=True)
            else:
                return
        for crossing in crossings:
            if link.lost and not crossing.error:
                self._break_off(crossing, link.lost)
            elif not crossing.error:
                self._attempt(crossing, lambda it: action([it], link))

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
            self.links.lose(link, reason)

    def move_on(self, crossing: Crossing) -> None:
        self._attempt(crossing, self._advance)

    def move_all_on(self) -> None:
        """Those that set out now do it together, and the words of those whose data has arrived are read together: others wait
        until there is a landing place again, unless nobody has one to give back."""
        self._set_out()
        look, arrived = _Looks(self._transport), dict[Link, list[Crossing]]()
        for crossing in tuple(self.under_way):
            self._attempt(crossing, lambda it: self._advance(it, look, arrived))
        for link, found in arrived.items():
            self._check_some(found, link)
            wait = any(crossing.landings and not crossing.waits for crossing in self.under_way)
            for crossing in found:
                if crossing.checking or not wait:
                    self._attempt(crossing, lambda it: self._advance(it, look))

    def _set_out(self) -> None:
        """Of those whose connection is found lost, the ones that were not begun try again alone over another."""
        ready: dict[Link, list[Crossing]] = {}
        for crossing in self.under_way:
            link = crossing.peer.link
            if crossing.link is None and link is not None and not link.anywhere and not crossing.error:
                ready.setdefault(link, []).append(crossing)
        for link, found in ready.items():
            if len(found) > 1 and not link.lost:
                self._attempt_all(found, link, self._post)
            for crossing in found if link.lost else ():
                if crossing.error and not crossing.reads and crossing.filled is None:
                    crossing.link, crossing.error = None, ""

    def _advance(
        self,
        crossing: Crossing,
        look: Callable[[Read], State] | None = None,
        arrived: dict[Link, list[Crossing]] | None = None,
    ) -> None:
        """`look`: how reads are asked after. `arrived`: where those are put down whose words are to be read next, instead of
        reading them."""
        look = look or self._transport.poll
        if crossing.error:
            self._let_go(crossing)
            return
        link = crossing.link or self._depart(crossing)
        if link is None or crossing.error or not self._arrived(crossing, look):
            return
        if not crossing.checking and arrived is not None:
            arrived.setdefault(link, []).append(crossing)
            return
        if not crossing.checking:
            self._check([crossing], link)
            if crossing.error or not self._arrived(crossing, look):
                return
        self._spend(crossing)
        if self._filled(crossing):
            self._disembark(crossing, link)

    def _arrived(self, crossing: Crossing, look: Callable[[Read], State]) -> bool:
        """Whether all that is under way has arrived; it may have while it was posted."""
        states = [look(read) for read in crossing.reads]
        if State.FAILED in states:
            self._break_off(crossing, crossing.reads[states.index(State.FAILED)].error)
            return False
        return State.RUNNING not in states

    def _spend(self, crossing: Crossing) -> None:
        if crossing.reads:
            self.moved_at = self._clock()
            self.spent += [read for read in crossing.reads if not self._released(read)]
            crossing.reads = []

    def _filled(self, crossing: Crossing) -> bool:
        if crossing.filled is not None and crossing.filled():
            crossing.filled = None
        return crossing.filled is None

    def _depart(self, crossing: Crossing) -> Link | None:
        """Post the reads, over a new connection if need be, once no read of a broken one can still land."""
        peer, key = crossing.peer, crossing.load.peer
        if peer.link is None:
            if self.links.lingers(key, self.under_way):
                if self._clock() - crossing.started >= self._patience_s:
                    raise TransportError(
                        f"{key}: its connection broke, and reads over it have not ended in {self._patience_s:g} s; "
                        f"is it stopped or overloaded?"
                    )
                return None
            peer.link = self.links.connect(peer)
        self._post([crossing], peer.link)
        return crossing.link

    def _post(self, crossings: Sequence[Crossing], link: Link) -> None:
        """What is to be filled, and the reads of the data; of several loads at once, if the transport can. What was begun by
        an earlier call is not begun again."""
        new = [crossing for crossing in crossings if crossing.link is None and len(crossing.loading.fills)]
        for crossing in crossings:
            crossing.link = link
        self._begin_to_fill(new)
        sound = [crossing for crossing in crossings if not crossing.error]
        for source, prepared in enumerate(link.data):
            lacking = [crossing for crossing in sound if len(crossing.reads) == source]
            loads = [crossing.loading.tiles for crossing in lacking]
            for crossing, read in zip(lacking, read_together(self._transport, prepared, loads) if loads else (), strict=True):
                crossing.reads.append(read)

    def _begin_to_fill(self, crossings: Sequence[Crossing]) -> None:
        """All at once, unless there are many runs; if that fails, one by one: to fill twice does no harm."""
        fills = [crossing.loading.fills for crossing in crossings]
        if len(fills) > 1 and sum(map(len, fills)) <= _FILLED:
            try:
                filled = self._fill(joined(fills))
            except Exception:
                logger.debug("%d loads cannot be filled together; each is alone", len(crossings), exc_info=True)
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
            if not crossing.checking:
                self._attempt(crossing, self._prepare_to_check)
        sound = [crossing for crossing in crossings if not crossing.error]
        for source, (first, prepared) in enumerate(link.words):
            lacking = [crossing for crossing in sound if len(crossing.reads) == source]
            if not lacking:
                continue
            slots = [crossing.load.lease.slot for crossing in lacking]
            landings = [crossing.landings[source] for crossing in lacking]
            read = self._transport.read(prepared, tiles_of_words(first, slots, landings))
            for crossing in lacking:
                crossing.reads.append(read)

    def _prepare_to_check(self, crossing: Crossing) -> None:
        """A place for a word of every rank that is read."""
        crossing.seen = [self._transport.telemetry(read) for read in crossing.reads]
        self._spend(crossing)
        crossing.checking = True
        for _ in crossing.peer.binder.plan.sources:
            if not self.landings:
                raise SessionError("no landing place for a generation word is free: too many loads at a time")
            crossing.landings.append(self.landings.popleft())
            self._words.wipe(crossing.landings[-1])

    def _disembark(self, crossing: Crossing, link: Link) -> None:
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
        self.links.tell(crossing.peer, link)

    def _let_go(self, crossing: Crossing) -> None:
        crossing.reads = [read for read in crossing.reads if self._is_wanted(read, crossing) or not self._released(read)]
        if not crossing.reads and self._filled(crossing):
            self._end(crossing, Outcome(crossing.load.request, crossing.error, total_s=self._clock() - crossing.started))
        elif crossing.reads and not crossing.waits:
            crossing.waits = True
            waits = "it waits until nothing can land in its blocks any more, until the producer goes on or dies"
            logger.error("request %s: %s; %s", crossing.load.request, crossing.error, waits)

    def _is_wanted(self, read: Read, crossing: Crossing) -> bool:
        """Whether it reads the words of other loads as well, and has not failed: they would fail if it were given up."""
        if not crossing.checking or read.error:
            return False
        return any(read in it.reads for it in self.under_way if it is not crossing and not it.error)

    def _end(self, crossing: Crossing, outcome: Outcome) -> None:
        self.landings.extend(crossing.landings)
        self.under_way.remove(crossing)
        self.outcomes.append(outcome)

    def sweep(self) -> None:
        """Give back reads that are done; the transport may need to be asked more than once."""
        self.spent = [read for read in self.spent if not self._released(read)]

    def _released(self, read: Read) -> bool:
        try:
            return self._transport.release(read)
        except Exception:
            logger.debug("a read of %s cannot be let go of; it is asked for again", read.peer, exc_info=True)
            return False


class _Looks:
    """Asks after each read once, though several loads may wait for it. Keeps the reads, so that none is taken for another."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._seen: dict[int, tuple[Read, State]] = {}

    def __call__(self, read: Read) -> State:
        if id(read) not in self._seen:
            self._seen[id(read)] = read, self._transport.poll(read)
        return self._seen[id(read)][1]


def _blocks(table: list[int] | int, places: Ints) -> tuple[int, ...]:
    return tuple(table[place] for place in places.tolist()) if isinstance(table, list) else ()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
