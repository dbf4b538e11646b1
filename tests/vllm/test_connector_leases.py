"""Leases that engines wait for: two that both load and lease, many that wait in a queue, names that requests share, and leases
that no consumer can know of."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from engine import Setup
from served import Engine, engines, load, loaded, side, sides
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm.scheduler import CHECKED_A_STEP

pytestmark = pytest.mark.vllm

NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "kvferry": None}
PATIENCE_S = 60.0


def prompt(seed: int, tokens: int = 158) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 200 for i in range(tokens)]


def begin_prefill(engine: Engine, name: str, tokens: list[int], params: dict[str, Any] | None = None) -> None:
    engine.scheduler.add_request(engine.request(name, tokens, {"do_remote_decode": True, **(params or {})}))


def answer_of(engine: Engine, name: str) -> dict[str, Any] | None:
    found = engine.outputs.get(name)
    return found.kv_transfer_params if found is not None else None


def answers(engine: Engine, *names: str) -> list[dict[str, Any]]:
    engine.step_until(lambda: all(name in engine.outputs for name in names))
    return [dict(engine.outputs[name].kv_transfer_params) for name in names]


def until(what: str, done: Any, *stepped: Engine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        for engine in stepped:
            engine.step()
        time.sleep(0.001)


@contextmanager
def warnings_to(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM's logger takes what the connector logs, and hands nothing on."""
    logger = logging.getLogger("kvferry")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, "kvferry"):
            yield
    finally:
        logger.removeHandler(caplog.handler)


def hear(engine: Engine) -> Any:
    """The consumer's session, once all that was said to it was taken in."""
    courier, said = engine.connector.scheduler._courier, threading.Event()
    courier._commands.put(said.set)
    assert said.wait(PATIENCE_S)
    return courier._consumer


TIGHT = Setup("llama", engine="A", blocks=16, failure_policy="recompute")
"""A cache of 15 blocks, of which a request of full length needs 8, and each of these prompts 5."""


class TestEnginesThatLoadAndLease:
    def run(self, legs: list[tuple[Engine, Engine, str]]) -> None:
        """All prompts are prefilled at once, and each is sent on as soon as its prefill is answered."""
        stepped = {id(engine): engine for leg in legs for engine in leg[:2]}.values()
        for number, (there, _, name) in enumerate(legs):
            begin_prefill(there, f"p{name}", prompt(number))
        sent: set[str] = set()

        def over() -> bool:
            for number, (there, here, name) in enumerate(legs):
                params = answer_of(there, f"p{name}")
                if params is not None and name not in sent:
                    sent.add(name)
                    here.scheduler.add_request(here.request(name, prompt(number), params))
            return all(name in here.outputs for _, here, name in legs)

        until(f"{len(legs)} requests, half of them each way", over, *stepped)
        for _, here, name in legs:
            assert here.outputs[name].finish_reason is FinishReason.LENGTH
        until("all leases end", lambda: not any(engine.scheduler.requests for engine in stepped), *stepped)
        assert [engine.held for engine in stepped] == [0] * len(stepped)

    def test_two_of_them_never_wait_for_each_other(self, caplog: pytest.LogCaptureFixture) -> None:
        with warnings_to(caplog), engines(TIGHT, replace(TIGHT, engine="B")) as (a, b):
            self.run([(a, b, f"r{i}") if i % 2 else (b, a, f"r{i}") for i in range(28)])
            both = a.counted + b.counted
            assert both["loaded"] >= 2
            assert both["moved"] == both["predicted"] > 0
            assert both["expired"] == 0
            assert both["tokens"] + both["recomputed"] >= 28 * 157
        assert "leases may hold 7 of its 16 blocks" in caplog.text
        assert re.search(r"leases hold \d of at most 7 blocks, the oldest that of request pr\d+-?\w* for", caplog.text)

    def test_one_does_not_wait_for_itself(self) -> None:
        with engines(TIGHT) as (a,):
            self.run([(a, a, f"r{i}") for i in range(14)])
            assert a.counted["loaded"] >= 1

    def test_a_prefix_that_leases_share_counts_once(self) -> None:
        with engines(replace(TIGHT, prefix_caching=True)) as (a,):
            first = prompt(1)
            for number in range(3):
                begin_prefill(a, f"r{number}", [*first[:130], *prompt(number + 2, 20)])
                (params,) = answers(a, f"r{number}")
                assert params["do_remote_prefill"]
            assert a.connector.scheduler._producer.blocks == 4 + 3

    def test_an_engine_that_only_prefills_lends_all_it_has(self) -> None:
        with engines(Setup("llama", engine="A", blocks=16, role="kv_producer")) as (a,):
            for number in range(3):
                begin_prefill(a, f"r{number}", prompt(number))
            assert all(params["do_remote_prefill"] for params in answers(a, "r0", "r1", "r2"))
            assert a.held == 15


