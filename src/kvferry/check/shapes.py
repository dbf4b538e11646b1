"""The manifests that an engine would publish, from a model's configuration and the engine's flags, without running it.

What vLLM chooses by itself is taken to be its default: the backend, its blocks, the cache's layout. Caches of backends that are
not certified become opaque cells here as they do in the engine. Here a cache is certified if evidence is recorded for it. An
engine certifies its own caches when it starts: what that may give beyond the evidence can be assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import msgspec

from kvferry.check.flags import Flags
from kvferry.check.sources import Source, source_of
from kvferry.engines.vllm.layouts import Grid, certified, known
from kvferry.engines.vllm.releases import asks_what_is_loaded, is_served, release_of, zeroes_loads
from kvferry.findings import Finding
from kvferry.manifest import Manifest
from kvferry.manifest.kinds import Attention, Entries, LatentAttention, LayerKind, Layout, OpaqueCells
from kvferry.manifest.pool import LayerSpec
from kvferry.manifest.schema import DTYPE_BYTES
from kvferry.models import ModelShape, Side, legal, manifests

RELEASE: Final = "0.32.0"
"""Of vLLM, if none is named."""
BLOCKS: Final = 64
DTYPES: Final = {"half": "float16", "float": "float32"}
FORMATS: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
LAYOUTS: Final = {"HND": "LBHNC", "NHD": "LBNHC"}
BACKENDS: Final = {
    ("cuda", False): "FLASH_ATTN",
    ("cuda", True): "FLASHMLA",
    ("cpu", False): "CPU_ATTN",
    ("cpu", True): "CPU_MLA",
}
BLOCK: Final = {("cuda", False): 16, ("cuda", True): 64, ("cpu", False): 128, ("cpu", True): 16}
ISAS: Final = ("vec", "vec16", "amx", "")


@dataclass(frozen=True)
class Engine:
    """A side of a model as flags describe it, with what cannot be."""

    model: ModelShape
    side: Side
    stages: tuple[int, ...]
    shaped: ModelShape
    backend: str
    form: str
    order: str
    release: str
    troubles: tuple[Finding, ...] = ()

    @property
    def opaque(self) -> bool:
        """Whether a cache is moved in whole cells."""
        return any(isinstance(kind, OpaqueCells) for kind in self.shaped.kinds)

    @property
    def cache(self) -> str:
        return f"{self.backend} {self.form} in {self.order}"

    def __str__(self) -> str:
        stages = f",PP{self.side.pp}" if self.side.pp > 1 else ""
        return f"TP{self.side.tp}{stages}, blocks of {self.side.layout.block}"

    def manifests(self, name: str, blocks: int = BLOCKS) -> tuple[Manifest, ...]:
        """Identity is the model's own, whatever the flags make of its caches."""
        found = manifests(self.shaped, self.side, name, "offline", blocks, self.stages)
        return tuple(
            msgspec.structs.replace(m, identity=msgspec.structs.replace(m.identity, model=self.model.fingerprint))
            for m in found
        )


def engine_of(flags: Flags, device: str, model_or_source: str | Source, release: str = RELEASE, assume: bool = False) -> Engine:
    """What the flags make of a model; a size that no engine could run is a trouble. With `assume` the engine is taken
    to certify every cache that the table of layouts explains, recorded or not."""
    source = model_or_source if isinstance(model_or_source, Source) else source_of(model_or_source, flags)
    model, asked = source.shape(), source.shape(dtype_of(flags.word("dtype")))
    latent = any(isinstance(kind, LatentAttention) for kind in model.kinds)
    backend = attention_backend(flags) or BACKENDS[device, latent]
    order = _order(flags, device, latent)
    block = flags.number("block_size", BLOCK[device, latent])
    layout = Layout(
        block=block,
        kv="transposed" if device == "cpu" else "packed",
        order="token" if "NH" in order else "head",
        conv="ds" if flags.environment.get("VLLM_SSM_CONV_STATE_LAYOUT") == "DS" else "sd",
        spec=_speculative(flags),
        pool="block" if order.startswith("B") else "layer",
        overlay=not flags.switch("disable_hybrid_kv_cache_manager"),
        delta="kv" if device == "cpu" else "vk",
    )
    side = Side(flags.number("tensor_parallel_size"), flags.number("pipeline_parallel_size"), layout)
    stages = _stages(flags)
    keeper = Keeper(backend, order, release, assume)
    shaped = replace(model, layers=tuple(tuple(_spec(spec, flags, keeper, side) for spec in held) for held in asked.layers))
    form = flags.word("kv_cache_dtype", "auto")
    own = next((kind.dtype for kind in asked.kinds if isinstance(kind, Attention | LatentAttention)), "")
    form = own if form == "auto" else FORMATS.get(form, form)
    troubles = (*_troubles(model, side, stages), *_of_release(model, side, release))
    return Engine(model, side, stages, shaped, backend, form, order, release, troubles)


@dataclass(frozen=True)
class Keeper:
    """What keeps a cache, and whether it is taken to certify what is not recorded."""

    backend: str
    order: str
    release: str
    assume: bool = False

    def certifies(self, number: str, block: int, width: int) -> bool:
        form = {"float8_e4m3fn": "fp8_e4m3"}.get(number, number)
        grid = Grid(block, width, width)
        if self.assume and known(form, grid):
            return True
        return any(certified(self.release, self.backend, isa, form, self.order, grid) is not None for isa in ISAS)


