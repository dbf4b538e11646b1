"""What stays in its region: sums of a peer's numbers against Python's integers, and messages whose sums would wrap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.bounds import end, holds, leaves
from kvferry.errors import TransportError
from kvferry.manifest import Identity, Region
from kvferry.manifest.codec import decode, encode
from kvferry.manifest.schema import FULL, MAX_BYTES, MAX_COUNT, Group, StatePaged
from kvferry.plan import Plan
from kvferry.plan.rows import PreparedRows, Rows
from kvferry.plan.schema import Edge, Grain, Lane, Need, Run, Side
from kvferry.strategy.gathering import MAX_HELD, Ask, Introduction, pack
from kvferry.strategy.moves import Moves
from kvferry.transport import Storage
from kvferry.transport.addresses import place
from test_strategy_packed import World, world

MOST = (1 << 63) - 1
numbers = st.one_of(st.integers(0, 40), st.integers(0, MOST), st.sampled_from([MAX_BYTES, MAX_COUNT, MOST, MOST - 1, 1 << 62]))
counts = st.one_of(st.integers(1, 9), st.integers(1, MAX_COUNT), st.just(MAX_COUNT))
offsets = st.one_of(st.integers(0, 99), st.integers(0, MAX_BYTES), st.just(MAX_BYTES))
lengths = st.one_of(st.integers(1, 99), st.integers(1, MAX_COUNT))


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers, numbers), min_size=1, max_size=6))
@example([(1 << 62, 1 << 62, 1, 0, MOST)])
@example([(8, 8, 1 << 32, 1 << 32, MOST), (8, 8, 2, 8, 24), (8, 8, 2, 9, 24), (8, 8, 1, MOST, 16), (25, 0, 0, 0, 24)])
def test_columns_leave_their_limits_exactly_where_whole_numbers_say_so(rows: list[tuple[int, int, int, int, int]]) -> None:
    columns = np.array(rows, np.int64).T
    said = [offset + length + max(count - 1, 0) * stride > limit for offset, length, count, stride, limit in rows]
    assert leaves(*columns).tolist() == said


@given(offsets, lengths, st.lists(st.tuples(counts, offsets), max_size=4), st.lists(st.tuples(counts, offsets), max_size=4))
def test_an_end_is_where_the_last_byte_of_all_steps_is(
    offset: int, length: int, steps: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    furthest = offset
    for count, stride in (*steps, *more):
        furthest += stride * count - stride
    assert end(offset, length, steps, more) == furthest + length


@given(offsets, lengths, offsets, lengths)
def test_a_storage_holds_what_begins_and_ends_in_it(at: int, length: int, inner: int, size: int) -> None:
    storage, region = Storage(at, length), Region("r", size, inner)
    assert holds(storage, region) == (inner >= at and inner + size <= at + length)
    assert not holds(Storage(at, length, "vram"), region)
    assert not holds(Storage(at, length, device=1), region)


def plan_of(run: Run, lanes: list[Lane], blocks: tuple[int, int], length: int) -> Plan:
    sides = [
        Side(Identity(name, "1", "m"), (Region(name, length),), (Group(0, StatePaged(), count, hashed=False),))
        for name, count in zip("pd", blocks, strict=True)
    ]
    need, edge = Need(FULL, 0, False, 0, ("layer",)), Edge(0, 0, 0, 0, (Grain(0, (run,)),))
    return Plan(sides[1], (sides[0],), tuple(lanes), (need,), (edge,), ())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One run, whose repeats are few enough to be spelled out, and lanes of any reach."""
    digits = st.lists(st.tuples(counts, offsets), max_size=2).map(tuple)
    repeats = tuple(draw(st.lists(st.tuples(st.integers(1, 4), offsets, offsets), max_size=2)))
    run = Run(0, draw(offsets), 0, draw(offsets), draw(st.integers(1, 64)), repeats, 0, 1)
    lanes = [Lane(draw(offsets), draw(digits)) for _ in range(2)]
    return plan_of(run, lanes, (draw(counts), draw(counts)), draw(offsets))


