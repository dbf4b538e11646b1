"""A consumer's session, on a thread of its own, so that leases are renewed however long the engine computes."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import zmq

from kvferry.errors import KVFerryError, SessionError, printable
from kvferry.session.consumer import Answer, Consumer, Greeting, PeerKey, Sought, Word, key_of
from kvferry.session.finding import Finder, Number
from kvferry.session.key import Key, Keys, is_number, reach
from kvferry.session.messages import Hello, Welcome, pack
from kvferry.session.reference import Reference
from kvferry.session.wire import ask_at, dial, find, looked_up, not_found, reach_s
from kvferry.transport.metadata import refuse_elsewhere

logger = logging.getLogger("kvferry.session")

T = TypeVar("T")

_TICK_S: Final = 0.1
_PATIENCE_S: Final = 0.005
"""How long what is asked for waits for more of it, unless somebody waits for the answer: who wakes this thread for each of many
requests has the engine's thread let go of the interpreter as often."""
_LINGER_MS: Final = 500
_UNTAKEN: Final = 1 << 16
_ENDS: Final = 64
_NUMBERS: Final = 1024
_LOOKUPS: Final = 32
"""Names that are looked up at a time."""
_CLOSE_S: Final = 5.0
_UNREAD: Final = {zmq.RCVHWM: 1}
"""Nobody has anything to say in reply to words on leases."""
_TURNING: Final = {**_UNREAD, zmq.RECONNECT_IVL_MAX: 500}
"""While there are two keys: the one that is refused now is answered as soon as a producer has turned to it."""
_UNREAD_BYTES: Final = 1 << 13


