"""Loads that a producer has pledged to leave time for: what is pledged, that nothing of it can be lost, and when it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import structs

import oracle
from ferrying import manifests_of
from kvferry.errors import BindError
from kvferry.plan import Binder, make_plans
from kvferry.session import Lease, Load, Meeting, PeerKey, Release
from kvferry.session.words import WORD, board_of
from session_dock import PATIENCE_S, Dock, case, dock
from test_bind_whole import as_engines_have_it, said
from test_session_ferry import ENOUGH, _Slow, errors, nothing_left
from test_transfer_properties import DEPTH, cases

GRACE_S = 0.25


def docked(tp_p: int = 1, grace_s: float = GRACE_S, mapped: bool = True) -> tuple[Dock, _Slow]:
    slow = _Slow()
    made = dock(case(False, tp_p, 1), mapped=mapped, mover=lambda: slow, grace_s=grace_s)
    slow.go()
    made.step(ENOUGH)
    return made, slow


def pledged(made: Dock, load: Load) -> float | None:
    return made.ferries[0].pledge(load.peer, load.lease, load.tokens, load.src)


def begun(made: Dock) -> Load:
    """A pledged load whose copies are under way."""
    load = made.load(made.lease("r"), "r", in_step=True)
    made.ferries[0].load(replace(load, pledged=pledged(made, load)))
    return load


def end(made: Dock, lease: Lease) -> None:
    """The lease ends, by the word of another consumer."""
    made.producer.receive(Release("1", lease, "another"), made.clock.now)
    made.turn()


@pytest.mark.parametrize("tp_p", [1, 2])
def test_a_pledged_load_arrives_though_its_lease_ends_before_its_copies_do(tp_p):
    made, slow = docked(tp_p=tp_p)
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)
    until = pledged(made, load)
    assert until == made.clock.now + GRACE_S
    end(made, load.lease)
    slow.sizes.clear()
    ferry.load(replace(load, pledged=until))
    made.clock.now += GRACE_S / 2
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    (outcome,) = ferry.outcomes()
    assert outcome.error == ""
    assert outcome.moved == outcome.predicted == sum(slow.sizes)
    assert made.differing() == []
    nothing_left(made)


@pytest.mark.parametrize("ends", [False, True])
def test_after_the_time_that_was_pledged_the_lease_itself_must_stand(ends):
    made, slow = docked()
    (ferry,) = made.ferries
    load = begun(made)
    slow.go()
    made.clock.now += GRACE_S
    if ends:
        end(made, load.lease)
    ferry.settle(["r"], PATIENCE_S)
    (outcome,) = ferry.outcomes()
    assert ("has given the blocks of the reference away" in outcome.error) is ends
    nothing_left(made)


def test_while_something_is_pledged_nothing_is_let_go_of():
    """A producer is forgotten, and one that died is found out, on the ferry's own thread: after the step's loads."""
    made, _ = docked()
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)
    until = pledged(made, load)
    ferry.forget(made.peer)
    ferry.step()
    assert made.peer in ferry._links.peers
    made.clock.now = until
    ferry.step()
    assert made.peer not in ferry._links.peers


def test_a_producers_other_name_can_be_forgotten_with_the_very_loads_that_are_pledged():
    """The same start by another address, over the same connection."""
    made, slow = docked()
    (ferry,) = made.ferries
    other = replace(made.meeting, peer=replace(made.peer, address="127.0.0.2:7000"))
    ferry.meet(other)
    ferry.step()
    load = made.load(made.lease("r"), "r", in_step=True)
    until = pledged(made, load)
    ferry.forget(other.peer)
    ferry.load(replace(load, pledged=until))
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    ferry.step()
    assert set(ferry._links.peers) == {made.peer}
    assert pledged(made, load) is not None
    ferry.load()
    nothing_left(made)


def test_copies_that_end_in_time_are_seen_to_though_the_step_takes_longer():
    made, slow = docked()
    (ferry,) = made.ferries
    load = begun(made)
    slow.go()
    ferry.step()
    end(made, load.lease)
    made.clock.now += 2 * GRACE_S
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    nothing_left(made)


@pytest.mark.parametrize("begun_before", [False, True])
def test_a_load_that_finds_its_producer_dead_takes_no_pledged_one_down(begun_before):
    """Whatever else is found out of it waits for the step's loads."""
    made, slow = docked()
    (ferry,) = made.ferries
    beside = made.load(made.lease("beside"), "beside")
    if begun_before:
        ferry.load(beside)
    load = made.load(made.lease("r"), "r", in_step=True)
    load = replace(load, pledged=pledged(made, load))
    start = slow.start

    def last(*arguments: Any) -> Any:
        ticket = start(*arguments)
        for berth in made.berths:
            for memory in berth.memories:
                memory.disown()
        return ticket

    slow.start = last
    ferry.load(load, *(() if begun_before else (beside,)))
    seen = ferry.outcomes()
    slow.go()
    ferry.step()
    seen += ferry.outcomes()
    ferry.settle(["r"], PATIENCE_S)
    seen += made.step(ENOUGH)
    assert {outcome.request: bool(outcome.error) for outcome in seen} == {"r": False, "beside": True}
    nothing_left(made)


