"""Does one manifest make sense by itself: digits fill extents, parts lie in their regions, nothing shares a byte.

Whatever passes here can be turned into addresses without further bounds checks than block ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from kvferry.errors import ManifestError
from kvferry.manifest.schema import DTYPE_BYTES, Axis, Group, Layer, Manifest, Part, Shape, TokenPaged
from kvferry.strided import Digits, Ints, footprint, size, span, spread

MAX_PIECES: Final = 1 << 16


def check_manifest(manifest: Manifest) -> None:
    """Raise ManifestError, naming layer and part, unless the manifest is well formed."""
    groups = _groups(manifest)
    footprints = [_check_shape(i, shape) for i, shape in enumerate(manifest.shapes)]
    seen: set[str] = set()
    for layer in manifest.layers:
        if layer.name in seen:
            raise ManifestError(f"layer {layer.name} is declared twice")
        seen.add(layer.name)
        group = groups.get(layer.group)
        if group is None:
            raise ManifestError(f"{layer.name}: group {layer.group} is not declared")
        for part in layer.parts:
            if part.shape >= len(manifest.shapes) or part.region >= len(manifest.regions):
                raise ManifestError(f"{layer.name} {part.name}: shape {part.shape} or region {part.region} is not declared")
            _check_part(manifest, layer, part, group, footprints[part.shape])
        if len({p.name for p in layer.parts}) < len(layer.parts):
            raise ManifestError(f"{layer.name}: a part is declared twice")
    _check_disjoint(manifest, groups, footprints)


def _groups(manifest: Manifest) -> dict[int, Group]:
    groups = {g.id: g for g in manifest.groups}
    if len(groups) < len(manifest.groups):
        raise ManifestError("two groups have the same id")
    for group in manifest.groups:
        if isinstance(group.paging, TokenPaged) and group.paging.tokens % group.paging.kernel_blocks:
            raise ManifestError(
                f"group {group.id}: {group.paging.tokens} tokens cannot be cut into {group.paging.kernel_blocks} kernel blocks"
            )
    return groups


def _check_shape(index: int, shape: Shape) -> tuple[int, Digits]:
    """Check a shape and return the bytes it touches within one block, as a run length and repeats."""
    element = shape.element
    if not element.opaque and DTYPE_BYTES.get(element.dtype) != element.bytes:
        raise ManifestError(
            f"shape {index}: dtype {element.dtype} of {element.bytes} bytes is unknown; known: {', '.join(DTYPE_BYTES)}"
        )
    if len({a.name for a in shape.axes}) < len(shape.axes) or any(a.name == "token" for a in shape.axes):
        raise ManifestError(f"shape {index}: an axis is named twice, or a plain axis is named 'token'")
    for axis in shape.axes:
        _check_axis(index, axis)
    digits = [d for axis in shape.axes for d in axis.digits]
    if shape.token:
        digits += shape.token.digits
    try:
        length, repeats = footprint(digits, element.bytes)
    except ValueError as error:
        raise ManifestError(f"shape {index}: {error}") from None
    if size(repeats) > MAX_PIECES:
        raise ManifestError(f"shape {index}: more than {MAX_PIECES:,} separate pieces in one block")
    return length, repeats


def _check_axis(index: int, axis: Axis) -> None:
    if not 0 <= axis.start < axis.stop <= axis.size:
        raise ManifestError(f"shape {index}, axis {axis.name}: [{axis.start}, {axis.stop}) is not inside [0, {axis.size})")
    if size(axis.digits) != axis.stop - axis.start:
        raise ManifestError(
            f"shape {index}, axis {axis.name}: digits hold {size(axis.digits)} indices, [{axis.start}, {axis.stop}) has "
            f"{axis.stop - axis.start}"
        )
    if axis.live is not None and axis.live > axis.size:
        raise ManifestError(f"shape {index}, axis {axis.name}: {axis.live} live indices of {axis.size}")


def _check_part(manifest: Manifest, layer: Layer, part: Part, group: Group, footprint_: tuple[int, Digits]) -> None:
    where = f"{layer.name} {part.name}"
    token = manifest.shapes[part.shape].token
    if (token is None) != (group.tokens == 0):
        raise ManifestError(f"{where}: has {'no' if token is None else 'a'} token axis, but group {group.id} is not paged so")
    if token is not None and token.entries * token.per_entry != group.tokens:
        raise ManifestError(
            f"{where}: {token.entries} entries of {token.per_entry} tokens do not make the group's {group.tokens} tokens"
        )
    length, repeats = footprint_
    end = part.offset + (group.blocks - 1) * part.block_stride + span(repeats) + length
    region = manifest.regions[part.region]
    if end > region.length:
        raise ManifestError(f"{where}: reaches byte {end:,} of region {region.name}, which has {region.length:,}")


def _check_disjoint(manifest: Manifest, groups: dict[int, Group], footprints: list[tuple[int, Digits]]) -> None:
    """No byte belongs to two blocks, or twice to one block of one group; groups may overlay each other block by block."""
    by_region: dict[int, list[tuple[Layer, Part]]] = defaultdict(list)
    for layer in manifest.layers:
        for part in layer.parts:
            by_region[part.region].append((layer, part))
    for region, placed in by_region.items():
        by_stride: dict[int, list[tuple[Layer, Part]]] = defaultdict(list)
        for layer, part in placed:
            by_stride[part.block_stride].append((layer, part))
        ranges = sorted(_check_same_stride(region, stride, same, groups, footprints) for stride, same in by_stride.items())
        for (_, end, one), (start, _, other) in pairwise(ranges):
            if start < end:
                raise ManifestError(f"region {region}: {one} and {other} overlap with different block strides")


def _check_same_stride(
    region: int,
    stride: int,
    placed: list[tuple[Layer, Part]],
    groups: dict[int, Group],
    footprints: list[tuple[int, Digits]],
) -> tuple[int, int, str]:
    """Pieces that repeat every `stride` bytes meet where their residues overlap and so do their ranges of blocks."""
    pieces = list(_pieces(placed, footprints))
    start = np.concatenate(pieces)
    owner = np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
    length = np.array([footprints[part.shape][0] for _, part in placed], np.int64)[owner]
    blocks = np.array([groups[layer.group].blocks for layer, _ in placed], np.int64)[owner]
    end = int((start + length + (blocks - 1) * stride).max())
    if (blocks == 1).all():
        stride = end
    if (length > stride).any():
        layer, part = placed[int(owner[np.argmax(length)])]
        raise ManifestError(f"region {region}: {layer.name} {part.name} is longer than its block stride of {stride} bytes")
    turn, low = np.divmod(start, stride)
    wraps = low + length > stride
    piece = np.concatenate([np.arange(len(start)), np.flatnonzero(wraps)])
    turn = np.concatenate([turn, turn[wraps] + 1])
    low = np.concatenate([low, np.zeros(int(wraps.sum()), np.int64)])
    high = np.concatenate(
        [np.minimum(low[: len(start)] + length, stride), (start + length - turn[: len(start)] * stride - stride)[wraps]]
    )
    group = np.array([layer.group for layer, _ in placed], np.int64)[owner][piece]
    order = np.lexsort((low, turn, group))
    columns = tuple(c[order] for c in (low, high, turn, group, blocks[piece], owner[piece]))
    clash = _clash_inside_groups(*columns[:4]) or _clash_between(*_joined(*columns))
    if clash:
        names = [f"{layer.name} {part.name}" for layer, part in (placed[i] for i in (columns[5][c] for c in clash))]
        raise ManifestError(f"region {region}: {names[0]} and {names[1]} share bytes of a block, or of different blocks")
    return int(start.min()), end, f"{placed[0][0].name} {placed[0][1].name}"


def _pieces(placed: list[tuple[Layer, Part]], footprints: list[tuple[int, Digits]]) -> Iterator[Ints]:
    total = 0
    for layer, part in placed:
        repeats = footprints[part.shape][1]
        total += size(repeats)
        if total > MAX_PIECES:
            raise ManifestError(f"{layer.name} {part.name}: more than {MAX_PIECES:,} separate pieces in one block")
        yield spread(part.offset, repeats)


def _clash_inside_groups(low: Ints, high: Ints, turn: Ints, group: Ints) -> tuple[int, int] | None:
    """Two pieces of one block and one group that share a byte."""
    bad = np.flatnonzero((low[1:] < high[:-1]) & (turn[1:] == turn[:-1]) & (group[1:] == group[:-1]))
    return (int(bad[0]), int(bad[0]) + 1) if len(bad) else None


def _joined(low: Ints, high: Ints, turn: Ints, group: Ints, blocks: Ints, owner: Ints) -> tuple[Ints, ...]:
    """Neighbouring pieces of one block and one group as one; the last column is the first piece's index."""
    apart = (low[1:] != high[:-1]) | (turn[1:] != turn[:-1]) | (group[1:] != group[:-1])
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.concatenate([first[1:] - 1, [len(low) - 1]])
    return low[first], high[last], turn[first], group[first], np.maximum.reduceat(blocks, first), first


def _clash_between(low: Ints, high: Ints, turn: Ints, group: Ints, blocks: Ints, first: Ints) -> tuple[int, int] | None:
    """Two pieces that share a byte, unless they are the same block seen by two groups."""
    order = np.argsort(low, kind="stable").tolist()
    open_: list[int] = []
    for i in order:
        open_ = [j for j in open_ if high[j] > low[i]]
        for j in open_:
            near, far = (i, j) if turn[i] <= turn[j] else (j, i)
            distance = turn[far] - turn[near]
            if distance < blocks[near] and (distance > 0 or group[i] == group[j]):
                return int(first[j]), int(first[i])
        open_.append(i)
    return None
