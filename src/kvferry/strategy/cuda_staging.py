"""Rings on a CUDA device, or in host memory that its kernels reach and that never moves (pinned)."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.strategy.staging import BUDGET, DEVICE_CUT, PAGE, PINNED_CUT, Cut, Staging, sized
from kvferry.transport.contract import Storage


def device_staging(device: int, budget: int = BUDGET) -> Staging:
    slot, slots = sized(budget, DEVICE_CUT)
    memory = torch.zeros(2 * slot * slots + PAGE, dtype=torch.uint8, device=torch.device("cuda", device))
    torch.cuda.synchronize(memory.device)
    return _staging(memory, slot, slots, Storage(0, 0, "vram", device), DEVICE_CUT)


def pinned_staging(budget: int = BUDGET) -> Staging:
    slot, slots = sized(budget, PINNED_CUT)
    memory = torch.zeros(2 * slot * slots + PAGE, dtype=torch.uint8, pin_memory=True)
    return _staging(memory, slot, slots, Storage(0, 0), PINNED_CUT)


def _staging(memory: Any, slot: int, slots: int, of: Storage, cut: Cut) -> Staging:
    address = int(memory.data_ptr())
    address += -address % PAGE
    return Staging(Storage(address, 2 * slot * slots, of.memory, of.device), slot, slots, memory, cut)