class TestQueues:
    """Requests that wait at a busy consumer."""

    def test_the_leases_of_all_requests_that_have_arrived_are_kept_alive(self) -> None:
        count = 5 * CHECKED_A_STEP
        with engines(*sides("llama", side(blocks=2 * count + 1, role="kv_producer"), side(role="kv_consumer"))) as (
            there,
            here,
        ):
            names = [f"r{i}" for i in range(count)]
            for number, name in enumerate(names):
                begin_prefill(there, name, prompt(number, 40))
            for number, (name, params) in enumerate(zip(names, answers(there, *names), strict=True)):
                here.scheduler.add_request(here.request(name, prompt(number, 40), params))
            (leases,) = hear(here)._leases.values()
            assert len(leases.held) == count
            until("all are loaded", lambda: all(name in here.outputs for name in names), here, there)
            assert here.counted["loaded"] == count
            until("all are released", lambda: there.counted["released"] == count, there)

    def test_no_lease_ends_while_renewals_wait_to_be_heard(self) -> None:
        """As after the producer was stopped: its clock has gone on, and what was said meanwhile was not read yet."""
        with engines(*sides("llama", {}, {})) as (there, here):
            half, params = there.connector.scheduler, dict(there.prefill("r", prompt(1)) or {})
            listener, clock, lease_s = half._listener, half._clock, half._options.lease_s
            half._clock = lambda: clock() + lease_s + 1
            listener._hearing.caught_up_at -= lease_s + 1
            listener._hearing.turned = lambda *_: None
            for _ in range(3):
                there.step()
            assert there.counted["expired"] == 0
            assert load(there, here, "r", prompt(1), params).differences() == []
            until("what was said is heard", lambda: there.counted["released"] == 1, there, here)

    def test_a_lease_of_another_prompt_is_left_to_its_own_request(self) -> None:
        """No word of it reaches the producer: the request that it is of may still come."""
        with engines(*sides("llama", {}, side(failure_policy="recompute"))) as (there, here):
            params = dict(there.prefill("r", prompt(1)) or {})
            here.scheduler.add_request(here.request("other", prompt(2, 158), dict(params)))
            until("another prompt is computed", lambda: "other" in here.outputs, here)
            assert not hear(here)._leases
            for _ in range(3):
                there.step()
            assert there.counted["released"] == 0
            assert load(there, here, "r", prompt(1), params).differences() == []

    def test_vllms_notice_of_a_crossed_request_releases_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM answers with 500, and tells the connector with a request of one token that has the same parameters."""
        with engines(*sides("llama", {}, side(failure_policy="fail"))) as (there, here):
            params = dict(there.prefill("r", prompt(1)) or {})
            here.scheduler.add_request(here.request("other", prompt(2, 158), dict(params)))
            until("another prompt is refused", lambda: "other" in here.outputs, here)
            with monkeypatch.context() as watched:
                said: list[Any] = []
                watched.setattr(here.connector.scheduler._courier, "release", lambda *given: said.append(given))
                notice = here.request("notice", [0], dict(params))
                notice.abort_immediately = True
                here.scheduler.add_request(notice)
                here.scheduler.finish_requests("notice", RequestStatus.FINISHED_ABORTED)
                here.idle()
            assert said == []
            assert load(there, here, "r", prompt(1), params).differences() == []


class TestNamesThatRequestsShare:
    """Repeated and hedged requests have one X-Request-Id."""

    def test_each_of_them_has_a_lease_of_its_own(self) -> None:
        with engines(*sides("llama", side(blocks=64, role="kv_producer"), side(blocks=64, role="kv_consumer"))) as (
            there,
            here,
        ):
            names = [f"cmpl-again-0-{i:08x}" for i in range(8)]
            for name in names:
                begin_prefill(there, name, prompt(1))
            found = answers(there, *names)
            assert len({params["kvferry"]["lease"]["slot"] for params in found}) == 8
            for name, params in zip(names, found, strict=True):
                here.scheduler.add_request(here.request(name, prompt(1), params))
                until("it is answered", lambda name=name: name in here.outputs, here, there)
                assert here.outputs[name].finish_reason is FinishReason.LENGTH
            assert here.counted["loaded"] == 8
            until("all are released", lambda: there.counted["released"] == 8, there, here)

    def test_batches_find_leases_of_their_own_for_later_prompts(self) -> None:
        """Two consumers: what one releases is not the other's."""
        setups = (Setup("llama", engine="P", blocks=64, role="kv_producer"), *(Setup("llama", engine=e) for e in "DE"))
        with engines(*setups) as (there, here, yonder):
            batches = [[f"cmpl-again-{place}-{number}{place}aaaaaa" for place in range(2)] for number in range(2)]
            for names in batches:
                for place, name in enumerate(names):
                    begin_prefill(there, name, prompt(place))
            given = [answers(there, *names)[0] for names in batches]
            for names, params, engine in zip(batches, given, (here, yonder), strict=True):
                for place, name in enumerate(names):
                    engine.scheduler.add_request(engine.request(name, prompt(place), dict(params)))
                until("both are answered", lambda names=names, e=engine: set(names) <= e.outputs.keys(), engine, there)
                assert engine.counted["loaded"] == 2
            until("all are released", lambda: there.counted["released"] == 4, there, here, yonder)

    def test_one_of_any_length_is_handed_over(self) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            name = f"cmpl-{'x' * 300}-0-5a5a5a5a"
            begin_prefill(there, name, prompt(1))
            (params,) = answers(there, name)
            assert len(params["kvferry"]["request"]) < 256
            here.scheduler.add_request(here.request(name, prompt(1), params))
            until("it is answered", lambda: name in here.outputs, here, there)
            assert here.counted["loaded"] == 1


