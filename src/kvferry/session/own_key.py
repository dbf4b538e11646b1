"""The key of one user on one machine: a file in the user's runtime folder, which processes make and find without an option."""

from __future__ import annotations

import base64
import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvferry.errors import SessionError

NAME: Final = "kvferry.key"
RUNTIME: Final = "/run/user"
TEMPORARY: Final = "/tmp"
_NAMED: Final = "or set key_file to a file that all sides hold"
_REMOVE: Final = "this user's own key, {}, {}: remove it, and the next engine makes another"
_LARGEST: Final = 1 << 12
_TRIES: Final = 3


def read_or_make(kept: bytes) -> tuple[Path, bytes]:
    """The file and what is in it. Where there is none it is made, of `kept` if there is something to keep: of several processes
    that make it at once, all read what the first one made."""
    path = _folder() / NAME
    try:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                return path, _read(path)
            _make(path, kept or base64.b64encode(secrets.token_bytes(32)) + b"\n")
    except OSError as error:
        raise SessionError(f"this user's own key cannot be kept at {path}: {error.strerror}; cure that, {_NAMED}") from None
    raise SessionError(f"this user's own key at {path} goes away as soon as it is made; {_NAMED[3:]}")


def stamp() -> object:
    """What changes when the key does."""
    try:
        path = _folder() / NAME
        found = path.lstat()
    except (OSError, SessionError):
        return None
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _folder() -> Path:
    """The user's runtime folder. Without one, a folder in /tmp that others cannot write to."""
    user = os.geteuid()
    for said in (os.environ.get("XDG_RUNTIME_DIR", ""), f"{RUNTIME}/{user}"):
        if said.startswith("/") and not _trouble(said):
            return Path(said)
    made = f"{TEMPORARY}/kvferry-{user}"
    try:
        with suppress(FileExistsError):
            os.mkdir(made, 0o700)
    except OSError as error:
        raise SessionError(
            f"no folder for this user's own key: {made} cannot be made: {error.strerror}; cure that, {_NAMED}"
        ) from None
    trouble = _trouble(made)
    if trouble:
        raise SessionError(f"no folder for this user's own key: {made} {trouble}; remove it, {_NAMED}")
    return Path(made)


def _trouble(folder: str) -> str:
    """Why a folder is not this user's alone to write; empty if it is."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    return _not_ours(found)


def _not_ours(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return f"may be written by others (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o022 else ""


def _read(path: Path) -> bytes:
    """Not by a link, which would lead to another's file."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SessionError(_REMOVE.format(path, "is a link")) from None
    try:
        found = os.fstat(number)
        trouble = "is no file" if not stat.S_ISREG(found.st_mode) else _not_ours(found)
        if not trouble and found.st_mode & 0o077:
            trouble = f"may be read by others (mode {found.st_mode & 0o777:o})"
        if trouble:
            raise SessionError(_REMOVE.format(path, trouble))
        return os.read(number, _LARGEST)
    finally:
        os.close(number)


def _make(path: Path, content: bytes) -> None:
    """Whole, or not at all: it has its name once it is written. A name that is taken stays as it is."""
    written = path.with_name(f".{NAME}.{secrets.token_hex(8)}")
    number = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(number, "wb") as file:
            os.fchmod(number, 0o600)
            file.write(content)
        with suppress(FileExistsError):
            os.link(written, path)
    finally:
        os.unlink(written)
