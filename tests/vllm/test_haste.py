"""Loads that are made in the step that orders them: with vLLM's own scheduler, and reads that any thread may make, as those out
of mapped memory are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine import Setup, build
from served import Arrival, Engine, engines, load, side, sides
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm import haste
from kvferry.engines.vllm.cargo import Orders, Report
from kvferry.engines.vllm.haste import (
    FEW,
    LOAD_S,
    LOADS_A_STEP,
    LOADS_BESIDE,
    SHORT_S,
    Haste,
    looks_ahead,
    may_hurry,
)
from kvferry.engines.vllm.nearby import stay_nearby
from kvferry.errors import SessionError
from kvferry.session import Lease, Outcome, PeerKey

pytestmark = pytest.mark.vllm

PROMPT = list(range(7, 165))
PEER, OTHER = PeerKey("127.0.0.1:1", "P", "1"), PeerKey("127.0.0.1:2", "P", "2")
REQUEST = SimpleNamespace(mm_features=[])


def prompt(seed: int, tokens: int = len(PROMPT)) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 200 for i in range(tokens)]


def prefilled(there: Engine, name: str, tokens: list[int]) -> dict[str, Any]:
    params = there.prefill(name, tokens)
    assert params is not None
    return params


def killed(there: Engine, params: dict[str, Any]) -> None:
    """Its lease ends."""
    said = params["kvferry"]["lease"]
    there.connectors[0].worker._words.kill(Lease(said["slot"], int(said["generation"])))


def acquainted(there: Engine, here: Engine, first: str = "first") -> None:
    """A producer's first load tells how fast it is."""
    load(there, here, first, PROMPT, prefilled(there, first, PROMPT))
    here.step_until(lambda: first not in here.scheduler.requests)
    there.step_until(lambda: not there.scheduler.requests)


def in_one_step(there: Engine, here: Engine, name: str, tokens: list[int], params: dict[str, Any]) -> Arrival:
    here.scheduler.add_request(here.request(name, tokens, params))
    arrival = Arrival(there, here)

    def forward(out: Any) -> None:
        for ordered in out.kv_connector_metadata.loads:
            assert ordered.in_step
            arrival.expect(name, params["kvferry"]["tokens"], ordered.start)

    here.step(forward)
    return arrival


