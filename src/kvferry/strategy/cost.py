"""What a load would cost by each way, in seconds, from few numbers of the path and of the memory at its ends.

    direct    a read, every descriptor, the bytes on the wire
    packed    an answer; then gather, wire and scatter beside each other, by pieces of some rounds each; no wire where the ring
              that was gathered into can be mapped
    staged    every covering stretch, its bytes on the wire; the scatter of what is in them beside it; pieces as well
    mapped    one launch, every run, the bytes

Numbers are measured when a producer is met, or by `python -m lab bench calibrate`, or they are a path's usual ones. Counts come
from plans. Nothing here knows a layout, a layer or a block size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Final, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvferry.plan import Plan, Tiles
from kvferry.plan.columns import expanded
from kvferry.plan.detour import Detour, Key
from kvferry.strided import Ints, canonical

Way = Literal["direct", "mapped", "packed", "staged"]
WAYS: Final[tuple[Way, ...]] = ("direct", "mapped", "packed", "staged")


class Wire(Struct, frozen=True):
    """A path: seconds of a word there and back, of every descriptor, of every byte; and until a producer has begun what it was
    asked for. `begin_s`: what the first `FEW` descriptors of a read take beyond `descriptor_s` each, all of them together."""

    round_s: float
    descriptor_s: float
    byte_s: float
    answer_s: float
    begin_s: float = 0.0

    def read_s(self, descriptors: float) -> float:
        """What a read takes beside its bytes."""
        return self.round_s + self.begin_s * min(1.0, descriptors / FEW) + descriptors * self.descriptor_s


class Copying(Struct, frozen=True):
    """Memory at an end: seconds of every launch, of every run, of every byte. `beside`: copies run beside the thread that began
    them, as a device's do; else it can do nothing else meanwhile."""

    launch_s: float
    run_s: float
    byte_s: float
    beside: bool = False


class Rates(Struct, frozen=True):
    """`gathering` at the producer, `scattering` at the consumer."""

    path: str
    wire: Wire
    gathering: Copying
    scattering: Copying


FEW: Final = 64
"""Descriptors of a read that may cost more than those that follow: over CUDA IPC they do, each by 5 to 8 µs."""
HOST: Final = Copying(20e-6, 8e-9, 1 / 1.8e9)
DEVICE: Final = Copying(30e-6, 0.02e-9, 1 / 1.2e12, beside=True)
WIRES: Final[Mapping[str, Wire]] = {
    "same GPU": Wire(60e-6, 3e-6, 1 / 1.1e12, 0.6e-3, 0.5e-3),
    "NVLink": Wire(60e-6, 3e-6, 1 / 350e9, 0.6e-3, 0.5e-3),
    "PCIe": Wire(60e-6, 3e-6, 1 / 45e9, 0.6e-3, 0.5e-3),
    "NIC": Wire(30e-6, 0.4e-6, 1 / 45e9, 1.5e-3),
    "shared memory": Wire(20e-6, 0.7e-6, 1 / 6e9, 1e-3),
    "TCP": Wire(1e-3, 4e-6, 1 / 1.1e9, 2.5e-3),
}
"""What a path usually costs, where nothing was measured. An answer is never measured: the producer's thread looks every 1.5 ms
and the consumer's every 0.3 ms, half of which is waited for on average, and a network adds its own; beside a device it is
what it took between two processes on one H200, and in engines the first after a quiet while takes three times as long.
NVLink, PCIe and NIC are what vendors and others report: nobody has measured them here."""


WORTH: Final = 1.1
"""How many times cheaper staging must be foretold to be used instead of descriptors."""
SOME: Final = 4096
ONE_IN: Final = 8
"""Of a load of more tiles so many are looked at, or one in eight, before all are put in order: where each is a token, that
takes a tenth of the load."""
PACKED_ROUNDS: Final = 6
MAPPED_ROUNDS: Final = 2
STAGED_ROUNDS: Final = 3
"""What a piece takes beyond its bytes, in rounds, as found with many small ones: to be asked for and found on the board, read,
checked, let go of and bound; out of a mapped ring to be asked for, let go of and bound; a staged one only to be read, let go of
and bound. A round is mostly the work of this process and of its transport, as it is where nothing but a word is read."""


