"""Intervals against plain loops over every token: none, one, and several of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.plan.intervals import Intervals, cut_at, integers, interval, subtract, union

Pair = tuple[int, int]

pair = st.tuples(st.integers(0, 60), st.integers(1, 40)).map(lambda found: (found[0], sum(found)))
few = st.one_of(st.just([]), st.lists(pair, min_size=1, max_size=1), st.lists(pair, max_size=6))
grains_of = st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=4).map(lambda found: [*accumulate(found, mul)][::-1])


def columns(pairs: Iterable[Pair]) -> Intervals:
    starts, stops = np.array([*pairs], np.int64).reshape(-1, 2).T
    return starts.copy(), stops.copy()


def pairs_of(intervals: Intervals) -> list[Pair]:
    starts, stops = intervals
    assert starts.dtype == stops.dtype == np.int64
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def tokens_of(pairs: Iterable[Pair]) -> list[int]:
    return [token for start, stop in pairs for token in range(start, stop)]


def cut_by_hand(start: int, stop: int, grains: Sequence[int]) -> list[tuple[int, int]]:
    """(grain, number) of every tile, found by walking from token to token and taking the largest that fits."""
    out, at = [], start
    while at < stop:
        tokens = next((g for g in grains if at % g == 0 and at + g <= stop), None)
        if tokens:
            out.append((tokens, at // tokens))
        at += tokens or 1
    return out


@given(st.integers(-3, 50), st.integers(-3, 50))
def test_an_interval_has_its_tokens_or_is_none(low: int, high: int) -> None:
    assert pairs_of(interval(low, high)) == ([(low, high)] if low < high else [])


@given(st.lists(few, min_size=1, max_size=3))
def test_a_union_has_every_interval_once_in_order(sets: list[list[Pair]]) -> None:
    found = pairs_of(union(*map(columns, sets)))
    assert sorted(found) == sorted(one for some in sets for one in some)
    assert [start for start, _ in found] == sorted(start for start, _ in found)


@given(st.integers(0, 70), st.integers(0, 70), few)
@example(10, 20, [])
@example(10, 20, [(0, 50)])
@example(10, 20, [(12, 15)])
@example(10, 20, [(0, 10)])
@example(10, 20, [(20, 30)])
def test_what_is_subtracted_is_gone_and_nothing_else(low: int, high: int, bad: list[Pair]) -> None:
    found = pairs_of(subtract(low, high, columns(sorted(bad))))
    assert tokens_of(found) == sorted({*range(low, high)} - {*tokens_of(bad)})
    assert all(start < stop for start, stop in found)


@given(few)
def test_integers_are_those_of_each_range_after_the_other(ranges: list[Pair]) -> None:
    assert integers(*columns(ranges)).tolist() == tokens_of(ranges)


@given(few, grains_of)
@example([(3, 3 + 64)], [16, 4, 1])
@example([(16, 64)], [16, 4, 1])
@example([(17, 18)], [16, 4])
def test_tiles_are_the_largest_that_fit_and_have_every_token_once(intervals: list[Pair], grains: list[int]) -> None:
    found = cut_at(columns(intervals), grains)
    assert len(found) == len(grains)
    tiles = [(tokens, number) for tokens, cut in zip(grains, found, strict=True) for number in tokens_of(pairs_of(cut))]
    # A grain that is there twice has its tiles at the first of the two.
    assert sorted(tiles) == sorted(tile for start, stop in intervals for tile in cut_by_hand(start, stop, grains))
    assert all(start < stop for cut in found for start, stop in pairs_of(cut))
    if len(intervals) == 1:
        assert all(stop < start for cut in found for (_, stop), (start, _) in pairwise(pairs_of(cut)))
