"""The vocabulary of a manifest: what one rank's cache memory holds and where, as pure data.

Nothing here knows a layer kind or a transfer. Struct fields that change the meaning of bytes refuse unknown fields;
`Identity` and `Manifest` ignore them, so that a newer peer may add remarks (docs/formats.md, "schema evolution").
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

SCHEMA_VERSION: Final = 1
HOLE: Final = -1

MAX_BYTES: Final = 1 << 50
MAX_COUNT: Final = 1 << 40

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Label = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Index = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Offset = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digit = tuple[Count, Offset]
Digits = Annotated[tuple[Digit, ...], Meta(max_length=16)]

DTYPE_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float32": 4,
    "int32": 4,
    "float64": 8,
    "int64": 8,
}


class Rank(Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's place in its engine."""

    tp: Index = 0
    tp_size: Count = 1
    pp: Index = 0
    pp_size: Count = 1

    @property
    def ordinal(self) -> int:
        return self.pp * self.tp_size + self.tp

    def __str__(self) -> str:
        return f"tp{self.tp}/{self.tp_size} pp{self.pp}/{self.pp_size}"


class Identity(Struct, frozen=True):
    """Who publishes a manifest: engine, its incarnation (new at each start), model fingerprint, rank."""

    engine: Name
    incarnation: Name
    model: Name
    rank: Rank = Rank()

    def __str__(self) -> str:
        return f"{self.engine} {self.rank}"


class Region(Struct, frozen=True, forbid_unknown_fields=True):
    """One registered stretch of memory."""

    name: Name
    length: Offset
    address: Address = 0
    memory: Literal["dram", "vram"] = "dram"
    device: Index = 0


class Full(Struct, frozen=True, forbid_unknown_fields=True, tag="full"):
    """Every earlier token is in reach."""

    def first_needed(self, tokens: int) -> int:
        return 0

    def covers(self, other: Reach) -> bool:
        return True


class Window(Struct, frozen=True, forbid_unknown_fields=True, tag="window"):
    """The last `tokens` tokens, the one being computed included."""

    tokens: Count

    def first_needed(self, tokens: int) -> int:
        return max(0, tokens - self.tokens + 1)

    def covers(self, other: Reach) -> bool:
        return not isinstance(other, Full) and other.tokens <= self.tokens


class Chunk(Struct, frozen=True, forbid_unknown_fields=True, tag="chunk"):
    """The tokens of the same aligned chunk of `tokens` tokens."""

    tokens: Count

    def first_needed(self, tokens: int) -> int:
        return tokens // self.tokens * self.tokens

    def covers(self, other: Reach) -> bool:
        if isinstance(other, Chunk):
            return self.tokens % other.tokens == 0
        return isinstance(other, Window) and other.tokens == 1


Reach = Full | Window | Chunk
FULL: Final = Full()


class Cyclic(Struct, frozen=True, forbid_unknown_fields=True):
    """Token ownership dealt round robin over context-parallel ranks; declared here, not yet planned."""

    rank: Index
    size: Count
    tokens: Count


class TokenPaged(Struct, frozen=True, forbid_unknown_fields=True, tag="token"):
    """A block holds `tokens` consecutive tokens, cut by the engine's tensors into `kernel_blocks` equal pieces."""

    tokens: Count
    kernel_blocks: Count = 1
    cyclic: Cyclic | None = None
    ring: Count | None = None


class StatePaged(Struct, frozen=True, forbid_unknown_fields=True, tag="state"):
    """A block holds one whole state."""


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table. `keeps` is what the table retains; `hashed` says that every full block that is
    loaded becomes findable by its hash, so that it must be whole for every layer of the group that a producer holds."""

    id: Index
    paging: TokenPaged | StatePaged
    blocks: Count
    keeps: Reach = FULL
    hashed: bool = True

    @property
    def tokens(self) -> int:
        """Tokens per block; 0 where a block is a state."""
        return self.paging.tokens if isinstance(self.paging, TokenPaged) else 0


class Axis(Struct, frozen=True, forbid_unknown_fields=True):
    """A named dimension: global extent `size`, owned extent [start, stop), and in memory `digits`, a mixed radix of
    (count, stride), most significant first. Indices from `live` on are scratch that prefill never writes."""

    name: Name
    size: Count
    start: Index
    stop: Count
    digits: Digits
    live: Count | None = None

    @property
    def live_size(self) -> int:
        return self.size if self.live is None else self.live


class TokenAxis(Struct, frozen=True, forbid_unknown_fields=True):
    """The token dimension inside a block; one entry stands for `per_entry` consecutive tokens. `partial` says whether an
    entry is written before the last of its tokens is there (a cell, a scale for a block), so that an incomplete one is moved
    too, or not (a compressed entry). Nobody can infer it: where an entry stands for several tokens, it must be said."""

    digits: Digits
    per_entry: Count = 1
    partial: bool | None = None

    @property
    def entries(self) -> int:
        return prod(count for count, _ in self.digits)

    @property
    def moves_partial(self) -> bool:
        return self.per_entry > 1 and bool(self.partial)


class Element(Struct, frozen=True, forbid_unknown_fields=True):
    """What one element is: a number of `dtype` (with the static scales that are part of its meaning), or, where
    `opaque` names a backend's private layout, a cell that is moved whole or not at all."""

    dtype: Name
    bytes: Count
    scales: Annotated[tuple[float, ...], Meta(max_length=64)] = ()
    opaque: Label = ""

    def __str__(self) -> str:
        if self.opaque:
            return f"opaque cells '{self.opaque}' of {self.bytes} bytes"
        return f"{self.dtype} scaled by {', '.join(f'{s:g}' for s in self.scales)}" if self.scales else self.dtype


class Shape(Struct, frozen=True, forbid_unknown_fields=True):
    """The logical content and inner memory order of a part, free of where it lies; layers of one kind share it."""

    element: Element
    axes: Annotated[tuple[Axis, ...], Meta(max_length=8)]
    token: TokenAxis | None = None


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One placed tensor: `shape` indexes Manifest.shapes; its first element in block 0 lies at `offset` of `region`."""

    name: Name
    shape: Index
    region: Index
    offset: Offset
    block_stride: Offset


class Layer(Struct, frozen=True, forbid_unknown_fields=True):
    """A layer's parts in one group. One that is not `required` need not be held by any producer: it can do with zeros."""

    name: Name
    group: Index
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=32)]
    reach: Reach = FULL
    required: bool = True


class Manifest(Struct, frozen=True):
    """Everything a peer must know of one rank's cache memory."""

    identity: Identity
    regions: Annotated[tuple[Region, ...], Meta(max_length=4096)]
    groups: Annotated[tuple[Group, ...], Meta(max_length=1024)]
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=4096)]
    layers: Annotated[tuple[Layer, ...], Meta(max_length=4096)]
    version: Literal[1] = SCHEMA_VERSION

    def group(self, group_id: int) -> Group:
        return next(g for g in self.groups if g.id == group_id)

    @property
    def body(self) -> Manifest:
        """The manifest without rank and addresses: ranks whose bodies are equal hold the same in the same places."""
        return Manifest(
            _ANYBODY, tuple(replace(region, address=0) for region in self.regions), self.groups, self.shapes, self.layers
        )


_ANYBODY: Final = Identity("any", "any", "any")
