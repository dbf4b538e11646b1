"""A client of the engines' API that makes references of its own: it reads no other's cache, and spoils no one's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from forging import EMPTY, forgeries
from served import Engine, engines, load, side, sides
from vllm.v1.engine import FinishReason

from kvferry.session import from_params, own_keys, to_params

pytestmark = pytest.mark.vllm

MINE, OTHERS = list(range(7, 165)), list(range(8, 166))
TOKENS = len(MINE) - 1


@contextmanager
def watched(consumer: Engine) -> Iterator[Counter[str]]:
    """What the consumer's scheduler half asks of its courier."""
    courier, asked = consumer.connector.scheduler._courier, Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("hold", "peer", "introduce", "release", "doubt"):
            patch.setattr(courier, name, partial(_noted, asked, name, getattr(courier, name)))
        yield asked


def _noted(asked: Counter[str], name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    asked[name] += 1
    return call(*arguments, **named)


def ended(consumer: Engine, name: str) -> FinishReason:
    consumer.step_until(lambda: name in consumer.outputs and name not in consumer.scheduler.requests)
    return consumer.outputs[name].finish_reason


def given(producer: Engine, name: str, prompt: list[int]) -> dict[str, Any]:
    params = producer.prefill(name, prompt)
    assert params is not None
    return params


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_ones_own_lease_with_the_blocks_of_anothers_prompt_loads_nothing(policy: str) -> None:
    """Resealed without a secret, this read the other's cache, and left it in the decode engine's under one's own prompt."""
    with engines(*sides("llama", {}, side(failure_policy=policy))) as (there, here):
        mine, others = given(there, "mine", MINE), given(there, "others", OTHERS)
        reference = from_params(mine["kvferry"], own_keys())
        forged = {**mine, "kvferry": to_params(msgspec.structs.replace(reference, blocks=others["kvferry"]["blocks"]), EMPTY)}
        before = [bytes(worker.memory) for worker in here.ranks]
        with watched(here) as asked:
            here.scheduler.add_request(here.request("forged", MINE, forged))
            assert ended(here, "forged") is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)
        assert asked == Counter()
        assert [bytes(worker.memory) for worker in here.ranks] == before
        assert here.counted["refused"] == 1
        assert here.scheduled["forged"] == (0 if policy == "fail" else len(MINE))
        assert here.moved[0]["moved"] == 0


def test_a_request_without_a_reference_finds_nothing_that_a_forged_one_left() -> None:
    with engines(*sides("llama", {}, {}, prefix_caching=True)) as (there, here):
        mine, others = given(there, "mine", MINE), given(there, "others", OTHERS)
        reference = from_params(mine["kvferry"], own_keys())
        forged = {**mine, "kvferry": to_params(msgspec.structs.replace(reference, blocks=others["kvferry"]["blocks"]), EMPTY)}
        here.scheduler.add_request(here.request("forged", MINE, forged))
        assert ended(here, "forged") is FinishReason.ERROR
        here.scheduler.add_request(here.request("plain", MINE, None))
        assert ended(here, "plain") is FinishReason.LENGTH
        assert here.scheduled["plain"] == len(MINE)


def test_of_a_thousand_forged_references_none_leads_to_a_dial_a_read_or_a_changed_block() -> None:
    with engines(*sides("llama", {}, {})) as (there, here):
        mine, others = given(there, "mine", MINE), given(there, "others", OTHERS)
        reference = from_params(mine["kvferry"], own_keys())
        before = [bytes(worker.memory) for worker in here.ranks]
        refused = 0
        with watched(here) as asked:
            for number, forged in enumerate(forgeries(mine["kvferry"], others["kvferry"], reference, 1000)):
                name = f"forged{number}"
                here.scheduler.add_request(here.request(name, MINE, {**copy.deepcopy(mine), "kvferry": forged}))
                assert ended(here, name) is FinishReason.ERROR
                refused += 1
        assert refused == here.counted["refused"] == 1000
        assert asked == Counter()
        assert [bytes(worker.memory) for worker in here.ranks] == before
        assert here.moved[0]["moved"] == 0
        load(there, here, "mine", MINE, mine)
        assert ended(here, "mine") is FinishReason.LENGTH
        assert here.counted["loaded"] == 1
