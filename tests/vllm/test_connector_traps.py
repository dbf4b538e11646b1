"""The connector against vLLM's own scheduler, aggregator, factory and requests, in the places where a connector goes wrong."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from byte_crossing import HOLE
from engine import Setup, as_rank, engine_args, workers
from served import Engine, engines, load, loaded, side, sides
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole, supports_hma
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.check import ask_all, check_engines
from kvferry.check.canary import read_beacons
from kvferry.engines.vllm import KVFerryConnector, register, scheduler, seeking
from kvferry.engines.vllm.media import are_named_by_request, content_of
from kvferry.engines.vllm.prompts import digest_of
from kvferry.engines.vllm.stats import COUNTERS, LABELLED
from kvferry.engines.vllm.tables import tables_of
from kvferry.errors import BindError, ManifestError, MismatchError, SessionError, TransportError
from kvferry.session import Lease, from_params, key_of, own_keys, to_params
from kvferry.up.ports import free_port

pytestmark = pytest.mark.vllm

PROMPT = list(range(7, 165))
OTHER = list(range(8, 166))
TOKENS = len(PROMPT) - 1
NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "kvferry": None}


def lease_of(params: dict[str, Any]) -> Lease:
    said = params["kvferry"]["lease"]
    return Lease(said["slot"], int(said["generation"]))


def say(params: dict[str, Any], **changes: Any) -> None:
    """Another reference, as a producer would have given it out."""
    keys = own_keys()
    params["kvferry"] = to_params(msgspec.structs.replace(from_params(params["kvferry"], keys), **changes), keys.first)


def prefilled(producer: Engine, name: str = "r", prompt: list[int] = PROMPT, **sampling: Any) -> dict[str, Any]:
    params = producer.prefill(name, prompt, **sampling)
    assert params is not None
    assert params["do_remote_prefill"]
    return params


def released(producer: Engine, ending: str = "released") -> None:
    """The producer gets its blocks back, every rank having said so once."""
    producer.step_until(lambda: not producer.scheduler.requests)
    producer.idle()
    assert producer.held == 0
    assert set(producer.reported["sent"].values()) <= {1}
    assert producer.counted[ending] == 1


def ended(consumer: Engine, name: str = "r") -> FinishReason:
    consumer.step_until(lambda: name in consumer.outputs and name not in consumer.scheduler.requests)
    consumer.idle()
    assert consumer.held == 0
    return consumer.outputs[name].finish_reason


def later(producer: Engine, seconds: float) -> None:
    """The producer's clock goes ahead."""
    half = producer.connector.scheduler
    now = half._clock() + seconds
    half._clock = lambda: now


def all_is_heard(producer: Engine, consumer: Engine) -> None:
    """What the consumer has to say has been said, and the producer has done it: a greeting that is answered came after it."""
    courier = consumer.connector.scheduler._courier
    said = threading.Event()
    courier._commands.put(said.set)
    assert said.wait(60)
    courier.introduce(producer.connector.scheduler._address)
    for _ in range(5):
        producer.step()


def nobody_else_comes(consumer: Engine) -> None:
    courier = consumer.connector.scheduler._courier
    courier._commands.put(lambda: courier._consumer.part(math.inf))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, parts of a request come in time."""
    monkeypatch.setattr(scheduler, "LINGER_S", 600.0, raising=False)


def slots(producer: Engine) -> list[int]:
    """The words of every rank that are not dead."""
    return [int(word) for c in producer.connectors for word in c.worker._words._words[: producer.setup.blocks] if word]


class TestReports:
    @pytest.mark.parametrize("aborted", [False, True])
    def test_a_producer_that_the_courier_forgets_is_kept_until_nothing_is_loaded_from_it(self, aborted: bool) -> None:
        """Another producer may have been met between the order of a load and the courier's hearing of it."""
        with engines(*sides("llama", side(tp=1), side(tp=2))) as (there, here):
            params = prefilled(there)
            half, peer = here.connector.scheduler, key_of(from_params(params["kvferry"], own_keys()))
            links = [connector.worker._ferry._links for connector in here.connectors]
            here.slow = {1}
            here.scheduler.add_request(here.request("r", PROMPT, params))
            here.step_until(lambda: here.reported["received"][0, "r"] == 1)
            if aborted:
                here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            half._courier._forgotten.append(peer)
            for _ in range(20):
                here.step()
            assert all(peer in found.peers for found in links)
            assert peer in half._announced
            here.slow = set()
            here.step_until(lambda: not any(peer in found.peers for found in links))
            here.idle()
            assert here.held == 0
            assert here.counted["loaded"] == 1
            assert peer not in half._announced

    def test_a_load_is_over_once_the_slowest_rank_has_reported(self) -> None:
        with engines(*sides("granite-h-1g", side(tp=1), side(tp=2))) as (there, here):
            params = prefilled(there)
            here.slow = {1}
            here.scheduler.add_request(here.request("r", PROMPT, params))
            here.step_until(lambda: here.reported["received"][0, "r"] == 1)
            for _ in range(20):
                here.step()
            assert here.waits_for_bytes("r")
            assert there.scheduler.requests
            here.slow = set()
            assert ended(here) is FinishReason.LENGTH
            assert dict(here.reported["received"]) == {(0, "r"): 1, (1, "r"): 1}
            released(there)

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_load_that_fails_on_one_rank_has_failed(self, policy: str) -> None:
        with engines(*sides("nemotron-h", side(tp=2), side(tp=2, failure_policy=policy))) as (there, here):
            params = prefilled(there)
            there.connectors[1].worker._words.kill(lease_of(params))
            here.scheduler.add_request(here.request("r", PROMPT, params))
            outcome = ended(here)
            assert here.failed == {(1, "r")}
            assert dict(here.reported["received"]) == {(0, "r"): 1, (1, "r"): 1}
            assert here.counted["failed"] == 1
            assert not here.counted["loaded"]
            released(there)
        recomputed = policy == "recompute"
        assert outcome is (FinishReason.LENGTH if recomputed else FinishReason.ERROR)
        assert here.scheduled["r"] == (len(PROMPT) if recomputed else 0)

    def test_a_recomputed_request_is_not_loaded_again(self) -> None:
        with engines(*sides("gemma3", {}, side(failure_policy="recompute"))) as (there, here):
            params = prefilled(there)
            there.connectors[0].worker._words.kill(lease_of(params))
            request = here.request("r", PROMPT, params, max_tokens=4)
            here.scheduler.add_request(request)
            here.step_until(lambda: here.scheduled["r"] >= len(PROMPT))
            assert here.connector.get_num_new_matched_tokens(request, 0) == (0, False)
            assert ended(here) is FinishReason.LENGTH
            assert dict(here.reported["received"]) == {(0, "r"): 1}


