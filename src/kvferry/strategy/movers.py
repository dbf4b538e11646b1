"""Who moves bytes between mapped memory and one's own: what a mover promises, and the one for host memory.

export(storage)              what another process needs to open it
open(token, length)          that memory, in this process
prepare(moves)               once for a peer: what every load refers to
start(prepared, bound)       a load's copies begin; `Ticket.done` says when all bytes are there
zero(runs)                   destination bytes that must not keep what was there
precede_the_engine()         the engine's next kernels wait for all of it
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from kvferry.errors import TransportError
from kvferry.strategy.moves import FIELDS, Bound, Moves
from kvferry.strategy.shared import Memory, OpenedBytes, SharedBytes
from kvferry.strided import Ints
from kvferry.transport import Storage

_LONG = 1 << 12


class Ticket(Protocol):
    """Copies under way."""

    @property
    def done(self) -> bool: ...

    @property
    def moved(self) -> int:
        """Bytes, as counted by whoever copied them; once they are done."""
        ...

    @property
    def seconds(self) -> float:
        """From the first byte to the last; once they are done."""
        ...


class Opened(Protocol):
    """Another process's storage."""

    @property
    def address(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...


class Mover(Protocol):
    @property
    def memory(self) -> Literal["dram", "vram"]: ...

    def export(self, storage: Storage) -> bytes:
        """Raises TransportError where the storage cannot be mapped by others."""
        ...

    def open(self, token: bytes, length: int) -> Opened: ...

    def prepare(self, moves: Moves) -> Any: ...

    def start(self, prepared: Any, bound: Bound) -> Ticket: ...

    def zero(self, runs: Ints) -> Ticket: ...

    def precede_the_engine(self) -> None:
        """What the calling thread's engine launches from here on waits for everything begun before."""
        ...


@dataclass(frozen=True)
class Over:
    """Copies that were done when they began."""

    moved: int
    done: bool = True
    seconds: float = 0.0


class HostMover:
    """Memory of this machine's processes that was made to be shared; copies are plain ones and done at once."""

    memory: Literal["dram", "vram"] = "dram"

    def __init__(self) -> None:
        self._shared: list[SharedBytes] = []

    def share(self, shared: SharedBytes) -> None:
        """Storages that lie in `shared` can be exported from now on."""
        self._shared.append(shared)

    def export(self, storage: Storage) -> bytes:
        for shared in self._shared:
            offset = storage.address - shared.address
            if offset >= 0 and offset + storage.length <= shared.length:
                return msgspec.msgpack.encode((shared.name, shared.nonce, shared.length, offset))
        raise TransportError("host memory that was not made to be shared cannot be mapped by another process")

    def open(self, token: bytes, length: int) -> Opened:
        try:
            name, nonce, whole, offset = msgspec.msgpack.decode(token, type=tuple[str, bytes, int, int])
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            raise TransportError(f"not the name of shared memory: {error}") from None
        if not 0 <= offset <= offset + length <= whole:
            raise TransportError(f"bytes [{offset}, {offset + length}) of shared memory of {whole}")
        return _Window(OpenedBytes(name, nonce, whole), offset)

    def prepare(self, moves: Moves) -> Ints:
        return moves.pieces

    def start(self, prepared: Ints, bound: Bound) -> Ticket:
        moved = 0
        for src, dst, length in _items(prepared, bound):
            for size in np.unique(length).tolist():
                of = length == size
                _copy(src[of], dst[of], size)
                moved += size * int(of.sum())
        return Over(moved)

    def zero(self, runs: Ints) -> Ticket:
        for address, length in runs.tolist():
            _at(address, length)[:] = 0
        return Over(int(runs[:, 1].sum()))

    def precede_the_engine(self) -> None:
        """They are done at once."""


@dataclass(frozen=True)
class _Window:
    opened: OpenedBytes
    offset: int

    @property
    def address(self) -> int:
        return self.opened.address + self.offset

    @property
    def alive(self) -> bool:
        return self.opened.alive

    def close(self) -> None:
        self.opened.close()


def _items(pieces: Ints, bound: Bound) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Source, destination and length of every item, job by job, in the words of the tables."""
    for launch in bound.launches:
        jobs = bound.table[launch.at : launch.at + launch.jobs * FIELDS].reshape(-1, FIELDS)
        for first, count, tiles, places, _ in jobs.tolist():
            src, dst, elements, theirs, ours = pieces[first : first + count].T
            lanes = bound.table[places : places + (int(ours.max()) + 1) * tiles].reshape(-1, tiles)
            length = np.repeat(elements * launch.form.width, tiles)
            yield (src[:, None] + lanes[theirs]).reshape(-1), (dst[:, None] + lanes[ours]).reshape(-1), length


def _copy(src: Ints, dst: Ints, size: int) -> None:
    if size >= _LONG or len(src) == 1:
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        return
    low, lowest = int(src.min()), int(dst.min())
    theirs, ours = _at(low, int(src.max()) - low + size), _at(lowest, int(dst.max()) - lowest + size)
    within = np.arange(size)
    ours[(dst - lowest)[:, None] + within] = theirs[(src - low)[:, None] + within]


def _at(address: int, length: int) -> Memory:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
