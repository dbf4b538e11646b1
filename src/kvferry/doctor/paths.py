"""A small measured transfer for each path between two processes of this machine, and to others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from kvferry.doctor.machine import Answer, Machine, probe

BYTES: Final = 32 << 20


@dataclass(frozen=True)
class Path:
    """What to measure: `kind` of `kvferry.doctor.probe`, under which settings, and what it stands for."""

    name: str
    kind: str
    meaning: str
    settings: Mapping[str, str]


class Measured(msgspec.Struct, frozen=True):
    """A path and what came of it."""

    path: str
    meaning: str
    carried: str = ""
    bytes: int = 0
    seconds: float = 0.0
    right: bool = False
    slow: bool = False
    remedy: str = ""
    error: str = ""

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


HOST: Final = Path("host memory", "host", "host memory of another process, as UCX chooses", {})
MAPPED: Final = Path("mapped memory", "mapped", "memory of another process in /dev/shm, copied", {})
DEVICE: Final = Path("device memory", "device", "device memory of another process, as UCX chooses", {})
TCP: Final = Path("TCP", "host", "host memory over TCP alone: what is left without shared memory and RDMA", {"UCX_TLS": "tcp"})


def paths(machine: Machine) -> Iterator[Path]:
    """Those that this machine has."""
    if not machine.nixl.error:
        yield HOST
        if "UCX_TLS" not in machine.environment:
            yield TCP
        if machine.gpus and "torch" in machine.packages and not machine.packages["torch"].endswith("+cpu"):
            yield DEVICE
    if not machine.shared_error:
        yield MAPPED


def measure(machine: Machine, size: int = BYTES) -> list[Measured]:
    out = []
    for path in paths(machine):
        answer = probe(path.kind, {"bytes": size}, path.settings)
        if isinstance(answer, str):
            out.append(Measured(path.name, path.meaning, error=answer))
            continue
        found = msgspec.convert(answer, Answer)
        out.append(msgspec.convert({**msgspec.to_builtins(found), "path": path.name, "meaning": path.meaning}, Measured))
    return out