class TestStaleReferences:
    """Bytes are accepted only while the producer's word stands, on every rank that is read."""

    @pytest.mark.parametrize("killed", [[0], [1], [0, 1]])
    def test_a_word_that_dies_before_it_is_read_fails_the_load(self, killed: list[int]) -> None:
        with engines(*sides("nemotron-h", side(tp=2), {})) as (there, here):
            params = prefilled(there)
            ferry = here.connectors[0].worker._ferry
            read = ferry._passage._check

            def late(*args: Any) -> None:
                for rank in killed:
                    there.connectors[rank].worker._words.kill(lease_of(params))
                read(*args)

            ferry._passage._check = late
            here.scheduler.add_request(here.request("r", PROMPT, params))
            assert ended(here) is FinishReason.ERROR
            assert here.failed == {(0, "r")}
            assert dict(here.reported["received"]) == {(0, "r"): 1}
            assert here.moved[0]["moved"] == 0

    def test_blocks_that_were_freed_and_overwritten_while_they_were_read_are_never_accepted(self) -> None:
        with engines(*sides("granite-h-1g", {}, side(tp=2))) as (there, here):
            params = prefilled(there)
            for connector in here.connectors:
                read = connector.worker._ferry._passage._check

                def late(*args: Any, read: Any = read) -> None:
                    there.connectors[0].worker._words.kill(lease_of(params))
                    there.soil(77)
                    read(*args)

                connector.worker._ferry._passage._check = late
            here.scheduler.add_request(here.request("r", PROMPT, params))
            assert ended(here) is FinishReason.ERROR
            assert {rank for rank, _ in here.failed}

    def test_a_lease_that_expired_is_not_read(self) -> None:
        with engines(*sides("nemotron-h", side(tp=2), side(tp=2))) as (there, here):
            params = prefilled(there)
            assert len(slots(there)) == 2
            later(there, 59.0)
            there.step()
            assert there.held
            later(there, 2.0)
            released(there, "expired")
            assert slots(there) == []
            there.soil(77)
            here.scheduler.add_request(here.request("r", PROMPT, params))
            assert ended(here) is FinishReason.ERROR
            assert here.failed == {(0, "r"), (1, "r")}

    def test_a_reference_that_is_replayed_after_its_slot_was_taken_again_is_refused(self) -> None:
        with engines(*sides("llama", side(blocks=12, role="kv_producer"), side(blocks=12))) as (there, here):
            params = prefilled(there)
            load(there, here, "r", PROMPT, params)
            assert ended(here) is FinishReason.LENGTH
            released(there)
            for other in range(12):
                taken = prefilled(there, f"other{other}", OTHER[:40])
                if lease_of(taken).slot != lease_of(params).slot:
                    later(there, 100.0)
                    there.step_until(lambda: not there.scheduler.requests)
            assert lease_of(taken).slot == lease_of(params).slot
            here.scheduler.add_request(here.request("replayed", PROMPT, params))
            assert ended(here, "replayed") is FinishReason.ERROR
            assert slots(there) == [lease_of(taken).generation]
            load(there, here, f"other{other}", OTHER[:40], taken)
            assert ended(here, f"other{other}") is FinishReason.LENGTH

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_crossed_reference_is_refused_and_releases_nobody(self, policy: str) -> None:
        with engines(*sides("gemma3", side(role="kv_producer"), side(failure_policy=policy))) as (there, here):
            mine, others = prefilled(there, "mine"), prefilled(there, "others", OTHER)
            here.scheduler.add_request(here.request("crossed", PROMPT, others))
            outcome = ended(here, "crossed")
            assert outcome is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)
            assert here.counted["refused"] == 1
            for name, prompt, params in (("mine", PROMPT, mine), ("others", OTHER, others)):
                here.scheduler.add_request(here.request(name, prompt, params))
                assert ended(here, name) is FinishReason.LENGTH
                assert here.scheduled[name] == 1
            there.step_until(lambda: not there.scheduler.requests)
            assert there.counted["released"] == 2

    @pytest.mark.parametrize("salt", ["", "other"])
    def test_another_salt_is_another_prompt(self, salt: str) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = prefilled(there)
            request = here.request("r", PROMPT, params)
            request.cache_salt = salt
            here.scheduler.add_request(request)
            assert ended(here) is (FinishReason.ERROR if salt else FinishReason.LENGTH)


class TestRefusedReferences:
    DAMAGE: tuple[tuple[str, Any], ...] = (
        ("absent", lambda p: p.pop("kvferry")),
        ("damaged", lambda p: p["kvferry"].pop("lease")),
        ("of another version", lambda p: p["kvferry"].update(version=99)),
        ("changed on its way", lambda p: p["kvferry"].update(tokens=3)),
        ("of a longer prompt", lambda p: say(p, tokens=len(PROMPT))),
        ("to nobody", lambda p: say(p, address="127.0.0.1:1")),
        ("of another start", lambda p: say(p, incarnation="earlier")),
    )

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    @pytest.mark.parametrize("damage", [d for _, d in DAMAGE], ids=[name for name, _ in DAMAGE])
    def test_the_policy_decides_what_becomes_of_the_request(self, damage: Any, policy: str) -> None:
        with engines(*sides("nemotron-h", {}, side(tp=2, failure_policy=policy))) as (there, here):
            params = prefilled(there)
            damage(params)
            here.scheduler.add_request(here.request("r", PROMPT, params))
            outcome = ended(here)
            fails = policy == "fail"
            assert outcome is (FinishReason.ERROR if fails else FinishReason.LENGTH)
            assert here.scheduled["r"] == (0 if fails else len(PROMPT))
            assert here.failed == ({(0, "r"), (1, "r")} if fails else set())
            assert set(here.reported["received"].values()) == ({1} if fails else set())
            assert here.counted["refused"] == 1
            assert not here.counted["failed"]

    def test_blocks_outside_the_producers_pool_fail_on_every_rank(self) -> None:
        with engines(*sides("llama", {}, side(tp=2))) as (there, here):
            params = prefilled(there)
            blocks = params["kvferry"]["blocks"]["0"]
            say(params, blocks={"0": [1 << 30, *blocks[1:]]})
            here.scheduler.add_request(here.request("r", PROMPT, params))
            assert ended(here) is FinishReason.ERROR
            assert here.failed == {(0, "r"), (1, "r")}
            released(there)

    def test_embeddings_among_tokens_cannot_be_compared_with_what_was_prefilled(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            request = here.request("r", PROMPT, prefilled(there))
            request.prompt_embeds, request.prompt_is_token_ids = torch.ones(len(PROMPT), 128), [False] * len(PROMPT)
            here.scheduler.add_request(request)
            assert ended(here) is FinishReason.ERROR
            assert here.counted["refused"] == 1

    def test_an_engine_that_only_produces_loads_nothing(self) -> None:
        with engines(*sides("llama", {}, side(role="kv_producer"))) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there)))
            assert ended(here) is FinishReason.ERROR

    def test_an_engine_that_only_consumes_holds_nothing(self) -> None:
        with engines(Setup("llama", engine="D", role="kv_consumer")) as (here,):
            assert here.prefill("r", PROMPT) == NOTHING
            assert here.scheduled["r"] == len(PROMPT)
            assert here.held == 0
            assert here.connector.scheduler._listener is None

    def test_threads_of_its_process_switch_as_soon_as_it_is_told(self) -> None:
        usual = sys.getswitchinterval()
        try:
            with engines(Setup("llama", engine="D", role="kv_consumer", options=(("switch_s", 0.002),))):
                assert sys.getswitchinterval() == pytest.approx(0.002)
        finally:
            sys.setswitchinterval(usual)

    @pytest.mark.parametrize(
        ("device", "options", "eager", "newer", "later", "ready"),
        [
            ("cuda", {}, True, True, "warn", True),
            ("cuda", {}, True, True, "error", False),
            ("cuda", {}, True, False, "warn", False),
            ("cuda", {"warm_up": False}, True, True, "warn", False),
            ("cpu", {}, True, True, "warn", False),
            ("cuda", {}, False, True, "warn", True),
        ],
    )
    def test_kernels_of_an_eager_engine_on_a_gpu_are_made_ready_at_its_start_unless_it_is_told_not_to(
        self,
        monkeypatch: pytest.MonkeyPatch,
        device: str,
        options: dict[str, Any],
        eager: bool,
        newer: bool,
        later: str,
        ready: bool,
    ) -> None:
        """vLLM has switched it off for eager engines by then, and looks at it once their caches are there."""
        with engine_args(Setup("llama", engine="D", options=tuple(options.items()))) as args:
            config = EngineArgs(**{**args, "enforce_eager": eager, "jit_monitor_mode": later}).create_engine_config()
        assert config.kernel_config.enable_jit_warmup is not eager
        seen: list[bool] = []
        stand_ins = {
            "current_platform": SimpleNamespace(device_type=device),
            "refuse_unserved": lambda *_: None,
            "WorkerHalf": lambda config, *_: seen.append(config.kernel_config.enable_jit_warmup),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(f"kvferry.engines.vllm.connector.{name}", stand_in)
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", newer)
        usual = sys.getswitchinterval()
        try:
            KVFerryConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[]))
        finally:
            sys.setswitchinterval(usual)
        assert seen == [ready]

    def test_an_engine_that_only_consumes_answers_who_checks_it_where_it_is_given_a_port(self) -> None:
        """It still prefills for nobody; and both engines say what they are, and show their beacons."""
        listen = f"127.0.0.1:{free_port()}"
        consumer = Setup("llama", tp=2, engine="D", role="kv_consumer", options=(("listen", listen),))
        with engines(Setup("llama", engine="P", role="kv_producer"), consumer) as (there, here):
            assert here.prefill("r", PROMPT) == NOTHING
            address = there.connector.scheduler._address
            asked = ask_all([address, listen], own_keys(), 30.0)
            assert [one.welcome.role for one in asked.engines] == ["producer", "consumer"]
            pairs, findings = check_engines(asked.engines)
            assert ([pair.name for pair in pairs], findings) == ([f"{address} → {listen}"], [])
            assert not pairs[0].findings
            assert pairs[0].plans
            done = read_beacons(asked.engines[0])
            assert (done.ranks, done.findings) == (1, ())


