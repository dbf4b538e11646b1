"""Packed reads when something goes wrong: nothing wrong is accepted, and every slot comes back. Time is the test's."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.errors import TransportError
from kvferry.manifest.codec import decode, encode
from kvferry.plan import Binder, Fleet, Plan, Request, Tiles, make_plans
from kvferry.session import Words
from kvferry.session.reference import Lease
from kvferry.strategy import HostMover, cost
from kvferry.strategy.asking import AGAIN_S
from kvferry.strategy.cost import Way, usual
from kvferry.strategy.flights import DetouredRead, SharedRead
from kvferry.strategy.gathering import AGAIN, AWAKE_S, MARK, SLOT_S, Ask, Asks, Free, Introduction, pack
from kvferry.strategy.movers import Over, Ticket
from kvferry.strategy.moves import Bound
from kvferry.strategy.scattered import Scattered, Settings, _slotfuls
from kvferry.strategy.staging import (
    DEVICE_CUT,
    HOST_CUT,
    LEAST,
    PAGE,
    PINNED_CUT,
    Cut,
    Offer,
    Rings,
    host_staging,
    page_of,
    sized,
)
from kvferry.strategy.turns import turn
from kvferry.strategy.ways import ScatteredPrepared
from kvferry.strided import Ints
from kvferry.transport import Harbour, InProcessTransport, State
from kvferry.transport.contract import Prepared, Read
from kvferry.transport.faults import Delay, LateLanding
from kvferry.transport.inprocess import InProcessRead
from transport_peer import PeerProcess, Rank, allocated
from transport_suite import TCP, TIMEOUT_S, Case, Clock, ScatteredWharf, crossing, dense_case, finish, model_case, until

RATES = usual("shared memory")
MAPS = pytest.mark.parametrize("maps", [False, True], ids=["over the wire", "ring mapped"])
ROUTES = [("packed", False), ("packed", True), ("staged", False)]


@dataclass
class Late:
    """Copies that end when the test says so, and that may have moved too little."""

    moved: int
    done: bool = False
    seconds: float = 0.0


@dataclass
class LateMover(HostMover):
    """Copies at once and says so later."""

    late: bool = False
    short: int = 0
    tickets: list[Late] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def start(self, prepared: Ints, bound: Bound) -> Ticket:
        over = super().start(prepared, bound)
        if not self.late:
            return Over(over.moved - self.short)
        self.tickets.append(Late(over.moved - self.short))
        return self.tickets[-1]


class Ordered(InProcessTransport):
    """A wire on which the test says when a slot's bytes land, and when it is told that a board was read, whose words are those
    of the moment when it was asked after first."""

    slots_land = boards_are_told = True

    def poll(self, read: Read) -> State:
        assert isinstance(read, InProcessRead)
        board = int(read.runs[2].sum()) < PAGE
        if read.state is not State.RUNNING or (not board and self.slots_land):
            return super().poll(read)
        if board and not read.landed:
            self._copy(read, 0, read.total)
            read.landed = read.total
        if board and self.boards_are_told:
            self._finish(read)
        return read.state


@dataclass
class World:
    """A producer, and consumers of the same case, in one process."""

    case: Case
    harbour: Harbour
    clock: Clock
    there: Rank
    source: Scattered
    gatherer: LateMover
    plan: Plan
    here: Rank
    wire: InProcessTransport
    target: Scattered
    scatterer: LateMover
    expected: list[np.ndarray]

    def prepare(self, target: Scattered | None = None) -> ScatteredPrepared:
        one = target or self.target
        prepared = one.prepare(self.plan, 0, one.connect(self.source.metadata()))
        assert isinstance(prepared, ScatteredPrepared)
        return prepared

    @property
    def tiles(self) -> dict[tuple[int, int], Tiles]:
        return Binder(self.plan).tiles(self.case.request)

    def read(self, prepared: ScatteredPrepared | None = None, notification: bytes = b"") -> DetouredRead:
        read = self.target.read(prepared or self.prepare(), self.tiles, notification)
        assert isinstance(read, DetouredRead)
        return read

    def another(self, budget: int = 1 << 17) -> Scattered:
        """A consumer of the same blocks."""
        out = Scattered(
            InProcessTransport("e", self.harbour, clock=self.clock),
            host_staging(budget, mappable=False),
            HostMover(),
            forced(),
            self.clock,
        )
        out.register(self.here.storages)
        return out

    def turn(self, reads: Sequence[DetouredRead], times: int = 1, target: Scattered | None = None) -> list[State]:
        for _ in range(times):
            self.source.notifications()
            for read in reads:
                (target or self.target).poll(read)
        return [read.state for read in reads]

    def finish(self, *reads: DetouredRead) -> list[State]:
        for _ in range(2000):
            if State.RUNNING not in self.turn(reads):
                break
        return [read.state for read in reads]

    @property
    def right(self) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.here.buffers, self.expected, strict=True))

    @property
    def untouched(self) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.here.buffers, self.before, strict=True))

    @property
    def before(self) -> list[np.ndarray]:
        return allocated(self.case.consumers, 2)[0].buffers

    def all_back(self) -> bool:
        self.target.notifications()
        self.source.notifications()
        landing, gathering = self.target.landing, self.source.gathering
        berths = [source.berths for source in self.target._sources.values() if source.berths is not None]
        if any(one.free != one.count for one in berths) or landing._waiting or landing._flying or landing._running:
            return False
        return landing.free == landing.slots and gathering.free == len(gathering._words) and not gathering._words.any()


def taken_by(made: World, other: Scattered, prepared: Prepared) -> list[Read]:
    """Reads of another consumer that take all free slots, for which the producer gathers other bytes than it has."""
    for buffer in made.there.buffers:
        buffer ^= 0xFF
    reads = [other.read(prepared, made.tiles) for _ in range(made.source.gathering.free)]
    made.source.notifications()
    for buffer in made.there.buffers:
        buffer ^= 0xFF
    return reads


def forced(way: Way = "packed", timeout_s: float = 30.0, maps: bool = False) -> Settings:
    return Settings((way,), RATES, timeout_s=timeout_s, maps=maps)


def world(
    case: Case | None = None,
    way: Way = "packed",
    budgets: tuple[int, int] = (1 << 17, 1 << 17),
    timeout_s: float = 30.0,
    wire: type[InProcessTransport] = InProcessTransport,
    rings: tuple[Rings, Rings] = ("both", "both"),
    maps: bool = False,
) -> World:
    """`maps`: the producer's ring is mapped by the consumer."""
    case = case or model_case("synthetic-12", "tp=1,layout=token", "tp=2")
    harbour, clock = Harbour(), Clock()
    there, here = allocated(case.producers, 1)[0], allocated(case.consumers, 2)[0]
    gatherer, scatterer = LateMover(), LateMover()
    wires = [wire(name, harbour, clock=clock, timeout_s=timeout_s) for name in "pd"]
    settings_ = forced(way, timeout_s, maps)
    source = Scattered(wires[0], host_staging(budgets[0], rings[0], maps), gatherer, settings_, clock)
    source.register(there.storages)
    target = Scattered(wires[1], host_staging(budgets[1], rings[1], maps), scatterer, settings_, clock)
    target.register(here.storages)
    plan = make_plans([here.manifest], Fleet([there.manifest]))[0]
    expected = [buffer.copy() for buffer in here.buffers]
    found = Binder(plan).bind(case.request).copies[0]
    columns = (found.src_region, found.src_offset, found.dst_region, found.dst_offset, found.length)
    for sr, so, dr, do, n in zip(*(c.tolist() for c in columns), strict=True):
        expected[dr][do : do + n] = there.buffers[sr][so : so + n]
    return World(case, harbour, clock, there, source, gatherer, plan, here, wires[1], target, scatterer, expected)


