"""Every strategy on every way for bytes to be scattered, between two processes, bytes compared; and what would be chosen.

    python -m kvferry.bench.strategies [--memory vram] [--tokens 1000,16000] [--json FILE]

needs NumPy, msgspec and NIXL alone, torch and Triton for device memory; `kvferry bench strategies` draws the picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Struct

from kvferry.bench.agents import load_nixl
from kvferry.bench.case import Case, MemoryKind, Order, placed, size_of
from kvferry.bench.machine import Record, this_machine
from kvferry.bench.measure import Tick, silent
from kvferry.bench.memory import device_name, pattern
from kvferry.bench.staging_ends import End, Held, Ready, Staged, consumer_end, holder, memory_of
from kvferry.errors import BenchError, KVFerryError
from kvferry.manifest import Attention, LayerSpec
from kvferry.manifest.kinds import LayerKind, Layout, Mamba2, Paging, Shard
from kvferry.manifest.page import Stream
from kvferry.manifest.schema import FULL, Reach
from kvferry.models import ModelShape
from kvferry.plan import Binder, Plan, Tiles
from kvferry.strategy import cost
from kvferry.strategy.scattered import ScatteredPrepared
from kvferry.transport.contract import State

TOKENS: Final = (1_000, 16_000, 128_000)
WITHIN: Final = 1.15
LIMIT: Final = 1.5

_REST_S: Final = 0.00005
"""Between two looks: the producer may need the core."""

Way = Literal["direct", "mapped", "packed", "packed (host)", "staged"]
HOST_WAYS: Final[tuple[Way, ...]] = ("direct", "mapped", "packed", "staged")
DEVICE_WAYS: Final[tuple[Way, ...]] = ("direct", "mapped", "packed", "packed (host)", "staged")


@dataclass(frozen=True)
class ConvState:
    """The convolution state of Mamba2 without its matrices: `conv.x`, `conv.B` and `conv.C`."""

    whole: Mamba2
    paging: Paging = "state"
    reach: Reach = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        return ((self.whole.streams(shard, layout)[0][0],),)


_HEADS: Final = Attention(12, 64)


@dataclass(frozen=True)
class Scatter:
    """A way for bytes to be scattered: what is cached, in how many layers, between which sides."""

    name: str
    prefill: str
    decode: str
    order: Order = "scattered"
    kind: LayerKind = _HEADS
    layers: int = 2
    tokens: int = 0

    def case(self, tokens: int) -> Case:
        return _Made(self.name, self.prefill, self.decode, tokens, self.order, scatter=self)


@dataclass(frozen=True)
class _Made(Case):
    """A case of a made-up model; a scattered request lies in a pool of twice as many blocks."""

    scatter: Scatter | None = None

    @cached_property
    def shape(self) -> ModelShape:
        if self.scatter is None:
            raise BenchError(f"{self.name}: nothing is cached")
        layers = tuple((LayerSpec(f"layers.{i}", self.scatter.kind),) for i in range(self.scatter.layers))
        return ModelShape("scattered", layers, "made up", query_heads=12)

    def plan(self, *words: Any) -> Plan:
        return super().plan(*words)


_CONV: Final = ConvState(Mamba2(126, 64, 128, 6))
SCATTERS: Final[tuple[Scatter, ...]] = (
    Scatter("consecutive blocks", "tp=1", "tp=1", "consecutive"),
    Scatter("scattered blocks", "tp=1", "tp=1"),
    Scatter("head slices, TP 1 → 2", "tp=1", "tp=2"),
    Scatter("head slices, TP 2 → 1", "tp=2", "tp=1"),
    Scatter("head slices, TP 2 → 3", "tp=2", "tp=3"),
    Scatter("token-major, TP 1 → 2", "tp=1,layout=token", "tp=2,layout=token"),
    Scatter("transposed K, 4 bytes", "tp=1,kv=transposed", "tp=1,kv=paged", kind=Attention(1, 32, "float32"), layers=1),
    Scatter("cyclic tokens", "tp=1,block=1,layout=token", "tp=1,layout=token", kind=Attention(1, 128), layers=2),
    Scatter("conv (dim, tap), TP 2 → 1", "tp=2", "tp=1", kind=_CONV, layers=24, tokens=1),
    Scatter("conv (tap, dim), TP 2 → 1", "tp=2,conv=sd", "tp=1,conv=sd", kind=_CONV, layers=24, tokens=1),
    Scatter("conv (dim, tap) → (tap, dim)", "tp=2", "tp=1,conv=sd", kind=_CONV, layers=24, tokens=1),
)


class Cell(Struct, frozen=True):
    """One request: bytes, runs, median seconds by every strategy, what the model foretells and chooses among those that need
    no mapped memory, and a plain copy of as many bytes. `right`: every byte was compared, after every strategy."""

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

    @property
    def best(self) -> float:
        return min(self.seconds[way] for way in self.foretold)

    @property
    def regret(self) -> float:
        """How many times longer than the best of those among which was chosen."""
        return self.seconds[self.chosen] / self.best


def cells(tokens: Sequence[int] = TOKENS, only: str = "") -> list[tuple[Scatter, int]]:
    found = [(s, count) for s in SCATTERS if only in s.name for count in ((s.tokens,) if s.tokens else tokens)]
    if not found:
        raise BenchError(f"--only {only}: there is none of that name; there are {', '.join(s.name for s in SCATTERS)}")
    return found


def run(found: Sequence[tuple[Scatter, int]], memory: MemoryKind, repeats: int, budget: int, tick: Tick = silent) -> list[Cell]:
    load_nixl()
    return [measure(scatter, tokens, memory, repeats, budget, tick) for scatter, tokens in found]


def measure(scatter: Scatter, tokens: int, memory: MemoryKind, repeats: int, budget: int, tick: Tick = silent) -> Cell:
    case = scatter.case(tokens)
    ways = DEVICE_WAYS if memory == "vram" else HOST_WAYS
    with holder(Staged(case, memory, budget, memory == "vram")) as ready:
        here = memory_of(size_of(case.consumers[0]), memory, shared=False)
        ends = {way: consumer_end(way, here, memory, budget) for way in ways}
        chooser = consumer_end("auto", here, memory, budget)
        try:
            return _Cell(scatter, case, memory, ready, here, ends, chooser).measure(repeats, tick)
        finally:
            for end in (*ends.values(), chooser):
                end.close()


class _Cell:
    """One consumer rank with an end for every strategy, all over the same memory."""

    def __init__(
        self, scatter: Scatter, case: Case, memory: MemoryKind, ready: Ready, here: Held, ends: Mapping[Way, End], chooser: End
    ) -> None:
        self.scatter, self.case, self.memory, self.here, self.ends = scatter, case, memory, here, ends
        producers = [placed(m, entry.address, memory) for m, entry in zip(case.producers, ready.ranks, strict=True)]
        self.plan: Plan = case.plan(producers, placed(case.consumers[0], here.memory.storage.address, memory))
        self.binder = Binder(self.plan)
        self.ranks = [side.identity.rank.ordinal for side in self.plan.sources]
        self.prepared: dict[Way, list[Any]] = {}
        for way, end in ends.items():
            metadata = [
                ready.ranks[rank].hosted if way == "packed (host)" else ready.ranks[rank].transport for rank in self.ranks
            ]
            names = [end.transport.connect(words) for words in metadata]
            self.prepared[way] = [end.transport.prepare(self.plan, source, name) for source, name in enumerate(names)]
        self.names = names
        reached = [chooser.transport.connect(ready.ranks[rank].transport) for rank in self.ranks]
        self.chosen = [chooser.transport.prepare(self.plan, source, name) for source, name in enumerate(reached)]
        self.bytes = self.runs = 0

    def measure(self, repeats: int, tick: Tick) -> Cell:
        sources = {rank: pattern(rank, size_of(self.case.producers[rank])) for rank in self.ranks}
        binding = self.binder.bind(self.case.request) if self.binder.runs(self.case.request) < 3_000_000 else None
        want = self._expected(sources)
        right = True
        for way in self.ends:
            self.here.memory.clear()
            self._load(way)
            right = right and bool(np.array_equal(self.here.memory.read(), want))
        samples: dict[Way, list[float]] = {way: [] for way in self.ends}
        for _ in range(repeats):
            for way in self.ends:
                samples[way].append(self._load(way))
            tick()
        seconds = {way: median(found) for way, found in samples.items()}
        foretold = self._foretold()
        spare = memory_of(2 * self.bytes, self.memory, shared=False)
        spare.memory.clear()
        copier = spare.memory.copier(self.bytes)
        copier()
        return Cell(
            self.scatter.name,
            0 if self.scatter.tokens else self.case.tokens,
            self.memory,
            self.bytes,
            self.runs if binding is None else sum(len(copies) for copies in binding.copies),
            {str(way): found for way, found in seconds.items()},
            {str(way): found for way, found in foretold.items()},
            min(foretold, key=lambda way: foretold[way]),
            right,
            median(copier() for _ in range(max(3, repeats))),
            self.ends["direct"].transport.path(self.names[0]).name,
        )

    def _foretold(self) -> dict[cost.Way, float]:
        """What the model says of each way that needs no mapped memory; sources are read beside each other."""
        tiles = self.binder.tiles(self.case.request)
        found = [one.costs(tiles) for one in self.chosen if isinstance(one, ScatteredPrepared)]
        ways: tuple[cost.Way, ...] = ("direct", "packed", "staged")
        return {way: sum(one[way] for one in found) for way in ways if all(way in one for one in found)}

    def _load(self, way: Way) -> float:
        transport, start = self.ends[way].transport, perf_counter()
        loading = self.binder.load(self.case.request)
        reads = [transport.read(prepared, loading.tiles) for prepared in self.prepared[way]]
        left = list(reads)
        while left := [read for read in left if transport.poll(read) is State.RUNNING]:
            sleep(_REST_S)
        seconds = perf_counter() - start
        for read in reads:
            if read.error:
                raise BenchError(f"{self.scatter.name}, {way}: {read.error}")
        found = [transport.telemetry(read) for read in reads]
        self.bytes = loading.bytes
        if way == "direct":
            self.runs = sum(t.runs for t in found)
        if sum(t.bytes for t in found) != loading.bytes:
            raise BenchError(f"{self.scatter.name}, {way}: {sum(t.bytes for t in found):,} bytes moved of {loading.bytes:,}")
        for read in reads:
            while not transport.release(read):
                transport.notifications()
        transport.notifications()
        return seconds

    def _expected(self, sources: Mapping[int, Any]) -> Any:
        """The consumer's memory after the load, byte by byte from the runs of the plan, tile by tile."""
        want = np.zeros(size_of(self.case.consumers[0]), np.uint8)
        first = self.plan.consumer.regions[0].address
        starts = [[r.address - side.regions[0].address for r in side.regions] for side in self.plan.sources]
        here = [r.address - first for r in self.plan.consumer.regions]
        for (index, level), tiles in self.binder.tiles(self.case.request).items():
            edge = self.plan.edges[index]
            source = sources[self.ranks[edge.source]]
            for run in edge.grains[level].runs:
                src = starts[edge.source][run.src_region] + run.src_offset + _places(self.plan, run.src_lane, tiles, 0)
                dst = here[run.dst_region] + run.dst_offset + _places(self.plan, run.dst_lane, tiles, 1)
                for count, there_step, here_step in run.repeats:
                    src = (src[:, None] + np.arange(count) * there_step).reshape(-1)
                    dst = (dst[:, None] + np.arange(count) * here_step).reshape(-1)
                for at in range(0, len(src), 1 << 16):
                    few = slice(at, at + (1 << 16))
                    for low in range(0, run.length, 4096):
                        within = np.arange(low, min(run.length, low + 4096))
                        for part in range(at, min(at + (1 << 16), len(src)), 1 << 10) if run.length > 64 else (at,):
                            few = slice(part, part + (1 << 10)) if run.length > 64 else slice(at, at + (1 << 16))
                            want[dst[few][:, None] + within] = source[src[few][:, None] + within]
        return want


