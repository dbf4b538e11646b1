"""From a rank's layers to its manifest: pages into regions, layer-major or block-major, groups overlaid or apart.

Layer-major: a region per slot, pages of one layer behind each other. Block-major: one region, all slots of a block behind
each other. Overlaid (HMA): the i-th layers of all groups share slot i, since a block id belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import lcm

from kvferry.errors import ManifestError
from kvferry.manifest.kinds import LayerKind, Layout, Shard, fixed_block, page_align
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
    """Layers that share a block table; `tokens` per block, 0 for state, cut into kernel blocks of `kernel` tokens, 0 for
    the layout's. A stage may hold none of a group's layers."""

    id: int
    layers: tuple[LayerSpec, ...]
    tokens: int = 0
    keeps: Reach = FULL
    hashed: bool = True
    kernel: int = 0


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
                sizes[slot, stream] = max(sizes.get((slot, stream), 0), _padded(length, layer.kind, layout))
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
    shape_of = {key: tuple(shapes.setdefault(part.shape, len(shapes)) for part in page.parts) for key, page in pages.items()}
    layers = []
    for group in groups:
        for layer in group.layers:
            page = (group.id, layer.kind)
            parts = []
            for part, shape in zip(pages[page].parts, shape_of[page], strict=True):
                region, offset, stride = place[slots[layer.name], part.stream]
                parts.append(Part(part.name, shape, region, offset + part.offset, stride))
            layers.append(Layer(layer.name, group.id, tuple(parts), layer.kind.reach, layer.required))
    addresses = accumulate(lengths[:-1], initial=base_address) if lengths else ()
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
                kernel = replace(layout, block=group.kernel) if group.kernel else layout
                pages[group.id, layer.kind] = _page(layer.kind, shard, kernel, group.tokens)
    return pages


@lru_cache(maxsize=4096)
def _page(kind: LayerKind, shard: Shard, layout: Layout, tokens: int) -> Page:
    """A page depends on nothing else, so ranks and layers share it, and with it its shapes."""
    return lay_out(kind.streams(shard, layout), tokens, kernel_blocks_of(tokens, layout.block))


def _padded(length: int, kind: LayerKind, layout: Layout) -> int:
    multiple = lcm(layout.page_align, page_align(kind))
    return -(-length // multiple) * multiple


def kernel_blocks_of(tokens: int, block: int) -> int:
    if tokens % block:
        raise ManifestError(f"a block of {tokens} tokens is not made of whole kernel blocks of {block}")
    return tokens // block or 1


def _group(group: GroupSpec, layout: Layout, blocks: int) -> Group:
    kernel_blocks = kernel_blocks_of(group.tokens, group.kernel or layout.block)
    paging = TokenPaged(group.tokens, kernel_blocks) if group.tokens else StatePaged()
    return Group(group.id, paging, blocks, group.keeps, group.hashed)


def page_bytes(kind: LayerKind, shard: Shard, layout: Layout) -> int:
    """Bytes of a state, or of one kernel block of tokens, with the padding that the kind itself asks for."""
    block = fixed_block(kind) or layout.block
    page = _page(kind, shard, replace(layout, block=block), block if kind.paging == "token" else 0)
    return sum(_padded(length, kind, replace(layout, page_align=1)) for length in page.stream_bytes)
