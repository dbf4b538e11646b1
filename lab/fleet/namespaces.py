"""Servers on a network of their own: a process keeps the namespaces, and servers are told to enter them."""

from __future__ import annotations

import ctypes
import os
from typing import Final

VARIABLE = "FLEET_NAMESPACES"
"""The process whose network, and mounts, a server has in place of ours."""

KINDS: Final = {"net": 0x40000000, "mnt": 0x00020000}


def leave() -> None:
    """This process gets a network and mounts of its own."""
    if _libc().unshare(sum(KINDS.values())):
        raise OSError(ctypes.get_errno(), "no namespaces of its own can be had")


def enter(process: int) -> None:
    """Before anything is opened that belongs to a network."""
    doors = {kind: os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in KINDS}
    for kind, door in doors.items():
        if _libc().setns(door, KINDS[kind]):
            raise OSError(ctypes.get_errno(), f"the {kind} namespace of process {process} cannot be entered")
        os.close(door)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
