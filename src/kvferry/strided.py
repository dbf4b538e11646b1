"""The run algebra: mixed-radix digits, footprints of strided tensors, merging of adjacent runs.

Pure arithmetic on integers and NumPy arrays; knows no manifest, no plan, no layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import gcd, prod
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Digits = tuple[tuple[int, int], ...]
JointDigit = tuple[int, int, int]
JointDigits = tuple[JointDigit, ...]
Ints = npt.NDArray[np.int64]
Whole = TypeVar("Whole", bound=np.signedinteger[Any])
Known = TypeVar("Known")


def canonical(digits: Iterable[tuple[int, int]]) -> Digits:
    """The same map with as few digits as possible: no count of 1, no two digits that continue each other."""
    out: list[tuple[int, int]] = []
    for count, stride in digits:
        if count == 1:
            continue
        if out and out[-1][1] == count * stride:
            out[-1] = (out[-1][0] * count, stride)
        else:
            out.append((count, stride))
    return tuple(out)


def size(digits: Iterable[tuple[int, int]]) -> int:
    return prod(count for count, _ in digits)


def span(digits: Iterable[tuple[int, int]]) -> int:
    """The largest offset the digits reach."""
    return sum((count - 1) * stride for count, stride in digits)


def offsets(digits: Sequence[tuple[int, int]], positions: npt.ArrayLike) -> Ints:
    """Byte offsets of the given positions of a mixed-radix axis."""
    rest: Ints = np.asarray(positions, dtype=np.int64)
    out = np.zeros_like(rest)
    for stride, digit in split(digits, rest):
        out += digit * stride
    return out


def split(digits: Sequence[tuple[int, int]], positions: npt.NDArray[Whole]) -> Iterator[tuple[int, npt.NDArray[Whole]]]:
    """Every digit of the positions with its stride, as wide as the positions are."""
    rest = positions
    for count, stride in reversed(digits[1:]):
        above = rest // count
        yield stride, rest - above * count
        rest = above
    if digits:
        yield digits[0][1], rest


def borders(digits: Digits, unit: int = 1) -> tuple[int, ...]:
    """Sizes of the digits' suffixes, in `unit`s: the places where the axis may change its stride."""
    out = []
    running = unit
    for count, _ in reversed(digits):
        running *= count
        out.append(running)
    return tuple(out)


def fitting_grain(limit: int, edges: Iterable[int]) -> int:
    """The largest divisor of `limit` that divides, or is divided by, every border."""
    edges = tuple(edges)
    grain = limit
    while True:
        worst = next((e for e in edges if grain % e and e % grain), None)
        if worst is None:
            return grain
        grain = gcd(grain, worst)


