"""Host memory that other processes of this machine can map, and that tells them when its owner has died.

It is a file in memory that only the owner's user can open. Its first bytes are a number drawn at random, so that a file of the
same name on another machine is not taken for it; its owner holds a lock on it for as long as it lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransportError

FOLDER: Final = Path("/dev/shm")
HEADER: Final = 4096
NONCE: Final = 16

_NAME: Final = re.compile(r"kvferry-[0-9a-f]{32}")

Memory = npt.NDArray[np.uint8]


class SharedBytes:
    """`length` bytes of zeros, at `address`; other processes open them by `name` and `nonce`."""

    def __init__(self, length: int) -> None:
        for left in _left_behind():
            left.unlink(missing_ok=True)
        self.name, self.nonce, self.length = f"kvferry-{secrets.token_hex(16)}", secrets.token_bytes(NONCE), length
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        try:
            self._file = os.open(FOLDER / self.name, flags, 0o600)
        except OSError as error:
            raise TransportError(f"no memory can be shared with other processes in {FOLDER}: {error}") from error
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.truncate(self._file, HEADER + length)
        self._map = mmap.mmap(self._file, HEADER + length)
        self._map[:NONCE] = self.nonce
        self.bytes: Memory = np.frombuffer(self._map, np.uint8, length, HEADER)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def close(self) -> None:
        """Give the name and the lock back; the memory stays while arrays of it are in use."""
        if self._file >= 0:
            (FOLDER / self.name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


class OpenedBytes:
    """Another process's SharedBytes, to be read."""

    def __init__(self, name: str, nonce: bytes, length: int) -> None:
        if not _NAME.fullmatch(name):
            raise TransportError(f"{name!a} is no name of shared memory")
        try:
            self._file = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"its shared memory {name} cannot be opened here: {error.strerror}") from error
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != HEADER + length:
                raise TransportError(f"shared memory {name} is of another user or size")
            self._map = mmap.mmap(self._file, HEADER + length, access=mmap.ACCESS_READ)
            if self._map[:NONCE] != nonce:
                raise TransportError(f"shared memory {name} is another one than the peer's")
        except (OSError, TransportError):
            os.close(self._file)
            raise
        self.bytes: Memory = np.frombuffer(self._map, np.uint8, length, HEADER)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def alive(self) -> bool:
        """Whether the owner still holds its lock."""
        return self._file >= 0 and not _unlocked(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _unlocked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _left_behind() -> Iterator[Path]:
    """Files of this user whose owners have died."""
    for path in FOLDER.glob("kvferry-*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(file).st_uid == os.geteuid() and _NAME.fullmatch(path.name) and _unlocked(file):
                yield path
        finally:
            os.close(file)
