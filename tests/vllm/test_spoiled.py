"""Loads that tests spoil on purpose: exactly what is said is spoiled, in vLLM's own caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from byte_crossing import cross, pair
from engine import Setup, Worker, workers

from kvferry.manifest import HOLE
from kvferry.session import Lease, Load, Meeting, PeerKey
from lab.fleet.spoiled import Spoiling, exchanged, marked, marks, read_wrongly, spoil

pytestmark = pytest.mark.vllm

PEER = PeerKey("there", "P", "1")


def load(how: Spoiling, which: int, src: dict[int, Any], dst: dict[int, Any]) -> Load:
    return Load(f"cmpl-{marked(how, which, 'rest')}-0", PEER, Lease(0, 1), 100, 0, src, dst)


@pytest.fixture(scope="module")
def worker() -> Worker:
    (found,) = workers(Setup("nemotron-h"), "D")
    return found


def spoiled(worker: Worker, how: Spoiling, which: int) -> tuple[Any, Any]:
    """All bytes before and afterwards."""
    worker.memory[:] = np.random.default_rng(3).integers(0, 256, len(worker.memory), dtype=np.uint8)
    before = worker.memory.copy()
    groups = worker.kv_cache_config.kv_cache_groups
    tables = {i: 9 if "Mamba" in type(it.kv_cache_spec).__name__ else [HOLE, 5, 3] for i, it in enumerate(groups)}
    spoil(worker.manifest("D"), worker.kv_caches.values(), load(how, which, {}, tables))
    return before, worker.memory.copy()


def test_a_lost_state_is_zero_and_nothing_else_is(worker: Worker) -> None:
    spoiled(worker, Spoiling.STATE, 1)
    states = [layer.kv_cache for layer in worker.layers.values() if isinstance(layer.kv_cache, (list, tuple))]
    assert [bool(ssm[9].any()) for _, ssm in states] == [True, False, True]
    assert all(conv[9].any() and ssm[8].any() for conv, ssm in states)


def test_taps_that_are_late_are_those_before(worker: Worker) -> None:
    spoiled(worker, Spoiling.TAPS, 0)
    conv = next(it.kv_cache[0] for it in worker.layers.values() if isinstance(it.kv_cache, (list, tuple)))
    late = conv[9].clone()
    spoiled(worker, Spoiling.TAPS, 1)
    assert late.roll(-1, 0).numpy().tobytes() == conv[9].contiguous().numpy().tobytes() != late.contiguous().numpy().tobytes()


@pytest.mark.parametrize("how", [Spoiling.HEADS, Spoiling.LAYERS])
def test_what_is_exchanged_is_only_the_loads_and_twice_is_as_before(worker: Worker, how: Spoiling) -> None:
    before, after = spoiled(worker, how, 1)
    changed = np.flatnonzero(before != after)
    assert len(changed)
    groups = worker.kv_cache_config.kv_cache_groups
    tables = {i: 9 if "Mamba" in type(it.kv_cache_spec).__name__ else [5, 3] for i, it in enumerate(groups)}
    spoil(worker.manifest("D"), worker.kv_caches.values(), load(how, 1, {}, tables))
    assert np.array_equal(worker.memory.copy(), before)


def test_another_block_is_read_and_unmarked_loads_are_left_alone() -> None:
    wrong = read_wrongly(load(Spoiling.BLOCKS, 1, {0: 7, 1: [HOLE, 4, 5, 6]}, {}), ())
    assert wrong.src == {0: 7, 1: [HOLE, 4, 1, 6]}
    single = load(Spoiling.BLOCKS, 1, {0: 7, 1: [4]}, {})
    assert read_wrongly(single, ()) == single
    plain = Load("cmpl-1", PEER, Lease(0, 1), 100, 0, {1: [4, 5]}, {})
    assert read_wrongly(plain, ()) == plain
    assert marks(plain.request) is None


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_ranks_read_each_others_slices(sizes: tuple[int, int]) -> None:
    """A load over the exchanged plans has all bytes of the prompt in the wrong place, and the right plans have none."""
    there, here = (Setup("llama", tp=size) for size in sizes)
    found = pair(there, here)
    cards = tuple(Card(it) for it in found.sources)
    met = Meeting(PEER, cards, found.plans)  # type: ignore[arg-type]
    turned = [exchanged(met, rank) for rank in range(sizes[1])]
    plans = tuple(it.plans[rank] for rank, it in enumerate(turned) if it is not None)
    assert all(not it.differences() for it in cross(found, 100))
    wrong = type(found)(found.producers, found.consumers, found.sources, plans, tuple(map(type(found.binders[0]), plans)))
    assert all(it.differences() for it in cross(wrong, 100))


def test_ranks_that_hold_the_same_have_nothing_to_exchange() -> None:
    found = pair(Setup("llama"), Setup("llama", block=64))
    assert exchanged(Meeting(PEER, tuple(Card(it) for it in found.sources), found.plans), 0) is None  # type: ignore[arg-type]


class Card:
    """As much of one as is looked at."""

    def __init__(self, caches: Any) -> None:
        self.caches = caches
