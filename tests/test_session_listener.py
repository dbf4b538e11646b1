"""A listener among strangers: what they can make it keep, answer and do, and that the engine beside it pays for none of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from keyed import KEYS, secured
from kvferry.session import Card, Courier, Hello, Lease, Listener, Producer, Reference, Release, Renew, Welcome, Words
from kvferry.session import listener as listening
from kvferry.session.connections import Connections, _Connection
from kvferry.session.messages import MAX_LEASES, MAX_REQUEST, pack, unpack_reply
from kvferry.session.reference import MAX_GENERATION
from kvferry.session.wire import ask, dial
from kvferry.transport.metadata import Metadata, encode_metadata, this_host
from pairs import manifests_of
from transport_suite import until

HELLO = Hello("consumer", "d1")
CACHES = manifests_of("blocks of 12 to 8")[0]
METADATA = encode_metadata(Metadata("nixl", "p.0#1", this_host(), (), b"blob"))
WELCOME = Welcome("producer", "p1", 60.0, (Card(CACHES, Words(2, CACHES.identity).manifest, METADATA),))
PATIENCE_S = 20.0
ENOUGH = 400 << 20


@pytest.fixture
def made() -> Iterator[Callable[..., Listener]]:
    opened: list[Any] = []

    def make(*arguments: Any) -> Listener:
        opened.append(Listener("127.0.0.1:0", KEYS, *arguments))
        opened[-1].welcome(WELCOME)
        return opened[-1]

    yield make
    for listener in opened:
        listener.close()


@pytest.fixture
def plain(monkeypatch) -> None:
    """Listeners hear who has no key, so that a test can send what ZeroMQ never would."""
    monkeypatch.setattr(listening, "_secure", lambda end, key: None)


@pytest.fixture
def dealer() -> Iterator[Callable[[Listener], zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        ends: list[zmq.Socket[bytes]] = []

        def dial(listener: Listener) -> zmq.Socket[bytes]:
            ends.append(context.socket(zmq.DEALER))
            if listener._socket.curve_server:
                secured(ends[-1])
            ends[-1].setsockopt(zmq.LINGER, 0)
            ends[-1].connect(f"tcp://127.0.0.1:{listener.port}")
            return ends[-1]

        yield dial
        for end in ends:
            end.close()


def answered(end: zmq.Socket[bytes]) -> Any:
    end.send(pack(HELLO))
    assert end.poll(PATIENCE_S * 1000)
    return unpack_reply(end.recv())


@pytest.mark.parametrize("frames", [[b"", b""], [b"x"] * 500, [b"x"] * 100_000, [b"", pack(HELLO)], [pack(HELLO), b""]])
def test_a_message_of_several_frames_is_not_answered_and_the_next_one_is(made, dealer, frames):
    listener = made()
    end = dealer(listener)
    end.send_multipart(frames)
    assert answered(end) == WELCOME
    assert not end.poll(0)
    assert listener.refused == 1


def endless(port: int) -> Iterator[int]:
    """Frames of a message that never ends, as the wire has them; yields what was sent so far."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as raw:
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        ready = b"\x05READY" + properties
        raw.sendall(greeting + bytes([0x04, len(ready)]) + ready)
        heard = b""
        while b"READY" not in heard:
            heard += raw.recv(1 << 16)
        frame = bytes([0x01 | 0x02]) + struct.pack(">Q", MAX_REQUEST) + bytes(MAX_REQUEST)
        for sent in itertools.count(len(frame), len(frame)):
            raw.sendall(frame)
            yield sent


def cut_after(port: int) -> int:
    """How much of an endless message was taken in before its connection was cut."""
    sent = 0
    try:
        for sent in endless(port):
            if sent > ENOUGH:
                break
    except OSError:
        return sent
    return sent


def test_a_message_that_never_ends_is_cut_off_and_others_are_served(plain, made, dealer):
    listener = made()
    end = dealer(listener)
    assert answered(end) == WELCOME
    assert cut_after(listener.port) < ENOUGH
    assert answered(end) == WELCOME
    assert answered(dealer(listener)) == WELCOME
    until(lambda: listener._connections.cut == 1, "one cut")


def test_a_message_that_never_ends_is_cut_off_while_others_keep_the_listener_busy(plain, made, dealer):
    listener = made()
    busy = dealer(listener)
    busy.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
    sent = 0
    try:
        for sent in endless(listener.port):
            busy.send(pack(Release("p1", Lease(0, 1), "reader")))
            if sent > ENOUGH:
                break
    except OSError:
        pass
    assert 0 < sent < ENOUGH


