"""Between engines on GPUs and engines on CPUs: both layouts are certified, so that caches and states are moved either way.

There is no GPU here. Manifests are those of CUDA's certificates, in memory that is said to be a device's;
tests/gpu/test_across.py runs the same body with memory that is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import across
from across import (
    CPU,
    DRAM,
    FLASH,
    PAIRS,
    SAID_TO_BE_VRAM,
    Arrival,
    Berth,
    Helper,
    Place,
    Side,
    assert_right,
    declared,
    tables_of,
)
from kvferry.errors import MismatchError, ScatteredError
from kvferry.manifest import Identity, Manifest, check_manifest
from kvferry.plan import make_plans
from kvferry.session import Words
from kvferry.strategy import HostMover, Mapped, Strategies
from kvferry.strategy.mapped import Token
from kvferry.strategy.scattered import Scattered, Settings
from kvferry.strategy.staging import host_staging
from kvferry.transport import Harbour, InProcessTransport, Storage

TOKENS = 75
WAYS = ("direct", "packed", "staged")


class LyingTransport(InProcessTransport):
    """Takes host memory for whatever it is said to be."""

    def register(self, storages: Sequence[Storage]) -> None:
        self._storages += storages


class LyingMover(HostMover):
    """Copies in host memory that is said to be a device's."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory


class LyingEnd:
    """As the connector's, over a wire inside this process."""

    tended = True

    def __init__(self, manifest: Manifest, identity: Identity, harbour: Harbour, way: Any) -> None:
        wire = LyingTransport(f"{identity.engine}.{identity.rank.ordinal}", harbour)
        memory = manifest.regions[0].memory
        staging = host_staging(1 << 20)
        staging = replace(staging, storage=replace(staging.storage, memory=memory))
        mover = LyingMover(memory)
        if staging.shared is not None:
            mover.share(staging.shared)
        self.gathers = Scattered(wire, staging, mover, Settings((way,)))
        self.transport = Strategies(self.gathers)
        self.words = Words(across.SLOTS, identity)
        self.transport.register(
            [*(Storage(r.address, r.length, r.memory, r.device) for r in manifest.regions), self.words.storage]
        )

    @property
    def hurried(self) -> bool:
        return self.gathers.hurried

    def filler(self, kv_caches: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


def place_of(side: Side) -> Place:
    return SAID_TO_BE_VRAM if side.device == "cuda" else DRAM


def crossed(there: Side, here: Side, way: str = "direct", tokens: int = TOKENS) -> Arrival:
    harbour = Harbour()

    def end(manifest: Manifest, identity: Identity) -> LyingEnd:
        return LyingEnd(manifest, identity, harbour, way)

    producer = across.pier(there, place_of(there), tokens, end)

    def pump(berths: list[Berth]) -> None:
        for berth in (*producer.berths, *berths):
            berth.ferry.step()

    try:
        src = tables_of(there, tokens, 1)
        return across.arrive(here, place_of(here), tokens, end, producer.welcome, producer.lease, src, pump)
    finally:
        producer.close()


@pytest.mark.parametrize("to_gpu", [False, True], ids=["GPU to CPU", "CPU to GPU"])
@pytest.mark.parametrize("pair", PAIRS)
def test_certified_caches_and_states_cross_between_a_gpu_and_a_cpu(pair: str, to_gpu: bool) -> None:
    there, here = PAIRS[pair][::-1] if to_gpu else PAIRS[pair]
    assert_right(crossed(there, here), here, TOKENS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to_gpu", [False, True], ids=["GPU to CPU", "CPU to GPU"])
@pytest.mark.parametrize("pair", ["FLASH_ATTN, CPU_ATTN (vec)", "gated delta net"])
def test_every_strategy_crosses_between_devices(pair: str, to_gpu: bool, way: str) -> None:
    there, here = PAIRS[pair][::-1] if to_gpu else PAIRS[pair]
    arrival = crossed(there, here, way)
    assert_right(arrival, here, TOKENS)
    assert [set(ways) for ways in arrival.ways] == [{way} - {"direct"}]


def test_a_ring_on_a_device_is_mapped_where_the_caches_of_both_ends_lie_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[set[str]] = []
    connect = Mapped.connect

    def noted(mapped: Mapped, name: str, tokens: Sequence[Token]) -> None:
        opened.append({token.memory for token in tokens})
        connect(mapped, name, tokens)

    monkeypatch.setattr(Mapped, "connect", noted)
    side = PAIRS["FLASH_ATTN, CPU_ATTN (vec)"][0]
    arrival = crossed(side, side, "packed", 5 * side.block)
    assert_right(arrival, side, 5 * side.block)
    assert [set(ways) for ways in arrival.ways] == [{"packed"}]
    assert opened == [{"vram", "dram"}]


@pytest.mark.parametrize("tps", [(1, 2), (2, 1)], ids=["TP1 to TP2", "TP2 to TP1"])
@pytest.mark.parametrize("to_gpu", [False, True], ids=["GPU to CPU", "CPU to GPU"])
@pytest.mark.parametrize("pair", ["Mamba2", "gated delta net, square"])
def test_tensor_parallel_sizes_may_differ_between_devices(pair: str, to_gpu: bool, tps: tuple[int, int]) -> None:
    sides = PAIRS[pair][::-1] if to_gpu else PAIRS[pair]
    there, here = (replace(side, tp=tp) for side, tp in zip(sides, tps, strict=True))
    assert_right(crossed(there, here), here, TOKENS)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 96])
