"""Where the steps of an engine spend their time, for measuring only.

An environment variable names a file; where it is not set nothing is wrapped. The engine's thread writes a record of every step
into that file's memory: it makes no call to write, nobody asks the engine for it, and what an engine wrote before it was killed
is there. A part's seconds are its own: what it calls that is a part too is not counted twice. Beside the seconds that passed
stand those in which the thread did not run: where nothing is waited for, it was kept from running by other threads that held
Python's lock, or by others on its core. Workers in processes of their own are not looked into: of these the engine's thread
sees that it waits.
"""

from __future__ import annotations

import gc
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import get_ident
from time import perf_counter, thread_time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

VARIABLE = "FLEET_STEPS"
"""The file that a reader has made."""

PARTS: Final = (
    "intake",
    "schedule",
    "connector",
    "begin loads",
    "settle",
    "launch",
    "take on",
    "inputs",
    "metadata",
    "compute",
    "sample",
    "wait",
    "update",
    "hand out",
    "pause",
    "collect",
)
"""`intake`: requests taken from the queue. `connector`: its scheduler's half, wherever it is called. `begin loads`, `settle`:
its worker's half, up to the loads and after. `take on` to `sample`: parts of the launch in vLLM's runner: the step's new
requests and blocks, its inputs, what attention is told by, the model (with CUDA graphs, or on a CPU), and the next tokens;
`launch` is the rest of it. `wait`: for what the device computes. `pause`: vLLM's, after a step that computed
nothing. `collect`: full garbage collections that fell upon this thread."""
OTHER: Final = "other"
WAITING_PARTS: Final = ("wait", "pause")
"""In these a thread has nothing to run."""
COUNTS: Final = ("running", "new", "tokens", "waiting", "loads begun", "loads ended")
"""`running`: requests that the step computes, `new` ones among them. `waiting`: requests that it leaves waiting. Loads that are
made in their step begin and end in it."""
COLUMNS: Final = ("at", "step", "off", *PARTS, *(f"{part} off" for part in PARTS), *COUNTS)
"""Seconds, but for the counts. `at`: when the step began, on the clock that all processes share. `off`: not running."""

SCHEDULERS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
)
BEGINNING: Final = ("handle_preemptions", "bind_connector_metadata", "start_load_kv")
SETTLING: Final = ("wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta")
"""A connector's hooks by the part they belong to. Those of every layer are left out: they would cost more than they tell."""

LAUNCHING: Final = (
    ("take on", ("add_requests", "update_requests", "_update_states")),
    ("inputs", ("prepare_inputs", "prepare_attn", "_prepare_inputs")),
    ("metadata", ("model_state.prepare_attn", "_build_attention_metadata")),
    ("compute", ("cudagraph_manager.run_fullgraph", "cudagraph_manager.run_pw_graph", "_model_forward")),
    ("sample", ("sample", "_sample")),
)
"""What either of vLLM's runners calls while a step is launched, by part; one has some of them, the other the others."""

KEPT: Final = 1 << 15
"""Records: of more steps than these between two looks only the last are there."""
_HEAD: Final = struct.Struct("=q")
_HEAD_BYTES: Final = 64
_RECORD: Final = struct.Struct(f"={len(COLUMNS)}d")
_OLDEST: Final = 2

Call = Callable[..., Any]


class Steps:
    """The steps of one engine, seen from outside. Makes the file, which is small until the engine writes into it."""

    def __init__(self, path: Path, kept: int = KEPT) -> None:
        with path.open("wb") as made:
            made.truncate(_HEAD_BYTES + kept * _RECORD.size)
        self.path = path
        self.lost = 0
        self._seen = 0
        with path.open("rb") as there:
            self._memory = mmap.mmap(there.fileno(), 0, access=mmap.ACCESS_READ)

    def since(self) -> NDArray[np.float64]:
        """A row for every step since the last call, in COLUMNS. What was written over unseen is counted in `lost`."""
        written = _HEAD.unpack_from(self._memory)[0]
        ring = np.frombuffer(self._memory, np.float64, offset=_HEAD_BYTES).reshape(-1, len(COLUMNS))
        first = max(self._seen, written - len(ring))
        self.lost += first - self._seen
        self._seen = written
        found: NDArray[np.float64] = ring[np.arange(first, written) % len(ring)]
        return found


