"""Memory to measure with: one storage per rank, in host or device memory, with a pattern that any process knows."""

from __future__ import annotations

import importlib
import mmap
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import MeasureError
from kvferry.strided import Ints
from kvferry.transport.contract import Storage

Bytes = npt.NDArray[np.uint8]
MemoryKind = Literal["dram", "vram"]

ODD: Final = 0x9E3779B97F4A7C15
_SALT: Final = 0xD1B54A32D192ED03
_NUMBERS: Final[dict[int, Any]] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_TENSORS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def salt(rank: int) -> int:
    return (rank + 1) * _SALT % (1 << 64)


def pattern(rank: int, length: int) -> Bytes:
    """Bytes that tell their rank and place: no two words of any two ranks are equal."""
    words = np.arange(1, -(-length // 8) + 1, dtype=np.uint64)
    words *= np.uint64(ODD)
    words ^= np.uint64(salt(rank))
    return words.view(np.uint8)[:length]


class Memory(Protocol):
    """One storage."""

    @property
    def storage(self) -> Storage: ...

    @property
    def at_once(self) -> int:
        """Elements to look at by one call."""
        ...

    def view(self, unit: int) -> Any:
        """All whole elements of `unit` bytes, as numbers where they lie, once nothing is being written there."""
        ...

    def place(self, numbers: Ints) -> Any:
        """The numbers where the bytes are."""
        ...

    def write(self, data: Bytes) -> None: ...

    def read(self) -> Bytes: ...

    def clear(self) -> None: ...


class ArrayMemory:
    """Bytes of an array in host memory."""

    at_once = 1 << 16

    def __init__(self, found: Bytes) -> None:
        self._bytes = found
        self.storage = Storage(found.ctypes.data, len(found))

    def view(self, unit: int) -> Any:
        return self._bytes[: len(self._bytes) // unit * unit].view(_NUMBERS[unit])

    def place(self, numbers: Ints) -> Any:
        return numbers

    def write(self, data: Bytes) -> None:
        self._bytes[:] = data

    def read(self) -> Bytes:
        return self._bytes

    def clear(self) -> None:
        self._bytes[:] = 0


class HostMemory(ArrayMemory):
    """Anonymous pages, not touched before they are written."""

    def __init__(self, length: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            super().__init__(np.frombuffer(mmap.mmap(-1, max(length, 1), flags=flags), np.uint8)[:length])
        except (OSError, OverflowError, ValueError) as error:
            raise MeasureError(f"{length:,} bytes of memory cannot be had: {error}; measure with less") from None


class DeviceMemory:
    """A torch tensor of bytes."""

    at_once = 1 << 24

    def __init__(self, torch: Any, found: Any) -> None:
        self._torch, self._bytes = torch, found
        self.storage = Storage(found.data_ptr(), len(found), "vram", 0)

    def _settle(self) -> None:
        if self._bytes.is_cuda:
            self._torch.cuda.synchronize()

    def view(self, unit: int) -> Any:
        self._settle()
        return self._bytes[: len(self._bytes) // unit * unit].view(getattr(self._torch, _TENSORS[unit]))

    def place(self, numbers: Ints) -> Any:
        return self._torch.as_tensor(numbers, device=self._bytes.device)

    def write(self, data: Bytes) -> None:
        self._bytes.copy_(self._torch.from_numpy(data))
        self._settle()

    def read(self) -> Bytes:
        self._settle()
        found: Bytes = self._bytes.cpu().numpy()
        return found

    def clear(self) -> None:
        self._bytes.zero_()
        self._settle()


def allocate(length: int, kind: MemoryKind) -> Memory:
    if kind == "dram":
        return HostMemory(length)
    torch = _torch()
    return DeviceMemory(torch, torch.empty(length, dtype=torch.uint8, device="cuda:0"))


def device_name(kind: MemoryKind) -> str:
    return str(_torch().cuda.get_device_name(0)) if kind == "vram" else ""


def _torch() -> Any:
    """Torch is imported only here."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise MeasureError("device memory (vram) needs torch, which is not installed; use host memory (dram)") from None
    if not torch.cuda.is_available():
        raise MeasureError("device memory (vram) needs a CUDA device, and torch finds none; use host memory (dram)")
    return torch
