"""The two processes of `bench strategies`: one holds source ranks and gathers for whoever asks, the other has an end
for every strategy over the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Final

import msgspec
from msgspec import Struct

from kvferry.doctor.child import Child, child
from kvferry.doctor.memory import ArrayMemory, Memory, MemoryKind, allocate
from kvferry.errors import KVFerryError, MeasureError
from kvferry.strategy import HostMover, Mapped, Mover, SharedBytes, Strategies
from kvferry.strategy.cost import Way
from kvferry.strategy.scattered import Scattered, Settings
from kvferry.strategy.staging import Rings, Staging, host_staging
from kvferry.transport import NixlOptions, NixlTransport
from kvferry.transport.contract import Storage, Transport
from lab.bench.agents import STOCK_THREADS, Agent, load_nixl
from lab.bench.case import size_of
from lab.bench.comparing import stamp
from lab.bench.scatters import SCATTERS

_START_S = 180.0
_IDLE_S = 0.0002
AUTO: Final = "auto"


class Ask(Struct, frozen=True):
    """Which way for bytes to be scattered the producer's process is to hold, in how many layers and how long; `stock`: for an
    agent with the settings of vLLM's connector, and for nobody else."""

    scatter: str
    layers: int
    tokens: int
    memory: MemoryKind
    budget: int
    ucx: dict[str, str] = {}
    stock: bool = False


class RankEntry(Struct, frozen=True):
    address: int
    transport: bytes
    hosted: bytes


class Ready(Struct, frozen=True):
    ranks: tuple[RankEntry, ...] = ()
    error: str = ""


@dataclass(frozen=True, eq=False)
class Held:
    """Memory of one rank, in which others may map it if it was made so."""

    memory: Memory
    shared: SharedBytes | None = None


def memory_of(length: int, kind: MemoryKind, shared: bool) -> Held:
    if kind == "vram" or not shared:
        return Held(allocate(length, kind))
    made = SharedBytes(length)
    return Held(ArrayMemory(made.bytes), made)


def movers(held: Held, kind: MemoryKind) -> tuple[HostMover, Mover]:
    """One for host memory, and the one for caches."""
    host = HostMover()
    if held.shared is not None:
        host.share(held.shared)
    return host, host if kind == "dram" else _device_mover()


@cache
def _device_mover() -> Mover:
    from kvferry.strategy.cuda import CudaMover

    return CudaMover(0)


def staging_of(kind: MemoryKind, budget: int, on_host: bool, rings: Rings) -> Staging:
    """All of the budget in the one ring that an end needs, as an engine's that only sends, or only reads."""
    if kind == "dram":
        return host_staging(budget, rings)
    from kvferry.strategy.cuda_staging import device_staging, pinned_staging

    return pinned_staging(budget, rings) if on_host else device_staging(0, budget, rings)


@dataclass(frozen=True)
class End:
    transport: Transport
    scattered: Scattered

    def close(self) -> None:
        self.transport.close()


def consumer_end(
    way: str, held: Held, kind: MemoryKind, budget: int, ucx: Mapping[str, str] | None = None, maps: bool = True
) -> End:
    """An end that reads one way alone, or one that would choose. `maps`: a ring that it can map; else over the transport."""
    host, mover = movers(held, kind)
    staging = staging_of(kind, budget, way == "packed (host)", "landing")
    wire = NixlTransport(f"decode {way}", NixlOptions(progress_thread=False, ucx=ucx or {}))
    inner = Scattered(wire, staging, mover, Settings(_WAYS[way], maps=maps))
    if way == "mapped":
        found = [host] if host is mover else [host, mover]
        out = Strategies(inner, Mapped(found))
    else:
        out = Strategies(inner)
    out.register([held.memory.storage])
    return End(out, inner)


_WAYS: Final[dict[str, tuple[Way, ...]]] = {
    "direct": ("direct",),
    "mapped": ("direct",),
    "packed": ("packed",),
    "packed (host)": ("packed",),
    "staged": ("staged",),
    AUTO: ("packed", "staged", "direct"),
}


