"""The trouble of one end of `packed` stays its own: others are served, and what was lost for a moment comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.errors import TransportError
from kvferry.manifest.codec import decode, encode
from kvferry.plan import Plan
from kvferry.strategy import HostMover
from kvferry.strategy.asking import AGAIN_S
from kvferry.strategy.cost import Way
from kvferry.strategy.flights import DetouredRead
from kvferry.strategy.gathering import AGAIN, MARK, MAX_PLANS, MOST, SLOT_S, Introduction, Why, pack, refusal, refused
from kvferry.strategy.mapped import PeerGoneError
from kvferry.strategy.movers import Ticket
from kvferry.strategy.moves import Bound
from kvferry.strategy.scattered import Scattered, Settings
from kvferry.strategy.staging import LEAST, host_staging
from kvferry.strategy.ways import ScatteredPrepared
from kvferry.strided import Ints
from kvferry.transport import State
from kvferry.transport.contract import Read
from test_strategy_packed import MAPS, RATES, Ordered, World, ends_of, forced, part_of, world

TICK_S = 0.05


def producer(made: World, name: str, maps: bool = False) -> Scattered:
    """Another one, that holds the same."""
    wire = type(made.wire)(name, made.harbour, clock=made.clock, timeout_s=30.0)
    out = Scattered(wire, host_staging(1 << 17, mappable=maps), HostMover(), forced(maps=maps), made.clock)
    out.register(made.there.storages)
    return out


def prepared(made: World, target: Scattered, source: Scattered) -> ScatteredPrepared:
    found = target.prepare(made.plan, 0, target.connect(source.metadata()))
    assert isinstance(found, ScatteredPrepared)
    return found


def ended(made: World, read: Read, *sources: Scattered, target: Scattered | None = None) -> float:
    """Seconds until a read is over, while everybody else does what they do."""
    one, began = target or made.target, made.clock.now
    while one.poll(read) is State.RUNNING:
        made.clock.now += TICK_S
        for source in sources or (made.source,):
            source.notifications()
        one.notifications()
    return made.clock.now - began


def stopped_on_the_wire(made: World, read: DetouredRead) -> None:
    """Its producer is stopped while all that the read holds is on the wire, and it is given up."""
    assert isinstance(made.wire, Ordered)
    made.wire.slots_land = False
    for _ in range(50):
        made.source.notifications()
        made.target.poll(read)
    assert read.flights
    made.harbour.stop(made.source.name)
    made.wire.slots_land = True
    made.clock.now += 31
    assert made.target.poll(read) is State.FAILED
    assert made.target.release(read)
    made.target.forget(made.source.name)


def resumed(made: World) -> None:
    made.harbour.resume(made.source.name)
    for _ in range(5):
        made.source.notifications()
        made.target.notifications()


def test_a_stopped_producer_leaves_a_slot_to_the_others():
    made = world(wire=Ordered)
    healthy = producer(made, "q")
    theirs, others = made.prepare(), prepared(made, made.target, healthy)
    stopped_on_the_wire(made, made.read(theirs))
    assert made.target.landing.free == 1
    read = made.target.read(others, made.tiles)
    ended(made, read, healthy)
    assert read.state is State.DONE
    assert made.right
    made.target.release(read)
    resumed(made)
    assert made.target.landing.free == made.target.landing.slots


def test_who_waits_for_the_share_of_a_stopped_producer_fails_in_time_however_much_is_read_of_others():
    made = world(wire=Ordered)
    healthy = producer(made, "q")
    theirs, others = made.prepare(), prepared(made, made.target, healthy)
    stopped_on_the_wire(made, made.read(theirs))
    waiting, began = made.read(), made.clock.now
    many = 0
    while waiting.state is State.RUNNING:
        read = made.target.read(others, made.tiles)
        while made.target.poll(read) is State.RUNNING:
            made.clock.now += TICK_S
            healthy.notifications()
            made.target.poll(waiting)
        assert read.state is State.DONE
        made.target.release(read)
        many += 1
        made.clock.now += TICK_S
        made.target.poll(waiting)
    assert made.clock.now - began < 32
    assert many > 5
    assert f"what was read of {made.source.name} may still land" in waiting.error


def test_who_only_polls_has_the_slots_of_a_producer_that_goes_on_back():
    made = world(wire=Ordered)
    prepared(made, made.target, producer(made, "q"))
    stopped_on_the_wire(made, made.read())
    read = made.read()
    assert not read.flights
    made.harbour.resume(made.source.name)
    assert set(made.finish(read)) == {State.DONE}
    assert made.right


def test_a_producer_that_is_alone_may_have_all_slots():
    made = world(wire=Ordered)
    stopped_on_the_wire(made, made.read())
    assert made.target.landing.free == 0
    resumed(made)
    assert made.target.landing.free == made.target.landing.slots


def stuck(ways: tuple[Way, ...]) -> tuple[World, Scattered, ScatteredPrepared]:
    """All slots are kept for what a stopped producer may still write there; another one is met."""
    made = world(wire=Ordered)
    made.target = Scattered(
        type(made.wire)("t", made.harbour, clock=made.clock, timeout_s=30.0),
        host_staging(1 << 17, mappable=False),
        HostMover(),
        Settings(ways, RATES, maps=False),
        made.clock,
    )
    made.wire = made.target._wire
    made.target.register(made.here.storages)
    found = made.prepare()
    packed = found.detours["packed"]
    read = made.target._detour(packed, made.tiles)
    stopped_on_the_wire(made, read)
    assert made.target.landing.is_stuck
    healthy = producer(made, "q")
    return made, healthy, prepared(made, made.target, healthy)


def test_where_no_slot_can_be_used_loads_go_by_descriptors():
    made, healthy, others = stuck(("packed", "direct"))
    assert set(others.costs(made.tiles)) == {"direct"}
    read = made.target.read(others, made.tiles)
    ended(made, read, healthy)
    assert made.right
    assert made.target.carried["direct"] == 1
    resumed(made)
    assert set(others.costs(made.tiles)) == {"direct", "packed"}


def test_where_there_is_no_other_way_the_peer_that_holds_the_slots_is_named():
    made, healthy, others = stuck(("packed",))
    read = made.target.read(others, made.tiles)
    assert isinstance(read, DetouredRead)
    ended(made, read, healthy)
    assert read.state is State.FAILED
    assert f"what was read of {made.source.name} may still land in those that there are" in read.error
    resumed(made)
    again = made.target.read(others, made.tiles)
    ended(made, again, healthy)
    assert again.state is State.DONE
    assert made.right


def test_of_several_producers_none_holds_up_who_waits_for_it_alone():
    """The share of one bounds pieces under way, and costs no load its end."""
    made = world()
    producer(made, "q")
    others = prepared(made, made.target, producer(made, "r"))
    one = made.prepare()
    reads = [made.read(one) for _ in range(6)]
    assert sum(len(read.flights) for read in reads) == made.target.landing.slots - 1
    assert made.target.landing.berths(one.detours["packed"].source) == made.target.landing.slots - 1
    assert set(made.finish(*reads)) == {State.DONE}
    assert made.right
    made.target.forget(others.peer)
    assert made.target.landing.berths(one.detours["packed"].source) == made.target.landing.slots


@pytest.mark.parametrize("budget", [LEAST, 1 << 17], ids=["2 slots", "4 slots"])
def test_a_short_load_behind_long_ones_ends_before_them_where_another_producer_is_read_too(budget: int):
    made = world(budgets=(1 << 18, budget))
    prepared(made, made.target, producer(made, "q"))
    *long, short = ends_of(made, [*[made.tiles] * 6, part_of(made, 1)])
    assert short < long[0]


def test_producers_whose_rings_are_mapped_take_no_slots_and_no_share_of_them():
    made = world(maps=True)
    prepared(made, made.target, producer(made, "q", maps=True))
    made.target._settings = dataclasses.replace(made.target._settings, ways=("packed", "staged", "direct"))
    assert {*made.prepare().detours} == {"packed", "staged"}
    assert made.target.landing.peers == set()


class Failing(HostMover):
    """Raises what a device without memory does, so often."""

    def __init__(self, often: int) -> None:
        super().__init__()
        self.often = often

    def start(self, prepared: Ints, bound: Bound) -> Ticket:
        if self.often:
            self.often -= 1
            raise RuntimeError("out of memory")
        return super().start(prepared, bound)


@MAPS
def test_a_gather_that_fails_unexpectedly_gives_its_slot_back_and_is_made_when_it_is_asked_for_again(maps: bool):
    made = world(maps=maps)
    made.source.gathering._mover = Failing(5)
    read = made.read()
    assert ended(made, read) >= AGAIN_S
    assert read.state is State.DONE
    assert made.right
    assert made.source.gathering._mover.often == 0
    made.target.release(read)
    assert made.all_back()


@pytest.mark.parametrize(("gap", "when"), [(0.0, 1.0), (1.0, 0.5), (5.0, 1.0)])
def test_who_waits_behind_consumers_that_died_one_after_the_other_is_served(gap: float, when: float):
    made = world()
    live = made.prepare()
    for wait in (gap, when):
        dead = made.another()
        found = prepared(made, dead, made.source)
        made.source.notifications()
        for _ in range(2):
            dead.read(found, made.tiles)
        made.source.notifications()
        made.clock.now += wait
    assert made.source.gathering.free == 0
    read = made.read(live)
    assert ended(made, read) <= 2 * SLOT_S
    assert read.state is State.DONE
    assert made.right


def test_who_has_asked_again_as_often_as_a_ticket_allows_asks_under_a_new_one():
    made = world()
    read = made.read()
    tickets = [flight.ticket for flight in read.flights]
    for flight in read.flights:
        flight.ticket += 7 * AGAIN
        assert flight.ticket <= MOST < flight.ticket + AGAIN
    made.clock.now += AGAIN_S + 30 / 6
    made.target.poll(read)
    made.target.poll(read)
    assert {flight.ticket for flight in read.flights}.isdisjoint(tickets)
    assert all(flight.ticket < AGAIN for flight in read.flights)
    made.source.notifications()
    assert len(made.source.gathering._orders) == len(read.flights)
    assert made.finish(read) == [State.DONE]
    assert made.right


def test_a_plan_is_introduced_again_once_for_all_that_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    made = world()
    reads = [made.read(found) for found in [made.prepare()] for _ in range(4)]
    flights = sum(len(read.flights) for read in reads)
    assert flights > 1
    made.source.notifications()
    said: list[bytes] = []
    monkeypatch.setattr(made.wire, "notify", lambda peer, message: said.append(message))
    made.source.gathering._words[:] = 0
    for read in reads:
        for flight in read.flights:
            flight.ticket += 1
    made.clock.now += AGAIN_S + TICK_S
    for _ in range(10):
        made.target.poll(reads[0])
        for read in reads:
            made.target.poll(read)
    introductions = [message for message in said if b"plan" in message[: len(MARK) + 8]]
    assert len(said) == len(introductions) + flights
    assert len(introductions) == 1


def test_a_producer_that_died_fails_no_read_of_another_by_what_is_still_to_be_said_to_it():
    made = world(maps=True)
    healthy = producer(made, "q", maps=True)
    theirs, others = made.prepare(), prepared(made, made.target, healthy)
    one = made.read(theirs)
    reads = [made.target.read(others, made.tiles) for _ in range(2)]
    assert not reads[1].flights
    made.source.notifications()
    healthy.notifications()
    rings = made.target._rings
    assert rings is not None
    peek, read = rings.peek, rings.read
    looks: list[str] = []

    def looked(name: str, *rest: Any) -> Any:
        out = peek(name, *rest)
        if name == made.source.name:
            looks.append(name)
            if len(looks) == 2:
                made.harbour.kill(name)
        return out

    def copied(one: Any, *rest: Any, **more: Any) -> Any:
        if one.peer == made.source.name and len(looks) >= 2:
            raise PeerGoneError(one.peer)
        return read(one, *rest, **more)

    rings.peek, rings.read = looked, copied  # type: ignore[method-assign]
    made.target.poll(reads[1])
    assert one.state is State.FAILED
    for other in reads:
        ended(made, other, healthy)
    assert [other.state for other in reads] == [State.DONE, State.DONE]
    assert made.right


def test_there_is_room_for_the_boards_of_more_producers_than_a_session_knows():
    """Those that ended idle are known until they are forgotten."""
    made = world()
    target = Scattered(
        type(made.wire)("t", made.harbour, clock=made.clock),
        host_staging(LEAST, mappable=False),
        HostMover(),
        forced(),
        made.clock,
    )
    target.register(made.here.storages)
    for number in range(300):
        wire = type(made.wire)(f"pod {number}", made.harbour, clock=made.clock)
        source = Scattered(wire, host_staging(LEAST, mappable=False), HostMover(), forced(), made.clock)
        source.register(made.there.storages)
        assert set(prepared(made, target, source).detours) == {"packed"}
        made.harbour.kill(wire.name)


def test_plans_that_are_used_are_remembered_longer_than_those_that_are_not():
    made = world()
    found = made.prepare()
    gathering, plan = made.source.gathering, found.detours["packed"].plan
    ended(made, made.read(found))
    for number in range(MAX_PLANS):
        other = decode(plan, Plan)
        identity = replace(other.sources[0].identity, incarnation=f"x{number}")
        other = replace(other, sources=(replace(other.sources[0], identity=identity),))
        gathering.hear(pack(Introduction(gathering.offer.secret, encode(other))))
        if number % 50 == 0:
            assert ended(made, made.read(found)) < AGAIN_S
    assert len(gathering._plans) == MAX_PLANS
    assert ended(made, made.read(found)) < AGAIN_S
    assert made.right


@dataclasses.dataclass
class Refusing(HostMover):
    """Does not make any plan's copies ready."""

    def __post_init__(self) -> None:
        super().__init__()

    def prepare(self, moves: Any) -> Any:
        raise TransportError("no memory is left for its tables")