@pytest.mark.parametrize(("way", "maps"), ROUTES)
@pytest.mark.parametrize("budget", [LEAST, LEAST + PAGE, 1 << 18, 1 << 23])
def test_a_load_arrives_whatever_the_budget_and_all_slots_come_back(way: Way, maps: bool, budget: int) -> None:
    made = world(way=way, maps=maps, budgets=(budget, LEAST))
    read = made.read(notification=b"done")
    for _ in range(200):
        if made.target.poll(read) is State.DONE:
            break
        assert made.source.notifications() == []
    assert read.state is State.DONE
    assert made.right
    assert made.target.telemetry(read).bytes == Binder(made.plan).bind(made.case.request).bytes
    assert made.target.carried == {way: 1}
    assert made.target.release(read)
    assert made.source.notifications() == [(made.target.name, b"done")]
    assert made.all_back()


@pytest.mark.parametrize("cut", [HOST_CUT, PINNED_CUT, DEVICE_CUT], ids=["host", "pinned", "device"])
@pytest.mark.parametrize("budget", [LEAST, 100_000, 1 << 20, 3 << 20, 1 << 30, 40 << 30])
def test_both_rings_together_stay_within_the_budget(budget: int, cut: Cut) -> None:
    sizes = sized(budget, cut)
    assert sizes.bytes == sizes.slot * (sizes.sending + sizes.landing) <= budget
    assert sizes.slot % PAGE == 0
    assert 2 <= sizes.sending == sizes.landing <= 512


@pytest.mark.parametrize("cut", [HOST_CUT, PINNED_CUT, DEVICE_CUT], ids=["host", "pinned", "device"])
@pytest.mark.parametrize("budget", [LEAST, 100_000, 1 << 20, 3 << 20, 1 << 30, 5_260_000_000, 40 << 30])
def test_a_ring_that_is_alone_has_the_whole_budget(budget: int, cut: Cut) -> None:
    both, sending, landing = (sized(budget, cut, rings) for rings in ("both", "sending", "landing"))
    assert sending.landing == landing.sending == 0
    assert (sending.slot, sending.sending) == (landing.slot, landing.landing)
    assert min(both.bytes, landing.bytes) >= 0.9 * budget - 2 * PAGE
    assert max(both.bytes, landing.bytes) <= budget
    assert landing.slot % PAGE == 0
    assert 4 <= landing.landing <= 512


@pytest.mark.parametrize("way", ["packed", "staged"])
def test_one_that_only_sends_and_one_that_only_lands_have_a_ring_each_of_their_whole_budget(way: Way) -> None:
    made = world(way=way, rings=("sending", "landing"))
    read = made.read()
    assert made.finish(read) == [State.DONE]
    assert made.right
    assert made.target.carried == {way: 1}
    assert made.target.release(read)
    assert made.all_back()
    usual = world(way=way)
    assert (made.source.landing.slots, made.target.gathering.free) == (0, 0)
    assert made.source.gathering.free == made.target.landing.slots == 2 * usual.target.landing.slots


def test_an_end_without_a_ring_to_send_from_makes_no_offer_and_hears_nobody(caplog: pytest.LogCaptureFixture) -> None:
    made = world(rings=("landing", "both"))
    assert made.source.metadata() == made.source._wire.metadata()
    with caplog.at_level("INFO", "kvferry.strategy"):
        prepared = made.prepare()
        read = made.target.read(prepared, made.tiles)
    assert "cannot go packed (it does not gather: it has no ring to send from)" in caplog.text
    assert made.target.poll(read) is State.DONE
    assert made.target.carried == {"direct": 1}
    made.source.gathering.hear(pack(Free(made.source.gathering.offer.secret, (1,))))
    assert made.source.gathering.refused == 1
    assert "this end only reads, and has no ring to send from" in caplog.text


