"""What is measured: a model's shape, two sides and one request, all derived from a few numbers.

Two processes that hold the same case build the same manifests from it and exchange addresses alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from msgspec.structs import replace

from kvferry.doctor.memory import MemoryKind
from kvferry.errors import MeasureError
from kvferry.manifest import HOLE, Attention, LayerSpec, Manifest
from kvferry.manifest.schema import Group
from kvferry.models import ModelShape, Side, load_model, manifests
from kvferry.plan import Plan, Request, make_plan

Order = Literal["consecutive", "scattered"]

PAGES: Final = "pages"
HEADS: Final = 8
BLOCK: Final = 16
PAGE_UNIT: Final = 2 * HEADS * 2 * BLOCK
_SEED: Final = 7


@dataclass(frozen=True)
class Case:
    """One request of `tokens` tokens between two sides.

    The model `pages` is made up: `regions` attention layers whose pages of 16 tokens have `page` bytes on one rank. A pool
    has `blocks` blocks, and at least as many as the request takes.
    """

    name: str
    prefill: str
    decode: str
    tokens: int
    order: Order = "consecutive"
    model: str = PAGES
    regions: int = 4
    page: int = 32_768
    blocks: int = 0

    @cached_property
    def shape(self) -> ModelShape:
        if self.model != PAGES:
            return load_model(self.model)
        if self.page < PAGE_UNIT or self.page % PAGE_UNIT:
            raise MeasureError(f"a page of {self.page:,} bytes: give a multiple of {PAGE_UNIT} ({HEADS} heads, {BLOCK} tokens)")
        if self.regions < 1:
            raise MeasureError(f"{self.regions} regions: give at least 1")
        kind = Attention(HEADS, self.page // PAGE_UNIT)
        layers = tuple((LayerSpec(f"layers.{i}", kind),) for i in range(self.regions))
        return ModelShape(PAGES, layers, "made up: equal pages", query_heads=HEADS)

    @cached_property
    def producers(self) -> tuple[Manifest, ...]:
        return self._side(self.prefill, "prefill")

    @cached_property
    def consumers(self) -> tuple[Manifest, ...]:
        return self._side(self.decode, "decode")

    @cached_property
    def request(self) -> Request:
        """Tables as an engine hands them out, in lists; a scattered one takes blocks from all over the pool."""
        src, dst = (self._tables(side[0], seed) for seed, side in enumerate((self.producers, self.consumers)))
        return Request(self.tokens, src, dst)

    def plan(self, producers: Sequence[Manifest] | None = None, consumer: Manifest | None = None) -> Plan:
        """The plan of the first consumer rank; `producers` and `consumer` where they lie at addresses of their own."""
        return make_plan(consumer or self.consumers[0], producers or self.producers, self.consumers)

    def _side(self, text: str, engine: str) -> tuple[Manifest, ...]:
        if self.tokens < 1:
            raise MeasureError(f"{self.tokens} tokens: a request loads at least 1")
        side = Side.parse(text)
        groups = manifests(self.shape, side, engine=engine, blocks=2)[0].groups
        needed = 1 + sum(-(-self.tokens // g.tokens) if g.tokens else 1 for g in groups)
        return manifests(self.shape, side, engine=engine, blocks=max(needed, self.blocks))

    def _tables(self, manifest: Manifest, seed: int) -> Mapping[int, list[int]]:
        blocks = manifest.groups[0].blocks
        ids = np.arange(1, blocks)
        if self.order == "scattered":
            np.random.default_rng([_SEED, seed]).shuffle(ids)
        free, tables = 0, {}
        for group in manifest.groups:
            holes, taken = _places(group, self.tokens)
            tables[group.id] = [HOLE] * holes + ids[free : free + taken].tolist()
            free += taken
        return tables


def _places(group: Group, tokens: int) -> tuple[int, int]:
    """Places before the window that a group keeps, and blocks after them."""
    if not group.tokens:
        return 0, 1
    stop = -(-tokens // group.tokens)
    first = min(group.keeps.first_needed(tokens) // group.tokens, stop)
    return first, stop - first


def size_of(manifest: Manifest) -> int:
    return sum(region.length for region in manifest.regions)


def placed(manifest: Manifest, address: int, memory: MemoryKind = "dram") -> Manifest:
    """The manifest with its regions behind each other from `address` on."""
    base = manifest.regions[0].address
    regions = tuple(replace(r, address=r.address - base + address, memory=memory) for r in manifest.regions)
    return replace(manifest, regions=regions)
