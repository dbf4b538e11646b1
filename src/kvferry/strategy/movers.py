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
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import TransportError
from kvferry.strategy.moves import FIELDS, Bound, Moves
from kvferry.strategy.shared import OpenedBytes, SharedBytes
from kvferry.strided import Ints
from kvferry.transport import Storage

_LONG: Final = 1 << 15
_AT_ONCE: Final = 1 << 18
"""Bytes that are copied by one call: what it lays aside meanwhile stays in a processor's cache."""
_ITEMS: Final = 1 << 16
_MEMORY: Final = ctypes.c_uint8 * (1 << 62)
_NUMBERS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
"""Elements that NumPy copies faster than bytes of no meaning."""


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

    def enter(self) -> None:
        """The calling thread, which is none of the engine's, is about to use it while the engine may be starting."""
        ...

    def export(self, storage: Storage) -> bytes:
        """Raises TransportError where the storage cannot be mapped by others."""
        ...

    def open(self, token: bytes, length: int) -> Opened: ...

    def prepare(self, moves: Moves) -> Any: ...

    def start(self, prepared: Any, bound: Bound) -> Ticket:
        """What is begun is copied in the order in which it was begun."""
        ...

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

    def enter(self) -> None:
        """Every thread may."""

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
        """The pieces column by column, since that is how they are looked at."""
        return np.ascontiguousarray(moves.pieces.T)

    def start(self, prepared: Ints, bound: Bound) -> Ticket:
        moved = 0
        for unit, src, dst, length in _items(prepared, bound):
            sizes = [int(length[0])] if (length == length[0]).all() else np.unique(length).tolist()
            for size in sizes:
                of = slice(None) if len(sizes) == 1 else length == size
                theirs, ours = src[:, of].reshape(-1), dst[:, of].reshape(-1)
                _copy(theirs, ours, size, unit)
                moved += size * len(theirs)
        return Over(moved)

    def zero(self, runs: Ints) -> Ticket:
        for address, length in runs.tolist():
            ctypes.memset(address, 0, length)
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


def _items(columns: Ints, bound: Bound) -> Iterator[tuple[int, Ints, Ints, Ints]]:
    """Unit, source and destination of every piece (the second axis) at every tile (the first), and lengths of the pieces, in
    the words of the tables; some at a time. Tile by tile, since a tile's pieces share pages and lines of a processor's caches,
    and those of different tiles do not."""
    for launch in bound.launches:
        jobs = bound.table[launch.at : launch.at + launch.jobs * FIELDS].reshape(-1, FIELDS)
        for first, count, tiles, places, _ in jobs.tolist():
            lanes = 1 + int(columns[4, first : first + count].max())
            place = bound.table[places : places + lanes * tiles].reshape(-1, tiles)
            pieces = min(count, _ITEMS)
            for at in range(first, first + count, pieces):
                src, dst, elements, theirs, ours = columns[:, at : min(at + pieces, first + count)]
                step = max(1, _ITEMS // pieces)
                for tile in range(0, tiles, step):
                    few = place[:, tile : tile + step]
                    there, here = (few[0][:, None], few[1][:, None]) if lanes == 2 else (few[theirs].T, few[ours].T)
                    yield launch.form.unit, there + src, here + dst, elements * launch.form.width


def _copy(src: Ints, dst: Ints, size: int, unit: int) -> None:
    """Runs of one size, all addresses multiples of `unit`. NumPy copies elements of any size in one call for all of them; where
    they lie close together on one side, without laying them aside."""
    if size >= _LONG or len(src) == 1:
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        return
    kind: np.dtype[Any] = _NUMBERS.get(size, np.dtype((np.void, size)))
    if _close(src, size):
        ours, here = _elements(dst, kind, unit)
        ours[here] = _rows(int(src[0]), len(src), kind)
        return
    if unit % kind.alignment == 0 and _close(dst, size):
        low = int(src.min())
        above = src - low
        row = above // size
        if (row * size == above).all():
            _rows(low, int(row.max()) + 1, kind).take(row, out=_rows(int(dst[0]), len(dst), kind), mode="clip")
            return
    (theirs, there), (ours, here) = _elements(src, kind, unit), _elements(dst, kind, unit)
    step = _AT_ONCE // size
    for at in range(0, len(src), step):
        few = slice(at, at + step)
        ours[here[few]] = theirs[there[few]]


def _close(address: Ints, size: int) -> bool:
    """Whether runs lie behind each other."""
    return bool(int(address[-1] - address[0]) == size * (len(address) - 1) and (address[1:] - address[:-1] == size).all())


def _rows(address: int, count: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    rows: npt.NDArray[Any] = np.ndarray(count, kind, _at(address))
    return rows


def _elements(address: Ints, kind: np.dtype[Any], unit: int) -> tuple[npt.NDArray[Any], Ints]:
    """Elements that begin at every unit of a stretch of memory, and which of them are at the addresses."""
    low = int(address.min())
    count = (int(address.max()) - low) // unit + 1
    return np.ndarray(count, kind, _at(low), strides=(unit,)), (address - low) >> (unit.bit_length() - 1)


def _at(address: int) -> memoryview[int]:
    """Memory from an address on, to be cut to what is there. One type for all lengths: making another takes longer than many a
    copy."""
    return memoryview(_MEMORY.from_address(address))
