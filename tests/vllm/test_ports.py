"""Real engines with default options: the connector opens the session port, and no port beside those that vLLM opens itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shared_engines import Fleet, Truth, all_given_back

from lab.crossing.compare import difference
from lab.fleet import legs
from lab.fleet.legs import prompt
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

WITHOUT_CMA = ("UCX_TLS", "^tcp,cma")


@pytest.fixture(scope="module")
def fleet(zygote: Zygote, checkpoints: Path) -> Iterator[Fleet]:
    fleet = Fleet(zygote, checkpoints)
    yield fleet
    fleet.close()


def processes(server: Server) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*") if group_of(path) == server._group]


def group_of(process: Path) -> int:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return -1


def ports(server: Server) -> set[int]:
    """TCP ports that any process of a server listens on."""
    own: set[str] = set()
    listening: dict[str, int] = {}
    for process in processes(server):
        own |= {os.readlink(path) for path in (process / "fd").iterdir() if path.is_symlink()}
        for name in ("tcp", "tcp6"):
            words = [line.split() for line in (process / "net" / name).read_text(encoding="ascii").splitlines()[1:]]
            listening |= {f"socket:[{w[9]}]": int(w[1].rpartition(":")[2], 16) for w in words if w[3] == "0A"}
    return {port for socket, port in listening.items() if socket in own}


@pytest.mark.parametrize("environment", [(), (WITHOUT_CMA,)], ids=["with cma", "without cma"])
def test_an_engine_opens_the_session_port_and_no_other(fleet: Fleet, environment: tuple[tuple[str, str], ...]) -> None:
    roles = ("kv_producer", "kv_consumer")
    engines = [fleet.engine(role=role, policy="fail", environment=environment) for role in roles]
    plain, producer, consumer = fleet.up(replace(engines[0], connector=None), *engines)
    tokens = prompt(300, 7)
    crossed = legs.cross(producer, consumer, tokens)
    assert crossed.decode.good, crossed
    assert difference(0, crossed.decode, Truth().of(producer, tokens), "float32").parted_at == -1
    all_given_back(producer)
    session = {int(crossed.prefill.params["remote_port"])}
    assert session < ports(producer)
    assert len(ports(producer)) == len(ports(plain)) + 1
    assert len(ports(consumer)) == len(ports(plain))
