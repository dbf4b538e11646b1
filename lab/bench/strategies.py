"""Every strategy on every way for bytes to be scattered, between two processes, bytes compared; and what would be chosen.

    python -m lab.bench.strategies [--memory vram] [--tokens 1000,16000] [--json FILE]

needs NumPy, msgspec and NIXL alone, torch and Triton for device memory; `python -m lab bench strategies` draws the picture.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from time import perf_counter, sleep
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvferry.doctor.memory import MemoryKind, device_name
from kvferry.errors import KVFerryError, MeasureError
from kvferry.plan import Binder, Plan, Tiles
from kvferry.strategy import cost
from kvferry.strategy.probing import rest_s
from kvferry.strategy.staging import BUDGET
from kvferry.strategy.ways import ScatteredPrepared
from kvferry.transport.contract import Prepared, State
from lab.bench.agents import STOCK_THREADS, Agent, StockLists, load_nixl
from lab.bench.bind import stock_of
from lab.bench.case import Case, placed, size_of
from lab.bench.comparing import compared
from lab.bench.machine import Record, this_machine
from lab.bench.measure import copier
from lab.bench.scatters import TOKENS, Scatter, cells
from lab.bench.staging_ends import AUTO, Ask, End, Held, Holder, Ready, consumer_end, holder, memory_of
from lab.bench.stock import Stock

WITHIN: Final = 1.15
LIMIT_S: Final = 5.0
"""A strategy that would take longer than this, as the model foretells it, is not measured."""
REPEATS: Final = 5
HOST_WAYS: Final = ("direct", "mapped", "packed", "staged")
STOCK: Final = "stock"
"""Beside the strategies, never among what is chosen from: the same bytes as vLLM's own connector would post them."""
DEVICE_WAYS: Final = ("direct", "mapped", "packed", "packed (host)", "staged")

_MERGED: Final = 2_000_000
"""Runs up to here are merged with their neighbours to be counted."""
_CHOICES: Final = 10
_MORE: Final = 4
_ENOUGH_S: Final = 2.0
"""Loads are repeated up to so many times more often than was asked for, while that takes no longer."""

Tick = Callable[["Cell"], None]


class Cell(Struct, frozen=True):
    """One request: bytes, runs, the fewest seconds by every strategy, what the model foretells and chooses among those that
    need no mapped memory, and a plain copy of as many bytes. A strategy that would take too long was not measured. `right`:
    every byte was compared, after every strategy. `chosen_seconds`: of loads by an end that chooses for itself, in turn with
    the others; they are loads of the strategy that it chose like any other, but for `choosing_seconds`, also measured alone.
    Where its choice would take too long, nothing is `chosen`. `stock_bytes`: what stock moved, whole blocks; `stock_remark`:
    why there is nothing of it."""

    scatter: str
    tokens: int
    memory: str
    bytes: int
    runs: int
    seconds: dict[str, float]
    foretold: dict[str, float]
    chosen: str
    right: bool
    memcpy_seconds: float
    path: str
    chosen_seconds: float = 0.0
    stock_bytes: int = 0
    stock_remark: str = ""
    choosing_seconds: float = 0.0

    @property
    def best(self) -> float:
        """Of those among which was chosen."""
        return min([self.took, *(self.seconds[way] for way in self.foretold if way in self.seconds)])

    @property
    def took(self) -> float:
        """To choose and to load by what was chosen, whoever chose it: but for the choice, two measurements of one strategy
        differ by noise alone."""
        return min(self.chosen_seconds or math.inf, self.choosing_seconds + self.seconds.get(self.chosen, math.inf))

    @property
    def regret(self) -> float:
        """How many times longer than the best."""
        return self.took / self.best if self.took < math.inf else math.inf


class Measured(Record, frozen=True):
    """What `--json` writes, as it is read again."""

    results: tuple[Cell, ...]


def run(
    found: Sequence[tuple[Scatter, int]],
    memory: MemoryKind = "dram",
    repeats: int = REPEATS,
    budget: int = BUDGET,
    limit_s: float = LIMIT_S,
    tick: Tick = lambda cell: None,
) -> list[Cell]:
    """All cells against one process that holds one after the other; `tick` hears of each when it is done."""
    load_nixl()
    out = []
    with holder() as held:
        for scatter, tokens in found:
            out.append(measure(held, scatter, tokens, memory, repeats, budget, limit_s))
            tick(out[-1])
    return out


def measure(
    held: Holder, scatter: Scatter, tokens: int, memory: MemoryKind, repeats: int, budget: int, limit_s: float = LIMIT_S
) -> Cell:
    case = scatter.case(tokens)
    ready = held.hold(Ask(scatter.name, scatter.layers, tokens, memory, budget))
    here = memory_of(size_of(case.consumers[0]), memory, shared=False)
    ends: dict[str, End] = {}
    try:
        for way in (*(DEVICE_WAYS if memory == "vram" else HOST_WAYS), AUTO):
            ends[way] = consumer_end(way, here, memory, budget)
        cell = _Cell(scatter, case, memory, ready, here, ends).measure(repeats, limit_s)
    finally:
        for end in ends.values():
            end.close()
    return _beside_stock(cell, held, scatter, case, here, repeats)


