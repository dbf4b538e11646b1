"""A producer's ring that is mapped: what is gathered is copied out of it as it is, and counts when the board was looked at
again. Whatever cannot be mapped is read over the wire."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.quay import staging_around
from kvferry.errors import TransportError
from kvferry.plan import Binder
from kvferry.strategy import SharedBytes, cost
from kvferry.strategy.flights import DetouredRead
from kvferry.strategy.gathering import SLOT_S
from kvferry.strategy.mapped import LOOK_S
from kvferry.strategy.shared import FOLDER
from kvferry.strategy.staging import LEAST, PAGE, Offer, host_staging
from kvferry.transport import Harbour, InProcessTransport, State
from kvferry.transport.contract import Read
from kvferry.transport.metadata import encode_metadata, open_metadata
from test_strategy_mapped import mapped_files
from test_strategy_packed import RATES, World, ends_of, part_of, taken_by, world
from transport_peer import PeerProcess
from transport_suite import RingWharf, crossing, dense_case, finish, model_case, until


def untold(made: World, **changes: Any) -> bytes:
    """The producer's metadata, with something else said of its ring."""
    found = open_metadata(made.source.metadata())
    offer = msgspec.msgpack.decode(found.more, type=Offer)
    return encode_metadata(
        msgspec.structs.replace(found, more=msgspec.msgpack.encode(msgspec.structs.replace(offer, **changes)))
    )


def read_by(made: World, metadata: bytes) -> DetouredRead:
    read = made.target.read(made.target.prepare(made.plan, 0, made.target.connect(metadata)), made.tiles)
    assert isinstance(read, DetouredRead)
    return read


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([("tp=1,layout=token", "tp=2"), ("tp=1", "tp=3"), ("tp=1", "tp=1,layout=token")]),
    st.integers(1, 300),
    st.integers(4, 40),
    st.integers(4, 40),
)
def test_scattered_bytes_arrive_through_a_mapped_ring_and_take_no_slot_to_land_in(
    sides: tuple[str, str], tokens: int, theirs: int, ours: int
) -> None:
    made = world(model_case("synthetic-12", *sides, tokens), budgets=(theirs * PAGE, ours * PAGE), maps=True)
    landing = made.target.landing
    read = made.read()
    assert read.detoured.mapped is not None
    held = made.source.gathering.free
    for _ in range(2000):
        made.turn([read])
        assert landing.free == landing.slots
        assert len(read.flights) <= held
        if read.state is not State.RUNNING:
            break
    assert read.state is State.DONE
    assert made.right
    assert made.target.release(read)
    assert made.all_back()


def test_nothing_but_what_is_said_goes_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(maps=True)
    prepared = made.prepare()

    def refuse(*_: object) -> Read:
        raise AssertionError("a read over the wire")

    monkeypatch.setattr(made.wire, "read", refuse)
    read = made.read(prepared)
    assert made.finish(read) == [State.DONE]
    assert made.right
    assert made.target.path(read.peer).name == "mapped ring"


def test_a_slot_that_was_given_to_another_before_the_second_look_is_asked_for_again() -> None:
    """Copies of the right bytes or of another's: nobody can tell, so that neither are accepted."""
    made = world(dense_case(layers=1, blocks=8), maps=True)
    prepared = made.prepare()
    other = made.another()
    theirs = made.prepare(other)
    made.scatterer.late = True
    read = made.read(prepared, b"never before")
    made.turn([read], 2)
    (flight,) = read.flights
    assert flight.stage.value == "scattering"
    old, slot = flight.ticket, flight.there
    made.clock.now += SLOT_S + 0.1
    made.source.notifications()
    intruders = taken_by(made, other, theirs)
    assert made.source.gathering._words[slot] not in (0, old)
    made.scatterer.tickets[0].done = True
    made.scatterer.late = False
    made.target.poll(read)
    assert (read.state, read.moved) == (State.RUNNING, 0)
    assert (flight.stage.value, flight.ticket != old) == ("asked", True)
    for intruder in intruders:
        other.release(intruder)
    for buffer, before in zip(made.here.buffers, made.before, strict=True):
        buffer[:] = before
    assert made.finish(read) == [State.DONE]
    assert made.right
    assert read.moved == Binder(made.plan).bind(made.case.request).bytes


def test_slots_that_are_always_given_to_others_fail_the_read() -> None:
    made = world(dense_case(layers=1, blocks=8), maps=True)
    made.scatterer.late = True
    read = made.read(notification=b"never")
    for _ in range(50):
        made.turn([read])
        made.clock.now += SLOT_S + 0.1
        made.source.notifications()
        for ticket in made.scatterer.tickets:
            ticket.done = True
    assert read.state is State.FAILED
    assert "a slot was given to another while it was read, 4 times; give the producer more staging_bytes" in read.error
    assert made.target.release(read)
    assert made.all_back()


