"""Memory that a benchmark owns: one storage per rank, in host or device memory, with a pattern that any process knows."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.bench.case import MemoryKind
from kvferry.bench.measure import timed
from kvferry.errors import BenchError
from kvferry.transport.contract import Storage

Bytes = npt.NDArray[np.uint8]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SALT = 0xD1B54A32D192ED03


def pattern(rank: int, length: int) -> Bytes:
    """Bytes that tell their rank and place: no two words of any two ranks are equal."""
    words = np.arange(1, -(-length // 8) + 1, dtype=np.uint64)
    words *= _ODD
    words ^= np.uint64((rank + 1) * _SALT % (1 << 64))
    return words.view(np.uint8)[:length]


class Memory(Protocol):
    """One storage."""

    @property
    def storage(self) -> Storage: ...

    def write(self, data: Bytes) -> None: ...

    def read(self) -> Bytes: ...

    def clear(self) -> None: ...

    def copier(self, length: int) -> Callable[[], float]:
        """Seconds of one plain copy of `length` bytes from the first to the second half."""
        ...


class HostMemory:
    """Anonymous pages, not touched before they are written."""

    def __init__(self, length: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._bytes: Bytes = np.frombuffer(mmap.mmap(-1, max(length, 1), flags=flags), np.uint8)[:length]
        except (OSError, OverflowError, ValueError) as error:
            raise BenchError(f"{length:,} bytes of memory cannot be had: {error}; use fewer blocks or smaller pages") from None
        self.storage = Storage(self._bytes.ctypes.data, length)

    def write(self, data: Bytes) -> None:
        self._bytes[:] = data

    def read(self) -> Bytes:
        return self._bytes

    def clear(self) -> None:
        self._bytes[:] = 0

    def copier(self, length: int) -> Callable[[], float]:
        there, here = self._bytes[:length], self._bytes[length : 2 * length]
        return lambda: timed(lambda: np.copyto(here, there))


class DeviceMemory:
    """A torch tensor; torch is imported only here."""

    def __init__(self, length: int) -> None:
        self._torch = _torch()
        self._bytes = self._torch.empty(length, dtype=self._torch.uint8, device="cuda:0")
        self.storage = Storage(self._bytes.data_ptr(), length, "vram", 0)

    def write(self, data: Bytes) -> None:
        self._bytes.copy_(self._torch.from_numpy(data))
        self._torch.cuda.synchronize()

    def read(self) -> Bytes:
        self._torch.cuda.synchronize()
        found: Bytes = self._bytes.cpu().numpy()
        return found

    def clear(self) -> None:
        self._bytes.zero_()
        self._torch.cuda.synchronize()

    def copier(self, length: int) -> Callable[[], float]:
        there, here = self._bytes[:length], self._bytes[length : 2 * length]

        def copy() -> None:
            here.copy_(there)
            self._torch.cuda.synchronize()

        return lambda: timed(copy)


def allocate(length: int, kind: MemoryKind) -> Memory:
    return DeviceMemory(length) if kind == "vram" else HostMemory(length)


def device_name(kind: MemoryKind) -> str:
    return str(_torch().cuda.get_device_name(0)) if kind == "vram" else ""


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise BenchError("--memory vram needs torch, which is not installed; use --memory dram") from None
    if not torch.cuda.is_available():
        raise BenchError("--memory vram needs a CUDA device, and torch finds none; use --memory dram")
    return torch
