"""What the contract's tests need of a transport: wharves with the same face, in one process or in two, and cases to carry."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol
from unittest.mock import patch

import numpy as np

from kvferry.explain.request import block_tables, blocks_needed
from kvferry.manifest import Attention, GroupSpec, Identity, LayerSpec, Layout, Manifest, build_manifest
from kvferry.models import Side, load_model, manifests
from kvferry.plan import Binder, Fleet, Plan, Request, make_plans
from kvferry.strategy import HostMover, Mapped, Strategies
from kvferry.strategy.cost import Way, usual
from kvferry.strategy.scattered import Scattered, Settings
from kvferry.strategy.staging import host_staging
from kvferry.transport import Harbour, InProcessTransport, NixlOptions, NixlTransport, Read, State, Transport, nixl
from kvferry.transport.agent import library
from transport_peer import PATIENCE_S, Buffers, PeerProcess, Rank, allocated, at_addresses, filled

SRC_SEED, DST_SEED = 1, 2
TIMEOUT_S = 3.0
TCP = {"UCX_TLS": "tcp"}


@dataclass
class Clock:
    """Time that passes when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Case:
    """Manifests of both sides, without addresses, and one request."""

    producers: Sequence[Manifest]
    consumers: Sequence[Manifest]
    request: Request


def model_case(model: str, prefill: str, decode: str, tokens: int = 99) -> Case:
    shape = load_model(model)
    sides = [Side.parse(text) for text in (prefill, decode)]
    one, other = (manifests(shape, side, name) for side, name in zip(sides, "PD", strict=True))
    blocks = max(blocks_needed(m[0].groups, tokens) for m in (one, other))
    producers, consumers = (manifests(shape, s, n, blocks=blocks) for s, n in zip(sides, "PD", strict=True))
    rng = np.random.default_rng(7)
    order = np.append(rng.permutation(blocks), -1)
    tables = block_tables(producers[0].groups, tokens)
    shuffled = {group: order[table].tolist() for group, table in tables.items()}
    return Case(producers, consumers, Request(tokens, shuffled, block_tables(consumers[0].groups, tokens)))


def dense_case(layers: int = 3, blocks: int = 16, scattered: bool = False, heads: int = 2, dim: int = 8) -> Case:
    """Equal sides, whole pages: consecutive blocks lie behind each other on both."""
    kind = Attention(heads, dim)
    groups = (GroupSpec(0, tuple(LayerSpec(f"layers.{i}.attn", kind) for i in range(layers)), 16),)
    one, other = (build_manifest(Identity(n, "1", "m"), groups, Layout(block=16), blocks) for n in "PD")
    taken = blocks // 2
    src = list(range(0, blocks, 2)) if scattered else list(range(1, 1 + taken))
    return Case([one], [other], Request(taken * 16, {0: src}, {0: list(range(blocks - taken, blocks))}))


def turned_case() -> Case:
    """A producer's K by dimension and then by token, in blocks of which a consumer's are a part."""
    kind = Attention(2, 8)
    sides = []
    for name, layout, blocks in (("P", Layout(block=64, kv="transposed"), 6), ("D", Layout(block=16), 24)):
        groups = (GroupSpec(0, (LayerSpec("layers.0.attn", kind),), layout.block),)
        sides.append(build_manifest(Identity(name, "1", "m"), groups, layout, blocks))
    return Case([sides[0]], [sides[1]], Request(200, {0: [4, 1, 5, 2]}, {0: list(range(22, 9, -1))}))


@dataclass
class Crossing:
    """A case whose memory exists and whose producers can be reached: where it lies, and what must be there in the end."""

    case: Case
    sources: list[Rank]
    metadata: list[bytes]
    here: list[Rank]
    plans: tuple[Plan, ...]
    expected: list[Buffers] = field(default_factory=list)

    def source(self, plan: Plan, number: int) -> int:
        rank = plan.sources[number].identity.rank
        return next(i for i, s in enumerate(self.sources) if s.manifest.identity.rank == rank)

    def differing(self) -> int:
        pairs = zip(self.here, self.expected, strict=True)
        return sum(int((a != b).sum()) for rank, want in pairs for a, b in zip(rank.buffers, want, strict=True))

    def wait_for_bytes(self) -> None:
        until(lambda: not self.differing(), "the bytes")