@dataclass(frozen=True)
class Counts:
    """A load from one source: bytes, and contiguous runs once neighbours are merged."""

    bytes: int
    runs: int


@dataclass(frozen=True)
class Through:
    """A load by way of staging: bytes of its runs and of staging, stretches on the wire of a staged one, runs on the way in and
    on the way out."""

    bytes: int
    staged: int
    gathered: int
    scattered: int


class Counter:
    """A plan's runs from one source, ready to be counted for loads: per grain, and how many of them merge with those of the
    next tile."""

    def __init__(self, plan: Plan, source: int) -> None:
        self._grains: dict[Key, tuple[int, int, int]] = {}
        self._tiles: dict[Key, tuple[int, int]] = {}
        for i, edge in enumerate(plan.edges):
            if edge.source != source:
                continue
            for level, grain in enumerate(edge.grains):
                columns = expanded(grain.runs)
                lanes = [canonical(((1 << 40, lane.block_stride), *lane.digits)) for lane in plan.lanes]
                steps = np.array([one[0][1] if len(one) == 1 else -1 for one in lanes], np.int64)
                dense = (steps[columns.src_lane] == columns.length) & (steps[columns.dst_lane] == columns.length)
                self._grains[i, level] = int(columns.length.sum()), len(columns), int(dense.sum())
                there, here = (plan.lanes[lane].digits for lane in (grain.runs[0].src_lane, grain.runs[0].dst_lane))
                self._tiles[i, level] = prod(count for count, _ in there), prod(count for count, _ in here)

    @property
    def tile_bytes(self) -> int:
        """Of one tile of every grain together."""
        return sum(size for size, _, _ in self._grains.values())

    @property
    def tile_runs(self) -> int:
        return sum(runs for _, runs, _ in self._grains.values())

    def count(self, tiles: Mapping[Key, Tiles]) -> Counts:
        return self._counted(tiles, _stretches)

    def least(self, tiles: Mapping[Key, Tiles]) -> Counts:
        """No more runs than there are, by a look at some of the tiles: what merges lies equally far from here at the source."""
        return self._counted(tiles, _distances)

    def _counted(self, tiles: Mapping[Key, Tiles], stretches: Callable[[Tiles, int, int], int]) -> Counts:
        moved = runs = 0
        for key, (size, total, dense) in self._grains.items():
            found = tiles.get(key)
            if found is None or not len(found.src_block):
                continue
            count = len(found.src_block)
            moved += size * count
            runs += (total - dense) * count
            if dense:
                runs += dense * stretches(found, *self._tiles[key])
        return Counts(moved, runs)


def _places(tiles: Tiles, there: int, here: int, every: int = 1) -> tuple[Ints, Ints]:
    """Of every so many tiles, by how many a block has on either side."""
    src = tiles.src_block[::every].astype(np.int64) * there + tiles.src_tile[::every]
    return src, tiles.dst_block[::every].astype(np.int64) * here + tiles.dst_tile[::every]


def _stretches(tiles: Tiles, there: int, here: int) -> int:
    """In the order in which they are copied, which is that of places here."""
    src, dst = _places(tiles, there, here)
    step = dst[1:] - dst[:-1]
    if (step < 0).any():
        order = np.argsort(dst)
        src, dst = src[order], dst[order]
        step = dst[1:] - dst[:-1]
    return 1 + int(np.count_nonzero((step != 1) | (src[1:] - src[:-1] != 1)))


