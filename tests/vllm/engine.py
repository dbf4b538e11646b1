"""vLLM's own cache configuration, cache tensors and cache-write op for tiny models: one process, no server, no weights.

Any tensor- or pipeline-parallel rank can be built, since no collective runs while a model is constructed and its cache
allocated: the ranks and sizes of the TP and PP groups are numbers that are set for the while.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.gpu import attn_utils
from vllm.version import __version__ as vllm_version

from kvferry.engines.vllm import manifest_of
from kvferry.engines.vllm.certify_self import certify_self
from kvferry.engines.vllm.layouts import Grid, Own, certified
from kvferry.engines.vllm.releases import place_of
from kvferry.engines.vllm.states import GROUP_FIELDS
from kvferry.manifest import Identity, Manifest, Rank
from kvferry.manifest.kinds import Shard
from lab.crossing import architectures

POOL_BYTES = 256 << 20
MAX_TOKENS = 256
CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
PARTITION = "VLLM_PP_LAYER_PARTITION"
CACHE_LAYOUT = "VLLM_KV_CACHE_LAYOUT"

MODELS = {
    "llama": lambda: architectures.llama(num_hidden_layers=3),
    "llama-mqa": architectures.mqa,
    "llama-2kv": lambda: architectures.llama(num_hidden_layers=3, num_key_value_heads=2),
    "gemma3": architectures.gemma3,
    "nemotron-h": architectures.nemotron_h,
    "granite-h-1g": lambda: architectures.granite_h(1),
    "granite-h-2g": lambda: architectures.granite_h(2),
    "granite-h-6": lambda: architectures.granite_h(1, heads=6),
    "deepseek": architectures.deepseek,
    "jamba": architectures.jamba,
    "qwen3-next": lambda: architectures.qwen3_next(dim=32),
    "lfm2": architectures.lfm2,
    "gpt-oss": architectures.gpt_oss,
}


@dataclass(frozen=True)
class Setup:
    """One rank of one engine, as a user would configure it.

    `isa` is what the cache-write op runs with, where it is not to be vLLM's choice for this CPU; `declared_isa` is what the
    adapter is told, where it is not to be the truth. `kernel` has vLLM's allocator cut blocks into kernel blocks of that many
    tokens, as it does on other platforms. `layers` says how many go to each pipeline stage, where it is not to be vLLM's
    choice; `budget` how many tokens a step computes at most; `ahead` has steps scheduled before the tokens of the last one
    are known. `drafter` makes `speculative` tokens the guesses of an EAGLE layer with so many kv heads; else they are taken
    from the prompt. `engine` gives it KVFerry's connector with that id and `options`. `layout` is the cache layout asked for.
    """

    model: str
    tp: int = 1
    rank: int = 0
    pp: int = 1
    stage: int = 0
    layers: str = ""
    block: int = 32
    dtype: str = "float32"
    isa: str = ""
    conv: str = "SD"
    hma: bool = True
    prefix_caching: bool = False
    speculative: int = 0
    drafter: int = 0
    declared_isa: str = ""
    backend: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    layout: str = ""
    kernel: int = 0
    engine: str = ""
    role: str = "kv_both"
    failure_policy: str = "fail"
    blocks: int = 40
    budget: int = MAX_TOKENS
    ahead: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Held:
    """Which of `total` global heads, channels or units a rank holds, in local order."""

    indices: torch.Tensor
    total: int


class DeviceMemory:
    """A device's bytes, with as much of an array as the tests use of one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __setitem__(self, everything: slice, values: npt.NDArray[np.uint8] | int) -> None:
        if isinstance(values, int):
            self.tensor.fill_(values)
        else:
            self.tensor.copy_(torch.from_numpy(values))

    def copy(self) -> npt.NDArray[np.uint8]:
        return self.tensor.cpu().numpy()


Memory = npt.NDArray[np.uint8] | DeviceMemory


