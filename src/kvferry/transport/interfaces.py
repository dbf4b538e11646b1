"""Which network interface of this machine has an address, asked of the kernel (rtnetlink)."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GET, _NEW, _DONE, _ERROR = 22, 20, 3, 2
_DUMP: Final = 0x301
_ADDRESS, _LOCAL = 1, 2
_HEADER: Final = struct.Struct("=IHHII")
_BODY: Final = struct.Struct("=BBBBi")
_ATTRIBUTE: Final = struct.Struct("=HH")
_VERBS: Final = Path("/dev/infiniband")
_RDMA: Final = Path("/sys/class/infiniband")


def interface_of(host: str) -> str:
    """The interface that has the host's address; empty where none has, or where the name is not known here."""
    try:
        found = socket.getaddrinfo(host.partition("%")[0], None, type=socket.SOCK_STREAM)
        wanted = {str(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found}
    except (OSError, UnicodeError, ValueError):
        return ""
    return next((name for name, address in addresses() if address in wanted), "")


def address_toward(host: str) -> str:
    """This machine's address on the way to a host; empty where none is known."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def addresses() -> Iterator[tuple[str, str]]:
    """Every interface with each of its addresses."""
    try:
        names = dict(socket.if_nameindex())
        messages = _dump()
    except OSError:
        return
    for body in messages:
        family, _, _, _, index = _BODY.unpack_from(body)
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        attributes = dict(_attributes(body[_BODY.size :]))
        raw = attributes.get(_LOCAL) or attributes.get(_ADDRESS)
        if raw is not None and index in names:
            yield names[index], str(ipaddress.ip_address(raw))


def _dump() -> list[bytes]:
    out: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as kernel:
        kernel.settimeout(5.0)
        kernel.send(_HEADER.pack(_HEADER.size + _BODY.size, _GET, _DUMP, 1, 0) + _BODY.pack(0, 0, 0, 0, 0))
        while True:
            data = kernel.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return out
                if kind == _NEW:
                    out.append(data[_HEADER.size : length])
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]


def free_ports(interface: str, first: int, last: int, enough: int) -> int:
    """How many ports of a range could be listened on, counted up to `enough`."""
    hosts = [a for name, a in addresses() if name == interface and ":" not in a] or ["0.0.0.0"]
    found = 0
    for port in range(first, last + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            try:
                one.bind((hosts[0], port))
                one.listen(1)
            except OSError:
                continue
        found += 1
        if found >= enough:
            break
    return found


def has_rdma() -> bool:
    """Whether an RDMA device has an active port, and this process may use one."""
    if not any(os.access(path, os.R_OK | os.W_OK) for path in _VERBS.glob("uverbs*")):
        return False
    return any(_active(path) for path in _RDMA.glob("*/ports/*/state"))


def _active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text(encoding="utf-8")
    except OSError:
        return False
