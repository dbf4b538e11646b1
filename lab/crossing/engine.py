"""A tiny engine as a server's flags and variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.crossing.checkpoints import Checkpoint
from lab.fleet.connectors import Connector
from lab.fleet.server import MODEL

MAX_TOKENS = 1024


@dataclass(frozen=True)
class Engine:
    """What to start. `stages`: the layers of each pipeline stage; the checkpoint's first choice if empty."""

    checkpoint: Checkpoint
    connector: Connector | None = None
    tp: int = 1
    pp: int = 1
    block: int = 32
    stages: tuple[int, ...] = ()
    prefix_caching: bool = False
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        carried = self.connector.name if self.connector else "plain"
        return f"{self.checkpoint.name}-tp{self.tp}-pp{self.pp}-b{self.block}-{carried}"

    def arguments(self, port: int) -> list[str]:
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        out = [
            f"--model={self.checkpoint.folder}",
            f"--served-model-name={MODEL}",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--dtype={self.checkpoint.architecture.dtype}",
            f"--tensor-parallel-size={self.tp}",
            f"--pipeline-parallel-size={self.pp}",
            f"--block-size={self.block}",
            f"--max-model-len={MAX_TOKENS}",
            f"--max-num-batched-tokens={MAX_TOKENS}",
            "--max-num-seqs=32",
            "--kv-cache-memory-bytes=128M",
            "--skip-tokenizer-init",
            "--enforce-eager",
            "--no-disable-hybrid-kv-cache-manager",
            "--disable-uvicorn-access-log",
            caching,
        ]
        if self.connector:
            out.append(f"--kv-transfer-config={self.connector.flag()}")
        return [*out, *self.flags]

    def variables(self, side_port: int) -> dict[str, str]:
        out = dict(self.environment)
        if self.tp * self.pp == 1:
            out.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if self.connector and self.connector.side_port:
            out.setdefault(self.connector.side_port, str(side_port))
        if self.pp > 1:
            stages = self.stages or self._first_choice()
            out.setdefault("VLLM_PP_LAYER_PARTITION", ",".join(map(str, stages)))
        return out

    def _first_choice(self) -> tuple[int, ...]:
        stages = self.checkpoint.architecture.stages
        if not stages:
            raise ValueError(f"vLLM cannot load {self.checkpoint.name} in pipeline stages; choose pp=1")
        return stages[0]
