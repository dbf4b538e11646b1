"""A brute-force account of what a transfer must leave in memory, written from the engines' side with NumPy views.

It spells out pages, shards and needed tokens by itself and imports nothing from kvferry, so that agreement means something.
Data bytes lie in [1, 128), garbage in [128, 256) and fills are 0: a byte that was copied, left or zeroed shows which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Slices = tuple[slice, ...]

HOLE = -1


@dataclass(frozen=True)
class Reach:
    """`full`, a `window` of the last tokens with the current one, or the current aligned `chunk`."""

    kind: str = "full"
    tokens: int = 0

    def first(self, n: int) -> int:
        """The lowest token that computing token `n` looks at."""
        if self.kind == "window":
            return max(0, n + 1 - self.tokens)
        if self.kind == "chunk":
            return n - n % self.tokens
        return 0


FULL = Reach()


def window(tokens: int) -> Reach:
    return Reach("window", tokens)


def chunk(tokens: int) -> Reach:
    return Reach("chunk", tokens)


@dataclass(frozen=True)
class Memory:
    """How one engine lays out its caches. `block` is what its tensors are cut into, a kernel block."""

    block: int = 4
    kv: str = "packed"
    order: str = "head"
    conv: str = "ds"
    spec: int = 0
    pool: str = "layer"
    overlay: bool = True
    page_align: int = 1
    delta: str = "vk"


def even_share(units: int, rank: int, tp: int, width: int = 1) -> slice:
    each = units // tp
    return slice(rank * each * width, (rank + 1) * each * width)


def head_share(heads: int, rank: int, tp: int) -> slice:
    if tp <= heads:
        return even_share(heads, rank, tp)
    mine = rank * heads // tp
    return slice(mine, mine + 1)


def split_axis(view: Bytes, *shape: int) -> Bytes:
    """The last axis cut into `shape`, still the same memory."""
    out = view.reshape(*view.shape[:-1], *shape)
    if out.size and not np.shares_memory(out, view):
        raise RuntimeError("a view became a copy")
    return out


@dataclass(frozen=True)
class Tensor:
    """One part of a layer as the model has it: global shape without tokens, bytes of an element."""

    shape: tuple[int, ...]
    item: int


@dataclass(frozen=True)
class Kind:
    """What every layer kind answers. Pages come as [block, kernel block, byte], one array per stream; state pages as
    [block, byte]. Views go out as [block, kernel block, entry, *shape, byte of the element], without the two for state."""

    paged_by: str = field(default="token", init=False)

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        raise NotImplementedError

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        raise NotImplementedError

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        """Bytes of one kernel block, or of one state, per stream."""
        raise NotImplementedError

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        raise NotImplementedError

    def tokens_per_entry(self, memory: Memory) -> int:
        return 1

    @property
    def moves_partial_entries(self) -> bool:
        return False

    @property
    def pads_page_to(self) -> int:
        return 1

    @property
    def looks_back(self) -> Reach:
        return getattr(self, "reach", FULL)


@dataclass(frozen=True)
class Attention(Kind):
    heads: int = 1
    dim: int = 1
    v_dim: int = 1
    item: int = 2
    reach: Reach = FULL

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        return {"k": Tensor((self.heads, self.dim), self.item), "v": Tensor((self.heads, self.v_dim), self.item)}

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        heads = head_share(self.heads, rank, tp)
        return {"k": (heads, slice(0, self.dim)), "v": (heads, slice(0, self.v_dim))}

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        rows = max(1, self.heads // tp) * memory.block * self.item
        if memory.kv == "separate":
            return (rows * self.dim, rows * self.v_dim)
        return (rows * (self.dim + self.v_dim),)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        h, t, dk, dv, e = max(1, self.heads // tp), memory.block, self.dim, self.v_dim, self.item
        if memory.kv == "transposed":
            per_head = split_axis(pages[0], h, t * (dk + dv) * e)
            k = split_axis(per_head[..., : dk * t * e], dk, t, e)
            v = split_axis(per_head[..., dk * t * e :], t, dv, e)
            return {"k": k.transpose(0, 1, 4, 2, 3, 5), "v": v.transpose(0, 1, 3, 2, 4, 5)}
        rows = (h, t) if memory.order == "head" else (t, h)
        if memory.kv == "packed":
            cells = split_axis(pages[0], *rows, dk + dv, e)
            k, v = cells[..., :dk, :], cells[..., dk:, :]
        elif memory.kv == "paged":
            half = h * t * dk * e
            k, v = split_axis(pages[0][..., :half], *rows, dk, e), split_axis(pages[0][..., half:], *rows, dv, e)
        else:
            k, v = split_axis(pages[0], *rows, dk, e), split_axis(pages[1], *rows, dv, e)
        if memory.order == "head":
            return {"k": k.transpose(0, 1, 3, 2, 4, 5), "v": v.transpose(0, 1, 3, 2, 4, 5)}
        return {"k": k, "v": v}


@dataclass(frozen=True)
class Latent(Kind):
    latent: int = 1
    rope: int = 1
    indexer: int = 0
    item: int = 2
    indexer_item: int = 1
    reach: Reach = FULL

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        parts = {"latent": Tensor((self.latent + self.rope,), self.item)}
        if self.indexer:
            parts["indexer"] = Tensor((self.indexer,), self.indexer_item)
        return parts

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        return {"latent": (slice(None),), "indexer": (slice(None),)}

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        latent = memory.block * (self.latent + self.rope) * self.item
        return (latent, memory.block * self.indexer * self.indexer_item) if self.indexer else (latent,)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        out = {"latent": split_axis(pages[0], memory.block, self.latent + self.rope, self.item)}
        if self.indexer:
            out["indexer"] = split_axis(pages[1], memory.block, self.indexer, self.indexer_item)
        return out


@dataclass(frozen=True)
class Compressed(Kind):
    """Entries of several tokens, `partial` if they are written as their tokens come. A kernel block holds the first part of
    all its entries, then each plane of all."""

    part: str = "entry"
    width: int = 1
    tokens: int = 2
    item: int = 1
    reach: Reach = FULL
    planes: tuple[tuple[str, int], ...] = ()
    align: int = 1
    partial: bool = False

    @property
    def moves_partial_entries(self) -> bool:
        return self.partial

    @property
    def widths(self) -> dict[str, int]:
        return {self.part: self.width, **dict(self.planes)}

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        return {name: Tensor((width,), self.item) for name, width in self.widths.items()}

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        return {name: (slice(None),) for name in self.widths}

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        return (memory.block // self.tokens * sum(self.widths.values()) * self.item,)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        entries, out, at = memory.block // self.tokens, {}, 0
        for name, width in self.widths.items():
            plane = entries * width * self.item
            out[name] = split_axis(pages[0][..., at : at + plane], entries, width, self.item)
            at += plane
        return out

    def tokens_per_entry(self, memory: Memory) -> int:
        return self.tokens

    @property
    def pads_page_to(self) -> int:
        return self.align


@dataclass(frozen=True)
class OpaqueCells(Kind):
    tag: str = "private"
    bytes_per_token: int = 1
    head_slots: int = 0
    reach: Reach = FULL

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        slots = (self.head_slots,) if self.head_slots else ()
        return {"bytes": Tensor(slots, self.bytes_per_token * memory.block)}

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        return {"bytes": (head_share(self.head_slots, rank, tp),) if self.head_slots else ()}

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        slots = max(1, self.head_slots // tp) if self.head_slots else 1
        return (slots * self.bytes_per_token * memory.block,)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        cell = self.bytes_per_token * memory.block
        if self.head_slots:
            return {"bytes": split_axis(pages[0], 1, max(1, self.head_slots // tp), cell)}
        return {"bytes": split_axis(pages[0], 1, cell)}

    def tokens_per_entry(self, memory: Memory) -> int:
        return memory.block

    @property
    def moves_partial_entries(self) -> bool:
        return True


def conv_views(page: Bytes, rows: Mapping[str, int], taps: int, item: int, order: str) -> tuple[dict[str, Bytes], Bytes]:
    """The conv state at the head of a page, its channels stacked by part, as [block, channel, tap, byte]; and the rest."""
    channels = sum(rows.values())
    end = channels * taps * item
    if order == "ds":
        table = split_axis(page[:, :end], channels, taps, item)
    else:
        table = split_axis(page[:, :end], taps, channels, item).transpose(0, 2, 1, 3)
    out, at = {}, 0
    for name, count in rows.items():
        out[name] = table[:, at : at + count]
        at += count
    return out, page[:, end:]


@dataclass(frozen=True)
class State(Kind):
    """Recurrent kinds: a conv of stacked channels, then a matrix state, either of which may be absent."""

    paged_by: str = field(default="state", init=False)
    kernel: int = 4
    item: int = 2
    ssm_item: int = 2

    def channels(self, tp: int) -> dict[str, int]:
        """Local conv channels by part, in page order."""
        return {}

    def matrix(self, tp: int) -> tuple[int, ...]:
        """Local shape of the matrix state."""
        return ()

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        conv = sum(self.channels(tp).values()) * (self.kernel - 1 + memory.spec) * self.item
        return (conv + (int(np.prod(self.matrix(tp))) * self.ssm_item if self.matrix(tp) else 0),)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        out, rest = conv_views(pages[0], self.channels(tp), self.kernel - 1 + memory.spec, self.item, memory.conv)
        if self.matrix(tp):
            out["ssm"] = split_axis(rest, *self.matrix(tp), self.ssm_item)
        return out

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        parts = {name: Tensor((count, self.kernel - 1), self.item) for name, count in self.channels(1).items()}
        if self.matrix(1):
            parts["ssm"] = Tensor(self.matrix(1), self.ssm_item)
        return parts


@dataclass(frozen=True)
class Mamba1(State):
    inner: int = 1
    state: int = 1

    def channels(self, tp: int) -> dict[str, int]:
        return {"conv.x": self.inner // tp}

    def matrix(self, tp: int) -> tuple[int, ...]:
        return (self.inner // tp, self.state)

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        mine = even_share(self.inner, rank, tp)
        return {"conv.x": (mine, slice(None)), "ssm": (mine, slice(None))}


@dataclass(frozen=True)
class Mamba2(State):
    heads: int = 1
    dim: int = 1
    state: int = 1
    groups: int = 1

    def channels(self, tp: int) -> dict[str, int]:
        per_rank = self.state if self.groups == 1 else self.groups // tp * self.state
        return {"conv.x": self.heads // tp * self.dim, "conv.B": per_rank, "conv.C": per_rank}

    def matrix(self, tp: int) -> tuple[int, ...]:
        return (self.heads // tp, self.dim, self.state)

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        by_group = slice(None) if self.groups == 1 else even_share(self.groups, rank, tp, self.state)
        return {
            "conv.x": (even_share(self.heads, rank, tp, self.dim), slice(None)),
            "conv.B": (by_group, slice(None)),
            "conv.C": (by_group, slice(None)),
            "ssm": (even_share(self.heads, rank, tp), slice(None), slice(None)),
        }


@dataclass(frozen=True)
class GatedDelta(State):
    k_heads: int = 1
    v_heads: int = 1
    k_dim: int = 1
    v_dim: int = 1

    def channels(self, tp: int) -> dict[str, int]:
        qk = self.k_heads // tp * self.k_dim
        return {"conv.q": qk, "conv.k": qk, "conv.v": self.v_heads // tp * self.v_dim}

    def matrix(self, tp: int) -> tuple[int, ...]:
        return (self.v_heads // tp, self.v_dim, self.k_dim)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        out = super().views(pages, tp, memory)
        if memory.delta == "kv":
            heads, v_dim, k_dim = self.matrix(tp)
            end = self.page_sizes(tp, memory)[0]
            first = end - heads * v_dim * k_dim * self.ssm_item
            by_key = split_axis(pages[0][:, first:end], heads, k_dim, v_dim, self.ssm_item)
            out["ssm"] = by_key.transpose(0, 1, 3, 2, 4)
        return out

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        qk = even_share(self.k_heads, rank, tp, self.k_dim)
        return {
            "conv.q": (qk, slice(None)),
            "conv.k": (qk, slice(None)),
            "conv.v": (even_share(self.v_heads, rank, tp, self.v_dim), slice(None)),
            "ssm": (even_share(self.v_heads, rank, tp), slice(None), slice(None)),
        }


@dataclass(frozen=True)
class ShortConv(State):
    inner: int = 1

    def channels(self, tp: int) -> dict[str, int]:
        return {"conv.x": self.inner // tp}

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        return {"conv.x": (even_share(self.inner, rank, tp), slice(None))}


@dataclass(frozen=True)
class LinearAttention(State):
    heads: int = 1
    k_dim: int = 1
    v_dim: int = 1

    def matrix(self, tp: int) -> tuple[int, ...]:
        return (self.heads // tp, self.v_dim, self.k_dim)

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        return {"ssm": (even_share(self.heads, rank, tp), slice(None), slice(None))}


@dataclass(frozen=True)
class OpaqueState(State):
    tag: str = "private"
    size: int = 1

    def tensors(self, memory: Memory) -> dict[str, Tensor]:
        return {"bytes": Tensor((), self.size)}

    def owned(self, rank: int, tp: int) -> dict[str, Slices]:
        return {"bytes": ()}

    def page_sizes(self, tp: int, memory: Memory) -> tuple[int, ...]:
        return (self.size,)

    def views(self, pages: Sequence[Bytes], tp: int, memory: Memory) -> dict[str, Bytes]:
        return {"bytes": pages[0]}


@dataclass(frozen=True)
class Layer:
    """A layer of the model, and the sides that run it."""

    name: str
    kind: Kind
    sides: str = "PD"


@dataclass(frozen=True)
class Group:
    """Layers of one side that share a block table, by name; `tokens` per block, 0 for state; `kernel` tokens per kernel
    block, 0 for what the side's memory has."""

    id: int
    layers: tuple[str, ...]
    tokens: int = 0
    keeps: Reach = FULL
    hashed: bool = False
    kernel: int = 0


