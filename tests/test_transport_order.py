"""The order of tiles: the same bytes in any order, and never more descriptors than in the order they came in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrying import elements
from kvferry.models import Side, load_model, manifests
from kvferry.plan import Binder, Plan, Request, Tiles, make_plans
from kvferry.plan.rows import Numbers, PreparedRows
from kvferry.transport.order import ascending
from transport_suite import dense_case

MOST = 60
BLOCKS = 96
EACH = 4
"""Blocks that a group may have: as many as the longest request needs, and no other group's."""
UP = list(range(EACH))
BROKEN = [1, 0, 3, 2]


def plan_of(prefill: str, decode: str) -> Plan:
    shape = load_model("synthetic-12")
    there, here = (manifests(shape, Side.parse(text), name, blocks=BLOCKS) for text, name in ((prefill, "P"), (decode, "D")))
    return make_plans(here, there)[0]


PLANS = {
    "equal": plan_of("tp=1", "tp=1"),
    "head slices": plan_of("tp=1", "tp=2"),
    "token-major": plan_of("tp=1,layout=token", "tp=1"),
    "block-outermost": plan_of("tp=1,pool=block", "tp=1,pool=block"),
}


def descriptors(rows: PreparedRows, src: Numbers, dst: Numbers) -> int:
    """Runs after every run was joined, one by one, with the one before it where it follows it in its row on both sides."""
    (there, length), (here, _) = elements(rows.src), elements(rows.dst)
    row_there, row_here = (np.repeat(np.arange(len(side)), side.count).tolist() for side in (rows.src, rows.dst))
    found, end = 0, (-1, -1, -1, -1)
    for s, d in zip(src.tolist(), dst.tolist(), strict=True):
        found += (row_there[s], int(there[s]), row_here[d], int(here[d])) != end
        end = row_there[s], int(there[s] + length[s]), row_here[d], int(here[d] + length[s])
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@given(data=st.data())
def test_the_same_bytes_in_no_more_descriptors(plan, data):
    """Tables of any order, and tables in stretches that ascend or descend, as engines make them."""
    tokens = data.draw(st.integers(1, MOST))
    tables = []
    for side in (plan.sources[0], plan.consumer):
        drawn = data.draw(st.one_of(st.permutations(UP), st.sampled_from([UP, UP[::-1], BROKEN])))
        free = {g.id: [EACH * place + block for block in drawn] for place, g in enumerate(side.groups)}
        tables.append({g.id: free[g.id][: -(-tokens // g.tokens)] if g.tokens else free[g.id][0] for g in side.groups})
    tiles = Binder(plan).tiles(Request(tokens, *tables))
    rows = PreparedRows(plan, 0)
    before, after = rows.indices(tiles), rows.indices(ascending(tiles))
    assert sorted(zip(*(side.tolist() for side in before), strict=True)) == sorted(
        zip(*(side.tolist() for side in after), strict=True)
    )
    assert descriptors(rows, *after) <= descriptors(rows, *before)


def descending(blocks: int) -> Request:
    down = list(range(blocks))[::-1]
    return Request(16 * blocks, {0: down}, {0: down})


def test_descending_blocks_of_whole_pages_are_one_descriptor_per_region():
    case = dense_case(layers=3, blocks=64)
    plan = make_plans(case.consumers, case.producers)[0]
    rows = PreparedRows(plan, 0)
    tiles = Binder(plan).tiles(descending(64))
    assert descriptors(rows, *rows.indices(tiles)) == 3 * 64
    assert descriptors(rows, *rows.indices(ascending(tiles))) == 3


def test_tiles_in_order_are_not_touched():
    case = dense_case(layers=3, blocks=64)
    tiles = Binder(make_plans(case.consumers, case.producers)[0]).tiles(case.request)
    assert all(found is tiles[key] for key, found in ascending(tiles).items())


def test_grains_that_share_their_tiles_go_on_sharing_them():
    down = np.arange(9)[::-1]
    shared = Tiles(down, np.zeros(9, int), down, np.zeros(9, int))
    found = ascending({(0, 0): shared, (1, 0): shared})
    assert found[0, 0] is found[1, 0]
    assert found[0, 0].src_block.tolist() == list(range(9))


def test_tiles_of_a_block_follow_each_other_here():
    block, tile = np.array([4, 4, 2, 2]), np.array([0, 1, 0, 1])
    found = ascending({(0, 0): Tiles(np.array([7, 8, 9, 6]), tile, block, tile)})[0, 0]
    assert list(zip(found.dst_block.tolist(), found.dst_tile.tolist(), found.src_block.tolist(), strict=True)) == [
        (2, 0, 9),
        (2, 1, 6),
        (4, 0, 7),
        (4, 1, 8),
    ]
