"""Windows: every element once, in order, and never more descriptors than the cap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan import Binder, make_plans
from kvferry.plan.rows import PreparedRows, Rows
from kvferry.transport.windows import Merging
from transport_suite import dense_case


def prepared(blocks: int = 64) -> PreparedRows:
    case = dense_case(layers=3, blocks=blocks)
    return PreparedRows(make_plans(case.consumers, case.producers)[0], 0)


def descriptors(rows: PreparedRows, src: list[int], dst: list[int]) -> int:
    """Descriptors when only neighbours in the same row without gaps are merged, counted one by one."""

    def row_of(side: Rows, index: int) -> int:
        return next(i for i, end in enumerate(np.cumsum(side.count)) if index < end)

    def continues(side: Rows, before: int, after: int) -> bool:
        row = row_of(side, before)
        return after == before + 1 and row == row_of(side, after) and side.stride[row] == side.length[row]

    pairs = list(zip(src, dst, strict=True))
    joined = sum(continues(rows.src, a, c) and continues(rows.dst, b, d) for (a, b), (c, d) in pairwise(pairs))
    return len(pairs) - joined


ROWS = prepared()
indices = st.lists(
    st.tuples(st.integers(0, 3 * 64 - 40), st.integers(0, 3 * 64 - 40), st.integers(1, 40)), min_size=1, max_size=8
)


@given(indices, st.integers(1, 60))
def test_windows_hold_every_element_once_and_keep_to_the_cap(stretches, cap):
    src = np.concatenate([np.arange(s, s + n) for s, _, n in stretches])
    dst = np.concatenate([np.arange(d, d + n) for _, d, n in stretches])
    windows = list(Merging(ROWS).windows(src, dst, cap))
    assert np.array_equal(np.concatenate([w.src for w in windows]), src)
    assert np.array_equal(np.concatenate([w.dst for w in windows]), dst)
    for window in windows:
        assert descriptors(ROWS, window.src.tolist(), window.dst.tolist()) <= window.descriptors <= cap
        assert window.src.dtype == window.dst.dtype == np.int32


def test_consecutive_blocks_of_dense_pages_need_one_descriptor_per_region():
    case = dense_case(layers=3, blocks=4096)
    plan = make_plans(case.consumers, case.producers)[0]
    rows = PreparedRows(plan, 0)
    src, dst = rows.indices(Binder(plan).tiles(case.request))
    (window,) = Merging(rows).windows(src, dst, 8)
    assert len(window.src) == 3 * 2048
    assert window.descriptors <= 8


def test_a_read_past_the_cap_goes_in_windows_of_half_of_it():
    case = dense_case(layers=3, blocks=64, scattered=True)
    plan = make_plans(case.consumers, case.producers)[0]
    rows = PreparedRows(plan, 0)
    windows = list(Merging(rows).windows(*rows.indices(Binder(plan).tiles(case.request)), 20))
    assert [w.descriptors for w in windows] == [10] * 9 + [6]
