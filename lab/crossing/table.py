"""Outcomes side by side, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lab.crossing.cases import Case, Outcome, Verdict

COLOURS = {
    Verdict.RIGHT: "green",
    Verdict.WRONG: "bold red",
    Verdict.RECOMPUTED: "yellow",
    Verdict.FAILED: "red",
    Verdict.REFUSED: "yellow",
}


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row a case, a column a connector, in the order in which they came."""
    cases = tuple(dict.fromkeys(it.case for it in outcomes))
    connectors = tuple(dict.fromkeys(it.connector for it in outcomes))
    found = {(it.case, it.connector): it for it in outcomes}
    out = Table(title="Requests from P to D on vLLM, compared with an engine that computed everything itself", show_lines=True)
    out.add_column("model", max_width=24)
    out.add_column("P→D", no_wrap=True)
    for connector in connectors:
        out.add_column(connector, ratio=1)
    for case in cases:
        cells = [_cell(found.get((case, connector))) for connector in connectors]
        out.add_row(case.title, _pair(case), *cells)
    return out


def _pair(case: Case) -> str:
    return f"{case.producer}→{case.consumer}"


def _cell(outcome: Outcome | None) -> Text:
    if outcome is None:
        return Text("–")
    out = Text(outcome.verdict.value, style=COLOURS[outcome.verdict])
    if outcome.verdict in (Verdict.RIGHT, Verdict.WRONG):
        out.append(f" ({outcome.right} of {outcome.requests})", style="default")
    if outcome.detail:
        out.append(f"\n{outcome.detail}", style="default")
    if outcome.moved:
        out.append(f"\n{outcome.moved / 1024:,.0f} KiB moved, {outcome.from_peer} prompt tokens from P", style="dim")
    return out


def as_json(outcomes: Sequence[Outcome]) -> str:
    rows = [
        {
            "case": it.case.name,
            "model": it.case.model,
            "producer": str(it.case.producer),
            "consumer": str(it.case.consumer),
            "prompt_lengths": it.case.lengths,
            "connector": it.connector,
            "verdict": it.verdict.value,
            "detail": it.detail,
            "requests": it.requests,
            "right": it.right,
            "prompt_tokens": it.prompt_tokens,
            "prompt_tokens_from_producer": it.from_peer,
            "bytes_moved": it.moved,
        }
        for it in outcomes
    ]
    return json.dumps(rows, indent=2)
