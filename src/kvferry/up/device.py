"""What engines run on."""

from __future__ import annotations

import os
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class Device(str, Enum):
    CPU = "cpu"
    CUDA = "cuda"


def found_device() -> Device:
    """CUDA where vLLM would find it: a device file, not hidden, and a torch that was built for it. Nothing is initialised."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    try:
        built = not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        built = False
    return Device.CUDA if built and not hidden and Path("/dev/nvidiactl").exists() else Device.CPU
