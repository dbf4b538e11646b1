"""What two sides say to each other over the session's channel; encoding, a size cap, and one error for what is wrong.

    consumer                         producer
    Hello                     -->
                              <--    Welcome (the cards of all ranks), or Refusal with the reason
    Renew (leases in use)     -->            the deadlines of those that live move on
    Release (a lease)         -->            the lease ends, whether its blocks were read or not
    Seek (a prompt)           -->
                              <--    Found (its reference, if it came together with one that the consumer knows)

Renew and Release have no answer: both may be repeated, and a lost one costs no more than waiting for the deadline.

Hello, Welcome and Refusal carry `versions` beside their fields: the lowest and the highest version of the session that their
side speaks. It is read first, whatever else the message holds, so that two releases that have no version in common tell each
other so in words. The highest common version is spoken. A greeting of the first release has `version` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from kvferry.errors import DecodeError
from kvferry.manifest.schema import Label, Manifest, Name
from kvferry.session.reference import Lease, Reference

MAX_REQUEST: Final = 1 << 14
MAX_WELCOME: Final = 1 << 28
MAX_LEASES: Final = 1 << 8
ENCRYPTED: Final = 64
"""Bytes by which a frame may grow when it is encrypted, and more: ZeroMQ's limit is on what it takes in."""

Version = Annotated[int, Meta(ge=0)]


class Versions(Struct, frozen=True, array_like=True):
    """The lowest and the highest version of the session that a side speaks."""

    lowest: Version
    highest: Version

    def common(self, other: Versions) -> int | None:
        """The highest version that both sides speak; None if they have none in common."""
        highest = min(self.highest, other.highest)
        return highest if highest >= max(self.lowest, other.lowest) else None

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.lowest, self.highest + 1))

    def __contains__(self, version: int) -> bool:
        return self.lowest <= version <= self.highest

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


SPOKEN: Final = Versions(1, 1)
"""What this release speaks. A version that was released once is dropped only with a line in the changelog."""


class _Greeting(Struct, frozen=True):
    """What is read of a message before anything else is. These fields never change their meaning."""

    versions: Versions | None = None
    version: Version | None = None


class Card(Struct, frozen=True):
    """One rank: what its caches hold, where its words lie, and how the transport reaches it (a bearer secret). `beacon` is what
    stands at the last of the words; 0 where nothing is said of it."""

    caches: Manifest
    words: Manifest
    transport: Annotated[bytes, Meta(max_length=1 << 20)]
    beacon: Annotated[int, Meta(le=0, ge=-(1 << 63))] = 0


PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"
BOTH: Final = "both"


class Hello(Struct, frozen=True, tag="hello"):
    """The first message; `engine` and `incarnation` are the consumer's, for the producer's log. `version`: the lowest that the
    consumer speaks."""

    engine: Name
    incarnation: Name
    version: Version = SPOKEN.lowest


class Welcome(Struct, frozen=True, tag="welcome"):
    """`version`: the one that is spoken from now on, the highest common one.
    `role` is what the engine is, one of those above; empty where it does not say. Newer engines may be something else."""

    engine: Name
    incarnation: Name
    lease_s: Annotated[float, Meta(gt=0)]
    cards: Annotated[tuple[Card, ...], Meta(min_length=1, max_length=4096)]
    version: Version = SPOKEN.highest
    role: Label = ""


class Refusal(Struct, frozen=True, tag="refusal"):
    reason: Annotated[str, Meta(max_length=4096)]


class Renew(Struct, frozen=True, tag="renew"):
    incarnation: Name
    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_LEASES)]


class Release(Struct, frozen=True, tag="release"):
    """`reader` says which consumer, and `note` how it went."""

    incarnation: Name
    lease: Lease
    reader: Name
    note: Label = ""


class Seek(Struct, frozen=True, tag="seek"):
    """Which reference is of the prompt with this digest? `lease` is of one that came in the same request."""

    incarnation: Name
    lease: Lease
    digest: Name


class Found(Struct, frozen=True, tag="found"):
    reference: Reference | None = None


class _SentHello(Hello, frozen=True, tag="hello"):
    versions: Versions = SPOKEN


class _SentWelcome(Welcome, frozen=True, tag="welcome"):
    versions: Versions = SPOKEN


class _SentRefusal(Refusal, frozen=True, tag="refusal"):
    versions: Versions = SPOKEN


class VersionError(DecodeError):
    """A greeting of a side that speaks no version of the session that this side speaks."""


T = TypeVar("T")

Request = Hello | Renew | Release | Seek
Reply = Welcome | Refusal | Found

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_GREETINGS: msgspec.msgpack.Decoder[_Greeting] = msgspec.msgpack.Decoder(_Greeting)
_SENT: Final[dict[type[Struct], Callable[..., Struct]]] = {Hello: _SentHello, Welcome: _SentWelcome, Refusal: _SentRefusal}
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def pack(message: Request | Reply) -> bytes:
    """A greeting goes with the versions that this side speaks. Refuses what the other side would refuse for its size."""
    sent = _SENT.get(type(message))
    data = msgspec.msgpack.encode(sent(**structs.asdict(message), versions=SPOKEN) if sent is not None else message)
    cap = MAX_WELCOME if isinstance(message, Reply) else MAX_REQUEST
    if len(data) > cap:
        raise DecodeError(f"a {type(message).__name__} of {len(data):,} bytes is not sent: the other side takes {cap:,}")
    return data


def versions_of(data: bytes) -> Versions | None:
    """What the side speaks that sent this; None where it does not say, and of what is no message at all."""
    try:
        found = _GREETINGS.decode(data)
    except _ERRORS:
        return None
    if found.versions is not None:
        return found.versions
    return Versions(found.version, found.version) if found.version is not None else None


def unpack_request(data: bytes) -> Request:
    """Raises VersionError for a greeting of a consumer that speaks no version that is spoken here."""
    theirs = versions_of(data) if len(data) <= MAX_REQUEST else None
    if theirs is not None:
        _insist_on_a_common_version(consumer=theirs, producer=SPOKEN)
    return _unpack(_REQUESTS, data, MAX_REQUEST, "request")


def unpack_reply(data: bytes) -> Reply:
    """Raises VersionError for a greeting of a producer that speaks no version that is spoken here."""
    theirs = versions_of(data) if len(data) <= MAX_WELCOME else None
    if theirs is not None:
        _insist_on_a_common_version(consumer=SPOKEN, producer=theirs)
    return _unpack(_REPLIES, data, MAX_WELCOME, "reply")


def _insist_on_a_common_version(consumer: Versions, producer: Versions) -> None:
    if consumer.common(producer) is None:
        older = "consumer" if consumer.highest < producer.lowest else "producer"
        raise VersionError(
            f"the consumer speaks version {consumer} of the session, the producer {producer}: "
            f"there is none in common; update kvferry at the {older}"
        )


def _unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes, most: int, noun: str) -> T:
    if len(data) > most:
        raise DecodeError(f"a {noun} of {len(data):,} bytes is refused: the cap is {most:,}")
    try:
        return decoder.decode(data)
    except _ERRORS as error:
        raise DecodeError(f"not a {noun} this version accepts: {error}") from None
