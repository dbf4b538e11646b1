"""Zeroing runs of memory against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.session import fills
from kvferry.session.fills import zero

SIZE = 1 << 14

runs = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.one_of(st.integers(0, 40), st.integers(4090, 4100), st.integers(0, SIZE))).map(
        lambda run: (run[0], min(run[1], SIZE - run[0]))
    ),
    max_size=40,
)


def columns(found: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    offset, length = zip(*found, strict=True) if found else ((), ())
    return np.array(offset, np.int64), np.array(length, np.int64)


def memory() -> np.ndarray:
    return np.random.default_rng(3).integers(1, 256, SIZE, np.uint8)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
@given(found=runs)
def test_exactly_the_bytes_of_the_runs_are_zeroed(at_once, found):
    """Runs may be empty, touch and overlap; few or many fit into one assignment."""
    got, wanted = memory(), memory()
    for offset, length in found:
        for at in range(offset, offset + length):
            wanted[at] = 0
    before = fills._AT_ONCE
    fills._AT_ONCE = at_once
    try:
        zero(got, *columns(found))
    finally:
        fills._AT_ONCE = before
    assert np.array_equal(got, wanted)


def test_no_runs_leave_memory_as_it_was():
    got = memory()
    zero(got, *columns([]))
    zero(got, *columns([(5, 0), (SIZE, 0)]))
    assert np.array_equal(got, memory())
