"""A NIXL agent of our own making: every call is counted, and descriptors land in the order of posting, so many a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.plan import Binder, Request, make_plans
from kvferry.transport import NixlOptions, NixlTransport, Storage
from kvferry.transport import nixl as module
from kvferry.transport.agent import Library
from kvferry.transport.metadata import Metadata, StorageEntry, encode_metadata, this_host
from kvferry.transport.nixl import NixlRead
from kvferry.transport.process import this_process
from transport_peer import allocated
from transport_suite import Case, dense_case

PEER = "p#1"


@dataclass(eq=False)
class Handle:
    descriptors: int
    left: int


@dataclass
class Agent:
    """`rate` descriptors land whenever `carry` is called; a notification is a message that was sent."""

    rate: int = 32
    calls: Counter[str] = field(default_factory=Counter)
    flying: list[Handle] = field(default_factory=list)
    most: int = 0
    posting: Callable[[int], None] = lambda descriptors: None

    def carry(self) -> None:
        room = self.rate
        for handle in self.flying:
            taken = min(room, handle.left)
            handle.left -= taken
            room -= taken

    def add_remote_agent(self, blob: bytes) -> str:
        return PEER

    def register_memory(self, rows: Any, memory: str) -> object:
        return object()

    def prep_xfer_dlist(self, agent: str, rows: Any, memory: str) -> object:
        return object()

    def make_prepped_xfer(self, operation: str, dst: object, here: np.ndarray, src: object, there: np.ndarray) -> Handle:
        self.calls["make"] += 1
        return Handle(len(here), len(here))

    def transfer(self, handle: Handle) -> str:
        self.calls["transfer"] += 1
        self.flying.append(handle)
        self.most = max(self.most, sum(h.descriptors for h in self.flying))
        self.posting(handle.descriptors)
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        self.calls["check"] += 1
        return "PROC" if handle.left else "DONE"

    def get_xfer_telemetry(self, handle: Handle) -> SimpleNamespace:
        self.calls["telemetry"] += 1
        n = handle.descriptors
        return SimpleNamespace(startTime=0, xferDuration=1, postDuration=1, totalBytes=n, descCount=n)

    def release_xfer_handle(self, handle: Handle) -> None:
        self.calls["release"] += 1
        self.flying.remove(handle)

    def send_notif(self, peer: str, message: bytes) -> None:
        self.calls["notify"] += 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.calls["notifications"] += 1
        return {}


class Sea:
    """A transport over the agent, connected to one peer; reads of as many scattered blocks as one likes."""

    def __init__(self, monkeypatch: Any, window: int, blocks: int, rate: int = 32, clock: Callable[[], float] = lambda: 0.0):
        self.agent = Agent(rate)
        monkeypatch.setattr(module, "library", lambda: Library(SimpleNamespace(), (RuntimeError,)))
        monkeypatch.setattr(module, "start", lambda name, options, found: (self.agent, False))
        self.case: Case = dense_case(layers=1, blocks=2 * blocks)
        here, there = allocated(self.case.consumers, 1), allocated(self.case.producers, 2)
        self.plan = make_plans([rank.manifest for rank in here], [rank.manifest for rank in there])[0]
        self.transport = NixlTransport("d", NixlOptions(window=window), clock)
        self.transport.register(here[0].storages)
        self._kept = here, there
        metadata = Metadata(
            module.CARRIER,
            PEER,
            this_host(),
            tuple(_entry(s) for s in there[0].storages),
            b"",
            process=this_process(),
        )
        self.prepared = self.transport.prepare(self.plan, 0, self.transport.connect(encode_metadata(metadata)))

    def read(self, descriptors: int) -> NixlRead:
        """Every second block, so that nothing merges."""
        blocks = list(range(0, 2 * descriptors, 2))
        request = Request(16 * descriptors, {0: blocks}, {0: blocks})
        return self.transport.read(self.prepared, Binder(self.plan).tiles(request))

    def round(self, reads: Sequence[NixlRead]) -> None:
        """Something lands, and then every read is asked after once."""
        self.agent.carry()
        for read in reads:
            self.transport.poll(read)


def _entry(storage: Storage) -> StorageEntry:
    return StorageEntry(storage.address, storage.length, storage.memory, storage.device)
