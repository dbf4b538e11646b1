"""From a rank's layers to its manifest: pages into regions, layer-major or block-major, groups overlaid or apart.

Layer-major: a region per slot, pages of one layer behind each other. Block-major: one region, all slots of a block behind
each other. Overlaid (HMA): the i-th layers of all groups share slot i, since a block id belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ManifestError
from kvferry.manifest.kinds import LayerKind, Layout, Shard
from kvferry.manifest.page import Page, lay_out
from kvferry.manifest.schema import FULL, Group, Identity, Layer, Manifest, Part, Reach, Region, Shape, StatePaged, TokenPaged


@dataclass(frozen=True)
class LayerSpec:
    """A layer by its model name and kind; `required` as in the manifest."""

    name: str
    kind: LayerKind
    required: bool = True


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share a block table; `tokens` per block, 0 for state. A stage may hold none of a group's layers."""

    id: int
    layers: tuple[LayerSpec, ...]
    tokens: int = 0
    keeps: Reach = FULL
    hashed: bool = True


def build_manifest(
    identity: Identity, groups: Sequence[GroupSpec], layout: Layout, blocks: int, base_address: int = 0
) -> Manifest:
    """Place every layer of one rank. Region addresses are consecutive from `base_address`: an engine gives its own."""
    shard = Shard(identity.rank.tp, identity.rank.tp_size)
    pages = _pages(groups, layout, shard)
    sizes: dict[tuple[int, int], int] = {}
    slots: dict[str, int] = {}
    for group in groups:
        for i, layer in enumerate(group.layers):
            slot = slots[layer.name] = i if layout.overlay else len(slots)
            for stream, length in enumerate(pages[group.id, layer.kind].stream_bytes):
                aligned = -(-length // layout.page_align) * layout.page_align
                sizes[slot, stream] = max(sizes.get((slot, stream), 0), aligned)
    order = sorted(sizes)
    if layout.pool == "layer":
        regions = tuple(f"slot{slot}.{stream}" for slot, stream in order)
        lengths = tuple(sizes[key] * blocks for key in order)
        place = {key: (i, 0, sizes[key]) for i, key in enumerate(order)}
    else:
        at, place = 0, {}
        total = sum(sizes.values())
        for key in order:
            place[key] = (0, at, total)
            at += sizes[key]
        regions, lengths = ("pool",), (total * blocks,)
    shapes: dict[Shape, int] = {}
    layers = []
    for group in groups:
        for layer in group.layers:
            parts = []
            for part in pages[group.id, layer.kind].parts:
                region, offset, stride = place[slots[layer.name], part.stream]
                shape = shapes.setdefault(part.shape, len(shapes))
                parts.append(Part(part.name, shape, region, offset + part.offset, stride))
            layers.append(Layer(layer.name, group.id, tuple(parts), layer.kind.reach, layer.required))
    addresses = [base_address + sum(lengths[:i]) for i in range(len(lengths))]
    return Manifest(
        identity,
        tuple(Region(n, length, address) for n, length, address in zip(regions, lengths, addresses, strict=True)),
        tuple(_group(g, layout, blocks) for g in groups),
        tuple(shapes),
        tuple(layers),
    )


def _pages(groups: Sequence[GroupSpec], layout: Layout, shard: Shard) -> dict[tuple[int, LayerKind], Page]:
    pages: dict[tuple[int, LayerKind], Page] = {}
    for group in groups:
        for layer in group.layers:
            if (layer.kind.paging == "state") != (group.tokens == 0):
                raise ManifestError(
                    f"{layer.name}: paged by {layer.kind.paging}, but group {group.id} has {group.tokens} tokens a block"
                )
            if (group.id, layer.kind) not in pages:
                kernel_blocks = kernel_blocks_of(group.tokens, layout.block)
                pages[group.id, layer.kind] = lay_out(layer.kind.streams(shard, layout), group.tokens, kernel_blocks)
    return pages


def kernel_blocks_of(tokens: int, block: int) -> int:
    if tokens % block:
        raise ManifestError(f"a block of {tokens} tokens is not made of whole kernel blocks of {block}")
    return tokens // block or 1


def _group(group: GroupSpec, layout: Layout, blocks: int) -> Group:
    paging = TokenPaged(group.tokens, kernel_blocks_of(group.tokens, layout.block)) if group.tokens else StatePaged()
    return Group(group.id, paging, blocks, group.keeps, group.hashed)


def page_bytes(kind: LayerKind, shard: Shard, layout: Layout) -> int:
    """Bytes of a state, or of one kernel block of tokens."""
    return sum(lay_out(kind.streams(shard, layout), layout.block if kind.paging == "token" else 0).stream_bytes)