@pytest.mark.parametrize("way", ["packed", "staged"])
def test_an_end_without_a_ring_to_land_in_reads_by_descriptors_or_says_what_is_missing(
    way: Way, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(way=way, rings=("both", "sending"))
    with caplog.at_level("INFO", "kvferry.strategy"):
        prepared = made.prepare()
    assert f"cannot go {way} (this end only sends, and has no ring to land in" in caplog.text
    assert made.target.poll(made.target.read(prepared, made.tiles)) is State.DONE
    assert made.right
    assert made.target.carried == {"direct": 1}

    def refuse(*_: object) -> None:
        raise TransportError("more descriptors than there may be")

    monkeypatch.setattr(made.wire, "prepare", refuse)
    with pytest.raises(TransportError, match=f"more descriptors.*nor can it go {way}: this end only sends, and has no ring"):
        made.prepare()


def test_what_a_load_costs_follows_from_the_shorter_slots_and_the_smaller_ring() -> None:
    for budgets in ((LEAST, 1 << 23), (1 << 23, LEAST)):
        made = world(budgets=budgets)
        prepared = made.prepare()
        load = cost.through(prepared.detours["packed"].detour, made.tiles)
        assert load.staged > 2 * PAGE
        assert prepared.costs(made.tiles)["packed"] == cost.packed_s(load, RATES, PAGE, 2)


@given(st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_slots_of_either_ring_are_so_many_whole_pages_and_few_of_them_where_that_can_be(theirs: int, ours: int) -> None:
    offer = Offer(0, "dram", 0, theirs * PAGE, 1, 0, b"s" * 16)
    page = page_of(offer, ours * PAGE)
    assert page % PAGE == theirs * PAGE % page == ours * PAGE % page == 0
    if theirs == ours and theirs % 256 == 0:
        assert 128 <= theirs * PAGE // page < 256


CUTS = st.sampled_from([HOST_CUT, PINNED_CUT, DEVICE_CUT])
BUDGETS = st.integers(LEAST, 1 << 36)


@given(BUDGETS, BUDGETS, CUTS, CUTS)
def test_slots_of_any_two_ends_are_read_by_few_pages(theirs: int, ours: int, cut: Cut, other: Cut) -> None:
    one, two = sized(theirs, cut, "sending").slot, sized(ours, other, "landing").slot
    assert min(one, two) // page_of(Offer(0, "dram", 0, one, 1, 0, b"s" * 16), two) < 256


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(TransportError, match="give 65,536 at least"):
        host_staging(LEAST - 1)


@MAPS
def test_64_loads_at_once_through_a_ring_that_is_smaller_than_one_of_them(maps: bool) -> None:
    made = world(budgets=(LEAST, LEAST), maps=maps)
    prepared = made.prepare()
    assert Binder(made.plan).bind(made.case.request).bytes > 2 * made.target.landing.slots * PAGE
    reads = [made.read(prepared) for _ in range(64)]
    assert made.finish(*reads) == [State.DONE] * 64
    assert made.right
    assert all(made.target.release(read) for read in reads)
    assert made.all_back()


@MAPS
def test_a_read_that_alone_is_asked_after_ends_though_others_hold_all_slots(maps: bool) -> None:
    made = world(budgets=(LEAST, LEAST), maps=maps)
    prepared = made.prepare()
    reads = [made.read(prepared) for _ in range(9)]
    last = reads[-1]
    for _ in range(500):
        made.turn([last])
    assert last.state is State.DONE


def ends_of(made: World, loads: Sequence[dict[tuple[int, int], Tiles]]) -> list[int]:
    """After how many rounds each of several loads is done that begin together; in each a slot carries one piece."""
    prepared = made.prepare()
    reads = [made.target.read(prepared, tiles) for tiles in loads]
    ends = [0] * len(reads)
    for number in range(1, 3000):
        made.source.notifications()
        for index, read in enumerate(reads):
            if not ends[index] and made.target.poll(read) is State.DONE:
                ends[index] = number
        if all(ends):
            break
    assert all(made.target.release(read) for read in reads)
    assert made.right
    assert made.all_back()
    return ends


def part_of(made: World, tiles: int) -> dict[tuple[int, int], Tiles]:
    """The first so many tiles of every grain."""
    columns = ("src_block", "src_tile", "dst_block", "dst_tile")
    return {key: Tiles(*(getattr(found, name)[:tiles] for name in columns)) for key, found in made.tiles.items()}


def test_loads_of_one_size_end_one_after_the_other_and_the_first_as_if_it_were_all_but_alone() -> None:
    alone, *_ = ends_of(world(budgets=(1 << 18, 1 << 17)), [world().tiles])
    made = world(budgets=(1 << 18, 1 << 17))
    assert made.target.landing.slots == 4
    ends = ends_of(made, [made.tiles] * 12)
    assert ends == sorted(ends)
    assert ends[0] <= alone * 4 / 3 + 1
    assert ends[5] <= ends[-1] * 0.6


def test_a_short_load_behind_long_ones_ends_long_before_them() -> None:
    made = world(budgets=(1 << 18, LEAST))
    *long, short = ends_of(made, [*[made.tiles] * 6, part_of(made, 1)])
    assert short < long[0] / 2


@pytest.mark.parametrize(("way", "maps"), ROUTES)
@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=24), pages=st.integers(4, 12), room=st.integers(4, 12))
def test_loads_of_any_sizes_all_end_however_few_slots_there_are(
    way: Way, maps: bool, sizes: list[int], pages: int, room: int
) -> None:
    """With one that is whole, since what is compared in the end is all of it."""
    made = world(way=way, maps=maps, budgets=(pages * PAGE, room * PAGE))
    ends = ends_of(made, [*(part_of(made, size) for size in sizes), made.tiles])
    assert all(ends)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 6), st.randoms(use_true_random=False))
def test_turns_leave_a_slot_to_those_behind_and_nobody_is_forgotten(sizes: list[int], slots: int, random: Random) -> None:
    """Pieces that end in any order, and loads that begin at any time."""
    coming = list(enumerate(sizes))
    left: dict[int, int] = {}
    held: dict[int, int] = {}
    flying: list[int] = []
    for _ in range(10 * (sum(sizes) + len(sizes))):
        if coming and random.random() < 0.3:
            index, size = coming.pop(0)
            left[index], held[index] = size, 0
        while len(flying) < slots and (waiting := [index for index in left if left[index]]):
            chosen = waiting[turn([(held[index], left[index]) for index in waiting], slots)]
            assert chosen == waiting[0] or held[waiting[0]] >= slots - 1 >= 1
            assert len(waiting) == 1 or slots == 1 or chosen != waiting[0] or held[chosen] < slots - 1
            left[chosen] -= 1
            held[chosen] += 1
            flying.append(chosen)
        if flying:
            held[flying.pop(random.randrange(len(flying)))] -= 1
    assert not coming
    assert not any(left.values())


def test_where_all_are_asked_after_in_turn_none_is_looked_at_by_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(budgets=(1 << 18, 1 << 17))
    prepared = made.prepare()
    reads = [made.read(prepared) for _ in range(40)]
    begun = 0

    def counting(*given: Any) -> Read:
        nonlocal begun
        begun += 1
        return InProcessTransport.read(made.wire, *given)

    monkeypatch.setattr(made.wire, "read", counting)
    for read in reads:
        made.target.poll(read)
    assert 1 <= begun <= made.target.landing.slots


def parts_of(made: World, cuts: Sequence[int]) -> list[dict[tuple[int, int], Tiles]]:
    """The tiles of every grain, cut at these places: some loads may have none of a grain."""
    columns = ("src_block", "src_tile", "dst_block", "dst_tile")
    bounds = [0, *sorted(cuts), 1 << 62]
    out = []
    for first, stop in pairwise(bounds):
        cut = {key: [getattr(found, name)[first:stop] for name in columns] for key, found in made.tiles.items()}
        out.append({key: Tiles(*found) for key, found in cut.items() if len(found[0])})
    return [tiles for tiles in out if tiles]


def ended(made: World, reads: Sequence[Read]) -> list[State]:
    states: list[State] = []
    for _ in range(500):
        made.source.notifications()
        states = [made.target.poll(read) for read in reads]
        if State.RUNNING not in states:
            break
    return states


