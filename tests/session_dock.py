"""Two engines with real manifests, words and ferries over in-process transports: an oracle's case brought to life."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import oracle
from ferrying import manifests_of, place
from kvferry.manifest import Manifest
from kvferry.plan import Fills
from kvferry.session import Card, Ferry, Lease, Load, Meeting, Outcome, PeerKey, Producer, Welcome, Words, meet
from kvferry.session.fills import zero
from kvferry.strategy import HostMover, Mapped, SharedBytes, Strategies
from kvferry.transport import Harbour, InProcessTransport, Storage, Transport
from kvferry.transport.faults import Fault
from oracle import HOLE, Attention, Case, Group, Layer, Mamba2, Memory, Side, window
from transport_peer import at_addresses

TIMEOUT_S, PATIENCE_S = 30.0, 5.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def side(layers: Sequence[Layer], tp: int, tokens: int, memory: Memory, blocks: int = 24) -> Side:
    """One engine: full attention, windows and states in groups of their own, full attention hashed."""
    full = tuple(x.name for x in layers if x.kind.paged_by == "token" and x.kind.looks_back.kind == "full")
    near = tuple(x.name for x in layers if x.kind.paged_by == "token" and x.kind.looks_back.kind == "window")
    state = tuple(x.name for x in layers if x.kind.paged_by == "state")
    groups = [Group(0, full, tokens, hashed=True)]
    if near:
        groups.append(Group(1, near, tokens, window(6)))
    if state:
        groups.append(Group(2, state))
    return Side(tp, (tuple(x.name for x in layers),), tuple(groups), memory, blocks)


def tables(of: Side, tokens: int, seed: int) -> dict[int, list[int] | int]:
    free = np.random.default_rng(seed).permutation(of.blocks).tolist()
    out: dict[int, list[int] | int] = {}
    for group in of.groups:
        if not group.tokens:
            out[group.id] = free.pop()
            continue
        kept = group.keeps.first(tokens) // group.tokens
        out[group.id] = [HOLE if p < kept else free.pop() for p in range(-(-tokens // group.tokens))]
    return out


def case(hybrid: bool, tp_p: int, tp_d: int, tokens: int = 21, start: int = 0) -> Case:
    kinds: list[oracle.Kind] = [Attention(4, 3, 2, 2), Attention(4, 3, 2, 2)]
    if hybrid:
        kinds += [Mamba2(heads=4, dim=2, state=3, groups=4, ssm_item=4), Attention(4, 2, 2, 2, window(6))]
    layers = tuple(Layer(f"layers.{i}", kind) for i, kind in enumerate(kinds))
    producer = side(layers, tp_p, 4, Memory(block=4))
    consumer = side(layers, tp_d, 8, Memory(block=8, order="token"))
    there, here = tables(producer, tokens, 1), tables(consumer, tokens, 2)
    return Case(layers, producer, consumer, tokens, _lists(there), _lists(here), start, prefilled=tokens + 1, seed=5)


def _lists(found: Mapping[int, list[int] | int]) -> dict[int, list[int]]:
    return {group: table if isinstance(table, list) else [table] for group, table in found.items()}


@dataclass
class Berth:
    """A producer rank: its memory, its words, its end of the wire."""

    manifest: Manifest
    words: Words
    transport: Transport
    memories: list[SharedBytes] = field(default_factory=list)

    @property
    def card(self) -> Card:
        return Card(self.manifest, self.words.manifest, self.transport.metadata())


@dataclass
class Dock:
    """A case's producer with its leases, and a ferry for every consumer rank, moved on by hand."""

    case: Case
    world: oracle.World
    harbour: Harbour
    clock: Clock
    producer: Producer
    berths: list[Berth]
    meeting: Meeting
    ferries: list[Ferry]
    ends: list[InProcessTransport]
    landings: list[Words]
    consumers: list[Manifest]
    filled: list[int] = field(default_factory=list)

    @property
    def peer(self) -> PeerKey:
        return self.meeting.peer

    def lease(self, request: str = "r") -> Lease:
        """Opened, live on every rank, and published."""
        self.producer.open(request)
        lease = self.producer.publish(request, self.clock.now)
        self.turn()
        return lease

    def turn(self) -> None:
        """The producer's ranks carry out what is due, and report it."""
        closing, opened = self.producer.take_closing(), self.producer.take_opened()
        for berth in self.berths:
            for end in closing:
                berth.words.kill(end.lease)
            for lease in opened:
                berth.words.live(lease)
        self.producer.close_all(end.request for end in closing)

    def load(self, lease: Lease, request: str = "r", /, **changed: object) -> Load:
        found = self.case
        src, dst = ({g: _one(s, g, t) for g, t in ts.items()} for s, ts in self.sides)
        return replace(Load(request, self.peer, lease, found.tokens, found.start, src, dst), **changed)  # type: ignore[arg-type]

    @property
    def sides(self) -> tuple[tuple[Side, Mapping[int, Sequence[int]]], ...]:
        return (self.case.producer, self.case.src), (self.case.consumer, self.case.dst)

    def hand_in(self, load: Load) -> None:
        for ferry in self.ferries:
            ferry.load(load)

    def step(self, times: int = 1) -> list[Outcome]:
        out = []
        for _ in range(times):
            for ferry in self.ferries:
                ferry.step()
                out += ferry.outcomes()
        return out

    def differing(self) -> list[str]:
        out = []
        for rank, memory in self.world.consumers.items():
            out += list(oracle.differences(memory.buffers, self.world.expected[rank].memory.buffers))
        return out

    @property
    def free_landings(self) -> list[int]:
        return [len(ferry._passage.landings) for ferry in self.ferries]


