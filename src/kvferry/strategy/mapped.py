"""Reads out of memory that is mapped: the producer's storages are opened once, and a load is copied out of them by a mover.

Whether memory can be mapped is found out by opening it. A peer that died is let go of soon, since whoever has a dead process's
memory open keeps it from the process that is started in its place.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from kvferry.bounds import holder, holds
from kvferry.errors import TransportError
from kvferry.manifest.schema import Address, Index, Offset, Region
from kvferry.plan import Plan, Tiles
from kvferry.strategy.movers import Mover, Opened, Ticket
from kvferry.strategy.moves import Key, Moves, joined
from kvferry.transport.contract import Path, State, Storage, Telemetry

logger = logging.getLogger("kvferry.strategy")

LOOK_S: Final = 1.0
"""How often it is asked whether peers live: what a dead one leaves mapped is in the way of its successor."""

TRUST_S: Final = 1.0
"""How long device memory is read of a peer that was seen to live. Copies out of it are begun for steps that cannot do without,
and the memory of a peer that dies meanwhile is there until it is closed here."""

CLOSE_S: Final = 5.0
"""How long copies under way may take when this end is closed; what is mapped then ends with the process."""


class Token(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A storage, and what opens it."""

    address: Address
    length: Offset
    memory: Literal["dram", "vram"]
    device: Index
    token: Annotated[bytes, Meta(max_length=4096)]


Tokens = Annotated[tuple[Token, ...], Meta(max_length=4096)]


class PeerGoneError(TransportError):
    """Its memory may still be there, and nothing else: there is no other way to read it."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"peer {peer} is gone: its process has ended")


@dataclass(frozen=True)
class _Window:
    """A peer's storage in this process."""

    token: Token
    opened: Opened

    def close(self) -> None:
        try:
            self.opened.close()
        except TransportError as error:
            logger.warning("memory of a peer stays mapped: %s", error)


@dataclass(eq=False)
class _Peer:
    windows: tuple[_Window, ...]
    reads: set[MappedRead] = field(default_factory=set)
    gone: bool = False
    lived: float = -math.inf

    @property
    def alive(self) -> bool:
        return all(window.opened.alive for window in self.windows)

    def close(self) -> None:
        for window in self.windows:
            window.close()


@dataclass(frozen=True, eq=False)
class MappedPrepared:
    """A plan's edges from one source as tables that a mover holds; `owner` is the peer as it was when they were made."""

    peer: str
    rows: int
    moves: Moves
    mover: Mover
    held: Any
    owner: _Peer
    anywhere: bool = True


@dataclass(frozen=True, eq=False)
class _Share:
    """One load's part of copies that are made for several: `size` of `total` bytes, of which all count or none."""

    copies: Ticket
    total: int
    size: int

    @property
    def done(self) -> bool:
        return self.copies.done

    @property
    def moved(self) -> int:
        return self.size if self.copies.moved == self.total else 0

    @property
    def seconds(self) -> float:
        return self.copies.seconds * self.size / max(1, self.total)


@dataclass(eq=False)
class MappedRead:
    peer: str
    ticket: Ticket
    runs: int
    size: int
    posting_s: float
    notification: bytes = b""
    state: State = State.RUNNING
    error: str = ""

    def fail(self, reason: str) -> None:
        self.state, self.error = State.FAILED, f"peer {self.peer}: {reason}"


