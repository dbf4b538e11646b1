"""KVFerry as a connector of vLLM: vLLM's hooks on one side, the two halves on the other. Decides nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform

from kvferry.engines.vllm import register
from kvferry.engines.vllm.cargo import Orders, RankCard, Report
from kvferry.engines.vllm.options import buffered, read_options
from kvferry.engines.vllm.refusals import refuse_unserved
from kvferry.engines.vllm.releases import hit_source, this_release
from kvferry.engines.vllm.scheduler import SchedulerHalf
from kvferry.engines.vllm.stats import FerryMetrics, FerryStats
from kvferry.engines.vllm.tables import only_states_lag
from kvferry.engines.vllm.warming import warm_up
from kvferry.engines.vllm.worker import WorkerHalf
from kvferry.errors import SessionError


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """In a scheduler's process it has a SchedulerHalf, in a worker's a WorkerHalf."""

    _cache_hit_source = hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logging.getLogger("kvferry").parent = logging.getLogger("vllm")
        release = this_release()
        if release.off and role is KVConnectorRole.SCHEDULER:
            logging.getLogger("kvferry.vllm").warning("%s", release)
        refuse_unserved(vllm_config, current_platform.device_type, release, kv_cache_config)
        transfer, device = vllm_config.kv_transfer_config, current_platform.device_type
        options = buffered(read_options(transfer.kv_connector_extra_config), transfer.kv_buffer_device, device)
        sys.setswitchinterval(options.switching_s(device, sys.getswitchinterval()))
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, options)
        else:
            if options.warm_up and device == "cuda":
                warm_up(vllm_config)
            self._worker = WorkerHalf(vllm_config, kv_cache_config, options)

    @property
    def scheduler(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise SessionError("a scheduler's hook was called in a worker")
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        if self._worker is None:
            raise SessionError("a worker's hook was called in a scheduler")
        return self._worker

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Then vLLM offers the tokens that attention has in the cache, also where no state is kept at their end: what a prompt
        that ended inside a block leaves behind. Where nothing is loaded after all, vLLM goes back to where all groups agree."""
        return this_release().is_seen and only_states_lag(self._kv_cache_config.kv_cache_groups)

    @property
    def requires_kv_delivery(self) -> bool:
        """Then vLLM does not deliver what a step computed of a request that was preempted meanwhile: also its load in that step
        may have been lost, which vLLM would not see any more."""
        return super().requires_kv_delivery or self.scheduler.can_undo

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """CUDA graphs may hold whole steps. vLLM asks before it starts an engine's processes: wrong options end it here."""
        read_options(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Block-outermost on CUDA: all layers of a block are one run. Elsewhere backends restrict it, and head-major makes a
        rank's heads of a layer one run; latents have no heads."""
        model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
        asked: str | None = transfer.kv_connector_extra_config.get("cache_layout") if transfer is not None else None
        if model is None or asked:
            return asked or None
        if current_platform.is_cuda():
            return "BLHNC"
        return None if model.use_mla else "LBHNC"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> RankCard | None:
        card = self.worker.card
        alone = not has_kv_transfer_group() or get_kv_transfer_group() is self
        return RankCard(card, alone) if card is not None else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Orders are taken before the forward pass is launched: a load that is short has ended when the step's results are
        asked for. That is safe beside steps in flight: vLLM keeps blocks that these may write from being given to a load
        (the scheduler's `defer_block_free`), and does not zero the blocks of one (`get_loaded_kv_cache_group_ids`)."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, Orders):
            self.worker.step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have started with their orders; what the forward pass needs of them it waits for on the device."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their requests are computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Consumers read the caches where they are."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self.worker.results()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.invalid()

    def build_connector_worker_meta(self) -> Report | None:
        return self.worker.report()

    def get_kv_connector_stats(self) -> FerryStats | None:
        return (self.scheduler if self._worker is None else self.worker).stats()

    def shutdown(self) -> None:
        half = self._scheduler if self._worker is None else self._worker
        if half is not None:
            half.close()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self.scheduler.ranks(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind_cache(kv_cache_manager.evict_blocks)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All that are transferred: what of their blocks is not copied is filled here."""
        groups = enumerate(self._kv_cache_config.kv_cache_groups)
        return tuple(index for index, group in groups if group.enable_kv_transfer)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM takes up what has been loaded after this, also what was not when the step ended that this is the output of."""
        report = connector_output.kv_connector_worker_meta
        connector_output.finished_recving = self.scheduler.results(
            connector_output.finished_sending or set(),
            connector_output.finished_recving or set(),
            connector_output.failed_recving or set(),
            report if isinstance(report, Report) else None,
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool:
        """After weights were replaced, say. False while something of before may still be read, or is being loaded: vLLM says so
        to whoever asked, who asks again."""
        return self.scheduler.reset()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        return FerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FerryMetrics:
        return FerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


register()
"""vLLM looks a connector among several up by its name, also where it was loaded by its module's."""
