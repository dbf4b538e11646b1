"""Prepared rows: the same bytes as explicit copies, in numbers that do not grow with blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.manifest import (
    Attention,
    GroupSpec,
    Identity,
    LatentAttention,
    LayerSpec,
    Layout,
    Mamba2,
    Manifest,
    Rank,
    build_manifest,
)
from kvferry.plan import Binder, Binding, Plan, Request, make_plans
from kvferry.plan.rows import PreparedRows, Rows

ATTENTION = Attention(heads=4, dim=2)
LATENT = LatentAttention(latent=3, rope=1)
MAMBA = Mamba2(heads=4, dim=2, state=2, groups=2)


def side(engine: str, tp: int, layout: Layout, tokens: int, blocks: int = 16) -> tuple[Manifest, ...]:
    groups = (
        GroupSpec(0, tuple(LayerSpec(f"layers.{i}.attn", ATTENTION) for i in range(3)), tokens),
        GroupSpec(1, tuple(LayerSpec(f"layers.{i}.latent", LATENT) for i in range(2)), tokens),
        GroupSpec(2, tuple(LayerSpec(f"layers.{i}.mixer", MAMBA) for i in range(3))),
    )
    return tuple(build_manifest(Identity(engine, "1", "m", Rank(r, tp)), groups, layout, blocks) for r in range(tp))


def elements(rows: Rows, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.cumsum(rows.count)
    row = np.searchsorted(ends, index, side="right")
    return rows.region[row], rows.offset[row] + (index - (ends - rows.count)[row]) * rows.stride[row], rows.length[row]


def byte_pairs(regions: tuple[np.ndarray, ...]) -> set[tuple[int, int, int, int]]:
    src_region, src, dst_region, dst, length = (column.tolist() for column in regions)
    return {
        (a, b + i, c, d + i) for a, b, c, d, n in zip(src_region, src, dst_region, dst, length, strict=True) for i in range(n)
    }


def indexed(plan: Plan, source: int, binder: Binder, request: Request) -> set[tuple[int, int, int, int]]:
    prepared = PreparedRows(plan, source)
    src, dst = prepared.indices(binder.tiles(request))
    src_region, src_at, length = elements(prepared.src, src)
    dst_region, dst_at, other = elements(prepared.dst, dst)
    assert np.array_equal(length, other)
    assert len(np.unique(dst)) == len(dst)
    return byte_pairs((src_region, src_at, dst_region, dst_at, length))


def explicit(binding: Binding, source: int) -> set[tuple[int, int, int, int]]:
    found = binding.copies[source]
    return byte_pairs((found.src_region, found.src_offset, found.dst_region, found.dst_offset, found.length))


layouts = st.builds(
    Layout,
    block=st.just(2),
    kv=st.sampled_from(["packed", "paged", "separate", "transposed"]),
    order=st.sampled_from(["head", "token"]),
    conv=st.sampled_from(["ds", "sd"]),
    pool=st.sampled_from(["layer", "block"]),
    overlay=st.booleans(),
)


@settings(max_examples=60)
@given(
    layouts,
    layouts,
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([2, 4, 6]),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_indices_into_rows_copy_the_same_bytes_as_explicit_addresses(
    p_layout, d_layout, p_tp, d_tp, p_tokens, d_tokens, tokens, random
):
    producers = side("p", p_tp, p_layout, p_tokens)
    consumers = side("d", d_tp, d_layout, d_tokens)

    def tables(per_block: int) -> dict[int, list[int] | int]:
        ids, count = random.sample(range(16), 16), -(-tokens // per_block)
        return {0: ids[:count], 1: ids[count : 2 * count], 2: ids[-1]}

    request = Request(tokens, tables(p_tokens), tables(d_tokens))
    for plan in make_plans(consumers, producers):
        binder = Binder(plan)
        binding = binder.bind(request)
        assert binding.bytes > 0
        for source in range(len(plan.sources)):
            assert indexed(plan, source, binder, request) == explicit(binding, source)


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_do_not_multiply_with_blocks(tp):
    def count(blocks: int) -> tuple[int, int, int]:
        plan = make_plans(side("d", 1, Layout(block=2), 4, blocks), side("p", tp, Layout(block=2), 4, blocks))[0]
        prepared = PreparedRows(plan, 0)
        runs = sum(len(grain.runs) for edge in plan.edges for grain in edge.grains)
        return len(prepared.src), len(prepared.dst), runs

    assert count(1_000) == count(1_000_000)


def test_rows_stay_inside_their_regions():
    producers, consumers = side("p", 2, Layout(block=2, order="token"), 4), side("d", 1, Layout(block=2), 6)
    plan = make_plans(consumers, producers)[0]
    for source, manifest in enumerate(producers):
        prepared = PreparedRows(plan, source)
        for rows, owner in ((prepared.src, manifest), (prepared.dst, consumers[0])):
            lengths = np.array([r.length for r in owner.regions])
            assert (rows.offset + (rows.count - 1) * rows.stride + rows.length <= lengths[rows.region]).all()


def test_an_empty_request_has_no_indices():
    plan = make_plans(side("d", 1, Layout(block=2), 4), side("p", 1, Layout(block=2), 4))[0]
    src, dst = PreparedRows(plan, 0).indices(Binder(plan).tiles(Request(0, {}, {})))
    assert len(src) == len(dst) == 0


@pytest.mark.parametrize("blocks", [1 << 20, (1 << 31) - 1, 1 << 31, 1 << 33])
def test_the_last_blocks_of_a_large_pool_are_reached(blocks):
    apart = Layout(block=2, overlay=False)
    producers, consumers = side("p", 2, apart, 4, blocks), side("d", 1, apart, 4, blocks)
    plan = make_plans(consumers, producers)[0]
    src, dst = [blocks - 1, blocks - 3, blocks - 2], [blocks - 5, blocks - 1, blocks - 2]
    request = Request(12, {0: src, 1: src, 2: src[0]}, {0: dst, 1: dst, 2: dst[0]})
    binder = Binder(plan)
    binding = binder.bind(request)
    for source, manifest in enumerate(producers):
        pairs = explicit(binding, source)
        assert indexed(plan, source, binder, request) == pairs
        there, here = ([r.length // blocks for r in m.regions] for m in (manifest, consumers[0]))
        assert {(at // there[a], to // here[c]) for a, at, c, to in pairs} == set(zip(src, dst, strict=True))


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(0, 4), st.randoms(use_true_random=False))
def test_tiles_are_those_of_a_walk_over_tokens(tokens, held, random):
    apart = Layout(block=2, overlay=False)
    producers, consumers = side("p", 2, apart, 6), side("d", 1, apart, 4)
    plan = make_plans(consumers, producers)[0]
    src, dst = ([*random.sample(range(8), 8)] for _ in "pd")
    request = Request(tokens, {0: src, 1: src, 2: src[0]}, {0: dst, 1: dst, 2: dst[0]}, min(held, tokens // 4) * 4)
    binder = Binder(plan)
    walked: dict[int, list[tuple[int, int]]] = {}
    for (i, level), found in binder.tiles(request).items():
        edge = plan.edges[i]
        step = edge.grains[level].tokens
        columns = (found.src_block, found.src_tile, found.dst_block, found.dst_tile)
        for a, b, c, d in zip(*(column.tolist() for column in columns), strict=True):
            walked.setdefault(i, []).extend((a * 6 + b * step + k, c * 4 + d * step + k) for k in range(step))
    wanted = [(src[at // 6] * 6 + at % 6, dst[at // 4] * 4 + at % 4) for at in range(request.start, tokens)]
    paged = [i for i, edge in enumerate(plan.edges) if edge.grains[0].tokens]
    assert paged
    for i in paged:
        assert sorted(walked.get(i, [])) == sorted(wanted)


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, lambda ids: np.array(ids, np.uint8), lambda ids: np.array(ids, np.int32)]
)
def test_a_table_may_be_any_sequence_of_whole_numbers(form):
    plan = make_plans(side("d", 1, Layout(block=2), 4), side("p", 1, Layout(block=2), 4))[0]
    plain, other = (
        Request(10, {0: f([1, 4, 2]), 1: f([3, 0, 5]), 2: 6}, {0: f([2, 0, 7]), 1: f([1, 3, 4]), 2: f([5])})
        for f in (list, form)
    )
    binder = Binder(plan)
    assert explicit(binder.bind(other), 0) == explicit(binder.bind(plain), 0)
    assert indexed(plan, 0, binder, other) == indexed(plan, 0, binder, plain)
