"""A consumer's end of the session's channel over ZeroMQ: finding who listens, dialling, asking. Decides nothing."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import zmq

from kvferry.errors import SessionError, plain
from kvferry.session.key import Key, Keys, reach
from kvferry.session.messages import (
    ENCRYPTED,
    MAX_WELCOME,
    SESSION_VERSION,
    Found,
    Hello,
    Refusal,
    Seek,
    Welcome,
    pack,
    unpack_reply,
)
from kvferry.session.reference import Reference

Number = tuple[str, int]
"""A host's number and a port."""

_TICK_MS: Final = 100
_LINGER_MS: Final = 500
_RECONNECT_MS: Final = 5000
_HANDSHAKE_MS: Final = 3000
"""After this a connection whose handshake has not ended is made anew; ZeroMQ alone would wait longer than anybody here does."""
_AGAIN_S: Final = 1.0
"""After this a question is put once more: where one thread writes what another looks for at that moment, a socket that keeps
only the last frame can lose it."""
_REACH_S: Final = 4.0
"""For a listener to be reached and to say its first byte, which ZeroMQ does at once, however busy the engine is."""
_ANOTHER_KEY: Final = "has it another key, or none (key_file)?"
_ANOTHER_USER: Final = (
    "engines without key_file hear only those of the same user, container and release: name one file in key_file on both sides"
)
_LEFT: Final = "the port is open, and connections end at once: it is another's"
"""A listener does this too, for a moment, when it goes over to another key."""
_PROBES: Final = 5
_PAUSE_S: Final = 0.05
_SIGNATURE: Final = b"\xff"
_TRIED: Final = 4


class SilentError(SessionError):
    """Somebody listens, and does not answer: most often because of another key."""


class RefusedError(SessionError):
    """It answers, and refuses; an engine does while it is starting."""


def ask(address: str, hello: Hello, keys: Keys, timeout_s: float, stop: threading.Event | None = None) -> Welcome:
    """A producer's welcome; raises SessionError with the reason if there is none, or once `stop` is set."""
    return ask_at(address, find(address, keys, timeout_s, stop), hello, keys, timeout_s, stop)


def find(address: str, keys: Keys, timeout_s: float, stop: threading.Event | None = None) -> Number:
    """Where a session is spoken at `address`. A name is looked up here: ZeroMQ would keep everybody waiting for it."""
    host, port = reach(address, keys)
    deadline = time.monotonic() + min(timeout_s, _REACH_S)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SessionError(f"nobody listens at {address}: {error}") from None
    reason = "no address"
    for family, kind, protocol, _, place in found[:_TRIED]:
        for _ in range(_PROBES):
            with socket.socket(family, kind, protocol) as probe:
                reason = _probe(probe, place, deadline, stop)
            if reason != _LEFT:
                break
            time.sleep(_PAUSE_S)
        if not reason:
            scope = f"%{place[3]}" if len(place) == 4 and place[3] else ""
            return f"{place[0]}{scope}", port
    if stop is not None and stop.is_set():
        raise SessionError(f"{address} has not answered, and this engine is closing")
    raise SessionError(f"nobody listens at {address}: {reason}")


def _probe(probe: socket.socket, place: Any, deadline: float, stop: threading.Event | None) -> str:
    """Why no session is spoken there; empty if one is."""
    probe.setblocking(False)
    try:
        probe.connect(place)
    except BlockingIOError:
        pass
    except OSError as error:
        return str(error)
    if not _wait(probe, select.POLLOUT, deadline, stop):
        return "it is not reached; is the machine up, and the port open?"
    failed = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        return str(OSError(failed, os.strerror(failed)))
    if not _wait(probe, select.POLLIN, deadline, stop):
        return "the port is open and says nothing: the producer is stopped, or it is another's port"
    try:
        heard = probe.recv(1)
    except ConnectionResetError:
        return _LEFT
    except OSError as error:
        return str(error)
    if not heard:
        return _LEFT
    return "" if heard == _SIGNATURE else "the port is open and speaks no session: it is another's"


