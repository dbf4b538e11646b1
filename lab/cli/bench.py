"""`python -m lab bench`: preparing, moving and binding against named baselines, as tables, JSON, pictures and a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.cli.completion import model_names
from kvferry.cli.output import show, show_json
from kvferry.doctor.memory import MemoryKind, device_name
from kvferry.errors import MeasureError
from lab.bench import bind, handshake, page, transfer
from lab.bench.case import PAGES, Case, Order
from lab.bench.machine import Record, this_machine
from lab.bench.measure import REPEATS, Tick
from lab.bench.plot import svg
from lab.cli.serve import serve_command
from lab.cli.strategies import calibrate_command, strategies_command

bench_app = typer.Typer(
    help="Measure KVFerry against named baselines in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

bench_app.command("serve")(serve_command)
bench_app.command("strategies")(strategies_command)
bench_app.command("calibrate")(calibrate_command)

MAX_BLOCKS = 10_000_000
MAX_REPEATS = 10_000

Prefill = Annotated[str, typer.Option(help="The producer, as for `kvferry plan`; give both sides or neither.")]
Decode = Annotated[str, typer.Option(help="The consumer.")]
Repeats = Annotated[int, typer.Option(help="Rounds; every figure is their median, every ratio that of the rounds' ratios.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw the ratios as an SVG file.")]
Orders = Annotated[str, typer.Option(help="How a request's blocks lie: consecutive, scattered or both.")]
Regions = Annotated[int, typer.Option(help="Regions of the made-up model. Default: a suite's own.")]
PageBytes = Annotated[int, typer.Option(help="Bytes of a page of 16 tokens of the made-up model.")]


@bench_app.command("handshake")
def handshake_command(
    regions: Regions = 4,
    blocks: Annotated[str, typer.Option(help="Blocks in the pool, one or several numbers.")] = "2000,200000",
    page: PageBytes = 512,
    prefill: Prefill = "",
    decode: Decode = "",
    repeats: Repeats = REPEATS,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Prepare a peer: time and memory, however many blocks there are."""
    counts = _numbers(blocks, "--blocks")
    pairs = _pair(prefill, decode)
    _repeats(repeats)
    found = (
        handshake.cases(_count(regions, "--regions"), counts, page, pairs) if pairs else handshake.cases(regions, counts, page)
    )
    with _progress("preparing", found, repeats) as tick:
        results = handshake.run(found, repeats, tick)
    _show(Record("handshake", this_machine(), repeats, results), as_json, plot)


