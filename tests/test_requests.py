"""Requests and engines at their edges: what is refused, and who is told when not everybody is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import BindError, ManifestError
from kvferry.manifest import (
    FULL,
    Attention,
    Chunk,
    GroupSpec,
    Identity,
    LatentAttention,
    LayerSpec,
    Layout,
    Manifest,
    Rank,
    Reach,
    Window,
    build_manifest,
    check_manifest,
)
from kvferry.plan import Binder, Request, make_plan, make_plans, routes

LAYER = Attention(heads=2, dim=2)


def ranks(engine: str, tp: int, kind: Attention | LatentAttention = LAYER, required: bool = True) -> list[Manifest]:
    names = (LayerSpec("a", kind), *(() if required else (LayerSpec("draft", kind, required=False),)))
    groups = (GroupSpec(0, names, 4),)
    return [build_manifest(Identity(engine, "1", "m", Rank(i, tp)), groups, Layout(block=4), 16) for i in range(tp)]


def binder() -> Binder:
    return Binder(make_plan(ranks("d", 1)[0], ranks("p", 1)))


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([1, 2, 3], [5, 5, 6], "the consumer's block table of group 0 names block 5 twice"),
        ([1.0, 2.0, 3.0], [4, 5, 6], "not a list of block ids"),
        (["1", "2", "3"], [4, 5, 6], "not a list of block ids"),
        ([[1, 2, 3]], [4, 5, 6], "not a list of block ids"),
        (np.array([1, 2, 2**64 - 1], np.uint64), [4, 5, 6], "outside"),
        ([1, 2, -2], [4, 5, 6], "outside"),
    ],
)
def test_a_table_that_is_not_one_of_distinct_blocks_is_refused(src, dst, words):
    with pytest.raises(BindError, match=words):
        binder().bind(Request(10, {0: src}, {0: dst}))


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (16, "outside"),
        (-2, "outside"),
        (1 << 70, "not a list of block ids"),
        (True, "not a list of block ids"),
        (1.0, "not a list of block ids"),
        (-1, "no block for tokens"),
    ],
)
def test_a_single_id_that_is_no_blocks_is_refused(one, words):
    with pytest.raises(BindError, match=words):
        binder().bind(Request(4, {0: 3}, {0: one}))


@pytest.mark.parametrize("one", [5, np.int64(5), np.array(5, np.uint8), [5], (5,), np.array([5], np.int16)])
def test_a_single_id_is_a_table_of_one(one):
    (copies,) = binder().bind(Request(4, {0: 3}, {0: one})).copies
    (wanted,) = binder().bind(Request(4, {0: [3, 7]}, {0: [5, 6]})).copies
    assert copies.dst_offset.tolist() == wanted.dst_offset.tolist() != []
    assert copies.src_offset.tolist() == wanted.src_offset.tolist()


@pytest.mark.parametrize(("tokens", "start"), [(-1, 0), (4, 8), (4.5, 0), (8, -4), ("8", 0)])
def test_a_token_range_that_is_none_is_refused(tokens, start):
    with pytest.raises(BindError, match="range"):
        binder().bind(Request(tokens, {0: [1, 2]}, {0: [1, 2]}, start))


@pytest.mark.parametrize("made", [list, np.array])
@pytest.mark.parametrize(("blocks", "at"), [(2, 1), (9, 7), (15, 3)])
def test_a_block_that_the_producer_names_for_two_places_is_refused(made, blocks, at):
    """It holds the tokens of one of them at most."""
    src = list(range(blocks))
    src[at - 1] = src[at]
    asked = Request(4 * blocks, {0: made(src)}, {0: list(range(blocks))})
    for use in (binder().bind, binder().load):
        with pytest.raises(BindError, match=f"the producer's block table of group 0 names block {at} twice"):
            use(asked)


def test_a_long_table_is_seen_to_name_a_block_twice_and_holes_as_often_as_it_likes():
    groups = (GroupSpec(0, (LayerSpec("a", replace(LAYER, reach=Window(8))),), 4, keeps=Window(8), hashed=False),)
    producer, consumer = (build_manifest(Identity(n, "1", "m"), groups, Layout(block=4), 5000) for n in "pd")
    bound, order = Binder(make_plan(consumer, [producer])), np.random.default_rng(1).permutation(5000)[:2000]
    holed = order.copy()
    holed[:1990] = -1
    for src in (order, order.tolist(), holed, holed.tolist()):
        assert bound.bind(Request(8000, {0: src}, {0: order})).bytes > 0
        twice = [*src[:1992], src[1999], *src[1993:]]
        for table in (twice, np.array(twice)):
            with pytest.raises(BindError, match=f"the producer's block table of group 0 names block {order[1999]} twice"):
                bound.bind(Request(8000, {0: table}, {0: order}))


def test_of_groups_that_overlay_each_other_none_names_a_block_twice_nor_one_of_the_others():
    """Groups of one pool have blocks with bytes in common, and take them from one list of free ones."""
    groups = tuple(GroupSpec(i, (LayerSpec(f"l{i}", LAYER),), 4) for i in range(2))
    producer, consumer = (build_manifest(Identity(n, "1", "m"), groups, Layout(block=4), 16) for n in "pd")
    bound = Binder(make_plan(consumer, [producer]))
    fine = {0: [1, 2], 1: [3, 4]}
    assert bound.bind(Request(8, fine, fine)).bytes > 0
    for wrong, words in (
        ({0: [1, 1], 1: [3, 4]}, "group 0 names block 1 twice"),
        ({0: [1, 2], 1: [4, 2]}, "both name block 2"),
    ):
        for src, dst, side in ((wrong, fine, "producer"), (fine, wrong, "consumer")):
            with pytest.raises(BindError, match=f"the {side}'s block table.*{words}"):
                bound.bind(Request(8, src, dst))


def test_the_count_of_runs_is_known_without_expanding_them():
    request = Request(10, {0: [1, 3, 5]}, {0: [1, 3, 5]})
    assert binder().runs(request) >= len(binder().bind(request).copies[0]) > 0


def test_without_all_consumers_nobody_is_told():
    producers, consumers = ranks("p", 2), ranks("d", 2)
    assert [make_plan(c, producers).tells for c in consumers] == [(), ()]
    assert [p.tells for p in make_plans(consumers, producers)] == [(), ()]


def test_with_all_consumers_a_single_plan_tells_like_all_of_them():
    latent = LatentAttention(latent=2, rope=2)
    producers, consumers = ranks("p", 4, latent), ranks("d", 2, latent)
    together = [plan.tells for plan in make_plans(consumers, producers)]
    assert [make_plan(c, producers, consumers).tells for c in consumers] == together
    assert sum(map(len, together)) == 2


def test_no_consumers_means_no_plans_and_no_tellers():
    assert make_plans([], ranks("p", 2)) == ()
    assert [(r.readers, r.teller) for r in routes(ranks("p", 2), [])] == [((), None), ((), None)]


def test_a_layer_that_is_not_required_does_not_keep_blocks_from_being_found():
    plan = make_plan(ranks("d", 1, required=False)[0], ranks("p", 1))
    binding = Binder(plan).bind(Request(8, {0: [1, 2]}, {0: [1, 2]}))
    assert binding.fills.bytes > 0
    assert dict(binding.unhashable) == {}


@pytest.mark.parametrize(
    ("keeps", "reach", "covered"),
    [
        (FULL, Window(8), True),
        (FULL, FULL, True),
        (Window(8), Window(8), True),
        (Window(9), Window(8), True),
        (Window(7), Window(8), False),
        (Window(8), FULL, False),
        (Window(8), Chunk(8), True),
        (Window(7), Chunk(8), False),
        (Chunk(8), Chunk(4), True),
        (Chunk(8), Chunk(3), False),
        (Chunk(8), Window(4), False),
        (Chunk(8), Window(1), True),
        (Chunk(1), Window(2), False),
    ],
)
def test_a_layer_looks_back_no_further_than_its_table_keeps(keeps: Reach, reach: Reach, covered: bool):
    groups = (GroupSpec(0, (LayerSpec("a", Attention(2, 2, reach=reach)),), 4, keeps=keeps),)
    manifest = build_manifest(Identity("e", "1", "m"), groups, Layout(block=4), 4)
    if covered:
        check_manifest(manifest)
        assert all(keeps.first_needed(n) <= reach.first_needed(n) for n in range(40))
    else:
        with pytest.raises(ManifestError, match="a: looks back further"):
            check_manifest(manifest)
        assert any(keeps.first_needed(n) > reach.first_needed(n) for n in range(40))