class TestPrefills:
    @pytest.mark.parametrize(
        "sampling",
        [
            side(max_tokens=16),
            side(max_tokens=16, min_tokens=4),
            side(max_tokens=16, stop=["end"], detokenize=True),
            side(max_tokens=16, stop_token_ids=[5]),
            side(max_tokens=16, ignore_eos=True, min_tokens=16),
        ],
        ids=lambda s: "-".join(s),
    )
    def test_one_step_of_all_but_the_last_token(self, sampling: dict[str, Any]) -> None:
        with engines(Setup("nemotron-h", tp=2, engine="P")) as (there,):
            params = prefilled(there, **sampling)
            assert there.scheduled["r"] == TOKENS
            assert there.outputs["r"].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            mine = Request("d", list(PROMPT), SamplingParams(), None)
            assert params["kvferry"]["digest"] == digest_of(mine, TOKENS)
            there.step()
            assert there.scheduled["r"] == TOKENS

    def test_steps_that_are_scheduled_ahead_compute_nothing_more(self) -> None:
        with engines(Setup("nemotron-h", engine="P", ahead=True)) as (there,):
            there.scheduler.add_request(there.request("r", PROMPT, {"do_remote_decode": True}, max_tokens=16))
            assert there.scheduler.schedule().num_scheduled_tokens == {"r": TOKENS}
            assert there.scheduler.schedule().num_scheduled_tokens == {}

    @pytest.mark.parametrize("computed", [TOKENS - 1, TOKENS + 1])
    def test_a_state_after_another_number_of_tokens_is_not_published(self, computed: int) -> None:
        with engines(Setup("nemotron-h", engine="P")) as (there,):
            request = there.request("r", PROMPT, {"do_remote_decode": True})
            there.scheduler.add_request(request)
            there.scheduler.schedule()
            request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, computed
            blocks = there.scheduler.kv_cache_manager.get_block_ids("r")
            assert there.connector.request_finished_all_groups(request, blocks) == (False, NOTHING)

    def test_a_preempted_prefill_is_not_cut_twice(self) -> None:
        with engines(*sides("nemotron-h", side(budget=64), {})) as (there, here):
            request = there.request("r", PROMPT, {"do_remote_decode": True})
            there.scheduler.add_request(request)
            there.step()
            assert request.num_computed_tokens == 64
            there.scheduler.running.remove(request)
            there.scheduler._preempt_request(request, 0.0)

            params = there.finish_prefill(request)
            assert there.scheduled["r"] == 64 + TOKENS
            assert request.num_prompt_tokens == len(request.prompt_token_ids) == TOKENS
            arrival = load(there, here, "r", PROMPT, params)
            assert arrival.differences() == []
            assert ended(here) is FinishReason.LENGTH
            released(there)

    def test_an_aborted_prefill_leaves_no_live_word(self) -> None:
        with engines(Setup("nemotron-h", tp=2, budget=64, engine="P")) as (there,):
            there.scheduler.add_request(there.request("r", PROMPT, {"do_remote_decode": True}))
            there.step()
            assert len(slots(there)) == 2
            there.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            there.step()
            assert slots(there) == []
            assert there.held == 0
            assert not there.reported["sent"]
            prefilled(there, "next")

    @pytest.mark.parametrize(
        "what", ["one token", "prompt logprobs", "embeddings", "embeddings among tokens", "streaming input"]
    )
    def test_what_cannot_be_handed_over_takes_no_lease(self, what: str) -> None:
        with engines(Setup("nemotron-h", engine="P")) as (there,):
            tokens: list[int] | None = PROMPT[:1] if what == "one token" else PROMPT[:40]
            more: dict[str, Any] = {}
            if what == "embeddings":
                tokens, more = None, {"prompt_embeds": torch.ones(40, 128)}
            if what == "embeddings among tokens":
                more = {"prompt_embeds": torch.ones(40, 128), "prompt_is_token_ids": [True] * 20 + [False] * 20}
            if what == "streaming input":
                more = {"resumable": True}
            logprobs = 1 if what == "prompt logprobs" else None
            params = {"kv_transfer_params": {"do_remote_decode": True}}
            sampling = SamplingParams(max_tokens=4, prompt_logprobs=logprobs, extra_args=params)
            request = Request("r", tokens, sampling, None, **more)
            there.scheduler.add_request(request)
            there.step()
            assert slots(there) == []
            assert request.num_prompt_tokens == (1 if what == "one token" else 40)
            if what == "streaming input":
                there.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            else:
                assert there.outputs["r"].kv_transfer_params == NOTHING
            assert there.held == 0

    @pytest.mark.parametrize(("name", "kept"), [("cmpl-1-0-5a", False), ("1_chatcmpl-2", False), ("mine", True)])
    def test_a_stream_that_cannot_carry_a_reference_holds_nothing(
        self, name: str, kept: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with engines(Setup("nemotron-h", engine="P")) as (there,):
            params = there.prefill(name, PROMPT[:40], output_kind=RequestOutputKind.DELTA)
            assert params is not None
            assert params["do_remote_prefill"] is kept
            assert bool(slots(there)) is kept
            assert (f"request {name} asks for a prefill for others in a stream" in caplog.text) is not kept

    def test_the_producer_that_has_no_word_left_hands_out_no_reference(self) -> None:
        with engines(Setup("llama", engine="P")) as (there,):
            there.connector.scheduler._producer._free.clear()
            assert there.prefill("r", PROMPT) == NOTHING
            assert there.held == 0


class TestWaysOut:
    """Whatever becomes of a request at the consumer, the producer gets its blocks back, and the consumer its own."""

    def test_abort_before_blocks_are_allocated(self) -> None:
        with engines(*sides("nemotron-h", side(tp=2), side(tp=2))) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there)))
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            released(there)
            here.step()
            assert here.held == 0
            assert not here.reported["received"]

    def test_abort_while_ranks_read(self) -> None:
        with engines(*sides("nemotron-h", side(tp=2), side(tp=2))) as (there, here):
            here.slow = {0, 1}
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there)))
            here.step_until(lambda: here.waits_for_bytes("r"))
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            here.slow = {1}
            here.step_until(lambda: here.reported["received"][0, "r"] == 1)
            assert here.held > 0
            assert there.held > 0
            here.slow = set()
            here.step_until(lambda: not here.scheduler.requests)
            assert here.held == 0
            released(there)
            assert not here.connector.scheduler._decodes

    def test_abort_after_the_load(self) -> None:
        with engines(*sides("nemotron-h", side(tp=2), side(tp=2))) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there), max_tokens=64))
            here.step_until(lambda: here.scheduled["r"] > 2)
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            here.step()
            assert here.held == 0
            released(there)
            assert not here.connector.scheduler._decodes

    def test_a_consumer_that_has_it_all_loads_nothing(self) -> None:
        prompt = PROMPT[:129]
        with engines(*sides("llama", {}, side(tp=2), prefix_caching=True)) as (there, here):
            for name in ("first", "second"):
                params = prefilled(there, name, prompt)
                here.scheduler.add_request(here.request(name, prompt, params))
                assert ended(here, name) is FinishReason.LENGTH
                there.step_until(lambda: not there.scheduler.requests)
            assert dict(here.reported["received"]) == {(0, "first"): 1, (1, "first"): 1}
            assert (here.counted["loaded"], here.counted["nothing"]) == (1, 1)
            assert there.counted["released"] == 2

    def test_a_consumer_that_computes_prompt_logprobs_loads_nothing(self) -> None:
        with engines(*sides("nemotron-h", {}, {})) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there), prompt_logprobs=1))
            assert ended(here) is FinishReason.LENGTH
            assert here.scheduled["r"] == len(PROMPT)
            assert not here.reported["received"]
            released(there)

    def test_a_preempted_consumer_computes_what_it_had_loaded(self) -> None:
        with engines(*sides("nemotron-h", {}, side(tp=2))) as (there, here):
            request = here.request("r", PROMPT, prefilled(there), max_tokens=64)
            here.scheduler.add_request(request)
            here.step_until(lambda: here.scheduled["r"] == 2)
            released(there)
            here.scheduler.running.remove(request)
            here.scheduler._preempt_request(request, 0.0)
            assert here.connector.get_num_new_matched_tokens(request, 0) == (0, False)
            here.step()
            assert here.scheduled["r"] == 2 + len(PROMPT) + 2
            assert set(here.reported["received"].values()) == {1}

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_producer_that_is_gone(self, policy: str) -> None:
        with engines(*sides("nemotron-h", {}, side(failure_policy=policy))) as (there, here):
            params = prefilled(there)
            there.connector.shutdown()
            here.scheduler.add_request(here.request("r", PROMPT, params))
            assert ended(here) is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)

    def test_a_read_that_cannot_be_posted_fails_one_request_and_the_next_one_loads(self) -> None:
        with engines(*sides("nemotron-h", {}, side(tp=2))) as (there, here):
            transport = here.connectors[1].worker._ferry._transport
            read = transport.read

            def broken(*args: Any, **kwargs: Any) -> Any:
                raise TransportError("the wire is cut")

            transport.read = broken
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there)))
            assert ended(here) is FinishReason.ERROR
            transport.read = read
            assert here.failed == {(1, "r")}
            arrival = load(there, here, "next", PROMPT, prefilled(there, "next"))
            assert arrival.differences() == []


