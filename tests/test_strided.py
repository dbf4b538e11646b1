"""The run algebra against plain loops that visit every position and every byte."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.strided import (
    borders,
    canonical,
    cut,
    fitting_grain,
    fold,
    footprint,
    gather,
    joint,
    merge,
    offsets,
    size,
    span,
    spread,
)

Digits = tuple[tuple[int, int], ...]

digits_of = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), max_size=4).map(tuple)
pair_of_digits = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40), st.integers(0, 40)), max_size=3).map(tuple)


def places(digits: Digits) -> list[int]:
    """Offsets of all positions, most significant digit slowest."""
    out = [0]
    for count, stride in digits:
        out = [at + i * stride for at in out for i in range(count)]
    return out


def bytes_of(starts: list[int], length: int) -> list[int]:
    return [at + i for at in starts for i in range(length)]


def moves(src: int, dst: int, digits: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int]]:
    """All (source, destination) pairs of a piece, in order."""
    out = [(src, dst)]
    for count, s, d in digits:
        out = [(a + i * s, b + i * d) for a, b in out for i in range(count)]
    return out


@given(digits_of)
def test_canonical_digits_reach_the_same_offsets_with_no_digit_to_spare(digits):
    short = canonical(digits)
    assert places(short) == places(digits)
    assert all(count > 1 for count, _ in short)
    assert all(above != count * stride for (_, above), (count, stride) in pairwise(short))


@given(digits_of)
def test_size_and_span_are_those_of_the_enumerated_offsets(digits):
    assert size(digits) == len(places(digits))
    assert span(digits) == max(places(digits))


@given(digits_of, st.data())
def test_offsets_are_looked_up_in_the_enumeration(digits, data):
    wanted = places(digits)
    at = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=8))
    assert offsets(digits, at).tolist() == [wanted[i] for i in at]


@given(digits_of, st.integers(1, 5))
def test_borders_are_where_the_enumeration_may_change_its_step(digits, unit):
    wanted = places(digits)
    found = borders(digits, unit)
    assert found[-1:] == ((len(wanted) * unit,) if digits else ())
    for i in range(1, len(wanted) - 1):
        if wanted[i + 1] - wanted[i] != wanted[i] - wanted[i - 1]:
            assert any((i * unit) % b == 0 or ((i + 1) * unit) % b == 0 for b in found)


@given(st.integers(1, 400), st.lists(st.integers(1, 400), max_size=5))
def test_the_fitting_grain_is_the_largest_divisor_that_fits_every_border(limit, edges):
    fitting = [d for d in range(1, limit + 1) if limit % d == 0 and all(d % e == 0 or e % d == 0 for e in edges)]
    assert fitting_grain(limit, edges) == max(fitting)


@given(digits_of, st.integers(1, 300))
def test_a_cut_gives_tiles_and_places_inside_them_or_refuses(digits, tile):
    whole = places(digits)
    fits = len(whole) % tile == 0 and all(b % tile == 0 or tile % b == 0 for b in borders(digits))
    if not fits:
        with pytest.raises(ValueError, match="tile"):
            cut(digits, tile)
        return
    upper, inner = cut(digits, tile)
    assert len(places(inner)) == tile
    assert [a + b for a in places(upper) for b in places(inner)] == whole
    assert (upper, inner) == (canonical(upper), canonical(inner))


@given(digits_of, digits_of, st.data())
def test_joint_pieces_pair_every_position_of_two_axes_once_and_in_order(src, dst, data):
    one, other = places(src), places(dst)
    count = data.draw(st.integers(1, min(len(one), len(other))))
    src_start = data.draw(st.integers(0, len(one) - count))
    dst_start = data.draw(st.integers(0, len(other) - count))
    pieces = joint(src, src_start, dst, dst_start, count)
    wanted = list(zip(one[src_start:], other[dst_start:], strict=False))[:count]
    assert [pair for piece in pieces for pair in moves(*piece)] == wanted


def test_joint_axes_of_equal_order_are_one_piece():
    assert joint(((6, 8),), 2, ((3, 20), (2, 10)), 1, 4) == ((16, 10, ((4, 8, 10),)),)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), pair_of_digits), max_size=8))
def test_gathered_pieces_move_the_same_pairs_in_the_same_order(pieces):
    wanted = [pair for piece in pieces for pair in moves(*piece)]
    assert [pair for piece in gather(pieces) for pair in moves(*piece)] == wanted


@given(st.integers(2, 9), st.integers(1, 50), st.integers(1, 50), pair_of_digits)
def test_pieces_at_equal_distances_gather_into_one(count, src, dst, inner):
    found = gather([(3 + i * src, 5 + i * dst, inner) for i in range(count)])
    assert found == [(3, 5, ((count, src, dst), *inner))]


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24), st.integers(0, 24)), max_size=4))
def test_a_folded_run_moves_the_same_bytes(length, digits):
    long, repeats = fold(length, digits)
    wanted = sorted((s + i, d + i) for s, d in moves(0, 0, tuple(digits)) for i in range(length))
    assert sorted((s + i, d + i) for s, d in moves(0, 0, repeats) for i in range(long)) == wanted
    assert all(count > 1 for count, _, _ in repeats)
    assert all(not s == d == long for _, s, d in repeats)


def test_a_run_that_its_repeats_continue_folds_into_one():
    assert fold(2, [(3, 8, 8), (4, 2, 2), (5, 24, 24)]) == (120, ())


@given(st.integers(0, 50), digits_of)
def test_spread_enumerates_in_order(start, digits):
    assert spread(start, digits).tolist() == [start + at for at in places(digits)]


def draw_nested(data: st.DataObject, length: int) -> Digits:
    """Digits whose strides step over everything finer, in any order."""
    out: list[tuple[int, int]] = []
    reach = length
    for _ in range(data.draw(st.integers(0, 3))):
        count, stride = data.draw(st.integers(1, 4)), reach + data.draw(st.integers(0, 5))
        out.append((count, stride))
        reach += (count - 1) * stride
    return tuple(data.draw(st.permutations(out)))


@given(st.integers(1, 5), st.data())
def test_a_footprint_has_the_bytes_of_a_nested_tensor(length, data):
    digits = draw_nested(data, length)
    long, repeats = footprint(digits, length)
    assert sorted(bytes_of(places(repeats), long)) == sorted(bytes_of(places(digits), length))
    assert all(stride > long for _, stride in repeats)


@given(st.integers(1, 5), digits_of)
def test_a_footprint_is_refused_whenever_two_elements_share_a_byte(length, digits):
    touched = bytes_of(places(digits), length)
    assume(len(set(touched)) < len(touched))
    with pytest.raises(ValueError, match="stride"):
        footprint(digits, length)


runs_of = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4), st.integers(0, 1)), max_size=10)


@given(runs_of)
def test_merged_runs_move_the_same_bytes_and_leave_no_neighbours(rows):
    columns = [np.array(c, np.int64) for c in zip(*rows, strict=True)] or [np.empty(0, np.int64)] * 4
    src, dst, length, tag = merge(*columns)

    def moved(rows):
        return [(s + i, d + i, t) for s, d, n, t in rows for i in range(n)]

    got = list(zip(src.tolist(), dst.tolist(), length.tolist(), tag.tolist(), strict=True))
    assert moved(got) == moved(rows)
    for one, other in pairwise(got):
        assert (one[0] + one[2], one[1] + one[2], one[3]) != (other[0], other[1], other[3])


def test_merge_keeps_runs_apart_that_agree_on_one_side_only():
    src, dst, length = (np.array(c, np.int64) for c in ([0, 4, 9], [0, 4, 8], [4, 4, 4]))
    assert [c.tolist() for c in merge(src, dst, length)] == [[0, 9], [0, 8], [8, 4]]


def test_enumerations_of_two_axes_agree_with_numpy_strides():
    array = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1)
    digits = tuple(zip(array.shape, array.strides, strict=True))
    flat = np.arange(24, dtype=np.int16)
    assert [int(flat[at // 2]) for at in places(digits)] == [int(array[i]) for i in product(*map(range, array.shape))]
    assert footprint(digits, 2) == (48, ())
