"""A load thread that ends, for whatever reason: every load ends with that reason, and nothing lands after it was said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.session import Ferry, Outcome, Words
from kvferry.transport.faults import Delay
from session_dock import PATIENCE_S, Dock, case, dock
from transport_suite import until


class Broken(BaseException):
    """Like a panic in a library, or SystemExit: none of Exception's."""


ENDS = [Broken("a library panicked"), SystemExit(3), KeyboardInterrupt()]


def raising(error: BaseException) -> Callable[..., Any]:
    def called(*_: Any, **__: Any) -> Any:
        raise error

    return called


def ended(ferry: Ferry) -> None:
    """The thread runs, and ends by itself."""
    ferry._thread = threading.Thread(target=ferry._run, name="kvferry-ferry", daemon=True)
    ferry.start()
    ferry._thread.join(30)
    assert not ferry._thread.is_alive()
    assert not ferry._stop.is_set()


def said(ferry: Ferry, loads: int) -> dict[str, str]:
    found: list[Outcome] = []
    until(lambda: found.extend(ferry.outcomes()) or len(found) >= loads, f"{loads} outcomes")
    found += ferry.outcomes()
    assert len(found) == loads
    return {outcome.request: outcome.error for outcome in found}


def memory(made: Dock) -> list[np.ndarray]:
    return [buffer.copy() for rank in made.world.consumers.values() for buffer in rank.buffers]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["poll", "read", "notifications"])
def test_loads_fail_with_the_reason_when_their_thread_ends(monkeypatch, caplog, call, error):
    made = dock(case(False, 1, 1), {0: [Delay(polls=100)], 1: [Delay(polls=100)]})
    (ferry,), (end,) = made.ferries, made.ends
    for name in ("a", "b"):
        made.hand_in(made.load(made.lease(name), name))
    made.clock.now += 1
    monkeypatch.setattr(end, call, raising(error))
    ended(ferry)
    made.hand_in(made.load(made.lease("c"), "c"))
    found = said(ferry, 3)
    assert sorted(found) == ["a", "b", "c"]
    assert all("the load thread of rank 0 has ended" in reason and "restart the engine" in reason for reason in found.values())
    assert all(type(error).__name__ in reason for reason in found.values())
    assert [record.levelno for record in caplog.records if "load thread" in record.message] == [logging.ERROR]


def test_nothing_lands_once_it_was_said_that_a_load_failed(monkeypatch):
    made = dock(case(False, 1, 1), {0: [Delay(polls=100)], 1: [Delay(polls=100)]})
    (ferry,), (end,) = made.ferries, made.ends
    for name in ("a", "b"):
        made.hand_in(made.load(made.lease(name), name))
    made.step()
    monkeypatch.setattr(end, "poll", raising(Broken()))
    ended(ferry)
    assert sorted(said(ferry, 2)) == ["a", "b"]
    before = memory(made)
    monkeypatch.undo()
    for _ in range(10):
        for read in tuple(end._reads):
            end.poll(read)
            end.release(read)
        ferry.outcomes()
    assert all(np.array_equal(one, other) for one, other in zip(before, memory(made), strict=True))
    assert not end._reads


def test_a_load_that_the_thread_had_in_its_hands_when_it_ended_fails_too(monkeypatch):
    made = dock(case(False, 1, 1))
    (ferry,) = made.ferries
    made.hand_in(made.load(made.lease("a"), "a"))
    made.hand_in(made.load(made.lease("b"), "b"))
    monkeypatch.setattr(ferry._passage, "embark", raising(Broken()))
    ended(ferry)
    assert sorted(said(ferry, 2)) == ["a", "b"]


def test_later_loads_fail_at_once_in_their_step_and_beside_it(monkeypatch):
    made = dock(case(False, 1, 1), mapped=True)
    (ferry,) = made.ferries
    monkeypatch.setattr(ferry._transport, "notifications", raising(Broken()))
    made.clock.now += 1
    ended(ferry)
    lease = made.lease()
    ferry.load(made.load(lease, "in its step", in_step=True), made.load(lease, "beside it"))
    ferry.settle(["in its step"], PATIENCE_S)
    found = {outcome.request: outcome.error for outcome in ferry.outcomes()}
    assert sorted(found) == ["beside it", "in its step"]
    assert all("the load thread of rank 0 has ended" in reason for reason in found.values())
    ferry.meet(made.meeting)
    ferry.forget(made.peer)
    assert not ferry.meets
    assert ferry.outcomes() == []


