"""The consumer's part of `packed` and `staged`: what passes through the ring to land in, piece after piece.

    packed    asked ──> (its ticket is on the board) reading ──> checking (the board again) ──> scattering ──> over
    staged                                           reading ──────────────────────────────> scattering ──> over
    mapped    asked ──> (its ticket is on the board) scattering ──> checking (the board again) ──> over

Mapped is what is packed and whose ring can be mapped here: it takes no slot of the ring to land in, but a berth, of which there
are as many as the producer has slots; its bytes go from the producer's slot to the request's blocks, and count when the board
was looked at after that.

A piece has its slot here before it is asked for, and gives it back when it is over: what has been asked for waits for nobody
else. Slots are given to reads in the order in which they were begun, whichever of them is asked after (`turns`). The producer's
slot is given back as soon as the board was read again. Bytes off the wire land in slots, never in a request's blocks: a read
that fails is safe once its own copies have ended, and a slot that something may still land in is kept apart until the transport
has let go of it. What is copied out of a mapped slot holds its read until that has ended, right or wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from kvferry.bounds import holder
from kvferry.errors import TransportError
from kvferry.plan import Plan, Tiles
from kvferry.plan.detour import Key, Pieces, tiles_here, tiles_there
from kvferry.strategy.asking import Asking
from kvferry.strategy.flights import Detoured, DetouredRead, Flight, Stage
from kvferry.strategy.gathering import refused
from kvferry.strategy.limbo import Limbo
from kvferry.strategy.mapped import Mapped, MappedPrepared, MappedRead
from kvferry.strategy.movers import Mover
from kvferry.strategy.moves import Moves, joined
from kvferry.strategy.sources import Source, Sources
from kvferry.strategy.staging import Boards, Cut, Offer, Slots, Staging, pages
from kvferry.strategy.turns import turn
from kvferry.transport.contract import Read, State, Storage, Telemetry, Transport

logger = logging.getLogger("kvferry.strategy")

TIMEOUT_S: Final = 30.0
_LIVELY_S: Final = 0.02
_SEVERAL: Final = 4
_SHARED: Final = 3
"""Of so many slots one is left to other peers. With fewer it would be all that lets a short load go before a long one's end."""


