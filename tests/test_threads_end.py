"""Threads beside the engine that end, and what they ran into: the engine is told, in words, and waits for none of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from keyed import KEYS
from kvferry.engines.vllm import introducing
from kvferry.engines.vllm.seeking import FOR_NOBODY, Seeking
from kvferry.errors import SessionError
from kvferry.session import Courier, Hello, Lease, Listener, Reference
from kvferry.session import courier as couriers
from transport_suite import until


class Broken(BaseException):
    """Like a panic in a library: none of Exception's."""


def reference(address: str) -> Reference:
    return Reference(address, "P", "1", "r", Lease(0, 1), 8, {}, "digest")


def raising(error: BaseException) -> Any:
    def called(*_: Any, **__: Any) -> Any:
        raise error

    return called


@pytest.fixture
def courier() -> Iterator[Courier[str]]:
    made = Courier(Hello("D", "1"), KEYS, 1.0, lambda peer, welcome: "met")
    yield made
    made.close()


@pytest.fixture
def listening() -> Iterator[str]:
    """Where a producer listens that is still starting."""
    made = Listener("127.0.0.1:0", KEYS)
    yield f"127.0.0.1:{made.port}"
    made.close()


def told(courier: Courier[str], address: str) -> str:
    found: list[str] = []

    def looked() -> bool:
        answer = courier.peer(reference(address))
        found.extend([answer] if answer is not None else [])
        return bool(found)

    until(looked, "an answer")
    return found[-1]


def errors(caplog: pytest.LogCaptureFixture, words: str) -> list[int]:
    return [record.levelno for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize("log", ["works", "fails too"])
def test_no_request_waits_for_a_producer_once_the_courier_has_ended(courier, caplog, monkeypatch, log):
    if log == "fails too":
        monkeypatch.setattr(logging.getLogger("kvferry.session"), "exception", raising(MemoryError()))
        monkeypatch.setattr(courier, "_send", raising(RuntimeError("in a round")))
    else:
        monkeypatch.setattr(courier, "_send", raising(Broken("in a round")))
    courier._thread.join(30)
    assert not courier._thread.is_alive()
    for _ in range(2):
        assert "the thread that renews leases has ended" in told(courier, "127.0.0.1:1")
        assert "restart the engine" in told(courier, "127.0.0.1:1")
    courier.hold("r", reference("127.0.0.1:1"))
    courier.release("r", reference("127.0.0.1:1"), "over")
    assert courier._commands.empty()
    assert log == "fails too" or errors(caplog, "has ended") == [logging.ERROR]


@pytest.mark.parametrize("error", [Broken("in a greeting"), SystemExit(1), MemoryError()], ids=lambda it: type(it).__name__)
def test_a_greeting_that_ends_its_thread_is_an_answer(courier, listening, monkeypatch, error):
    monkeypatch.setattr(courier, "_answer", raising(error))
    assert type(error).__name__ in told(courier, listening)
    assert courier._thread.is_alive()


def test_a_producer_that_is_not_looked_for_any_more_is_an_answer(courier, caplog, monkeypatch):
    monkeypatch.setattr(courier._finder, "_turn", raising(Broken()))
    courier._finder._ring()
    courier._finder._thread.join(30)
    for port in (1, 2):
        assert "the thread that looks for producers has ended" in told(courier, f"127.0.0.1:{port}")
    assert not courier._finder._thread.is_alive()
    assert sum(record.getMessage().startswith("the thread that looks") for record in caplog.records) == 1
    assert courier._thread.is_alive()


@pytest.mark.parametrize("error", [Broken(), MemoryError()], ids=lambda it: type(it).__name__)
def test_an_address_that_cannot_be_looked_up_at_all_is_an_answer(courier, monkeypatch, error):
    monkeypatch.setattr(couriers, "looked_up", raising(error))
    for address in ("127.0.0.1:1", "127.0.0.1:2"):
        assert type(error).__name__ in told(courier, address)
    assert courier._thread.is_alive()


def test_a_greeting_for_which_there_is_no_memory_is_an_answer(courier, listening, monkeypatch):
    monkeypatch.setattr(courier, "_greet", lambda *_: None)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "kvferry-asking":
            raise MemoryError("no stack")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert "it cannot be asked: no stack" in told(courier, listening)


def test_a_listener_that_ends_says_so_once_and_can_be_closed(caplog, monkeypatch):
    listener = Listener("127.0.0.1:0", KEYS)
    monkeypatch.setattr(listener, "_hear", raising(Broken()))
    monkeypatch.setattr(listener, "_watch", raising(Broken()))
    listener._thread.join(30)
    assert not listener._thread.is_alive()
    assert errors(caplog, "the listener has ended") == [logging.ERROR]
    listener.close()
    assert listener._context.closed


@pytest.fixture
def seeking() -> Iterator[Seeking]:
    made = Seeking(KEYS, 1.0, threading.Event())
    yield made
    made.close()


@pytest.mark.parametrize("error", [Broken(), SystemExit(1), RuntimeError()], ids=lambda it: type(it).__name__)
def test_what_ends_a_search_is_words_for_the_engine(seeking, error):
    """It is asked for on the engine's thread, which anything else would end."""
    sought = seeking.begin(reference("127.0.0.1:1"), raising(error))
    assert isinstance(sought.exception(30), SessionError)
    assert type(error).__name__ in str(sought.exception(30))


def test_a_search_that_no_thread_can_be_started_for_is_words_for_the_engine(seeking, monkeypatch):
    monkeypatch.setattr(ThreadPoolExecutor, "submit", raising(RuntimeError("can't start new thread")))
    assert "no thread can ask for it: can't start new thread" in str(
        seeking.begin(reference("127.0.0.1:1"), tuple).exception(30)
    )
    for _ in range(2 * FOR_NOBODY):
        found = seeking.begin_for_nobody(reference("127.0.0.1:1"), tuple)
        assert found is not None
        assert isinstance(found.exception(30), SessionError)


def test_a_peer_that_is_met_beside_the_engine_and_fails_unexpectedly_is_logged(caplog):
    class Told:
        asked = 0

        def introduce(self, address: str) -> None:
            self.asked += 1
            raise (SessionError("not there") if self.asked == 1 else IndexError("no cards"))

    courier, closing = Told(), threading.Event()
    introducing.RETRY_S, before = 0.0, introducing.RETRY_S
    try:
        introducing._ask_for(courier, "127.0.0.1:1", closing)  # type: ignore[arg-type]
    finally:
        introducing.RETRY_S = before
    assert courier.asked == 2
    assert errors(caplog, "127.0.0.1:1 cannot be met before the first request names it") == [logging.ERROR]
