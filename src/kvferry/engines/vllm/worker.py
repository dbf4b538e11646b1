"""The worker's half of the connector: one rank's caches, words and loads. Takes orders, reports once for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.version import __version__

from kvferry.engines.vllm.cargo import Orders, Report
from kvferry.engines.vllm.manifest import manifest_of
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.stats import FerryStats
from kvferry.engines.vllm.wharf import Wharf
from kvferry.errors import SessionError
from kvferry.manifest import Identity, Rank
from kvferry.session import Card, Ending, Ferry, Words

logger = logging.getLogger("kvferry.vllm")


def this_rank() -> Rank:
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return Rank(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size)


class WorkerHalf:
    """Between `register` and `close` it owns a transport and a ferry."""

    def __init__(self, config: VllmConfig, kv_cache_config: Any, options: Options, rank: Rank | None = None) -> None:
        self._config, self._kv_cache_config, self._options = config, kv_cache_config, options
        self._rank = rank or this_rank()
        self._ferry: Ferry | None = None
        self._wharf: Wharf | None = None
        self._words: Words | None = None
        self._card: Card | None = None
        self._sent: set[str] = set()
        self._refused: set[str] = set()
        self._unhashable: dict[str, frozenset[int]] = {}
        self._stats = FerryStats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Declare and register every storage; raises where something in it cannot be moved."""
        engine = self._config.kv_transfer_config.engine_id
        identity = Identity(engine, "starting", "starting", self._rank)
        manifest = manifest_of(
            self._kv_cache_config, kv_caches, self._config, identity, version=__version__, conv_layout=get_conv_state_layout()
        )
        name = f"{engine}.{self._rank.ordinal}"
        wharf = Wharf(name, manifest, self._options, self._kv_cache_config.num_blocks, identity)
        self._card = Card(manifest, wharf.words.manifest, wharf.transport.metadata())
        self._wharf, self._words = wharf, wharf.words
        filler = wharf.filler(kv_caches)
        self._ferry = Ferry(
            wharf.transport, wharf.words, self._rank.ordinal, filler, tended=wharf.tended, hurried=lambda: wharf.hurried
        )
        self._ferry.start()

    @property
    def card(self) -> Card | None:
        return self._card

    def step(self, orders: Orders) -> None:
        """Words first: what is opened here is live before any output of the step can leave the engine."""
        if self._ferry is None or self._words is None:
            raise SessionError("the connector was given orders before its caches were registered")
        for closing in orders.closing:
            self._words.kill(closing.lease)
            if closing.ending is not Ending.ABORTED:
                self._sent.add(closing.request)
        for lease in orders.opened:
            self._words.live(lease)
        for peer in orders.forgotten:
            self._ferry.forget(peer)
        for meeting in orders.meetings:
            self._ferry.meet(meeting)
        for load in orders.loads:
            self._ferry.load(load)
        self._refused.update(orders.refused)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose lease has ended, whose load is over, and those of the latter that failed; each one once."""
        sent, self._sent = self._sent, set()
        failed, self._refused = self._refused, set()
        received = set(failed)
        for outcome in self._ferry.outcomes() if self._ferry is not None else ():
            received.add(outcome.request)
            if outcome.error:
                failed.add(outcome.request)
                logger.error("request %s was not loaded on %s: %s", outcome.request, self._rank, outcome.error)
                continue
            for name in ("moved", "predicted", "runs", "posting_s", "wire_s"):
                self._stats.count(name, getattr(outcome, name))
            blocks = frozenset(block for found in outcome.unhashable.values() for block in found)
            if blocks:
                self._unhashable[outcome.request] = blocks
        return sent, received, failed

    def report(self) -> Report | None:
        found, self._unhashable = self._unhashable, {}
        return Report(found) if found else None

    def stats(self) -> FerryStats | None:
        return self._stats.take()

    def close(self) -> None:
        if self._ferry is not None:
            self._ferry.close()
            self._ferry = None
        if self._wharf is not None:
            self._wharf.close()
            self._wharf = None
