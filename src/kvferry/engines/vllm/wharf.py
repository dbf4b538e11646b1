"""One rank's end of the wire in vLLM: which strategies its device has, where its words lie, and who zeroes its caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.quay import staging_around
from kvferry.errors import TransportError
from kvferry.manifest import Identity, Manifest
from kvferry.plan import Fills
from kvferry.session import Words
from kvferry.session.fills import Bytes, apply_fills
from kvferry.strategy import HostMover, Mapped, Mover, SharedBytes, Strategies
from kvferry.strategy.shared import sweep
from kvferry.strategy.staging import Rings
from kvferry.transport import NixlTransport, Storage

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvferry.vllm")

Done = Callable[[], bool]


class Wharf:
    """The registered storages of one rank, and whatever moves them. `rings`: those that it uses, where it has staging.
    `tended`: others read from it only while it is called."""

    def __init__(
        self, name: str, manifest: Manifest, options: Options, slots: int, identity: Identity, rings: Rings = "both"
    ) -> None:
        sweep()
        self._manifest = manifest
        self._shared: SharedBytes | None = None
        self._mover = _mover(manifest, options)
        direct = NixlTransport(name, options.nixl)
        mapped: Mapped | None = None
        memory = None
        if self._mover is not None and "mapped" in options.strategies:
            host = HostMover()
            self._shared = SharedBytes(Words.size(slots))
            host.share(self._shared)
            memory = self._shared.bytes
            mapped = Mapped([host, self._mover])
        self.words = Words(slots, identity, memory)
        self.gathers = staging_around(direct, self._mover, manifest.regions[0].device, options, rings)
        self.transport = Strategies(self.gathers or direct, mapped)
        self.tended = not direct.progresses or self.gathers is not None
        storages = [Storage(r.address, r.length, r.memory, r.device) for r in manifest.regions]
        self.transport.register([*storages, self.words.storage])

    @property
    def hurried(self) -> bool:
        """Whether somebody waits for what is gathered here, or here for what others gather."""
        return self.gathers is not None and self.gathers.hurried

    def filler(self, kv_caches: Mapping[str, torch.Tensor]) -> Callable[[Fills], Done]:
        """Zeroes runs of the rank's regions, and tells when that is done."""
        if self._mover is None:
            memories = _on_host(self._manifest, kv_caches)

            def at_once(fills: Fills) -> Done:
                apply_fills(fills, memories)
                return lambda: True

            return at_once
        mover = self._mover
        bases = np.array([region.address for region in self._manifest.regions], np.int64)

        def beside(fills: Fills) -> Done:
            ticket = mover.zero(np.stack([bases[fills.region] + fills.offset, fills.length], axis=1))
            return lambda: ticket.done

        return beside

    def enter(self) -> None:
        """The calling thread is about to use it beside the engine's."""
        if self._mover is not None:
            self._mover.enter()

    @property
    def on_device(self) -> bool:
        return self._mover is not None

    def holds_the_engine_back(self) -> bool:
        """Whether what the engine launches from here on waits for the copies and fills that were begun: on a device it does."""
        if self._mover is not None:
            self._mover.precede_the_engine()
        return self.on_device

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


def _mover(manifest: Manifest, options: Options) -> Mover | None:
    """None where caches lie in host memory."""
    devices = sorted({region.device for region in manifest.regions if region.memory == "vram"})
    if not devices:
        return None
    if len(devices) > 1 or any(region.memory == "dram" for region in manifest.regions):
        raise TransportError(f"caches of one rank lie on several devices ({devices}) or partly in host memory: not supported")
    from kvferry.strategy.cuda import CudaMover

    return CudaMover(devices[0], options.copy_programs)


def _on_host(manifest: Manifest, kv_caches: Mapping[str, torch.Tensor]) -> Sequence[Bytes]:
    """vLLM's storages seen as bytes, by region."""
    import torch

    found: dict[int, Any] = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).numpy()
    return [found[region.address] for region in manifest.regions]
