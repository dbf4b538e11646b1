"""vLLM's block ids by group as the tables of a request: null blocks are holes, and of state groups one block counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvferry.engines.vllm.surface import Group
from kvferry.errors import BindError
from kvferry.manifest.schema import HOLE
from kvferry.session.reference import Sizes

NULL_BLOCK: Final = 0


def tables_of(groups: Sequence[Group], block_ids: Sequence[Sequence[int]], tokens: int) -> dict[int, list[int] | int]:
    """Tables for the first `tokens` tokens, keyed by the group's position; groups that are not transferred are left out."""
    return {
        index: _table(index, spec_of(group.kv_cache_spec), ids, tokens)
        for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True))
        if group.enable_kv_transfer
    }


def sizes_of(groups: Sequence[Group], longest: int) -> Sizes:
    """How large a reference may be of a prompt that an engine with these groups takes; of states one block counts."""
    specs = [spec_of(group.kv_cache_spec) for group in groups]
    return Sizes.of(longest, len(groups), [spec.block_size for spec in specs if type(spec).__name__ != "MambaSpec"])


def only_states_lag(groups: Sequence[Group]) -> bool:
    """Whether of a prefix that is found in the cache nothing but recurrent states can be missing: a load brings these whole,
    and of all else what lies past the prefix. What a window has lost before its end would not be loaded."""
    kinds = {type(spec_of(group.kv_cache_spec)).__name__ for group in groups}
    return "MambaSpec" in kinds and kinds <= {"MambaSpec", "FullAttentionSpec", "MLAAttentionSpec"}


def spec_of(spec: Any, layer: str = "") -> Any:
    """The spec of a layer, or of any: a group of one type but several shapes carries one for each, which agree on all but
    the shape."""
    by_layer: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return (by_layer.get(layer) or next(iter(by_layer.values()))) if by_layer else spec


def specs_of(spec: Any) -> tuple[Any, ...]:
    """The specs of all layers of a group, or the one that they share."""
    by_layer: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or {}
    return tuple(by_layer.values()) or (spec,)


def keeps_every_token(spec: Any) -> bool:
    """Whether a layer keeps something of every token, each by itself: no window, no chunk, no state."""
    known = type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec")
    return known and spec.sliding_window is None and spec.attention_chunk_size is None


def _table(index: int, spec: Any, ids: Sequence[int], tokens: int) -> list[int] | int:
    if type(spec).__name__ != "MambaSpec":
        table = list(ids[: -(-tokens // spec.block_size)])
        return table if NULL_BLOCK not in table else [HOLE if block == NULL_BLOCK else block for block in table]
    place = 0 if spec.mamba_cache_mode == "none" else -(-tokens // spec.block_size) - 1
    if place >= len(ids) or ids[place] == NULL_BLOCK:
        raise BindError(f"group {index}: no block holds the state after {tokens} tokens (place {place} of {len(ids)})")
    return ids[place]
