"""A listening socket's connections, and what they may cost before they have said anything.

ZeroMQ caps a frame and counts messages, but keeps the frames of a message until the last has come, however many there are, and
accepts whoever connects. So the kernel is asked what a connection has taken in, and one that goes on without ever completing a
message is cut. ZeroMQ then lets go of what it had of it; an honest peer connects again by itself.

Only connections on which something moved are asked about, and of these so many at a time, in turn. The kernel says which they
are, whoever reads them: a connection is watched for room to write as well, which there nearly always is. One that is never told
of, since its peer reads nothing, comes up in a slow round of all.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

_INFO: Final = getattr(socket, "TCP_INFO", None)
_INFO_BYTES: Final = 256
_RECEIVED: Final = 128
"""Where struct tcp_info of Linux has the bytes received."""
_MOVED: Final = 64
"""Connections on which something moved that are looked at in one call, at 3 us each."""
_ROUND: Final = 8
"""Other ones that are."""
_OPENED: Final = zmq.EVENT_ACCEPTED
_ENDED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass
class _Connection:
    """`end` is a descriptor of our own for ZeroMQ's connection: its number cannot come to mean another while we hold it."""

    end: socket.socket
    seen: int = 0
    marked: int = 0
    heard: bool = False

    def received(self) -> int:
        if _INFO is None:
            return 0
        info = self.end.getsockopt(socket.IPPROTO_TCP, _INFO, _INFO_BYTES)
        return int(struct.unpack_from("Q", info, _RECEIVED)[0]) if len(info) >= _RECEIVED + 8 else 0

    def cut(self) -> None:
        """Without a farewell: what the peer still has to say must not wait for us."""
        try:
            self.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class Connections:
    """Of a ROUTER that listens at `port`: at most `most`, each with at most `unsaid` bytes since its last whole message. All
    calls are made on the thread that reads the socket."""

    def __init__(self, listening: zmq.Socket[Any], port: int, most: int, unsaid: int) -> None:
        self._port, self._most, self._unsaid = port, most, unsaid
        self.events: zmq.Socket[Any] = listening.get_monitor_socket(_OPENED | _ENDED)
        self._open: dict[int, _Connection] = {}
        self._moved = select.epoll()
        self._at: dict[int, int] = {}
        self._round: dict[int, None] = {}
        self.cut = 0

    def __len__(self) -> int:
        return len(self._open)

    def heard(self, frame: zmq.Frame) -> None:
        """A whole message came, of which this is a frame."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return
        found = self._open.pop(descriptor, None)
        if found is not None:
            found.heard = True
            self._open[descriptor] = found

    def watch(self) -> bool:
        """Take note of who came and went, and cut what costs too much; whether some message is under way."""
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            if event["event"] & _OPENED:
                self._opened(int(event["value"]))
            else:
                self._ended(int(event["value"]))
        while len(self._open) > self._most:
            self._cut(next(iter(self._open)))
        looked_at = {self._at[end]: None for end, _ in self._moved.poll(0, _MOVED) if end in self._at}
        for descriptor in list(islice(self._round, _ROUND)):
            self._round[descriptor] = self._round.pop(descriptor)
            looked_at[descriptor] = None
        return sum([self._check(descriptor, self._open[descriptor]) for descriptor in looked_at]) > 0

    def release(self) -> None:
        """All that are open now: no more of them is to be noted."""
        for descriptor in list(self._open):
            self._ended(descriptor)

    def close(self) -> None:
        self.release()
        self._moved.close()

    def _opened(self, descriptor: int) -> None:
        """It may have ended already, and its number be another's: only what is connected to our port is ours."""
        self._ended(descriptor)
        try:
            copy = os.dup(descriptor)
        except OSError:
            return
        try:
            end = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return
        try:
            ours = end.family in (socket.AF_INET, socket.AF_INET6) and end.getsockname()[1] == self._port
            end.getpeername()
            if ours:
                self._moved.register(end, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        except OSError:
            ours = False
        if ours:
            self._open[descriptor] = _Connection(end)
            self._at[end.fileno()] = descriptor
            self._round[descriptor] = None
        else:
            end.close()

    def _ended(self, descriptor: int) -> None:
        """ZeroMQ's own descriptor may still be open: then ours would be told of after it is closed."""
        found = self._open.pop(descriptor, None)
        if found is not None:
            del self._at[found.end.fileno()], self._round[descriptor]
            self._moved.unregister(found.end)
            found.end.close()

    def _check(self, descriptor: int, found: _Connection) -> bool:
        try:
            received = found.received()
        except OSError:
            self._ended(descriptor)
            return False
        grows, found.seen = received > found.seen and not found.heard, received
        if found.heard:
            found.heard, found.marked = False, received
        if received - found.marked > self._unsaid:
            self._cut(descriptor)
        return grows

    def _cut(self, descriptor: int) -> None:
        self.cut += 1
        self._open[descriptor].cut()
        self._ended(descriptor)