def refusing(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made.source.gathering, "_mover", Refusing())


REASON = "it cannot make the plan's copies ready"


@MAPS
@pytest.mark.parametrize("change", ["beyond its memory", "no plan", "no copies"])
def test_a_refused_introduction_fails_the_load_at_once_and_says_the_producers_reason(
    maps: bool, change: str, monkeypatch: pytest.MonkeyPatch
):
    made = world(maps=maps)
    reasons = {
        "beyond its memory": "the plan leads beyond the memory that it gathers from",
        "no plan": "its release does not accept the plan",
        "no copies": REASON,
    }
    if change == "beyond its memory":
        monkeypatch.setattr(made.source.gathering, "_storages", [])
    elif change == "no copies":
        refusing(made, monkeypatch)
    else:
        monkeypatch.setattr("kvferry.strategy.gathering.decode", lambda *_: decode(b"", Plan))
    read = made.read(notification=b"never")
    assert made.turn([read], 4) == [State.FAILED]
    assert made.clock.now == 0.0
    assert f"the producer refuses to gather, since {reasons[change]}" in read.error
    assert made.target.release(read)
    assert made.all_back()
    assert made.untouched


def either(made: World) -> ScatteredPrepared:
    """A consumer that may read by descriptors too, though it would not choose to."""
    made.target._settings = dataclasses.replace(made.target._settings, ways=("packed", "direct"), rates=PACKED)
    found = made.prepare()
    assert found.direct is not None
    assert found.way(made.tiles) == "packed"
    return found


