"""What servers need of vLLM beyond its flags. For tests and measuring only; none touches what is compared.

On a CPU: tiny engines on few cores. On a GPU nothing that a user's engine does is changed; only starting it is cheaper."""

from __future__ import annotations

import importlib
import logging
import math
import os
import pickle
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry.up.device import Device
from lab.fleet import blocks, namespaces, one_gpu, spoiled, steps

logger = logging.getLogger("kvferry.vllm")

NAP_SECONDS = 0.0001
ASYNCHRONOUS = "FLEET_ASYNC_SCHEDULING"
"""The variable that asks a server to schedule asynchronously."""

STOCK_AGENT = "FLEET_STOCK_AGENT"
"""The variable that gives our connector the NIXL agent that vLLM's own has, to tell the two apart."""
WIDE_WEIGHTS = "FLEET_WIDE_WEIGHTS"
"""The variable that makes weights of `--load-format dummy` wide enough for the text to depend on the whole prompt."""

LAST_TOKEN_APART = "FLEET_LAST_TOKEN_APART"
"""The variable that has an engine compute a prompt in the steps of a pair: all tokens but the last, and then that one."""

NEARBY = "FLEET_NEARBY"
"""The variable that has a rank on a CPU take its orders with the step's, and say at once what it has loaded, as one on a GPU
does."""
TOLD = "loaded since the last step"
"""What such a rank's log says of it."""
IN_STEP = "FLEET_IN_STEP"
"""The variable that has an engine on a CPU load in its steps, as one on a GPU does out of mapped memory, if vLLM can
undo that for its model."""

STEP_SECONDS = "FLEET_STEP_SECONDS"
"""The variable that makes each step in which something is computed take so long at least, as on an engine that is busy."""

SWITCH_SECONDS = "FLEET_SWITCH_SECONDS"
"""The variable that says how long a thread of the engine's process keeps Python's lock while others want it."""

FIRST_TUNING = "VLLM_TRITON_FORCE_FIRST_CONFIG"
"""vLLM's own variable, which it reads when it is imported: forked servers would be too late. Kernels are not timed to choose
how they are tiled: engines would choose otherwise, and round otherwise. Here the smallest tiles come first."""
USUAL_WARPS = 4

STOCK_AGENT_THREADS = 4
WIDTH = 2.5
FLAT = {"bias": 0.0, "A": -0.2, "dt_bias": -0.5}
"""Weights that are one number a channel; a decay must not grow. Others, such as norms, are 1."""

T = TypeVar("T")


def apply(device: Device) -> None:
    """Once a process, before any engine; forked children inherit all of it."""
    if device is Device.CUDA:
        _inspect_models_in_a_fork()
        return
    _fork_children()
    _schedule_asynchronously_where_asked()
    inspect_models_here()
    _leave_cores_alone()
    _make_intermediate_tensors_late()
    _keep_nixl_off_the_cores()
    _sleep_instead_of_spinning()


def apply_ordered() -> None:
    """What the variables of one server ask for, in its own process; its children inherit it or are told the same."""
    if os.environ.get(namespaces.VARIABLE):
        namespaces.enter(int(os.environ[namespaces.VARIABLE]))
    blocks.open_where_asked()
    steps.trace_where_asked()
    if os.environ.get(SWITCH_SECONDS):
        _switch_threads_after(float(os.environ[SWITCH_SECONDS]))
    if os.environ.get(STEP_SECONDS):
        _lengthen_steps(float(os.environ[STEP_SECONDS]))
    if os.environ.get(STOCK_AGENT):
        _take_the_agent_of_stock()
    if os.environ.get(WIDE_WEIGHTS):
        _widen_dummy_weights()
    if os.environ.get(LAST_TOKEN_APART):
        _compute_last_tokens_apart()
    if os.environ.get(NEARBY):
        _stay_nearby()
    if os.environ.get(IN_STEP):
        _load_in_steps()
    if os.environ.get(FIRST_TUNING):
        _tile_without_timing()
    if os.environ.get(one_gpu.VARIABLE):
        one_gpu.share()
    if os.environ.get(spoiled.VARIABLE):
        spoiled.where_marked()


