"""A request between an engine on the GPU and one in host memory, both ways, over NIXL: caches as certified for either, declared
and ferried as the connector does it, every token and state compared with what the other side's backend would have written.

Each engine is a process of its own; the one in host memory sees no GPU, as vLLM's for CPUs. tests/test_across_devices.py runs
the same body without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from across import CPU, DRAM, FLASH, PAIRS, VRAM, Arrival, Helper, Side, assert_right, ferried

TOKENS = 75
NOT_SEEN = {"CUDA_VISIBLE_DEVICES": ""}
STAGING = {
    "packed on the device": {"strategies": ["packed"], "staging": "device"},
    "packed in host memory": {"strategies": ["packed"], "staging": "host"},
    "staged on the device": {"strategies": ["staged"], "staging": "device"},
    "staged in host memory": {"strategies": ["staged"], "staging": "host"},
}
BUDGET, READ_S = 16 << 20, 10.0
_endless: set[tuple[bool, str]] = set()
"""Of ways that do not end nobody learns more by waiting for each of them."""


class Fleet:
    """The engine on the GPU, and the one in host memory that sees it or not."""

    def __init__(self, gpu: Helper, host: Helper) -> None:
        self.gpu, self.host = gpu, host

    def cross(self, pair: tuple[Side, Side], to_gpu: bool, settings: dict[str, Any], tokens: int = TOKENS) -> Arrival:
        key = to_gpu, str(settings.get("strategies", "")) + str(settings.get("staging", ""))
        if key in _endless:
            pytest.fail("a load of this kind has not ended already, or its process died: see the first that failed")
        helpers, sides, places = (self.gpu, self.host), pair, (VRAM, DRAM)
        if to_gpu:
            helpers, sides, places = helpers[::-1], sides[::-1], places[::-1]
        try:
            return ferried(helpers, sides, places, tokens, {"read_s": READ_S, **settings})
        except RuntimeError as error:
            if "TimeoutError" in str(error) or "is gone" in str(error):
                _endless.add(key)
            raise


@pytest.fixture(scope="module")
def gpu() -> Iterator[Helper]:
    with closing(Helper("the process of the GPU's engine")) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(gpu: Helper) -> Iterator[Fleet]:
    with closing(Helper("the process of the CPU's engine", NOT_SEEN)) as host:
        yield Fleet(gpu, host)


@pytest.fixture(scope="module")
def seeing(gpu: Helper) -> Iterator[Fleet]:
    with closing(Helper("a process of a CPU's engine that sees the GPU")) as host:
        yield Fleet(gpu, host)


DIRECTIONS = pytest.mark.parametrize("to_gpu", [False, True], ids=["GPU to CPU", "CPU to GPU"])


def tell(capsys: pytest.CaptureFixture[str], what: str, to_gpu: bool, arrival: Arrival) -> None:
    """What was seen, whether it is right or not."""
    (outcome,) = arrival.outcomes
    with capsys.disabled():
        print(
            f"\n{what}, {'CPU to GPU' if to_gpu else 'GPU to CPU'}: {outcome.error or 'right'}; {outcome.moved:,} bytes in "
            f"{outcome.runs:,} runs, {1000 * outcome.wire_s:.1f} ms, posted in {1000 * outcome.posting_s:.1f} ms; "
            f"{arrival.paths[0]} {arrival.ways or ''}"
        )


def assert_judged(arrival: Arrival, here: Side, tokens: int, reached: bool) -> None:
    """UCX without CUDA cannot read a GPU's memory: that fails, and says so. What was gathered into host memory it can."""
    if reached:
        assert_right(arrival, here, tokens)
        return
    for outcome in arrival.outcomes:
        assert "NIXL cannot" in outcome.error
        assert not outcome.moved


@DIRECTIONS
@pytest.mark.parametrize("pair", PAIRS)
def test_certified_caches_and_states_cross(fleet: Fleet, pair: str, to_gpu: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arrival = fleet.cross(PAIRS[pair], to_gpu, {})
    tell(capsys, pair, to_gpu, arrival)
    assert_judged(arrival, PAIRS[pair][0 if to_gpu else 1], TOKENS, reached=to_gpu)


@DIRECTIONS
@pytest.mark.parametrize("staging", STAGING)
@pytest.mark.parametrize("pair", ["FLASH_ATTN, CPU_ATTN (vec)", "gated delta net, square"])
def test_they_cross_by_way_of_staging(
    fleet: Fleet, pair: str, staging: str, to_gpu: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**STAGING[staging], "staging_bytes": BUDGET}
    arrival = fleet.cross(PAIRS[pair], to_gpu, settings)
    tell(capsys, f"{pair}, {staging}", to_gpu, arrival)
    assert_judged(arrival, PAIRS[pair][0 if to_gpu else 1], TOKENS, to_gpu or staging == "packed in host memory")
    assert [set(ways) for ways in arrival.ways] == [set(settings["strategies"])]


@DIRECTIONS
@pytest.mark.parametrize("pair", ["FLASH_ATTN, CPU_ATTN (vec)", "Mamba2"])
def test_they_cross_to_and_from_a_process_that_sees_the_gpu(
    seeing: Fleet, pair: str, to_gpu: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arrival = seeing.cross(PAIRS[pair], to_gpu, {})
    tell(capsys, f"{pair}, both see the GPU", to_gpu, arrival)
    assert_right(arrival, PAIRS[pair][0 if to_gpu else 1], TOKENS)


@DIRECTIONS
@pytest.mark.parametrize("staging", ["packed on the device", "packed in host memory"])
def test_a_prompt_of_a_realistic_shape_crosses_packed(
    fleet: Fleet, staging: str, to_gpu: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = replace(FLASH, heads=8, dim=128, block=128), replace(CPU, heads=8, dim=128, block=128)
    arrival = fleet.cross(pair, to_gpu, {**STAGING[staging], "staging_bytes": 4 * BUDGET}, tokens=1000)
    tell(capsys, f"1,000 tokens of 2 layers, {staging}", to_gpu, arrival)
    assert_judged(arrival, pair[0 if to_gpu else 1], 1000, to_gpu or staging == "packed in host memory")