@pytest.mark.parametrize(("way", "maps"), ROUTES)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 12), max_size=8), pages=st.sampled_from([4, 9, 40, 400]), random=st.randoms())
def test_loads_that_begin_together_bring_all_their_bytes_however_many_share_a_slot(
    way: Way, maps: bool, cuts: list[int], pages: int, random: Random
) -> None:
    made = world(way=way, maps=maps, budgets=(pages * PAGE, pages * PAGE))
    loads = parts_of(made, cuts)
    random.shuffle(loads)
    reads = list(made.target.read_together(made.prepare(), loads))
    assert ended(made, reads) == [State.DONE] * len(loads)
    assert made.right
    seen = [made.target.telemetry(read) for read in reads]
    sizes = [
        sum(size * len(tiles[key].src_block) for key, size in tile_bytes(made.plan).items() if key in tiles) for tiles in loads
    ]
    assert [found.bytes for found in seen] == sizes
    assert all(found.runs >= 0 for found in seen)
    assert made.target.carried == {way: len(loads)}
    random.shuffle(reads)
    assert all(made.target.release(read) for read in reads)
    assert made.all_back()


def tile_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes of one tile of every grain, by edge and grain."""
    return {
        (number, place): sum(run.length * prod(count for count, _, _ in run.repeats) for run in grain.runs)
        for number, edge in enumerate(plan.edges)
        for place, grain in enumerate(edge.grains)
    }


@MAPS
def test_loads_that_fit_a_slot_are_asked_for_and_gathered_once(maps: bool) -> None:
    made = world(maps=maps, budgets=(1 << 23, 1 << 23))
    loads = parts_of(made, [1, 2, 3])
    reads = list(made.target.read_together(made.prepare(), loads))
    made.source.notifications()
    assert len(loads) > 2
    assert len(made.source.gathering._orders) == 1
    assert ended(made, reads) == [State.DONE] * len(loads)
    total = made.target.telemetry(reads[0].read)
    assert sum(made.target.telemetry(read).runs for read in reads) == total.runs
    assert sum(made.target.telemetry(read).bytes for read in reads) == total.bytes
    assert sum(made.target.telemetry(read).wire_s for read in reads) == pytest.approx(total.wire_s)
    assert sum(made.target.telemetry(read).posting_s for read in reads) == pytest.approx(total.posting_s)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 20))
def test_loads_share_a_slot_in_their_order_as_long_as_it_holds_them(sizes: list[int], most: int) -> None:
    made = world()
    packed = made.prepare().detours["packed"]
    loads = [part_of(made, size) for size in sizes]
    room = most * cost.through(packed.detour, part_of(made, 1)).staged
    groups = list(_slotfuls(packed, loads, room))
    assert [id(tiles) for several in groups for tiles in several] == [id(tiles) for tiles in loads]
    held = [[cost.through(packed.detour, tiles).staged for tiles in several] for several in groups]
    assert all(sum(several) <= room or len(several) == 1 for several in held)
    assert all(sum(several) + following[0] > room for several, following in pairwise(held))


@MAPS
def test_loads_are_joined_only_if_they_cross_the_wire_in_a_moment(maps: bool) -> None:
    made = world(maps=maps, budgets=(1 << 23, 1 << 23))
    slow = replace(RATES, wire=replace(RATES.wire, byte_s=1.0))
    loads = parts_of(made, [1, 2])
    prepared = dataclasses.replace(made.prepare(), rates=slow)
    reads = list(made.target.read_together(prepared, loads))
    assert {type(read) for read in reads} == {SharedRead if maps else DetouredRead}


def test_nothing_is_read_together_of_a_peer_that_was_forgotten() -> None:
    made = world(maps=True, budgets=(1 << 23, 1 << 23))
    prepared, loads = made.prepare(), parts_of(made, [1, 2])
    made.target.forget(made.source.name)
    with pytest.raises(TransportError, match="is not connected"):
        list(made.target.read_together(prepared, loads))


@MAPS
def test_a_load_that_is_given_up_is_held_while_others_want_what_is_read_with_it(maps: bool) -> None:
    made = world(maps=maps, budgets=(1 << 23, 1 << 23))
    one, *others = list(made.target.read_together(made.prepare(), parts_of(made, [1, 2])))
    assert not made.target.release(one)
    assert ended(made, others) == [State.DONE] * len(others)
    assert made.target.release(one)
    assert all(made.target.release(read) for read in others)
    assert made.right
    assert made.all_back()


@MAPS
def test_loads_that_are_all_given_up_end_what_is_read_for_them(maps: bool) -> None:
    made = world(maps=maps, budgets=(1 << 23, 1 << 23))
    reads = list(made.target.read_together(made.prepare(), parts_of(made, [1, 2])))
    assert [made.target.release(read) for read in reads] == [*[False] * (len(reads) - 1), True]
    assert all(made.target.release(read) for read in reads)
    assert {made.target.poll(read) for read in reads} == {State.FAILED}
    assert made.untouched
    assert made.all_back()


@MAPS
def test_loads_that_are_read_together_fail_together_and_hold_their_places_until_copies_end(maps: bool) -> None:
    made = world(maps=maps, budgets=(1 << 23, 1 << 23))
    prepared = made.prepare()
    reads = list(made.target.read_together(prepared, parts_of(made, [1, 2])))
    made.scatterer.late = True
    for _ in range(20):
        made.source.notifications()
        states = {made.target.poll(read) for read in reads}
    assert states == {State.RUNNING}
    made.target.forget(made.source.name)
    assert {made.target.poll(read) for read in reads} == {State.FAILED}
    assert all("it was forgotten here" in read.error for read in reads)
    assert not any(made.target.release(read) for read in reads)
    for ticket in made.scatterer.tickets:
        ticket.done = True
    assert all(made.target.release(read) for read in reads)


def test_of_many_that_are_polled_in_turn_one_gives_the_transport_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(maps=True, budgets=(LEAST, LEAST))
    prepared = made.prepare()
    reads = [made.read(prepared) for _ in range(20)]
    turns: list[int] = []
    notifications = made.wire.notifications
    monkeypatch.setattr(made.wire, "notifications", lambda: (turns.append(1), notifications())[1])
    for number in range(1, 6):
        for read in reads:
            made.target.poll(read)
        assert number <= len(turns) <= number + 1
    turns.clear()
    for _ in range(3):
        made.target.poll(reads[7])
    assert len(turns) == 3


def test_loads_that_wait_for_a_slot_are_not_gone_through_by_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(maps=True, budgets=(LEAST, LEAST))
    prepared = made.prepare()
    reads = [made.read(prepared) for _ in range(40)]
    flying = sum(bool(read.flights) for read in reads)
    assert 0 < flying < 5
    advanced: list[DetouredRead] = []
    fetch = made.target.landing._fetch
    monkeypatch.setattr(made.target.landing, "_fetch", lambda read, source: (advanced.append(read), fetch(read, source))[1])
    for read in reads:
        made.target.poll(read)
    assert all(read.flights for read in advanced)
    assert len(advanced) <= 4 * flying


@MAPS
def test_a_word_is_set_when_the_gather_is_complete_and_not_before(maps: bool) -> None:
    made = world(maps=maps)
    made.gatherer.late = True
    read = made.read()
    made.turn([read], 5)
    assert not made.source.gathering._words.any()
    assert made.untouched
    made.gatherer.late = False
    for ticket in made.gatherer.tickets:
        ticket.done = True
    assert made.finish(read) == [State.DONE]
    assert made.right


def said_by(made: World, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], list[int]]:
    """What the consumer tells others, and how many bytes each of its reads is of."""
    told: list[bytes] = []
    sizes: list[int] = []

    def notify(peer: str, message: bytes) -> None:
        told.append(message)
        InProcessTransport.notify(made.wire, peer, message)

    def read(*given: Any) -> Read:
        found = InProcessTransport.read(made.wire, *given)
        sizes.append(int(found.runs[2].sum()))
        return found

    monkeypatch.setattr(made.wire, "notify", notify)
    monkeypatch.setattr(made.wire, "read", read)
    return told, sizes


@pytest.mark.parametrize(
    ("shortest", "together"), [(PAGE, [1, 1, 1, 1]), (2 * PAGE, [2, 2]), (3 * PAGE, [3, 1]), (8 * PAGE, [4])]
)
def test_pieces_that_begin_together_are_asked_for_by_one_message_and_short_ones_read_by_one_read(
    shortest: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(budgets=(1 << 18, 1 << 17))
    landing = made.target.landing
    landing.staging = dataclasses.replace(landing.staging, cut=Cut(shortest, PAGE, 4))
    prepared = made.prepare()
    made.source.notifications()
    told, sizes = said_by(made, monkeypatch)
    read = made.read(prepared)
    flights = list(read.flights)
    assert (len(flights), len(told)) == (4, 1)
    made.turn([read])
    assert [size // PAGE for size in sizes if size >= PAGE] == together
    assert made.finish(read) == [State.DONE]
    assert made.right
    assert made.target.release(read)
    assert made.all_back()


def test_of_pieces_that_are_read_together_only_those_are_asked_for_again_whose_slot_was_given_away() -> None:
    made = world(budgets=(1 << 18, 1 << 17), wire=Ordered)
    wire = made.wire
    assert isinstance(wire, Ordered)
    read = made.read(made.prepare())
    made.source.notifications()
    wire.slots_land = False
    made.target.poll(read)
    assert {flight.stage.value for flight in read.flights} == {"reading"}
    lost, *kept = read.flights
    made.source.gathering._words[lost.there] = 1
    before = lost.ticket
    wire.slots_land = True
    made.target.poll(read)
    assert lost.ticket != before
    assert not set(kept) & set(read.flights)
    made.source.gathering._words[lost.there] = before
    assert made.finish(read) == [State.DONE]
    assert made.right


def test_pieces_that_were_read_together_keep_their_slots_until_nothing_can_land_in_any() -> None:
    made = world(budgets=(1 << 18, 1 << 17))
    prepared = made.prepare()
    made.wire.script({2: [LateLanding(releases=6)]})
    read = made.read(prepared)
    made.source.notifications()
    assert made.target.poll(read) is State.FAILED
    assert made.target.release(read)
    assert made.target.landing.free == 0
    assert made.untouched
    for _ in range(8):
        made.target.notifications()
    assert made.all_back()


def test_a_producer_that_cannot_be_asked_fails_the_load_and_not_the_one_that_was_asked_after() -> None:
    made = world(rings=("sending", "landing"), budgets=(1 << 18, LEAST))
    prepared = made.prepare()
    first, second = made.read(prepared), made.read(prepared)
    made.turn([first], 2)
    other = Scattered(
        InProcessTransport("q", made.harbour, clock=made.clock), host_staging(1 << 17), LateMover(), forced(), made.clock
    )
    other.register(made.there.storages)
    third = made.target.read(made.target.prepare(made.plan, 0, made.target.connect(other.metadata())), made.tiles)
    assert isinstance(third, DetouredRead)
    made.harbour.kill(other.name)
    assert made.finish(first, second) == [State.DONE] * 2
    made.target.poll(third)
    assert third.state is State.FAILED
    assert all(made.target.release(read) for read in (first, second, third))
    assert made.all_back()


@MAPS
def test_a_producer_expects_for_a_moment_that_it_is_asked_again(maps: bool) -> None:
    made = world(maps=maps)
    assert not made.source.hurried
    read = made.read()
    assert made.finish(read) == [State.DONE]
    made.source.notifications()
    gathering = made.source.gathering
    assert gathering.free == len(gathering._words)
    assert made.source.hurried
    made.clock.now += AWAKE_S / 2
    assert made.source.hurried
    made.clock.now += AWAKE_S
    assert not made.source.hurried


@MAPS
def test_a_gather_that_moved_too_little_is_never_offered(maps: bool) -> None:
    made = world(timeout_s=5.0, maps=maps)
    made.gatherer.short = 1
    read = made.read()
    made.turn([read], 5)
    assert not made.source.gathering._words.any()
    made.clock.now += 6
    assert made.turn([read]) == [State.FAILED]
    assert "it has not gathered" in read.error
    assert made.target.release(read)
    assert made.untouched


@MAPS
def test_a_scatter_that_moved_too_little_is_no_load(maps: bool) -> None:
    made = world(maps=maps)
    made.scatterer.short = 1
    read = made.read(notification=b"never")
    assert made.finish(read) == [State.FAILED]
    assert "were copied; report this" in read.error
    assert made.source.notifications() == []
    assert made.target.release(read)
    assert made.all_back()


@MAPS
def test_a_consumer_that_dies_holding_slots_holds_none_when_its_time_is_up(maps: bool) -> None:
    made = world(maps=maps)
    other = made.another()
    dead = other.read(made.prepare(other), made.tiles)
    made.source.notifications()
    assert made.source.gathering.free == 0
    assert made.source.gathering._words.all()
    made.harbour.kill(other.name)
    read = made.read()
    made.turn([read], 5)
    assert read.state is State.RUNNING
    made.clock.now += SLOT_S
    made.source.notifications()
    assert made.finish(read) == [State.DONE]
    assert made.right
    made.clock.now += SLOT_S
    assert made.all_back()
    assert dead.state is State.RUNNING


def test_a_producer_that_dies_in_the_middle_of_a_gather_fails_the_read() -> None:
    made = world()
    made.gatherer.late = True
    read = made.read()
    made.turn([read], 2)
    made.harbour.kill(made.source.name)
    assert made.target.poll(read) is State.FAILED
    assert "died" in read.error
    assert made.untouched
    assert made.target.release(read)
    assert made.target.landing.free == made.target.landing.slots


def test_a_late_read_of_a_slot_that_was_given_to_another_is_not_accepted() -> None:
    """The bytes are fetched after the slot's time was up and another's bytes are in it; the word says so, and the piece is
    asked for again."""
    made = world(dense_case(layers=1, blocks=8))
    prepared = made.prepare()
    other = made.another()
    theirs = made.prepare(other)
    made.wire.script({2: [Delay(polls=3)]})
    read = made.read(prepared)
    made.source.notifications()
    made.target.poll(read)
    assert [flight.stage.value for flight in read.flights] == ["reading"]
    old, slot = read.flights[0].ticket, read.flights[0].there
    made.clock.now += SLOT_S + 0.1
    made.source.notifications()
    intruders = taken_by(made, other, theirs)
    assert made.source.gathering._words[slot] not in (0, old)
    for _ in range(4):
        made.target.poll(read)
    assert read.state is State.RUNNING
    assert read.flights[0].ticket != old
    assert made.untouched
    for intruder in intruders:
        other.release(intruder)
    assert made.finish(read) == [State.DONE]
    assert made.right


@pytest.mark.parametrize("told", ["before the bytes landed", "after the bytes landed"])
def test_a_board_that_was_read_before_a_slots_bytes_landed_says_nothing_of_them(told: str) -> None:
    """Another read has the board looked at while a slot's bytes are on the wire: its ticket is still there. Then the slot is
    another's, whose bytes are what lands. Whenever that look is told of, only one that began later counts."""
    made = world(dense_case(layers=1, blocks=8), wire=Ordered)
    wire = made.wire
    assert isinstance(wire, Ordered)
    prepared = made.prepare()
    read = made.read(prepared)
    made.source.notifications()
    made.gatherer.late = True
    beside = made.read(prepared)
    made.source.notifications()
    wire.slots_land = False
    made.target.poll(read)
    flight = read.flights[0]
    assert (flight.stage.value, beside.flights[0].stage.value) == ("reading", "asked")
    old, slot, looks = flight.ticket, flight.there, flight_looks(read)
    wire.boards_are_told = told == "before the bytes landed"
    made.target.poll(beside)
    begun, seen = flight_looks(read)
    assert begun > looks[0]
    assert (seen == begun) is wire.boards_are_told
    wire.boards_are_told = False
    made.clock.now += SLOT_S + 0.1
    for ticket in made.gatherer.tickets:
        ticket.done = True
    made.gatherer.late = False
    made.source.notifications()
    other = made.another()
    theirs = made.prepare(other)
    intruders = taken_by(made, other, theirs)
    assert made.source.gathering._words[slot] not in (0, old)
    wire.slots_land = True
    made.target.poll(read)
    assert flight.stage.value == "checking"
    assert made.untouched
    wire.boards_are_told = True
    made.target.poll(read)
    assert (flight.stage.value, flight.ticket != old) == ("asked", True)
    assert made.untouched
    for intruder in intruders:
        other.release(intruder)
    made.clock.now += AGAIN_S
    assert made.finish(read, beside) == [State.DONE] * 2
    assert made.right


