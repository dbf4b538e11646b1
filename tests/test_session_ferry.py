"""Loads over the in-process transport, moved on by hand: what arrives, what is said of it, and when, whatever goes wrong."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.errors import MismatchError, SessionError, TransportError
from kvferry.manifest import Identity
from kvferry.plan import Request
from kvferry.session import Ferry, Lease, Meeting, Outcome, PeerKey, Release, Welcome, Words, meet
from kvferry.strategy import HostMover
from kvferry.transport import Harbour, InProcessTransport, NixlOptions, NixlTransport, Storage
from kvferry.transport.faults import Delay, Drop, Duplicate, LateLanding, PeerDeath, Reorder
from session_dock import PATIENCE_S, TIMEOUT_S, Berth, Dock, berths, case, dock
from transport_suite import until

PAIRS = [(1, 1), (1, 2), (2, 1), (4, 2)]
ENOUGH = 8


def errors(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes]


def loaded(made: Dock, request: str = "again") -> None:
    """A load that is handed in now arrives, whole."""
    made.hand_in(made.load(made.lease(request), request))
    assert errors(made.step(ENOUGH)) == [""] * len(made.ferries)
    assert made.differing() == []


def nothing_left(made: Dock) -> None:
    """No read is held, and every landing place is free."""
    made.step()
    assert made.free_landings == [8] * len(made.ferries)
    assert all(not end._reads for end in made.ends)


def memory(made: Dock) -> list[np.ndarray]:
    return [buffer for rank in made.world.consumers.values() for buffer in rank.buffers]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("tp_p", "tp_d"), PAIRS)
@pytest.mark.parametrize(("tokens", "start"), [(21, 0), (24, 0), (21, 8)])
def test_every_byte_arrives_and_as_many_as_were_predicted(hybrid, tp_p, tp_d, tokens, start):
    made = dock(case(hybrid, tp_p, tp_d, tokens, start))
    made.hand_in(made.load(made.lease()))
    outcomes = made.step(ENOUGH)
    assert errors(outcomes) == [""] * tp_d
    assert made.differing() == []
    assert [o.moved for o in outcomes] == [made.world.expected[rank].moved for rank in made.world.consumers]
    assert all(o.moved == o.predicted > 0 and o.runs > 0 and o.tokens == tokens - start for o in outcomes)
    assert tokens == 24 or sum(made.filled) > 0
    nothing_left(made)


def test_nothing_is_said_before_the_words_were_read():
    made = dock(case(True, 2, 1), {2: [Delay(polls=2)]})
    made.hand_in(made.load(made.lease()))
    assert made.step() == []
    assert made.step() == []
    assert made.differing() == []
    assert errors(made.step()) == [""]


def test_what_arrives_while_it_is_posted_is_said_in_the_same_step():
    """Data, and then the words: neither costs a pause of the thread's."""
    made = dock(case(True, 2, 1))
    made.hand_in(made.load(made.lease()))
    assert errors(made.step()) == [""]
    assert made.differing() == []


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("ending", ["released", "expired"])
def test_a_lease_that_ends_before_its_words_are_read_fails_the_load(steps, ending):
    made = dock(case(False, 1, 1), {0: [Delay(polls=2)], 1: [Delay(polls=2)]})
    lease = made.lease()
    made.hand_in(made.load(lease))
    assert made.step(steps) == []
    if ending == "released":
        made.producer.receive(Release("1", lease, "another"), made.clock.now)
    else:
        made.producer.expire(made.clock.now + 60)
    made.turn()
    (error,) = errors(made.step(ENOUGH))
    assert "has given the blocks of the reference away" in error
    nothing_left(made)


def test_one_rank_whose_word_is_dead_fails_the_load():
    made = dock(case(False, 2, 1))
    lease = made.lease()
    made.berths[1].words.kill(lease)
    made.hand_in(made.load(lease))
    assert "given the blocks" in errors(made.step(ENOUGH))[0]


def test_a_slot_that_has_another_lease_while_bytes_are_under_way_fails_the_load():
    made = dock(case(False, 1, 1), {0: [Delay(polls=5)]}, slots=1)
    lease = made.lease()
    made.hand_in(made.load(lease))
    made.step(3)
    made.producer.receive(Release("1", lease, "another"), made.clock.now)
    made.turn()
    assert made.lease("other").slot == lease.slot
    assert "given the blocks" in errors(made.step(2 * ENOUGH))[0]


def test_a_reference_that_is_replayed_after_its_slot_was_reused_fails():
    made = dock(case(False, 1, 2), slots=1)
    lease = made.lease()
    made.hand_in(made.load(lease))
    assert errors(made.step(ENOUGH)) == ["", ""]
    made.producer.receive(Release("1", lease, "reader"), made.clock.now)
    made.turn()
    other = made.lease("other")
    assert (other.slot, other.generation != lease.generation) == (lease.slot, True)
    made.hand_in(made.load(lease, "replayed"))
    assert all("for a second time" in error for error in errors(made.step(ENOUGH)))
    made.hand_in(made.load(other, "other"))
    assert errors(made.step(ENOUGH)) == ["", ""]
    nothing_left(made)


def test_two_loads_of_one_lease_both_arrive():
    made = dock(case(True, 2, 1))
    lease = made.lease()
    made.hand_in(made.load(lease, "one"))
    made.hand_in(made.load(lease, "two"))
    assert sorted((o.request, o.error) for o in made.step(ENOUGH)) == [("one", ""), ("two", "")]
    assert made.differing() == []
    nothing_left(made)


@pytest.mark.parametrize("read", [0, 1], ids=["data", "word"])
def test_what_never_arrives_fails_the_load_once_and_the_next_one_arrives(read):
    made = dock(case(True, 1, 1), {read: [Drop()]})
    made.hand_in(made.load(made.lease()))
    assert made.step(20) == []
    made.clock.now = TIMEOUT_S + 1
    assert ["nothing arrived for 30 s" in error for error in errors(made.step(ENOUGH))] == [True]
    nothing_left(made)
    loaded(made)


