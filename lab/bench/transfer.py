"""Requests moved between two processes: KVFerry, stock, one descriptor and a plain copy in turn, bytes compared.

    python -m lab.bench.transfer [--memory vram] [--json]

needs NumPy, msgspec and NIXL alone; `python -m lab bench transfer` has all options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Final

import msgspec
from msgspec import Struct

from kvferry.doctor.memory import MemoryKind, allocate, device_name
from kvferry.errors import KVFerryError, MeasureError
from kvferry.plan import Binder, Plan
from kvferry.transport import NixlOptions, NixlTransport
from kvferry.transport.contract import Prepared, State
from lab.bench.agents import Agent, OneDescriptor, StockLists, load_nixl
from lab.bench.bind import stock_of
from lab.bench.case import BLOCK, Case, Order, placed, size_of
from lab.bench.comparing import compared
from lab.bench.machine import Record, available_bytes, this_machine
from lab.bench.measure import REPEATS, Action, Tick, copier, measured, silent
from lab.bench.producer import Ready, producer
from lab.bench.stock import Stock

ORDERS: Final[tuple[Order, ...]] = ("consecutive", "scattered")
HYBRID: Final = "nemotron-3-nano-30b-a3b"


class Moved(Struct, frozen=True):
    """Median seconds of each way to move one request, and how much faster KVFerry is than each (above 1: faster).

    `runs` are NIXL's descriptors after merging. `stock_bytes` may be more than `bytes`: stock moves whole blocks.
    """

    case: str
    model: str
    prefill: str
    decode: str
    order: str
    memory: str
    tokens: int
    bytes: int
    runs: int
    path: str
    right: bool
    seconds: float
    posting_seconds: float
    stock_seconds: float | None
    stock_bytes: int | None
    stock_right: bool | None
    stock_remark: str
    one_descriptor_seconds: float
    memcpy_seconds: float
    ratio_to_stock: float | None
    ratio_to_one_descriptor: float
    ratio_to_memcpy: float
    gigabytes_per_second: float


def host_cases(regions: int = 4, blocks: int = 1024, page: int = 32_768, orders: Sequence[Order] = ORDERS) -> list[Case]:
    """Equal sides, head slices both ways, token-major slices, states and their convs, and a short prompt of a hybrid."""
    found = []
    for prefill, decode in (("tp=1", "tp=1"), ("tp=2", "tp=1"), ("tp=1", "tp=2")):
        found += pages_cases(prefill, decode, regions, blocks, page, orders)
    small = {"regions": regions, "page": page}
    found.append(Case("token-major slices", "tp=2,layout=token", "tp=1,layout=token", BLOCK * max(blocks // 16, 1), **small))  # type: ignore[arg-type]
    for prefill, decode in (("tp=1", "tp=1"), ("tp=2", "tp=1"), ("tp=2,conv=sd", "tp=1,conv=sd")):
        found.append(Case(f"hybrid, 8,000 tokens, {prefill} → {decode}", prefill, decode, 8_000, model=HYBRID))
    found.append(Case("hybrid, short prompt of 100 tokens", "tp=1", "tp=1", 99, model=HYBRID))
    return found


def device_cases(regions: int = 16, blocks: int = 4096, page: int = 32_768, orders: Sequence[Order] = ORDERS) -> list[Case]:
    """Whole pages in both orders, and head slices."""
    return [
        *pages_cases("tp=1", "tp=1", regions, blocks, page, orders),
        *pages_cases("tp=2", "tp=1", regions, blocks, page, ("consecutive",)),
    ]


def pages_cases(prefill: str, decode: str, regions: int, blocks: int, page: int, orders: Sequence[Order]) -> list[Case]:
    """A request of `blocks` blocks; a scattered one has a pool of twice as many to lie in."""
    what = "equal sides" if prefill == decode else f"{prefill} → {decode}"
    return [
        Case(
            f"{what}, {blocks:,} blocks × {regions} regions, {order}",
            prefill, decode, blocks * BLOCK, order,
            regions=regions, page=page, blocks=2 * blocks if order == "scattered" else 0,
        )
        for order in orders
    ]  # fmt: skip


def run(found: Sequence[Case], memory: MemoryKind = "dram", repeats: int = REPEATS, tick: Tick = silent) -> list[Moved]:
    load_nixl()
    return [measure(case, memory, repeats, tick) for case in found]


def measure(case: Case, memory: MemoryKind, repeats: int, tick: Tick = silent) -> Moved:
    unplaced = Binder(case.plan()).bind(case.request)
    needed = sum(size_of(m) for m in (case.consumers[0], *case.producers)) * 2 + unplaced.bytes * 3
    if memory == "dram" and needed > available_bytes():
        raise MeasureError(f"{case.name}: needs {needed:,} bytes of memory; use fewer blocks, regions or smaller pages")
    with producer(case, memory, unplaced.bytes) as ready:
        here = _Consumer(case, memory, ready, unplaced.bytes)
        try:
            return here.measure(repeats, tick)
        finally:
            here.close()


class _Consumer:
    """The first consumer rank, with every way to fetch the request."""

    def __init__(self, case: Case, memory: MemoryKind, ready: Ready, wire: int) -> None:
        self.case, self.kind, self.bytes = case, memory, wire
        self.memory = allocate(size_of(case.consumers[0]), memory)
        self.spare = allocate(2 * wire, memory)
        for owned in (self.memory, self.spare):
            owned.clear()
        producers = [placed(m, entry.address, memory) for m, entry in zip(case.producers, ready.ranks, strict=True)]
        consumer = placed(case.consumers[0], self.memory.storage.address, memory)
        self.plan: Plan = case.plan(producers, consumer)
        self.binder = Binder(self.plan)
        self.transport = NixlTransport("decode", NixlOptions(progress_thread=False))
        self.transport.register([self.memory.storage])
        self.agent = Agent("stock-decode")
        for owned in (self.memory, self.spare):
            self.agent.register(owned.storage)
        ranks = [side.identity.rank.ordinal for side in self.plan.sources]
        self.peers = [self.transport.connect(ready.ranks[rank].transport) for rank in ranks]
        self.prepared: list[Prepared] = [
            self.transport.prepare(self.plan, source, peer) for source, peer in enumerate(self.peers)
        ]
        names = {rank: self.agent.connect(ready.ranks[rank].agent) for rank in sorted({0, *ranks})}
        self.model, self.remark = stock_of(case)
        self.stock: StockLists | None = None
        if self.model is not None:
            self.model = Stock(consumer, [producers[rank] for rank in ranks])
            self.stock = StockLists(self.agent, self.model, [names[rank] for rank in ranks], memory)
        there = replace(self.spare.storage, address=ready.wire, length=wire)
        self.one = OneDescriptor(self.agent, names[0], self.spare.storage, there, wire)
        self.runs = 0
        self.posting = 0.0

    def measure(self, repeats: int, tick: Tick) -> Moved:
        request = self.case.request
        right = self._checked(self._ferry)
        stock, stock_right = self.stock, None
        actions: dict[str, Action] = {"kvferry": self._ferry}
        if stock is not None:
            stock_right = self._checked(lambda: stock.read(request))
            actions["stock"] = lambda: stock.read(request)
        actions |= {"one descriptor": self.one.read, "memcpy": copier(self.spare, self.bytes)}
        rounds = measured(actions, repeats, tick)
        ours, case = rounds.median("kvferry"), self.case
        return Moved(
            case=case.name, model=case.shape.name, prefill=case.prefill, decode=case.decode, order=case.order,
            memory=self.kind, tokens=case.tokens, bytes=self.bytes, runs=self.runs,
            path=self.transport.path(self.peers[0]).name, right=right, seconds=ours, posting_seconds=self.posting,
            stock_seconds=rounds.median("stock") if stock else None,
            stock_bytes=self.model.bytes(request) if self.model and stock else None,
            stock_right=stock_right, stock_remark=self.remark,
            one_descriptor_seconds=rounds.median("one descriptor"), memcpy_seconds=rounds.median("memcpy"),
            ratio_to_stock=rounds.ratio("stock", "kvferry") if stock else None,
            ratio_to_one_descriptor=rounds.ratio("one descriptor", "kvferry"),
            ratio_to_memcpy=rounds.ratio("memcpy", "kvferry"),
            gigabytes_per_second=self.bytes / ours / 1e9,
        )  # fmt: skip

    def _ferry(self) -> float:
        transport, start = self.transport, perf_counter()
        tiles = self.binder.tiles(self.case.request)
        reads = [transport.read(prepared, tiles) for prepared in self.prepared]
        left = list(reads)
        while left:
            left = [read for read in left if transport.poll(read) is State.RUNNING]
        seconds = perf_counter() - start
        for read in reads:
            if read.error:
                raise MeasureError(read.error)
        found = [transport.telemetry(read) for read in reads]
        self.runs, self.posting = sum(t.runs for t in found), sum(t.posting_s for t in found)
        for read in reads:
            transport.release(read)
        return seconds

    def _checked(self, action: Action) -> bool:
        """Whether every byte that the plan copies is right after an action on cleared memory."""
        self.memory.clear()
        action()
        return not compared(self.plan, self.binder.tiles(self.case.request), self.memory).wrong

    def close(self) -> None:
        self.one.drop()
        if self.stock is not None:
            self.stock.drop()
        self.transport.close()
        self.agent.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=("dram", "vram"), default="dram")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--regions", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--page", type=int, default=32_768)
    parser.add_argument("--json", action="store_true", help="for programs")
    words = parser.parse_args()
    try:
        if words.memory == "vram":
            cases = device_cases(words.regions or 16, words.blocks or 4096, words.page)
        else:
            cases = host_cases(words.regions or 4, words.blocks or 1024, words.page)
        found = run(cases, words.memory, words.repeats)
        done = Record("transfer", this_machine(device_name(words.memory)), words.repeats, found)
    except KVFerryError as error:
        sys.stderr.write(f"kvferry: {error}\n")
        sys.exit(2)
    if words.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(done), indent=1).decode() + "\n")
        return
    for row in done.results:
        stock = row.stock_remark if row.ratio_to_stock is None else f"{row.ratio_to_stock:.2f} × stock"
        sys.stdout.write(
            f"{row.case}: {row.gigabytes_per_second:.1f} GB/s in {row.runs:,} runs by {row.path}, {stock}, "
            f"{row.ratio_to_one_descriptor:.2f} × one descriptor, {row.ratio_to_memcpy:.2f} × memcpy, "
            f"bytes {'right' if row.right else 'WRONG'}\n"
        )


if __name__ == "__main__":
    main()
