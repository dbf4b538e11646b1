"""Parts as lines of global indices, and sets of copies as sorted intervals: what the proof reasons with.

Shares nothing with the planner's boxes and digits: two parts mean the same where their lines overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvferry.errors import ScatteredError
from kvferry.manifest.schema import Axis, Shape
from kvferry.strided import Ints, canonical, kept, merge, offsets

MAX_PIECES: Final = 1 << 18
"""Pieces that a part's line is spelled out in."""

Triple = tuple[Ints, Ints, Ints]
"""Copies as columns: source, destination, length."""


def concatenate(triples: Sequence[Triple]) -> Triple:
    if not triples:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    return tuple(np.concatenate(column) for column in zip(*triples, strict=True))  # type: ignore[return-value]


def picked(some: npt.NDArray[np.bool_], triple: Triple) -> Triple:
    return triple[0][some], triple[1][some], triple[2][some]


def sorted_and_merged(triple: Triple) -> Triple:
    src, dst, length = triple
    order = np.argsort(dst, kind="stable")
    return merge(src[order], dst[order], length[order])  # type: ignore[return-value]


def same(one: Iterable[Ints], other: Iterable[Ints]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def first_difference(wanted: Triple, got: Triple) -> int:
    """The lowest destination address at which two sorted and merged lists of copies differ."""
    both = min(len(wanted[0]), len(got[0]))
    rows = np.stack([w[:both] != g[:both] for w, g in zip(wanted, got, strict=True)])
    row = int(np.argmax(rows.any(axis=0))) if rows.any() else both
    if row == both:
        return int((wanted if len(wanted[0]) > both else got)[1][row])
    if rows[:2, row].any():
        return int(min(wanted[1][row], got[1][row]))
    return int(wanted[1][row] + min(wanted[2][row], got[2][row]))


@lru_cache(maxsize=4096)
def same_meaning(src: Shape, dst: Shape) -> bool:
    """Do equal indices of two parts stand for the same numbers?"""
    per_entry = [(s.token.per_entry, s.token.moves_partial) if s.token else (0, False) for s in (src, dst)]
    sizes = [{a.name: a.live_size for a in s.axes} for s in (src, dst)]
    return src.element == dst.element and per_entry[0] == per_entry[1] and sizes[0] == sizes[1]


def _line(shape: Shape, order: Sequence[str], live: bool) -> tuple[Ints, Ints, int]:
    """A part as pieces of one length on the line of global indices: (place on the line, place in memory), in bytes."""
    axes = {a.name: a for a in shape.axes}
    unit = length = shape.element.bytes
    pieces = 1
    weight = 1
    start = 0
    line = np.zeros(1, np.int64)
    memory = np.zeros(1, np.int64)
    contiguous = True
    for name in reversed(order):
        axis = axes[name]
        count, full = _owned(axis, live)
        digits = canonical(axis.digits)
        if contiguous and (count <= 1 or (len(digits) == 1 and digits[0][1] == length)):
            length *= count
            start += axis.start * weight
            contiguous = axis.start == 0 and count == full
        else:
            contiguous = False
            pieces *= count
            if pieces > MAX_PIECES:
                raise ScatteredError(f"a part in more than {MAX_PIECES:,} separate pieces is too scattered to be copied")
            at = np.arange(count, dtype=np.int64)
            line = ((axis.start + at)[:, None] * weight + line).reshape(-1)
            memory = (offsets(axis.digits, at)[:, None] + memory).reshape(-1)
        weight *= full
    return (line + start) * unit, memory, length


def pieces_of(shape: Shape, other: Shape) -> int:
    """In how many pieces a part's line is spelled out where it is laid over another's."""
    axes = {a.name: a for a in shape.axes}
    length, pieces, contiguous = shape.element.bytes, 1, True
    for name in reversed(_memory_order(other)):
        count, full = _owned(axes[name], live=True)
        digits = canonical(axes[name].digits)
        if contiguous and (count <= 1 or (len(digits) == 1 and digits[0][1] == length)):
            length *= count
            contiguous = axes[name].start == 0 and count == full
        else:
            pieces, contiguous = pieces * count, False
    return pieces


def _owned(axis: Axis, live: bool) -> tuple[int, int]:
    if not live:
        return axis.stop - axis.start, axis.size
    return max(0, min(axis.stop, axis.live_size) - axis.start), axis.live_size


def _memory_order(shape: Shape) -> list[str]:
    """Axis names, widest stride first."""
    return [a.name for a in sorted(shape.axes, key=lambda a: -min((s for _, s in canonical(a.digits)), default=0))]


@kept(lambda found: len(found[0]), 1 << 20)
def overlay(src: Shape, dst: Shape) -> Triple:
    """Where the lines of two parts overlap: (source offset, destination offset, length) relative to their places."""
    order = _memory_order(dst)
    src_line, src_memory, src_length = _line(src, order, live=True)
    dst_line, dst_memory, dst_length = _line(dst, order, live=True)
    by_line = np.argsort(src_line, kind="stable")
    src_line, src_memory = src_line[by_line], src_memory[by_line]
    first = np.searchsorted(src_line + src_length, dst_line, side="right")
    last = np.searchsorted(src_line, dst_line + dst_length, side="left")
    count = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(dst_line)), count)
    other = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    start = np.maximum(src_line[other], dst_line[mine])
    stop = np.minimum(src_line[other] + src_length, dst_line[mine] + dst_length)
    triple = (start - src_line[other] + src_memory[other], start - dst_line[mine] + dst_memory[mine], stop - start)
    return sorted_and_merged(picked(start < stop, triple))


@kept(lambda found: len(found[0]), 1 << 20)
def slots_of(shape: Shape) -> tuple[Ints, Ints]:
    """All bytes of one entry of a part in its block: (offset, length)."""
    _, memory, length = _line(shape, _memory_order(shape), live=False)
    memory = np.sort(memory)
    _, start, lengths = merge(memory, memory, np.full(len(memory), length, np.int64))
    return start, lengths


@kept(lambda found: len(found[0]), 1 << 20)
def scratch_of(shape: Shape) -> tuple[Ints, Ints]:
    """The bytes of one entry that prefill never writes: (offset, length)."""
    start, length = slots_of(shape)
    _, memory, piece = _line(shape, _memory_order(shape), live=True)
    live = np.sort(memory) if piece else np.empty(0, np.int64)
    begin = np.sort(np.concatenate([start, live + piece]))
    end = np.sort(np.concatenate([start + length, live]))
    some = begin < end
    return begin[some], (end - begin)[some]


def coordinates(shape: Shape, offset: int) -> str | None:
    """The indices of the element at `offset` of a part in block 0, or None if there is none."""
    named = [(a.name, a.digits, a.start) for a in shape.axes]
    if shape.token:
        named.append(("token", shape.token.digits, 0))
    rest, index = offset, dict.fromkeys((n for n, _, _ in named), 0)
    steps = []
    for name, digits, _ in named:
        weight = 1
        for count, stride in reversed(digits):
            steps.append((stride, count, name, weight))
            weight *= count
    for stride, count, name, weight in sorted(steps, reverse=True):
        digit = min(rest // stride, count - 1) if stride and rest > 0 else 0
        rest -= digit * stride
        index[name] += digit * weight
    if not 0 <= rest < shape.element.bytes:
        return None
    return ", ".join(f"{name} [{start + index[name]}, {start + index[name] + 1})" for name, _, start in named)
