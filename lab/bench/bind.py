"""From block tables to what a transport takes, against lists of block ids in Python."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvferry.models import Side
from kvferry.plan import Binder
from kvferry.plan.rows import PreparedRows
from lab.bench.case import Case
from lab.bench.measure import REPEATS, Action, Tick, measured, silent, timed
from lab.bench.stock import RefusedError, Stock, refuse

MODEL = "qwen3-next-80b-a3b"
TOKENS = 131_072


class Bound(Struct, frozen=True):
    """Seconds to index arrays, ours and stock's, and to explicit addresses; a ratio above 1 is how much faster we are."""

    case: str
    model: str
    prefill: str
    decode: str
    order: str
    tokens: int
    seconds: float
    indices: int
    stock_seconds: float | None
    stock_indices: int | None
    stock_remark: str
    ratio_to_stock: float | None
    address_seconds: float
    address_runs: int


def cases(
    models: Sequence[str] = (MODEL, "llama-3.1-8b"),
    tokens: Sequence[int] = (TOKENS // 4, TOKENS),
    pairs: Sequence[tuple[str, str]] = (("tp=1", "tp=1"), ("tp=2", "tp=1")),
    orders: Sequence[str] = ("consecutive", "scattered"),
) -> list[Case]:
    return [
        Case(f"{model} {prefill} → {decode}, {count:,} tokens, {order}", prefill, decode, count, order, model)  # type: ignore[arg-type]
        for model in models
        for prefill, decode in pairs
        for order in orders
        for count in tokens
    ]


def run(found: Sequence[Case], repeats: int = REPEATS, tick: Tick = silent) -> list[Bound]:
    return [measure(case, repeats, tick) for case in found]


def measure(case: Case, repeats: int, tick: Tick) -> Bound:
    plan, request = case.plan(), case.request
    binder = Binder(plan)
    prepared = [PreparedRows(plan, source) for source in range(len(plan.sources))]

    def indexed() -> int:
        tiles = binder.tiles(request)
        return sum(len(rows.indices(tiles)[0]) for rows in prepared)

    actions: dict[str, Action] = {"indices": lambda: timed(indexed), "addresses": lambda: timed(lambda: binder.bind(request))}
    stock, remark = stock_of(case)
    if stock is not None:
        actions["stock"] = lambda: timed(lambda: stock.indices(request))
    rounds = measured(actions, repeats, tick)
    return Bound(
        case.name, case.shape.name, case.prefill, case.decode, case.order, case.tokens,
        rounds.median("indices"), indexed(),
        rounds.median("stock") if stock else None,
        sum(len(src) for src, _ in stock.indices(request)) if stock else None, remark,
        rounds.ratio("stock", "indices") if stock else None,
        rounds.median("addresses"), sum(len(copies) for copies in binder.bind(request).copies),
    )  # fmt: skip


def stock_of(case: Case) -> tuple[Stock | None, str]:
    """The baseline for a case where it lies in no memory, or why there is none."""
    try:
        refuse(Side.parse(case.prefill), Side.parse(case.decode), case.consumers[0].layers)
        ranks = {side.identity.rank for side in case.plan().sources}
        return Stock(case.consumers[0], [m for m in case.producers if m.identity.rank in ranks]), ""
    except RefusedError as reason:
        return None, str(reason)