class TestSiblings:
    """Several prompts in one request: vLLM answers with the parameters of the first, and gives them to all at the consumer."""

    NAMES = tuple(f"cmpl-7-{i}-{i}0000000" for i in range(3))
    PROMPTS = (PROMPT, OTHER[:70], OTHER[:100])

    def prefilled(self, there: Engine) -> dict[str, Any]:
        """All are prefilled before the answer leaves."""
        answers = [prefilled(there, *part) for part in zip(self.NAMES, self.PROMPTS, strict=True)]
        return answers[0]

    @pytest.mark.parametrize("tp", [1, 2])
    def test_each_prompt_finds_its_own_reference(self, tp: int) -> None:
        with engines(*sides("nemotron-h", side(tp=3 - tp), side(tp=tp))) as (there, here):
            params = self.prefilled(there)
            for name, prompt in zip(self.NAMES[::-1], self.PROMPTS[::-1], strict=True):
                here.scheduler.add_request(here.request(name, prompt, dict(params)))
                assert loaded(there, here, {name: len(prompt) - 1}).differences() == []
                assert ended(here, name) is FinishReason.LENGTH
                assert here.scheduled[name] == 1
            there.step_until(lambda: not there.scheduler.requests)
            assert (here.counted["loaded"], there.counted["released"]) == (3, 3)
            assert (here.held, there.held) == (0, 0)
            assert not there.connector.scheduler._prefills._siblings._families

    @pytest.mark.parametrize("when", ["at once", "while the producer is met", "after it was asked"])
    def test_one_that_is_aborted_gives_its_own_lease_back(self, when: str) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = self.prefilled(there)
            for name, prompt in zip(self.NAMES, self.PROMPTS, strict=True):
                here.scheduler.add_request(here.request(name, prompt, dict(params)))
            last = here.connector.scheduler._decodes[self.NAMES[-1]]
            if when != "at once":
                here.step()
            if when == "after it was asked":
                here.step_until(lambda: last.sought is not None)
            here.scheduler.finish_requests(list(self.NAMES), RequestStatus.FINISHED_ABORTED)
            here.step_until(lambda: not here.scheduler.requests)
            there.step_until(lambda: not there.scheduler.requests)
            assert there.counted["released"] == 3
            assert (here.held, there.held) == (0, 0)

    def test_those_that_are_aborted_hold_up_nobody_who_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(seeking, "FOR_NOBODY", 2)
        with engines(*sides("llama", {}, {})) as (there, here):
            half, wait, ask = here.connector.scheduler, threading.Event(), seeking.seek
            params = self.prefilled(there)
            asked: list[str] = []

            def silent(address: str, *rest: Any) -> Any:
                asked.append(threading.current_thread().name)
                if threading.current_thread().name.startswith("kvferry-giving-back"):
                    assert wait.wait(60)
                return ask(address, *rest)

            monkeypatch.setattr(seeking, "seek", silent)
            for number in range(6):
                here.scheduler.add_request(here.request(f"cmpl-7-{number}-x", self.PROMPTS[1], dict(params)))
            here.scheduler.finish_requests([f"cmpl-7-{number}-x" for number in range(6)], RequestStatus.FINISHED_ABORTED)
            here.scheduler.add_request(here.request(self.NAMES[2], self.PROMPTS[2], dict(params)))
            assert ended(here, self.NAMES[2]) is FinishReason.LENGTH
            assert here.counted["loaded"] == 1
            wait.set()
            here.step_until(lambda: sum(name.startswith("kvferry-giving-back") for name in asked) == 2)
            assert not half._decodes

    def test_all_may_ask_at_once(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = self.prefilled(there)
            for name, prompt in zip(self.NAMES, self.PROMPTS, strict=True):
                here.scheduler.add_request(here.request(name, prompt, dict(params)))
            for name in self.NAMES:
                assert ended_among(here, name) is FinishReason.LENGTH
                assert here.scheduled[name] == 1
            assert here.counted["loaded"] == 3

    def test_the_first_may_be_over_before_the_others_ask(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = self.prefilled(there)
            for done, (name, prompt) in enumerate(zip(self.NAMES, self.PROMPTS, strict=True), 1):
                here.scheduler.add_request(here.request(name, prompt, dict(params)))
                assert ended(here, name) is FinishReason.LENGTH
                there.step_until(lambda done=done: there.counted["released"] == done)
            assert here.counted["loaded"] == 3

    def test_a_prompt_that_was_not_among_them_is_refused(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = self.prefilled(there)
            prefilled(there, "cmpl-8-0-00000000", OTHER)
            here.scheduler.add_request(here.request("r", OTHER, params))
            assert ended(here) is FinishReason.ERROR
            assert here.counted["refused"] == 1
            assert len(there.connector.scheduler._producer) == 4

    def test_a_prompt_of_one_token_among_them_is_computed(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = prefilled(there, self.NAMES[0])
            assert there.prefill(self.NAMES[1], PROMPT[:1]) == NOTHING
            here.scheduler.add_request(here.request("r", PROMPT[:1], params))
            assert ended(here) is FinishReason.LENGTH
            assert (here.counted["nothing"], here.counted["refused"]) == (1, 0)

    @pytest.mark.parametrize(
        "names",
        [("0_cmpl-9-0-5a5a5a5a", "1_cmpl-9-0-5a5a5a5a"), ("cmpl-9-0-5a5a5a5a", "cmpl-9-1-5b5b5b5b")],
        ids=["two answers", "one prompt twice"],
    )
    def test_parts_with_one_prompt_share_a_lease(self, names: tuple[str, str]) -> None:
        with engines(*sides("nemotron-h", {}, {})) as (there, here):
            requests = [there.request(name, PROMPT, {"do_remote_decode": True}) for name in names]
            for request in requests:
                there.scheduler.add_request(request)
            params = [there.finish_prefill(request) for request in requests]
            assert params[0] == params[1]
            there.idle()
            assert len(slots(there)) == 1
            assert (there.counted["published"], there.counted["prefill_shared"]) == (1, 1)
            for name in names:
                here.scheduler.add_request(here.request(name, PROMPT, params[0]))
            for name in names:
                assert ended_among(here, name) is FinishReason.LENGTH
            released(there)

    @pytest.mark.parametrize(
        "names",
        [
            ("0_cmpl-9-0-5a5a5a5a", "1_cmpl-9-0-5a5a5a5a"),
            ("0_chatcmpl-___prefill_addr_10.0.0.1:8100_9f-5a5a5a5a", "1_chatcmpl-___prefill_addr_10.0.0.1:8100_9f-5a5a5a5a"),
        ],
        ids=["completion", "chat"],
    )
    def test_an_answer_that_comes_after_the_first_has_loaded_is_loaded_too(self, names: tuple[str, str], patient: None) -> None:
        with engines(*sides("nemotron-h", {}, {})) as (there, here):
            params = prefilled(there, names[0])
            for done, name in enumerate(names, 1):
                here.scheduler.add_request(here.request(name, PROMPT, dict(params)))
                assert ended(here, name) is FinishReason.LENGTH
                assert here.counted["loaded"] == done
                all_is_heard(there, here)
            nobody_else_comes(here)
            released(there)

    def test_a_prompt_that_comes_again_while_others_of_its_request_are_there_is_loaded_too(self, patient: None) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            params = self.prefilled(there)
            again = "cmpl-7-3-30000000"
            for name, prompt, tokens in zip(self.NAMES[:2], self.PROMPTS[:2], (1, 120), strict=True):
                here.scheduler.add_request(here.request(name, prompt, dict(params), max_tokens=tokens))
            assert ended_among(here, self.NAMES[0]) is FinishReason.LENGTH
            all_is_heard(there, here)
            here.scheduler.add_request(here.request(again, self.PROMPTS[0], dict(params)))
            assert ended_among(here, again) is FinishReason.LENGTH
            here.step_until(lambda: not here.scheduler.requests)
            assert here.counted["loaded"] == 3

    def test_a_request_that_is_alone_is_released_at_once(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            courier, lingering = here.connector.scheduler._courier, []
            release = courier.release
            courier.release = lambda *args: (lingering.append(args[3]), release(*args))
            here.scheduler.add_request(here.request("cmpl-9-0-5a5a5a5a", PROMPT, prefilled(there)))
            assert ended(here, "cmpl-9-0-5a5a5a5a") is FinishReason.LENGTH
            released(there)
            assert lingering == [0.0]

    def test_a_request_that_is_sent_again_has_a_lease_of_its_own(self) -> None:
        with engines(Setup("llama", engine="P")) as (there,):
            one, other = (prefilled(there, f"cmpl-9-0-5a5a5a5{i}") for i in range(2))
            assert lease_of(one) != lease_of(other)

    def test_what_is_published_stands_while_others_are_prefilled(self) -> None:
        with engines(Setup("llama", engine="P", budget=64)) as (there,):
            prefilled(there, self.NAMES[0], PROMPT[:40])
            prefilled(there, "cmpl-8-0-00000000", OTHER[:40])
            there.scheduler.add_request(there.request(self.NAMES[1], PROMPT, {"do_remote_decode": True}))
            for _ in range(2):
                later(there, 50.0)
                there.step()
            assert self.NAMES[1] in there.scheduler.requests
            there.idle()
            assert there.counted["expired"] == 1
            assert len(slots(there)) == 2

    def test_a_request_that_ends_while_its_reference_is_sought_releases_it(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            half, wait = here.connector.scheduler, threading.Event()
            params, ask = self.prefilled(there), half._seeking._seek

            def slow(*args: Any) -> Any:
                assert wait.wait(60)
                return ask(*args)

            half._seeking._seek = slow
            here.scheduler.add_request(here.request("r", self.PROMPTS[1], params))
            here.step_until(lambda: half._decodes["r"].sought is not None)
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            assert not half._decodes
            wait.set()
            there.step_until(lambda: there.counted["released"] == 1)
            assert not here.reported["received"]

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_producer_that_does_not_answer_costs_the_prompt_and_not_the_engine(self, policy: str) -> None:
        with engines(*sides("llama", {}, side(failure_policy=policy))) as (there, here):
            params = self.prefilled(there)

            def broken(*args: Any) -> Any:
                raise OSError("the line is cut")

            there.connector.scheduler._listener._find = broken
            here.connector.scheduler._seeking._patience_s = 0.5
            here.scheduler.add_request(here.request("r", self.PROMPTS[1], params))
            assert ended(here) is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)
            assert here.counted["refused"] == 1

    def test_a_request_that_vllm_rejects_releases_its_lease(self) -> None:
        """vLLM tells the connector of it with a request of one token that is aborted at once."""
        with engines(*sides("llama", {}, {})) as (there, here):
            rejected = here.request("r", [0], prefilled(there))
            rejected.abort_immediately = True
            here.scheduler.add_request(rejected)
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            released(there)
            here.idle()
            assert not here.counted["load_aborted"]


def ended_among(engine: Engine, name: str) -> FinishReason:
    """How a request ended, while others may not have."""
    engine.step_until(lambda: name in engine.outputs)
    return engine.outputs[name].finish_reason


class TestComingBack:
    """An engine that produces and consumes may be sent its own references by a router."""

    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize("model", ["nemotron-h", "gemma3"])
    def test_a_reference_that_comes_back_is_loaded(self, model: str, tp: int) -> None:
        with engines(Setup(model, tp=tp, engine="both")) as (both,):
            params = prefilled(both, "there")
            arrival = load(both, both, "here", PROMPT, params, source="there")
            assert arrival.differences() == []
            both.step_until(lambda: "here" in both.outputs and not both.scheduler.requests)
            both.idle()
            assert both.outputs["here"].finish_reason is FinishReason.LENGTH
            assert both.scheduled["here"] == 1
            assert both.held == 0
            assert (both.counted["loaded"], both.counted["released"]) == (1, 1)
            assert set(both.reported["received"].values()) == {1}
            assert all(moved["moved"] == needed for moved, needed in zip(both.moved, arrival.needed, strict=True))

    def test_what_its_prefix_cache_holds_is_not_loaded(self) -> None:
        with engines(Setup("llama", engine="both", prefix_caching=True)) as (both,):
            params = prefilled(both, "there", PROMPT[:129])
            both.scheduler.add_request(both.request("here", PROMPT[:129], params))
            both.step_until(lambda: "here" in both.outputs and not both.scheduler.requests)
            both.idle()
            assert both.held == 0
            assert (both.counted["nothing"], both.counted["released"]) == (1, 1)


def picture(seed: int, name: str, *, place: int = 3) -> MultiModalFeatureSpec:
    """What a processor makes of an image, in types that they use."""
    rng = torch.Generator().manual_seed(seed)
    held = {
        "pixels": torch.rand(12, 8, generator=rng, dtype=torch.bfloat16),
        "tiles": [torch.rand(2, 3, generator=rng), torch.rand(4, 3, generator=rng)],
        "grid": torch.tensor([1, 2, 3]),
        "scale": 2.0,
    }
    data = MultiModalKwargsItem({k: MultiModalFieldElem(v, MultiModalSharedField(batch_size=1)) for k, v in held.items()})
    return MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset=place, length=12), name)


class TestMedia:
    """Without a processor cache and prefix caching, vLLM names media by the request they came with."""

    @staticmethod
    def said(engine: Engine, params: dict[str, Any] | None, *media: MultiModalFeatureSpec) -> Request:
        request = engine.request("r", PROMPT, params)
        request.mm_features = list(media)
        return request

    @staticmethod
    @contextmanager
    def pair(*, named: str) -> Iterator[tuple[Engine, Engine]]:
        """`named` are the sides whose names say what media are."""
        with engines(*sides("llama", {}, {})) as both:
            for letter, engine in zip("PD", both, strict=True):
                engine.connector.scheduler._media_by_content = letter not in named
            yield both

    def crossed(self, there: Engine, here: Engine, one: MultiModalFeatureSpec, other: MultiModalFeatureSpec) -> bool:
        """Whether the consumer takes a prompt with `other` for what the producer prefilled with `one`."""
        params = prefilled(there)
        at_producer = self.said(there, {"do_remote_decode": True}, one)
        there.connector.on_new_request(at_producer)
        say(params, digest=there.connector.scheduler._prefills._under_way.pop("r").digest)
        at_consumer = self.said(here, params, other)
        here.connector.on_new_request(at_consumer)
        here.connector.get_num_new_matched_tokens(at_consumer, 0)
        decode = here.connector.scheduler._decodes["r"]
        assert decode.offered is None
        return decode.reason == ""

    @pytest.mark.parametrize("named", ["", "D"])
    def test_the_same_picture_is_the_same_under_any_name(self, named: str) -> None:
        with self.pair(named=named) as (there, here):
            assert self.crossed(there, here, picture(1, "renderer0-mm-1"), picture(1, "renderer0-mm-2"))

    def test_another_picture_is_another_prompt_under_any_name(self) -> None:
        with self.pair(named="") as (there, here):
            assert not self.crossed(there, here, picture(1, "renderer0-mm-1"), picture(2, "renderer0-mm-1"))

    def test_names_that_say_what_they_name_are_taken_at_their_word(self) -> None:
        with self.pair(named="PD") as (there, here):
            assert self.crossed(there, here, picture(1, "5f3a"), picture(1, "5f3a"))

    def test_every_byte_of_a_picture_counts_and_nothing_runs_together(self) -> None:
        one = content_of(picture(1, "a"))
        changed = []
        for key, value in (
            ("pixels", torch.zeros(12, 8, dtype=torch.bfloat16)),
            ("tiles", [torch.zeros(6, 3)]),
            ("grid", torch.tensor([12, 3])),
            ("scale", 3.0),
            ("more", torch.empty(0)),
        ):
            other = picture(1, "a")
            other.data[key] = MultiModalFieldElem(value, MultiModalSharedField(batch_size=1))
            changed.append(content_of(other))
        assert len({one, *changed}) == 6
        assert one == content_of(picture(1, "b"))

    @pytest.mark.parametrize(("gigabytes", "caching", "by_request"), [(0, False, True), (0, True, False), (4, False, False)])
    def test_when_names_say_nothing(self, gigabytes: float, caching: bool, by_request: bool) -> None:
        config = workers(Setup("llama", prefix_caching=caching), "P")[0].vllm_config
        media = replace_field(config.model_config, "multimodal_config", MultiModalConfig(mm_processor_cache_gb=gigabytes))
        assert are_named_by_request(replace_field(config, "model_config", media)) is by_request
        assert not are_named_by_request(config)


class TestBesideOthers:
    """Among several connectors each hears of what all of them have finished."""

    @pytest.mark.parametrize("failed", [False, True])
    def test_what_another_connector_loaded_is_not_ours(self, failed: bool) -> None:
        with engines(*sides("llama", {}, side(failure_policy="recompute"))) as (there, here):
            request = here.request("r", PROMPT, prefilled(there))
            here.connector.on_new_request(request)
            here.connector.update_state_after_alloc(request, here.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0)
            reported = KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"} if failed else set())
            here.connector.update_connector_output(reported)
            here.connector.request_finished_all_groups(request, ([],))
            counted = here.connector.get_kv_connector_stats()
            assert counted is not None
            assert counted.data == {"nothing": 1}
            assert not here.connector.scheduler._decodes
            released(there)

    def test_cards_of_another_connector_are_refused(self) -> None:
        with engines(Setup("llama", engine="P")) as (there,):
            foreign = KVConnectorHandshakeMetadata()
            with pytest.raises(SessionError, match=r"KVConnectorHandshakeMetadata .*name KVFerryConnector first"):
                there.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): foreign})


