"""Whether a session is spoken at an address: connect, and hear its first byte, at many addresses at once, on one thread.

ZeroMQ says its first byte as soon as it is connected to, however busy the engine is. An address that takes the connection and
says nothing is a stopped producer's, or another's. Nothing is sent.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

logger = logging.getLogger("kvferry.session")

Number = tuple[str, int]
"""A host's number and a port."""
Place = tuple[Any, Any, int, str, Any]
"""What `getaddrinfo` says of an address."""

_SIGNATURE: Final = b"\xff"
_TRIED: Final = 4
_TICK_S: Final = 0.1
_NOT_REACHED: Final = "it is not reached; is the machine up, and the port open?"
_SILENT: Final = "the port is open and says nothing: the producer is stopped, or it is another's port"
_LEFT: Final = "the port is open, and connections end at once: it is another's"
"""A listener does this too, once, when it goes over to another key: its port stays open, and the next connection waits."""
_TIMES: Final = 5
"""How often such a place is tried."""
_ANOTHERS: Final = "the port is open and speaks no session: it is another's"


class Probe:
    """One address, of which there may be several places; none of its calls waits. It is `over` when a session was `found` at
    one, or `reason` says why there is none."""

    def __init__(self, places: Sequence[Place], deadline: float) -> None:
        self.deadline = deadline
        self.found: Number | None = None
        self.reason = "no address"
        self._places = list(places[:_TRIED])
        self._end: socket.socket | None = None
        self._at: Place | None = None
        self._times = _TIMES
        self._connected = False
        self._next()

    @property
    def over(self) -> bool:
        return self._end is None

    @property
    def waits(self) -> tuple[int, int]:
        """The descriptor, and for which of its events."""
        return (self._end.fileno() if self._end is not None else -1), select.POLLIN if self._connected else select.POLLOUT

    def look(self) -> None:
        """What it waited for has happened, or an error."""
        if self._end is None:
            return
        try:
            if self._connected:
                heard = self._end.recv(1)
                self._give_up("" if heard == _SIGNATURE else _ANOTHERS if heard else _LEFT)
            elif failed := self._end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._give_up(str(OSError(failed, os.strerror(failed))))
            else:
                self._connected = True
        except BlockingIOError:
            return
        except ConnectionResetError as error:
            self._give_up(_LEFT if self._connected else str(error))
        except (OSError, ValueError) as error:
            self._give_up(str(error))

    def expire(self, now: float) -> None:
        if self._end is not None and now >= self.deadline:
            self._places = []
            self._give_up(_SILENT if self._connected else _NOT_REACHED)

    def close(self) -> None:
        self._places = []
        self._give_up(self.reason)

    def _give_up(self, reason: str) -> None:
        """This place; with no reason, since a session is spoken there."""
        if self._end is not None:
            self._end.close()
            self._end = None
        if reason:
            self.reason = reason
            if reason == _LEFT and self._at is not None and self._times > 1:
                self._times -= 1
                self._places.insert(0, self._at)
            self._next()
        elif self._at is not None:
            place = self._at[4]
            scope = f"%{place[3]}" if len(place) == 4 and place[3] else ""
            self.found, self.reason = (f"{place[0]}{scope}", place[1]), ""

    def _next(self) -> None:
        while self._end is None and self._places:
            self._at = self._places.pop(0)
            family, kind, protocol, _, place = self._at
            try:
                self._end = socket.socket(family, kind, protocol)
                self._end.setblocking(False)
                self._connected = False
                self._end.connect(place)
            except BlockingIOError:
                return
            except (OSError, ValueError, OverflowError) as error:
                self._give_up(str(error))


def probe(places: Sequence[Place], deadline: float, stop: threading.Event | None) -> Probe:
    """Wait for one address; until `stop` is set."""
    one = Probe(places, deadline)
    while not one.over and not (stop is not None and stop.is_set()):
        descriptor, events = one.waits
        poll = select.poll()
        poll.register(descriptor, events)
        if poll.poll(1000 * _TICK_S):
            one.look()
        one.expire(time.monotonic())
    if not one.over:
        one.close()
    return one


class Finder:
    """Probes of many addresses on one thread, which says of each what came of it: the number, or the reason."""

    def __init__(self, told: Callable[[str, Number | str], None]) -> None:
        self._told = told
        self._new: queue.SimpleQueue[tuple[str, Sequence[Place], float]] = queue.SimpleQueue()
        self._probes: dict[str, Probe] = {}
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._stop = threading.Event()
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name="kvferry-finding", daemon=True)
        self._thread.start()

    def find(self, address: str, places: Sequence[Place], patience_s: float) -> None:
        """Any thread may ask; one probe of an address at a time."""
        self._new.put((address, places, time.monotonic() + patience_s))
        self._ring()
        if self._ended:
            self._give_all_up()

    def close(self, limit_s: float) -> None:
        self._stop.set()
        self._ring()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return
        for one in self._probes.values():
            one.close()
        self._bell.close()
        self._rung.close()

    def _ring(self) -> None:
        with suppress(OSError):
            self._bell.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except BaseException as error:
            self._ended = f"the thread that looks for producers has ended ({type(error).__name__}): restart the engine"
            with suppress(BaseException):
                logger.exception("%s", self._ended)
            self._give_all_up()

    def _give_all_up(self) -> None:
        """No request waits for an answer that does not come."""
        with suppress(queue.Empty):
            while True:
                self._told(self._new.get_nowait()[0], self._ended)
        for address in list(self._probes):
            if self._probes.pop(address, None) is not None:
                self._told(address, self._ended)

    def _turn(self) -> None:
        poll, waiting = select.poll(), dict[int, Probe]()
        poll.register(self._rung, select.POLLIN)
        for one in self._probes.values():
            descriptor, events = one.waits
            waiting[descriptor] = one
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(1000 * _TICK_S if self._probes else None):
            if descriptor in waiting:
                waiting[descriptor].look()
            else:
                with suppress(OSError):
                    self._rung.recv(4096)
        with suppress(queue.Empty):
            while True:
                address, places, deadline = self._new.get_nowait()
                self._probes[address] = Probe(places, deadline)
        now = time.monotonic()
        for address, one in list(self._probes.items()):
            one.expire(now)
            if one.over:
                del self._probes[address]
                self._told(address, one.found or one.reason)
