"""Weights are replaced in running engines and their caches are reset: vLLM's own scheduler asks the connector, and nothing
that was computed before is decoded after."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Setup
from served import Engine, engines, load, side, sides
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from kvferry.session import Lease, Seek

pytestmark = pytest.mark.vllm

PROMPT = list(range(7, 165))
NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "kvferry": None}


def reset(engine: Engine, running: bool = False) -> bool:
    """As `POST /reset_prefix_cache?reset_external=true` does."""
    return bool(engine.scheduler.reset_prefix_cache(running, reset_connector=True))


def prefilled(there: Engine, name: str, prompt: list[int] = PROMPT) -> dict[str, Any]:
    params = there.prefill(name, prompt)
    assert params is not None
    assert params["do_remote_prefill"]
    return params


def words(there: Engine) -> list[int]:
    """Those that stand, of every rank."""
    return [int(word) for c in there.connectors for word in c.worker._words._words[: there.setup.blocks] if word]


def lease_of(params: dict[str, Any]) -> Lease:
    said = params["kvferry"]["lease"]
    return Lease(said["slot"], int(said["generation"]))


def found(there: Engine, params: dict[str, Any]) -> Any:
    """What a consumer is answered that knows one reference and looks for its very prompt's."""
    said = params["kvferry"]
    return there.connector.scheduler._prefills.find(Seek(said["incarnation"], lease_of(params), said["digest"]))


def ended(here: Engine, name: str) -> FinishReason:
    here.step_until(lambda: name in here.outputs and name not in here.scheduler.requests)
    here.idle()
    assert here.held == 0
    return here.outputs[name].finish_reason


def begun(there: Engine, name: str) -> Request:
    """A request of which a part is prefilled."""
    request = there.request(name, PROMPT, {"do_remote_decode": True})
    there.scheduler.add_request(request)
    there.step()
    assert 0 < request.num_computed_tokens < request.num_prompt_tokens
    return request


class TestWhatIsKeptForConsumers:
    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_reference_of_before_is_not_loaded_and_one_of_after_is(self, policy: str) -> None:
        with engines(*sides("llama", side(tp=2), side(failure_policy=policy), prefix_caching=True)) as (there, here):
            before = prefilled(there, "before")
            here.scheduler.add_request(here.request("before", PROMPT, before))
            assert not reset(there)
            assert found(there, before) is None
            there.step()
            there.step()
            assert (words(there), there.held) == ([], 0)
            assert reset(there)
            assert reset(here)
            assert ended(here, "before") is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)
            assert here.scheduled["before"] == (0 if policy == "fail" else len(PROMPT))
            assert (here.counted["failed"], here.counted["loaded"]) == (1, 0)
            assert reset(here)

            after = prefilled(there, "after")
            assert there.scheduled["after"] == len(PROMPT) - 1
            assert found(there, after) is not None
            arrival = load(there, here, "after", PROMPT, after)
            assert arrival.differences() == []
            assert ended(here, "after") is FinishReason.LENGTH
            there.step_until(lambda: not there.scheduler.requests)
            there.idle()
            assert (there.counted["reset"], there.counted["released"], there.counted["expired"]) == (1, 1, 0)
            assert set(there.reported["sent"].values()) == {1}

    def test_it_is_over_when_the_slowest_rank_has_killed_the_word_and_blocks_were_left_alone_for_a_while(self) -> None:
        with engines(Setup("nemotron-h", tp=2, engine="P")) as (there,):
            before = prefilled(there, "before")
            there.slow = {1}
            assert there.connector.reset_cache() is False
            there.step_until(lambda: bool(there.reported["sent"][0, "before"]))
            assert there.connector.reset_cache() is False
            assert there.held > 0
            assert found(there, before) is None
            there.slow = set()
            there.step_until(lambda: not there.held)
            assert there.connector.reset_cache() is True
            assert reset(there)

    def test_an_answer_that_is_prefilled_later_does_not_share_what_was_kept_for_another(self) -> None:
        with engines(Setup("llama", engine="P")) as (there,):
            one = prefilled(there, "0_mine")
            assert lease_of(prefilled(there, "1_mine")) == lease_of(one)
            assert not reset(there)
            there.step()
            assert reset(there)
            other = prefilled(there, "2_mine")
            assert lease_of(other) != lease_of(one)
            assert words(there) == [lease_of(other).generation]

    def test_among_several_connectors_it_fails_while_ours_does(self) -> None:
        with engines(Setup("llama", engine="P")) as (there,):
            several = MultiConnector.__new__(MultiConnector)
            several._connectors = [there.connector]
            prefilled(there, "r")
            assert several.reset_cache() is False
            there.step()
            assert several.reset_cache() is True


class TestWhatIsBeingPrefilled:
    def test_it_leaves_nothing(self) -> None:
        with engines(Setup("nemotron-h", tp=2, budget=64, engine="P")) as (there,):
            request = begun(there, "r")
            assert not reset(there)
            assert there.connector.reset_cache() is True
            assert there.finish_prefill(request) == NOTHING
            assert (words(there), there.held) == ([], 0)
            assert there.connector.scheduler._prefills._under_way == {}
            assert reset(there)
            prefilled(there, "next")

    def test_what_the_reset_preempts_is_computed_anew_and_handed_over(self) -> None:
        with engines(*sides("llama", side(tp=2, budget=64), side(), prefix_caching=True)) as (there, here):
            request = begun(there, "r")
            before = set(words(there))
            assert reset(there, running=True)
            assert request.status is RequestStatus.PREEMPTED
            params = there.finish_prefill(request)
            assert params is not None
            assert there.scheduled["r"] == 64 + len(PROMPT) - 1
            assert set(words(there)) == {lease_of(params).generation}
            assert before.isdisjoint(words(there))
            arrival = load(there, here, "r", PROMPT, params)
            assert arrival.differences() == []

    def test_what_waits_to_be_prefilled_is_handed_over(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            request = there.request("r", PROMPT, {"do_remote_decode": True})
            there.scheduler.add_request(request)
            assert there.connector.reset_cache() is True
            arrival = load(there, here, "r", PROMPT, there.finish_prefill(request))
            assert arrival.differences() == []


class TestWhatIsBeingLoaded:
    @pytest.mark.parametrize("aborted", [False, True])
    def test_a_consumers_reset_is_not_over_while_ranks_read(self, aborted: bool) -> None:
        with engines(*sides("llama", side(), side(tp=2))) as (there, here):
            here.slow = {1}
            here.scheduler.add_request(here.request("r", PROMPT, prefilled(there, "r")))
            here.step_until(lambda: here.waits_for_bytes("r"))
            if aborted:
                here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
            assert here.connector.reset_cache() is False
            here.slow = set()
            here.step_until(lambda: not here.scheduler.requests)
            assert here.connector.reset_cache() is True
            assert reset(here)
