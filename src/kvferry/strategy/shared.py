"""Host memory that other processes of this machine can map, and that tells them when its owner has died.

It is a file in memory that only the owner's user can open. Its first bytes are a number drawn at random, so that a file of the
same name on another machine is not taken for it; its owner holds a lock on it for as long as it lives.

The lock belongs to an opening of the file that is never mapped and that forked children close: whoever inherits a mapping, or
the descriptor, would keep the lock of a dead owner. Only a child that is forked behind Python's back, and that runs nothing
else, still does; then a dead owner is taken for alive until that child ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import re
import secrets
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final
from weakref import WeakSet, finalize

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransportError

FOLDER: Final = Path("/dev/shm")
HEADER: Final = 4096
NONCE: Final = 16

_MOST_SWEPT: Final = 1024
"""Files of these names that are looked at when something starts: anybody may put any number there."""
_NAME: Final = re.compile(r"kvferry-[0-9a-f]{32}")
_TO_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Anybody may put anything there: a link, or a pipe that nobody writes to."""

_C: Final = ctypes.PyDLL(None, use_errno=True)
"""Called with Python's lock in hand. `fcntl.flock` lets go of it, and who asks before every load would wait for milliseconds to
have it back from a busy thread."""

Memory = npt.NDArray[np.uint8]


class SharedBytes:
    """`length` bytes of zeros, at `address`; other processes open them by `name` and `nonce` until they are closed here, or
    nobody holds them any more."""

    def __init__(self, length: int) -> None:
        sweep()
        self.nonce, self.length = secrets.token_bytes(NONCE), length
        try:
            self.name, self._lock = _locked()
            self._closing = finalize(self, _give_back, FOLDER / self.name, self._lock)
            _own.add(self)
            with ExitStack() as undo:
                undo.callback(self.close)
                self._map = _reserved(FOLDER / self.name, HEADER + length)
                undo.pop_all()
        except OSError as error:
            raise TransportError(f"no memory can be shared with other processes in {FOLDER}: {error}") from error
        self._map[:NONCE] = self.nonce
        self.bytes: Memory = np.frombuffer(self._map, np.uint8, length, HEADER)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def close(self) -> None:
        """Give the name and the lock back; the memory stays while arrays of it are in use."""
        self._closing()

    def disown(self) -> None:
        """Leave the memory to another process that holds the same lock; this one's death then says nothing of it."""
        if self._closing.detach() is not None:
            os.close(self._lock)


class OpenedBytes:
    """Another process's SharedBytes, to be read."""

    def __init__(self, name: str, nonce: bytes, length: int) -> None:
        if not _NAME.fullmatch(name):
            raise TransportError(f"{name!a} is no name of shared memory")
        try:
            self._file, self._map = _opened(name, nonce, HEADER + length)
        except OSError as error:
            raise TransportError(f"its shared memory {name} cannot be opened here: {error.strerror}") from error
        self._name, self.length = name, length
        self.address = int(self.view().ctypes.data)

    def view(self) -> Memory:
        return np.frombuffer(self._map, np.uint8, self.length, HEADER)

    @property
    def alive(self) -> bool:
        """Whether the owner still holds its lock."""
        if self._file < 0:
            return False
        if not _C.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB):
            _C.flock(self._file, fcntl.LOCK_UN)
            return False
        reason = ctypes.get_errno()
        if reason != errno.EWOULDBLOCK:
            raise OSError(reason, os.strerror(reason))
        return True

    def close(self) -> None:
        """Nothing may read at `address` from now on; arrays of the memory that are in use keep it. A dead owner's file is
        removed: its owner cannot do that, and its memory is used up as long as it has a name."""
        with suppress(BufferError):
            self._map.close()
        if self._file >= 0:
            _sweep(FOLDER / self._name)
            os.close(self._file)
            self._file = -1


_own: Final[WeakSet[SharedBytes]] = WeakSet()


def _leave_to_the_parent() -> None:
    for shared in tuple(_own):
        shared.disown()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _give_back(path: Path, lock: int) -> None:
    path.unlink(missing_ok=True)
    os.close(lock)


def _ours(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _locked() -> tuple[str, int]:
    """A new file, and a lock on it; one that was swept before it was locked is made again."""
    while True:
        name = f"kvferry-{secrets.token_hex(16)}"
        lock = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return name, lock
        os.close(lock)


def _reserved(path: Path, length: int) -> mmap.mmap:
    """A file's first bytes, mapped; there is room for all of them, since whoever touches one that has none is killed."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, length)
        return mmap.mmap(file, length)
    finally:
        os.close(file)


def _opened(name: str, nonce: bytes, length: int) -> tuple[int, mmap.mmap]:
    """A file that is just what the peer says, and its bytes."""
    with ExitStack() as undo:
        file = os.open(FOLDER / name, _TO_READ)
        undo.callback(os.close, file)
        found = os.fstat(file)
        if not _ours(found) or found.st_size != length:
            raise TransportError(f"shared memory {name} is of another user or size")
        memory = mmap.mmap(file, length, access=mmap.ACCESS_READ)
        undo.callback(memory.close)
        if memory[:NONCE] != nonce:
            raise TransportError(f"shared memory {name} is another one than the peer's")
        undo.pop_all()
    return file, memory


def sweep() -> None:
    """Remove what this user's dead processes left. Of very many files some are looked at, others the next time."""
    named: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(FOLDER) as found:
        named = [entry for entry in found if _NAME.fullmatch(entry.name)]
    for entry in random.sample(named, min(len(named), _MOST_SWEPT)):
        with suppress(OSError):
            if _ours(entry.stat(follow_symlinks=False)):
                _sweep(Path(entry.path))


def _sweep(path: Path) -> None:
    """Remove a file of this user whose owner has died; meanwhile nobody can make it theirs. The lock is one that others can
    share: whoever asks whether the owner lives would take any other for the owner's."""
    with suppress(OSError):
        file = os.open(path, _TO_READ)
        try:
            if _ours(os.fstat(file)) and _NAME.fullmatch(path.name):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        finally:
            os.close(file)
