"""A window into an engine, for measuring only: what blocks requests had, the times of its steps, and its free list
shuffled or sorted.

A server that has run for hours hands out blocks in no order; vLLM gives freed ones back in reverse, so a bench would need many
thousands of requests to get there. Shuffling the free list gives the same in a moment. The engine listens at a socket whose
path an environment variable names; where the variable is not set nothing is patched. Orders are carried out by the scheduler
itself, before its next step, and what requests held is kept as they free it. While nothing is asked, a step costs a few
microseconds more, with any connector and without one.
"""

from __future__ import annotations

import array
import json
import os
import random
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FLEET_BLOCKS"
"""Where the engine listens. A path for a socket is at most some hundred characters long."""

ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Held:
    """One request's blocks as it gave them back: a table for every group. `first_s`: seconds from the moment that the scheduler
    heard of it to its first token, below 0 if there was none."""

    request: str
    tokens: int
    first_s: float
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Pool:
    """`pending`: orders that wait for the scheduler's next step. `held` and `steps` are those since the last look; a step is
    the moment when its tokens were taken in, on the clock that all processes share, and how many requests it ran."""

    blocks: int
    free: int
    pending: int
    block_tokens: tuple[int, ...]
    held: tuple[Held, ...]
    steps: tuple[tuple[float, int], ...]


class Window:
    """The engine, seen from outside."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def shuffle(self, seed: int) -> None:
        self._ask({"do": "shuffle", "seed": seed})

    def sort(self) -> None:
        """The free list is as in an engine that has served nothing yet."""
        self._ask({"do": "sort"})

    def forget(self) -> None:
        """The prefix cache is emptied."""
        self._ask({"do": "forget"})

    def look(self) -> Pool:
        found = self._ask({"do": "look"})
        held = tuple(Held(name, tokens, first, tuple(map(tuple, tables))) for name, tokens, first, tables in found["held"])
        steps = tuple(zip(found["times"], found["sizes"], strict=True))
        return Pool(found["blocks"], found["free"], found["pending"], tuple(found["block_tokens"]), held, steps)

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        with socket.socket(socket.AF_UNIX) as there:
            there.settimeout(ANSWER_SECONDS)
            there.connect(str(self._path))
            there.sendall(json.dumps(order).encode() + b"\n")
            received = bytearray()
            while not received.endswith(b"\n"):
                some = there.recv(1 << 20)
                if not some or time.monotonic() > deadline:
                    raise OSError(f"the engine behind {self._path} did not answer {order['do']}")
                received += some
        answer: dict[str, Any] = json.loads(received)
        return answer


def open_where_asked() -> None:
    """In the process of the engine, before there is one."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    beginning, arriving, scheduling = Scheduler.__init__, Scheduler.add_request, Scheduler.schedule
    answering, updating, freeing = (
        Scheduler._update_request_with_output,
        Scheduler.update_from_output,
        Scheduler._free_request_blocks,
    )

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        beginning(self, *args, **kwargs)
        self.fleet_blocks = _Listener(self, path)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fleet_blocks.orders:
            self.fleet_blocks.obey()
        return scheduling(self, *args, **kwargs)

    def arrive(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        request.fleet_arrived = time.perf_counter()
        return arriving(self, request, *args, **kwargs)

    def answer(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.num_output_tokens:
            request.fleet_first = time.perf_counter()
        return answering(self, request, *args, **kwargs)

    def update(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        out = updating(self, scheduled, *args, **kwargs)
        self.fleet_blocks.steps.append((time.perf_counter(), len(scheduled.num_scheduled_tokens)))
        return out

    def free(self: Any, request: Any) -> None:
        tables = [array.array("i", it) for it in self.kv_cache_manager.get_block_ids(request.request_id)]
        first = getattr(request, "fleet_first", 0.0) - request.fleet_arrived
        self.fleet_blocks.held.append((request.request_id, request.num_prompt_tokens, first, tables))
        freeing(self, request)

    Scheduler.__init__, Scheduler.add_request, Scheduler.schedule = begin, arrive, schedule
    Scheduler._update_request_with_output, Scheduler.update_from_output, Scheduler._free_request_blocks = answer, update, free


class _Listener:
    """`orders`, `held` and `steps` are handed between two threads whole, under the interpreter's lock."""

    def __init__(self, scheduler: Any, path: str) -> None:
        self.orders: list[dict[str, Any]] = []
        self.held: list[tuple[str, int, float, list[array.array[int]]]] = []
        self.steps: list[tuple[float, int]] = []
        self._scheduler = scheduler
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen()
        threading.Thread(target=self._listen, name="fleet-blocks", daemon=True).start()

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def obey(self) -> None:
        orders, self.orders = self.orders, []
        for order in orders:
            pool = self._pool
            if order["do"] == "forget":
                pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
                continue
            queue = pool.free_block_queue
            blocks = queue.popleft_n(queue.num_free_blocks)
            if order["do"] == "sort":
                blocks.sort(key=lambda block: block.block_id)
            else:
                random.Random(order["seed"]).shuffle(blocks)
            queue.append_n(blocks)

    def _listen(self) -> None:
        while True:
            asking, _ = self._socket.accept()
            with asking:
                order = json.loads(asking.makefile("rb").readline())
                asking.sendall(json.dumps(self._answer(order)).encode() + b"\n")

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] != "look":
            self.orders.append(order)
            return {}
        held, self.held = self.held, []
        steps, self.steps = self.steps, []
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return {
            "blocks": self._pool.num_gpu_blocks,
            "free": self._pool.get_num_free_blocks(),
            "pending": len(self.orders),
            "block_tokens": [group.kv_cache_spec.block_size for group in groups],
            "held": [(name, tokens, first, [it.tolist() for it in tables]) for name, tokens, first, tables in held],
            "times": [at for at, _ in steps],
            "sizes": [size for _, size in steps],
        }
