"""A checkpoint with random weights, for a model that is made where it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 20


def write(config: Any, dtype: str, folder: Path, adjust: Callable[[Any], None] | None = None) -> None:
    """Random weights from a fixed seed; every weight wide enough that greedy output depends on the whole context. `adjust`
    may change the model before it is written."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = getattr(transformers, config.architectures[0])(config)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                _fill(name, weight, config)
            if adjust is not None:
                adjust(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


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
