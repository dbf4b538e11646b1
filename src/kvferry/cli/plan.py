"""`kvferry plan`: who reads what from whom, what it costs, and what one request moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import RenderableType
from rich.table import Table

from kvferry.cli.completion import model_names
from kvferry.cli.output import show, show_json
from kvferry.errors import SideError
from kvferry.explain.request import example_request, sized_manifests
from kvferry.models import ModelShape, Side, load_model
from kvferry.plan import Binder, Binding, Fleet, Plan, Request, Route, make_plans, routes
from kvferry.plan.explain import Cost, Read, costs, reads
from kvferry.strategy.cost import WAYS, Rates
from kvferry.strategy.forecast import USUAL, Forecast, forecasts

MAX_TOKENS = 10_000_000
MAX_RUNS = 4_000_000
CALIBRATE = "`python -m lab bench calibrate --json` in KVFerry's repository"
SIDE_SYNTAX = (
    "tp=2,pp=2[,block=16][,layout=head|token][,conv=ds|sd][,spec=0]"
    "[,kv=packed|paged|separate|transposed][,pool=layer|block][,hma=on|off]"
)


def plan_command(
    model: Annotated[
        str, typer.Option(help="A model of the zoo, or the path of a HuggingFace config.json.", autocompletion=model_names)
    ],
    prefill: Annotated[str, typer.Option(help=f"The producer, as {SIDE_SYNTAX}.")],
    decode: Annotated[str, typer.Option(help="The consumer, written likewise.")],
    tokens: Annotated[int, typer.Option(help="Prompt length of the request to show.")] = 1000,
    rates: Annotated[Path | None, typer.Option(help=f"Measured paths, as {CALIBRATE} writes them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs: docs/formats.md describes it.")] = False,
) -> None:
    """Plan and prove the transfer between two sides, and show it."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise SideError(f"--tokens {tokens}: give a prompt length from 1 to {MAX_TOKENS:,}")
    shown = Shown(load_model(model), Side.parse(prefill), Side.parse(decode), tokens, _rates(rates))
    if as_json:
        show_json(shown.document())
    else:
        show(shown.tables())


class _Calibrated(msgspec.Struct):
    rates: dict[str, Rates]


def _rates(path: Path | None) -> Mapping[str, Rates]:
    if path is None:
        return USUAL
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Calibrated)
    except (OSError, msgspec.MsgspecError) as error:
        raise SideError(f"--rates {path}: not what {CALIBRATE} writes: {error}") from None
    return {f"{rates.path}, {name}": rates for name, rates in found.rates.items()}


class Shown:
    """A pair of sides with its plans and one bound request."""

    def __init__(self, model: ModelShape, prefill: Side, decode: Side, prompt: int, rates: Mapping[str, Rates] = USUAL) -> None:
        self.model, self.prefill, self.decode, self.prompt = model, prefill, decode, prompt
        self.producers = sized_manifests(model, prefill, "prefill", prompt)
        self.consumers = sized_manifests(model, decode, "decode", prompt)
        self.fleet = Fleet(self.producers)
        self.plans: Sequence[Plan] = make_plans(self.consumers, self.fleet)
        self.routes: Sequence[Route] = routes(self.fleet, self.consumers)
        self.request: Request = example_request(self.producers[0], self.consumers[0], prompt)
        binders = [Binder.of_sessions(plan) for plan in self.plans]
        runs = sum(binder.runs(self.request) for binder in binders)
        if runs > MAX_RUNS:
            raise SideError(
                f"a prompt of {prompt:,} tokens falls into {runs:,} runs between these layouts, too many to show "
                f"({MAX_RUNS:,} at most); give fewer --tokens"
            )
        self.bindings: Sequence[Binding] = [binder.bind(self.request) for binder in binders]
        self.forecasts: Sequence[Forecast] = forecasts(self.plans, self.request, rates)

    def reads(self) -> list[Read]:
        return [read for consumer in self.consumers for read in reads(consumer, self.fleet)]

    def costs(self) -> list[tuple[Plan, Cost]]:
        return [(plan, cost) for plan in self.plans for cost in costs(plan)]

    def document(self) -> dict[str, Any]:
        """The whole of it as plain data."""
        ordinal = {m.identity.rank: i for i, m in enumerate(self.fleet.manifests)}
        return {
            "version": 1,
            "model": {"name": self.model.name, "fingerprint": self.model.fingerprint, "source": self.model.source},
            "prefill": str(self.prefill),
            "decode": str(self.decode),
            "proved": True,
            "routes": [
                {
                    "producer": ordinal[r.producer],
                    "readers": [c.ordinal for c in r.readers],
                    "teller": r.teller and r.teller.ordinal,
                }
                for r in self.routes
            ],
            "reads": [msgspec.to_builtins(r) for r in self.reads()],
            "costs": [
                {"consumer": plan.consumer.identity.rank.ordinal, **msgspec.to_builtins(cost), "source": cost.source.ordinal}
                for plan, cost in self.costs()
            ],
            "manifests": {
                "prefill": [msgspec.to_builtins(m) for m in self.fleet.manifests],
                "decode": [msgspec.to_builtins(m) for m in self.consumers],
            },
            "plans": [msgspec.to_builtins(plan) for plan in self.plans],
            "request": {
                "prompt": self.prompt,
                "tokens": self.request.tokens,
                "tables": {"prefill": dict(self.request.src), "decode": dict(self.request.dst)},
                "ranks": [_bound(plan, binding, ordinal) for plan, binding in zip(self.plans, self.bindings, strict=True)],
                "strategies": [
                    {"path": found.path, "seconds": dict(found.seconds), "chosen": found.chosen} for found in self.forecasts
                ],
            },
        }

    def tables(self) -> Iterator[RenderableType]:
        """The same for people."""
        yield (
            f"[bold]{self.model.name}[/]  {self.prefill} → {self.decode}   "
            f"{len(self.producers)} → {len(self.consumers)} ranks   [green]proved[/]"
        )
        yield _reads_table(self.reads())
        yield _routes_table(self.routes)
        yield _costs_table(self.costs())
        yield self._request_table()
        yield self._strategies_table()

    def _strategies_table(self) -> Table:
        """Of the slowest rank; scattered as the example's blocks are."""
        table = Table(
            title="milliseconds of this load by strategy, as the numbers of each path foretell; the chosen one is bold"
        )
        table.add_column("path")
        for way in WAYS:
            table.add_column(way, justify="right")
        for found in self.forecasts:
            shown = [
                (f"[bold]{1000 * found.seconds[way]:,.2f}[/]" if way == found.chosen else f"{1000 * found.seconds[way]:,.2f}")
                if way in found.seconds
                else ""
                for way in WAYS
            ]
            table.add_row(found.path, *shown)
        return table

    def _request_table(self) -> Table:
        table = Table(title=f"a prompt of {self.prompt:,} tokens: {self.request.tokens:,} loaded, the last one recomputed")
        for name in ("decode rank", "copies", "bytes moved", "useful", "useful %", "fills", "bytes filled", "not hashable"):
            table.add_column(name, justify="right")
        for plan, binding in zip(self.plans, self.bindings, strict=True):
            share = 100 * binding.useful_bytes / binding.bytes if binding.bytes else 100.0
            table.add_row(
                str(plan.consumer.identity.rank),
                f"{sum(len(c) for c in binding.copies):,}",
                f"{binding.bytes:,}",
                f"{binding.useful_bytes:,}",
                f"{share:.1f}",
                f"{len(binding.fills):,}",
                f"{binding.fills.bytes:,}",
                f"{sum(len(lost) for lost in binding.unhashable.values()):,}",
            )
        return table


