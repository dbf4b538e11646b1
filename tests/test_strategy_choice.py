"""Which way a peer is read, and what becomes of reads out of mapped memory when movers, peers or messages fail."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.plan import Binder, Fleet, make_plans
from kvferry.strategy import HostMover, Mapped, SharedBytes, Strategies
from kvferry.strategy.choose import CARRIER
from kvferry.strategy.mapped import LOOK_S
from kvferry.strategy.movers import Opened, Over, Ticket
from kvferry.strategy.moves import Bound, Moves
from kvferry.strided import Ints
from kvferry.transport import Harbour, InProcessTransport, NixlOptions, NixlTransport, State, Storage
from kvferry.transport.metadata import decode_metadata, encode_metadata
from transport_peer import PeerProcess, Rank, allocated, shared
from transport_suite import Case, Crossing, MappedWharf, crossing, dense_case, finish, start, until


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class LateTicket:
    """Copies that end when the test says so."""

    moved: int
    done: bool = False
    seconds: float = 0.5


@dataclass
class Window:
    """A storage of this process, seen by a mover that can tell what was closed."""

    address: int
    alive: bool = True
    closed: bool = False

    def close(self) -> None:
        if self.closed:
            raise TransportError("closed twice")
        self.closed = True


@dataclass
class FakeMover:
    """Opens storages of this process by their address; copies at once or when the test says so, all bytes or fewer."""

    memory: Literal["dram", "vram"] = "dram"
    exports: bool = True
    opens: Callable[[int], bool] = lambda number: True
    late: bool = False
    short: int = 0
    windows: list[Window] = field(default_factory=list)
    tickets: list[LateTicket] = field(default_factory=list)

    def export(self, storage: Storage) -> bytes:
        if not self.exports:
            raise TransportError("memory of an expandable segment")
        return msgspec.msgpack.encode(storage.address)

    def open(self, token: bytes, length: int) -> Opened:
        if not self.opens(len(self.windows)):
            raise TransportError("another device")
        self.windows.append(Window(msgspec.msgpack.decode(token, type=int)))
        return self.windows[-1]

    def prepare(self, moves: Moves) -> Any:
        return HostMover().prepare(moves)

    def start(self, prepared: Any, bound: Bound) -> Ticket:
        moved = HostMover().start(prepared, bound).moved - self.short
        if not self.late:
            return Over(moved)
        self.tickets.append(LateTicket(moved))
        return self.tickets[-1]

    def zero(self, runs: Ints) -> Ticket:
        raise NotImplementedError


@dataclass
class Pair:
    """A producer and a consumer of one process, both with strategies over the in-process transport."""

    made: Crossing
    source: Strategies
    target: Strategies
    direct: InProcessTransport
    clock: Clock
    harbour: Harbour

    @property
    def plan(self) -> Any:
        return self.made.plans[0]

    @property
    def tiles(self) -> Any:
        return Binder(self.plan).tiles(self.made.case.request)

    def connect(self) -> str:
        return self.target.connect(self.source.metadata())

    def path(self) -> str:
        return self.target.path(self.connect()).name

    def carried(self) -> bool:
        """Whether a whole read arrives now."""
        read = self.target.read(self.target.prepare(self.plan, 0, self.connect()), self.tiles)
        return finish(self.target, read) is State.DONE and not self.made.differing() and self.target.release(read)


def pair(theirs: Sequence[Any] | None, ours: Sequence[Any] | None, case: Case | None = None) -> Pair:
    """`theirs` and `ours` are the movers of either side; None: no strategy but `direct`."""
    case = case or dense_case()
    harbour, clock = Harbour(), Clock()
    there, here = allocated(case.producers, 1), allocated(case.consumers, 2)
    plans = make_plans([r.manifest for r in here], Fleet([r.manifest for r in there]))
    expected = [[b.copy() for b in rank.buffers] for rank in here]
    found = Binder(plans[0]).bind(case.request).copies[0]
    columns = (found.src_region, found.src_offset, found.dst_region, found.dst_offset, found.length)
    for sr, so, dr, do, n in zip(*(c.tolist() for c in columns), strict=True):
        expected[0][dr][do : do + n] = there[0].buffers[sr][so : so + n]
    direct = InProcessTransport("d", harbour, clock=clock)
    source = Strategies(InProcessTransport("p", harbour), Mapped(theirs, clock) if theirs is not None else None)
    target = Strategies(direct, Mapped(ours, clock) if ours is not None else None)
    source.register(there[0].storages)
    target.register(here[0].storages)
    made = Crossing(case, there, [source.metadata()], here, plans, expected)
    return Pair(made, source, target, direct, clock, harbour)


def test_memory_that_both_sides_can_map_is_mapped():
    made = pair([FakeMover()], [FakeMover()])
    assert made.path() == "mapped memory"
    assert made.carried()
    assert not made.direct._peers


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (None, None),
        (None, [FakeMover()]),
        ([FakeMover()], None),
        ([FakeMover(exports=False)], [FakeMover()]),
        ([FakeMover()], [FakeMover(opens=lambda number: False)]),
        ([FakeMover()], [FakeMover(opens=lambda number: number != 1)]),
        ([FakeMover()], [FakeMover(memory="vram")]),
        ([FakeMover(memory="vram")], [FakeMover()]),
        ([], []),
    ],
    ids=["neither", "only ours", "only theirs", "not exported", "not opened", "half opened", "other", "of another", "no mover"],
)
def test_memory_that_one_side_cannot_map_is_read_by_descriptors(theirs, ours):
    made = pair(theirs, ours)
    assert made.path() == "plain memory"
    assert made.carried()
    for mover in ours or ():
        assert all(window.closed for window in mover.windows)


def test_a_way_that_is_closed_is_said_once(caplog):
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        made = pair([FakeMover()], [FakeMover(opens=lambda number: False)])
        for _ in range(3):
            made.connect()
            made.target.forget(made.connect())
    assert [record.getMessage() for record in caplog.records if "cannot be mapped" in record.getMessage()] == [
        f"memory of peer {made.source.name} cannot be mapped (another device): it is read by descriptors"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        made = pair([FakeMover(exports=False)], [])
        made.source.register([])
        made.source.register([Storage(1 << 20, 1 << 10)])
    said = [record.getMessage() for record in caplog.records if "cannot be mapped by others" in record.getMessage()]
    assert len([words for words in said if "expandable segment" in words]) == 1


def test_a_rank_whose_own_memory_nobody_can_map_still_maps_that_of_others():
    made = pair([FakeMover()], [FakeMover(exports=False)])
    assert made.path() == "mapped memory"
    assert made.carried()


def test_storages_of_which_one_cannot_be_mapped_are_all_read_by_descriptors():
    mover = FakeMover()
    made = pair([mover], [FakeMover()])
    mover.exports = False
    made.source.register([Storage(made.made.sources[0].storages[0].address, 8)])
    assert made.path() == "plain memory"
    assert made.carried()
    made.target.forget(made.connect())
    mover.exports = True
    made.source.register([Storage(made.made.sources[0].storages[0].address, 8)])
    assert made.path() == "plain memory"


def test_a_peer_that_is_mapped_and_sends_other_metadata_is_refused_until_it_is_forgotten():
    made = pair([FakeMover()], [FakeMover()])
    name = made.connect()
    made.source.register([Storage(made.made.sources[0].storages[0].address, 8)])
    with pytest.raises(TransportError, match=f"peer {name} is connected with other metadata; forget it"):
        made.connect()
    made.target.forget(name)
    assert made.path() == "mapped memory"


def test_a_peer_whose_transport_is_another_one_is_not_told_anything():
    made = pair([FakeMover()], [FakeMover()])
    stranger = InProcessTransport("q", made.harbour)
    envelope = decode_metadata(made.source.metadata(), CARRIER)
    ways = msgspec.msgpack.decode(envelope.blob)
    forged = msgspec.structs.replace(envelope, blob=msgspec.msgpack.encode((stranger.metadata(), ways[1])))
    name = made.target.connect(encode_metadata(forged))
    with pytest.raises(TransportError, match=f"peer {name} sends metadata of {stranger.name}"):
        made.target.notify(name, b"ahoy")
    assert stranger.notifications() == []


def test_a_plan_that_cannot_be_mapped_is_read_by_descriptors(caplog):
    """The peer said less of its memory than the plan reads."""
    made = pair([FakeMover()], [FakeMover()])
    envelope = decode_metadata(made.source.metadata(), CARRIER)
    direct, tokens = msgspec.msgpack.decode(envelope.blob)
    less = msgspec.structs.replace(envelope, blob=msgspec.msgpack.encode((direct, tokens[:1])))
    name = made.target.connect(encode_metadata(less))
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        read = made.target.read(made.target.prepare(made.plan, 0, name), made.tiles, b"done")
    assert "lies in no storage that it lets others map): it is read by descriptors" in caplog.text
    assert finish(made.target, read) is State.DONE
    assert made.made.differing() == 0
    assert made.source.notifications() == [(made.target.name, b"done")]
    made.target.forget(name)
    with pytest.raises(TransportError, match="not connected"):
        made.target.prepare(made.plan, 0, name)
