"""Bytes compared where they are, in tensors: those of a CPU stand in for a device's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.doctor.memory import DeviceMemory, pattern
from lab.bench.comparing import compared, stamp

sys.path.append(str(Path(__file__).parents[1]))
from loaded_bytes import NAMES, loaded

pytestmark = pytest.mark.vllm


def memory_of(length: int, at_once: int = 1 << 16) -> DeviceMemory:
    memory = DeviceMemory(torch, torch.zeros(length, dtype=torch.uint8))
    memory.at_once = at_once
    return memory


@pytest.mark.parametrize("name", NAMES)
def test_a_load_is_right_and_one_wrong_byte_anywhere_in_a_tensor_is_found(name):
    found = loaded(name)
    memory = memory_of(len(found.bytes))
    memory.write(found.bytes)
    assert compared(found.plan, found.tiles, memory).right
    assert not memory.read().any()
    places = np.random.default_rng(3).integers(0, len(found.bytes), 20)
    for place in [*places, *np.flatnonzero(found.taken)[[0, -1]]]:
        data = found.bytes.copy()
        data[place] ^= 0x80
        memory.write(data)
        result = compared(found.plan, found.tiles, memory)
        assert (result.wrong, result.stray) == ((1, False) if found.taken[place] else (0, True))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 13, 4096, 65_543])
def test_a_pattern_made_in_a_tensor_is_the_one_that_every_process_knows(length):
    memory = memory_of(length, 1000)
    for rank in (0, 5):
        stamp(memory, rank)
        assert np.array_equal(memory.read(), pattern(rank, length))
