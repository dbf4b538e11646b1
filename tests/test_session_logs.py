"""Names that others chose, in every line that is written of them: none begins a line, moves a cursor or fails to be encoded."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keyed import KEYS, opened, sealed
from kvferry import errors
from kvferry.errors import BadReferenceError, DecodeError, KVFerryError, MismatchError, plain, printable
from kvferry.logs import BURST_S, LINES, LOGGERS, Bursts, indented
from kvferry.session import (
    Card,
    Courier,
    Hello,
    Lease,
    Listener,
    PeerKey,
    Reference,
    Refusal,
    Welcome,
    Words,
)
from kvferry.session.messages import pack, unpack_reply, unpack_request
from kvferry.session.wire import ask
from kvferry.transport.metadata import Metadata, encode_metadata, this_host
from pairs import manifests_of
from transport_suite import until

EVIL = "p\nINFO all is well\r\x1b[2J\u2028\u202e\0\x85\ud800"
NAME = EVIL.replace("\ud800", "")
TRACEBACK = "Traceback (most recent call last):"
SOURCE = Path(errors.__file__).parent
CACHES = manifests_of("blocks of 12 to 8")[0]
METADATA = encode_metadata(Metadata("nixl", "p.0#1", this_host(), (), b"blob"))


def lines(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    return [logging.Formatter("%(message)s").format(record).split("\n") for record in caplog.records]


def harmless(caplog: pytest.LogCaptureFixture) -> None:
    for first, *others in lines(caplog):
        assert first.isprintable(), first
        assert all(line.isprintable() for line in others), others
        assert all(line.startswith(" ") or line == TRACEBACK for line in others), others


def welcome(engine: str, incarnation: str) -> Welcome:
    return Welcome(engine, incarnation, 60.0, (Card(CACHES, Words(2, CACHES.identity).manifest, METADATA),))


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1:0", KEYS)
    yield made
    made.close()


def test_a_line_says_that_its_file_is_kvferrys(listener, caplog):
    caplog.set_level(logging.INFO)
    listener.welcome(welcome("p", "p1"))
    ask(f"127.0.0.1:{listener.port}", Hello("d", "d1"), KEYS, 20.0)
    until(lambda: "asks for the manifests" in caplog.text, "a line")
    assert {record.filename for record in caplog.records} == {"kvferry/listener.py"}


def test_a_consumers_name_stays_within_its_line(listener, caplog):
    caplog.set_level(logging.INFO)
    listener.welcome(welcome("p", "p1"))
    ask(f"127.0.0.1:{listener.port}", Hello(NAME, NAME), KEYS, 20.0)
    until(lambda: "asks for the manifests" in caplog.text, "a line")
    assert "all is well" in caplog.text
    harmless(caplog)


def test_a_producers_names_stay_within_their_line_and_within_the_reason(listener, caplog):
    listener.welcome(welcome(NAME, NAME))
    address = f"127.0.0.1:{listener.port}"

    def meet(peer: PeerKey, found: Welcome) -> str:
        raise RuntimeError(NAME) if threading.current_thread().name == "kvferry-asking" else KVFerryError(NAME)

    courier: Courier[str] = Courier(Hello("d", "d1"), KEYS, 20.0, meet)
    try:
        for name in (NAME, f"other {NAME}"):
            found = Reference(address, name, name, "r", Lease(0, 7), 5, {"0": [1]}, "digest")
            courier.hold("r", found)
            until(lambda found=found: courier.peer(found) is not None, "an answer")
            assert str(courier.peer(found)).isprintable()
        with pytest.raises(KVFerryError) as caught:
            courier.introduce(address)
        assert str(caught.value).isprintable()
    finally:
        courier.close()
    assert "all is well" in caplog.text
    harmless(caplog)


def test_a_refusal_is_told_on_one_line(listener, monkeypatch):
    monkeypatch.setattr(listener, "_welcomes", {1: pack(Refusal(NAME))})
    with pytest.raises(KVFerryError, match="refuses: ") as caught:
        ask(f"127.0.0.1:{listener.port}", Hello("d", "d1"), KEYS, 20.0)
    assert str(caught.value).isprintable()


def test_what_a_message_or_a_reference_calls_its_fields_is_told_on_one_line():
    raw = msgspec.msgpack.decode(pack(Hello("d", "d1")))
    lease: dict[str, Any] = {"slot": 0, "generation": 1, NAME: 1}
    for unpack, said in (
        (unpack_request, {**raw, "type": NAME}),
        (unpack_reply, {"type": NAME}),
        (unpack_request, {"type": "renew", "incarnation": "p", "leases": [lease]}),
    ):
        with pytest.raises(DecodeError) as caught:
            unpack(msgspec.msgpack.encode(said))
        assert str(caught.value).isprintable()
    params = sealed(Reference("127.0.0.1:1", "p", "p1", "r", Lease(0, 7), 5, {"0": [1]}, "digest"))
    for changed in ({"lease": lease}, {"blocks": {NAME: [1]}}, {"address": NAME}, {"version": NAME}, {"digest": EVIL}):
        with pytest.raises(BadReferenceError) as refused:
            opened({**params, **changed})
        assert str(refused.value).isprintable()


def test_mismatches_are_one_line_each():
    error = MismatchError([f"{NAME} k: there", "layers.1 v: here"])
    _, *told = str(error).split("\n")
    assert len(told) == 2
    assert all(line.startswith("  ") and line.isprintable() for line in told)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVFerryError)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not MismatchError])
def test_every_error_is_told_on_one_line(kind):
    assert str(kind(f"peer {EVIL}")).isprintable()


def test_every_logger_is_guarded_and_there_is_no_other():
    named = {name for file in SOURCE.rglob("*.py") for name in re.findall(r'getLogger\("(kvferry[.\w]*)"\)', file.read_text())}
    assert named - {"kvferry"} == set(LOGGERS)


@pytest.mark.parametrize("name", LOGGERS)
def test_whatever_is_logged_begins_one_line(name, caplog):
    caplog.set_level(logging.DEBUG)
    logger = logging.getLogger(name)
    logger.info("request %s of %s", EVIL, PeerKey("127.0.0.1:1", EVIL, EVIL))
    logger.info("100%% of it")
    logger.info("100%")
    try:
        raise RuntimeError(EVIL)
    except RuntimeError:
        logger.exception("it %s", "stumbled")
    assert [record.getMessage() for record in caplog.records][1:] == ["100%% of it", "100%", "it stumbled"]
    assert "RuntimeError" in caplog.text
    harmless(caplog)


def test_what_is_ours_to_break_is_broken_and_what_is_plain_stays():
    assert indented("two sides:\n  a\nb") == "two sides:\n  a\n  b"
    assert plain("p at 127.0.0.1:1") == "p at 127.0.0.1:1"
    assert plain("é\n") == r"\xe9\n"
    assert printable("é\n") == "é\\n"
    assert plain(plain(EVIL)) == plain(EVIL)


class TestBursts:
    @pytest.fixture
    def now(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    def bursts(self, now: list[float]) -> Bursts:
        return Bursts(logging.getLogger("kvferry.vllm"), clock=lambda: now[0])

    def said(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records]

    def test_the_last_line_of_a_burst_says_that_others_are_only_counted(
        self, bursts: Bursts, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(LINES + 30):
            bursts.log("request %d is refused: 5 %% of %s", number, "it")
        *first, last = self.said(caplog)
        assert first == [f"request {number} is refused: 5 % of it" for number in range(LINES - 1)]
        assert last == f"request {LINES - 1} is refused: 5 % of it (more lines in the next 10 s are counted, not written)"
        assert {record.levelno for record in caplog.records} == {logging.ERROR}
        assert {record.filename for record in caplog.records} == {"test_session_logs.py"}

    def test_the_next_line_after_a_burst_says_how_many_were_not_written(
        self, bursts: Bursts, now: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(LINES + 2):
            bursts.log("request %d is refused", number)
        now[0] += BURST_S - 1
        bursts.log("one more is refused")
        assert len(self.said(caplog)) == LINES
        now[0] += 1
        bursts.log("another is refused")
        bursts.log("and another")
        assert self.said(caplog)[LINES:] == ["another is refused (3 lines before this one were not written)", "and another"]
