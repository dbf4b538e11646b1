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
from triton import Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
from vllm.triton_utils import force_first_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from lab.fleet import patches

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
    _restored(monkeypatch)
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


SHARED = [(0, 200), (0, 100, 1, 60), (0, 200), (0, 97), (0, 200, 2, 40), (3, 129), (0, 100, 4, 1), (0, 128), (0, 33)]
"""Prompts one after the other, as pieces that they are made of: a kind and how many tokens of it."""


@pytest.mark.parametrize("caching", ["llama", "nemotron-h"], indirect=True)
def test_with_a_prefix_cache_steps_are_those_of_an_engine_that_is_asked_for_a_token_less(
    caching: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _restored(monkeypatch)
    shorter = [steps(caching, 10, pieces, leave_out=1) for pieces in SHARED]
    monkeypatch.setenv(patches.LAST_TOKEN_APART, "1")
    patches.apply_ordered()
    assert [steps(caching, 20, pieces) for pieces in SHARED] == [[*seen, 1] for seen in shorter]
    assert sum(map(sum, shorter)) < sum(sum(pieces[1::2]) for pieces in SHARED) - len(SHARED), "nothing was found in the cache"


def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the test."""
    for name in ("schedule", "_update_after_schedule"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    for name in ("num_tokens", "num_tokens_with_spec"):
        monkeypatch.setattr(Request, name, getattr(Request, name))


@pytest.fixture
def caching(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engines(Setup(request.param, engine="alone", prefix_caching=True)) as (it,):
        yield it


def steps(engine: Engine, salt: int, pieces: tuple[int, ...], leave_out: int = 0) -> list[int]:
    """The tokens of each step that the prompt is computed in."""
    prompt = [salt + kind for kind, tokens in zip(pieces[::2], pieces[1::2], strict=True) for _ in range(tokens)]
    name = f"{salt} {pieces} {len(engine.outputs)}"
    engine.scheduler.add_request(engine.request(name, prompt[: len(prompt) - leave_out], None))
    seen: list[int] = []
    engine.step_until(lambda: name in engine.outputs, lambda out: seen.append(out.num_scheduled_tokens.get(name, 0)))
    return [tokens for tokens in seen if tokens]


class Kernel:
    """A kernel that some tilings do not fit; `ran` are those it was run with."""

    def __init__(self, too_large: int) -> None:
        self._too_large = too_large
        self.ran: list[int] = []

    @staticmethod
    def fn() -> None: ...

    def run(self, x: int, tile: int, **settings: Any) -> int:
        self.ran.append(tile)
        if tile >= self._too_large:
            raise OutOfResources(tile, self._too_large, "shared memory")
        return tile


@pytest.mark.parametrize(("tiles", "too_large", "ran"), [((128, 32, 64), 99, [32, 32]), ((32, 8, 16), 16, [8, 8])])
def test_kernels_run_with_the_smallest_tiles_and_none_are_timed(
    tiles: tuple[int, ...], too_large: int, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(too_large)
    tuned = Autotuner(kernel, ["x"], [Config({"tile": tile}) for tile in tiles], ["x"], None, None)
    _tile_without_timing(monkeypatch)
    assert [tuned.run(7), tuned.run(7)] == kernel.ran == ran


def test_tiles_that_do_not_run_are_passed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(too_large=99)
    tuned = Autotuner(kernel, ["x"], [Config({"tile": 200, "depth": 1}), Config({"tile": 20, "depth": 30})], ["x"], None, None)
    _tile_without_timing(monkeypatch)
    assert [tuned.run(7), tuned.run(7)] == [20, 20]
    assert kernel.ran == [200, 20, 20]


def _tile_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server whose vLLM was imported where there is a GPU, before anybody asked for it."""
    monkeypatch.setattr(Autotuner, "run", Autotuner.run)
    monkeypatch.setattr(force_first_config, "HAS_TRITON", True)
    monkeypatch.setattr(force_first_config, "_installed", False)
    monkeypatch.setenv(patches.FIRST_TUNING, "1")
    patches.apply_ordered()
