"""How scattered a request's blocks lie: the separate runs that are left when neighbours are read together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

SCATTERED: Final = 0.9
FEW: Final = 8
"""Requests of fewer blocks say nothing of how blocks lie."""

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Scatter:
    """Blocks that one request moves, and the runs they form once the pairs are sorted."""

    blocks: int
    runs: int

    @property
    def ratio(self) -> float:
        return self.runs / self.blocks if self.blocks else 0.0


def runs(source: Sequence[int], target: Sequence[int]) -> int:
    """Runs of pairs whose blocks follow each other on both sides. Sorted by either side they are the same."""
    pairs = np.array([source, target], np.int64).reshape(2, -1)
    if not pairs.size:
        return 0
    steps = np.diff(pairs[:, np.argsort(pairs[0], kind="stable")], axis=1)
    return 1 + int(np.count_nonzero((steps != 1).any(axis=0)))


def scatter(source: Tables, target: Tables, tokens: int, block_tokens: Sequence[int]) -> Scatter:
    """Over all groups; block 0 is vLLM's place for a block that a request does not have."""
    blocks = count = 0
    for there, here, size in zip(source, target, block_tokens, strict=False):
        many = -(-tokens // size)
        pairs = [(a, b) for a, b in zip(there[:many], here[:many], strict=False) if a and b]
        blocks += len(pairs)
        count += runs([a for a, _ in pairs], [b for _, b in pairs])
    return Scatter(blocks, count)


def scattered(found: Mapping[str, Scatter]) -> float:
    """The least scattered of the requests that have enough blocks to tell; 0 where none has."""
    return min((it.ratio for it in found.values() if it.blocks >= FEW), default=0.0)