class TestLeasesThatCannotBeClaimed:
    NAMES = tuple(f"cmpl-b-{place}-{place}0000000" for place in range(3))

    @pytest.mark.parametrize("last", [False, True], ids=["first", "while others stand"])
    def test_a_batch_whose_first_prompt_leaves_nothing_leaves_nothing(self, last: bool) -> None:
        """The parameters of the first prompt are all that the answer gives out."""
        order = self.NAMES[::-1] if last else self.NAMES
        with engines(*sides("llama", {}, {})) as (there, _):
            for name in order:
                begin_prefill(there, name, prompt(1, 1 if name == self.NAMES[0] else 60 + int(name[7])))
                answers(there, name)
            assert answers(there, self.NAMES[0]) == [NOTHING]
            until("nothing is kept", lambda: not there.scheduler.requests, there)
            there.idle()
            assert there.held == 0
            assert not len(there.connector.scheduler._producer)

    def test_another_request_of_its_name_keeps_its_leases(self) -> None:
        with engines(*sides("llama", side(blocks=64, role="kv_producer"), {})) as (there, here):
            again = tuple(name[:-1] + "f" for name in self.NAMES)
            for place, name in enumerate(again):
                begin_prefill(there, name, prompt(place))
            (params, *_) = answers(there, *again)
            begin_prefill(there, self.NAMES[0], prompt(0, 1))
            assert answers(there, self.NAMES[0]) == [NOTHING]
            for place, name in enumerate(again):
                here.scheduler.add_request(here.request(name, prompt(place), dict(params)))
            until("all are answered", lambda: set(again) <= here.outputs.keys(), here, there)
            assert here.counted["loaded"] == 3

    @pytest.mark.parametrize("at_once", [True, False])
    def test_one_prompt_three_times_in_a_batch_has_one_lease(self, at_once: bool) -> None:
        with engines(*sides("llama", side(blocks=64), side(blocks=64))) as (there, here):
            for name in self.NAMES:
                begin_prefill(there, name, prompt(1))
                if not at_once:
                    answers(there, name)
            found = answers(there, *self.NAMES)
            assert found[0] == found[1] == found[2]
            for name in self.NAMES:
                here.scheduler.add_request(here.request(name, prompt(1), dict(found[0])))
            until("all are answered", lambda: set(self.NAMES) <= here.outputs.keys(), here, there)
            assert here.counted["loaded"] == 3
            until("the lease is released", lambda: not there.scheduler.requests, there, here)
            assert there.counted["published"] == there.counted["released"] == 1


class TestHandingOn:
    """A request that came with a reference and is prefilled for others: it is loaded, then leased."""

    @pytest.mark.parametrize(("model", "loads"), [("llama", 1), ("deepseek", 1), ("gemma3", 0), ("nemotron-h", 0)])
    def test_it_is_loaded_where_one_token_less_can_be_and_leased(self, model: str, loads: int) -> None:
        setups = tuple(Setup(model, engine=name) for name in "PMD")
        with engines(*setups) as (there, between, here):
            params = there.prefill("r", prompt(1))
            assert params is not None
            request = between.request("r", prompt(1), {**params, "do_remote_prefill": True, "do_remote_decode": True})
            between.scheduler.add_request(request)
            handed_on = between.finish_prefill(request)
            assert between.counted["loaded"] == loads
            assert between.scheduled["r"] == (1 if loads else 157)
            until("the first lease is released", lambda: there.counted["released"] == 1, there, between)
            assert handed_on is not None
            assert handed_on["kvferry"]["tokens"] == 157
            arrival = load(between, here, "r", prompt(1), handed_on)
            assert arrival.differences() == []
            until("the second lease is released", lambda: between.counted["released"] == 1, between, here)

    def test_a_longer_prompt_loads_all_of_the_shorter_one(self) -> None:
        with engines(*(Setup("nemotron-h", engine=name) for name in "PM")) as (there, between):
            params = there.prefill("r", prompt(1))
            assert params is not None
            longer = [*prompt(1), *prompt(2, 30)]
            request = between.request("r", longer, {**params, "do_remote_prefill": True, "do_remote_decode": True})
            between.scheduler.add_request(request)
            arrival = loaded(there, between, {"r": 157})
            assert arrival.differences() == []
            (handed_on,) = answers(between, "r")
            assert handed_on["kvferry"]["tokens"] == len(longer) - 1