def _beside_stock(cell: Cell, held: Holder, scatter: Scatter, case: Case, here: Held, repeats: int) -> Cell:
    """The cell with what stock takes. Its agents have threads that spin, on both sides: they live only while nobody else is
    measured."""
    model, remark = stock_of(case)
    if model is None or "direct" not in cell.seconds:
        return msgspec.structs.replace(cell, stock_remark=remark or "too long")
    kind: MemoryKind = "vram" if cell.memory == "vram" else "dram"
    ready = held.hold(Ask(scatter.name, scatter.layers, case.tokens, kind, BUDGET, stock=True))
    consumer = placed(case.consumers[0], here.memory.storage.address, kind)
    producers = [placed(m, entry.address, kind) for m, entry in zip(case.producers, ready.ranks, strict=True)]
    plan = case.plan(producers, consumer)
    ranks = [side.identity.rank.ordinal for side in plan.sources]
    agent = Agent("stock-decode", STOCK_THREADS)
    try:
        agent.register(here.memory.storage)
        model = Stock(consumer, [producers[rank] for rank in ranks])
        lists = StockLists(agent, model, [agent.connect(ready.ranks[rank].transport) for rank in ranks], kind)
        here.memory.clear()
        lists.read(case.request)
        # Whole blocks are moved, so that there may be more than the plan asks for.
        wrong = compared(plan, Binder(plan).tiles(case.request), here.memory).wrong
        took: list[float] = []
        began = perf_counter()
        while len(took) < repeats or (len(took) < _MORE * repeats and perf_counter() - began < _ENOUGH_S / len(cell.seconds)):
            took.append(lists.read(case.request))
        lists.drop()
    finally:
        agent.close()
    seconds = cell.seconds | {STOCK: min(took)}
    right = cell.right and not wrong
    return msgspec.structs.replace(cell, seconds=seconds, right=right, stock_bytes=model.bytes(case.request))


class _Cell:
    """One consumer rank with an end for every strategy, all over the same memory, and one that would choose."""

    def __init__(
        self, scatter: Scatter, case: Case, memory: MemoryKind, ready: Ready, here: Held, ends: Mapping[str, End]
    ) -> None:
        self.scatter, self.case, self.memory, self.here, self.ends = scatter, case, memory, here, ends
        producers = [placed(m, entry.address, memory) for m, entry in zip(case.producers, ready.ranks, strict=True)]
        self.plan: Plan = case.plan(producers, placed(case.consumers[0], here.memory.storage.address, memory))
        self.binder = Binder(self.plan)
        self.ranks = [side.identity.rank.ordinal for side in self.plan.sources]
        self.prepared: dict[str, list[Prepared]] = {}
        self.names: list[str] = []
        for way, end in ends.items():
            entries = [ready.ranks[rank] for rank in self.ranks]
            self.names = [end.transport.connect(e.hosted if way == "packed (host)" else e.transport) for e in entries]
            self.prepared[way] = [end.transport.prepare(self.plan, i, name) for i, name in enumerate(self.names)]
        self.bytes = 0
        self.rest_s = rest_s()

    def measure(self, repeats: int, limit_s: float) -> Cell:
        runs = self.binder.runs(self.case.request)
        if runs <= _MERGED:
            runs = sum(len(found) for found in self.binder.bind(self.case.request).copies)
        foretold = self._foretold()
        ways = [way for way in self.ends if foretold.get(way, self._own(way)) <= limit_s]
        tiles = self.binder.tiles(self.case.request)
        self.here.memory.clear()
        right = True
        for way in ways:
            self._load(way)
            right = compared(self.plan, tiles, self.here.memory).right and right
        found = self._in_turn(ways, repeats)
        spare = memory_of(2 * self.bytes, self.memory, shared=False)
        spare.memory.clear()
        copy = copier(spare.memory, self.bytes)
        copy()
        return Cell(
            self.scatter.name,
            0 if self.scatter.tokens else self.case.tokens,
            self.memory,
            self.bytes,
            runs,
            {way: seconds for way, seconds in found.items() if way != AUTO},
            foretold,
            " and ".join(sorted(self.ends[AUTO].scattered.carried)),
            right,
            min(copy() for _ in range(max(3, repeats))),
            self.ends[AUTO].transport.path(self.names[0]).name,
            found.get(AUTO, 0.0),
            choosing_seconds=self._choosing(tiles) if AUTO in found else 0.0,
        )

    def _choosing(self, tiles: Mapping[tuple[int, int], Tiles]) -> float:
        """The fewest seconds that the choice takes of a load."""
        ends = [one for one in self.prepared[AUTO] if isinstance(one, ScatteredPrepared)]
        took = []
        for _ in range(_CHOICES):
            began = perf_counter()
            for one in ends:
                one.way(tiles)
            took.append(perf_counter() - began)
        return min(took)

    def _in_turn(self, ways: Sequence[str], repeats: int) -> dict[str, float]:
        """The fewest seconds of some loads by each way: whatever else a machine does only ever adds. One load after the other
        by every way, so that a busy minute is everybody's, each time in another order, since who follows a load of the same
        kind finds its bytes in a processor's caches; short loads more often."""
        samples: dict[str, list[float]] = {way: [] for way in ways}
        began = perf_counter()
        for turn in range(_MORE * repeats):
            if turn >= repeats and perf_counter() - began > _ENOUGH_S:
                break
            for way in Random(turn).sample(ways, len(ways)):
                samples[way].append(self._load(way))
        return {way: min(found) for way, found in samples.items()}

    def _foretold(self) -> dict[str, float]:
        """What the model says of each way that needs no mapped memory; one source is read after the other."""
        tiles = self.binder.tiles(self.case.request)
        found = [one.costs(tiles) for one in self.prepared[AUTO] if isinstance(one, ScatteredPrepared)]
        ways: tuple[cost.Way, ...] = ("direct", "packed", "staged")
        return {way: sum(one[way] for one in found) for way in ways if all(way in one for one in found)}

    def _own(self, way: str) -> float:
        """What the end of a way foretells of its loads, each of which goes as it would choose; nothing of mapped memory."""
        tiles = self.binder.tiles(self.case.request)
        found = [one.costs(tiles) for one in self.prepared[way] if isinstance(one, ScatteredPrepared)]
        return sum(min(one.values()) for one in found)

    def _load(self, way: str) -> float:
        transport, start = self.ends[way].transport, perf_counter()
        loading = self.binder.load(self.case.request)
        reads = [transport.read(prepared, loading.tiles) for prepared in self.prepared[way]]
        left = list(reads)
        while left := [read for read in left if transport.poll(read) is State.RUNNING]:
            sleep(self.rest_s)
        seconds = perf_counter() - start
        for read in reads:
            if read.error:
                raise MeasureError(f"{self.scatter.name}, {way}: {read.error}")
        self.bytes = loading.bytes
        moved = sum(transport.telemetry(read).bytes for read in reads)
        if moved != loading.bytes:
            raise MeasureError(f"{self.scatter.name}, {way}: {moved:,} bytes moved of {loading.bytes:,}")
        for read in reads:
            while not transport.release(read):
                sleep(self.rest_s)
        transport.notifications()
        return seconds


