"""Packed and staged reads of device memory, rings on the device and in pinned host memory, out of another process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.manifest.schema import Region
from kvferry.plan import Tiles
from kvferry.strategy.moves import Moves
from kvferry.strategy.probing import copying_of
from kvferry.strategy.staging import Staging, paged
from lab.bench.scatters import SCATTERS, Scatter
from lab.bench.staging_ends import Holder, holder
from lab.bench.strategies import DEVICE_WAYS, measure

SMALL = 8 << 20
"""Less than most of these loads take."""


@pytest.fixture(scope="module")
def held() -> Iterator[Holder]:
    with holder() as found:
        yield found


@pytest.mark.parametrize("scatter", SCATTERS, ids=lambda scatter: scatter.name)
def test_every_byte_arrives_by_every_strategy(held: Holder, scatter: Scatter) -> None:
    cell = measure(held, scatter, scatter.tokens or 4_000, "vram", 1, SMALL, limit_s=2.0)
    assert cell.right
    assert set(DEVICE_WAYS) - set(cell.seconds) <= {"direct"}
    assert cell.bytes > 0


@pytest.fixture(scope="module")
def mover() -> Any:
    from kvferry.strategy.cuda import CudaMover

    return CudaMover(0)


def rings() -> list[Staging]:
    from kvferry.strategy.cuda_staging import device_staging, pinned_staging

    return [device_staging(0, SMALL), pinned_staging(SMALL)]


def test_rings_stay_within_their_budget_and_lie_where_they_are_said_to() -> None:
    for staging, memory in zip(rings(), ("vram", "dram"), strict=True):
        assert staging.storage.length <= SMALL
        assert staging.storage.memory == memory
        assert staging.storage.address % 16384 == 0


def gathered(mover: Any, caches: Any, staging: Staging) -> tuple[Any, int]:
    """Every other KiB of a cache into a ring; a ticket, and the bytes."""
    ring = staging.sending
    there = Region("caches", caches.numel(), caches.data_ptr(), "vram", 0)
    here = Region("ring", ring.length, ring.address, ring.memory, ring.device)
    plan = paged(there, here, 1024, (2048, caches.numel() // 2048), (1024, ring.length // 1024))
    moves = Moves(plan, 0, lambda _: there.address, lambda _: here.address)
    count = min(caches.numel() // 2048, ring.length // 1024)
    at, zeros = np.arange(count, dtype=np.int64), np.zeros(count, np.int64)
    return mover.start(mover.prepare(moves), moves.bind({(0, 0): Tiles(at, zeros, at, zeros)})), count


def test_a_gather_is_over_while_the_engine_is_inside_a_step(mover: Any) -> None:
    """The engine's stream is kept busy for a second; the copies have a stream of their own, on either kind of ring."""
    caches = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for staging in rings():
        gathered(mover, caches, staging)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        step = torch.cuda.Event()
        step.record()
        ticket, count = gathered(mover, caches, staging)
        while not ticket.done:
            assert not step.query()
        assert not step.query()
        assert ticket.moved == 1024 * count
        torch.cuda.synchronize()
        offset = staging.sending.address - staging.keep.data_ptr()
        found = staging.keep[offset : offset + 1024 * count].cpu()
        assert torch.equal(found, caches.cpu().view(-1, 2048)[:count, :1024].reshape(-1))


def test_what_copies_cost_is_found_out_on_the_ring(mover: Any) -> None:
    for staging in rings():
        found = copying_of(mover, staging.landing)
        assert found.launch_s > 0
        assert found.byte_s >= 0
