"""An engine certifies its own caches when it starts: its cache-write ops write numbered tokens into the empty cache.

For every kind of layer, the op of one layer writes to two kernel blocks. The cell of the table that explains every byte is what
the layer declares. If none does, or the op cannot be called, the layer is opaque. Kernels of recurrent layers step a state
likewise, except where they have to be compiled first (on a GPU) and a recorded run has seen them. Afterwards the cache holds
what it held before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvferry.engines.vllm.layouts import Cell, Grid, Own, elements_of, known
from kvferry.engines.vllm.manifest import TOKEN_SPECS, backend_of, format_of, grid_of, state_layer
from kvferry.engines.vllm.state_kernels import BLOCKS, StateError, StatePage, step_of, watch_page
from kvferry.engines.vllm.states import StateLayer, state_parts
from kvferry.engines.vllm.tables import spec_of
from kvferry.errors import KVFerryError
from kvferry.manifest.kinds import Shard

logger = logging.getLogger("kvferry.vllm")

LOOKED_AT: Final = 4
"""Kernel blocks whose bytes are compared; the op writes to the last of them, and to some of the one before."""
INDEXER: Final = "DEEPSEEK_V32_INDEXER"
INDEXER_GROUP: Final = 128
_STORED: Final = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}
"""What a cache format keeps numbers in; other formats are packed rows with scales of their own."""
_FILLED: Final = 0xFF
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class UnknownLayoutError(KVFerryError):
    """An op was seen to write as no cell of the table has it, or could not be called."""


@dataclass(frozen=True)
class _Kind:
    """What the layout of a layer may depend on."""

    backend: tuple[str, str]
    impl: str
    form: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        _, heads, tokens, width = self.shape
        return f"{' '.join(filter(None, (*self.backend, self.form)))}, kernel blocks of {tokens} tokens, {heads} x {width}"


@dataclass(frozen=True)
class _Watched:
    """A layer of a kind, with what its op reads and where it writes."""

    layer: Any
    spec: Any
    tensor: Any
    form: str
    grid: Grid

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements a token and head of each tensor that the op is given."""
        if backend_of(self.layer)[0] == INDEXER:
            return (int(self.layer.head_dim) - 4,)
        if hasattr(self.layer, "kv_lora_rank"):
            return int(self.layer.kv_lora_rank), int(self.layer.qk_rope_head_dim)
        return int(self.spec.head_size), int(self.spec.head_size_v or self.spec.head_size)

    @property
    def heads(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def own(self) -> Any:
        """The bytes of this layer in the blocks that are looked at."""
        return self.tensor[:LOOKED_AT].contiguous().view(torch.uint8)

    def put_back(self, own: Any) -> None:
        first = self.tensor[:LOOKED_AT]
        first.copy_(own.view(self.tensor.dtype).view(first.shape))

    def write(self, values: Sequence[Any], slots: Any) -> None:
        layer, values = self.layer, [some.contiguous() for some in values]
        if backend_of(layer)[0] == INDEXER:
            write_index(values[0][:, 0].contiguous(), layer.kv_cache, slots)
        elif hasattr(layer, "kv_lora_rank"):
            latent, rope = values
            layer.impl.do_kv_cache_update(latent[:, 0], rope, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            layer.impl.do_kv_cache_update(layer, *values, layer.kv_cache, slots)

    def slots(self) -> Any:
        """A full kernel block and one that is not, shuffled."""
        tokens = self.grid.tokens
        order = torch.randperm(2 * tokens - tokens // 2, generator=torch.Generator().manual_seed(tokens))
        table = torch.tensor((LOOKED_AT - 1, LOOKED_AT - 2))
        return (table[order // tokens] * tokens + order % tokens).to(self.tensor.device)

    def elements(self, cell: Cell, slots: Any) -> list[Any]:
        """Of each part [token][head][element]: places in the flat tensor where a cell has these slots."""
        apart = int(self.tensor.stride(1)) if self.heads > 1 else 0
        block, token = slots // self.grid.tokens * int(self.tensor.stride(0)), slots % self.grid.tokens
        places = (torch.from_numpy(elements_of(plane, self.heads, apart)).to(slots.device) for plane in cell)
        return [place.transpose(0, 1)[token] + block[:, None, None] for place in places]


def write_index(keys: Any, cache: Any, slots: Any) -> None:
    from vllm import _custom_ops

    _custom_ops.indexer_k_quant_and_cache(keys, cache, slots, INDEXER_GROUP, "ue8m0")


def certify_self(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], config: Any, shard: Shard, conv_layout: str, recorded: bool
) -> Own:
    """What the engine's ops and kernels were seen to do; one line for each kind of layer says what is opaque, and why.

    To be called before anything is served: the caches are empty, and hold afterwards what they held before. `recorded`: runs on
    other machines have seen this release.
    """
    began = time.monotonic()
    cells = _own_cells(kv_cache_config, kv_caches, config)
    opaque = _opaque_states(kv_cache_config, kv_caches, config, shard, conv_layout, recorded)
    logger.info("this engine certified its caches in %.0f ms", (time.monotonic() - began) * 1e3)
    return Own(cells, opaque)


def _own_cells(kv_cache_config: Any, kv_caches: Mapping[str, Any], config: Any) -> dict[str, Cell]:
    layers, dtype = config.compilation_config.static_forward_context, config.model_config.dtype
    by_kind: dict[_Kind, list[str]] = {}
    first: dict[_Kind, Any] = {}
    for name, spec in _attention(kv_cache_config, kv_caches, layers):
        layer, tensor = layers[name], kv_caches[name]
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        impl = type(getattr(layer, "impl", layer)).__name__
        kind = _Kind(backend_of(layer), impl, format_of(layer, spec, tensor), shape, strides)
        by_kind.setdefault(kind, []).append(name)
        first.setdefault(kind, spec)
    cells: dict[str, Cell] = {}
    for kind, names in by_kind.items():
        try:
            cell = watch(layers[names[0]], first[kind], kv_caches[names[0]], kind.form, dtype)
        except UnknownLayoutError as error:
            logger.warning(
                "caches of %d layers (%s) are opaque: %s. They are moved whole: both engines need this backend, this release "
                "of vLLM and equal block sizes",
                len(names),
                kind,
                error,
            )
            continue
        cells |= dict.fromkeys(names, cell)
        logger.info("caches of %d layers (%s) are certified", len(names), kind)
    return cells


def _opaque_states(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], config: Any, shard: Shard, conv_layout: str, recorded: bool
) -> frozenset[str]:
    """Layers whose kernels were seen to keep a state otherwise than declared. What no kernel of this machine steps is declared
    as vLLM's views have it."""
    layers = config.compilation_config.static_forward_context
    by_kind: dict[tuple[object, ...], list[str]] = {}
    why: dict[tuple[object, ...], str] = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names if group.enable_kv_transfer else ():
            spec = spec_of(group.kv_cache_spec, name)
            if type(spec).__name__ != "MambaSpec":
                continue
            state = state_layer(name, layers[name], spec, config)
            views = tuple((str(view.dtype), tuple(view.shape), tuple(view.stride())) for view in state.views)
            kind = (type(state.layer).__name__, state.mamba_type, views)
            of_rank = Shard() if spec.tp_replicated else shard
            if kind not in by_kind and (found := _watch_state(state, kv_caches[name], of_rank, conv_layout, recorded)):
                why[kind] = found
            by_kind.setdefault(kind, []).append(name)
    for which, reason in why.items():
        logger.warning(
            "states of %d layers (%s of type %s) are opaque: %s. They are moved whole: both engines need this release of vLLM "
            "and equal tensor-parallel sizes",
            len(by_kind[which]),
            *which[:2],
            reason,
        )
    return frozenset(name for kind in why for name in by_kind[kind])


def _watch_state(state: StateLayer, tensor: Any, shard: Shard, conv_layout: str, recorded: bool) -> str:
    """Why a layer's states are opaque, or nothing. A kernel that cannot be called says nothing of a release that runs have
    `recorded`."""
    device, guessed = tensor.device.type, int(getattr(state.layer, "num_spec", 0))
    if device != "cpu" and recorded:
        return ""
    parts = state_parts(state, shard, "sd" if conv_layout == "SD" else "ds")
    if tensor.shape[0] < BLOCKS or not parts[0].name.startswith("conv") or (device == "cpu" and guessed):
        return ""
    pages = tensor[:BLOCKS, 0, 0].view(torch.uint8)
    before = pages.clone()
    try:
        page = StatePage(state.name, pages, tuple(state.views), parts, conv_layout, guessed)
        watch_page(page, *step_of(state.layer, state.mamba_type, device))
    except StateError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  any failure of foreign code says that the kernel is not as it is known
        return "" if recorded else f"its kernels could not be called ({type(error).__name__}: {str(error)[:200]})"
    finally:
        pages.copy_(before)
    return ""


def _attention(kv_cache_config: Any, kv_caches: Mapping[str, Any], layers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names if group.enable_kv_transfer else ():
            spec = spec_of(group.kv_cache_spec, name)
            shares = getattr(layers[name], "kv_sharing_target_layer_name", None) is not None
            if type(spec).__name__ in TOKEN_SPECS and not shares and kv_caches[name].dim() == 4:
                yield name, spec


def watch(layer: Any, spec: Any, tensor: Any, form: str, dtype: Any) -> Cell:
    """The cell in which a layer keeps what its op is given; raises UnknownLayoutError. The cache is left as it was."""
    grid = grid_of(spec, tensor)
    if grid is None:
        raise UnknownLayoutError("its slots are not heads, or its K and V are of different sizes")
    if tensor.shape[0] < LOOKED_AT:
        raise UnknownLayoutError(f"it has {tensor.shape[0]} kernel blocks, and {LOOKED_AT} are looked at")
    watched = _Watched(layer, spec, tensor, form, grid)
    numbers = form in _STORED
    wanted = [cell for cell in known(form, grid) if numbers != any(plane.row for plane in cell)]
    if not wanted:
        raise UnknownLayoutError("no known layout has this cache format, head size and block size")
    before = watched.own.clone()
    try:
        if not numbers:
            watched.write(_packed(watched, 1, dtype, 0), torch.full((1,), -1, device=tensor.device))
            before = watched.own.clone()
        found = _numbers(watched, wanted, dtype) if numbers else _rows(watched, wanted, dtype)
    except UnknownLayoutError:
        raise
    except Exception as error:  # any failure of foreign code says that the op is not as it is known
        raise UnknownLayoutError(f"its op could not be called ({type(error).__name__}: {str(error)[:200]})") from error
    finally:
        watched.put_back(before)
    return found


def _flat(watched: _Watched, at: Iterable[Any]) -> Any:
    """The cache from the layer's first element on, as long as the places need."""
    most = max(int(some.max()) for some in at) + 1
    return watched.tensor.as_strided((most,), (1,))


def _only(watched: _Watched, cells: Sequence[Cell], before: Any, slots: Any, agrees: Any) -> list[Cell]:
    """The cells in which everything was found, and beside which nothing was written."""
    out = []
    for cell in cells:
        at = watched.elements(cell, slots)
        flat, written = _flat(watched, at), watched.own.clone()
        if not agrees([flat[some] for some in at]):
            continue
        watched.put_back(before)
        clean = [flat[some].clone() for some in at]
        watched.put_back(written)
        for some, was in zip(at, clean, strict=True):
            flat[some] = was
        if torch.equal(watched.own, before):
            out.append(cell)
        watched.put_back(written)
    return out


def _numbers(watched: _Watched, cells: Sequence[Cell], dtype: Any) -> Cell:
    """Each element has a value of its own; twice, since narrow formats have few values."""
    before, slots = watched.own.clone(), watched.slots()
    stored = getattr(torch, _STORED[watched.form])
    word = _WORDS[stored.itemsize]
    for seed in (1, 2):
        given = [_values(watched, len(slots), dim, stored, dtype, part, seed) for part, dim in enumerate(watched.dims)]
        kept = [values.view(word) for _, values in given]
        kept = [torch.cat(kept, dim=2)] if hasattr(watched.layer, "kv_lora_rank") else kept
        watched.write([values for values, _ in given], slots)

        cells = _only(watched, cells, before, slots, lambda found, kept=kept: _equal(found, kept))
        watched.put_back(before)
    return _found(cells)


def _equal(found: Sequence[Any], kept: Sequence[Any]) -> bool:
    pairs = list(zip(found, kept, strict=False))
    return len(found) == len(kept) and all(a.shape == b.shape and torch.equal(a.view(b.dtype), b) for a, b in pairs)


def _values(watched: _Watched, count: int, dim: int, stored: Any, dtype: Any, part: int, seed: int) -> tuple[Any, Any]:
    """What the op is given, and what the cache then keeps: finite numbers, none of them zero."""
    generator = torch.Generator().manual_seed(10 * seed + part)
    shape, device = (count, watched.heads, dim), watched.tensor.device
    if stored.itemsize > 1:
        values = torch.randn(shape, generator=generator).to(dtype)
        values = torch.where(values == 0, torch.ones_like(values), values).to(device)
        return values, values.to(stored)
    latent = hasattr(watched.layer, "kv_lora_rank")
    scale = watched.layer._k_scale_float if latent or not part else watched.layer._v_scale_float
    bits = torch.randint(1, 0x7F, shape, generator=generator, dtype=torch.uint8)
    bits |= torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    kept = bits.view(stored)
    return (kept.float() * scale).to(dtype).to(device), kept.to(device)


def _rows(watched: _Watched, cells: Sequence[Cell], dtype: Any) -> Cell:
    """Bytes of a token and head that depend on nothing else: not on other tokens, other heads, the place, what was there."""
    before, slots = watched.own.clone(), watched.slots()
    count, turned = len(slots), slots.roll(1)
    values, others = _packed(watched, count, dtype, 1), _packed(watched, count, dtype, 2)
    by_head = all(plane.by_head for cell in cells for plane in cell)
    changed = (torch.arange(watched.heads, device=slots.device) % 2 == 1) & by_head
    mixed = [torch.where(changed[None, :, None], other, value) for value, other in zip(values, others, strict=True)]
    watched.write(values, slots)
    first: dict[Cell, list[Any]] = {}
    for cell in cells:
        at = watched.elements(cell, slots)
        first[cell] = [_flat(watched, at)[some] for some in at]
    cells = _only(watched, cells, before, slots, lambda found: True)
    filled = torch.full_like(before, _FILLED)
    watched.put_back(filled)
    watched.write(mixed, turned)
    out = []
    for cell in cells:
        out += _only(watched, [cell], filled, turned, lambda found, cell=cell: _agree(first[cell], found, changed[None]))
    watched.put_back(before)
    return _found(out)


def _agree(one: Sequence[Any], other: Sequence[Any], changed: Any) -> bool:
    """Whether rows of equal values are equal, and those of other values are not; scales behind them may be equal by chance."""
    same = [(a.view(torch.uint8) == b.view(torch.uint8)).all(dim=2) for a, b in zip(one, other, strict=True)]
    rows, differs = one[0].view(torch.uint8), changed.expand(same[0].shape)
    varied = not torch.equal(rows[0], rows[1]) and not bool(same[0][differs].any())
    return varied and all(bool(found[~changed.expand(found.shape)].all()) for found in same)


def _packed(watched: _Watched, count: int, dtype: Any, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((count, watched.heads, dim) for dim in watched.dims)
    return [torch.randn(shape, generator=generator).to(dtype).to(watched.tensor.device) for shape in shapes]


def _found(cells: Sequence[Cell]) -> Cell:
    if not cells:
        raise UnknownLayoutError("its op writes otherwise than any known layout has it")
    return cells[0]
