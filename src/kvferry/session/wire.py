"""The session's channel over ZeroMQ: a producer that listens, a consumer that asks and reports. Decides nothing."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

import zmq

from kvferry.errors import DecodeError, KVFerryError, SessionError
from kvferry.session.consumer import Consumer, Greeting, PeerKey, Word, key_of
from kvferry.session.key import Key, is_loopback, split_address
from kvferry.session.messages import (
    MAX_REQUEST,
    MAX_WELCOME,
    SESSION_VERSION,
    Found,
    Hello,
    Refusal,
    Release,
    Renew,
    Seek,
    Welcome,
    pack,
    unpack_reply,
    unpack_request,
)
from kvferry.session.reference import Reference

logger = logging.getLogger("kvferry.session")

T = TypeVar("T")

_TICK_MS: Final = 100
_LINGER_MS: Final = 500
_RECONNECT_MS: Final = 5000
_UNSENT: Final = 8
"""Answers that may wait for one consumer: each may be as long as a welcome."""
_UNTAKEN: Final = 1 << 16
_ENDS: Final = 64


class Listener:
    """A producer's end: answers greetings with `welcome`, and keeps what consumers say of leases for `take`.

    Nothing that arrives can end it; what cannot be read is answered with a refusal and counted.
    """

    def __init__(self, listen: str, key: Key | None = None) -> None:
        host, port = split_address(listen)
        if key is None and not is_loopback(host):
            raise SessionError(
                f"listening on {host} needs a key: set key_file to a file that all sides hold, or listen on 127.0.0.1"
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        self._socket.setsockopt(zmq.SNDHWM, _UNSENT)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        if key is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = key.secret
            self._socket.curve_publickey = key.public
        shown = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{shown}:{port if port else '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SessionError(f"cannot listen on {listen}: {error}; choose another with the option listen") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._welcome: bytes | None = None
        self._find: Callable[[Seek], Reference | None] = lambda seek: None
        self._inbox: deque[Renew | Release] = deque()
        self._stop = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-listener", daemon=True)
        self._thread.start()

    def welcome(self, welcome: Welcome, find: Callable[[Seek], Reference | None] = lambda seek: None) -> None:
        """What greetings are answered with from now on; `find` looks references up, on the listener's thread."""
        self._welcome, self._find = pack(welcome), find

    def take(self) -> list[Renew | Release]:
        out = []
        while self._inbox:
            out.append(self._inbox.popleft())
        return out

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn()

    def _turn(self) -> None:
        try:
            if self._socket.poll(_TICK_MS):
                self._hear(self._socket.recv_multipart())
        except Exception:
            logger.exception("the listener stumbled; it goes on")
            self._stop.wait(_TICK_MS / 1000)

    def _hear(self, frames: list[bytes]) -> None:
        reply = self._answer(frames[-1])
        if reply is None:
            return
        try:
            self._socket.send_multipart([frames[0], reply], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            logger.debug("a consumer went away before it was answered: %s", error)

    def _answer(self, data: bytes) -> bytes | None:
        try:
            message = unpack_request(data)
        except DecodeError as error:
            self.refused += 1
            rare = self.refused & (self.refused - 1) == 0
            logger.log(logging.WARNING if rare else logging.DEBUG, "message %d was refused: %s", self.refused, error)
            return pack(Refusal(str(error)[:4096]))
        if isinstance(message, Seek):
            return pack(Found(self._find(message)))
        if not isinstance(message, Hello):
            if len(self._inbox) < _UNTAKEN:
                self._inbox.append(message)
            return None
        if message.version != SESSION_VERSION:
            return pack(Refusal(f"sessions of version {message.version} are not spoken here, only {SESSION_VERSION}"))
        logger.info("%s (%s) asks for the manifests of this engine", message.engine, message.incarnation)
        return self._welcome or pack(Refusal("this engine is still starting; ask again"))


def ask(address: str, hello: Hello, key: Key | None, timeout_s: float, stop: threading.Event | None = None) -> Welcome:
    """A producer's welcome; raises SessionError with the reason if there is none, or once `stop` is set."""
    reply = _exchange(address, hello, key, timeout_s, stop)
    if not isinstance(reply, Welcome) or reply.version != SESSION_VERSION:
        spoken = f"sessions of version {reply.version}" if isinstance(reply, Welcome) else "out of turn"
        raise SessionError(f"{address} speaks {spoken}, this side {SESSION_VERSION}")
    return reply


def seek(
    address: str, message: Seek, key: Key | None, timeout_s: float, stop: threading.Event | None = None
) -> Reference | None:
    """The reference that a producer finds; raises SessionError as `ask` does."""
    reply = _exchange(address, message, key, timeout_s, stop)
    return reply.reference if isinstance(reply, Found) else None


def _exchange(
    address: str, message: Hello | Seek, key: Key | None, timeout_s: float, stop: threading.Event | None
) -> Welcome | Found:
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, UnicodeError) as error:
        raise SessionError(f"nobody listens at {address}: {error}") from None
    context = zmq.Context()
    try:
        end = _dial(context, address, key)
        end.send(pack(message))
        deadline = time.monotonic() + timeout_s
        while not end.poll(_TICK_MS):
            if stop is not None and stop.is_set():
                raise SessionError(f"{address} has not answered, and this engine is closing")
            if time.monotonic() >= deadline:
                hint = "has it another key, or none?" if key else "does it want a key (key_file)?"
                raise SessionError(f"{address} does not answer within {timeout_s:g} s; {hint}")
        reply = unpack_reply(end.recv())
    except zmq.ZMQError as error:
        raise SessionError(f"{address}: {error}") from None
    finally:
        context.destroy(linger=0)
    if isinstance(reply, Refusal):
        raise SessionError(f"{address} refuses: {reply.reason}")
    return reply


