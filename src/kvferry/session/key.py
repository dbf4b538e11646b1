"""The keys of a cluster: they authenticate and encrypt the session's channel, and seal references.

All sides hold the same secret. The listener's CURVE key pair is made from it: only a side that knows the secret can speak to
the listener, or pose as one. A file is read again while the engine runs. It may hold two keys, so that keys can be replaced
without a restart.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

import zmq
from zmq.utils import z85

from kvferry.errors import SessionError
from kvferry.session import own_key

logger = logging.getLogger("kvferry.session")

SHORTEST: Final = 32
HEADER: Final = b"kvferry keys"
"""The first line of a file with one key a line."""
HEX: Final = b"hex:"
MOST: Final = 2
LOOK_S: Final = 2.0
"""Between two looks at a file that may have changed. It is read once two looks have found the same change."""

_MAKE_ONE: Final = "make one with: head -c 32 /dev/urandom | base64"
_REMEMBERED = 1024
"""Addresses that are in order, and hosts: the same few are looked at for every request, on the engine's thread too."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?\]|[0-9A-Za-z_.:%*-]+):([0-9]{1,5})")


@dataclass(frozen=True, repr=False)
class Key:
    """The listener's key pair, in ZeroMQ's text form."""

    public: bytes
    secret: bytes


class Source(Protocol):
    """Where keys are read. `stamp` changes when what is there does."""

    def stamp(self) -> object: ...

    def read(self) -> tuple[Key, ...]: ...


class Keys:
    """One key, or two while keys are replaced. The first seals references, and the listener answers to it. All of them are
    tried when this side dials, and each opens a seal. `local`: they speak with this machine only, since no file names them.

    Any thread may read them. `look` reads the file again, on a thread that may wait for a disk."""

    def __init__(self, source: Source, local: bool = False) -> None:
        self._source, self.local = source, local
        stamp = source.stamp()
        self.all = source.read()
        self._stamp = self._changed = stamp or source.stamp()
        self._look_at, self._looking = time.monotonic() + LOOK_S, threading.Lock()

    @property
    def first(self) -> Key:
        return self.all[0]

    def look(self) -> None:
        """Read the file again if it has changed; at most every LOOK_S. What cannot be read is said once and changes nothing."""
        now = time.monotonic()
        if now < self._look_at or not self._looking.acquire(blocking=False):
            return
        try:
            self._look_at = now + LOOK_S
            stamp, seen = self._source.stamp(), self._changed
            self._changed = stamp
            if stamp != self._stamp and stamp == seen:
                self._read_again()
                self._stamp = self._changed = stamp or self._source.stamp()
        finally:
            self._looking.release()

    def _read_again(self) -> None:
        try:
            found = self._source.read()
        except SessionError as error:
            logger.error("%s; the keys read before are still used", error)
            return
        if found != self.all:
            self.all = found
            logger.warning("%s was read again: %d key%s", self._source, len(found), "s" if len(found) > 1 else "")


class _Named:
    """A file that an option names. Links are followed: Kubernetes replaces a Secret's files by turning one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __str__(self) -> str:
        return f"the key file {self._path}"

    def stamp(self) -> object:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns

    def read(self) -> tuple[Key, ...]:
        try:
            with self._path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read()
        except OSError as error:
            raise SessionError(f"{self} cannot be read: {error.strerror}; {_MAKE_ONE}") from None
        if stat.S_ISREG(mode) and mode & 0o022:
            raise SessionError(f"{self} may be written by others (mode {mode & 0o777:o}): chmod 600 it, then make a new key")
        if stat.S_ISREG(mode) and mode & 0o004:
            _warn(str(self), mode & 0o777)
        return keys_in(content, str(self))


class _Own:
    """The key of this user on this machine. Where its file goes away while it is used, it is put back."""

    def __init__(self) -> None:
        self._content = b""

    def __str__(self) -> str:
        return "this user's own key"

    def stamp(self) -> object:
        return own_key.stamp()

    def read(self) -> tuple[Key, ...]:
        path, self._content = own_key.read_or_make(self._content)
        return keys_in(self._content, f"the key file {path}")


@lru_cache(maxsize=64)
def _warn(where: str, mode: int) -> None:
    """Once in a process: halves of an engine read the same file."""
    logger.warning("%s may be read by every user of this machine (mode %o): chmod 600 it", where, mode)


def keys_of(path: str) -> Keys:
    """The keys in the file that an option names; where it names none, this user's own on this machine."""
    return read_keys(path) if path else own_keys()


def read_keys(path: str | Path) -> Keys:
    """The keys in a file: one of at least 32 bytes, however they came about, or one a line under a line `kvferry keys`."""
    return Keys(_Named(path))


def own_keys() -> Keys:
    """A key that all processes of this user on this machine share, and no others. It is made where there is none."""
    return Keys(_Own(), local=True)


def keys_in(content: bytes, where: str) -> tuple[Key, ...]:
    """The keys that a file holds; raises SessionError with what is wrong with it."""
    header, _, rest = content.strip().partition(b"\n")
    if header.rstrip() != HEADER:
        return (_key(content, where),)
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MOST:
        raise SessionError(f"{where} has {len(lines)} lines under its first; one or two keys are needed there")
    return tuple(dict.fromkeys(_key(_of_line(line, where), where) for line in lines))


def _of_line(line: bytes, where: str) -> bytes:
    if not line.startswith(HEX):
        return line
    try:
        return bytes.fromhex(line.removeprefix(HEX).decode())
    except ValueError:
        raise SessionError(f"{where} has a line that begins with hex: and goes on with something else") from None


def _key(content: bytes, where: str) -> Key:
    """Spaces and newlines at a text's ends do not count, nor at others' as long as enough is left."""
    plain = content.strip()
    if len(plain) < SHORTEST and not _is_text(content):
        plain = content
    if len(plain) < SHORTEST:
        raise SessionError(f"{where} has {len(plain)} bytes; at least {SHORTEST} are needed")
    if len(set(plain.rstrip(b"=")) - set(b" \t\r\n")) < 2:
        raise SessionError(f"{where} has the same letter throughout, which is no secret; {_MAKE_ONE}")
    secret: bytes = z85.encode(hashlib.sha256(b"kvferry session 1\0" + plain).digest())
    return Key(zmq.curve_public(secret), secret)


def _is_text(content: bytes) -> bool:
    """Random bytes hardly ever are."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=_REMEMBERED)
def split_address(address: str) -> tuple[str, int]:
    """A `host:port`; the host may be in brackets."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise SessionError(f"{address!r} is not an address; write host:port, port 0 for any free one")
    return found[1].strip("[]"), int(found[2])


def reach(address: str, keys: Keys) -> tuple[str, int]:
    """Host and port that may be listened on or dialled. Where no file names the keys that is this machine alone, by number."""
    host, port = split_address(address)
    if not keys.local:
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
