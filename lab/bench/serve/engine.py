"""One engine of an arm as a server's flags and variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvferry.up.device import Device
from kvferry.up.ports import HERE
from lab.bench.serve.arms import Arm
from lab.bench.serve.models import Model
from lab.fleet import blocks, steps
from lab.fleet.connectors import OURS, Connector
from lab.fleet.patches import WIDE_WEIGHTS
from lab.fleet.server import MODEL

EAGER: Final = "eager"
GRAPHS: Final = "graphs"
MODES: Final = (EAGER, GRAPHS)

SEQUENCES: Final = 128
CAPTURED: Final = (1, 4, 8, 16, 32, 64)
BLOCK: Final = {Device.CPU: 32, Device.CUDA: 16}
DEVICE_FLAGS: Final[Mapping[Device, tuple[str, ...]]] = {
    Device.CPU: (),
    Device.CUDA: ("--gpu-memory-utilization=0.4", "--attention-backend=FLASH_ATTN"),
}


@dataclass(frozen=True)
class Place:
    """Where an engine runs: the address that it serves at, and what our connector and its environment must be told there."""

    host: str = HERE
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """`role`: P or D. `window`: where its block pool is looked into. `listen`: where P of our connector listens, and D looks
    for it at its start, as everybody would have it who knows where P is. `trace`: the file that its steps are recorded in."""

    model: Model
    arm: Arm
    role: str
    mode: str
    device: Device
    window: Path
    kv_cache_bytes: str
    max_tokens: int
    batched_tokens: int
    prefix_caching: bool
    flags: tuple[str, ...] = ()
    listen: str = ""
    place: Place = field(default_factory=Place)
    trace: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.mode}-{self.role}"

    @property
    def block(self) -> int:
        return self.arm.block or BLOCK[self.device]

    def arguments(self, port: int) -> list[str]:
        out = [
            f"--model={self.model.folder}",
            f"--served-model-name={MODEL}",
            f"--host={self.place.host}",
            f"--port={port}",
            f"--dtype={self.model.dtype}",
            f"--block-size={self.block}",
            f"--max-model-len={self.max_tokens}",
            f"--max-num-batched-tokens={self.batched_tokens}",
            f"--max-num-seqs={SEQUENCES}",
            f"--kv-cache-memory-bytes={self.kv_cache_bytes}",
            "--seed=0",
            "--skip-tokenizer-init",
            "--no-disable-hybrid-kv-cache-manager",
            "--disable-uvicorn-access-log",
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
            *DEVICE_FLAGS[self.device],
            *self._compilation(),
        ]
        if not self.model.weights:
            out.append("--load-format=dummy")
        if self.arm.connector:
            role = {"P": "kv_producer", "D": "kv_consumer"}[self.role]
            out.append(f"--kv-transfer-config={self._connector(self.arm.connector).flag(role)}")
        return [*out, *self.arm.flags, *self.flags]

    def _connector(self, connector: Connector) -> Connector:
        if connector.kind != OURS.kind or not self.listen:
            return connector
        there: dict[str, Any] = {"listen": self.listen} if self.role == "P" else {"peers": [self.listen]}
        return replace(connector, settings={**there, **self.place.settings, **connector.settings})

    def _compilation(self) -> tuple[str, ...]:
        if self.mode == EAGER:
            return ("--enforce-eager",)
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
        return (f"--compilation-config={json.dumps(graphs)}",)

    def variables(self, side_port: int) -> dict[str, str]:
        out = {blocks.VARIABLE: str(self.window), **self.place.environment, **self.arm.environment}
        if self.trace is not None:
            out[steps.VARIABLE] = str(self.trace)
        if not self.model.weights:
            out[WIDE_WEIGHTS] = "1"
        if self.arm.connector and self.arm.connector.side_port:
            out[self.arm.connector.side_port] = str(side_port)
        return out
