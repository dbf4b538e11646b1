"""The producer of a transfer benchmark: a process of its own that holds every source rank's memory and lets itself be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
from msgspec import Struct

from kvferry.doctor.child import child
from kvferry.doctor.memory import Memory, MemoryKind, allocate
from kvferry.errors import KVFerryError, MeasureError
from kvferry.transport import NixlOptions, NixlTransport
from lab.bench.agents import Agent, load_nixl
from lab.bench.case import Case, size_of
from lab.bench.comparing import stamp

_START_S = 120.0
_IDLE_S = 0.0005


class Ask(Struct, frozen=True):
    """What to hold: a case, and `wire` contiguous bytes for the single descriptor."""

    case: Case
    memory: MemoryKind
    wire: int


class RankEntry(Struct, frozen=True):
    """One source rank: where its storage lies, and how to reach it with KVFerry and without."""

    address: int
    transport: bytes
    agent: bytes


class Ready(Struct, frozen=True):
    """All ranks, and the address of the contiguous bytes, which the first rank's agent holds; or what went wrong."""

    ranks: tuple[RankEntry, ...] = ()
    wire: int = 0
    error: str = ""


@contextmanager
def producer(case: Case, memory: MemoryKind, wire: int) -> Iterator[Ready]:
    """A child process that is ready to be read, until the block ends."""
    with child("the producer's process", _hold) as holder:
        holder.send(msgspec.msgpack.encode(Ask(case, memory, wire)))
        ready = msgspec.msgpack.decode(holder.receive(_START_S), type=Ready)
        if ready.error:
            raise MeasureError(f"{holder.name}: {ready.error}")
        yield ready
        holder.send(b"")


def _hold(parent: Connection) -> None:
    ask = msgspec.msgpack.decode(parent.recv_bytes(), type=Ask)
    try:
        load_nixl()
        ends = [_Rank(rank, size_of(m), ask) for rank, m in enumerate(ask.case.producers)]
    except KVFerryError as error:
        parent.send_bytes(msgspec.msgpack.encode(Ready(error=str(error))))
        return
    wire = ends[0].wire
    ready = Ready(tuple(end.entry() for end in ends), wire.storage.address if wire else 0)
    parent.send_bytes(msgspec.msgpack.encode(ready))
    try:
        while not parent.poll(_IDLE_S):
            for end in ends:
                end.transport.notifications()
                end.agent.progress()
    except (EOFError, ConnectionResetError):
        return
    for end in ends:
        end.transport.close()
        end.agent.close()


class _Rank:
    """A source rank's memory under both ends."""

    def __init__(self, rank: int, length: int, ask: Ask) -> None:
        self.memory: Memory = allocate(length, ask.memory)
        stamp(self.memory, rank)
        self.agent = Agent(f"stock-prefill-{rank}")
        self.transport = NixlTransport(f"prefill-{rank}", NixlOptions(progress_thread=False))
        self.wire: Memory | None = None
        if rank == 0:
            self.wire = allocate(ask.wire, ask.memory)
            stamp(self.wire, rank)
            self.agent.register(self.wire.storage)
        self.agent.register(self.memory.storage)
        self.transport.register([self.memory.storage])

    def entry(self) -> RankEntry:
        return RankEntry(self.memory.storage.address, self.transport.metadata(), self.agent.metadata())