def test_a_thread_whose_log_fails_too_is_seen_to_end(monkeypatch):
    """There is no memory for what went wrong, nor for the words on it."""
    made = dock(case(False, 1, 1), {0: [Delay(polls=100)]})
    (ferry,) = made.ferries
    made.hand_in(made.load(made.lease("a"), "a"))
    made.clock.now += 1
    monkeypatch.setattr(made.ends[0], "notifications", raising(RuntimeError("once")))
    for name in ("exception", "error", "debug"):
        monkeypatch.setattr(logging.getLogger("kvferry.session"), name, raising(MemoryError()))
    ended(ferry)
    assert "MemoryError" in said(ferry, 1)["a"]


def test_a_transport_that_cannot_be_closed_gives_loads_back_when_nothing_can_land(monkeypatch, caplog):
    made = dock(case(False, 1, 1))
    (ferry,), (end,) = made.ferries, made.ends
    made.harbour.stop(made.berths[0].transport.name)
    made.hand_in(made.load(made.lease("a"), "a"))
    made.step()
    monkeypatch.setattr(end, "poll", raising(Broken()))
    monkeypatch.setattr(end, "close", raising(RuntimeError("stuck")))
    ended(ferry)
    for _ in range(5):
        assert ferry.outcomes() == []
        assert end._reads
    made.harbour.resume(made.berths[0].transport.name)
    (outcome,) = ferry.outcomes()
    assert "has ended" in outcome.error
    assert not end._reads
    assert "stuck" in caplog.text
    ferry.close()


@pytest.mark.parametrize("error", [RuntimeError("no such call"), OSError("no device"), MemoryError()])
def test_a_thread_that_could_not_be_prepared_goes_on(error, caplog):
    made = dock(case(False, 1, 1))
    (ferry,) = made.ferries
    ferry._entering = raising(error)
    made.hand_in(made.load(made.lease("a"), "a"))
    ferry.start()
    assert said(ferry, 1) == {"a": ""}
    assert made.differing() == []
    assert "was not prepared" in caplog.text
    ferry.close()
    assert not ferry._thread.is_alive()


def test_a_thread_that_ends_before_it_was_prepared_is_seen(caplog):
    made = dock(case(False, 1, 1))
    (ferry,) = made.ferries
    ferry._entering = raising(Broken("in the driver"))
    made.hand_in(made.load(made.lease("a"), "a"))
    ended(ferry)
    assert "Broken: in the driver" in said(ferry, 1)["a"]


@pytest.mark.parametrize("what", ["sweep", "warming", "command"])
def test_what_always_fails_in_a_round_keeps_nothing_else_from_it(monkeypatch, what):
    """Others read from this rank while its transport is called."""
    made = dock(case(False, 1, 1), warm=what != "warming")
    (ferry,), (end,) = made.ferries, made.ends
    heard: list[None] = []
    notifications, release, poll = end.notifications, end.release, end.poll
    monkeypatch.setattr(end, "notifications", lambda: (heard.append(None), notifications())[1])
    if what == "warming":
        ferry.step()
        warming = [it.read for it in ferry._links.warming] or list(end._reads)
        monkeypatch.setattr(end, "poll", lambda read: raising(RuntimeError())() if read in warming else poll(read))
    elif what == "command":
        monkeypatch.setattr(ferry._passage, "forget", raising(RuntimeError()))
        ferry.forget(made.peer)
    else:
        bad: list[Any] = []
        monkeypatch.setattr(end, "release", lambda read: bad.append(read) or raising(RuntimeError())())
    made.hand_in(made.load(made.lease("a"), "a"))
    outcomes: list[Outcome] = []
    for _ in range(10):
        made.clock.now += 1
        outcomes += made.step()
    assert [(outcome.request, outcome.error) for outcome in outcomes] == [("a", "")]
    assert len(heard) >= 9
    monkeypatch.setattr(end, "release", release)


def test_closing_after_the_thread_has_ended_closes_nothing_twice(monkeypatch):
    made = dock(case(False, 1, 1))
    (ferry,), (end,) = made.ferries, made.ends
    closed: list[None] = []
    monkeypatch.setattr(end, "close", lambda: closed.append(None))
    monkeypatch.setattr(end, "notifications", raising(Broken()))
    made.clock.now += 1
    ended(ferry)
    ferry.close()
    assert len(closed) == 1


def test_a_lease_that_stands_still_wakes_nobody_that_has_ended(monkeypatch):
    made = dock(case(False, 1, 1))
    words: Words = made.landings[0]
    monkeypatch.setattr(made.ends[0], "notifications", raising(Broken()))
    made.clock.now += 1
    ended(made.ferries[0])
    words.live(made.lease())
    assert words.alive == 1
