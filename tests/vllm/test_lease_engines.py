"""Real engines, over HTTP: two that load and lease with small caches, a queue that is longer than a lease, and requests that
share a name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shared_engines import Fleet, Truth, all_given_back, meter, since, until

from lab.crossing.compare import difference
from lab.fleet import legs
from lab.fleet.legs import Crossed, prompt
from lab.fleet.patches import STEP_SECONDS
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

LEASE_S = 12.0
SMALL = ("--num-gpu-blocks-override=64", "--max-num-batched-tokens=256")
"""Of blocks of 32 tokens: 2,048 tokens, where a request may have 1,024."""
BUSY_S = 2.5
"""A step of an engine that is busy: five of them take longer than a lease lasts that is not renewed."""


@pytest.fixture(scope="module")
def fleet(zygote: Zygote, checkpoints: Path) -> Iterator[Fleet]:
    fleet = Fleet(zygote, checkpoints)
    yield fleet
    fleet.close()


def engine(fleet: Fleet, which: str, *flags: str, step_s: float = 0.0) -> Server:
    environment = (("KVFERRY_TEST_ENGINE", which), *([(STEP_SECONDS, str(step_s))] if step_s else []))
    made = fleet.engine("llama", policy="fail", settings={"lease_s": LEASE_S}, flags=flags, environment=environment)
    return fleet.up(made)[0]


def assert_right(crossed: Crossed, truth: Truth, server: Server) -> None:
    found = difference(0, crossed.decode, truth.of(server, crossed.prompt), "float32")
    assert crossed.decode.good, crossed
    assert found.parted_at == -1, found


@pytest.mark.parametrize("engines", [2, 1], ids=["two", "its own"])
def test_engines_that_load_and_lease_answer_all_whatever_their_leases_hold(fleet: Fleet, engines: int) -> None:
    """28 prompts of 250 tokens, half of them each way: their leases would fill both caches."""
    servers = [engine(fleet, name, *SMALL) for name in "AB"[:engines]]
    before = [meter(server) for server in servers]
    prompts = [prompt(250, 9000 + seed) for seed in range(28)]
    begun = legs.at_once(lambda n: legs.prefill(servers[n % engines], prompts[n]), range(28), 28)
    answers = legs.at_once(lambda n: legs.decode(servers[(n + 1) % engines], prompts[n], begun[n].params), range(28), 28)
    truth = Truth()
    for tokens, there, here in zip(prompts, begun, answers, strict=True):
        assert_right(Crossed(tokens, there, here), truth, servers[0])
    seen = [since(server, old, lambda m: m.released == m.published) for server, old in zip(servers, before, strict=True)]
    loaded, tokens = (sum(getattr(one, name) for one in seen) for name in ("loaded", "tokens"))
    assert loaded >= engines
    assert tokens == 249 * loaded
    assert sum(one.recomputed for one in seen) == 250 * (28 - loaded)
    assert sum(one.moved for one in seen) == sum(one.predicted for one in seen) > 0
    assert not any(one.expired or one.failed for one in seen)


def test_every_request_that_waits_at_a_busy_consumer_keeps_its_lease(fleet: Fleet) -> None:
    """100 that arrive together, whose cache is full for longer than a lease lasts that is not renewed."""
    there = engine(fleet, "P", "--num-gpu-blocks-override=600")
    here = engine(fleet, "D", "--num-gpu-blocks-override=220", step_s=BUSY_S)
    assert legs.cross(there, here, prompt(40, 999), max_new=1).decode.good
    before, prompts = meter(here), [prompt(40, seed) for seed in range(100)]
    with ThreadPoolExecutor(6) as pool:
        busy = [pool.submit(legs.ask, here, prompt(1000, 500 + seed), max_new=7) for seed in range(6)]
        until("the consumer's cache is full", lambda: meter(here), lambda m: m.running >= 6)
        references = legs.at_once(lambda tokens: legs.prefill(there, tokens), prompts, 100)
        assert all(answer.params["do_remote_prefill"] for answer in references)
        answers = legs.at_once(lambda n: legs.decode(here, prompts[n], references[n].params, max_new=1), range(100), 100)
        assert all(asked.result().good for asked in busy)
    assert [answer.status for answer in answers] == [200] * 100
    seen = since(here, before, lambda m: m.loaded >= 100)
    assert (seen.loaded, seen.tokens) == (100, 3900)
    assert seen.moved == seen.predicted > 0
    until("all are released", lambda: meter(there), lambda m: m.released == m.published)


def test_requests_that_share_a_name_are_all_loaded(fleet: Fleet) -> None:
    there, here = engine(fleet, "P", "--num-gpu-blocks-override=600"), engine(fleet, "D")
    before, tokens, name = meter(here), prompt(123, 5), "again-" * 60
    references = legs.at_once(lambda _: legs.prefill(there, tokens, request_id=name), range(8), 8)
    answers = legs.at_once(lambda it: legs.decode(here, tokens, it.params, request_id=name), references, 8)
    truth = Truth()
    for reference, answer in zip(references, answers, strict=True):
        assert_right(Crossed(tokens, reference, answer), truth, there)
    assert since(here, before, lambda m: m.loaded >= 8).loaded == 8


def test_the_metrics_of_both_engines_account_for_every_request(fleet: Fleet) -> None:
    """Eight with one answer, two with two, one that is refused, and one whose reference the router drops. The lease of the
    refused one is left to its own request, which never comes."""
    there, here = engine(fleet, "P", "--num-gpu-blocks-override=600"), engine(fleet, "D")
    before = [all_given_back(there), meter(here)]
    prompts, twice = [prompt(90, 700 + seed) for seed in range(12)], {"n": 2, "temperature": 1.0, "top_k": 1}
    for number, tokens in enumerate(prompts[:10]):
        settings = twice if number >= 8 else {}
        reference = legs.prefill(there, tokens, settings=settings)
        assert legs.decode(here, tokens, reference.params, settings=settings).good
    reference = legs.prefill(there, prompts[10])
    assert legs.decode(here, prompt(90, 799), reference.params).status == 500
    assert legs.prefill(there, prompts[11]).params["do_remote_prefill"]
    at_p = all_given_back(there) - before[0]
    assert (at_p.published, at_p.released, at_p.expired, at_p.reset) == (12, 10, 2, 0)
    assert (at_p.prefill_shared, at_p.prefill_aborted, at_p.prefill_nothing) == (2, 0, 0)
    at_d = since(here, before[1], lambda m: m.loaded + m.refused >= 13)
    assert (at_d.loaded, at_d.refused, at_d.failed, at_d.nothing, at_d.aborted) == (12, 1, 0, 0, 0)