class Wharf(Protocol):
    """Two ends of one kind of transport: the name of the path between them, and whether it joins runs that are neighbours."""

    path: str
    merges: bool

    def producers(self, manifests: Sequence[Manifest], seed: int) -> tuple[list[list[int]], list[bytes]]: ...

    def consumer(self, window: int = 4096, timeout_s: float = PATIENCE_S) -> Transport: ...

    def heard(self) -> list[tuple[str, str, bytes]]:
        """(producer, sender, message) of notifications that arrived since."""
        ...

    def connect_back(self, number: int, metadata: bytes) -> str: ...

    def notify_back(self, number: int, peer: str, message: bytes) -> None: ...

    def stop(self) -> None: ...

    def resume(self) -> None: ...

    def kill(self) -> None: ...

    def restart(self) -> None:
        """After a kill: make room for other producers."""
        ...

    def close(self) -> None: ...


class InProcessWharf:
    """Both ends in this process."""

    path = "plain memory"
    merges = True

    def __init__(self) -> None:
        self.harbour = Harbour()
        self._held: list[tuple[Rank, InProcessTransport]] = []

    def producers(self, manifests: Sequence[Manifest], seed: int) -> tuple[list[list[int]], list[bytes]]:
        addresses, metadata = [], []
        for i, rank in enumerate(allocated(manifests, seed)):
            transport = InProcessTransport(f"p{i}", self.harbour)
            transport.register(rank.storages)
            self._held.append((rank, transport))
            addresses.append([b.ctypes.data for b in rank.buffers])
            metadata.append(transport.metadata())
        return addresses, metadata

    def consumer(self, window: int = 4096, timeout_s: float = PATIENCE_S) -> Transport:
        return InProcessTransport("d", self.harbour, timeout_s=timeout_s)

    def heard(self) -> list[tuple[str, str, bytes]]:
        return [(t.name, *heard) for _, t in self._held for heard in t.notifications()]

    def connect_back(self, number: int, metadata: bytes) -> str:
        return self._held[number][1].connect(metadata)

    def notify_back(self, number: int, peer: str, message: bytes) -> None:
        self._held[number][1].notify(peer, message)

    def stop(self) -> None:
        for _, transport in self._held:
            self.harbour.stop(transport.name)

    def resume(self) -> None:
        for _, transport in self._held:
            self.harbour.resume(transport.name)

    def kill(self) -> None:
        for _, transport in self._held:
            self.harbour.kill(transport.name)

    def restart(self) -> None:
        self._held.clear()

    def close(self) -> None:
        for _, transport in self._held:
            transport.close()


class NixlWharf:
    """Producers in a process of their own; `ucx` chooses how the two meet."""

    maps = False
    budget = 0
    path = "shared memory"
    merges = True

    def __init__(self, peer: PeerProcess, ucx: dict[str, str] | None = None) -> None:
        self.peer = peer
        self._ucx = ucx or {}
        self._ours: list[NixlTransport] = []

    def producers(self, manifests: Sequence[Manifest], seed: int) -> tuple[list[list[int]], list[bytes]]:
        options = NixlOptions(ucx=self._ucx, progress_thread=False)
        opened = self.peer.ask("open", manifests, seed, options, self.maps, self.budget)
        return [addresses for addresses, _ in opened], [metadata for _, metadata in opened]

    def consumer(self, window: int = 4096, timeout_s: float = PATIENCE_S) -> Transport:
        options = NixlOptions(window=window, timeout_s=timeout_s, ucx=self._ucx, progress_thread=False)
        self._ours.append(NixlTransport("d", options))
        return self._ours[-1]

    def heard(self) -> list[tuple[str, str, bytes]]:
        for transport in self._ours:
            if not transport.closed:
                transport.notifications()
        return list(self.peer.ask("hear"))

    def connect_back(self, number: int, metadata: bytes) -> str:
        return str(self.peer.ask("connect", number, metadata))

    def notify_back(self, number: int, peer: str, message: bytes) -> None:
        self.peer.ask("notify", number, peer, message)

    def stop(self) -> None:
        self.peer.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.peer.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.peer.send_signal(signal.SIGKILL)

    def restart(self) -> None:
        self.peer.close()
        self.peer = PeerProcess()

    def close(self) -> None:
        for transport in self._ours:
            transport.close()
        if self.peer.process.is_alive():
            self.resume()
            self.peer.ask("shut")