def verdict(found: Sequence[Cell]) -> str:
    """How good the automatic choice was."""
    judged = [cell for cell in found if cell.chosen]
    longer = f"; {len(found) - len(judged)} would take too long" if len(judged) < len(found) else ""
    if not judged:
        return "nothing was chosen: every cell would take too long"
    within = sum(cell.regret <= WITHIN for cell in judged)
    worst = max(judged, key=lambda cell: cell.regret)
    return (
        f"the choice is within {WITHIN:g} × of the best in {within} of {len(judged)} cells; "
        f"at worst {worst.regret:.2f} × ({worst.scatter}, {length_of(worst)}: {worst.chosen}){longer}"
    )


def length_of(cell: Cell) -> str:
    return f"{cell.tokens:,} tokens" if cell.tokens else "a state"


def line(cell: Cell) -> str:
    times = ", ".join(
        f"{way} {1000 * seconds:.2f} ms" + (f" (foretold {1000 * cell.foretold[way]:.2f})" if way in cell.foretold else "")
        for way, seconds in cell.seconds.items()
    )
    chosen = f"chosen {cell.chosen} {1000 * cell.chosen_seconds:.2f} ms ({cell.regret:.2f})" if cell.chosen else "none chosen"
    chosen += f", of which {1000 * cell.choosing_seconds:.3f} ms to choose" if cell.choosing_seconds else ""
    return (
        f"{cell.scatter}, {length_of(cell)}, {cell.bytes / 1e6:.1f} MB in {cell.runs:,} runs: {times}; memcpy "
        f"{1000 * cell.memcpy_seconds:.2f} ms; {chosen}; {'right' if cell.right else 'WRONG'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=("dram", "vram"), default="dram")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--staging-bytes", type=int, default=BUDGET)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    words: Any = parser.parse_args()
    done: list[Cell] = []

    def tick(cell: Cell) -> None:
        done.append(cell)
        sys.stdout.write(line(cell) + "\n")
        sys.stdout.flush()
        if words.json:
            record = Record("strategies", this_machine(device_name(words.memory)), words.repeats, done)
            words.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))

    try:
        found = cells([int(word) for word in words.tokens.split(",")], words.only, words.layers)
        run(found, words.memory, words.repeats, words.staging_bytes, words.limit_s, tick)
    except KVFerryError as error:
        sys.stderr.write(f"kvferry: {error}\n")
        sys.exit(2)
    sys.stdout.write(verdict(done) + "\n")


if __name__ == "__main__":
    main()
