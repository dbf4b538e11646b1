"""Tiny random checkpoints whose greedy output depends on the whole context: wide weights, a fixed seed, no tokenizer."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 256
WINDOW = 64
SEED = 20

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    """A model to be made. `recurrent`: some layers keep a state instead of tokens, and vLLM's CPU scan of them needs prefix
    caching off. `stages` are ways to cut its layers into two pipeline stages, the first with every kind of layer in both;
    none where vLLM cannot load it in stages."""

    name: str
    config: Callable[[], Any]
    recurrent: bool = False
    stages: tuple[tuple[int, int], ...] = ()
    window: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk."""

    architecture: Architecture
    folder: Path

    @property
    def name(self) -> str:
        return self.architecture.name


def _llama(**changes: Any) -> Any:
    import transformers

    fields = {**COMMON, "num_hidden_layers": 4, "head_dim": 32, **changes}
    return transformers.LlamaConfig(**fields, architectures=["LlamaForCausalLM"])


def _mqa() -> Any:
    return _llama(num_key_value_heads=1, num_hidden_layers=3)


def _gemma3() -> Any:
    import transformers

    return transformers.Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        architectures=["Gemma3ForCausalLM"],
    )


def _nemotron_h(**changes: Any) -> Any:
    import transformers

    fields = {
        **COMMON,
        "head_dim": 32,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp", "mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 32,
        "mlp_hidden_act": "relu2",
        **changes,
    }
    return transformers.NemotronHConfig(**fields, architectures=["NemotronHForCausalLM"])


def _nemotron_h_large_state() -> Any:
    """A state of half a megabyte beside half a kilobyte of KV a token: vLLM makes blocks of about a thousand tokens."""
    return _nemotron_h(num_key_value_heads=2, mamba_num_heads=16, mamba_head_dim=64, ssm_state_size=128)


def _granite_h(groups: int) -> Any:
    import transformers

    return transformers.GraniteMoeHybridConfig(
        **COMMON,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        mamba_n_heads=8,
        mamba_n_groups=groups,
        mamba_d_state=64,
        mamba_d_head=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
        num_local_experts=0,
        num_experts_per_tok=0,
        attention_multiplier=1 / math.sqrt(32),
        position_embedding_type="rope",
        architectures=["GraniteMoeHybridForCausalLM"],
    )


def _deepseek() -> Any:
    import transformers

    return transformers.DeepseekV2Config(
        **COMMON,
        num_hidden_layers=2,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        q_lora_rank=None,
        n_routed_experts=4,
        first_k_dense_replace=2,
        architectures=["DeepseekV2ForCausalLM"],
    )


def _qwen3_next() -> Any:
    import transformers

    return transformers.Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        architectures=["Qwen3NextForCausalLM"],
    )


ARCHITECTURES = {
    it.name: it
    for it in (
        Architecture("llama", _llama, stages=((2, 2), (1, 3))),
        Architecture("mqa", _mqa),
        Architecture("gemma3", _gemma3, stages=((3, 3), (2, 4)), window=WINDOW),
        Architecture("nemotron-h", _nemotron_h, recurrent=True, stages=((3, 3), (1, 5))),
        Architecture("nemotron-h-large-state", _nemotron_h_large_state, recurrent=True, stages=((3, 3),)),
        Architecture("granite-h-1g", lambda: _granite_h(1), recurrent=True),
        Architecture("granite-h-2g", lambda: _granite_h(2), recurrent=True),
        Architecture("deepseek", _deepseek, dtype="bfloat16"),
        Architecture("qwen3-next", _qwen3_next, recurrent=True, dtype="bfloat16"),
    )
}


def checkpoint(name: str, cache: Path) -> Checkpoint:
    """The checkpoint `name`, made if the folder `cache` does not hold it yet."""
    if name not in ARCHITECTURES:
        raise ValueError(f"no checkpoint is named {name!r}; choose one of {', '.join(ARCHITECTURES)}")
    folder = cache / name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            _write(ARCHITECTURES[name], made)
            os.replace(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return Checkpoint(ARCHITECTURES[name], folder)


def _write(architecture: Architecture, folder: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = architecture.config()
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = getattr(transformers, config.architectures[0])(config)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                _fill(name, weight, config)
    model.to(getattr(torch, architecture.dtype)).save_pretrained(folder)


def _fill(name: str, weight: Any, config: Any) -> None:
    """Every weight wide enough that a token's logits are coloured by all the tokens before it."""
    import torch

    last = name.rsplit(".", 2)
    if "norm" in last[-2]:
        centred_on_zero = config.model_type in ("gemma3_text", "qwen3_next") and not name.endswith("linear_attn.norm.weight")
        torch.nn.init.constant_(weight, 0.0 if centred_on_zero else 1.0)
    elif last[-1] == "A_log":
        weight.copy_(torch.empty_like(weight).uniform_(0.02, 0.5).log())
    elif last[-1] == "dt_bias":
        torch.nn.init.normal_(weight, -0.5, 0.5)
    elif last[-1] == "D":
        torch.nn.init.normal_(weight, 1.0, 0.3)
    elif "conv1d" in name:
        torch.nn.init.normal_(weight, 0.0, 0.5 if weight.dim() > 1 else 0.1)
    elif weight.dim() == 1:
        torch.nn.init.normal_(weight, 0.0, 0.1)
    elif "embed" in name:
        scaled_later = config.model_type == "gemma3_text"
        torch.nn.init.normal_(weight, 0.0, 1 / math.sqrt(config.hidden_size) if scaled_later else 1.0)
    else:
        width = 3.0 if "lm_head" in name else 1.5
        torch.nn.init.normal_(weight, 0.0, width / math.sqrt(weight.shape[-1]))
