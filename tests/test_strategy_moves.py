"""A load's tables, carried out on plain memory: every byte where the plan says, none beside it, and no table of runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping, Sequence
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import kvferry.strategy.moves
import oracle
from drawn_moves import Choose, Drawn, Guarded, Key, drawn
from ferrying import manifests_of, place, request_of
from kvferry.errors import TransportError
from kvferry.manifest import Identity
from kvferry.manifest.schema import FULL, Group, Region, StatePaged
from kvferry.plan import Binder, Fleet, Plan, Tiles, make_plans
from kvferry.plan.schema import Edge, Grain, Lane, Need, Run, Side
from kvferry.strategy import HostMover
from kvferry.strategy.moves import COLUMNS, FIELDS, ROWS, UNITS, Bound, Form, Moves, joined
from test_transfer_properties import cases

DEPTH = settings().max_examples // 100

MOVER = HostMover()


def choosing(data: st.DataObject) -> Choose:
    return lambda options: data.draw(st.sampled_from(options))


def moved(moves: Moves, tiles: Mapping[Key, Tiles]) -> Bound:
    """A load carried out on this process's memory."""
    bound = moves.bind(tiles)
    ticket = MOVER.start(MOVER.prepare(moves), bound)
    assert ticket.done
    assert ticket.moved == bound.bytes
    return bound


def guarded(buffers: Sequence[np.ndarray], shifts: Sequence[int], seed: int) -> list[Guarded]:
    out = []
    for index, buffer in enumerate(buffers):
        out.append(Guarded(len(buffer), shifts[index % len(shifts)], (seed, index)))
        out[-1].bytes[:] = buffer
    return out


@settings(max_examples=100 * DEPTH)
@given(cases(), st.lists(st.integers(0, 16), min_size=1, max_size=4))
def test_every_byte_is_as_an_independent_oracle_says_wherever_regions_begin(case: oracle.Case, shifts: list[int]) -> None:
    note(repr(case))
    producers, consumers = manifests_of(case)
    world = oracle.build_world(case)
    there = {rank: guarded(memory.buffers, shifts, 1) for rank, memory in world.producers.items()}
    for plan in make_plans(consumers, Fleet(producers)):
        rank = place(plan.consumer.identity.rank)
        here = guarded(world.consumers[rank].buffers, shifts[::-1], 2)
        before = [region.whole.copy() for region in here]
        loading = Binder(plan).load(request_of(case))
        total = 0
        for number, source in enumerate(plan.sources):
            theirs = there[place(source.identity.rank)]
            moves = Moves(plan, number, lambda i, of=theirs: of[i].address, lambda i, of=here: of[i].address)
            bound = moved(moves, loading.tiles)
            total += bound.bytes
            for form in moves.forms:
                event(f"unit {form.unit}, {form.columns} columns")
        bases = np.array([region.address for region in here], np.int64)
        fills = loading.fills
        MOVER.zero(np.stack([bases[fills.region] + fills.offset, fills.length], axis=1))
        expected = world.expected[rank]
        assert list(oracle.differences([region.bytes for region in here], expected.memory.buffers)) == []
        assert total == loading.bytes == expected.moved
        for region, was in zip(here, before, strict=True):
            stop = region.start + len(region.bytes)
            assert np.array_equal(region.whole[: region.start], was[: region.start])
            assert np.array_equal(region.whole[stop:], was[stop:])


@settings(max_examples=80 * DEPTH)
@given(st.data())
def test_drawn_plans_are_carried_out_run_by_run_however_many_places_are_reckoned_at_a_time(data: st.DataObject) -> None:
    made = drawn(choosing(data))
    read: list[int] = []
    held = data.draw(st.sampled_from([1, 2, 500]))
    for source in range(len(made.plan.sources)):
        read.append(source)
        want = made.expected(*read)
        with patch.object(kvferry.strategy.moves, "_HELD", held):
            bound = moved(made.moves(source), made.tiles)
        assert bound.bytes == made.bytes(source)
        for region, bytes_there in zip(made.here, want, strict=True):
            assert np.array_equal(region.whole, bytes_there)