@contextmanager
def without_strides() -> Iterator[None]:
    with patch.object(nixl, "library", lambda: replace(library(), strided=False)):
        yield


class DenseWharf(NixlWharf):
    """Over a NIXL that takes no strided lists, as before its release 1.5."""

    def consumer(self, window: int = 4096, timeout_s: float = PATIENCE_S) -> Transport:
        with without_strides():
            return super().consumer(window, timeout_s)


class MappedWharf(NixlWharf):
    """Producers in a process of their own whose memory is mapped here; only notifications go over NIXL."""

    maps = True
    path = "mapped memory"
    merges = False

    def __init__(self, peer: PeerProcess, ucx: dict[str, str] | None = None) -> None:
        super().__init__(peer, ucx)
        self._mapping: list[Strategies] = []

    def consumer(self, window: int = 4096, timeout_s: float = PATIENCE_S) -> Transport:
        self._mapping.append(Strategies(super().consumer(window, timeout_s), Mapped([HostMover()])))
        return self._mapping[-1]

    def close(self) -> None:
        for transport in self._mapping:
            transport.close()
        super().close()


class ScatteredWharf(NixlWharf):
    """Producers in a process of their own that gather, or are covered: every read but those of words goes one way."""

    budget = 1 << 18
    way: Way = "packed"
    rings = False

    def __init__(self, peer: PeerProcess, ucx: dict[str, str] | None = None) -> None:
        super().__init__(peer, ucx)
        self.staging: list[Scattered] = []

    def consumer(self, window: int = 4096, timeout_s: float = PATIENCE_S) -> Transport:
        settings = Settings((self.way,), usual("shared memory"), timeout_s=timeout_s, maps=self.rings)
        self.staging.append(Scattered(super().consumer(window, timeout_s), host_staging(self.budget), HostMover(), settings))
        return self.staging[-1]

    def close(self) -> None:
        for transport in self.staging:
            if not transport.closed:
                transport.close()
        super().close()


class RingWharf(ScatteredWharf):
    """Producers whose rings are mapped here, and whose other memory is not."""

    path = "mapped ring"
    rings = True


class StagedWharf(ScatteredWharf):
    way: Way = "staged"


def crossing(wharf: Wharf, case: Case) -> Crossing:
    """Bring a case to life, and work out with explicit copies what must be in the consumers' memory in the end."""
    addresses, metadata = wharf.producers(case.producers, SRC_SEED)
    copies = [filled(m, SRC_SEED, i) for i, m in enumerate(case.producers)]
    sources = [Rank(at_addresses(m, a), c) for m, a, c in zip(case.producers, addresses, copies, strict=True)]
    here = allocated(case.consumers, DST_SEED)
    plans = make_plans([r.manifest for r in here], Fleet([r.manifest for r in sources]))
    out = Crossing(case, sources, metadata, here, plans)
    for rank, plan in zip(here, plans, strict=True):
        out.expected.append([b.copy() for b in rank.buffers])
        for number, found in enumerate(Binder(plan).bind(case.request).copies):
            there = sources[out.source(plan, number)].buffers
            columns = (found.src_region, found.src_offset, found.dst_region, found.dst_offset, found.length)
            for sr, so, dr, do, n in zip(*(c.tolist() for c in columns), strict=True):
                out.expected[-1][dr][do : do + n] = there[sr][so : so + n]
    return out


def until(done: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about in {seconds:g} s")


def finish(transport: Transport, read: Read) -> State:
    until(lambda: transport.poll(read) is not State.RUNNING, "the end of a read")
    return transport.poll(read)


def start(transport: Transport, made: Crossing, plan: Plan, number: int, notification: bytes = b"") -> Read:
    peer = transport.connect(made.metadata[made.source(plan, number)])
    prepared = transport.prepare(plan, number, peer)
    return transport.read(prepared, Binder(plan).tiles(made.case.request), notification)


def heard_so_far(wharf: Wharf, transport: Transport, peer: str) -> list[bytes]:
    """Notifications that reached the producers, up to one that is sent now: they arrive in order."""
    heard: list[bytes] = []
    transport.notify(peer, b"marker")

    def arrived() -> bool:
        transport.notifications()
        heard.extend(message for _, _, message in wharf.heard())
        return b"marker" in heard

    until(arrived, "the marker")
    heard.remove(b"marker")
    return heard
