"""`kvferry certify`: watches the cache-write ops of the vLLM of this machine, or shows what was seen on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.cli.output import show, show_json, write
from kvferry.engines.vllm.evidence import Evidence, recorded
from kvferry.engines.vllm.layouts import replay
from kvferry.engines.vllm.supported import page
from kvferry.errors import SideError


def certify_command(
    seen: Annotated[
        bool, typer.Option("--recorded", help="Show and replay the evidence that is kept with the package.")
    ] = False,
    backend: Annotated[list[str] | None, typer.Option(help="Watch this attention backend alone; may be repeated.")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Watch this cache layout alone, e.g. BLHNC; may be repeated.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep what was seen in this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was seen, for programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/supported.md.")] = False,
) -> None:
    """See where vLLM keeps every element of its caches, and compare with the table of layouts; exit 1 if they differ."""
    runs = recorded() if seen else (_watch(backend or (), layout or ()),)
    if save is not None:
        if seen:
            raise SideError("--save keeps what was seen on this machine; leave --recorded out")
        try:
            save.write_bytes(msgspec.json.encode(runs[0]) + b"\n")
        except OSError as error:
            raise SideError(f"--save {save}: {error.strerror or error}") from None
    if as_json:
        show_json(runs if seen else runs[0])
    elif markdown:
        write(page(runs))
    else:
        show(_tables(runs))
    if any(replay(run) or (run.troubles and not seen) for run in runs):
        raise typer.Exit(1)


def _watch(backends: Sequence[str], layouts: Sequence[str]) -> Evidence:
    try:
        from kvferry.engines.vllm.certify import LAYOUTS, certify, subjects
        from kvferry.engines.vllm.certify_states import certify_states
    except ImportError as error:
        raise SideError(
            f"vLLM is not here ({error}): run this where vLLM runs, or see with --recorded what was seen elsewhere"
        ) from None
    console = Console(stderr=True)
    chosen = [one for one in subjects() if not backends or one.backend in backends]
    unknown = [*(set(backends) - {one.backend for one in chosen}), *(set(layouts) - set(LAYOUTS))]
    if unknown:
        known = ", ".join(sorted({one.backend for one in subjects()}))
        raise SideError(f"{', '.join(unknown)}: not known here; backends: {known}; cache layouts: {', '.join(LAYOUTS)}")

    def told(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    run = certify(chosen, layouts=layouts, told=told)
    if backends or layouts:
        return run
    states, troubles = certify_states(told=told)
    return msgspec.structs.replace(run, states=states, troubles=run.troubles + troubles).sealed()


def _tables(runs: Sequence[Evidence]) -> Iterator[RenderableType]:
    for run in runs:
        table = Table(title=f"vLLM {run.vllm}, torch {run.torch}, {run.device}")
        for name in ("backend", "cache format", "cache layout", "cases"):
            table.add_column(name, justify="right" if name == "cases" else "left")
        for one in run.sightings:
            named = f"{one.backend} ({one.isa})" if one.isa else one.backend
            table.add_row(named, one.form, one.layout, f"{len(one.cases):,}" if one.cases else one.by)
        yield table
        for outcome in (*run.states, *run.moves):
            yield Text(f"{outcome.what}: {outcome.found}")
        for trouble in run.troubles:
            yield Text(f"{trouble.what}: {trouble.why}", style="red")
        for wrong in replay(run):
            yield Text(f"DIFFERS {wrong}", style="red")
        yield Text(f"digest of the run: {run.digest}")
