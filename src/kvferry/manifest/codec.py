"""Manifests and plans as bytes: msgpack with a version, a size cap, and one error type for whatever is wrong.

Decoding checks types and numbers; whether a manifest makes sense is `check`'s business.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

from kvferry.errors import DecodeError

MAX_ENCODED: Final = 1 << 20

T = TypeVar("T")

_MAKING: Final = threading.Lock()
_DECODERS: Final[dict[type[Any], msgspec.msgpack.Decoder[Any]]] = {}


def encode(value: msgspec.Struct) -> bytes:
    """Encode a manifest or a plan; refuses what a peer would refuse for its size."""
    data = msgspec.msgpack.encode(value)
    if len(data) > MAX_ENCODED:
        raise DecodeError(
            f"this {type(value).__name__.lower()} takes {len(data):,} bytes encoded; a peer accepts at most {MAX_ENCODED:,}"
        )
    return data


def decode(data: bytes, kind: type[T]) -> T:
    """Decode one `kind`, or raise DecodeError saying where it goes wrong."""
    noun = kind.__name__.lower()
    if len(data) > MAX_ENCODED:
        raise DecodeError(f"a {noun} of {len(data):,} bytes is refused: the cap is {MAX_ENCODED:,}")
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise DecodeError(f"not a {noun} this version accepts: {error}") from None


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Made by one thread at a time: another that decodes a type while it is looked into for the first time ends the process."""
    with _MAKING:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
        return _DECODERS[kind]
