"""Engines and their router, from start to end.

A process between us and them runs them (`kvferry.up.supervise`): it ends all of them and removes their folder when we end,
however that comes about. An engine that has served and dies is started again, as it was; one that does not come up ends
everything.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from kvferry.errors import UpError
from kvferry.up import process_group
from kvferry.up.commands import Command
from kvferry.up.supervisor import Supervisor
from kvferry.up.watch import Counts, State, carried_by, counts, get, reason, serves, stage, total

LOOK_SECONDS: Final = 0.5
END_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05
ATTEMPTS: Final = 3
TAIL: Final = 12


class NotUpError(UpError):
    """A process did not come up; `tail` is the end of its log."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class Seen:
    """One look at one process. `doing`: how far it is, while it starts."""

    command: Command
    state: State = State.STARTING
    doing: str = ""
    restarts: int = 0
    counts: Counts = field(default_factory=Counts)
    carried_by: str = ""


class _Process:
    """A command that is run, and run again. `before` is what was counted by those of it that died."""

    def __init__(self, command: Command, supervisor: Supervisor, logs: Path) -> None:
        self.command, self._supervisor, self._logs = command, supervisor, logs
        self.restarts = 0
        self.ready = False
        self.failed = 0
        self._before = Counts()
        self._latest = Counts()
        self._run()

    def _run(self) -> None:
        self.log = self._logs / f"{self.command.name}.{self.restarts}.log"
        self.log.touch()
        self._group = self._supervisor.run(self.command.words, self.command.variables, self.log)
        self.ready = False
        try:
            self._alive = os.pidfd_open(self._group)
        except ProcessLookupError:
            self._alive = -1

    @property
    def ended(self) -> bool:
        return self._alive < 0 or bool(select.select([self._alive], [], [], 0)[0])

    def again(self) -> None:
        """In place of one that died, with nothing of it left."""
        self.failed = 0 if self.ready else self.failed + 1
        self._before, self._latest = self._before + self._latest, Counts()
        self.stop()
        self.restarts += 1
        self._run()

    def stop(self) -> None:
        """At once, with all of its group."""
        process_group.end(self._group)
        if self._alive >= 0:
            os.close(self._alive)
        self._alive = -1

    def ask_to_end(self) -> None:
        process_group.send(self._group, signal.SIGTERM)

    def look(self) -> Seen:
        text = self.log.read_text(errors="replace")
        if self.ended:
            return self._seen(State.ENDED, reason(text))
        well = serves(self.command.url)
        self.ready = self.ready or well
        engine = self.command.role != "router"
        if not self.ready:
            return self._seen(State.STARTING, stage(text) if engine else "meeting the engines")
        page = get(f"{self.command.url}/metrics") if engine else None
        if page is not None:
            self._latest = counts(page)
        return self._seen(State.SERVING if well else State.SILENT, carried=carried_by(text) if engine else "")

    def _seen(self, state: State, doing: str = "", carried: str = "") -> Seen:
        return Seen(self.command, state, doing, self.restarts, self._before + self._latest, carried)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL:])


class Harbour:
    """All of it runs in `folder`, which is removed at the end. `logs`: where logs are kept, else in the folder."""

    def __init__(self, variables: Mapping[str, str], folder: Path, logs: Path | None = None) -> None:
        self.folder = folder
        self._logs = logs or folder
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UpError(f"--logs {logs}: {error.strerror}; name a folder that can be written") from None
        self._supervisor = Supervisor(folder, {**variables, "VLLM_RPC_BASE_PATH": str(folder)})
        self._supervisor.remove_at_end(folder)
        self._engines: Sequence[Command] = ()
        self._router: Command | None = None
        self._processes: list[_Process] = []
        self._seen: dict[str, Seen] = {}
        self._closing = threading.Event()
        self._reviving = threading.Lock()
        self._looking: list[threading.Thread] = []
        self._error: NotUpError | None = None

    def __enter__(self) -> Harbour:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def prepare(self, command: Command, wish: threading.Event) -> None:
        """Run something that ends by itself, before engines are begun; its log tells whether it went well."""
        process = _Process(command, self._supervisor, self._logs)
        while not process.ended and not wish.wait(POLL_SECONDS):
            pass
        process.stop()
        why = reason(process.log.read_text(errors="replace"))
        if why:
            raise NotUpError(f"{command.name} failed: {why}", process.tail())

    def begin(self, engines: Sequence[Command], router: Command) -> None:
        """Start the engines side by side; the router is started when all of them serve."""
        self._engines, self._router = engines, router
        for command in engines:
            self._begin(command)

    def _begin(self, command: Command) -> None:
        process = _Process(command, self._supervisor, self._logs)
        self._processes.append(process)
        self._seen[command.name] = Seen(command)
        thread = threading.Thread(target=self._watch, args=(process,), name=f"kvferry-{command.name}", daemon=True)
        self._looking.append(thread)
        thread.start()

    def _watch(self, process: _Process) -> None:
        """One that is slow to answer holds up no other."""
        try:
            while not self._closing.wait(LOOK_SECONDS):
                seen = process.look()
                if seen.state is State.ENDED:
                    self._revive(process, seen)
                self._seen[process.command.name] = seen
        except NotUpError as error:
            self._error = self._error or error
        except (OSError, RuntimeError) as error:
            self._error = self._error or NotUpError(f"what runs {process.command.name} has ended", str(error))

    def _revive(self, process: _Process, seen: Seen) -> None:
        with self._reviving:
            if self._closing.is_set():
                return
            if (process.restarts == 0 and not process.ready) or process.failed >= ATTEMPTS - 1:
                why = seen.doing or "its log gives no reason"
                raise NotUpError(f"{process.command.name} ended before it served: {why}", process.tail())
            process.again()

    def look(self) -> tuple[Seen, ...]:
        """All of them, as last seen; the router is begun here. Raises UpError where one did not come up."""
        if self._error is not None:
            raise self._error
        up = all(self._seen[command.name].state is State.SERVING for command in self._engines)
        if up and self._router is not None and self._router.name not in self._seen:
            self._begin(self._router)
        return tuple(self._seen.values())

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        seen = self._seen.get(self._router.name) if self._router is not None else None
        return seen is not None and seen.state is State.SERVING

    def counted(self) -> Counts:
        """By all decode engines, asked now."""
        decoding = [process for process in self._processes if process.command.role == "decode"]
        return total(process.look().counts for process in decoding)

    def close(self) -> None:
        """As an operator would, then at once; nothing is left."""
        with self._reviving:
            self._closing.set()
        for process in self._processes:
            process.ask_to_end()
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and not all(process.ended for process in self._processes):
            time.sleep(POLL_SECONDS)
        for process in self._processes:
            process.stop()
        self._supervisor.close()
        for thread in self._looking:
            thread.join()


@contextmanager
def ended_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and a closed terminal set. A second Ctrl-C does not leave half of it behind either: what
    is under way ends in seconds."""
    wanted = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        wanted.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield wanted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def folder() -> Iterator[Path]:
    """For all that processes write; its name is short, since sockets are made in it."""
    made = Path(tempfile.mkdtemp(prefix="kvferry-up-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
