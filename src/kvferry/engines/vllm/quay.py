"""One rank's staging in vLLM: whether it has any, where it lies, which rings, and which ways its loads may go."""

from __future__ import annotations

from typing import Any

from kvferry.engines.vllm.options import Options
from kvferry.strategy import HostMover, Mover
from kvferry.strategy.cost import Way
from kvferry.strategy.scattered import Scattered, Settings
from kvferry.strategy.staging import Rings, Staging, host_staging
from kvferry.transport import Transport


def rings_of(transfer: Any) -> Rings:
    """Those that an engine of this role uses, by vLLM's `kv_transfer_config`."""
    if transfer.is_kv_producer and transfer.is_kv_consumer:
        return "both"
    return "sending" if transfer.is_kv_producer else "landing"


def staging_around(
    wire: Transport, mover: Mover | None, device: int, options: Options, rings: Rings = "both"
) -> Scattered | None:
    """None where options ask for none; `mover` is None where caches lie in host memory."""
    ways = _ways(options)
    if ways == ("direct",):
        return None
    settings = Settings(ways, timeout_s=options.read_s, slot_s=options.slot_s, maps=options.map_rings)
    return Scattered(wire, _staging(mover, device, options, rings), mover or HostMover(), settings)


def _ways(options: Options) -> tuple[Way, ...]:
    """Mapped memory is another's business: what is not mapped goes by one of these."""
    found: tuple[Way, ...] = tuple(way for way in options.strategies if way != "mapped")
    return found or ("direct",)


def _staging(mover: Mover | None, device: int, options: Options, rings: Rings) -> Staging:
    if mover is None:
        return host_staging(options.staging_bytes, rings, options.map_rings)
    from kvferry.strategy.cuda_staging import device_staging, pinned_staging

    if options.staging == "host":
        return pinned_staging(options.staging_bytes, rings)
    return device_staging(device, options.staging_bytes, rings)
