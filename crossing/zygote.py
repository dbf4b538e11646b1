"""The process that forks servers, seen from the test run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_NET_DEVICES": "lo",
}
LEAKED = ("LD_PRELOAD", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PP_LAYER_PARTITION")


class Zygote:
    """Started at once, ready some seconds later; the first fork waits for that."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "zygote.log"
        environment = {**os.environ, **ENVIRONMENT}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment["TMPDIR"] = str(folder)
        environment["VLLM_RPC_BASE_PATH"] = tempfile.gettempdir()
        for name in LEAKED:
            environment.pop(name, None)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "crossing.launch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._ready = False
        self._lock = threading.Lock()

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The process id of a new API server, which leads a process group of its own."""
        order = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        with self._lock:
            if not self._ready:
                self._answer()
                self._ready = True
            stdin = self._process.stdin
            if stdin is None:
                raise RuntimeError("the process that forks servers has no standard input")
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else b""
        if not line:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the process that forks servers ended; its log {self.log} ends with\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends every server that still runs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
