"""Which layers of a model share a block table, and how many tokens their blocks hold, as vLLM's hybrid memory allocator
decides it: over the whole model, so that group ids are the engine's and a pipeline stage keeps its members."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from kvferry.manifest.kinds import LayerKind, Shard, fixed_block
from kvferry.manifest.pool import GroupSpec, LayerSpec, page_bytes
from kvferry.manifest.schema import FULL, Reach
from kvferry.models.shape import ModelShape
from kvferry.models.side import Side

Members = tuple[LayerSpec, ...]


def engine_groups(model: ModelShape, side: Side) -> tuple[GroupSpec, ...]:
    """The groups of the whole engine; a group's `keeps` is the reach that all its layers have, else everything."""
    tokens = block_tokens(model, side)
    dealt = deal(model.caches) if side.layout.overlay else (model.caches,)
    groups = []
    for i, members in enumerate(dealt):
        kind = members[0].kind
        kernel = fixed_block(kind)
        held = 0 if kind.paging == "state" else kernel or tokens
        groups.append(GroupSpec(i, members, held, _keeps(members) if side.layout.overlay else FULL, kernel=kernel))
    return tuple(groups)


def block_tokens(model: ModelShape, side: Side) -> int:
    """Tokens per block: the side's, unless a block must also hold a whole state.

    A hybrid's block is the smallest multiple of the alignment whose page of the widest token layer is no smaller than
    the largest state. Both are a rank's, so that it depends on the tensor-parallel size.
    """
    shard, layout = Shard(0, side.tp), side.layout
    states = [page_bytes(k, shard, layout) for k in model.kinds if k.paging == "state"]
    pages = [page_bytes(k, shard, layout) for k in model.kinds if k.paging == "token" and not fixed_block(k)]
    if not states or not pages:
        return layout.block
    aligned = -(-max(model.alignment, layout.block) // layout.block) * layout.block
    return aligned * -(-max(states) * layout.block // (aligned * max(pages)))


def deal(caches: Sequence[LayerSpec]) -> tuple[Members, ...]:
    """Layers into groups of about equal size, each of one kind where that is possible."""
    if len({_table(spec.kind) for spec in caches}) == 1 and caches[0].kind.paging == "token":
        return (tuple(caches),)
    if any(fixed_block(spec.kind) for spec in caches):
        return _deal_packed(caches)
    buckets = _bucketed(caches, [spec.kind for spec in caches])
    smallest, largest = min(map(len, buckets)), max(map(len, buckets))
    size = largest if largest < 1.5 * smallest else smallest
    return tuple(share for bucket in buckets for share in _round_robin(bucket, -(-len(bucket) // size)))


def _deal_packed(caches: Sequence[LayerSpec]) -> tuple[Members, ...]:
    """Caches with block sizes of their own: a bucket per block size and reach, pages of all sizes side by side.

    A bucket with as many layers of each kind is a repeated pattern. One that mixes kinds stays whole and bounds the
    repeats of a group from below; the others are split where that wastes the fewest slots.
    """
    buckets = _bucketed(caches, [_table(spec.kind) for spec in caches])
    counts = [{len(same) for same in _by_kind(bucket)} for bucket in buckets]
    patterns = [(len(_by_kind(bucket)), max(count)) for bucket, count in zip(buckets, counts, strict=True) if len(count) == 1]
    least = max((repeats for kinds, repeats in patterns if kinds > 1), default=0)
    size = _least_padding([repeats for _, repeats in patterns], least) if least else 0
    groups = []
    for bucket, count in zip(buckets, counts, strict=True):
        shares = -(-max(count) // size) if size and len(count) == 1 else 1
        dealt = [_round_robin(same, shares) for same in _by_kind(bucket)]
        groups += [tuple(spec for same in dealt for spec in same[i]) for i in range(shares)]
    return tuple(groups)


def _least_padding(repeats: Sequence[int], least: int) -> int:
    """The group size from `least` on that leaves the fewest empty slots; of equals the largest."""
    return min(range(least, max(repeats) + 1), key=lambda size: (sum(-count % size for count in repeats), -size))


def _table(kind: LayerKind) -> tuple[str, Reach, int]:
    """What layers must have in common to share a block table."""
    return kind.paging, kind.reach, fixed_block(kind)


def _bucketed(caches: Sequence[LayerSpec], keys: Sequence[Hashable]) -> list[Members]:
    buckets: dict[Hashable, list[LayerSpec]] = defaultdict(list)
    for spec, key in zip(caches, keys, strict=True):
        buckets[key].append(spec)
    return [tuple(bucket) for bucket in buckets.values()]


def _by_kind(caches: Sequence[LayerSpec]) -> list[Members]:
    return _bucketed(caches, [spec.kind for spec in caches])


def _round_robin(layers: Members, shares: int) -> list[Members]:
    return [layers[i::shares] for i in range(shares)]


def _keeps(members: Members) -> Reach:
    reaches = {spec.kind.reach for spec in members}
    return reaches.pop() if len(reaches) == 1 else FULL
