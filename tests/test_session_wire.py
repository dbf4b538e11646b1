"""The session's channel over real sockets of this machine: what is answered, what is refused, and that nothing ends it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from keyed import KEYS, secured
from kvferry.errors import DecodeError, SessionError
from kvferry.session import (
    Card,
    Courier,
    Hello,
    Keys,
    Lease,
    Listener,
    PeerKey,
    Reference,
    Refusal,
    Release,
    Renew,
    Welcome,
    Words,
    read_keys,
    wire,
)
from kvferry.session import courier as couriers
from kvferry.session import listener as listening
from kvferry.session.key import is_loopback, split_address
from kvferry.session.messages import MAX_REQUEST, pack, unpack_reply
from kvferry.session.wire import ask
from kvferry.transport.metadata import Metadata, encode_metadata, this_host
from kvferry.up.ports import free_port
from pairs import manifests_of
from transport_suite import until

HELLO = Hello("consumer", "d1")
CACHES = manifests_of("blocks of 12 to 8")[0]
METADATA = encode_metadata(Metadata("nixl", "p.0#1", this_host(), (), b"blob"))
PATIENCE_S = 20.0
SHORT_S = 1.5


def welcome(incarnation: str = "p1", lease_s: float = 60.0, transport: bytes = METADATA) -> Welcome:
    return Welcome("producer", incarnation, lease_s, (Card(CACHES, Words(2, CACHES.identity).manifest, transport),))


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []

    def keep(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield keep
    for thing in reversed(opened):
        thing.close()


@pytest.fixture
def listener(closing) -> Listener:
    made = closing(Listener("127.0.0.1:0", KEYS))
    made.welcome(welcome())
    return made


def key_in(folder: Path, name: str, content: str = "") -> Keys:
    path = folder / name
    path.write_text(content or f"{name:=>40}\n")
    return read_keys(path)


def at(listener: Listener) -> str:
    return f"127.0.0.1:{listener.port}"


def reference(address: str, slot: int = 0, incarnation: str = "p1") -> Reference:
    return Reference(address, "producer", incarnation, "r", Lease(slot, 7), 5, {"0": [1]}, "digest")


def met(peer: PeerKey, found: Welcome) -> str:
    return f"{found.engine} {found.incarnation}"


def taken(listener: Listener, count: int) -> list[Renew | Release]:
    out: list[Renew | Release] = []
    until(lambda: out.extend(listener.take()) or len(out) >= count, f"{count} messages")
    return out


def answer(courier: Courier[str], found: Reference) -> str:
    said: list[str] = []

    def heard() -> bool:
        said.extend(filter(None, [courier.peer(found)]))
        return bool(said)

    until(heard, "an answer")
    return said[0]


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_a_hello_is_answered_with_the_welcome(listener):
    assert ask(at(listener), HELLO, KEYS, PATIENCE_S) == welcome()


def test_a_welcome_of_many_megabytes_arrives_whole_at_many(listener, closing):
    cards = tuple(Card(CACHES, CACHES, bytes([i]) * (1 << 20)) for i in range(24))
    large = Welcome("producer", "p1", 60.0, cards)
    listener.welcome(large)
    for _ in range(3):
        assert ask(at(listener), HELLO, KEYS, PATIENCE_S) == large


def test_a_welcome_beyond_the_cap_is_not_taken_in(listener, monkeypatch):
    monkeypatch.setattr(wire, "MAX_WELCOME", 100)
    with pytest.raises(SessionError, match="does not answer"):
        ask(at(listener), HELLO, KEYS, SHORT_S)


def test_an_engine_that_is_still_starting_says_so(closing):
    made = closing(Listener("127.0.0.1:0", KEYS))
    with pytest.raises(SessionError, match="refuses: this engine is still starting"):
        ask(at(made), HELLO, KEYS, PATIENCE_S)
    made.welcome(welcome())
    assert ask(at(made), HELLO, KEYS, PATIENCE_S).incarnation == "p1"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [b"\xff" * 1000],
        [b"\x91" * MAX_REQUEST],
        [pack(Refusal("no"))],
        [bytes(MAX_REQUEST)],
    ],
    ids=["empty", "text", "high", "nested", "a reply", "long"],
)
def test_what_cannot_be_read_is_refused_and_the_next_greeting_answered(listener, frames):
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.setsockopt(zmq.LINGER, 0)
        secured(end).connect(f"tcp://{at(listener)}")
        end.send_multipart(frames)
        assert end.poll(PATIENCE_S * 1000)
        assert isinstance(unpack_reply(end.recv()), Refusal)
        end.send(pack(HELLO))
        assert end.poll(PATIENCE_S * 1000)
        assert unpack_reply(end.recv()) == welcome()
    assert listener.refused == 1
    assert ask(at(listener), HELLO, KEYS, PATIENCE_S) == welcome()


def test_a_message_beyond_the_cap_and_bytes_that_are_no_session_end_only_their_connection(listener):
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.setsockopt(zmq.LINGER, 0)
        secured(end).connect(f"tcp://{at(listener)}")
        end.send(bytes(2 * MAX_REQUEST))
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"", bytes(100_000)):
            with socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S) as raw:
                raw.sendall(data)
        assert ask(at(listener), HELLO, KEYS, PATIENCE_S) == welcome()
    assert listener.take() == []


def test_a_flood_of_greetings_keeps_few_answers_waiting_and_others_are_served(listener):
    listener.welcome(welcome(transport=bytes(1 << 20)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.RCVHWM, 1)
        secured(end).connect(f"tcp://{at(listener)}")
        for _ in range(500):
            end.send(pack(HELLO))
        assert ask(at(listener), HELLO, KEYS, PATIENCE_S).incarnation == "p1"


def test_an_error_in_the_listener_itself_does_not_end_it(listener, monkeypatch):
    failed = threading.Event()
    unpack = listening.unpack_request

    def stumbles(data: bytes) -> Any:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("unheard of")
        return unpack(data)

    monkeypatch.setattr(listening, "unpack_request", stumbles)
    assert ask(at(listener), HELLO, KEYS, PATIENCE_S) == welcome()
    assert failed.is_set()


def test_words_that_nobody_takes_do_not_pile_up(listener, closing, monkeypatch):
    monkeypatch.setattr(listening, "_UNTAKEN", 10)
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    for slot in range(30):
        courier.hold(f"r{slot}", reference(at(listener), slot))
        courier.release(f"r{slot}", reference(at(listener), slot), "loaded")
    until(lambda: len(listener._released) == 10, "ten messages")
    assert ask(at(listener), HELLO, KEYS, PATIENCE_S) == welcome()
    assert len(listener.take()) == 10


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "192.0.2.1", "example.org"])
def test_listening_beyond_this_machine_needs_a_key_and_the_error_says_how(host):
    with pytest.raises(SessionError, match=r"needs a key.*: set key_file .* or use 127\.0\.0\.1"):
        Listener(f"{host}:0", KEYS)


def test_with_a_key_it_listens_on_all_interfaces(closing, tmp_path):
    made = closing(Listener("0.0.0.0:0", key_in(tmp_path, "one")))
    made.welcome(welcome())
    assert ask(at(made), HELLO, key_in(tmp_path, "one"), PATIENCE_S) == welcome()


def test_an_address_that_is_taken_is_an_error_that_names_the_option(listener):
    with pytest.raises(SessionError, match=f"cannot listen on {at(listener)}.*option listen"):
        Listener(at(listener), KEYS)


def test_only_who_holds_the_same_key_is_answered(closing, tmp_path):
    made = closing(Listener("127.0.0.1:0", key_in(tmp_path, "one")))
    made.welcome(welcome())
    assert ask(at(made), HELLO, key_in(tmp_path, "one"), PATIENCE_S) == welcome()
    with pytest.raises(SessionError, match="has it another key, or none"):
        ask(at(made), HELLO, key_in(tmp_path, "other"), SHORT_S)
    with pytest.raises(SessionError, match=r"name one file in key_file on both sides"):
        ask(at(made), HELLO, KEYS, SHORT_S)
    assert ask(at(made), HELLO, key_in(tmp_path, "one"), PATIENCE_S) == welcome()


def test_a_listener_with_its_users_own_key_does_not_answer_who_has_a_named_one(listener, tmp_path):
    with pytest.raises(SessionError, match="has it another key, or none"):
        ask(at(listener), HELLO, key_in(tmp_path, "one"), SHORT_S)


def test_who_refuses_the_handshake_before_it_is_asked_is_not_waited_for(listener, tmp_path, monkeypatch):
    """ZeroMQ ends such a connection, or makes it anew, as the two sides' threads happen to run; ended, it is a socket that is
    connected to nobody."""
    monkeypatch.setattr(wire, "dial", lambda context, *how: context.socket(zmq.DEALER))
    with pytest.raises(SessionError, match="refuses the connection; has it another key, or none"):
        ask(at(listener), HELLO, key_in(tmp_path, "one"), PATIENCE_S)


def test_a_question_that_is_lost_on_its_way_is_put_again(listener, monkeypatch):
    put, sent = wire._put, []

    def forgetful(ends: Any, question: bytes) -> bool:
        sent.append(question)
        return len(sent) == 1 or put(ends, question)

    listener.welcome(welcome())
    monkeypatch.setattr(wire, "_put", forgetful)
    assert ask(at(listener), HELLO, KEYS, PATIENCE_S).engine == "producer"
    assert sent == [pack(HELLO)] * 2
    assert listener.greeted == 1


def test_words_from_who_holds_no_key_are_not_heard(closing, tmp_path):
    key = key_in(tmp_path, "one")
    made = closing(Listener("127.0.0.1:0", key))
    couriers = {name: closing(Courier(HELLO, k, SHORT_S, met)) for name, k in (("thief", KEYS), ("reader", key))}
    for slot, courier in enumerate(couriers.values()):
        courier.hold("r", reference(at(made), slot))
        courier.release("r", reference(at(made), slot), "")
    assert [m.lease.slot for m in taken(made, 1) if isinstance(m, Release)] == [1]


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def test_where_nobody_listens_the_error_comes_at_once_and_says_so():
    address = free_address()
    with pytest.raises(SessionError, match=f"nobody listens at {address}.*refused"):
        ask(address, HELLO, KEYS, 3600.0)


@pytest.mark.parametrize("address", ["no-such-host.invalid:1", f"{'x' * 70}.invalid:1", "..:1"])
def test_a_host_that_has_no_address_is_an_error_like_any_other(address, tmp_path):
    with pytest.raises(SessionError, match="nobody listens at"):
        ask(address, HELLO, key_in(tmp_path, "one"), SHORT_S)


def test_a_producer_is_met_and_its_leases_are_renewed_and_released(closing):
    made = closing(Listener("127.0.0.1:0", KEYS))
    made.welcome(welcome(lease_s=0.3))
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    courier.hold("a", reference(at(made), 0))
    courier.hold("b", reference(at(made), 1))
    assert answer(courier, reference(at(made))) == "producer p1"
    assert taken(made, 1)[0] == Renew("p1", (Lease(0, 7), Lease(1, 7)))
    courier.release("a", reference(at(made), 0), "loaded")
    courier.release("b", reference(at(made), 1), "failed")
    heard: list[Renew | Release] = []
    until(lambda: heard.extend(made.take()) or sum(isinstance(m, Release) for m in heard) == 2, "two releases")
    notes = [(m.lease.slot, m.reader, m.note) for m in heard if isinstance(m, Release)]
    assert notes == [(0, "consumer@d1", "loaded"), (1, "consumer@d1", "failed")]


def test_a_reference_of_an_earlier_start_is_refused_with_the_reason(listener, closing):
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    stale = reference(at(listener), incarnation="p0")
    courier.hold("a", stale)
    assert "start p1; the reference is of producer, start p0: it is gone" in answer(courier, stale)
    assert answer(courier, reference(at(listener))) == "producer p1"


def test_a_reason_is_asked_about_again_after_a_pause(closing):
    made = closing(Listener("127.0.0.1:0", KEYS))
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    courier._consumer._retry_s = 0.05
    said: list[Any] = []
    until(lambda: said.append(courier.peer(reference(at(made)))) or any(said), "a refusal")
    assert "still starting" in said[-1]
    made.welcome(welcome())
    until(lambda: courier.peer(reference(at(made))) == "producer p1", "a welcome")


@pytest.mark.parametrize("error", [SessionError("cannot be read"), RuntimeError("unheard of"), DecodeError("damaged")])
def test_what_goes_wrong_in_meeting_a_producer_is_the_reason(listener, closing, error):
    def meet(peer: PeerKey, found: Welcome) -> str:
        raise error

    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, meet))
    courier.hold("a", reference(at(listener)))
    assert str(error) in answer(courier, reference(at(listener)))
    with pytest.raises(type(error)):
        courier.introduce(at(listener))


def test_a_producer_that_is_introduced_is_known_to_its_references(listener, closing):
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    assert courier.introduce(at(listener)) == "producer p1"
    assert answer(courier, reference(at(listener))) == "producer p1"
    with pytest.raises(SessionError, match="nobody listens"):
        courier.introduce(free_address())


def test_a_producer_that_restarted_at_its_address_is_met_anew_and_the_old_one_forgotten(listener, closing):
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    assert answer(courier, reference(at(listener))) == "producer p1"
    assert courier.forgotten() == []
    listener.welcome(welcome("p2"))
    assert answer(courier, reference(at(listener), incarnation="p2")) == "producer p2"
    gone: list[PeerKey] = []
    until(lambda: gone.extend(courier.forgotten()) or bool(gone), "the old start")
    assert gone == [PeerKey(at(listener), "producer", "p1")]


def test_addresses_that_nobody_answers_keep_few_sockets_and_the_courier_goes_on(listener, closing, monkeypatch):
    monkeypatch.setattr(couriers, "_ENDS", 3)
    courier = closing(Courier(HELLO, KEYS, SHORT_S, met))
    for port in range(1, 12):
        courier.hold(f"r{port}", reference(f"127.0.0.1:{port}"))
        courier.release(f"r{port}", reference(f"127.0.0.1:{port}"), "")
    for odd in ("127.0.0.1:99999", "a b:1", "\ud800:1", "h\0:1", ""):
        courier.hold("odd", reference(odd))
        courier.release("odd", reference(odd), "")
    courier.hold("r", reference(at(listener)))
    courier.release("r", reference(at(listener)), "loaded")
    assert [m.lease for m in taken(listener, 1) if isinstance(m, Release)] == [Lease(0, 7)]
    assert len(courier._ends) <= 3


@pytest.fixture
def dead() -> Iterator[list[str]]:
    """Addresses that take connections and say nothing: one port under many numbers of this machine."""
    with socket.create_server(("0.0.0.0", 0), backlog=128) as silent:
        yield [f"127.0.1.{number}:{silent.getsockname()[1]}" for number in range(1, 41)]


def test_dead_addresses_hold_up_no_greeting_of_others(listener, closing, dead, monkeypatch):
    monkeypatch.setattr(wire, "_REACH_S", 1.0)
    courier = closing(Courier(HELLO, KEYS, 3600.0, met))
    for number, address in enumerate(dead):
        courier.hold(f"r{number}", reference(address))
    assert answer(courier, reference(at(listener))) == "producer p1"
    listener.welcome(welcome("p2"))
    assert answer(courier, reference(at(listener), incarnation="p2")) == "producer p2"


def test_any_number_of_silent_addresses_takes_no_place_of_who_answers_and_no_thread(listener, closing, monkeypatch):
    """They are waited for as long as this test takes."""
    monkeypatch.setattr(wire, "_REACH_S", 3600.0)
    monkeypatch.setattr(wire, "_FIRST_REACH_S", 3600.0, raising=False)
    before = threading.active_count()
    with socket.create_server(("0.0.0.0", 0), backlog=16) as silent:
        courier = closing(Courier(HELLO, KEYS, 3600.0, met))
        for number in range(200):
            courier.hold(f"r{number}", reference(f"127.0.2.{number}:{silent.getsockname()[1]}"))
        assert answer(courier, reference(at(listener))) == "producer p1"
        assert threading.active_count() - before < 10
        assert courier.peer(reference(f"127.0.2.7:{silent.getsockname()[1]}")) is None
        courier.close()


def test_who_takes_connections_and_says_nothing_is_told_from_a_producer_that_is_slow(dead, monkeypatch):
    monkeypatch.setattr(wire, "_REACH_S", 0.3)
    with pytest.raises(SessionError, match=f"nobody listens at {dead[0]}: the port is open and says nothing"):
        ask(dead[0], HELLO, KEYS, PATIENCE_S)


def test_a_connection_whose_handshake_does_not_end_is_made_anew(listener, monkeypatch):
    """The first one after the probe hears the greeting and then nothing more."""
    monkeypatch.setattr(wire, "_HANDSHAKE_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as between:
        taken = []

        def stall_the_second() -> None:
            with contextlib.suppress(OSError):
                while True:
                    here, _ = between.accept()
                    taken.append(here)
                    there = socket.create_connection(("127.0.0.1", listener.port))
                    taken.append(there)
                    stalls = len(taken) == 4
                    for one, other in ((here, there), (there, here)):
                        threading.Thread(target=_carried, args=(one, other, 10 if stalls else 1 << 30), daemon=True).start()

        threading.Thread(target=stall_the_second, daemon=True).start()
        assert ask(f"127.0.0.1:{between.getsockname()[1]}", HELLO, KEYS, PATIENCE_S) == welcome()
        assert len(taken) >= 6
        for end in taken:
            end.close()


def _carried(one: socket.socket, other: socket.socket, most: int) -> None:
    with contextlib.suppress(OSError):
        while most > 0 and (heard := one.recv(min(most, 4096))):
            other.sendall(heard)
            most -= len(heard)


def test_who_speaks_something_else_is_not_greeted():
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(lambda: other.accept()[0].sendall(b"220 mail.example.org ready\r\n"))
        with pytest.raises(SessionError, match="the port is open and speaks no session"):
            ask(f"127.0.0.1:{other.getsockname()[1]}", HELLO, KEYS, PATIENCE_S)
        answering.result()


def test_many_starts_that_are_named_at_one_dead_address_cost_one_greeting(closing, dead, monkeypatch):
    asked: list[str] = []
    looked_up = couriers.looked_up

    def counted(address: str, *arguments: Any) -> Any:
        asked.append(address)
        return looked_up(address, *arguments)

    monkeypatch.setattr(couriers, "looked_up", counted)
    monkeypatch.setattr(wire, "_REACH_S", 1.5)
    courier = closing(Courier(HELLO, KEYS, 3600.0, met))
    references = [reference(dead[0], incarnation=f"p{number}") for number in range(100)]
    for number, found in enumerate(references):
        courier.hold(f"r{number}", found)
    assert all("says nothing" in answer(courier, found) for found in references)
    assert asked == [dead[0]]


@pytest.fixture
def names(closing, tmp_path, monkeypatch) -> tuple[Listener, Keys, list[str]]:
    """A listener that every name leads to, its key, and the threads that looked names up."""
    key = key_in(tmp_path, "one")
    made = closing(Listener("127.0.0.1:0", key))
    made.welcome(welcome())
    looked_up: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> Any:
        looked_up.append(threading.current_thread().name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return made, key, looked_up


@pytest.mark.parametrize("introduced", [False, True])
def test_words_to_a_name_go_where_its_greeting_found_it(names, closing, introduced):
    """The resolver is asked beside everything else, never by the thread that renews leases."""
    made, key, looked_up = names
    courier = closing(Courier(HELLO, key, PATIENCE_S, met))
    named = reference(f"prefill-0.example.org:{made.port}")
    if introduced:
        courier.introduce(named.address)
    courier.hold("r", named)
    assert answer(courier, named) == "producer p1"
    courier.release("r", named, "loaded")
    assert [m.note for m in taken(made, 1) if isinstance(m, Release)] == ["loaded"]
    assert set(looked_up) == {threading.current_thread().name if introduced else "kvferry-asking"}


class _Watched(dict[str, Any]):
    """Knows which threads have changed it."""

    changed_by: set[str]

    def __setitem__(self, key: str, value: Any) -> None:
        self.changed_by.add(threading.current_thread().name)
        super().__setitem__(key, value)

    def pop(self, *arguments: Any) -> Any:
        self.changed_by.add(threading.current_thread().name)
        return super().pop(*arguments)


def test_of_many_names_the_last_are_kept_by_the_thread_that_uses_them(names, closing, monkeypatch):
    """Threads that took turns to make room for a name would take the same one away twice, and call who answers unreachable."""
    monkeypatch.setattr(couriers, "_NUMBERS", 4)
    made, key, _ = names
    courier = closing(Courier(HELLO, key, PATIENCE_S, met))
    kept = courier._numbers = _Watched()
    kept.changed_by = set()
    found = [reference(f"prefill-{n}.example.org:{made.port}") for n in range(20)]
    assert {answer(courier, one) for one in found} == {"producer p1"}
    assert kept.changed_by == {"kvferry-courier"}
    assert list(kept) == [one.address for one in found[-4:]]
    courier.doubt(found[-4])
    assert answer(courier, found[-4]) == "producer p1"
    assert list(kept) == [one.address for one in (*found[-3:], found[-4])]


def test_a_greeting_that_no_thread_can_be_started_for_is_tried_again(listener, closing, monkeypatch):
    start, failed = threading.Thread.start, []

    def start_later(self: threading.Thread) -> None:
        if self.name == "kvferry-asking" and not failed:
            failed.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    assert "it cannot be asked: can't start new thread" in answer(courier, reference(at(listener)))
    failed.clear()
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    courier._consumer._retry_s = 0.0
    until(lambda: courier.peer(reference(at(listener))) == "producer p1", "an answer")
    assert len(failed) == 1


def never_ending(server: socket.socket) -> None:
    """Greets who connects as a producer would that asked for no key, and replies with frames of a message that never ends."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
    for _ in range(2):
        end, _ = server.accept()
        with end, contextlib.suppress(OSError):
            end.sendall(greeting)
            heard = end.recv(1 << 16)
            while heard and b"hello" not in heard:
                if b"READY" in heard:
                    end.sendall(bytes([0x04, len(ready)]) + ready)
                heard = end.recv(1 << 16)
            while heard:
                end.sendall(b"\x01\x01x")