class Marks:
    """The engine's side: the seconds of the step in progress, and the place of the next record."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as there:
            self._memory = mmap.mmap(there.fileno(), 0)
        self._places = (len(self._memory) - _HEAD_BYTES) // _RECORD.size
        self._written = 0
        self._thread = 0
        self._nothing = [0.0] * len(PARTS)
        self._spent = [0.0] * len(PARTS)
        self._ran = [0.0] * len(PARTS)
        self._inner = [0.0, 0.0]
        self._collecting = (0.0, 0.0)
        self._began, self._ran_before = 0.0, 0.0
        self._left, self._ran_left = 0.0, 0.0
        self.counts = dict.fromkeys(COUNTS, 0)

    def timed(self, part: str, call: Call) -> Call:
        """The same call, whose seconds are the part's but for those of parts within it. Only on the engine's own thread."""
        place = PARTS.index(part)
        spent, ran, inner = self._spent, self._ran, self._inner

        def timing(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return call(*args, **kwargs)
            outer, outer_ran = inner
            inner[0] = inner[1] = 0.0
            running, began = thread_time(), perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took, running = perf_counter() - began, thread_time() - running
                spent[place] += took - inner[0]
                ran[place] += running - inner[1]
                inner[0], inner[1] = outer + took, outer_ran + running

        return timing

    def enter(self) -> None:
        """This thread is the engine's: the one that takes requests in."""
        if self._thread != get_ident():
            self._thread = get_ident()
            self._began, self._ran_before = perf_counter(), thread_time()

    def begin(self, *, after_waiting: bool) -> None:
        """Requests were taken in. A step begins where the last ended, unless there was nothing to do in between."""
        if after_waiting:
            self._began, self._ran_before = perf_counter() - self._inner[0], thread_time() - self._inner[1]

    def leave(self) -> None:
        """The step is done but for what is handed out."""
        self._left, self._ran_left = perf_counter() - self._inner[0], thread_time() - self._inner[1]

    def end(self, *, computed: bool) -> None:
        now, running = perf_counter(), thread_time()
        last = PARTS.index("hand out" if computed else "pause")
        self._spent[last] += now - self._left - self._inner[0]
        self._ran[last] += running - self._ran_left - self._inner[1]
        step = now - self._began
        off = [spent - ran for spent, ran in zip(self._spent, self._ran, strict=True)]
        place = _HEAD_BYTES + self._written % self._places * _RECORD.size
        whole = step - (running - self._ran_before)
        _RECORD.pack_into(self._memory, place, self._began, step, whole, *self._spent, *off, *self.counts.values())
        self._written += 1
        _HEAD.pack_into(self._memory, 0, self._written)
        self._spent[:] = self._ran[:] = self._nothing
        self._inner[:] = (0.0, 0.0)
        for name in COUNTS:
            self.counts[name] = 0
        self._began, self._ran_before = now, running

    def collected(self, phase: str, about: Mapping[str, int]) -> None:
        """Python tells of its garbage collections here. Short ones are as many as they are short."""
        if about["generation"] < _OLDEST or get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting = (perf_counter(), thread_time())
            return
        took, running = perf_counter() - self._collecting[0], thread_time() - self._collecting[1]
        place = PARTS.index("collect")
        self._spent[place] += took
        self._ran[place] += running
        self._inner[0] += took
        self._inner[1] += running


