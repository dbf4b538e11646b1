"""What is run for a fleet, and where: the same on one machine and on two."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.errors import UpError
from kvferry.up.engines import Engine, Role
from kvferry.up.machine import Share

LOOPBACK: Final = "127.0.0.1"
WILDCARD: Final = "0.0.0.0"
CHANNEL_PORT: Final = 7600
"""The first port of a machine at which engines answer others and `kvferry check`, where the sides are on different machines."""
QUIET: Final = "--disable-access-log-for-endpoints=/health,/metrics"
"""The router and `kvferry up` ask for these several times a second; without it they are most of an engine's log."""
ALERT: Final = (
    "--worker-startup-check-interval=1",
    "--health-check-interval-secs=2",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
    "--cb-timeout-duration-secs=2",
    "--cb-success-threshold=1",
)
"""An engine that was restarted is asked again after seconds; the router's own values are made for minutes."""


@dataclass(frozen=True)
class Serving:
    """How vLLM is started: its command where its package is called so, else its module. `module`: KVFerry is not installed as a
    package, so that vLLM must be told where the connector is."""

    start: tuple[str, ...] = ("vllm", "serve")
    module: bool = False


@dataclass(frozen=True)
class Command:
    """A program to run: on `host`, with these variables, answering at `url`."""

    name: str
    role: str
    host: str
    url: str
    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """As one would type it."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.variables.items()), shlex.join(self.words)])


@dataclass(frozen=True)
class Place:
    """Where an engine is: what it listens on, how others call it, the port of its HTTP server and that of its channel."""

    listen: str
    host: str
    port: int
    channel: int = 0

    @property
    def url(self) -> str:
        return f"http://{self._named}:{self.port}"

    @property
    def answers(self) -> str:
        """Where other engines and `kvferry check` ask it."""
        return f"{self._named}:{self.channel}"

    @property
    def _named(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True)
class Fleet:
    """All that is needed to say what is run. `settings`: options of the connector for both sides; `key_file`: needed where the
    sides are on different machines."""

    model: str
    engines: tuple[Engine, ...]
    places: tuple[Place, ...]
    shares: tuple[Share, ...]
    serving: Serving = Serving()
    name: str = ""
    key_file: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Whether some engine is on another machine than another."""
        return len({place.host for place in self.places}) > 1

    def commands(self) -> tuple[Command, ...]:
        if self.apart and not self.key_file:
            raise UpError("the two sides are on different machines: set --key-file to a file that both hold")
        return tuple(
            Command(engine.name, engine.role.value, place.host, place.url, self._words(engine, place, share), share.variables)
            for engine, place, share in zip(self.engines, self.places, self.shares, strict=True)
        )

    def _words(self, engine: Engine, place: Place, share: Share) -> tuple[str, ...]:
        model = (self.model,) if self.serving.start[-1] == "serve" else ("--model", self.model)
        out = [*self.serving.start, *model, "--host", place.listen, "--port", str(place.port)]
        out += ["--served-model-name", self.name] if self.name else []
        for flag, size in (("--tensor-parallel-size", engine.tp), ("--pipeline-parallel-size", engine.pp)):
            out += [flag, str(size)] if size > 1 else []
        out += ["--block-size", str(engine.block)] if engine.block else []
        out += ["--kv-transfer-config", json.dumps(self._transfer(engine, place))]
        return (*out, QUIET, *share.flags, *engine.flags)

    def _transfer(self, engine: Engine, place: Place) -> dict[str, Any]:
        out: dict[str, Any] = {"kv_connector": "KVFerryConnector"}
        if self.serving.module:
            out["kv_connector_module_path"] = "kvferry.engines.vllm"
        extra: dict[str, Any] = {**self.settings, "listen": place.answers}
        if self.key_file:
            extra["key_file"] = self.key_file
        if engine.role is Role.PREFILL:
            out["kv_role"] = "kv_producer"
            if self.apart:
                extra |= {"listen": f"{WILDCARD}:{place.channel}", "advertise": place.host}
        else:
            out |= {"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
            if self.apart:
                extra["peers"] = [it.answers for producer, it in self._placed() if producer.role is Role.PREFILL]
        return {**out, "kv_connector_extra_config": extra}

    def _placed(self) -> Iterator[tuple[Engine, Place]]:
        return zip(self.engines, self.places, strict=True)


def router(start: Sequence[str], commands: Sequence[Command], place: Place, flags: Sequence[str] = ()) -> Command:
    """vllm-router over engines that are to be run by `commands`."""
    words = [*start, "--vllm-pd-disaggregation", "--host", place.listen, "--port", str(place.port)]
    for command in commands:
        words += [f"--{command.role}", command.url]
    return Command("router", "router", place.host, place.url, (*words, *ALERT, *flags))


def script(commands: Sequence[Command], key_file: str, model: str, first: Sequence[str] = ()) -> str:
    """To be pasted, machine by machine; the router is the last of the commands. `first`: what is to be run on every machine
    before them."""
    hosts = list(dict.fromkeys(command.host for command in commands))
    out = []
    if len(hosts) > 1:
        out += [
            f"# Once, on one machine; then copy {key_file} to all of {', '.join(hosts)}, readable by nobody else:",
            f"(umask 077; head -c 32 /dev/urandom | base64 > {shlex.quote(key_file)})",
            "",
        ]
    for host in hosts:
        out += ["# First:" if len(hosts) == 1 else f"# First, on {host}:", *first, ""] if first else []
        out.append(f"# On {host}, each in a terminal of its own:" if len(hosts) > 1 else "# Each in a terminal of its own:")
        out += [command.line for command in commands if command.host == host]
        out.append("")
    return "\n".join([*out, "# When all of them are up:", curl(commands[-1].url, model)]) + "\n"


def check(fleet: Fleet) -> str:
    """Asks all of its engines whether every pair of them fits."""
    words = [word for place in fleet.places for word in ("--engine", place.answers)]
    return shlex.join(["kvferry", "check", *words, *(["--key-file", fleet.key_file] if fleet.key_file else [])])


def curl(url: str, model: str) -> str:
    body = json.dumps({"model": model, "prompt": "The ferry leaves at", "max_tokens": 16})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
