"""What the connector counts, in vLLM's form: summed over steps, logged by vLLM, and exported to Prometheus.

The scheduler's half counts once a request: loads, tokens, seconds of a load, leases. Every rank counts the bytes and runs that
it moved, and the time that it spent posting.

Every request has exactly one outcome. A request with a reference counts under one outcome of `kvferry_loads`. A request that
was to be prefilled for others counts as a published lease, or under one reason of `kvferry_prefills_without_lease`. A published
lease counts under one ending of `kvferry_leases_ended` when it ends. Published less ended is what stands. vLLM's notice that it
rejected a request (`abort_immediately`) is no request: it counts as nothing, and releases the lease.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

OUTCOMES: Final = {
    "loaded": "loaded",
    "refused": "refused",
    "failed": "failed",
    "nothing": "nothing",
    "aborted": "load_aborted",
}
ENDINGS: Final = {"released": "released", "expired": "expired", "reset": "reset"}
REASONS: Final = {"shared": "prefill_shared", "aborted": "prefill_aborted", "nothing": "prefill_nothing"}
"""The values of a label, and under what each is counted here."""

COUNTERS: Final = {
    "tokens": ("kvferry_tokens_loaded", "Prompt tokens that came from a producer."),
    "recomputed": (
        "kvferry_tokens_recomputed",
        "Prompt tokens that are computed here again: their producer gave no reference, or they could not be loaded.",
    ),
    "in_step": ("kvferry_loads_in_step", "Requests that were loaded in the step that first computed them."),
    "moved": ("kvferry_bytes_moved", "Bytes that the transport has moved for loads that succeeded, on all ranks."),
    "predicted": ("kvferry_bytes_predicted", "Bytes that the plans said those loads would move."),
    "runs": ("kvferry_runs_moved", "Contiguous runs they were moved in, after merging, on all ranks."),
    "posting_s": ("kvferry_posting_seconds", "Time spent posting reads, summed over ranks."),
    "wire_s": (
        "kvferry_wire_seconds",
        "Time from posting a load to its last byte, on its slowest rank; its share, if copied with others.",
    ),
    "published": ("kvferry_leases_published", "Prefilled requests whose blocks were kept for a consumer."),
}
LABELLED: Final = {
    "kvferry_loads": ("outcome", OUTCOMES, "Requests that came with a reference, by what became of it."),
    "kvferry_leases_ended": ("ending", ENDINGS, "Published leases, by how they ended."),
    "kvferry_prefills_without_lease": (
        "reason",
        REASONS,
        "Requests that were to be prefilled for a consumer and published no lease, by why.",
    ),
}
_WORDS: Final = {key: name.removeprefix("kvferry_") for key, (name, _) in COUNTERS.items()} | {
    key: f"{name.removeprefix('kvferry_')}_{value}" for name, (_, keys, _) in LABELLED.items() for value, key in keys.items()
}
"""What each is called in vLLM's log: as on the page of metrics."""


class FerryStats(KVConnectorStats):
    """A dict of sums."""

    data: dict[str, float]

    def count(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        for name, amount in other.data.items():
            self.count(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {_WORDS[name]: round(amount, 6) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> FerryStats | None:
        """What was counted since the last call."""
        if self.is_empty():
            return None
        out = FerryStats(data=self.data)
        self.reset()
        return out


class FerryMetrics(KVConnectorPromMetrics):
    """The same sums as Prometheus counters, one set an engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[str, int], Any] = {}
        engines = per_engine_labelvalues.items()
        for key, (name, text) in COUNTERS.items():
            counter = self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            for engine, values in engines:
                self._counters[key, engine] = counter.labels(*values)
        for name, (label, keys, text) in LABELLED.items():
            counter = self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, label])
            for engine, values in engines:
                for value, key in keys.items():
                    self._counters[key, engine] = counter.labels(*values, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[name, engine_idx].inc(amount)