def flight_looks(read: DetouredRead) -> tuple[int, int]:
    """Reads of the producer's board that were begun, and the last of them that was told of."""
    source = read.detoured.source
    assert source is not None
    return source.begun, source.seen


@MAPS
@pytest.mark.parametrize("heard", ["in time", "after its slot was taken back"])
def test_what_is_asked_for_again_is_found_under_another_word(maps: bool, heard: str) -> None:
    """Under the same one its slot could be taken back, given to another and gathered into anew, between two looks."""
    made = world(dense_case(layers=1, blocks=8), maps=maps)
    read = made.read(made.prepare())
    (flight,) = read.flights
    old, words, wire = flight.ticket, made.source.gathering._words, made.source._wire
    asked = reminded(made, read)
    assert flight.ticket != old
    on_its_way, wire._inbox = wire._inbox[asked:], wire._inbox[:asked]
    made.source.notifications()
    assert old in words
    made.target.poll(read)
    made.target.poll(read)
    assert (flight.stage.value, made.untouched) == ("asked", True)
    if heard != "in time":
        made.clock.now += SLOT_S + 0.1
        made.source.notifications()
        assert not words.any()
        flight.asked_at = made.clock.now
    wire._inbox += on_its_way
    made.source.notifications()
    assert flight.ticket in words
    assert old not in words
    assert made.finish(read) == [State.DONE]
    assert made.right
    assert made.source.gathering.gathered == read.moved * (1 if heard == "in time" else 2)
    assert made.all_back()


