"""A model on one side: is it possible, which rank holds what, and the manifests of all ranks.

The only place that knows how pipeline stages share layers. Knows no transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from kvferry.errors import ManifestError, UnshardableError
from kvferry.manifest.kinds import Shard, fixed_block
from kvferry.manifest.pool import build_manifest, page_bytes
from kvferry.manifest.schema import Identity, Manifest, Rank
from kvferry.models.groups import block_tokens, engine_groups
from kvferry.models.shape import ModelShape
from kvferry.models.side import Side

__all__ = ["Side", "block_tokens", "engine_groups", "legal", "manifests", "stages"]


def stages(layers: int, pp: int, sizes: Sequence[int] = ()) -> tuple[range, ...]:
    """Layer indices per pipeline stage: `sizes` of them, or a remainder goes one each to the stages before the last, from the
    back."""
    share, rest = divmod(layers, pp)
    if not sizes:
        sizes = [share + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]
    if len(sizes) != pp or sum(sizes) != layers:
        raise UnshardableError(f"stages of {', '.join(map(str, sizes))} layers are not {pp} stages of {layers} layers in all")
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def legal(model: ModelShape, side: Side) -> str | None:
    """Why no engine runs the model so, or None."""
    if side.pp > len(model.layers):
        return f"{model.name} has {len(model.layers)} layers, too few for {side.pp} pipeline stages"
    if model.query_heads % side.tp:
        return f"{model.query_heads} query heads cannot be dealt evenly to {side.tp} tensor-parallel ranks"
    if not side.layout.overlay:
        if any(kind.paging == "state" for kind in model.kinds):
            return f"{model.name} has recurrent layers, which cannot share a block table with attention; use hma=on"
        if any(fixed_block(kind) for kind in model.kinds):
            return f"{model.name} has caches with block sizes of their own, which need a block table each; use hma=on"
    try:
        for kind in model.kinds:
            page_bytes(kind, Shard(0, side.tp), side.layout)
    except (UnshardableError, ManifestError) as error:
        return str(error)
    return None


def manifests(
    model: ModelShape,
    side: Side,
    engine: str = "engine",
    incarnation: str = "0",
    blocks: int = 1024,
    sizes: Sequence[int] = (),
) -> tuple[Manifest, ...]:
    """The manifests of all ranks, stage by stage, of `sizes` layers if given. Raises UnshardableError with the reason that
    `legal` gives."""
    reason = legal(model, side)
    if reason is not None:
        raise UnshardableError(f"{model.name} at {side}: {reason}")
    groups = engine_groups(model, side)
    found = []
    for pp, indices in enumerate(stages(len(model.layers), side.pp, sizes)):
        names = {spec.name for i in indices for spec in model.layers[i]}
        held = [replace(g, layers=tuple(spec for spec in g.layers if spec.name in names)) for g in groups]
        for tp in range(side.tp):
            identity = Identity(engine, incarnation, model.fingerprint, Rank(tp, side.tp, pp, side.pp))
            found.append(build_manifest(identity, held, side.layout, blocks))
    return tuple(found)
