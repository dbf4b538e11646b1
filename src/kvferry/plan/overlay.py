"""Which groups of a side have bytes in common: a block id must not be in the tables of two that have them in its block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.plan.schema import Lane
from kvferry.strided import Ints, span, spread

Ids = npt.NDArray[np.signedinteger[Any]]
"""Block ids and places in blocks: 32 bits wide where that is enough, since there may be one for every few tokens."""

Ranges = tuple[tuple[int, int], ...]
"""Block ids from the first of a pair up to and with the second."""

MAX_PIECES: Final = 1 << 22
_EVERY: Final = 1 << 62


@dataclass(frozen=True)
class Claim:
    """Runs of one tile that a group has, as columns; `memory` tells regions of different ranks apart."""

    memory: int
    region: Ints
    offset: Ints
    length: Ints
    lane: Ints


Stretches = dict[tuple[int, int, int], tuple[Ints, Ints]]
"""By memory, region and block stride: sorted starts and ends of what a group has of block 0."""


class Overlay:
    """The groups of one side, with what each claims of block 0 and how many blocks it has."""

    def __init__(self, claims: Mapping[int, Iterable[Claim]], blocks: Mapping[int, int], lanes: Sequence[Lane]) -> None:
        stretches = {group: _stretches(found, lanes) for group, found in claims.items()}
        self._shared: dict[tuple[int, int], Ranges] = {}
        for one, other in combinations(sorted(stretches), 2):
            found = _in_common(stretches[one], stretches[other], min(blocks[one], blocks[other]))
            if found:
                self._shared[one, other] = found
        self.clusters = _clusters(self._shared)

    def clash(self, tables: Mapping[int, Ids]) -> tuple[int, int, int] | None:
        """A block id with two groups whose tables both name it and whose bytes meet in that block."""
        for (one, other), ranges in self._shared.items():
            if one in tables and other in tables:
                both = np.intersect1d(tables[one], tables[other])
                for low, high in ranges:
                    bad = both[(both >= max(low, 0)) & (both <= high)]
                    if len(bad):
                        return int(bad[0]), one, other
        return None


def _stretches(claims: Iterable[Claim], lanes: Sequence[Lane]) -> Stretches:
    found: dict[tuple[int, int, int], list[tuple[Ints, Ints]]] = defaultdict(list)
    for claim in claims:
        for lane in np.unique(claim.lane).tolist():
            mine = claim.lane == lane
            for region in np.unique(claim.region[mine]).tolist():
                some = mine & (claim.region == region)
                start, length = claim.offset[some], claim.length[some]
                tiles = spread(0, lanes[lane].digits)
                if len(start) * len(tiles) > MAX_PIECES:
                    start, length = start.min(keepdims=True), (start + length).max(keepdims=True) - start.min()
                    tiles, length = np.zeros(1, np.int64), length + span(lanes[lane].digits)
                first = (start[:, None] + tiles).reshape(-1)
                stretch = first, first + np.repeat(length, len(tiles))
                found[claim.memory, region, lanes[lane].block_stride].append(stretch)
    return {key: _united(*(np.concatenate(c) for c in zip(*some, strict=True))) for key, some in found.items()}


def _united(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1]))
    return start[first], end[np.append(first[1:], len(end)) - 1]


def _in_common(one: Stretches, other: Stretches, blocks: int) -> Ranges:
    """The ids of blocks in which two groups have a byte in common."""
    found: set[tuple[int, int]] = set()
    for (memory, region, stride), (start, end) in one.items():
        for (its_memory, its_region, its_stride), (its_start, its_end) in other.items():
            if (memory, region) != (its_memory, its_region):
                continue
            if stride == its_stride or blocks == 1:
                at = np.searchsorted(its_end, start, side="right")
                if (its_start[at[at < len(its_start)]] < end[at < len(its_start)]).any():
                    found.add((0, _EVERY))
            else:
                found |= _meetings(start, end, its_start, its_end, stride - its_stride, blocks)
    return tuple(sorted(found))


def _meetings(start: Ints, end: Ints, its_start: Ints, its_end: Ints, step: int, blocks: int) -> set[tuple[int, int]]:
    """Ids at which stretches meet that move apart by `step` bytes from block to block."""
    if step < 0:
        return _meetings(its_start, its_end, start, end, -step, blocks)
    if len(start) * len(its_start) > MAX_PIECES:
        return {(0, _EVERY)}
    low = -((end[:, None] - 1 - its_start) // step)
    high = (its_end - 1 - start[:, None]) // step
    some = (low <= high) & (high >= 0) & (low < blocks)
    return set(zip(low[some].tolist(), high[some].tolist(), strict=True))


def _clusters(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Groups that share bytes with one another, directly or through others."""
    clusters: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(c for c in clusters if c & set(pair)))
        clusters = [c for c in clusters if not c & set(pair)] + [joined]
    return tuple(tuple(sorted(c)) for c in clusters)
