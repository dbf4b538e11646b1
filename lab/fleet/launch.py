"""A process that imports vLLM once and forks an API server for every line on its standard input.

Importing is most of what starting a tiny engine costs and half of what a large one costs, and forked servers share what was
imported. The process ends, and ends every server it started, when its standard input closes, so that nothing outlives a run
that was killed. Nothing here may touch CUDA: a process that forked after that could not use it. Where vLLM itself spawns the
process of an engine, that one imports this module under another name and is patched as its parent was.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.engines.vllm.releases import place_of
from kvferry.up.device import Device
from kvferry.up.supervise import Order, execute, supervise
from lab.fleet import patches
from lab.fleet.zygote import Start

FIRST = {
    Device.CPU: ("vllm.v1.worker.cpu_worker",),
    Device.CUDA: (),
}
"""They must come before other parts of vLLM."""
NEEDED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
)
WELCOME = {
    Device.CPU: (),
    Device.CUDA: (
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
        "kvferry.engines.vllm.connector",
    ),
}
"""They only save time: a build of vLLM that lacks one serves without it. NIXL is not among them: what UCX reads from the
environment must be what each connector sets before it loads it."""


@dataclass
class Launcher:
    """`start` is what was asked for, and what could be had once everything is imported."""

    device: Device
    start: Start
    imports: Sequence[str] = ()

    def prepare(self) -> Mapping[str, str]:
        why = ""
        if self.start is Start.FORK:
            _prepare(self.device, self.imports)
            why = unfit_for_forks(self.device)
            self.start = Start.SPAWN if why else Start.FORK
        return {"start": self.start.value, "why": why}

    def become(self, order: Order) -> None:
        if "command" in order:
            execute(order)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = order["environment"].get("VLLM_WORKER_MULTIPROC_METHOD", self.start.value)
        if self.start is Start.SPAWN:
            os.execv(sys.executable, [sys.executable, "-m", "lab.fleet.alone", self.device.value, *order["arguments"]])
        patches.apply_ordered()
        serve(order["arguments"])


def _prepare(device: Device, imports: Sequence[str]) -> None:
    """Everything that a server and its workers import, and nothing that starts a thread."""
    for name in (*FIRST[device], *NEEDED):
        _timed(name)
    for name in (*WELCOME[device], *imports):
        _welcome(name)
    if device is Device.CPU:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    patches.apply(device)


def _timed(name: str) -> None:
    began = time.monotonic()
    importlib.import_module(name)
    print(f"imported {name} in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _welcome(name: str) -> None:
    try:
        _timed(name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        print(f"not imported in advance: {name}: {error}", file=sys.stderr, flush=True)


def unfit_for_forks(device: Device) -> str:
    """Why a forked child could not use the device: a child is sent to try."""
    if device is Device.CPU:
        return ""
    import torch

    if torch.cuda.is_initialized():
        return "an import has initialised CUDA"
    child = os.fork()
    if not child:
        os._exit(min(ctypes.CDLL("libcuda.so.1").cuInit(0), 255))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"cuInit returns {code} in a forked child" if code else ""


def serve(arguments: Sequence[str]) -> None:
    """An API server, or several, until they are told to end."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = place_of("make_arg_parser")(FlexibleArgumentParser()).parse_args(list(arguments))
    place_of("validate_parsed_serve_args")(args)
    if (args.api_server_count or 1) > 1:
        from vllm.entrypoints.cli.serve import run_multi_api_server

        if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == Start.FORK.value:
            patches.fork_api_servers()
        run_multi_api_server(args)
    else:
        uvloop.run(run_server(args))


if __name__ == "__mp_main__":
    patches.apply(Device(sys.argv[1]))
    patches.apply_ordered()

if __name__ == "__main__":
    launcher = Launcher(Device(sys.argv[1]), Start(sys.argv[2]), sys.argv[3:])
    supervise(launcher.become, launcher.prepare)
