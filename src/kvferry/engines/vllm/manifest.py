"""The manifest of one vLLM worker, from the KVCacheConfig and the tensors that `register_kv_caches` receives.

Places are read off vLLM's tensors, meanings off its layer objects and the model's configuration. Imports neither torch
nor vLLM; decides nothing about transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal

from kvferry.engines.vllm.drafters import drafted_layers
from kvferry.engines.vllm.layouts import Cell, Grid, Own
from kvferry.engines.vllm.releases import release_of
from kvferry.engines.vllm.states import StateLayer, dtype_name, state_parts
from kvferry.engines.vllm.surface import Group as VllmGroup
from kvferry.engines.vllm.surface import KVCacheConfig, Layers, Tensor, VllmConfig
from kvferry.engines.vllm.tables import spec_of
from kvferry.errors import ManifestError
from kvferry.manifest.kinds import Shard, split_or_replicate
from kvferry.manifest.page import Extent, whole
from kvferry.manifest.schema import (
    FULL,
    Axis,
    Chunk,
    Element,
    Group,
    Identity,
    Layer,
    Manifest,
    Part,
    Reach,
    Region,
    Shape,
    StatePaged,
    TokenAxis,
    TokenPaged,
    Window,
)

TOKEN_SPECS: Final = frozenset(
    {
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
    }
)

ENCODER_SPECS: Final = frozenset({"CrossAttentionSpec", "EncoderOnlyAttentionSpec"})
ENCODERS: Final = "it is as long as an encoder's output, which the tokens of a request do not count"

SAME_FORMAT: Final = {"fp8": "fp8_e4m3"}
NUMBERS: Final = {"fp8_e4m3": "float8_e4m3fn"}
"""The element of a cache format, where it has another name."""


@dataclass(frozen=True)
class _Placed:
    """A part and its storage: `offset` is that of block 0 in the storage."""

    name: str
    shape: Shape
    tensor: Tensor
    offset: int
    block_stride: int


@dataclass(frozen=True)
class _Worker:
    """What holds for all layers of the worker."""

    config: VllmConfig
    layers: Layers
    blocks: int
    shard: Shard
    version: str
    conv: Literal["ds", "sd"]
    drafted: frozenset[str]
    own: Own


def manifest_of(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Tensor],
    vllm_config: VllmConfig,
    identity: Identity,
    *,
    version: str,
    conv_layout: str,
    own: Own,
) -> Manifest:
    """What a worker holds once its layers are bound to `kv_caches`.

    `own` is what the engine saw of its own caches. `version` is vLLM's: opaque cells of two releases are not compared.
    `conv_layout` is its `get_conv_state_layout()`: SD or DS.
    Group ids are positions in `kv_cache_groups`. A layer's `reach` is the model's own window or chunk, whichever spec vLLM
    gave the layer; a group's `keeps` is what its block table retains. With the hybrid manager off the first is a
    window and the second is FULL, so that the side compares equal with one that has it on.
    """
    refuse_context_parallel(vllm_config)
    if conv_layout not in ("SD", "DS"):
        raise ManifestError(f"conv layout {conv_layout!r} is neither SD nor DS")
    layers = vllm_config.compilation_config.static_forward_context
    worker = _Worker(
        vllm_config,
        layers,
        kv_cache_config.num_blocks,
        Shard(identity.rank.tp, identity.rank.tp_size),
        version,
        "sd" if conv_layout == "SD" else "ds",
        drafted_layers([name for name in layers if name in kv_caches], vllm_config, layers),
        own,
    )
    groups: list[Group] = []
    placed: list[tuple[str, int, Reach, bool, tuple[_Placed, ...]]] = []
    hashed = bool(vllm_config.cache_config.enable_prefix_caching)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not group.enable_kv_transfer:
            continue
        groups.append(_group(index, group, kv_caches, worker, hashed))
        for name in group.layer_names:
            layer = worker.layers[name]
            if getattr(layer, "kv_sharing_target_layer_name", None) is None:
                spec = spec_of(group.kv_cache_spec, name)
                parts = _parts(name, layer, spec, kv_caches[name], worker)
                placed.append((name, index, _reach(layer, spec), name not in worker.drafted, parts))
    return _assemble(identity, groups, placed)


def refuse_context_parallel(config: VllmConfig) -> None:
    """vLLM guards these for its own connectors, by their names."""
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(config.parallel_config, field, 1) > 1:
            raise ManifestError(f"{field} > 1: token ownership over context-parallel ranks is not supported; set it to 1")


def _kind(spec: Any) -> str:
    return type(spec).__name__


def _group(index: int, group: VllmGroup, kv_caches: Mapping[str, Tensor], worker: _Worker, hashed: bool) -> Group:
    names = group.layer_names
    spec = spec_of(group.kv_cache_spec, names[0] if names else "")
    where = names[0] if names else f"group {index}"
    if getattr(group, "host_resident", False):
        raise ManifestError(f"{where}: group {index} lives in host memory beside the device pool: not supported; turn it off")
    if _kind(spec) == "MambaSpec":
        return Group(index, StatePaged(), worker.blocks, hashed=hashed)
    for name in names or (where,):
        kind = _kind(spec_of(group.kv_cache_spec, name))
        if kind not in TOKEN_SPECS:
            supported = ", ".join(("MambaSpec", *sorted(TOKEN_SPECS)))
            hint = f" ({ENCODERS})" if kind in ENCODER_SPECS else ""
            raise ManifestError(f"{name}: a cache of spec {kind} is not supported{hint}; supported: {supported}")
    kernel_blocks = _kernel_blocks(where, kv_caches[names[0]], spec, worker) if names else 1
    return Group(index, TokenPaged(spec.block_size, kernel_blocks), worker.blocks, _keeps(spec), hashed)


def _keeps(spec: Any) -> Reach:
    """What a block table retains; only the managers of these specs give blocks back while a request runs."""
    if _kind(spec) in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        return Window(spec.sliding_window + spec.extra_retained_tokens)
    if _kind(spec) == "ChunkedLocalAttentionSpec":
        return Chunk(spec.attention_chunk_size)
    return FULL


def _reach(layer: Any, spec: Any) -> Reach:
    """The model layer's own reach. A full-attention spec may carry a window of other layers: it is not asked."""
    chunk, window = getattr(layer, "attention_chunk_size", None), getattr(layer, "sliding_window", None)
    if chunk is None and window is None and _kind(spec) == "SlidingWindowMLASpec":
        window = spec.sliding_window
    if chunk is not None:
        return Chunk(chunk)
    return FULL if window is None else Window(window)