def _distances(tiles: Tiles, there: int, here: int) -> int:
    src, dst = _places(tiles, there, here, min(ONE_IN, -(-len(tiles.src_block) // SOME)))
    found = np.sort(dst - src)
    return 1 + int(np.count_nonzero(found[1:] != found[:-1]))


def through(detour: Detour, tiles: Mapping[Key, Tiles]) -> Through:
    counts = [len(tiles[part.key].src_block) if part.key in tiles else 0 for part in detour.parts]
    pairs = list(zip(detour.parts, counts, strict=True))
    return Through(
        sum(part.bytes * count for part, count in pairs),
        sum(part.size * count for part, count in pairs),
        sum(part.gathered * count for part, count in pairs),
        sum(part.scattered * count for part, count in pairs),
    )


def direct_s(load: Counts, rates: Rates) -> float:
    return rates.wire.read_s(load.runs) + load.bytes * rates.wire.byte_s


def mapped_s(load: Counts, rates: Rates) -> float:
    """The copies cross the path, and are no faster than it is."""
    copying = rates.scattering
    return copied(copying, load.runs, 0) + load.bytes * max(copying.byte_s, rates.wire.byte_s)


def copied(copying: Copying, runs: int, moved: int) -> float:
    return copying.launch_s + runs * copying.run_s + moved * copying.byte_s


def packed_s(load: Through, rates: Rates, piece: int, slots: int, mapped: bool = False) -> float:
    """The slowest of the three stages is what every further piece takes. A ring that is smaller than the load is waited for
    once each time around. Out of a ring that is `mapped` a device's copies cross the path, and are no faster than it is; host
    memory's cross none, whatever the transport's is."""
    pieces = max(1, -(-load.staged // piece))
    share = 1 / pieces
    wire, gathering, scattering = rates.wire, rates.gathering, rates.scattering
    carried_s = PACKED_ROUNDS * wire.round_s + wire.descriptor_s + share * load.staged * wire.byte_s
    byte_s = max(scattering.byte_s, wire.byte_s) if mapped and scattering.beside else scattering.byte_s
    stages = (
        copied(gathering, 0, 0) + share * (load.gathered * gathering.run_s + load.bytes * gathering.byte_s),
        MAPPED_ROUNDS * wire.round_s if mapped else carried_s,
        copied(scattering, 0, 0) + share * (load.scattered * scattering.run_s + load.bytes * byte_s),
    )
    slowest = max(stages) if scattering.beside else max(stages[0], stages[1] + stages[2])
    around = (pieces - 1) // slots
    return wire.answer_s * (1 + around) + wire.round_s + sum(stages) + (pieces - 1) * slowest


def staged_s(load: Through, rates: Rates, piece: int) -> float:
    pieces = max(1, -(-load.staged // piece))
    wire, scattering = rates.wire, rates.scattering
    stages = (
        (STAGED_ROUNDS - 1) * wire.round_s + wire.read_s(load.gathered / pieces) + load.staged * wire.byte_s / pieces,
        scattering.launch_s + (load.scattered * scattering.run_s + load.bytes * scattering.byte_s) / pieces,
    )
    return sum(stages) + (pieces - 1) * (max(stages) if scattering.beside else sum(stages))


def best(found: Mapping[Way, float]) -> Way:
    """The cheapest, of equals the one that is named first; but descriptors, which take no slots and nobody's time at the
    producer, unless a way through staging is cheaper by more than such numbers are worth."""
    cheapest = min(found, key=lambda way: (found[way], WAYS.index(way)))
    if cheapest in ("packed", "staged") and found.get("direct", inf) <= WORTH * found[cheapest]:
        return "direct"
    return cheapest


def usual(path: str, gathering: Copying = HOST, scattering: Copying = HOST) -> Rates:
    return Rates(path, WIRES[path], gathering, scattering)


def of_path(name: str, device: bool) -> str:
    """Which of the usual paths a transport speaks of."""
    words = name.lower()
    for said, path in _SAID:
        if said in words:
            return path
    return "NVLink" if device else "NIC"


_SAID: Final = (
    ("tcp", "TCP"),
    ("cuda ipc", "same GPU"),
    ("shared memory", "shared memory"),
    ("plain memory", "shared memory"),
    ("mapped memory", "shared memory"),
)


def fitted(xs: Sequence[tuple[float, float]], ys: Sequence[float]) -> tuple[float, float]:
    """Two factors by least squares of relative errors, none below zero: seconds of each of the first, and of the second."""
    a, y = np.array(xs, float), np.array(ys, float)
    one, other = np.linalg.lstsq(a / y[:, None], np.ones(len(y)), rcond=None)[0]
    return max(0.0, float(one)), max(0.0, float(other))


def with_wire(rates: Rates, wire: Wire) -> Rates:
    return replace(rates, wire=wire)
