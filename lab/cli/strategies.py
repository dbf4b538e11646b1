"""`bench strategies`, every strategy on every way to be scattered, and `bench calibrate`, what paths cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.cli.output import show, show_json
from kvferry.doctor.memory import MemoryKind, device_name
from kvferry.errors import MeasureError
from kvferry.strategy.cost import FEW, Rates
from kvferry.strategy.staging import BUDGET, LEAST
from lab.bench import calibrate, heat, page, strategies
from lab.bench.machine import this_machine
from lab.bench.scatters import TOKENS, cells
from lab.bench.strategies import Cell, Measured

MAX_TOKENS = 1_000_000

Memory = Annotated[str, typer.Option(help="dram, or vram with torch and a CUDA device.")]
Staging = Annotated[int, typer.Option("--staging-bytes", help="What each end has for staging.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def strategies_command(
    tokens: Annotated[str, typer.Option(help="Tokens of a request, one or several numbers.")] = ",".join(map(str, TOKENS)),
    only: Annotated[str, typer.Option(help="Only what has this in its name, like `conv`.")] = "",
    layers: Annotated[int, typer.Option(help="Layers of the made-up model. Default: 2, or what a kind needs.")] = 0,
    memory: Memory = "dram",
    staging: Staging = BUDGET,
    repeats: Annotated[
        int, typer.Option(help="Loads by every strategy, at least; figures are the least.")
    ] = strategies.REPEATS,
    limit_s: Annotated[float, typer.Option(help="What would take longer is not measured.")] = strategies.LIMIT_S,
    as_json: Json = False,
    add: Annotated[
        list[Path] | None, typer.Option(help="Show what --json wrote before, and measure nothing; may be repeated.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the heat map as an SVG file.")] = None,
) -> None:
    """Move scattered bytes by every strategy between two processes, compare every byte, and judge the automatic choice."""
    if add:
        record = _merged([_read(path) for path in add])
    else:
        chosen = cells(_tokens(tokens), only, _within(layers, 0, 1024, "--layers"))
        kind = _memory(memory)
        _within(repeats, 1, 10_000, "--repeats")
        _within(staging, LEAST, 1 << 40, "--staging-bytes")
        with _progress(len(chosen)) as progress:
            bar = progress.add_task("", total=len(chosen))
            found = strategies.run(chosen, kind, repeats, staging, limit_s, lambda cell: progress.advance(bar))
        record = Measured("strategies", this_machine(device_name(kind)), repeats, tuple(found))
    found = list(record.results)
    columns = list(dict.fromkeys(way for cell in found for way in cell.seconds))
    if plot is not None:
        rows = [
            heat.Row(
                f"{cell.scatter}, {strategies.length_of(cell)}",
                cell.seconds,
                cell.chosen,
                {way: _missing(cell, way) for way in columns},
            )
            for cell in found
        ]
        try:
            plot.write_text(heat.svg(f"Scattered bytes by strategy, {found[0].memory}", columns, rows), encoding="utf-8")
        except OSError as error:
            raise MeasureError(f"--plot {plot}: cannot be written: {error.strerror}") from None
    if as_json:
        show_json(record)
        return
    show([_table(found, columns), strategies.verdict(found), Text(page.described(record.machine))])


def calibrate_command(memory: Memory = "dram", staging: Staging = BUDGET, as_json: Json = False) -> None:
    """Measure what paths on this machine cost: the numbers by which every load chooses its strategy."""
    kind = _memory(memory)
    _within(staging, LEAST, 1 << 40, "--staging-bytes")
    found = calibrate.run(kind, staging)
    if as_json:
        show_json({"version": 1, "machine": this_machine(device_name(kind)), "rates": found})
        return
    show([_rates(found)])


def _rates(found: dict[str, Rates]) -> Table:
    table = Table(title="what a load is charged with")
    names = (
        "path",
        "a round, µs",
        "a descriptor, µs",
        f"the first {FEW} beyond that, µs",
        "wire, GB/s",
        "an answer, µs",
        "a launch, µs",
        "a run, ns",
        "copying, GB/s",
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    for said, rates in found.items():
        wire, copying = rates.wire, rates.scattering
        table.add_row(
            f"{rates.path}, {said}",
            f"{1e6 * wire.round_s:.0f}",
            f"{1e6 * wire.descriptor_s:.2f}",
            f"{1e6 * wire.begin_s:.0f}",
            f"{1e-9 / wire.byte_s:,.2f}",
            f"{1e6 * wire.answer_s:.0f}",
            f"{1e6 * copying.launch_s:.0f}",
            f"{1e9 * copying.run_s:.2f}",
            f"{1e-9 / max(copying.byte_s, 1e-15):,.2f}",
        )
    return table


def _table(found: list[Cell], columns: list[str]) -> Table:
    table = Table(title="scattered bytes by strategy: milliseconds, the least of several loads")
    for i, name in enumerate(("request", "MB", "runs", *columns, "memcpy", "chosen", "× best", "bytes")):
        table.add_column(name, justify="right" if i else "left")
    for cell in found:
        table.add_row(
            f"{cell.scatter}, {strategies.length_of(cell)}",
            f"{cell.bytes / 1e6:,.1f}",
            f"{cell.runs:,}",
            *(f"{1000 * cell.seconds[way]:,.2f}" if way in cell.seconds else _missing(cell, way) for way in columns),
            f"{1000 * cell.memcpy_seconds:,.2f}",
            cell.chosen or "too long",
            f"{cell.regret:.2f}" if cell.chosen else "",
            "right" if cell.right else "WRONG",
        )
    return table


def _missing(cell: Cell, way: str) -> str:
    """Stock has nothing to show for what it refuses."""
    return "" if way == strategies.STOCK and cell.stock_remark != "too long" else "too long"


def _read(path: Path) -> Measured:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError) as error:
        raise MeasureError(f"--add {path}: not what `bench strategies --json` writes: {error}") from None
    if not found.results:
        raise MeasureError(f"--add {path}: has no results")
    return found


def _merged(records: list[Measured]) -> Measured:
    """Of one machine: times of several tell nothing about each other."""
    first, *others = records
    for other in others:
        if other.machine != first.machine:
            here, there = page.described(first.machine), page.described(other.machine)
            raise MeasureError(f"--add: these were measured on two machines: {here}; and {there}")
    return msgspec.structs.replace(first, results=tuple(cell for record in records for cell in record.results))


def _progress(count: int) -> Progress:
    """A bar on standard error where somebody watches."""
    columns = (TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def _memory(text: str) -> MemoryKind:
    if text not in ("dram", "vram"):
        raise MeasureError(f"--memory {text}: choose dram or vram")
    return "vram" if text == "vram" else "dram"


def _tokens(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 9 and 1 <= int(word) <= MAX_TOKENS for word in words):
        raise MeasureError(f"--tokens {text}: give numbers from 1 to {MAX_TOKENS:,} separated by commas, like 1000,16000")
    return [int(word) for word in words]


def _within(value: int, least: int, most: int, option: str) -> int:
    if not least <= value <= most:
        raise MeasureError(f"{option} {value}: give a number from {least:,} to {most:,}")
    return value