def test_many_whole_messages_are_never_cut_off(monkeypatch):
    """What may wait unheard, here and in the kernel, is less than what is cut. All are kept, however late they are taken."""
    assert listening._UNHEARD * MAX_REQUEST + 4 * listening._BUFFER < listening._UNSAID
    monkeypatch.setattr(listening, "_REST", 0.0)
    monkeypatch.setattr(listening, "_UNTAKEN", 1 << 30)
    listener = Listener("127.0.0.1:0", KEYS)
    leases = tuple(Lease((1 << 40) - i, MAX_GENERATION) for i in range(MAX_LEASES))
    heard: set[str] = set()
    with zmq.Context() as context, dial(context, ("127.0.0.1", listener.port), KEYS.first, MAX_REQUEST, {}) as end:
        sent = 0
        for turn in itertools.count(1):
            message = pack(Renew(f"p{turn}", leases))
            end.send(message)
            sent += len(message)
            if sent > 2 * listening._UNSAID:
                break
        until(lambda: heard.update(m.incarnation for m in listener.take()) or len(heard) == turn, "all of them")
    assert listener._connections.cut == 0
    listener.close()


def test_of_too_many_connections_the_longest_silent_ones_are_cut(made, dealer, monkeypatch):
    monkeypatch.setattr(listening, "_CONNECTIONS", 5)
    listener = made()
    strangers = [socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S) for _ in range(3)]
    end = dealer(listener)
    assert answered(end) == WELCOME
    strangers += [socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S) for _ in range(4)]
    until(lambda: listener._connections.cut >= 3, "three cuts")
    assert answered(end) == WELCOME
    assert len(listener._connections) <= 5
    for stranger in strangers[:3]:
        while stranger.recv(1 << 16):
            pass
    for stranger in strangers:
        stranger.close()
    until(lambda: len(listener._connections) == 1, "those who left are forgotten")


@pytest.fixture
def crowd(monkeypatch) -> Iterator[tuple[Connections, list[socket.socket], list[int]]]:
    """Connections of 300 strangers, each of which has begun a message, and which of them were asked about."""
    asked: list[int] = []
    received = _Connection.received

    def counted(self: _Connection) -> int:
        asked.append(self.end.fileno())
        return received(self)

    monkeypatch.setattr(_Connection, "received", counted)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        connections = Connections(router, port, 1024, 1 << 20)
        strangers = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(300)]
        until(lambda: connections.watch() or len(connections) == 300, "all of them")
        until(lambda: not connections.watch() and not (asked.clear() or connections.watch() or len(asked) > 8), "quiet")
        yield connections, strangers, asked
        for stranger in strangers:
            stranger.close()
        connections.close()
        connections.events.close()


def test_slow_connections_are_asked_about_so_many_at_a_time_and_all_of_them_in_turn(crowd):
    connections, strangers, asked = crowd
    everyone: set[int] = set()
    for stranger in strangers:
        stranger.send(b"\xff")
    for _ in range(8):
        asked.clear()
        connections.watch()
        assert len(asked) <= 72
        everyone.update(asked)
    assert len(everyone) == 300


def test_connections_on_which_nothing_moves_are_asked_about_now_and_then(crowd):
    connections, _, asked = crowd
    for _ in range(5):
        asked.clear()
        connections.watch()
        assert len(asked) <= 8
    everyone: set[int] = set()
    for _ in range(60):
        connections.watch()
        everyone.update(asked)
    assert len(everyone) == 300


def test_one_that_goes_on_among_many_slow_ones_is_cut_and_no_other_is(crowd):
    connections, strangers, _ = crowd
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    ready = b"\x05READY" + properties
    frame = bytes([0x01 | 0x02]) + struct.pack(">Q", MAX_REQUEST) + bytes(MAX_REQUEST)
    strangers[7].send(greeting + bytes([0x04, len(ready)]) + ready)
    said = b""  # ZeroMQ closes a connection on which anything comes before it has said READY itself.
    while b"READY" not in said:
        said += strangers[7].recv(1 << 10)
    strangers[7].setblocking(False)
    unsent, slowly = b"", iter(greeting)

    def pushed_on() -> bool:
        nonlocal unsent
        byte = bytes(itertools.islice(slowly, 1))
        for stranger in (*strangers[:7], *strangers[8:]):
            stranger.send(byte)
        unsent = unsent or frame
        with contextlib.suppress(OSError):
            unsent = unsent[strangers[7].send(unsent) :]
        connections.watch()
        return connections.cut == 1

    until(pushed_on, "the cut")
    assert connections.cut == 1
    assert len(connections) == 299