def test_a_load_beside_pledged_ones_begins_with_the_next_pledge_at_the_latest():
    """However soon one follows the other, and whether or not the ferry's own thread has a turn between."""
    made, slow = docked()
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)
    beside = made.load(made.lease("beside"), "beside")
    ferry.load(replace(load, pledged=pledged(made, load)), beside)
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert [outcome.request for outcome in ferry.outcomes()] == ["r"]
    again = replace(load, request="again")
    ferry.load(replace(again, pledged=pledged(made, again)))
    slow.go()
    ferry.settle(["again"], PATIENCE_S)
    assert {outcome.request: outcome.error for outcome in ferry.outcomes()} == {"again": "", "beside": ""}
    assert made.differing() == []
    nothing_left(made)


def test_what_is_handed_in_while_loads_are_pledged_is_taken_up_at_once_after_them():
    made, slow = docked()
    (ferry,) = made.ferries
    begun(made)
    ferry.forget(PeerKey("127.0.0.1:7001", "Q", "1"))
    assert ferry._wake.wait(0)
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert ferry._wake.wait(0)


def test_a_look_that_goes_wrong_or_sees_nothing_pledges_nothing(monkeypatch):
    made, _ = docked()
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)

    def raises(*arguments: object) -> None:
        raise OSError("no locks available")

    for peek in (raises, lambda *arguments: None):
        with monkeypatch.context() as broken:
            broken.setattr(ferry._transport, "peek", peek)
            assert pledged(made, load) is None
    assert pledged(made, load) is not None


@pytest.mark.parametrize("used", [False, True])
def test_the_ferry_goes_on_once_a_steps_loads_are_ordered_or_settled(used):
    made, slow = docked()
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)
    until = pledged(made, load)
    if used:
        ferry.load(replace(load, pledged=until))
        slow.go()
        ferry.settle(["r"], PATIENCE_S)
    else:
        ferry.load()
    ferry.forget(made.peer)
    ferry.step()
    assert made.peer not in ferry._links.peers