@pytest.mark.parametrize("read", [0, 1, 2, 3])
def test_nothing_is_said_of_a_load_while_its_bytes_may_still_land(read):
    made = dock(case(True, 2, 1), {read: [LateLanding(releases=5)]})
    made.hand_in(made.load(made.lease()))
    end = made.ends[0]
    outcomes: list[Outcome] = []
    for _ in range(20):
        unsafe = bool(end._reads)
        outcomes += made.step()
        if outcomes:
            break
    assert unsafe
    assert [("may still land" in o.error) for o in outcomes] == [True]
    assert not end._reads
    after = [buffer.copy() for buffer in memory(made)]
    landed = [words._words.copy() for words in made.landings]
    assert made.step(20) == []
    assert all(np.array_equal(a, b) for a, b in zip(after, memory(made), strict=True))
    assert all(np.array_equal(a, w._words) for a, w in zip(landed, made.landings, strict=True))
    nothing_left(made)
    loaded(made)


def test_bytes_that_land_twice_are_seen_to_before_the_words_are_read():
    made = dock(case(False, 1, 1), {0: [Duplicate("bytes")], 1: [Duplicate("bytes")]})
    made.hand_in(made.load(made.lease()))
    assert errors(made.step(ENOUGH)) == [""]
    after = [buffer.copy() for buffer in memory(made)]
    made.world.producers[0, 0].buffers[0][:] = 0
    made.step(ENOUGH)
    assert all(np.array_equal(a, b) for a, b in zip(after, memory(made), strict=True))


def test_a_producer_that_dies_fails_its_loads_once_each_and_its_next_start_is_read():
    made = dock(case(False, 1, 1), {0: [PeerDeath(after_runs=3)]})
    lease = made.lease()
    for name in ("a", "b"):
        made.hand_in(made.load(lease, name))
    found = made.step(ENOUGH)
    made.hand_in(made.load(lease, "c"))
    found += made.step(ENOUGH)
    assert sorted(o.request for o in found) == ["a", "b", "c"]
    assert all("died" in o.error for o in found)
    assert all("P at 127.0.0.1:7000 since its start 1 is gone or out of reach: " in o.error for o in found)
    nothing_left(made)
    restarted = restart(made, "2")
    made.hand_in(made.load(made.lease("d"), "d", peer=restarted))
    assert errors(made.step(ENOUGH)) == [""]
    assert made.differing() == []


def restart(made: Dock, incarnation: str) -> PeerKey:
    """The producer's memory under a new start, met by every ferry."""
    manifests = [replace(b.manifest, identity=replace(b.manifest.identity, incarnation=incarnation)) for b in made.berths]
    made.berths = berths(made.world, manifests, made.harbour, 8)
    welcome = Welcome("P", incarnation, 60.0, tuple(b.card for b in made.berths))
    peer = PeerKey(made.peer.address, "P", incarnation)
    for ferry in made.ferries:
        ferry.meet(meet(peer, welcome, made.consumers))
    return peer


def test_loads_wait_for_a_broken_connection_to_be_let_go_and_then_cross_over_a_new_one():
    made = dock(case(False, 2, 1), {1: [LateLanding(releases=6)]})
    made.hand_in(made.load(made.lease("a"), "a"))
    assert made.step(3) == []
    made.hand_in(made.load(made.lease("b"), "b"))
    outcomes = made.step(20)
    assert [(o.request, bool(o.error)) for o in outcomes] == [("a", True), ("b", False)]
    assert made.differing() == []


def test_a_stopped_producer_keeps_its_loads_and_later_ones_are_told_after_a_while():
    made = dock(case(False, 1, 1))
    name = made.berths[0].transport.name
    made.harbour.stop(name)
    made.hand_in(made.load(made.lease("a"), "a"))
    made.step()
    made.clock.now = TIMEOUT_S + 1
    made.step()
    made.hand_in(made.load(made.lease("b"), "b"))
    assert made.step(20) == []
    made.clock.now += PATIENCE_S
    (second,) = made.step(20)
    assert second.request == "b"
    assert "its connection broke, and reads over it have not ended in 5 s" in second.error
    made.harbour.resume(name)
    (first,) = made.step(ENOUGH)
    assert (first.request, "nothing arrived" in first.error) == ("a", True)
    nothing_left(made)
    loaded(made)


def test_loads_that_share_a_connection_that_breaks_are_each_reported_once_with_the_reason():
    made = dock(case(True, 2, 1), {0: [Delay(polls=50)], 1: [Delay(polls=50)], 5: [LateLanding(releases=2)]})
    lease = made.lease()
    for name in ("a", "b", "c"):
        made.hand_in(made.load(lease, name))
    first = made.step(2)
    made.hand_in(made.load(lease, "later"))
    found = {o.request: o.error for o in first + made.step(30)}
    assert sorted(found) == ["a", "b", "c", "later"]
    assert all("the read was lost, and may still land" in found[name] for name in ("a", "b", "c"))
    assert found["later"] == ""
    assert made.differing() == []
    assert made.step(ENOUGH) == []
    nothing_left(made)


def failing(method: Callable[..., Any], number: int | set[int], error: Exception) -> Callable[..., Any]:
    """`method`, but for its call `number`, or for several."""
    calls = iter(range(1000))
    bad = number if isinstance(number, set) else {number}

    def called(*arguments: Any) -> Any:
        if next(calls) in bad:
            raise error
        return method(*arguments)

    return called


@pytest.mark.parametrize("error", [TransportError("refused"), RuntimeError("unheard of")])
@pytest.mark.parametrize(
    ("method", "number"),
    [("read", i) for i in range(4)] + [(method, i) for method in ("poll", "telemetry") for i in range(2)],
)
def test_a_call_that_raises_half_way_fails_that_load_and_leaves_nothing_behind(monkeypatch, method, number, error):
    made = dock(case(True, 2, 1))
    end = made.ends[0]
    monkeypatch.setattr(end, method, failing(getattr(end, method), number, error))
    made.hand_in(made.load(made.lease()))
    (outcome,) = made.step(20)
    assert str(error) in outcome.error
    assert outcome.moved == 0
    nothing_left(made)
    loaded(made)


MEETING = [("connect", 0), ("connect", 1), *(("prepare", i) for i in range(4)), ("read", 0), ("read", 1)]


@pytest.mark.parametrize("error", [TransportError("refused"), RuntimeError("unheard of")])
@pytest.mark.parametrize(("method", "number"), MEETING)
def test_a_producer_that_cannot_be_read_from_when_it_is_met_is_tried_again_at_the_first_load(
    monkeypatch, method, number, error
):
    made = dock(case(True, 2, 1), warm=False)
    end = made.ends[0]
    monkeypatch.setattr(end, method, failing(getattr(end, method), number, error))
    assert made.step(3) == []
    assert not end._peers
    loaded(made)
    nothing_left(made)


