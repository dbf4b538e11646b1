"""References that are late, crossed or damaged, legs that are aborted, engines that run short, stop or die: the text is right
or there is an error, everything held is given back, and the next request works. On real engines, over HTTP."""

from __future__ import annotations

import copy
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from shared_engines import Among, Ferried, Fleet, Meter, Truth, all_given_back, kill, meter, since, stopped, until

from kvferry.errors import SessionError
from kvferry.session import Hello, Key, from_params, own_keys, read_keys, to_params
from kvferry.session.reference import Reference, seal
from kvferry.session.wire import ask
from kvferry.up.ports import free_port
from lab.crossing import architectures
from lab.crossing.compare import difference
from lab.crossing.engine import Engine
from lab.fleet import legs
from lab.fleet.legs import Answer, Leg, Prompt, prompt
from lab.fleet.patches import ASYNCHRONOUS, IN_STEP, NEARBY, TOLD
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

SMALL_STEPS = "--max-num-batched-tokens=128"
POOL = ("--num-gpu-blocks-override=160", SMALL_STEPS)
SHORT = ("--num-gpu-blocks-override=40", SMALL_STEPS, "--no-scheduler-reserve-full-isl")
ROLES = {"P": "kv_producer", "hasty": "kv_producer", "D": "kv_consumer"}
"""Leases of engines that load too are bounded, and caches are small here."""
QUICK = {"lease_s": 12.0, "greeting_s": 6.0, "read_s": 4.0}
TCP = ("UCX_TLS", "tcp,self")
WITHOUT_CMA = ("UCX_TLS", "^tcp,cma")
LONG = 1000
EMPTY = Key(b"", b"")
HELLO = Hello("one", "1")
APART = 1e-4


@pytest.fixture(scope="module")
def fleet(zygote: Zygote, checkpoints: Path) -> Iterator[Fleet]:
    fleet = Fleet(zygote, checkpoints)
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def truth() -> Truth:
    return Truth()


def llama(fleet: Fleet, which: str = "", **choices: Any) -> Engine:
    return ours(fleet, "llama", which, **choices)


def ours(fleet: Fleet, model: str, which: str, **choices: Any) -> Engine:
    """`which` tells engines of one kind apart, and which role they have. They schedule as on a GPU, a step ahead of what they
    compute."""
    environment = (("KVFERRY_TEST_ENGINE", which), (ASYNCHRONOUS, "1"), *choices.pop("environment", ()))
    choices = {"flags": POOL, "settings": QUICK, "role": ROLES.get(which, "kv_both"), **choices}
    return fleet.engine(model, environment=environment, **choices)


def hasty(fleet: Fleet) -> Engine:
    """A producer that soon gives up on consumers that do not come."""
    return llama(fleet, "hasty", settings={**QUICK, "lease_s": 3.0})


@pytest.fixture
def pair(fleet: Fleet) -> list[Server]:
    """Producer and consumer, llama, alike."""
    return fleet.up(llama(fleet, "P"), llama(fleet, "D"))


@pytest.fixture(scope="session", params=["nemotron-h", "llama"])
def tokens_or_states(request: pytest.FixtureRequest) -> str:
    """A model that keeps tokens only, and one that keeps states too. The scope makes pytest run the tests of one together."""
    return str(request.param)


@pytest.fixture
def either_pair(tokens_or_states: str, fleet: Fleet) -> list[Server]:
    """Producer and consumer, alike."""
    return fleet.up(*(ours(fleet, tokens_or_states, which) for which in "PD"))


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


def choices(leg: Leg) -> list[tuple[int, ...]]:
    """The tokens of every choice of an answer."""
    response = leg._connection.getresponse()
    found = json.loads(response.read())
    leg.abort()
    assert response.status == 200, found
    return [tuple(choice["token_ids"]) for choice in found["choices"]]


def assert_right(got: Answer, wanted: Answer) -> None:
    """All tokens equal, and the first log-probabilities as near as other orders of summing leave them."""
    found = difference(0, got, wanted, "float32")
    assert got.good, got
    assert (found.parted_at, found.apart < APART) == (-1, True), found


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