def reminded(made: World, read: DetouredRead) -> int:
    """A producer that is not heard is asked again; returns what it has been told before."""
    before = len(made.source._wire._inbox)
    made.clock.now += AGAIN_S + 0.1
    for _ in range(3):
        made.target.poll(read)
    assert len(made.source._wire._inbox) > before
    return before


@MAPS
@pytest.mark.parametrize("period", [AGAIN_S / 2, AGAIN_S + 0.1, 4.0, SLOT_S - 0.1])
def test_who_looks_rarely_finds_what_is_there_before_it_asks_again(maps: bool, period: float) -> None:
    made = world(dense_case(layers=1, blocks=8), maps=maps)
    read = made.read(made.prepare())
    (flight,) = read.flights
    old = flight.ticket
    for _ in range(3):
        made.source.notifications()
        made.clock.now += period
        made.source.notifications()
        made.target.poll(read)
        if read.state is not State.RUNNING:
            break
    assert read.state is State.DONE
    assert made.right
    assert (flight.ticket, flight.tries) == (old, 1)


@pytest.mark.parametrize("gathered", ["late", "short"])
def test_asking_again_sets_no_word_of_what_has_not_been_gathered(gathered: str) -> None:
    made = world(dense_case(layers=1, blocks=8))
    made.gatherer.late, made.gatherer.short = gathered == "late", int(gathered == "short")
    read = made.read(made.prepare())
    made.source.notifications()
    reminded(made, read)
    made.source.notifications()
    assert not made.source.gathering._words.any()