def _parts(name: str, layer: Any, spec: Any, tensor: Tensor, worker: _Worker) -> tuple[_Placed, ...]:
    if _kind(spec) == "MambaSpec":
        return _state(name, layer, spec, tensor, worker)
    if len(tensor.shape) != 4 or tensor.stride()[3] != 1:
        raise ManifestError(f"{name}: a cache of {_form(tensor)} is not [block, head, token, content]: not supported")
    heads = _heads(name, spec, worker)
    ratio = _kernel_blocks(name, tensor, spec, worker)
    cell = worker.own.cells.get(name)
    if cell is None:
        return (_opaque(name, layer, spec, tensor, heads, ratio, worker),)
    return _planes(cell, layer, spec, tensor, heads, ratio)


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}"


def _kernel_blocks(name: str, tensor: Tensor, spec: Any, worker: _Worker) -> int:
    ratio, rest = divmod(tensor.shape[0], worker.blocks)
    if rest or not ratio or spec.block_size % ratio:
        raise ManifestError(
            f"{name}: {tensor.shape[0]} kernel blocks do not make {worker.blocks} blocks of {spec.block_size} tokens"
        )
    return ratio


def _heads(name: str, spec: Any, worker: _Worker) -> Extent:
    """A rank with several heads has an equal share; with one it may be a replica, and the model must say of what."""
    local: int = spec.num_kv_heads
    size = worker.shard.size
    if getattr(spec, "max_tp_shards", None) == 1:
        return whole("head", local)
    total = local * size
    if local == 1 and size > 1:
        config = worker.config
        model = config.speculative_config.draft_model_config if name in worker.drafted else config.model_config
        index = next((int(piece) for piece in name.split(".") if piece.isdigit()), 0)
        total = model.model_arch_config[index].total_num_kv_heads
        if total > size:
            raise ManifestError(f"{name}: one kv head on each of {size} ranks, but the model has {total}: cannot tell which")
    return split_or_replicate("head", total, worker.shard, "kv heads")