class TestPeers:
    def test_a_producer_that_is_named_at_the_start_is_known_before_the_first_request(self) -> None:
        with engines(Setup("nemotron-h", tp=2, engine="P")) as (there,):
            peers = (("peers", (there.connector.scheduler._address,)),)
            with engines(Setup("nemotron-h", engine="D", options=peers)) as (here,):
                load(there, here, "r", PROMPT, prefilled(there))
                assert ended(here) is FinishReason.LENGTH

    def test_a_producer_that_cannot_be_read_ends_the_start(self) -> None:
        with engines(Setup("llama", engine="P")) as (there,):
            peers = (("peers", (there.connector.scheduler._address,)),)
            with pytest.raises(MismatchError, match="model"), engines(Setup("gemma3", engine="D", options=peers)):
                pass

    def test_a_producer_that_is_not_there_yet_does_not(self) -> None:
        with engines(Setup("llama", engine="D", options=(("peers", ("127.0.0.1:1",)),))) as (here,):
            here.scheduler.add_request(here.request("r", PROMPT, None))
            assert ended(here) is FinishReason.LENGTH

    def test_other_weights_of_one_configuration_are_another_model(self, caplog: pytest.LogCaptureFixture) -> None:
        one, other = (side(options=(("weights", name),)) for name in ("base", "tuned"))
        with engines(*sides("llama", one, other)) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there)))
            assert ended(here) is FinishReason.ERROR
            assert here.counted["refused"] == 1
            assert re.search(r"model LlamaFor.* weights base\) there, LlamaFor.* weights tuned\) here", caplog.text)
            released(there)

    def test_another_model_is_refused_when_a_request_names_it(self) -> None:
        with engines(Setup("llama", engine="P"), Setup("llama-2kv", engine="D")) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there)))
            assert ended(here) is FinishReason.ERROR
            assert here.counted["refused"] == 1
            released(there)