def test_a_reply_that_never_ends_is_refused_by_its_first_frames(monkeypatch):
    """From a producer that has the key: none here speaks its encryption by hand."""
    monkeypatch.setattr(wire, "_secure", lambda end, key: None)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        replying = pool.submit(never_ending, server)
        with pytest.raises(DecodeError, match="not a reply"):
            ask(f"127.0.0.1:{server.getsockname()[1]}", HELLO, KEYS, PATIENCE_S)
        replying.result()


def test_a_load_that_failed_makes_sure_that_its_producer_is_still_there(listener, closing):
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    assert answer(courier, reference(at(listener))) == "producer p1"
    courier.doubt(reference(at(listener)))
    assert answer(courier, reference(at(listener))) == "producer p1"
    listener.welcome(welcome("p2"))
    assert courier.peer(reference(at(listener))) == "producer p1"
    courier.doubt(reference(at(listener)))
    assert "start p2; the reference is of producer, start p1: it is gone" in answer(courier, reference(at(listener)))


def test_a_producer_in_doubt_is_not_read_from_before_it_has_answered(listener, closing):
    """However the threads that ask and that read take turns."""
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    found = reference(at(listener))
    assert answer(courier, found) == "producer p1"
    with switching_often():
        for _ in range(300):
            greeted = listener.greeted
            courier.doubt(found)
            assert answer(courier, found) == "producer p1"
            assert listener.greeted > greeted


