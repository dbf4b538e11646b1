"""Ports of this machine that no process has, none given out twice."""

from __future__ import annotations

import itertools
import random
import socket
from typing import Final

from kvferry.errors import UpError

HERE: Final = "127.0.0.1"
PORTS: Final = range(20_000, 32_000)
"""Below those that Linux gives to a socket that asks for any port, or connects: none of them is taken between `free_port` and
the use of what it returned."""
_tried = itertools.count(random.SystemRandom().randrange(len(PORTS)))
_reserved: set[int] = set()


def free_port(neighbours: int = 1) -> int:
    """The first of `neighbours` adjacent free ports; this process gives none of them out again."""
    for _ in PORTS:
        first = PORTS[next(_tried) % len(PORTS)]
        wanted = range(first, first + neighbours)
        if all(map(_is_free, wanted)):
            for _ in wanted[1:]:
                next(_tried)
            return first
    raise UpError(f"no {neighbours} free ports side by side from {PORTS[0]} to {PORTS[-1]}; see `ss -ltnp`")


def reserve(*ports: int) -> None:
    """Never give these out: this process was told to use them, and binds them later."""
    _reserved.update(ports)


def _is_free(port: int) -> bool:
    if port in _reserved:
        return False
    with socket.socket() as probe:
        try:
            probe.bind((HERE, port))
        except OSError:
            return False
    return True
