"""Who can reach this end's UCX: processes of this machine through shared memory alone, or a network.

UCX's TCP port authenticates no peer: any peer reads and writes this process's memory, and a few bytes end the process. So the
port is opened only for an engine that is to be reached over a network without RDMA. On loopback UCX runs without TCP. Its
shared memory must then report peers that died (`UCX_MM_ERROR_HANDLING`): NIXL demands that of some transport, else of TCP.
Reads from a dead peer end with UCX's next look at it (`UCX_KEEPALIVE_INTERVAL`).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvferry.errors import TransportError
from kvferry.transport.interfaces import addresses, free_ports, has_rdma, interface_of

logger = logging.getLogger("kvferry.transport")

PORTS: Final = "20000-20255"
"""Outside the ports that Linux gives away by itself, and those of Kubernetes' services."""

TLS: Final = "UCX_TLS"
DEVICES: Final = "UCX_NET_DEVICES"
RANGE: Final = "UCX_TCP_PORT_RANGE"
LOOPBACK: Final = "127.0.0.1"
TURN_S: Final = 30.0
"""For all that start before this process: one takes a second at most."""

_NEAR: Final = {TLS: "^tcp", "UCX_MM_ERROR_HANDLING": "y", "UCX_KEEPALIVE_INTERVAL": "1s"}
_TURN: Final = "\0kvferry ucx ports"
_AGAIN_S: Final = 0.02
_RANGE: Final = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


@dataclass(frozen=True)
class Fence:
    """`near`: UCX opens no port. Else `words` say what is open, and what to put around it. `ports`: how many of the range this
    process takes on every interface; 0 where any port will do."""

    near: bool
    words: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    ports: int = 0


def port_range(text: str) -> tuple[int, int]:
    """First and last port of `20000-20255`; raises TransportError for anything else."""
    found = _RANGE.fullmatch(text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise TransportError(f"{text!r} is no range of ports: write first-last, from 1024 to 65535, as ucx_ports: {PORTS}")
    return first, last


def fence(address: str, ports: str, said: Mapping[str, str], each: int = 1) -> Fence:
    """What UCX is told for an end that is reached at `address`. `said`: what the operator set, in the environment or the
    options, which stays. `each`: how many ports this process takes on every interface."""
    loopback = is_here(address)
    if loopback and not allows_tcp(said.get(TLS, _NEAR[TLS])):
        return Fence(True, "", {**_NEAR, **said})
    if not loopback and TLS not in said and has_rdma():
        words = f"UCX reads over RDMA at {address} and opens no TCP port: keep the RDMA network for machines that you trust"
        return Fence(False, words, {TLS: "^tcp", **said})
    if not allows_tcp(said.get(TLS, "all")):
        return Fence(False, "", said)
    settings = {RANGE: ports, **said}
    device = "lo" if loopback else interface_of(address)
    if device:
        settings = {DEVICES: device, **settings}
    named = settings.get(DEVICES, "all")
    where, taken = "all interfaces" if named == "all" else named, each if settings[RANGE] != "0" else 0
    if loopback:
        words = (
            f"UCX listens on TCP ports {settings[RANGE]} of {where}, since {TLS}={said[TLS]} lets TCP in: programs of this "
            f"machine reach them. Unset {TLS}, and none is open: on one machine KVFerry needs no TCP"
        )
        return Fence(False, words, settings, taken)
    words = (
        f"UCX listens on TCP ports {settings[RANGE]} of {where} ({each} for this process), and authenticates no peer: "
        f"any that reaches them reads and writes this process's memory. Let only the engines' machines in, "
        f"for example: {rule(where, settings[RANGE])}"
    )
    if not device:
        words += f". {address} is no address of this machine: name the interface with ucx, as {DEVICES}"
    return Fence(False, words, settings, taken)


def rule(interface: str, ports: str) -> str:
    """A line for a firewall, with a network to be filled in."""
    named = "" if interface == "all interfaces" else f'iifname "{interface}" '
    return f"nft add rule inet filter input {named}tcp dport {ports} ip saddr != ENGINES drop"


def is_here(address: str) -> bool:
    """Whether an address is this machine seen from itself."""
    return address in ("", "localhost", "::1") or address.startswith("127.")


def allows_tcp(transports: str) -> bool:
    """Whether UCX_TLS lets TCP in, as UCX reads it."""
    words = {word.strip().partition(":")[0].lstrip("\\") for word in transports.lower().removeprefix("^").split(",")}
    return "tcp" not in words if transports.startswith("^") else bool(words & {"tcp", "all"})


def operators(ucx: Mapping[str, str]) -> dict[str, str]:
    """What was set by hand: the options' `ucx`, and over it the environment."""
    return {**ucx, **{name: value for name, value in os.environ.items() if name in (TLS, DEVICES, RANGE)}}


@contextmanager
def taking_ports(found: Fence) -> Iterator[None]:
    """For as long as UCX takes its ports. UCX looks for a free one for ever where its range has none: so they are counted, and
    raises TransportError where there are too few. Processes that start together take theirs one after the other."""
    if not found.ports:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        if not _has_turn(turn):
            logger.warning("another process takes UCX ports for longer than %g s; this one no longer waits for it", TURN_S)
        _require(found)
        yield


def _has_turn(turn: socket.socket) -> bool:
    deadline = time.monotonic() + TURN_S
    while not _takes(turn):
        if time.monotonic() > deadline:
            return False
        time.sleep(_AGAIN_S)
    return True


def _takes(turn: socket.socket) -> bool:
    """A name in the abstract namespace, which is the network's, as ports are; it is free again when its process ends."""
    try:
        turn.bind(_TURN)
    except OSError:
        return False
    return True


def _require(found: Fence) -> None:
    said = found.settings[RANGE]
    first, last = port_range(said)
    known = {name for name, _ in addresses()}
    for device in found.settings.get(DEVICES, "").split(","):
        if device and device not in known:
            continue
        free = free_ports(device, first, last, found.ports)
        if free < found.ports:
            raise TransportError(
                f"{free} of the ports {said} of {device or 'this machine'} are free, and UCX needs {found.ports} "
                f"for this process: widen ucx_ports, or end who holds them (ss -ltnp)"
            )