def test_a_read_that_is_given_up_is_held_until_its_copies_have_ended_and_the_producer_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world(dense_case(layers=1, blocks=8), maps=True)
    made.scatterer.late = True
    read = made.read()
    made.turn([read], 2)
    told: list[bytes] = []
    monkeypatch.setattr(made.wire, "notify", lambda _, message: told.append(message))
    assert [made.target.release(read) for _ in range(3)] == [False] * 3
    assert len(told) == 1
    made.scatterer.tickets[0].done = True
    assert made.target.release(read)
    assert read.state is State.FAILED


def test_a_forgotten_producers_ring_is_closed_when_no_copy_out_of_it_is_under_way() -> None:
    gc.collect()
    made = world(dense_case(layers=1, blocks=8), maps=True)
    ring = made.source.gathering._staging.shared
    assert ring is not None
    before = maps_of(ring)
    made.scatterer.late = True
    read = made.read()
    made.turn([read], 2)
    assert maps_of(ring) == before + 1
    made.target.forget(read.peer)
    made.target.notifications()
    assert maps_of(ring) == before + 1
    made.scatterer.tickets[0].done = True
    made.target.notifications()
    assert maps_of(ring) == before
    assert made.target.release(read)


def maps_of(shared: SharedBytes) -> int:
    """How often this process has mapped it."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum(f"{FOLDER}/{shared.name}" in line for line in file)


@pytest.mark.parametrize("polled", [True, False], ids=["asked after", "not asked after"])
def test_a_producer_that_ends_fails_the_read_and_its_ring_is_closed_soon(polled: bool) -> None:
    made = world(maps=True)
    prepared = made.prepare()
    read = made.read(prepared, b"never")
    ring = made.source.gathering._staging.shared
    assert ring is not None
    made.source.close()
    if polled:
        assert made.target.poll(read) is State.FAILED
    made.clock.now += LOOK_S
    made.target.notifications()
    assert made.target.poll(read) is State.FAILED
    assert "its process has ended" in read.error
    assert made.target.release(read)
    assert maps_of(ring) == 1
    assert made.untouched
    with pytest.raises(TransportError, match="is gone: its process has ended"):
        made.read(prepared)


@pytest.fixture
def wharf() -> Iterator[RingWharf]:
    made = RingWharf(PeerProcess())
    yield made
    made.close()
    made.peer.close()


def test_a_killed_producer_is_let_go_of_and_its_successor_is_read(wharf: RingWharf) -> None:
    gc.collect()
    before = mapped_files()
    made = crossing(wharf, dense_case(blocks=256))
    transport = wharf.consumer()
    transport.register([storage for rank in made.here for storage in rank.storages])
    own, plan = mapped_files() - before, made.plans[0]
    prepared = transport.prepare(plan, 0, transport.connect(made.metadata[0]))
    assert finish(transport, transport.read(prepared, Binder(plan).tiles(made.case.request))) is State.DONE
    assert made.differing() == 0
    theirs = mapped_files() - before - own
    assert len(theirs) == 2
    assert all(os.path.exists(path) for path in theirs)
    wharf.stop()
    read = transport.read(prepared, Binder(plan).tiles(made.case.request), b"never")
    wharf.kill()
    assert finish(transport, read) is State.FAILED
    assert "its process has ended" in read.error
    assert transport.release(read)

    def closed() -> bool:
        transport.notifications()
        return mapped_files() - before == own

    until(closed, "the closing of a dead producer's ring")
    assert not any(os.path.exists(path) for path in theirs)
    wharf.restart()
    other = crossing(wharf, dense_case())
    transport.register([storage for rank in other.here for storage in rank.storages])
    again = transport.prepare(other.plans[0], 0, transport.connect(other.metadata[0]))
    assert finish(transport, transport.read(again, Binder(other.plans[0]).tiles(other.case.request))) is State.DONE
    assert other.differing() == 0
    assert transport.path(again.peer).name == "mapped ring"
    transport.close()
    assert mapped_files() - {"(deleted)"} == before


def test_an_offer_without_tokens_is_read_over_the_wire() -> None:
    made = world(maps=True)
    found = open_metadata(made.source.metadata())
    older = msgspec.msgpack.decode(found.more)[:7]
    read = read_by(made, encode_metadata(msgspec.structs.replace(found, more=msgspec.msgpack.encode(older))))
    assert read.detoured.mapped is None
    assert made.finish(read) == [State.DONE]
    assert made.right


def test_an_end_that_maps_nothing_offers_no_tokens_and_opens_none() -> None:
    assert world().source.gathering.offer.tokens == ()
    made = world(maps=True)
    other = made.another()
    read = other.read(made.prepare(other), made.tiles)
    assert isinstance(read, DetouredRead)
    assert read.detoured.mapped is None
    while made.turn([read], target=other) == [State.RUNNING]:
        pass
    assert made.right


def spoilt(made: World) -> dict[str, bytes]:
    """Offers whose tokens open nothing, or less than they say."""
    ring, board = made.source.gathering.offer.tokens
    replace = msgspec.structs.replace
    return {
        "garbage": untold(made, tokens=(replace(ring, token=b"no token"), board)),
        "no board": untold(made, tokens=(ring,)),
        "a short ring": untold(made, tokens=(replace(ring, length=PAGE), board)),
        "a ring elsewhere": untold(made, tokens=(replace(ring, address=ring.address + PAGE), board)),
    }


@pytest.mark.parametrize("what", ["garbage", "no board", "a short ring", "a ring elsewhere"])
def test_a_ring_that_cannot_be_opened_is_read_over_the_wire_and_that_is_said(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = world(maps=True)
    ring = made.source.gathering._staging.shared
    assert ring is not None
    before = maps_of(ring)
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        read = read_by(made, spoilt(made)[what])
    assert read.detoured.mapped is None
    assert f"the ring of peer {read.peer} cannot be mapped" in caplog.text
    assert maps_of(ring) == before
    assert made.finish(read) == [State.DONE]
    assert made.right


def test_where_there_is_no_room_to_share_a_ring_it_is_read_over_the_wire(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvferry.strategy.shared._reserved", full)
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        made = world(maps=True)
    assert "cannot be mapped by others" in caplog.text
    assert made.source.gathering.offer.tokens == ()
    read = made.read()
    assert made.finish(read) == [State.DONE]
    assert made.right


@pytest.mark.parametrize("budget", [LEAST, LEAST + PAGE, 1 << 20])
def test_a_ring_that_others_can_map_stays_within_the_budget(budget: int) -> None:
    staging = host_staging(budget)
    assert staging.shared is not None
    assert staging.sizes.bytes <= budget
    assert staging.shared.length <= budget + PAGE
    assert host_staging(budget, "landing").shared is None


def test_memory_that_nobody_holds_any_more_has_no_name_left() -> None:
    made = SharedBytes(8)
    path, memory = FOLDER / made.name, made.bytes
    assert path.exists()
    del made
    gc.collect()
    assert not path.exists()
    assert not memory.any()


def test_an_end_that_is_closed_leaves_no_file() -> None:
    made = world(maps=True)
    shared = (made.source.gathering._staging.shared, made.source._keep.shared)
    paths = [FOLDER / one.name for one in shared if one is not None]
    assert len(paths) == 2
    made.source.close()
    assert not any(path.exists() for path in paths)


def test_a_short_load_behind_long_ones_ends_long_before_them() -> None:
    made = world(budgets=(LEAST, LEAST), maps=True)
    *long, short = ends_of(made, [*[made.tiles] * 6, part_of(made, 1)])
    assert short < long[0]


def test_a_mapped_ring_costs_two_copies_and_no_reads_over_the_wire() -> None:
    made = world(budgets=(1 << 18, LEAST), maps=True)
    prepared = made.prepare()
    load = cost.through(prepared.detours["packed"].detour, made.tiles)
    offer = made.source.gathering.offer
    assert prepared.costs(made.tiles)["packed"] == cost.packed_s(load, RATES, offer.slot, offer.slots, mapped=True)
    assert cost.packed_s(load, RATES, offer.slot, 8, mapped=True) < cost.packed_s(load, RATES, offer.slot, 8)


def test_a_ring_in_memory_that_this_end_does_not_copy_in_is_not_opened() -> None:
    made = world(maps=True)
    peer, offer = made.target.connect(made.source.metadata()), made.source.gathering.offer
    assert made.target.landing.sources.meet(peer, offer, "vram").berths is None
    assert made.target.landing.sources.meet(peer, offer, "dram").berths is not None


@pytest.mark.parametrize("maps", [True, False])
def test_an_engines_ring_lies_where_others_can_map_it_unless_it_is_told_otherwise(maps):
    wire = InProcessTransport("p", Harbour())
    made = staging_around(wire, None, 0, Options(strategies=("packed",), map_rings=maps))
    assert made is not None
    assert (made._staging.shared is not None) is maps
    assert bool(made.gathering.offer.tokens) is maps
    made.close()