def cut(digits: Digits, tile: int) -> tuple[Digits, Digits]:
    """Digits above and inside aligned tiles of `tile` positions; `tile` must fit the digits' borders."""
    inner: list[tuple[int, int]] = []
    upper: list[tuple[int, int]] = []
    left = tile
    for count, stride in reversed(digits):
        low = min(count, left)
        if left % low or count % low:
            raise ValueError(f"a tile of {tile} positions does not fit the digits {digits}")
        left //= low
        if low > 1:
            inner.insert(0, (low, stride))
        if count // low > 1:
            upper.insert(0, (count // low, stride * low))
    if left != 1:
        raise ValueError(f"a tile of {tile} positions is larger than the digits {digits}")
    return canonical(upper), canonical(inner)


class Kept(Generic[Known]):
    """What a function answered, as long as all answers together weigh at most so much: those that were asked for least lately
    go. Answers about a peer's memory may be a million numbers long, or one."""

    def __init__(self, function: Callable[..., Known], weigh: Callable[[Any], int], most: int) -> None:
        self._function, self._weigh, self._most = function, weigh, most
        self._known: OrderedDict[tuple[Hashable, ...], Known] = OrderedDict()
        self._lock = Lock()
        self.weight = 0

    def __call__(self, *asked: Hashable) -> Known:
        with self._lock:
            if asked in self._known:
                self._known.move_to_end(asked)
                return self._known[asked]
        found = self._function(*asked)
        with self._lock:
            if asked not in self._known:
                self._known[asked] = found
                self.weight += 1 + self._weigh(found)
            while self.weight > self._most:
                self.weight -= 1 + self._weigh(self._known.popitem(last=False)[1])
        return found


def kept(weigh: Callable[[Any], int], most: int) -> Callable[[Callable[..., Known]], Kept[Known]]:
    """Keep a function's answers while they weigh at most `most` together."""
    return lambda function: Kept(function, weigh, most)


@kept(len, 1 << 16)
def joint(src: Digits, src_start: int, dst: Digits, dst_start: int, count: int) -> tuple[tuple[int, int, JointDigits], ...]:
    """Positions [start, start + count) of two axes as pieces (source offset, destination offset, joint digits)."""
    src, dst = canonical(src), canonical(dst)
    if len(src) <= 1 and len(dst) <= 1:
        s = src[0][1] if src else 0
        d = dst[0][1] if dst else 0
        return ((src_start * s, dst_start * d, ((count, s, d),) if count > 1 else ()),)
    at = np.arange(count, dtype=np.int64)
    pieces = _segments(offsets(src, at + src_start), offsets(dst, at + dst_start))
    return tuple(pieces)


def _segments(src: Ints, dst: Ints) -> list[tuple[int, int, JointDigits]]:
    """Greedy segmentation of two parallel offset sequences into progressions, then progressions of those.

    Digits whose strides do not fall from the most significant on lead back; a progression only ever leads forth.
    """
    step = np.stack([np.diff(src), np.diff(dst)], axis=1)
    forth: list[bool] = np.all(step > 0, axis=1).tolist()
    last = len(src) - 1
    ends = [*(np.flatnonzero((step[1:] != step[:-1]).any(axis=1)) + 1).tolist(), last]
    pieces: list[tuple[int, int, JointDigits]] = []
    start = turn = 0
    while start <= last:
        while ends[turn] <= start < last:
            turn += 1
        end = ends[turn] if start < last and forth[start] else start
        digits: JointDigits = ((end - start + 1, int(step[start, 0]), int(step[start, 1])),) if end > start else ()
        pieces.append((int(src[start]), int(dst[start]), digits))
        start = end + 1
    return gather(pieces)


def gather(pieces: list[tuple[int, int, JointDigits]]) -> list[tuple[int, int, JointDigits]]:
    """Neighbouring pieces of equal inner digits at a constant distance become one piece with a further outer digit."""
    out: list[tuple[int, int, JointDigits]] = []
    i = 0
    while i < len(pieces):
        src, dst, inner = pieces[i]
        j = i + 1
        if j < len(pieces) and pieces[j][2] == inner:
            ds, dd = pieces[j][0] - src, pieces[j][1] - dst
            while ds > 0 and dd > 0 and j < len(pieces) and pieces[j] == (src + (j - i) * ds, dst + (j - i) * dd, inner):
                j += 1
            if j - i > 1:
                out.append((src, dst, ((j - i, ds, dd), *inner)))
                i = j
                continue
        out.append(pieces[i])
        i += 1
    return out


def fold(length: int, digits: Iterable[JointDigit]) -> tuple[int, JointDigits]:
    """A run with its repeats: digits that continue the run on both sides lengthen it, the rest are put in order."""
    rest = [d for d in digits if d[0] > 1]
    grown = True
    while grown:
        grown = False
        for digit in rest:
            if digit[1] == digit[2] == length:
                length *= digit[0]
                rest.remove(digit)
                grown = True
                break
    rest.sort(key=lambda d: (-d[2], -d[1]))
    merged: list[JointDigit] = []
    for count, src, dst in rest:
        if merged and merged[-1][1] == count * src and merged[-1][2] == count * dst:
            merged[-1] = (merged[-1][0] * count, src, dst)
        else:
            merged.append((count, src, dst))
    return length, tuple(merged)


def spread(start: int, digits: Iterable[tuple[int, int]]) -> Ints:
    """All offsets that digits reach from `start`, most significant digit slowest."""
    out = np.array([start], dtype=np.int64)
    for count, stride in digits:
        out = (out[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return out


def footprint(digits: Iterable[tuple[int, int]], length: int) -> tuple[int, Digits]:
    """The bytes a strided tensor touches from its first one: a run length and repeats, both nested and disjoint.

    Raises ValueError where two elements share a byte, or where strides interleave so that disjointness cannot be seen.
    """
    repeats: list[tuple[int, int]] = []
    reach = length
    for count, stride in sorted((d for d in digits if d[0] > 1), key=lambda d: d[1]):
        if stride < reach:
            raise ValueError(f"a stride of {stride} bytes steps inside {reach} bytes already taken")
        if stride == length and not repeats:
            length *= count
        else:
            repeats.insert(0, (count, stride))
        reach = (count - 1) * stride + reach
    return length, canonical(repeats)


def merge(src: Ints, dst: Ints, length: Ints, *same: Ints) -> tuple[Ints, ...]:
    """Join neighbouring entries that continue each other on both sides and agree in all `same` columns."""
    if len(src) < 2:
        return (src, dst, length, *same)
    joined = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])
    for column in same:
        joined &= column[1:] == column[:-1]
    if not joined.any():
        return (src, dst, length, *same)
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    total = length.cumsum()
    lengths = np.append(total[first[1:] - 1], total[-1])
    lengths[1:] -= lengths[:-1].copy()
    return (src[first], dst[first], lengths, *(c[first] for c in same))