def backend_of(layer: Any) -> tuple[str, str]:
    """The backend's name, and the instruction set its layout depends on where there is one."""
    return str(layer.get_attn_backend().get_name()), str(getattr(layer, "isa", ""))


def _quantized(spec: Any) -> bool:
    return int(spec.kv_quant_mode) != 0


def format_of(layer: Any, spec: Any, tensor: Tensor) -> str:
    """What numbers a cache holds, by one name, whichever way they were asked for."""
    if not _quantized(spec):
        return dtype_name(tensor)
    said = str(layer.kv_cache_dtype)
    return SAME_FORMAT.get(said, said)


def grid_of(spec: Any, tensor: Tensor) -> Grid | None:
    """One head's tokens of a kernel block; None where slots are not heads, or K and V are not of one size."""
    _, slots, tokens, width = tensor.shape
    if slots != spec.num_kv_heads or spec.head_size_v not in (0, spec.head_size):
        return None
    return Grid(tokens, width, tensor.stride()[2])


def _block_stride(tensor: Tensor, ratio: int) -> int:
    return tensor.stride()[0] * tensor.element_size() * ratio


def _head_axis(tensor: Tensor, heads: Extent) -> Axis:
    return Axis("head", heads.size, heads.start, heads.stop, ((heads.count, tensor.stride()[1] * tensor.element_size()),))


