"""Starts of arms, one after the other, from one process that has imported vLLM."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Final

from kvferry.errors import MeasureError
from kvferry.up.device import Device
from kvferry.up.ports import free_port
from lab.bench.serve.arms import Arm, turns
from lab.bench.serve.asking import BESIDE_NEW, BESIDE_TOKENS, Side
from lab.bench.serve.client import UnansweredError
from lab.bench.serve.engine import EAGER, GRAPHS, Engine, Place
from lab.bench.serve.measure import CONSECUTIVE, IN_TURNS, ROWS, SHUFFLED, Measuring
from lab.bench.serve.models import Model
from lab.bench.serve.result import Record, Run, Settings
from lab.fleet.blocks import Window
from lab.fleet.server import ServerError, servers
from lab.fleet.steps import Steps
from lab.fleet.zygote import Start, Zygote

BATCHED_TOKENS: Final = 8192
ROOM: Final = 256
MOST: Final = 100_000
ERROR_LINES: Final = 3
MEMORY: Final = Path("/dev/shm")
"""Files in which engines record their steps: elsewhere, writing them back to a disk could hold a step up."""


@dataclass(frozen=True)
class Order:
    """What to run. `budget_s`: no arm is started that would probably end later; 0 means no bound. `places`: where P and D are,
    if not here."""

    model: Model
    arms: tuple[Arm, ...]
    modes: tuple[str, ...]
    starts: int
    device: Device
    start: Start
    rows: tuple[str, ...] = ROWS
    flags: tuple[str, ...] = ()
    budget_s: float = 0.0
    places: Mapping[str, Place] = field(default_factory=dict)

    def place(self, role: str) -> Place:
        return self.places.get(role, Place())


@dataclass(frozen=True)
class Watcher:
    """`told` hears what is being done, `finished` of every start that ended; `save` is called when something is to be kept."""

    told: Callable[[str], None]
    finished: Callable[[Run], None]
    save: Callable[[], None]


def left(order: Order, record: Record) -> list[tuple[int, str, Arm]]:
    """The starts that `record` does not hold yet."""
    return [it for it in turns(order.arms, order.modes, order.starts) if (it[0], it[1], it[2].name) not in record.done()]


def run(order: Order, record: Record, logs: Path, watcher: Watcher) -> None:
    """Adds to `record` what is left."""
    told, waiting = watcher.told, left(order, record)
    if not waiting:
        return
    began, longest = monotonic(), 0.0
    told(f"importing vLLM ({order.start.value})")
    with ExitStack() as stack:
        zygote = stack.enter_context(Zygote(logs, order.device, order.start, order.model.imports))
        sockets = stack.enter_context(tempfile.TemporaryDirectory())
        memory = MEMORY if MEMORY.is_dir() else None
        traces = stack.enter_context(tempfile.TemporaryDirectory(dir=memory)) if record.settings.traced else ""
        zygote.wait()
        told(f"vLLM imported after {monotonic() - began:.1f} s")
        if zygote.why_spawned:
            told(f"engines cannot be forked and are spawned: {zygote.why_spawned}")
        for start, mode, arm in waiting:
            if order.budget_s and monotonic() - began + longest > order.budget_s:
                told(f"stopped before {arm.name} {mode} {start}: it would end after {order.budget_s:g} s")
                return
            begun = monotonic()
            watcher.finished(_one(order, record, zygote, (Path(sockets), traces), (start, mode, arm), watcher))
            longest = max(longest, monotonic() - begun)


def _one(
    order: Order,
    record: Record,
    zygote: Zygote,
    folders: tuple[Path, str],
    turn: tuple[int, str, Arm],
    watcher: Watcher,
) -> Run:
    settings, (start, mode, arm) = record.settings, turn
    roles, (sockets, traces) = ("P", "D"), folders
    steps = {role: Steps(Path(traces) / f"{start}{mode}{arm.name}{role}") for role in (roles if traces else ())}
    listen = f"{order.place('P').host}:{free_port()}"
    engines = {
        role: replace(
            _engine(order, settings, arm, mode, role, sockets / f"{start}{mode}{arm.name}{role}", listen),
            trace=steps[role].path if traces else None,
        )
        for role in roles
    }
    hosts = {role: order.place(role).host for role in roles}
    configured = json.loads(arm.connector.flag()) if arm.connector else {}
    made = Run(arm.name, mode, start, engines["D"].block, configured, started_by=zygote.start.value)
    record.keep(made)
    label = f"{arm.name} {mode} {start + 1}/{order.starts}"
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        watcher.told(f"{label}: start")
        began = monotonic()
        with servers(zygote, engines, hosts=hosts) as up:
            made.phases["start"] = round(monotonic() - began, 2)
            sides = {role: Side(server, Window(engines[role].window), steps.get(role)) for role, server in up.items()}
            if arm.alone:
                sides["P"] = sides["D"]

            def told(what: str) -> None:
                watcher.told(f"{label}: {what}")

            measuring = Measuring(made, settings, order.model.vocabulary, sides, order.rows, told, watcher.save)
            try:
                asyncio.run(measuring.all())
            except UnansweredError as error:
                reasons = [f"{side.server.name}: {side.server.reason()}" for side in sides.values() if side.server.reason()]
                raise MeasureError("; ".join([str(error), *dict.fromkeys(reasons)])) from error
            began = monotonic()
        made.phases["stop"] = round(monotonic() - began, 2)
        made.complete = True
    except (ServerError, MeasureError, OSError) as error:
        made.error = "\n".join(str(error).splitlines()[:ERROR_LINES])
        watcher.told(f"{label}: failed: {made.error}")
    finally:
        gc.enable()
        gc.unfreeze()
        watcher.save()
    return made


def _engine(order: Order, settings: Settings, arm: Arm, mode: str, role: str, window: Path, listen: str) -> Engine:
    longest = max(*settings.lengths, settings.at_once_length, BESIDE_TOKENS + BESIDE_NEW) + settings.output + ROOM
    return Engine(
        order.model,
        arm,
        role,
        mode,
        order.device,
        window,
        settings.kv_cache_bytes,
        longest,
        min(BATCHED_TOKENS, longest) if order.device is Device.CPU else BATCHED_TOKENS,
        settings.prefix_caching,
        order.flags,
        listen,
        order.place(role),
    )


def check(order: Order, settings: Settings) -> None:
    """Raises where something would only be found out after minutes."""
    for name in order.rows:
        if name not in (*ROWS, IN_TURNS):
            raise MeasureError(f"--only {name}: choose among {', '.join((*ROWS, IN_TURNS))}")
    if IN_TURNS in order.rows and {CONSECUTIVE, SHUFFLED} & set(order.rows):
        raise MeasureError(f"--only {IN_TURNS}: it measures {CONSECUTIVE} and {SHUFFLED} blocks itself; leave those out")
    for name in ("repeats", "at_once", "rounds", "beside", "output", "prefills", "rate", "rate_s", "idle_s"):
        if not 0 < getattr(settings, name) < MOST:
            raise MeasureError(
                f"--{name.replace('_', '-')} {getattr(settings, name)}: give a number above 0 and below {MOST:,}"
            )
    if min(*settings.lengths, settings.at_once_length) < 2:
        raise MeasureError("a prompt has at least 2 tokens: the last is always computed at D")
    if GRAPHS in order.modes and order.device is Device.CPU:
        raise MeasureError(f"--modes {GRAPHS}: CUDA graphs need a GPU; choose {EAGER}")
    if find_spec("vllm") is None:
        raise MeasureError("vLLM is not installed for this Python; install it here, or run this with the Python that serves")