def trace_where_asked() -> None:
    """In the process of the engine, before there is one."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.engine.core import EngineCore

    beginning = EngineCore.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        beginning(self, *args, **kwargs)
        trace(self, get_kv_transfer_group() if has_kv_transfer_group() else None, Marks(Path(path)))

    EngineCore.__init__ = begin


def trace(core: Any, worker: Any, marks: Marks) -> None:
    """Wraps what this engine has, before its first step. `worker`: the connector of the worker in this process, if there is
    one."""
    _trace_loop(core, marks)
    _trace_scheduler(core.scheduler, marks)
    if core.scheduler.connector is not None:
        _trace_loads(core.scheduler.connector, marks)
        _time(core.scheduler.connector, SCHEDULERS, "connector", marks)
    if worker is not None:
        _time(worker, BEGINNING, "begin loads", marks)
        _time(worker, SETTLING, "settle", marks)
    _trace_results(core.model_executor, marks)
    _trace_launch(core.model_executor, marks)
    _time(core.model_executor, ("execute_model", "sample_tokens"), "launch", marks)
    gc.callbacks.append(marks.collected)


def _time(there: Any, names: tuple[str, ...], part: str, marks: Marks) -> None:
    for name in names:
        setattr(there, name, marks.timed(part, getattr(there, name)))


def _trace_launch(executor: Any, marks: Marks) -> None:
    """Of a worker in this process."""
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    runner = getattr(worker, "model_runner", None)
    for part, names in LAUNCHING:
        for name in names:
            owner, _, method = name.rpartition(".")
            there = getattr(runner, owner, None) if owner else runner
            if hasattr(there, method):
                _time(there, (method,), part, marks)


def _trace_loop(core: Any, marks: Marks) -> None:
    taking, stepping, around = core._process_input_queue, core.step_fn, core._process_engine_step

    working, waits = core.has_work, False

    def has_work() -> bool:
        nonlocal waits
        found: bool = working()
        waits = waits or not found
        return found

    def take() -> None:
        nonlocal waits
        waits = False
        marks.enter()
        taking()
        marks.begin(after_waiting=waits)

    def step() -> Any:
        try:
            return stepping()
        finally:
            marks.leave()

    def step_and_hand_out() -> Any:
        computed = around()
        marks.end(computed=computed)
        return computed

    core.has_work = has_work
    core._process_input_queue, core.step_fn, core._process_engine_step = take, step, step_and_hand_out
    _time(core, ("_handle_client_request",), "intake", marks)


def _trace_scheduler(scheduler: Any, marks: Marks) -> None:
    counts = marks.counts
    _time(scheduler, ("schedule",), "schedule", marks)
    _time(scheduler, ("update_from_output",), "update", marks)
    scheduling = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        out = scheduling(*args, **kwargs)
        counts["running"] += len(out.num_scheduled_tokens)
        counts["new"] += len(out.scheduled_new_reqs)
        counts["tokens"] += out.total_num_scheduled_tokens
        counts["waiting"] += scheduler.get_request_counts()[1]
        return out

    scheduler.schedule = schedule


def _trace_loads(connector: Any, marks: Marks) -> None:
    """A request's blocks are allotted right after its tokens were matched."""
    counts = marks.counts
    matching, allotted, hearing = (
        connector.get_num_new_matched_tokens,
        connector.update_state_after_alloc,
        connector.update_connector_output,
    )
    beside = False

    def match(*args: Any, **kwargs: Any) -> Any:
        nonlocal beside
        found = matching(*args, **kwargs)
        beside = found[1]
        return found

    def allot(request: Any, blocks: Any, external: int, *args: Any, **kwargs: Any) -> Any:
        if external:
            counts["loads begun"] += 1
            counts["loads ended"] += not beside
        return allotted(request, blocks, external, *args, **kwargs)

    def hear(output: Any) -> Any:
        counts["loads ended"] += len(output.finished_recving or ())
        return hearing(output)

    connector.get_num_new_matched_tokens, connector.update_state_after_alloc = match, allot
    connector.update_connector_output = hear


def _trace_results(executor: Any, marks: Marks) -> None:
    """What a step computes is waited for where its result is asked for. Wrapped where the kind of the result is first seen: a
    wrapper that each result held would hold it in turn, and with it what it brings, until garbage is collected."""
    wrapped = {Future}

    def timing(name: str) -> None:
        calling = getattr(executor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = calling(*args, **kwargs)
            kind = type(found)
            if kind not in wrapped and isinstance(found, Future):
                wrapped.add(kind)
                kind.result = marks.timed("wait", kind.result)
            return found

        setattr(executor, name, call)

    timing("execute_model")
    timing("sample_tokens")
