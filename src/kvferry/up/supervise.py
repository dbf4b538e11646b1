"""The process that runs programs for `Supervisor`: `python -m kvferry.up.supervise`.

Standard input has one order a line, in JSON, and standard output one answer a line. When standard input closes, the process
ends everything that it started: nothing outlives a command that was killed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvferry.up import process_group

POLL_SECONDS = 0.05

Order = Mapping[str, Any]
"""What to run: `environment`, a `log`, and a `command`, unless a supervisor of another kind reads something else."""


def execute(order: Order) -> None:
    """Become the program that is ordered."""
    os.execvp(order["command"][0], order["command"])


def supervise(become: Callable[[Order], None] = execute, prepare: Callable[[], Mapping[str, Any]] = dict) -> NoReturn:
    """Carry out orders until standard input closes.

    `prepare` is called first; what it returns is the first answer. Each order calls `become` in a new process, which leads a
    process group, writes to the order's log, and ends when `become` does."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    process_group.adopt_orphans()
    answers.write(json.dumps(prepare()) + "\n")
    children: set[int] = set()
    removed: list[str] = []
    pending = b""
    try:
        while True:
            children -= process_group.reap()
            if not select.select([0], [], [], POLL_SECONDS)[0]:
                continue
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                order = json.loads(line)
                child = 0
                if "remove" in order:
                    removed.append(order["remove"])
                else:
                    child = _begin(order, answers.fileno(), become)
                    children.add(child)
                answers.write(json.dumps({"pid": child}) + "\n")
    finally:
        for child in children:
            process_group.end(child, process_group.reap)
        process_group.sweep(Path(tempfile.gettempdir()))
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _begin(order: Order, answers: int, become: Callable[[Order], None]) -> int:
    child = os.fork()
    if not child:
        _carry_out(order, answers, become)
    return child


def _carry_out(order: Order, answers: int, become: Callable[[Order], None]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.close(answers)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        process_group.die_with_parent()
        os.environ.update(order["environment"])
        become(order)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    supervise()
