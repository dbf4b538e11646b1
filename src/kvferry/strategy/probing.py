"""What a path costs, found out by reading a producer's ring when it is met: a few reads of which nobody needs the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan import Tiles
from kvferry.strategy import cost
from kvferry.strategy.cost import Wire
from kvferry.strategy.landing import Source
from kvferry.strategy.staging import PAGE, Staging, noting
from kvferry.transport.contract import Prepared, Read, State, Transport

LIMIT_S: Final = 0.25
"""In all. A producer that does not answer so soon is one whose numbers would be wrong."""
_PIECES: Final = 64
_TIMES: Final = 3
_REST_S: Final = 0.00005


def probed(
    wire: Transport, source: Source, staging: Staging, slot: int, kept: list[Read], clock: Callable[[], float]
) -> tuple[Wire, str]:
    """The path's numbers and its name; raises TransportError where they cannot be had soon, or would mean nothing. Bytes land
    in a slot, which is the caller's again unless there are reads in `kept`."""
    started = clock()
    deadline = started + LIMIT_S

    def seconds(prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], times: int = _TIMES) -> float:
        return min(_timed(wire, prepared, tiles, kept, clock, deadline) for _ in range(times))

    seconds(source.board, noting(source.note), 1)
    if wire.path(source.peer).slow:
        raise TransportError(f"{wire.path(source.peer).name} moves while the producer looks at it")
    round_s = seconds(source.board, noting(source.note))
    count = min(_PIECES, source.offer.slot // PAGE // 2, staging.slot // PAGE // 2)
    if clock() <= started or count < 4:
        raise TransportError("slots are too small to tell")
    first = slot * (staging.slot // PAGE)
    together = seconds(source.ring, _pages(count, 1, first))
    apart = seconds(source.ring, _pages(count, 2, first))
    device = "vram" in (source.offer.memory, staging.storage.memory)
    path = cost.of_path(wire.path(source.peer).name, device)
    usual = cost.WIRES[path]
    byte_s = max(together - round_s, 0.1 * together) / (count * PAGE)
    descriptor_s = max((apart - together) / max(1, count - 1), 0.05 * usual.descriptor_s)
    return Wire(round_s, descriptor_s, byte_s, usual.answer_s), path


def _pages(count: int, step: int, first: int) -> dict[tuple[int, int], Tiles]:
    at = np.arange(0, count * step, step, dtype=np.int64)
    zeros = np.zeros_like(at)
    return {(0, 0): Tiles(at, zeros, first + at, zeros)}


def _timed(
    wire: Transport,
    prepared: Prepared,
    tiles: Mapping[tuple[int, int], Tiles],
    kept: list[Read],
    clock: Callable[[], float],
    deadline: float,
) -> float:
    began = clock()
    read = wire.read(prepared, tiles)
    while (state := wire.poll(read)) is State.RUNNING and clock() < deadline:
        time.sleep(_REST_S)
    took = clock() - began
    if not wire.release(read):
        kept.append(read)
    if kept or state is not State.DONE:
        raise TransportError(read.error or f"it has not answered within {LIMIT_S:g} s")
    return took