def _dial(context: zmq.Context[Any], address: str, key: Key | None) -> zmq.Socket[bytes]:
    host, port = split_address(address)
    end: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    end.setsockopt(zmq.LINGER, _LINGER_MS)
    end.setsockopt(zmq.IPV6, ":" in host)
    end.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
    end.setsockopt(zmq.MAXMSGSIZE, MAX_WELCOME)
    if key is not None:
        public, secret = zmq.curve_keypair()
        end.curve_serverkey, end.curve_publickey, end.curve_secretkey = key.public, public, secret
    try:
        end.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    except zmq.ZMQError:
        end.close()
        raise
    return end


class Courier(Generic[T]):
    """A consumer's end, on a thread of its own, so that leases are renewed however long the engine computes.

    `meet` makes of a welcome what the engine wants to know of the producer; it runs beside the engine, several at once.
    """

    def __init__(
        self, hello: Hello, key: Key | None, timeout_s: float, meet: Callable[[PeerKey, Welcome], T], asking: int = 4
    ) -> None:
        self._hello, self._key, self._timeout_s, self._meet = hello, key, timeout_s, meet
        self._consumer: Consumer[T] = Consumer(hello)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._ends: dict[str, zmq.Socket[bytes]] = {}
        self._forgotten: deque[PeerKey] = deque(maxlen=_UNTAKEN)
        self._pool = ThreadPoolExecutor(asking, "kvferry-asking")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-courier", daemon=True)
        self._thread.start()

    def peer(self, reference: Reference) -> T | str | None:
        """What is known of the producer of a reference; the reason if it cannot be read; None while it is being asked."""
        key, now = key_of(reference), time.monotonic()
        if self._consumer.due(key, now):
            self._commands.put(lambda: self._consumer.greet(key, now))
        return self._consumer.peer(key, now)

    def forgotten(self) -> list[PeerKey]:
        """Producers that were met and are no longer known: gone, or long unused."""
        out = []
        while self._forgotten:
            out.append(self._forgotten.popleft())
        return out

    def introduce(self, address: str) -> T:
        """Meet a producer now, before any request names it; raises where that fails."""
        welcome = ask(address, self._hello, self._key, self._timeout_s, self._stop)
        peer = PeerKey(address, welcome.engine, welcome.incarnation)
        found = self._meet(peer, welcome)
        self._commands.put(lambda: self._consumer.known(peer, found, welcome.lease_s))
        return found

    def hold(self, request: str, reference: Reference) -> None:
        """Greet the reference's producer if need be, and keep the lease alive until `release`."""

        def command() -> None:
            now = time.monotonic()
            self._consumer.greet(key_of(reference), now)
            self._consumer.hold(request, reference, now)

        self._commands.put(command)

    def release(self, request: str, reference: Reference, note: str) -> None:
        self._commands.put(lambda: self._consumer.release(request, reference, note))

    def close(self) -> None:
        """Say what was asked to be said, and end; waits for greetings under way."""
        self._stop.set()
        self._commands.put(lambda: None)
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn(_TICK_MS / 1000)
        self._turn(0)

    def _turn(self, wait_s: float) -> None:
        """Carry out what the engine asks for, waiting so long for the first of it; then send what is due."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                self._guarded(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            self._guarded(self._send)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            logger.exception("the courier stumbled; it goes on")

    def _send(self) -> None:
        self._consumer.renew(time.monotonic())
        self._forgotten.extend(self._consumer.take_forgotten())
        greetings, words = self._consumer.take()
        for greeting in greetings:
            if not self._stop.is_set():
                self._pool.submit(self._greet, greeting)
        for word in words:
            self._say(word)

    def _say(self, word: Word) -> None:
        try:
            end = self._ends.pop(word.address, None) or _dial(self._context, word.address, self._key)
            self._ends[word.address] = end
            end.send(pack(word.message), zmq.NOBLOCK)
        except (zmq.ZMQError, KVFerryError, UnicodeError) as error:
            logger.warning("%r cannot be told of a lease: %s; it ends at its deadline", word.address, error)
        while len(self._ends) > _ENDS:
            self._ends.pop(next(iter(self._ends))).close()

    def _greet(self, greeting: Greeting) -> None:
        peer = greeting.peer
        try:
            welcome = ask(peer.address, greeting.hello, self._key, self._timeout_s, self._stop)
            if (welcome.engine, welcome.incarnation) != (peer.engine, peer.incarnation):
                raise SessionError(
                    f"{peer.address} is {welcome.engine} since its start {welcome.incarnation}; "
                    f"the reference is of {peer.engine}, start {peer.incarnation}: it is gone"
                )
            found = self._meet(peer, welcome)
        except KVFerryError as error:
            reason = str(error)
            logger.error("nothing can be read from %s: %s", peer, reason)
            self._commands.put(lambda: self._consumer.refused(peer, reason, time.monotonic()))
        except Exception as error:
            logger.exception("nothing can be read from %s", peer)
            reason = f"{type(error).__name__}: {error}"
            self._commands.put(lambda: self._consumer.refused(peer, reason, time.monotonic()))
        else:
            self._commands.put(lambda: self._consumer.known(peer, found, welcome.lease_s))
