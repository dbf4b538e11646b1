"""Pairs of sides that exercise the planner, small enough to take apart, and plain memory to carry their plans out in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import prod

import numpy as np

from kvferry.manifest import (
    Attention,
    Entries,
    GroupSpec,
    Identity,
    LatentAttention,
    LayerKind,
    LayerSpec,
    Layout,
    Mamba2,
    Manifest,
    OpaqueCells,
    Rank,
    ShortConv,
    Window,
    build_manifest,
)
from kvferry.plan import Binder, Plan, Request, make_plan

Groups = Sequence[tuple[int, Sequence[str]]]
Memory = list[np.ndarray]

BLOCKS = 24


@dataclass(frozen=True)
class Side:
    """One engine: its layout, its groups as (tokens per block, layers), its tensor-parallel size."""

    layout: Layout
    groups: tuple[tuple[int, tuple[str, ...]], ...]
    tp: int = 1


@dataclass(frozen=True)
class Pair:
    """A model on two sides; the consumer rank whose plan is looked at."""

    layers: Mapping[str, LayerKind]
    producer: Side
    consumer: Side
    rank: int = 0
    optional: frozenset[str] = frozenset()

    def manifests(self, engine: str, side: Side) -> list[Manifest]:
        groups = tuple(
            GroupSpec(
                i,
                tuple(LayerSpec(n, self.layers[n], required=n not in self.optional) for n in names),
                tokens,
            )
            for i, (tokens, names) in enumerate(side.groups)
        )
        ranks = (Identity(engine, "1", "model", Rank(i, side.tp)) for i in range(side.tp))
        return [build_manifest(rank, groups, side.layout, BLOCKS, base_address=1 << 20) for rank in ranks]

    @property
    def producers(self) -> list[Manifest]:
        return self.manifests("p", self.producer)

    @property
    def consumers(self) -> list[Manifest]:
        return self.manifests("d", self.consumer)

    def plan(self) -> Plan:
        return make_plan(self.consumers[self.rank], self.producers, self.consumers)


GQA = Attention(6, 4)
NARROW = Attention(6, 4, reach=Window(20))
MIXER = Mamba2(6, 2, 3, groups=6, ssm_dtype="float32")
MLA = LatentAttention(6, 2, indexer=3)

PAIRS: dict[str, Pair] = {
    "hybrid, two ranks to three": Pair(
        {"a.0": GQA, "a.1": GQA, "w": NARROW, "m.0": MIXER, "m.1": MIXER, "mla": MLA},
        Side(Layout(block=8), ((8, ("a.0", "a.1", "mla")), (8, ("w",)), (0, ("m.0", "m.1"))), 2),
        Side(Layout(block=8), ((16, ("a.0", "a.1", "mla")), (8, ("w",)), (0, ("m.0", "m.1"))), 3),
        rank=1,
    ),
    "blocks of 12 to 8": Pair(
        {"a": GQA, "b": GQA},
        Side(Layout(block=12, kv="separate", order="token"), ((12, ("a", "b")),)),
        Side(Layout(block=8, kv="paged"), ((8, ("a", "b")),)),
    ),
    "transposed to token-major": Pair(
        {"a": Attention(2, 4)},
        Side(Layout(block=8, kv="transposed"), ((8, ("a",)),)),
        Side(Layout(block=4, order="token"), ((8, ("a",)),), 2),
        rank=1,
    ),
    "conv rows of taps to rows of channels": Pair(
        {"m": MIXER, "c": ShortConv(6)},
        Side(Layout(conv="sd"), ((0, ("m", "c")),), 2),
        Side(Layout(conv="ds"), ((0, ("m", "c")),)),
    ),
    "spec taps on one side": Pair(
        {"m.0": MIXER, "m.1": MIXER, "a": GQA},
        Side(Layout(block=4, conv="sd"), ((0, ("m.0", "m.1")), (4, ("a",)))),
        Side(Layout(block=4, conv="sd", spec=2), ((0, ("m.0", "m.1")), (4, ("a",)))),
    ),
    "overlaid groups to one group": Pair(
        {"a": GQA, "b": GQA, "w": NARROW, "draft": GQA},
        Side(Layout(block=8, overlay=True), ((8, ("a",)), (8, ("b",)), (16, ("w",)))),
        Side(Layout(block=8, overlay=False), ((8, ("a", "b", "w", "draft")),)),
        optional=frozenset({"draft"}),
    ),
    "block-major to block-major": Pair(
        {"a.0": GQA, "a.1": GQA, "m": MIXER},
        Side(Layout(block=8, pool="block", page_align=64), ((8, ("a.0", "a.1")), (0, ("m",)))),
        Side(Layout(block=8, pool="block", page_align=64), ((8, ("a.0", "a.1")), (0, ("m",)))),
    ),
    "cells and compressed entries": Pair(
        {"c": Entries("compressed", 5, tokens_per_entry=4), "o": OpaqueCells("flash", 3, head_slots=2)},
        Side(Layout(block=8), ((16, ("c", "o")),), 2),
        Side(Layout(block=8), ((8, ("c",)), (24, ("o",)))),
    ),
}


@cache
def plan_of(name: str) -> Plan:
    return PAIRS[name].plan()


@cache
def manifests_of(name: str) -> tuple[Manifest, tuple[Manifest, ...]]:
    pair = PAIRS[name]
    return pair.consumers[pair.rank], tuple(pair.producers)


def request_of(consumer: Manifest, producers: Sequence[Manifest], tokens: int, seed: int) -> Request:
    """A request of `tokens` tokens at random blocks; a block belongs to one group."""
    rng = np.random.default_rng(seed)

    def table(manifest: Manifest) -> dict[int, list[int]]:
        free = rng.permutation(BLOCKS).tolist()
        return {g.id: [free.pop() for _ in range(-(-tokens // g.tokens) if g.tokens else 1)] for g in manifest.groups}

    return Request(tokens, table(producers[0]), table(consumer))


def garbage(manifest: Manifest, seed: int) -> Memory:
    rng = np.random.default_rng([seed, manifest.identity.rank.ordinal])
    return [rng.integers(0, 256, r.length, np.uint8) for r in manifest.regions]


@cache
def held_by(manifest: Manifest) -> Memory:
    """Memory in which equal indices of a part hold equal bytes on every rank, so that replicas agree."""
    memory = garbage(manifest, 1)
    for layer in manifest.layers:
        for part in layer.parts:
            shape, group = manifest.shapes[part.shape], manifest.group(layer.group)
            entries = shape.token.digits if shape.token else ()
            sizes = [group.blocks, prod(c for c, _ in entries), *(a.size for a in shape.axes), shape.element.bytes]
            seed = [*layer.name.encode(), *part.name.encode()]
            whole = np.random.default_rng(seed).integers(0, 256, sizes, np.uint8)
            mine = whole[(slice(None), slice(None), *(slice(a.start, a.stop) for a in shape.axes))]
            axes = [((group.blocks, part.block_stride),), entries, *(a.digits for a in shape.axes), ((shape.element.bytes, 1),)]
            places = reduce(np.add.outer, [np.array(places_of(digits)) for digits in axes]) + part.offset
            memory[part.region][places] = mine
    return memory


def places_of(digits: Sequence[tuple[int, int]]) -> list[int]:
    out = [0]
    for count, stride in digits:
        out = [at + i * stride for at in out for i in range(count)]
    return out


def carried_out(plan: Plan, request: Request, consumer: Manifest, producers: Sequence[Manifest]) -> Memory:
    """The consumer's memory after the plan's copies and fills; raises IndexError where a run leaves its region."""
    there = {m.identity: held_by(m) for m in producers}
    here = garbage(consumer, 2)
    binding = Binder(plan).bind(request)
    for side, copies in zip(plan.sources, binding.copies, strict=True):
        columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
        for src_region, src, dst_region, dst, n in zip(*(c.tolist() for c in columns), strict=True):
            source, target = there[side.identity][src_region], here[dst_region]
            if src < 0 or dst < 0 or src + n > len(source) or dst + n > len(target):
                raise IndexError(f"{src} or {dst} plus {n} bytes leave their regions")
            target[dst : dst + n] = source[src : src + n]
    fills = binding.fills
    for region, at, n in zip(fills.region.tolist(), fills.offset.tolist(), fills.length.tolist(), strict=True):
        if at < 0 or at + n > len(here[region]):
            raise IndexError(f"{at} plus {n} bytes leave their region")
        here[region][at : at + n] = 0
    return here
