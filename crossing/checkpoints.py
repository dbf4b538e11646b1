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

from crossing import architectures

SEED = 20


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


ARCHITECTURES = {
    it.name: it
    for it in (
        Architecture("llama", architectures.llama, stages=((2, 2), (1, 3))),
        Architecture("mqa", architectures.mqa),
        Architecture("gemma3", architectures.gemma3, stages=((3, 3), (2, 4)), window=architectures.WINDOW),
        Architecture("nemotron-h", architectures.nemotron_h, recurrent=True, stages=((3, 3), (5, 1))),
        Architecture("nemotron-h-large-state", architectures.nemotron_h_large_state, recurrent=True, stages=((3, 3),)),
        Architecture("nemotron-h-nano-state", architectures.nemotron_h_nano_state, recurrent=True, dtype="bfloat16"),
        Architecture("granite-h-1g", lambda: architectures.granite_h(1), recurrent=True),
        Architecture("granite-h-2g", lambda: architectures.granite_h(2), recurrent=True),
        Architecture("deepseek", architectures.deepseek, dtype="bfloat16"),
        Architecture("gpt-oss", architectures.gpt_oss, window=architectures.WINDOW, dtype="bfloat16"),
        Architecture("qwen3-next", architectures.qwen3_next, recurrent=True, dtype="bfloat16"),
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
