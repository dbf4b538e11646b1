"""Watches vLLM's own cache-write ops: for every element that is given to one, the byte where it is kept.

Caches are allocated by vLLM, in the cache layout asked for, three layers of which the middle one is written. Every element
of K and V (or of the latent) is given a number of its own, one digit of it at a time, since a narrow format holds few
different numbers: what is found in memory after all the digits says which element each place holds. Packed formats, where an
op computes scales of its own, are watched by rows: which bytes a token's write touches, and that they depend on that token
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.version import __version__

from kvferry.engines.vllm.certify_self import write_index
from kvferry.engines.vllm.evidence import Case, Evidence, Sighting, Trouble
from kvferry.engines.vllm.layouts import Grid, candidate, digest, places
from kvferry.engines.vllm.releases import customized, place_of
from kvferry.errors import KVFerryError
from kvferry.strided import Ints

LAYOUTS: Final = tuple(layout.name for layout in KVCacheLayout)
BLOCKS: Final = 4
TABLE: Final = (2, 0)
LAYERS: Final = ("before", "written", "after")
K_SCALE, V_SCALE = 2.0, 4.0

_DIGITS: Final = {"float32": 4096, "float16": 1024, "bfloat16": 128, "fp8_e4m3": 16}
"""How many whole numbers from 0 a format tells apart."""
_SPELLED: Final = {
    "float32": ("auto",),
    "float16": ("auto", "float16"),
    "bfloat16": ("auto", "bfloat16"),
    "fp8_e4m3": ("fp8", "fp8_e4m3"),
}
"""What a user may call a format, and vLLM then gives to its op."""
_UNWRITTEN: Final = 0xFF


class OpError(KVFerryError):
    """An op was seen to do what no layout explains."""


@dataclass(frozen=True)
class Trial:
    """One cache to be written to; `dims` are elements a token and head of each tensor that the op is given."""

    backend: str
    isa: str
    form: str
    layout: str
    tokens: int
    heads: int
    dims: tuple[int, ...]
    spelled: str

    def __str__(self) -> str:
        dims = "+".join(map(str, self.dims))
        named = " ".join(filter(None, (self.backend, self.isa, self.form, self.layout)))
        return f"{named}: {self.tokens} tokens, {self.heads} heads of {dims}"


Shape = tuple[int, int, tuple[int, ...]]
Write = Callable[[Trial, Any, Sequence[Any], Any], None]


@dataclass(frozen=True)
class Subject:
    """A backend's op: what it is called with, and the shapes in which it is watched."""

    backend: str
    forms: tuple[str, ...]
    shapes: tuple[Shape, ...]
    write: Write
    isa: str = ""
    layouts: tuple[str, ...] = LAYOUTS
    latent: bool = False

    def trials(self) -> Iterator[tuple[str, str, tuple[Trial, ...]]]:
        """Of each format and cache layout: every shape, and every way to ask for the format."""
        for form in self.forms:
            first, *others = _SPELLED.get(form, (form,))
            for layout in self.layouts:
                trial = Trial(self.backend, self.isa, form, layout, *self.shapes[0], first)
                shapes = (replace(trial, tokens=tokens, heads=heads, dims=dims) for tokens, heads, dims in self.shapes)
                yield form, layout, (*shapes, *(replace(trial, spelled=other) for other in others))


