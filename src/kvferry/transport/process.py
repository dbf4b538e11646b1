"""A peer's process on this machine: which one it is, and whether it still lives.

A process is told by its number, the time of its start and its PID namespace: a number alone may have been given to another.
Its death is seen by a pidfd, also of a process that its parent has not waited for.
"""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

_STARTED: Final = 19
"""The field of /proc/PID/stat with the start time, counted behind the name."""

_C: Final = ctypes.PyDLL(None, use_errno=True)
"""Called with Python's lock in hand: `select.poll` lets go of it, and a busy thread would keep it for milliseconds."""


class Process(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process as told to peers: its number, when it started (clock ticks after the boot), and its PID namespace."""

    number: Annotated[int, Meta(ge=1, le=1 << 32)]
    started: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    namespace: Annotated[str, Meta(max_length=64)]


class Life:
    """Whether a process of this machine lives. `known` is False where the kernel does not let this process watch it."""

    def __init__(self, process: Process) -> None:
        self._file = -1
        self._ended = False
        try:
            self._file = os.pidfd_open(process.number)
        except ProcessLookupError:
            self._ended = True
        except (OSError, OverflowError):
            return
        self._ended = self._ended or started(process.number) != process.started

    @property
    def known(self) -> bool:
        return self._ended or self._file >= 0

    @property
    def ended(self) -> bool:
        if not self._ended and self._file >= 0:
            self._ended = _readable(self._file)
        return self._ended

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def _readable(file: int) -> bool:
    found = _PollFd(file, select.POLLIN, 0)
    return bool(_C.poll(ctypes.byref(found), 1, 0) > 0)


def this_process() -> Process:
    return Process(os.getpid(), started(os.getpid()), namespace())


def started(number: int) -> int:
    """When a process started; 0 where that cannot be seen."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[_STARTED])
    except (OSError, IndexError, ValueError):
        return 0


def namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"
