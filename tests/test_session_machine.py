"""Loads from several producers, drawn with everything that goes wrong, against a model of what each of them may end as.

A load's blocks belong to another request as soon as its outcome is given, and a lease's blocks as soon as its word is wiped:
whatever lands too late, or was read too late, is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

import oracle
from ferrying import copies_of, manifests_of, place
from kvferry.manifest import Manifest
from kvferry.plan import Binder, Fills, Request
from kvferry.session import Ferry, Lease, Load, Meeting, Outcome, PeerKey, Producer, Release, Welcome, Words, meet
from kvferry.session.fills import zero
from kvferry.strategy import HostMover, Mapped, Strategies
from kvferry.transport import Harbour, InProcessTransport, Read, Storage
from kvferry.transport.contract import read_together
from kvferry.transport.faults import Delay, Drop, Duplicate, Fault, LateLanding, PeerDeath, Reorder
from session_dock import PATIENCE_S, TIMEOUT_S, Berth, Clock, berths, case
from transport_peer import at_addresses

TOKENS, ANOTHER = 21, 0xEE
"""The latter: what other requests write to their blocks."""
BLOCKS, THERE, HERE = 48, 6, 3
"""Blocks of an engine, and of a load at either end."""
MANY, FEW, NO_PLACE = 64, 6, "no landing place for a generation word is free: too many loads at a time"
"""Landing places."""


def wide(tp: int) -> oracle.Case:
    of = case(False, tp, 1, TOKENS)
    return replaced(of, producer=replaced(of.producer, blocks=BLOCKS), consumer=replaced(of.consumer, blocks=BLOCKS))


@dataclass(eq=False)
class Given:
    """A lease, and the producer's blocks that it is on."""

    lease: Lease
    request: str
    blocks: list[int]


@dataclass(eq=False)
class Side:
    """One start of one producer. It is `troubled` from what may cost it its connection until nothing of it is under way."""

    key: PeerKey
    berths: list[Berth]
    memories: list[list[oracle.Bytes]]
    meeting: Meeting
    producer: Producer
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    leases: list[Given] = field(default_factory=list)
    met: bool = True
    dead: bool = False
    troubled: bool = False

    @property
    def names(self) -> set[str]:
        return {berth.transport.name for berth in self.berths}


@dataclass(eq=False)
class Wanted:
    """A load under way: the bytes that it is to have, and whether it must end well."""

    side: Side
    given: Given
    blocks: list[int]
    places: list[tuple[int, int, int]]
    expected: list[bytes]
    fine: bool
    wrong: bool = False


class Wire(InProcessTransport):
    """Meets each peer's faults as they come up, and says which of them cost a connection."""

    def __init__(self, name: str, harbour: Harbour, clock: Clock) -> None:
        super().__init__(name, harbour, timeout_s=TIMEOUT_S, clock=clock)
        self.coming: dict[str, list[Fault]] = {}
        self.hit: list[str] = []

    def read(self, prepared: Any, tiles: Any, notification: bytes = b"") -> Any:
        coming = self.coming.get(prepared.peer)
        if coming:
            fault = coming.pop(0)
            self._faults[self._started] = (fault,)
            if isinstance(fault, (Drop, LateLanding, PeerDeath)):
                self.hit.append(prepared.peer)
        return super().read(prepared, tiles, notification)


