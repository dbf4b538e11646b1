"""A consumer's end of the session's channel over ZeroMQ: finding who listens, dialling, asking. Decides nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import zmq

from kvferry.errors import SessionError, plain
from kvferry.session.finding import Number, Place, probe
from kvferry.session.key import Key, reach
from kvferry.session.messages import MAX_WELCOME, SPOKEN, Found, Hello, Refusal, Seek, Welcome, pack, unpack_reply
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


class SilentError(SessionError):
    """Somebody listens, and does not answer: most often because of another key."""


class RefusedError(SessionError):
    """It answers, and refuses; an engine does while it is starting."""


def ask(address: str, hello: Hello, key: Key | None, timeout_s: float, stop: threading.Event | None = None) -> Welcome:
    """A producer's welcome; raises SessionError with the reason if there is none, or once `stop` is set."""
    return ask_at(address, find(address, key, timeout_s, stop), hello, key, timeout_s, stop)


def find(address: str, key: Key | None, timeout_s: float, stop: threading.Event | None = None) -> Number:
    """Where a session is spoken at `address`; waits for it. A name is looked up here: ZeroMQ would keep everybody waiting."""
    deadline = time.monotonic() + reach_s(timeout_s)
    found = probe(looked_up(address, *reach(address, key)), deadline, stop)
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
    address: str, number: Number, hello: Hello, key: Key | None, timeout_s: float, stop: threading.Event | None = None
) -> Welcome:
    reply = _exchange(address, number, hello, key, timeout_s, stop)
    if not isinstance(reply, Welcome):
        raise SessionError(f"{address} speaks out of turn: it answers a greeting with another message than a welcome")
    if reply.version not in SPOKEN:
        raise SessionError(f"{address} answers in version {reply.version} of the session, this side speaks {SPOKEN}")
    return reply


def seek(
    address: str, message: Seek, key: Key | None, timeout_s: float, stop: threading.Event | None = None
) -> Reference | None:
    """The reference that a producer finds; raises SessionError as `ask` does."""
    reply = _exchange(address, find(address, key, timeout_s, stop), message, key, timeout_s, stop)
    return reply.reference if isinstance(reply, Found) else None


def _exchange(
    address: str, number: Number, message: Hello | Seek, key: Key | None, timeout_s: float, stop: threading.Event | None
) -> Welcome | Found:
    """Of a reply only the last frame is kept, so that a long one costs no more than it may. A socket whose handshake was
    refused has nobody to send to, and would wait for one."""
    hint = "has it another key, or none?" if key else "does it want a key (key_file)?"
    context = zmq.Context()
    try:
        end = dial(context, number, key, MAX_WELCOME, {zmq.CONFLATE: 1})
        question, deadline, again_at = pack(message), time.monotonic() + timeout_s, time.monotonic() + _AGAIN_S
        end.send(question, zmq.NOBLOCK)
        while not end.poll(_TICK_MS):
            if stop is not None and stop.is_set():
                raise SessionError(f"{address} has not answered, and this engine is closing")
            now = time.monotonic()
            if now >= deadline:
                raise SilentError(f"{address} does not answer within {timeout_s:g} s; {hint}")
            if now >= again_at:
                again_at = now + _AGAIN_S
                with suppress(zmq.Again):
                    end.send(question, zmq.NOBLOCK)
        reply = unpack_reply(end.recv())
    except zmq.Again:
        raise SilentError(f"{address} refuses the connection; {hint}") from None
    except zmq.ZMQError as error:
        raise SessionError(f"{address}: {error}") from None
    finally:
        context.destroy(linger=0)
    if isinstance(reply, Refusal):
        raise RefusedError(f"{address} refuses: {plain(reply.reason)}")
    return reply


def dial(
    context: zmq.Context[Any], number: Number, key: Key | None, most: int, options: Mapping[zmq.SocketOption, int]
) -> zmq.Socket[bytes]:
    """`most` is the longest frame that is taken in."""
    host, port = number
    end: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    fixed = {
        zmq.LINGER: _LINGER_MS,
        zmq.IPV6: int(":" in host),
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MS,
        zmq.MAXMSGSIZE: most,
    }
    for option, value in {**fixed, **options}.items():
        end.setsockopt(option, value)
    if key is not None:
        public, secret = zmq.curve_keypair()
        end.curve_serverkey, end.curve_publickey, end.curve_secretkey = key.public, public, secret
    try:
        end.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    except zmq.ZMQError:
        end.close()
        raise
    return end
