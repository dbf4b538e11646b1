"""What a record says: figures by arm, medians over its starts, and ratios of arms that were started in the same turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from msgspec import Struct

from lab.bench.machine import Machine
from lab.bench.plot import Bar
from lab.bench.serve.measure import (
    ALONE,
    AT_ONCE,
    BUSY,
    CONSECUTIVE,
    DECODE,
    FIRST,
    IN_ENGINE,
    PREFILL,
    RATE,
    SHUFFLED,
    read_lengths,
)
from lab.bench.serve.result import Record, Row, Run, Settings
from lab.bench.serve.stats import percentile
from lab.bench.serve.trace import Steps, steps
from lab.fleet.connectors import OURS, STOCK, Connector

FLOOR: Final = ("none", "none-64")
"""Engines alone: what they take is what everybody takes, at the better of two block sizes."""

P50, P90, P99, WORST = 0.5, 0.9, 0.99, 1.0
_SHARES: Final = {P50: "p50", P90: "p90", P99: "p99", WORST: "worst"}


@dataclass(frozen=True)
class Figure:
    """One number of a run: the `share` of a row's samples, divided by that of `over`, of the same row or of `over_row`."""

    title: str
    unit: str
    row: tuple[str, str, int]
    sample: str
    share: float = P50
    over: tuple[str, float] | None = None
    over_row: tuple[str, str, int] | None = None
    more_is_better: bool = False

    def of(self, run: Run) -> float | None:
        row = run.row(self.row)
        value = _share(row, self.sample, self.share)
        if value is None or self.over is None:
            return value
        below = _share(run.row(self.over_row) if self.over_row else row, *self.over)
        return value / below if below else None


def _share(row: Row | None, sample: str, share: float) -> float | None:
    samples = row.samples.get(sample) if row is not None else None
    if not samples:
        return None
    return median(samples) if share == P50 else percentile(samples, share)


def figures(settings: Settings) -> list[Figure]:
    many = f"{settings.at_once} × {settings.at_once_length:,}"
    start, longest = settings.lengths[0], settings.lengths[-1]
    first, later = (FIRST, CONSECUTIVE, start), (ALONE, CONSECUTIVE, start)
    out = []
    for sample, told in (("ttft", ""), (IN_ENGINE, ", in D's engine")):
        out.append(Figure(f"first request, {start:,} tokens{told}", "ms", first, sample))
        out.append(Figure(f"first request ÷ later ones{told}", "", first, sample, over=(sample, P50), over_row=later))
    for name, order, told in ((ALONE, CONSECUTIVE, ""), (ALONE, SHUFFLED, ""), (BUSY, SHUFFLED, ", D decoding")):
        for n in settings.lengths:
            out.append(_ttft(f"{n:,} tokens, {order}{told}", (name, order, n)))
            out.append(Figure(f"{n:,} tokens, {order}{told}, in D's engine", "ms", (name, order, n), IN_ENGINE))
    scattered, fresh = (ALONE, SHUFFLED, longest), (ALONE, CONSECUTIVE, longest)
    out.append(
        Figure(f"{longest:,} tokens, scattered ÷ consecutive", "", scattered, "ttft", over=("ttft", P50), over_row=fresh)
    )
    loads = (AT_ONCE, SHUFFLED, settings.at_once_length)
    out += [_ttft(f"{many} at once, {_SHARES[share]}", loads, share) for share in (P50, P90, P99)]
    out.append(Figure(f"{many} at once, in D's engine, p50", "ms", loads, IN_ENGINE))
    beside = (DECODE, SHUFFLED, settings.at_once_length)
    for sample, title, shares in (("idle", "idle", (P50, P99)), ("loaded", "during the loads", (P50, P99, WORST))):
        out += [Figure(f"decode step, {title}, {_SHARES[share]}", "ms", beside, sample, share) for share in shares]
    out.append(Figure("decode step, during the loads, worst ÷ p50", "", beside, "loaded", WORST, ("loaded", P50)))
    for share in (P50, P99, WORST):
        out.append(Figure(f"between tokens, during the loads, {_SHARES[share]}", "ms", beside, "loaded seen", share))
    rate = (RATE, SHUFFLED, settings.at_once_length)
    title = f"{settings.rate:g} requests/s"
    out += [_ttft(f"{title}, D's leg, {_SHARES[share]}", rate, share) for share in (P50, P99)]
    out += [Figure(f"{title}, both legs, {_SHARES[share]}", "ms", rate, "both legs", share) for share in (P50, P99)]
    out += [Figure(f"{title}, between tokens, {_SHARES[share]}", "ms", rate, "itl", share) for share in (P50, P99)]
    prefill = (PREFILL, SHUFFLED, settings.at_once_length)
    out.append(Figure("P's prefill, alone", "tokens/s", prefill, "alone", more_is_better=True))
    for n in read_lengths(settings):
        read, title = (PREFILL, SHUFFLED, n), f"P's prefill, prompts of {n:,} being read"
        out.append(Figure(f"{title} ÷ alone", "", read, "read", P50, ("alone", P50), more_is_better=True))
        out.append(Figure(f"{title} ÷ D not reading", "", read, "read", P50, ("hits", P50), more_is_better=True))
        decoding = f"{title}, D decoding ÷ D not reading"
        out.append(Figure(decoding, "", read, "read while decoding", P50, ("decoding", P50), more_is_better=True))
    return out