def _without(field: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.pop(field)


def _with(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update(fields)


def _lease(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["lease"].update(fields)


def _damages(nobody: str, silent: str) -> dict[str, Callable[[dict[str, Any]], None]]:
    """What a router, a proxy or a stranger may make of a reference; sealed anew unless the name says otherwise."""
    fields = ("address", "engine", "incarnation", "request", "lease", "tokens", "blocks", "digest", "version")
    hosts = (
        "",
        "nowhere",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "a..b:1",
        "[::1]:1",
        "\0:1",
        "%s:1" % ("h" * 300),
        "192.0.2.1:7600",
        "example.org:7600",
    )
    return {
        "another block, seal unchanged": lambda found: found["blocks"].update({"0": [159] * len(found["blocks"]["0"])}),
        **{f"no {field}": _without(field) for field in fields},
        **{f"address {host[:20]!r}": _with(address=host) for host in hosts},
        "address of nobody": _with(address=nobody),
        "address of a port that never answers": _with(address=silent),
        "address as a number": _with(address=5),
        "another incarnation": _with(incarnation="0" * 16),
        "another engine": _with(engine="somebody"),
        "another version": _with(version=2),
        "version as text": _with(version="1"),
        "tokens as text": _with(tokens="many"),
        "negative tokens": _with(tokens=-1),
        "tokens past any prompt": _with(tokens=1 << 62),
        "fewer tokens": _with(tokens=3),
        "lease as text": _with(lease="mine"),
        "slot out of range": _lease(slot=1 << 20),
        "slot far out of range": _lease(slot=1 << 62),
        "negative slot": _lease(slot=-1),
        "another slot": _lease(slot=150),
        "generation too large": _lease(generation=str((1 << 63) + 5)),
        "generation without end": _lease(generation="9" * 3000),
        "generation as a word": _lease(generation="new"),
        "another generation": _lease(generation="12345"),
        "blocks as a list": _with(blocks=[1, 2]),
        "blocks as text": _with(blocks={"0": "all"}),
        "blocks nested": _with(blocks={"0": [[[[[1]]]]]}),
        "blocks out of range": _with(blocks={"0": [160, 161, 162]}),
        "blocks far out of range": _with(blocks={"0": [1 << 39] * 3}),
        "blocks past any number": _with(blocks={"0": [1 << 63] * 3}),
        "negative blocks": _with(blocks={"0": [-5, 1, 2]}),
        "holes for blocks": _with(blocks={"0": [-1, -1, -1]}),
        "too few blocks": _with(blocks={"0": [1]}),
        "too many blocks, seal unchanged": _with(blocks={"0": list(range(1, 100))}),
        "a state for blocks": _with(blocks={"0": 3}),
        "no groups": _with(blocks={}),
        "another group": _with(blocks={"5": [1, 2, 3]}),
        "another digest": _with(digest="0" * 32),
    }


def _sealed(found: Mapping[str, Any]) -> str:
    try:
        return seal(msgspec.convert(found, Reference, strict=False), own_keys().first)
    except msgspec.ValidationError:
        return "0" * 32


def _damaged(params: Mapping[str, Any], name: str, damage: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    out = copy.deepcopy(dict(params))
    found = out["kvferry"]
    damage(found)
    if "seal unchanged" not in name:
        found["seal"] = _sealed(found)
    return out


def test_damaged_references_are_recomputed_and_nothing_hangs(pair: list[Server], truth: Truth) -> None:
    producer, consumer = pair
    with socket.create_server(("127.0.0.1", 0)) as never_answers, socket.create_server(("127.0.0.1", 0)) as closed:
        addresses = [f"127.0.0.1:{end.getsockname()[1]}" for end in (closed, never_answers)]
        closed.close()
        damages = _damages(*addresses)
        prompts = {name: prompt(70, 100 + index) for index, name in enumerate(damages)}
        wanted = dict(zip(damages, legs.ask_all(producer, list(prompts.values())), strict=True))
        before = meter(consumer)

        def send(name: str) -> tuple[dict[str, Any], Answer]:
            params = reference(producer, prompts[name])
            return params, legs.decode(consumer, prompts[name], _damaged(params, name, damages[name]))

        sent = dict(zip(damages, legs.at_once(send, list(damages), 12), strict=True))
        for name, (_, answer) in sent.items():
            assert answer.tokens == wanted[name].tokens, f"{name}: {answer}"
        seen = since(consumer, before, lambda m: m.refused + m.failed >= len(damages))
        assert (seen.loaded, seen.moved, seen.nothing) == (0, 0, 0), str(seen)
    for not_one in (None, [], "reference", 7, {}, {"version": 1}):
        params = {**sent["no digest"][0], "kvferry": not_one}
        assert_right(legs.decode(consumer, prompts["no digest"], params), wanted["no digest"])
    for name, (params, _) in sent.items():
        assert_right(legs.decode(consumer, prompts[name], params), wanted[name])
    assert_crosses(producer, consumer, truth)
    all_given_back(consumer)
    all_given_back(producer)


def test_references_of_another_kind_or_none_are_recomputed(pair: list[Server], truth: Truth) -> None:
    """As from a router that drops what it does not know, and from a producer with vLLM's own connector."""
    producer, consumer = pair
    tokens = prompt(150, 7)
    wanted, before = truth.of(producer, tokens), meter(consumer)
    stock = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5]],
        "remote_engine_id": "somebody",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    }
    assert_right(legs.decode(consumer, tokens, stock), wanted)
    assert_right(legs.decode(consumer, tokens, {"do_remote_prefill": True}), wanted)
    assert_loads(consumer, before, refused=2)
    for nothing in ({}, {"do_remote_prefill": False}, {"kvferry": reference(producer, prompt(60, 8))["kvferry"]}):
        assert_right(legs.decode(consumer, tokens, nothing), wanted)
    all_given_back(consumer)


def test_decodes_aborted_at_any_moment_leave_nothing_behind(either_pair: list[Server], truth: Truth) -> None:
    producer, consumer = either_pair
    tokens = prompt(600, 20)
    wanted, before = truth.of(producer, tokens), meter(producer)
    started = time.monotonic()
    assert_right(legs.decode(consumer, tokens, reference(producer, tokens)), wanted)
    whole = time.monotonic() - started
    moments = 20
    for moment in range(moments):
        several = [reference(producer, tokens) for _ in range(2)]
        flying = [Leg(consumer, tokens, params=params, max_new=64, stream=True) for params in several]
        if moment % 5 == 4:
            assert flying[0].first()
        else:
            time.sleep(whole * moment / moments / 2)
        for leg in flying:
            leg.abort()
    all_given_back(consumer)
    after = all_given_back(producer) - before
    assert after.published == 2 * moments + 1
    assert after.released > moments // 2, str(after)
    assert_crosses(producer, consumer, truth)


def test_a_decode_aborted_before_its_producer_answers_is_forgotten(pair: list[Server], truth: Truth) -> None:
    producer, consumer = pair
    tokens = prompt(300, 30)
    params = reference(producer, tokens)
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        far = _damaged(params, "", _with(address=f"127.0.0.1:{never_answers.getsockname()[1]}"))
        leg = Leg(consumer, tokens, params=far, stream=True)
        until("the request waits", lambda: meter(consumer), lambda m: m.waiting == 1)
        leg.abort()
        all_given_back(consumer)
    assert_right(legs.decode(consumer, tokens, params), truth.of(producer, tokens))
    all_given_back(producer)


def test_prompts_that_are_not_loaded_free_the_producer(pair: list[Server], truth: Truth) -> None:
    producer, consumer = pair
    tokens, single = prompt(120, 97), prompt(1, 97)
    wanted, before, there = truth.of(producer, tokens), meter(consumer), meter(producer)
    params = reference(producer, tokens)
    assert_right(legs.decode(consumer, tokens, params, settings={"prompt_logprobs": 2}), wanted)
    assert_loads(consumer, before, nothing=1)
    assert (all_given_back(producer) - there).released == 1
    short = legs.prefill(producer, single)
    assert short.good
    assert not short.params["do_remote_prefill"]
    assert_right(legs.decode(consumer, single, short.params), truth.of(producer, single))
    asked = legs.prefill(producer, tokens, settings={"prompt_logprobs": 2})
    assert asked.good
    assert_right(legs.decode(consumer, tokens, asked.params), wanted)
    assert (all_given_back(producer) - there).published == 1


def test_a_prefill_computes_one_token_whatever_its_client_asks_for(either_pair: list[Server], truth: Truth) -> None:
    producer, consumer = either_pair
    tokens = prompt(120, 98)
    wanted, before = truth.of(producer, tokens), meter(consumer)
    there = legs.prefill(producer, tokens, settings={"max_tokens": 5, "min_tokens": 4})
    assert len(there.tokens) == 1
    assert_right(legs.decode(consumer, tokens, there.params), wanted)
    assert_loads(consumer, before, loaded=1)


def test_several_answers_to_one_prompt_are_all_right(pair: list[Server], truth: Truth) -> None:
    """One reference, two requests of it, and both load. The producer keeps one request's blocks, however many answers it was
    asked for."""
    producer, consumer = pair
    tokens = prompt(120, 99)
    twice = {"n": 2, "temperature": 1.0, "top_k": 1}
    wanted, before, kept = truth.of(producer, tokens), meter(consumer), meter(producer)
    for settings in ({}, twice):
        there = legs.prefill(producer, tokens, settings=settings)
        assert there.good, there
        answers = choices(Leg(consumer, tokens, params=there.params, settings=twice))
        assert answers == [wanted.tokens] * 2
    seen = since(consumer, before, lambda m: m.loaded + m.failed >= 4)
    assert (seen.loaded, seen.failed) == (4, 0), str(seen)
    seen = all_given_back(producer) - kept
    assert (seen.published, seen.released) == (2, 2), str(seen)


def test_several_prompts_in_one_request_are_all_loaded(fleet: Fleet, truth: Truth) -> None:
    """vLLM answers with the parameters of the first, and gives them to all of them. One of the prompts is there twice."""
    producer, consumer = fleet.up(llama(fleet, "P"), llama(fleet, "strict", policy="fail"))
    prompts = [prompt(length, 110) for length in (300, 60, 2, 700, 61)]
    prompts.append(prompts[1])
    wanted, before, kept = [truth.of(producer, tokens).tokens for tokens in prompts], meter(consumer), meter(producer)
    together = {"prompt": [list(tokens) for tokens in prompts]}
    there = legs.prefill(producer, prompts[0], settings=together)
    assert there.good, there
    assert choices(Leg(consumer, prompts[0], params=there.params, settings=together)) == wanted
    assert assert_loads(consumer, before, loaded=len(prompts)).tokens == sum(len(tokens) - 1 for tokens in prompts)
    seen = all_given_back(producer) - kept
    assert (seen.published, seen.released, seen.expired) == (5, 5, 0), str(seen)
    all_given_back(consumer)


@pytest.mark.parametrize("kind", [Ferried, Among], ids=["alone", "among several connectors"])
def test_an_engine_loads_what_it_prefilled_itself(fleet: Fleet, truth: Truth, kind: type[Ferried]) -> None:
    """As behind a router that does not tell the two legs apart."""
    (both,) = fleet.up(llama(fleet, "both") if kind is Ferried else llama(fleet, "among", kind=kind))
    assert_crosses(both, both, truth, seed=101)
    all_given_back(both)


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


def test_a_reference_whose_lease_expired_is_recomputed(fleet: Fleet, truth: Truth) -> None:
    producer, consumer = fleet.up(hasty(fleet), llama(fleet, "D"))
    tokens = prompt(300, 2)
    wanted, before, there = truth.of(producer, tokens), meter(consumer), meter(producer)
    params = reference(producer, tokens)
    held = until("the lease expires", lambda: meter(producer) - there, lambda m: m.expired == 1 and not m.usage)
    assert held.released == 0
    reuse_blocks(producer)
    assert_right(legs.decode(consumer, tokens, params), wanted)
    assert_loads(consumer, before, failed=1)


def test_prefills_aborted_at_any_moment_leave_nothing_behind(fleet: Fleet, truth: Truth) -> None:
    producer, consumer = fleet.up(hasty(fleet), llama(fleet, "D"))
    prompts = [prompt(LONG, 10 + seed) for seed in range(4)]
    wanted, before = [truth.of(producer, tokens) for tokens in prompts], meter(consumer)
    started = time.monotonic()
    legs.at_once(lambda tokens: legs.prefill(producer, tokens), prompts)
    whole = time.monotonic() - started
    moments = 16
    for moment in range(moments):
        flying = [Leg(producer, tokens, params=legs.TO_PREFILL, max_new=1) for tokens in prompts]
        time.sleep(1.2 * whole * moment / moments)
        kept = flying.pop(moment % len(flying))
        for leg in flying:
            leg.abort()
        if moment % 4 == 0:
            there = kept.answer()
            assert there.good, there
            index = moment % len(prompts)
            assert_right(legs.decode(consumer, prompts[index], there.params), wanted[index])
        else:
            kept.abort()
    after = all_given_back(producer)
    assert after.prefill_aborted, "no leg was aborted while it was prefilled"
    assert since(consumer, before, lambda m: m.loaded + m.failed >= moments // 4).loaded
    assert_crosses(producer, consumer, truth)
    all_given_back(consumer)


@pytest.fixture
def far_pair(fleet: Fleet) -> list[Server]:
    """The producer is reached over TCP, where reads need it to run: stopping it stops them."""
    return fleet.up(far(fleet), far_reader(fleet))


def far_reader(fleet: Fleet) -> Engine:
    return llama(fleet, "far D", environment=(TCP,))


def far(fleet: Fleet) -> Engine:
    return llama(fleet, "far", environment=(TCP,), settings={**QUICK, "lease_s": 10.0})


def loading(consumer: Server, tokens: Prompt, params: Mapping[str, Any]) -> Leg:
    """A leg that has blocks of its own and waits for bytes."""
    leg = Leg(consumer, tokens, params=params, stream=True)
    until("the request loads", lambda: meter(consumer), lambda m: m.usage > 0 and m.running == 0)
    return leg


def test_a_decode_aborted_while_it_loads_keeps_its_blocks_until_nothing_can_land(far_pair: list[Server], truth: Truth) -> None:
    producer, consumer = far_pair
    tokens, other = prompt(600, 40), prompt(90, 41)
    assert_crosses(producer, consumer, truth)
    wanted, before = truth.of(consumer, other), meter(consumer)
    params = reference(producer, tokens)
    with stopped(producer):
        leg = loading(consumer, tokens, params)
        leg.abort()
        assert_right(legs.ask(consumer, other), wanted)
        assert meter(consumer).usage > 0
    all_given_back(consumer)
    assert (meter(consumer) - before).refused == 0
    all_given_back(producer)
    assert_crosses(producer, consumer, truth)


def test_a_producer_that_stands_still_delays_only_what_is_read_from_it(far_pair: list[Server], truth: Truth) -> None:
    producer, consumer = far_pair
    tokens, other = prompt(600, 42), prompt(90, 43)
    assert_crosses(producer, consumer, truth)
    wanted, wanted_other = truth.of(producer, tokens), truth.of(consumer, other)
    params, before, said = reference(producer, tokens), meter(consumer), len(consumer.log.read_text())
    with ThreadPoolExecutor(1) as pool:
        with stopped(producer):
            waiting = pool.submit(legs.decode, consumer, tokens, params)
            until("the request loads", lambda: meter(consumer), lambda m: m.usage > 0 and m.running == 0)
            assert_right(legs.ask(consumer, other), wanted_other)
            until("it gives up", lambda: consumer.log.read_text()[said:], lambda log: "waits until nothing can land" in log)
        assert_right(waiting.result(), wanted)
    assert_loads(consumer, before, failed=1)
    assert_crosses(producer, consumer, truth)
    all_given_back(producer)


def test_a_consumer_that_dies_while_it_loads_costs_a_lease(fleet: Fleet, truth: Truth) -> None:
    """What it asked for is under way to it: UCX ends a process that is still to answer over TCP when who asked is gone."""
    dying = llama(fleet, "mortal", environment=(TCP,))
    producer, consumer, mortal = fleet.up(far(fleet), far_reader(fleet), dying)
    tokens = prompt(600, 51)
    assert_crosses(producer, mortal, truth)
    params, before = reference(producer, tokens), meter(producer)
    with ExitStack() as still:
        with stopped(producer):
            loading(mortal, tokens, params)
            still.enter_context(stopped(mortal))
        assert_crosses(producer, consumer, truth)
        kill(mortal)
    assert_crosses(producer, consumer, truth)
    assert (all_given_back(producer) - before).expired == 1


@pytest.mark.parametrize("carrier", ["shared memory", "shared memory without cma", "tcp"])
def test_a_producer_that_dies_costs_a_recomputation_and_its_successor_is_met(fleet: Fleet, truth: Truth, carrier: str) -> None:
    """Over TCP it dies while it is read, and its successor has its address; else before it is read, and another address."""
    over_tcp = carrier == "tcp"
    settings = {**QUICK, "listen": f"127.0.0.1:{free_port() if over_tcp else 0}"}
    how = {"shared memory": (), "shared memory without cma": (WITHOUT_CMA,), "tcp": (TCP,)}[carrier]
    mortal = llama(fleet, "mortal", environment=how, settings=settings)
    reading = (llama(fleet, f"{which} {carrier}", environment=how) if how else llama(fleet, which) for which in "DP")
    producer, consumer, unmet = fleet.up(mortal, *reading)
    tokens = prompt(600, 50)
    wanted = truth.of(producer, tokens)
    assert_crosses(producer, consumer, truth)
    lost, lost_too = reference(producer, tokens), reference(producer, tokens)
    before, before_unmet = meter(consumer), meter(unmet)
    if over_tcp:
        with ThreadPoolExecutor(1) as pool, stopped(producer):
            waiting = pool.submit(legs.decode, consumer, tokens, lost)
            until("the request loads", lambda: meter(consumer), lambda m: m.usage > 0 and m.running == 0)
            kill(producer)
            assert_right(waiting.result(), wanted)
    else:
        kill(producer)
        assert_right(legs.decode(consumer, tokens, lost), wanted)
    assert_right(legs.decode(consumer, tokens, lost_too), wanted)
    assert_right(legs.decode(unmet, tokens, lost_too), wanted)
    assert_loads(consumer, before, failed=1, refused=1)
    assert_loads(unmet, before_unmet, refused=1)
    assert re.search(r"since its start \w+ is gone or out of reach: ", consumer.log.read_text())
    successor = fleet.up(mortal)[0]
    assert_crosses(successor, consumer, truth)
    before = meter(consumer)
    assert_right(legs.decode(consumer, tokens, lost), wanted)
    assert_loads(consumer, before, refused=1)
    assert ("it is gone" if over_tcp else "nobody listens at") in consumer.log.read_text()
    all_given_back(consumer)
    all_given_back(successor)


def large_blocks(fleet: Fleet) -> Engine:
    """And an engine that waits for each step before it schedules the next."""
    return llama(fleet, "large blocks", block=64, prefix_caching=True, environment=((ASYNCHRONOUS, ""),))


def test_block_sizes_and_ways_of_scheduling_may_differ(fleet: Fleet, truth: Truth) -> None:
    small, large = fleet.up(llama(fleet, "small"), large_blocks(fleet))
    for turn, (producer, consumer) in enumerate(((small, large), (large, small))):
        prompts = [prompt(length, 90 + turn) for length in (2, 31, 32, 33, 63, 64, 65, 128, 129, 500)]
        wanted, before = [truth.of(small, tokens) for tokens in prompts], meter(consumer)
        for got, right in zip(legs.cross_all(producer, consumer, prompts), wanted, strict=True):
            assert_right(got.decode, right)
        assert assert_loads(consumer, before, loaded=len(prompts)).tokens == sum(len(tokens) - 1 for tokens in prompts)
        all_given_back(producer)


def test_what_the_consumer_has_is_not_loaded_again(fleet: Fleet, truth: Truth) -> None:
    producer, consumer = fleet.up(llama(fleet, "P"), large_blocks(fleet))
    first = prompt(257, 95)
    shared = first[:200] + prompt(100, 96)
    for tokens, loaded in ((first, 256), (shared, 299 - 192), (shared, 299 - 256)):
        wanted, before = truth.of(producer, tokens), meter(consumer)
        assert_right(legs.cross(producer, consumer, tokens).decode, wanted)
        assert assert_loads(consumer, before, loaded=1).tokens == loaded
    wanted, before, there = truth.of(producer, first), meter(consumer), meter(producer)
    assert_right(legs.cross(producer, consumer, first).decode, wanted)
    assert_loads(consumer, before, nothing=1)
    assert (all_given_back(producer) - there).released == 1


def test_engines_that_share_a_key_cross_and_others_recompute(fleet: Fleet, truth: Truth, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("key", "another")]
    for file in files:
        file.write_text(file.name * 16)
    wide = {**QUICK, "listen": "0.0.0.0:0", "advertise": "127.0.0.1"}
    engines = [llama(fleet, "keyed", settings={**wide, "key_file": str(file)}) for file in files]
    producer, stranger, keyless = fleet.up(*engines, llama(fleet, "D"))
    tokens = prompt(300, 88)
    for consumer in (stranger, keyless):
        wanted, before = truth.of(producer, tokens), meter(consumer)
        assert_right(legs.cross(producer, consumer, tokens).decode, wanted)
        assert_loads(consumer, before, refused=1)
        assert "under another key" in consumer.log.read_text()
    producer, friend = fleet.up(engines[0], llama(fleet, "friend", settings={**QUICK, "key_file": str(files[0])}))
    assert_crosses(producer, friend, truth)


def test_a_client_with_a_reference_of_its_own_making_reads_and_spoils_nobodys_cache(pair: list[Server], truth: Truth) -> None:
    """Its own lease and prompt with the blocks of another's, under the seal that needs no key."""
    producer, consumer = pair
    mine, others = prompt(300, 120), prompt(300, 121)
    wanted, before, there = truth.of(producer, mine), meter(consumer), meter(producer)
    given, secret = reference(producer, mine), reference(producer, others)
    own = from_params(given["kvferry"], own_keys())
    forged = to_params(msgspec.structs.replace(own, blocks=secret["kvferry"]["blocks"]), EMPTY)
    assert_right(legs.decode(consumer, mine, {**given, "kvferry": forged}), wanted)
    assert_loads(consumer, before, refused=1)
    assert "under another key" in consumer.log.read_text()
    assert_right(legs.ask(consumer, mine), wanted)
    for tokens, params in ((mine, given), (others, secret)):
        assert_right(legs.decode(consumer, tokens, params), truth.of(producer, tokens))
    assert_loads(consumer, before, refused=1, loaded=2)
    assert (all_given_back(producer) - there).released == 2


def test_a_key_is_replaced_while_requests_are_loaded_and_none_is_recomputed(fleet: Fleet, truth: Truth, tmp_path: Path) -> None:
    old, new = (name * 10 for name in ("old key ", "new key "))
    files = {name: tmp_path / name for name in "PD"}
    steps = [f"kvferry keys\n{old}\n{new}\n", f"kvferry keys\n{new}\n{old}\n", f"{new}\n"]

    def write(name: str, content: str) -> None:
        (tmp_path / "next").write_text(content)
        (tmp_path / "next").chmod(0o600)
        (tmp_path / "next").rename(files[name])

    for name in files:
        write(name, old)
    producer, consumer = fleet.up(*(llama(fleet, f"turned {n}", settings={**QUICK, "key_file": str(files[n])}) for n in files))
    before, crossed, over = meter(consumer), 0, threading.Event()
    tokens = [prompt(211, 130 + seed) for seed in range(8)]
    wanted = [truth.of(producer, it) for it in tokens]

    def crossing(seed: int) -> int:
        done = 0
        while not over.is_set():
            assert_right(legs.cross(producer, consumer, tokens[seed]).decode, wanted[seed])
            done += 1
        return done

    with ThreadPoolExecutor(4) as pool:
        under_way = [pool.submit(crossing, seed) for seed in range(4)]
        try:
            for number, content in enumerate(steps):
                sides = [("D", consumer), ("P", producer)]
                for name, server in sides[:: -1 if number % 2 else 1]:
                    write(name, content)
                    until(f"{name} has read it", lambda server=server: _read_again(server), lambda seen, n=number: seen > n)
                    time.sleep(1)
        finally:
            over.set()
        crossed = sum(found.result() for found in under_way)
    assert crossed > 20
    assert_loads(consumer, before, loaded=crossed)
    assert len(re.findall("answers to the key that comes first now", producer.log.read_text())) == 1
    with pytest.raises(SessionError):
        ask(from_params(reference(producer, tokens[0])["kvferry"], read_keys(files["P"])).address, HELLO, own_keys(), 2.0)


def _read_again(server: Server) -> int:
    return len(re.findall("was read again", server.log.read_text()))


def test_two_fine_tunes_of_one_configuration_do_not_cross(fleet: Fleet, truth: Truth, tmp_path: Path) -> None:
    """A third engine serves a copy of the first one's checkpoint, at another place."""
    base = llama(fleet, "base")
    tuned, copied = (_at(base, tmp_path / name) for name in ("tuned", "copied"))
    for file in tuned.checkpoint.folder.glob("*.safetensors"):
        held = load_file(file)
        save_file({name: weight * 1.01 if "3.self_attn.v_proj" in name else weight for name, weight in held.items()}, file)
    producer, consumer, other = fleet.up(base, tuned, copied)
    tokens = prompt(200, 102)
    wanted, before = legs.ask(consumer, tokens), meter(consumer)
    assert_right(legs.cross(producer, consumer, tokens).decode, wanted)
    assert_loads(consumer, before, refused=1)
    assert re.search(r"weights \w{16}\) there, .* weights \w{16}\) here", consumer.log.read_text())
    assert_crosses(producer, other, truth, seed=103)


def _at(engine: Engine, folder: Path) -> Engine:
    """The same, with a copy of its checkpoint."""
    shutil.copytree(engine.checkpoint.folder, folder)
    return replace(engine, checkpoint=replace(engine.checkpoint, folder=folder))


@pytest.mark.parametrize("at", ["consumer", "producer"])
def test_a_drafter_that_one_side_runs_alone_costs_nothing(fleet: Fleet, truth: Truth, checkpoints: Path, at: str) -> None:
    speculative = json.dumps({"method": "eagle", "model": str(eagle(checkpoints)), "num_speculative_tokens": 2})
    plain = llama(fleet, "plain")
    drafting = llama(fleet, "drafting", policy="fail", flags=(*POOL, f"--speculative-config={speculative}"))
    producer, consumer = fleet.up(*((plain, drafting) if at == "consumer" else (drafting, plain)))
    for seed in (104, 105):
        tokens = prompt(211, seed)
        wanted, before = legs.ask(fleet.up(plain)[0], tokens), meter(consumer)
        got = legs.cross(producer, consumer, tokens).decode
        assert got.tokens == wanted.tokens, got
        assert assert_loads(consumer, before, loaded=1).tokens == len(tokens) - 1
    all_given_back(producer)
    all_given_back(consumer)


def eagle(checkpoints: Path) -> Path:
    """One layer that guesses what the tiny llama will say, as badly as chance has it."""
    folder = checkpoints / "eagle"
    if not folder.exists():
        config = architectures.llama(num_hidden_layers=1)
        config.save_pretrained(folder)
        held = transformers.LlamaModel(config).state_dict()
        held = {name: weight for name, weight in held.items() if name not in ("norm.weight", "layers.0.input_layernorm.weight")}
        held["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) / config.hidden_size
        save_file(held, folder / "model.safetensors")
    return folder


def test_listening_beyond_this_machine_without_a_key_ends_the_start(fleet: Fleet) -> None:
    settings = {"listen": "0.0.0.0:0", "advertise": "127.0.0.1"}
    with fleet.attempt(llama(fleet, "open", settings=settings)) as server:
        assert server.refused()
        assert "listen on 0.0.0.0 needs a key: set key_file" in server.log.read_text()


@pytest.mark.parametrize("model", ["llama", "nemotron-h"])
def test_requests_that_compete_for_blocks_are_preempted_and_exact(fleet: Fleet, truth: Truth, model: str) -> None:
    """Prefills outgrow P's blocks and decodes D's; both engines are asked the truth before, one request at a time."""
    producer, consumer = fleet.up(ours(fleet, model, "P", flags=SHORT), ours(fleet, model, "D", flags=SHORT))
    long, growing = [prompt(700, 60 + seed) for seed in range(5)], [prompt(100, 70 + seed) for seed in range(6)]
    wanted = [truth.of(producer, tokens) for tokens in long] + [truth.of(producer, tokens, 300) for tokens in growing]
    before = [meter(server) for server in (producer, consumer)]
    crossed = legs.cross_all(producer, consumer, long) + legs.cross_all(producer, consumer, growing, max_new=300)
    for got, right in zip(crossed, wanted, strict=True):
        assert_right(got.decode, right)
    assert since(producer, before[0], lambda m: m.preemptions > 0).preemptions
    seen = since(consumer, before[1], lambda m: m.preemptions > 0 and m.loaded + m.failed >= len(crossed))
    assert seen.loaded, str(seen)
    all_given_back(producer)
    all_given_back(consumer)


@pytest.mark.parametrize("model", ["llama", "nemotron-h", "granite-h-1g"])
def test_attention_is_loaded_in_its_step_and_states_beside_it_and_no_load_that_fails_ends_an_engine(
    fleet: Fleet, truth: Truth, model: str
) -> None:
    """One after the other, so that each is alone in its step, and all at once; then a reference whose lease has ended."""
    hasty = ours(fleet, model, "in step", policy="fail", environment=((IN_STEP, "1"),))
    producer, consumer = fleet.up(ours(fleet, model, "P"), hasty)
    prompts = [prompt(length, 80 + length) for length in (17, 64, 65, 211, 300, 500)]
    wanted = [truth.of(producer, tokens) for tokens in prompts]
    assert_crosses(producer, consumer, truth)
    before = meter(consumer)
    for tokens, right in zip(prompts, wanted, strict=True):
        assert_right(legs.cross(producer, consumer, tokens).decode, right)
    for got, right in zip(legs.cross_all(producer, consumer, prompts), wanted, strict=True):
        assert_right(got.decode, right)
    seen = assert_loads(consumer, before, loaded=2 * len(prompts))
    assert seen.tokens == 2 * sum(len(tokens) - 1 for tokens in prompts)
    assert seen.in_step >= len(prompts) if model == "llama" else not seen.in_step
    params = reference(producer, prompts[-1])
    assert legs.decode(consumer, prompts[-1], params).good
    all_given_back(producer)
    before = meter(consumer)
    assert not legs.decode(consumer, prompts[-1], params).good
    assert_loads(consumer, before, failed=1)
    assert_crosses(producer, consumer, truth)
    all_given_back(producer)
    all_given_back(consumer)


@pytest.mark.parametrize(("model", "strategies"), [("llama", ["direct"]), ("nemotron-h", ["packed"])])
def test_what_is_loaded_beside_steps_that_compute_is_exact(
    fleet: Fleet, truth: Truth, model: str, strategies: list[str]
) -> None:
    """By a rank that says so before the next step is put together."""
    settings = {**QUICK, "strategies": strategies}
    beside = ours(fleet, model, "beside", settings=settings, environment=((NEARBY, "1"),))
    producer, consumer = fleet.up(ours(fleet, model, "P", settings=settings), beside)
    prompts = [prompt(length, 90 + length) for length in (17, 64, 65, 211, 300, 500)]
    wanted = [truth.of(producer, tokens) for tokens in prompts]
    before = meter(consumer)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(legs.cross, producer, consumer, prompt(40, 90), max_new=200)
        for tokens, right in zip(prompts, wanted, strict=True):
            assert_right(legs.cross(producer, consumer, tokens).decode, right)
        for got, right in zip(legs.cross_all(producer, consumer, prompts), wanted, strict=True):
            assert_right(got.decode, right)
        assert decoding.result().decode.good
    seen = assert_loads(consumer, before, loaded=2 * len(prompts) + 1)
    assert seen.tokens == 2 * sum(len(tokens) - 1 for tokens in prompts) + 39
    assert seen.in_step == 0
    assert TOLD in consumer.log.read_text()
    all_given_back(producer)
    all_given_back(consumer)


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_two_consumers_read_one_producer_and_every_rank_of_it_frees(fleet: Fleet, model: str) -> None:
    """With latents every rank of P holds the same, and some are read by nobody. On this CPU a latent model's decode differs
    from its own prefill, so that only what was carried is compared there."""
    patient = {**QUICK, "lease_s": 60.0}
    engines = [ours(fleet, model, which, tp=tp, settings=patient) for which, tp in (("P", 2), ("one", 1), ("two", 2))]
    producer, *consumers = fleet.up(*engines)
    prompts = {server: [prompt(length, index) for length in (40, 257, 600)] for index, server in enumerate(consumers)}
    wanted = {server: legs.ask_all(producer, found) for server, found in prompts.items()}
    before = {server: meter(server) for server in (producer, *consumers)}
    with ThreadPoolExecutor(len(consumers)) as pool:
        crossed = {
            server: pool.submit(legs.cross_all, producer, server, prompts[server] + prompts[server]) for server in consumers
        }
    for server, future in crossed.items():
        for got, right in zip(future.result(), wanted[server] * 2, strict=True):
            assert got.decode.good, got.decode
            if model != "deepseek":
                assert_right(got.decode, right)
        seen = assert_loads(server, before[server], loaded=6)
        assert seen.tokens == 2 * sum(len(tokens) - 1 for tokens in prompts[server])
        all_given_back(server)
    seen = all_given_back(producer) - before[producer]
    assert (seen.published, seen.released, seen.expired) == (12, 12, 0), str(seen)


def test_windows_cross_where_one_side_keeps_every_block_and_what_was_loaded_can_be_hit(fleet: Fleet, truth: Truth) -> None:
    """Both ways between an engine that clips windows and one that treats every layer as full, both with prefix caching."""
    unclipped = ours(fleet, "gemma3", "unclipped", prefix_caching=True, flags=("--disable-hybrid-kv-cache-manager", *POOL))
    clipped = ours(fleet, "gemma3", "clipped", prefix_caching=True)
    alone, *both = fleet.up(ours(fleet, "gemma3", "alone"), unclipped, clipped)
    for turn, (producer, consumer) in enumerate((both, both[::-1])):
        prompts = [prompt(length, 80 + turn) for length in (30, 64, 97, 159, 161, 223, 400)]
        wanted, before = [truth.of(alone, tokens) for tokens in prompts], meter(consumer)
        for got, right in zip(legs.cross_all(producer, consumer, prompts), wanted, strict=True):
            assert_right(got.decode, right)
        seen = assert_loads(consumer, before, loaded=len(prompts))
        assert seen.tokens == sum(len(tokens) - 1 for tokens in prompts)
        before = meter(consumer)
        for tokens in prompts:
            for kept in (len(tokens), len(tokens) * 2 // 3):
                longer = tokens[:kept] + prompt(50, kept)
                assert_right(legs.ask(consumer, longer), truth.of(alone, longer))
        assert since(consumer, before, lambda m: m.hits > 0).hits
        for server in both:
            all_given_back(server)
