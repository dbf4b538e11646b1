"""Loads by way of staging between vLLM's own schedulers: every byte as the engine would have written it, whatever is forced."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Setup
from served import Engine, engines, side, sides
from test_connector_caches import CASE, TOKENS, cross, one
from vllm.config import KVTransferConfig

from kvferry.engines.vllm.options import buffered, read_options
from kvferry.engines.vllm.quay import rings_of, staging_around
from kvferry.errors import SessionError
from kvferry.transport import Harbour, InProcessTransport

pytestmark = pytest.mark.vllm

SMALL = 1 << 17
"""Less than most of these loads take."""

PACKED = (("strategies", ("packed",)), ("staging_bytes", SMALL))
STAGED = (("strategies", ("staged",)), ("staging_bytes", SMALL))
CASES = [
    one("llama", side(tp=1, block=64), side(tp=2)),
    one("llama", side(tp=2), side(tp=1), dtype="bfloat16"),
    one("gemma3", side(tp=2, block=64), side(tp=1)),
    one("deepseek", side(tp=1), side(tp=2), backend="CPU_MLA", dtype="bfloat16"),
    one("nemotron-h", side(tp=1, conv="SD"), side(tp=2, conv="DS", block=64), dtype="bfloat16"),
    one("granite-h-6", side(tp=2, conv="SD"), side(tp=3, conv="DS", block=64)),
    one("nemotron-h", side(pp=2), side(tp=2, block=64)),
]


def carried(engine: Engine) -> list[dict[str, int]]:
    return [dict(connector.worker._wharf.gathers.carried) for connector in engine.connectors]


@pytest.mark.parametrize("options", [PACKED, STAGED], ids=["packed", "staged"])
@pytest.mark.parametrize(CASE, CASES)
def test_every_byte_is_what_the_engine_writes_at_the_consumer(
    model: str,
    producer: dict[str, Any],
    consumer: dict[str, Any],
    both: dict[str, Any],
    options: tuple[tuple[str, Any], ...],
) -> None:
    way = options[0][1][0]
    with engines(*sides(model, producer, consumer, options=options, **both)) as (there, here):
        cross(there, here, TOKENS)
        cross(there, here, 64, "again")
        assert all(set(seen) == {way} for seen in carried(here))
        assert sum(sum(seen.values()) for seen in carried(here)) >= 2 * len(here.ranks)


def test_engines_of_one_role_have_all_of_their_staging_in_one_ring() -> None:
    with engines(
        Setup("llama", engine="P", role="kv_producer", options=PACKED),
        Setup("llama", engine="D", role="kv_consumer", tp=2, options=PACKED),
    ) as (there, here):
        cross(there, here, TOKENS)
        assert all(set(seen) == {"packed"} for seen in carried(here))
        ends = [[connector.worker._wharf.gathers for connector in engine.connectors] for engine in (there, here)]
        assert {(end.gathering.free > 0, end.landing.slots) for end in ends[0]} == {(True, 0)}
        assert {(end.gathering.free, end.landing.slots > 0) for end in ends[1]} == {(0, True)}
        assert {end._staging.storage.length for end in (*ends[0], *ends[1])} == {SMALL}


@pytest.mark.parametrize("strangers", [("producer", "consumer"), ("consumer", "producer")], ids=lambda ends: ends[0])
def test_an_end_without_staging_reads_and_is_read_by_one_that_has_it(strangers: tuple[str, str]) -> None:
    options = {strangers[0]: (("strategies", ("packed", "direct")), ("staging_bytes", SMALL)), strangers[1]: ()}
    with engines(
        Setup("llama", engine="P", tp=1, options=options["producer"]),
        Setup("llama", engine="D", tp=2, options=options["consumer"]),
    ) as (there, here):
        cross(there, here, TOKENS)


def test_a_buffer_in_host_memory_is_staging_there_and_what_is_not_mapped_is_gathered() -> None:
    asked = buffered(read_options({}), "cpu", "cuda")
    assert (asked.staging, asked.strategies) == ("host", ("mapped", "packed"))
    assert buffered(read_options({}), "cuda", "cuda") == read_options({})
    assert buffered(read_options({}), "cpu", "cpu") == read_options({})
    told = read_options({"staging": "device", "strategies": ["packed", "direct"]})
    assert buffered(told, "cpu", "cuda") == told


@pytest.mark.parametrize(("role", "slots"), [("kv_producer", (8, 0)), ("kv_consumer", (0, 8)), ("kv_both", (8, 8))])
def test_a_rank_has_the_rings_that_its_role_uses(role: Any, slots: tuple[int, int]) -> None:
    options = read_options({"strategies": ["packed"], "staging_bytes": 1 << 20})
    rings = rings_of(KVTransferConfig(kv_connector="KVFerryConnector", kv_role=role))
    made = staging_around(InProcessTransport("e", Harbour()), None, 0, options, rings)
    assert made is not None
    assert (made.gathering.free, made.landing.slots) == slots
    assert made.gathering.offer.slot * sum(slots) == 1 << 20


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"staging": "disk"}, "staging"),
        ({"staging_bytes": 1000}, "staging_bytes"),
        ({"strategies": ["packet"]}, "strategies"),
        ({"staging_byte": 1 << 20}, "did you mean staging_bytes"),
        ({"slot_s": 0}, "slot_s"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SessionError, match=said):
        read_options(wrong)
