"""Rings on a CUDA device, or in host memory that its kernels reach and that never moves (pinned)."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.strategy.staging import BUDGET, DEVICE_CUT, PAGE, PINNED_CUT, Cut, Rings, Sizes, Staging, sized
from kvferry.transport.contract import Storage


def device_staging(device: int, budget: int = BUDGET, rings: Rings = "both") -> Staging:
    sizes = sized(budget, DEVICE_CUT, rings)
    memory = torch.zeros(sizes.bytes + PAGE, dtype=torch.uint8, device=torch.device("cuda", device))
    torch.cuda.synchronize(memory.device)
    return _staging(memory, sizes, Storage(0, 0, "vram", device), DEVICE_CUT)


def pinned_staging(budget: int = BUDGET, rings: Rings = "both") -> Staging:
    sizes = sized(budget, PINNED_CUT, rings)
    memory = torch.zeros(sizes.bytes + PAGE, dtype=torch.uint8, pin_memory=True)
    return _staging(memory, sizes, Storage(0, 0), PINNED_CUT)


def _staging(memory: Any, sizes: Sizes, of: Storage, cut: Cut) -> Staging:
    address = int(memory.data_ptr())
    address += -address % PAGE
    return Staging(Storage(address, sizes.bytes, of.memory, of.device), sizes, memory, cut)