PACKED = replace(RATES, wire=replace(RATES.wire, descriptor_s=1.0))


@MAPS
def test_what_a_producer_refuses_to_gather_is_read_by_descriptors_at_once_and_from_then_on(
    maps: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    made = world(maps=maps)
    refusing(made, monkeypatch)
    found = either(made)
    read = made.read(found, b"done")
    told: list[tuple[str, bytes]] = []
    for _ in range(50):
        told += made.source.notifications()
        if made.target.poll(read) is State.DONE:
            break
    told += made.source.notifications()
    assert read.state is State.DONE
    assert made.clock.now == 0.0
    assert made.right
    assert [message for _, message in told] == [b"done"]
    assert made.target.telemetry(read).bytes == read.size
    assert made.target.release(read)
    assert made.all_back()
    assert made.target.carried["direct"] == 1
    assert f"refuses to gather, since {REASON}" in caplog.text
    again = made.target.read(found, made.tiles)
    assert not isinstance(again, DetouredRead)
    assert made.target.poll(again) is State.DONE


@MAPS
def test_loads_that_are_read_together_and_refused_are_read_by_descriptors(maps: bool, monkeypatch: pytest.MonkeyPatch):
    made = world(maps=maps, budgets=(1 << 23, 1 << 23))
    refusing(made, monkeypatch)
    found = either(made)
    reads = list(made.target.read_together(found, [made.tiles, made.tiles]))
    for _ in range(50):
        made.source.notifications()
        if [made.target.poll(read) for read in reads] == [State.DONE] * 2:
            break
    assert made.right
    assert [made.target.poll(read) for read in reads] == [State.DONE] * 2
    assert [made.target.release(read) for read in reads].count(True) >= 1
    assert made.all_back()


def test_a_plan_that_is_refused_and_cannot_be_read_otherwise_fails_every_load_at_once(monkeypatch: pytest.MonkeyPatch):
    made = world()
    refusing(made, monkeypatch)
    found = made.prepare()
    read = made.read(found)
    assert made.turn([read], 4) == [State.FAILED]
    with pytest.raises(TransportError, match=f"it refuses to gather, since {REASON}"):
        made.target.read(found, made.tiles)


def test_a_consumer_of_an_earlier_release_finds_its_ticket_in_no_refusal():
    words = np.array([0, refusal(Why.PLAN, 7), 9], np.int64)
    assert not (words == 7).any()
    assert refused(words, 7) == refused(words, AGAIN + 7) != ""
    assert refused(words, 9) == refused(words, 8) == ""
    assert "none that this release knows" in refused(np.array([-(6 * AGAIN + 7)]), 7)


def test_a_producer_takes_no_notice_of_kinds_of_messages_that_it_does_not_know():
    made = world()
    read = made.read()
    for kind in (["refusal", b"s" * 16, "why"], {"type": "newer"}, ["plan", made.source.gathering.offer.secret, 5, 6]):
        made.source.gathering.hear(MARK + msgspec.msgpack.encode(kind))
    assert made.finish(read) == [State.DONE]
    assert made.right
