"""The demo: two processes, a hybrid model in two different layouts, some hundred requests carried over NIXL, every byte of
every loaded block compared with what it should be.

The child process is the producer and writes requests into its blocks; this one is the consumer, reads and compares.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
from msgspec.structs import replace

from kvferry.demo.cargo import Bytes, Cargo, Hold
from kvferry.errors import TransportError
from kvferry.manifest import HOLE, Manifest, decode, encode
from kvferry.manifest.schema import Group
from kvferry.models import ModelShape, Side, load_model, manifests
from kvferry.plan import Binder, Fills, Plan, Request, make_plans, routes
from kvferry.session.fills import apply_fills
from kvferry.transport import Prepared, Read, State, Storage, Transport
from kvferry.transport.nixl import NixlTransport

IN_FLIGHT = 8
JOIN_S = 10.0
BLOCKS_FOR = 12
"""Blocks for this many of the longest requests."""


@dataclass(frozen=True)
class Voyage:
    """What to carry: a model in two layouts, requests of random lengths."""

    model: str
    prefill: str
    decode: str
    requests: int
    longest: int
    seed: int = 1


@dataclass
class Log:
    """How far the voyage has come."""

    carried: int = 0
    bytes: int = 0
    runs: int = 0
    compared: int = 0
    wrong: int = 0
    paths: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Berth:
    """One rank: its memory and its end of the wire."""

    manifest: Manifest
    hold: Hold
    transport: Transport


def berths(model: ModelShape, side: Side, engine: str, longest: int) -> list[Berth]:
    """All ranks of a side, each with memory of its own, registered once."""
    groups = manifests(model, side, engine=engine, blocks=2)[0].groups
    blocks = 1 + BLOCKS_FOR * sum(-(-longest // g.tokens) if g.tokens else 1 for g in groups)
    found = []
    for manifest in manifests(model, side, engine=engine, blocks=blocks):
        length = sum(r.length for r in manifest.regions)
        memory: Bytes = np.random.default_rng(7).integers(1, 256, max(length, 1), dtype=np.uint8)
        base = memory.ctypes.data
        buffers = [memory[r.address : r.address + r.length] for r in manifest.regions]
        placed = replace(manifest, regions=tuple(replace(r, address=base + r.address) for r in manifest.regions))
        rank = manifest.identity.rank
        transport = NixlTransport(f"{engine}-{rank.ordinal}")
        transport.register([Storage(base, max(length, 1))])
        found.append(Berth(placed, Hold(placed, buffers), transport))
    return found


class Quay:
    """A side's free blocks."""

    def __init__(self, groups: Sequence[Group], random_: random.Random) -> None:
        self.groups = groups
        self.free = list(range(1, groups[0].blocks))
        random_.shuffle(self.free)

    def take(self, tokens: int, whole: bool) -> dict[int, list[int]] | None:
        """Block tables for a request; a consumer has holes before a window, a producer keeps everything."""
        wanted = {}
        for group in self.groups:
            count = -(-tokens // group.tokens) if group.tokens else 1
            first = 0 if whole or not group.tokens else group.keeps.first_needed(tokens) // group.tokens
            wanted[group.id] = (first, count - first)
        if sum(count for _, count in wanted.values()) > len(self.free):
            return None
        return {g: [HOLE] * first + [self.free.pop() for _ in range(count)] for g, (first, count) in wanted.items()}

    def give_back(self, tables: Mapping[int, Sequence[int]]) -> None:
        self.free[:0] = [block for table in tables.values() for block in table if block != HOLE]


def produce(pipe: Connection, voyage: Voyage) -> None:
    """The producer's process: writes requests when asked, and says when all readers have told it that they are done."""
    ranks = berths(load_model(voyage.model), Side.parse(voyage.prefill), "prefill", voyage.longest)
    pipe.send([(encode(b.manifest), b.transport.metadata()) for b in ranks])
    readers: list[int] = pipe.recv()
    told: dict[bytes, list[int]] = defaultdict(lambda: [0] * len(ranks))
    while True:
        while pipe.poll(0):
            message = pipe.recv()
            if message is None:
                for berth in ranks:
                    berth.transport.close()
                return
            for berth in ranks:
                berth.hold.load(message)
            pipe.send(("loaded", message.seed))
        for index, berth in enumerate(ranks):
            for _, name in berth.transport.notifications():
                told[name][index] += 1
                if told[name] == readers:
                    pipe.send(("told", int(name)))
                    del told[name]


@dataclass
class _Request:
    tokens: int
    src: dict[int, list[int]]
    dst: dict[int, list[int]]
    reads: list[tuple[Berth, Read]] = field(default_factory=list)
    fills: list[tuple[Berth, Fills]] = field(default_factory=list)


class Consumer:
    """The consumer's process: plans, reads, fills, compares."""

    def __init__(self, pipe: Connection, voyage: Voyage) -> None:
        self.pipe, self.voyage, self.log = pipe, voyage, Log()
        self.random = random.Random(voyage.seed)
        self.ranks = berths(load_model(voyage.model), Side.parse(voyage.decode), "decode", voyage.longest)
        offered = [(decode(data, Manifest), metadata) for data, metadata in pipe.recv()]
        producers = [manifest for manifest, _ in offered]
        self.plans = make_plans([b.manifest for b in self.ranks], producers)
        self.binders = [Binder(plan) for plan in self.plans]
        self.peers = {
            (rank, manifest.identity.rank): berth.transport.connect(metadata)
            for rank, berth in enumerate(self.ranks)
            for manifest, metadata in offered
        }
        self.prepared = [self._prepare(rank, plan) for rank, plan in enumerate(self.plans)]
        found = routes(producers, [b.manifest for b in self.ranks])
        pipe.send([max(len(r.readers), 1) for r in found])
        self.here = Quay(self.ranks[0].manifest.groups, self.random)
        self.there = Quay(producers[0].groups, self.random)
        self.open: dict[int, _Request] = {}
        self.kept: dict[int, dict[int, list[int]]] = {}

    def _prepare(self, rank: int, plan: Plan) -> list[Prepared]:
        transport = self.ranks[rank].transport
        return [
            transport.prepare(plan, source, self.peers[rank, side.identity.rank]) for source, side in enumerate(plan.sources)
        ]

    def run(self, show: Callable[[Log], None]) -> Log:
        started = 0
        while self.log.carried < self.voyage.requests:
            while started < self.voyage.requests and len(self.open) < IN_FLIGHT and self._start(started):
                started += 1
            while self.pipe.poll(0):
                what, seed = self.pipe.recv()
                if what == "loaded":
                    self._read(seed)
                else:
                    self.there.give_back(self.kept.pop(seed))
            for seed in [s for s, request in self.open.items() if request.reads and self._arrived(request)]:
                self._compare(seed, self.open.pop(seed))
                show(self.log)
        self.log.paths = {f"{self.ranks[rank].transport.path(peer).name}" for (rank, _), peer in self.peers.items()}
        return self.log

    def _start(self, seed: int) -> bool:
        tokens = self.random.randint(1, self.voyage.longest)
        src = self.there.take(tokens, whole=True)
        dst = self.here.take(tokens, whole=False) if src is not None else None
        if src is None or dst is None:
            if src is not None:
                self.there.give_back(src)
            return False
        self.open[seed] = _Request(tokens, src, dst)
        self.kept[seed] = src
        self.pipe.send(Cargo(seed, tokens, src))
        return True

    def _read(self, seed: int) -> None:
        request = self.open[seed]
        asked = Request(request.tokens, request.src, request.dst)
        for rank, (berth, plan, binder) in enumerate(zip(self.ranks, self.plans, self.binders, strict=True)):
            loading = binder.load(asked)
            for prepared in self.prepared[rank]:
                request.reads.append((berth, berth.transport.read(prepared, loading.tiles, str(seed).encode())))
            for unread in plan.tells:
                berth.transport.notify(self.peers[rank, unread], str(seed).encode())
            request.fills.append((berth, loading.fills))

    def _arrived(self, request: _Request) -> bool:
        states = [berth.transport.poll(read) for berth, read in request.reads]
        for state, (_, read) in zip(states, request.reads, strict=True):
            if state is State.FAILED:
                raise TransportError(read.error)
        return all(state is State.DONE for state in states)

    def _compare(self, seed: int, request: _Request) -> None:
        for berth, read in request.reads:
            told = berth.transport.telemetry(read)
            self.log.bytes += told.bytes
            self.log.runs += told.runs
            berth.transport.release(read)
        for berth, fills in request.fills:
            apply_fills(fills, berth.hold.buffers)
        for berth in self.ranks:
            wrong, looked = berth.hold.differing_bytes(Cargo(seed, request.tokens, request.dst))
            self.log.wrong += wrong
            self.log.compared += looked
        self.here.give_back(request.dst)
        self.log.carried += 1


def sail(voyage: Voyage, show: Callable[[Log], None]) -> Log:
    """Run the voyage; the child ends with it. What cannot be carried is refused before it starts."""
    model = load_model(voyage.model)
    here, there = (manifests(model, Side.parse(s), blocks=2) for s in (voyage.decode, voyage.prefill))
    make_plans(here, there, proof=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=produce, args=(theirs, voyage), daemon=True)
    child.start()
    theirs.close()
    consumer = None
    try:
        consumer = Consumer(ours, voyage)
        return consumer.run(show)
    except (EOFError, ConnectionError):
        child.join(JOIN_S)
        raise TransportError(f"the producer's process ended with {child.exitcode}; it wrote why on standard error") from None
    finally:
        if child.is_alive():
            with suppress(OSError):
                ours.send(None)
            child.join(JOIN_S)
        if child.is_alive():
            child.terminate()
        if consumer is not None:
            for berth in consumer.ranks:
                berth.transport.close()
