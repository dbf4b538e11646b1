"""References that are late, crossed or damaged, legs that are aborted, engines that run short, stop or die: the text is right
or there is an error, everything held is given back, and the next request works. On real engines, over HTTP."""

from __future__ import annotations

import copy
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crossing import legs
from crossing.compare import difference
from crossing.legs import Answer, Leg, Prompt, prompt
from crossing.server import Engine, Server, ServerError
from crossing.zygote import Zygote
from fleet import Fleet, Meter, Truth, all_given_back, kill, meter, since, stopped, until

pytestmark = pytest.mark.vllm

POOL = ("--num-gpu-blocks-override=160",)
QUICK = {"greeting_s": 2.0, "read_s": 4.0}
TCP = (("UCX_TLS", "tcp,self"),)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with Zygote(folder / "logs") as zygote:
        fleet = Fleet(zygote, folder / "checkpoints")
        try:
            yield fleet
        finally:
            fleet.close()


@pytest.fixture(scope="session")
def truth() -> Truth:
    return Truth()


def llama(fleet: Fleet, which: str = "", **choices: Any) -> Engine:
    """`which` tells engines of one kind apart."""
    choices.setdefault("settings", QUICK)
    return fleet.engine("llama", environment=(("KVFERRY_TEST", which),), flags=POOL, **choices)


@pytest.fixture
def pair(fleet: Fleet) -> list[Server]:
    """Producer and consumer, llama, alike."""
    return fleet.up(llama(fleet, "P"), llama(fleet, "D"))


def hybrid(fleet: Fleet, which: str) -> Engine:
    return fleet.engine("nemotron-h", environment=(("KVFERRY_TEST", which),), flags=POOL, settings=QUICK)


PAIRS = {"llama": llama, "nemotron-h": hybrid}


@pytest.fixture(params=PAIRS)
def either_pair(request: pytest.FixtureRequest, fleet: Fleet) -> list[Server]:
    """Producer and consumer: a model that keeps tokens only, and one that keeps states too."""
    make = PAIRS[request.param]
    return fleet.up(make(fleet, "P"), make(fleet, "D"))


def reference(server: Server, tokens: Prompt) -> dict[str, Any]:
    """What the leg to P returns for its router."""
    answer = legs.prefill(server, tokens)
    assert answer.good, answer
    assert answer.params["do_remote_prefill"], answer.params
    return dict(answer.params)


def reuse_blocks(server: Server) -> None:
    """More prompts than the pool has blocks for, one wave after another."""
    answers = legs.at_once(lambda seed: legs.ask(server, prompt(500, 1000 + seed), max_new=2), range(24), 8)
    assert all(answer.good for answer in answers)


def assert_right(got: Answer, wanted: Answer) -> None:
    assert difference(0, got, wanted, "float32").why == ""


def assert_loads(server: Server, before: Meter, **counts: int) -> Meter:
    """Exactly these outcomes, and bytes if and only if something was loaded."""
    total = sum(counts.values())
    seen = since(server, before, lambda m: m.loaded + m.refused + m.failed + m.nothing >= total)
    outcomes = {name: int(getattr(seen, name)) for name in ("loaded", "refused", "failed", "nothing")}
    assert outcomes == {"loaded": 0, "refused": 0, "failed": 0, "nothing": 0, **counts}, str(seen)
    assert (seen.moved > 0) == (outcomes["loaded"] > 0), str(seen)
    assert seen.moved == seen.predicted, str(seen)
    return seen


def assert_crosses(producer: Server, consumer: Server, truth: Truth, seed: int = 77) -> None:
    """An ordinary request is loaded, every token of it but the last, and exact."""
    tokens = prompt(211, seed)
    wanted, before = truth.of(producer, tokens), meter(consumer)
    assert_right(legs.cross(producer, consumer, tokens).decode, wanted)
    assert assert_loads(consumer, before, loaded=1).tokens == len(tokens) - 1


def test_a_reference_replayed_after_its_blocks_were_reused_is_recomputed(either_pair: list[Server], truth: Truth) -> None:
    producer, consumer = either_pair
    tokens = prompt(300, 1)
    wanted, before = truth.of(producer, tokens), meter(consumer)
    params = reference(producer, tokens)
    assert_right(legs.decode(consumer, tokens, params), wanted)
    assert_loads(consumer, before, loaded=1)
    all_given_back(producer)
    reuse_blocks(producer)
    before = meter(consumer)
    assert_right(legs.decode(consumer, tokens, params), wanted)
    assert_loads(consumer, before, failed=1)
    assert_crosses(producer, consumer, truth)


def test_a_reference_whose_lease_expired_is_recomputed(fleet: Fleet, truth: Truth) -> None:
    hasty = llama(fleet, "hasty", settings={**QUICK, "lease_s": 1.0})
    producer, consumer = fleet.up(hasty, llama(fleet, "D"))
    tokens = prompt(300, 2)
    wanted, before = truth.of(producer, tokens), meter(consumer)
    params = reference(producer, tokens)
    held = until("the lease expires", lambda: meter(producer), lambda m: m.expired == 1 and not m.usage)
    assert held.released == 0
    reuse_blocks(producer)
    assert_right(legs.decode(consumer, tokens, params), wanted)
    assert_loads(consumer, before, failed=1)


def test_where_failed_loads_shall_fail_the_client_sees_an_error(fleet: Fleet, truth: Truth) -> None:
    producer, strict = fleet.up(llama(fleet, "P"), llama(fleet, "strict", policy="fail"))
    tokens, other = prompt(300, 3), prompt(200, 4)
    wanted = truth.of(producer, tokens)
    params = reference(producer, tokens)
    assert_right(legs.decode(strict, tokens, params), wanted)
    all_given_back(producer)
    reuse_blocks(producer)
    before = meter(strict)
    for sent in (tokens, other):
        answer = legs.decode(strict, sent, params)
        assert answer.status == 500, answer
        assert not answer.tokens
    assert_loads(strict, before, failed=1, refused=1)
    assert_crosses(producer, strict, truth)
    all_given_back(strict)


def test_a_reference_of_another_request_is_refused_and_stays_good_for_its_own(either_pair: list[Server], truth: Truth) -> None:
    producer, consumer = either_pair
    mine, other = prompt(300, 5), prompt(280, 6)
    wanted, wanted_other = truth.of(producer, mine), truth.of(producer, other)
    params, before = reference(producer, other), meter(consumer)
    assert_right(legs.decode(consumer, mine, params), wanted)
    assert_loads(consumer, before, refused=1)
    before = meter(consumer)
    assert_right(legs.decode(consumer, other, params), wanted_other)
    assert_loads(consumer, before, loaded=1)
    all_given_back(producer)
