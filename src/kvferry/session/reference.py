"""What a consumer needs to know of one prefilled request: where it lies, until when it may be read, and what it is.

A reference travels through routers as plain JSON. Nothing in it is trusted: blocks are checked against the manifest, the
lease against the word in the producer's memory, the content against the digest of the consumer's own request.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from kvferry.errors import BadReferenceError, SessionError
from kvferry.manifest.schema import Count, Index, Name
from kvferry.session.key import is_loopback, split_address

REFERENCE_VERSION: Final = 1
SEAL: Final = "seal"
MAX_GENERATION: Final = (1 << 63) - 1
MAX_GROUPS: Final = 256
MAX_TOKENS: Final = 1 << 22

Generation = Annotated[int, Meta(ge=1, le=MAX_GENERATION)]
BlockId = Annotated[int, Meta(ge=-1, le=(1 << 40))]
Blocks = Annotated[list[BlockId], Meta(max_length=MAX_TOKENS)] | BlockId
GroupId = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,8})\Z")]
HostPort = Annotated[str, Meta(pattern=r"^\[?[0-9A-Za-z_.:%-]+\]?:[0-9]{1,5}\Z", max_length=256)]

_SHOWN: Final = 300
_TWO: Final = struct.Struct("<qq")
_HELD: Final = 2047
"""Bytes that Python hashes without letting go of its lock. Who lets go of it while others wait for it, as the engine's thread
would here, has it back after milliseconds: `hmac.digest`, which always does, took 3.8 ms beside another thread, not 0.01."""
_BEYOND: Final = 64
"""Tokens past those that are wanted which it costs less to encode with them than to leave out by a copy of the others."""


class Lease(Struct, frozen=True, forbid_unknown_fields=True):
    """A producer's promise to leave blocks alone while the word at `slot` of every rank reads `generation`."""

    slot: Index
    generation: Generation


class Reference(Struct, frozen=True):
    """One prefilled request at a producer: `tokens` tokens in `blocks`, by group: ids by place in the sequence, or the one
    block of a state. Newer producers may add fields; a change of meaning changes `version`."""

    address: HostPort
    engine: Name
    incarnation: Name
    request: Name
    lease: Lease
    tokens: Count
    blocks: Annotated[dict[GroupId, Blocks], Meta(max_length=MAX_GROUPS)]
    digest: Name
    version: int = REFERENCE_VERSION

    @property
    def tables(self) -> dict[int, list[int] | int]:
        return {int(group): blocks for group, blocks in self.blocks.items()}


def digest(
    tokens: Sequence[int],
    *,
    count: int | None = None,
    adapter: str = "",
    media: Sequence[tuple[str, int]] = (),
    salt: str = "",
) -> str:
    """What was prefilled: token ids, of which the first `count` if that is given, adapter, media as (identity, place), salt.
    Equal for equal prefixes only."""
    given = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
    count = len(given) if count is None else min(count, len(given))
    state = hashlib.blake2b(_TWO.pack(count, len(media)), digest_size=16)
    _feed_first(state.update, given, count)
    told: list[bytes] = []
    for text, place in ((adapter, 0), (salt, 0), *media):
        said = text.encode("utf-8", "surrogatepass")
        told += (_TWO.pack(place, len(said)), said)
    _feed(state.update, b"".join(told))
    return state.hexdigest()


def _feed_first(update: Callable[[bytes | memoryview], None], tokens: Sequence[int], count: int) -> None:
    """The first tokens, as msgpack has a list of them. One that is hardly longer is encoded whole and cut: a copy would touch
    every number once more, and they lie about in memory."""
    beyond = len(tokens) - count
    if beyond > _BEYOND or not beyond:
        _feed(update, msgspec.msgpack.encode(tokens[:count] if beyond else tokens))
        return
    whole, rest = msgspec.msgpack.encode(tokens), msgspec.msgpack.encode(tokens[count:])
    end = len(whole) - (len(rest) - len(_heading(beyond)))
    update(_heading(count))
    _feed(update, memoryview(whole)[len(_heading(len(tokens))) : end])


