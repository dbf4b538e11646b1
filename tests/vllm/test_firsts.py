"""First tokens that do not wait for another launch: whose step is followed by one that computes nothing, with vLLM's own
scheduler and by a clock that the tests turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from served import Engine, engines, side, sides
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm import firsts
from kvferry.engines.vllm.cargo import Orders
from kvferry.engines.vllm.firsts import WAIT, Firsts
from kvferry.engines.vllm.haste import Haste
from kvferry.engines.vllm.wharf import Wharf
from kvferry.fleet.patches import stands_as_read
from kvferry.session import Lease
from kvferry.session.links import Links

pytestmark = pytest.mark.vllm

LAUNCH_S = 0.02
QUICK, SLOW = LAUNCH_S * WAIT, LAUNCH_S * WAIT * 1.01


class Engines:
    """Steps of an engine with two batches in flight, each launched in the same time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.firsts = Firsts(lambda: self.now)

    def step(self, *requests: Any, idle: bool = False, wait_s: float = QUICK) -> bool:
        """Whether its requests are held in the next one."""
        self.firsts.begin(idle, requests)
        will_hold = self.firsts.will_hold
        self.firsts.launch()
        self.now += 0.0 if idle else LAUNCH_S
        self.firsts.launched()
        self.now += wait_s
        self.firsts.looked()
        return will_hold


def request(eligible: int = 7) -> Any:
    return SimpleNamespace(next_decode_eligible_step=eligible)


class TestWhen:
    def test_nobody_is_held_before_anything_is_known(self) -> None:
        found = Engines()
        assert not found.step(request())
        assert not found.firsts.holds

    @pytest.mark.parametrize(("wait_s", "held"), [(0.0, True), (QUICK, True), (SLOW, False), (1.0, False)])
    def test_results_that_are_waited_for_hold_nobody(self, wait_s: float, held: bool) -> None:
        found = Engines()
        found.step(wait_s=1.0)
        found.step(wait_s=wait_s)
        assert found.step(request()) is held

    def test_most_of_the_last_steps_decide(self) -> None:
        found = Engines()
        for wait_s in (SLOW, SLOW, SLOW, 0.0, 0.0, 0.0, 0.0):
            found.step(wait_s=wait_s)
        assert found.step(request())
        for _ in range(9):
            found.step(wait_s=SLOW)
        assert not found.step(request())

    def test_what_is_waited_for_while_tokens_are_held_counts_too(self) -> None:
        found = Engines()
        for _ in range(3):
            found.step()
        for _ in range(2):
            assert found.step(request())
            found.step(idle=True, wait_s=1.0)
            assert found.firsts.holds
        assert not found.step(request())
        found.step(idle=True)
        assert not found.firsts.holds

    def test_steps_after_which_nothing_computed_is_looked_at_say_nothing(self) -> None:
        found = Engines()
        found.step(request(), wait_s=0.0)
        found.step(idle=True, wait_s=0.0)
        found.step(wait_s=0.0)
        found.firsts.looked()
        assert not found.step(request())

    def test_a_step_with_somebody_who_cannot_be_held_is_followed_by_another(self) -> None:
        found = Engines()
        found.step()
        found.step()
        assert not found.step(request(), None)
        assert not found.step(request(), SimpleNamespace())
        assert found.step(request())

    def test_vllm_has_its_own_word_on_a_request_back(self) -> None:
        found, held = Engines(), request(7)
        found.step()
        found.step()
        assert found.step(held)
        assert held.next_decode_eligible_step > 1_000_000
        found.step(idle=True)
        assert held.next_decode_eligible_step == 7


@pytest.fixture
def _nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks live in their scheduler's process, as on a device, and what is connected counts as mapped and quick."""
    monkeypatch.setattr(firsts, "WAIT", 1e9)
    monkeypatch.setattr(Wharf, "on_device", property(lambda self: True))
    monkeypatch.setattr(Wharf, "holds_the_engine_back", lambda self: False)
    connect, saw = Links.connect, Haste.saw

    def anywhere(self: Links, peer: Any) -> Any:
        link = connect(self, peer)
        link.anywhere = True
        return link

    monkeypatch.setattr(Links, "connect", anywhere)
    monkeypatch.setattr(Links, "stands", stands_as_read)
    monkeypatch.setattr(Haste, "saw", lambda self, peer, tokens, seconds: saw(self, peer, tokens, 1e-6))


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 200 for i in range(60)]


def arrive(there: Engine, here: Engine, name: str, seed: int) -> Any:
    found = here.request(name, prompt(seed), there.prefill(name, prompt(seed)), max_tokens=8)
    here.scheduler.add_request(found)
    return found


def acquainted(there: Engine, here: Engine) -> None:
    """The producer is known, results count as there when a step has been launched, and vLLM says when a request may go on."""
    here.scheduler.use_v2_model_runner = True
    arrive(there, here, "first", 1)
    here.step_until(lambda: "first" in here.outputs)
    here.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    here.idle()
    here.connector.scheduler._firsts._waits.append(-1.0)


@pytest.mark.usefixtures("_nearby")
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
            assert here.connector.scheduler._firsts.will_hold
            here.step()
            assert here.scheduled["r"] == 2