def test_an_introduction_that_takes_long_leaves_a_doubt_that_came_meanwhile(listener, closing, monkeypatch):
    late, silent = threading.Event(), threading.Event()
    asked: list[str] = []

    def ask_at(*_: Any) -> Welcome:
        asked.append(threading.current_thread().name)
        waits = late if asked[-1] == "introducing" else silent if len(asked) == 3 else None
        assert waits is None or waits.wait(PATIENCE_S)
        return welcome()

    monkeypatch.setattr(couriers, "ask_at", ask_at)
    courier = closing(Courier(HELLO, KEYS, PATIENCE_S, met))
    found = reference(at(listener))
    introducing = threading.Thread(target=courier.introduce, args=(found.address,), name="introducing")
    introducing.start()
    until(lambda: asked == ["introducing"], "the introduction")
    assert answer(courier, found) == "producer p1"
    courier.doubt(found)
    assert courier.peer(found) is None
    until(lambda: len(asked) == 3, "another greeting")
    late.set()
    introducing.join()
    heard = threading.Event()
    courier._put(heard.set)
    assert heard.wait(PATIENCE_S)
    assert courier.peer(found) is None
    silent.set()
    assert answer(courier, found) == "producer p1"


def test_what_was_asked_to_be_said_before_closing_is_said(listener, monkeypatch):
    monkeypatch.setattr(couriers, "_LINGER_MS", int(1000 * PATIENCE_S))
    courier = Courier(HELLO, KEYS, PATIENCE_S, met)
    for slot in range(50):
        courier.hold(f"r{slot}", reference(at(listener), slot))
        courier.release(f"r{slot}", reference(at(listener), slot), "loaded")
    courier.close()
    assert sorted(m.lease.slot for m in taken(listener, 50) if isinstance(m, Release)) == list(range(50))


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kvferry")}


