"""What each of several engines gets of one machine: cores and memory, or GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvferry.errors import UpError
from kvferry.up.device import Device
from kvferry.up.engines import Engine

ENOUGH_CORES: Final = 4
"""From so many a rank on, its threads are bound to cores; with fewer, binding makes engines wait for each other."""
GPU_MEMORY: Final = 0.9
CPU_MEMORY: Final = 0.7
MEMORY_FLAGS: Final = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")


@dataclass(frozen=True)
class Share:
    """An engine's part: variables of its environment and flags."""

    variables: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


def shares(device: Device, engines: Sequence[Engine], has: Sequence[str], outer: Mapping[str, str]) -> tuple[Share, ...]:
    """`has`: the cores, or the GPUs. What is set in the `outer` environment stays as it is."""
    found = _gpus(engines, has) if device is Device.CUDA else _cores(engines, [int(it) for it in has])
    return tuple(Share({name: value for name, value in it.variables.items() if name not in outer}, it.flags) for it in found)


def _gpus(engines: Sequence[Engine], gpus: Sequence[str]) -> list[Share]:
    """One after the other; where there are not enough for all, the next begins anew and memory is shared."""
    dealt: list[tuple[str, ...]] = []
    at = 0
    for engine in engines:
        if engine.ranks > len(gpus):
            raise UpError(f"{engine.name} wants {engine.ranks} GPUs (tp={engine.tp},pp={engine.pp}); there are {len(gpus)}")
        at = 0 if at + engine.ranks > len(gpus) else at
        dealt.append(tuple(gpus[at : at + engine.ranks]))
        at += engine.ranks
    out = []
    for engine, mine in zip(engines, dealt, strict=True):
        beside = max(sum(gpu in others for others in dealt) for gpu in mine)
        shared = beside > 1 and not engine.sets(*MEMORY_FLAGS)
        flags = (f"--gpu-memory-utilization={GPU_MEMORY / beside:.2f}",) if shared else ()
        out.append(Share({"CUDA_VISIBLE_DEVICES": ",".join(mine)}, flags))
    return out


def _cores(engines: Sequence[Engine], cores: Sequence[int]) -> list[Share]:
    """Where every rank has some cores of its own, one of them is left to what runs beside its threads."""
    each = len(cores) // sum(engine.ranks for engine in engines)
    memory = f"--gpu-memory-utilization={CPU_MEMORY / len(engines):.2f}"
    out = []
    at = 0
    for engine in engines:
        if each >= ENOUGH_CORES:
            taken = [cores[at + rank * each : at + (rank + 1) * each - 1] for rank in range(engine.ranks)]
            at += each * engine.ranks
            variables = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, it)) for it in taken)}
        else:
            variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, each))}
        out.append(Share(variables, () if engine.sets(*MEMORY_FLAGS) else (memory,)))
    return out


def found_cores() -> tuple[str, ...]:
    return tuple(str(core) for core in sorted(os.sched_getaffinity(0)))


def found_gpus(outer: Mapping[str, str]) -> tuple[str, ...]:
    """Those that CUDA would show, by their numbers; nothing is initialised."""
    shown = outer.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return tuple(it.strip() for it in shown.split(",") if it.strip())
    return tuple(str(number) for number, _ in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*"))))
