"""Requests between whole vLLM engines of unlike topology: the text, where the prompt came from, and what was moved."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleets import FLEETS, Harbour, engine_of

from kvferry.check import ask_all, check_commands, check_engines, read_command
from kvferry.check.canary import read_beacons, read_blocks, release
from kvferry.findings import errors
from kvferry.session import from_params, own_keys
from lab.crossing.checkpoints import checkpoint
from lab.crossing.compare import differences
from lab.crossing.engine import Engine
from lab.fleet.connectors import OURS, Connector
from lab.fleet.legs import Prompt, cross_all, prefill
from lab.fleet.metrics import Counters, counted, counters
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

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
    if fleet.connector is OURS:
        assert_checked(producer, consumer, fleet.prompts[-1])
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


@pytest.mark.parametrize("name", FLEETS)
def test_check_says_yes_to_every_pair_before_it_serves(checkpoints: Path, name: str) -> None:
    """From the engines' command lines, where none has to run."""
    fleet = FLEETS[name]
    made = checkpoint(fleet.model, checkpoints)
    commands = {letter: command_of(engine_of(made, OURS, **changes)) for letter, changes in fleet.engines.items()}
    for pair in fleet.pairs:
        found = check_commands(*(read_command(commands[letter]) for letter in pair), devices=("cpu", "cpu"))
        assert not errors(found.findings), (pair, found.findings)
        assert found.moves is not None


def command_of(engine: Engine) -> str:
    said = {**engine.variables(0), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in said.items()), "vllm serve", shlex.join(engine.arguments(8000))])


def assert_checked(producer: Server, consumer: Server, tokens: Prompt) -> None:
    """`kvferry check` of the two as they run: asked, compared, planned and proved; a word of every prefill rank, and a prompt's
    blocks in the layout of the decode engine, really read."""
    keys = own_keys()
    references = [from_params(prefill(server, tokens).params["kvferry"], keys) for server in (producer, consumer)]
    asked = ask_all([reference.address for reference in references], keys, 30.0)
    assert not asked.findings
    pairs, wrong = check_engines(asked.engines)
    assert (len(pairs), wrong) == (2, [])
    pair = next(one for one in pairs if one.producer.address == references[0].address)
    assert not pair.findings
    assert pair.plans
    beacons = read_beacons(pair.producer)
    assert not errors(beacons.findings)
    assert beacons.ranks == len(pair.producer.welcome.cards)
    blocks = read_blocks(pair, references[0], keys)
    assert not blocks.findings
    assert blocks.compared > 0
    release(references[1], keys)


def assert_ours_moved_all_but_the_last_token(counts: Counters, requests: int, prompt_tokens: int) -> None:
    assert (counts.refused, counts.failed, counts.nothing) == (0, 0, 0)
    assert counts.loaded == requests
    assert counts.from_peer == counts.tokens_loaded == prompt_tokens - requests
    assert counts.bytes_moved == counts.bytes_predicted > 0
    assert counts.runs_moved > 0
