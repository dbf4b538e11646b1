"""One rank's end, whatever carries the bytes: memory that can be mapped is, everything else goes by descriptors.

To whoever reads it is a transport like any other, with the same promises; which way a peer is read is decided when it is
connected, by trying, and said once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET, Struct

from kvferry.errors import TransportError
from kvferry.plan import Plan, Tiles
from kvferry.strategy.mapped import Mapped, MappedPrepared, MappedRead, PeerGoneError, Token, Tokens
from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry, Transport, read_together
from kvferry.transport.metadata import Metadata, decode_metadata, encode_metadata, open_metadata, this_host

logger = logging.getLogger("kvferry.strategy")


CARRIER: Final = "strategies"


class _Ways(Struct, frozen=True, array_like=True):
    """How a rank can be read: over the transport, and, where `tokens` say how, by mapping its memory. Newer releases may add
    ways, at the end."""

    direct: bytes
    tokens: Tokens = ()


_WAYS: Final = msgspec.msgpack.Decoder(_Ways)


@dataclass(frozen=True)
class _Known:
    """A peer whose memory is mapped, and how the transport reaches it."""

    digest: bytes
    direct: bytes


def stays_here(metadata: bytes) -> bool:
    """Whether the end that exported this is reached through memory of its machine alone, by whatever it says it can be read."""
    found = open_metadata(metadata)
    if found.carrier == CARRIER:
        try:
            found = open_metadata(_WAYS.decode(found.blob).direct)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise TransportError(f"peer {found.name} does not say how it is read ({error}); fetch its metadata again") from None
    return found.process is not UNSET


class Strategies:
    """`direct` carries what cannot be mapped, and notifications; `mapped` None: everything goes by descriptors."""

    def __init__(self, direct: Transport, mapped: Mapped | None = None) -> None:
        self._direct, self._mapped = direct, mapped
        self._tokens: list[Token] | None = []
        self._known: dict[str, _Known] = {}
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
        ways = _Ways(self._direct.metadata(), tuple(self._tokens or ()))
        return encode_metadata(Metadata(CARRIER, self.name, this_host(), (), msgspec.msgpack.encode(ways)))

    def connect(self, metadata: bytes) -> str:
        found = decode_metadata(metadata, CARRIER)
        known = self._known.get(found.name)
        if known is not None and known.digest != found.digest:
            raise TransportError(f"peer {found.name} is connected with other metadata; forget it, then connect again")
        try:
            ways = _WAYS.decode(found.blob)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise TransportError(f"peer {found.name} does not say how it is read ({error}); fetch its metadata again") from None
        if self._mapped is not None and ways.tokens:
            try:
                self._mapped.connect(found.name, ways.tokens)
            except PeerGoneError:
                raise
            except TransportError as error:
                self._say(f"memory of peer {found.name} cannot be mapped ({error}): it is read by descriptors")
            else:
                self._known[found.name] = _Known(found.digest, ways.direct)
                return found.name
        return self._direct.connect(ways.direct)

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            logger.info("%s", words)

    def prepare(self, plan: Plan, source: int, peer: str) -> Prepared:
        """Mapped, where the peer is and the plan can be; what cannot is the transport's, to carry or to refuse."""
        if self._mapped is not None and self._mapped.connected(peer):
            try:
                return self._mapped.prepare(plan, source, peer)
            except TransportError as error:
                self._say(f"a plan that reads peer {peer} cannot be mapped ({error}): it is read by descriptors")
                self._reach(peer)
        return self._direct.prepare(plan, source, peer)

    def read(self, prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], notification: bytes = b"") -> Read:
        if self._mapped is None or not isinstance(prepared, MappedPrepared):
            return self._direct.read(prepared, tiles, notification)
        return self._mapped.read(prepared, tiles, notification)

    def read_together(self, prepared: Prepared, loads: Sequence[Mapping[tuple[int, int], Tiles]]) -> Iterator[Read]:
        """Several loads, where they can be by one launch."""
        if self._mapped is None or not isinstance(prepared, MappedPrepared):
            yield from read_together(self._direct, prepared, loads)
        else:
            yield from self._mapped.read_together(prepared, loads)

    def poll(self, read: Read) -> State:
        if self._mapped is None or not isinstance(read, MappedRead):
            return self._direct.poll(read)
        before = read.state
        if self._mapped.poll(read) is State.DONE and before is State.RUNNING and read.notification:
            try:
                self.notify(read.peer, read.notification)
            except TransportError as error:
                read.fail(f"all bytes arrived, but it cannot be notified: {error}")
        return read.state

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
        self._reach(peer)
        self._direct.notify(peer, message)

    def _reach(self, peer: str) -> None:
        known = self._known.get(peer)
        if known is not None and (found := self._direct.connect(known.direct)) != peer:
            raise TransportError(f"peer {peer} sends metadata of {found}; fetch its own")

    def notifications(self) -> list[tuple[str, bytes]]:
        for name in self._mapped.look() if self._mapped is not None else ():
            self._leave(name)
        return self._direct.notifications()

    def path(self, peer: str) -> Path:
        if self._mapped is not None and self._mapped.connected(peer):
            return self._mapped.path(peer)
        return self._direct.path(peer)

    def forget(self, peer: str) -> None:
        if self._mapped is not None:
            self._mapped.forget(peer)
        self._leave(peer)

    def _leave(self, peer: str) -> None:
        self._known.pop(peer, None)
        self._direct.forget(peer)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
        self._direct.close()
