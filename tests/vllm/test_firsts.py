"""First tokens that do not wait for another launch: whose step is followed by one that computes nothing, with vLLM's own
scheduler and by a clock that the tests turn."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from served import Engine, engines, side, sides
from vllm.config import CUDAGraphMode
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm import firsts
from kvferry.engines.vllm.cargo import Orders
from kvferry.engines.vllm.firsts import EMPTY_S, PATIENCE, WAIT, Firsts, launches_one_by_one, may_hold
from kvferry.engines.vllm.haste import Haste, looks_ahead
from kvferry.session import Lease

pytestmark = pytest.mark.vllm

LAUNCH_S = 0.02
QUICK = LAUNCH_S * WAIT
SLOW = QUICK * 1.01


class Steps:
    """Steps of an engine with two batches in flight."""

    def __init__(self, one_by_one: bool = False) -> None:
        self.now = 100.0
        self.firsts = Firsts(lambda: self.now, one_by_one)

    def step(self, *requests: Any, idle: bool = False, launch_s: float = LAUNCH_S, wait_s: float = QUICK) -> bool:
        """Whether its requests are held in the next one."""
        self.firsts.begin(idle, requests)
        will_hold = self.firsts.will_hold
        self.firsts.launch()
        assert self.firsts.will_hold is will_hold
        self.now += 0.0 if idle else launch_s
        self.firsts.launched()
        self.now += wait_s
        self.firsts.looked()
        return will_hold

    def hold(self, wait_s: float) -> None:
        assert self.step(request())
        self.step(idle=True, wait_s=wait_s)
        assert self.firsts.holds


def request(eligible: int = 7) -> Any:
    return SimpleNamespace(next_decode_eligible_step=eligible)


def known(wait_s: float = 0.0) -> Steps:
    found = Steps()
    for _ in range(5):
        found.step(wait_s=wait_s)
    return found


class TestWhen:
    def test_nobody_is_held_before_anything_is_known(self) -> None:
        found = Steps()
        assert not found.step(request())
        assert not found.firsts.holds

    def test_the_first_are_held_where_kernels_are_launched_one_by_one_until_that_is_seen_to_be_no_good(self) -> None:
        found = Steps(one_by_one=True)
        found.hold(wait_s=1.0)
        found.step()
        found.hold(wait_s=1.0)
        assert not found.step(request())

    @pytest.mark.parametrize("early", [True, False])
    def test_they_are_not_held_for_long_where_nothing_is_seen_of_what_that_takes(self, early: bool) -> None:
        """As where every step has a first token, or every launch needs the results of the step before."""
        found = Steps(one_by_one=True)
        held = 0
        for _ in range(100):
            found.firsts.begin(False, [request()])
            if found.firsts.will_hold:
                held += 1
                found.firsts.launch()
                found.firsts.launched()
                found.firsts.looked()
                found.firsts.begin(True)
            for part in (found.firsts.looked, found.firsts.launched) if early else (found.firsts.launched, found.firsts.looked):
                part()
        assert 0 < held < 20

    def test_what_was_seen_counts_for_more_than_how_kernels_are_launched(self) -> None:
        found = Steps(one_by_one=True)
        for _ in range(5):
            found.step(wait_s=SLOW)
        assert not found.step(request())

    @pytest.mark.parametrize(("mode", "found"), [("NONE", True), ("FULL_DECODE_ONLY", False), ("FULL_AND_PIECEWISE", False)])
    def test_kernels_are_launched_one_by_one_without_graphs(self, mode: str, found: bool) -> None:
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]))
        assert launches_one_by_one(config) is found

    @pytest.mark.parametrize(("wait_s", "held"), [(0.0, True), (QUICK * 0.99, True), (SLOW, False), (1.0, False)])
    def test_it_is_tried_where_results_are_not_waited_for_after_a_next_step(self, wait_s: float, held: bool) -> None:
        assert known(wait_s).step(request()) is held

    def test_most_of_the_last_steps_decide_whether_it_is_tried(self) -> None:
        found = Steps()
        for wait_s in (0.0, SLOW, SLOW, SLOW, 0.0, 0.0, 0.0, 0.0):
            found.step(wait_s=wait_s)
        assert found.step(request())

    def test_where_it_was_tried_the_wait_for_those_tokens_decides(self) -> None:
        """As with a graph, which the device begins when it has been launched: after a next step nobody waits for results."""
        found = known()
        found.hold(wait_s=1.0)
        for _ in range(20):
            found.step(wait_s=0.0)
            assert not found.step(request())

    @pytest.mark.parametrize(("late", "held"), [(-1e-6, True), (1e-6, False)])
    def test_that_wait_and_vllms_rest_may_take_a_part_of_what_a_launch_does(self, late: float, held: bool) -> None:
        """The launch of a next step, not of one in which loads are waited for, or which computes nothing."""
        found = known()
        for _ in range(6):
            found.step(request(), None, launch_s=9.0)
            found.step(idle=True)
        assert found.step(request(), launch_s=9.0)
        found.step(idle=True, wait_s=QUICK - EMPTY_S + late)
        found.step()
        assert found.step(request()) is held

    def test_it_is_tried_again_after_a_while(self) -> None:
        found = known()
        found.hold(wait_s=1.0)
        held = [found.step(request()) for _ in range(PATIENCE + 1)]
        assert held == [False] * PATIENCE + [True]

    def test_results_that_a_launch_needs_tell_nothing(self) -> None:
        found = Steps()
        for _ in range(5):
            found.firsts.begin(False)
            found.firsts.looked()
            found.now += LAUNCH_S
            found.firsts.launched()
            found.firsts.looked()
        assert not found.step(request())

    def test_steps_after_which_nothing_computed_is_looked_at_tell_nothing(self) -> None:
        found = Steps()
        for _ in range(3):
            found.step(request(), wait_s=0.0)
            found.step(idle=True, wait_s=0.0)
            found.step(wait_s=0.0)
            found.firsts.looked()
            found.step(idle=True, wait_s=0.0)
        assert not found.step(request())

    def test_a_step_with_somebody_who_cannot_be_held_is_followed_by_another(self) -> None:
        found = known()
        assert not found.step(request(), None)
        assert not found.step(request(), SimpleNamespace())
        assert found.step(request())

    def test_who_comes_in_between_does_not_have_the_others_held_again(self) -> None:
        found = known()
        assert found.step(request())
        assert not found.step(request())
        assert not found.firsts.holds
        assert found.step(request())

    def test_vllm_has_its_own_word_on_a_request_back(self) -> None:
        found, held = known(), request(7)
        assert found.step(held)
        found.firsts.launch()
        assert held.next_decode_eligible_step > 1_000_000
        found.step(idle=True)
        assert held.next_decode_eligible_step == 7

    @pytest.mark.parametrize(
        ("ahead", "runner", "data", "stages", "possible"),
        [(True, True, 1, 1, True), (False, True, 1, 1, False), (True, False, 1, 1, False), (True, True, 2, 1, False),
         (True, True, 1, 2, False)],
    )  # fmt: skip
    def test_an_engine_alone_that_launches_ahead_with_the_newer_runner(
        self, ahead: bool, runner: bool, data: int, stages: int, possible: bool
    ) -> None:
        found = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=ahead),
            parallel_config=SimpleNamespace(data_parallel_size=data, pipeline_parallel_size=stages),
            use_v2_model_runner=runner,
        )
        assert may_hold(found) is possible


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for results counts as long, whatever runs on these engines."""
    monkeypatch.setattr(firsts, "WAIT", 1e9)
    monkeypatch.setattr("kvferry.engines.vllm.scheduler.may_hold", looks_ahead)


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 200 for i in range(60)]


