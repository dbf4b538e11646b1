"""Configurations of tiny models of every kind that vLLM loads, small enough for a CPU and with heads for two ranks or more."""

from __future__ import annotations

import math
from typing import Any

import transformers

VOCABULARY = 256
WINDOW = 64

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


def llama(**changes: Any) -> Any:
    fields = {**COMMON, "num_hidden_layers": 4, "head_dim": 32, **changes}
    return transformers.LlamaConfig(**fields, architectures=["LlamaForCausalLM"])


def mqa() -> Any:
    return llama(num_key_value_heads=1, num_hidden_layers=3)


def gemma3() -> Any:
    return transformers.Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        architectures=["Gemma3ForCausalLM"],
    )


def nemotron_h(**changes: Any) -> Any:
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


def nemotron_h_large_state() -> Any:
    """A state of half a megabyte beside half a kilobyte of KV a token: vLLM makes blocks of about a thousand tokens."""
    return nemotron_h(num_key_value_heads=2, mamba_num_heads=16, mamba_head_dim=64, ssm_state_size=128)


def granite_h(groups: int, heads: int = 4) -> Any:
    """As wide as its heads, so that other numbers of ranks can share them."""
    width = {"hidden_size": 32 * heads, "vocab_size": 64 * heads, "num_attention_heads": heads, "num_key_value_heads": heads}
    return transformers.GraniteMoeHybridConfig(
        **{**COMMON, **width},
        shared_intermediate_size=64 * heads,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        mamba_n_heads=2 * heads,
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


def deepseek() -> Any:
    return transformers.DeepseekV2Config(
        **COMMON,
        num_hidden_layers=2,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        q_lora_rank=None,
        n_routed_experts=4,
        first_k_dense_replace=2,
        architectures=["DeepseekV2ForCausalLM"],
    )


def qwen3_next(dim: int = 128) -> Any:
    return transformers.Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        architectures=["Qwen3NextForCausalLM"],
    )


def gpt_oss() -> Any:
    """Attention sinks, and every other layer with a window."""
    return transformers.GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        architectures=["GptOssForCausalLM"],
    )


def nemotron_h_nano_state() -> Any:
    """States and heads as large as Nemotron-3-Nano's: in bfloat16 vLLM makes blocks of 2,096 tokens."""
    return nemotron_h(
        head_dim=128, num_key_value_heads=2, mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8
    )


def jamba() -> Any:
    return transformers.JambaConfig(
        **COMMON,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=100,
        expert_layer_offset=50,
        num_experts=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        architectures=["JambaForCausalLM"],
    )


def lfm2() -> Any:
    return transformers.Lfm2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_L_cache=3,
        conv_dim=128,
        block_dim=128,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        architectures=["Lfm2ForCausalLM"],
    )
