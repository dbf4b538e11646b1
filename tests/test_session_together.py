"""Loads that set out together: what is wrong with one fails that one, and what is wrong with their connection fails all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.errors import SessionError, TransportError
from kvferry.session import Outcome
from kvferry.transport import Read
from kvferry.transport.contract import read_together
from kvferry.transport.faults import Delay
from session_dock import PATIENCE_S, Dock, case, dock

NAMES = ("a", "b", "c", "d")
WRONG = [RuntimeError("wrong with one"), MemoryError("wrong with one"), SessionError("wrong with one")]
ENOUGH = 20


def errors(outcomes: Iterable[Outcome]) -> dict[str, str]:
    found = [(outcome.request, outcome.error) for outcome in outcomes]
    assert len(dict(found)) == len(found), "a load ended twice"
    return dict(found)


def nothing_left(made: Dock) -> None:
    made.step()
    assert made.free_landings == [8] * len(made.ferries)
    assert all(not end._reads for end in made.ends)
    assert all(not ferry._passage.under_way and not ferry._passage.spent for ferry in made.ferries)


class Wire:
    """The transport of a rank, in which something is wrong with what is read for one request: its data, out of one source,
    or its words. Several loads are begun by one call, one after the other, or none of them if `at_once`."""

    def __init__(self, made: Dock, request: str, error: Exception, what: str, source: int = 0, at_once: bool = False) -> None:
        self._passage, self._inner = made.ferries[0]._passage, made.ferries[0]._transport
        self._request, self._error, self._what, self._source, self._at_once = request, error, what, source, at_once
        self.begun: list[int] = []
        made.ferries[0]._passage._transport = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _insist(self, prepared: Any, tiles: Any) -> None:
        for crossing in self._passage.under_way:
            if crossing.load.request != self._request or crossing.link is None:
                continue
            if self._what == "data":
                wrong = prepared is crossing.link.data[self._source] and tiles is crossing.loading.tiles
            else:
                landed = np.concatenate([one.dst_block for one in tiles.values()])
                words = prepared is crossing.link.words[self._source][1]
                wrong = words and crossing.landings[self._source] in landed.tolist()
            if wrong:
                raise self._error

    def read(self, prepared: Any, tiles: Any, notification: bytes = b"") -> Read:
        self._insist(prepared, tiles)
        return self._inner.read(prepared, tiles, notification)

    def read_together(self, prepared: Any, loads: Sequence[Any]) -> Iterable[Read]:
        self.begun.append(len(loads))
        if self._at_once:
            for tiles in loads:
                self._insist(prepared, tiles)
            return read_together(self._inner, prepared, loads)
        return (self.read(prepared, tiles) for tiles in loads)


def sent(made: Dock, way: str) -> dict[str, str]:
    """How loads end that are handed in together."""
    loads = [made.load(made.lease(name), name, in_step=way == "in a step") for name in NAMES]
    (ferry,) = made.ferries
    ferry.load(*loads)
    if way == "in a step":
        ferry.settle(NAMES, PATIENCE_S)
    return errors(made.step(ENOUGH))


@pytest.mark.parametrize("error", WRONG[1:])
@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("what", ["data", "words"])
@pytest.mark.parametrize("bad", ["a", "c"])
@pytest.mark.parametrize("way", ["transport", "mapped", "in a step"])
def test_a_read_that_cannot_be_made_fails_its_load_and_no_other(way, bad, what, source, error):
    made = dock(case(False, 2, 1), mapped=way != "transport")
    wire = Wire(made, bad, error, what, source, at_once=way != "transport")
    found = sent(made, way)
    assert sorted(found) == sorted(NAMES)
    assert {name for name, said in found.items() if said} == {bad}
    assert "wrong with one" in found[bad]
    assert made.differing() == []
    assert max(wire.begun) == len(NAMES)
    nothing_left(made)


@pytest.mark.parametrize("error", WRONG)
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("way", ["transport", "mapped", "in a step"])
def test_a_fill_that_fails_for_one_fails_its_load_and_no_other(monkeypatch, way, bad, error):
    """Together, and then alone."""
    made = dock(case(True, 1, 1), mapped=way != "transport")
    passage = made.ferries[0]._passage
    fill, calls = passage._fill, []

    def filling(fills: Any) -> Any:
        calls.append(len(fills))
        if len(calls) in (1, bad + 2):
            raise error
        return fill(fills)

    monkeypatch.setattr(passage, "_fill", filling)
    found = sent(made, way)
    assert {name for name, said in found.items() if said} == {NAMES[bad]}
    assert "wrong with one" in found[NAMES[bad]]
    assert len(calls) == 1 + len(NAMES)
    assert made.differing() == []
    nothing_left(made)


@pytest.mark.parametrize("bad", NAMES)
def test_what_cannot_be_begun_together_is_begun_alone(bad):
    """Neither the first, whose turn it is, nor one of the others fails for it."""
    made = dock(case(False, 2, 1))
    wire = Wire(made, bad, RuntimeError("too many at a time"), "data")
    together = wire.read_together
    wire.read = wire._inner.read  # type: ignore[method-assign]
    wire.read_together = _unless_alone(together)  # type: ignore[method-assign]
    assert sent(made, "transport") == dict.fromkeys(NAMES, "")
    assert made.differing() == []
    nothing_left(made)


def _unless_alone(together: Callable[..., Any]) -> Callable[..., Any]:
    def called(prepared: Any, loads: Sequence[Any]) -> Any:
        if len(loads) > 1:
            raise RuntimeError("too many at a time")
        return together(prepared, loads)

    return called


def test_of_loads_that_set_out_over_a_lost_connection_those_under_way_fail_and_the_others_take_another():
    made = dock(case(False, 2, 1))
    Wire(made, "c", TransportError("out of reach"), "data")
    found = sent(made, "transport")
    assert sorted(found) == sorted(NAMES)
    assert [name for name in NAMES if "out of reach" in found[name]] == ["a", "b", "c"]
    assert found["d"] == ""
    assert made.differing() == []
    nothing_left(made)


def test_words_that_several_loads_wait_for_are_not_given_up_for_one_that_failed():
    """The transport cannot be asked after them once, for the first load that wants to know."""
    made = dock(case(False, 2, 1), {8: [Delay(polls=4)], 9: [Delay(polls=4)]})
    (ferry,) = made.ferries
    passage = ferry._passage
    poll = passage._transport.poll
    failed: list[str] = []

    class Asked(Wire):
        def poll(self, read: Any) -> Any:
            checking = [crossing for crossing in passage.under_way if crossing.checking and read in crossing.reads]
            if len(checking) == len(NAMES) and not failed:
                failed.append(checking[0].load.request)
                raise RuntimeError("not this time")
            return poll(read)

    Asked(made, "", RuntimeError(), "data")
    found = sent(made, "transport")
    assert failed
    assert {name: said for name, said in found.items() if said} == {failed[0]: "RuntimeError: not this time"}
    assert made.differing() == []
    nothing_left(made)