def arrive(there: Engine, here: Engine, name: str, seed: int) -> Any:
    found = here.request(name, prompt(seed), there.prefill(name, prompt(seed)), max_tokens=8)
    here.scheduler.add_request(found)
    return found


def acquainted(there: Engine, here: Engine) -> None:
    """The producer is known, no results were waited for after the launch of a next step, and vLLM says when a request may go
    on."""
    here.scheduler.use_v2_model_runner = True
    arrive(there, here, "first", 1)
    here.step_until(lambda: "first" in here.outputs)
    flying = here.begin()
    for _ in range(3):
        following = here.begin()
        here.end(*flying)
        flying = following
    here.end(*flying)
    here.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    here.idle()


@pytest.mark.usefixtures("_quick", "_nearby", "_eager")
class TestWithVllm:
    @pytest.mark.parametrize("beside", [0, 2])
    def test_first_tokens_are_looked_at_before_anything_else_is_launched(self, beside: int) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            acquainted(there, here)
            others = [f"beside {i}" for i in range(beside)]
            for i, name in enumerate(others):
                arrive(there, here, name, 10 + i)
            here.step_until(lambda: all(name in here.outputs for name in others))
            here.step()
            here.step()
            arrive(there, here, "r", 2)
            one = here.begin()
            assert set(one[0].num_scheduled_tokens) == {"r", *others}
            arrive(there, here, "late", 3)
            two = here.begin()
            assert not two[0].num_scheduled_tokens
            assert two[0].kv_connector_metadata == Orders(begun=True)
            here.end(*one)
            assert here.outputs["r"].new_token_ids
            three = here.begin()
            assert set(three[0].num_scheduled_tokens) == {"r", "late", *others}
            here.end(*two)
            here.end(*three)
            here.step_until(lambda: not here.scheduler.requests)
            assert all(here.outputs[name].finish_reason is not None for name in ("r", "late", *others))
            assert here.scheduled["r"] == here.scheduled["late"] == 8
            assert here.moved[0]["moved"] == here.moved[0]["predicted"] > 0
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    @pytest.mark.parametrize("alone", [True, False])
    def test_the_very_first_is_looked_at_so_where_kernels_are_launched_one_by_one(
        self, monkeypatch: pytest.MonkeyPatch, alone: bool
    ) -> None:
        if not alone:
            monkeypatch.setattr("kvferry.engines.vllm.scheduler.launches_one_by_one", lambda _: False)
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            here.scheduler.use_v2_model_runner = True
            arrive(there, here, "r", 2)
            flying = here.begin()
            while not flying[0].num_scheduled_tokens:
                following = here.begin()
                here.end(*flying)
                flying = following
            assert here.connector.scheduler._firsts.will_hold is alone
            here.end(*flying)
            here.step_until(lambda: not here.scheduler.requests)

    @pytest.mark.parametrize("decoding", [True, False])
    def test_who_decodes_beside_is_held_too_but_beside_a_prompt_nobody(self, decoding: bool) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            acquainted(there, here)
            here.scheduler.add_request(here.request("own", prompt(4), None, max_tokens=8))
            if decoding:
                here.step()
            arrive(there, here, "r", 2)
            one = here.begin()
            assert one[0].num_scheduled_tokens == {"r": 1, "own": 1 if decoding else len(prompt(4))}
            two = here.begin()
            assert two[0].num_scheduled_tokens == ({} if decoding else {"r": 1, "own": 1})
            here.end(*one)
            here.end(*two)
            here.step_until(lambda: not here.scheduler.requests)

    def test_a_request_that_is_aborted_while_it_is_held_is_gone(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            acquainted(there, here)
            arrive(there, here, "r", 2)
            one = here.begin()
            assert here.connector.scheduler._firsts.will_hold
            here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            two = here.begin()
            here.end(*one)
            here.end(*two)
            here.step_until(lambda: not here.scheduler.requests)
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    def test_a_request_whose_load_is_lost_in_its_step_fails_and_the_others_go_on(self) -> None:
        with engines(*sides("llama", side(), side(ahead=True, prefix_caching=True))) as (there, here):
            acquainted(there, here)
            lost = there.prefill("lost", prompt(2))
            assert lost is not None
            said = lost["kvferry"]["lease"]
            there.connectors[0].worker._words.kill(Lease(said["slot"], int(said["generation"])))
            here.scheduler.add_request(here.request("lost", prompt(2), lost, max_tokens=8))
            arrive(there, here, "r", 3)
            one = here.begin()
            assert one[0].num_scheduled_tokens == {"lost": 1, "r": 1}
            two = here.begin()
            assert not two[0].num_scheduled_tokens
            here.end(*one)
            assert here.outputs["lost"].finish_reason is FinishReason.ERROR
            here.end(*two)
            here.step_until(lambda: not here.scheduler.requests)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.scheduled["lost"] == 1
            there.step_until(lambda: not there.scheduler.requests)
            assert (there.held, here.held) == (0, 0)

    def test_where_no_step_is_launched_ahead_nobody_is_held(self) -> None:
        with engines(*sides("llama", side(), side(ahead=False))) as (there, here):
            acquainted(there, here)
            arrive(there, here, "r", 2)
            here.step()
            assert not here.connector.scheduler._firsts.will_hold
            here.step()
            assert here.scheduled["r"] == 2

    def test_who_was_loaded_beside_the_steps_meanwhile_waits_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with engines(*sides("llama", side(), side(ahead=True))) as (there, here):
            acquainted(there, here)
            arrive(there, here, "r", 2)
            for _ in range(2):
                here.step()
            zero = here.begin()
            arrive(there, here, "beside", 3)
            ferry, deadline = here.connectors[0].worker._ferry, time.monotonic() + 20
            with monkeypatch.context() as patch, ferry._turn:
                patch.setattr(Haste, "allows", lambda *_: False)
                one = here.begin()
                here.end(*zero)
            while "beside" not in [outcome.request for outcome in ferry._passage.outcomes]:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            arrive(there, here, "in its step", 4)
            two = here.begin()
            assert two[0].num_scheduled_tokens == {"r": 1, "in its step": 1}
            here.end(*one)
            three = here.begin()
            assert not three[0].num_scheduled_tokens
            here.end(*two)
            four = here.begin()
            assert four[0].num_scheduled_tokens == {"r": 1, "in its step": 1, "beside": 1}
            here.end(*three)
            here.end(*four)
            here.step_until(lambda: not here.scheduler.requests)
            assert here.scheduled["beside"] == 8
