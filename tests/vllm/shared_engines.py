"""Engines shared between tests, a few up at a time, and what their metrics say of blocks, leases and loads."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from kvferry.up import process_group
from lab.crossing.checkpoints import checkpoint
from lab.crossing.engine import Engine
from lab.fleet import legs
from lab.fleet.connectors import Connector
from lab.fleet.legs import Answer, Prompt
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

T = TypeVar("T")
AT_ONCE = 3
PATIENCE = 60.0
NUDGE_AFTER = 1.0
LABELLED = {
    "kvferry_leases_ended_total": ("ending", ""),
    "kvferry_loads_total": ("outcome", ""),
    "kvferry_prefills_without_lease_total": ("reason", "prefill_"),
}


@dataclass(frozen=True)
class Ferried(Connector):
    """Our connector in a role, with vLLM's policy for loads that fail."""

    policy: str = "recompute"
    role: str = "kv_both"

    def flag(self) -> str:
        return json.dumps({**json.loads(super().flag(self.role)), "kv_load_failure_policy": self.policy})


@dataclass(frozen=True)
class Among(Ferried):
    """The same, as one of several connectors."""

    def flag(self) -> str:
        several = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": self.policy}
        return json.dumps({**several, "kv_connector_extra_config": {"connectors": [json.loads(super().flag())]}})


class Fleet:
    """Starts an engine when it is first asked for; stops the one that was not asked for the longest to make room."""

    def __init__(self, zygote: Zygote, checkpoints: Path) -> None:
        self._zygote, self._checkpoints = zygote, checkpoints
        self._up: dict[Engine, Server] = {}
        self._numbers = itertools.count(1)

    def engine(
        self,
        model: str = "llama",
        *,
        policy: str = "recompute",
        role: str = "kv_both",
        settings: Mapping[str, Any] | None = None,
        flags: tuple[str, ...] = (),
        environment: tuple[tuple[str, str], ...] = (),
        kind: type[Ferried] = Ferried,
        **choices: Any,
    ) -> Engine:
        said = {"settings": Frozen(settings or {}), "policy": policy, "role": role}
        connector = kind("ours", "KVFerryConnector", "kvferry.engines.vllm", **said)
        return Engine(
            checkpoint(model, self._checkpoints), connector, flags=flags, environment=Frozen(dict(environment)), **choices
        )

    def up(self, *engines: Engine) -> list[Server]:
        """Servers for all of them, started side by side."""
        for engine, server in tuple(self._up.items()):
            if server.died():
                self.down(engine)
        spare = [engine for engine in self._up if engine not in engines]
        missing = [engine for engine in engines if engine not in self._up]
        for engine in spare[: max(0, len(self._up) + len(missing) - AT_ONCE)]:
            self.down(engine)
        for engine in missing:
            self._up[engine] = self._start(engine)
        for engine in engines:
            self._up[engine] = self._up.pop(engine).wait()
        return [self._up[engine] for engine in engines]

    def _start(self, engine: Engine) -> Server:
        """With a log of its own."""
        return Server(engine, self._zygote, f"{engine.name}-{next(self._numbers)}")

    def down(self, engine: Engine) -> None:
        self._up.pop(engine).stop()

    @contextmanager
    def attempt(self, engine: Engine) -> Iterator[Server]:
        """Started, not waited for, and stopped afterwards."""
        server = self._start(engine)
        try:
            yield server
        finally:
            server.stop()

    def close(self) -> None:
        for engine in tuple(self._up):
            self.down(engine)


class Frozen(dict[str, Any]):
    """Settings that may be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def kill(server: Server) -> None:
    """As a machine would: every process of the server at once."""
    process_group.send(server._group, signal.SIGKILL)
    until("it has ended", lambda: process_group.send(server._group, 0), lambda lives: not lives)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """All of its processes stand still."""
    process_group.send(server._group, signal.SIGSTOP)
    try:
        yield
    finally:
        if not server.died():
            process_group.send(server._group, signal.SIGCONT)


@dataclass(frozen=True)
class Meter:
    """One look at a server's metrics: how much of its cache is in use, loads by outcome, leases by how they ended."""

    values: Mapping[str, float]

    def __getattr__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def __sub__(self, before: Meter) -> Meter:
        return Meter({name: value - before.values.get(name, 0.0) for name, value in self.values.items()})

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in sorted(self.values.items()) if value)


NAMES = {
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_hits_total": "hits",
    "kvferry_tokens_loaded_total": "tokens",
    "kvferry_tokens_recomputed_total": "recomputed",
    "kvferry_loads_in_step_total": "in_step",
    "kvferry_bytes_moved_total": "moved",
    "kvferry_bytes_predicted_total": "predicted",
    "kvferry_leases_published_total": "published",
}


def meter(server: Server) -> Meter:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            label, before = LABELLED.get(sample.name, ("", ""))
            name = before + sample.labels[label] if label else NAMES.get(sample.name)
            if name:
                found[name] = found.get(name, 0.0) + sample.value
    return Meter(found)


def until(what: str, look: Callable[[], T], enough: Callable[[T], bool], seconds: float = PATIENCE) -> T:
    """Look again until it is enough; metrics follow what they count by a moment."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if enough(seen):
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s; seen: {seen}")
        time.sleep(0.05)


def since(server: Server, before: Meter, enough: Callable[[Meter], bool]) -> Meter:
    """What was counted since `before`, once it is enough."""
    return until(f"{server.name} since {before}", lambda: meter(server) - before, enough)


def all_given_back(server: Server) -> Meter:
    """Waits until no block is held, no request is left, and every published lease has ended. vLLM returns some blocks and
    counts some endings only with its next step, so an engine that stands still is nudged with a request of its own."""
    started = time.monotonic()

    def look() -> Meter:
        if time.monotonic() - started > NUDGE_AFTER:
            legs.ask(server, legs.prompt(2), max_new=1)
        return meter(server)

    return until(
        f"{server.name} gives everything back",
        look,
        lambda m: not m.usage and not m.running and not m.waiting and m.published == m.released + m.expired,
    )


class Truth:
    """What an engine answers that computes everything itself, asked once a prompt."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Prompt, int], Answer] = {}

    def of(self, server: Server, prompt: Prompt, max_new: int = legs.MAX_NEW) -> Answer:
        key = (server.engine.checkpoint.name, prompt, max_new)
        if key not in self._known:
            self._known[key] = legs.ask(server, prompt, max_new=max_new)
        return self._known[key]
