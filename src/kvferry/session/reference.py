"""What a consumer needs to know of one prefilled request: where it lies, until when it may be read, and what it is.

A reference travels through routers as plain JSON. Nothing in it is trusted: blocks are checked against the manifest, the
lease against the word in the producer's memory, the content against the digest of the consumer's own request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvferry.errors import BadReferenceError
from kvferry.manifest.schema import Count, Index, Name

REFERENCE_VERSION: Final = 1
SEAL: Final = "seal"

Generation = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
BlockId = Annotated[int, Meta(ge=-1, le=(1 << 40))]
Blocks = Annotated[list[BlockId], Meta(max_length=1 << 22)] | BlockId


class Lease(Struct, frozen=True, forbid_unknown_fields=True):
    """A producer's promise to leave blocks alone while the word at `slot` of every rank reads `generation`."""

    slot: Index
    generation: Generation


class Reference(Struct, frozen=True):
    """One prefilled request at a producer: `tokens` tokens in `blocks`, by group: ids by place in the sequence, or the one
    block of a state. Newer producers may add fields; a change of meaning changes `version`."""

    address: Name
    engine: Name
    incarnation: Name
    request: Name
    lease: Lease
    tokens: Count
    blocks: dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Blocks]
    digest: Name
    version: int = REFERENCE_VERSION

    @property
    def tables(self) -> dict[int, list[int] | int]:
        return {int(group): blocks for group, blocks in self.blocks.items()}


def digest(tokens: Sequence[int], *, adapter: str = "", media: Sequence[tuple[str, int]] = (), salt: str = "") -> str:
    """What was prefilled: token ids, adapter, media as (identity, place), salt. Equal for equal prefixes only."""
    state = hashlib.sha256(np.asarray(tokens, np.int64).tobytes())
    state.update(msgspec.json.encode((len(tokens), adapter, list(media), salt)))
    return state.hexdigest()[:32]


def to_params(reference: Reference) -> dict[str, Any]:
    """As JSON-like values under a seal; the generation as text, since not every router keeps 63 bits of a number."""
    out: dict[str, Any] = msgspec.to_builtins(reference)
    out["lease"]["generation"] = str(reference.lease.generation)
    out[SEAL] = seal(out)
    return out


def seal(params: Mapping[str, Any]) -> str:
    """Of every field, whatever their order. It keeps no secret: it finds damage, such as another block in the range of ids."""
    kept = {name: value for name, value in params.items() if name != SEAL}
    return hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()[:32]


def from_params(params: object) -> Reference:
    """Read what a router relayed; raises BadReferenceError saying which field is wrong."""
    if not isinstance(params, Mapping):
        raise BadReferenceError("the reference is not an object; routers must relay kv_transfer_params as they are")
    version = params.get("version")
    if version != REFERENCE_VERSION:
        raise BadReferenceError(f"a reference of version {version!r}; this side reads version {REFERENCE_VERSION}")
    sent, lease = params, params.get("lease")
    if isinstance(lease, Mapping) and isinstance(lease.get("generation"), str) and lease["generation"].isdecimal():
        if len(lease["generation"]) > 19:
            raise BadReferenceError("the reference's generation is longer than 63 bits")
        params = {**params, "lease": {**lease, "generation": int(lease["generation"])}}
    try:
        reference = msgspec.convert(params, Reference)
        whole = sent.get(SEAL) == seal(sent)
    except (msgspec.ValidationError, msgspec.EncodeError, TypeError, RecursionError, OverflowError) as error:
        raise BadReferenceError(f"the reference is damaged: {error}") from None
    if not whole:
        raise BadReferenceError("the reference is not as it was given out; routers must relay kv_transfer_params as they are")
    return reference
