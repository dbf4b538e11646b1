"""What servers of tests are changed in, on vLLM's own scheduler."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import Setup
from ranks_that_speak import speak
from served import PATIENCE_S, Engine, engines
from vllm.v1.core.sched.scheduler import Scheduler

from kvferry.fleet import patches

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engines(Setup("llama", engine="alone")) as (it,):
        yield it


@pytest.mark.parametrize(
    ("tokens", "apart", "steps"), [(100, True, [99, 1]), (2, True, [1, 1]), (1, True, [1]), (100, False, [100])]
)
def test_the_last_token_of_a_prompt_is_computed_in_a_step_of_its_own(
    engine: Engine, tokens: int, apart: bool, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "schedule", Scheduler.schedule)
    if apart:
        monkeypatch.setenv(patches.LAST_TOKEN_APART, "1")
        patches.apply_ordered()
    name = f"{tokens} {apart}"
    engine.scheduler.add_request(engine.request(name, [7] * tokens, None))
    seen: list[int] = []

    def forward(out: Any) -> None:
        seen.append(out.num_scheduled_tokens.get(name, 0))

    engine.step_until(lambda: name in engine.outputs, forward)
    assert seen == steps


def test_ranks_on_one_gpu_hear_each_other_through_the_host(tmp_path: Path) -> None:
    spawning = mp.get_context("spawn")
    pipes = [spawning.Pipe() for _ in range(2)]
    for rank, (_, there) in enumerate(pipes):
        spawning.Process(target=speak, args=(rank, str(tmp_path / "store"), there), daemon=True).start()
    assert all(here.poll(PATIENCE_S) for here, _ in pipes), "a rank did not answer"
    first, second = (here.recv() for here, _ in pipes)
    whole = [[12.0, 14.0], [16.0, 18.0]]
    assert first["sum"] == second["sum"] == whole
    assert first["side by side"] == second["side by side"] == [[1, 2, 11, 12], [3, 4, 13, 14]]
    assert first["below each other"] == [[1, 2], [3, 4], [11, 12], [13, 14]]
    assert (first["a share of the sum"], second["a share of the sum"]) == (whole[:1], whole[1:])
    assert first["told"] == first["sent"] == [[11, 12], [13, 14]]
