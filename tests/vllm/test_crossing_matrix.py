"""Requests between whole vLLM engines of unlike topology: the text, where the prompt came from, and what was moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleets import FLEETS, Harbour

from crossing.compare import differences
from kvferry.fleet.connectors import OURS, Connector
from kvferry.fleet.legs import cross_all
from kvferry.fleet.metrics import Counters, counted, counters
from kvferry.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

PAIRS = [(name, letters) for name, fleet in FLEETS.items() for letters in fleet.pairs]


@pytest.fixture(scope="module")
def harbour(connector: Connector, zygote: Zygote, checkpoints: Path) -> Iterator[Harbour]:
    with closing(Harbour(connector, zygote, checkpoints)) as it:
        yield it


@pytest.mark.parametrize(("name", "pair"), PAIRS, ids=["-".join(it) for it in PAIRS])
def test_a_request_prefilled_at_P_decodes_at_D_as_if_D_had_computed_it(harbour: Harbour, name: str, pair: str) -> None:
    fleet = harbour.fleet(name)
    producer, consumer = fleet.pair(pair)
    before = counters(consumer)
    crossed = cross_all(producer, consumer, fleet.prompts, in_flight=fleet.fleet.in_flight)
    found = differences(crossed, fleet.reference, fleet.dtype)
    wrong = [it.why for it in found if not it.right]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(found)} differ; D's log: {consumer.reason() or 'no error'}", *wrong])
    prompt_tokens = sum(len(it) for it in fleet.prompts)
    counts = counted(consumer, before, lambda c: c.prompt_tokens >= prompt_tokens)
    assert counts.prompt_tokens == prompt_tokens
    assert counts.cached == 0
    if fleet.connector is OURS:
        assert_ours_moved_all_but_the_last_token(counts, len(fleet.prompts), prompt_tokens)
    else:
        assert counts.from_peer >= prompt_tokens - len(fleet.prompts)
        assert counts.stock_bytes > 0


def assert_ours_moved_all_but_the_last_token(counts: Counters, requests: int, prompt_tokens: int) -> None:
    assert (counts.refused, counts.failed, counts.nothing) == (0, 0, 0)
    assert counts.loaded == requests
    assert counts.from_peer == counts.tokens_loaded == prompt_tokens - requests
    assert counts.bytes_moved == counts.bytes_predicted > 0
    assert counts.runs_moved > 0