def test_what_is_asked_for_again_keeps_its_place_and_earlier_words_of_it_are_not_heard() -> None:
    made = world(dense_case(layers=1, blocks=8))
    prepared, queue = made.prepare(), made.source.gathering._queue
    other = made.another()
    intruders = taken_by(made, other, made.prepare(other))
    reads = [made.read(prepared) for _ in range(2)]
    made.source.notifications()
    first = [order.ask for order in queue]
    assert len(first) == 2
    reminded(made, reads[1])
    made.source.notifications()
    for _ in range(3):
        made.target.poll(reads[0])
    made.source.notifications()
    assert [order.ask.ticket for order in queue] == [ask.ticket + AGAIN for ask in first]
    made.wire.notify(reads[0].peer, pack(first[0]))
    made.source.notifications()
    assert [order.ask.ticket for order in queue] == [ask.ticket + AGAIN for ask in first]
    for intruder in intruders:
        other.release(intruder)
    assert made.finish(*reads) == [State.DONE] * 2
    assert made.right
    assert made.all_back()


def test_slots_that_are_always_taken_away_fail_the_read_and_say_what_helps() -> None:
    made = world(dense_case(layers=1, blocks=8))
    read = made.read()
    for _ in range(200):
        made.source.notifications()
        if read.flights and read.flights[0].stage.value == "asked":
            made.wire.script({1: [Delay(polls=1)]})
        made.target.poll(read)
        if read.flights and read.flights[0].stage.value == "reading":
            made.clock.now += SLOT_S + 0.1
            made.source.notifications()
        if read.state is State.FAILED:
            break
    assert "give the producer more staging_bytes" in read.error
    assert made.untouched
    assert made.target.release(read)
    assert made.all_back()


@MAPS
def test_a_gather_that_never_happens_fails_the_read_and_gives_its_slots_back(maps: bool) -> None:
    made = world(timeout_s=3.0, maps=maps)
    read = made.read()
    for _ in range(10):
        made.clock.now += 0.5
        made.target.poll(read)
    assert read.state is State.FAILED
    assert "it has not gathered" in read.error
    assert "for 3 s: it is stopped, overloaded or unreachable" in read.error
    assert made.target.release(read)
    assert made.untouched
    assert made.all_back()


@MAPS
def test_a_producer_that_has_forgotten_the_plan_is_told_it_again(maps: bool) -> None:
    made = world(maps=maps)
    prepared = made.prepare()
    made.source.notifications()
    made.source.gathering._plans.clear()
    read = made.read(prepared)
    made.turn([read], 3)
    assert read.state is State.RUNNING
    made.clock.now += AGAIN_S + 0.1
    assert made.finish(read) == [State.DONE]
    assert made.right


def test_bytes_that_land_late_land_in_a_slot_that_nobody_else_has() -> None:
    made = world(dense_case(layers=1, blocks=8))
    prepared = made.prepare()
    made.wire.script({2: [LateLanding(releases=3)]})
    read = made.read(prepared, b"never")
    made.source.notifications()
    assert made.target.poll(read) is State.FAILED
    assert made.target.release(read)
    assert made.target.landing.free == made.target.landing.slots - 1
    assert made.untouched
    for _ in range(4):
        made.target.notifications()
    assert made.source.notifications() == []
    assert made.all_back()


@MAPS
def test_a_destination_is_held_while_its_own_copies_run(maps: bool) -> None:
    made = world(dense_case(layers=1, blocks=8), maps=maps)
    made.scatterer.late = True
    read = made.read()
    made.turn([read], 3)
    assert [flight.stage.value for flight in read.flights] == ["scattering"]
    assert not made.target.release(read)
    assert read.state is State.FAILED
    made.scatterer.tickets[0].done = True
    assert made.target.release(read)
    assert made.all_back()


@MAPS
def test_a_forgotten_peer_fails_its_reads_and_is_read_again_after_connecting(maps: bool) -> None:
    made = world(maps=maps)
    read = made.read()
    made.target.forget(read.peer)
    assert made.target.poll(read) is State.FAILED
    assert "forgotten here" in read.error
    assert made.target.release(read)
    again = made.read()
    assert made.finish(again) == [State.DONE]
    assert made.right
    made.clock.now += SLOT_S
    assert made.all_back()


def spoilt(message: Introduction, secret: bytes, change: str) -> bytes:
    plan = decode(message.plan, Plan)
    source, staging, edge = plan.sources[0], plan.consumer, plan.edges[0]
    run = edge.grains[0].runs[0]

    def with_run(**fields: int | tuple[tuple[int, int, int], ...]) -> Plan:
        grain = replace(edge.grains[0], runs=(replace(run, **fields),))
        return replace(plan, edges=(replace(edge, grains=(grain,)), *plan.edges[1:]))

    moved = {
        "another address": lambda: replace(
            plan, sources=(replace(source, regions=tuple(replace(r, address=r.address + (1 << 20)) for r in source.regions)),)
        ),
        "a longer region": lambda: replace(
            plan, sources=(replace(source, regions=tuple(replace(r, length=r.length + (1 << 20)) for r in source.regions)),)
        ),
        "more blocks": lambda: replace(
            plan, sources=(replace(source, groups=tuple(replace(g, blocks=g.blocks * 1000) for g in source.groups)),)
        ),
        "a larger slot": lambda: replace(
            plan, consumer=replace(staging, regions=(replace(staging.regions[0], length=1 << 30),))
        ),
        "more room": lambda: replace(
            plan, consumer=replace(staging, groups=tuple(replace(g, blocks=g.blocks * 1000) for g in staging.groups))
        ),
        "a longer run": lambda: with_run(length=1 << 40),
        "a run elsewhere": lambda: with_run(src_region=99),
        "a run out of a slot": lambda: with_run(dst_offset=1 << 40),
        "another lane": lambda: with_run(src_lane=9999),
        "countless runs": lambda: with_run(repeats=((1 << 38, 1, 1), (1 << 38, 1, 1))),
        "no source": lambda: replace(plan, sources=()),
        "device memory": lambda: replace(
            plan, sources=(replace(source, regions=tuple(replace(r, memory="vram") for r in source.regions)),)
        ),
    }[change]()
    return pack(Introduction(secret, encode(moved)))


