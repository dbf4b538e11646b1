"""The process that starts servers, seen from whoever asks for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.fleet.device import Device, environment

SOURCES = Path(__file__).parents[2]


class Start(str, Enum):
    """`FORK`: servers share what one process has imported. `SPAWN`: each starts from nothing, as a user's does."""

    FORK = "fork"
    SPAWN = "spawn"


class Zygote:
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
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.device = device
        self.start = start
        self.why_spawned = ""
        self.log = folder / "zygote.log"
        made = environment(device, os.environ) if variables is None else dict(variables)
        made["PYTHONPATH"] = os.pathsep.join([str(SOURCES), *filter(None, [made.get("PYTHONPATH")])])
        made["TMPDIR"] = str(folder)
        made.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.fleet.launch", device.value, start.value, *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=made,
                start_new_session=True,
            )
        self._ready = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until vLLM is imported."""
        with self._lock:
            self._wait()

    def _wait(self) -> None:
        if self._ready:
            return
        found = self._answer()
        self.start, self.why_spawned = Start(found["start"]), found["why"]
        self._ready = True

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The process id of a new API server, which leads a process group of its own."""
        return self._order({"arguments": list(arguments), "environment": dict(environment), "log": str(log)})

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The same for any other program."""
        return self._order({"command": list(command), "environment": dict(environment), "log": str(log)})

    def remove_at_end(self, folder: Path) -> None:
        """When the last server has ended, also where we were killed."""
        self._order({"remove": str(folder)})

    def _order(self, order: Mapping[str, Any]) -> int:
        with self._lock:
            self._wait()
            stdin = self._process.stdin
            if stdin is None:
                raise RuntimeError("the process that starts servers has no standard input")
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else b""
        if not line:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the process that starts servers ended; its log {self.log} ends with\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends every server that still runs."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
