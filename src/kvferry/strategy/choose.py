"""One rank's end, whatever carries the bytes: memory that can be mapped is, everything else goes by descriptors.

To whoever reads it is a transport like any other, with the same promises; which way a peer is read is decided when it is
connected, by trying, and said once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvferry.errors import TransportError
from kvferry.manifest.schema import Name
from kvferry.plan import Plan, Tiles
from kvferry.strategy.mapped import Mapped, MappedPrepared, MappedRead, Token, Tokens
from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry, Transport
from kvferry.transport.metadata import MAX_METADATA_BYTES

logger = logging.getLogger("kvferry.strategy")


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank can be read: over the transport, and, where `tokens` say how, by mapping its memory."""

    name: Name
    direct: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
    tokens: Tokens = ()


class Strategies:
    """`direct` carries what cannot be mapped, and notifications; `mapped` None: everything goes by descriptors."""

    def __init__(self, direct: Transport, mapped: Mapped | None = None) -> None:
        self._direct, self._mapped = direct, mapped
        self._tokens: list[Token] | None = []
        self._metadata: dict[str, Metadata] = {}
        self._said: set[str] = set()

    @property
    def name(self) -> str:
        return self._direct.name

    def register(self, storages: Sequence[Storage]) -> None:
        """Others map all of this rank's storages, or none: a plan may read any of them."""
        self._direct.register(storages)
        if self._mapped is None:
            return
        try:
            found = self._mapped.register(storages)
        except TransportError as error:
            self._say(f"memory here cannot be mapped by others ({error}): it is read by descriptors")
            self._tokens = None
        else:
            if self._tokens is not None:
                self._tokens += found

    def metadata(self) -> bytes:
        tokens = tuple(self._tokens or ())
        return msgspec.msgpack.encode(Metadata(self.name, self._direct.metadata(), tokens))

    def connect(self, metadata: bytes) -> str:
        try:
            found = msgspec.msgpack.decode(metadata, type=Metadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise TransportError(f"these {len(metadata):,} bytes are not a peer's metadata ({error}); fetch it again") from None
        if self._mapped is not None and found.tokens:
            try:
                self._mapped.connect(found.name, found.tokens)
                self._metadata[found.name] = found
                return found.name
            except TransportError as error:
                self._say(f"memory of peer {found.name} cannot be mapped ({error}): it is read by descriptors")
        return self._direct.connect(found.direct)

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            logger.info("%s", words)

    def _is_mapped(self, name: str) -> bool:
        return self._mapped is not None and self._mapped.connected(name)

    def prepare(self, plan: Plan, source: int, peer: str) -> Prepared:
        if self._mapped is not None and self._is_mapped(peer):
            return self._mapped.prepare(plan, source, peer)
        return self._direct.prepare(plan, source, peer)

    def read(self, prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], notification: bytes = b"") -> Read:
        if self._mapped is None or not isinstance(prepared, MappedPrepared):
            return self._direct.read(prepared, tiles, notification)
        return self._mapped.read(prepared, tiles, notification)

    def poll(self, read: Read) -> State:
        if self._mapped is None or not isinstance(read, MappedRead):
            return self._direct.poll(read)
        before = read.state
        state = self._mapped.poll(read)
        if state is State.DONE and before is State.RUNNING and read.notification:
            self.notify(read.peer, read.notification)
        return state

    def telemetry(self, read: Read) -> Telemetry:
        if self._mapped is None or not isinstance(read, MappedRead):
            return self._direct.telemetry(read)
        return self._mapped.telemetry(read)

    def release(self, read: Read) -> bool:
        if self._mapped is None or not isinstance(read, MappedRead):
            return self._direct.release(read)
        return self._mapped.release(read)

    def notify(self, peer: str, message: bytes) -> None:
        """Over the transport, to which a mapped peer is connected when there is something to say."""
        if peer in self._metadata:
            self._direct.connect(self._metadata[peer].direct)
        self._direct.notify(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        for name in self._mapped.look() if self._mapped is not None else ():
            self._leave(name)
        return self._direct.notifications()

    def path(self, peer: str) -> Path:
        if self._mapped is not None and self._is_mapped(peer):
            return self._mapped.path(peer)
        return self._direct.path(peer)

    def forget(self, peer: str) -> None:
        if self._mapped is not None:
            self._mapped.forget(peer)
        self._leave(peer)

    def _leave(self, peer: str) -> None:
        self._metadata.pop(peer, None)
        self._direct.forget(peer)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
        self._direct.close()
