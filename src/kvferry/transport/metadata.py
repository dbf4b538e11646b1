"""What one transport tells its peers about itself: a versioned, size-capped envelope around what the library under it exports.

The digest tells damage from a peer's words before they reach a library that was not written for damage; it is no seal:
metadata travels over authenticated channels.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvferry.errors import TransportError
from kvferry.manifest.schema import Address, Index, Name, Offset
from kvferry.transport.process import Process

METADATA_VERSION: Final = 1
MAX_METADATA_BYTES: Final = 16 << 20

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class StorageEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered storage, as told to peers."""

    address: Address
    length: Offset
    memory: Literal["dram", "vram"]
    device: Index


class Metadata(Struct, frozen=True):
    """Who can be reached, on which host, with which storages; `blob` is the library's own. `more` is said by whoever is around
    the transport, to whoever is around the other: the transport takes no notice of it. `process`: said by an end that is
    reached through shared memory alone; the first release refuses metadata that has it, and could not reach such an end. Fields
    that a newer release adds are ignored, and are not under the digest."""

    carrier: Name
    name: Name
    host: Name
    storages: Annotated[tuple[StorageEntry, ...], Meta(max_length=65536)]
    blob: bytes
    digest: bytes = b""
    version: Literal[1] = METADATA_VERSION
    more: Annotated[bytes, Meta(max_length=4096)] = b""
    process: Process | UnsetType = UNSET

    def sealed(self) -> Metadata:
        return msgspec.structs.replace(self, digest=self._digest())

    def _digest(self) -> bytes:
        return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(self, digest=b""))).digest()

    @property
    def intact(self) -> bool:
        return self.digest == self._digest()


_METADATA: Final = msgspec.msgpack.Decoder(Metadata)
"""Made here and not where it is used, as are all that several threads may need: msgspec looks into a type when it is first
decoded, and another thread that decodes one meanwhile ends the process."""


def encode_metadata(metadata: Metadata) -> bytes:
    return msgspec.msgpack.encode(metadata.sealed())


def decode_metadata(data: bytes, carrier: str) -> Metadata:
    """Read a peer's metadata, or say what is wrong with it."""
    found = open_metadata(data)
    if found.carrier != carrier:
        raise TransportError(f"peer {found.name} speaks {found.carrier}, this end {carrier}; use the same transport on both")
    return found


def refuse_elsewhere(data: bytes) -> None:
    """A peer that nobody vouches for is reached on this host or not at all, whatever its library's words would lead to."""
    found = open_metadata(data)
    if found.host != this_host():
        raise TransportError(
            f"peer {found.name} is on another host, and without a key none there is read from: "
            f"set key_file to a file that all sides hold"
        )


def open_metadata(data: bytes) -> Metadata:
    """Read a peer's metadata whatever carries it."""
    if len(data) > MAX_METADATA_BYTES:
        raise TransportError(f"peer metadata of {len(data):,} bytes; at most {MAX_METADATA_BYTES:,} are accepted")
    try:
        found = _METADATA.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise TransportError(
            f"these {len(data):,} bytes are not a peer's metadata ({error}); send what metadata() gave"
        ) from None
    if not found.intact:
        raise TransportError(f"the metadata of peer {found.name} arrived damaged; fetch it again")
    return found


def this_host() -> str:
    """The same for processes under one kernel, another after a reboot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