class Courier(Generic[T]):
    """`meet` makes of a welcome what the engine wants to know of the producer; it runs beside the engine, several at once."""

    def __init__(
        self, hello: Hello, keys: Keys, timeout_s: float, meet: Callable[[PeerKey, Welcome], T], asking: int = 32
    ) -> None:
        self._hello, self._keys, self._timeout_s, self._meet = hello, keys, timeout_s, meet
        self._consumer: Consumer[T] = Consumer(hello, asking=asking)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._finder = Finder(self._found)
        self._ends: dict[tuple[Number, Key], zmq.Socket[bytes]] = {}
        self._numbers: dict[str, Number] = {}
        self._forgotten: deque[PeerKey] = deque(maxlen=_UNTAKEN)
        self._found_at: dict[str, Number] = {}
        self._names: deque[tuple[Sought, str, int]] = deque()
        self._asking: set[threading.Thread] = set()
        self._looking: set[threading.Thread] = set()
        self._stop, self._urgent = threading.Event(), threading.Event()
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name="kvferry-courier", daemon=True)
        self._thread.start()

    def peer(self, reference: Reference) -> T | str | None:
        """What is known of the producer of a reference; the reason if it cannot be read; None while it is being asked."""
        if self._ended:
            return self._ended
        key, now = key_of(reference), time.monotonic()
        found = self._consumer.peer(key, now)
        if found is None and self._consumer.due(key, now):
            self._put(lambda: self._consumer.greet(key, now), urgent=True)
        return found

    def doubt(self, reference: Reference) -> None:
        """A load of the reference failed: whether its producer is still there is asked before the next one."""
        self._consumer.doubt(key_of(reference), time.monotonic())

    def forgotten(self) -> list[PeerKey]:
        """Producers that were met and are no longer known: gone, or long unused."""
        out = []
        while self._forgotten:
            out.append(self._forgotten.popleft())
        return out

    def introduce(self, address: str) -> T:
        """Meet a producer now, before any request names it; raises where that fails."""
        began = time.monotonic()
        number = find(address, self._keys, self._timeout_s, self._stop)
        self._put(lambda: self._note(address, number))
        welcome = ask_at(address, number, self._hello, self._keys, self._timeout_s, self._stop)
        peer = PeerKey(address, welcome.engine, welcome.incarnation)
        found = self._made_of(peer, welcome)
        answer = Answer(peer, found, welcome.lease_s)
        self._put(lambda: self._consumer.answered(address, answer, time.monotonic(), began), urgent=True)
        return found

    def hold(self, request: str, reference: Reference) -> None:
        """Greet the reference's producer if need be, and keep the lease alive until `release`."""
        key = key_of(reference)

        def command() -> None:
            now = time.monotonic()
            self._consumer.greet(key, now)
            self._consumer.hold(request, reference, now)

        self._put(command, urgent=self._consumer.due(key, time.monotonic()))

    def release(self, request: str, reference: Reference, note: str, linger_s: float = 0.0) -> None:
        """The request needs its lease no more. For `linger_s` longer it is kept for others that come with the reference."""
        until = time.monotonic() + linger_s if linger_s else -math.inf
        self._put(lambda: self._consumer.release(request, reference, note, until))

    def drop(self, request: str, reference: Reference) -> None:
        """The request turned out not to be the lease's: the producer hears nothing of it."""
        self._put(lambda: self._consumer.drop(request, reference))

    def _put(self, command: Callable[[], None], urgent: bool = False) -> None:
        if self._ended:
            return
        self._commands.put(command)
        if urgent:
            self._urgent.set()

    def close(self) -> None:
        """Say what was asked to be said, and end; greetings under way are given up, and waited for a while."""
        deadline = time.monotonic() + _CLOSE_S
        self._stop.set()
        self._put(lambda: None, urgent=True)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("the courier does not end within %g s; it is left to the end of the process", _CLOSE_S)
            return
        self._finder.close(max(0.0, deadline - time.monotonic()))
        for thread in (*self._asking, *self._looking):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn(_TICK_S)
            self._put(lambda: self._consumer.part(math.inf))
            self._turn(0)
        except BaseException as error:
            said = printable(f"the thread that renews leases has ended ({type(error).__name__}: {error})")
            self._ended = f"{said}: nothing can be read; restart the engine"
            with suppress(BaseException):
                logger.exception("%s", self._ended)

    def _turn(self, wait_s: float) -> None:
        """Carry out what the engine asks for, waiting so long for the first of it; then send what is due."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            if wait_s and self._urgent.wait(_PATIENCE_S):
                self._urgent.clear()
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
        now = time.monotonic()
        self._keys.look()
        for number, key in [known for known in self._ends if known[1] not in self._keys.all]:
            self._ends.pop((number, key)).close()
        self._consumer.part(now)
        self._consumer.renew(now)
        self._forgotten.extend(self._consumer.take_forgotten())
        for sought in self._consumer.seek(now):
            self._begin_to_seek(sought)
        self._begin_to_look_up()
        greetings, words = self._consumer.take(now)
        self._asking = {thread for thread in self._asking if thread.is_alive()}
        for greeting in greetings:
            if not self._stop.is_set():
                number = self._found_at.pop(greeting.address)
                self._begin(greeting.address, self._asking, self._greet, greeting, number)
        for word in words:
            self._say(word)

    def _begin_to_seek(self, sought: Sought) -> None:
        """A number is sought at once; a name is looked up first, on a thread of its own."""
        try:
            host, port = reach(sought.address, self._keys)
        except KVFerryError as error:
            self._unanswered(sought.address, str(error))
            return
        if is_number(host):
            self._look_up(sought, host, port)
        else:
            self._names.append((sought, host, port))

    def _begin_to_look_up(self) -> None:
        """The newest first."""
        self._looking = {thread for thread in self._looking if thread.is_alive()}
        while self._names and len(self._looking) < _LOOKUPS:
            sought, host, port = self._names.pop()
            self._begin(sought.address, self._looking, self._look_up, sought, host, port)

    def _look_up(self, sought: Sought, host: str, port: int) -> None:
        try:
            places = looked_up(sought.address, host, port)
            self._finder.find(sought.address, places, reach_s(self._timeout_s, sought.first))
        except KVFerryError as error:
            self._unanswered(sought.address, str(error))
        except BaseException as error:
            logger.exception("%s cannot be looked for", sought.address)
            self._unanswered(sought.address, printable(f"{type(error).__name__}: {error}"))

    def _found(self, address: str, found: Number | str) -> None:
        if isinstance(found, str):
            self._unanswered(address, not_found(address, found))
        else:
            self._put(lambda: self._reached(address, found), urgent=True)

    def _reached(self, address: str, number: Number) -> None:
        self._note(address, number)
        self._found_at[address] = number
        self._consumer.reached(address)

    def _begin(self, address: str, among: set[threading.Thread], action: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=action, args=arguments, name="kvferry-asking", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._unanswered(address, f"it cannot be asked: {error}; does this process have too many threads?")
        else:
            among.add(thread)

    def _say(self, word: Word) -> None:
        try:
            number, message = self._number(word.address), pack(word.message)
            told = [self._tell(number, key, message) for key in self._keys.all]
            if not any(told):
                raise SessionError("no connection takes more")
        except (zmq.ZMQError, KVFerryError, UnicodeError) as error:
            logger.warning("%r cannot be told of a lease: %s; it ends at its deadline", word.address, error)

    def _tell(self, number: Number, key: Key, message: bytes) -> bool:
        """By every key: which one is answered there may change at any time. An end that takes no more is made anew for the
        next word: its handshake was refused, or nobody hears it."""
        end = self._ends.pop((number, key), None)
        while len(self._ends) >= _ENDS * len(self._keys.all):
            self._ends.pop(next(iter(self._ends))).close()
        end = end or dial(self._context, number, key, _UNREAD_BYTES, _TURNING if len(self._keys.all) > 1 else _UNREAD)
        try:
            end.send(message, zmq.NOBLOCK)
        except zmq.Again:
            end.close()
            return False
        self._ends[number, key] = end
        return True

    def _number(self, address: str) -> Number:
        """Where words go; a name leads where its last greeting found it."""
        host, port = reach(address, self._keys)
        if is_number(host):
            return host, port
        found = self._numbers.get(address)
        if found is None:
            raise SessionError("nobody was found there")
        return found

    def _greet(self, greeting: Greeting, number: Number) -> None:
        address = greeting.address
        try:
            answer = self._answer(address, number, greeting.hello)
        except KVFerryError as error:
            self._unanswered(address, str(error))
        except BaseException as error:
            logger.exception("nothing can be read from %s", address)
            self._unanswered(address, printable(f"{type(error).__name__}: {error}"))
        else:
            self._put(lambda: self._consumer.answered(address, answer, time.monotonic()), urgent=True)

    def _unanswered(self, address: str, reason: str) -> None:
        logger.error("nothing can be read from %s: %s", address, reason)
        self._put(lambda: self._consumer.unanswered(address, reason, time.monotonic()), urgent=True)

    def _answer(self, address: str, number: Number, hello: Hello) -> Answer[T]:
        welcome = ask_at(address, number, hello, self._keys, self._timeout_s, self._stop)
        peer = PeerKey(address, welcome.engine, welcome.incarnation)
        found = self._consumer.found(peer)
        if found is not None:
            return Answer(peer, found, welcome.lease_s)
        try:
            return Answer(peer, self._made_of(peer, welcome), welcome.lease_s)
        except KVFerryError as error:
            reason = str(error)
            logger.error("nothing can be read from %s: %s", peer, reason)
        except Exception as error:
            reason = printable(f"{type(error).__name__}: {error}")
            logger.exception("nothing can be read from %s", peer)
        return Answer(peer, None, welcome.lease_s, reason)

    def _note(self, address: str, number: Number) -> None:
        """Words go where the address was found."""
        self._numbers.pop(address, None)
        while len(self._numbers) >= _NUMBERS:
            self._numbers.pop(next(iter(self._numbers)))
        self._numbers[address] = number

    def _made_of(self, peer: PeerKey, welcome: Welcome) -> T:
        """This user's own key vouches for this machine only: a port here may be the end of a tunnel."""
        if self._keys.local:
            for card in welcome.cards:
                refuse_elsewhere(card.transport)
        return self._meet(peer, welcome)