@pytest.mark.usefixtures("_quick")
class TestInAStep:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_a_known_producers_load_is_over_and_its_request_computed_in_one_step(self, tp: int) -> None:
        with engines(*sides("llama", side(tp=2), side(tp=tp))) as (there, here):
            acquainted(there, here)
            here.soil(5)
            tokens, before = prompt(1), [counted["moved"] for counted in here.moved]
            arrival = in_one_step(there, here, "r", tokens, prefilled(there, "r", tokens))
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.scheduled["r"] == 1
            assert not [key for key in here.reported["received"] if key[1] == "r"]
            assert arrival.differences() == []
            moved = [counted["moved"] - was for counted, was in zip(here.moved, before, strict=True)]
            assert all(moved)
            assert (here.counted["loaded"], here.counted["in_step"]) == (2, 1)
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    def test_the_first_load_of_a_producer_is_waited_for_beside_the_steps(self) -> None:
        with engines(*sides("llama", side(), side())) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there, "r", PROMPT)))
            here.step_until(lambda: here.waits_for_bytes("r"))

    @pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
    @pytest.mark.parametrize("ending", ["preempted", "aborted"])
    def test_what_is_lost_in_a_step_of_a_request_that_leaves_it_is_not_taken_for_right(self, ending: str, role: str) -> None:
        """Neither its token nor its blocks, nor what was computed after them: before its loss is told it is preempted, to be
        computed anew, which vLLM does to nobody in flight where it schedules ahead, or aborted."""
        consumer = side(prefix_caching=True, ahead=ending == "aborted", blocks=60, role=role)
        with engines(*sides("llama", side(), consumer)) as (there, here):
            acquainted(there, here)
            here.scheduler.add_request(here.request("other", prompt(9, 64), None, max_tokens=9))
            zeroth = here.begin()
            tokens = prompt(2, 161)
            params = prefilled(there, "x", tokens[:97])
            killed(there, params)
            here.scheduler.add_request(here.request("x", tokens, params))
            first = here.begin()
            assert here.status("x") is RequestStatus.RUNNING
            assert here.scheduled["x"] == 65
            here.end(*zeroth)
            taken = []
            if ending == "preempted":
                taken = here.pool.get_new_blocks(here.pool.get_num_free_blocks())
            else:
                here.scheduler.finish_requests("x", RequestStatus.FINISHED_ABORTED)
            second = here.begin()
            assert here.status("x") is (RequestStatus.PREEMPTED if taken else None)
            here.end(*first)
            assert "x" not in here.outputs
            assert here.scheduler.kv_cache_manager.get_computed_blocks(here.request("again", tokens, None))[1] == 0
            here.end(*second)
            here.pool.free_blocks(taken)
            if ending == "preempted":
                here.step_until(lambda: "x" in here.outputs)
                assert here.outputs["x"].finish_reason is FinishReason.LENGTH
                assert here.scheduled["x"] == 65 + len(tokens)
            assert not here.connector.scheduler._decodes or ending == "preempted"

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_load_that_fails_in_its_step_fails_its_request_and_nothing_of_the_next_step_is_taken(self, ahead: bool) -> None:
        with engines(*sides("llama", side(), side(prefix_caching=True, ahead=ahead))) as (there, here):
            acquainted(there, here)
            tokens = prompt(2)
            params = prefilled(there, "r", tokens)
            killed(there, params)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            steps = [here.begin()]
            assert here.status("r") is RequestStatus.RUNNING
            if ahead:
                steps.append(here.begin())
            for step in steps:
                here.end(*step)
            here.idle()
            assert here.outputs["r"].finish_reason is FinishReason.ERROR
            assert here.outputs["r"].new_token_ids == []
            assert here.status("r") is None
            assert here.counted["failed"] == 1
            assert here.held == 0
            again = here.request("again", tokens, None)
            assert here.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0
            there.step_until(lambda: not there.scheduler.requests)
            arrival = load(there, here, "next", PROMPT, prefilled(there, "next", PROMPT))
            assert arrival.differences() == []

    def test_a_request_whose_load_is_lost_in_its_step_fails_and_the_others_go_on(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True, prefix_caching=True))) as (there, here):
            acquainted(there, here)
            params = {name: prefilled(there, name, prompt(seed)) for seed, name in ((2, "lost"), (3, "r"))}
            killed(there, params["lost"])
            for seed, name in ((2, "lost"), (3, "r")):
                here.scheduler.add_request(here.request(name, prompt(seed), params[name], max_tokens=8))
            one = here.begin()
            assert one[0].num_scheduled_tokens == {"lost": 1, "r": 1}
            two = here.begin()
            here.end(*one)
            assert here.outputs["lost"].finish_reason is FinishReason.ERROR
            here.end(*two)
            here.step_until(lambda: not here.scheduler.requests)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.outputs["lost"].new_token_ids == []
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    def test_a_request_that_shares_what_failed_to_load_fails_too(self) -> None:
        with engines(*sides("llama", side(), side(prefix_caching=True))) as (there, here):
            acquainted(there, here)
            tokens = prompt(3)
            params = prefilled(there, "r", tokens)
            killed(there, params)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            here.scheduler.add_request(here.request("shares", [*tokens, 9, 9], None, max_tokens=4))
            here.step()
            here.idle()
            assert [here.outputs[name].finish_reason for name in ("r", "shares")] == [FinishReason.ERROR] * 2
            assert here.held == 0

    @pytest.mark.parametrize("ending", ["fails", "aborted"])
    @pytest.mark.parametrize("ahead", [False, True])
    def test_what_others_computed_behind_a_lost_load_is_not_found_later(self, ahead: bool, ending: str) -> None:
        with engines(*sides("llama", side(), side(prefix_caching=True, ahead=ahead))) as (there, here):
            acquainted(there, here)
            tokens = prompt(3, 97)
            longer = [*tokens[:96], *prompt(5, 65)]
            params = prefilled(there, "r", tokens)
            killed(there, params)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            here.scheduler.add_request(here.request("shares", longer, None, max_tokens=4))
            first = here.begin()
            assert first[0].num_scheduled_tokens == {"r": 1, "shares": 65}
            if ending == "aborted":
                here.scheduler.finish_requests("shares", RequestStatus.FINISHED_ABORTED)
            here.end(*first)
            here.idle()
            assert here.outputs["r"].finish_reason is FinishReason.ERROR
            here.scheduler.add_request(here.request("r again", tokens, None, max_tokens=1))
            here.step_until(lambda: "r again" in here.outputs)
            again = here.request("shares again", longer, None)
            assert here.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 96

    def test_what_the_next_step_computes_of_a_lost_load_that_was_aborted_is_not_found_later(self) -> None:
        with engines(*sides("llama", side(), side(prefix_caching=True, ahead=True, budget=64))) as (there, here):
            acquainted(there, here)
            tokens = prompt(3, 230)
            params = prefilled(there, "r", tokens[:97])
            killed(there, params)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            first, second = here.begin(), here.begin()
            assert [out.num_scheduled_tokens for out, _ in (first, second)] == [{"r": 64}, {"r": 64}]
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            here.end(*first)
            here.end(*second)
            here.idle()
            here.scheduler.add_request(here.request("same beginning", tokens[:170], None, max_tokens=1))
            here.step_until(lambda: "same beginning" in here.outputs)
            again = here.request("again", tokens, None)
            assert here.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 160

    def test_steps_are_in_doubt_only_until_their_loads_are_known_to_be_right(self) -> None:
        with engines(*sides("llama", side(), side(prefix_caching=True, ahead=True))) as (there, here):
            acquainted(there, here)
            doubts = here.connector.scheduler._doubts
            pending: list[Any] = []
            seen = []
            for turn in range(8):
                tokens = prompt(20 + turn)
                params = prefilled(there, f"r{turn}", tokens)
                here.scheduler.add_request(here.request(f"r{turn}", tokens, params, max_tokens=4))
                pending.append(here.begin())
                if len(pending) > 1:
                    here.end(*pending.pop(0))
                seen.append(len(doubts._steps))
            here.end(*pending.pop())
            here.idle()
            assert 0 < max(seen) <= 2
            assert here.counted["in_step"] > 2
            assert not doubts._steps

    def test_beside_other_connectors_none_is_made_in_its_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
        with engines(*sides("llama", side(), side(prefix_caching=True))) as (there, here):
            assert not here.connector.scheduler.can_undo
            acquainted(there, here)
            tokens = prompt(3)
            params = prefilled(there, "r", tokens)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            here.step()
            assert here.scheduled["r"] == 0
            here.step_until(lambda: "r" in here.outputs)
            assert here.counted["loaded"] == 2
            assert not here.counted["in_step"]

    def test_a_request_that_shares_only_what_was_there_before_goes_on(self) -> None:
        with engines(*sides("llama", side(), side(prefix_caching=True))) as (there, here):
            acquainted(there, here)
            tokens = prompt(9)
            params = prefilled(there, "r", tokens)
            here.scheduler.add_request(here.request("held", tokens[:70], None, max_tokens=20))
            here.step()
            killed(there, params)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            here.step()
            assert here.outputs["r"].finish_reason is FinishReason.ERROR
            assert here.status("held") is RequestStatus.RUNNING
            here.step_until(lambda: here.status("held") is None)
            assert here.outputs["held"].finish_reason is FinishReason.LENGTH
            again = here.request("again", tokens, None)
            assert here.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 64

    def test_a_producer_that_ranks_no_longer_know_costs_the_request_and_not_the_engine(self) -> None:
        with engines(*sides("llama", side(), side())) as (there, here):
            acquainted(there, here)
            params = prefilled(there, "r", prompt(4))
            here.connectors[0].worker._ferry._links.peers.clear()
            here.scheduler.add_request(here.request("r", prompt(4), params))
            here.step()
            here.idle()
            assert here.outputs["r"].finish_reason is FinishReason.ERROR
            there.step_until(lambda: not there.scheduler.requests)

    def test_a_request_that_is_aborted_while_its_step_runs_gives_everything_back(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            acquainted(there, here)
            here.scheduler.add_request(here.request("r", prompt(5), prefilled(there, "r", prompt(5)), max_tokens=4))
            step = here.begin()
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            here.end(*step)
            here.idle()
            assert here.held == 0
            assert not here.connector.scheduler._decodes
            there.step_until(lambda: not there.scheduler.requests)
            assert there.held == 0

    def test_of_many_that_come_together_a_few_are_loaded_in_each_step_and_all_leases_are_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(haste, "LOADS_A_STEP", 2)
        monkeypatch.setattr(haste, "LOAD_S", 1e9)
        with engines(*sides("llama", side(), side())) as (there, here):
            acquainted(there, here)
            names = [f"r{i}" for i in range(5)]
            for i, name in enumerate(names):
                here.scheduler.add_request(here.request(name, prompt(i, 40), prefilled(there, name, prompt(i, 40))))
            finished = []
            for _ in range(3):
                here.step()
                finished.append(sum(name in here.outputs for name in names))
            assert finished == [2, 4, 5]
            assert not here.connector.scheduler._unchecked
            there.step_until(lambda: not there.scheduler.requests)
            assert there.counted["released"] == len(names) + 1

    def test_the_first_tokens_of_many_that_were_loaded_wait_for_no_other_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(haste, "LOADS_A_STEP", 2)
        monkeypatch.setattr(haste, "LOAD_S", 1e9)
        monkeypatch.setattr(haste, "FEW", 1)
        monkeypatch.setattr("kvferry.engines.vllm.scheduler.looks_ahead", lambda config: True)
        with engines(*sides("llama", side(), side())) as (there, here):
            acquainted(there, here)
            for i, name in enumerate(("r0", "r1", "r2", "r3")):
                params = prefilled(there, name, prompt(i, 40))
                here.scheduler.add_request(here.request(name, prompt(i, 40), params, max_tokens=9))
            ordered: list[int] = []
            for _ in range(5):
                here.step(lambda out: ordered.append(len(out.kv_connector_metadata.loads)))
            assert ordered == [2, 0, 2, 0, 0]
            here.step_until(lambda: not here.scheduler.requests)
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    def test_a_request_that_ends_before_its_reference_was_read_gives_the_lease_back(self) -> None:
        with engines(*sides("llama", side(), side())) as (there, here):
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there, "r", PROMPT)))
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            assert not here.connector.scheduler._decodes
            there.step_until(lambda: not there.scheduler.requests)
            assert there.held == 0

    def test_a_rank_in_the_schedulers_process_has_its_orders_before_vllm_passes_them_on(self) -> None:
        with engines(*sides("llama", side(), side())) as (there, here):
            worker = here.connectors[0].worker
            stay_nearby(here.config.kv_transfer_config.engine_id, worker)
            here.scheduler.add_request(here.request("first", PROMPT, prefilled(there, "first", PROMPT)))
            here.step_until(lambda: "first" in here.outputs)
            here.scheduler.add_request(here.request("r", prompt(8), prefilled(there, "r", prompt(8))))
            out, parts = here.begin(lambda out: worker._ferry.settle(["r"], 5.0))
            assert out.kv_connector_metadata == Orders(begun=True)
            here.end(out, parts)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.moved[0]["moved"] == here.moved[0]["predicted"] > 0
            assert here.counted["loaded"] == 2

    def test_while_a_producer_is_met_none_is_made_in_its_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with engines(*sides("llama", side(), side())) as (there, here):
            acquainted(there, here)
            worker = here.connectors[0].worker
            stay_nearby(here.config.kv_transfer_config.engine_id, worker)
            params = [prefilled(there, name, prompt(seed)) for seed, name in enumerate("rs", 1)]
            monkeypatch.setattr(type(worker), "meets", property(lambda _: True))
            here.scheduler.add_request(here.request("r", prompt(1), params[0]))
            here.step()
            assert here.waits_for_bytes("r")
            here.step_until(lambda: "r" in here.outputs)
            monkeypatch.undo()
            in_one_step(there, here, "s", prompt(2), params[1])
            assert here.scheduled["s"] == 1

    def test_copies_that_never_end_stop_the_engine_rather_than_let_it_compute_on(self) -> None:
        with engines(*sides("llama", side(), side())) as (there, here):
            acquainted(there, here)
            worker = here.connectors[0].worker
            worker._options = msgspec.structs.replace(worker._options, read_s=0.2)
            ferry = worker._ferry
            ferry._passage._filled = lambda crossing: False
            here.scheduler.add_request(here.request("r", prompt(6), prefilled(there, "r", prompt(6))))
            with pytest.raises(SessionError, match="have not ended in"):
                here.step()
            del ferry._passage._filled