def _backend(name: str) -> Any:
    if name == "DEEPSEEK_V32_INDEXER":
        return import_module("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerBackend
    return AttentionBackendEnum[name].get_class()


def _scale(value: float, device: Any) -> Any:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _write_kv(trial: Trial, view: Any, values: Sequence[Any], slots: Any) -> None:
    """`do_kv_cache_update` of an implementation that has what that method reads, and nothing else."""
    impl_class = _backend(trial.backend).get_impl_cls()
    quantized = get_kv_quant_mode(trial.spelled)
    impl = object.__new__(impl_class)
    impl.__dict__.update(
        attn_type=AttentionType.DECODER,
        head_size=trial.dims[0],
        num_kv_heads=trial.heads,
        kv_cache_dtype=trial.spelled,
        kv_sharing_target_layer_name=None,
        fp8_dtype=current_platform.fp8_dtype(),
        _kv_quant_mode=quantized,
        _is_per_token_head_quant=quantized.is_per_token_head,
        _set_kv_ptr_range=False,
    )
    layer = SimpleNamespace(
        isa=trial.isa,
        _k_scale=_scale(K_SCALE, view.device),
        _v_scale=_scale(V_SCALE, view.device),
        _k_scale_float=K_SCALE,
        _v_scale_float=V_SCALE,
    )
    if quantized.is_per_token_head:
        _keep_scales(impl, view)
    impl.do_kv_cache_update(layer, values[0], values[1], view, slots)


def _keep_scales(impl: Any, view: Any) -> None:
    """The first write of an engine gives every scale of the cache a value; here that was long ago."""
    storage = view.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)
    before = memory.clone()
    impl._ensure_scale_caches(view)
    memory.copy_(before)


def _write_latent(trial: Trial, view: Any, values: Sequence[Any], slots: Any) -> None:
    impl_class = _backend(trial.backend).get_impl_cls()
    latent, rope = values
    impl_class.do_kv_cache_update(None, latent[:, 0], rope, view.squeeze(1), slots, trial.spelled, _scale(K_SCALE, view.device))


def _write_index(trial: Trial, view: Any, values: Sequence[Any], slots: Any) -> None:
    write_index(values[0][:, 0].contiguous(), view.squeeze(1), slots)


def _kv(tokens: Iterable[int], heads_and_dims: Iterable[tuple[int, int]]) -> tuple[Shape, ...]:
    return tuple((some, heads, (dim, dim)) for some in tokens for heads, dim in heads_and_dims)


_FEW_KV: Final = (*_kv((16, 1040), ((8, 128),)), *_kv((48,), ((3, 80),)), *_kv((64,), ((2, 256),)), *_kv((528,), ((1, 64),)))
"""Each of them is a kernel to be compiled, where kernels are compiled."""
_MANY_KV: Final = (*_FEW_KV, *_kv((16, 32, 64, 128, 528, 1040), ((1, 64), (1, 128), (1, 256), (2, 64), (2, 128), (8, 64))))
_LATENT: Final = (512, 64)


def _of_pages(*tokens: int, dims: tuple[int, ...] = _LATENT) -> tuple[Shape, ...]:
    return tuple((some, 1, dims) for some in tokens)


_LATENTS: Final = _of_pages(16, 32, 64, 128, 528, 1040)


CUDA_SUBJECTS: Final = (
    Subject("FLASH_ATTN", ("bfloat16", "float16", "fp8_e4m3"), _MANY_KV, _write_kv),
    Subject("TRITON_MLA", ("bfloat16", "float16", "fp8_e4m3"), _LATENTS, _write_latent, latent=True),
    Subject("FLASHMLA", ("bfloat16", "float16", "fp8_e4m3"), _of_pages(64, 128, 192), _write_latent, latent=True),
    Subject("FLASH_ATTN_MLA", ("bfloat16", "float16"), _LATENTS, _write_latent, latent=True),
    Subject("FLASHMLA_SPARSE", ("bfloat16",), _of_pages(64, 128, 192), _write_latent, latent=True),
    Subject("CUTLASS_MLA", ("bfloat16", "float16", "fp8_e4m3"), _of_pages(128, 256), _write_latent, latent=True),
    Subject("FLEX_ATTENTION", ("float32", "float16", "bfloat16"), _MANY_KV, _write_kv, layouts=("LBNHC",)),
    Subject("TRITON_ATTN", ("float32", "bfloat16", "float16", "fp8_e4m3"), _FEW_KV, _write_kv),
    Subject("FLASHMLA_SPARSE", ("fp8_ds_mla",), _of_pages(64, 128), _write_latent, latent=True),
    Subject("DEEPSEEK_V32_INDEXER", ("uint8",), _of_pages(64, 128, dims=(128,)), _write_index, latent=True),
    Subject(
        "TRITON_ATTN", ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"), _FEW_KV[2:], _write_kv
    ),
)  # fmt: skip
"""In the order of the risk: what a broken kernel leaves behind spoils what comes after it."""