def _switch_threads_after(seconds: float) -> None:
    """In the engine's own process alone; the API server beside it keeps Python's interval."""
    from vllm.v1.engine.core import EngineCore

    beginning = EngineCore.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        sys.setswitchinterval(seconds)
        beginning(self, *args, **kwargs)

    EngineCore.__init__ = begin


def _lengthen_steps(seconds: float) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    def slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = schedule(self, *args, **kwargs)
        if out.total_num_scheduled_tokens:
            time.sleep(seconds)
        return out

    Scheduler.schedule = slowly


def _stay_nearby() -> None:
    """The forward pass, which no stream holds back here, waits for its loads."""
    from kvferry.engines.vllm.wharf import Wharf
    from kvferry.engines.vllm.worker import WorkerHalf

    loaded = WorkerHalf.loaded

    def telling(self: Any, most: int) -> Any:
        received, report = loaded(self, most)
        if received:
            logger.info("%s: %s", TOLD, ", ".join(sorted(received)))
        return received, report

    WorkerHalf.loaded = telling  # type: ignore[method-assign]
    Wharf.on_device = property(lambda self: True)  # type: ignore[assignment]
    Wharf.holds_the_engine_back = lambda self: False  # type: ignore[method-assign]


def _load_in_steps() -> None:
    """Whatever is connected counts as mapped and quick."""
    from kvferry.engines.vllm.haste import Haste
    from kvferry.session import links

    _stay_nearby()
    connect, saw = links.Links.connect, Haste.saw

    def anywhere(self: Any, peer: Any) -> Any:
        link = connect(self, peer)
        link.anywhere = True
        return link

    links.Links.connect = anywhere  # type: ignore[method-assign]
    Haste.saw = lambda self, peer, tokens, seconds: saw(self, peer, tokens, 1e-6)  # type: ignore[method-assign]


def _compute_last_tokens_apart() -> None:
    """What two engines compute in steps of N-1 tokens and of one is rounded otherwise than what one computes in a step of N. To
    the scheduler a prompt ends before its last token until all others are computed, as P's does: its length also decides what
    is found in a prefix cache, and which states are kept there."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    schedule, update = Scheduler.schedule, Scheduler._update_after_schedule
    shorter: set[Any] = set()

    def less_one(whole: property) -> property:
        return property(lambda request: whole.fget(request) - (request in shorter))  # type: ignore[misc]

    def lengthen() -> None:
        while shorter:
            shorter.pop().num_prompt_tokens += 1

    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        for request in (*self.waiting, *self.running):
            if request.num_computed_tokens < request.num_prompt_tokens - 1:
                shorter.add(request)
                request.num_prompt_tokens -= 1
        try:
            return schedule(self, *args, **kwargs)
        finally:
            lengthen()

    def whole_again(self: Any, output: Any) -> None:
        lengthen()
        update(self, output)

    Request.num_tokens = less_one(Request.num_tokens)
    Request.num_tokens_with_spec = less_one(Request.num_tokens_with_spec)
    Scheduler.schedule, Scheduler._update_after_schedule = apart, whole_again


def _tile_without_timing() -> None:
    """Large tiles of float32 that is not rounded to TF32 compile for minutes."""
    from triton.runtime.autotuner import Autotuner
    from vllm.triton_utils import force_first_config

    force_first_config.install()
    first_that_runs = Autotuner.run
    ordered: set[int] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in ordered:
            ordered.add(id(self))
            self.configs = sorted(self.configs, key=_size_of_tiles)
        return first_that_runs(self, *args, **kwargs)

    Autotuner.run = run


def _size_of_tiles(config: Any) -> tuple[int, int]:
    sizes = [value for value in config.kwargs.values() if isinstance(value, int) and not isinstance(value, bool)]
    return math.prod(sizes), abs(config.num_warps - USUAL_WARPS)


def _take_the_agent_of_stock() -> None:
    api: Any = importlib.import_module("nixl._api")
    original = api.nixl_agent_config

    def stock(**settings: Any) -> Any:
        own = {"backends": settings["backends"]} if "backends" in settings else {}
        return original(num_threads=STOCK_AGENT_THREADS, capture_telemetry=True, **own)

    api.nixl_agent_config = stock


def _widen_dummy_weights() -> None:
    """vLLM draws them all from within a thousandth of zero, so that the next token follows from the last one alone."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    original = DummyModelLoader.load_weights

    def wide(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        for name, weight in model.named_parameters():
            if weight.device.type == "meta" or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                continue
            leaf = name.rpartition(".")[2]
            if weight.dim() < 2:
                weight.data.fill_(FLAT.get(leaf, 1.0))
            else:
                made = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
                bound = WIDTH / weight[0].numel() ** 0.5
                weight.data.uniform_(-bound, bound, generator=made)

    DummyModelLoader.load_weights = wide


def fork_api_servers() -> None:
    """Several API servers of one engine are spawned, and each would import everything anew. Their counters add up by files,
    which the metrics' library decides when it is imported."""
    import multiprocessing
    import types

    from prometheus_client import values
    from vllm.v1 import utils

    forking = types.ModuleType("multiprocessing")
    forking.__dict__.update(vars(multiprocessing), get_context=lambda method=None: multiprocessing.get_context("fork"))
    utils.multiprocessing = forking
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="metrics-")
    values.ValueClass = values.get_value_class()


