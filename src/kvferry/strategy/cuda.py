"""Device memory of another process of this machine, through CUDA: handles of the driver, and a mover with kernels.

A handle names an allocation; whoever opens it has the same memory. The copies run on a stream of their own, by `programs`
programs, so that most of the device is left to the engine beside them; nothing waits for the engine's streams, and nobody for
these: a copy's end is an event that is asked after.

The driver keeps an allocation for as long as anybody has it open: `Mapped` closes what a dead process left.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from kvferry.errors import TransportError
from kvferry.strategy import kernel
from kvferry.strategy.movers import Opened, Over, Ticket
from kvferry.strategy.moves import COLUMNS, ROWS, UNITS, Bound, Form, Moves
from kvferry.strided import Ints
from kvferry.transport import Storage

logger = logging.getLogger("kvferry.strategy")

PROGRAMS: Final = 128

_HANDLE: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_NOT_READY: Final = 600
_LEAST: Final = 1 << 12
_LONGER: Final = 1 << 14
_READY: Final = {_LEAST: 64, _LONGER: 8}
"""Slots that are made at the start, by the length of their table: page-locked memory takes milliseconds to be had, and these do
for a burst of requests, and for loads that are made together."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE),)


class _Driver:
    """The few calls of CUDA's driver that are needed. Short ones keep Python's lock: a thread that lets go of it waits for the
    engine's to have it back. Mapping memory is not short."""

    def __init__(self) -> None:
        try:
            self._library, self._slow = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(f"CUDA's driver is not here: {error}") from error

    def call(self, name: str, *arguments: Any, fine: int = 0) -> bool:
        """Whether it went well; False for the one other status that is `fine`."""
        library = self._slow if "Ipc" in name else self._library
        status = getattr(library, name)(*arguments)
        if status and status != fine:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise TransportError(f"{name}: {(text.value or b'').decode(errors='replace') or status}")
        return not status

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

    def event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        return int(event.value or 0)

    def record(self, event: int, stream: Any) -> None:
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream.cuda_stream))

    def passed(self, event: int) -> bool:
        return self.call("cuEventQuery", ctypes.c_void_p(event), fine=_NOT_READY)

    def between(self, event: int, other: int) -> float:
        """Seconds from one event to another."""
        found = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(found), ctypes.c_void_p(event), ctypes.c_void_p(other))
        return found.value / 1000

    def upload(self, device: int, host: int, length: int, stream: Any) -> None:
        where = ctypes.c_uint64(device), ctypes.c_void_p(host), ctypes.c_size_t(length)
        self.call("cuMemcpyHtoDAsync_v2", *where, ctypes.c_void_p(stream.cuda_stream))


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
class _Slot:
    """Room for one load's table, here and on the device, with what tells how far its copies are."""

    host: Any
    table: Any
    counts: Any
    began: int
    ended: int


@dataclass(eq=False)
class _Copies:
    """Copies under way in a slot, which goes back to `free` when they are seen to be done."""

    driver: _Driver
    slot: _Slot
    free: list[_Slot]
    counts: int
    moved: int = 0
    seconds: float = 0.0
    over: bool = False

    @property
    def done(self) -> bool:
        if not self.over and self.driver.passed(self.slot.ended):
            self.over = True
            self.moved = int(self.slot.counts.numpy()[: self.counts].sum())
            self.seconds = self.driver.between(self.slot.began, self.slot.ended)
            self.free.append(self.slot)
        return self.over


class CudaMover:
    """Moves on one device; `programs` bounds how many of its multiprocessors a copy takes."""

    memory: Literal["dram", "vram"] = "vram"

    def __init__(self, device: int, programs: int = PROGRAMS) -> None:
        self._index, self._device, self._programs = device, torch.device("cuda", device), programs
        self._counts = len(UNITS) * len(COLUMNS) * programs
        self._driver = _Driver()
        self._driver.enter(device)
        self._stream = torch.cuda.Stream(self._device)
        self._none = np.zeros(self._counts, np.int64).data
        self._free = {room: self._slots(room, count) for room, count in _READY.items()}
        self._warmed: set[Form] = set()
        for columns in COLUMNS:
            self._warm(Form(UNITS[0], columns, ROWS[columns]))
        self._zero(torch.zeros(2, dtype=torch.int64, device=self._device), 0)
        self._stream.synchronize()

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
        with torch.cuda.stream(self._stream):
            pieces = torch.from_numpy(moves.pieces).to(self._device)
        self._stream.synchronize()
        return pieces

    def start(self, prepared: Any, bound: Bound) -> Ticket:
        if not bound.launches:
            return Over(0)
        slot, free = self._slot(bound.table)
        slot.counts.numpy().data[:] = self._none
        try:
            for launch, counts in zip(bound.launches, slot.counts.split(self._programs), strict=False):
                self._launch(prepared, slot.table, launch.at, launch.jobs, counts, launch.form)
        except RuntimeError as error:
            # What was launched before runs all the same: the destination is kept until it is over, and the count is short.
            logger.error("a copy could not be launched: %s", error)
        self._driver.record(slot.ended, self._stream)
        return _Copies(self._driver, slot, free, len(bound.launches) * self._programs)

    def zero(self, runs: Ints) -> Ticket:
        if not len(runs):
            return Over(0)
        slot, free = self._slot(runs.reshape(-1))
        self._zero(slot.table, len(runs))
        self._driver.record(slot.ended, self._stream)
        return _Copies(self._driver, slot, free, 0)

    def _zero(self, table: Any, runs: int) -> None:
        with torch.cuda.stream(self._stream):
            kernel.zero[(max(1, min(runs, self._programs)),)](table, runs, COLUMNS=4096)

    def precede_the_engine(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _slot(self, table: Ints) -> tuple[_Slot, list[_Slot]]:
        """A slot that holds the table, which is on its way to the device; and where the slot belongs."""
        self._driver.enter(self._index)
        length = len(table)
        room = min((room for room in self._free if room >= length), default=1 << (length - 1).bit_length())
        free = self._free.setdefault(room, [])
        slot = free.pop() if free else self._slots(room, 1)[0]
        # Unlike NumPy's copies, a memoryview's keep Python's lock, however long they are.
        slot.host.numpy().data[:length] = table.data
        self._driver.record(slot.began, self._stream)
        self._driver.upload(slot.table.data_ptr(), slot.host.data_ptr(), 8 * length, self._stream)
        return slot, free

    def _slots(self, room: int, count: int) -> list[_Slot]:
        hosts = torch.empty((count, room), dtype=torch.int64, pin_memory=True)
        counts = torch.empty((count, self._counts), dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._stream):
            tables = torch.empty((count, room), dtype=torch.int64, device=self._device)
        event = self._driver.event
        return [_Slot(hosts[i], tables[i], counts[i], event(), event()) for i in range(count)]

    def _warm(self, form: Form) -> None:
        """Compiles a kernel, which takes a second the first time, by moving nothing with it."""
        if form in self._warmed:
            return
        self._warmed.add(form)
        nothing = torch.zeros(self._programs, dtype=torch.int64, device=self._device)
        self._launch(nothing, nothing, 0, 0, nothing, form)
        self._stream.synchronize()

    def _launch(self, pieces: Any, table: Any, at: int, jobs: int, counts: Any, form: Form) -> None:
        with torch.cuda.stream(self._stream):
            kernel.launch(self._programs, pieces, table, at, jobs, counts, form)
