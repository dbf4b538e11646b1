"""The process that runs programs (`kvferry.up.supervise`), as the process that gives it orders sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

SOURCES: Final = Path(__file__).parents[2]
MODULE: Final = "kvferry.up.supervise"
Self = TypeVar("Self", bound="Supervisor")


class Supervisor:
    """Runs programs, each in a process group of its own, and ends all of them when it is closed, or when this process ends.

    `folder` is their folder for temporary files, and `variables` their environment. `module` is what the supervising process
    runs, with `words` as its arguments."""

    def __init__(self, folder: Path, variables: Mapping[str, str], module: str = MODULE, words: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "supervisor.log"
        paths = [str(SOURCES), *filter(None, [variables.get("PYTHONPATH")])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**variables, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)},
                start_new_session=True,
            )
        self._prepared: Mapping[str, Any] | None = None
        self._lock = threading.Lock()

    def wait(self) -> Mapping[str, Any]:
        """Block until the process takes orders; what it said of itself."""
        with self._lock:
            return self._wait()

    def _wait(self) -> Mapping[str, Any]:
        if self._prepared is None:
            self._prepared = self._answer()
        return self._prepared

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The process id of a new program, which leads a process group."""
        return self._order({"command": list(command), "environment": dict(environment), "log": str(log)})

    def remove_at_end(self, folder: Path) -> None:
        """Remove the folder when the last program has ended, also if this process was killed."""
        self._order({"remove": str(folder)})

    def _order(self, order: Mapping[str, Any]) -> int:
        with self._lock:
            self._wait()
            stdin = self._process.stdin
            if stdin is None:
                raise RuntimeError("the supervising process has no standard input")
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else b""
        if not line:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the supervising process ended; its log {self.log} ends with\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End every program that still runs."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
