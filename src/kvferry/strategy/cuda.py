"""Device memory of another process of this machine, through CUDA: handles of the driver, and a mover with kernels.

A handle names an allocation; whoever opens it has the same memory. The copies run on a stream of their own, by `programs`
programs, so that most of the device is left to the engine beside them; nothing waits for the engine's streams, and nobody for
these: a copy's end is an event that is asked after.

What a copy is told by, its table, is uploaded on another stream. Two processes that share a device take turns, and one whose
kernels wait for an upload between them loses its turn there: one gather a turn, however short.

The driver keeps an allocation for as long as anybody has it open: `Mapped` closes what a dead process left.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from kvferry.errors import TransportError
from kvferry.strategy import kernel
from kvferry.strategy.cuda_driver import HANDLE, Arguments, Driver, Launchable
from kvferry.strategy.movers import Opened, Over, Ticket
from kvferry.strategy.moves import COLUMNS, FIELDS, ROWS, UNITS, Bound, Form, Launch, Moves
from kvferry.strided import Ints
from kvferry.transport import Storage

logger = logging.getLogger("kvferry.strategy")

PROGRAMS: Final = 128

_LEAST: Final = 1 << 12
_LONGER: Final = 1 << 14
_READY: Final = {_LEAST: 64, _LONGER: 8}
"""Slots that are made at the start, by the length of their table: page-locked memory takes milliseconds to be had, and these do
for a burst of requests, and for loads that are made together."""
_EVEN: Final = 2
"""Counts of a launch begin where this many do: kernels are made for addresses that are multiples of 16."""


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
    """Room for one load's table, here and on the device, with what tells how far its copies are. Tensors are for Triton; views
    of them and addresses are what a load needs of them otherwise, found once."""

    host: memoryview[int]
    uploaded: int
    table: Any
    onto: int
    counts: Any
    counted: Ints
    counters: int
    there: int
    began: int
    ended: int
    given: Arguments


@dataclass(eq=False)
class _Copies:
    """Copies under way in a slot, which goes back to `free` when they are seen to be done."""

    driver: Driver
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
            self.moved = int(self.slot.counted[: self.counts].sum())
            self.seconds = self.driver.between(self.slot.began, self.slot.ended)
            self.free.append(self.slot)
        return self.over


class CudaMover:
    """Moves on one device; `programs` bounds how many of its multiprocessors a copy takes."""

    memory: Literal["dram", "vram"] = "vram"

    def __init__(self, device: int, programs: int = PROGRAMS) -> None:
        self._index, self._device, self._programs = device, torch.device("cuda", device), programs
        self._share = -(-programs // _EVEN) * _EVEN
        self._driver = Driver()
        self._driver.enter(device)
        self._stream, self._uploads = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._handle, self._uploading = int(self._stream.cuda_stream), int(self._uploads.cuda_stream)
        self._none = np.zeros(len(UNITS) * len(COLUMNS) * self._share, np.int64).data
        self._free = {room: self._slots(room, count) for room, count in _READY.items()}
        self._ready: dict[Form, Launchable | None] = {}
        for columns in COLUMNS:
            self._warm(Form(UNITS[0], columns, ROWS[columns]))
        self._zeroing: Launchable | None = None
        self._warm_zero()

    def enter(self) -> None:
        self._driver.enter(self._index)
        self._driver.stand_aside()

    def export(self, storage: Storage) -> bytes:
        self._driver.enter(self._index)
        base, _ = self._driver.allocation(storage.address)
        return msgspec.msgpack.encode((self._driver.handle(base), storage.address - base))

    def open(self, token: bytes, length: int) -> Opened:
        try:
            handle, offset = msgspec.msgpack.decode(token, type=tuple[bytes, int])
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            raise TransportError(f"not a handle of device memory: {error}") from None
        if len(handle) != HANDLE or offset < 0:
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
        try:
            with torch.cuda.stream(self._stream):
                pieces = torch.from_numpy(moves.pieces).to(self._device)
        except torch.OutOfMemoryError as error:
            raise TransportError(f"there is no memory for the pieces of a plan: {error}") from None
        self._stream.synchronize()
        return pieces

    def start(self, prepared: Any, bound: Bound) -> Ticket:
        if not bound.launches:
            return Over(0)
        slot, free = self._slot(bound.table)
        slot.counted.data[:] = self._none
        try:
            for number, launch in enumerate(bound.launches):
                self._launch(prepared, slot, launch, number * self._share)
        except (RuntimeError, TransportError) as error:
            # What was launched before runs all the same: the destination is kept until it is over, and the count is short.
            logger.error("a copy could not be launched: %s", error)
        self._driver.record(slot.ended, self._handle)
        return _Copies(self._driver, slot, free, len(bound.launches) * self._share)

    def zero(self, runs: Ints) -> Ticket:
        if not len(runs):
            return Over(0)
        slot, free = self._slot(runs.reshape(-1))
        programs = min(len(runs), self._programs)
        if self._zeroing is not None:
            slot.given.hold(slot.onto, len(runs))
            self._driver.launch(self._zeroing, programs, self._handle, slot.given)
        else:
            with torch.cuda.stream(self._stream):
                kernel.zeroing(programs, slot.table, len(runs))
        self._driver.record(slot.ended, self._handle)
        return _Copies(self._driver, slot, free, 0)

    def precede_the_engine(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _slot(self, table: Ints) -> tuple[_Slot, list[_Slot]]:
        """A slot that holds the table, which is there before what is launched next; and where the slot belongs."""
        self._driver.enter(self._index)
        length = len(table)
        room = min((room for room in self._free if room >= length), default=1 << (length - 1).bit_length())
        free = self._free.setdefault(room, [])
        slot = free.pop() if free else self._slots(room, 1)[0]
        # Unlike NumPy's copies, a memoryview's keep Python's lock, however long they are.
        slot.host[:length] = table.data
        self._driver.upload(slot.onto, slot.uploaded, 8 * length, self._uploading)
        self._driver.record(slot.there, self._uploading)
        self._driver.follow(self._handle, slot.there)
        self._driver.record(slot.began, self._handle)
        return slot, free

    def _slots(self, room: int, count: int) -> list[_Slot]:
        hosts = torch.empty((count, room), dtype=torch.int64, pin_memory=True)
        counts = torch.empty((count, len(self._none)), dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._uploads):
            tables = torch.empty((count, room), dtype=torch.int64, device=self._device)
        return [self._of(hosts[i], tables[i], counts[i]) for i in range(count)]

    def _of(self, host: Any, table: Any, counts: Any) -> _Slot:
        where = table, table.data_ptr(), counts, counts.numpy(), self._driver.seen(counts.data_ptr())
        events = self._driver.event(), self._driver.event(), self._driver.event()
        return _Slot(host.numpy().data, host.data_ptr(), *where, *events, Arguments())

    def _warm(self, form: Form) -> None:
        """Compiles a kernel, which takes a second the first time, by moving nothing with it. From then on the driver launches
        it, if one unit that is moved so arrives."""
        if form in self._ready:
            return
        with torch.cuda.stream(self._stream):
            nothing = torch.zeros(self._share, dtype=torch.int64, device=self._device)
            made = kernel.launch(self._programs, nothing, nothing, 0, 0, nothing, form)
        self._stream.synchronize()
        self._ready[form] = self._driver.launchable(made, kernel.MOVE_ARGUMENTS)
        if self._ready[form] is not None and not self._moves_a_unit(form):
            self._ready[form] = None
        if self._ready[form] is None:
            logger.info("%s is launched by Triton: CUDA's driver does not know its arguments for those that are meant", form)

    def _moves_a_unit(self, form: Form) -> bool:
        with torch.cuda.stream(self._stream):
            cells = torch.tensor([[3, 5], [0, 0]], dtype=torch.int64, device=self._device)
            ends = cells[0].data_ptr(), cells[1].data_ptr()
            pieces = torch.tensor([[*ends, form.unit // form.width, 0, 1]], dtype=torch.int64, device=self._device)
            table = np.array([0] * FIELDS + [0, 1, 1, 2 * FIELDS, 0] + [0, 0], np.int64)
            ticket = self.start(pieces, Bound(table, (Launch(form, FIELDS, 1),), form.unit, 1))
            self._stream.synchronize()
            found = cells.cpu().numpy().view(np.uint8)
        arrived = np.array_equal(found[1], np.where(np.arange(16) < form.unit, found[0], 0))
        return ticket.done and ticket.moved == form.unit and arrived

    def _warm_zero(self) -> None:
        """The same of the kernel that zeroes."""
        with torch.cuda.stream(self._stream):
            made = kernel.zeroing(1, torch.zeros(2, dtype=torch.int64, device=self._device), 0)
            cells = torch.tensor([3, 5], dtype=torch.int64, device=self._device)
            self._stream.synchronize()
            self._zeroing = self._driver.launchable(made, kernel.ZERO_ARGUMENTS)
            if self._zeroing is None:
                return
            try:
                ticket = self.zero(np.array([[cells.data_ptr(), 8]], np.int64))
                self._stream.synchronize()
                fine = ticket.done and cells.tolist() == [0, 5]
            except TransportError as error:
                logger.info("zeroes are launched by Triton: %s", error)
                fine = False
        if not fine:
            self._zeroing = None

    def _launch(self, pieces: Any, slot: _Slot, launch: Launch, first: int) -> None:
        """`first`: where the counts of this launch begin."""
        ready = self._ready.get(launch.form)
        if ready is not None:
            slot.given.hold(pieces.data_ptr(), slot.onto, launch.at, launch.jobs, slot.counters + 8 * first)
            self._driver.launch(ready, self._programs, self._handle, slot.given)
            return
        with torch.cuda.stream(self._stream):
            kernel.launch(self._programs, pieces, slot.table, launch.at, launch.jobs, slot.counts[first:], launch.form)
