"""A process beside this one, told and asked through a pipe, and never left behind."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from kvferry.errors import MeasureError

_LEAVING_S: Final = 10.0


@dataclass(frozen=True)
class Child:
    """A running child; `name` is what it is called in errors."""

    name: str
    process: BaseProcess
    pipe: Connection

    def send(self, message: bytes) -> None:
        try:
            self.pipe.send_bytes(message)
        except OSError:
            raise self._died() from None

    def receive(self, patience_s: float) -> bytes:
        if not self.pipe.poll(patience_s):
            raise MeasureError(f"{self.name} did not answer in {patience_s:g} s")
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> MeasureError:
        self.process.join(_LEAVING_S)
        return MeasureError(f"{self.name} died with exit code {self.process.exitcode}")


@contextmanager
def child(name: str, target: Callable[..., None], *words: Any) -> Iterator[Child]:
    """A fresh process that runs `target` on its end of a pipe and `words`, and is gone when the block ends."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *words), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(name, process, ours)
    finally:
        ours.close()
        process.join(_LEAVING_S)
        if process.is_alive():
            process.kill()
            process.join()
