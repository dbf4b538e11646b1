"""A consumer's end of the session's channel over ZeroMQ: finding who listens, dialling, asking. Decides nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import zmq

from kvferry.errors import SessionError, plain
from kvferry.session.finding import Number, Place, probe
from kvferry.session.key import Key, Keys, reach
from kvferry.session.messages import (
    ENCRYPTED,
    MAX_WELCOME,
    SPOKEN,
    Found,
    Hello,
    Refusal,
    Seek,
    Welcome,
    pack,
    unpack_reply,
)
from kvferry.session.reference import Reference

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
_FIRST_REACH_S: Final = 2.0
"""A packet that begins a connection and is lost is sent again after one second."""
_ANOTHER_KEY: Final = "has it another key, or none (key_file)?"
_ANOTHER_USER: Final = (
    "engines without key_file hear only those of the same user, container and release: name one file in key_file on both sides"
)


class SilentError(SessionError):
    """Somebody listens, and does not answer: most often because of another key."""


class RefusedError(SessionError):
    """It answers, and refuses; an engine does while it is starting."""


def ask(address: str, hello: Hello, keys: Keys, timeout_s: float, stop: threading.Event | None = None) -> Welcome:
    """A producer's welcome; raises SessionError with the reason if there is none, or once `stop` is set."""
    return ask_at(address, find(address, keys, timeout_s, stop), hello, keys, timeout_s, stop)


def find(address: str, keys: Keys, timeout_s: float, stop: threading.Event | None = None) -> Number:
    """Where a session is spoken at `address`; waits for it. A name is looked up here: ZeroMQ would keep everybody waiting."""
    deadline = time.monotonic() + reach_s(timeout_s)
    found = probe(looked_up(address, *reach(address, keys)), deadline, stop)
    if found.found is not None:
        return found.found
    if stop is not None and stop.is_set():
        raise SessionError(f"{address} has not answered, and this engine is closing")
    raise SessionError(not_found(address, found.reason))


def looked_up(address: str, host: str, port: int) -> list[Place]:
    """Where an address may lead; of a name this may take long."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SessionError(not_found(address, str(error))) from None


def not_found(address: str, reason: str) -> str:
    return f"nobody listens at {address}: {reason}"


def reach_s(timeout_s: float, first: bool = False) -> float:
    """How long a listener may take to be reached and to say its first byte. The `first` time that an address is tried, less."""
    return min(timeout_s, _FIRST_REACH_S if first else _REACH_S, _REACH_S)


def ask_at(
    address: str, number: Number, hello: Hello, keys: Keys, timeout_s: float, stop: threading.Event | None = None
) -> Welcome:
    reply = _exchange(address, number, hello, keys, timeout_s, stop)
    if not isinstance(reply, Welcome):
        raise SessionError(f"{address} speaks out of turn: it answers a greeting with another message than a welcome")
    if reply.version not in SPOKEN:
        raise SessionError(f"{address} answers in version {reply.version} of the session, this side speaks {SPOKEN}")
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
