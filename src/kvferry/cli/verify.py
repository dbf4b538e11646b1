"""`kvferry verify`: proves every legal pair of tensor- and pipeline-parallel sizes of the models named."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from typing import Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.cli.completion import model_names
from kvferry.cli.output import show, show_json
from kvferry.errors import MismatchError, ProofError, ScatteredError, SideError
from kvferry.models import ModelShape, Side, legal, load_model, manifests, zoo_names
from kvferry.plan import Fleet, make_plans

DEFAULT_TP = (1, 2, 4, 8)
MAX_JOBS = 256
STATUSES = ("proved", "failed", "refused", "skipped")
_WHY = {
    "refused": "refused: engines could run both sides, and their caches do not fit each other",
    "skipped": "skipped: no engine could run one of the sides",
}
SYNTHETIC_TP = {"synthetic-12": (1, 2, 3, 4, 6, 12)}


class Pair(msgspec.Struct, frozen=True):
    """One pair of sides and what became of it: one that no engine could run is skipped, one that engines could run and that is
    refused by name is refused."""

    model: str
    prefill: str
    decode: str
    status: str
    reason: str = ""
    ranks: int = 0
    runs: int = 0


def verify_command(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A zoo model or a config.json; may be repeated. Default: the zoo.", autocompletion=model_names),
    ] = None,
    tp: Annotated[
        str, typer.Option(help="Tensor-parallel sizes, e.g. 1,2,3. Default: 1,2,4,8; synthetic-12: 1,2,3,4,6,12.")
    ] = "",
    pp: Annotated[str, typer.Option(help="Pipeline-parallel sizes.")] = "1,2,3",
    prefill: Annotated[str, typer.Option(help="Further settings of the producer, e.g. block=32,layout=token.")] = "",
    decode: Annotated[str, typer.Option(help="Further settings of the consumer.")] = "",
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: one per core.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Counts and all pairs, for programs.")] = False,
) -> None:
    """Prove every legal pair; exit 1 if a proof fails, if a pair is refused, or if no pair is legal."""
    work = work_of(model, tp, pp, prefill, decode)
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise SideError(f"--jobs {jobs}: give a number from 1 to {MAX_JOBS}")
    pairs = _run(work, jobs or os.cpu_count() or 1)
    counts = Counter(pair.status for pair in pairs)
    summary = {status: counts.get(status, 0) for status in STATUSES}
    if as_json:
        show_json({**summary, "pairs": pairs})
    else:
        show(_tables(pairs, summary))
    if summary["failed"] or summary["refused"] or not summary["proved"]:
        raise typer.Exit(1)


def work_of(
    models: Sequence[str] | None, tp: str, pp: str, prefill: str, decode: str
) -> list[tuple[str, Side, tuple[Side, ...]]]:
    """What there is to prove: (model, producer side, all consumer sides)."""
    pipeline = _sizes(pp, "--pp")
    work = []
    for name in models or zoo_names():
        tensor = _sizes(tp, "--tp") if tp else SYNTHETIC_TP.get(_model(name).name, DEFAULT_TP)
        sizes = [f"tp={t},pp={p}" for t in tensor for p in pipeline]
        theirs = tuple(Side.parse(f"{size},{decode}" if decode else size) for size in sizes)
        work += [(name, Side.parse(f"{size},{prefill}" if prefill else size), theirs) for size in sizes]
    return work


def _sizes(text: str, option: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise SideError(f"{option} {text}: give sizes separated by commas, like 1,2,3") from None
    if not all(1 <= size <= 1024 for size in sizes):
        raise SideError(f"{option} {text}: sizes go from 1 to 1024")
    return sizes


def _run(work: Sequence[tuple[str, Side, tuple[Side, ...]]], jobs: int) -> list[Pair]:
    """All pairs in the order of `work`, with a progress bar where somebody watches."""
    found: dict[int, list[Pair]] = {}
    columns = (TextColumn("proving pairs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=sum(len(theirs) for _, _, theirs in work))
        for index, pairs in _results(work, jobs):
            found[index] = pairs
            progress.advance(bar, len(pairs))
    return [pair for index in range(len(work)) for pair in found[index]]


def _results(work: Sequence[tuple[str, Side, tuple[Side, ...]]], jobs: int) -> Iterable[tuple[int, list[Pair]]]:
    if jobs == 1 or len(work) == 1:
        yield from ((i, prove_pairs(*item)) for i, item in enumerate(work))
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(prove_pairs, *item): i for i, item in enumerate(work)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def prove_pairs(name: str, prefill: Side, decodes: Sequence[Side]) -> list[Pair]:
    """Every consumer side against one producer side."""
    model = _model(name)
    out = []
    for decode in decodes:
        named = (model.name, str(prefill), str(decode))
        reason = why_not(name, prefill, decode)
        if reason is not None:
            out.append(Pair(*named, "skipped", reason))
            continue
        try:
            plans = make_plans(_fleet(name, decode, "decode"), _fleet(name, prefill, "prefill"))
        except MismatchError as error:
            out.append(Pair(*named, "refused", str(error.mismatches[0])))
            continue
        except ScatteredError as error:
            out.append(Pair(*named, "refused", str(error)))
            continue
        except ProofError as error:
            out.append(Pair(*named, "failed", str(error)))
            continue
        runs = sum(len(g.runs) for plan in plans for edge in plan.edges for g in edge.grains)
        out.append(Pair(*named, "proved", ranks=len(plans), runs=runs))
    return out


def why_not(name: str, prefill: Side, decode: Side) -> str | None:
    """The reason why no engine could run one of the sides."""
    return next((r for side in (prefill, decode) if (r := legal(_model(name), side)) is not None), None)


@lru_cache(maxsize=4)
def _model(name: str) -> ModelShape:
    return load_model(name)


@lru_cache(maxsize=64)
def _fleet(name: str, side: Side, engine: str) -> Fleet:
    return Fleet(manifests(_model(name), side, engine=engine))


def _tables(pairs: Sequence[Pair], summary: dict[str, int]) -> Iterator[RenderableType]:
    table = Table(title="pairs of sides", show_footer=True)
    for name, total in (("model", "all"), *((status, f"{count:,}") for status, count in summary.items())):
        table.add_column(name, footer=total, justify="left" if name == "model" else "right")
    for name in dict.fromkeys(pair.model for pair in pairs):
        counts = Counter(pair.status for pair in pairs if pair.model == name)
        table.add_row(name, *(f"{counts.get(status, 0):,}" if counts.get(status) else "" for status in summary))
    yield table
    for status, title in _WHY.items():
        found = Counter((pair.model, pair.reason) for pair in pairs if pair.status == status)
        if found:
            reasons = Table(title=title)
            for name in ("model", "reason", "pairs"):
                reasons.add_column(name)
            for (name, reason), count in found.items():
                reasons.add_row(name, reason, f"{count:,}")
            yield reasons
    for pair in pairs:
        if pair.status == "failed":
            yield Text(f"FAILED {pair.model} {pair.prefill} → {pair.decode}: {pair.reason}", style="red")
