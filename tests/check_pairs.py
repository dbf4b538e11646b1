"""Twenty-four pairs of vLLM command lines, each with the verdict that vLLM 0.32's own rules ask for; twelve of them are wrong.

They were written from vLLM's sources and the models' published configurations alone. `{Name}` in a command is a folder of
`CONFIGS[Name]`; a model without braces has no `config.json` on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Verdict(Enum):
    SERVES = 0
    REFUSED = 1
    NOT_PLANNED = 3


@dataclass(frozen=True)
class Pair:
    name: str
    prefill: str
    decode: str
    verdict: Verdict
    why: str


QWEN3_8B: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_32B: Final[dict[str, Any]] = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
LLAMA_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-32B-AWQ": {
        **QWEN3_32B,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    },
    "Qwen3-30B-A3B": {
        **QWEN3_8B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "Meta-Llama-3-8B": LLAMA_8B,
    "Llama-3.1-8B": {
        **LLAMA_8B,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Mixtral-8x22B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 65536,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "position_embedding_type": "nope",
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    },
    "gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
        },
    },
}

KV: Final = (
    "--kv-transfer-config.kv_connector KVFerryConnector --kv-transfer-config.kv_connector_module_path kvferry.engines.vllm"
)
P: Final = f"--port 8100 {KV} --kv-transfer-config.kv_role kv_producer"
D: Final = f"--port 8200 {KV} --kv-transfer-config.kv_role kv_consumer --kv-transfer-config.kv_load_failure_policy recompute"


def right(name: str, prefill: str, decode: str, why: str) -> Pair:
    return Pair(name, f"vllm serve {prefill} {P}", f"vllm serve {decode} {D}", Verdict.SERVES, why)


def wrong(name: str, prefill: str, decode: str, why: str) -> Pair:
    return Pair(name, f"vllm serve {prefill} {P}", f"vllm serve {decode} {D}", Verdict.REFUSED, why)


PAIRS: Final[tuple[Pair, ...]] = (
    right("tensor sizes differ", "{Qwen3-8B} -tp 2", "{Qwen3-8B} -tp 4", "8 KV heads divide by both"),
    right(
        "KV heads are replicated",
        "{Qwen3-8B} --tensor-parallel-size 1",
        "{Qwen3-8B} --tensor-parallel-size=16",
        "32 heads divide by 16, and 16 divides by 8 KV heads",
    ),
    right("MLA", "{DeepSeek-V3} -tp 8", "{DeepSeek-V3} -tp 16 --enable-expert-parallel", "every rank holds the whole latent"),
    right(
        "a hybrid", "{granite-4.0-h-tiny} -tp 1", "{granite-4.0-h-tiny} -tp 2", "12 heads, 4 KV heads and 48 Mamba heads divide"
    ),
    right("sliding windows", "{gemma-3-27b-it} -tp 2", "{gemma-3-27b-it} -tp 4", "16 KV heads divide by both"),
    right("pipeline stages", "{Llama-3.1-8B} -pp 2", "{Llama-3.1-8B} -tp 2", "stages split 32 layers"),
    right(
        "fp8 on both sides",
        "{Qwen3-8B} --kv-cache-dtype fp8",
        "{Qwen3-8B} --kv-cache-dtype fp8_e4m3 -tp 2",
        "fp8 is another word for fp8_e4m3 on CUDA, and neither computes scales",
    ),
    right(
        "one quantised variant", "{Qwen3-32B-AWQ} -tp 2", "{Qwen3-32B-AWQ} -tp 4 --quantization awq_marlin", "the same weights"
    ),
    right(
        "flags that no transfer depends on",
        "{Qwen3-8B} --dtype auto --max-num-batched-tokens 16384 --gpu-memory-utilization 0.8 --enforce-eager",
        "{Qwen3-8B} --dtype bfloat16 --max-num-seqs 256 --gpu-memory-utilization=0.92 --served-model-name chat --api-key abc",
        "auto is the checkpoint's bfloat16",
    ),
    right(
        "block sizes differ",
        "{Qwen3-8B} --block-size 16",
        "{Qwen3-8B} --block-size 64 -tp 2",
        "0.32's FlashAttention is certified",
    ),
    right(
        "data and expert parallel",
        "{Qwen3-30B-A3B} -tp 4 --enable-expert-parallel",
        "{Qwen3-30B-A3B} -tp 2 --data-parallel-size 2 --enable-expert-parallel",
        "every data-parallel rank holds a cache of its own",
    ),
    Pair(
        "a model that nobody can look up",
        f"vllm serve acme/private-13b -tp 2 {P}",
        f"vllm serve acme/private-13b -tp 4 {D}",
        Verdict.NOT_PLANNED,
        "its shape is not known: the flags are all that can be compared",
    ),
    wrong(
        "two models at a size that neither can run",
        "Qwen/Qwen3-8B -tp 3 --dtype bfloat16",
        "Qwen/Qwen3-14B -tp 3 --dtype float16",
        "unlike models, unlike dtypes, and 3 divides neither 32 nor 40 heads",
    ),
    wrong(
        "a name that begins as another's",
        "deepseek-ai/DeepSeek-V3 -tp 4",
        "deepseek-v3-distill-qwen-7b -tp 4",
        "the second is a Qwen2 of 28 layers, without MLA",
    ),
    wrong("a quantised variant of the other's model", "{Qwen3-32B} -tp 2", "{Qwen3-32B-AWQ} -tp 2", "other weights"),
    wrong(
        "KV heads that do not divide",
        "{Mixtral-8x22B-v0.1} -tp 6",
        "{Mixtral-8x22B-v0.1} -tp 6",
        "6 divides 48 heads, not 8 KV heads",
    ),
    wrong("fp8 on one side", "{Qwen3-8B} --kv-cache-dtype fp8", "{Qwen3-8B}", "one byte an element there, two here"),
    wrong("dtypes differ", "{Qwen3-8B}", "{Qwen3-8B} --dtype float16", "auto is bfloat16 there"),
    wrong(
        "decode context parallel",
        "{DeepSeek-V3} -tp 8",
        "{DeepSeek-V3} -tp 8 --decode-context-parallel-size 2",
        "tokens are dealt out to ranks",
    ),
    wrong(
        "a flag that is misspelled",
        "{Qwen3-8B} --tensor-parallel-size 2",
        "{Qwen3-8B} --tensor-paralel-size 2",
        "vLLM does not start with it",
    ),
    wrong(
        "states in another dtype",
        "{granite-4.0-h-tiny} --mamba-ssm-cache-dtype float32",
        "{granite-4.0-h-tiny}",
        "auto is bfloat16 there",
    ),
    wrong(
        "revisions differ",
        "meta-llama/Llama-3.1-8B --revision d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
        "meta-llama/Llama-3.1-8B --revision 0e9e39f249a16976918f6564b8830bc894c89659",
        "a revision is another checkpoint",
    ),
    wrong(
        "windows differ",
        "{gemma-3-27b-it} -tp 2",
        """{gemma-3-27b-it} -tp 2 --hf-overrides '{"text_config": {"sliding_window": 512}}'""",
        "tokens attend to others there than here",
    ),
    wrong(
        "two models of one shape and one served name",
        "{Meta-Llama-3-8B} --served-model-name chat",
        "{Llama-3.1-8B} --served-model-name chat",
        "the same caches in bytes, computed by other weights",
    ),
)