def piece_bytes(staged: int, most: int, cut: Cut) -> int:
    """How long the pieces of a load are: so that a few follow each other, since they overlap. A slot holds `most`."""
    return min(most, max(cut.shortest, -(-staged // _SEVERAL)))


class Landing:
    """Pieces off `wire`; `mover` takes them out of the ring. `timeout_s`: how long a read may go without anything happening.
    `rings`: producers' rings that are mapped here. `peers`: those that are read through slots: of several none may take all,
    since they stay with one that is stopped until it goes on or dies."""

    def __init__(
        self,
        wire: Transport,
        staging: Staging,
        boards: Boards,
        mover: Mover,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        rings: Mapped | None = None,
    ) -> None:
        self._wire, self.staging, self._mover, self._rings = wire, staging, mover, rings
        self._timeout_s, self._clock = timeout_s, clock
        self.sources = Sources(wire, staging, boards, rings)
        self.peers: set[str] = set()
        self._slots = Slots(staging.sizes.landing)
        self._limbo = Limbo(wire, self._slots)
        self._running: dict[DetouredRead, None] = {}
        self._flying: dict[DetouredRead, None] = {}
        self._waiting: dict[Slots, dict[DetouredRead, None]] = {}
        self._polls = 0
        self._asking = Asking(wire, clock, timeout_s)
        self._moved_at = clock()

    @property
    def free(self) -> int:
        return self._slots.free

    @property
    def busy(self) -> bool:
        """Whether a producer gathers for this end, and lately something came of it."""
        asked = any(read.detoured.source is not None for read in tuple(self._running))
        return asked and self._clock() - self._moved_at < _LIVELY_S

    @property
    def slots(self) -> int:
        return self._slots.count

    @property
    def is_stuck(self) -> bool:
        """Whether something that was given up may still land in every slot."""
        return bool(self._limbo) and self._usable <= 0

    @property
    def _usable(self) -> int:
        return self._slots.count - len(self._limbo)

    @property
    def _share(self) -> int:
        """Slots that are for one peer at most: of a few all."""
        return self._slots.count - (len(self.peers) > 1 and self._slots.count >= _SHARED)

    def _has_its_share(self, read: DetouredRead) -> bool:
        """Whether its peer has all the slots to land in that are for one."""
        if self._share == self._slots.count or self._slots_of(read) is not self._slots:
            return False
        ours = (it for it in self._flying if it.peer == read.peer and self._slots_of(it) is self._slots)
        return sum(len(it.flights) for it in ours) + self._limbo.of(read.peer) >= self._share

    def _is_kept_out(self, read: DetouredRead) -> bool:
        """Whether something may still land in every slot that it could have, whatever others do meanwhile."""
        if not self._limbo or read.flights or self._slots_of(read) is not self._slots:
            return False
        return self._usable <= 0 or self._limbo.of(read.peer) >= self._share

    def borrow(self) -> int:
        """A slot for something else; `give_back` it."""
        slot = self._slots.take()
        if slot is None:
            raise TransportError("all slots are taken")
        return slot

    def give_back(self, slot: int, kept: list[Read]) -> None:
        """Whatever is in `kept` may still land in the slot."""
        for read in kept:
            self._limbo.keep(read, slot)
        if not kept:
            self._slots.give(slot)

    def require(self) -> None:
        """Raises TransportError where there is no ring to land in."""
        if not self._slots.count:
            raise TransportError("this end only sends, and has no ring to land in; give it the role of one that reads as well")

    def meet(self, peer: str, offer: Offer) -> Source:
        """Raises TransportError where nothing can be read out of the producer's ring."""
        self.require()
        return self.sources.meet(peer, offer, self._mover.memory)

    def room(self, source: Source) -> int:
        """Bytes of a piece that fit a slot: on either side, or the producer's if it is mapped here."""
        return source.offer.slot if source.berths is not None else min(source.offer.slot, self.staging.slot)

    def berths(self, source: Source) -> int:
        """How many pieces a load may have under way."""
        return source.berths.count if source.berths is not None else min(self._share, source.offer.slots)

    def leave(self, source: Source) -> None:
        """Nothing more is read of a producer, nor is it told what is free."""
        self._asking.leave(source)
        self.sources.leave(source)
        self.tidy()

    def mapped(self, plan: Plan, source: Source) -> MappedPrepared | None:
        """The way out of a producer's first slot, where its ring is mapped here; `plan` has a slot as its only source."""
        if self._rings is None or source.berths is None:
            return None
        offer, (slot,) = source.offer, plan.sources[0].regions
        there = msgspec.structs.replace(slot, address=offer.ring, memory=offer.memory, device=offer.device)
        side = msgspec.structs.replace(plan.sources[0], regions=(there,))
        return self._rings.prepare(msgspec.structs.replace(plan, sources=(side,)), 0, source.peer)

    def scattering(self, plan: Plan, storages: list[Storage]) -> tuple[Moves, Any]:
        """The way out of staging, for a mover; `plan` has it as its only source."""
        kinds = {region.memory for region in plan.consumer.regions}
        if kinds != {self._mover.memory}:
            raise TransportError(f"caches lie in {', '.join(sorted(kinds))}, what is staged is copied in {self._mover.memory}")
        ours = plan.consumer.regions
        for region in ours:
            if holder(storages, region) is None:
                raise TransportError(f"region {region.name} lies in no registered storage; register it first")
        landing = self.staging.landing.address
        moves = Moves(plan, 0, lambda _: landing, lambda index: ours[index].address)
        return moves, self._mover.prepare(moves)

    def introduce(self, detoured: Detoured) -> None:
        self._asking.introduce(detoured)

    def read(self, detoured: Detoured, tiles: Mapping[Key, Tiles], notification: bytes) -> DetouredRead:
        now = self._clock()
        own = {part.key for part in detoured.detour.parts}
        counts = {key: len(found.src_block) for key, found in tiles.items() if key in own}
        parts = detoured.detour.parts
        most = self.staging.slot if detoured.source is None else self.room(detoured.source)
        least = 2 * max((part.size for part in parts), default=0)
        staged = sum(part.size * counts.get(part.key, 0) for part in parts)
        room = min(most, max(least, piece_bytes(staged, most, self.staging.cut)))
        read = DetouredRead(detoured, tiles, Pieces(parts, counts), now, now, room, staged, notification)
        read.size = sum(part.bytes * counts.get(part.key, 0) for part in parts)
        self._running[read] = None
        if not read.pieces.over:
            self._waiting.setdefault(self._slots_of(read), {})[read] = None
        self.poll(read)
        read.posting_s = self._clock() - now
        return read

    def poll(self, read: DetouredRead) -> State:
        """Moves the read on, and, where it waits for a slot, those that have one and that nobody has asked after since the last
        time: where all are asked after in turn, none is looked at by everybody who waits for it."""
        self._polls += 1
        before, read.polled = read.polled, self._polls
        self._attempt(read)
        if read.state is State.RUNNING and not read.flights:
            for other in [it for it in self._flying if it.polled <= before]:
                other.polled = self._polls
                self._attempt(other)
            if read.flights:
                self._attempt(read)
        return read.state

    def _attempt(self, read: DetouredRead) -> None:
        if read.state is State.RUNNING:
            try:
                self._advance(read)
            except TransportError as error:
                read.fail(str(error))
            except Exception as error:
                logger.exception("a read by way of staging failed unexpectedly")
                read.fail(f"{type(error).__name__}: {error}")
        self._moved_at = max(self._moved_at, read.moved_at)
        kept_out = self._is_kept_out(read)
        since = read.moved_at if read.flights or kept_out else self._moved_at
        if read.state is State.RUNNING and self._clock() - since > self._timeout_s:
            waiting = sum(flight.stage is Stage.ASKED for flight in read.flights)
            what = f"it has not gathered {waiting} pieces that it was asked for" if waiting else "nothing arrived"
            why = "it is stopped, overloaded or unreachable"
            if kept_out:
                what = "no slot to land in"
                why = f"what was read of {self._limbo.peers} may still land in those that there are, until it goes on or dies"
            read.fail(f"{what} for {self._timeout_s:g} s: {why}")
        self._see_off(read)

    def _see_off(self, read: DetouredRead) -> None:
        """One that is over takes no more turns, and gives up what it has if it failed."""
        if read.state is not State.RUNNING:
            self._running.pop(read, None)
            self._flying.pop(read, None)
            self._wait_no_more(read)
        if read.state is State.FAILED:
            self._abandon(read)

    def _advance(self, read: DetouredRead) -> None:
        """As far as it goes without waiting: nowhere, where it waits for a slot and none is free. For what was asked for the
        board is looked at once."""
        if not read.flights and not read.pieces.over:
            if self._limbo and (not self._slots_of(read).free or self._has_its_share(read)):
                self.tidy()
            if not self._slots_of(read).free or self._has_its_share(read):
                return
        looked, source = False, read.detoured.source
        while read.state is State.RUNNING:
            before = read.moved_at, len(read.flights), [flight.stage for flight in read.flights]
            for flight in tuple(read.flights):
                self._move(read, flight)
            if source is not None and read.state is State.RUNNING:
                self._fetch(read, source)
            self._embark()
            if source is not None:
                urgent = any(flight.stage is Stage.CHECKING for flight in read.flights)
                asked = any(flight.stage is Stage.ASKED for flight in read.flights)
                self._asking.tell_freed()
                if self.sources.look(source, urgent or (asked and not looked)):
                    looked = looked or not urgent
                    continue
            if before == (read.moved_at, len(read.flights), [flight.stage for flight in read.flights]):
                break
        self._asking.tell_freed()
        if read.pieces.over and not read.flights and read.state is State.RUNNING:
            read.ended = self._clock()
            if read.moved == read.size:
                read.state = State.DONE
            else:
                read.fail(f"{read.moved:,} bytes of {read.size:,} were copied; report this with both manifests")

    def _embark(self) -> None:
        """Begin pieces while there are slots to land in, of whichever read it is the turn of; what a producer is asked for, by
        one message."""
        self._begin_pieces()
        for read in self._asking.say():
            self._see_off(read)

    def _begin_pieces(self) -> None:
        for slots, waiting in tuple(self._waiting.items()):
            self._begin_in(slots, waiting)

    def _slots_of(self, read: DetouredRead) -> Slots:
        """What its pieces take one of: slots to land in, or berths at a producer whose ring is mapped."""
        source = read.detoured.source
        return source.berths if source is not None and source.berths is not None else self._slots

    def _wait_no_more(self, read: DetouredRead) -> None:
        slots = self._slots_of(read)
        waiting = self._waiting.get(slots, {})
        waiting.pop(read, None)
        if not waiting:
            self._waiting.pop(slots, None)

    def _begin_in(self, slots: Slots, waiting: Mapping[DetouredRead, None]) -> None:
        while waiting:
            slot = slots.take()
            if slot is None:
                self.tidy()
                return
            usable = min(self._usable, self._share) if slots is self._slots else slots.count
            full = {it.peer for it in {it.peer: it for it in waiting}.values() if self._has_its_share(it)}
            several = tuple(it for it in waiting if it.peer not in full) if full else tuple(waiting)
            if not several:
                slots.give(slot)
                return
            read = several[turn([(len(it.flights), it.left) for it in several], usable)]
            try:
                self._begin(read, slot)
            except TransportError as error:
                slots.give(slot)
                read.fail(str(error))
                self._see_off(read)
            except Exception as error:
                logger.exception("a piece could not be begun; its slot is not used again, since something may still land there")
                read.fail(f"{type(error).__name__}: {error}")
                self._see_off(read)

    def _begin(self, read: DetouredRead, slot: int) -> None:
        detoured, now = read.detoured, self._clock()
        if detoured.source is None:
            if detoured.wire is None:
                raise TransportError(f"peer {read.peer}: {detoured.way} was not prepared")
            piece = read.pieces.take(slot * self.staging.slot, read.room)
            flight = Flight(piece, slot, Stage.READING)
            flight.read = self._wire.read(detoured.wire, tiles_there(piece, detoured.detour.parts, read.tiles))
        else:
            piece = read.pieces.take(0, read.room)
            flight = Flight(piece, slot, Stage.ASKED)
            self._asking.ask(read, flight, detoured.source)
        read.flights.append(flight)
        self._flying[read] = None
        read.left -= piece.stop - piece.start
        read.moved_at = now
        if read.pieces.over:
            self._wait_no_more(read)

    def _move(self, read: DetouredRead, flight: Flight) -> None:
        source = read.detoured.source
        if flight.stage is Stage.READING and flight.read is not None:
            wire = flight.read
            together = [other for other in read.flights if other.read is wire]
            if together[0] is not flight:
                return
            state = self._wire.poll(wire)
            if state is State.FAILED:
                read.fail(wire.error)
            elif state is State.DONE and self._told(read, wire):
                read.moved_at = self._clock()
                for other in together:
                    other.read = None
                    if source is None:
                        self._scatter(read, other)
                    else:
                        other.stage, other.after = Stage.CHECKING, source.begun
        elif flight.stage is Stage.CHECKING and source is not None and source.seen > flight.after:
            if source.words[flight.there] != flight.ticket:
                self._asking.again(read, flight, source, "a slot was given to another while it was read")
                return
            self._asking.freed(source, flight.ticket)
            if source.berths is None:
                self._scatter(read, flight)
            else:
                self._over(read, flight)
        elif flight.stage is Stage.SCATTERING and flight.copies is not None and flight.copies.done:
            if flight.mapped is None or source is None:
                self._over(read, flight)
            elif self._copied(read, flight.mapped):
                flight.mapped = None
                flight.stage, flight.after = Stage.CHECKING, source.begun

    def _over(self, read: DetouredRead, flight: Flight) -> None:
        """All of a piece is in its places, and nobody can have written to its slot meanwhile."""
        read.moved += flight.copies.moved if flight.copies is not None else 0
        read.moved_at = self._clock()
        read.flights.remove(flight)
        if not read.flights:
            self._flying.pop(read, None)
        self._slots_of(read).give(flight.slot)

    def _copied(self, read: DetouredRead, mapped: MappedRead) -> bool:
        """Whether all that was to be copied out of a mapped slot was; then the slot may be closed."""
        if self._rings is None or self._rings.poll(mapped) is not State.DONE:
            read.fail(mapped.error)
            return False
        read.runs += mapped.runs
        read.moved_at = self._clock()
        return self._rings.release(mapped)

    def _told(self, read: DetouredRead, wire: Read) -> bool:
        """Note what the transport says of a read that is over, and let it go."""
        found = self._wire.telemetry(wire)
        if not self._wire.release(wire):
            return False
        read.runs += found.runs
        return True

    def _fetch(self, read: DetouredRead, source: Source) -> None:
        """Begin to read what has been gathered, short pieces by one read: a long one is scattered, and its slot given back,
        while the next is on the wire. What is mapped is copied at once; one piece alone where that was done by this thread, so
        that its slot is given back before the next. Ask once more for what has not been gathered for long."""
        ready: list[list[Flight]] = []
        held = 0
        for flight in (it for it in read.flights if it.stage is Stage.ASKED):
            at = np.flatnonzero(source.words == flight.ticket)
            if len(at):
                flight.there = int(at[0])
                held += flight.piece.stop
                if not ready or held > self.staging.cut.shortest:
                    ready.append([])
                    held = flight.piece.stop
                ready[-1].append(flight)
            elif said := refused(source.words, flight.ticket):
                read.refused = said
                read.fail(f"the producer refuses to gather, since {said}; its log says more")
                return
            else:
                self._asking.remind(read, flight, source)
        if source.berths is not None:
            for flight in (it for several in ready for it in several):
                read.moved_at = self._clock()
                self._scatter(read, flight)
                if flight.copies is not None and flight.copies.done:
                    return
            return
        own = self.staging.slot
        for several in ready:
            found = joined([pages(source.offer, it.there, own, it.slot, it.piece.stop) for it in several])
            wire = self._wire.read(source.ring, found)
            for flight in several:
                flight.read, flight.stage = wire, Stage.READING
            read.moved_at = self._clock()

    def _scatter(self, read: DetouredRead, flight: Flight) -> None:
        """Out of the slot; of a packed piece the tables count from the slot's beginning."""
        detoured = read.detoured
        if detoured.mapped is not None and detoured.source is not None and self._rings is not None:
            tiles = tiles_here(flight.piece, detoured.detour.parts, read.tiles)
            flight.mapped = self._rings.read(detoured.mapped, tiles, src_shift=flight.there * detoured.source.offer.slot)
            flight.copies, flight.stage = flight.mapped.ticket, Stage.SCATTERING
            return
        shift = flight.slot * self.staging.slot if detoured.source is not None else 0
        bound = detoured.moves.bind(tiles_here(flight.piece, detoured.detour.parts, read.tiles), src_shift=shift)
        flight.copies, flight.stage = self._mover.start(detoured.held, bound), Stage.SCATTERING

    def _abandon(self, read: DetouredRead) -> None:
        """Give up what is on the wire; its slots are kept apart until nothing can land there."""
        source, slots = read.detoured.source, self._slots_of(read)
        mapped = source is not None and source.berths is not None
        tickets = [it.ticket for it in read.flights if it.ticket and (mapped or it.stage is not Stage.SCATTERING)]
        for flight in tuple(read.flights):
            if mapped:
                flight.ticket = 0
            if flight.mapped is not None and self._rings is not None:
                self._rings.release(flight.mapped)
            if flight.stage is Stage.SCATTERING:
                if flight.copies is None or not flight.copies.done:
                    continue
                slots.give(flight.slot)
            elif flight.read is None:
                slots.give(flight.slot)
            else:
                self._limbo.keep(flight.read, flight.slot)
            read.flights.remove(flight)
        if tickets and source is not None and not source.dropped:
            try:
                self._asking.free(source, tickets)
            except TransportError:
                read.error += "; it cannot be told either"
        self.tidy()

    def release(self, read: DetouredRead) -> bool:
        read.fail("the read was given up here")
        self._see_off(read)
        return not read.flights

    def tidy(self) -> None:
        """Take back slots and notes that nothing can land in any more."""
        self._limbo.tidy()
        self.sources.tidy()

    def telemetry(self, read: DetouredRead) -> Telemetry:
        if read.state is not State.DONE:
            raise TransportError(f"peer {read.peer}: telemetry is of a read that is done; this one is {read.state.value}")
        return Telemetry(read.moved, read.runs, read.posting_s, read.ended - read.began)
