"""The comparison of bytes where they are: it finds any one that is wrong, missing or too many, on every way to be scattered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.doctor.memory import ArrayMemory, HostMemory, pattern
from lab.bench.comparing import compared, stamp
from loaded_bytes import NAMES, Loaded, loaded


def memory_with(found: Loaded, at_once: int = 1 << 16) -> ArrayMemory:
    memory = HostMemory(len(found.bytes))
    memory.write(found.bytes)
    memory.at_once = at_once
    return memory


@pytest.mark.parametrize("name", NAMES)
def test_what_a_load_leaves_is_right_and_wiped_and_nothing_is_right_that_was_not_loaded(name):
    found = loaded(name)
    memory = memory_with(found)
    assert compared(found.plan, found.tiles, memory).right
    assert not memory.read().any()
    nothing = compared(found.plan, found.tiles, memory)
    assert nothing.wrong > 0
    assert not nothing.stray


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    place=st.integers(0, 1 << 40),
    other=st.integers(1, 255),
    at_once=st.sampled_from([1, 7, 1000, 1 << 16]),
)
def test_one_wrong_byte_anywhere_is_found(name, place, other, at_once):
    found = loaded(name)
    memory = memory_with(found, at_once)
    place %= len(found.bytes)
    memory.read()[place] ^= other
    result = compared(found.plan, found.tiles, memory)
    assert (result.wrong, result.stray) == ((1, False) if found.taken[place] else (0, True))
    assert not memory.read().any()


@pytest.mark.parametrize("place", [0, -1])
def test_a_wrong_byte_in_the_first_and_in_the_last_place_that_a_load_writes_is_found(place):
    for name in NAMES:
        found = loaded(name)
        memory = memory_with(found)
        memory.read()[np.flatnonzero(found.taken)[place]] ^= 1
        assert compared(found.plan, found.tiles, memory).wrong == 1


def test_bytes_of_another_rank_or_place_are_wrong():
    found = loaded("head slices, TP 2 → 1")
    taken = np.flatnonzero(found.taken)
    memory = memory_with(found)
    memory.read()[taken] = np.roll(memory.read()[taken], 8)
    assert compared(found.plan, found.tiles, memory).wrong > len(taken) // 16


@pytest.mark.parametrize("length", [0, 1, 7, 8, 13, 4096, 65_543])
@pytest.mark.parametrize("at_once", [3, 1 << 16])
def test_a_pattern_made_in_its_memory_is_the_one_that_every_process_knows(length, at_once):
    memory = HostMemory(length)
    memory.at_once = at_once
    for rank in (0, 5):
        stamp(memory, rank)
        assert np.array_equal(memory.read(), pattern(rank, length))