def test_a_connection_of_another_is_never_touched():
    """A number that ZeroMQ named may have become another's before we look."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, socket.socket() as unbound:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        connections = Connections(router, port, 10, 0)
        near, far = socket.socketpair()
        with near, far, socket.create_server(("127.0.0.1", 0)) as server:
            there = socket.create_connection(server.getsockname())
            here, _ = server.accept()
            with there, here:
                for other in (near, server, there, here, unbound):
                    connections._opened(other.fileno())
                connections._opened(1 << 20)
                assert len(connections) == 0
                held = os.listdir("/proc/self/fd")
                reading, writing = os.pipe()
                connections._opened(reading)
                os.close(reading)
                os.close(writing)
                assert os.listdir("/proc/self/fd") == held
                there.sendall(b"x")
                connections.watch()
                assert here.recv(1) == b"x"
        connections.events.close()


def held(count: int) -> tuple[Producer, list[Lease]]:
    producer = Producer("p1", count, 60.0)
    leases = [producer.open(f"r{i}") for i in range(count)]
    for i in range(count):
        producer.publish(f"r{i}", 0.0)
    return producer, [lease for lease in leases if lease is not None]


def test_only_words_on_leases_that_stand_wait_for_the_engine_each_once(made, dealer):
    producer, leases = held(3)
    listener = made(producer.stands)
    end = dealer(listener)
    for turn in range(200):
        made_up = tuple(Lease(i % 3, turn * 1000 + i + 1) for i in range(MAX_LEASES - 2))
        end.send(pack(Renew("p1", (*made_up, leases[0], leases[2]))))
        end.send(pack(Renew("p0", tuple(leases))))
        end.send(pack(Release("p1", Lease(1, turn + 1), "reader")))
        end.send(pack(Release("p0", leases[1], "reader")))
    end.send(pack(Release("p1", leases[1], "reader", "loaded")))
    assert answered(end) == WELCOME
    renewed, released = listener.take()
    assert renewed == Renew("p1", (leases[0], leases[2]))
    assert released == Release("p1", leases[1], "reader", "loaded")
    assert listener.take() == []


def test_a_request_is_short_enough_to_be_read_between_two_steps():
    assert len(pack(Renew("p" * 256, tuple(Lease((1 << 40) - i, (1 << 63) - 1) for i in range(MAX_LEASES))))) <= MAX_REQUEST
    assert MAX_LEASES <= 256
    assert MAX_REQUEST <= 1 << 14


def test_the_listener_rests_in_proportion_to_its_work(made, dealer, monkeypatch):
    """By a clock that says how much it has worked, and an event that says how long it was to wait."""
    listener = made()
    assert answered(dealer(listener)) == WELCOME
    rests: list[float] = []
    worked = itertools.count(0.0, 0.05)
    monkeypatch.setattr(listening.time, "thread_time", lambda: next(worked))
    monkeypatch.setattr(listener._stop, "wait", lambda seconds=None: rests.append(seconds))
    assert answered(dealer(listener)) == WELCOME
    until(lambda: any(rest == pytest.approx(0.2) for rest in rests), "a rest four times as long as the work")


def test_renewals_of_a_courier_reach_the_leases(made):
    producer, leases = held(600)
    listener = made(producer.stands)
    courier: Courier[str] = Courier(HELLO, KEYS, PATIENCE_S, lambda peer, welcome: "met")
    try:
        courier._consumer._renew_s = 0.05
        for i, lease in enumerate(leases):
            address = f"127.0.0.1:{listener.port}"
            courier.hold(f"r{i}", Reference(address, "producer", "p1", "r", lease, 5, {"0": [1]}, "digest"))
        until(lambda: all_renewed(listener, producer), "all renewals")
    finally:
        courier.close()
    assert ask(f"127.0.0.1:{listener.port}", HELLO, KEYS, PATIENCE_S) == WELCOME


def all_renewed(listener: Listener, producer: Producer) -> bool:
    for message in listener.take():
        producer.receive(message, 50.0)
    return all(found.deadline == 110.0 for found in producer._held.values())
