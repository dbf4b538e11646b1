"""What the engines count: each request once, by what became of it, each load once, and each published lease once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from engine import Setup
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from served import Engine, engines, load, side, sides
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm.stats import FerryMetrics, FerryStats
from kvferry.logs import LINES
from kvferry.session import Ferry
from kvferry.up.watch import counts

pytestmark = pytest.mark.vllm

TOKENS = 157


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 200 for i in range(TOKENS + 1)]


def begin_prefill(engine: Engine, name: str, tokens: list[int]) -> None:
    engine.scheduler.add_request(engine.request(name, tokens, {"do_remote_decode": True}))


def answers(engine: Engine, *names: str) -> list[dict[str, Any]]:
    engine.step_until(lambda: all(name in engine.outputs for name in names))
    return [dict(engine.outputs[name].kv_transfer_params) for name in names]


def answered(engine: Engine, *names: str) -> None:
    engine.step_until(lambda: all(name in engine.outputs and name not in engine.scheduler.requests for name in names))


def abort(engine: Engine, name: str) -> None:
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def later(engine: Engine, seconds: float) -> None:
    half = engine.connector.scheduler
    clock = half._clock
    half._clock = lambda: clock() + seconds


def page(engine: Engine) -> dict[str, float]:
    """What /metrics says of all that was counted, without the labels of the engine, where it is not zero."""
    registry = CollectorRegistry()

    kinds = {Counter: partial(Counter, registry=registry), Gauge: Gauge, Histogram: Histogram}
    metrics = FerryMetrics(engine.config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(dict(engine.counted))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_total") and sample.value:
                said = "".join(f"{{{value}}}" for label, value in sample.labels.items() if label != "engine")
                found[sample.name.removeprefix("kvferry_").removesuffix("_total") + said] = sample.value
    return found


@contextmanager
def logged(words: str) -> Iterator[list[str]]:
    """The connector's lines that have these words in them."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage()) if words in record.getMessage() else None  # type: ignore[method-assign]
    logger = logging.getLogger("kvferry.vllm")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def standing(figures: dict[str, float]) -> float:
    """Leases, as the page of metrics has them: published less ended."""
    return figures["leases_published"] - sum(value for name, value in figures.items() if name.startswith("leases_ended"))


def test_every_request_is_found_in_the_metrics_of_both_engines() -> None:
    """Ten healthy ones, of which two ask for two answers; one that is aborted on each side, one that is refused, and one whose
    consumer comes too late."""
    setups = sides(
        "llama", side(blocks=256, role="kv_producer"), side(blocks=128, role="kv_consumer", failure_policy="recompute")
    )
    with logged("its lease expired") as expired, engines(*setups) as (there, here):
        healthy = [[f"cmpl-{n}-0-aaaaaa{n:02}"] for n in range(8)]
        healthy += [[f"{answer}_cmpl-{n}-0-aaaaaa{n:02}" for answer in range(2)] for n in (8, 9)]
        for number, names in enumerate(healthy):
            for name in names:
                begin_prefill(there, name, prompt(number))
            for name, params in zip(names, answers(there, *names), strict=True):
                here.scheduler.add_request(here.request(name, prompt(number), params))
            answered(here, *names)
        there.step_until(lambda: not there.scheduler.requests)
        assert page(there) == {
            "leases_published": 10,
            "leases_ended{released}": 10,
            "prefills_without_lease{shared}": 2,
        }
        begin_prefill(there, "aborted-there", prompt(20))
        abort(there, "aborted-there")
        begin_prefill(there, "aborted-here", prompt(21))
        here.scheduler.add_request(here.request("aborted-here", prompt(21), *answers(there, "aborted-here")))
        abort(here, "aborted-here")
        begin_prefill(there, "refused", prompt(22))
        (params,) = answers(there, "refused")
        here.scheduler.add_request(
            here.request("refused", prompt(22), {**params, "kvferry": {**params["kvferry"], "tokens": 3}})
        )
        answered(here, "refused")
        begin_prefill(there, "late", prompt(23))
        (params,) = answers(there, "late")
        here.idle()
        there.step_until(lambda: there.counted["released"] == 11)
        assert standing(page(there)) == 2
        later(there, 61.0)
        there.step_until(lambda: not there.scheduler.requests)
        here.scheduler.add_request(here.request("late", prompt(23), params))
        answered(here, "late")
        there.idle()
        here.idle()
        at_p, at_d = page(there), page(here)
    assert sorted(line.split()[1] for line in expired) == ["late:", "refused:"]
    assert at_p == {
        "leases_published": 13,
        "leases_ended{released}": 11,
        "leases_ended{expired}": 2,
        "prefills_without_lease{shared}": 2,
        "prefills_without_lease{aborted}": 1,
    }
    assert standing(at_p) == 0
    assert {name: value for name, value in at_d.items() if name.startswith(("loads{", "tokens"))} == {
        "loads{loaded}": 12,
        "loads{aborted}": 1,
        "loads{refused}": 1,
        "loads{failed}": 1,
        "tokens_loaded": 12 * TOKENS,
        "tokens_recomputed": TOKENS + 1 + TOKENS,
    }
    assert at_d["bytes_moved"] == at_d["bytes_predicted"] > 0


