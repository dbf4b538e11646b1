"""Loads that are made in the step that orders them: what is met, and what is forgotten, beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import SessionError
from kvferry.session import Meeting
from session_dock import PATIENCE_S, Dock, case, dock
from test_session_ferry import ENOUGH, _Slow, errors, nothing_left


def docked() -> tuple[Dock, _Slow]:
    slow = _Slow()
    made = dock(case(False, 1, 1), mapped=True, mover=lambda: slow)
    slow.go()
    made.step(ENOUGH)
    return made, slow


def another(made: Dock) -> Meeting:
    """The same start by another address: to be met, it is to be connected to."""
    return replace(made.meeting, peer=replace(made.peer, address="127.0.0.2:7000"))


def test_a_producers_other_name_can_be_forgotten_with_the_very_loads_in_a_step():
    """The same start by another address, over the same connection."""
    made, slow = docked()
    (ferry,) = made.ferries
    other = another(made)
    ferry.meet(other)
    ferry.step()
    ferry.forget(other.peer)
    ferry.load(made.load(made.lease("r"), "r", in_step=True))
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    ferry.step()
    assert set(ferry._links.peers) == {made.peer}
    nothing_left(made)


def test_a_producer_is_being_met_until_the_ferrys_thread_has_met_it():
    made, _ = docked()
    (ferry,) = made.ferries
    assert not ferry.meets
    ferry.meet(another(made))
    assert ferry.meets
    assert set(ferry._links.peers) == {made.peer}
    ferry.step()
    assert set(ferry._links.peers) == {made.peer, another(made).peer}
    assert not ferry.meets


def test_a_load_in_its_step_meets_no_other_producer_and_none_is_met_until_it_is_over():
    made, slow = docked()
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
    made, slow = docked()
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
    made, slow = docked()
    (ferry,) = made.ferries
    ferry.forget(made.peer)
    ferry.meet(made.meeting)
    ferry.load(made.load(made.lease("r"), "r", in_step=True))
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    assert made.differing() == []
    nothing_left(made)


class Taking:
    """A lock that another thread keeps for so long each time, by the clock of the test; or a turn that takes so long."""

    def __init__(self, made: Dock, before_s: float, within_s: float) -> None:
        self._clock, self._before_s, self._within_s = made.clock, before_s, within_s

    def __enter__(self) -> None:
        self._clock.now += self._before_s

    def __exit__(self, *found: Any) -> None:
        self._clock.now += self._within_s


def test_a_step_is_not_given_up_because_another_thread_had_the_turn(monkeypatch):
    made, slow = docked()
    (ferry,) = made.ferries
    ferry.load(made.load(made.lease("r"), "r", in_step=True))
    slow.go()
    monkeypatch.setattr(ferry, "_turn", Taking(made, before_s=10 * PATIENCE_S, within_s=0.0))
    ferry.settle(["r"], PATIENCE_S)
    monkeypatch.undo()
    assert errors(ferry.outcomes()) == [""]
    nothing_left(made)


def test_copies_that_never_end_are_told_of(monkeypatch):
    made, slow = docked()
    (ferry,) = made.ferries
    ferry.load(made.load(made.lease("r"), "r", in_step=True))
    monkeypatch.setattr(ferry, "_turn", Taking(made, before_s=0.0, within_s=PATIENCE_S))
    with pytest.raises(SessionError, match="copies of r have not ended in"):
        ferry.settle(["r"], PATIENCE_S)
    monkeypatch.undo()
    slow.go()
    ferry.settle(["r"], PATIENCE_S)
    assert errors(ferry.outcomes()) == [""]
    nothing_left(made)
