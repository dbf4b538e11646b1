"""What the first release reads of a session's messages, as it was then: it stays as it is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvferry.manifest.schema import Index, Label, Manifest, Name

Generation = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Lease(Struct, frozen=True, forbid_unknown_fields=True):
    slot: Index
    generation: Generation


class Card(Struct, frozen=True):
    caches: Manifest
    words: Manifest
    transport: Annotated[bytes, Meta(max_length=1 << 20)]
    beacon: Annotated[int, Meta(le=0, ge=-(1 << 63))] = 0


class Hello(Struct, frozen=True, tag="hello"):
    engine: Name
    incarnation: Name
    version: int = 1


class Welcome(Struct, frozen=True, tag="welcome"):
    engine: Name
    incarnation: Name
    lease_s: Annotated[float, Meta(gt=0)]
    cards: Annotated[tuple[Card, ...], Meta(min_length=1, max_length=4096)]
    version: int = 1
    role: Label = ""
    grace_s: Annotated[float, Meta(ge=0, le=10)] = 0.0


class Refusal(Struct, frozen=True, tag="refusal"):
    reason: Annotated[str, Meta(max_length=4096)]


class Renew(Struct, frozen=True, tag="renew"):
    incarnation: Name
    leases: Annotated[tuple[Lease, ...], Meta(max_length=256)]


class Release(Struct, frozen=True, tag="release"):
    incarnation: Name
    lease: Lease
    reader: Name
    note: Label = ""


class Seek(Struct, frozen=True, tag="seek"):
    incarnation: Name
    lease: Lease
    digest: Name


Request = Hello | Renew | Release | Seek
Reply = Welcome | Refusal
