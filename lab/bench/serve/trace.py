"""Steps of engines: which belong to what was measured, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lab.bench.serve.result import Row, Run, Trace
from lab.fleet.steps import COLUMNS, COUNTS, OTHER, PARTS, WAITING_PARTS

LOADS: Final = "loads"
IDLE: Final = "idle"
PREFILLS: Final = "prefills"
MOST: Final = 1000
"""Steps kept of a trace: the slowest. Of up to twice as many, the median is still known."""
SPLIT: Final = (*PARTS, OTHER)
NOT_RUNNING: Final = "not running"
_MS: Final = 1000.0

Marks = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """Seconds of the clock that all processes share, in which something was measured."""

    during: str
    begin: float
    end: float


def traced(side: str, marks: Marks, spans: Sequence[Span], most: int = MOST) -> list[Trace]:
    """What the steps that some part of the spans falls into say, by what went on; steps are in COLUMNS."""
    out = []
    base = min((it.begin for it in spans), default=0.0)
    at, step = marks[:, COLUMNS.index("at")], marks[:, COLUMNS.index("step")]
    for during in dict.fromkeys(it.during for it in spans):
        within = np.zeros(len(marks), bool)
        for span in spans:
            if span.during == during:
                within |= (at < span.end) & (at + step > span.begin)
        if within.any():
            out.append(_kept(side, during, marks[within], base, most))
    return out


def _kept(side: str, during: str, marks: Marks, base: float, most: int) -> Trace:
    columns = dict(zip(COLUMNS, marks.T, strict=True))
    columns["at"] = columns["at"] - base
    columns[OTHER] = columns["step"] - sum(columns[part] for part in PARTS)
    columns[NOT_RUNNING] = columns.pop("off") - sum(columns[f"{part} off"] for part in WAITING_PARTS)
    slowest = np.sort(np.argsort(-columns["step"], kind="stable")[:most])
    units = {name: values if name in COUNTS else values * _MS for name, values in columns.items()}
    told = {name: values for name, values in units.items() if np.round(values, 3).any()}
    sums = {name: round(float(values.sum()), 3) for name, values in told.items() if name != "at"}
    kept = {name: [round(it, 3) for it in values[slowest].tolist()] for name, values in told.items()}
    return Trace(side, during, len(marks), sums, kept)


def share(trace: Trace, wanted: float) -> float | None:
    """The step that `wanted` of all do not exceed, where it is among those kept."""
    kept = sorted(trace.slowest.get("step", []))
    place = max(ceil(wanted * trace.steps), 1) - 1 - (trace.steps - len(kept))
    return kept[place] if 0 <= place < len(kept) else None


class Steps(Struct, frozen=True):
    """Steps of one arm while one thing went on, over its starts. Milliseconds: `p50` and `p99` medians over starts, `mean` and
    `worst` by part, the latter of the slowest step of all. `counts`: of all steps, and of that one. `shown`: in the table,
    which is of D while nothing was loaded and while it was."""

    arm: str
    mode: str
    title: str
    shown: bool
    steps: int
    p50: float | None
    p99: float | None
    mean: dict[str, float]
    worst: dict[str, float]
    counts: dict[str, float]
    worst_counts: dict[str, float]


def steps(runs: Sequence[Run], wanted: Sequence[tuple[str, str, int]]) -> list[Steps]:
    """Of the rows wanted, void ones too: a step took as long as it took."""
    found: dict[tuple[str, str, str], list[Trace]] = {}
    for run in runs:
        for row in sorted((row for row in run.rows if row.key in wanted), key=lambda row: wanted.index(row.key)):
            for trace in row.traces:
                found.setdefault((run.arm, run.mode, _title(row, trace)), []).append(trace)
    return [_steps(*key, traces) for key, traces in found.items()]


def _title(row: Row, trace: Trace) -> str:
    return f"{row.name} {row.tokens:,}, {trace.side}, {trace.during}"


def _steps(arm: str, mode: str, title: str, traces: Sequence[Trace]) -> Steps:
    many = sum(it.steps for it in traces)
    slowest = max(traces, key=lambda it: max(it.slowest["step"]))
    place = int(np.argmax(slowest.slowest["step"]))
    sums = {name: sum(it.sums.get(name, 0.0) for it in traces) for name in ("step", *SPLIT, NOT_RUNNING, *COUNTS)}
    worst = {name: slowest.slowest[name][place] if name in slowest.slowest else 0.0 for name in sums}
    return Steps(
        arm,
        mode,
        title,
        all(it.side == "D" and it.during in (IDLE, LOADS) for it in traces),
        many,
        _middle([share(it, 0.5) for it in traces]),
        _middle([share(it, 0.99) for it in traces]),
        {name: value / many for name, value in sums.items() if name not in COUNTS},
        {name: value for name, value in worst.items() if name not in COUNTS},
        {name: sums[name] for name in COUNTS},
        {name: worst[name] for name in COUNTS},
    )


def _middle(values: Sequence[float | None]) -> float | None:
    known = [it for it in values if it is not None]
    return median(known) if len(known) == len(values) else None


def table(found: Sequence[Steps]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of one arm in one mode: for each thing that went on its steps, and beside them the slowest one."""
    head = ("", *(cell for it in found for cell in (it.title, "its worst")))
    rows = [
        ("steps", *(cell for it in found for cell in (f"{it.steps:,}", ""))),
        ("p50, ms", *(cell for it in found for cell in (_number(it.p50), ""))),
        ("p99, ms", *(cell for it in found for cell in (_number(it.p99), ""))),
    ]
    for name in ("step", *SPLIT, NOT_RUNNING):
        label = "mean, ms" if name == "step" else f"  {name}"
        rows.append((label, *(cell for it in found for cell in (_number(it.mean[name]), _number(it.worst[name])))))
    rows += [
        (name, *(f"{value:,.0f}" for it in found for value in (it.counts[name], it.worst_counts[name]))) for name in COUNTS
    ]
    return head, rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