def test_everything_that_is_counted_is_exported() -> None:
    known = {*COUNTERS, *(key for _, keys, _ in LABELLED.values() for key in keys.values())}
    with engines(*sides("nemotron-h", side(tp=2), side(tp=2))) as (there, here):
        load(there, here, "r", PROMPT, prefilled(there))
        assert ended(here) is FinishReason.LENGTH
        here.scheduler.add_request(here.request("refused", PROMPT, {"do_remote_prefill": True}))
        assert ended(here, "refused") is FinishReason.ERROR
        released(there)
        counted = set(here.counted) | set(there.counted)
        assert counted == {
            "published",
            "released",
            "loaded",
            "tokens",
            "refused",
            "moved",
            "predicted",
            "runs",
            "posting_s",
            "wire_s",
        }
        assert here.counted["tokens"] == TOKENS
    assert counted <= known


class TestTables:
    def test_null_blocks_are_holes(self) -> None:
        groups = workers(Setup("gemma3"), "P")[0].kv_cache_config.kv_cache_groups
        found = tables_of(groups, ([0, 0, 5, 6], [0, 0, 7, 8], [1, 2, 3, 4]), 128)
        assert found == {0: [HOLE, HOLE, 5, 6], 1: [HOLE, HOLE, 7, 8], 2: [1, 2, 3, 4]}

    def test_blocks_past_the_last_token_are_left_out(self) -> None:
        groups = workers(Setup("gemma3"), "P")[0].kv_cache_config.kv_cache_groups
        assert tables_of(groups, ([1, 2, 3], [4, 5, 6], [7, 8, 9]), 64) == {0: [1, 2], 1: [4, 5], 2: [7, 8]}

    @pytest.mark.parametrize(("tokens", "place"), [(1, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
    def test_with_prefix_caching_a_state_lies_in_the_block_of_its_last_token(self, tokens: int, place: int) -> None:
        groups = workers(Setup("nemotron-h", prefix_caching=True), "P")[0].kv_cache_config.kv_cache_groups
        assert {g.kv_cache_spec.block_size for g in groups} == {32}
        found = tables_of(groups, ([11, 12, 13, 99], [21, 22, 23, 99], [31, 32, 33, 34]), tokens)
        assert (found[0], found[1]) == (11 + place, 21 + place)

    def test_without_prefix_caching_speculative_blocks_are_not_the_state(self) -> None:
        groups = workers(Setup("granite-h-1g", speculative=2), "P")[0].kv_cache_config.kv_cache_groups
        states = [i for i, g in enumerate(groups) if type(g.kv_cache_spec).__name__ == "MambaSpec"]
        found = tables_of(groups, tuple([10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(len(groups))), 20)
        assert [found[i] for i in states] == [10 * i + 1 for i in states]

    @pytest.mark.parametrize("mode", ["none", "align"])
    def test_a_group_of_states_of_several_shapes_has_one_state_too(self, mode: str) -> None:
        shapes = (((3, 8), (4, 16)), ((3, 16), (4, 8)))
        specs = {
            f"layers.{i}": MambaSpec(
                block_size=32, shapes=some, dtypes=(torch.float32,) * 2, page_size_padded=1024, mamba_cache_mode=mode
            )
            for i, some in enumerate(shapes)
        }
        merged = UniformTypeKVCacheSpecs.from_specs(specs)
        assert merged is not None
        for names in (list(specs), []):
            found = tables_of([KVCacheGroupSpec(names, merged)], ([11, 12, 13],), 70)
            assert found == {0: 11 if mode == "none" else 13}

    @pytest.mark.parametrize("ids", [[], [0], [0, 0]])
    def test_a_state_that_no_block_holds_is_refused(self, ids: list[int]) -> None:
        groups = workers(Setup("nemotron-h"), "P")[0].kv_cache_config.kv_cache_groups
        with pytest.raises(BindError, match="group 0: no block holds the state after 20 tokens"):
            tables_of(groups, (ids, [1], [1]), 20)

    def test_a_reference_says_where_the_window_let_go(self) -> None:
        with engines(Setup("gemma3", engine="P")) as (there,):
            blocks = prefilled(there)["kvferry"]["blocks"]
            assert [table[:3].count(HOLE) for _, table in sorted(blocks.items())] == [2, 2, 0]
            assert not any(0 in table for table in blocks.values())

    def test_a_stage_without_layers_of_a_group_of_several_shapes_has_the_group_too(self) -> None:
        worker = workers(Setup("llama"), "P")[0]
        (group,) = worker.kv_cache_config.kv_cache_groups
        merged = UniformTypeKVCacheSpecs.from_specs({"layers.7": group.kv_cache_spec, "layers.8": group.kv_cache_spec})
        config = replace_field(worker.kv_cache_config, "kv_cache_groups", [group, KVCacheGroupSpec([], merged)])
        groups = dataclasses.replace(worker, kv_cache_config=config).manifest("P").groups
        assert [(found.id, found.tokens) for found in groups] == [(0, 32), (1, 32)]


class TestFills:
    def test_the_null_block_is_neither_read_nor_written(self) -> None:
        with engines(*sides("gemma3", {}, side(tp=2))) as (there, here):
            params = prefilled(there)
            for engine, value in ((there, 0xAA), (here, 0xBB)):
                for worker in engine.ranks:
                    for cache in worker.kv_caches.values():
                        cache[0].view(torch.uint8).fill_(value)
            arrival = load(there, here, "r", PROMPT, params)
            assert arrival.differences() == []
            for worker in here.ranks:
                for cache in worker.kv_caches.values():
                    assert (cache[0].view(torch.uint8) == 0xBB).all()

    @pytest.mark.parametrize("model", ["gemma3", "nemotron-h", "granite-h-1g"])
    def test_a_loaded_block_keeps_nothing_of_what_was_there(self, model: str) -> None:
        with engines(*sides(model, {}, side(block=64, speculative=2 if model == "granite-h-1g" else 0))) as (there, here):
            (worker,) = here.ranks
            worker.memory[:] = 0xFF
            arrival = load(there, here, "r", PROMPT, prefilled(there))
            assert arrival.differences() == []
            for index, group in enumerate(worker.kv_cache_config.kv_cache_groups):
                blocks = [block for block in here.table("r", TOKENS)[index] if block != HOLE]
                for name in group.layer_names:
                    cache = worker.kv_caches[name]
                    loaded = cache[blocks] if len(cache) == here.setup.blocks else cache.unflatten(0, (40, -1))[blocks]
                    held = loaded.contiguous().view(torch.float32)
                    assert not held.isnan().any()


WRONG_OPTIONS = pytest.mark.parametrize(
    ("options", "said"),
    [
        ((("lease", 3),), r"no option 'lease': did you mean lease_s\?"),
        ((("zzz", 3),), r"no option 'zzz': there are listen, "),
        ((("lease_s", 0),), r"lease_s"),
        ((("listen", "0.0.0.0:0"),), r"needs a key: set key_file"),
        ((("peers", ("nowhere",)),), r"'nowhere' is not an address"),
    ],
    ids=lambda o: o[0][0] if isinstance(o, tuple) else "",
)


class TestNames:
    def test_the_class_has_the_name_that_users_write(self) -> None:
        assert KVFerryConnector.__name__ == "KVFerryConnector"
        assert supports_hma(KVFerryConnector)

    @pytest.mark.parametrize("path", ["kvferry.engines.vllm", None], ids=["by its module", "by its name"])
    def test_vllms_factory_makes_it(self, path: str | None) -> None:
        register()
        register()
        worker = workers(Setup("llama", engine="P"), "P")[0]
        transfer = KVTransferConfig(
            kv_connector="KVFerryConnector", kv_connector_module_path=path, kv_role="kv_both", engine_id="P"
        )
        assert KVConnectorFactory.get_connector_class(transfer) is KVFerryConnector
        assert KVConnectorFactory.supports_hma_config(transfer)
        config = replace_field(worker.vllm_config, "kv_transfer_config", transfer)
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, worker.kv_cache_config)
        try:
            assert isinstance(made, KVFerryConnector)
        finally:
            made.shutdown()

    def test_loaded_by_its_module_it_is_known_by_its_name(self) -> None:
        """As vLLM looks up the statistics of one connector among several, in a process of its own."""
        code = (
            "from vllm.config import KVTransferConfig;"
            "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory;"
            "from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector;"
            "one = dict(kv_connector='KVFerryConnector', kv_connector_module_path='kvferry.engines.vllm', kv_role='kv_both');"
            "factory.get_connector_class(KVTransferConfig(**one));"
            "print(MultiConnector.build_kv_connector_stats({'KVFerryConnector': {'loaded': 1}}).reduce())"
        )
        environment = {**os.environ, "VLLM_PLUGINS": ""}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
        assert done.stdout.splitlines()[-1:] == ["{'KVFerryConnector': {'loads_loaded': 1}}"], done.stderr[-2000:]

    def test_vllm_is_told_of_it_by_an_entry_point(self) -> None:
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        assert project["entry-points"]["vllm.general_plugins"] == {"kvferry": "kvferry.engines.vllm:register"}

    @pytest.mark.parametrize(("model", "layout"), [("llama", "LBHNC"), ("nemotron-h", "LBHNC"), ("deepseek", None)])
    def test_caches_are_asked_for_head_by_head_where_there_are_heads(self, model: str, layout: str | None) -> None:
        config = workers(Setup(model), "P")[0].vllm_config
        assert KVFerryConnector.get_required_kvcache_layout(config) == layout

    @pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
    @pytest.mark.parametrize("role", list(KVConnectorRole))
    def test_context_parallelism_is_refused(self, field: str, role: KVConnectorRole) -> None:
        worker = workers(Setup("llama", engine="P"), "P")[0]
        parallel = replace_field(worker.vllm_config.parallel_config, field, 2)
        config = replace_field(worker.vllm_config, "parallel_config", parallel)
        with as_rank(worker.setup, worker.vllm_config), pytest.raises(ManifestError, match=rf"{field} > 1: .*set it to 1"):
            KVConnectorFactory.create_connector(config, role, worker.kv_cache_config)

    @pytest.mark.parametrize(
        ("inside", "field", "value", "said"),
        [
            ("kv_transfer_config", "kv_buffer_device", "cuda", "kv_buffer_device is 'cuda', .* on 'cpu': leave it out"),
            ("kv_transfer_config", "enable_permute_local_kv", True, "enable_permute_local_kv .*leave it out"),
            ("kv_transfer_config", "kv_port", 7600, "kv_port is 7600, .* with listen in kv_connector_extra_config"),
            ("model_config", "enable_sleep_mode", True, "without --enable-sleep-mode"),
            ("aux_output_config", "enable_return_routed_experts", True, "without --enable-return-routed-experts"),
        ],
        ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
    )
    @pytest.mark.parametrize("role", list(KVConnectorRole))
    def test_settings_that_are_not_served_are_refused(
        self, inside: str, field: str, value: Any, said: str, role: KVConnectorRole
    ) -> None:
        worker = workers(Setup("llama", engine="P"), "P")[0]
        changed = replace_field(getattr(worker.vllm_config, inside), field, value)
        config = replace_field(worker.vllm_config, inside, changed)
        with as_rank(worker.setup, worker.vllm_config), pytest.raises(SessionError, match=said):
            KVConnectorFactory.create_connector(config, role, worker.kv_cache_config)

    def test_no_setting_of_a_transfer_is_ignored(self) -> None:
        """A setting that a later vLLM adds has to be looked at."""
        served = {"kv_connector", "kv_connector_module_path", "kv_connector_extra_config", "engine_id", "kv_role"}
        refused = {"kv_buffer_device", "enable_permute_local_kv", "kv_port"}
        fields = {field.name for field in dataclasses.fields(KVTransferConfig)}
        assert fields == served | refused | {"kv_load_failure_policy"}

    @WRONG_OPTIONS
    def test_wrong_options_are_named_before_any_process_of_an_engine_with_graphs_starts(
        self, options: tuple[tuple[str, Any], ...], said: str
    ) -> None:
        with pytest.raises(SessionError, match=said):
            KVFerryConnector.requires_piecewise_for_cudagraph(dict(options))
        assert not KVFerryConnector.requires_piecewise_for_cudagraph({"lease_s": 3})

    @WRONG_OPTIONS
    def test_wrong_options_are_named_at_the_start(self, options: tuple[tuple[str, Any], ...], said: str) -> None:
        worker = workers(Setup("llama", engine="P", options=options), "P")[0]
        with as_rank(worker.setup, worker.vllm_config), pytest.raises(SessionError, match=said):
            KVConnectorFactory.create_connector(worker.vllm_config, KVConnectorRole.WORKER, worker.kv_cache_config)


def replace_field(config: Any, field: str, value: Any) -> Any:
    """A shallow copy: vLLM's configurations check themselves when they are made."""
    made = object.__new__(type(config))
    made.__dict__.update(config.__dict__)
    made.__dict__[field] = value
    return made