CHANGES = (
    "another address", "a longer region", "more blocks", "a larger slot", "more room", "a longer run", "a run elsewhere",
    "a run out of a slot", "another lane", "countless runs", "no source", "device memory",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_leads_elsewhere_is_not_prepared(change: str) -> None:
    made = world()
    detoured = made.prepare().detours["packed"]
    made.source.notifications()
    gathering = made.source.gathering
    known = dict(gathering._plans)
    assert len(known) == 1
    gathering.hear(spoilt(Introduction(gathering.offer.secret, detoured.plan), gathering.offer.secret, change))
    assert gathering._plans == known
    assert gathering.refused == 1


def test_blocks_and_tiles_that_are_not_there_are_not_gathered() -> None:
    made = world()
    detoured = made.prepare().detours["packed"]
    made.source.notifications()
    gathering, secret = made.source.gathering, made.source.gathering.offer.secret
    many, one = np.array([1 << 30], np.int32).tobytes(), np.array([0], np.int32).tobytes()
    below = np.array([-1], np.int32).tobytes()
    wrong = [
        [(0, 0, many, b"")], [(0, 0, below, b"")], [(0, 0, one, many)], [(0, 0, one, below)], [(0, 1 << 30, one, b"")],
        [(9999, 0, one, b"")], [(0, 0, one, b""), (0, 0, one, b"")], [(0, 0, b"123", b"")], [(0, 0, b"", b"")],
        [(0, 0, one, one + one)],
    ]  # fmt: skip
    for number, shares in enumerate(wrong, 1):
        gathering.hear(pack(Ask(secret, detoured.digest, number, tuple(shares))))
    gathering.step()
    assert not gathering._words.any()
    assert gathering.free == len(gathering._words)
    assert not gathering.busy


def test_nobody_without_the_secret_is_served() -> None:
    made = world()
    detoured = made.prepare().detours["packed"]
    gathering = made.source.gathering
    stranger = secrets.token_bytes(16)
    one = np.array([0], np.int32).tobytes()
    for message in (
        Introduction(stranger, detoured.plan),
        Ask(stranger, detoured.digest, 5, ((0, 0, one, b""),)),
        Asks(stranger, detoured.digest, ((6, ((0, 0, one, b""),)), (7, ((0, 0, one, b""),)))),
        Free(stranger, (5,)),
    ):
        gathering.hear(pack(message))
    gathering.step()
    assert gathering.refused == 4
    assert not gathering._plans
    assert not gathering.busy


@settings(max_examples=50)
@given(st.binary(max_size=80))
def test_garbage_changes_nothing(garbage: bytes) -> None:
    made = world(dense_case(layers=1, blocks=8))
    made.wire.notify(made.wire.connect(made.source._wire.metadata()), MARK + garbage)
    assert made.source.notifications() == []
    assert not made.source.gathering._plans
    assert not made.source.gathering.busy


def test_what_is_not_about_gathering_is_handed_on() -> None:
    made = world()
    made.target.notify(made.prepare().peer, b"ahoy")
    assert made.source.notifications() == [(made.target.name, b"ahoy")]


def test_words_are_read_where_they_stand_whatever_is_forced() -> None:
    made = world()
    theirs, ours = (Words(4, rank.manifest.identity) for rank in (made.there, made.here))
    made.source.register([theirs.storage])
    made.target.register([ours.storage])
    peer = made.target.connect(made.source.metadata())
    prepared = made.target.prepare(ours.plan(theirs.manifest), 0, peer)
    assert not isinstance(prepared, ScatteredPrepared)
    theirs.live(Lease(2, 77))
    read = made.target.read(prepared, Binder(ours.plan(theirs.manifest)).tiles(Request(1, {0: 2}, {0: 1})))
    assert made.target.poll(read) is State.DONE
    assert ours.landed(1) == 77
    assert not made.target.carried


@pytest.mark.parametrize("ucx", [{}, TCP], ids=["as UCX chooses", "TCP"])
def test_a_producer_process_that_is_killed_before_it_gathers_fails_the_read_and_its_slots_come_back(
    ucx: dict[str, str],
) -> None:
    wharf = ScatteredWharf(PeerProcess(), ucx)
    try:
        made = crossing(wharf, dense_case(blocks=256))
        transport = wharf.consumer(timeout_s=TIMEOUT_S)
        transport.register([storage for rank in made.here for storage in rank.storages])
        plan = made.plans[0]
        prepared = transport.prepare(plan, 0, transport.connect(made.metadata[0]))
        before = [buffer.copy() for buffer in made.here[0].buffers]
        wharf.stop()
        read = transport.read(prepared, Binder(plan).tiles(made.case.request), b"never")
        assert transport.poll(read) is State.RUNNING
        wharf.kill()
        assert finish(transport, read) is State.FAILED
        assert read.peer in read.error
        until(lambda: transport.release(read), "the release")
        assert all(np.array_equal(a, b) for a, b in zip(made.here[0].buffers, before, strict=True))
        transport.forget(read.peer)
        landing = wharf.staging[0].landing

        def all_back() -> bool:
            landing.tidy()
            return landing.free == landing.slots

        until(all_back, "the slots")
    finally:
        wharf.close()
        wharf.peer.close()


def test_a_consumer_process_that_vanishes_leaves_the_producer_serving_others() -> None:
    """Its transport ends without a word while it holds slots; the next consumer of the same producer is served."""
    wharf = ScatteredWharf(PeerProcess())
    try:
        made = crossing(wharf, model_case("synthetic-12", "tp=1", "tp=2"))
        for turn in range(2):
            transport = wharf.consumer()
            transport.register([storage for rank in made.here for storage in rank.storages])
            plan = made.plans[turn]
            prepared = transport.prepare(plan, 0, transport.connect(made.metadata[0]))
            read = transport.read(prepared, Binder(plan).tiles(made.case.request))
            if turn:
                assert finish(transport, read) is State.DONE
                assert np.array_equal(made.here[1].buffers[0], made.expected[1][0])
            transport.close()
    finally:
        wharf.close()
        wharf.peer.close()


@pytest.mark.parametrize("way", ["packed", "staged"])
def test_a_read_that_fails_unexpectedly_is_given_back_failed_and_nothing_of_it_is_written_later(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever read may have given the blocks away by then."""
    made = world(way=way, budgets=(1 << 18, LEAST))
    prepared = made.prepare()
    read = made.wire.read

    def broken(*args: Any, **named: Any) -> Read:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made.wire, "read", broken)
    first = made.read(prepared)
    made.turn([first], 3)
    assert first.state is State.FAILED
    assert "RuntimeError: out of memory" in first.error
    monkeypatch.setattr(made.wire, "read", read)
    assert made.target.release(first)
    assert made.untouched
    second = made.read(prepared)
    assert made.finish(second) == [State.DONE]
    assert first.moved == 0
    assert made.right
