"""Tiny random checkpoints of every architecture that vLLM loads on a CPU, without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.up.checkpoints import write
from lab.crossing import architectures
from lab.fleet.checkpoints import kept


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
    found = ARCHITECTURES[name]
    return Checkpoint(found, kept(cache / name, lambda folder: write(found.config(), found.dtype, folder)))
