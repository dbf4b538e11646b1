"""The models KVFerry knows by name, and the one way to get a shape from a name, a config.json or a directory with one."""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvferry.errors import ModelError
from kvferry.manifest.kinds import (
    Attention,
    Entries,
    GatedDelta,
    LatentAttention,
    LayerKind,
    LinearAttention,
    Mamba1,
    Mamba2,
    OpaqueCells,
    OpaqueState,
    ShortConv,
)
from kvferry.manifest.pool import LayerSpec
from kvferry.manifest.schema import Chunk, Window
from kvferry.models.config import from_config
from kvferry.models.shape import ModelShape

SYNTHETIC: Final = "synthetic-12"
MAX_CONFIG_BYTES: Final = 1 << 20

_CONFIGS = files("kvferry.models") / "zoo"


@lru_cache(maxsize=1)
def zoo_names() -> tuple[str, ...]:
    """The built-in models, `synthetic-12` last."""
    names = (entry.name for entry in _CONFIGS.iterdir())
    return (*sorted(name.removesuffix(".json") for name in names if name.endswith(".json")), SYNTHETIC)


def load_model(name_or_path: str | Path, dtype: str = "") -> ModelShape:
    """A zoo model by its name in any case, or the shape that a config.json, or a directory that holds one, describes; `dtype`
    as in `from_config`."""
    name = str(name_or_path).lower()
    if name in zoo_names():
        return _zoo_model(name, dtype)
    return from_config(*read_config(name_or_path), dtype)


def zoo_config(name: str) -> dict[str, object]:
    """What the zoo has under a name of `zoo_names`; nothing for the made-up model."""
    if name == SYNTHETIC:
        return {}
    config: dict[str, object] = json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def read_config(name_or_path: str | Path) -> tuple[dict[str, object], str]:
    """What a config.json, or the one of a directory, says, and what the model is called there."""
    path = Path(name_or_path)
    try:
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            return _read(path), path.resolve().parent.name if path.name == "config.json" else path.stem
    except (OSError, ValueError) as error:
        raise ModelError(f"{name_or_path}: cannot be read: {error}") from None
    if path.name == "config.json":
        raise ModelError(f"{path}: there is no such file; give a config.json, a directory with one, or a name of the zoo")
    near = difflib.get_close_matches(str(name_or_path).lower(), zoo_names(), 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(zoo_names())}"
    raise ModelError(f"{name_or_path}: neither a model of the zoo nor a config.json or a directory with one; {hint}")


@lru_cache(maxsize=32)
def _zoo_model(name: str, dtype: str = "") -> ModelShape:
    if name == SYNTHETIC:
        return _synthetic()
    return from_config(zoo_config(name), name, dtype)


def _read(path: Path) -> dict[str, object]:
    """`from_config` says what is wrong with a file that holds something else than an object."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"{path}: {path.stat().st_size:,} bytes; a config.json has at most {MAX_CONFIG_BYTES:,}")
    try:
        config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    return config


def _synthetic() -> ModelShape:
    """Every layer kind, with 12 of whatever is dealt to ranks; small, and legal at TP 1, 2, 3, 4, 6 and 12.

    Most kinds appear twice and some thrice, so that grouping splits some of them and pipeline stages miss others.
    """
    full = Attention(12, 8)
    mamba, one_group = Mamba2(12, 4, 8, groups=12, ssm_dtype="float32"), Mamba2(24, 4, 8, groups=1)
    others: tuple[tuple[str, LayerKind], ...] = (
        ("sliding", Attention(12, 8, reach=Window(24))),
        ("chunked", Attention(12, 8, reach=Chunk(40))),
        ("latent", LatentAttention(16, 8, indexer=12)),
        ("compressed", Entries("latent", 20, tokens_per_entry=4)),
        ("mamba1", Mamba1(48, 4)),
        ("gated_delta", GatedDelta(12, 24, 4, 8)),
        ("kda", GatedDelta(12, 12, 6, 6, ssm_dtype="float32")),
        ("short_conv", ShortConv(36)),
        ("linear", LinearAttention(12, 4, 6)),
        ("opaque_block", OpaqueCells("synthetic", 10)),
        ("opaque_slots", OpaqueCells("synthetic", 6, head_slots=12)),
        ("opaque_state", OpaqueState("synthetic", 1000)),
    )
    thrice: tuple[tuple[str, LayerKind], ...] = (("full", full), ("mamba2", mamba), ("mamba2_one_group", one_group))
    plain = (*thrice, *others, *thrice, *others)
    caches = (*((cache,) for cache in plain), (), thrice)
    layers = tuple(tuple(LayerSpec(f"layers.{i}.{suffix}", kind) for suffix, kind in held) for i, held in enumerate(caches))
    return ModelShape(SYNTHETIC, layers, "made up: every layer kind", query_heads=12)
