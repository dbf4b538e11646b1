"""How planned bytes travel: what every transport promises, and the order of calls.

    consumer                                              producer
    --------                                              --------
    register(own storages)                                register(own storages)
    connect(producer's metadata())        <-- exchanged, by whoever carries manifests
    prepared = prepare(plan, source, peer)                (does nothing: reads are one-sided)
    read = read(prepared, tiles, b"done 7")
    poll(read) until it is not RUNNING                    notifications() -> (peer, b"done 7")
    telemetry(read); release(read)
    forget(peer) ... close()                              close()

Who owns what, when:

- A storage is registered once, before its metadata is exported, and stays allocated until `close`. Regions of a plan lie in
  registered storages on both sides, or `prepare` refuses them; addresses come from the manifests, never from a message.
- From `read` on, the destination bytes belong to the transport. They are the caller's again when `poll` says DONE, or when
  `release` returns True. After FAILED they are *not* safe yet: a read that timed out, was given up, or whose peer was
  forgotten may still land. Until `release` returns True the caller keeps those blocks quarantined, and asks again. It
  returns True once the library under the transport has said that the read is over. A peer that hangs forever holds them
  forever; `close` is the way out: it ends all connections, and nothing lands after it.
- The source bytes must stay unchanged until the notification arrives: it is sent after all bytes of its read have been
  seen to arrive. A failed read sends none, even if its bytes land late.
- A read carries all runs of one request from one source. It fails as a whole, with an `error` that says which peer, why,
  and how far it came; it is then released until its destination is safe. Calls that cannot be carried out raise
  `TransportError`.
- A peer that dies or stops fails the reads from it within `timeout_s` without visible progress; other peers are not
  affected. `forget` drops it, fails its reads and voids what was prepared for it; afterwards it can connect again.
- A name is unique to one start of one transport: a restarted peer is another peer.
- Bytes and notifications move while somebody calls: a side without a progress thread calls `notifications` or `poll` often,
  also where it is only read from.

Nothing here decides which bytes move; transports take rows and indices from `kvferry.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from kvferry.plan import Plan, Tiles


class State(Enum):
    """RUNNING: bytes are under way. DONE: all arrived, and the notification was sent. FAILED: see `error`."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Storage:
    """One allocation to be registered."""

    address: int
    length: int
    memory: Literal["dram", "vram"] = "dram"
    device: int = 0


@dataclass(frozen=True)
class Telemetry:
    """One read in numbers: runs after the transport merged neighbours, time to post them, and time from the first posting
    until the last byte, which includes it: some paths carry everything while they post."""

    bytes: int
    runs: int
    posting_s: float
    wire_s: float


@dataclass(frozen=True)
class Path:
    """What really carries the bytes: the mechanism, whether it is a slow one, and the remedy if there is one."""

    name: str
    slow: bool = False
    remedy: str = ""


class Prepared(Protocol):
    """A plan's edges from one source, ready for requests."""

    @property
    def peer(self) -> str: ...

    @property
    def rows(self) -> int:
        """Strided rows prepared, on both sides together."""
        ...

    @property
    def anywhere(self) -> bool:
        """Whether any thread may make reads of it, poll and release them, one thread at a time; else the one that made it."""
        ...


class Read(Protocol):
    """A read under way."""

    @property
    def peer(self) -> str: ...

    @property
    def error(self) -> str:
        """Why it failed; empty unless it did."""
        ...


@runtime_checkable
class ReadsTogether(Protocol):
    """A transport that begins several reads at once for less than one by one. Each is told of as soon as it is begun."""

    def read_together(self, prepared: Prepared, loads: Sequence[Mapping[tuple[int, int], Tiles]]) -> Iterable[Read]: ...


class Transport(Protocol):
    """One rank's end of the wire. Not thread-safe: one thread calls it, but for reads of what is prepared for `anywhere`."""

    @property
    def name(self) -> str: ...

    def register(self, storages: Sequence[Storage]) -> None: ...

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered storages. A bearer secret: it travels over authenticated channels."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Import a peer; returns the name by which it is known from now on."""
        ...

    def prepare(self, plan: Plan, source: int, peer: str) -> Prepared: ...

    def read(self, prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], notification: bytes = b"") -> Read: ...

    def poll(self, read: Read) -> State: ...

    def telemetry(self, read: Read) -> Telemetry:
        """Of a read that is DONE."""
        ...

    def release(self, read: Read) -> bool:
        """Let go of a read that is not RUNNING, or give one up; True once its destination is safe. A read that is DONE may be
        polled and released again: several may wait for one."""
        ...

    def notify(self, peer: str, message: bytes) -> None: ...

    def notifications(self) -> list[tuple[str, bytes]]: ...

    def path(self, peer: str) -> Path:
        """What carries reads from the peer, as far as it is known; the first read may have to come first."""
        ...

    def forget(self, peer: str) -> None: ...

    def close(self) -> None: ...


def read_together(transport: Transport, prepared: Prepared, loads: Sequence[Mapping[tuple[int, int], Tiles]]) -> Iterable[Read]:
    """Reads of several loads, at once if the transport can."""
    if isinstance(transport, ReadsTogether):
        return transport.read_together(prepared, loads)
    return (transport.read(prepared, tiles) for tiles in loads)