def _wait(probe: socket.socket, what: int, deadline: float, stop: threading.Event | None) -> bool:
    poll = select.poll()
    poll.register(probe, what)
    while time.monotonic() < deadline and not (stop is not None and stop.is_set()):
        if poll.poll(_TICK_MS):
            return True
    return False


def ask_at(
    address: str, number: Number, hello: Hello, keys: Keys, timeout_s: float, stop: threading.Event | None = None
) -> Welcome:
    reply = _exchange(address, number, hello, keys, timeout_s, stop)
    if not isinstance(reply, Welcome) or reply.version != SESSION_VERSION:
        spoken = f"sessions of version {reply.version}" if isinstance(reply, Welcome) else "out of turn"
        raise SessionError(f"{address} speaks {spoken}, this side {SESSION_VERSION}")
    return reply


def seek(address: str, message: Seek, keys: Keys, timeout_s: float, stop: threading.Event | None = None) -> Reference | None:
    """The reference that a producer finds; raises SessionError as `ask` does."""
    reply = _exchange(address, find(address, keys, timeout_s, stop), message, keys, timeout_s, stop)
    return reply.reference if isinstance(reply, Found) else None


def _exchange(
    address: str, number: Number, message: Hello | Seek, keys: Keys, timeout_s: float, stop: threading.Event | None
) -> Welcome | Found:
    """Of a reply only the last frame is kept, so that a long one costs no more than it may. A socket whose handshake was
    refused has nobody to send to, and would wait for one. Every key is tried at once: a wrong one is never answered."""
    hint = _ANOTHER_USER if keys.local else _ANOTHER_KEY
    context = zmq.Context()
    try:
        ends = [dial(context, number, key, MAX_WELCOME, {zmq.CONFLATE: 1}) for key in keys.all]
        question, deadline, again_at = pack(message), time.monotonic() + timeout_s, time.monotonic() + _AGAIN_S
        if not _put(ends, question):
            raise SilentError(f"{address} refuses the connection; {hint}")
        while not (heard := _heard(ends)):
            if stop is not None and stop.is_set():
                raise SessionError(f"{address} has not answered, and this engine is closing")
            now = time.monotonic()
            if now >= deadline:
                raise SilentError(f"{address} does not answer within {timeout_s:g} s; {hint}")
            if now >= again_at:
                again_at = now + _AGAIN_S
                _put(ends, question)
        reply = unpack_reply(heard[0].recv())
    except zmq.ZMQError as error:
        raise SessionError(f"{address}: {error}") from None
    finally:
        context.destroy(linger=0)
    if isinstance(reply, Refusal):
        raise RefusedError(f"{address} refuses: {plain(reply.reason)}")
    return reply


def _put(ends: Sequence[zmq.Socket[bytes]], question: bytes) -> bool:
    """Whether any of them took it."""
    taken = 0
    for end in ends:
        with suppress(zmq.Again):
            end.send(question, zmq.NOBLOCK)
            taken += 1
    return taken > 0


def _heard(ends: Sequence[zmq.Socket[bytes]]) -> list[zmq.Socket[bytes]]:
    """Those that have something, once any has, or none has for a tick."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end, zmq.POLLIN)
    return [end for end, _ in poller.poll(_TICK_MS)]


def _secure(end: zmq.Socket[bytes], key: Key) -> None:
    public, secret = zmq.curve_keypair()
    end.curve_serverkey, end.curve_publickey, end.curve_secretkey = key.public, public, secret


def dial(
    context: zmq.Context[Any], number: Number, key: Key, most: int, options: Mapping[zmq.SocketOption, int]
) -> zmq.Socket[bytes]:
    """`most` is the longest frame that is taken in."""
    host, port = number
    end: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    fixed = {
        zmq.LINGER: _LINGER_MS,
        zmq.IPV6: int(":" in host),
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MS,
        zmq.MAXMSGSIZE: most + ENCRYPTED,
    }
    for option, value in {**fixed, **options}.items():
        end.setsockopt(option, value)
    _secure(end, key)
    try:
        end.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    except zmq.ZMQError:
        end.close()
        raise
    return end
