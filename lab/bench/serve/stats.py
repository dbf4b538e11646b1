"""What samples say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from statistics import median


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed."""
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(ceil(share * len(samples)), 1) - 1]


def gaps(marks: Sequence[float], begin: float = float("-inf"), end: float = float("inf")) -> Iterator[float]:
    """Times between marks, of those that some part of [begin, end] falls into."""
    return (later - earlier for earlier, later in pairwise(marks) if later > begin and earlier < end)


def middle(samples: Sequence[float]) -> float | None:
    return median(samples) if samples else None
