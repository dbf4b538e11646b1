"""What the connector counts, in vLLM's form: summed over ranks and steps, logged by vLLM, and exported to Prometheus.

Loads and tokens are counted once a request, by the scheduler's half; bytes, runs and times by every rank that moves them.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

OUTCOMES: Final = ("loaded", "refused", "failed", "nothing")
ENDINGS: Final = ("released", "expired", "aborted", "reset")

COUNTERS: Final = {
    "tokens": ("kvferry_tokens_loaded", "Prompt tokens that came from a producer."),
    "recomputed": (
        "kvferry_tokens_recomputed",
        "Prompt tokens that are computed here again: their producer gave no reference, or they could not be loaded.",
    ),
    "in_step": ("kvferry_loads_in_step", "Requests that were loaded in the step that first computed them."),
    "moved": ("kvferry_bytes_moved", "Bytes that the transport has moved for loads that succeeded."),
    "predicted": ("kvferry_bytes_predicted", "Bytes that the plans said those loads would move."),
    "runs": ("kvferry_runs_moved", "Contiguous runs they were moved in, after merging."),
    "posting_s": ("kvferry_posting_seconds", "Time spent posting reads."),
    "wire_s": (
        "kvferry_wire_seconds",
        "Time from posting a load to its last byte; its share, if copied with others.",
    ),
    "held": ("kvferry_leases_published", "Prefilled requests whose blocks were kept for a consumer."),
}
LABELLED: Final = {
    "kvferry_loads": ("outcome", OUTCOMES, "Requests that came with a reference, by what became of it."),
    "kvferry_leases_ended": ("ending", ENDINGS, "Leases on this producer's blocks, by how they ended."),
}


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
        return {name: round(amount, 6) for name, amount in sorted(self.data.items())}

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
                for key in keys:
                    self._counters[key, engine] = counter.labels(*values, key)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[name, engine_idx].inc(amount)