_VEC: Final = _kv((32, 64, 96), ((1, 32), (2, 64), (3, 128), (1, 256)))
_VEC16: Final = _kv((16, 32, 96), ((1, 48), (2, 80), (3, 112)))
_AMX: Final = _kv((32, 64, 160), ((1, 32), (2, 96), (3, 128)))
_FLOATS: Final = ("float32", "float16", "bfloat16")

CPU_SUBJECTS: Final = (
    Subject("CPU_ATTN", _FLOATS, _VEC, _write_kv, "vec", ("LBHNC",)),
    Subject("CPU_ATTN", _FLOATS, _VEC16, _write_kv, "vec16", ("LBHNC",)),
    Subject("CPU_ATTN", ("float32", "float16"), _VEC, _write_kv, "neon", ("LBHNC",)),
    Subject("CPU_ATTN", ("bfloat16",), _AMX, _write_kv, "amx", ("LBHNC",)),
    Subject("CPU_MLA", ("float32", "bfloat16"), _of_pages(16, 32, 128), _write_latent, layouts=("LBNHC", "LBHNC"), latent=True),
    Subject("AMX_MLA", ("bfloat16",), _of_pages(32, 96), _write_latent, layouts=("LBNHC", "LBHNC"), latent=True),
)


_CPUS: Final = {CpuArchEnum.X86: ("x86-64 CPU", {"neon"}), CpuArchEnum.ARM: ("AArch64 CPU", {"vec"})}
"""What CPUs are called, and the instruction sets of others."""


@lru_cache(maxsize=1)
def subjects() -> tuple[Subject, ...]:
    """What can be watched on this machine."""
    current_platform.import_kernels()
    if current_platform.is_cuda():
        return CUDA_SUBJECTS
    if not current_platform.is_cpu():
        raise OpError(f"nothing is known of the cache-write ops of {current_platform.device_name}")
    _, without = _cpu()
    if not torch.cpu._is_amx_tile_supported():
        without = without | {"amx", "AMX_MLA"}
    return tuple(one for one in CPU_SUBJECTS if not {one.isa, one.backend} & without)


def _cpu() -> tuple[str, set[str]]:
    found = current_platform.get_cpu_architecture()
    if found not in _CPUS:
        raise OpError(f"nothing is known of the cache-write ops of vLLM on a CPU of the kind {found.name}")
    return _CPUS[found]


@dataclass(frozen=True)
class _Cache:
    """Three layers of a cache as vLLM allocates it, and all of their memory as bytes."""

    view: Any
    memory: Any
    offset: int = field(default=0)

    @property
    def size(self) -> int:
        return int(self.view.element_size())

    @property
    def block_stride(self) -> int:
        return int(self.view.stride(0)) * self.size

    @property
    def head_stride(self) -> int:
        return int(self.view.stride(1)) if self.view.shape[1] > 1 else 0

    @property
    def grid(self) -> Grid:
        return Grid(int(self.view.shape[2]), int(self.view.shape[3]), int(self.view.stride(2)))


def _cache_dtype(trial: Trial) -> Any:
    return STR_DTYPE_TO_TORCH_DTYPE.get(trial.form) or getattr(torch, trial.form)