@given(plans())
@example(plan_of(Run(0, 1 << 41, 0, 0, 8, (), 0, 1), [Lane(8, (((1 << 23), 1 << 40),)), Lane(8, ())], (2, 1), 1 << 30))
@example(plan_of(Run(0, 0, 0, 1 << 41, 8, (), 1, 0), [Lane(8, (((1 << 23), 1 << 40),)), Lane(8, ())], (1, 2), 1 << 30))
def test_tables_are_made_of_plans_that_stay_in_their_regions_and_of_no_others(plan: Plan) -> None:
    run = plan.edges[0].grains[0].runs[0]
    inside = True
    for side, (start, lane, step) in enumerate(((run.src_offset, 0, 1), (run.dst_offset, 1, 2))):
        of = (plan.sources[0], plan.consumer)[side]
        far = start + run.length + sum((r[0] - 1) * r[step] for r in run.repeats)
        lane_of = plan.lanes[(run.src_lane, run.dst_lane)[lane]]
        far += (of.groups[0].blocks - 1) * lane_of.block_stride + sum((c - 1) * s for c, s in lane_of.digits)
        inside &= far <= of.regions[0].length
    if inside:
        assert len(Moves(plan, 0, lambda _: 0, lambda _: 0).pieces)
    else:
        with pytest.raises(TransportError, match="leave region 0"):
            Moves(plan, 0, lambda _: 0, lambda _: 0)


@given(st.tuples(offsets, lengths, offsets, counts), offsets)
@example((0, 8, 1 << 32, 1 << 32), 1 << 40)
@example((8, MAX_COUNT, MAX_BYTES, 1 << 13), MAX_BYTES)
def test_rows_become_addresses_only_inside_their_regions(row: tuple[int, int, int, int], room: int) -> None:
    offset, length, stride, count = row
    column = [np.array([number], np.int64) for number in (0, offset, length, stride, count)]
    region = Region("r", room, 1 << 20)
    rows = Rows(*column, count)
    if offset + (count - 1) * stride + length <= room:
        assert place(rows, [region], [Storage(1 << 20, room)], "it").address.tolist() == [(1 << 20) + offset]
    else:
        with pytest.raises(TransportError, match="leave region r"):
            place(rows, [region], [Storage(1 << 20, room)], "it")


@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_continue_each_other_nowhere_are_counted_before_they_are_made(side: int) -> None:
    """Tiles closer than a run is long lie in no row; a place for each of 2**40 would have been written down."""
    lanes = [Lane(8, ((1 << 40, 7),)), Lane(8, ())]
    plan = plan_of(Run(0, 0, 0, 0, 8, (), side, 1 - side), lanes, (1, 1), 1 << 50)
    with pytest.raises(TransportError, match=r"1,099,511,627,776 rows .* at most 4,194,304 are prepared"):
        PreparedRows(plan, 0)


def asked(made: World) -> tuple[bytes, bytes]:
    """The plan that a consumer introduced, and the secret that it knows."""
    detoured = made.prepare().detours["packed"]
    made.source.notifications()
    return detoured.plan, made.source.gathering.offer.secret


def with_lane(data: bytes, side: str, lane: Lane, offset: int) -> bytes:
    """The plan with its first run at `offset` and led by `lane` on one side."""
    plan = decode(data, Plan)
    edge = plan.edges[0]
    runs = (replace(edge.grains[0].runs[0], **{f"{side}_lane": len(plan.lanes), f"{side}_offset": offset}),)
    changed = replace(edge, grains=(replace(edge.grains[0], runs=runs),))
    return encode(replace(plan, lanes=(*plan.lanes, lane), edges=(changed, *plan.edges[1:])))


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_sum_that_wraps_makes_nothing_gather_or_write_elsewhere(side: str) -> None:
    made = world()
    plan, secret = asked(made)
    gathering, known = made.source.gathering, dict(made.source.gathering._plans)
    wrapping = Lane(0, ((1 << 23, 1 << 40),))
    assert 1 << 63 <= (1 << 41) + ((1 << 23) - 1 << 40) < 1 << 64
    data = with_lane(plan, side, wrapping, 1 << 41)
    gathering.hear(pack(Introduction(secret, data)))
    assert gathering._plans == known
    assert gathering.refused == 1


