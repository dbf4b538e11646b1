"""What a server's /metrics say about where prompt tokens came from and what was moved for them."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from kvferry.up.watch import samples
from lab.fleet.server import Server

SETTLE_SECONDS = 10.0
POLL_SECONDS = 0.05

NAMES = {
    "from_peer": ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"),
    "computed": ("vllm:prompt_tokens_by_source_total", "local_compute"),
    "cached": ("vllm:prompt_tokens_by_source_total", "local_cache_hit"),
    "stock_bytes": ("vllm:nixl_bytes_transferred_sum", ""),
    "stock_descriptors": ("vllm:nixl_num_descriptors_sum", ""),
    "stock_failed": ("vllm:nixl_num_failed_transfers_total", ""),
    "loaded": ("kvferry_loads_total", "loaded"),
    "refused": ("kvferry_loads_total", "refused"),
    "failed": ("kvferry_loads_total", "failed"),
    "nothing": ("kvferry_loads_total", "nothing"),
    "in_step": ("kvferry_loads_in_step_total", ""),
    "tokens_loaded": ("kvferry_tokens_loaded_total", ""),
    "bytes_moved": ("kvferry_bytes_moved_total", ""),
    "bytes_predicted": ("kvferry_bytes_predicted_total", ""),
    "runs_moved": ("kvferry_runs_moved_total", ""),
    "wire_s": ("kvferry_wire_seconds_total", ""),
}
TOLD_APART_BY = ("source", "outcome")


@dataclass(frozen=True)
class Counters:
    """Prompt tokens by vLLM's count: from a peer, computed, from the engine's own prefix cache. What vLLM's own connector
    moved. And our counters: loads by outcome, those made in their step, tokens, bytes moved and foretold, runs, seconds from
    the first posting of a load to its last byte."""

    from_peer: int = 0
    computed: int = 0
    cached: int = 0
    stock_bytes: int = 0
    stock_descriptors: int = 0
    stock_failed: int = 0
    loaded: int = 0
    refused: int = 0
    failed: int = 0
    nothing: int = 0
    in_step: int = 0
    tokens_loaded: int = 0
    bytes_moved: int = 0
    bytes_predicted: int = 0
    runs_moved: int = 0
    wire_s: float = 0.0

    def __sub__(self, before: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    @property
    def prompt_tokens(self) -> int:
        return self.from_peer + self.computed + self.cached


def counters(server: Server) -> Counters:
    """Each counter summed over the labels that do not tell it from another."""
    found = dict.fromkeys(NAMES, 0.0)
    for name, labels, value in samples(page(server)):
        told = next((labels[label] for label in TOLD_APART_BY if label in labels), "")
        for field, wanted in NAMES.items():
            if wanted == (name, told):
                found[field] += value
    seconds = found.pop("wire_s")
    return Counters(**{field: int(value) for field, value in found.items()}, wire_s=seconds)


def counted(server: Server, before: Counters, enough: Callable[[Counters], bool], seconds: float = SETTLE_SECONDS) -> Counters:
    """What was counted since `before`, read again until it is enough: vLLM counts a moment after it answers."""
    deadline = time.monotonic() + seconds
    while True:
        found = counters(server) - before
        if enough(found) or time.monotonic() > deadline:
            return found
        time.sleep(POLL_SECONDS)


def page(server: Server) -> str:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()