def _bound(plan: Plan, binding: Binding, ordinal: dict[Any, int]) -> dict[str, Any]:
    copies = []
    for source, found in zip(plan.sources, binding.copies, strict=True):
        columns = (found.src_region, found.src_offset, found.dst_region, found.dst_offset, found.length)
        producer = np.full(len(found), ordinal[source.identity.rank], np.int64)
        copies += np.stack([producer, *columns], axis=1).tolist()
    fills = np.stack([binding.fills.region, binding.fills.offset, binding.fills.length], axis=1).tolist()
    return {
        "consumer": plan.consumer.identity.rank.ordinal,
        "copies": copies,
        "fills": fills,
        "bytes": binding.bytes,
        "useful_bytes": binding.useful_bytes,
        "unhashable": {group: lost.tolist() for group, lost in binding.unhashable.items()},
    }


def _reads_table(found: Sequence[Read]) -> Table:
    table = Table(title="who reads what from whom")
    for name in ("decode rank", "prefill rank", "layers", "parts and their slice of the global tensor"):
        table.add_column(name, justify="right" if name == "layers" else "left", no_wrap=name.endswith("rank"))
    rows: dict[tuple[str, str, int], list[str]] = {}
    for read in found:
        rows.setdefault((str(read.consumer), str(read.producer), read.layers), []).append(
            f"{' '.join(read.parts)} {read.extents}"
        )
    last = ("", "")
    for (consumer, producer, layers), slices in rows.items():
        first = (consumer, producer)
        table.add_row(
            "" if consumer == last[0] else consumer, "" if first == last else producer, str(layers), "; ".join(slices)
        )
        last = first
    return table


def _routes_table(found: Sequence[Route]) -> Table:
    table = Table(title="who is read by whom")
    for name in ("prefill rank", "read by", "told by"):
        table.add_column(name)
    for route in found:
        table.add_row(str(route.producer), "  ".join(map(str, route.readers)) or "nobody", str(route.teller or ""))
    return table


def _costs_table(found: Sequence[tuple[Plan, Cost]]) -> Table:
    table = Table(title="runs and bytes")
    columns = ("decode rank", "from", "strided runs", "runs a block", "runs of state", "bytes a token", "bytes of state")
    for name in columns:
        table.add_column(name, justify="left" if name in ("decode rank", "from") else "right")
    rows: dict[tuple[str, str], list[float]] = {}
    for plan, cost in found:
        row = rows.setdefault((str(plan.consumer.identity.rank), str(cost.source)), [0, 0, 0, 0.0, 0])
        row[0] += cost.strided_runs
        row[1 if plan.consumer.group(cost.group).tokens else 2] += cost.runs_per_block
        row[3] += cost.bytes_per_token
        row[4] += cost.bytes_per_state
    last = None
    for (consumer, source), row in rows.items():
        table.add_row("" if consumer == last else consumer, source, *(f"{value:,.0f}" if value else "" for value in row))
        last = consumer
    return table
