"""`python -m lab.crossing`: the telling cases with vLLM's own connector and with ours, as one table."""

from __future__ import annotations

import shutil
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lab.crossing.cases import CASES, Case, Verdict, run
from lab.crossing.table import as_json, table
from lab.fleet.connectors import CONNECTORS, OURS
from lab.fleet.zygote import Zygote


class Only(str, Enum):
    STOCK = "stock"
    OURS = "ours"


def main(
    case: Annotated[list[str] | None, typer.Option(help="A case by its name; may be given several times.")] = None,
    only: Annotated[Only | None, typer.Option(help="One of the two connectors.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs and the checkpoints in this folder.")] = None,
) -> None:
    """Carry requests between real vLLM engines, with vLLM's own connector and with ours, and compare what they answer.

    Exits with 1 unless ours is right in every case."""
    chosen = _chosen(case or [])
    connectors = [CONNECTORS[only.value]] if only else list(CONNECTORS.values())
    folder = logs or Path(tempfile.mkdtemp(prefix="crossing-"))
    progress = Console(stderr=True)
    outcomes = []
    try:
        with Zygote(folder / "logs") as zygote, progress.status("starting vLLM") as status:
            for outcome in run(chosen, connectors, zygote, folder / "checkpoints", status.update):
                outcomes.append(outcome)
                progress.print(f"{outcome.case.name}: {outcome.connector}: {outcome.verdict.value}", highlight=False)
    finally:
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if json:
        typer.echo(as_json(outcomes))
    else:
        console.print(table(outcomes))
    if any(it.connector == OURS.name and it.verdict is not Verdict.RIGHT for it in outcomes):
        raise typer.Exit(1)


def _chosen(names: list[str]) -> tuple[Case, ...]:
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"there is no case {name!r}; choose among {', '.join(known)}")
    return tuple(case for case in CASES if not names or case.name in names)


if __name__ == "__main__":
    typer.run(main)
