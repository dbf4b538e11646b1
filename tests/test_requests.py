"""Requests and engines at their edges: what is refused, and who is told when not everybody is known."""

from __future__ import annotations

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
        ([1, 2, 3], [5, 5, 6], "names a block twice"),
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


def test_a_block_read_twice_from_the_producer_is_allowed():
    assert binder().bind(Request(8, {0: [1, 1]}, {0: [2, 3]})).bytes > 0


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