def _places(plan: Plan, lane: int, tiles: Tiles, side: int) -> Any:
    """Where tiles lie, digit by digit: shares nothing with what is measured."""
    block, tile = (tiles.dst_block, tiles.dst_tile) if side else (tiles.src_block, tiles.src_tile)
    found = block.astype(np.int64) * plan.lanes[lane].block_stride
    rest = tile.astype(np.int64)
    for count, stride in reversed(plan.lanes[lane].digits):
        found = found + rest % count * stride
        rest = rest // count
    return found


def verdict(found: Sequence[Cell]) -> str:
    """How good the automatic choice was."""
    within = sum(cell.regret <= WITHIN for cell in found)
    worst = max(found, key=lambda cell: cell.regret)
    return (
        f"the choice is within {WITHIN:g} × of the best in {within} of {len(found)} cells; "
        f"at worst {worst.regret:.2f} × ({worst.scatter}, {worst.tokens:,} tokens: {worst.chosen})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=("dram", "vram"), default="dram")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--staging-bytes", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    words = parser.parse_args()
    try:
        chosen = cells([int(word) for word in words.tokens.split(",")], words.only)
        found: list[Cell] = []
        for scatter, tokens in chosen:
            found += run([(scatter, tokens)], words.memory, words.repeats, words.staging_bytes)
            sys.stdout.write(line(found[-1]) + "\n")
            sys.stdout.flush()
            if words.json:
                record = Record("strategies", this_machine(device_name(words.memory)), words.repeats, found)
                words.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    except KVFerryError as error:
        sys.stderr.write(f"kvferry: {error}\n")
        sys.exit(2)
    sys.stdout.write(verdict(found) + "\n")


def line(cell: Cell) -> str:
    times = ", ".join(
        f"{way} {1000 * seconds:.2f} ms" + (f" (foretold {1000 * cell.foretold[way]:.2f})" if way in cell.foretold else "")
        for way, seconds in cell.seconds.items()
    )
    what = f"{cell.tokens:,} tokens" if cell.tokens else "a state"
    return (
        f"{cell.scatter}, {what}, {cell.bytes / 1e6:.1f} MB in {cell.runs:,} runs: {times}; memcpy "
        f"{1000 * cell.memcpy_seconds:.2f} ms; chosen {cell.chosen} ({cell.regret:.2f}); "
        f"{'right' if cell.right else 'WRONG'}"
    )


if __name__ == "__main__":
    main()
