"""Device memory of another process of this machine, through CUDA: handles of the driver, and a mover with kernels.

A handle names an allocation; whoever opens it has the same memory. The copies run on a stream of their own, by `programs`
programs, so that most of the device is left to the engine beside them; nothing waits for the engine's streams, and nobody for
these: a copy's end is an event that is asked after.

The driver keeps an allocation for as long as anybody has it open: `Mapped` closes what a dead process left.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from kvferry.errors import TransportError
from kvferry.strategy import kernel
from kvferry.strategy.movers import Opened, Over, Ticket
from kvferry.strategy.moves import COLUMNS, Bound, Form, Moves
from kvferry.strided import Ints
from kvferry.transport import Storage

PROGRAMS: Final = 32

_HANDLE: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_FIRST: Final = Form(16, COLUMNS[-1], 1)
"""What whole blocks are moved by."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE),)


class _Driver:
    """The few calls of CUDA's driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(f"CUDA's driver is not here: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise TransportError(f"{name}: {(text.value or b'').decode(errors='replace') or status}")

    def enter(self, device: int) -> None:
        """Give the calling thread the device's context, which torch makes lazily and the driver's own calls need."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
            self.call("cuCtxSetCurrent", context)

    def allocation(self, address: int) -> tuple[int, int]:
        """Where the allocation that holds an address begins, and its length."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def handle(self, base: int) -> bytes:
        found = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(base))
        return ctypes.string_at(ctypes.byref(found), _HANDLE)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


@dataclass(frozen=True)
class _Mapping:
    """An opened allocation; whether its owner lives is told by the host memory that comes with it."""

    mover: CudaMover
    base: int
    offset: int
    alive: bool = True

    @property
    def address(self) -> int:
        return self.base + self.offset

    def close(self) -> None:
        self.mover.unmap(self.base)


@dataclass(eq=False)
class _Copies:
    """Events around copies, and what must live until they are over."""

    began: Any
    ended: Any
    told: Any
    counted: Any
    held: tuple[Any, ...]

    @property
    def done(self) -> bool:
        return bool(self.told.query())

    @property
    def moved(self) -> int:
        return int(self.counted.sum())

    @property
    def seconds(self) -> float:
        return float(self.began.elapsed_time(self.ended)) / 1000


@dataclass(eq=False)
class _Zeroed:
    ended: Any
    moved: int
    held: Any
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return bool(self.ended.query())


class CudaMover:
    """Moves on one device; `programs` bounds how many of its multiprocessors a copy takes."""

    memory: Literal["dram", "vram"] = "vram"

    def __init__(self, device: int, programs: int = PROGRAMS) -> None:
        self._index, self._device, self._programs = device, torch.device("cuda", device), programs
        self._driver = _Driver()
        self._stream = torch.cuda.Stream(self._device)
        self._warm(_FIRST)

    def export(self, storage: Storage) -> bytes:
        self._driver.enter(self._index)
        base, _ = self._driver.allocation(storage.address)
        return msgspec.msgpack.encode((self._driver.handle(base), storage.address - base))

    def open(self, token: bytes, length: int) -> Opened:
        try:
            handle, offset = msgspec.msgpack.decode(token, type=tuple[bytes, int])
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            raise TransportError(f"not a handle of device memory: {error}") from None
        if len(handle) != _HANDLE or offset < 0:
            raise TransportError(f"a handle of {len(handle)} bytes at {offset} is none of CUDA's")
        self._driver.enter(self._index)
        base = self._driver.open(handle)
        if offset + length > self._driver.allocation(base)[1]:
            self._driver.close(base)
            raise TransportError("the peer's device memory is shorter than it says")
        return _Mapping(self, base, offset)

    def unmap(self, base: int) -> None:
        self._driver.enter(self._index)
        self._driver.close(base)

    def prepare(self, moves: Moves) -> Any:
        """The pieces, on the device; every kernel that loads will need is made now."""
        for form in moves.forms:
            self._warm(form)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pieces = torch.from_numpy(moves.pieces).to(self._device)
        self._stream.synchronize()
        return pieces

    def start(self, prepared: Any, bound: Bound) -> Ticket:
        if not bound.launches:
            return Over(0)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            table = self._upload(bound.table)
            counts = torch.empty((len(bound.launches), self._programs), dtype=torch.int64, device=self._device)
            began = torch.cuda.Event(enable_timing=True)
            began.record(self._stream)
            for launch, row in zip(bound.launches, counts, strict=True):
                self._launch(prepared, table, launch.at, launch.jobs, row, launch.form)
            ended = torch.cuda.Event(enable_timing=True)
            ended.record(self._stream)
            counted = torch.empty(counts.shape, dtype=torch.int64, pin_memory=True)
            counted.copy_(counts, non_blocking=True)
            told = torch.cuda.Event()
            told.record(self._stream)
        return _Copies(began, ended, told, counted, (table, counts, prepared))

    def zero(self, runs: Ints) -> Ticket:
        if not len(runs):
            return Over(0)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            table = self._upload(runs)
            kernel.zero[(min(len(runs), self._programs),)](table, len(runs), COLUMNS=4096)
            ended = torch.cuda.Event()
            ended.record(self._stream)
        return _Zeroed(ended, int(runs[:, 1].sum()), table)

    def _warm(self, form: Form) -> None:
        """Compiles a kernel, which takes a second the first time, by moving nothing with it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            nothing = torch.zeros(self._programs, dtype=torch.int64, device=self._device)
            self._launch(nothing, nothing, 0, 0, nothing, form)
        self._stream.synchronize()

    def _launch(self, pieces: Any, table: Any, at: int, jobs: int, counts: Any, form: Form) -> None:
        kernel.launch(self._programs, pieces, table, at, jobs, counts, form)

    def _upload(self, table: Ints) -> Any:
        """From pinned memory, which torch keeps until the copy has left it."""
        host = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
        np.copyto(host.numpy(), table)
        return host.to(self._device, non_blocking=True)
