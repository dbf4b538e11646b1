"""`python -m lab bench serve`: real vLLM engines with each connector in turn, as a table, JSON and a picture."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.cli.output import show, show_json
from kvferry.errors import MeasureError
from kvferry.up.device import Device, found_device
from lab.bench import page
from lab.bench.machine import this_machine
from lab.bench.plot import svg
from lab.bench.serve import report
from lab.bench.serve.arms import ARMS, chosen, defined
from lab.bench.serve.engine import EAGER, MODES
from lab.bench.serve.measure import IN_TURNS, ROWS
from lab.bench.serve.models import SHAPES
from lab.bench.serve.models import model as found_model
from lab.bench.serve.result import Record, Run, Settings, merged, read, refuse_unlike, write
from lab.bench.serve.runner import Order, Watcher, check, left, run
from lab.bench.serve.trace import table
from lab.fleet.device import device_name
from lab.fleet.zygote import Start


@dataclass(frozen=True)
class Usual:
    """What a device is asked for where nothing else is said."""

    model: str
    lengths: str
    at_once: int
    at_once_length: int
    kv_cache_bytes: str
    rate: float


USUAL: Final = {
    Device.CPU: Usual("tiny-llama", "257,1025", 8, 257, "64M", 4.0),
    Device.CUDA: Usual("llama-3.1-8b", "4000,32000", 48, 4000, "28G", 4.0),
}


def serve_command(
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}: shapes without weights; or a folder of your own.")] = "",
    arms: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(ARMS)}, or what --define defines.")] = (
        "none,stock,kvferry"
    ),
    define: Annotated[
        list[str] | None, typer.Option(help='NAME={"like": ARM, "settings": {...}, "switch_s": 0.001, ...}')
    ] = None,
    modes: Annotated[str, typer.Option(help="eager, graphs (CUDA graphs for decoding) or both, separated by a comma.")] = EAGER,
    starts: Annotated[int, typer.Option(help="How often every arm is started; arms take turns.")] = 1,
    lengths: Annotated[str, typer.Option(help="Prompt lengths handed over alone.")] = "",
    repeats: Annotated[int, typer.Option(help="Hand-overs of each length.")] = 5,
    at_once: Annotated[int, typer.Option(help="Prompts handed over at once.")] = 0,
    at_once_length: Annotated[int, typer.Option(help="Their length.")] = 0,
    rounds: Annotated[int, typer.Option(help="How often they are.")] = 2,
    beside: Annotated[int, typer.Option(help="Requests that decode on D meanwhile.")] = 4,
    output: Annotated[int, typer.Option(help="Tokens that each of them decodes.")] = 16,
    idle_s: Annotated[float, typer.Option(help="Seconds of decoding before the loads.")] = 1.5,
    prefills: Annotated[int, typer.Option(help="Prompts that P prefills while D reads from it.")] = 12,
    rate: Annotated[float, typer.Option(help="Requests a second that arrive at random.")] = 0.0,
    rate_s: Annotated[float, typer.Option(help="For how long.")] = 6.0,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(ROWS)}; all by default; or {IN_TURNS}.")] = "",
    kv_cache_bytes: Annotated[str, typer.Option(help="Of each engine, as for vLLM's --kv-cache-memory-bytes.")] = "",
    prefix_caching: Annotated[
        bool | None, typer.Option(help="vLLM's prefix cache. Without it there is no floor, and P prefills each time.")
    ] = None,
    load_format: Annotated[str, typer.Option(help="dummy: weights are made up even where the folder has some.")] = "",
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for every engine, like --engine-flag=--swap=0.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: what vLLM would find.")] = "",
    start: Annotated[str, typer.Option(help="fork: engines share imports. spawn: each imports vLLM itself.")] = "fork",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    budget_s: Annotated[float, typer.Option(help="Start no arm that would probably end later than this.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Keep results here after every row; starts it holds are not run.")] = None,
    add: Annotated[list[Path] | None, typer.Option(help="Show the runs of this file too; may be repeated.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the engines' logs in this folder.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record where steps of the engines spend their time; show it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw how many times faster than stock, as an SVG file.")] = None,
) -> None:
    """Hand requests over between real vLLM engines: with KVFerry, with vLLM's own connector, and with nothing to move.

    Needs vLLM in the Python that runs this. With --starts 0 only what --out and --add hold is shown."""
    where = Device(_one_of(device, [it.value for it in Device], "--device")) if device else found_device()
    usual = USUAL[where]
    folder = logs or Path(tempfile.mkdtemp(prefix="kvferry-serve-"))
    try:
        served = found_model(model or usual.model, folder / "models")
        if load_format == "dummy":
            served = replace(served, weights=False)
        settings = Settings(
            model=served.name,
            device=where.value,
            dtype=served.dtype,
            lengths=_lengths(lengths or usual.lengths),
            repeats=repeats,
            at_once=at_once or usual.at_once,
            at_once_length=at_once_length or usual.at_once_length,
            rounds=rounds,
            beside=beside,
            output=output,
            idle_s=idle_s,
            prefills=prefills,
            rate=rate or usual.rate,
            rate_s=rate_s,
            kv_cache_bytes=kv_cache_bytes or usual.kv_cache_bytes,
            prefix_caching=served.prefix_caching if prefix_caching is None else prefix_caching,
            seed=seed,
            traced=trace,
            warmed=True,
        )
        known = dict(ARMS)
        for text in define or []:
            arm = defined(text, known)
            known[arm.name] = arm
        order = Order(
            served,
            chosen(arms, known),
            tuple(_one_of(it.strip(), MODES, "--modes") for it in modes.split(",")),
            starts,
            where,
            Start(_one_of(start, [it.value for it in Start], "--start")),
            tuple(it.strip() for it in only.split(",")) if only else ROWS,
            tuple(engine_flag or ()),
            budget_s,
        )
        others = [read(path) for path in add or []]
        record = _record(out, settings, where)
        if starts:
            check(order, settings)
            _measure(order, record, folder, out)
    finally:
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)
    _show(report.summary(merged([*([record] if record.runs or not others else []), *others])), as_json, plot, trace)
    if any(it.error for it in record.runs):
        raise typer.Exit(1)


def _record(out: Path | None, settings: Settings, device: Device) -> Record:
    if out is not None and out.exists():
        found = read(out)
        refuse_unlike(found.settings, settings)
        return found
    return Record(this_machine(device_name(device)), settings, [])


def _measure(order: Order, record: Record, folder: Path, out: Path | None) -> None:
    def save() -> None:
        if out is not None:
            write(out, record)

    save()
    with _progress(len(left(order, record))) as (told, finished):
        run(order, record, folder / "logs", Watcher(told, finished, save))


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[Run], None]]]:
    """A bar on standard error where somebody watches, and lines where nobody does: what is done, and what each start took."""
    console = Console(stderr=True, soft_wrap=True)
    began = monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("", total=total)

        def told(what: str) -> None:
            progress.update(bar, description=what)
            if progress.disable:
                console.print(f"{monotonic() - began:7.1f} s  {what}", markup=False, highlight=False)

        def finished(ended: Run) -> None:
            progress.advance(bar)
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in ended.phases.items())
            state = "failed" if ended.error else f"{sum(bool(row.void) for row in ended.rows)} void rows"
            line = f"{ended.arm} {ended.mode} {ended.start + 1}: {sum(ended.phases.values()):.1f} s, {state} ({phases})"
            console.print(f"{monotonic() - began:7.1f} s  {line}", markup=False, highlight=False)

        yield told, finished


def _show(found: report.Summary, as_json: bool, plot: Path | None, trace: bool) -> None:
    if plot is not None:
        try:
            plot.write_text(svg("bench serve: times faster than vLLM's own connector", report.bars(found)), "utf-8")
        except OSError as error:
            raise MeasureError(f"--plot {plot}: cannot be written: {error.strerror}") from None
    if as_json:
        show_json(found)
        return
    items: list[RenderableType] = []
    for mode in dict.fromkeys(it.mode for it in found.figures):
        head, rows = report.table(found, mode)
        shown = Table(title=f"bench serve: {found.settings.model}, {mode}, medians over starts")
        for i, name in enumerate(head):
            shown.add_column(name, justify="right" if i > 1 else "left")
        for row in rows:
            shown.add_row(*row)
        items.append(shown)
    items += _steps(found) if trace else []
    show([*items, *(Text(it) for it in report.remarks(found)), Text(page.described(found.machine))])


def _steps(found: report.Summary) -> list[RenderableType]:
    if not found.steps:
        return [Text("No steps were recorded: run what is to be looked at with --trace.")]
    items: list[RenderableType] = []
    for arm, mode in dict.fromkeys((it.arm, it.mode) for it in found.steps):
        head, rows = table([it for it in found.steps if (it.arm, it.mode, it.shown) == (arm, mode, True)])
        shown = Table(title=f"{arm}, {mode}: where steps spend their time; parts are means, counts are of all steps")
        for i, name in enumerate(head):
            shown.add_column(name, justify="right" if i else "left", no_wrap=not i)
        for row in rows:
            shown.add_row(*row)
        items.append(shown)
    return items


def _lengths(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 9 for word in words):
        raise MeasureError(f"--lengths {text}: give numbers of tokens separated by commas, like 4000,32000")
    return tuple(map(int, words))


def _one_of(value: str, choices: Sequence[str], option: str) -> str:
    if value not in choices:
        raise MeasureError(f"{option} {value}: choose {' or '.join(choices)}")
    return value
