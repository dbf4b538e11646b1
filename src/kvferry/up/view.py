"""A fleet as a table and a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.up.harbour import Seen
from kvferry.up.watch import Counts, State, total

COLOURS: Final = {State.STARTING: "yellow", State.SERVING: "green", State.SILENT: "red", State.ENDED: "red"}


def view(title: str, seen: Sequence[Seen], recent: Counts, notes: Sequence[str]) -> RenderableType:
    """`recent`: what decode engines have counted in the last moments."""
    table = Table(title=title, title_justify="left")
    for name, justify in (("", "left"), ("address", "left"), ("", "left"), ("requests", "right"), ("running", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for it in seen:
        engine = it.command.role != "router"
        counted = (f"{it.counts.answered:,.0f}", f"{it.counts.running:,.0f}") if engine else ("", "")
        table.add_row(it.command.name, it.command.url, Text(doing(it), style=COLOURS[it.state]), *counted)
    return Group(table, *(Text(line) for line in (moved(seen, recent), *notes) if line))


def doing(seen: Seen) -> str:
    again = f", started again {seen.restarts} times" if seen.restarts > 1 else ", started again" if seen.restarts else ""
    said = {
        State.STARTING: seen.doing or "starting",
        State.SERVING: "serving",
        State.SILENT: "does not answer",
        State.ENDED: f"ended: {seen.doing}" if seen.doing else "ended",
    }
    return said[seen.state] + again


def moved(seen: Sequence[Seen], recent: Counts) -> str:
    """What was handed over, how long that took on average, and what carries it."""
    counts = total(it.counts for it in seen if it.command.role == "decode")
    if not counts.loaded + counts.refused + counts.failed:
        return ""
    lately = f" (lately {recent.hand_over_ms:.1f})" if recent.loaded else ""
    out = [
        f"{counts.loaded:,.0f} prompts handed over",
        f"{counts.tokens:,.0f} tokens",
        f"{counts.moved:,.0f} bytes",
        f"{counts.hand_over_ms:.1f} ms each{lately}",
    ]
    computed = counts.refused + counts.failed
    out += [f"{computed:,.0f} computed instead: see the decode engine's log"] if computed else []
    by = sorted({it.carried_by for it in seen if it.carried_by})
    out += [f"by {' and '.join(by)}"] if by else []
    return ", ".join(out)


def compared(name: str, asked: Sequence[str], served: Sequence[str], alone: Sequence[str]) -> str:
    """Whether an engine that computed everything itself answers the same; `name` is the engine's."""
    for prompt, one, other in zip(asked, served, alone, strict=True):
        if one != other:
            return (
                f"DIFFERENT TEXT: {name} alone answers {prompt!r} with {other!r}; this is an error, unless the weights have "
                f"16 bits or fewer and the sides differ in size: then the two may round differently"
            )
    count = f"{len(asked)} answers" if len(asked) > 1 else "answer"
    return f"same text: {name} alone gives the same {count}, with nothing handed over"