@bench_app.command("transfer")
def transfer_command(
    model: Annotated[
        str, typer.Option(help="A model of the zoo or a config.json; with --tokens and both sides.", autocompletion=model_names)
    ] = "",
    tokens: Annotated[int, typer.Option(help="Tokens that the request loads. Default: all blocks.")] = 0,
    regions: Regions = 0,
    blocks: Annotated[int, typer.Option(help="Blocks of the request to the made-up model. Default: a suite's own.")] = 0,
    page: PageBytes = 32_768,
    order: Orders = "both",
    prefill: Prefill = "",
    decode: Decode = "",
    memory: Annotated[str, typer.Option(help="dram, or vram with torch and a CUDA device.")] = "dram",
    repeats: Repeats = REPEATS,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Move requests between two processes over NIXL, and compare every byte."""
    _repeats(repeats)
    orders, pairs = _orders(order), _pair(prefill, decode)
    if memory not in ("dram", "vram"):
        raise MeasureError(f"--memory {memory}: choose dram or vram")
    kind: MemoryKind = "vram" if memory == "vram" else "dram"
    suite = transfer.device_cases if kind == "vram" else transfer.host_cases
    sizes = {
        name: _count(value, f"--{name}")
        for name, value in (("regions", regions), ("blocks", blocks))
        if value or name in _given(regions=regions, blocks=blocks)
    }
    if model:
        found = _model_cases(model, tokens, pairs or (("tp=1", "tp=1"),), orders)
    elif pairs:
        given = {"regions": 4, "blocks": 1024} | sizes
        found = [c for p, d in pairs for c in transfer.pages_cases(p, d, given["regions"], given["blocks"], page, orders)]
    else:
        found = suite(page=page, orders=orders, **sizes)
    with _progress("moving", found, repeats) as tick:
        results = transfer.run(found, kind, repeats, tick)
    _show(Record("transfer", this_machine(device_name(kind)), repeats, results), as_json, plot)
    if not all(row.right for row in results):
        raise typer.Exit(1)


@bench_app.command("bind")
def bind_command(
    model: Annotated[
        list[str] | None, typer.Option(help="A model of the zoo or a config.json; may be repeated.", autocompletion=model_names)
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of a request, one or several numbers.")] = "32768,131072",
    order: Orders = "both",
    prefill: Prefill = "",
    decode: Decode = "",
    repeats: Repeats = REPEATS,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """From a request's block tables to index arrays and to addresses."""
    _repeats(repeats)
    given: dict[str, Any] = {"tokens": _numbers(tokens, "--tokens"), "orders": _orders(order)}
    if model:
        given["models"] = model
    if pairs := _pair(prefill, decode):
        given["pairs"] = pairs
    found = bind.cases(**given)
    with _progress("binding", found, repeats) as tick:
        results = bind.run(found, repeats, tick)
    _show(Record("bind", this_machine(), repeats, results), as_json, plot)


@bench_app.command("report")
def report_command(
    out: Annotated[Path, typer.Option(help="The page to write.")],
    gpu: Annotated[
        Path | None, typer.Option(help="What `transfer --memory vram --json` wrote on a machine with a GPU; else kept.")
    ] = None,
    repeats: Repeats = REPEATS,
) -> None:
    """Run all three with their defaults and write the page of figures."""
    _repeats(repeats)
    device = page.read_device(gpu) if gpu else None
    suites = (handshake.cases(), transfer.host_cases(), bind.cases())
    with _progress("measuring", [case for cases in suites for case in cases], repeats) as tick:
        prepared = handshake.run(suites[0], repeats, tick)
        moved = transfer.run(suites[1], "dram", repeats, tick)
        bound = bind.run(suites[2], repeats, tick)
    before = out.read_text(encoding="utf-8") if out.exists() else ""
    text = page.written(this_machine(), repeats, prepared, moved, bound, device, before)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeasureError(f"--out {out}: cannot be written: {error.strerror}") from None


def _given(**values: int) -> set[str]:
    return {name for name, value in values.items() if value}


def _model_cases(model: str, tokens: int, pairs: Sequence[tuple[str, str]], orders: Sequence[Order]) -> list[Case]:
    if model == PAGES:
        raise MeasureError(f"--model {PAGES}: the made-up model is the default; leave --model out")
    count = _count(tokens or 8_000, "--tokens")
    return [
        Case(f"{model} {prefill} → {decode}, {count:,} tokens, {order}", prefill, decode, count, order, model)
        for prefill, decode in pairs
        for order in orders
    ]


def _pair(prefill: str, decode: str) -> tuple[tuple[str, str], ...]:
    if bool(prefill) != bool(decode):
        raise MeasureError("give both --prefill and --decode, or neither")
    return ((prefill, decode),) if prefill else ()


def _orders(text: str) -> tuple[Order, ...]:
    if text == "both":
        return transfer.ORDERS
    for order in transfer.ORDERS:
        if order == text:
            return (order,)
    raise MeasureError(f"--order {text}: choose consecutive, scattered or both")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and len(word) < 12 for word in words):
        raise MeasureError(f"{option} {text}: give numbers separated by commas, like 2000,200000")
    return tuple(_count(int(word), option) for word in words)


def _count(value: int, option: str) -> int:
    if not 1 <= value <= MAX_BLOCKS:
        raise MeasureError(f"{option} {value}: give a number from 1 to {MAX_BLOCKS:,}")
    return value


def _repeats(value: int) -> None:
    if not 1 <= value <= MAX_REPEATS:
        raise MeasureError(f"--repeats {value}: give a number from 1 to {MAX_REPEATS:,}")


@contextmanager
def _progress(doing: str, cases: Sequence[Case], repeats: int) -> Iterator[Tick]:
    """A bar on standard error where somebody watches; one step is one round of one case."""
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("", total=len(cases) * (repeats + 1))
        yield lambda: progress.advance(bar)


def _show(record: Record, as_json: bool, plot: Path | None) -> None:
    if plot is not None:
        title = f"bench {record.bench}: times faster than each baseline"
        try:
            plot.write_text(svg(title, page.bars(record.results)), encoding="utf-8")
        except OSError as error:
            raise MeasureError(f"--plot {plot}: cannot be written: {error.strerror}") from None
    if as_json:
        show_json(record)
        return
    head, rows = page.table(record.results)
    table = Table(title=f"bench {record.bench}: medians of {record.repeats}, measured in turn")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    show([table, Text(page.described(record.machine))])
