"""A process that imports vLLM once and forks an API server for every line on its standard input.

Importing is most of what starting a tiny engine costs and half of what a large one costs, and forked servers share what was
imported. The process ends, and ends every server it started, when its standard input closes, so that nothing outlives a run
that was killed. Nothing here may touch CUDA: a process that forked after that could not use it. Where vLLM itself spawns the
process of an engine, that one imports this module under another name and is patched as its parent was.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvferry.engines.vllm.releases import place_of
from kvferry.fleet import patches, process_group
from kvferry.fleet.device import Device
from kvferry.fleet.zygote import Start

POLL_SECONDS = 0.05

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


def main() -> None:
    device, start, imports = Device(sys.argv[1]), Start(sys.argv[2]), sys.argv[3:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    process_group.adopt_orphans()
    why = ""
    if start is Start.FORK:
        _prepare(device, imports)
        why = unfit_for_forks(device)
        start = Start.SPAWN if why else Start.FORK
    answers.write(json.dumps({"ready": True, "start": start.value, "why": why}) + "\n")
    children: set[int] = set()
    removed: list[str] = []
    pending = b""
    try:
        while True:
            children -= process_group.reap()
            if not select.select([0], [], [], POLL_SECONDS)[0]:
                continue
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                order = json.loads(line)
                child = 0
                if "remove" in order:
                    removed.append(order["remove"])
                else:
                    child = _begin(order, answers.fileno(), device, start)
                    children.add(child)
                answers.write(json.dumps({"pid": child}) + "\n")
    finally:
        for child in children:
            process_group.end(child, process_group.reap)
        process_group.sweep(Path(tempfile.gettempdir()))
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


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


def _begin(order: dict[str, Any], answers: int, device: Device, start: Start) -> int:
    child = os.fork()
    if not child:
        _become_server(order, answers, device, start)
    return child


def _become_server(order: dict[str, Any], answers: int, device: Device, start: Start) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.close(answers)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        process_group.die_with_parent()
        os.environ.update(order["environment"])
        if "command" in order:
            os.execvp(order["command"][0], order["command"])
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = order["environment"].get("VLLM_WORKER_MULTIPROC_METHOD", start.value)
        if start is Start.SPAWN:
            os.execv(sys.executable, [sys.executable, "-m", "kvferry.fleet.alone", device.value, *order["arguments"]])
        patches.apply_ordered()
        serve(order["arguments"])
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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
    main()
