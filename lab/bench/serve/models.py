"""What the engines serve: shapes of real models without weights, tiny ones, or a folder of somebody's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvferry.errors import MeasureError

_COMMON: Final[Mapping[str, Any]] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_TINY_LLAMA: Final = {
    **_LLAMA,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_NEMOTRON_H: Final = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "mlp_hidden_act": "relu2"}


@dataclass(frozen=True)
class Shape:
    """A configuration, and whether vLLM's prefix cache works for it."""

    config: Mapping[str, Any]
    dtype: str = "bfloat16"
    prefix_caching: bool = True


SHAPES: Final = {
    "llama-3.1-8b": Shape(
        {
            **_LLAMA,
            "vocab_size": 32_000,
            "max_position_embeddings": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    ),
    "nemotron-h-8b": Shape(
        {
            **_NEMOTRON_H,
            "vocab_size": 32_000,
            "max_position_embeddings": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 21_504,
            "num_hidden_layers": 52,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        prefix_caching=False,
    ),
    "tiny-llama": Shape(_TINY_LLAMA, "float32"),
    "small-llama": Shape({**_TINY_LLAMA, "hidden_size": 256, "num_hidden_layers": 16, "head_dim": 64}, "float32"),
    "tiny-nemotron-h": Shape(
        {
            **_NEMOTRON_H,
            "vocab_size": 256,
            "max_position_embeddings": 8192,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "hybrid_override_pattern": "M*M-M*",
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 32,
        },
        "float32",
        prefix_caching=False,
    ),
}

IMPORTS: Final = {
    "LlamaForCausalLM": "vllm.model_executor.models.llama",
    "NemotronHForCausalLM": "vllm.model_executor.models.nemotron_h",
}


@dataclass(frozen=True)
class Model:
    """`imports`: the module that engines load it with, where it is known. `weights`: a folder holds them."""

    name: str
    folder: Path
    vocabulary: int
    dtype: str
    prefix_caching: bool
    weights: bool
    imports: tuple[str, ...] = ()


def model(name: str, folder: Path) -> Model:
    """A shape by its name, written into `folder`, or somebody's own folder with a config.json."""
    shape = SHAPES.get(name)
    if shape is None:
        return _own(Path(name))
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **shape.config, "torch_dtype": shape.dtype}
    (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return Model(name, made, config["vocab_size"], shape.dtype, shape.prefix_caching, False, _imports(config))


def _own(folder: Path) -> Model:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocabulary = int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        names = ", ".join(SHAPES)
        problem = f"{type(error).__name__}: {error}"
        raise MeasureError(f"--model {folder}: choose {names} or a folder with a config.json ({problem})") from None
    weights = any(folder.glob("*.safetensors"))
    return Model(folder.name, folder.resolve(), vocabulary, "auto", True, weights, _imports(config))


def _imports(config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(IMPORTS[name] for name in config.get("architectures") or () if name in IMPORTS)