@dataclass(frozen=True)
class Holder:
    """The producer's process, which holds one case at a time."""

    child: Child

    def hold(self, ask: Ask) -> Ready:
        self.child.send(msgspec.msgpack.encode(ask))
        ready = msgspec.msgpack.decode(self.child.receive(_START_S), type=Ready)
        if ready.error:
            raise MeasureError(f"{self.child.name}: {ready.error}")
        return ready


@contextmanager
def holder() -> Iterator[Holder]:
    with child("the producer's process", _hold) as found:
        yield Holder(found)
        found.send(b"")


def _hold(parent: Connection) -> None:
    ranks: list[_Rank] | list[_StockRank] = []
    try:
        load_nixl()
        while True:
            ends = [inner for rank in ranks for inner in rank.inner]
            rest = 0 if any(inner.hurried for inner in ends) else _IDLE_S
            if not parent.poll(rest if ends else None):
                for rank in ranks:
                    rank.turn()
                continue
            data = parent.recv_bytes()
            for rank in ranks:
                rank.close()
            ranks = []
            if not data:
                return
            try:
                ask = msgspec.msgpack.decode(data, type=Ask)
                scatter = replace(next(s for s in SCATTERS if s.name == ask.scatter), layers=ask.layers)
                sizes = [size_of(manifest) for manifest in scatter.case(ask.tokens).producers]
                if ask.stock:
                    ranks = [_StockRank(rank, size, ask) for rank, size in enumerate(sizes)]
                else:
                    ranks = [_Rank(rank, size, ask) for rank, size in enumerate(sizes)]
            except KVFerryError as error:
                parent.send_bytes(msgspec.msgpack.encode(Ready(error=str(error))))
            else:
                parent.send_bytes(msgspec.msgpack.encode(Ready(tuple(rank.entry() for rank in ranks))))
    except (EOFError, ConnectionResetError):
        for rank in ranks:
            rank.close()


class _Rank:
    """A source rank's memory, and an end for each ring."""

    def __init__(self, rank: int, length: int, ask: Ask) -> None:
        self.held = memory_of(length, ask.memory, shared=True)
        stamp(self.held.memory, rank)
        host, mover = movers(self.held, ask.memory)
        self.alive = SharedBytes(8) if ask.memory == "vram" else None
        if self.alive is not None:
            host.share(self.alive)
        self.inner: list[Scattered] = []
        self.ends: list[Strategies] = []
        for on_host in (False, True) if ask.memory == "vram" else (False,):
            wire = NixlTransport(f"prefill-{rank}-{int(on_host)}", NixlOptions(progress_thread=False, ucx=ask.ucx))
            self.inner.append(Scattered(wire, staging_of(ask.memory, ask.budget, on_host, "sending"), mover))
            end = Strategies(self.inner[-1], Mapped([host] if host is mover else [host, mover]))
            end.register([self.held.memory.storage])
            if self.alive is not None:
                end.register([Storage(self.alive.address, self.alive.length)])
            self.ends.append(end)

    def turn(self) -> None:
        for end in self.ends:
            end.notifications()

    def close(self) -> None:
        for end in self.ends:
            end.close()
        for shared in (self.held.shared, self.alive):
            if shared is not None:
                shared.close()

    def entry(self) -> RankEntry:
        words = [end.metadata() for end in self.ends]
        return RankEntry(self.held.memory.storage.address, words[0], words[-1])


class _StockRank:
    """A source rank's memory under an agent whose own threads do all that is to be done."""

    inner: tuple[Scattered, ...] = ()

    def __init__(self, rank: int, length: int, ask: Ask) -> None:
        self.held = memory_of(length, ask.memory, shared=False)
        stamp(self.held.memory, rank)
        self.agent = Agent(f"stock-prefill-{rank}", STOCK_THREADS)
        self.agent.register(self.held.memory.storage)

    def turn(self) -> None:
        """Nothing waits for this thread."""

    def close(self) -> None:
        self.agent.close()

    def entry(self) -> RankEntry:
        return RankEntry(self.held.memory.storage.address, self.agent.metadata(), b"")