def _planes(cell: Cell, layer: Any, spec: Any, tensor: Tensor, heads: Extent, ratio: int) -> tuple[_Placed, ...]:
    size = tensor.element_size()
    form = format_of(layer, spec, tensor)
    scales = dict(zip(("k", "v"), _scales(layer, spec), strict=False))
    block_stride = _block_stride(tensor, ratio)
    out = []
    for plane in cell:
        head = (_head_axis(tensor, heads),) if plane.by_head else ()
        token = TokenAxis(((ratio, block_stride // ratio), *((count, stride * size) for count, stride in plane.token)))
        if plane.row:
            shape = Shape(Element("opaque", plane.row * size, opaque=f"{plane.part} of {form}"), head, token)
        else:
            digits = tuple((count, stride * size) for count, stride in plane.dim)
            dims = prod(count for count, _ in digits)
            scale = scales.get(plane.part, scales.get("k"))
            element = Element(NUMBERS.get(form, form), size, () if scale is None else (scale,))
            shape = Shape(element, (*head, Axis("dim", dims, 0, dims, digits)), token)
        out.append(_Placed(plane.part, shape, tensor, _offset(tensor) + plane.start * size, block_stride))
    return tuple(out)


def _scales(layer: Any, spec: Any) -> tuple[float, ...]:
    """Those of K and of V, which are part of what the numbers mean."""
    return (float(layer._k_scale_float), float(layer._v_scale_float)) if _quantized(spec) else ()


def _opaque(name: str, layer: Any, spec: Any, tensor: Tensor, heads: Extent, ratio: int, worker: _Worker) -> _Placed:
    """Cells of a kernel block and head, tagged with everything that their private layout may depend on.

    Where slots are not heads, which of them hold which is not known, and where heads lie inside the tokens they cannot be
    told apart: such blocks are cut by no head, so that both sides must share the heads out alike.
    """
    tokens = spec.block_size // ratio
    _, slots, entries, width = tensor.shape
    _, by_slot, by_entry, _ = tensor.stride()
    size = tensor.element_size()
    share = Axis("shard", heads.size // heads.count, heads.start // heads.count, heads.start // heads.count + 1, ((1, 0),))
    cell, of = entries * width, ""
    axes: tuple[Axis, ...] = (_head_axis(tensor, heads),)
    if by_entry == width and slots != heads.count:
        of, axes = f" in {slots} slots", (share, Axis("slot", slots, 0, slots, ((slots, by_slot * size),)))
    elif by_entry != width:
        if (slots > 1 and by_slot != width) or by_entry != slots * width:
            raise ManifestError(f"{name}: no order of heads and tokens explains a cache of {_form(tensor)}: not supported")
        cell, of, axes = slots * entries * width, f" of {slots} heads", (share,)
    numbers = (*filter(None, backend_of(layer)), format_of(layer, spec, tensor))
    tag = f"vllm {release_of(worker.version)} {' '.join(numbers)} {tokens}x{width}{of}"
    element = Element("opaque", cell * size, _scales(layer, spec), opaque=tag)
    block_stride = _block_stride(tensor, ratio)
    token = TokenAxis(((ratio, block_stride // ratio),), per_entry=tokens, partial=True)
    return _Placed("bytes", Shape(element, axes, token), tensor, _offset(tensor), block_stride)


def _state(name: str, layer: Any, spec: Any, tensor: Tensor, worker: _Worker) -> tuple[_Placed, ...]:
    shard = Shard() if spec.tp_replicated else worker.shard
    state = state_layer(name, layer, spec, worker.config)
    views = state.views
    stride = _block_stride(tensor, 1)
    if tensor.shape[0] != worker.blocks or any(v.stride()[0] * v.element_size() != stride for v in views):
        raise ManifestError(f"{name}: the views of a state do not step from page to page as the registered tensor does")
    start = _offset(views[0])
    if name in worker.own.opaque_states:
        return (_Placed("bytes", _opaque_state(state, shard, worker.version), tensor, start, stride),)
    return tuple(_Placed(p.name, p.shape, tensor, start + p.offset, stride) for p in state_parts(state, shard, worker.conv))


def state_layer(name: str, layer: Any, spec: Any, config: VllmConfig) -> StateLayer:
    return StateLayer(name, layer, spec.mamba_type.name, layer.kv_cache, config.model_config.hf_text_config)


def _opaque_state(state: StateLayer, shard: Shard, version: str) -> Shape:
    """A whole page without its padding, between equally many ranks; the tag names what its private layout may depend on."""
    held = " ".join(f"{dtype_name(view)}{tuple(view.shape[1:])}" for view in state.views)
    size = sum(prod(view.shape[1:]) * view.element_size() for view in state.views)
    share = Axis("shard", shard.size, shard.rank, shard.rank + 1, ((1, 0),))
    tag = f"vllm {release_of(version)} {state.mamba_type} {held}".replace(" (", "(")
    return Shape(Element("opaque", size, opaque=tag), (share,))


def _offset(tensor: Tensor) -> int:
    return tensor.data_ptr() - tensor.untyped_storage().data_ptr()


def _assemble(
    identity: Identity, groups: Sequence[Group], placed: Sequence[tuple[str, int, Reach, bool, tuple[_Placed, ...]]]
) -> Manifest:
    regions: dict[int, Region] = {}
    order: dict[int, int] = {}
    shapes: dict[Shape, int] = {}
    layers = []
    for name, group, reach, required, found in placed:
        parts = []
        for part in found:
            storage, device = part.tensor.untyped_storage(), part.tensor.device
            address = storage.data_ptr()
            region = order.setdefault(address, len(order))
            memory: Literal["dram", "vram"] = "dram" if device.type == "cpu" else "vram"
            regions[address] = Region(f"storage{region}", storage.nbytes(), address, memory, device.index or 0)
            shape = shapes.setdefault(part.shape, len(shapes))
            parts.append(Part(part.name, shape, region, part.offset, part.block_stride))
        layers.append(Layer(name, group, tuple(parts), reach, required))
    return Manifest(identity, tuple(regions.values()), tuple(groups), tuple(shapes), tuple(layers))
