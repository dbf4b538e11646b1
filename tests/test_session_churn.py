"""Many loads, one wave after the other, whatever becomes of them: nothing of them is left."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.session import Lease, Outcome, PeerKey, Release
from kvferry.transport.faults import Delay, Drop, Duplicate, Fault, LateLanding, PeerDeath, Reorder
from session_dock import TIMEOUT_S, Dock, case, dock
from transport_suite import until

LOADS, WAVE = 1000, 50


def left(made: Dock) -> dict[str, int]:
    """What loads may leave behind, counted."""
    (ferry,), (end,) = made.ferries, made.ends
    passage, links = ferry._passage, ferry._links
    return {
        "under way": len(passage.under_way),
        "outcomes": len(passage.outcomes),
        "spent": len(passage.spent),
        "warming": len(links.warming),
        "commands": len(ferry._commands),
        "reads": len(end._reads),
        "prepared": len(end._prepared),
        "connected": len(end._peers),
        "known": len(links.peers),
        "linked": sum(peer.link is not None for peer in links.peers.values()),
        "landings": len(passage.landings),
        "different landings": len(set(passage.landings)),
    }


def sorted_names(loads: int) -> list[str]:
    return sorted(f"r{number}" for number in range(loads))


def spoiled(made: Dock, number: int, lease: Lease) -> dict[str, Any]:
    """What is wrong with some of the loads."""
    kinds: Sequence[dict[str, Any]] = (
        {"src": {0: [1, 2]}},
        {"tokens": 1 << 40},
        {"lease": Lease(1 << 40, 1)},
        {"lease": Lease(lease.slot, lease.generation + 1)},
        {"peer": PeerKey("127.0.0.1:1", "Q", "1")},
    )
    return kinds[number % len(kinds)] if number % 7 == 0 else {}


@pytest.mark.parametrize("way", ["transport", "mapped", "in a step"])
def test_a_thousand_loads_leave_nothing_behind(way):
    made = dock(case(True, 1, 1), landings=2 * WAVE, mapped=way != "transport")
    (ferry,) = made.ferries
    before = left(made)
    outcomes: list[Outcome] = []
    held: list[weakref.ref[Any]] = []
    for wave in range(LOADS // WAVE):
        lease = made.lease(f"wave {wave}")
        numbers = range(wave * WAVE, (wave + 1) * WAVE)
        loads = [made.load(lease, f"r{it}", in_step=way == "in a step", **spoiled(made, it, lease)) for it in numbers]
        ferry.load(*loads)
        held += [weakref.ref(crossing) for crossing in ferry._passage.under_way]
        if way == "in a step":
            ferry.settle([load.request for load in loads], 5.0)
        outcomes += made.step(8)
        made.producer.receive(Release("1", lease, "D"), made.clock.now)
        made.turn()
    assert sorted(outcome.request for outcome in outcomes) == sorted_names(LOADS)
    assert sum(not outcome.error for outcome in outcomes) == sum(number % 7 != 0 for number in range(LOADS))
    assert made.differing() == []
    assert left(made) == before
    gc.collect()
    assert not any(ref() is not None for ref in held)
    if way != "transport":
        mapped: Any = ferry._transport
        assert [len(peer.reads) for peer in mapped._mapped._peers.values()] == [0]


FAULTS: Sequence[Sequence[Fault]] = (
    [Delay(polls=3)],
    [Drop()],
    [LateLanding(releases=4)],
    [Duplicate("bytes")],
    [Reorder(seed=3, polls=3)],
    [Delay(polls=2), LateLanding(releases=2)],
)


def test_a_thousand_loads_over_a_wire_that_fails_often_leave_nothing_behind():
    rng = np.random.default_rng(7)
    reads = rng.choice(3 * LOADS, LOADS // 8, replace=False).tolist()
    made = dock(case(True, 1, 1), {number: FAULTS[number % len(FAULTS)] for number in reads}, landings=WAVE)
    (ferry,) = made.ferries
    before = left(made)
    outcomes: list[Outcome] = []
    for wave in range(LOADS // WAVE):
        lease = made.lease(f"wave {wave}")
        ferry.load(*[made.load(lease, f"r{it}") for it in range(wave * WAVE, (wave + 1) * WAVE)])
        for _ in range(4):
            outcomes += made.step(20)
            made.clock.now += TIMEOUT_S + 1
        outcomes += made.step(20)
        made.producer.receive(Release("1", lease, "D"), made.clock.now)
        made.turn()
    assert sorted(outcome.request for outcome in outcomes) == sorted_names(LOADS)
    assert any(outcome.error for outcome in outcomes)
    assert any(not outcome.error for outcome in outcomes)
    assert made.differing() == []
    made.ends[0]._faults.clear()
    made.hand_in(made.load(made.lease("last"), "last"))
    assert [outcome.error for outcome in made.step(20)] == [""]
    assert left(made) == before


def test_a_producer_that_dies_and_is_forgotten_leaves_no_link():
    made = dock(case(False, 2, 1), {2: [PeerDeath(after_runs=1)]}, landings=WAVE)
    (ferry,) = made.ferries
    lease = made.lease()
    ferry.load(*[made.load(lease, f"r{it}") for it in range(WAVE)])
    outcomes = made.step(20)
    assert sorted(outcome.request for outcome in outcomes) == sorted_names(WAVE)
    ferry.forget(made.peer)
    made.step(2)
    found = left(made)
    assert {name for name, count in found.items() if count} == {"landings", "different landings"}
    assert found["landings"] == WAVE


def test_a_thousand_loads_on_the_thread_leave_one_thread_until_it_is_closed():
    made = dock(case(True, 1, 1), landings=2 * WAVE)
    (before, threads), lease = (left(made), threading.active_count()), made.lease()
    (ferry,) = made.ferries
    ferry.start()
    found: list[Outcome] = []
    for wave in range(LOADS // WAVE):
        ferry.load(*[made.load(lease, f"r{it}") for it in range(wave * WAVE, (wave + 1) * WAVE)])
        assert threading.active_count() == threads + 1
        until(lambda wave=wave: found.extend(ferry.outcomes()) or len(found) == (wave + 1) * WAVE, "a wave")
    assert sorted(outcome.request for outcome in found) == sorted_names(LOADS)
    assert not any(outcome.error for outcome in found)
    until(lambda: left(made) == before, "the end of what was left")
    ferry.close()
    assert threading.active_count() == threads
    assert left(made)["reads"] == left(made)["connected"] == 0


@pytest.mark.parametrize("again", [False, True], ids=["for good", "and met again"])
def test_loads_whose_producer_is_forgotten_before_they_set_out_fail_and_connect_to_nothing(again):
    made = dock(case(False, 2, 1))
    (ferry,) = made.ferries
    ferry.load(*[made.load(made.lease(name), name) for name in ("r0", "r1")])
    ferry.forget(made.peer)
    if again:
        ferry.meet(made.meeting)
    outcomes = made.step(20)
    assert sorted(outcome.request for outcome in outcomes) == sorted_names(2)
    assert all("was forgotten here" in outcome.error for outcome in outcomes)
    assert left(made)["connected"] == (2 if again else 0)
    if again:
        made.hand_in(made.load(made.lease("next"), "next"))
        assert [outcome.error for outcome in made.step(20)] == [""]
        assert made.differing() == []
    ferry.forget(made.peer)
    made.step(2)
    assert {name for name, count in left(made).items() if count} == {"landings", "different landings"}