def _heading(count: int) -> bytes:
    """What msgpack has before the items of a list."""
    if count < 1 << 4:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def to_params(reference: Reference, secret: bytes = b"") -> dict[str, Any]:
    """As JSON-like values under a seal; the generation as text, since not every router keeps 63 bits of a number."""
    out: dict[str, Any] = msgspec.to_builtins(reference)
    out["lease"]["generation"] = str(reference.lease.generation)
    out[SEAL] = seal(reference, secret)
    return out


def seal(reference: Reference, secret: bytes = b"") -> str:
    """Of everything the reference says. It finds damage that would pass for sound, such as the number of another block; with
    the cluster's secret, forgery too."""
    state = _keyed(secret).copy()
    _feed(state.update, msgspec.json.encode(reference, order="sorted"))
    return state.hexdigest()[:32]


@lru_cache(maxsize=16)
def _keyed(secret: bytes) -> hmac.HMAC:
    """To be copied; a process has one secret, or none."""
    return hmac.new(b"kvferry reference " + secret, digestmod="sha256")


def _feed(update: Callable[[bytes | memoryview], None], data: bytes | memoryview) -> None:
    for at in range(0, len(data), _HELD):
        update(data[at : at + _HELD])


def from_params(params: object, secret: bytes = b"", most: int = MAX_TOKENS) -> Reference:
    """Read what a router relayed; raises BadReferenceError saying which field is wrong. Without a secret anybody may have made
    it, and it is believed of this machine only. With more than `most` blocks in a group, as many as a prompt may have tokens,
    it is not read at all: the engine waits for us."""
    if not isinstance(params, Mapping):
        raise BadReferenceError("the reference is not an object; routers must relay kv_transfer_params as they are")
    version = params.get("version")
    if version != REFERENCE_VERSION:
        said = str(version) if isinstance(version, int) and 0 <= version < 1 << 32 else "none that there is"
        raise BadReferenceError(f"the reference's version is {said}; this side reads version {REFERENCE_VERSION}")
    _check_length(params.get("blocks"), most)
    lease = params.get("lease")
    if isinstance(lease, Mapping) and isinstance(lease.get("generation"), str) and lease["generation"].isdecimal():
        if len(lease["generation"]) > 19:
            raise BadReferenceError("the reference's generation is longer than 63 bits")
        params = {**params, "lease": {**lease, "generation": int(lease["generation"])}}
    try:
        found = msgspec.convert(params, Reference)
        for text in (found.engine, found.incarnation, found.request, found.digest):
            text.encode()
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        raise BadReferenceError(f"the reference is damaged: {str(error)[:_SHOWN]}") from None
    if not _sealed(params.get(SEAL), seal(found, secret)):
        raise BadReferenceError(
            "the reference is not as it was given out, or under another key; routers must relay kv_transfer_params as they are"
        )
    _check_address(found.address, secret)
    return found


def _check_length(blocks: object, most: int) -> None:
    if not isinstance(blocks, Mapping):
        return
    longest = 0
    for table in islice(blocks.values(), MAX_GROUPS):
        if isinstance(table, list) and len(table) > longest:
            longest = len(table)
    if len(blocks) > MAX_GROUPS or longest > most:
        raise BadReferenceError(
            f"the reference is damaged: it has {len(blocks)} groups with up to {longest} blocks; "
            f"a prompt of {most} tokens has {MAX_GROUPS} groups with {most} blocks at most"
        )


def _sealed(said: object, wanted: str) -> bool:
    """In a time that does not tell how much of a guess was right."""
    return isinstance(said, str) and hmac.compare_digest(said.encode("utf-8", "surrogatepass"), wanted.encode())


def _check_address(address: str, secret: bytes) -> None:
    try:
        host, port = split_address(address)
    except SessionError as error:
        raise BadReferenceError(f"the reference is damaged: {error}") from None
    if not port:
        raise BadReferenceError(f"the reference is damaged: nobody can listen at {address}")
    if not secret and not is_loopback(host):
        raise BadReferenceError(
            f"the reference names {host}, and without a key none is believed that leads beyond this machine: "
            f"set key_file to the same file on both sides"
        )