def _fork_children() -> None:
    """vLLM's CPU platform asks for spawned children whatever was wanted; each would import everything anew."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def forking(cls: Any, vllm_config: Any) -> None:
        method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        os.environ.pop("LD_PRELOAD", None)

    CpuPlatform.check_and_update_config = classmethod(forking)


def _schedule_asynchronously_where_asked() -> None:
    """vLLM's CPU platform turns asynchronous scheduling off even where a flag asks for it; GPUs have it by default."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def asking(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        if os.environ.get(ASYNCHRONOUS):
            vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(asking)


def inspect_models_here() -> None:
    """vLLM looks at a model's class in a process of its own, to keep this one free of CUDA."""
    from vllm.model_executor.models import registry

    def here(work: Callable[[], T]) -> T:
        return work()

    registry._run_in_subprocess = here


def _inspect_models_in_a_fork() -> None:
    """The same, where this process must stay free of CUDA: a forked child need not import everything anew."""
    from vllm.model_executor.models import registry

    def forked(work: Callable[[], T]) -> T:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                with os.fdopen(writing, "wb") as out:
                    pickle.dump(work(), out)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        os.close(writing)
        with os.fdopen(reading, "rb") as found:
            answer = found.read()
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a model's class could not be looked at; the log says why")
        seen: T = pickle.loads(answer)
        return seen

    registry._run_in_subprocess = forked


def _leave_cores_alone() -> None:
    """With a connector every worker would be pinned to the last core of the machine."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


def _make_intermediate_tensors_late() -> None:
    """The second pipeline stage receives into tensors that only the warm-up makes, which eager CPU engines skip."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = late


def _keep_nixl_off_the_cores() -> None:
    """vLLM's own connector starts a progress thread in every worker, which keeps a core busy even when nothing moves."""
    from vllm.distributed import nixl_utils

    original = nixl_utils._load_nixl_attr

    def load(name: str) -> Any:
        found = original(name)
        if name != "nixl_agent_config" or found is None:
            return found

        def quiet(**settings: Any) -> Any:
            return found(**{**settings, "enable_prog_thread": False, "num_threads": 0})

        nixl_utils.nixl_agent_config = quiet
        return quiet

    nixl_utils._load_nixl_attr = load


def _sleep_instead_of_spinning() -> None:
    """Processes that wait on shared memory yield in a loop; with more of them than cores, some kernels run nothing else."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(NAP_SECONDS)