class Carrier:
    """What is wrong with a load's own reads."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.wrong = inner, set[str]()
        self.ferry: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _insist(self, tiles: Any) -> None:
        for crossing in self.ferry._passage.under_way:
            if crossing.loading.tiles is tiles and crossing.load.request in self.wrong:
                raise RuntimeError("wrong with one")

    def read(self, prepared: Any, tiles: Any, notification: bytes = b"") -> Read:
        self._insist(tiles)
        return self._inner.read(prepared, tiles, notification)

    def read_together(self, prepared: Any, loads: Sequence[Any]) -> Iterable[Read]:
        if prepared.anywhere:
            for tiles in loads:
                self._insist(tiles)
            return read_together(self._inner, prepared, loads)
        return (self.read(prepared, tiles) for tiles in loads)


@dataclass(eq=False)
class Late:
    """Copies that are made when they are asked after for so many times."""

    copy: Any
    left: int
    over: Any = None
    seconds = 0.0

    @property
    def done(self) -> bool:
        self.left -= 1
        if self.left < 0 and self.over is None:
            self.over = self.copy()
        return self.over is not None

    @property
    def moved(self) -> int:
        return int(self.over.moved)


class Mover(HostMover):
    delay = 0

    def start(self, prepared: Any, bound: Any) -> Any:
        return Late(lambda: HostMover.start(self, prepared, bound), self.delay)


LOADS = st.tuples(st.integers(0, 5), st.integers(0, 7), st.sampled_from(["", "", "", "wrong", "tables"]))
"""Whose, by which of its leases, and what is wrong with it."""
FAULTS = st.one_of(
    st.builds(Delay, polls=st.integers(0, 5)),
    st.builds(Delay, seconds=st.sampled_from([0.5, 2.0])),
    st.builds(Reorder, seed=st.integers(0, 3), polls=st.integers(1, 3)),
    st.just(Duplicate("bytes")),
    st.just(Drop()),
    st.builds(LateLanding, releases=st.integers(0, 5)),
    st.builds(PeerDeath, after_runs=st.integers(0, 40)),
)


class Loads(RuleBasedStateMachine):
    @initialize(
        tps=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3),
        mapped=st.booleans(),
        landings=st.sampled_from([MANY, FEW]),
    )
    def begin(self, tps: list[int], mapped: bool, landings: int) -> None:
        self.landings, self.mapped, self.harbour, self.clock = landings, mapped, Harbour(), Clock()
        self.numbers = iter(range(10**6))
        self.wanted: dict[str, Wanted] = {}
        self.ended: list[str] = []
        self.free = list(range(BLOCKS))
        world = oracle.build_world(wide(1))
        (consumer,) = manifests_of(wide(1))[1]
        self.memory = world.consumers[place(consumer.identity.rank)].buffers
        for buffer in self.memory:
            buffer[:] = ANOTHER
        self.taken = [np.zeros(len(buffer), bool) for buffer in self.memory]
        self.consumer = at_addresses(consumer, [buffer.ctypes.data for buffer in self.memory])
        self.words = Words(landings, consumer.identity)
        self.wire, self.mover = Wire("d", self.harbour, self.clock), Mover()
        self.carrier = Carrier(Strategies(self.wire, Mapped([self.mover], self.clock)) if mapped else self.wire)
        storages = [Storage(b.ctypes.data, b.nbytes) for b in self.memory if b.nbytes]
        self.carrier.register([*storages, self.words.storage])
        self.ferry = Ferry(self.carrier, self.words, 0, self._fill, PATIENCE_S, self.clock)
        self.carrier.ferry = self.ferry
        self.sides = [self._started(f"P{number}", tp, "1") for number, tp in enumerate(tps)]
        self.ferry.step()
        for side in (*self.sides, *self.sides):
            self._lease(side)

    def _fill(self, fills: Fills) -> None:
        for region in np.unique(fills.region).tolist():
            mine = fills.region == region
            zero(self.memory[region], fills.offset[mine], fills.length[mine])

    def _started(self, engine: str, tp: int, incarnation: str) -> Side:
        world = oracle.build_world(replaced(wide(tp), seed=next(self.numbers)))
        manifests = [self._named(it, engine, incarnation) for it in manifests_of(wide(tp))[0]]
        there = berths(world, manifests, self.harbour, 8, self.mapped)
        buffers = [world.producers[place(it.identity.rank)].buffers for it in manifests]
        memories = [[shared.bytes for shared in berth.memories[:-1]] for berth in there] if self.mapped else buffers
        key = PeerKey("127.0.0.1:7000", engine, incarnation)
        meeting = meet(key, Welcome(engine, incarnation, 60.0, tuple(it.card for it in there)), [self.consumer])
        self.ferry.meet(meeting)
        return Side(key, there, memories, meeting, Producer(incarnation, 8, 60.0))

    def _named(self, manifest: Manifest, engine: str, incarnation: str) -> Manifest:
        return replace(manifest, identity=replace(manifest.identity, engine=engine, incarnation=incarnation))

    def _side(self, number: int) -> Side:
        return self.sides[number % len(self.sides)]

    @rule(number=st.integers(0, 5))
    def lease(self, number: int) -> None:
        self._lease(self._side(number))

    def _lease(self, side: Side) -> None:
        if len(side.free) < THERE or len(side.leases) == 8:
            return
        name = f"p{next(self.numbers)}"
        side.producer.open(name)
        given = Given(side.producer.publish(name, self.clock.now), name, [side.free.pop() for _ in range(THERE)])
        for lease in side.producer.take_opened():
            for berth in side.berths:
                berth.words.live(lease)
        side.leases.append(given)

    @rule(number=st.integers(0, 5), which=st.integers(0, 7))
    def end_lease(self, number: int, which: int) -> None:
        """Its blocks are another request's at once."""
        side = self._side(number)
        if not side.leases:
            return
        given = side.leases.pop(which % len(side.leases))
        side.producer.receive(Release(side.key.incarnation, given.lease, "D"), self.clock.now)
        self._reuse(side, given)
        side.producer.close_all(end.request for end in side.producer.take_closing())

    def _reuse(self, side: Side, given: Given) -> None:
        for berth in side.berths:
            berth.words.kill(given.lease)
        for wanted in self.wanted.values():
            wanted.fine = wanted.fine and wanted.given is not given
        for memory, berth in zip(side.memories, side.berths, strict=True):
            for region, buffer in zip(berth.manifest.regions, memory, strict=True):
                size = region.length // BLOCKS
                for block in given.blocks:
                    buffer[block * size : (block + 1) * size] = next(self.numbers) % 251
        side.free += given.blocks

    @rule(number=st.integers(0, 5), which=st.integers(0, 7))
    def load(self, number: int, which: int) -> None:
        self.load_together([(number, which, "")], False, 0)

    @rule(
        loads=st.lists(LOADS, min_size=2, max_size=5),
        in_step=st.booleans(),
        delay=st.integers(0, 3),
    )
    def load_together(self, loads: list[tuple[int, int, str]], in_step: bool, delay: int) -> None:
        """Some together, from one producer or several."""
        handed: list[Load] = []
        for number, which, what in loads:
            side = self._side(number)
            if not side.leases or len(self.free) < HERE:
                continue
            handed.append(self._made(side, side.leases[which % len(side.leases)], what))
        self.mover.delay = delay
        hurried = in_step and self.mapped and all(self.ferry._links.mapped(it.peer) is not None for it in handed)
        self.ferry.load(*[replaced(it, in_step=hurried) for it in handed])
        if hurried:
            self.ferry.settle([it.request for it in handed], PATIENCE_S)
        self.look()

    def _made(self, side: Side, given: Given, what: str) -> Load:
        request = f"r{next(self.numbers)}"
        blocks = [self.free.pop() for _ in range(HERE)]
        src: dict[int, list[int] | int] = {0: list(given.blocks)}
        dst: dict[int, list[int] | int] = {0: list(blocks)}
        places, expected = self._expected(side, Request(TOKENS, src, dst, 0))
        for region, at, length in places:
            self.taken[region][at : at + length] = True
        if what == "tables":
            src = {0: [*given.blocks[:-1], BLOCKS]}
        elif what == "wrong":
            self.carrier.wrong.add(request)
        fine = side.met and not side.dead and not side.troubled and not self._stopped(side)
        self.wanted[request] = Wanted(side, given, blocks, places, expected, fine and not what, bool(what))
        return Load(request, side.key, given.lease, TOKENS, 0, src, dst)

    def _expected(self, side: Side, request: Request) -> tuple[list[tuple[int, int, int]], list[bytes]]:
        (plan,) = side.meeting.plans
        binding = self._binder(side).bind(request)
        ranks = {place(berth.manifest.identity.rank): memory for berth, memory in zip(side.berths, side.memories, strict=True)}
        places: list[tuple[int, int, int]] = []
        expected: list[bytes] = []
        for copy in copies_of(plan, binding):
            places.append((copy.dst_region, copy.dst, copy.length))
            expected.append(ranks[copy.source][copy.src_region][copy.src : copy.src + copy.length].tobytes())
        fills = binding.fills
        for region, at, length in zip(fills.region.tolist(), fills.offset.tolist(), fills.length.tolist(), strict=True):
            places.append((region, at, length))
            expected.append(bytes(length))
        return places, expected

    def _binder(self, side: Side) -> Binder:
        return Binder(side.meeting.plans[0])

    def _stopped(self, side: Side) -> bool:
        return any(self.harbour.stopped(name) for name in side.names)

    def _trouble(self, sides: Iterable[Side]) -> None:
        troubled = list(sides)
        for side in troubled:
            side.troubled = True
        for wanted in self.wanted.values():
            wanted.fine = wanted.fine and wanted.side not in troubled

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.ferry.step()
            self.look()

    @rule()
    def look(self) -> None:
        outcomes = self.ferry.outcomes()
        self._trouble([side for side in self.sides if side.names & set(self.wire.hit)])
        self.wire.hit.clear()
        for outcome in outcomes:
            self._end(outcome)
        for side in self.sides:
            busy = any(wanted.side is side for wanted in self.wanted.values())
            if side.troubled and not busy and not any(read.peer in side.names for read in self.wire._reads):
                side.troubled = False

    def _end(self, outcome: Outcome) -> None:
        assert outcome.request in self.wanted, f"{outcome.request} ended twice, or never began"
        wanted = self.wanted.pop(outcome.request)
        self.ended.append(outcome.request)
        scarce = self.landings == FEW and outcome.error == NO_PLACE
        assert not wanted.fine or not outcome.error or scarce, f"{outcome.request} was fine: {outcome.error}"
        assert not wanted.wrong or outcome.error, f"{outcome.request} could not be read, and ended well"
        if (
            outcome.request in self.carrier.wrong
            and not wanted.side.troubled
            and not outcome.error.startswith("P")
            and not scarce
        ):
            assert "wrong with one" in outcome.error
        assert "wrong with one" not in outcome.error or outcome.request in self.carrier.wrong, "it got another's error"
        for (region, at, length), expected in zip(wanted.places, wanted.expected, strict=True):
            if not outcome.error:
                assert self.memory[region][at : at + length].tobytes() == expected, f"{outcome.request} has other bytes"
            self.memory[region][at : at + length] = ANOTHER
            self.taken[region][at : at + length] = False
        self.free += wanted.blocks

    @invariant()
    def nothing_lands_in_blocks_of_others(self) -> None:
        for memory, taken in zip(getattr(self, "memory", ()), getattr(self, "taken", ()), strict=True):
            assert (memory[~taken] == ANOTHER).all()

    @invariant()
    def no_landing_place_is_had_twice(self) -> None:
        if not hasattr(self, "ferry"):
            return
        passage = self.ferry._passage
        had = [it for crossing in passage.under_way for it in crossing.landings]
        had += [warming.landing for warming in self.ferry._links.warming]
        assert sorted([*had, *passage.landings]) == list(range(self.landings))

    @rule(number=st.integers(0, 5), fault=FAULTS)
    @precondition(lambda self: not self.mapped)
    def spoil(self, number: int, fault: Fault) -> None:
        """A read that is made later, of one of the producer's ranks."""
        side = self._side(number)
        name = side.berths[number % len(side.berths)].transport.name
        self.wire.coming.setdefault(name, []).append(fault)

    @rule(number=st.integers(0, 5), what=st.sampled_from(["stop", "stop for long", "kill", "forget"]))
    def upset(self, number: int, what: str) -> None:
        side = self._side(number)
        if what == "forget":
            self.ferry.forget(side.key)
            side.met = False
            self._trouble([side])
        elif what == "kill" and not self.mapped:
            side.dead = True
            for name in side.names:
                self.harbour.kill(name)
            self._trouble([side])
        elif not side.dead and not self.mapped:
            for name in side.names:
                self.harbour.stop(name)
            if what == "stop for long":
                self.pass_time(TIMEOUT_S + 1)

    @rule(number=st.integers(0, 5))
    def mend(self, number: int) -> None:
        """One that was stopped goes on, one that was forgotten is met again, and one that died has another start."""
        side = self._side(number)
        for name in side.names:
            self.harbour.resume(name)
        if side.dead:
            self.ferry.forget(side.key)
            tp, incarnation = len(side.berths), str(int(side.key.incarnation) + 1)
            again = self._started(side.key.engine, tp, incarnation)
            self.sides[self.sides.index(side)] = again
            self._lease(again)
        elif not side.met:
            self.ferry.meet(side.meeting)
            side.met = True

    @rule(seconds=st.sampled_from([0.5, 0.5, PATIENCE_S + 1, TIMEOUT_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        if seconds > 1:
            running = {read.peer for read in self.wire._reads}
            self._trouble([side for side in self.sides if side.names & running or self._stopped(side)])

    def teardown(self) -> None:
        if not hasattr(self, "ferry"):
            return
        for side in self.sides:
            for name in side.names:
                self.harbour.resume(name)
        for _ in range(6):
            self.pass_time(TIMEOUT_S + 1)
            self.step(20)
            self.nothing_lands_in_blocks_of_others()
        assert not self.wanted, f"{sorted(self.wanted)} never ended"
        assert len(self.ended) == len(set(self.ended))
        passage = self.ferry._passage
        assert sorted(passage.landings) == list(range(self.landings))
        assert not passage.spent
        assert not passage.under_way
        assert not self.ferry._links.warming
        assert not self.wire._reads
        for side in self.sides:
            self.ferry.forget(side.key)
        self.step(2)
        assert not self.wire._peers
        assert not self.wire._prepared
        self.ferry.close()


Loads.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestLoads = Loads.TestCase