@pytest.mark.parametrize("error", [TransportError("refused"), RuntimeError("unheard of")])
@pytest.mark.parametrize(("method", "number"), MEETING[:-2])
def test_a_producer_that_cannot_be_connected_to_by_a_load_either_fails_that_load(monkeypatch, method, number, error):
    made = dock(case(True, 2, 1), warm=False)
    end = made.ends[0]
    monkeypatch.setattr(end, method, failing(getattr(end, method), {number, 2 * number + 1}, error))
    made.step()
    made.hand_in(made.load(made.lease()))
    (outcome,) = made.step(20)
    assert str(error) in outcome.error
    nothing_left(made)
    loaded(made)


def test_a_producer_is_connected_to_and_read_from_when_it_is_met(monkeypatch):
    """So that a first load makes no call that a second does not make."""
    made = dock(case(True, 2, 1))
    end = made.ends[0]
    nothing_left(made)
    assert len(end._prepared) == 4
    assert end._started == 2
    assert all(made.landings[0].landed(place) == 0 for place in range(8))

    def again(*arguments: Any) -> Any:
        raise AssertionError("this was done at the meeting")

    monkeypatch.setattr(end, "connect", again)
    monkeypatch.setattr(end, "prepare", again)
    loaded(made)


@pytest.mark.parametrize("fault", [LateLanding(releases=3), Drop()])
def test_a_connection_that_does_not_come_about_is_made_anew_by_the_first_load(fault):
    made = dock(case(False, 2, 1), {1: [fault]}, warm=False)
    made.step(2)
    made.clock.now = TIMEOUT_S + 1
    made.step(ENOUGH)
    assert not made.ends[0]._peers
    nothing_left(made)
    loaded(made)


def test_a_load_from_a_producer_that_was_just_met_does_not_wait_for_the_connection_to_be_warm():
    made = dock(case(False, 2, 1), {0: [Delay(polls=100)]}, warm=False)
    loaded(made)
    made.step(100)
    nothing_left(made)


def test_a_producer_of_which_one_rank_cannot_be_reached_is_never_taken_for_connected():
    made = dock(case(False, 2, 1), warm=False)
    made.harbour.kill(made.berths[1].transport.name)
    for name in ("a", "b", "c"):
        made.hand_in(made.load(made.lease(name), name))
        assert ["is not in this harbour" in error for error in errors(made.step(ENOUGH))] == [True]
    assert not made.ends[0]._peers
    assert not made.ends[0]._prepared


def test_a_release_that_raises_is_asked_again(monkeypatch):
    made = dock(case(False, 1, 1), {0: [LateLanding(releases=1)]})
    end = made.ends[0]
    monkeypatch.setattr(end, "release", failing(end.release, 0, RuntimeError("not now")))
    made.hand_in(made.load(made.lease()))
    assert ["may still land" in error for error in errors(made.step(20))] == [True]
    nothing_left(made)


def test_a_read_that_is_done_and_not_let_go_is_asked_for_until_it_is(monkeypatch):
    made = dock(case(False, 1, 1))
    end, refusals = made.ends[0], iter([False] * 5)
    release = end.release
    monkeypatch.setattr(end, "release", lambda read: next(refusals, True) and release(read))
    made.hand_in(made.load(made.lease()))
    assert errors(made.step(ENOUGH)) == [""]
    assert next(refusals, None) is None
    nothing_left(made)


def test_a_peer_that_cannot_be_forgotten_is_connected_again(monkeypatch):
    made = dock(case(False, 1, 1), {0: [LateLanding(releases=1)]})
    end = made.ends[0]
    monkeypatch.setattr(end, "forget", failing(end.forget, 0, RuntimeError("not now")))
    made.hand_in(made.load(made.lease()))
    assert ["may still land" in error for error in errors(made.step(20))] == [True]
    loaded(made)


def test_an_outcome_is_said_even_where_the_path_is_not_known(monkeypatch):
    made = dock(case(False, 1, 1))

    def path(peer: str) -> None:
        raise TransportError(f"{peer} is not connected")

    monkeypatch.setattr(made.ends[0], "path", path)
    made.hand_in(made.load(made.lease()))
    assert errors(made.step(ENOUGH)) == [""]


BAD = {
    "a block past the producer's last": {"src": {0: [1, 2, 3, 4, 5, 24]}},
    "a huge block": {"src": {0: [1, 2, 3, 4, 5, 1 << 40]}},
    "a negative block": {"src": {0: [1, 2, 3, 4, 5, -2]}},
    "a hole where a block is needed": {"src": {0: [1, 2, -1, 4, 5, 6]}},
    "too few blocks": {"src": {0: [1, 2]}},
    "no table": {"src": {}},
    "one block for many": {"src": {0: 3}},
    "text": {"src": {0: ["1", "2", "3", "4", "5", "6"]}},
    "a nested list": {"src": {0: [[1, 2, 3, 4, 5, 6]]}},
    "nothing": {"src": {0: None}},
    "a block of ours twice": {"dst": {0: [1, 1, 2]}},
    "a block past our last": {"dst": {0: [1, 2, 24]}},
    "more tokens than blocks": {"tokens": 1 << 40},
    "tokens before the first": {"start": -1},
    "a start past the end": {"start": 22},
    "a start inside a block": {"start": 3},
    "a slot past the last": {"lease": Lease(8, 1)},
    "a slot among the producer's landing places": {"lease": Lease(9, 1)},
    "a huge slot": {"lease": Lease(1 << 40, 1)},
    "a negative slot": {"lease": Lease(-1, 1)},
    "a lease that never was": {"lease": Lease(5, 1)},
    "the number of a dead word": {"lease": Lease(5, 0)},
    "a producer that was never met": {"peer": PeerKey("127.0.0.1:1", "P", "0")},
}


