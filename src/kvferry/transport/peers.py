"""What the NIXL transport remembers: peers, what was prepared for them, reads, and their windows in flight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import TransportError
from kvferry.plan.rows import PreparedRows
from kvferry.transport.contract import State
from kvferry.transport.metadata import Metadata
from kvferry.transport.process import Life
from kvferry.transport.windows import Merging, Window


@dataclass(eq=False)
class Lists:
    """NIXL's two descriptor lists; a list keeps the agent alive, so they are dropped when they are released."""

    src: Any
    dst: Any


@dataclass(frozen=True, eq=False)
class NixlPrepared:
    """A plan's edges from one source as descriptor lists that NIXL holds."""

    peer: str
    rows: int
    indices: PreparedRows
    merging: Merging
    lists: Lists
    anywhere: bool = False


@dataclass(eq=False)
class Flight:
    """A posted window; `over` once NIXL has said how it ended."""

    handle: Any
    descriptors: int
    over: bool = False


@dataclass(eq=False)
class NixlRead:
    """A read: windows waiting, windows in flight, and what is known of those that have landed. `left` counts descriptors that
    wait; `posted_in` is the round in which a window of it was last posted, `looked_at_in` the one in which it was asked after.
    A `small` read waits for nobody and takes nobody's room."""

    prepared: NixlPrepared
    notification: bytes
    waiting: deque[Window]
    total: int
    left: int
    small: bool
    moved_at: float
    posted_in: int
    looked_at_in: int = -1
    state: State = State.RUNNING
    error: str = ""
    flying: list[Flight] = field(default_factory=list)
    landed: list[Any] = field(default_factory=list)

    @property
    def peer(self) -> str:
        return self.prepared.peer


@dataclass(eq=False)
class Peer:
    """A connected peer: what it registered, what is in flight, and whether the caller has dropped it. `void` was prepared
    before it was dropped and is kept for reads that have not ended. `descriptors` counts those in flight of reads that are not
    small, `queue` are reads with windows to post, and `round` counts how often all flights were looked at. `life` tells whether
    its process lives, `looked_at` when that was last asked, `ended_at` when it was first seen dead; `drained` counts how often
    what it left behind was looked through since."""

    metadata: Metadata
    life: Life | None = None
    prepared: list[NixlPrepared] = field(default_factory=list)
    void: list[NixlPrepared] = field(default_factory=list)
    reads: dict[NixlRead, None] = field(default_factory=dict)
    queue: dict[NixlRead, None] = field(default_factory=dict)
    descriptors: int = 0
    round: int = 0
    moved_at: float = 0.0
    dropped: bool = False
    warned: bool = False
    looked_at: float = -math.inf
    ended_at: float | None = None
    drained: int = 0

    @property
    def idle(self) -> bool:
        return not any(read.flying for read in self.reads)

    def drop(self) -> None:
        """Void what was prepared; the peer itself stays until it is idle."""
        self.dropped = True
        self.void += self.prepared
        self.prepared.clear()

    def take_lists(self) -> Iterator[Any]:
        """NIXL's lists of everything that was ever prepared for the peer, to be released."""
        for prepared in (*self.prepared, *self.void):
            yield from (side for side in (prepared.lists.src, prepared.lists.dst) if side is not None)
            prepared.lists.src = prepared.lists.dst = None
        self.prepared.clear()
        self.void.clear()


class Peers:
    """Peers by name; a dropped one stays while a read from it may still land."""

    def __init__(self) -> None:
        self._known: dict[str, Peer] = {}

    def __iter__(self) -> Iterator[tuple[str, Peer]]:
        return iter(tuple(self._known.items()))

    def known(self, name: str) -> Peer | None:
        """The peer, dropped or not."""
        return self._known.get(name)

    def connected(self, name: str) -> Peer:
        peer = self._known.get(name)
        if peer is None or peer.dropped:
            raise TransportError(f"peer {name} is not connected; connect with its metadata first")
        return peer

    def add(self, metadata: Metadata, life: Life | None = None) -> None:
        self._known[metadata.name] = Peer(metadata, life)

    def again(self, metadata: Metadata) -> bool:
        """Whether the peer is known, in which case it is connected from now on; raises if it has other metadata."""
        known = self._known.get(metadata.name)
        if known is None:
            return False
        if known.metadata.digest != metadata.digest:
            raise TransportError(
                f"peer {metadata.name} is connected with other metadata; forget it and release its reads, then connect again"
            )
        known.dropped = False
        return True

    def remove(self, name: str) -> None:
        life = self._known.pop(name).life
        if life is not None:
            life.close()

    def clear(self) -> None:
        for name in tuple(self._known):
            self.remove(name)
