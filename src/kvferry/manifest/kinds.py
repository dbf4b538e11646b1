"""The layer kinds: which parts each one caches, how engines shard them, and in which memory orders they keep them.

The only module that knows what a layer kind looks like. A kind is a frozen dataclass with `paging`, `reach` and
`streams`; adding one touches nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from kvferry.errors import UnshardableError
from kvferry.manifest.page import Extent, Panel, PartSpec, Stream, whole
from kvferry.manifest.schema import DTYPE_BYTES, FULL, Element, Reach

Paging = Literal["token", "state"]


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank of `size`."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Layout:
    """A side's choices of memory order, block size and padding; every kind takes from it what concerns it. `delta`: whether a
    gated delta net's state is a row for each value dim, or for each key dim."""

    block: int = 16
    kv: Literal["packed", "paged", "separate", "transposed"] = "packed"
    order: Literal["head", "token"] = "head"
    conv: Literal["ds", "sd"] = "ds"
    spec: int = 0
    pool: Literal["layer", "block"] = "layer"
    overlay: bool = True
    page_align: int = 1
    delta: Literal["vk", "kv"] = "vk"


@runtime_checkable
class LayerKind(Protocol):
    """What a builder must say of a layer."""

    @property
    def paging(self) -> Paging: ...

    @property
    def reach(self) -> Reach: ...

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]: ...

    def __hash__(self) -> int: ...


def element(dtype: str, scales: tuple[float, ...] = ()) -> Element:
    return Element(dtype, DTYPE_BYTES[dtype], scales)


def split(name: str, count: int, shard: Shard, what: str, width: int = 1) -> Extent:
    """`count` units of `width` indices, dealt in equal consecutive shares."""
    if count % shard.size:
        raise UnshardableError(f"{count} {what} cannot be dealt evenly to {shard.size} tensor-parallel ranks")
    share = count // shard.size * width
    return Extent(name, count * width, shard.rank * share, (shard.rank + 1) * share)


def split_or_replicate(name: str, count: int, shard: Shard, what: str) -> Extent:
    """Like `split`; with more ranks than units, neighbouring ranks hold the same one."""
    if shard.size <= count:
        return split(name, count, shard, what)
    if shard.size % count:
        raise UnshardableError(f"{shard.size} tensor-parallel ranks cannot share {count} {what} evenly")
    unit = shard.rank * count // shard.size
    return Extent(name, count, unit, unit + 1)


@dataclass(frozen=True)
class Attention:
    """MHA, GQA, MQA, sliding-window and chunked-local attention: `k` and `v` by heads."""

    heads: int
    dim: int
    dtype: str = "bfloat16"
    v_dim: int = 0
    reach: Reach = FULL
    scales: tuple[float, float] | None = None
    paging: ClassVar[Paging] = "token"

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        heads = split_or_replicate("head", self.heads, shard, "kv heads")
        k, v = (
            PartSpec(
                name,
                element(self.dtype, self.scales[i : i + 1] if self.scales else ()),
                (heads, whole("dim", dim)),
                per_entry=1,
            )
            for i, (name, dim) in enumerate((("k", self.dim), ("v", self.v_dim or self.dim)))
        )
        outer = ("head", "token") if layout.order == "head" else ("token", "head")
        if layout.kv == "packed":
            return ((Panel(((k, ("dim",)), (v, ("dim",))), outer),),)
        if layout.kv == "paged":
            return ((Panel(((k, (*outer, "dim")), (v, (*outer, "dim")))),),)
        if layout.kv == "separate":
            return ((Panel(((k, (*outer, "dim")),)),), (Panel(((v, (*outer, "dim")),)),))
        return ((Panel(((k, ("dim", "token")), (v, ("token", "dim"))), ("head",)),),)


@dataclass(frozen=True)
class LatentAttention:
    """MLA, with or without an indexer: whole on every rank; the indexer's cache is a tensor of its own."""

    latent: int
    rope: int
    indexer: int = 0
    dtype: str = "bfloat16"
    indexer_dtype: str = "uint8"
    reach: Reach = FULL
    paging: ClassVar[Paging] = "token"

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        latent = PartSpec("latent", element(self.dtype), (whole("dim", self.latent + self.rope),), per_entry=1)
        streams: tuple[Stream, ...] = ((Panel(((latent, ("token", "dim")),)),),)
        if self.indexer:
            indexer = PartSpec("indexer", element(self.indexer_dtype), (whole("dim", self.indexer),), per_entry=1)
            streams += ((Panel(((indexer, ("token", "dim")),)),),)
        return streams


@dataclass(frozen=True)
class Entries:
    """A declared cache of entries that each stand for several tokens (compressed attention); whole on every rank.

    A `partial` one is written as its tokens come (a scale for a block), not when the last of them is there. `planes` are
    further parts of an entry: a kernel block holds the first part of all its entries, then the next of all. `block` is the
    tokens of a block where the engine fixes them for this cache, and 0 where the side chooses; a page is padded up to a
    multiple of `page_align` bytes.
    """

    part: str
    width: int
    tokens_per_entry: int = 1
    dtype: str = "uint8"
    reach: Reach = FULL
    planes: tuple[tuple[str, int], ...] = ()
    block: int = 0
    page_align: int = 1
    partial: bool = False
    paging: ClassVar[Paging] = "token"

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        parts = (
            PartSpec(name, element(self.dtype), (whole("dim", width),), self.tokens_per_entry, self.partial)
            for name, width in ((self.part, self.width), *self.planes)
        )
        return ((Panel(tuple((part, ("token", "dim")) for part in parts)),),)


