"""One OpenAI API server over one engine, from start to stop."""

from __future__ import annotations

import http.client
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from kvferry.up import process_group
from kvferry.up.ports import HERE, free_port
from kvferry.up.watch import reason
from lab.fleet.zygote import Zygote

READY_SECONDS = 180.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
MODEL = "model"
"""The name under which every server serves its model."""


class Engine(Protocol):
    """What to start."""

    @property
    def name(self) -> str: ...

    def arguments(self, port: int) -> list[str]:
        """The flags of its API server."""

    def variables(self, side_port: int) -> dict[str, str]:
        """Its environment, beyond the device's; `side_port` is free for a connector to listen at."""


class ServerError(Exception):
    """A server did not come up, or died; the message ends with its log's last lines."""


class Server:
    """Forked at once; `wait` returns when it serves. `host`: where its engine's flags have it listen."""

    def __init__(self, engine: Engine, zygote: Zygote, name: str = "", host: str = HERE) -> None:
        self.engine = engine
        self.name = name or engine.name
        self.host = host
        self.port = free_port()
        self.log = _unused(zygote.folder, self.name)
        self._group = zygote.fork(engine.arguments(self.port), engine.variables(free_port()), self.log)
        self._alive = os.pidfd_open(self._group)

    def wait(self, seconds: float = READY_SECONDS, beside: Iterable[Server] = ()) -> Server:
        """Nor is it waited for where one of those `beside` it has ended."""
        deadline = time.monotonic() + seconds
        while not self._healthy():
            for other in beside:
                if other.died():
                    raise ServerError(f"{other.name} ended before it was ready.\n{other.tail()}")
            if self.died(POLL_SECONDS):
                raise ServerError(f"{self.name} ended before it was ready.\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} was not ready after {seconds:.0f} s.\n{self.tail()}")
        return self

    def refused(self) -> bool:
        """Whether it ended instead of serving."""
        try:
            self.wait()
        except ServerError:
            return True
        return False

    def died(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self._alive], [], [], seconds)[0])

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def reason(self) -> str:
        return reason(self.log.read_text(errors="replace"))

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([self.reason() or "no error in its log", f"the end of {self.log}:", *text[-lines:]])

    def stop(self) -> None:
        """At once, with every process of its group and what these would leave behind."""
        if self._alive < 0:
            return
        process_group.end(self._group)
        os.close(self._alive)
        self._alive = -1

    def terminate(self) -> bool:
        """As an operator would; whether it ended of its own accord."""
        process_group.send(self._group, signal.SIGTERM)
        return self.died(STOP_SECONDS)

    def __enter__(self) -> Server:
        return self.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@contextmanager
def servers(
    zygote: Zygote, engines: Mapping[str, Engine], *, hosts: Mapping[str, str] | None = None, or_refused: bool = False
) -> Iterator[dict[str, Server]]:
    """All of them, started side by side. `hosts`: where those are that do not serve here. `or_refused`: those that did not come
    up are there too, ended."""
    started: dict[str, Server] = {}
    try:
        for name, engine in engines.items():
            started[name] = Server(engine, zygote, f"{engine.name}-{name}", (hosts or {}).get(name, HERE))
        for server in started.values():
            if or_refused:
                server.refused()
            else:
                server.wait(beside=started.values())
        yield started
    finally:
        for server in started.values():
            server.stop()


def _unused(folder: Path, name: str) -> Path:
    taken = len(tuple(folder.glob(f"{name}*.log")))
    return folder / f"{name}.{taken}.log"