@dataclass(frozen=True)
class Side:
    """One engine: its tensor-parallel size, the layers of its pipeline stages, its groups and its memory."""

    tp: int
    stages: tuple[tuple[str, ...], ...]
    groups: tuple[Group, ...]
    memory: Memory
    blocks: int

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(tensor-parallel rank, stage) of every rank."""
        return [(tp, pp) for pp in range(len(self.stages)) for tp in range(self.tp)]

    def group_of(self, layer: str) -> Group:
        return next(g for g in self.groups if layer in g.layers)

    def memory_of(self, group: Group) -> Memory:
        return replace(self.memory, block=group.kernel) if group.kernel else self.memory

    def held(self, group: Group, pp: int) -> tuple[str, ...]:
        """The group's layers on one stage, in the group's order."""
        return tuple(name for name in group.layers if name in self.stages[pp])


@dataclass(frozen=True)
class Case:
    """A model on two sides and one request: `tokens` that D will hold, of which it has `start`; P has run `prefilled`."""

    layers: tuple[Layer, ...]
    producer: Side
    consumer: Side
    tokens: int
    src: Mapping[int, Sequence[int]]
    dst: Mapping[int, Sequence[int]]
    start: int = 0
    prefilled: int = 0
    seed: int = 0

    def layer(self, name: str) -> Layer:
        return next(x for x in self.layers if x.name == name)


@dataclass
class RankMemory:
    """A rank's raw buffers, one per region, and windows on them by (layer, part)."""

    buffers: list[Bytes]
    views: dict[tuple[str, str], Bytes]


