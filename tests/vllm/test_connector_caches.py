"""Caches that the connector has loaded against an oracle that knows only global tensors and the engine's own write op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from byte_crossing import is_state
from engine import workers
from served import Arrival, Engine, engines, load, loaded, side, sides

pytestmark = pytest.mark.vllm

PROMPT = list(range(7, 247))
TOKENS = 157


def cross(producer: Engine, consumer: Engine, tokens: int, name: str = "r", shift: int = 0) -> Arrival:
    """One request from prefill to release; every rank of both sides reports exactly once, and nothing stays held.

    Prompts of different shifts share no prefix.
    """
    prompt = [(token + shift) % 251 for token in PROMPT[: tokens + 1]]
    before = [dict(seen) for seen in consumer.moved]
    producer.soil(3)
    consumer.soil(103)
    params = producer.prefill(name, prompt)
    assert params is not None
    assert params["kvferry"]["tokens"] == tokens
    assert producer.held > 0
    arrival = load(producer, consumer, name, prompt, params)
    assert arrival.differences() == []
    for rank, (seen, needed) in enumerate(zip(consumer.moved, arrival.needed, strict=True)):
        moved, predicted = (seen[what] - before[rank].get(what, 0) for what in ("moved", "predicted"))
        assert moved == predicted == needed > 0
    assert all((worker.memory != was).any() for worker, was in zip(consumer.ranks, arrival.before, strict=True))
    consumer.step_until(lambda: name in consumer.outputs)
    assert consumer.scheduled[name] in (1, 1 + consumer.setup.speculative)
    producer.step_until(lambda: not producer.scheduler.requests)
    for engine, what in ((producer, "sent"), (consumer, "received")):
        engine.idle()
        assert [engine.reported[what][rank, name] for rank in range(len(engine.ranks))] == [1] * len(engine.ranks)
        assert engine.held == 0
    assert not consumer.failed
    return arrival


def one(model: str, producer: dict[str, Any], consumer: dict[str, Any], **both: Any) -> Any:
    """A case that is named for how its two sides are set up."""
    said = ["_".join(f"{k}{v}" for k, v in part.items()) or "plain" for part in (producer, consumer)]
    rest = "".join(f",{k}={v}" for k, v in both.items())
    return pytest.param(model, producer, consumer, both, id=f"{model}:{said[0]}-to-{said[1]}{rest}")


RECURRENT = ("nemotron-h", "granite-h-1g", "granite-h-2g", "qwen3-next", "jamba", "lfm2")
MIXES = (
    (side(tp=1, conv="SD"), side(tp=1, conv="DS"), "float32"),
    (side(tp=1, conv="SD"), side(tp=2, conv="DS", block=64), "bfloat16"),
    (side(tp=1, conv="DS"), side(tp=2, conv="SD"), "float32"),
    (side(tp=2, conv="SD", block=64), side(tp=1, conv="SD"), "float32"),
    (side(tp=2, conv="DS"), side(tp=1, conv="DS", block=64), "bfloat16"),
)
HYBRIDS = [one(model, p, d, dtype=dtype) for model in RECURRENT for p, d, dtype in MIXES] + [
    one("granite-h-1g", side(tp=2, conv="SD"), side(tp=4, conv="DS")),
    one("granite-h-1g", side(tp=4, conv="DS"), side(tp=2, conv="SD"), dtype="bfloat16"),
    one("granite-h-6", side(tp=2, conv="SD"), side(tp=3, conv="DS", block=64)),
    one("granite-h-6", side(tp=3, conv="DS"), side(tp=2, conv="SD")),
    one("granite-h-1g", side(tp=1), side(tp=2, speculative=2)),
    one("granite-h-1g", side(tp=2, speculative=2), side(tp=1)),
]
ATTENTION = [
    one("llama", side(tp=1), side(tp=1, block=64)),
    one("llama", side(tp=1, block=64), side(tp=2)),
    one("llama", side(tp=2), side(tp=1), dtype="bfloat16"),
    one("llama", side(tp=2, block=64, kernel=32), side(tp=4, block=96, kernel=32)),
    one("llama", side(tp=4), side(tp=2)),
    one("gemma3", side(tp=1), side(tp=2, block=64), dtype="bfloat16"),
    one("gemma3", side(tp=2, block=64), side(tp=1)),
    one("gemma3", side(tp=2, hma=True), side(tp=1, hma=False)),
    one("gemma3", side(tp=1, hma=False, block=64), side(tp=2, hma=True)),
    one("deepseek", side(tp=1), side(tp=1), backend="CPU_MLA"),
    one("deepseek", side(tp=1), side(tp=2), backend="CPU_MLA", dtype="bfloat16"),
]
UNREAD = [
    one("deepseek", side(tp=2), side(tp=1), backend="CPU_MLA"),
    one("deepseek", side(tp=4), side(tp=2), backend="CPU_MLA", dtype="bfloat16"),
    one("llama-mqa", side(tp=2), side(tp=1)),
    one("llama-2kv", side(tp=4), side(tp=2, block=64)),
    one("llama-2kv", side(tp=4), side(tp=1)),
]
STAGES = [
    one("nemotron-h", side(pp=2, conv="SD"), side(conv="DS")),
    one("nemotron-h", side(conv="SD"), side(pp=2, conv="DS")),
    one("nemotron-h", side(pp=2), side(tp=2, block=64)),
    one("nemotron-h", side(tp=2), side(pp=2), dtype="bfloat16"),
    one("nemotron-h", side(pp=2, layers="1,5"), side(pp=2, layers="5,1")),
    one("nemotron-h", side(pp=2, tp=2), side(pp=3, layers="1,4,1")),
    one("gemma3", side(pp=2), side(block=64)),
    one("gemma3", side(), side(pp=2, block=64)),
    one("gemma3", side(pp=2), side(tp=2), dtype="bfloat16"),
    one("gemma3", side(pp=2, layers="1,5"), side(pp=2, layers="4,2")),
    one("gemma3", side(pp=2, layers="1,5", hma=False), side(tp=2)),
]
DRAFTERS = [
    one("llama", side(), side(tp=2, speculative=2, drafter=4)),
    one("llama", side(tp=2, speculative=2, drafter=4), side()),
    one("llama", side(tp=2), side(speculative=2, drafter=1)),
    one("llama", side(speculative=2, drafter=2), side(tp=2, speculative=2, drafter=2)),
    one("llama", side(speculative=2, drafter=4), side(tp=2, speculative=2, drafter=1)),
    one("gemma3", side(block=64), side(speculative=2, drafter=4)),
    one("granite-h-1g", side(tp=2), side(speculative=2, drafter=4)),
]
CASE = ("model", "producer", "consumer", "both")


@pytest.mark.parametrize(CASE, HYBRIDS + ATTENTION + UNREAD + STAGES + DRAFTERS)
def test_every_byte_is_what_the_engine_writes_at_the_consumer(
    model: str, producer: dict[str, Any], consumer: dict[str, Any], both: dict[str, Any]
) -> None:
    with engines(*sides(model, producer, consumer, **both)) as (there, here):
        cross(there, here, TOKENS)
        cross(there, here, 64, "again")


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX: certified where there is one")
@pytest.mark.parametrize(
    CASE,
    [
        one("deepseek", side(tp=2, block=32, backend="AMX_MLA"), side(tp=1, block=16, backend="CPU_MLA")),
        one("deepseek", side(tp=1, block=16, backend="CPU_MLA"), side(tp=2, block=64, backend="AMX_MLA")),
        one("llama", side(tp=2, isa="amx"), side(tp=1, block=64, isa="vec")),
        one("nemotron-h", side(tp=1, isa="vec"), side(tp=2, block=64, isa="amx")),
    ],
)
def test_every_byte_between_instruction_sets(
    model: str, producer: dict[str, Any], consumer: dict[str, Any], both: dict[str, Any]
) -> None:
    with engines(*sides(model, producer, consumer, dtype="bfloat16")) as (there, here):
        cross(there, here, TOKENS)


def test_stages_without_layers_of_a_group_are_among_the_cases() -> None:
    for setup in sides("nemotron-h", side(pp=2), side(pp=2, layers="1,5")) + sides("gemma3", side(pp=2, layers="1,5"), side()):
        found = [group.layer_names for worker in workers(setup, "P") for group in worker.kv_cache_config.kv_cache_groups]
        assert setup.pp == 1 or [] in found


EDGES = (1, 2, 31, 32, 33, 62, 63, 64, 65, 95, 96, 97, 127, 128, 129, 158, 159, 160, 190, 191, 192, 193)


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "hashed"])
@pytest.mark.parametrize("blocks", [(32, 32), (32, 64), (64, 32)], ids=lambda b: f"{b[0]}to{b[1]}")
def test_windows_and_blocks_at_their_edges(blocks: tuple[int, int], prefix_caching: bool) -> None:
    pair = sides("gemma3", side(block=blocks[0]), side(block=blocks[1]), prefix_caching=prefix_caching)
    with engines(*pair) as (there, here):
        for tokens in EDGES:
            cross(there, here, tokens, f"r{tokens}", shift=tokens)


@pytest.mark.parametrize("model", ["nemotron-h", "granite-h-1g"])
def test_states_at_the_edges_of_blocks(model: str) -> None:
    with engines(*sides(model, side(tp=1), side(tp=2, block=64))) as (there, here):
        for tokens in (1, 2, 3, 31, 32, 33, 63, 64, 65, 128, 191, 192, 193):
            cross(there, here, tokens, f"r{tokens}")


@pytest.mark.parametrize(
    ("model", "producer", "consumer", "both"),
    [
        one("nemotron-h", side(tp=1), side(tp=2)),
        one("nemotron-h", side(tp=2, conv="DS"), side(tp=1, prefix_caching=False)),
        one("granite-h-1g", side(tp=1, prefix_caching=False), side(tp=2, conv="DS")),
        one("granite-h-1g", side(tp=1, speculative=2), side(tp=2, speculative=2)),
        one("nemotron-h", side(tp=2), side(speculative=2, drafter=4)),
        one("qwen3-next", side(speculative=1), side(block=64)),
    ],
)
def test_states_that_prefix_caching_keeps_in_many_blocks(
    model: str, producer: dict[str, Any], consumer: dict[str, Any], both: dict[str, Any]
) -> None:
    with engines(*sides(model, producer, consumer, **both, prefix_caching=True)) as (there, here):
        modes = {
            group.kv_cache_spec.mamba_cache_mode
            for engine in (there, here)
            for group in engine.scheduler.kv_cache_config.kv_cache_groups
            if is_state(group) and engine.setup.prefix_caching
        }
        assert modes == {"align"}
        for tokens in (31, 32, 33, 128, 157):
            cross(there, here, tokens, f"r{tokens}", shift=tokens)


@pytest.mark.parametrize("model", ["llama", "gemma3", "nemotron-h"])
def test_blocks_that_the_consumer_already_has_are_not_moved(model: str) -> None:
    with engines(*sides(model, side(), side(tp=2), prefix_caching=True)) as (there, here):
        whole = cross(there, here, 128, "first")
        before = [seen["moved"] for seen in here.moved]
        prompt = PROMPT[: TOKENS + 1]
        params = there.prefill("second", prompt)
        arrival = load(there, here, "second", prompt, params, start=128)
        assert arrival.differences() == []
        for rank, needed in enumerate(arrival.needed):
            assert here.moved[rank]["moved"] - before[rank] == needed < whole.needed[rank]


@pytest.mark.parametrize(
    ("model", "producer", "consumer", "held"),
    [
        ("nemotron-h", side(), side(tp=2), 128),
        ("nemotron-h", side(block=64), side(), 128),
        ("granite-h-1g", side(tp=2), side(block=64), 128),
        ("qwen3-next", side(), side(tp=2), 128),
        ("jamba", side(), side(), 128),
    ],
)
def test_tokens_that_the_consumer_has_without_their_state_are_not_moved(
    model: str, producer: dict[str, Any], consumer: dict[str, Any], held: int
) -> None:
    """What was loaded for a prompt that ends inside a block leaves whole blocks of tokens, and no state at their end."""
    with engines(*sides(model, producer, consumer, prefix_caching=True, blocks=64)) as (there, here):
        cross(there, here, 150, "first")
        before = [seen["moved"] for seen in here.moved]
        prompt = PROMPT[: TOKENS + 1]
        params = there.prefill("second", prompt)
        arrival = load(there, here, "second", prompt, params, start=held, max_tokens=2)
        assert arrival.differences() == []
        for rank, needed in enumerate(arrival.needed):
            assert here.moved[rank]["moved"] - before[rank] == needed > 0
        here.step_until(lambda: not here.scheduler.requests)
        assert here.scheduled["second"] == 2


def test_tokens_without_their_state_are_computed_where_nothing_is_loaded() -> None:
    """All the tokens that a reference has are here, and the state after them is not."""
    with engines(*sides("nemotron-h", side(), side(), prefix_caching=True, blocks=64)) as (there, here):
        cross(there, here, 150, "first")
        prompt = PROMPT[:129]
        params = there.prefill("second", prompt)
        here.scheduler.add_request(here.request("second", prompt, params))
        here.step_until(lambda: "second" in here.outputs)
        assert here.scheduled["second"] == 129
        assert here.connector.scheduler._decodes == {}


@pytest.mark.parametrize("model", ["llama", "gemma3", "nemotron-h"])
def test_a_reference_may_be_of_the_beginning_of_a_longer_prompt(model: str) -> None:
    with engines(*sides(model, side(tp=2), side(block=64))) as (there, here):
        params = there.prefill("r", PROMPT[:100])
        arrival = load(there, here, "r", PROMPT[: TOKENS + 1], params)
        assert arrival.differences() == []
        assert here.moved[0]["moved"] == arrival.needed[0] > 0
        here.step_until(lambda: "r" in here.outputs)
        assert here.scheduled["r"] == TOKENS + 1 - 99


@pytest.mark.parametrize("model", ["gemma3", "granite-h-1g", "deepseek"])
def test_requests_that_are_loaded_at_the_same_time(model: str) -> None:
    backend = "CPU_MLA" if model == "deepseek" else None
    with engines(*sides(model, side(tp=2), side(tp=1, conv="DS"), blocks=64, backend=backend)) as (there, here):
        there.soil(3)
        here.soil(103)
        prompts = {f"r{tokens}": PROMPT[tokens % 7 : tokens % 7 + tokens + 1] for tokens in (33, 64, 100, 157)}
        references = {name: there.prefill(name, prompt) for name, prompt in prompts.items()}
        for name, prompt in prompts.items():
            here.scheduler.add_request(here.request(name, prompt, references[name], max_tokens=2))
        arrival = loaded(there, here, {name: len(prompt) - 1 for name, prompt in prompts.items()})
        assert arrival.differences() == []
        assert here.moved[0]["moved"] == arrival.needed[0]
        here.step_until(lambda: not here.scheduler.requests)
        there.step_until(lambda: not there.scheduler.requests)
        assert (here.held, there.held) == (0, 0)
        assert set(there.reported["sent"].values()) == set(here.reported["received"].values()) == {1}


def test_blocks_that_cannot_be_whole_are_not_found_by_their_hash() -> None:
    """The producer has let go of what lies before a window; the consumer would find its blocks by their hash."""
    pair = sides("gemma3", side(hma=True), side(tp=2, hma=False), prefix_caching=True)
    with engines(*pair) as (there, here):
        prompt = PROMPT[: TOKENS + 1]
        there.soil(3)
        here.soil(103)
        params = there.prefill("r", prompt)
        assert params is not None
        lost = [place for place, block in enumerate(min(params["kvferry"]["blocks"].values())) if block == -1]
        assert lost == [0, 1]
        arrival = load(there, here, "r", prompt, params, max_tokens=8)
        assert arrival.differences() == []
        here.step_until(lambda: here.scheduled["r"] > 2)
        table = here.table("r", TOKENS)[0][: TOKENS // 32]
        assert [here.pool.blocks[block].block_hash is None for block in table] == [True, True, False, False]
        again = here.request("again", prompt, None)
        assert here.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0


MODELS = ("nemotron-h", "granite-h-1g", "gemma3", "llama")


@pytest.mark.parametrize("model", MODELS)
def test_control_one_wrong_byte_is_seen(model: str) -> None:
    with engines(*sides(model, side(), side(tp=2))) as (there, here):
        arrival = cross(there, here, TOKENS)
        written = np.flatnonzero(arrival.wanted[1] != arrival.before[1])
        here.ranks[1].memory[written[len(written) // 2]] ^= 1
        (found,) = arrival.differences()
        assert "1 of" in found


def test_control_a_wrong_write_at_the_producer_is_seen() -> None:
    with engines(*sides("nemotron-h", side(tp=2), side())) as (there, here):
        prompt = PROMPT[: TOKENS + 1]
        params = there.prefill("r", prompt)
        block = there.table("r", TOKENS)[0][0]
        name = there.ranks[1].kv_cache_config.kv_cache_groups[0].layer_names[0]
        there.ranks[1].kv_caches[name][block].view(-1)[100] ^= 1
        arrival = load(there, here, "r", prompt, params)
        assert len(arrival.differences()) == 1