REFUSED: dict[str, Callable[[Load], Load]] = {
    "a producer that is not known": lambda load: replace(load, peer=PeerKey("127.0.0.1:7000", "Q", "1")),
    "another lease": lambda load: replace(load, lease=Lease(load.lease.slot, load.lease.generation + 1)),
    "a slot that is not there": lambda load: replace(load, lease=Lease(8, load.lease.generation)),
    "a table that is too short": lambda load: replace(load, src={**load.src, 0: list(load.src[0])[:-1]}),
    "a table with a hole": lambda load: replace(load, src={**load.src, 0: [-1, *list(load.src[0])[1:]]}),
    "a block that is not there": lambda load: replace(load, src={**load.src, 0: [10_000, *list(load.src[0])[1:]]}),
    "no table": lambda load: replace(load, src={}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_is_pledged_of_what_could_not_be_loaded(what):
    made, _ = docked()
    load = made.load(made.lease("r"), "r", in_step=True)
    assert pledged(made, REFUSED[what](load)) is None
    made.ferries[0].load()
    assert pledged(made, load) is not None
    made.ferries[0].load()
    nothing_left(made)


def test_nothing_is_pledged_of_a_lease_that_one_rank_has_ended():
    made, _ = docked(tp_p=2)
    load = made.load(made.lease("r"), "r", in_step=True)
    made.berths[1].words.kill(load.lease)
    assert pledged(made, load) is None


@pytest.mark.parametrize(("grace_s", "mapped"), [(0.0, True), (GRACE_S, False)])
def test_nothing_is_pledged_without_grace_or_out_of_memory_that_is_not_mapped(grace_s, mapped):
    made, _ = docked(grace_s=grace_s, mapped=mapped)
    assert pledged(made, made.load(made.lease("r"), "r")) is None


def test_nothing_is_pledged_of_a_producer_that_is_gone():
    made, _ = docked()
    load = made.load(made.lease("r"), "r", in_step=True)
    for berth in made.berths:
        for memory in berth.memories:
            memory.disown()
    assert pledged(made, load) is None


def test_nothing_is_pledged_by_words_that_do_not_lie_behind_each_other():
    made, _ = docked()
    (berth,) = made.berths
    words = berth.words.manifest
    assert board_of(words) == words.regions[0]
    apart = structs.replace(words.layers[0].parts[0], block_stride=2 * WORD)
    apart = structs.replace(words, layers=(structs.replace(words.layers[0], parts=(apart,)),))
    assert board_of(apart) is None
    (ferry,) = made.ferries
    link = ferry._links.peers[made.peer].link
    load = made.load(made.lease("r"), "r", in_step=True)
    assert ferry._links.stands(link, load.lease)
    link.boards = (board_of(apart),)
    assert pledged(made, load) is None


def spoiled(table: Any) -> st.SearchStrategy[Any]:
    """A table as it is, or with another block somewhere, or too short."""
    block = st.integers(-3, 40)
    if isinstance(table, int):
        return st.just(table) | block
    changed = st.tuples(st.integers(0, max(0, len(table) - 1)), block).map(
        lambda found: [*table[: found[0]], found[1], *table[found[0] + 1 :]]
    )
    return st.just(table) | st.just(table) | changed | st.just(table[:-1])


@settings(max_examples=200 * DEPTH)
@given(cases(), st.data())
def test_what_a_producers_tables_are_good_for_is_bound_into_any_that_are_in_order(
    case: oracle.Case, data: st.DataObject
) -> None:
    producers, consumers = manifests_of(case)
    request = as_engines_have_it(case)
    request = replace(request, src={group: data.draw(spoiled(table)) for group, table in request.src.items()})
    for plan in make_plans(consumers, producers):
        binder = Binder.of_sessions(plan)
        try:
            binder.insist_on_source(request.tokens, request.src)
        except BindError:
            event("refused")
            continue
        bound = said(binder, request)
        event(f"bound: {not isinstance(bound, str)}")
        assert not isinstance(bound, str) or "consumer" in bound or "held already" in bound


def another(made: Dock) -> Meeting:
    """The same start by another address: to be met, it is to be connected to."""
    return replace(made.meeting, peer=replace(made.peer, address="127.0.0.2:7000"))


def test_nothing_is_pledged_while_a_producer_is_met_nor_is_it_met_by_who_asks():
    made, _ = docked()
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)
    assert not ferry.meets
    ferry.meet(another(made))
    assert ferry.meets
    assert pledged(made, load) is None
    assert set(ferry._links.peers) == {made.peer}
    ferry.step()
    assert set(ferry._links.peers) == {made.peer, another(made).peer}
    assert not ferry.meets
    assert pledged(made, load) == made.clock.now + GRACE_S


def test_who_asks_for_a_pledge_waits_for_no_turn_that_takes_long():
    made, _ = docked()
    (ferry,) = made.ferries
    load = made.load(made.lease("r"), "r", in_step=True)
    with ferry._turn:
        found = []
        asking = Thread(target=lambda: found.append(pledged(made, load)))
        asking.start()
        asking.join(PATIENCE_S)
    assert found == [None]
    assert pledged(made, load) == made.clock.now + GRACE_S


def test_a_load_in_its_step_meets_no_other_producer_and_none_is_met_until_it_is_over():
    made, slow = docked(grace_s=0.0)
    (ferry,) = made.ferries
    slow.sizes.clear()
    ferry.meet(another(made))
    ferry.load(made.load(made.lease("r"), "r", in_step=True))
    assert slow.sizes
    ferry.step()
    assert set(ferry._links.peers) == {made.peer}
    slow.go()
    for _ in range(ENOUGH):
        ferry.step()
    assert not ferry._passage.under_way
    assert set(ferry._links.peers) == {made.peer}
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    ferry.step()
    assert set(ferry._links.peers) == {made.peer, another(made).peer}
    nothing_left(made)


def test_loads_in_a_step_begin_before_other_producers_are_handed_in_with_them(monkeypatch):
    made, slow = docked(grace_s=0.0)
    (ferry,) = made.ferries
    slow.sizes.clear()
    seen = []
    monkeypatch.setattr(ferry, "meet", lambda meeting: seen.append((meeting.peer, bool(slow.sizes))))
    ferry.load(made.load(made.lease("r"), "r", in_step=True), meetings=[another(made), made.meeting])
    assert seen == [(made.peer, False), (another(made).peer, True)]
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    nothing_left(made)


def test_a_load_in_its_step_from_a_producer_that_was_handed_in_with_it_is_made():
    made, slow = docked(grace_s=0.0)
    (ferry,) = made.ferries
    ferry.forget(made.peer)
    ferry.meet(made.meeting)
    ferry.load(made.load(made.lease("r"), "r", in_step=True))
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    assert made.differing() == []
    nothing_left(made)
