"""What it costs to get ready for a peer: time and memory to prepare both sides' descriptors, however many blocks there are.

Time is of both ends in one process, the same calls as between two. Memory is of a fresh process per case and way: resident
pages (native and Python together) at their highest during the preparation, and those that stay after it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Final, Literal

import msgspec
from msgspec import Struct

from kvferry.doctor.child import child
from kvferry.doctor.memory import HostMemory
from kvferry.errors import MeasureError
from kvferry.plan import Plan
from kvferry.transport import NixlOptions, NixlTransport
from lab.bench.agents import Agent, StockLists, load_nixl
from lab.bench.bind import stock_of
from lab.bench.case import Case, placed, size_of
from lab.bench.measure import REPEATS, Action, Tick, measured, silent, timed
from lab.bench.stock import Stock

Way = Literal["kvferry", "stock"]

FEW: Final = 2_000
_SETTLE_S: Final = 300.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Footprint(Struct, frozen=True):
    """Bytes of memory that a preparation took at its peak, and keeps; at least one page, the resolution of the kernel."""

    peak: int
    kept: int


class Prepared(Struct, frozen=True):
    """Median seconds and memory of preparing; ratios above 1 say how much faster, and how much smaller, KVFerry is.

    `plan_seconds` is what planning with proof takes, once a pair of sides, before any peer is prepared.
    """

    case: str
    prefill: str
    decode: str
    regions: int
    blocks: int
    rows: int
    descriptors: int
    plan_seconds: float
    seconds: float
    stock_seconds: float
    ratio_to_stock: float
    footprint: Footprint | None
    stock_footprint: Footprint | None
    peak_ratio: float | None
    kept_ratio: float | None


def cases(
    regions: int = 4,
    blocks: Sequence[int] = (FEW, 200_000),
    page: int = 512,
    pairs: Sequence[tuple[str, str]] = (("tp=1", "tp=1"), ("tp=2", "tp=1")),
) -> list[Case]:
    return [
        Case(
            f"{prefill} → {decode}, {regions} regions × {count:,} blocks",
            prefill,
            decode,
            1,
            regions=regions,
            page=page,
            blocks=count,
        )
        for prefill, decode in pairs
        for count in blocks
    ]


def run(found: Sequence[Case], repeats: int = REPEATS, tick: Tick = silent, *, footprints: bool = True) -> list[Prepared]:
    load_nixl()
    return [measure(case, repeats, tick, footprints=footprints) for case in found]


def measure(case: Case, repeats: int, tick: Tick = silent, *, footprints: bool = True) -> Prepared:
    ends = _Ends(case)
    try:
        actions: dict[str, Action] = {"plan": lambda: timed(ends.planned), "kvferry": ends.ferry, "stock": ends.stock}
        rounds = measured(actions, repeats, tick)
        rows, descriptors = ends.rows, ends.descriptors
    finally:
        ends.close()
    ours = footprint(case, "kvferry") if footprints else None
    theirs = footprint(case, "stock") if footprints else None
    return Prepared(
        case.name, case.prefill, case.decode, case.regions, case.producers[0].groups[0].blocks, rows, descriptors,
        rounds.median("plan"), rounds.median("kvferry"), rounds.median("stock"), rounds.ratio("stock", "kvferry"),
        ours, theirs,
        theirs.peak / ours.peak if ours and theirs else None,
        theirs.kept / ours.kept if ours and theirs else None,
    )  # fmt: skip


class _Ends:
    """One consumer rank and all its sources in one process, over memory that nobody touches."""

    def __init__(self, case: Case) -> None:
        self.case = case
        stock, remark = stock_of(case)
        if stock is None:
            raise MeasureError(f"{case.name}: {remark}; there is nothing to compare with")
        memories = [HostMemory(size_of(m)) for m in (case.consumers[0], *case.producers)]
        self.consumer, *self.producers = (
            placed(m, memory.storage.address) for m, memory in zip((case.consumers[0], *case.producers), memories, strict=True)
        )
        self.memories = memories
        self.plan: Plan = self.planned()
        self.transports = [NixlTransport(f"end-{i}", NixlOptions(progress_thread=False)) for i in range(len(memories))]
        self.agents = [Agent(f"stock-end-{i}") for i in range(len(memories))]
        for transport, agent, memory in zip(self.transports, self.agents, memories, strict=True):
            transport.register([memory.storage])
            agent.register(memory.storage)
        ranks = [side.identity.rank.ordinal for side in self.plan.sources]
        self.peers = [self.agents[0].connect(self.agents[1 + rank].metadata()) for rank in ranks]
        self.names = [self.transports[0].connect(self.transports[1 + rank].metadata()) for rank in ranks]
        self.model = Stock(self.consumer, [self.producers[rank] for rank in ranks])
        self.rows = self.descriptors = 0
        self.held: list[StockLists] = []

    def planned(self) -> Plan:
        return self.case.plan(self.producers, self.consumer)

    def ferry(self) -> float:
        """Rows are few, so that those of all repeats stay until the end."""
        before = perf_counter()
        found = [self.transports[0].prepare(self.plan, source, name) for source, name in enumerate(self.names)]
        seconds = perf_counter() - before
        self.rows = sum(prepared.rows for prepared in found)
        return seconds

    def stock(self) -> float:
        before = perf_counter()
        self.held = [StockLists(self.agents[0], self.model, self.peers)]
        seconds = perf_counter() - before
        self.descriptors = len(self.held[0].kept) * (1 + len(self.peers) + (len(self.peers) if len(self.peers) > 1 else 0))
        self.drop()
        return seconds

    def drop(self) -> None:
        for lists in self.held:
            lists.drop()
        self.held = []

    def keep(self, way: Way) -> None:
        """Prepare once and let it stay."""
        if way == "stock":
            self.held = [StockLists(self.agents[0], self.model, self.peers)]
        else:
            self.ferry()

    def close(self) -> None:
        self.drop()
        for transport, agent in zip(self.transports, self.agents, strict=True):
            transport.close()
            agent.close()


def footprint(case: Case, way: Way) -> Footprint:
    """Memory of one preparation in a process that has done a small one before, so that only the size is counted."""
    with child(f"{case.name}: the process that weighs {way}", _weigh, case, way) as weigher:
        return msgspec.msgpack.decode(weigher.receive(_SETTLE_S), type=Footprint)


def _weigh(parent: Connection, case: Case, way: Way) -> None:
    load_nixl()
    small = _Ends(Case(case.name, case.prefill, case.decode, 1, regions=case.regions, page=case.page, blocks=16))
    for _ in range(3):
        small.ferry() if way == "kvferry" else small.stock()
    ends = _Ends(case)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _resident("VmRSS")
    ends.keep(way)
    peak = _resident("VmHWM") - before
    gc.collect()
    kept = _resident("VmRSS") - before
    parent.send_bytes(msgspec.msgpack.encode(Footprint(max(peak, _PAGE), max(kept, _PAGE))))


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])
