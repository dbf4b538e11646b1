"""What loads do not do yet, as tests that fail until they do: an end at the deadline, and rounds that cost what has moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.session import Outcome
from kvferry.transport.faults import Delay
from session_dock import TIMEOUT_S, Dock, case, dock

IDLE, MOVING, ROUNDS = 1000, 10, 20


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a load from a stopped producer ends when the producer goes on or dies, and its request waits as long; it is to "
    "fail at read_s, with its blocks held back until nothing can land in them",
)
def test_a_load_from_a_stopped_producer_fails_at_its_deadline_and_its_blocks_are_held_back():
    made = dock(case(False, 1, 1))
    (end,) = made.ends
    name = made.berths[0].transport.name
    made.harbour.stop(name)
    made.hand_in(made.load(made.lease()))
    assert made.step(20) == []
    made.clock.now = TIMEOUT_S + 1
    outcomes = made.step(20)
    assert [(outcome.request, "nothing arrived for 30 s" in outcome.error) for outcome in outcomes] == [("r", True)]
    assert end._reads, "its bytes may still land, and are to be waited for"
    made.harbour.resume(name)
    assert made.step(20) == []
    assert not end._reads
    assert made.free_landings == [8]


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the load thread asks after every read in every round; it is to ask after those that have moved",
)
def test_a_round_of_the_load_thread_costs_what_has_moved_and_not_what_waits(monkeypatch):
    idle = {number: [Delay(seconds=TIMEOUT_S - 1)] for number in range(IDLE)}
    moving = {number: [Delay(seconds=ROUNDS - 1)] for number in range(IDLE, IDLE + MOVING)}
    made = dock(case(False, 1, 1), idle | moving, landings=16)
    lease = made.lease()
    for number in range(IDLE + MOVING):
        made.hand_in(made.load(lease, f"r{number}"))
    assert made.step() == []
    assert len(made.ferries[0]._passage.under_way) == IDLE + MOVING
    made.clock.now = 0.0
    calls = calls_of(monkeypatch, made)
    outcomes: list[Outcome] = []
    for _ in range(ROUNDS):
        made.clock.now += 0.5
        outcomes += made.step()
    assert outcomes == []
    made.clock.now = ROUNDS
    outcomes += made.step(5)
    assert [(outcome.request, outcome.error) for outcome in outcomes] == [(f"r{n}", "") for n in range(IDLE, IDLE + MOVING)]
    assert calls["poll"] <= (ROUNDS + 5) * 3 * MOVING, f"{calls['poll']} looks at reads in {ROUNDS + 5} rounds"


def calls_of(monkeypatch: pytest.MonkeyPatch, made: Dock) -> Counter[str]:
    (end,) = made.ends
    calls = Counter[str]()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            calls[name] += 1
            return method(*arguments)

        return called

    for name in ("poll", "release", "telemetry", "read"):
        monkeypatch.setattr(end, name, counted(name, getattr(end, name)))
    return calls
