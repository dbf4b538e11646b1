"""The vocabulary of a plan: which bytes of which producer rank become which bytes of one consumer rank, as pure data.

A plan is free of block ids and absolute addresses. A run's offset is that of tile 0 of block 0; its lanes say how far
the tile of another block or another place in the block lies from there.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvferry.manifest.schema import Count, Digits, Group, Identity, Index, Name, Offset, Rank, Reach, Region

PLAN_VERSION: Final = 1
MAX_ITEMS: Final = 1 << 16

Repeat = tuple[Count, Offset, Offset]
Repeats = Annotated[tuple[Repeat, ...], Meta(max_length=32)]


class Lane(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a run travels from tile to tile on one side: by block, and by the digits of the tile's place in the block."""

    block_stride: Offset
    digits: Digits


class Run(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`length` contiguous bytes, repeated by (count, source stride, destination stride), in tile 0 of block 0."""

    src_region: Index
    src_offset: Offset
    dst_region: Index
    dst_offset: Offset
    length: Count
    repeats: Repeats
    src_lane: Index
    dst_lane: Index


class Grain(Struct, frozen=True, forbid_unknown_fields=True):
    """The runs of one aligned tile of `tokens` tokens; 0 tokens: of one state."""

    tokens: Index
    runs: Annotated[tuple[Run, ...], Meta(max_length=MAX_ITEMS)]


Grains = Annotated[tuple[Grain, ...], Meta(min_length=1, max_length=64)]


class Need(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that need the same tokens of the same source group: their reach, the tokens an entry stands for (0: a
    state), and whether an entry that is not complete is moved too (a cell, a block's scale) or not (a compressed entry)."""

    reach: Reach
    per_entry: Index
    partial: bool
    src_group: Index
    layers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]


class Edge(Struct, frozen=True, forbid_unknown_fields=True):
    """What flows from one group of one source to one group of the consumer, coarsest grain first."""

    source: Index
    src_group: Index
    dst_group: Index
    need: Index
    grains: Grains


class Fill(Struct, frozen=True, forbid_unknown_fields=True):
    """Destination bytes that must not keep what was there: where `need`'s tokens are not copied, or, without a need,
    in every loaded block. Both sides of a fill's run are the destination."""

    group: Index
    need: Index | None
    grains: Grains


class Side(Struct, frozen=True):
    """What binding must know of a rank."""

    identity: Identity
    regions: Annotated[tuple[Region, ...], Meta(max_length=4096)]
    groups: Annotated[tuple[Group, ...], Meta(max_length=1024)]

    def group(self, group_id: int) -> Group:
        return next(g for g in self.groups if g.id == group_id)


class Plan(Struct, frozen=True):
    """Everything one consumer rank reads, from the sources it reads. `tells` are producer ranks that nobody reads and
    that this rank tells that the request is done."""

    consumer: Side
    sources: Annotated[tuple[Side, ...], Meta(max_length=4096)]
    lanes: Annotated[tuple[Lane, ...], Meta(max_length=4096)]
    needs: Annotated[tuple[Need, ...], Meta(max_length=4096)]
    edges: Annotated[tuple[Edge, ...], Meta(max_length=4096)]
    fills: Annotated[tuple[Fill, ...], Meta(max_length=4096)]
    tells: Annotated[tuple[Rank, ...], Meta(max_length=4096)] = ()
    version: Literal[1] = PLAN_VERSION

    @property
    def flows(self) -> tuple[Edge | Fill, ...]:
        return (*self.edges, *self.fills)
