"""NIXL without KVFerry around it: what the baselines read with, under the same UCX settings; without a progress thread, or with
the threads that vLLM's connector has."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.doctor.memory import MemoryKind
from kvferry.errors import MeasureError
from kvferry.plan import Request
from kvferry.transport import ucx
from kvferry.transport.contract import Storage
from lab.bench.stock import Stock

_MODULES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
_LOCAL: Final = "NIXL_INIT_AGENT"
_PATIENCE_S: Final = 120.0
STOCK_THREADS: Final = 4
"""Of UCX's, that vLLM's connector posts with unless told otherwise."""

Posted = Any


def load_nixl() -> Any:
    """NIXL's Python interface, told not to write its log to standard output."""
    for name in _MODULES:
        try:
            found = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return found
    raise MeasureError("this benchmark moves bytes over NIXL, which is not installed; pip install 'kvferry[nixl]'")


class Agent:
    """One end of the wire; with `threads` that post it has one that spins for progress as well."""

    def __init__(self, name: str, threads: int = 0) -> None:
        api = load_nixl()
        with ucx.environment({}):
            config = api.nixl_agent_config(enable_prog_thread=threads > 0, num_threads=threads, backends=["UCX"])
            self._nixl = api.nixl_agent(name, config)
        self._registered: list[Any] = []

    def register(self, storage: Storage) -> None:
        self._registered.append(
            self._nixl.register_memory([(storage.address, storage.length, storage.device, "")], storage.memory.upper())
        )

    def metadata(self) -> bytes:
        return bytes(self._nixl.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        name = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, peer: str | None, descriptors: Any, memory: MemoryKind) -> Any:
        """A dense list; of this agent's own memory where there is no peer."""
        listed = self._nixl.get_xfer_descs(descriptors, memory.upper())
        return self._nixl.prep_xfer_dlist(peer or _LOCAL, listed)

    def post(self, local: Any, local_indices: Any, remote: Any, remote_indices: Any) -> Posted:
        handle = self._nixl.make_prepped_xfer("READ", local, local_indices, remote, remote_indices)
        self._nixl.transfer(handle)
        return handle

    def finish(self, posted: Sequence[Posted]) -> None:
        """Wait until every read has arrived."""
        left, since = list(posted), perf_counter()
        while left:
            states = [self._nixl.check_xfer_state(handle) for handle in left]
            if "ERR" in states or perf_counter() - since > _PATIENCE_S:
                raise MeasureError("a baseline's NIXL read failed; is the producer's process alive?")
            left = [handle for handle, state in zip(left, states, strict=True) if state != "DONE"]

    def progress(self) -> None:
        self._nixl.get_new_notifs()

    def release(self, posted: Sequence[Posted]) -> None:
        for handle in posted:
            self._nixl.release_xfer_handle(handle)

    def drop(self, prepared: Sequence[Any]) -> None:
        for handle in prepared:
            self._nixl.release_dlist_handle(handle)

    def close(self) -> None:
        for registered in self._registered:
            self._nixl.deregister_memory(registered)
        self._registered.clear()
        self._nixl = None


class StockLists:
    """The lists that stock prepares for one consumer rank and its sources, and reads through them."""

    def __init__(self, agent: Agent, stock: Stock, peers: Sequence[str], memory: MemoryKind = "dram") -> None:
        self._agent, self._stock = agent, stock
        self.kept = stock.local_list()
        self._whole = agent.prepare(None, self.kept, memory)
        self._local = [self._whole] * len(peers)
        if stock.splits > 1:
            self._local = [agent.prepare(None, cut, memory) for cut in stock.split_lists(self.kept)]
        self._remote = [agent.prepare(peer, stock.remote_list(i), memory) for i, peer in enumerate(peers)]

    def read(self, request: Request) -> float:
        start = perf_counter()
        posted = [
            self._agent.post(local, here, remote, there)
            for local, remote, (there, here) in zip(self._local, self._remote, self._stock.indices(request), strict=True)
        ]
        self._agent.finish(posted)
        seconds = perf_counter() - start
        self._agent.release(posted)
        return seconds

    def drop(self) -> None:
        self._agent.drop([self._whole, *(h for h in self._local if h is not self._whole), *self._remote])


class OneDescriptor:
    """A single contiguous read of `length` bytes."""

    def __init__(self, agent: Agent, peer: str, here: Storage, there: Storage, length: int) -> None:
        self._agent = agent
        self._local, self._remote = (
            agent.prepare(name, np.array([(s.address, length, s.device)], np.uint64), s.memory)
            for name, s in ((None, here), (peer, there))
        )
        self._first: npt.NDArray[np.int32] = np.zeros(1, np.int32)

    def read(self) -> float:
        start = perf_counter()
        posted = [self._agent.post(self._local, self._first, self._remote, self._first)]
        self._agent.finish(posted)
        seconds = perf_counter() - start
        self._agent.release(posted)
        return seconds

    def drop(self) -> None:
        self._agent.drop([self._local, self._remote])