def allocate(case: Case, side: Side, rank: tuple[int, int], rng: np.random.Generator) -> RankMemory:
    """One rank's memory, full of garbage.

    Layer-major: a buffer per slot and stream, pages behind each other. Block-major: one buffer, in each block the pages of
    all slots. Overlaid, the i-th layers of all groups share slot i; a page is as long as the longest that shares it.
    """
    memory, (_, pp) = side.memory, rank
    place: list[tuple[Group, Layer, int]] = []
    for group in side.groups:
        for i, name in enumerate(side.held(group, pp)):
            place.append((group, case.layer(name), i if memory.overlay else len(place)))
    pages: dict[tuple[int, int], int] = {}
    for group, layer, slot in place:
        kernel_blocks = group.tokens // side.memory_of(group).block if group.tokens else 1
        multiple = lcm(memory.page_align, layer.kind.pads_page_to)
        for stream, kernel_bytes in enumerate(layer.kind.page_sizes(side.tp, side.memory_of(group))):
            padded = -(-kernel_bytes * kernel_blocks // multiple) * multiple
            pages[slot, stream] = max(padded, pages.get((slot, stream), 0))
    keys = sorted(pages)
    if memory.pool == "layer":
        buffers = [garbage(rng, side.blocks * pages[key]) for key in keys]
        by_slot = {key: b.reshape(side.blocks, pages[key]) for key, b in zip(keys, buffers, strict=True)}
    else:
        buffers = [garbage(rng, side.blocks * sum(pages.values()))]
        rows = buffers[0].reshape(side.blocks, sum(pages.values()))
        starts = np.concatenate([[0], np.cumsum([pages[key] for key in keys])])
        by_slot = {key: rows[:, start : start + pages[key]] for key, start in zip(keys, starts, strict=False)}
    views: dict[tuple[str, str], Bytes] = {}
    for group, layer, slot in place:
        inner = side.memory_of(group)
        kernel_blocks = group.tokens // inner.block if group.tokens else 1
        opened = []
        for stream, kernel_bytes in enumerate(layer.kind.page_sizes(side.tp, inner)):
            page = by_slot[slot, stream][:, : kernel_bytes * kernel_blocks]
            opened.append(split_axis(page, kernel_blocks, kernel_bytes) if group.tokens else page)
        for part, view in layer.kind.views(opened, side.tp, inner).items():
            views[layer.name, part] = view
    return RankMemory(buffers, views)


def garbage(rng: np.random.Generator, count: int) -> Bytes:
    return rng.integers(128, 256, count, dtype=np.uint8)


def global_tensors(case: Case, rng: np.random.Generator) -> dict[tuple[str, str], Bytes]:
    """Every part as one engine without parallelism would hold it; token parts by entry first."""
    out = {}
    for layer in case.layers:
        kind = layer.kind
        side = case.producer if "P" in layer.sides else case.consumer
        memory = side.memory_of(side.group_of(layer.name))
        for part, tensor in kind.tensors(memory).items():
            entries: tuple[int, ...] = ()
            if kind.paged_by == "token":
                entries = (-(-max(case.tokens, case.prefilled) // kind.tokens_per_entry(memory)) + 1,)
            out[layer.name, part] = rng.integers(1, 128, (*entries, *tensor.shape, tensor.item), dtype=np.uint8)
    return out


def store(view: Bytes, index: tuple[int, ...], piece: Bytes) -> int:
    """Write a piece at the start of every axis of `view[index]`; bytes written."""
    target = view[index][tuple(slice(0, n) for n in piece.shape)]
    if target.shape != piece.shape:
        raise RuntimeError(f"a piece of {piece.shape} does not fit {target.shape}")
    target[...] = piece
    return piece.size


def place_of(entry: int, per_entry: int, group: Group, block: int, table: Sequence[int]) -> tuple[int, int, int] | None:
    """Block id, kernel block and place in it of an entry, or None where the table has a hole or ends."""
    token = entry * per_entry
    position, inside = divmod(token, group.tokens)
    if position >= len(table) or table[position] == HOLE:
        return None
    return table[position], inside // block, inside % block // per_entry


def prefill(case: Case, tensors: Mapping[tuple[str, str], Bytes], rank: tuple[int, int], memory: RankMemory) -> None:
    """What a producer rank's memory holds after `prefilled` tokens."""
    side = case.producer
    for group in side.groups:
        inner = side.memory_of(group)
        for name in side.held(group, rank[1]):
            kind = case.layer(name).kind
            owned = kind.owned(rank[0], side.tp)
            for part in kind.tensors(inner):
                whole, view = tensors[name, part], memory.views[name, part]
                if kind.paged_by == "state":
                    store(view, (case.src[group.id][0],), whole[owned[part]])
                    continue
                per_entry = kind.tokens_per_entry(inner)
                stop = case.prefilled // per_entry
                if kind.moves_partial_entries:
                    stop = -(-case.prefilled // per_entry)
                for entry in range(stop):
                    at = place_of(entry, per_entry, group, inner.block, case.src[group.id])
                    if at is not None:
                        store(view, at, whole[entry][owned[part]])


@dataclass
class Expected:
    """The image that a consumer rank's memory must show, the bytes that must travel, and the blocks, by position in the
    group's table, that no hash may find."""

    memory: RankMemory
    moved: int = 0
    unhashable: dict[int, set[int]] = field(default_factory=dict)


def wanted_entries(case: Case, kind: Kind, group: Group) -> range:
    """Entries of a layer that D must get if both sides have a place for them."""
    per_entry = kind.tokens_per_entry(case.consumer.memory_of(group))
    low = kind.looks_back.first(case.tokens)
    if group.hashed:
        low = min(low, group.keeps.first(case.tokens))
        low -= low % group.tokens
    low = max(low, case.start)
    stop = -(-case.tokens // per_entry) if kind.moves_partial_entries else case.tokens // per_entry
    return range(low // per_entry, max(stop, low // per_entry))


def expect(case: Case, tensors: Mapping[tuple[str, str], Bytes], rank: tuple[int, int], memory: RankMemory) -> Expected:
    """Turn a consumer rank's garbage into what must be there afterwards, in place."""
    out = Expected(memory)
    if case.start == case.tokens:
        return out
    for group in case.consumer.groups:
        held = [case.layer(name) for name in case.consumer.held(group, rank[1])]
        if group.tokens:
            _expect_tokens(case, tensors, rank, group, held, out)
        else:
            _expect_state(case, tensors, rank, group, held, out)
    return out


def _expect_state(
    case: Case, tensors: Mapping[tuple[str, str], Bytes], rank: tuple[int, int], group: Group, held: list[Layer], out: Expected
) -> None:
    block = case.dst[group.id][0]
    for layer in held:
        owned = layer.kind.owned(rank[0], case.consumer.tp)
        for part in layer.kind.tensors(case.consumer.memory):
            view = out.memory.views[layer.name, part]
            view[block] = 0
            if "P" in layer.sides:
                out.moved += store(view, (block,), tensors[layer.name, part][owned[part]])


def _expect_tokens(
    case: Case, tensors: Mapping[tuple[str, str], Bytes], rank: tuple[int, int], group: Group, held: list[Layer], out: Expected
) -> None:
    table, memory = case.dst[group.id], case.consumer.memory_of(group)
    copied: dict[str, list[tuple[int, tuple[int, int, int]]]] = {}
    lost: set[int] = set()
    starts: list[int] = []
    for layer in held:
        copied[layer.name] = []
        if "P" not in layer.sides:
            continue
        per_entry = layer.kind.tokens_per_entry(memory)
        source = case.producer.group_of(layer.name)
        wanted = wanted_entries(case, layer.kind, group)
        starts.append(wanted.start * per_entry)
        for entry in wanted:
            there = place_of(entry, per_entry, source, case.producer.memory_of(source).block, case.src[source.id])
            here = place_of(entry, per_entry, group, memory.block, table)
            position = entry * per_entry // group.tokens
            if there is not None and here is not None:
                copied[layer.name].append((entry, here))
            elif here is not None and group.hashed and (position + 1) * group.tokens <= case.tokens:
                lost.add(position)
    lowest = min(starts, default=max(case.start, group.keeps.first(case.tokens)))
    loaded = [b for b in table[lowest // group.tokens : -(-case.tokens // group.tokens)] if b != HOLE]
    for layer in held:
        owned = layer.kind.owned(rank[0], case.consumer.tp)
        for part in layer.kind.tensors(memory):
            view = out.memory.views[layer.name, part]
            view[loaded] = 0
            for entry, at in copied[layer.name]:
                out.moved += store(view, at, tensors[layer.name, part][entry][owned[part]])
    if lost:
        out.unhashable[group.id] = lost


@dataclass
class World:
    """Both sides of a case before the transfer, and what D must look like after it, by (tensor-parallel rank, stage)."""

    producers: dict[tuple[int, int], RankMemory]
    consumers: dict[tuple[int, int], RankMemory]
    expected: dict[tuple[int, int], Expected]


def build_world(case: Case) -> World:
    rng = np.random.default_rng(case.seed)
    tensors = global_tensors(case, rng)
    producers = {}
    for rank in case.producer.ranks:
        producers[rank] = allocate(case, case.producer, rank, rng)
        prefill(case, tensors, rank, producers[rank])
    consumers, expected = {}, {}
    for i, rank in enumerate(case.consumer.ranks):
        consumers[rank] = allocate(case, case.consumer, rank, np.random.default_rng([case.seed, i]))
        image = allocate(case, case.consumer, rank, np.random.default_rng([case.seed, i]))
        expected[rank] = expect(case, tensors, rank, image)
    return World(producers, consumers, expected)


def differences(got: Sequence[Bytes], wanted: Sequence[Bytes]) -> Iterator[str]:
    """Every region in which memory is not as it must be, with the first byte that is not."""
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        bad = np.flatnonzero(one != other)
        if len(bad):
            at = int(bad[0])
            yield f"region {i}: {len(bad)} of {len(one)} bytes differ, the first at {at}: {one[at]}, not {other[at]}"
