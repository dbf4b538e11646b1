"""What a request's load would cost by each strategy, in counts that follow from plans; measures nothing, chooses nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from kvferry.plan import Binder, Plan, Request, Spans, Tiles
from kvferry.plan.rows import PreparedRows
from kvferry.strategy.forecast import detours
from kvferry.strategy.moves import Bound, Moves
from kvferry.strided import Ints

MOST_MERGED: Final = 2_000_000
"""With more runs than this in all, neighbours are not merged to count them: the count is what it is before."""


@dataclass(frozen=True)
class Load:
    """One rank's load: per source the bytes and the runs (neighbours merged if `merged`), what is filled, which tokens."""

    plan: Plan
    spans: Spans
    tiles: Mapping[tuple[int, int], Tiles]
    bytes: tuple[int, ...]
    runs: tuple[int, ...]
    merged: bool
    filled: int
    unhashable: Mapping[int, Ints]

    @classmethod
    def of(cls, plan: Plan, request: Request, most: int = MOST_MERGED) -> Load:
        binder = Binder.of_sessions(plan)
        loading = binder.load(request)
        moved, runs = [0] * len(plan.sources), [0] * len(plan.sources)
        for (i, level), tiles in loading.tiles.items():
            edge = plan.edges[i]
            for run in edge.grains[level].runs:
                repeats = prod(count for count, _, _ in run.repeats) * len(tiles.src_block)
                runs[edge.source] += repeats
                moved[edge.source] += repeats * run.length
        merged = sum(runs) <= most
        if merged:
            runs = [len(copies) for copies in binder.bind(request).copies]
        filled, lost = loading.fills.bytes, loading.unhashable
        return cls(plan, binder.spans(request), loading.tiles, tuple(moved), tuple(runs), merged, filled, lost)


@dataclass(frozen=True)
class Measure:
    """A number for every decode rank, and a word on what it means."""

    label: str
    meaning: str
    ranks: tuple[int, ...]
    unit: str = ""


@dataclass(frozen=True)
class Strategy:
    """A way for scattered bytes to travel, and what it would take here."""

    name: str
    meaning: str
    measures: tuple[Measure, ...]


def strategies(loads: Sequence[Load]) -> tuple[Strategy, ...]:
    """Every strategy that can be told from plans alone."""
    return direct(loads), mapped(loads), *by_staging(loads)


def direct(loads: Sequence[Load]) -> Strategy:
    rows = tuple(sum(_rows(load.plan, source) for source in range(len(load.plan.sources))) for load in loads)
    merged = all(load.merged for load in loads)
    return Strategy(
        "direct",
        "Every run is read by itself, straight into its place. Right where runs are few and long.",
        (
            Measure("rows prepared", "strided descriptor rows of both sides, once per pair of ranks", rows),
            Measure(
                "descriptors",
                f"contiguous runs that this request reads, neighbours {'merged' if merged else 'not yet merged'}",
                tuple(sum(load.runs) for load in loads),
            ),
            Measure("read", "bytes over the wire", tuple(sum(load.bytes) for load in loads), "B"),
            Measure("filled", "bytes zeroed by the decode rank itself", tuple(load.filled for load in loads), "B"),
        ),
    )


def mapped(loads: Sequence[Load]) -> Strategy:
    found = [[_bound(load, source) for source in range(len(load.plan.sources))] for load in loads]
    return Strategy(
        "mapped",
        "On one machine: the prefill ranks' memory is mapped once, and a load is copied out of it, on a GPU by a kernel.",
        (
            Measure("prefill ranks mapped", "once per pair of ranks", tuple(map(len, found))),
            Measure(
                "launches",
                "for this request: for every prefill rank one, or one for each form that its runs have",
                tuple(sum(len(bound.launches) for bound in sources) for sources in found),
            ),
            Measure("table", "bytes that say where tiles lie", tuple(sum(b.table.nbytes for b in s) for s in found), "B"),
            Measure("moved", "bytes", tuple(sum(load.bytes) for load in loads), "B"),
            Measure("filled", "bytes zeroed", tuple(load.filled for load in loads), "B"),
        ),
    )


def by_staging(loads: Sequence[Load]) -> tuple[Strategy, ...]:
    """Where every load can go that way; across gaps that are worth reading with a NIC."""
    found = [[detours(load.plan, source, load.tiles) for source in range(len(load.plan.sources))] for load in loads]
    ranks = [[pair for pair in sources if pair is not None] for sources in found]
    if any(len(kept) < len(sources) for kept, sources in zip(ranks, found, strict=True)):
        return ()

    def counted(way: int, name: str) -> tuple[int, ...]:
        return tuple(sum(getattr(pair[way], name) for pair in pairs) for pairs in ranks)

    filled = Measure("filled", "bytes zeroed by the decode rank itself", tuple(load.filled for load in loads), "B")
    return (
        Strategy(
            "packed",
            "On request a prefill rank gathers its bytes into staging, and they are read from there in large pieces.",
            (
                Measure("gathered", "runs that prefill ranks copy into staging", counted(0, "gathered")),
                Measure("read", "bytes over the wire, close together", counted(0, "staged"), "B"),
                Measure("scattered", "runs that the decode rank copies out of staging", counted(0, "scattered")),
                filled,
            ),
        ),
        Strategy(
            "staged",
            "Stretches that cover the runs are read into staging at the decode rank, which takes out what it needs.",
            (
                Measure("descriptors", "stretches on the wire", counted(1, "gathered")),
                Measure("read", "bytes over the wire, gaps between runs included", counted(1, "staged"), "B"),
                Measure("extracted", "runs that the decode rank copies out of staging", counted(1, "scattered")),
                filled,
            ),
        ),
    )


def _bound(load: Load, source: int) -> Bound:
    theirs, ours = load.plan.sources[source].regions, load.plan.consumer.regions
    return Moves(load.plan, source, lambda i: theirs[i].address, lambda i: ours[i].address).bind(load.tiles)


def _rows(plan: Plan, source: int) -> int:
    prepared = PreparedRows(plan, source)
    return len(prepared.src) + len(prepared.dst)
