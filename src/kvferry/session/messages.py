"""What two sides say to each other over the session's channel; encoding, a size cap, and one error for what is wrong.

    consumer                         producer
    Hello                     -->
                              <--    Welcome (the cards of all ranks), or Refusal with the reason
    Renew (leases in use)     -->            the deadlines of those that live move on
    Release (a lease)         -->            the lease ends, whether its blocks were read or not
    Seek (a prompt)           -->
                              <--    Found (its reference, if it came together with one that the consumer knows)

Renew and Release have no answer: both may be repeated, and a lost one costs no more than waiting for the deadline.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvferry.errors import DecodeError
from kvferry.manifest.schema import Label, Manifest, Name
from kvferry.session.reference import Lease, Reference

SESSION_VERSION: Final = 1
MAX_REQUEST: Final = 1 << 14
MAX_WELCOME: Final = 1 << 28
MAX_LEASES: Final = 1 << 8
ENCRYPTED: Final = 64
"""Bytes by which a frame may grow when it is encrypted, and more: ZeroMQ's limit is on what it takes in."""


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
    """The first message; `engine` and `incarnation` are the consumer's, for the producer's log."""

    engine: Name
    incarnation: Name
    version: int = SESSION_VERSION


class Welcome(Struct, frozen=True, tag="welcome"):
    """`role` is what the engine is, one of those above; empty where it does not say. Newer engines may be something else.
    `grace_s`: how long after a lease has ended its blocks are still left alone."""

    engine: Name
    incarnation: Name
    lease_s: Annotated[float, Meta(gt=0)]
    cards: Annotated[tuple[Card, ...], Meta(min_length=1, max_length=4096)]
    version: int = SESSION_VERSION
    role: Label = ""
    grace_s: Annotated[float, Meta(ge=0, le=10)] = 0.0


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


T = TypeVar("T")

Request = Hello | Renew | Release | Seek
Reply = Welcome | Refusal | Found

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def pack(message: Request | Reply) -> bytes:
    """Refuses what the other side would refuse for its size."""
    data = msgspec.msgpack.encode(message)
    cap = MAX_WELCOME if isinstance(message, Reply) else MAX_REQUEST
    if len(data) > cap:
        raise DecodeError(f"a {type(message).__name__} of {len(data):,} bytes is not sent: the other side takes {cap:,}")
    return data


def unpack_request(data: bytes) -> Request:
    return _unpack(_REQUESTS, data, MAX_REQUEST, "request")


def unpack_reply(data: bytes) -> Reply:
    return _unpack(_REPLIES, data, MAX_WELCOME, "reply")


def _unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes, most: int, noun: str) -> T:
    if len(data) > most:
        raise DecodeError(f"a {noun} of {len(data):,} bytes is refused: the cap is {most:,}")
    try:
        return decoder.decode(data)
    except _ERRORS as error:
        raise DecodeError(f"not a {noun} this version accepts: {error}") from None
