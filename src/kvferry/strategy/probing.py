"""What a path costs, found out by reading a producer's ring when it is met: a few reads of which nobody needs the bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from kvferry.errors import TransportError
from kvferry.manifest.schema import Region
from kvferry.plan import Tiles
from kvferry.strategy import cost
from kvferry.strategy.cost import Copying, Wire
from kvferry.strategy.movers import Mover
from kvferry.strategy.moves import Moves
from kvferry.strategy.sources import Source
from kvferry.strategy.staging import PAGE, Staging, noting, paged, pages
from kvferry.transport.contract import Prepared, Read, State, Storage, Transport

LIMIT_S: Final = 0.25
"""In all. A producer that does not answer so soon is one whose numbers would be wrong."""
_LENGTH: Final = 4 << 20
_SOON_S: Final = 0.002
"""What so many bytes take no longer than says more of the path's latency than of its bytes: more of the slot is read."""
_LONG: Final = 256 << 20
"""A quarter of a millisecond at a device's own pace, and not too long at a NIC's for those who wait meanwhile."""
_CRUMBS: Final = 1024
"""So many descriptors of a few bytes are read to learn what one costs: more than are posted in one go."""
_CRUMB: Final = 32
_TIMES: Final = 3
_SHORT: Final = 4
_REST_S: Final = 0.00005
_FEW_CORES: Final = 4


def rest_s() -> float:
    """Between two looks at a read that is timed: where cores are few the producer may need this one. Else it is asked after
    without, since a machine may rest for many times as long as it was asked to, and UCX looks at a few descriptors of CUDA IPC
    at a time."""
    return _REST_S if len(os.sched_getaffinity(0)) < _FEW_CORES else 0.0


def probed(
    wire: Transport, source: Source, staging: Staging, slot: int, kept: list[Read], clock: Callable[[], float]
) -> tuple[Wire, str]:
    """The path's numbers and its name; raises TransportError where they cannot be had soon, or would mean nothing. Bytes land
    in a slot, which is the caller's again unless there are reads in `kept`. Some 15 ms of looking without rest are spent on
    device memory alone, where a rest would be most of what is measured."""
    started = clock()
    deadline = started + LIMIT_S
    device = "vram" in (source.offer.memory, staging.storage.memory)
    rest = rest_s() if device else _REST_S

    def seconds(prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], times: int = _TIMES) -> float:
        return min(_timed(wire, prepared, tiles, kept, clock, deadline, rest) for _ in range(times))

    seconds(source.board, noting(source.note), 1)
    if wire.path(source.peer).slow:
        raise TransportError(f"{wire.path(source.peer).name} moves while the producer looks at it")
    round_s = seconds(source.board, noting(source.note))
    most = min(source.offer.slot, staging.slot, _LONG)
    length = min(_LENGTH, most)
    if clock() <= started or length < 2 * _CRUMB * _CRUMBS:
        raise TransportError("slots are too small to tell")
    together = seconds(source.ring, pages(source.offer, 0, staging.slot, slot, length))
    if length < most and together < _SOON_S:
        length = most
        together = seconds(source.ring, pages(source.offer, 0, staging.slot, slot, length))
    crumbs = _crumbs(wire, source, staging, slot)
    few, apart = seconds(crumbs, _every_other(cost.FEW)), seconds(crumbs, _every_other(_CRUMBS))
    path = cost.of_path(wire.path(source.peer).name, device)
    usual = cost.WIRES[path]
    byte_s = max(together - round_s, 0.1 * together) / length
    descriptor_s = max(apart - few, 0.1 * apart) / (_CRUMBS - cost.FEW)
    return Wire(round_s, descriptor_s, byte_s, usual.answer_s, max(0.0, few - cost.FEW * descriptor_s - round_s)), path


def _crumbs(wire: Transport, source: Source, staging: Staging, slot: int) -> Prepared:
    """The first slot of a ring, a few bytes at a time."""
    offer, landing = source.offer, staging.landing
    there = Region("ring", offer.slot, offer.ring, offer.memory, offer.device)
    here = Region("landing", staging.slot, landing.address + slot * staging.slot, landing.memory, landing.device)
    plan = paged(there, here, _CRUMB, (_CRUMB, offer.slot // _CRUMB), (_CRUMB, staging.slot // _CRUMB))
    return wire.prepare(plan, 0, source.peer)


def _every_other(count: int) -> dict[tuple[int, int], Tiles]:
    at = np.arange(0, 2 * count, 2, dtype=np.int64)
    zeros = np.zeros_like(at)
    return {(0, 0): Tiles(at, zeros, at, zeros)}


def copying_of(mover: Mover, ring: Storage) -> Copying:
    """What copies cost at this end, found out on its own ring before anybody uses it, by short runs and long ones."""
    least = [_copied(mover, ring, 64, 1) for _ in range(_TIMES)]
    launch_s = min(least)
    short = ring.length // 2 // _SHORT // 2
    cases = [(_SHORT, min(short, 1 << 15)), (1 << 10, min(ring.length // 4096, 1 << 11)), (PAGE, ring.length // 4 // PAGE)]
    found = []
    for length, count in cases:
        count = max(1, min(count, (1 << 22) // length))
        took = min(_copied(mover, ring, length, count) for _ in range(_TIMES))
        found.append((length, count, max(took - launch_s, 1e-9)))
    run_s, byte_s = cost.fitted([(count, length * count) for length, count, _ in found], [took for _, _, took in found])
    return Copying(launch_s, run_s, byte_s, beside=mover.memory == "vram")


def _copied(mover: Mover, ring: Storage, length: int, count: int) -> float:
    """Seconds of so many copies from one half of a ring to the other, both of them with gaps."""
    half = ring.length // 2
    sides = [Region("ring", half, ring.address + at, ring.memory, ring.device) for at in (0, half)]
    blocks = half // length
    plan = paged(sides[0], sides[1], length, (length, blocks), (length, blocks))
    at = np.arange(count, dtype=np.int64) * (2 if 2 * count <= blocks else 1) % blocks
    zeros = np.zeros_like(at)
    moves = Moves(plan, 0, lambda _: sides[0].address, lambda _: sides[1].address)
    held = mover.prepare(moves)
    bound = moves.bind({(0, 0): Tiles(at, zeros, at, zeros)})
    began = time.perf_counter()
    ticket = mover.start(held, bound)
    while not ticket.done:
        time.sleep(0)
    return time.perf_counter() - began


def _timed(
    wire: Transport,
    prepared: Prepared,
    tiles: Mapping[tuple[int, int], Tiles],
    kept: list[Read],
    clock: Callable[[], float],
    deadline: float,
    rest: float,
) -> float:
    began = clock()
    read = wire.read(prepared, tiles)
    while (state := wire.poll(read)) is State.RUNNING and clock() < deadline:
        time.sleep(rest)
    took = clock() - began
    if not wire.release(read):
        kept.append(read)
    if kept or state is not State.DONE:
        raise TransportError(read.error or f"it has not answered within {LIMIT_S:g} s")
    return took
