"""Plans drawn number by number, with memory for them that has guards around it, and what must be in it after a load.

Whoever draws passes `choose`, which picks one of some options: hypothesis, or a seed where hypothesis is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from kvferry.manifest import Identity
from kvferry.manifest.schema import FULL, Group, Region, StatePaged
from kvferry.plan import Plan, Tiles
from kvferry.plan.schema import Edge, Grain, Lane, Need, Run, Side
from kvferry.strategy.moves import COLUMNS, Moves

Choose = Callable[[Sequence[Any]], Any]
Key = tuple[int, int]

GUARD, PAGE = 64, 64
PIECE = COLUMNS[-1]
FACTORS = {1: ((),), 2: ((2,),), 4: ((4,), (2, 2)), 6: ((6,), (2, 3), (3, 2)), 12: ((12,), (3, 4), (2, 3, 2))}
"""Tiles of a block, and the digits by which lanes may count them."""


class Guarded:
    """A region's bytes, `shift` past a round address, between two stretches that nobody may touch."""

    def __init__(self, length: int, shift: int, seed: Sequence[int]) -> None:
        room = np.random.default_rng(seed).integers(0, 256, length + shift + 2 * GUARD + PAGE, np.uint8)
        first = -room.ctypes.data % PAGE
        self.whole = room[first : first + length + shift + 2 * GUARD]
        self.start = GUARD + shift
        self.bytes = self.whole[self.start : self.start + length]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


@dataclass
class Drawn:
    """A plan, one load's tiles, and memory: regions by source, and those of the consumer."""

    plan: Plan
    tiles: Mapping[Key, Tiles]
    sources: list[list[Guarded]]
    here: list[Guarded]

    def moves(self, source: int) -> Moves:
        there = self.sources[source]
        return Moves(self.plan, source, lambda index: there[index].address, lambda index: self.here[index].address)

    def expected(self, *sources: int) -> list[np.ndarray]:
        """The consumer's memory, guards included, after the given sources were read: run after run, byte by byte."""
        out = [guarded.whole.copy() for guarded in self.here]
        for (index, level), tiles in self.tiles.items():
            edge = self.plan.edges[index]
            if edge.source not in sources:
                continue
            columns = (tiles.src_block, tiles.src_tile, tiles.dst_block, tiles.dst_tile)
            for src_block, src_tile, dst_block, dst_tile in zip(*(c.tolist() for c in columns), strict=True):
                for run in edge.grains[level].runs:
                    there = run.src_offset + place(self.plan.lanes[run.src_lane], src_block, src_tile)
                    here = run.dst_offset + place(self.plan.lanes[run.dst_lane], dst_block, dst_tile)
                    for turns in product(*(range(count) for count, _, _ in run.repeats)):
                        src = there + sum(t * s for t, (_, s, _) in zip(turns, run.repeats, strict=True))
                        dst = here + sum(t * d for t, (_, _, d) in zip(turns, run.repeats, strict=True))
                        dst += self.here[run.dst_region].start
                        piece = self.sources[edge.source][run.src_region].bytes[src : src + run.length]
                        out[run.dst_region][dst : dst + run.length] = piece
        return out

    def bytes(self, source: int) -> int:
        total = 0
        for (index, level), tiles in self.tiles.items():
            edge = self.plan.edges[index]
            sizes = [prod(count for count, _, _ in run.repeats) * run.length for run in edge.grains[level].runs]
            total += sum(sizes) * len(tiles.src_block) * (edge.source == source)
        return total


def place(lane: Lane, block: int, tile: int) -> int:
    at = block * lane.block_stride
    for count, stride in reversed(lane.digits):
        tile, digit = divmod(tile, count)
        at += digit * stride
    return at


