"""All processes of one server, which share a process group."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

END_SECONDS = 10.0
POLL_SECONDS = 0.01
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")


def end(group: int, waiting: Callable[[], object] = lambda: None) -> None:
    """At once, with what the processes would leave behind: vLLM's forked workers do not remove their shared memory. A process
    is in its group until its parent has taken note of its end: where that is this one, `waiting` must do so."""
    left_behind = _shared_memory(group)
    send(group, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while send(group, 0) and time.monotonic() < deadline:
        waiting()
        time.sleep(POLL_SECONDS)
    for path in left_behind:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """The shared memory of engines that died by themselves: vLLM names it after a file that it keeps in `folder`."""
    for kept in folder.glob("vllm_dist_*"):
        for path in SHARED_MEMORY.glob(f"{kept.name}-*"):
            path.unlink(missing_ok=True)


def send(group: int, number: int) -> bool:
    """Whether there was a process to send it to."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, which can then wait for them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, "cannot become the parent of orphaned processes")


def die_with_parent() -> None:
    """This process, and what it becomes by exec, is killed when its parent ends, however that came about."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, "cannot be told of the parent's end")


def _prctl(option: int, value: int, otherwise: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), otherwise)


def reap() -> set[int]:
    """The children that have ended."""
    ended: set[int] = set()
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not child:
            return ended
        ended.add(child)


def _shared_memory(group: int) -> set[Path]:
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        shared = (line for line in lines if f" {SHARED_MEMORY}/" in line and not line.endswith("(deleted)"))
        found |= {Path(line.split(maxsplit=5)[5]) for line in shared}
    return found