def test_a_prefill_that_leaves_nothing_is_no_lease() -> None:
    with engines(replace(Setup("llama", engine="A"), blocks=16)) as (there,):
        for number in range(3):
            begin_prefill(there, f"r{number}", prompt(number))
        begin_prefill(there, "short", prompt(4)[:1])
        found = answers(there, "r0", "r1", "r2", "short")
        kept = sum(params["do_remote_prefill"] for params in found)
        there.idle()
        assert page(there) == {"leases_published": kept, "prefills_without_lease{nothing}": 4 - kept}
        assert kept in (1, 2)


def test_a_reset_ends_what_was_published_and_nothing_else() -> None:
    with engines(Setup("llama", engine="P", role="kv_producer", blocks=64, budget=64)) as (there,):
        begin_prefill(there, "published", prompt(1)[:40])
        answers(there, "published")
        begin_prefill(there, "under way", prompt(2))
        there.step()
        there.connector.reset_cache()
        answers(there, "under way")
        there.step_until(lambda: not there.scheduler.requests)
        there.idle()
        assert page(there) == {
            "leases_published": 1,
            "leases_ended{reset}": 1,
            "prefills_without_lease{nothing}": 1,
        }


@pytest.mark.parametrize("tp", [1, 2])
def test_a_load_takes_as_long_as_on_its_slowest_rank(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a load, however many ranks make it: `kvferry up` divides by loads."""
    seconds, found = iter((2.0, 3.0)), Ferry.outcomes
    took = [replace(Setup("llama", engine="D"), tp=tp)]

    def outcomes(self: Ferry) -> list[Any]:
        return [replace(outcome, wire_s=next(seconds), posting_s=0.5) for outcome in found(self)]

    monkeypatch.setattr(Ferry, "outcomes", outcomes)
    with engines(Setup("llama", engine="P"), *took) as (there, here):
        load(there, here, "r", prompt(1), there.prefill("r", prompt(1)))
        answered(here, "r")
        figures = page(here)
        assert figures["loads{loaded}"] == 1
        assert figures["wire_seconds"] == float(tp + 1)
        assert figures["posting_seconds"] == 0.5 * tp
    text = f'kvferry_loads_total{{outcome="loaded"}} 1\nkvferry_wire_seconds_total {figures["wire_seconds"]}\n'
    assert counts(text).hand_over_ms == 1000.0 * (tp + 1)


def test_the_log_says_the_words_of_the_metrics() -> None:
    with engines(*sides("llama", {}, {})) as (there, here):
        load(there, here, "r", prompt(1), there.prefill("r", prompt(1)))
        answered(here, "r")
        there.step_until(lambda: not there.scheduler.requests)
        assert FerryStats(dict(there.counted)).reduce() == {"leases_published": 1, "leases_ended_released": 1}
        said = FerryStats(dict(here.counted)).reduce()
        assert said["loads_loaded"] == 1
        assert said["tokens_loaded"] == TOKENS
        assert said["bytes_moved"] == said["bytes_predicted"]


def test_what_is_refused_when_its_blocks_are_there_is_counted_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its producer went away between the look and the order."""
    with engines(*sides("llama", {}, side(failure_policy="recompute"))) as (there, here):
        params = there.prefill("r", prompt(1))
        courier = here.connector.scheduler._courier
        peer, asked = courier.peer, []

        def once(reference: Any) -> Any:
            met = peer(reference)
            if met is None:
                return None
            asked.append(met)
            return met if len(asked) == 1 else "gone"

        monkeypatch.setattr(courier, "peer", once)
        here.scheduler.add_request(here.request("r", prompt(1), params))
        answered(here, "r")
        assert page(here) == {"loads{refused}": 1, "tokens_recomputed": TOKENS}


def test_a_burst_of_refusals_writes_a_few_lines_and_counts_all() -> None:
    recompute = Setup("llama", engine="D", failure_policy="recompute")
    with logged("is not loaded") as said, engines(recompute) as (here,):
        names = [f"r{number}" for number in range(20)]
        for name in names:
            here.scheduler.add_request(here.request(name, prompt(1), {"do_remote_prefill": True}))
        answered(here, *names)
        assert len(said) == LINES
        assert "request r4 is not loaded: kv_transfer_params carry no reference of KVFerry" in said[-1]
        assert said[-1].endswith("are counted, not written)")
        assert page(here)["loads{refused}"] == 20
