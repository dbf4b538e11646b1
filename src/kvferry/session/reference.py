"""What a consumer needs to know of one prefilled request: where it lies, until when it may be read, and what it is.

A reference travels through routers as plain JSON. Nothing in it is trusted: blocks are checked against the manifest, the
lease against the word in the producer's memory, the content against the digest of the consumer's own request.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from kvferry.errors import BadReferenceError, SessionError
from kvferry.manifest.schema import Count, Index, Name
from kvferry.session.key import Key, Keys, is_loopback, split_address

REFERENCE_VERSION: Final = 1
SEAL: Final = "seal"
MAX_GENERATION: Final = (1 << 63) - 1
MAX_GROUPS: Final = 256
MAX_TOKENS: Final = 1 << 22

Generation = Annotated[int, Meta(ge=1, le=MAX_GENERATION)]
BlockId = Annotated[int, Meta(ge=-1, le=(1 << 40))]
Blocks = Annotated[list[BlockId], Meta(max_length=MAX_TOKENS)] | BlockId
GroupId = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,8})\Z")]
Tables = Annotated[dict[GroupId, Blocks], Meta(max_length=MAX_GROUPS)]
HostPort = Annotated[str, Meta(pattern=r"^\[?[0-9A-Za-z_.:%-]+\]?:[0-9]{1,5}\Z", max_length=256)]

FINEST: Final = 8
"""Tokens of the smallest blocks that another engine is taken to have, unless this one has smaller ones. vLLM's attention
backends have blocks of 16 and more."""

_SHOWN: Final = 300
_FIELDS: Final = 64
"""Newer producers may have some more than there are now."""
_HEADING: Final = 1 << 14
_NUMBER: Final = 16
"""Bytes of a block's number, or of a group's, with what is around it."""
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
    blocks: Tables
    digest: Name
    version: int = REFERENCE_VERSION

    @property
    def tables(self) -> dict[int, list[int] | int]:
        return {int(group): blocks for group, blocks in self.blocks.items()}


class _Heading(Struct, frozen=True):
    """A reference without its tables: a few hundred bytes, whatever the size of the rest."""

    address: HostPort
    engine: Name
    incarnation: Name
    request: Name
    lease: Lease
    tokens: Count
    digest: Name
    version: int


@dataclass(frozen=True)
class Sizes:
    """How many groups a reference may have, and how many blocks each."""

    groups: int
    blocks: int

    @classmethod
    def of(cls, longest: int, groups: int, blocks: Sequence[int]) -> Sizes:
        """For prompts of up to `longest` tokens, at an engine with so many groups, those of which grow with the prompt having
        `blocks` of so many tokens. Other engines have smaller blocks, down to FINEST, and further groups, for drafters."""
        return cls(min(MAX_GROUPS, 2 * groups + 2), -(-longest // max(1, min([FINEST, *blocks]))) + 1)

    @property
    def text(self) -> int:
        """Bytes of the JSON of the longest reference."""
        return _HEADING + self.groups * (self.blocks + 1) * _NUMBER

    def check(self, tables: Mapping[Any, Any]) -> None:
        """Lengths alone are looked at."""
        longest = 0
        if len(tables) <= self.groups:
            longest = max((len(table) for table in tables.values() if isinstance(table, (list, tuple, dict, str))), default=0)
        if len(tables) > self.groups or longest > self.blocks:
            seen = f"up to {longest:,} blocks" if longest else "blocks"
            raise BadReferenceError(
                f"the reference is damaged: it has {len(tables):,} groups with {seen}; the longest prompt that this engine "
                f"takes has {self.groups} groups with {self.blocks:,} blocks at most"
            )


ANY: Final = Sizes(MAX_GROUPS, MAX_TOKENS)


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


def to_params(reference: Reference, key: Key) -> dict[str, Any]:
    """As JSON-like values under a seal; the generation as text, since not every router keeps 63 bits of a number."""
    out: dict[str, Any] = msgspec.to_builtins(reference)
    out["lease"]["generation"] = str(reference.lease.generation)
    out[SEAL] = seal(reference, key)
    return out


def seal(reference: Reference, key: Key) -> str:
    """Of everything the reference says, with the cluster's secret. It finds forgery, and damage that would pass for sound, such
    as the number of another block."""
    return _sealed(msgspec.json.encode(reference, order="sorted"), key.secret)


def _sealed(said: bytes, secret: bytes) -> str:
    state = _keyed(secret).copy()
    _feed(state.update, said)
    return state.hexdigest()[:32]


@lru_cache(maxsize=16)
def _keyed(secret: bytes) -> hmac.HMAC:
    """To be copied; a process has one secret, or two."""
    return hmac.new(b"kvferry reference " + secret, digestmod="sha256")


def _feed(update: Callable[[bytes | memoryview], None], data: bytes | memoryview) -> None:
    for at in range(0, len(data), _HELD):
        update(data[at : at + _HELD])


def from_params(params: object, keys: Keys, sizes: Sizes = ANY) -> Reference:
    """Read what a router relayed; raises BadReferenceError saying which field is wrong. The engine waits for this: what is
    larger than `sizes`, or under no seal of ours, is refused before its tables are looked at."""
    if not isinstance(params, Mapping):
        raise BadReferenceError("the reference is not an object; routers must relay kv_transfer_params as they are")
    version = params.get("version")
    if version != REFERENCE_VERSION:
        said = str(version) if isinstance(version, int) and 0 <= version < 1 << 32 else "none that there is"
        raise BadReferenceError(f"the reference's version is {said}; this side reads version {REFERENCE_VERSION}")
    blocks = params.get("blocks")
    if len(params) > _FIELDS:
        raise BadReferenceError(f"the reference is damaged: it has {len(params):,} fields")
    if not isinstance(blocks, dict):
        raise BadReferenceError("the reference is damaged: its blocks are missing, or no object")
    sizes.check(blocks)
    heading = _heading_of(params)
    _check_seal({**msgspec.structs.asdict(heading), "blocks": blocks}, params.get(SEAL), keys, sizes.text)
    _check_address(heading.address, keys)
    try:
        tables = msgspec.convert(blocks, Tables)
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        raise BadReferenceError(f"the reference is damaged: blocks: {str(error)[:_SHOWN]}") from None
    return Reference(**msgspec.structs.asdict(heading), blocks=tables)


def rehearse(keys: Keys) -> None:
    """Open a reference of our own, once at the start: decoders and seals are made by their first use, which takes longer."""
    made = Reference("127.0.0.1:1", "engine", "start", "request", Lease(0, 1), 1, {"0": [0]}, "digest")
    from_params(to_params(made, keys.first), keys)


def _heading_of(params: Mapping[str, Any]) -> _Heading:
    lease = params.get("lease")
    generation = lease.get("generation") if isinstance(lease, Mapping) else None
    if isinstance(lease, Mapping) and isinstance(generation, str):
        if len(generation) > 19:
            raise BadReferenceError("the reference's generation is longer than 63 bits")
        if generation.isdecimal() and len(lease) == len(Lease.__struct_fields__):
            params = {**params, "lease": {**lease, "generation": int(generation)}}
    try:
        found = msgspec.convert(params, _Heading)
        for text in (found.engine, found.incarnation, found.request, found.digest):
            text.encode()
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        raise BadReferenceError(f"the reference is damaged: {str(error)[:_SHOWN]}") from None
    return found


def _check_seal(said: Mapping[str, Any], seal: object, keys: Keys, most: int) -> None:
    """Of what was said as it was said, which for a reference in order is what its producer sealed. Tables of numbers are no
    longer than `most`."""
    try:
        text = msgspec.json.encode(said, order="sorted")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError):
        text = b""
    sealed = [_sealed(text, key.secret) for key in keys.all] if 0 < len(text) <= most and isinstance(seal, str) else []
    if not isinstance(seal, str) or not _is_one_of(seal, sealed):
        raise BadReferenceError(
            "the reference is not as it was given out, or under another key; routers must relay kv_transfer_params as they "
            "are, and both sides need the same key_file"
        )


def _is_one_of(said: str, wanted: Sequence[str]) -> bool:
    """In a time that does not tell how much of a guess was right."""
    guess = said.encode("utf-8", "surrogatepass")
    return any(hmac.compare_digest(guess, one.encode()) for one in wanted)


def _check_address(address: str, keys: Keys) -> None:
    try:
        host, port = split_address(address)
    except SessionError as error:
        raise BadReferenceError(f"the reference is damaged: {error}") from None
    if not port:
        raise BadReferenceError(f"the reference is damaged: nobody can listen at {address}")
    if keys.local and not is_loopback(host):
        raise BadReferenceError(
            f"the reference names {host}, and without a key none is believed that leads beyond this machine: "
            f"set key_file to the same file on both sides"
        )