@pytest.mark.parametrize("way", ["transport", "mapped", "in a step"])
@pytest.mark.parametrize("changed", BAD.values(), ids=BAD)
def test_a_load_that_makes_no_sense_is_an_error_and_nothing_else(changed, way):
    made = dock(case(False, 1, 1), mapped=way != "transport")
    lease = made.lease()
    if changed == BAD["the number of a dead word"]:
        made.berths[0].words.live(Lease(5, 7))
    loads = [made.load(lease, "bad", **changed), made.load(lease, "good")]
    if way == "in a step":
        made.ferries[0].load(*[replaced(load, in_step=True) for load in loads])
        made.ferries[0].settle(["bad", "good"], PATIENCE_S)
    else:
        for load in loads:
            made.hand_in(load)
    found = {o.request: o.error for o in made.step(ENOUGH)}
    assert sorted(found) == ["bad", "good"]
    assert found["bad"]
    assert found["good"] == ""
    nothing_left(made)


def test_a_load_waits_for_landing_places_that_another_has():
    made = dock(case(False, 2, 1), {4: [Delay(polls=3)]}, landings=3)
    lease = made.lease()
    for name in ("a", "b"):
        made.hand_in(made.load(lease, name))
    assert [(o.request, o.error) for o in made.step(ENOUGH)] == [("a", ""), ("b", "")]
    assert made.free_landings == [3]
    loaded(made)


def test_a_load_for_which_there_never_are_landing_places_is_an_error_and_gives_back_those_it_had():
    made = dock(case(False, 2, 1), landings=1)
    lease = made.lease()
    for name in ("a", "b"):
        made.hand_in(made.load(lease, name))
    found = {o.request: o.error for o in made.step(ENOUGH)}
    assert sorted(found) == ["a", "b"]
    assert all("no landing place" in error for error in found.values())
    assert made.free_landings == [1]


@pytest.mark.parametrize("lost", [None, "b"])
def test_words_of_loads_that_arrive_together_are_read_together_and_each_decides_for_its_own(monkeypatch, lost):
    made = dock(case(False, 2, 1))
    loaded(made)
    leases = {name: made.lease(name) for name in ("a", "b", "c")}
    if lost:
        for berth in made.berths:
            berth.words.kill(leases[lost])
    reads = []
    transport = made.ends[0]
    read = transport.read
    monkeypatch.setattr(transport, "read", lambda prepared, *given: (reads.append(prepared), read(prepared, *given))[1])
    for name, lease in leases.items():
        made.hand_in(made.load(lease, name))
    found = {o.request: o.error for o in made.step(ENOUGH)}
    assert {name for name, error in found.items() if error} == ({lost} if lost else set())
    assert sorted(found) == ["a", "b", "c"]
    (link,) = (peer.link for peer in made.ferries[0]._links.peers.values())
    assert [reads.count(prepared) for _, prepared in link.words] == [1, 1]
    assert [reads.count(prepared) for prepared in link.data] == [3, 3]
    nothing_left(made)


@pytest.mark.parametrize("number", [4, 5])
def test_a_load_that_has_arrived_does_not_wait_for_landing_places_that_may_never_come_back(number):
    made = dock(case(False, 2, 1), {number: [LateLanding(releases=10**9)]}, landings=3)
    lease = made.lease()
    for name in ("a", "b"):
        made.hand_in(made.load(lease, name))
    (found,) = made.step(40)
    assert (found.request, bool(found.error)) == ("b", True)