def allocate(trial: Trial, latent: bool, device: Any) -> _Cache:
    """With vLLM's own spec, strides and views."""
    layout = KVCacheLayout[trial.layout]
    common: dict[str, Any] = {
        "block_size": trial.tokens,
        "num_kv_heads": trial.heads,
        "dtype": _cache_dtype(trial),
        "kv_quant_mode": get_kv_quant_mode(trial.form),
    }
    if latent:
        width = 132 if trial.form == "uint8" else sum(trial.dims)
        spec = MLAAttentionSpec(
            **common,
            head_size=width,
            cache_dtype_str=trial.spelled,
            state_content_bytes={"fp8_ds_mla": 656}.get(trial.form),
        )
    else:
        spec = FullAttentionSpec(**common, head_size=trial.dims[0])
    spec = customized(_backend(trial.backend), spec)
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout, prefix_cache_retention_interval=None, num_gpu_blocks_override=BLOCKS
    )
    config = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
    groups = [KVCacheGroupSpec(list(LAYERS), spec)]
    found = place_of("get_kv_cache_config_from_groups")(config, groups, 1 << 40)
    view = allocate_kv_cache(found, device, layout, [trial.tokens])[LAYERS[1]]
    memory = torch.empty(0, dtype=torch.uint8, device=device).set_(view.untyped_storage())
    return _Cache(view, memory, view.data_ptr() - memory.data_ptr())