def test_prompts_of_any_length_cross(tokens: int) -> None:
    for there, here in ((FLASH, CPU), (CPU, FLASH)):
        assert_right(crossed(there, here, tokens=tokens), here, tokens)


@pytest.mark.parametrize("pair", PAIRS)
def test_both_sides_of_every_pair_are_certified_and_lie_where_they_are_said_to(pair: str) -> None:
    for side in PAIRS[pair]:
        manifest, _ = declared(side, 0, "P", 1 << 30, place_of(side).label)
        check_manifest(manifest)
        assert not [shape for shape in manifest.shapes if shape.element.opaque]
        assert {region.memory for region in manifest.regions} == {"vram" if side.device == "cuda" else "dram"}


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (
            replace(FLASH, dtype="float16"),
            "layers.0.self_attn.attn k: float16 there, bfloat16 here; cache dtypes must be equal",
        ),
        (
            replace(FLASH, backend="FLASHINFER"),
            "layers.0.self_attn.attn: opaque cells 'vllm 0.32 FLASHINFER bfloat16 16x64' of 2048 bytes there, k in bfloat16",
        ),
    ],
    ids=["dtypes", "a backend that is not certified"],
)
def test_what_cannot_cross_is_refused_by_name(there: Side, says: str) -> None:
    producer, consumer = (
        declared(side, 0, name, 1 << 30, place_of(side).label)[0] for side, name in ((there, "P"), (CPU, "D"))
    )
    with pytest.raises(MismatchError) as found:
        make_plans([consumer], [producer])
    assert says in str(found.value)
    assert "does not hold" not in str(found.value)


def test_a_state_that_would_fall_into_too_many_runs_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated delta net is turned around element by element: of real size, that is beyond what is proved."""
    there, here = PAIRS["gated delta net, square"]
    monkeypatch.setattr(sys.modules["kvferry.plan.prove"], "MAX_RUNS", 2500)
    producer = declared(there, 0, "P", 1 << 30, "vram")[0]
    one, half = ([declared(replace(here, tp=tp), r, "D", 1 << 30, "dram")[0] for r in range(tp)] for tp in (1, 2))
    says = (
        r"layers\.2\.mixer ssm .*: the plan of one rank has ([\d,]+) runs, 2,048 of 4 bytes here alone, and at most 2,500 are "
        r"proved: .*more tensor-parallel ranks here have fewer each"
    )
    with pytest.raises(ScatteredError, match=says) as found:
        make_plans(one, [producer])
    said = re.search(says, str(found.value))
    assert said is not None
    assert int(said[1].replace(",", "")) > 2500
    assert len(make_plans(half, [producer])) == 2


@pytest.fixture(scope="module")
def helpers() -> Iterator[tuple[Helper, Helper]]:
    with closing(Helper("the producer's process")) as there, closing(Helper("the consumer's process")) as here:
        yield there, here


@pytest.mark.parametrize("to_gpu", [False, True], ids=["GPU to CPU", "CPU to GPU"])
@pytest.mark.parametrize("pair", ["FLASH_ATTN, CPU_ATTN (vec)", "TRITON_MLA, CPU_MLA", "gated delta net"])
def test_the_body_that_runs_on_a_gpu_runs_in_host_memory(helpers: tuple[Helper, Helper], pair: str, to_gpu: bool) -> None:
    sides = PAIRS[pair][::-1] if to_gpu else PAIRS[pair]
    assert_right(across.ferried(helpers, sides, (DRAM, DRAM), TOKENS, {}), sides[1], TOKENS)


@pytest.mark.parametrize("way", ["packed", "staged"])
def test_the_body_that_runs_on_a_gpu_runs_by_way_of_staging(helpers: tuple[Helper, Helper], way: str) -> None:
    settings = {"strategies": [way], "staging_bytes": 1 << 22}
    arrival = across.ferried(helpers, (FLASH, CPU), (DRAM, DRAM), TOKENS, settings)
    assert_right(arrival, CPU, TOKENS)
    assert [set(ways) for ways in arrival.ways] == [{way}]


def test_control_bytes_that_are_not_as_they_must_be_are_noticed() -> None:
    """Of each cell layout, one token's; and a state that was turned around."""
    for pair in PAIRS.values():
        for side in pair:
            truth, tables = across.truth_of(side, TOKENS), tables_of(side, TOKENS, 2)
            memory = np.zeros(side.bytes, np.uint8)
            views = across.Views(side, 0, memory)
            views.write(truth, tables)
            assert list(views.wrong(truth, tables, memory.copy())) == []
            was = memory.copy()
            for view in views.token(1, tables[0][1], 3):  # type: ignore[index]
                view[...] += 1
            assert list(views.wrong(truth, tables, was))
            memory[:] = was
            if side.states is not None and side.states is across.SQUARE:
                state = views.state(0, tables[1])  # type: ignore[arg-type]
                state[...] = state.transpose(0, 2, 1).copy()
                assert list(views.wrong(truth, tables, was)) == ["state of layer 0"]
