"""`kvferry demo`: carries requests between two processes over NIXL, with a live view, and compares every byte."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvferry.cli.completion import model_names
from kvferry.cli.output import show, show_json
from kvferry.demo import Log, Voyage, sail
from kvferry.errors import SideError
from kvferry.strategy.shared import sweep
from kvferry.transport.agent import library

MAX_REQUESTS = 100_000
MAX_TOKENS = 4096
INTRODUCTION = """\
One process holds the cache of a model as its prefill ranks would, another as its decode ranks would, in another layout.
NIXL moves requests from one to the other. Every byte that arrives is compared with what belongs there."""
RIGHT = "[green]every byte that arrived is right[/]"
WRONG = "[red]bytes are wrong[/]: this is an error of KVFerry or NIXL; please report it with the output of kvferry doctor"


def demo_command(
    model: Annotated[
        str, typer.Option(help="A model of the zoo, or the path of a HuggingFace config.json.", autocompletion=model_names)
    ] = "synthetic-12",
    prefill: Annotated[str, typer.Option(help="The producer's side.")] = "tp=2,pp=2",
    decode: Annotated[str, typer.Option(help="The consumer's side.")] = "tp=3",
    requests: Annotated[int, typer.Option(help="How many requests to carry.")] = 300,
    tokens: Annotated[int, typer.Option(help="Tokens of the longest request.")] = 160,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome, for programs.")] = False,
) -> None:
    """Move requests' caches between two processes and compare every byte; exit 1 if one is wrong."""
    if not 1 <= requests <= MAX_REQUESTS:
        raise SideError(f"--requests {requests}: give a number from 1 to {MAX_REQUESTS:,}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise SideError(f"--tokens {tokens}: give a number from 1 to {MAX_TOKENS:,}")
    library()
    sweep()
    voyage = Voyage(model, prefill, decode, requests, tokens)
    console = Console(stderr=as_json)
    title = f"{model}: prefill {prefill} → decode {decode}"
    if not as_json:
        show([INTRODUCTION])
    if console.is_terminal:
        with Live(_view(title, Log(), requests), console=console, refresh_per_second=10) as live:
            log = sail(voyage, lambda so_far: live.update(_view(title, so_far, requests)))
            live.update(_view(title, log, requests))
    else:
        log = sail(voyage, lambda _: None)
        if not as_json:
            show([_view(title, log, requests)])
    if as_json:
        show_json({**asdict(log), "paths": sorted(log.paths)})
    else:
        show([WRONG if log.wrong else RIGHT])
    if log.wrong:
        raise typer.Exit(1)


def _view(title: str, log: Log, requests: int) -> Table:
    table = Table(title=title, show_header=False, min_width=72)
    table.add_column()
    table.add_column()
    table.add_row("requests carried", f"{log.carried:,} of {requests:,}")
    table.add_row("", ProgressBar(total=requests, completed=log.carried, width=48))
    table.add_row("bytes moved", f"{log.bytes:,}")
    table.add_row("bytes compared", f"{log.compared:,}")
    table.add_row("bytes wrong", f"[{'red' if log.wrong else 'green'}]{log.wrong:,}[/]")
    if log.paths:
        table.add_row("carried by", ", ".join(sorted(log.paths)))
    return table
