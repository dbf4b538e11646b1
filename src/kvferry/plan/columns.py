"""Runs as columns, repeats expanded: what binding adds block offsets to, and what the proof looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvferry.plan.schema import Run
from kvferry.strided import Ints, spread


@dataclass(frozen=True)
class Columns:
    """One entry per contiguous run of one tile."""

    src_region: Ints
    src_offset: Ints
    dst_region: Ints
    dst_offset: Ints
    length: Ints
    src_lane: Ints
    dst_lane: Ints

    def __len__(self) -> int:
        return len(self.length)


def expanded(runs: Sequence[Run]) -> Columns:
    """All contiguous runs of a tile, those of one strided run behind each other."""
    rows = np.array(
        [(r.src_region, r.src_offset, r.dst_region, r.dst_offset, r.length, r.src_lane, r.dst_lane) for r in runs], np.int64
    ).reshape(-1, 7)
    repeated = [i for i, r in enumerate(runs) if r.repeats]
    if repeated:
        counts = np.ones(len(runs), np.int64)
        counts[repeated] = [prod(c for c, _, _ in runs[i].repeats) for i in repeated]
        ends = np.cumsum(counts)
        rows = np.repeat(rows, counts, axis=0)
        for i in repeated:
            mine = slice(int(ends[i] - counts[i]), int(ends[i]))
            rows[mine, 1] += spread(0, [(c, s) for c, s, _ in runs[i].repeats])
            rows[mine, 3] += spread(0, [(c, d) for c, _, d in runs[i].repeats])
    return Columns(*(np.ascontiguousarray(column) for column in rows.T))