def fixed_block(kind: LayerKind) -> int:
    """Tokens of a block where a kind's `block` says that the engine fixes them; 0 where the side chooses."""
    return int(getattr(kind, "block", 0))


def page_align(kind: LayerKind) -> int:
    """Bytes that a kind's `page_align` says a page is padded to a multiple of, whatever the side's layout."""
    return int(getattr(kind, "page_align", 1))


def _taps(kernel: int, layout: Layout) -> Extent:
    """Prefill writes kernel - 1 taps; speculative decoding keeps room for more behind them."""
    return whole("tap", kernel - 1 + layout.spec, live=kernel - 1 if layout.spec else None)


def _conv(parts: tuple[tuple[str, Extent], ...], dtype: str, kernel: int, layout: Layout) -> Panel:
    taps = _taps(kernel, layout)
    specs = tuple(PartSpec(f"conv.{name}", element(dtype), (channels, taps)) for name, channels in parts)
    if layout.conv == "ds":
        return Panel(tuple((spec, ("channel", "tap")) for spec in specs))
    return Panel(tuple((spec, ("channel",)) for spec in specs), ("tap",))


def _ssm(dtype: str, *extents: Extent, order: tuple[str, ...] = ()) -> Panel:
    return Panel(((PartSpec("ssm", element(dtype), extents), order or tuple(e.name for e in extents)),))


@dataclass(frozen=True)
class Mamba1:
    """`conv.x` and `ssm` by channels."""

    channels: int
    state: int
    kernel: int = 4
    dtype: str = "bfloat16"
    ssm_dtype: str = "bfloat16"
    paging: ClassVar[Paging] = "state"
    reach: ClassVar[Reach] = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        channels = split("channel", self.channels, shard, "channels")
        conv = _conv((("x", channels),), self.dtype, self.kernel, layout)
        return ((conv, _ssm(self.ssm_dtype, channels, whole("state", self.state))),)


@dataclass(frozen=True)
class Mamba2:
    """`conv.x` and `ssm` by heads, `conv.B` and `conv.C` by groups; a single group is whole on every rank."""

    heads: int
    dim: int
    state: int
    groups: int
    kernel: int = 4
    dtype: str = "bfloat16"
    ssm_dtype: str = "bfloat16"
    paging: ClassVar[Paging] = "state"
    reach: ClassVar[Reach] = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        x = split("channel", self.heads, shard, "Mamba2 heads", self.dim)
        if self.groups == 1:
            bc = whole("channel", self.state)
        else:
            bc = split("channel", self.groups, shard, "Mamba2 groups", self.state)
        conv = _conv((("x", x), ("B", bc), ("C", bc)), self.dtype, self.kernel, layout)
        heads = split("head", self.heads, shard, "Mamba2 heads")
        return ((conv, _ssm(self.ssm_dtype, heads, whole("dim", self.dim), whole("state", self.state))),)


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta net and KDA: `conv.q`, `conv.k`, `conv.v` and `ssm`, each by its own heads."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int = 4
    dtype: str = "bfloat16"
    ssm_dtype: str = "bfloat16"
    paging: ClassVar[Paging] = "state"
    reach: ClassVar[Reach] = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        q = split("channel", self.k_heads, shard, "linear key heads", self.k_dim)
        v = split("channel", self.v_heads, shard, "linear value heads", self.v_dim)
        conv = _conv((("q", q), ("k", q), ("v", v)), self.dtype, self.kernel, layout)
        heads = split("head", self.v_heads, shard, "linear value heads")
        order = ("head", "dim", "state") if layout.delta == "vk" else ("head", "state", "dim")
        return ((conv, _ssm(self.ssm_dtype, heads, whole("dim", self.v_dim), whole("state", self.k_dim), order=order)),)


@dataclass(frozen=True)
class ShortConv:
    """A short convolution alone: `conv.x` by channels."""

    channels: int
    kernel: int = 3
    dtype: str = "bfloat16"
    paging: ClassVar[Paging] = "state"
    reach: ClassVar[Reach] = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        channels = split("channel", self.channels, shard, "channels")
        return ((_conv((("x", channels),), self.dtype, self.kernel, layout),),)


@dataclass(frozen=True)
class LinearAttention:
    """Linear attention: one matrix per head, `ssm` by heads."""

    heads: int
    k_dim: int
    v_dim: int
    dtype: str = "float32"
    paging: ClassVar[Paging] = "state"
    reach: ClassVar[Reach] = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        heads = split("head", self.heads, shard, "linear-attention heads")
        return ((_ssm(self.dtype, heads, whole("dim", self.v_dim), whole("state", self.k_dim)),),)


@dataclass(frozen=True)
class OpaqueCells:
    """Bytes whose order a backend keeps to itself, in cells of one kernel block, or of one (kernel block, head slot)."""

    tag: str
    bytes_per_token: int
    head_slots: int = 0
    reach: Reach = FULL
    paging: ClassVar[Paging] = "token"

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        cell = Element("opaque", self.bytes_per_token * layout.block, opaque=f"{self.tag}/{layout.block}")
        slots = (split_or_replicate("head", self.head_slots, shard, "head slots"),) if self.head_slots else ()
        part = PartSpec("bytes", cell, slots, per_entry=layout.block, partial=True)
        return ((Panel(((part, ("token", *(s.name for s in slots))),)),),)


@dataclass(frozen=True)
class OpaqueState:
    """A whole state of bytes whose order a backend keeps to itself."""

    tag: str
    bytes: int
    paging: ClassVar[Paging] = "state"
    reach: ClassVar[Reach] = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        part = PartSpec("bytes", Element("opaque", self.bytes, opaque=self.tag), ())
        return ((Panel(((part, ()),)),),)
