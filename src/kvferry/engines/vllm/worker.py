"""The worker's half of the connector: one rank's caches, words and loads. Takes orders, reports once for each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

from kvferry.engines.vllm.cargo import Orders, Report
from kvferry.engines.vllm.certify_self import certify_self
from kvferry.engines.vllm.drafters import without_other_drafters
from kvferry.engines.vllm.manifest import manifest_of
from kvferry.engines.vllm.nearby import stay_nearby
from kvferry.engines.vllm.options import NOT_LOADED, RETRY_S, Options
from kvferry.engines.vllm.quay import rings_of
from kvferry.engines.vllm.releases import this_release
from kvferry.engines.vllm.stats import FerryStats
from kvferry.engines.vllm.tables import spec_of
from kvferry.engines.vllm.wharf import Wharf
from kvferry.errors import KVFerryError, SessionError
from kvferry.logs import Bursts
from kvferry.manifest import Identity, Manifest, Rank
from kvferry.manifest.kinds import Shard
from kvferry.session import Card, Ending, Ferry, Hello, Load, Outcome, PeerKey, Words, meet
from kvferry.session.wire import ask

logger = logging.getLogger("kvferry.vllm")

COUNTED: Final = ("moved", "predicted", "runs", "posting_s")
LINGER_S: Final = 0.003
"""How long a step in which nothing is computed waits for loads that are all but over: the next comes a millisecond later."""


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
        self._in_step: dict[str, Load] = {}
        self._over: list[Outcome] = []
        self._idle = self._was_idle = self._asked = self._lost = False
        self._closing = threading.Event()
        self._invalid: set[int] = set()
        self._report = Report()
        self._stats = FerryStats()
        self._failures = Bursts(logger)
        self._becomes = NOT_LOADED[config.kv_transfer_config.kv_load_failure_policy]

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Declare and register every storage; raises where something in it cannot be moved."""
        engine = self._config.kv_transfer_config.engine_id
        identity = Identity(engine, "starting", "starting", self._rank)
        caches, conv, shard = self._kv_cache_config, get_conv_state_layout(), Shard(self._rank.tp, self._rank.tp_size)
        own = certify_self(caches, kv_caches, self._config, shard, conv, this_release().is_seen)
        manifest = manifest_of(
            caches, kv_caches, self._config, identity, version=this_release().version, conv_layout=conv, own=own
        )
        name = f"{engine}.{self._rank.ordinal}"
        rings = rings_of(self._config.kv_transfer_config)
        wharf = Wharf(name, manifest, self._options, self._kv_cache_config.num_blocks, identity, rings)
        self._card = Card(manifest, wharf.words.manifest, wharf.transport.metadata(), wharf.words.beacon)
        self._wharf, self._words = wharf, wharf.words
        filler = wharf.filler(kv_caches)
        ferry = self._ferry = Ferry(
            wharf.transport,
            wharf.words,
            self._rank.ordinal,
            filler,
            tended=wharf.tended,
            hurried=lambda: wharf.hurried,
            entering=wharf.enter,
        )
        ferry.start()
        if self._is_whole_engine and wharf.on_device:
            stay_nearby(engine, self)
        if self._options.peers and self._config.kv_transfer_config.is_kv_consumer and self._is_whole_engine:
            threading.Thread(target=self._meet_early, args=(manifest, ferry), name="kvferry-meeting", daemon=True).start()

    @property
    def _is_whole_engine(self) -> bool:
        return self._rank.tp_size == self._rank.pp_size == 1

    def _meet_early(self, manifest: Manifest, ferry: Ferry) -> None:
        """Ranks hear of producers with the first request. One that is alone plans as its scheduler will, and has connected by
        then; whether anything is read from them the scheduler decides, which knows what model this is."""
        waiting = list(self._options.peers)
        while waiting and not self._closing.is_set():
            waiting = [address for address in waiting if not self._meet_one_early(address, manifest, ferry)]
            self._closing.wait(RETRY_S)

    def _meet_one_early(self, address: str, manifest: Manifest, ferry: Ferry) -> bool:
        """Whether it need not be tried again."""
        hello = Hello(self._config.kv_transfer_config.engine_id, "starting")
        try:
            welcome = ask(address, hello, self._options.keys(), self._options.greeting_s, self._closing)
            model = welcome.cards[0].caches.identity.model
            mine = [msgspec.structs.replace(manifest, identity=msgspec.structs.replace(manifest.identity, model=model))]
            peer = PeerKey(address, welcome.engine, welcome.incarnation)
            ferry.meet(meet(peer, without_other_drafters(welcome, mine), mine))
        except SessionError as error:
            logger.debug("%s is not there yet: %s", address, error)
            return False
        except KVFerryError as error:
            logger.info("%s is connected to when the first request names it: %s", address, error)
        except Exception:
            logger.exception("%s is connected to when the first request names it", address)
        return True

    @property
    def card(self) -> Card | None:
        return self._card

    def step(self, orders: Orders) -> None:
        """Before the forward pass is launched."""
        if not orders.begun:
            self.begin(orders)
        if self._in_step and self._ferry is not None and not (self._wharf is not None and self._wharf.holds_the_engine_back()):
            self._ferry.settle(self._in_step.keys(), self._options.read_s)
        self._was_idle, self._idle = self._idle, orders.idle

    def begin(self, orders: Orders) -> None:
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
        self._ferry.load(*orders.loads, meetings=orders.meetings)
        self._in_step.update((load.request, load) for load in orders.loads if load.in_step)
        self._refused.update(orders.refused)

    @property
    def meets(self) -> bool:
        """Whether a producer is being met, which a load in a step would wait for."""
        return self._ferry is not None and self._ferry.meets

    def pace(self, peer: PeerKey) -> float | None:
        """Seconds a token that a load from a producer should take at most, where a step may wait for it."""
        return self._ferry.pace(peer) if self._ferry is not None else None

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose lease has ended, whose load is over, and those of the latter that failed; each one once. Of loads made
        in this step, vLLM is told of the blocks that failed alone. What the scheduler asks for (`loaded`) is left to it while
        it asks, since it hears of this step's results when the next one is under way; after one that computed nothing it may
        not ask."""
        sent, self._sent = self._sent, set()
        failed, self._refused = self._refused, set()
        received = set(failed)
        lost: set[str] = set()
        in_step, self._in_step = self._in_step, {}
        if self._ferry is not None and in_step:
            self._ferry.settle(in_step.keys(), self._options.read_s)
        elif self._ferry is not None and self._idle:
            self._ferry.linger(LINGER_S)
        loaded: list[Outcome] = []
        over: list[Outcome] = []
        ended, self._over = [*self._over, *(self._ferry.outcomes() if self._ferry is not None else ())], []
        for outcome in ended:
            left = self._asked and not self._was_idle and not outcome.error and outcome.request not in in_step
            (self._over if left else over).append(outcome)
        for outcome in over:
            load = in_step.get(outcome.request)
            if load is None:
                received.add(outcome.request)
            if outcome.error:
                self._failures.log(
                    "request %s was not loaded on %s: %s; %s", outcome.request, self._rank, outcome.error, self._becomes
                )
                (failed if load is None else lost).add(outcome.request)
                self._invalid |= self._unloaded(load) if load is not None else set()
                continue
            loaded.append(outcome)
        self._asked, self._lost = False, bool(lost)
        if loaded or in_step:
            report = self._noted(loaded, Report(ended=frozenset(in_step), failed=frozenset(lost)))
            self._report = self._report.aggregate(report)
        return sent, received, failed

    def loaded(self, most: int) -> tuple[set[str], Report]:
        """Requests that have been loaded beside the steps by now, so many `most`, for a scheduler that is about to put a step
        together; what failed vLLM hears of with a step's results alone. Nobody, if a load in its step was lost that vLLM has
        not heard of, or may still be: who shares its blocks fails with it, but not once it may run and waits for something
        else."""
        if self._lost or self._in_step:
            self._lost = False
            return set(), Report()
        self._asked = True
        over, self._over = [*self._over, *(self._ferry.outcomes() if self._ferry is not None else ())], []
        loaded: list[Outcome] = []
        for outcome in over:
            (self._over if outcome.error or len(loaded) >= most else loaded).append(outcome)
        return {outcome.request for outcome in loaded}, self._noted(loaded, Report())

    def _noted(self, loaded: Sequence[Outcome], report: Report) -> Report:
        for outcome in loaded:
            report.seconds[outcome.request] = outcome.wire_s
            blocks = frozenset(chain.from_iterable(outcome.unhashable.values())) if outcome.unhashable else None
            if blocks:
                report.unhashable[outcome.request] = blocks
        report.anywhere = frozenset(outcome.request for outcome in loaded if outcome.anywhere)
        for name in COUNTED if loaded else ():
            self._stats.count(name, sum(map(attrgetter(name), loaded)))
        return report

    def _unloaded(self, load: Load) -> set[int]:
        """The blocks that a load in its step was to write, and none that were there before: others may share those."""
        out: set[int] = set()
        for group, table in load.dst.items():
            tokens = spec_of(self._kv_cache_config.kv_cache_groups[group].kv_cache_spec).block_size
            out.update(table[load.start // tokens :] if isinstance(table, list) else (table,))
        return out

    def invalid(self) -> set[int]:
        """Blocks of loads that failed in the step that ordered them."""
        found, self._invalid = self._invalid, set()
        return found

    def report(self) -> Report | None:
        found, self._report = self._report, Report()
        return found or None

    def stats(self) -> FerryStats | None:
        return self._stats.take()

    def close(self) -> None:
        self._closing.set()
        if self._ferry is not None:
            self._ferry.close()
            self._ferry = None
        if self._wharf is not None:
            self._wharf.close()
            self._wharf = None