def _troubles(model: ModelShape, side: Side, stages: tuple[int, ...]) -> list[Finding]:
    reason = legal(model, side)
    out = []
    if reason is not None and "use hma=on" in reason:
        seen = reason.partition("; use")[0]
        out.append(Finding("hybrid-manager", seen, "start the engine without --disable-hybrid-kv-cache-manager"))
    elif reason is not None and side.pp > len(model.layers):
        out.append(Finding("pipeline-size", reason, "give fewer --pipeline-parallel-size"))
    elif reason is not None:
        out.append(Finding("tensor-size", reason, "choose a --tensor-parallel-size that divides"))
    if stages and (len(stages) != side.pp or sum(stages) != len(model.layers)):
        said = ", ".join(map(str, stages))
        seen = f"VLLM_PP_LAYER_PARTITION={said} is not {side.pp} stages of {len(model.layers)} layers in all"
        out.append(
            Finding("stages", seen, "give as many numbers as --pipeline-parallel-size, which make all layers, or unset it")
        )
    return out


def _of_release(model: ModelShape, side: Side, release: str) -> Iterator[Finding]:
    """What the release cannot serve of this model."""
    if not is_served(release) or asks_what_is_loaded(release) or legal(model, side) is not None:
        return
    dtypes = {str(getattr(kind, "dtype", "")) for kind in model.kinds}
    if any(kind.paging == "state" for kind in model.kinds) or len(dtypes) > 1:
        yield Finding("vllm-release", *zeroes_loads(release))


def attention_backend(flags: Flags) -> str:
    """The one that is asked for; empty if vLLM is to choose."""
    within = flags.values.get("attention_config")
    said = within.get("backend", "") if isinstance(within, dict) else ""
    return str(flags.word("attention_backend") or said or flags.environment.get("VLLM_ATTENTION_BACKEND", "")).upper()


def _order(flags: Flags, device: str, latent: bool) -> str:
    """The operator's environment comes first, as it does in vLLM."""
    usual = "BLHNC" if device == "cuda" else "LBNHC" if latent else "LBHNC"
    said = flags.environment.get("VLLM_KV_CACHE_LAYOUT") or str(flags.options.get("cache_layout", ""))
    return LAYOUTS.get(said, said) or usual


def _speculative(flags: Flags) -> int:
    said = flags.values.get("speculative_config")
    count = said.get("num_speculative_tokens", 0) if isinstance(said, dict) else 0
    return count if isinstance(count, int) and 0 <= count <= 64 else 0


def _stages(flags: Flags) -> tuple[int, ...]:
    said = flags.environment.get("VLLM_PP_LAYER_PARTITION", "")
    words = said.split(",") if said and flags.number("pipeline_parallel_size") > 1 else []
    return tuple(int(word) for word in words if word.strip().isdigit())


def _spec(spec: LayerSpec, flags: Flags, keeper: Keeper, side: Side) -> LayerSpec:
    return replace(spec, kind=_kept(_numbers(spec.kind, flags), flags, keeper, side))


def _numbers(kind: LayerKind, flags: Flags) -> LayerKind:
    """A state's kind with the dtypes that flags ask for; a state that has no dtype of its own has its convolution's."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    if kind.paging == "state":
        own, ssm = dtype_of(flags.word("mamba_cache_dtype")), dtype_of(flags.word("mamba_ssm_cache_dtype"))
        if own and "dtype" in names:
            changes["dtype"] = own
        follows = getattr(kind, "ssm_dtype", "") == getattr(kind, "dtype", "")
        if "ssm_dtype" in names and (ssm or (own and follows)):
            changes["ssm_dtype"] = ssm or own
    return replace(kind, **changes) if changes else kind  # type: ignore[type-var]


def dtype_of(word: str) -> str:
    """By its full name; empty for `auto` and for what is no dtype of a cache."""
    found = DTYPES.get(word, word)
    return found if found in DTYPE_BYTES else ""


def _kept(kind: LayerKind, flags: Flags, keeper: Keeper, side: Side) -> LayerKind:
    """The kind as the backend keeps it: by its parts where that is certified, else in cells."""
    form = flags.word("kv_cache_dtype", "auto")
    asked = "" if form == "auto" else FORMATS.get(form, dtype_of(form) or "opaque")
    if isinstance(kind, Attention):
        number = asked or kind.dtype
        width = kind.dim + (kind.v_dim or kind.dim)
        if number != "opaque" and kind.v_dim in (0, kind.dim) and keeper.certifies(number, side.layout.block, width):
            return replace(kind, dtype=number)
        tag = f"vllm {release_of(keeper.release)} {keeper.backend} {number if number != 'opaque' else form}"
        size = width * DTYPE_BYTES.get(number, 1)
        if side.layout.order == "head":
            return OpaqueCells(tag, size, kind.heads, kind.reach)
        heads = max(1, kind.heads // side.tp)
        return OpaqueCells(f"{tag} of {heads} heads", size * heads, 0, kind.reach)
    if isinstance(kind, LatentAttention):
        number = asked or kind.dtype
        width = kind.latent + kind.rope
        if number != "opaque" and keeper.certifies(number, side.layout.block, width):
            return replace(kind, dtype=number)
        tag = f"vllm {release_of(keeper.release)} {keeper.backend} {number if number != 'opaque' else form}"
        return OpaqueCells(tag, width * DTYPE_BYTES.get(number, 1), 0, kind.reach)
    if isinstance(kind, Entries) and not kind.block and kind.tokens_per_entry == 1:
        return OpaqueCells(
            f"vllm {release_of(keeper.release)} {kind.part}", kind.width + sum(size for _, size in kind.planes), 0, kind.reach
        )
    return kind
