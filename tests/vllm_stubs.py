"""Attention caches of vLLM workers without vLLM: tensors that are numbers, and just as much of the objects beside them as a
manifest is read from. Strides are laid out here, axis by axis, and share nothing with the code that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvferry.engines.vllm import layouts, manifest_of
from kvferry.engines.vllm.evidence import Case, Evidence, Sighting
from kvferry.manifest import Identity, Manifest, Rank

BLOCKS = 64
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True)
class StubTensor:
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: str
    address: int
    begins: int
    length: int
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cuda", index=0))

    def stride(self) -> Sequence[int]:
        return self.strides

    def element_size(self) -> int:
        return BYTES[self.dtype]

    def data_ptr(self) -> int:
        return self.address + self.begins

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.address, nbytes=lambda: self.length)


@dataclass(frozen=True)
class Side:
    """An engine whose attention layers are all alike; `slots` and `width` where a backend packs heads in another way."""

    backend: str = "FLASH_ATTN"
    layout: str = "BLHNC"
    block: int = 16
    tp: int = 1
    heads: int = 8
    dim: int = 128
    layers: int = 32
    dtype: str = "bfloat16"
    asked: str = "auto"
    quantized: int = 0
    scales: tuple[float, float] = (1.0, 1.0)
    version: str = "0.32.0"
    slots: int = 0
    width: int = 0

    @property
    def local(self) -> int:
        return max(1, self.heads // self.tp)


def caches(side: Side) -> dict[str, StubTensor]:
    """[layer, block, head, token, content] in the order that the cache layout's letters say."""
    sizes = {
        "L": side.layers,
        "B": BLOCKS,
        "H": side.slots or side.local,
        "N": side.block,
        "C": side.width or 2 * side.dim,
    }
    strides, total = {}, 1
    for letter in reversed(side.layout):
        strides[letter] = total
        total *= sizes[letter]
    size = BYTES[side.dtype]
    shape, step = ([of[letter] for letter in "BHNC"] for of in (sizes, strides))
    return {
        f"model.layers.{i}.self_attn.attn": StubTensor(shape, step, side.dtype, 1 << 40, i * strides["L"] * size, total * size)
        for i in range(side.layers)
    }


def manifests(side: Side, engine: str) -> list[Manifest]:
    return [_manifest(side, engine, rank) for rank in range(side.tp)]


def _manifest(side: Side, engine: str, rank: int) -> Manifest:
    tensors = caches(side)
    spec = type("FullAttentionSpec", (), {})()
    spec.__dict__.update(
        block_size=side.block,
        num_kv_heads=side.local,
        head_size=side.dim,
        head_size_v=side.dim,
        kv_quant_mode=side.quantized,
        max_tp_shards=side.heads,
    )
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: side.backend),
        kv_cache_dtype=side.asked,
        _k_scale_float=side.scales[0],
        _v_scale_float=side.scales[1],
    )
    group = SimpleNamespace(layer_names=list(tensors), kv_cache_spec=spec, host_resident=False, enable_kv_transfer=True)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False, kv_cache_layout=side.layout),
        parallel_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(tensors, layer)),
        model_config=SimpleNamespace(model_arch_config=[SimpleNamespace(total_num_kv_heads=side.heads)] * side.layers),
        speculative_config=None,
    )
    return manifest_of(
        SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group]),
        tensors,
        config,
        Identity(engine, "1", "model", Rank(rank, side.tp)),
        version=side.version,
        conv_layout="SD",
        own=layouts.Own(_cells(side, tensors)),
    )


def _cells(side: Side, tensors: Mapping[str, StubTensor]) -> dict[str, layouts.Cell]:
    """Of heads in slots of their own; what `as_if_seen` says was seen."""
    form = _format(side)
    out = {}
    for name, tensor in tensors.items():
        grid = layouts.Grid(side.block, tensor.shape[3], tensor.strides[2])
        cell = layouts.certified(side.version, side.backend, "", form, side.layout, grid)
        if cell is not None and not side.slots:
            out[name] = cell
    return out


def _format(side: Side) -> str:
    if not side.quantized:
        return side.dtype
    return {"fp8": "fp8_e4m3"}.get(side.asked, side.asked)


def as_if_seen(monkeypatch: Any, seen: Mapping[str, Sequence[str]], formats: Sequence[str] = ("bfloat16",)) -> None:
    """Evidence of backends in cache layouts, for this test alone."""
    case = Case(16, 1, 256, 256, 0, 2, "")
    sightings = tuple(
        Sighting(backend, "", form, layout, (case,)) for backend, held in seen.items() for layout in held for form in formats
    )
    monkeypatch.setattr(layouts, "recorded", lambda: (Evidence("0.32.0", "", "", sightings),))
    layouts._seen.cache_clear()
    monkeypatch.setattr(layouts, "_seen", layouts._seen.__wrapped__)