def drawn(choose: Choose, seed: int = 0) -> Drawn:
    """One or two sources, edges of some grains, lanes with digits in any order of nesting, and runs of all lengths."""
    unit = choose((1, 2, 4, 8, 16, 48))
    piece = min(unit & -unit, 8) * PIECE
    lengths = (unit, 2 * unit, 3 * unit, 7 * unit, 33 * unit, 130 * unit, piece, piece + unit, 2 * piece + 5 * unit)
    blocks = choose((1, 2, 3)), choose((1, 2, 3))
    lanes: list[Lane] = []
    spans: list[list[int]] = [[], []]
    edges: list[Edge] = []
    tiles: dict[Key, Tiles] = {}
    for source in range(choose((1, 2))):
        for _ in range(choose((1, 2))):
            grains = []
            for level in range(choose((1, 2))):
                per_block = choose(tuple(FACTORS)), choose(tuple(FACTORS))
                runs: list[Run] = []
                for _ in range(choose((1, 2, 3))):
                    runs += _track(choose, unit, lengths, blocks, per_block, lanes, spans)
                grains.append(Grain(0, tuple(runs)))
                found = _tiles(choose, blocks, per_block)
                if len(found.src_block):
                    tiles[len(edges), level] = found
            edges.append(Edge(source, 0, 0, 0, tuple(grains)))
    sides = []
    for name, side in (("p", 0), ("d", 1)):
        regions = tuple(Region(f"{name}{i}", length, 0) for i, length in enumerate(spans[side]))
        sides.append(Side(Identity(name, "1", "m"), regions, (Group(0, StatePaged(), blocks[side], hashed=False),)))
    count = 1 + max(edge.source for edge in edges)
    plan = Plan(sides[1], (sides[0],) * count, tuple(lanes), (Need(FULL, 0, False, 0, ("layer",)),), tuple(edges), ())
    shifts = [[unit * choose((0, 1, 3)) for _ in spans[side]] for side in range(2)]
    sources = [[_guarded(spans[0], shifts[0], i, n, seed) for i in range(len(spans[0]))] for n in range(count)]
    return Drawn(plan, tiles, sources, [_guarded(spans[1], shifts[1], i, 99, seed) for i in range(len(spans[1]))])


def _guarded(lengths: Sequence[int], shifts: Sequence[int], index: int, side: int, seed: int) -> Guarded:
    return Guarded(lengths[index], shifts[index], (seed, side, index))


def _track(
    choose: Choose,
    unit: int,
    lengths: Sequence[int],
    blocks: tuple[int, int],
    per_block: tuple[int, int],
    lanes: list[Lane],
    spans: list[list[int]],
) -> list[Run]:
    """Runs that share a lane on either side, in a region of their own on either side."""
    at = [unit * choose((0, 2)), unit * choose((0, 2))]
    shapes = []
    for _ in range(choose((1, 1, 2, 5))):
        length, count = choose(lengths), choose((1, 1, 2, 3))
        steps = [length + unit * choose((0, 1)) for _ in range(2)]
        shapes.append((tuple(at), length, ((count, *steps),) if count > 1 else ()))
        at = [start + count * step + unit * choose((0, 1)) for start, step in zip(at, steps, strict=True)]
    found = []
    for side in range(2):
        lane, span = _lane(choose, unit, blocks[side], per_block[side], at[side])
        spans[side].append(span)
        lanes.append(lane)
        found.append(len(lanes) - 1)
    regions = [len(spans[side]) - 1 for side in range(2)]
    return [Run(regions[0], src, regions[1], dst, n, repeats, *found) for (src, dst), n, repeats in shapes]


def _lane(choose: Choose, unit: int, blocks: int, per_block: int, extent: int) -> tuple[Lane, int]:
    """Steps of tiles of `extent` bytes that do not touch each other, and the bytes that they span together."""
    counts = (blocks, *choose(FACTORS[per_block]))
    strides = [0] * len(counts)
    left = list(range(len(counts)))
    while left:
        inner = choose(tuple(left))
        left.remove(inner)
        strides[inner] = extent + unit * choose((0, 1))
        extent = (counts[inner] - 1) * strides[inner] + extent
    return Lane(strides[0], tuple(zip(counts[1:], strides[1:], strict=True))), extent


def _tiles(choose: Choose, blocks: tuple[int, int], per_block: tuple[int, int]) -> Tiles:
    """Some tiles of the destination, each once, and one of the source for each."""
    free = list(product(range(blocks[1]), range(per_block[1])))
    count = min(len(free), choose((0, 1, 2, 5)))
    here = [free.pop(choose(range(len(free)))) for _ in range(count)]
    taken = [(choose(range(blocks[0])), choose(range(per_block[0])), *one) for one in here]
    columns = np.array(taken, np.int32).reshape(-1, 4).T
    return Tiles(*(np.ascontiguousarray(column) for column in columns))


def seeded(seed: int) -> Choose:
    rng = np.random.default_rng(seed)
    return lambda options: options[int(rng.integers(len(options)))]