@dataclass(frozen=True)
class Worker:
    """What vLLM built for a rank, with its memory as bytes and the global indices it holds by vLLM's own loaders."""

    setup: Setup
    vllm_config: Any = field(repr=False)
    kv_cache_config: Any = field(repr=False)
    kv_caches: dict[str, torch.Tensor] = field(repr=False)
    layers: dict[str, Any] = field(repr=False)
    memory: Memory = field(repr=False)
    held: dict[str, tuple[Held, ...]] = field(repr=False)

    def manifest(self, engine: str) -> Manifest:
        setup = self.setup
        with self._declaring(setup.declared_isa):
            return manifest_of(
                self.kv_cache_config,
                self.kv_caches,
                self.vllm_config,
                Identity(engine, "1", setup.model, Rank(setup.rank, setup.tp, setup.stage, setup.pp)),
                version=vllm_version,
                conv_layout=setup.conv,
                own=self._own(setup.declared_isa),
            )

    def _own(self, isa: str) -> Own:
        """What ops and kernels do; or what is recorded of another instruction set, where the adapter is to be told of one."""
        setup = self.setup
        if not isa:
            shard = Shard(setup.rank, setup.tp)
            return certify_self(self.kv_cache_config, self.kv_caches, self.vllm_config, shard, setup.conv, recorded=True)
        cells = {}
        for name, tensor in self.kv_caches.items():
            if type(self.layers[name]).__name__ == "Attention":
                grid, form = Grid(*tensor.shape[2:], tensor.stride(2)), str(tensor.dtype).removeprefix("torch.")
                cell = certified(vllm_version, "CPU_ATTN", isa, form, self.vllm_config.cache_config.kv_cache_layout, grid)
                cells |= {name: cell} if cell is not None else {}
        return Own(cells)

    @contextmanager
    def _declaring(self, isa: str) -> Iterator[None]:
        true = {name: layer.isa for name, layer in self.layers.items() if isa and hasattr(layer, "isa")}
        try:
            for name in true:
                self.layers[name].isa = isa
            yield
        finally:
            for name, was in true.items():
                self.layers[name].isa = was

    def write_kv(self, name: str, key: torch.Tensor, value: torch.Tensor, table: list[int], first: int = 0) -> None:
        """Tokens [first, first + n) through the layer's own cache-write op: [n, local head, dim], or latent and rope."""
        layer, device = self.layers[name], self.kv_caches[name].device
        key, value = key.to(device), value.to(device)
        block = next(g.kv_cache_spec.block_size for g in self.kv_cache_config.kv_cache_groups if name in g.layer_names)
        places = [table[i // block] * block + i % block for i in range(first, first + len(key))]
        slots = torch.tensor(places, dtype=torch.int64, device=device)
        if hasattr(layer, "kv_lora_rank"):
            layer.impl.do_kv_cache_update(key[:, 0], value, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            layer.impl.do_kv_cache_update(layer, key.contiguous(), value.contiguous(), layer.kv_cache, slots)


@lru_cache(maxsize=1)
def start() -> None:
    """A process group of one, once a process; a configuration without a model has groups for every kind of parallelism."""
    current_platform.import_kernels()
    store = tempfile.mkdtemp(prefix="kvferry-vllm-")
    atexit.register(shutil.rmtree, store, True)
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=f"file://{store}/store", local_rank=0, backend="gloo"
    )
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel(1, 1)


def _set_environment(setup: Setup) -> None:
    os.environ[CONV_LAYOUT] = setup.conv
    mamba_utils.get_conv_state_layout.cache_clear()
    for name, value in ((PARTITION, setup.layers), (CACHE_LAYOUT, setup.layout)):
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value


@contextmanager
def as_rank(setup: Setup, config: Any) -> Iterator[None]:
    """vLLM believes to be this rank of this engine."""
    start()
    _set_environment(setup)
    places = ((parallel_state._TP, setup.rank, setup.tp), (parallel_state._PP, setup.stage, setup.pp))
    before = [(group, group.rank, group.ranks, group.rank_in_group, group.world_size) for group, _, _ in places]
    config.parallel_config.rank = setup.stage * setup.tp + setup.rank
    try:
        for group, rank, size in places:
            group.rank, group.ranks, group.rank_in_group, group.world_size = rank, list(range(size)), rank, size
        with set_current_vllm_config(config):
            yield
    finally:
        for group, *was in before:
            group.rank, group.ranks, group.rank_in_group, group.world_size = was


@contextmanager
def engine_args(setup: Setup) -> Iterator[dict[str, Any]]:
    """What a user would pass; the model's folder lives as long as the context."""
    _set_environment(setup)
    with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
        MODELS[setup.model]().save_pretrained(folder)
        speculative = {"method": "ngram", "num_speculative_tokens": setup.speculative, "prompt_lookup_max": 2}
        if setup.drafter:
            guesses = f"{folder}/drafter"
            architectures.llama(num_hidden_layers=1, num_key_value_heads=setup.drafter).save_pretrained(guesses)
            speculative = {"method": "eagle", "model": guesses, "num_speculative_tokens": setup.speculative}
        with_connector = {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="KVFerryConnector",
                kv_connector_module_path="kvferry.engines.vllm",
                kv_role=setup.role,
                engine_id=setup.engine,
                kv_load_failure_policy=setup.failure_policy,
                kv_connector_extra_config={"progress_thread": False, **dict(setup.options)},
            ),
        }
        yield {
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": setup.dtype,
            "enforce_eager": True,
            "max_model_len": MAX_TOKENS,
            "max_num_batched_tokens": setup.budget,
            "max_num_seqs": 4,
            "tensor_parallel_size": setup.tp,
            "pipeline_parallel_size": setup.pp,
            "distributed_executor_backend": "mp" if setup.tp * setup.pp > 1 else None,
            "block_size": setup.block,
            "enable_prefix_caching": setup.prefix_caching,
            "num_gpu_blocks_override": setup.blocks,
            "kv_cache_memory_bytes": POOL_BYTES,
            "disable_hybrid_kv_cache_manager": not setup.hma,
            "attention_backend": setup.backend,
            "kv_cache_dtype": setup.kv_cache_dtype,
            "speculative_config": speculative if setup.speculative else None,
            **(with_connector if setup.engine else {}),
        }


def _model(setup: Setup) -> tuple[Any, Any, dict[str, Any]]:
    """A rank's configuration, its model, and the cache specs of its layers."""
    with engine_args(setup) as args:
        config = EngineArgs(**args).create_engine_config()
    config.scheduler_config.async_scheduling = setup.ahead
    with as_rank(setup, config):
        with torch.device(setup.device), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
            if setup.drafter:
                guessing = initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
                model = torch.nn.ModuleList([model, guessing])
        current_platform.update_block_size_for_backend(config)
        return config, model, attn_utils.get_kv_cache_spec(config)


def _cache_configs(config: VllmConfig, world: list[dict[str, Any]]) -> list[Any]:
    """Newer releases are given the groups of layers, which older ones find themselves."""
    planning = import_module(place_of("get_kv_cache_config_from_groups").__module__)
    grouping = getattr(planning, "get_global_kv_cache_groups", None)
    groups = () if grouping is None else (grouping(config, world),)
    return list(planning.get_kv_cache_configs(config, world, [POOL_BYTES] * len(world), *groups))


def build(setup: Setup) -> Worker:
    """In the order of vLLM's executor and worker: model, block size, specs, layout, config, backends, tensors."""
    config, model, specs = _model(setup)
    stages = [specs if stage == setup.stage else _model(replace(setup, stage=stage))[2] for stage in range(setup.pp)]
    world = [stage for stage in stages for _ in range(setup.tp)]
    with as_rank(setup, config):
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
        every = [spec for stage in stages for spec in stage.values()]
        resolve_kv_cache_layout(config, [layouts] * len(world), every)
        register_all_kvcache_specs(config)
        found = _cache_configs(config, world)
        cache = found[setup.stage * setup.tp + setup.rank]
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
        device = torch.device(setup.device)
        groups, _, kernel_blocks = attn_utils.init_attn_backend(cache, config, device)
        kernel_blocks = [setup.kernel or tokens for tokens in kernel_blocks]
        context = config.compilation_config.static_forward_context
        flat = [group for same in groups for group in same]
        tensors = attn_utils.init_kv_cache(context, cache, device, kernel_blocks, config, attn_groups=flat)
        layers = {name: context[name] for name in tensors}
        held = {name: _held(model, layer) for name, layer in layers.items()}
    for layer in layers.values():
        if setup.isa and hasattr(layer, "isa"):
            layer.isa = setup.isa
    storage = next(iter(tensors.values())).untyped_storage()
    tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    memory = tensor.numpy() if setup.device == "cpu" else DeviceMemory(tensor)
    return Worker(setup, config, cache, tensors, layers, memory, held)


def _held(model: Any, layer: Any) -> tuple[Held, ...]:
    """Found by loading the numbers 0, 1, ... with vLLM's own weight loaders: heads, or conv channels and units of state."""
    kind = type(layer).__name__
    if kind == "MLAAttention":
        return (Held(torch.zeros(1, dtype=torch.int64), 1),)
    if kind == "Attention":
        return (_held_heads(model, layer),)
    text = layer.model_config.hf_text_config
    if kind == "ShortConv":
        return (_held_channels(layer.conv.weight, layer.conv_dim),)
    if kind == "MambaMixer":
        channels = layer.intermediate_size
        return _held_channels(layer.conv1d.weight, channels), _held_units(layer.D, channels)
    if kind == "MambaMixer2":
        groups = next(getattr(text, f) for f in GROUP_FIELDS if hasattr(text, f))
        channels = layer.intermediate_size + 2 * groups * layer.ssm_state_size
        return _held_channels(layer.conv1d.weight, channels), _held_units(layer.D, layer.num_heads)
    channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
    return _held_channels(layer.conv1d.weight, channels), _held_units(layer.dt_bias, layer.num_v_heads)


def _held_heads(model: Any, layer: Any) -> Held:
    qkv = next(m.qkv_proj for m in model.modules() if getattr(m, "attn", None) is layer and hasattr(m, "qkv_proj"))
    weight = _numbers_fit(qkv.weight)
    numbers = torch.arange(qkv.total_num_kv_heads).repeat_interleave(qkv.head_size)
    qkv.weight_loader(weight, numbers[:, None].repeat(1, weight.shape[1]).double(), "k")
    start, size = qkv.num_heads * qkv.head_size, qkv.head_size
    return Held(weight.data[start : start + qkv.num_kv_heads * size : size, 0].long().cpu(), qkv.total_num_kv_heads)


def _held_channels(weight: Any, total: int) -> Held:
    weight = _numbers_fit(weight)
    weight.weight_loader(weight, torch.arange(total).view(-1, 1, 1).repeat(1, 1, weight.shape[-1]).double())
    return Held(weight.data[:, 0, 0].long().cpu(), total)


def _held_units(weight: Any, total: int) -> Held:
    weight = _numbers_fit(weight)
    weight.weight_loader(weight, torch.arange(total).double())
    return Held(weight.data.long().cpu(), total)


def _numbers_fit(weight: Any) -> Any:
    """bfloat16 cannot hold the integers above 256."""
    weight.data = torch.full_like(weight.data, -1, dtype=torch.float64)
    return weight


@lru_cache(maxsize=32)
def workers(setup: Setup, side: str) -> tuple[Worker, ...]:
    """All ranks of an engine, stage by stage. Sides have memory of their own, also where their setups are equal."""
    return tuple(build(replace(setup, rank=rank, stage=stage)) for stage in range(setup.pp) for rank in range(setup.tp))
