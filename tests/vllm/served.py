"""Whole engines but for their forward pass: vLLM's scheduler, and KVFerry's connector on every rank, in one process.

vLLM decides what is scheduled, allocated, held and freed; the connector's halves talk over loopback and NIXL, through
pickled orders and reports as they do between processes. In place of a forward pass the prompt's global tensors are written
with vLLM's own ops.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from byte_crossing import Tables, expect_at_consumer, fill_producer, garbage, is_state, retained_by
from engine import Setup, Worker, as_rank, build
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.manifest import HOLE

PATIENCE_S = 120.0
SAMPLED = 5


def through_a_pipe(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))


class Engine:
    """`slow` ranks keep their results to themselves; `reported` counts what each rank has said of each request."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.connectors: list[KVFerryConnector] = []
        self.reported = {"sent": Counter[tuple[int, str]](), "received": Counter[tuple[int, str]]()}
        self.failed: set[tuple[int, str]] = set()
        self.counted: Counter[str] = Counter()
        self.slow: set[int] = set()
        self.outputs: dict[str, Any] = {}
        self.scheduled: Counter[str] = Counter()
        self.moved = [Counter[str]() for _ in range(setup.tp * setup.pp)]

    def start(self, seed: int) -> None:
        """In the order of vLLM's engine: ranks, scheduler, the ranks' caches, and their cards."""
        setup = self.setup
        places = [(stage, rank) for stage in range(setup.pp) for rank in range(setup.tp)]
        self.ranks: list[Worker] = [build(replace(setup, stage=stage, rank=rank)) for stage, rank in places]
        config = self.config = self.ranks[0].vllm_config
        cache = generate_scheduler_kv_cache_config([worker.kv_cache_config for worker in self.ranks])
        config.cache_config.num_gpu_blocks = cache.num_blocks
        with as_rank(self.ranks[0].setup, config):
            block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
            self.scheduler: Scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=True,
            )
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(hash_block_size, hashing)
        for worker in self.ranks:
            with as_rank(worker.setup, worker.vllm_config):
                made = KVConnectorFactory.create_connector(worker.vllm_config, KVConnectorRole.WORKER, worker.kv_cache_config)
                made.register_kv_caches(worker.kv_caches)
                self.connectors.append(made)
        cards = {place: c.get_handshake_metadata() for place, c in zip(places, self.connectors, strict=True)}
        self.connector.set_xfer_handshake_metadata_pp_aware(through_a_pipe(cards))
        self.aggregator = KVOutputAggregator.from_connector(self.connector, len(self.ranks))
        self._scatter(seed)

    @property
    def connector(self) -> KVFerryConnector:
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _scatter(self, seed: int) -> None:
        """A pool that has been in use for a while: its free blocks are in no order."""
        queue = self.pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        queue.append_n([blocks[i] for i in np.random.default_rng(seed).permutation(len(blocks))])

    @property
    def held(self) -> int:
        """Blocks that requests hold; the null block is no request's."""
        deferred = sum(len(blocks) for _, blocks in self.scheduler.deferred_frees)
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks() - deferred

    def request(self, name: str, prompt: Sequence[int], params: dict[str, Any] | None, **sampling: Any) -> Request:
        fields = {"max_tokens": 1, "temperature": 0.0, **sampling}
        extra = {"kv_transfer_params": params} if params is not None else None
        return Request(name, list(prompt), SamplingParams(**fields, extra_args=extra), None, block_hasher=self._hasher)

    def table(self, name: str, tokens: int) -> Tables:
        """The blocks that vLLM holds for a request's first tokens; of a state, the one that it is in."""
        out: Tables = {}
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        held = self.scheduler.kv_cache_manager.get_block_ids(name)
        for index, (group, ids) in enumerate(zip(groups, held, strict=True)):
            spec = group.kv_cache_spec
            if is_state(group):
                out[index] = [ids[0 if spec.mamba_cache_mode == "none" else (tokens - 1) // spec.block_size]]
            else:
                out[index] = [block or HOLE for block in ids[: -(-tokens // spec.block_size)]]
        return out

    def step(self, forward: Callable[[Any], None] | None = None) -> None:
        """One step of the engine: schedule, ranks, report, update."""
        self.end(*self.begin(forward))

    def begin(self, forward: Callable[[Any], None] | None = None) -> tuple[Any, list[ModelRunnerOutput]]:
        """A step up to its results, which vLLM may look at after it has begun the next."""
        out = self.scheduler.schedule()
        if forward is not None:
            forward(out)
        self.scheduled.update(out.num_scheduled_tokens)
        names = list(out.num_scheduled_tokens)
        sampled = [[SAMPLED] if self._is_whole(name) else [] for name in names]
        index = {name: i for i, name in enumerate(names)}
        return out, [
            ModelRunnerOutput(names, index, sampled, kv_connector_output=through_a_pipe(self._rank_steps(rank, out)))
            for rank in range(len(self.ranks))
        ]

    def end(self, out: Any, parts: list[ModelRunnerOutput]) -> None:
        done = self.scheduler.update_from_output(out, self.aggregator.aggregate(parts))
        for some in done.values():
            if some.scheduler_stats is not None and some.scheduler_stats.kv_connector_stats:
                self.counted.update(some.scheduler_stats.kv_connector_stats)
            for output in some.outputs:
                self.outputs[output.request_id] = output

    def _rank_steps(self, rank: int, out: Any) -> KVConnectorOutput:
        connector = self.connectors[rank]
        connector.bind_connector_metadata(through_a_pipe(out.kv_connector_metadata))
        connector.start_load_kv(None)
        connector.clear_connector_metadata()
        if rank in self.slow:
            return KVConnectorOutput()
        found = connector.get_transfer_results(out.finished_req_ids)
        self.reported["sent"].update((rank, name) for name in found.finished_sending or ())
        self.reported["received"].update((rank, name) for name in found.finished_recving or ())
        self.failed |= {(rank, name) for name in found.failed_recving or ()}
        stats = connector.get_kv_connector_stats()
        if stats is not None:
            self.moved[rank].update(stats.data)
        return KVConnectorOutput(
            finished_sending=found.finished_sending or None,
            finished_recving=found.finished_recving or None,
            failed_recving=found.failed_recving or set(),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=stats,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )

    def step_until(self, done: Callable[[], bool], forward: Callable[[Any], None] | None = None) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{self.setup}: still waiting; {self.scheduler.requests}"
            self.step(forward)
            time.sleep(0.001)

    def idle(self) -> None:
        """Steps in which nothing is left to say; vLLM ends the engine where a rank repeats itself."""
        for _ in range(3):
            self.step()

    def prefill(self, name: str, prompt: Sequence[int], **sampling: Any) -> dict[str, Any] | None:
        """Prefill a request for others; the parameters of its answer as a router sees them."""
        request = self.request(name, prompt, {"do_remote_decode": True}, **sampling)
        self.scheduler.add_request(request)
        return self.finish_prefill(request)

    def finish_prefill(self, request: Request) -> dict[str, Any] | None:
        name, tokens = request.request_id, request.num_prompt_tokens

        def forward(out: Any) -> None:
            if self._is_whole(name):
                for worker in self.ranks:
                    fill_producer(worker, self.table(name, tokens), tokens)

        while name not in self.outputs:
            self.step(forward)
        params = self.outputs[name].kv_transfer_params
        return json.loads(json.dumps(params)) if params is not None else None

    def _is_whole(self, name: str) -> bool:
        """Whether the step that was just scheduled computes the last token there is."""
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def soil(self, seed: int) -> None:
        """Garbage in every byte, as blocks of earlier requests leave it."""
        for worker in self.ranks:
            worker.memory[:] = garbage(worker, seed + worker.setup.rank + 10 * worker.setup.stage)

    def status(self, name: str) -> RequestStatus | None:
        found = self.scheduler.requests.get(name)
        return found.status if found is not None else None

    def waits_for_bytes(self, name: str) -> bool:
        return self.status(name) == RequestStatus.WAITING_FOR_REMOTE_KVS

    def close(self) -> None:
        for connector in self.connectors:
            connector.shutdown()
        if hasattr(self, "scheduler"):
            self.scheduler.shutdown()


@contextmanager
def engines(*setups: Setup) -> Iterator[tuple[Engine, ...]]:
    made: list[Engine] = []
    try:
        for i, setup in enumerate(setups):
            made.append(Engine(setup))
            made[-1].start(seed=i + 1)
        yield tuple(made)
    finally:
        with ThreadPoolExecutor() as closing:
            list(closing.map(Engine.close, made))


def side(**changes: Any) -> dict[str, Any]:
    return changes


def sides(model: str, producer: dict[str, Any], consumer: dict[str, Any], **both: Any) -> tuple[Setup, Setup]:
    return Setup(model, engine="P", **{**both, **producer}), Setup(model, engine="D", **{**both, **consumer})


class Arrival:
    """Requests on their way into a consumer: its memory before the loads, and what an oracle wants to see after them."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.producer, self.consumer = producer, consumer
        self.before = [worker.memory.copy() for worker in consumer.ranks]
        self.wanted = [memory.copy() for memory in self.before]
        self.needed = [0 for _ in consumer.ranks]

    def expect(self, name: str, tokens: int, start: int, source: str = "") -> None:
        """Called once blocks are allocated at the consumer and nothing is loading yet. `source` is what the producer calls it,
        where that is another name."""
        retained = retained_by(self.producer.ranks, self.producer.table(source or name, tokens))
        if self.producer.setup.drafter != self.consumer.setup.drafter:
            count = self.consumer.config.model_config.get_total_num_hidden_layers()
            retained = {layer: first for layer, first in retained.items() if f".{count}." not in layer}
        here = self.consumer.table(name, tokens)
        for rank, worker in enumerate(self.consumer.ranks):
            now = worker.memory.copy()
            worker.memory[:] = self.wanted[rank]
            self.needed[rank] += expect_at_consumer(worker, here, tokens, retained, start)
            self.wanted[rank] = worker.memory.copy()
            worker.memory[:] = now

    def differences(self) -> list[str]:
        """For every rank that holds another byte than it should anywhere in its allocation, where."""
        out = []
        for worker, wanted in zip(self.consumer.ranks, self.wanted, strict=True):
            at = np.flatnonzero(worker.memory != wanted)
            if len(at):
                out.append(f"{worker.setup}: {len(at)} of {len(wanted)} bytes differ, the first at {at[0]}")
        return out


def load(
    producer: Engine,
    consumer: Engine,
    name: str,
    prompt: Sequence[int],
    params: dict[str, Any] | None,
    start: int = 0,
    source: str = "",
    **sampling: Any,
) -> Arrival:
    """Send a request with a reference to a consumer, up to the step in which every rank has reported. The consumer has the
    blocks before token `start` already."""
    consumer.scheduler.add_request(consumer.request(name, prompt, params, **sampling))
    return loaded(producer, consumer, {name: params["kvferry"]["tokens"] if params else 0}, start, source)


def loaded(producer: Engine, consumer: Engine, tokens: dict[str, int], start: int = 0, source: str = "") -> Arrival:
    """Step until every rank has reported on every request; their producers' first tokens are loaded."""
    arrival = Arrival(producer, consumer)
    ordered: set[str] = set()

    def forward(out: Any) -> None:
        for load in out.kv_connector_metadata.loads:
            ordered.add(load.request)
            arrival.expect(load.request, tokens[load.request], start, source)

    def over() -> bool:
        ranks = range(len(consumer.ranks))
        return ordered == set(tokens) and all(consumer.reported["received"][rank, name] for rank in ranks for name in tokens)

    consumer.step_until(over, forward=forward)
    return arrival
