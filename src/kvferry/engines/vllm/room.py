"""How many blocks of an engine's cache leases may hold.

An engine that only prefills keeps blocks until its consumers have read them, and these never wait for it. Two engines that
both load and lease could each fill its cache with leases that the other has no room to load. So such an engine always keeps
room for one request of full length: it can go on whatever becomes of its leases, and what it loads it releases.
"""

from __future__ import annotations

import math
from typing import Any

from kvferry.engines.vllm.tables import NULL_BLOCK


def most_leased(config: Any, kv_cache_config: Any) -> float:
    """Infinite for an engine that does not load."""
    transfer = config.kv_transfer_config
    if not (transfer.is_kv_producer and transfer.is_kv_consumer):
        return math.inf
    blocks: int = kv_cache_config.num_blocks
    watermark = int(config.scheduler_config.watermark * blocks)
    return max(0, blocks - (NULL_BLOCK + 1) - watermark - longest_request(config, kv_cache_config))


def longest_request(config: Any, kv_cache_config: Any) -> int:
    """Blocks of all groups that a request of `max_model_len` tokens needs, and one of each for tokens that are guessed."""
    groups = [group for group in kv_cache_config.kv_cache_groups if not getattr(group, "host_resident", False)]
    guessed = int(config.speculative_config is not None)
    return sum(guessed + math.ceil(_bytes(group, config) / group.kv_cache_spec.page_size_bytes) for group in groups)


def _bytes(group: Any, config: Any) -> int:
    return int(group.kv_cache_spec.max_memory_usage_bytes(config))