def together(made: Dock, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many loads were begun together, each time."""
    (end,) = made.ends
    found: list[int] = []

    def read_together(prepared: Any, loads: Sequence[Any]) -> Any:
        found.append(len(loads))
        return (end.read(prepared, tiles) for tiles in loads)

    monkeypatch.setattr(end, "read_together", read_together, raising=False)
    return found


def test_loads_that_are_handed_in_together_set_out_together(monkeypatch):
    made = dock(case(False, 2, 1))
    loaded(made)
    begun = together(made, monkeypatch)
    for name in ("a", "b", "c"):
        made.hand_in(made.load(made.lease(name), name))
    assert sorted((o.request, o.error) for o in made.step(ENOUGH)) == [("a", ""), ("b", ""), ("c", "")]
    assert begun == [3, 3]
    loaded(made)
    assert begun == [3, 3, 1, 1]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("error", [MemoryError("of one load"), TransportError("one was not posted")])
def test_of_loads_that_set_out_together_those_that_were_not_begun_try_again_alone(monkeypatch, number, error):
    """Those that were are not begun a second time."""
    made = dock(case(False, 1, 1))
    loaded(made)
    together(made, monkeypatch)
    calls = calls_of(monkeypatch, made)
    monkeypatch.setattr(made.ends[0], "read", failing(made.ends[0].read, number, error))
    for name in ("a", "b", "c", "d"):
        made.hand_in(made.load(made.lease(name), name))
    assert {o.request: o.error for o in made.step(20)} == dict.fromkeys(("a", "b", "c", "d"), "")
    assert calls["read"] == 5
    nothing_left(made)
    loaded(made)


def test_words_that_several_loads_wait_for_are_asked_after_once_a_round(monkeypatch):
    made = dock(case(False, 1, 1), {3: [Delay(polls=5)]})
    polled: Counter[int] = Counter()
    (end,) = made.ends
    poll = end.poll
    monkeypatch.setattr(end, "poll", lambda read: (polled.update([id(read)]), poll(read))[1])
    for name in ("a", "b", "c"):
        made.hand_in(made.load(made.lease(name), name))
    outcomes = []
    for _ in range(12):
        polled.clear()
        outcomes += made.step()
        assert all(count == 1 for count in polled.values())
    assert sorted((o.request, o.error) for o in outcomes) == [("a", ""), ("b", ""), ("c", "")]


def test_the_ferry_rests_longer_the_more_loads_it_looks_at():
    made = dock(case(False, 1, 1), {0: [Delay(polls=50)]})
    (ferry,) = made.ferries
    made.hand_in(made.load(made.lease()))
    made.step()
    few = ferry._pause()
    ferry._passage.under_way *= 80
    many = ferry._pause()
    ferry._passage.under_way *= 80
    assert few < many <= ferry._pause() == 0.002


def test_a_second_meeting_changes_nothing():
    made = dock(case(True, 2, 1), {0: [Delay(polls=3)]})
    made.hand_in(made.load(made.lease()))
    made.step()
    made.ferries[0].meet(made.meeting)
    assert errors(made.step(ENOUGH)) == [""]
    loaded(made)
    assert len(made.ends[0]._prepared) == 4


def test_a_meeting_without_a_plan_for_this_rank_is_logged_and_the_ferry_goes_on(caplog):
    made = dock(case(False, 1, 1))
    peer = PeerKey("127.0.0.1:1", "other", "1")
    made.ferries[0].meet(Meeting(peer, made.meeting.cards, ()))
    made.hand_in(made.load(made.lease(), "of another", peer=peer))
    with caplog.at_level(logging.ERROR):
        assert ["was never met" in error for error in errors(made.step(ENOUGH))] == [True]
    assert "nothing can be read from other" in caplog.text
    loaded(made)


def test_a_forgotten_producer_leaves_nothing_and_can_be_met_again():
    made = dock(case(True, 2, 1))
    loaded(made, "first")
    made.ferries[0].forget(made.peer)
    made.step()
    assert not made.ends[0]._peers
    made.hand_in(made.load(made.lease("gone"), "gone"))
    assert ["was never met" in error for error in errors(made.step())] == [True]
    made.ferries[0].meet(made.meeting)
    loaded(made)


def test_one_producer_by_two_addresses_is_read_by_either_when_the_other_broke():
    made = dock(case(False, 2, 1), {4: [Delay(polls=50)], 6: [LateLanding(releases=3)]})
    twin = PeerKey("localhost:7000", "P", "1")
    made.ferries[0].meet(Meeting(twin, made.meeting.cards, made.meeting.plans))
    made.hand_in(made.load(made.lease("a"), "a", peer=twin))
    assert errors(made.step(ENOUGH)) == [""]
    made.hand_in(made.load(made.lease("c"), "c", peer=twin))
    made.hand_in(made.load(made.lease("b"), "b"))
    assert [bool(error) for error in errors(made.step(20))] == [True, True]
    made.hand_in(made.load(made.lease("d"), "d", peer=twin))
    assert errors(made.step(ENOUGH)) == [""]
    loaded(made)


def test_a_producer_whose_words_cannot_be_read_is_refused_when_it_is_met():
    made = dock(case(False, 1, 1))
    card = made.berths[0].card
    welcome = Welcome("P", "1", 60.0, (replace(card, words=card.caches),))
    with pytest.raises(MismatchError):
        meet(made.peer, welcome, made.consumers)


def test_a_load_is_said_to_be_over_only_when_its_fills_are_done():
    made = dock(case(True, 1, 1))
    fills = Fills(made, 3)
    made.hand_in(made.load(made.lease()))
    assert made.step(3) == []
    assert fills.asked == 3
    assert errors(made.step()) == [""]
    assert made.differing() == []
    nothing_left(made)


@pytest.mark.parametrize("read", [0, 1], ids=["data", "word"])
def test_a_load_that_failed_is_let_go_only_when_its_fills_are_done(read):
    made = dock(case(True, 1, 1), {read: [LateLanding(releases=1)]})
    fills = Fills(made, 4)
    made.hand_in(made.load(made.lease()))
    assert made.step(6) == []
    assert fills.asked == 4
    assert ["may still land" in error for error in errors(made.step())] == [True]
    nothing_left(made)
    fills.left = 0
    loaded(made)


def test_nothing_is_filled_where_there_is_nothing_to_fill():
    made = dock(case(False, 1, 1, tokens=24))
    fills = Fills(made, 0)
    loaded(made)
    assert fills.begun == 0


def test_a_fill_that_raises_fails_the_load(monkeypatch):
    made = dock(case(True, 1, 1))
    passage = made.ferries[0]._passage
    monkeypatch.setattr(passage, "_fill", failing(passage._fill, 0, RuntimeError("no memory")))
    made.hand_in(made.load(made.lease()))
    assert errors(made.step(ENOUGH)) == ["RuntimeError: no memory"]
    nothing_left(made)
    loaded(made)


class Fills:
    """Fills at once, and says so after having been asked `left` times."""

    def __init__(self, made: Dock, left: int) -> None:
        self._fill, self.left, self.asked, self.begun = made.ferries[0]._passage._fill, left, 0, 0
        made.ferries[0]._passage._fill = self

    def __call__(self, fills: Any) -> Callable[[], bool]:
        self.begun += 1
        self._fill(fills)
        return self._done

    def _done(self) -> bool:
        self.asked += 1
        return self.asked > self.left


class Ticks:
    """Stands for the event that the thread waits on: time passes while it waits, and it ends after some of it."""

    def __init__(self, made: Dock, seconds: float) -> None:
        self._made, self._until, self.pauses = made, made.clock.now + seconds, []
        self._ferry = made.ferries[0]
        self._ferry._wake = self  # type: ignore[assignment]

    def set(self) -> None: ...

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._made.clock.now += seconds
        if self._made.clock.now >= self._until:
            self._ferry._stop.set()


def calls_of(monkeypatch: pytest.MonkeyPatch, made: Dock) -> Counter[str]:
    """Every call that the ferry makes of its transport from now on."""
    end, calls = made.ends[0], Counter[str]()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            calls[name] += 1
            return method(*arguments)

        return called

    for name in ("connect", "prepare", "read", "poll", "telemetry", "release", "notifications", "path", "forget"):
        monkeypatch.setattr(end, name, counted(name, getattr(end, name)))
    return calls


def test_an_idle_ferry_looks_at_nothing_but_for_connections_twenty_times_a_second(monkeypatch):
    made = dock(case(True, 2, 1))
    calls, ticks = calls_of(monkeypatch, made), Ticks(made, 10.0)
    made.ferries[0]._run()
    assert len(ticks.pauses) <= 201
    assert set(calls) == {"notifications"}
    assert calls["notifications"] <= 201


def test_a_producer_lets_itself_be_read_while_a_lease_stands(monkeypatch):
    made = dock(case(True, 1, 1))
    lease = Lease(3, 7)
    made.landings[0].live(lease)
    calls, _ = calls_of(monkeypatch, made), Ticks(made, 1.0)
    made.ferries[0]._run()
    assert 500 <= calls["notifications"] <= 1000
    made.landings[0].kill(lease)
    calls.clear()
    made.ferries[0]._stop.clear()
    Ticks(made, 1.0)
    made.ferries[0]._run()
    assert calls["notifications"] <= 21


def test_a_transport_that_needs_no_calls_gets_none_for_a_lease(monkeypatch):
    made = dock(case(True, 1, 1))
    made.ferries[0]._tended = False
    made.landings[0].live(Lease(3, 7))
    calls, _ = calls_of(monkeypatch, made), Ticks(made, 1.0)
    made.ferries[0]._run()
    assert calls["notifications"] <= 21


def test_loads_are_looked_at_often_at_first_and_then_less(monkeypatch):
    """One that takes 100 ms, and one handed in beside it that takes none."""
    made = dock(case(False, 1, 1), {0: [Delay(seconds=0.1)]})
    made.hand_in(made.load(made.lease()))
    calls, ticks = calls_of(monkeypatch, made), Ticks(made, 0.2)
    made.ferries[0]._run()
    assert errors(made.ferries[0].outcomes()) == [""]
    assert ticks.pauses[0] == 0.0005
    assert sorted(ticks.pauses[:20]) == ticks.pauses[:20]
    assert max(pause for pause in ticks.pauses if pause < 0.05) == 0.002
    assert calls["poll"] <= 70
    assert calls["telemetry"] == 1


def test_what_is_handed_in_wakes_the_ferry_and_so_does_a_first_lease():
    made = dock(case(False, 1, 1))
    ferry, words = made.ferries[0], made.landings[0]
    assert ferry._wake.wait(0)
    for act in (lambda: ferry.load(made.load(made.lease())), lambda: ferry.meet(made.meeting), lambda: words.live(Lease(2, 9))):
        assert not ferry._wake.wait(0)
        act()
        assert ferry._wake.wait(0)
    words.live(Lease(3, 10))
    assert not ferry._wake.wait(0)
    assert words.alive == 2
    words.live(Lease(3, 11))
    words.kill(Lease(3, 10))
    assert words.alive == 2
    words.kill(Lease(3, 11))
    words.kill(Lease(3, 11))
    words.kill(Lease(2, 9))
    assert words.alive == 0


faults = st.one_of(
    st.builds(Drop),
    st.builds(Delay, polls=st.integers(0, 6)),
    st.builds(LateLanding, releases=st.integers(0, 6)),
    st.builds(Reorder, seed=st.integers(0, 5), polls=st.integers(1, 4)),
    st.just(Duplicate("bytes")),
)


@settings(max_examples=60)
@given(
    scripts=st.dictionaries(st.integers(0, 16), st.lists(faults, min_size=1, max_size=2), max_size=6),
    loads=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6),
    hybrid=st.booleans(),
)
def test_every_load_has_one_outcome_and_success_means_every_byte(scripts, loads, hybrid):
    """Loads come with pauses of some steps between them; of some the lease ends while they are under way."""
    made = dock(case(hybrid, 2, 1), scripts)
    said: list[Outcome] = []
    for number, (pause, ends) in enumerate(loads):
        name = f"r{number}"
        lease = made.lease(name)
        made.hand_in(made.load(lease, name))
        said += made.step(pause)
        if ends:
            made.producer.receive(Release("1", lease, "another"), made.clock.now)
            made.turn()
    for _ in range(len(loads) + 2):
        said += made.step(40)
        made.clock.now += TIMEOUT_S + 1
    assert sorted(o.request for o in said) == sorted(f"r{i}" for i in range(len(loads)))
    if any(not o.error for o in said):
        assert made.differing() == []
        assert all(o.moved == o.predicted > 0 for o in said if not o.error)
    nothing_left(made)
    made.ends[0]._faults.clear()
    loaded(made)


@pytest.mark.parametrize("call", ["notifications", "poll"])
def test_closing_does_not_wait_for_a_transport_that_never_returns(monkeypatch, caplog, call):
    made = dock(case(False, 1, 1))
    end, ferry = made.ends[0], made.ferries[0]
    entered, allowed = threading.Event(), threading.Event()

    def stuck(*_: Any) -> Any:
        entered.set()
        allowed.wait()
        return []

    closed: list[str] = []
    monkeypatch.setattr(end, "close", lambda: closed.append(end.name))
    monkeypatch.setattr(end, call, stuck)
    ferry.load(made.load(made.lease()))
    made.clock.now += 1
    ferry.start()
    try:
        assert entered.wait(30)
        closing = threading.Thread(target=ferry.close, args=(0.05,), daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        assert "the transport has not returned in 0.05 s" in caplog.text
        assert closed == []
    finally:
        allowed.set()
    ferry._thread.join(30)
    assert not ferry._thread.is_alive()
    ferry.close()
    assert closed == [end.name]


def test_the_thread_carries_loads_over_nixl():
    """Two agents of one process, the producer's kept going by a ferry of its own."""
    pytest.importorskip("nixl_cu12")
    made = dock(case(True, 1, 1))
    options = NixlOptions(progress_thread=False)
    rank = made.world.producers[0, 0]
    source, words = NixlTransport("p", options), made.berths[0].words
    source.register([*(Storage(b.ctypes.data, b.nbytes) for b in rank.buffers), words.storage])
    card = Berth(made.berths[0].manifest, words, source).card  # type: ignore[arg-type]
    welcome = Welcome("P", "1", 60.0, (card,))
    meeting = meet(made.peer, welcome, made.consumers)
    landing = Words(4, made.consumers[0].identity)
    target = NixlTransport("d", options)
    here = made.world.consumers[0, 0]
    target.register([*(Storage(b.ctypes.data, b.nbytes) for b in here.buffers), landing.storage])
    ferries = [Ferry(target, landing, 0, made.ferries[0]._passage._fill), Ferry(source, words, 0, lambda fills: None)]
    try:
        for ferry in ferries:
            ferry.start()
        ferries[0].meet(meeting)
        lease = made.lease()
        for name in ("a", "b"):
            ferries[0].load(made.load(lease, name))
        said: list[Outcome] = []
        until(lambda: said.extend(ferries[0].outcomes()) or len(said) == 2, "two outcomes")
        assert errors(said) == ["", ""]
        assert made.differing() == []
        assert all(o.moved == o.predicted > 0 for o in said)
        words.kill(lease)
        ferries[0].load(made.load(lease, "late"))
        until(lambda: said.extend(ferries[0].outcomes()) or len(said) == 3, "an outcome")
        assert "given the blocks" in said[-1].error
    finally:
        for ferry in ferries:
            ferry.close()
    assert not any(ferry._thread.is_alive() for ferry in ferries)
    assert target.closed


def test_a_rank_that_others_wait_for_is_looked_after_more_often():
    """What they ask it to gather is begun in the ferry's calls of the transport."""
    waiting: list[str] = []
    words = Words(4, Identity("P", "1", "m"))
    ferry = Ferry(InProcessTransport("p", Harbour()), words, 0, lambda fills: None, hurried=lambda: bool(waiting))
    rests = [ferry._pause()]
    words.live(Lease(0, 5))
    rests.append(ferry._pause())
    waiting.append("somebody")
    rests.append(ferry._pause())
    assert rests[0] > rests[1] > rests[2] > 0


class _Slow(HostMover):
    """Copies caches when it is told to, and words at once unless those are late too; `sizes` are those of its copies."""

    def __init__(self, short: int = 0, broken: bool = False, late_words: bool = False) -> None:
        super().__init__()
        self.short, self.broken, self.late_words = short, broken, late_words
        self.sizes: list[int] = []
        self.late: list[_Late] = []

    def start(self, prepared: Any, bound: Any) -> Any:
        self.sizes.append(bound.bytes)
        if bound.bytes % 8 == 0 and bound.bytes <= 24 and not self.late_words:
            return super().start(prepared, bound)
        self.late.append(_Late(lambda: HostMover.start(self, prepared, bound), self.short, self.broken))
        return self.late[-1]

    def go(self) -> None:
        for copies in self.late:
            copies.go()


class _Late:
    """Copies that are said to be `short` bytes short of what they should be; or nobody can say, once, if it is `broken`."""

    seconds = 0.0

    def __init__(self, copy: Callable[[], Any], short: int, broken: bool) -> None:
        self._copy, self._short, self._broken = copy, short, broken
        self._over: Any = None

    @property
    def done(self) -> bool:
        if self._over is not None and self._broken:
            self._broken = False
            raise TransportError("the device is lost")
        return self._over is not None

    @property
    def moved(self) -> int:
        return self._over.moved - self._short

    def go(self) -> None:
        self._over = self._copy()


def in_one_step(made: Dock, *names: str) -> dict[str, Lease]:
    (ferry,) = made.ferries
    leases = {name: made.lease(name) for name in names}
    ferry.load(*[made.load(lease, name, in_step=True) for name, lease in leases.items()])
    return leases


@pytest.mark.parametrize("lost", [None, "r1"])
def test_loads_in_a_step_are_copied_together_and_their_words_are_read_together_and_each_decides_for_its_own(lost):
    slow = _Slow()
    made = dock(case(False, 1, 1), mapped=True, mover=lambda: slow)
    (ferry,) = made.ferries
    slow.sizes.clear()
    leases = in_one_step(made, "r0", "r1", "r2")
    assert ferry.outcomes() == []
    slow.go()
    if lost:
        for berth in made.berths:
            berth.words.kill(leases[lost])
    ferry.settle(tuple(leases), PATIENCE_S)
    outcomes = {outcome.request: outcome for outcome in ferry.outcomes()}
    assert {name for name, outcome in outcomes.items() if outcome.error} == ({lost} if lost else set())
    assert all("has given the blocks" in outcome.error for outcome in outcomes.values() if outcome.error)
    assert all(outcome.moved == outcome.predicted > 24 for name, outcome in outcomes.items() if name != lost)
    assert slow.sizes == [3 * outcomes["r0"].moved, 24]
    assert made.differing() == []
    nothing_left(made)


def test_more_loads_in_a_step_than_there_are_landing_places_end_well_where_copies_are_made_at_once():
    made = dock(case(False, 2, 1), mapped=True, landings=8)
    names = [f"r{i}" for i in range(8)]
    in_one_step(made, *names)
    assert errors(made.ferries[0].outcomes()) == [""] * 8
    assert made.differing() == []
    nothing_left(made)


LETS_GO = {"sort", "argsort", "argmin", "argmax", "reduceat", "searchsorted", "flock"}
"""Calls that let go of Python's lock, however little they do."""


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_a_load_in_a_step_does_keeps_pythons_lock(hybrid):
    """The engine's thread waits for milliseconds to have it back while requests arrive."""
    slow = _Slow()
    made = dock(case(hybrid, 1, 1), mapped=True, mover=lambda: slow)
    (ferry,) = made.ferries
    leases = {name: made.lease(name) for name in ("r0", "r1", "r2")}
    loads = [made.load(lease, name, in_step=True) for name, lease in leases.items()]
    beside = (HostMover.start.__code__, HostMover.zero.__code__, ferry._passage._fill.__code__)
    called: list[str] = []

    def hear(frame, event, function):
        place = frame
        while event == "c_call" and place is not None and place.f_code not in beside:
            if place.f_code is Ferry.load.__code__:
                called.append(function.__name__)
            place = place.f_back

    sys.setprofile(hear)
    try:
        ferry.load(*loads)
    finally:
        sys.setprofile(None)
    slow.go()
    ferry.settle(tuple(leases), PATIENCE_S)
    assert errors(ferry.outcomes()) == [""] * 3
    assert "frombuffer" in called
    assert LETS_GO.isdisjoint(called)


def test_copies_for_several_that_are_short_count_for_none_of_them():
    slow = _Slow(short=1)
    made = dock(case(False, 1, 1), mapped=True, mover=lambda: slow)
    (ferry,) = made.ferries
    in_one_step(made, "r0", "r1")
    slow.go()
    ferry.settle(["r0", "r1"], PATIENCE_S)
    assert all("were copied; report this" in outcome.error for outcome in ferry.outcomes())
    assert ferry.outcomes() == []


def test_copies_that_cannot_be_asked_after_fail_their_loads_and_not_the_step():
    slow = _Slow(broken=True)
    made = dock(case(False, 1, 1), mapped=True, mover=lambda: slow, warm=False)
    (ferry,) = made.ferries
    ferry.step()
    in_one_step(made, "r0", "r1")
    slow.late[-1].go()
    ferry.settle(["r0", "r1"], PATIENCE_S)
    outcomes = ferry.outcomes()
    assert [outcome.request for outcome in outcomes if "the device is lost" in outcome.error] == ["r0", "r1"]


def test_of_loads_in_a_step_those_from_nobody_fail_alone():
    made = dock(case(False, 1, 1), mapped=True)
    (ferry,) = made.ferries
    known, unknown = made.load(made.lease("r0"), "r0", in_step=True), PeerKey("127.0.0.1:7000", "Q", "1")
    ferry.load(*[made.load(known.lease, "r1", in_step=True, peer=unknown), known])
    ferry.settle(["r0", "r1"], PATIENCE_S)
    assert {o.request: bool(o.error) for o in ferry.outcomes()} == {"r0": False, "r1": True}
    assert made.differing() == []
    nothing_left(made)


@pytest.mark.parametrize("in_step", [False, True])
def test_of_loads_that_begin_together_one_that_finds_no_landing_place_fails_alone(in_step):
    slow = _Slow(late_words=True)
    made = dock(case(False, 1, 1), mapped=True, mover=lambda: slow, landings=2)
    (ferry,) = made.ferries
    slow.go()
    made.step(ENOUGH)
    ferry.load(*[made.load(made.lease(name), name, in_step=in_step) for name in ("r0", "r1", "r2")])
    slow.go()
    assert ferry.outcomes() == []
    slow.go()
    assert {o.request: o.error for o in (*ferry.outcomes(), *made.step(ENOUGH))} == {
        "r0": "",
        "r1": "",
        "r2": "no landing place for a generation word is free: too many loads at a time",
    }
    assert made.free_landings == [2]


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("in_step", [False, True])
def test_of_loads_that_begin_together_one_that_cannot_be_filled_fails_alone(monkeypatch, in_step, bad):
    made = dock(case(False, 1, 1), mapped=True)
    (ferry,) = made.ferries
    fill, filled = ferry._passage._fill, []
    names = ("r0", "r1", "r2")

    def once(fills: Any) -> Any:
        """All together, then one by one."""
        filled.append(len(fills))
        if len(filled) in (1, bad + 2):
            raise SessionError("nothing can be zeroed")
        return fill(fills)

    monkeypatch.setattr(ferry._passage, "_fill", once)
    ferry.load(*[made.load(made.lease(name), name, in_step=in_step) for name in names])
    if in_step:
        ferry.settle(names, PATIENCE_S)
    wanted = dict.fromkeys(names, "") | {names[bad]: "nothing can be zeroed"}
    assert {o.request: o.error for o in made.step(ENOUGH)} == wanted
    assert filled == [3 * filled[1], *[filled[1]] * 3]
    assert filled[1]
    nothing_left(made)


def test_what_loads_that_begin_together_leave_uncopied_is_filled_together():
    made = dock(case(True, 1, 1), mapped=True)
    (ferry,) = made.ferries
    alone = made.load(made.lease("r0"), "r0")
    ferry.load(alone)
    made.step(ENOUGH)
    (once,) = made.filled
    ferry.load(*[made.load(made.lease(name), name) for name in ("r1", "r2")])
    assert {o.request: o.error for o in made.step(ENOUGH)} == {"r1": "", "r2": ""}
    assert made.filled == [once, 2 * once]
    assert made.differing() == []


def test_loads_that_are_waited_for_beside_the_steps_are_copied_together_too():
    slow = _Slow()
    made = dock(case(True, 1, 1), mapped=True, mover=lambda: slow)
    (ferry,) = made.ferries
    slow.sizes.clear()
    leases = {name: made.lease(name) for name in ("r0", "r1", "r2")}
    ferry.load(*[made.load(lease, name) for name, lease in leases.items()])
    data = list(slow.sizes)
    assert len(data) == len(made.berths)
    slow.go()
    outcomes = ferry.outcomes()
    assert {o.request: o.error for o in outcomes} == dict.fromkeys(leases, "")
    assert sum(data) == sum(o.moved for o in outcomes) > 0
    assert slow.sizes[len(data) :] == [8 * len(leases)] * len(made.berths)
    assert made.differing() == []
    nothing_left(made)


def test_loads_that_no_step_waits_for_are_not_copied_together_with_long_ones(monkeypatch):
    slow = _Slow()
    made = dock(case(False, 1, 1), mapped=True, mover=lambda: slow)
    (ferry,) = made.ferries
    slow.go()
    made.step(ENOUGH)
    slow.sizes.clear()
    load = made.load(made.lease("r0"), "r0")
    size = ferry._links.peers[made.peer].binder.load(Request(load.tokens, load.src, load.dst, load.start)).bytes
    monkeypatch.setattr("kvferry.session.ferry._TOGETHER", 2 * size)
    ferry.load(load, *[made.load(made.lease(name), name) for name in ("r1", "r2")])
    assert slow.sizes == [2 * size, size]
    slow.go()
    assert {o.request: o.error for o in (*ferry.outcomes(), *made.step(ENOUGH))} == dict.fromkeys(("r0", "r1", "r2"), "")
    assert made.differing() == []


def test_a_landing_place_is_given_back_once_whatever_is_said_of_the_path(monkeypatch):
    made = dock(case(False, 1, 1), mapped=True, warm=False)
    (ferry,) = made.ferries

    def path(name: str) -> Any:
        raise OSError("no file is left")

    monkeypatch.setattr(ferry._transport, "path", path)
    for _ in range(5):
        with suppress(OSError):
            ferry.step()
    assert sorted(ferry._passage.landings) == list(range(8))


@pytest.mark.parametrize("mapped", [False, True])
def test_how_a_producer_is_read_is_said_when_it_is_known(mapped, caplog):
    """Words lie in host memory, and a transport may read caches otherwise."""
    caplog.set_level(logging.INFO, "kvferry.session")
    made = dock(case(False, 1, 1), mapped=mapped)
    made.step(ENOUGH)
    assert ("carried by" in caplog.text) == mapped
    made.hand_in(made.load(made.lease()))
    assert errors(made.step(ENOUGH)) == [""]
    assert caplog.text.count("carried by") == 1


def test_its_thread_is_prepared_before_it_touches_the_transport():
    called: list[str] = []

    class Told(InProcessTransport):
        def notifications(self):
            called.append(threading.current_thread().name)
            return super().notifications()

    def entering():
        called.append("entering")
        raise TransportError("no such call")

    ferry = Ferry(Told("p", Harbour()), Words(2, Identity("P", "1", "m")), 0, lambda fills: None, entering=entering)
    ferry.start()
    until(lambda: len(called) > 1, "a call of the transport")
    ferry.close()
    assert called[:2] == ["entering", "kvferry-ferry"]
