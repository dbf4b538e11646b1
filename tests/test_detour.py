"""Plans by way of staging, carried out on plain memory: every byte arrives, whatever the room, and none beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import oracle
from drawn_moves import Drawn, Guarded, drawn, seeded
from ferrying import manifests_of, place, request_of
from kvferry.plan import Binder, Fleet, Plan, Tiles, make_plans
from kvferry.plan.detour import Detour, Pieces, packed, staged, tiles_here, tiles_there
from kvferry.strategy import HostMover
from kvferry.strategy.moves import Moves
from test_strategy_moves import choosing
from test_transfer_properties import cases

DEPTH = settings().max_examples // 100
MOVER = HostMover()
Detoured = Callable[[Plan, int, int], Detour]

WAYS: dict[str, Detoured] = {
    "packed": lambda plan, source, room: packed(plan, source, room, room // 4),
    "staged": lambda plan, source, room: staged(plan, source, room, room // 4, 64),
    "staged without gaps": lambda plan, source, room: staged(plan, source, room, room // 4, 0),
    "staged whole": lambda plan, source, room: staged(plan, source, room, room // 4, 1 << 40),
}


def carried(
    detour: Detour, tiles: dict[tuple[int, int], Tiles], room: int, start: int, there: list[Guarded], here: list[Guarded]
) -> tuple[int, int]:
    """A load through a room that begins `start` bytes into staging; bytes that arrived, and pieces."""
    whole = detour.there.consumer.regions[0].length
    staging = Guarded(max(whole, start + room), 0, (9,))
    before = staging.whole.copy()
    ways = (
        Moves(detour.there, 0, lambda i: there[i].address, lambda _: staging.address),
        Moves(detour.here, 0, lambda _: staging.address, lambda i: here[i].address),
    )
    own = {part.key for part in detour.parts}
    counts = {key: len(found.src_block) for key, found in tiles.items() if key in own}
    pieces = Pieces(detour.parts, counts)
    moved = number = 0
    while not pieces.over:
        piece = pieces.take(start, room)
        assert start == piece.start < piece.stop <= start + room
        into = ways[0].bind(tiles_there(piece, detour.parts, tiles))
        MOVER.start(MOVER.prepare(ways[0]), into)
        out = ways[1].bind(tiles_here(piece, detour.parts, tiles))
        moved += MOVER.start(MOVER.prepare(ways[1]), out).moved
        number += 1
    low, high = staging.start + start, staging.start + start + room
    assert np.array_equal(staging.whole[:low], before[:low])
    assert np.array_equal(staging.whole[high:], before[high:])
    return moved, number


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=20 * DEPTH)
@given(st.data(), st.sampled_from([4096, 65536, 1 << 20]))
def test_drawn_plans_arrive_through_any_room(way: str, data: st.DataObject, room: int) -> None:
    made: Drawn = drawn(choosing(data), data.draw(st.integers(0, 9)))
    read = []
    for source in range(len(made.plan.sources)):
        detour = WAYS[way](made.plan, source, room)
        moved, _ = carried(detour, dict(made.tiles), room, 0, made.sources[source], made.here)
        read.append(source)
        assert moved == made.bytes(source)
        for region, want in zip(made.here, made.expected(*read), strict=True):
            assert np.array_equal(region.whole, want)


@pytest.mark.parametrize("way", ["packed", "staged"])
@settings(max_examples=15 * DEPTH)
@given(cases(), st.sampled_from([1 << 12, 1 << 14, 1 << 20]), st.sampled_from([0, 1, 3]))
def test_every_byte_is_as_an_independent_oracle_says(way: str, case: oracle.Case, room: int, slot: int) -> None:
    """`staged` counts tiles from the beginning of all slots, so that any of them must do."""
    note(repr(case))
    producers, consumers = manifests_of(case)
    world = oracle.build_world(case)
    for plan in make_plans(consumers, Fleet(producers)):
        rank = place(plan.consumer.identity.rank)
        here = [_guarded(buffer, i, 2) for i, buffer in enumerate(world.consumers[rank].buffers)]
        loading = Binder(plan).load(request_of(case))
        total = 0
        for number, source in enumerate(plan.sources):
            there = [_guarded(buffer, i, 1) for i, buffer in enumerate(world.producers[place(source.identity.rank)].buffers)]
            if way == "packed":
                detour, start = packed(plan, number, room, room // 8), 0
            else:
                detour, start = staged(plan, number, 4 * room, room // 8, 256), slot * room
            total += carried(detour, dict(loading.tiles), room, start, there, here)[0]
        bases = np.array([region.address for region in here], np.int64)
        fills = loading.fills
        MOVER.zero(np.stack([bases[fills.region] + fills.offset, fills.length], axis=1))
        expected = world.expected[rank]
        assert list(oracle.differences([region.bytes for region in here], expected.memory.buffers)) == []
        assert total == loading.bytes == expected.moved


def test_a_tile_that_is_larger_than_the_room_is_cut_and_goes_in_pieces() -> None:
    made = next(found for found in (drawn(seeded(i), i) for i in range(99)) if found.bytes(0) > 4096)
    room = 256
    assert max(part.bytes for part in packed(made.plan, 0, 1 << 20, 1 << 18).parts) > room
    detour = packed(made.plan, 0, room, room // 4)
    moved, pieces = carried(detour, dict(made.tiles), room, 0, made.sources[0], made.here)
    assert moved == made.bytes(0)
    assert pieces >= moved // room > 1


def _guarded(buffer: np.ndarray, index: int, seed: int) -> Guarded:
    out = Guarded(len(buffer), 0, (seed, index))
    out.bytes[:] = buffer
    return out