def _slots(trial: Trial, device: Any) -> Any:
    """Where the tokens go, in the order in which they are written: a full block and one that is not, shuffled."""
    count = 2 * trial.tokens - 5
    order = torch.randperm(count, generator=torch.Generator().manual_seed(trial.tokens))
    table = torch.tensor(TABLE)
    return order.to(device), (table[order // trial.tokens] * trial.tokens + order % trial.tokens).to(device)


def _input_dtype(trial: Trial) -> Any:
    return getattr(torch, trial.form) if trial.form in _FLOATS else torch.bfloat16


def watch(trial: Trial, subject: Subject, device: Any) -> Case:
    """Write, find every element, and compare with what the table says; raises where they differ."""
    cache = allocate(trial, subject.latent, device)
    found = _numbers(trial, subject, cache) if trial.form in _DIGITS else _rows(trial, subject, cache)
    cell = candidate(trial.backend, trial.isa, trial.form, cache.grid)
    if cell is None:
        raise OpError(f"{trial}: nothing is said of {cache.grid}")
    said = places(cell, trial.heads, cache.head_stride, cache.size)
    if len(said) != len(found) or (said != found).any():
        at = int(np.flatnonzero(said != found)[0]) if len(said) == len(found) else 0
        raise OpError(f"{trial}: element {at} is kept at byte {found[at]} of its block, not at {said[at]} as the table says")
    grid = cache.grid
    return Case(grid.tokens, trial.heads, grid.width, grid.pitch, cache.head_stride, cache.size, digest(found))


def _numbers(trial: Trial, subject: Subject, cache: _Cache) -> Ints:
    """The first byte of every element of a block: [tensor][head][token][dim]."""
    device = cache.memory.device
    order, slots = _slots(trial, device)
    count, heads = len(order), trial.heads
    base, total = _DIGITS[trial.form], count * heads * sum(trial.dims)
    starts = np.cumsum([0, *(count * heads * dim for dim in trial.dims)])
    numbers = [
        torch.arange(first, first + count * heads * dim, device=device).view(count, heads, dim)
        for first, dim in zip(starts.tolist(), trial.dims, strict=False)
    ]
    scales = (1.0,) * len(numbers)
    if trial.form.startswith("fp8"):
        scales = (K_SCALE, K_SCALE if subject.latent else V_SCALE)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[cache.size]
    floats = {1: torch.float8_e4m3fn}.get(cache.size, _input_dtype(trial))
    held = torch.zeros(len(cache.memory) // cache.size, dtype=torch.int64, device=device)
    written = None
    weight = 1
    while weight < total:
        cache.memory.fill_(_UNWRITTEN)
        values = [
            ((some // weight % base).float() * scale).to(_input_dtype(trial))[order].contiguous()
            for some, scale in zip(numbers, scales, strict=True)
        ]
        for part in (slice(0, 7), slice(7, None)):
            subject.write(trial, cache.view, [some[part] for some in values], slots[part])
        touched = cache.memory.view(integers) != -1
        if written is not None and not torch.equal(touched, written):
            raise OpError(f"{trial}: other places are written when other values are")
        written = touched
        held += torch.where(touched, cache.memory.view(floats).float().nan_to_num(0).to(torch.int64), 0) * weight
        weight *= base
    at = torch.nonzero(written)[:, 0]
    which = held[at]
    if len(at) != total or not torch.equal(torch.sort(which)[0], torch.arange(total, device=device)):
        raise OpError(f"{trial}: {len(at)} elements are written, not each of {total} once")
    offsets = torch.empty(total, dtype=torch.int64, device=device)
    offsets[which] = at * cache.size
    token = torch.arange(count, device=device)
    block = torch.tensor(TABLE, device=device)[token // trial.tokens] * cache.block_stride + cache.offset
    out = []
    for first, dim in zip(starts.tolist(), trial.dims, strict=False):
        inside = offsets[first : first + count * heads * dim].view(count, heads, dim) - block[:, None, None]
        rest = count - trial.tokens
        if not torch.equal(inside[:rest], inside[trial.tokens :]):
            raise OpError(f"{trial}: one block is kept in another order than the next")
        out.append(inside[: trial.tokens].transpose(0, 1))
    together = out if not subject.latent else [torch.cat(out, dim=2)]
    found: Ints = np.concatenate([some.reshape(-1).cpu().numpy() for some in together])
    return found


def _rows(trial: Trial, subject: Subject, cache: _Cache) -> Ints:
    """All bytes of every token of a block, ascending: [token][byte]; they depend on nothing but the token."""
    device = cache.memory.device
    order, slots = _slots(trial, device)
    values = _random(trial, len(order), 1, device)
    everything, all_bytes = _two_backgrounds(trial, subject, cache, values, slots)
    token = torch.zeros(len(cache.memory), dtype=torch.int64, device=device)
    for bit in range((len(order) - 1).bit_length()):
        some = (order >> bit & 1).bool()
        if some.any():
            _, touched = _two_backgrounds(trial, subject, cache, [v[some] for v in values], slots[some])
            token += touched.long() << bit
    at = torch.nonzero(all_bytes)[:, 0]
    by_token = torch.sort(token[at], stable=True)
    width, rest = divmod(len(at), len(order))
    if rest or not torch.equal(by_token[0], torch.arange(len(order), device=device).repeat_interleave(width)):
        raise OpError(f"{trial}: {len(at)} bytes are written, not equally many for each of {len(order)} tokens")
    rows = at[by_token[1]].view(len(order), width)
    _check_apart(trial, subject, cache, values, order, slots, everything, rows)
    blocks = torch.tensor(TABLE, device=device)[torch.arange(len(order), device=device) // trial.tokens]
    inside = rows - (blocks * cache.block_stride + cache.offset)[:, None]
    if not torch.equal(inside[: len(order) - trial.tokens], inside[trial.tokens :]):
        raise OpError(f"{trial}: one block is kept in another order than the next")
    found: Ints = inside[: trial.tokens].reshape(-1).cpu().numpy()
    return found


def _random(trial: Trial, count: int, seed: int, device: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, trial.heads, dim, generator=generator).to(device).to(_input_dtype(trial)) for dim in trial.dims]


def _written_over(trial: Trial, subject: Subject, cache: _Cache, values: Sequence[Any], slots: Any, background: int) -> Any:
    cache.memory.fill_(background)
    subject.write(trial, cache.view, [some.contiguous() for some in values], slots)
    return cache.memory.clone()


def _two_backgrounds(trial: Trial, subject: Subject, cache: _Cache, values: Sequence[Any], slots: Any) -> tuple[Any, Any]:
    """Memory after a write, and which of its bytes were written: those that do not show what was there before."""
    one, other = (_written_over(trial, subject, cache, values, slots, background) for background in (0x00, _UNWRITTEN))
    return one, one == other


def _check_apart(
    trial: Trial, subject: Subject, cache: _Cache, values: Sequence[Any], order: Any, slots: Any, before: Any, rows: Any
) -> None:
    """A token's bytes are the same beside other tokens and in another place, and a head's beside other heads."""
    others = _random(trial, len(order), 2, before.device)
    even = (order % 2 == 0)[:, None, None]
    mixed = [torch.where(even, mine, theirs) for mine, theirs in zip(values, others, strict=True)]
    memory = _written_over(trial, subject, cache, mixed, slots, 0x00)
    if not torch.equal(memory[rows[::2]], before[rows[::2]]):
        raise OpError(f"{trial}: what is kept of a token depends on the tokens beside it")
    if torch.equal(memory[rows[1::2]], before[rows[1::2]]):
        raise OpError(f"{trial}: what is kept of a token does not depend on its values")
    turned = slots.roll(1)
    memory = _written_over(trial, subject, cache, values, turned, 0x00)
    token_of_slot = torch.empty_like(order)
    token_of_slot[order.roll(1)] = order
    if not torch.equal(memory[rows], before[rows][token_of_slot]):
        raise OpError(f"{trial}: what is kept of a token depends on where it is")
    if trial.heads > 1:
        first = (torch.arange(trial.heads, device=before.device) == 0)[None, :, None]
        mixed = [torch.where(first, theirs, mine) for mine, theirs in zip(values, others, strict=True)]
        changed = torch.nonzero(_written_over(trial, subject, cache, mixed, slots, 0x00) != before)[:, 0] - cache.offset
        head = changed // (cache.head_stride * cache.size)
        if trial.layout.index("H") > trial.layout.index("N"):
            head = changed % (cache.grid.pitch * cache.size) // (cache.head_stride * cache.size)
        elif trial.layout.index("H") > trial.layout.index("B"):
            head = changed % cache.block_stride // (cache.head_stride * cache.size)
        if head.any():
            raise OpError(f"{trial}: what is kept of a head depends on the heads beside it")


def _seen(subject: Subject, trials: Sequence[Trial], where: Any) -> tuple[tuple[Case, ...], tuple[Trouble, ...]]:
    """None where an op was seen to write otherwise than the table says. A shape or a spelling that an op does not take is told
    of, and the others count; where it takes not even the first, the others are not tried."""
    cases, troubles = [], []
    for trial in trials:
        try:
            cases.append(watch(trial, subject, where))
        except Exception as error:  # noqa: BLE001, PERF203  any failure of foreign code is a finding of its own
            troubles.append(Trouble(f"{trial}, asked for as {trial.spelled}", f"{type(error).__name__}: {error}"[:500]))
            if isinstance(error, OpError):
                return (), tuple(troubles)
            if not cases:
                break
    return tuple(cases), tuple(troubles)


def certify(
    chosen: Iterable[Subject] | None = None,
    *,
    device: str = "",
    layouts: Sequence[str] = (),
    told: Callable[[str], None] = lambda line: None,
) -> Evidence:
    """Watch every op in every format and cache layout. What fails is told of, and the rest goes on."""
    where = torch.device(device or current_platform.device_type)
    sightings: list[Sighting] = []
    troubles: list[Trouble] = []
    for subject in subjects() if chosen is None else chosen:
        for form, layout, trials in subject.trials():
            if layouts and layout not in layouts:
                continue
            found, wrong = _seen(subject, trials, where)
            name = " ".join(filter(None, (subject.backend, subject.isa, form, layout)))
            for trouble in wrong:
                told(f"{trouble.what}: {trouble.why}")
            troubles += wrong
            if found:
                told(f"{name}: seen in {len(found)} cases")
                sightings.append(Sighting(subject.backend, subject.isa, form, layout, found))
    machine = (__version__, str(torch.__version__), _device_name(where))
    return Evidence(*machine, tuple(sightings), troubles=tuple(troubles)).sealed()


def _device_name(where: Any) -> str:
    if where.type == "cuda":
        return str(torch.cuda.get_device_name(where))
    return _cpu()[0]