def _ttft(title: str, row: tuple[str, str, int], share: float = P50) -> Figure:
    return Figure(title, "ms", row, "ttft", share)


class Shown(Struct, frozen=True):
    """One figure in one mode: every arm's median over starts, and ratios to stock at its best and to the floor."""

    title: str
    unit: str
    mode: str
    values: dict[str, float]
    starts: dict[str, list[float]]
    times_faster_than_stock: dict[str, float]
    times_the_floor: dict[str, float]


def _carried_by(connector: Connector, runs: Sequence[Run]) -> list[str]:
    """The arms with this connector, whatever its settings."""
    return list(dict.fromkeys(run.arm for run in runs if run.connector.get("kv_connector") == connector.kind))


class Agreement(Struct, frozen=True):
    """Prompts whose first tokens are those of the arm without a connector, of those that both answered; and how many unlike
    answers that arm gave, since a model that always says the same agrees with anything. KVFerry's engines compute a prompt's
    last token in a step of its own, and are compared with an engine that does too, where there is one: batches of other shapes
    round differently."""

    arm: str
    mode: str
    same: int
    prompts: int
    unlike: int


class Summary(Struct, frozen=True):
    bench: str
    arms: list[str]
    ours: list[str]
    machine: Machine
    settings: Settings
    figures: list[Shown]
    agreements: list[Agreement]
    scatter: dict[str, float]
    moved: dict[str, dict[str, int]]
    phases: dict[str, dict[str, float]]
    steps: list[Steps]
    void: list[str]
    errors: list[str]


def summary(record: Record) -> Summary:
    modes = list(dict.fromkeys(run.mode for run in record.runs))
    shown = [_shown(figure, mode, record.runs) for mode in modes for figure in figures(record.settings)]
    return Summary(
        record.bench,
        list(dict.fromkeys(run.arm for run in record.runs)),
        _carried_by(OURS, record.runs),
        record.machine,
        record.settings,
        [it for it in shown if it.values],
        _agreements(record.runs),
        _least_scatter(record.runs),
        _moved(record.runs),
        _phases(record.runs),
        steps(record.runs, _traced_rows(record.settings)),
        _void(record.runs),
        [f"{_named(run)}: {run.error}" for run in record.runs if run.error],
    )


def _traced_rows(settings: Settings) -> list[tuple[str, str, int]]:
    """Those whose steps are looked at: loads of scattered blocks, many at once and one at a time."""
    alone = [(name, SHUFFLED, n) for name in (ALONE, BUSY) for n in settings.lengths]
    return [(AT_ONCE, SHUFFLED, settings.at_once_length), *alone]


