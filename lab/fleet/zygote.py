"""A process that has imported vLLM and forks servers on request."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from kvferry.up.device import Device
from kvferry.up.supervisor import Supervisor
from lab.fleet.device import environment

ROOT = Path(__file__).parents[2]


class Start(str, Enum):
    """`FORK`: servers share what one process has imported. `SPAWN`: each starts from nothing, as a user's does."""

    FORK = "fork"
    SPAWN = "spawn"


class Zygote(Supervisor):
    """Started at once, ready some seconds later; the first server waits for that. `imports`: modules beyond what every server
    needs, such as the model's. Where forked servers could not use the GPU they are spawned, and `why_spawned` says so.
    `variables`: what servers find in their environment, in place of what measuring needs."""

    def __init__(
        self,
        folder: Path,
        device: Device = Device.CPU,
        start: Start = Start.FORK,
        imports: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.device = device
        made = environment(device, os.environ) if variables is None else dict(variables)
        made["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [made.get("PYTHONPATH")])])
        made.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
        super().__init__(folder, made, "lab.fleet.launch", (device.value, start.value, *imports))

    @property
    def start(self) -> Start:
        return Start(self.wait()["start"])

    @property
    def why_spawned(self) -> str:
        return str(self.wait()["why"])

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The process id of a new API server, which leads a process group of its own."""
        return self._order({"arguments": list(arguments), "environment": dict(environment), "log": str(log)})