@pytest.mark.parametrize("said", [b"", b"\xff"], ids=["sought", "asked"])
def test_closing_ends_all_threads_also_while_a_producer_is_sought_or_asked(said):
    before = threads()

    def greet() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(silent.accept()[0])
                taken[-1].sendall(said)

    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=greet, daemon=True).start()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        courier = Courier(HELLO, KEYS, 3600.0, met)
        made = Listener("127.0.0.1:0", KEYS)
        for number in range(8):
            courier.hold(f"r{number}", reference(address, number, incarnation=f"p{number}"))
        if said:
            until(lambda: any(t.name.startswith("kvferry-asking") for t in threads() - before), "one who asks")
        else:
            until(lambda: bool(courier._finder._probes and taken), "one who is sought")
        assert courier.peer(reference(address, incarnation="p0")) is None
        courier.close()
        made.close()
        courier.close()
        made.close()
        for end in taken:
            end.close()
    assert threads() <= before


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h:0", ("h", 0)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("[::1]:7", ("::1", 7)),
        ("::1:7", ("::1", 7)),
        ("*:7", ("*", 7)),
    ],
)
def test_addresses_are_split(text, found):
    assert split_address(text) == found


@pytest.mark.parametrize(
    "text", ["", "h", ":7", "h:", "h:x", "h:65536", "h:-1", "h:٣", "h:" + "9" * 5000, "a b:1", "h:1\n", "[h:1"]
)
def test_what_is_no_address_is_refused_with_an_example(text):
    with pytest.raises(SessionError, match="is not an address; write host:port"):
        split_address(text)


def test_loopback_is_told_from_the_rest():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "*", "10.0.0.1", "127.0.0.1.example.org", "localhost.x", ""))
