"""The producers' process: memory of all their ranks, one transport each, kept going between commands from a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.manifest import Manifest
from kvferry.strategy import HostMover, Mapped, SharedBytes, Strategies
from kvferry.strategy.scattered import Scattered
from kvferry.strategy.staging import host_staging
from kvferry.transport import NixlOptions, NixlTransport, Storage, Transport

Buffers = list[npt.NDArray[np.uint8]]

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Rank:
    """A rank's manifest with real addresses, and the memory behind it."""

    manifest: Manifest
    buffers: Buffers

    @property
    def storages(self) -> list[Storage]:
        return [Storage(b.ctypes.data, b.nbytes) for b in self.buffers if b.nbytes]


def filled(manifest: Manifest, *seed: int) -> Buffers:
    """The same bytes in every process."""
    rngs = [np.random.default_rng([*seed, i]) for i in range(len(manifest.regions))]
    return [rng.integers(0, 256, r.length, np.uint8) for rng, r in zip(rngs, manifest.regions, strict=True)]


def at_addresses(manifest: Manifest, addresses: Sequence[int]) -> Manifest:
    regions = (msgspec.structs.replace(r, address=a) for r, a in zip(manifest.regions, addresses, strict=True))
    return msgspec.structs.replace(manifest, regions=tuple(regions))


def allocated(manifests: Sequence[Manifest], seed: int) -> list[Rank]:
    out = []
    for i, manifest in enumerate(manifests):
        buffers = filled(manifest, seed, i)
        out.append(Rank(at_addresses(manifest, [b.ctypes.data for b in buffers]), buffers))
    return out


def shared(rank: Rank) -> tuple[Rank, SharedBytes]:
    """The same rank in memory that others can map, a little apart so that no two regions are neighbours."""
    places = np.cumsum([0, *(-(-b.nbytes // 64) * 64 + 64 for b in rank.buffers)])
    memory = SharedBytes(int(places[-1]))
    buffers = [memory.bytes[at : at + b.nbytes] for at, b in zip(places.tolist(), rank.buffers, strict=False)]
    for buffer, given in zip(buffers, rank.buffers, strict=True):
        buffer[:] = given
    return Rank(at_addresses(rank.manifest, [b.ctypes.data for b in buffers]), buffers), memory


class _Server:
    def __init__(self) -> None:
        self.held: list[tuple[Rank, Transport]] = []
        self.memories: list[SharedBytes] = []
        self.told: list[tuple[str, str, bytes]] = []

    def open(
        self, manifests: Sequence[Manifest], seed: int, options: NixlOptions, mapped: bool = False, budget: int = 0
    ) -> list[tuple[list[int], bytes]]:
        out = []
        for i, rank in enumerate(allocated(manifests, seed)):
            transport: Transport = NixlTransport(f"p{i}", options)
            if mapped:
                mover = HostMover()
                rank, memory = shared(rank)
                mover.share(memory)
                self.memories.append(memory)
                transport = Strategies(transport, Mapped([mover]))
            elif budget:
                transport = Scattered(transport, host_staging(budget), HostMover())
            transport.register(rank.storages)
            self.held.append((rank, transport))
            out.append(([b.ctypes.data for b in rank.buffers], transport.metadata()))
        return out

    def connect(self, number: int, metadata: bytes) -> str:
        return self.held[number][1].connect(metadata)

    def notify(self, number: int, peer: str, message: bytes) -> None:
        self.held[number][1].notify(peer, message)

    def hear(self) -> list[tuple[str, str, bytes]]:
        out, self.told = self.told, []
        return out

    def shut(self) -> None:
        for _, transport in self.held:
            transport.close()
        for memory in self.memories:
            memory.close()
        self.held.clear()
        self.memories.clear()
        self.told.clear()

    def turn(self) -> None:
        for _, transport in self.held:
            self.told += [(transport.name, *heard) for heard in transport.notifications()]


def serve(pipe: Connection) -> None:
    server = _Server()
    while True:
        server.turn()
        if not pipe.poll(0.001):
            continue
        name, *arguments = pipe.recv()
        if name == "quit":
            return
        pipe.send(getattr(server, name)(*arguments))


class PeerProcess:
    """The producers' process as its parent sees it."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, *arguments))
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"the peer process does not answer {name}")
        return self._pipe.recv()

    def send_signal(self, number: signal.Signals) -> None:
        if self.process.pid is None:
            raise RuntimeError("the peer process was never started")
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            self._wait_until_stopped()
        elif number == signal.SIGKILL:
            self.process.join(PATIENCE_S)

    def _wait_until_stopped(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    return
            time.sleep(0.001)
        raise TimeoutError("the peer process does not stop")

    def close(self) -> None:
        if self.process.is_alive():
            self.send_signal(signal.SIGCONT)
            self._pipe.send(("quit",))
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