STATES = ("nemotron-h", "granite-h-1g", "qwen3-next", "jamba", "lfm2")


def known(there: Engine, here: Engine) -> None:
    here.scheduler.add_request(here.request("first", PROMPT, prefilled(there, "first", PROMPT)))
    here.step_until(lambda: "first" in here.outputs)


def computing(here: Engine) -> tuple[Any, list[Any]]:
    """A step in which something is computed, also while others are in flight."""
    name = f"computed {len(here.scheduled)}"
    here.scheduler.add_request(here.request(name, prompt(9, 10), None))
    step = here.begin()
    assert name in step[0].num_scheduled_tokens
    return step


@contextmanager
def held_up(here: Engine) -> Iterator[None]:
    """Nothing is loaded beside the steps until the end of this."""
    with here.connectors[0].worker._ferry._turn:
        yield


def loaded_beside(here: Engine, name: str) -> None:
    """Until the load of a request is over, and nobody has been told."""
    passage, deadline = here.connectors[0].worker._ferry._passage, time.monotonic() + 20
    while name not in [outcome.request for outcome in passage.outcomes]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("_nearby")
class TestBesideSteps:
    @pytest.mark.parametrize("told", ["between two steps", "with a step"])
    def test_what_has_been_loaded_is_computed_in_the_next_step_that_is_put_together(self, told: str) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            known(there, here)
            earlier = computing(here)
            tokens, before = prompt(1), here.moved[0]["moved"]
            params = prefilled(there, "r", tokens)
            here.scheduler.add_request(here.request("r", tokens, params))
            with held_up(here):
                first = computing(here)
                assert here.waits_for_bytes("r")
                here.end(*earlier)
                second = computing(here) if told == "between two steps" else None
            loaded_beside(here, "r")
            second = second or computing(here)
            here.end(*first)
            third = here.begin()
            assert "r" in third[0].num_scheduled_tokens
            here.end(*second)
            here.end(*third)
            here.idle()
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.moved[0]["moved"] > before
            assert here.counted["loaded"] == 2
            assert not here.reported["received"][0, "r"]
            there.step_until(lambda: not there.scheduler.requests)

    def test_what_nobody_asked_for_since_the_last_step_is_told_with_the_next(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            known(there, here)
            steps = [computing(here)]
            params = prefilled(there, "r", prompt(1))
            here.scheduler.add_request(here.request("r", prompt(1), params))
            with held_up(here):
                steps.append(computing(here))
            loaded_beside(here, "r")
            steps.append(computing(here))
            assert here.reported["received"][0, "r"] == 1
            for step in steps:
                here.end(*step)
            here.step_until(lambda: "r" in here.outputs)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.reported["received"][0, "r"] == 1

    @pytest.mark.parametrize("computes", [False, True])
    def test_after_a_step_in_which_nothing_was_computed_nothing_is_left_to_be_asked_for(self, computes: bool) -> None:
        """vLLM need not look at the results of such a step."""
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            known(there, here)
            params = prefilled(there, "r", prompt(1))
            here.scheduler.add_request(here.request("r", prompt(1), params))
            with held_up(here):
                here.step()
                assert here.waits_for_bytes("r")
            loaded_beside(here, "r")
            step = computing(here) if computes else here.begin()
            assert here.reported["received"][0, "r"] == 1
            here.end(*step)
            here.step_until(lambda: "r" in here.outputs)

    def test_a_load_that_failed_is_told_with_the_next_step_and_fails_its_request_alone(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            known(there, here)
            earlier = computing(here)
            params = prefilled(there, "r", prompt(1))
            killed(there, params)
            here.scheduler.add_request(here.request("r", prompt(1), params, max_tokens=4))
            with held_up(here):
                first = computing(here)
                here.end(*earlier)
            loaded_beside(here, "r")
            second = computing(here)
            assert (0, "r") in here.failed
            here.end(*first)
            here.end(*second)
            here.step_until(lambda: "r" in here.outputs)
            assert here.outputs["r"].finish_reason is FinishReason.ERROR
            assert here.scheduled["r"] == 0
            assert here.counted["failed"] == 1

    @pytest.mark.usefixtures("_quick")
    def test_who_shares_blocks_of_a_load_that_was_lost_in_its_step_fails_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if it was loaded beside that step, and may not run in the next for want of a block."""
        allows = Haste.allows
        monkeypatch.setattr(
            Haste, "allows", lambda self, request, *rest: request.request_id == "x" and allows(self, request, *rest)
        )
        with engines(*sides("llama", side(), side(prefix_caching=True, ahead=True, blocks=60))) as (there, here):
            known(there, here)
            before, earlier = computing(here), computing(here)
            here.end(*before)
            short = prompt(2, 97)
            longer = [*short[:96], *prompt(5, 65)]
            params = {name: prefilled(there, name, tokens) for name, tokens in (("x", short), ("r", longer))}
            killed(there, params["x"])
            for name, tokens in (("x", short), ("r", longer)):
                here.scheduler.add_request(here.request(name, tokens, params[name], max_tokens=4))
            first = here.begin()
            shared = [set(here.scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in ("x", "r")]
            assert shared[0] & shared[1]
            worker = here.connectors[0].worker
            deadline = time.monotonic() + 20
            while worker._ferry._passage.under_way or worker._ferry._commands:
                assert time.monotonic() < deadline
                worker._ferry._lent_move_on()
            here.end(*earlier)
            taken = here.pool.get_new_blocks(here.pool.get_num_free_blocks())
            second = here.begin()
            here.end(*first)
            here.pool.free_blocks(taken)
            here.end(*second)
            ended = lambda: all(name in here.outputs and here.outputs[name].finish_reason for name in ("x", "r"))  # noqa: E731
            here.step_until(ended)
            assert [here.outputs[name].finish_reason for name in ("x", "r")] == [FinishReason.ERROR] * 2
            assert here.scheduled["r"] == 0

    @pytest.mark.usefixtures("_quick")
    def test_nothing_is_told_while_a_load_in_its_step_may_be_lost(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            known(there, here)
            worker = here.connectors[0].worker
            here.scheduler.add_request(here.request("x", prompt(3), prefilled(there, "x", prompt(3))))
            told: list[tuple[set[str], Report]] = []
            worker._over.append(Outcome("r"))
            here.begin(lambda out: told.append(worker.loaded(16)))
            assert told == [(set(), Report())]
            worker._over.append(Outcome("r"))
            assert worker.loaded(16) == ({"r"}, Report(seconds={"r": 0.0}))

    def test_a_step_is_told_of_so_many_and_the_next_of_the_others_while_somebody_asks(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            known(there, here)
            here.end(*computing(here))
            worker = here.connectors[0].worker
            worker.results()
            worker._over += [Outcome("a"), Outcome("bad", "lost"), Outcome("b"), Outcome("c")]
            assert worker.loaded(2)[0] == {"a", "b"}
            assert worker.results()[1:] == ({"bad"}, {"bad"})
            assert worker.loaded(2)[0] == {"c"}
            worker._over.append(Outcome("d"))
            assert worker.results()[1] == set()
            assert worker.results()[1] == {"d"}

    def test_requests_whose_loads_ended_together_begin_to_run_a_few_in_a_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(haste, "LOAD_S", 1e9)
        names = [f"r{i}" for i in range(5)]
        with engines(*sides("llama", side(), side(ahead=True, blocks=90))) as (there, here):
            known(there, here)
            steps = [computing(here)]
            for i, name in enumerate(names):
                here.scheduler.add_request(here.request(name, prompt(i, 40), prefilled(there, name, prompt(i, 40))))
            with held_up(here):
                steps.append(computing(here))
                assert all(here.waits_for_bytes(name) for name in names)
                here.end(*steps.pop(0))
                steps.append(computing(here))
            for name in names:
                loaded_beside(here, name)
            monkeypatch.setattr(haste, "LOADS_A_STEP", 2)
            began: list[int] = []
            for _ in range(4):
                here.end(*steps.pop(0))
                steps.append(here.begin())
                began.append(len({new.req_id for new in steps[-1][0].scheduled_new_reqs} & set(names)))
            assert began == [2, 2, 1, 0]
            for step in steps:
                here.end(*step)
            here.step_until(lambda: all(name in here.outputs for name in names))
            assert {here.outputs[name].finish_reason for name in names} == {FinishReason.LENGTH}
            assert not any(here.reported["received"][0, name] for name in names)
            there.step_until(lambda: not there.scheduler.requests)

    def test_blocks_that_cannot_be_whole_are_not_found_by_their_hash(self) -> None:
        pair = sides("gemma3", side(hma=True, role="kv_producer"), side(hma=False, ahead=True), prefix_caching=True)
        with engines(*pair) as (there, here):
            known(there, here)
            earlier = computing(here)
            tokens = prompt(1, 129)
            params = prefilled(there, "r", tokens)
            assert [place for place, block in enumerate(min(params["kvferry"]["blocks"].values())) if block == -1] == [0, 1]
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=8))
            with held_up(here):
                first = computing(here)
                here.end(*earlier)
            loaded_beside(here, "r")
            here.end(*first)
            here.step_until(lambda: here.scheduled["r"] > 2)
            assert not here.reported["received"][0, "r"]
            table = here.table("r", 128)[0][:4]
            assert [here.pool.blocks[block].block_hash is None for block in table] == [True, True, False, False]
            again = here.request("again", tokens, None)
            assert here.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0


@pytest.mark.usefixtures("_quick")
class TestNeverInAStep:
    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    @pytest.mark.parametrize("model", [*STATES, "gemma3"])
    def test_a_model_with_states_or_windows_is_loaded_beside_its_step(self, model: str, policy: str) -> None:
        """Though its producer is known to be quick."""
        with engines(*sides(model, side(tp=2 if model == "nemotron-h" else 1), side(failure_policy=policy))) as (there, here):
            assert not here.connector.scheduler.can_undo
            known(there, here)
            there.step_until(lambda: not there.scheduler.requests)
            here.soil(5)
            tokens = prompt(1)
            arrival = load(there, here, "r", tokens, prefilled(there, "r", tokens))
            here.step_until(lambda: "r" not in here.scheduler.requests)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert arrival.differences() == []
            assert (here.counted["loaded"], here.counted["in_step"]) == (2, 0)
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    @pytest.mark.usefixtures("_nearby")
    @pytest.mark.parametrize("model", STATES)
    def test_a_rank_that_has_its_orders_with_the_steps_loads_states_beside_it_too(self, model: str) -> None:
        with engines(*sides(model, side(), side())) as (there, here):
            known(there, here)
            here.scheduler.add_request(here.request("r", prompt(1), prefilled(there, "r", prompt(1))))
            here.step()
            assert here.scheduled["r"] == 0
            here.step_until(lambda: "r" in here.outputs)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert (here.counted["loaded"], here.counted["in_step"]) == (2, 0)
            assert here.moved[0]["moved"] == here.moved[0]["predicted"] > 0
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    @pytest.mark.usefixtures("_nearby")
    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    @pytest.mark.parametrize("model", ["nemotron-h", "granite-h-1g"])
    def test_a_load_that_fails_fails_or_recomputes_its_request_and_the_engine_goes_on(self, model: str, policy: str) -> None:
        with engines(*sides(model, side(), side(failure_policy=policy))) as (there, here):
            known(there, here)
            tokens = prompt(4)
            params = prefilled(there, "r", tokens)
            killed(there, params)
            here.scheduler.add_request(here.request("r", tokens, params, max_tokens=4))
            here.step_until(lambda: "r" in here.outputs and here.outputs["r"].finish_reason is not None)
            failed = policy == "fail"
            assert here.outputs["r"].finish_reason is (FinishReason.ERROR if failed else FinishReason.LENGTH)
            assert here.scheduled["r"] == (0 if failed else len(tokens) + 3)
            assert here.counted["failed"] == 1
            here.idle()
            assert here.held == 0
            there.step_until(lambda: not there.scheduler.requests)
            here.scheduler.add_request(here.request("next", prompt(5), prefilled(there, "next", prompt(5))))
            here.step_until(lambda: "next" in here.outputs)
            assert here.outputs["next"].finish_reason is FinishReason.LENGTH
            assert here.counted["loaded"] == 2


@pytest.mark.parametrize(
    ("setup", "may"),
    [
        (Setup("llama", engine="D"), True),
        (Setup("deepseek", engine="D"), True),
        (Setup("llama", engine="D", failure_policy="recompute"), False),
        (Setup("llama", engine="D", speculative=2), False),
        (Setup("llama", engine="D", pp=2), False),
        (Setup("nemotron-h", engine="D"), False),
        (Setup("gemma3", engine="D"), False),
        (Setup("gemma3", engine="D", hma=False), False),
    ],
    ids=["llama", "mla", "recompute", "speculation", "pipeline", "states", "windows", "windows-in-one-group"],
)
def test_only_where_vllm_can_undo_it(setup: Setup, may: bool) -> None:
    worker = build(setup)
    assert may_hurry(worker.vllm_config, worker.kv_cache_config) is may


class TestHaste:
    def test_nothing_is_known_of_a_producer_until_it_was_read(self) -> None:
        found = Haste(True)
        assert not found.allows(REQUEST, PEER, 10)
        found.saw(PEER, 1000, 0.001)
        assert found.allows(REQUEST, PEER, 10)
        assert not found.allows(REQUEST, OTHER, 10)
        found.forget(PEER)
        assert not found.allows(REQUEST, PEER, 10)

    def test_a_step_waits_for_so_much_and_no_more(self) -> None:
        found = Haste(True)
        found.saw(PEER, 1, SHORT_S / 3)
        for _ in range(3):
            assert found.allows(REQUEST, PEER, 1)
            found.took(PEER, 1, True)
        assert not found.allows(REQUEST, PEER, 1)
        found.new_step()
        assert found.allows(REQUEST, PEER, 1)
        assert not found.allows(REQUEST, PEER, 4)

    def test_copies_of_many_loads_may_take_as_long_as_their_requests_take_to_be_launched(self) -> None:
        found = Haste(True)
        found.saw(PEER, 10, LOAD_S)
        many = 3 * int(SHORT_S / LOAD_S)
        for _ in range(many):
            assert found.allows(REQUEST, PEER, 9)
            found.took(PEER, 9, True)
        assert not found.allows(REQUEST, PEER, 10 + many + 1)

    @pytest.mark.parametrize(("possible", "most"), [(True, LOADS_A_STEP), (False, LOADS_BESIDE)])
    def test_a_step_takes_on_a_few_loads_whatever_their_length(self, possible: bool, most: int) -> None:
        found = Haste(possible)
        for _ in range(most):
            assert not found.has_enough
            found.took(PEER, 1, False)
        assert found.has_enough
        found.new_step()
        assert not found.has_enough

    @pytest.mark.parametrize(
        ("ahead", "many", "in_step", "rests"),
        [(True, FEW + 1, True, True), (True, FEW, True, False), (True, FEW + 1, False, False), (False, FEW + 1, True, False)],
    )
    def test_where_steps_are_launched_ahead_one_in_which_many_were_loaded_is_followed_by_one_without(
        self, ahead: bool, many: int, in_step: bool, rests: bool
    ) -> None:
        found = Haste(True, ahead=ahead)
        for _ in range(many):
            found.took(PEER, 1, in_step)
        found.new_step()
        assert found.has_enough == rests
        found.new_step()
        assert not found.has_enough

    def test_a_long_step_takes_on_as_many_as_would_double_it(self) -> None:
        now = [0.0]
        found = Haste(True, lambda: now[0])
        many = LOADS_A_STEP + 3
        for seconds in (many * LOAD_S, 3 * many * LOAD_S, (many + 0.5) * LOAD_S):
            found.new_step()
            now[0] += seconds
        found.new_step()
        for _ in range(many):
            assert not found.has_enough
            found.took(PEER, 1, False)
        assert found.has_enough

    def test_steps_in_which_nothing_is_computed_say_nothing_of_how_long_one_takes(self) -> None:
        now = [0.0]
        found = Haste(True, lambda: now[0])
        for idle in (True, False, True, False, False):
            found.new_step(idle)
            now[0] += 50 * LOAD_S if not idle else LOAD_S
        for _ in range(LOADS_A_STEP + 1):
            found.took(PEER, 1, False)
        assert not found.has_enough

    def test_media_and_engines_that_cannot_are_never_hurried(self) -> None:
        found = Haste(True)
        found.saw(PEER, 1, 0.0)
        assert not found.allows(SimpleNamespace(mm_features=["picture"]), PEER, 1)
        never = Haste(False)
        never.saw(PEER, 1, 0.0)
        assert not never.allows(REQUEST, PEER, 1)


@pytest.mark.parametrize(("scheduled_ahead", "stages", "ahead"), [(True, 1, True), (None, 1, False), (False, 2, True)])
def test_vllm_looks_ahead_where_it_schedules_before_it_has_the_last_tokens(
    scheduled_ahead: bool | None, stages: int, ahead: bool
) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=scheduled_ahead),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    assert looks_ahead(config) == ahead


def test_reports_of_ranks_are_put_together() -> None:
    one = Report({"a": frozenset({1})}, {"a": 0.1}, frozenset({"a"}), frozenset({"b"}), frozenset())
    two = Report({"a": frozenset({2})}, {"a": 0.2, "c": 0.3}, frozenset(), frozenset({"b"}), frozenset({"b"}))
    both = one.aggregate(two)
    assert both == Report({"a": frozenset({1, 2})}, {"a": 0.2, "c": 0.3}, frozenset({"a"}), frozenset({"b"}), frozenset({"b"}))
    assert both
    assert not Report()
