"""A consumer's end of the session's channel over ZeroMQ: finding who listens, dialling, asking. Decides nothing."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import zmq

from kvferry.errors import SessionError, plain
from kvferry.session.key import Key, reach
from kvferry.session.messages import MAX_WELCOME, SPOKEN, Found, Hello, Refusal, Seek, Welcome, pack, unpack_reply
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
_SIGNATURE: Final = b"\xff"
_TRIED: Final = 4


class SilentError(SessionError):
    """Somebody listens, and does not answer: most often because of another key."""


class RefusedError(SessionError):
    """It answers, and refuses; an engine does while it is starting."""


def ask(address: str, hello: Hello, key: Key | None, timeout_s: float, stop: threading.Event | None = None) -> Welcome:
    """A producer's welcome; raises SessionError with the reason if there is none, or once `stop` is set."""
    return ask_at(address, find(address, key, timeout_s, stop), hello, key, timeout_s, stop)


def find(address: str, key: Key | None, timeout_s: float, stop: threading.Event | None = None) -> Number:
    """Where a session is spoken at `address`. A name is looked up here: ZeroMQ would keep everybody waiting for it."""
    host, port = reach(address, key)
    deadline = time.monotonic() + min(timeout_s, _REACH_S)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SessionError(f"nobody listens at {address}: {error}") from None
    reason = "no address"
    for family, kind, protocol, _, place in found[:_TRIED]:
        with socket.socket(family, kind, protocol) as probe:
            reason = _probe(probe, place, deadline, stop)
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
    except OSError as error:
        return str(error)
    return "" if heard == _SIGNATURE else "the port is open and speaks no session: it is another's"


def _wait(probe: socket.socket, what: int, deadline: float, stop: threading.Event | None) -> bool:
    poll = select.poll()
    poll.register(probe, what)
    while time.monotonic() < deadline and not (stop is not None and stop.is_set()):
        if poll.poll(_TICK_MS):
            return True
    return False


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
