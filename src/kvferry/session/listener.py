"""A producer's end of the session's channel, on a thread of its own: answers greetings, and hears what consumers say of leases.

Everything here may come from anybody who can connect. A message is one frame of bounded size; of words on leases only those
are kept that change something, so that what waits for the engine is bounded by its own leases; and the thread rests in
proportion to its work, so that no flood takes more than a fraction of a core from the engine beside it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import zmq
from msgspec import structs
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import DecodeError, SessionError
from kvferry.session.connections import Connections
from kvferry.session.hearing import Hearing
from kvferry.session.key import Key, Keys, reach
from kvferry.session.messages import (
    ENCRYPTED,
    MAX_REQUEST,
    SPOKEN,
    Found,
    Hello,
    Refusal,
    Release,
    Renew,
    Seek,
    Versions,
    Welcome,
    pack,
    unpack_request,
    versions_of,
)
from kvferry.session.reference import Lease, Reference

logger = logging.getLogger("kvferry.session")

_TICK_MS: Final = 100
_WATCHFUL_MS: Final = 5
_LINGER_MS: Final = 500
_UNSENT: Final = 8
"""Answers that may wait for one consumer: each may be as long as a welcome."""
_UNHEARD: Final = 64
"""Messages of one consumer that may wait here; further ones wait where they come from."""
_UNTAKEN: Final = 1 << 16
_REST: Final = 4.0
_LONGEST_REST_S: Final = 1.0
_CONNECTIONS: Final = 1024
_UNSAID: Final = 4 << 20
_BUFFER: Final = 1 << 18
_CLOSE_S: Final = 5.0
_BOUND: Final = "inproc://bound"


class Listener:
    """`stands` says whether a lease still stands; it is asked on the listener's thread. Nothing that arrives can end it; what
    cannot be read is answered with a refusal and counted, and what is not one frame is only counted."""

    def __init__(self, listen: str, keys: Keys, stands: Callable[[str, Lease], bool] = lambda incarnation, lease: True) -> None:
        host, port = reach(listen, keys)
        self._stands = stands
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST + ENCRYPTED)
        self._socket.setsockopt(zmq.SNDHWM, _UNSENT)
        self._socket.setsockopt(zmq.RCVHWM, _UNHEARD)
        self._socket.setsockopt(zmq.RCVBUF, _BUFFER)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._keys, self._key = keys, keys.first
        _secure(self._socket, self._key)
        shown = f"[{host}]" if ":" in host else host
        try:
            self._door = _bound(self._context, self._socket, f"tcp://{shown}:{port if port else '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SessionError(f"cannot listen on {listen}: {error}; choose another with the option listen") from None
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self._endpoint.rpartition(":")[2])
        self._connections = Connections(self._socket, self.port, _CONNECTIONS, _UNSAID)
        self._poller = zmq.Poller()
        for end in (self._socket, self._connections.events):
            self._poller.register(end, zmq.POLLIN)
        self._tick_ms, self._watch_at = _TICK_MS, 0.0
        self._hearing = Hearing(time.monotonic())
        self._welcomes: dict[int | None, bytes] = {}
        self._find: Callable[[Seek], Reference | None] = lambda seek: None
        self._lock = threading.Lock()
        self._renewed: dict[str, dict[Lease, None]] = {}
        self._released: dict[Lease, Release] = {}
        self._stop = threading.Event()
        self.refused = self.greeted = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-listener", daemon=True)
        self._thread.start()

    def welcome(self, welcome: Welcome, find: Callable[[Seek], Reference | None] = lambda seek: None) -> None:
        """What greetings are answered with from now on; `find` looks references up, on the listener's thread."""
        self._welcomes = {version: pack(structs.replace(welcome, version=version)) for version in SPOKEN}
        self._find = find

    def take(self) -> list[Renew | Release]:
        """What was said since the last call, each lease once."""
        with self._lock:
            renewed, self._renewed = self._renewed, {}
            released, self._released = self._released, {}
        return [*(Renew(incarnation, tuple(leases)) for incarnation, leases in renewed.items()), *released.values()]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("the listener does not end within %g s; it is left to the end of the process", _CLOSE_S)
            return
        self._connections.close()
        self._door.close()
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except BaseException:
            with suppress(BaseException):
                logger.exception("the listener has ended: no consumer is answered, and leases end; restart the engine")

    @property
    def caught_up_at(self) -> float:
        """Everything that had arrived by then, in `time.monotonic`, has been heard: what expires, expires by this time. Read it
        before `take`. It stands still while the process is stopped, and after that until what was sent meanwhile is heard."""
        return self._hearing.caught_up_at

    def _turn(self) -> None:
        began, heard, rest_s = time.monotonic(), False, _TICK_MS / 1000
        tick_s = self._tick_ms / 1000
        try:
            ready = dict(self._poller.poll(self._tick_ms))
            worked, rest_s = time.thread_time(), 0.0
            if self._socket in ready:
                heard = True
                self._hear()
            if self._connections.events in ready or time.monotonic() >= self._watch_at:
                self._watch()
            self._keys.look()
            if self._keys.first != self._key:
                self._answer_to(self._keys.first)
            if ready:
                rest_s = min(_REST * (time.thread_time() - worked), _LONGEST_REST_S)
        except Exception:
            logger.exception("the listener stumbled; it goes on")
        self._hearing.turned(began, heard, began + tick_s + rest_s)
        if rest_s:
            self._stop.wait(rest_s)

    def _answer_to(self, key: Key) -> None:
        """Connections end, and their peers make new ones, by the other key if they have two. The port stays open: who connects
        meanwhile waits in its queue. What fails here is tried again in the next turn."""
        self._watch()
        with suppress(zmq.ZMQError):
            self._socket.unbind(self._endpoint)
        self._connections.release()
        _secure(self._socket, key)
        self._socket.setsockopt(zmq.USE_FD, os.dup(self._door.fileno()))
        self._socket.bind(self._endpoint)
        self._key = key
        logger.warning("port %d answers to the key that comes first now", self.port)

    def _watch(self) -> None:
        before = self._connections.cut
        self._tick_ms = _WATCHFUL_MS if self._connections.watch() else _TICK_MS
        self._watch_at = time.monotonic() + self._tick_ms / 1000
        if self._connections.cut > before:
            self._refuse(f"{self._connections.cut} connections were cut so far: too many, or a message that does not end")

    def _hear(self) -> None:
        """ZeroMQ caps a frame, not their number: frames past the first are let go one by one, and make the message void."""
        frame, frames, data = self._socket.recv(copy=False), 0, b""
        sender = frame.bytes
        while frame.more:
            frame = self._socket.recv(copy=False)
            data = frame.bytes if not frames else b""
            frames += 1
        self._connections.heard(frame)
        if frames != 1:
            self._refuse(f"a message is one frame, this one has {frames}")
            return
        reply = self._answer(data)
        if reply is None:
            return
        try:
            self._socket.send_multipart([sender, reply], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            logger.debug("a consumer went away before it was answered: %s", error)

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        logger.log(_rarely(self.refused, logging.WARNING), "message %d was refused: %s", self.refused, reason)

    def _answer(self, data: bytes) -> bytes | None:
        try:
            message = unpack_request(data)
        except DecodeError as error:
            self._refuse(str(error))
            return pack(Refusal(str(error)[:4096]))
        if isinstance(message, Seek):
            return pack(Found(self._find(message)))
        if not isinstance(message, Hello):
            self._keep(message)
            return None
        theirs = versions_of(data) or Versions(message.version, message.version)
        self.greeted += 1
        level = logging.INFO if self.greeted < 100 else _rarely(self.greeted, logging.INFO)
        logger.log(level, "%s (%s) asks for the manifests of this engine", message.engine, message.incarnation)
        welcome = self._welcomes.get(SPOKEN.common(theirs))
        return welcome or pack(Refusal("this engine is still starting; ask again"))

    def _keep(self, message: Renew | Release) -> None:
        """Words on leases that do not stand are not kept: whoever makes them up fills nothing here."""
        leases = message.leases if isinstance(message, Renew) else (message.lease,)
        standing = [lease for lease in leases if self._stands(message.incarnation, lease)]
        if not standing:
            return
        with self._lock:
            if isinstance(message, Release):
                if len(self._released) < _UNTAKEN:
                    self._released[message.lease] = message
            elif sum(map(len, self._renewed.values())) < _UNTAKEN:
                self._renewed.setdefault(message.incarnation, {}).update(dict.fromkeys(standing))


def _secure(end: zmq.Socket[bytes], key: Key) -> None:
    """For what it is bound to from now on."""
    end.curve_server = True
    end.curve_secretkey, end.curve_publickey = key.secret, key.public


def _bound(context: zmq.Context[Any], end: zmq.Socket[bytes], endpoint: str) -> socket.socket:
    """Bind; a descriptor of our own for what listens now, which keeps the port open."""
    with context.socket(zmq.PAIR) as events:
        end.monitor(_BOUND, zmq.EVENT_LISTENING)
        events.connect(_BOUND)
        end.bind(endpoint)
        found = recv_monitor_message(events)["value"]
        end.monitor(None, 0)
    return socket.socket(fileno=os.dup(found))


def _rarely(count: int, level: int) -> int:
    """The level for powers of two, DEBUG for the rest: a flood does not fill the log."""
    return level if count & (count - 1) == 0 else logging.DEBUG