def test_a_group_that_is_said_twice_gives_no_more_room_than_was_checked() -> None:
    """Runs were checked against one of the two, asks against the other: a gather wrote behind its slot."""
    made = world()
    data, secret = asked(made)
    gathering, known = made.source.gathering, dict(made.source.gathering._plans)
    plan = decode(data, Plan)
    for name in ("consumer", "source"):
        side = plan.consumer if name == "consumer" else plan.sources[0]
        twice = replace(side, groups=(*(replace(g, blocks=1 << 20) for g in side.groups), *side.groups))
        changed = replace(plan, consumer=twice) if name == "consumer" else replace(plan, sources=(twice,))
        gathering.hear(pack(Introduction(secret, encode(changed))))
    assert gathering._plans == known
    assert gathering.refused == 2


def test_no_more_is_gathered_into_a_slot_than_it_holds_however_often_a_tile_is_asked_for() -> None:
    """Blocks without a stride lie on each other: there is room for any number of them, and each is copied."""
    made = world()
    data, secret = asked(made)
    gathering = made.source.gathering
    plan = decode(data, Plan)
    lanes = tuple(Lane(0, lane.digits) for lane in plan.lanes)
    groups = tuple(replace(g, blocks=1 << 30) for g in plan.consumer.groups)
    changed = encode(replace(plan, lanes=lanes, consumer=replace(plan.consumer, groups=groups)))
    gathering.hear(pack(Introduction(secret, changed)))
    assert gathering.refused == 0
    (digest,) = [key for key in gathering._plans if key != made.prepare().detours["packed"].digest]
    blocks = np.zeros(1 << 20, np.int32).tobytes()
    gathering.hear(pack(Ask(secret, digest, 1, ((0, 0, blocks, b""),))))
    gathering.step()
    assert not gathering.busy
    assert not gathering._words.any()


def test_runs_that_lie_on_each_other_are_no_plan_to_gather_by() -> None:
    """A run as long as a slot is cut into thousands of pieces; a thousand of them on one place would be millions."""
    made = world()
    data, secret = asked(made)
    gathering, known = made.source.gathering, dict(made.source.gathering._plans)
    plan = decode(data, Plan)
    edge = plan.edges[0]
    lane = len(plan.lanes)
    run = replace(edge.grains[0].runs[0], dst_offset=0, repeats=((1 << 20, 0, 0),), src_lane=lane, dst_lane=lane)
    changed = replace(edge, grains=(replace(edge.grains[0], runs=(run,)),))
    data = encode(replace(plan, lanes=(*plan.lanes, Lane(0, ())), edges=(changed,)))
    gathering.hear(pack(Introduction(secret, data)))
    assert gathering._plans == known
    assert gathering.refused == 1


def test_plans_are_held_by_their_tables_bytes_and_not_only_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world()
    data, secret = asked(made)
    gathering = made.source.gathering
    (first,) = gathering._plans.values()
    monkeypatch.setattr("kvferry.strategy.gathering.MAX_HELD", 3 * len(first.moves.pieces))
    plan = decode(data, Plan)
    for number in range(8):
        other = replace(plan, tells=(plan.consumer.identity.rank,) * number)
        gathering.hear(pack(Introduction(secret, encode(other))))
    assert gathering.refused == 0
    assert 1 <= len(gathering._plans) <= 3
    assert MAX_HELD >= 1 << 20
