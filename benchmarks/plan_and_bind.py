"""How long planning, proving and binding take, as ratios to named baselines measured in the same run.

    python benchmarks/plan_and_bind.py [--json]

*blocks in Python* is the usual way: block ids as Python lists, one address computed per block and region in a loop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvferry.explain.request import block_tables, blocks_needed
from kvferry.models import Side, load_model, manifests
from kvferry.plan import Binder, Plan, Request, make_plan
from kvferry.plan.rows import PreparedRows
from kvferry.strided import spread

MODEL = "qwen3-next-80b-a3b"
TOKENS = 131_072
REPEATS = 15


def planned(prefill: str, decode: str, blocks: int, *, proof: bool = True) -> Plan:
    model = load_model(MODEL)
    producers = manifests(model, Side.parse(prefill), engine="prefill", blocks=blocks)
    consumers = manifests(model, Side.parse(decode), engine="decode", blocks=blocks)
    return make_plan(consumers[0], producers, consumers, proof=proof)


def request_for(plan: Plan) -> Request:
    return Request(TOKENS, block_tables(plan.sources[0].groups, TOKENS), block_tables(plan.consumer.groups, TOKENS))


def blocks_in_python(plan: Plan, request: Request) -> list[tuple[int, int, int, int, int]]:
    """Whole tiles of the coarsest grain, one copy after the other."""
    copies = []
    for edge in plan.edges:
        grain = edge.grains[0]
        src_table, dst_table = list(request.src[edge.src_group]), list(request.dst[edge.dst_group])
        src_tokens = plan.sources[edge.source].group(edge.src_group).tokens or 1
        dst_tokens = plan.consumer.group(edge.dst_group).tokens or 1
        step = grain.tokens or 1
        last = request.tokens // step if grain.tokens else 1
        for run in grain.runs:
            src_lane, dst_lane = plan.lanes[run.src_lane], plan.lanes[run.dst_lane]
            inner = list(
                zip(
                    spread(0, [(c, s) for c, s, _ in run.repeats]).tolist(),
                    spread(0, [(c, d) for c, _, d in run.repeats]).tolist(),
                    strict=True,
                )
            )
            src_tiles = spread(0, src_lane.digits).tolist()
            dst_tiles = spread(0, dst_lane.digits).tolist()
            for tile in range(last):
                at = tile * step
                src = run.src_offset + src_table[at // src_tokens] * src_lane.block_stride + src_tiles[at % src_tokens // step]
                dst = run.dst_offset + dst_table[at // dst_tokens] * dst_lane.block_stride + dst_tiles[at % dst_tokens // step]
                for s, d in inner:
                    copies.append((run.src_region, src + s, run.dst_region, dst + d, run.length))
    return copies


def timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def ratios() -> list[dict[str, object]]:
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    small, large = (planned("tp=2", "tp=1", blocks) for blocks in (1_000, 1_000_000))
    cases["rows for 1,000,000 blocks / for 1,000 blocks"] = (lambda: PreparedRows(large, 0), lambda: PreparedRows(small, 0))
    cases["plan with proof / without"] = (
        lambda: planned("tp=2,pp=2", "tp=4", 1_000),
        lambda: planned("tp=2,pp=2", "tp=4", 1_000, proof=False),
    )
    for name, prefill, decode in (("equal sides", "tp=1", "tp=1"), ("tp 2 → 1", "tp=2", "tp=1")):
        model = load_model(MODEL)
        blocks = max(blocks_needed(manifests(model, Side.parse(s), blocks=2)[0].groups, TOKENS) for s in (prefill, decode))
        plan = planned(prefill, decode, blocks)
        request, binder = request_for(plan), Binder(plan)
        prepared = [PreparedRows(plan, source) for source in range(len(plan.sources))]
        cases[f"bind {TOKENS:,} tokens to addresses, {name} / blocks in Python"] = (
            lambda binder=binder, request=request: binder.bind(request),
            lambda plan=plan, request=request: blocks_in_python(plan, request),
        )
        cases[f"bind {TOKENS:,} tokens to indices, {name} / blocks in Python"] = (
            lambda binder=binder, request=request, prepared=prepared: [p.indices(binder.tiles(request)) for p in prepared],
            lambda plan=plan, request=request: blocks_in_python(plan, request),
        )
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    for _ in track(range(REPEATS), description="measuring", transient=True, console=Console(stderr=True)):
        for name, (ours, baseline) in cases.items():
            times[name][0].append(timed(ours))
            times[name][1].append(timed(baseline))
    return [{"what": name, "ratio": median(ours) / median(baseline)} for name, (ours, baseline) in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args().json
    found = ratios()
    if as_json:
        print(json.dumps(found))
        return
    table = Table(title=f"{MODEL}: medians of {REPEATS}, measured in turn")
    table.add_column("time of / time of")
    table.add_column("ratio", justify="right")
    for row in found:
        table.add_row(str(row["what"]), f"{row['ratio']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