class Mapped:
    """This process's storages as others map them, and theirs as they are mapped here."""

    def __init__(self, movers: Sequence[Mover], clock: Callable[[], float] = time.monotonic) -> None:
        self._movers = {mover.memory: mover for mover in movers}
        self._clock = clock
        self._storages: list[Storage] = []
        self._peers: dict[str, _Peer] = {}
        self._leaving: list[_Peer] = []
        self._looked = clock()

    def admit(self, storages: Sequence[Storage]) -> None:
        """Loads may be copied into the storages; nothing is said of who else may map them."""
        self._storages += storages

    def register(self, storages: Sequence[Storage]) -> tuple[Token, ...]:
        """What opens the storages elsewhere; raises TransportError where one of them cannot be mapped."""
        self.admit(storages)
        return tuple(Token(s.address, s.length, s.memory, s.device, self._mover(s.memory).export(s)) for s in storages)

    def _mover(self, memory: Literal["dram", "vram"]) -> Mover:
        if memory not in self._movers:
            raise TransportError(f"nothing here maps {memory}")
        return self._movers[memory]

    def connect(self, name: str, tokens: Sequence[Token]) -> None:
        """Open all of a peer's storages, or none: raises TransportError with the reason, PeerGoneError where it has died."""
        if name in self._peers:
            return
        windows: list[_Window] = []
        with ExitStack() as undo:
            for token in sorted(tokens, key=_tells_of_death):
                windows.append(_Window(token, self._mover(token.memory).open(token.token, token.length)))
                undo.callback(windows[-1].close)
                if not windows[-1].opened.alive:
                    raise PeerGoneError(name)
            undo.pop_all()
        self._peers[name] = _Peer(tuple(windows))

    def connected(self, name: str) -> bool:
        return name in self._peers

    def prepare(self, plan: Plan, source: int, name: str) -> MappedPrepared:
        peer = self._known(name)
        theirs, ours = plan.sources[source].regions, plan.consumer.regions
        kinds = {region.memory for region in (*theirs, *ours)}
        if len(kinds) > 1:
            raise TransportError(f"peer {name}: its memory and this end's are of different kinds ({', '.join(sorted(kinds))})")
        moves = Moves(
            plan,
            source,
            lambda index: _mapped(theirs[index], peer.windows, name),
            lambda index: _own(ours[index], self._storages),
        )
        mover = self._mover(kinds.pop() if kinds else "dram")
        return MappedPrepared(name, len(moves.pieces), moves, mover, mover.prepare(moves), peer)

    def where(self, name: str, region: Region) -> int:
        """Where a peer's region begins in this process; raises TransportError where not all of it is mapped."""
        return _mapped(region, self._known(name).windows, name)

    def peek(self, name: str, region: Region, offset: int, length: int) -> bytes:
        """A few bytes of a peer's host memory, as they are now; raises PeerGoneError where it has died. One that has not may be
        read for a while (TRUST_S)."""
        peer, now = self._known(name), self._clock()
        if not peer.alive:
            raise PeerGoneError(name)
        peer.lived = now
        if region.memory != "dram" or not 0 <= offset <= offset + length <= region.length:
            raise TransportError(f"peer {name}: bytes [{offset}, {offset + length}) of region {region.name} cannot be seen")
        return ctypes.string_at(self.where(name, region) + offset, length)

    def read(
        self, prepared: MappedPrepared, tiles: Mapping[Key, Tiles], notification: bytes = b"", src_shift: int = 0
    ) -> MappedRead:
        (read,) = self.read_together(prepared, [tiles], src_shift)
        read.notification = notification
        return read

    def read_together(
        self, prepared: MappedPrepared, loads: Sequence[Mapping[Key, Tiles]], src_shift: int = 0
    ) -> list[MappedRead]:
        """Several loads by one launch, which all of them wait for; out of so many bytes further on than was prepared."""
        if prepared.owner.gone:
            raise PeerGoneError(prepared.peer)
        peer = self._known(prepared.peer)
        if peer is not prepared.owner:
            raise TransportError(f"peer {prepared.peer} was forgotten since this plan was prepared; prepare it again")
        began = self._clock()
        if prepared.mover.memory == "dram" or began - peer.lived > TRUST_S:
            if not peer.alive:
                raise PeerGoneError(prepared.peer)
            peer.lived = began
        bound, sizes = prepared.moves.bind(joined(loads), src_shift), [prepared.moves.size(tiles) for tiles in loads]
        ticket = prepared.mover.start(prepared.held, bound)
        each_s = (self._clock() - began) / len(loads)
        reads = [
            MappedRead(prepared.peer, _Share(ticket, bound.bytes, size) if len(loads) > 1 else ticket, runs, size, each_s)
            for size, runs in sizes
        ]
        peer.reads.update(reads)
        return reads

    def _known(self, name: str) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise TransportError(f"peer {name} is not connected; connect with its metadata first")
        return peer

    def poll(self, read: MappedRead) -> State:
        if read.state is State.RUNNING and read.ticket.done:
            if read.ticket.moved == read.size:
                read.state = State.DONE
            else:
                read.fail(f"{read.ticket.moved:,} bytes of {read.size:,} were copied; report this with both manifests")
        return read.state

    def telemetry(self, read: MappedRead) -> Telemetry:
        if read.state is not State.DONE:
            raise TransportError(f"peer {read.peer}: telemetry is of a read that is done; this one is {read.state.value}")
        return Telemetry(read.ticket.moved, read.runs, read.posting_s, read.ticket.seconds)

    def release(self, read: MappedRead) -> bool:
        if read.state is State.RUNNING:
            read.fail("the read was given up here")
        if not read.ticket.done:
            return False
        for peer in (*self._peers.values(), *self._leaving):
            peer.reads.discard(read)
        self._close_idle()
        return True

    def path(self, name: str) -> Path:
        kinds = {window.token.memory for window in self._known(name).windows}
        return Path("mapped device memory" if "vram" in kinds else "mapped memory")

    def look(self) -> list[str]:
        """Let go of peers that have died, now and then; returns their names."""
        self._close_idle()
        if not self._peers or self._clock() - self._looked < LOOK_S:
            return []
        self._looked = self._clock()
        gone = [name for name, peer in self._peers.items() if not peer.alive]
        for name in gone:
            logger.info("peer %a has ended; its memory is no longer mapped here", name)
            self._peers[name].gone = True
            self._drop(name, "its process has ended")
        return gone

    def forget(self, name: str) -> None:
        """Fails the peer's reads; its memory is closed once none of them can still be copying."""
        if name in self._peers:
            self._drop(name, "it was forgotten here")

    def _drop(self, name: str, reason: str) -> None:
        peer = self._peers.pop(name)
        for read in peer.reads:
            if read.state is State.RUNNING:
                read.fail(reason)
        self._leaving.append(peer)
        self._close_idle()

    def _close_idle(self) -> None:
        for peer in [p for p in self._leaving if all(read.ticket.done for read in p.reads)]:
            self._leaving.remove(peer)
            peer.close()

    def close(self) -> None:
        for name in tuple(self._peers):
            self.forget(name)
        deadline = time.monotonic() + CLOSE_S
        while self._leaving and time.monotonic() < deadline:
            time.sleep(0.001)
            self._close_idle()


def _tells_of_death(token: Token) -> bool:
    """First host memory, which tells whether its owner lives: of a dead process's device memory there is only an error."""
    return token.memory != "dram"


def _mapped(region: Region, windows: Sequence[_Window], name: str) -> int:
    for window in windows:
        if holds(window.token, region):
            return window.opened.address + region.address - window.token.address
    raise TransportError(f"peer {name}: region {region.name} lies in no storage that it lets others map")


def _own(region: Region, storages: Sequence[Storage]) -> int:
    if holder(storages, region) is not None:
        return region.address
    raise TransportError(f"region {region.name} lies in no registered storage; register it before metadata() is exported")