def _void(runs: Sequence[Run]) -> list[str]:
    """Rows that do not count, those of one start with one reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for row in run.rows:
            if row.void:
                found.setdefault((_named(run), row.void), []).append(f"{row.name} {row.order} {row.tokens}")
    return [f"{run}: {', '.join(rows)}: {reason}" for (run, reason), rows in found.items()]


def _named(run: Run) -> str:
    return f"{run.arm} {run.mode} {run.start + 1}"


def _shown(figure: Figure, mode: str, runs: Sequence[Run]) -> Shown:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        value = figure.of(run) if run.mode == mode else None
        if value is not None:
            found.setdefault(run.arm, {})[run.start] = value
    best = max if figure.more_is_better else min
    stock = _best([found[arm] for arm in _carried_by(STOCK, runs) if arm in found], best)
    floor = _best([found[arm] for arm in FLOOR if arm in found], best)
    ours = {arm: found[arm] for arm in _carried_by(OURS, runs) if arm in found}
    faster = {arm: _ratio(by_start, stock, figure.more_is_better) for arm, by_start in ours.items()}
    slower = {arm: _ratio(floor, by_start, figure.more_is_better) for arm, by_start in found.items() if arm not in FLOOR}
    return Shown(
        figure.title,
        figure.unit,
        mode,
        {arm: median(by_start.values()) for arm, by_start in found.items()},
        {arm: [by_start[start] for start in sorted(by_start)] for arm, by_start in found.items()},
        {arm: ratio for arm, ratio in faster.items() if ratio is not None},
        {arm: ratio for arm, ratio in slower.items() if ratio is not None},
    )


def _best(arms: Sequence[Mapping[int, float]], best: Callable[[list[float]], float]) -> dict[int, float]:
    """Of each start the best of several arms."""
    starts = {start for arm in arms for start in arm}
    return {start: best([arm[start] for arm in arms if start in arm]) for start in starts}


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float], more_is_better: bool) -> float | None:
    """How many times better ours is: the median over the starts that have both."""
    ratios = [theirs[start] / ours[start] for start in ours if start in theirs and ours[start] and theirs[start]]
    if not ratios:
        return None
    return median(1 / ratio if more_is_better else ratio for ratio in ratios)


def _agreements(runs: Sequence[Run]) -> list[Agreement]:
    wanted: dict[tuple[str, str], list[int]] = {}
    parted: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        if run.arm in FLOOR:
            for key, tokens in run.answers.items():
                wanted.setdefault((run.mode, key), tokens)
                parted.setdefault((run.mode, key), run.parted.get(key, tokens))
    ours = _carried_by(OURS, runs)
    counted: dict[tuple[str, str], list[bool]] = {}
    for run in runs:
        like = parted if run.arm in ours else wanted
        for key, tokens in run.answers.items():
            if run.arm not in FLOOR and (run.mode, key) in like:
                counted.setdefault((run.arm, run.mode), []).append(tokens == like[run.mode, key])
    unlike = {mode: len({tuple(tokens) for (of, _), tokens in wanted.items() if of == mode}) for mode, _ in wanted}
    return [Agreement(arm, mode, sum(same), len(same), unlike[mode]) for (arm, mode), same in counted.items()]


def _least_scatter(runs: Sequence[Run]) -> dict[str, float]:
    out: dict[str, float] = {}
    for run in runs:
        for row in run.rows:
            if row.order == SHUFFLED and row.scatter >= 0 and run.arm not in FLOOR:
                out[run.arm] = min(row.scatter, out.get(run.arm, 1.0))
    return out


def _moved(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """Over all starts, by arm: bytes, the pieces they came in, and prompt tokens by where they came from."""
    out: dict[str, dict[str, int]] = {}
    for run in runs:
        of = out.setdefault(run.arm, {"bytes": 0, "pieces": 0, "from P": 0, "computed at D": 0})
        for row in run.rows:
            of["bytes"] += row.moved_bytes
            of["pieces"] += row.pieces
            of["from P"] += row.from_peer
            of["computed at D"] += row.computed
    return out


def _phases(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, seconds in run.phases.items():
            found.setdefault(f"{run.arm} {run.mode}", {}).setdefault(name, []).append(seconds)
    return {arm: {name: median(seconds) for name, seconds in names.items()} for arm, names in found.items()}


def table(found: Summary, mode: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of one mode."""
    shown = [it for it in found.figures if it.mode == mode]
    arms = [arm for arm in found.arms if any(arm in it.values for it in shown)]
    faster = [arm for arm in found.arms if any(arm in it.times_faster_than_stock for it in shown)]
    floored = [arm for arm in found.ours if any(arm in it.times_the_floor for it in shown)]
    head = ("", "unit", *arms, *(f"stock ÷ {arm}" for arm in faster), *(f"{arm} ÷ none" for arm in floored))
    rows = [
        (
            it.title,
            it.unit,
            *(_number(it.values.get(arm)) for arm in arms),
            *(_number(it.times_faster_than_stock.get(arm)) for arm in faster),
            *(_number(it.times_the_floor.get(arm)) for arm in floored),
        )
        for it in shown
    ]
    return head, rows


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def remarks(found: Summary) -> list[str]:
    """What a reader must know to believe the table."""
    shuffled = (
        "Free lists were shuffled by a patch for measuring: a server that has run for hours hands out blocks in no order."
    )
    paired = "Ratios are of arms started in the same turn, stock at its better block size; times are D's, to the first token."
    out = [f"{shuffled} {paired}"]
    if found.scatter:
        least = ", ".join(f"{arm} {ratio:.2f}" for arm, ratio in found.scatter.items())
        out.append(f"Runs per block after sorting, of the request whose blocks lay closest: {least}.")
    for arm, of in found.moved.items():
        if of["bytes"]:
            each = of["bytes"] / of["pieces"] if of["pieces"] else 0
            out.append(
                f"{arm}: {of['bytes'] / 1e9:,.2f} GB moved in {of['pieces']:,} pieces ({each / 1024:,.0f} KiB each); "
                f"{of['from P']:,} prompt tokens came from P, {of['computed at D']:,} were computed at D."
            )
    for it in found.agreements:
        told = f"{it.same} of {it.prompts} answers begin as without a connector, where {it.unlike} are unlike"
        out.append(f"{it.arm}, {it.mode}: {told}.")
    out += [f"void: {it}" for it in found.void]
    out += [f"failed: {it}" for it in found.errors]
    return out


_PICTURED: Final = {("ttft", P50), ("both legs", P50), ("idle", P50), ("loaded", P99), ("loaded seen", P99)}


def bars(found: Summary) -> list[Bar]:
    """How many times faster than stock: what most requests wait for, and what those that decode beside them nearly all do not
    wait longer for."""
    pictured = {it.title for it in figures(found.settings) if (it.sample, it.share) in _PICTURED and it.row[0] != FIRST}
    modes = {it.mode for it in found.figures}
    return [
        Bar(it.title if len(modes) == 1 else f"{it.title} ({it.mode})", arm, ratio)
        for it in found.figures
        for arm, ratio in it.times_faster_than_stock.items()
        if it.title in pictured and it.unit == "ms"
    ]