def _one(of: Side, group: int, table: Sequence[int]) -> list[int] | int:
    tokens = next(g.tokens for g in of.groups if g.id == group)
    return list(table) if tokens else table[0]


def berths(
    world: oracle.World, manifests: Sequence[Manifest], harbour: Harbour, slots: int, mapped: bool = False
) -> list[Berth]:
    """`mapped`: in memory that others can map, caches and words alike."""
    out = []
    for manifest in manifests:
        memory = world.producers[place(manifest.identity.rank)]
        if mapped:
            out.append(_shared_berth(manifest, memory, harbour, slots))
            continue
        placed = at_addresses(manifest, [b.ctypes.data for b in memory.buffers])
        words = Words(slots, manifest.identity)
        transport = InProcessTransport(f"p{manifest.identity.rank.ordinal}", harbour)
        transport.register([*(Storage(b.ctypes.data, b.nbytes) for b in memory.buffers if b.nbytes), words.storage])
        out.append(Berth(placed, words, transport))
    return out


def _shared_berth(manifest: Manifest, memory: oracle.RankMemory, harbour: Harbour, slots: int) -> Berth:
    mover = HostMover()
    memories = [SharedBytes(len(buffer)) for buffer in memory.buffers]
    for shared, buffer in zip(memories, memory.buffers, strict=True):
        shared.bytes[:] = buffer
        mover.share(shared)
    board = SharedBytes(Words.size(slots))
    mover.share(board)
    words = Words(slots, manifest.identity, board.bytes)
    transport = Strategies(InProcessTransport(f"p{manifest.identity.rank.ordinal}", harbour), Mapped([mover]))
    transport.register([*(Storage(shared.address, shared.length) for shared in memories if shared.length), words.storage])
    return Berth(at_addresses(manifest, [shared.address for shared in memories]), words, transport, [*memories, board])


def dock(
    of: Case,
    faults: Mapping[int, Sequence[Fault]] | None = None,
    slots: int = 8,
    landings: int = 8,
    warm: bool = True,
    mapped: bool = False,
    mover: Callable[[], HostMover] = HostMover,
) -> Dock:
    """`faults` are those of every consumer rank's first, second, ... read over the transport, but for those that warm its
    connections up where that has happened already; it carries nothing if all memory is `mapped`."""
    world, harbour, clock = oracle.build_world(of), Harbour(), Clock()
    producers, consumers = manifests_of(of)
    there = berths(world, producers, harbour, slots, mapped)
    placed = []
    for manifest in consumers:
        buffers = world.consumers[place(manifest.identity.rank)].buffers
        placed.append(at_addresses(manifest, [b.ctypes.data for b in buffers]))
    welcome = Welcome("P", "1", 60.0, tuple(berth.card for berth in there))
    meeting = meet(PeerKey("127.0.0.1:7000", "P", "1"), welcome, placed)
    out = Dock(of, world, harbour, clock, Producer("1", slots, 60.0), there, meeting, [], [], [], placed)
    for ordinal, manifest in enumerate(placed):
        memory = world.consumers[place(manifest.identity.rank)]
        words = Words(landings, manifest.identity)
        end = InProcessTransport(f"d{ordinal}", harbour, timeout_s=TIMEOUT_S, clock=clock)
        carrier = Strategies(end, Mapped([mover()], clock)) if mapped else end
        carrier.register([*(Storage(b.ctypes.data, b.nbytes) for b in memory.buffers if b.nbytes), words.storage])

        def fill(fills: Fills, buffers: list[oracle.Bytes] = memory.buffers) -> None:
            out.filled.append(fills.bytes)
            for region in np.unique(fills.region).tolist():
                mine = fills.region == region
                zero(buffers[region], fills.offset[mine], fills.length[mine])

        ferry = Ferry(carrier, words, ordinal, fill, PATIENCE_S, clock)
        ferry.meet(meeting)
        if warm:
            ferry.step()
        end.script(faults or {})
        out.ferries.append(ferry)
        out.ends.append(end)
        out.landings.append(words)
    return out
