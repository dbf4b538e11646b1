"""The shared key of a cluster, from a file: it authenticates and encrypts the session's channel.

All sides hold the same secret. The listener's CURVE key pair is made from it, so that only who knows it can say a word to the
listener, and nobody else can pose as one.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import zmq
from zmq.utils import z85

from kvferry.errors import SessionError

SHORTEST = 32

_REMEMBERED = 1024
"""Addresses that are in order, and hosts: the same few are looked at for every request, on the engine's thread too."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?\]|[0-9A-Za-z_.:%*-]+):([0-9]{1,5})")


@dataclass(frozen=True, repr=False)
class Key:
    """The listener's key pair, in ZeroMQ's text form."""

    public: bytes
    secret: bytes


def read_key(path: str | Path) -> Key:
    """The key in a file of at least 32 bytes, however they came about; spaces and newlines at its ends do not count."""
    try:
        content = Path(path).read_bytes().strip()
    except OSError as error:
        raise SessionError(
            f"the key file {path} cannot be read: {error.strerror}; make one with: head -c 32 /dev/urandom | base64"
        ) from None
    if len(content) < SHORTEST:
        raise SessionError(f"the key file {path} has {len(content)} bytes; at least {SHORTEST} are needed")
    secret: bytes = z85.encode(hashlib.sha256(b"kvferry session 1\0" + content).digest())
    return Key(zmq.curve_public(secret), secret)


@lru_cache(maxsize=_REMEMBERED)
def split_address(address: str) -> tuple[str, int]:
    """A `host:port`; the host may be in brackets."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise SessionError(f"{address!r} is not an address; write host:port, port 0 for any free one")
    return found[1].strip("[]"), int(found[2])


def reach(address: str, key: Key | None) -> tuple[str, int]:
    """Host and port that may be listened on or dialled. Without a key that is this machine alone, by number: whoever can hand
    in a reference could otherwise send us anywhere."""
    host, port = split_address(address)
    if key is not None:
        return host, port
    number = loopback(host)
    if not number:
        raise SessionError(
            f"{host} needs a key, as everything beyond this machine does: "
            f"set key_file to a file that all sides hold, or use 127.0.0.1"
        )
    return number, port


@lru_cache(maxsize=_REMEMBERED)
def loopback(host: str) -> str:
    """The number of a host that is this machine seen from itself; empty for any other. Names are not looked up, since what they
    stand for is for others to say; `localhost` is 127.0.0.1."""
    try:
        found = ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host.partition("%")[0])
    except ValueError:
        return ""
    plain = getattr(found, "ipv4_mapped", None) or found
    return str(plain) if plain.is_loopback else ""


def is_loopback(host: str) -> bool:
    return bool(loopback(host))


@lru_cache(maxsize=_REMEMBERED)
def is_number(host: str) -> bool:
    """Whether a host needs no looking up."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