@settings(max_examples=40 * DEPTH)
@given(st.data())
def test_loads_that_are_made_together_are_what_they_are_one_by_one(data: st.DataObject) -> None:
    made = drawn(choosing(data))
    loads: list[dict[Key, Tiles]] = [{}, {}, {}]
    for key, tiles in made.tiles.items():
        columns = (tiles.src_block, tiles.src_tile, tiles.dst_block, tiles.dst_tile)
        first, second = sorted(data.draw(st.integers(0, len(tiles.src_block))) for _ in range(2))
        for load, part in zip(loads, (slice(0, first), slice(first, second), slice(second, None)), strict=True):
            if part.start != part.stop:
                load[key] = Tiles(*(column[part] for column in columns))
    moves = made.moves(0)
    bound = moved(moves, joined(loads))
    assert (bound.bytes, bound.runs) == tuple(map(sum, zip(*map(moves.size, loads), strict=True)))
    for region, want in zip(made.here, made.expected(0), strict=True):
        assert np.array_equal(region.whole, want)


@settings(max_examples=30 * DEPTH)
@given(st.data())
def test_tables_keep_what_kernels_rely_on(data: st.DataObject) -> None:
    made = drawn(choosing(data))
    for source in range(len(made.plan.sources)):
        moves = made.moves(source)
        bound = moves.bind(made.tiles)
        items = 0
        for launch in bound.launches:
            form, turn = launch.form, 0
            assert form in moves.forms
            assert form.rows == ROWS[form.columns]
            jobs = bound.table[launch.at : launch.at + launch.jobs * FIELDS].reshape(-1, FIELDS)
            for first, count, tiles, places, told in jobs.tolist():
                assert told == turn
                turn += -(-count * tiles // form.rows)
                items += count * tiles
                src, dst, length, *lanes = moves.pieces[first : first + count].T
                narrower = [n for n in COLUMNS if n < form.columns]
                assert (length <= form.columns).all()
                assert (length > max(narrower, default=0)).all()
                assert not (length * form.width % form.unit).any()
                for address, lane in zip((src, dst), lanes, strict=True):
                    at = bound.table[places + lane[:, None] * tiles + np.arange(tiles)]
                    assert not ((address[:, None] + at) % form.unit).any()
        assert bound.runs == runs_of(made, source)
        assert items >= bound.runs
        assert sum(launch.jobs for launch in bound.launches) * FIELDS <= bound.table.size


def runs_of(made: Drawn, source: int) -> int:
    total = 0
    for (index, level), tiles in made.tiles.items():
        edge = made.plan.edges[index]
        if edge.source == source:
            total += sum(prod(count for count, _, _ in run.repeats) for run in edge.grains[level].runs) * len(tiles.src_block)
    return total


def plain(runs: Sequence[Run], lanes: Sequence[Lane], blocks: int, length: int) -> Plan:
    """One source, one group, one grain, one region on either side."""
    group = Group(0, StatePaged(), blocks, hashed=False)
    source, here = (Side(Identity(n, "1", "m"), (Region(n, length),), (group,)) for n in "pd")
    edge = Edge(0, 0, 0, 0, (Grain(0, tuple(runs)),))
    return Plan(here, (source,), tuple(lanes), (Need(FULL, 0, False, 0, ("layer",)),), (edge,), ())


def tiles_at(src: Sequence[int], dst: Sequence[int]) -> dict[Key, Tiles]:
    zeros = np.zeros(len(src), np.int32)
    return {(0, 0): Tiles(np.array(src, np.int32), zeros, np.array(dst, np.int32), zeros)}


def made_of(plan: Plan, tiles: dict[Key, Tiles], shift: int = 0) -> Drawn:
    sides = [[Guarded(r.length, shift, (n, i)) for i, r in enumerate(side.regions)] for n, side in enumerate(_sides(plan))]
    return Drawn(plan, tiles, [sides[0]], sides[1])


def _sides(plan: Plan) -> tuple[Side, Side]:
    return plan.sources[0], plan.consumer


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_and_every_width_moves_its_bytes(unit, columns):
    """`columns` elements are the most of that width; one fewer, where that is aligned, is of the same width."""
    width = min(unit, 8)
    lengths = [columns * width, max(columns * width - unit, unit)]
    page = -(-sum(lengths) // 16) * 16 + unit
    page += -page % unit
    runs = [Run(0, 0, 0, 0, lengths[0], (), 0, 0), Run(0, lengths[0], 0, lengths[0], lengths[1], (), 0, 0)]
    blocks = 2 * ROWS[columns] + 3
    order = np.random.default_rng(1).permutation(blocks)
    plan = plain(runs, [Lane(page, ())], blocks, blocks * page)
    made = made_of(plan, tiles_at(range(blocks), order.tolist()), shift=0 if unit == 16 else unit)
    want = made.expected(0)
    moves = made.moves(0)
    assert moves.forms == (Form(unit, columns, ROWS[columns]),)
    assert moved(moves, made.tiles).bytes == blocks * sum(lengths)
    assert np.array_equal(made.here[0].whole, want[0])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("extra", [0, 1, 700])
def test_a_run_longer_than_a_piece_is_cut(unit, extra):
    most = min(unit, 8) * COLUMNS[-1]
    length = 3 * most + extra * unit
    page = length + (unit if unit < 16 else 0)
    plan = plain([Run(0, 0, 0, 0, length, (), 0, 0)], [Lane(page, ())], 3, 3 * page)
    made = made_of(plan, tiles_at([0, 1], [2, 0]))
    want = made.expected(0)
    moves = made.moves(0)
    assert len(moves.pieces) == 3 + bool(extra)
    assert moved(moves, made.tiles).runs == 2
    assert np.array_equal(made.here[0].whole, want[0])


@settings(max_examples=60 * DEPTH)
@given(
    st.sampled_from(UNITS), st.integers(1, 400), st.integers(-40, 40), st.sampled_from([{4: 2, 128: 1}, {8: 1, 256: 3}, ROWS])
)
def test_runs_are_cut_evenly_at_lines_into_as_few_pieces_as_can_be(unit, full, extra, other):
    """Beside a run that is not cut: neither takes from the other. Pieces differ by a line, which is 128 bytes, and the last one
    by what its line lacks."""
    rows = other or ROWS
    most = min(unit, 8) * max(rows)
    length = max(full * most + extra * unit, unit)
    page = 4 * length + (unit if unit < 16 else 0)
    runs = [Run(0, 0, 0, 0, length, (), 0, 0), Run(0, 2 * length, 0, 2 * length, unit, (), 0, 0)]
    moves = Moves(plain(runs, [Lane(page, ())], 1, page), 0, lambda i: 1 << 20, lambda i: 1 << 40, rows)
    (form,) = {form for form in moves.forms if form.columns == max(f.columns for f in moves.forms)}
    assert form.rows == rows[form.columns]
    src, dst, elements = moves.pieces[np.argsort(moves.pieces[:, 0])][:-1, :3].T
    assert np.array_equal(src - (1 << 20), dst - (1 << 40))
    size = elements * form.width
    assert src.tolist() == [(1 << 20) + int(size[:i].sum()) for i in range(len(size))]
    assert size.sum() == length
    assert len(size) == -(-length // most)
    assert size.min() > 0
    assert size.max() <= most
    if len(size) > 1:
        assert size.max() - size.min() < 2 * 128
        assert not (src % 128).any()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("over", [1, 2, 100])
def test_a_run_that_is_cut_needs_one_form(unit, over):
    """A rest of its own length would need another, which is another kernel and another launch."""
    length = min(unit, 8) * COLUMNS[-1] + over * unit
    page = length + (unit if unit < 16 else 0)
    plan = plain([Run(0, 0, 0, 0, length, (), 0, 0)], [Lane(page + -page % unit, ())], 1, page)
    assert Moves(plan, 0, lambda i: 0, lambda i: 0).forms == (Form(unit, COLUMNS[-1], ROWS[COLUMNS[-1]]),)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("length", [1, 4, 16, 24, 768, 1536])
@pytest.mark.parametrize(
    ("there", "here"),
    [(2, 1), (1, 2), (2, 2), (1, 1), (2.5, 1)],
    ids=["gather", "scatter", "apart", "close", "gather odd rows"],
)
def test_runs_that_lie_close_together_on_either_side_arrive(there, here, length, shift):
    """Odd rows: their distance is no multiple of their length."""
    src, dst = int(there * length) + (there != int(there)), int(here * length)
    run = Run(0, length, 0, 0, length, ((5, src, dst),), 0, 1)
    blocks = 7
    plan = plain([run], [Lane(5 * src, ()), Lane(5 * dst, ())], blocks, (5 * blocks + 2) * max(src, dst) + length)
    made = made_of(plan, tiles_at([6, 0, 3, 2], [1, 2, 3, 4]), shift)
    want = made.expected(0)
    moved(made.moves(0), made.tiles)
    assert np.array_equal(made.here[0].whole, want[0])


def test_copies_make_no_types_however_many_lengths_there_are():
    """ctypes makes one for every length that it is asked for, which takes longer than most copies."""
    plans = []
    for length in range(24, 56, 2):
        run = Run(0, 0, 0, 0, length, ((3, 3 * length, 2 * length),), 0, 1)
        plan = plain([run], [Lane(9 * length, ()), Lane(6 * length, ())], 4, 40 * length)
        plans.append(made_of(plan, tiles_at([3, 1], [0, 2])))
    moved(plans[0].moves(0), plans[0].tiles)
    gc.collect()
    gc.disable()
    try:
        before = len(ctypes.Array.__subclasses__())
        for made in plans:
            moved(made.moves(0), made.tiles)
        assert len(ctypes.Array.__subclasses__()) == before
    finally:
        gc.enable()


def test_a_load_uploads_its_tiles_and_never_its_runs():
    def size(runs: int, tiles: int) -> int:
        lanes = [Lane(1 << 20, ()), Lane(1 << 21, ())]
        found = [Run(0, 1024 * i, 0, 1024 * i, 512, (), 0, 1) for i in range(runs)]
        moves = Moves(plain(found, lanes, 64, 1 << 27), 0, lambda i: 1 << 30, lambda i: 1 << 31)
        bound = moves.bind(tiles_at(range(tiles), range(tiles)))
        assert bound.runs == runs * tiles
        assert bound.bytes == 512 * runs * tiles
        return int(bound.table.size)

    assert size(1, 50) == size(1000, 50) == FIELDS + 2 * 50
    assert size(1000, 25) == FIELDS + 2 * 25


def test_far_blocks_are_far_in_numbers_too_wide_for_their_ids():
    stride = (1 << 32) + 16
    plan = plain([Run(0, 0, 0, 0, 16, (), 0, 0)], [Lane(stride, ())], 8, 8 * stride)
    bound = Moves(plan, 0, lambda i: 0, lambda i: 0).bind(tiles_at([7], [5]))
    assert bound.table[FIELDS:].tolist() == [7 * stride, 5 * stride]


@pytest.mark.parametrize("side", [0, 1])
def test_runs_that_leave_their_region_are_refused_when_they_are_prepared(side):
    plan = plain([Run(0, 0, 0, 0, 16, (), 0, 0)], [Lane(16, ((2, 16),))], 4, 80)
    short = replace_region(plan, side, 79)
    Moves(plan, 0, lambda i: 0, lambda i: 0)
    with pytest.raises(TransportError, match=f"runs leave region 0 of the {('source', 'destination')[side]}"):
        Moves(short, 0, lambda i: 0, lambda i: 0)


def replace_region(plan: Plan, side: int, length: int) -> Plan:
    found = _sides(plan)[side]
    cut = replace(found, regions=(replace(found.regions[0], length=length),))
    return replace(plan, consumer=cut) if side else replace(plan, sources=(cut,))


@pytest.mark.parametrize("tiles", [{}, tiles_at([], [])], ids=["no tiles", "an empty list of tiles"])
def test_a_load_of_nothing_launches_nothing(tiles):
    plan = plain([Run(0, 0, 0, 0, 16, (), 0, 0)], [Lane(16, ())], 4, 64)
    made = made_of(plan, tiles)
    bound = moved(made.moves(0), tiles)
    assert (bound.bytes, bound.runs, bound.launches) == (0, 0, ())


@pytest.mark.parametrize("rows", [{64: 4}, {8: 2, 200: 1}])
def test_rows_that_hold_no_whole_lines_are_refused_in_words(rows):
    plan = plain([Run(0, 0, 0, 0, 4096, (), 0, 0)], [Lane(4096, ())], 4, 4 * 4096)
    with pytest.raises(ValueError, match="the widest must be a multiple of 128"):
        Moves(plan, 0, lambda i: 0, lambda i: 0, rows)


@pytest.mark.parametrize("change", [{"src_region": 1}, {"dst_region": 1}, {"src_lane": 1}, {"dst_lane": 1}])
def test_a_run_in_what_the_plan_does_not_have_is_refused_in_words(change):
    run = replace(Run(0, 0, 0, 0, 16, (), 0, 0), **change)
    with pytest.raises(TransportError, match="which the plan does not have"):
        Moves(plain([run], [Lane(16, ())], 4, 64), 0, lambda i: 0, lambda i: 0)
