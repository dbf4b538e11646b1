"""Which way a peer is read, and what becomes of reads out of mapped memory when movers, peers or messages fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest

from kvferry.errors import TransportError
from kvferry.plan import Binder, Fleet, make_plans
from kvferry.strategy import HostMover, Mapped, Strategies
from kvferry.strategy.choose import CARRIER
from kvferry.strategy.mapped import LOOK_S, TRUST_S, PeerGoneError, Token
from kvferry.strategy.movers import Opened, Over, Ticket
from kvferry.strategy.moves import Bound, Moves
from kvferry.strided import Ints
from kvferry.transport import Harbour, InProcessTransport, State, Storage
from kvferry.transport.metadata import decode_metadata, encode_metadata
from transport_peer import allocated
from transport_suite import Case, Clock, Crossing, dense_case, finish


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

    def enter(self) -> None: ...

    def precede_the_engine(self) -> None:
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


def test_loads_that_begin_together_are_handed_on_together_where_nothing_is_mapped(monkeypatch):
    made = pair(None, None)
    handed: list[int] = []

    def read_together(prepared: Any, loads: Sequence[Any]) -> Any:
        handed.append(len(loads))
        return [made.direct.read(prepared, tiles) for tiles in loads]

    monkeypatch.setattr(made.direct, "read_together", read_together, raising=False)
    prepared = made.target.prepare(made.plan, 0, made.connect())
    reads = list(made.target.read_together(prepared, [made.tiles, made.tiles]))
    assert [finish(made.target, read) for read in reads] == [State.DONE] * 2
    assert handed == [2]
    assert not made.made.differing()


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


def test_a_notification_that_cannot_be_sent_fails_its_read():
    made = pair([FakeMover()], [FakeMover()])
    read = made.target.read(made.target.prepare(made.plan, 0, made.connect()), made.tiles, b"done")
    made.harbour.kill(made.source.name)
    assert made.target.poll(read) is State.FAILED
    assert read.error.startswith(f"peer {made.source.name}: all bytes arrived, but it cannot be notified: ")
    assert made.target.poll(read) is State.FAILED
    assert made.target.release(read)


def test_copies_that_counted_fewer_bytes_than_planned_fail_the_read():
    made = pair([FakeMover()], [FakeMover(short=1)])
    read = made.target.read(made.target.prepare(made.plan, 0, made.connect()), made.tiles, b"never")
    assert made.target.poll(read) is State.FAILED
    assert read.error == f"peer {made.source.name}: 24,575 bytes of 24,576 were copied; report this with both manifests"
    with pytest.raises(TransportError, match="telemetry is of a read that is done; this one is failed"):
        made.target.telemetry(read)
    assert made.source.notifications() == []
    assert made.target.release(read)


def test_a_read_is_running_until_its_copies_are_over_and_then_done():
    mover = FakeMover(late=True)
    made = pair([FakeMover()], [mover])
    read = made.target.read(made.target.prepare(made.plan, 0, made.connect()), made.tiles, b"done")
    assert made.target.poll(read) is State.RUNNING
    with pytest.raises(TransportError, match="this one is running"):
        made.target.telemetry(read)
    assert made.source.notifications() == []
    mover.tickets[0].done = True
    assert made.target.poll(read) is State.DONE
    assert made.source.notifications() == [(made.target.name, b"done")]
    assert made.target.poll(read) is State.DONE
    assert made.source.notifications() == []
    assert (made.target.telemetry(read).bytes, made.target.telemetry(read).wire_s) == (24576, 0.5)
    assert made.target.release(read)


def test_a_read_that_is_given_up_holds_its_destination_until_its_copies_are_over():
    mover = FakeMover(late=True)
    made = pair([FakeMover()], [mover])
    read = made.target.read(made.target.prepare(made.plan, 0, made.connect()), made.tiles, b"never")
    assert not made.target.release(read)
    assert made.target.poll(read) is State.FAILED
    assert "given up here" in read.error
    assert not made.target.release(read)
    mover.tickets[0].done = True
    assert made.target.poll(read) is State.FAILED
    assert made.target.release(read)
    assert made.source.notifications() == []


@pytest.mark.parametrize("released", [False, True])
def test_memory_of_a_forgotten_peer_is_closed_when_no_copy_reads_it_any_more(released):
    mover = FakeMover(late=True)
    made = pair([FakeMover()], [mover])
    prepared = made.target.prepare(made.plan, 0, made.connect())
    reads = [made.target.read(prepared, made.tiles) for _ in range(2)]
    made.target.forget(prepared.peer)
    assert [made.target.poll(read) for read in reads] == [State.FAILED] * 2
    assert all("forgotten here" in read.error for read in reads)
    assert [made.target.release(read) for read in reads] == [False] * 2
    assert made.path() == "mapped memory"
    mover.tickets[0].done = True
    assert made.target.release(reads[0])
    assert not any(window.closed for window in mover.windows)
    mover.tickets[1].done = True
    if released:
        assert made.target.release(reads[1])
    else:
        made.clock.now += LOOK_S
        made.target.notifications()
    assert [window.closed for window in mover.windows] == [True] * 3 + [False] * 3
    made.target.close()
    assert all(window.closed for window in mover.windows)


def test_one_window_that_cannot_be_closed_keeps_no_other_open(caplog):
    mover = FakeMover()
    made = pair([FakeMover()], [mover])
    name = made.connect()
    mover.windows[0].close()
    made.target.forget(name)
    assert all(window.closed for window in mover.windows)
    assert "memory of a peer stays mapped: closed twice" in caplog.text
    assert made.path() == "mapped memory"


def test_a_peer_that_has_died_is_not_read_and_let_go_of_within_the_interval(caplog):
    mover = FakeMover()
    made = pair([FakeMover()], [mover])
    prepared = made.target.prepare(made.plan, 0, made.connect())
    mover.windows[-1].alive = False
    with pytest.raises(TransportError, match=f"peer {made.source.name} is gone: its process has ended"):
        made.target.read(prepared, made.tiles)
    made.clock.now = LOOK_S / 2
    made.target.notifications()
    assert not any(window.closed for window in mover.windows)
    made.clock.now = LOOK_S
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        made.target.notifications()
        made.target.notifications()
    assert all(window.closed for window in mover.windows)
    assert caplog.text.count("has ended; its memory is no longer mapped here") == 1
    with pytest.raises(TransportError, match="is gone: its process has ended"):
        made.target.read(prepared, made.tiles)


def test_what_is_under_way_from_a_peer_that_has_died_is_kept_until_it_is_over():
    mover = FakeMover(late=True)
    made = pair([FakeMover()], [mover])
    read = made.target.read(made.target.prepare(made.plan, 0, made.connect()), made.tiles)
    mover.windows[0].alive = False
    made.clock.now = LOOK_S
    made.target.notifications()
    assert made.target.poll(read) is State.FAILED
    assert "its process has ended" in read.error
    assert not made.target.release(read)
    assert not any(window.closed for window in mover.windows)
    mover.tickets[0].done = True
    assert made.target.release(read)
    assert all(window.closed for window in mover.windows)


def test_a_peer_that_is_dead_when_it_is_connected_is_an_error_and_stays_unmapped():
    mover = FakeMover()
    made = pair([FakeMover()], [mover])
    opened = mover.open

    def dead(token: bytes, length: int) -> Opened:
        opened(token, length)
        mover.windows[-1].alive = False
        return mover.windows[-1]

    mover.open = dead  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=f"peer {made.source.name} is gone: its process has ended"):
        made.connect()
    assert mover.windows
    assert all(window.closed for window in mover.windows)
    assert not made.direct._peers


def test_a_dead_process_is_told_from_device_memory_that_cannot_be_opened():
    host, device = FakeMover(), FakeMover("vram", opens=lambda number: False)
    tokens = [Token(0, 8, "vram", 0, b""), Token(8, 8, "dram", 0, msgspec.msgpack.encode(8))]
    mapped = Mapped([host, device])
    with pytest.raises(TransportError, match="another device"):
        mapped.connect("p", tokens)
    opened = host.open

    def dead(token: bytes, length: int) -> Opened:
        opened(token, length)
        host.windows[-1].alive = False
        return host.windows[-1]

    host.open = dead  # type: ignore[method-assign]
    with pytest.raises(PeerGoneError, match="peer p is gone"):
        mapped.connect("p", tokens)
    assert [window.closed for window in host.windows] == [True, True]


@pytest.mark.parametrize("seen", ["read", "peeked at"])
@pytest.mark.parametrize(("memory", "is_read"), [("vram", True), ("dram", False)])
def test_device_memory_of_a_peer_that_was_alive_a_moment_ago_is_read_though_it_dies(memory, is_read, seen):
    """Host memory tells at once, and is asked each time; what a step has begun to rely on is there until it is closed."""
    theirs, ours = FakeMover(), FakeMover()
    made = pair([theirs], [ours])
    name = made.connect()
    prepared = made.target.prepare(made.plan, 0, name)
    if seen == "read":
        assert finish(made.target, made.target.read(prepared, made.tiles)) is State.DONE
    else:
        assert made.target._mapped.peek(name, made.plan.sources[0].regions[0], 0, 1) is not None
    ours.memory = memory
    for window in ours.windows:
        window.alive = False
    made.clock.now += TRUST_S / 2
    if is_read:
        assert finish(made.target, made.target.read(prepared, made.tiles)) is State.DONE
        made.clock.now += TRUST_S
    with pytest.raises(PeerGoneError):
        made.target.read(prepared, made.tiles)


def test_mapped_host_memory_of_a_peer_that_lives_can_be_peeked_at():
    theirs, ours = FakeMover(), FakeMover()
    made = pair([theirs], [ours])
    region, memory = made.plan.sources[0].regions[0], made.made.sources[0].buffers[0]
    name = made.connect()
    assert made.target._mapped.peek(name, region, 3, 8) == memory[3:11].tobytes()
    memory[3] += 1
    assert made.target._mapped.peek(name, region, 3, 8) == memory[3:11].tobytes()
    device = msgspec.structs.replace(region, memory="vram")
    for where, offset, length in ((region, -1, 8), (region, region.length - 7, 8), (device, 3, 8)):
        with pytest.raises(TransportError, match="cannot be seen"):
            made.target._mapped.peek(name, where, offset, length)
    for window in ours.windows:
        window.alive = False
    with pytest.raises(PeerGoneError):
        made.target._mapped.peek(name, region, 3, 8)


def test_closing_waits_for_copies_and_leaves_nothing_mapped():
    mover = FakeMover(late=True)
    made = pair([FakeMover()], [mover])
    read = made.target.read(made.target.prepare(made.plan, 0, made.connect()), made.tiles)
    mover.tickets[0].done = True
    made.target.close()
    assert made.target.release(read)
    assert all(window.closed for window in mover.windows)


def test_a_mover_that_fails_half_way_through_opening_leaves_nothing_open():
    mover = FakeMover()
    made = pair([FakeMover()], [mover])
    opened = mover.open

    def broken(token: bytes, length: int) -> Opened:
        if len(mover.windows) == 2:
            raise RuntimeError("an error of the device")
        return opened(token, length)

    mover.open = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        made.connect()
    assert [window.closed for window in mover.windows] == [True, True]
