"""Transfers that engines get wrong or refuse, each by name, byte by byte; and what must be refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

import oracle
from ferrying import (
    Copy,
    Outcome,
    apply,
    copies_of,
    ferry,
    manifests_of,
    place,
    request_of,
)
from kvferry import models
from kvferry.errors import BindError, KVFerryError, ManifestError, MismatchError, UnshardableError
from kvferry.manifest import Cyclic, Manifest, TokenPaged
from kvferry.models import load_model, manifests
from kvferry.plan import Binder, Fleet, Request, make_plan, make_plans, routes
from kvferry.plan.explain import costs
from kvferry.plan.rows import PreparedRows
from oracle import FULL, HOLE, Attention, Case, Group, Kind, Layer, Mamba2, Memory, Reach, Side, chunk, window

Stages = Sequence[Sequence[str]]


def model(*kinds: Kind) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{i}", kind) for i, kind in enumerate(kinds))


def names(layers: Sequence[Layer]) -> tuple[str, ...]:
    return tuple(x.name for x in layers)


def by_kind(layers: Sequence[Layer], tokens: int, hashed: bool = False) -> tuple[Group, ...]:
    """A group per paging and reach, each keeping what its layers look back to, as an engine with HMA does."""
    keys = sorted({(x.kind.paged_by, x.kind.looks_back.kind, x.kind.looks_back.tokens) for x in layers})
    groups = []
    for i, key in enumerate(keys):
        members = [x for x in layers if (x.kind.paged_by, x.kind.looks_back.kind, x.kind.looks_back.tokens) == key]
        state = key[0] == "state"
        groups.append(Group(i, names(members), 0 if state else tokens, members[0].kind.looks_back, hashed and not state))
    return tuple(groups)


def all_in_one(layers: Sequence[Layer], tokens: int, hashed: bool = False) -> tuple[Group, ...]:
    """One group for tokens and one for state, keeping everything, as an engine without HMA does."""
    token = [x for x in layers if x.kind.paged_by == "token"]
    state = [x for x in layers if x.kind.paged_by == "state"]
    groups = [Group(0, names(token), tokens, FULL, hashed)] if token else []
    return (*groups, *([Group(7, names(state))] if state else []))


def make_side(
    layers: Sequence[Layer],
    memory: Memory | None = None,
    *,
    tp: int = 1,
    stages: Stages | int = 1,
    groups: Sequence[Group] | None = None,
    hashed: bool = False,
    tokens: int = 0,
    blocks: int = 40,
) -> Side:
    memory = memory or Memory()
    if isinstance(stages, int):
        cuts = [round(i * len(layers) / stages) for i in range(stages + 1)]
        stages = [names(layers[a:b]) for a, b in pairwise(cuts)]
    groups = groups if groups is not None else by_kind(layers, tokens or memory.block, hashed)
    return Side(tp, tuple(tuple(s) for s in stages), tuple(groups), memory, blocks)


def tables(side: Side, n: int, seed: int) -> dict[int, list[int]]:
    """Shuffled ids; holes wherever a group no longer keeps any token of a block."""
    free = np.random.default_rng(seed).permutation(side.blocks).tolist()
    out = {}
    for group in side.groups:
        if not group.tokens:
            out[group.id] = [free.pop()]
            continue
        kept = group.keeps.first(n) // group.tokens
        out[group.id] = [HOLE if p < kept else free.pop() for p in range(-(-n // group.tokens))]
    return out


def case_of(layers: Sequence[Layer], producer: Side, consumer: Side, n: int, start: int = 0) -> Case:
    return Case(
        tuple(layers), producer, consumer, n, tables(producer, n, 1), tables(consumer, n, 2), start, prefilled=n + 1, seed=5
    )


def move(layers: Sequence[Layer], producer: Side, consumer: Side, n: int = 11, start: int = 0) -> Outcome:
    out = ferry(case_of(layers, producer, consumer, n, start))
    assert out.moved > 0
    return out


ATTENTION = Attention(12, 3, 2, 2)
EVERY_KIND = model(
    ATTENTION,
    Mamba2(heads=12, dim=2, state=3, groups=12, ssm_item=4),
    oracle.Latent(3, 1, 2),
    oracle.Mamba1(inner=24, state=2),
    Attention(12, 2, 2, 2, window(6)),
    oracle.GatedDelta(k_heads=12, v_heads=24, k_dim=2, v_dim=1, ssm_item=4),
    oracle.Compressed("entry", 3, 2, planes=(("scale", 1),)),
    oracle.ShortConv(inner=12, kernel=3),
    Attention(12, 1, 1, 1, chunk(5)),
    oracle.LinearAttention(heads=12, k_dim=2, v_dim=3, ssm_item=4),
    oracle.OpaqueState(size=9),
    oracle.OpaqueCells("packed4", 3, 12),
    oracle.OpaqueCells("packed4", 5),
    Mamba2(heads=24, dim=1, state=2, groups=1),
)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (2, 3), (3, 2), (1, 6)])
@pytest.mark.parametrize("conv", ["ds", "sd"])
def test_b_and_c_of_a_single_mamba_group_come_whole_to_every_rank(p: int, d: int, conv: str) -> None:
    layers = model(Mamba2(heads=6, dim=2, state=3, groups=1, ssm_item=4), ATTENTION)
    memory = Memory(conv=conv)
    move(layers, make_side(layers, memory, tp=p), make_side(layers, memory, tp=d))


@pytest.mark.parametrize(("p", "d"), [(1, 1), (1, 2), (2, 1), (2, 3), (4, 6)])
@pytest.mark.parametrize(("there", "here"), [("sd", "sd"), ("ds", "sd"), ("sd", "ds"), ("ds", "ds")])
def test_conv_states_move_in_either_order_of_taps_and_channels(p: int, d: int, there: str, here: str) -> None:
    layers = model(
        Mamba2(heads=12, dim=2, state=3, groups=12),
        oracle.GatedDelta(k_heads=12, v_heads=12, k_dim=2, v_dim=3),
        oracle.Mamba1(inner=12, state=2),
        oracle.ShortConv(inner=12),
    )
    move(layers, make_side(layers, Memory(conv=there), tp=p), make_side(layers, Memory(conv=here), tp=d))


@pytest.mark.parametrize(("p", "d"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize(("there", "here"), [("vk", "kv"), ("kv", "vk"), ("kv", "kv")])
def test_states_of_gated_delta_nets_move_in_either_order_of_keys_and_values(p: int, d: int, there: str, here: str) -> None:
    layers = model(
        oracle.GatedDelta(k_heads=6, v_heads=12, k_dim=2, v_dim=3), oracle.GatedDelta(k_heads=6, v_heads=6, k_dim=4, v_dim=4)
    )
    move(layers, make_side(layers, Memory(delta=there), tp=p), make_side(layers, Memory(delta=here), tp=d))


@pytest.mark.parametrize(("p", "d"), [(8, 1), (8, 4), (1, 8), (4, 8), (8, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("order", ["head", "token"])
def test_replicated_kv_heads_are_read_once(p: int, d: int, order: str) -> None:
    layers = model(Attention(2, 3, 3, 2), Attention(2, 1, 2, 4))
    memory = Memory(order=order)
    out = move(layers, make_side(layers, memory, tp=p), make_side(layers, memory, tp=d))
    heads_per_rank = max(1, 2 // d)
    assert out.moved == 11 * d * heads_per_rank * (6 * 2 + 3 * 4)


@pytest.mark.parametrize(("p", "d"), [(2, 3), (3, 2), (4, 6), (6, 4), (12, 1), (1, 12)])
def test_tensor_parallel_sizes_that_do_not_divide_each_other(p: int, d: int) -> None:
    move(EVERY_KIND, make_side(EVERY_KIND, tp=p), make_side(EVERY_KIND, tp=d), n=15)


UNEVEN = {
    "1 to 3": ([14], [4, 4, 6]),
    "3 to 2": ([1, 8, 5], [12, 2]),
    "3 to 3 cut elsewhere": ([5, 5, 4], [2, 9, 3]),
    "2 to 1": ([9, 5], [14]),
}


@pytest.mark.parametrize("cut", UNEVEN.values(), ids=UNEVEN.keys())
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 3)])
def test_pipeline_stages_that_hold_different_layers(cut: tuple[list[int], list[int]], p: int, d: int) -> None:
    def stages(counts: list[int]) -> list[tuple[str, ...]]:
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return [names(EVERY_KIND)[a:b] for a, b in pairwise(starts)]

    producer = make_side(EVERY_KIND, tp=p, stages=stages(cut[0]))
    consumer = make_side(EVERY_KIND, tp=d, stages=stages(cut[1]))
    move(EVERY_KIND, producer, consumer, n=14)


@pytest.mark.parametrize("which", ["producer", "consumer", "both"])
def test_a_stage_that_holds_no_layer_of_a_group(which: str) -> None:
    layers = model(ATTENTION, ATTENTION, Mamba2(heads=12, dim=2, state=2, groups=12), oracle.ShortConv(inner=12))
    apart = [names(layers)[:2], names(layers)[2:]]
    one, two = make_side(layers), make_side(layers, tp=2, stages=apart)
    producer = two if which in ("producer", "both") else one
    consumer = two if which in ("consumer", "both") else one
    out = move(layers, producer, consumer)
    assert all(len(m.groups) == 2 for m in (*out.producers, *out.consumers))


def test_a_stage_that_holds_nothing_at_all_is_told_by_one() -> None:
    layers = model(ATTENTION, ATTENTION)
    producer = make_side(layers, stages=[names(layers), ()])
    consumer = make_side(layers, tp=2, stages=[(), names(layers)])
    out = move(layers, producer, consumer)
    told = [r for r in routes(out.producers, out.consumers) if not r.readers]
    assert [place(r.producer) for r in told] == [(0, 1)]


BLOCKS = [(64, 16), (16, 64), (48, 32), (32, 48), (16, 16), (7, 5)]


@pytest.mark.parametrize(("p", "d"), BLOCKS)
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("n", [1, 63, 64, 149])
def test_block_sizes_at_any_ratio(p: int, d: int, hashed: bool, n: int) -> None:
    layers = model(Attention(2, 2, 1, 2), oracle.Latent(2, 1), Attention(2, 1, 1, 2, window(40)))
    move(layers, make_side(layers, Memory(p), blocks=120), make_side(layers, Memory(d, "paged"), hashed=hashed, blocks=120), n)


@pytest.mark.parametrize(("p", "d"), [((4, 12), (6, 6)), ((2, 16), (16, 16)), ((16, 16), (2, 16)), ((3, 9), (2, 8))])
def test_kernel_blocks_finer_than_the_block_table(p: tuple[int, int], d: tuple[int, int]) -> None:
    layers = model(Attention(4, 2, 2, 2), Attention(4, 1, 1, 2, window(9)))
    producer = make_side(layers, Memory(p[0], "transposed"), tp=2, tokens=p[1])
    consumer = make_side(layers, Memory(d[0]), tp=1, tokens=d[1], hashed=True)
    move(layers, producer, consumer, n=37)


@pytest.mark.parametrize(("p", "d"), [(1, 1), (1, 2), (2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize(("there", "here"), [("head", "token"), ("token", "head"), ("token", "token")])
@pytest.mark.parametrize("kv", ["packed", "paged", "separate"])
def test_head_major_and_token_major_pages_mix(p: int, d: int, there: str, here: str, kv: str) -> None:
    layers = model(ATTENTION)
    move(layers, make_side(layers, Memory(4, kv, there), tp=p), make_side(layers, Memory(4, "packed", here), tp=d))


@pytest.mark.parametrize("other", ["packed", "paged", "separate", "transposed"])
@pytest.mark.parametrize("direction", ["from", "to"])
@pytest.mark.parametrize("blocks", [(4, 4), (8, 4), (4, 6)])
def test_transposed_keys(other: str, direction: str, blocks: tuple[int, int]) -> None:
    layers = model(ATTENTION, Attention(12, 2, 3, 2, window(5)))
    transposed = make_side(layers, Memory(blocks[0], "transposed"), tp=2)
    plain = make_side(layers, Memory(blocks[1], other, "token"), tp=3)
    producer, consumer = (transposed, plain) if direction == "from" else (plain, transposed)
    move(layers, producer, consumer, n=13)


@pytest.mark.parametrize("pools", [("layer", "block"), ("block", "layer"), ("block", "block")])
@pytest.mark.parametrize("overlays", [(True, False), (False, True), (True, True)])
def test_pools_overlays_and_padding_are_each_sides_own(pools: tuple[str, str], overlays: tuple[bool, bool]) -> None:
    sides = [
        make_side(EVERY_KIND, Memory(pool=pool, overlay=overlay, page_align=align), tp=tp)
        for pool, overlay, align, tp in zip(pools, overlays, (64, 12), (3, 2), strict=True)
    ]
    move(EVERY_KIND, *sides, n=13)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (2, 3)])
def test_two_mamba_shapes_head_counts_by_layer_and_block_sizes_by_group(p: int, d: int) -> None:
    layers = model(
        Mamba2(heads=6, dim=2, state=2, groups=1, ssm_item=4),
        Mamba2(heads=12, dim=1, state=3, groups=6, kernel=3),
        Attention(6, 2, 2, 2),
        Attention(12, 1, 1, 2),
        Attention(1, 4, 4, 2, window(7)),
        oracle.Mamba1(inner=18, state=2),
    )

    def groups(full: int, local: int, kernel: int) -> list[Group]:
        return [
            Group(3, ("layers.2", "layers.3"), full, hashed=True),
            Group(0, ("layers.4",), local, window(7), hashed=True, kernel=kernel),
            Group(5, ("layers.0", "layers.1")),
            Group(1, ("layers.5",)),
        ]

    producer = make_side(layers, Memory(8), tp=p, groups=groups(16, 4, 2))
    consumer = make_side(layers, Memory(2), tp=d, groups=groups(6, 12, 0))
    move(layers, producer, consumer, n=29)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("blocks", [(8, 8), (8, 4), (4, 8), (6, 4)])
@pytest.mark.parametrize("reach", [window(8), window(11), window(1), chunk(8), chunk(12)])
def test_windows_and_chunks_at_every_residue_of_the_block(reach: Reach, blocks: tuple[int, int], hashed: bool) -> None:
    layers = model(Attention(2, 1, 1, 2, reach))
    producer = make_side(layers, Memory(blocks[0]))
    consumer = make_side(layers, Memory(blocks[1]), hashed=hashed)
    for n in range(1, 34):
        out = ferry(case_of(layers, producer, consumer, n))
        if not hashed:
            assert out.moved == (n - reach.first(n)) * 2 * 2 * 2


def test_a_window_whose_first_needed_token_opens_a_block_is_not_short_of_it() -> None:
    layers = model(Attention(1, 1, 1, 1, window(64)))
    side = make_side(layers, Memory(32))
    for prompt in (159, 191, 223):
        held = prompt - 1
        case = case_of(layers, side, side, held)
        first = held - 63
        assert case.src[0][first // 32] != HOLE
        out = ferry(case)
        assert out.moved == 63 * 2


GEMMA = model(*[Attention(4, 2, 2, 2, window(6) if i % 3 else FULL) for i in range(6)])


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("n", [5, 16, 18, 19])
def test_groups_there_and_one_group_here_that_is_not_hashed(p: int, d: int, n: int) -> None:
    producer = make_side(GEMMA, Memory(4), tp=p)
    consumer = make_side(GEMMA, Memory(4), tp=d, groups=all_in_one(GEMMA, 4))
    out = move(GEMMA, producer, consumer, n)
    per_token = 2 * 2 * 2 * max(4, d)
    assert out.moved == per_token * (2 * n + 4 * (n - window(6).first(n)))
    assert all(not b.unhashable for b in out.bindings)


@pytest.mark.parametrize("n", [5, 16, 18, 19])
def test_groups_there_and_one_hashed_group_here_report_blocks_that_are_not_whole(n: int) -> None:
    producer = make_side(GEMMA, Memory(4))
    consumer = make_side(GEMMA, Memory(4), groups=all_in_one(GEMMA, 4, hashed=True))
    out = move(GEMMA, producer, consumer, n)
    gone = range(window(6).first(n) // 4)
    assert {g: b.tolist() for g, b in out.bindings[0].unhashable.items()} == ({0: list(gone)} if gone else {})
    assert out.bindings[0].fills.bytes > 0 if gone or n % 4 else True


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("n", [5, 16, 18, 19])
def test_one_group_there_and_groups_here(hashed: bool, p: int, d: int, n: int) -> None:
    producer = make_side(GEMMA, Memory(4), tp=p, groups=all_in_one(GEMMA, 4))
    consumer = make_side(GEMMA, Memory(4), tp=d, hashed=hashed)
    out = move(GEMMA, producer, consumer, n)
    assert all(not b.unhashable for b in out.bindings)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("there", "here"), [((1,), ()), ((), (0, 2)), ((0, 2), (1,)), ((1, 2), (1, 2))])
def test_holes_outside_the_window_are_neither_read_nor_written(
    hashed: bool, there: tuple[int, ...], here: tuple[int, ...]
) -> None:
    layers = model(Attention(2, 2, 2, 2, window(5)), oracle.Latent(2, 1, reach=window(3)))
    producer = make_side(layers, Memory(4), groups=all_in_one(layers, 4))
    consumer = make_side(layers, Memory(4), groups=all_in_one(layers, 4, hashed))
    case = case_of(layers, producer, consumer, 18)
    src, dst = (
        {0: [HOLE if i in holes else b for i, b in enumerate(table[0])]}
        for table, holes in ((case.src, there), (case.dst, here))
    )
    out = ferry(replace(case, src=src, dst=dst))
    lost = sorted(set(there) - set(here)) if hashed else []
    assert [b.tolist() for b in out.bindings[0].unhashable.values()] == ([lost] if lost else [])


def test_layers_of_one_group_here_come_from_several_groups_there() -> None:
    layers = model(*[Attention(2, 2, 2, 2, window(6)) for _ in range(3)])
    producer = make_side(
        layers,
        Memory(4),
        groups=[
            Group(i, (x.name,), t, window(w)) for i, (x, t, w) in enumerate(zip(layers, (4, 8, 4), (6, 6, 14), strict=True))
        ],
    )
    for hashed in (False, True):
        consumer = make_side(layers, Memory(2), groups=[Group(0, names(layers), 6, window(14), hashed)])
        for n in range(1, 30):
            ferry(case_of(layers, producer, consumer, n))


@pytest.mark.parametrize("conv", ["ds", "sd"])
@pytest.mark.parametrize(("there", "here"), [(0, 3), (3, 0), (1, 2)])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 3)])
def test_speculative_taps_of_one_side_are_filled_and_never_read(conv: str, there: int, here: int, p: int, d: int) -> None:
    layers = model(
        Mamba2(heads=6, dim=2, state=2, groups=6, kernel=4),
        Mamba2(heads=6, dim=2, state=2, groups=1, kernel=4),
        oracle.GatedDelta(k_heads=6, v_heads=6, k_dim=2, v_dim=2),
        oracle.ShortConv(inner=6, kernel=3),
    )
    producer = make_side(layers, Memory(conv=conv, spec=there), tp=p)
    consumer = make_side(layers, Memory(conv=conv, spec=here), tp=d)
    out = move(layers, producer, consumer)
    assert all((b.fills.bytes > 0) == (here > 0) for b in out.bindings)


@pytest.mark.parametrize("own_group", [False, True])
def test_a_layer_that_only_the_consumer_has_is_filled(own_group: bool) -> None:
    shared = model(ATTENTION, Mamba2(heads=12, dim=1, state=2, groups=1))
    layers = (*shared, Layer("mtp.0", ATTENTION, "D"), Layer("mtp.1", oracle.ShortConv(inner=12), "D"))
    groups = list(by_kind(layers, 4))
    if own_group:
        groups = [*by_kind(shared, 4), Group(8, ("mtp.0",), 4), Group(9, ("mtp.1",))]
    out = move(layers, make_side(shared, tp=2), make_side(layers, tp=3, groups=groups))
    assert all(b.fills.bytes > 0 for b in out.bindings)


def test_a_group_that_only_the_consumer_has_may_be_left_out_of_the_tables() -> None:
    shared = model(ATTENTION)
    layers = (*shared, Layer("mtp.0", ATTENTION, "D"))
    consumer = make_side(layers, groups=[*by_kind(shared, 4), Group(8, ("mtp.0",), 4)])
    case = case_of(layers, make_side(shared), consumer, 10)
    producers, consumers = manifests_of(case)
    tables_here = {g: t for g, t in case.dst.items() if g != 8}
    binding = Binder(make_plans(consumers, producers)[0]).bind(Request(10, case.src, tables_here))
    regions = {p.region for layer in consumers[0].layers if layer.group == 8 for p in layer.parts}
    alone = regions - {p.region for layer in consumers[0].layers if layer.group != 8 for p in layer.parts}
    assert binding.bytes > 0
    assert not alone & set(binding.fills.region.tolist())


def test_a_layer_that_only_the_producer_has_is_left_there() -> None:
    layers = (*model(ATTENTION), Layer("drafter.0", ATTENTION, "P"))
    out = move(layers, make_side(layers), make_side(layers[:1], tp=2))
    assert out.moved == 11 * 12 * 5 * 2


@pytest.mark.parametrize("start", [0, 4, 8, 12, 14])
def test_tokens_that_the_consumer_holds_already_are_not_touched(start: int) -> None:
    layers = model(ATTENTION, Attention(12, 1, 1, 2, window(7)), oracle.Compressed("entry", 2, 2))
    producer, consumer = make_side(layers, Memory(6), tp=2), make_side(layers, Memory(4), tp=3, hashed=True)
    out = ferry(case_of(layers, producer, consumer, 14, start))
    assert (out.moved > 0) == (start < 14)


def test_a_recurrent_state_moves_whole_however_many_tokens_are_held() -> None:
    layers = model(Mamba2(heads=2, dim=2, state=2, groups=1), Attention(2, 2, 2, 2))
    side = make_side(layers)
    fresh, warm = ferry(case_of(layers, side, side, 14)), ferry(case_of(layers, side, side, 14, start=12))
    state = (4 + 2 + 2) * 3 * 2 + 2 * 2 * 2 * 2
    assert fresh.moved == state + 14 * 16
    assert warm.moved == state + 2 * 16


def refusal(layers: Sequence[Layer], other: Sequence[Layer], there: Memory | None = None, here: Memory | None = None) -> str:
    """What is said when a consumer of `layers` meets a producer of `other`."""
    side, other_side = make_side(layers, here), make_side(other, there)
    _, consumers = manifests_of(case_of(layers, side, side, 4))
    producers, _ = manifests_of(case_of(other, other_side, other_side, 4))
    with pytest.raises(MismatchError) as caught:
        make_plans(consumers, producers)
    return str(caught.value)


def test_ssm_dtypes_that_differ_are_refused_by_name() -> None:
    kind = Mamba2(heads=2, dim=2, state=2, groups=1, ssm_item=4)
    said = refusal(model(ATTENTION, kind), model(ATTENTION, replace(kind, ssm_item=2)))
    assert "layers.1 ssm: bfloat16 there, float32 here" in said
    assert "conv" not in said


def test_all_differences_are_named_at_once() -> None:
    here = model(Attention(2, 4, 4, 2), Attention(2, 4, 4, 2, window(8)), oracle.ShortConv(inner=6, kernel=4))
    there = model(Attention(4, 4, 4, 2), Attention(2, 4, 4, 1, window(9)), oracle.ShortConv(inner=6, kernel=3))
    said = refusal(here, there)
    for line in (
        "layers.0 k: 4 heads there, 2 here",
        "layers.0 v: 4 heads there, 2 here",
        "layers.1: a window of 9 tokens there, a window of 8 tokens here",
        "layers.1 k: uint8 there, bfloat16 here",
        "layers.2 conv.x: 2 taps there, 3 here",
    ):
        assert line in said


def test_opaque_cells_of_different_kernel_blocks_are_refused() -> None:
    layers = model(oracle.OpaqueCells("packed4", 3))
    said = refusal(layers, layers, there=Memory(8), here=Memory(4))
    assert "layers.0 bytes" in said
    assert "8" in said
    assert "4" in said


def test_opaque_cells_with_kernel_blocks_alike_move_between_different_blocks() -> None:
    layers = model(oracle.OpaqueCells("packed4", 3, 4), oracle.OpaqueCells("packed4", 2))
    move(layers, make_side(layers, Memory(4), tokens=12, tp=2), make_side(layers, Memory(4), tokens=8), n=18)


def test_private_layouts_of_different_backends_are_refused() -> None:
    said = refusal(model(oracle.OpaqueState(tag="fla", size=8)), model(oracle.OpaqueState(tag="flashinfer", size=8)))
    assert "layers.0 bytes" in said
    assert "fla" in said
    assert "flashinfer" in said


def test_a_required_layer_that_no_producer_holds_is_refused() -> None:
    layers = model(ATTENTION, ATTENTION)
    said = refusal(layers, layers[:1])
    assert "layers.1: held by no producer rank" in said


def test_state_paged_by_tokens_on_one_side_is_refused() -> None:
    said = refusal(model(oracle.OpaqueState(size=8)), model(oracle.OpaqueCells("private", 2)))
    assert "layers.0: paged by token there, by state here" in said


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_heads_that_no_rank_holds_are_refused_with_their_interval(lost: int) -> None:
    layers = model(ATTENTION)
    producers, consumers = manifests_of(case_of(layers, make_side(layers, tp=3), make_side(layers), 4))
    with pytest.raises(MismatchError, match=rf"layers\.0 k: head \[{4 * lost}, {4 * lost + 4}\) is held by no producer rank"):
        make_plans(consumers, [p for p in producers if p.identity.rank.tp != lost])


def with_paging(manifest: Manifest, change: Callable[[TokenPaged], TokenPaged]) -> Manifest:
    groups = tuple(with_fields(g, paging=change(g.paging)) if isinstance(g.paging, TokenPaged) else g for g in manifest.groups)
    return with_fields(manifest, groups=groups)


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize(
    ("change", "said"),
    [({"cyclic": Cyclic(0, 2, 4)}, "context-parallel"), ({"ring": 16}, "ring")],
    ids=["cyclic ownership", "a ring"],
)
def test_what_the_schema_can_say_but_no_plan_can_move_is_refused(side: str, change: dict[str, object], said: str) -> None:
    layers = model(ATTENTION)
    producers, consumers = manifests_of(case_of(layers, make_side(layers), make_side(layers), 4))
    changed = [with_paging(x, lambda p: with_fields(p, **change)) for x in (producers if side == "producer" else consumers)]
    with pytest.raises(MismatchError, match=said):
        make_plans(consumers, changed) if side == "producer" else make_plans(changed, producers)


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        (Attention(6, 1, 1, 2), 4),
        (Attention(2, 1, 1, 2), 3),
        (Mamba2(heads=8, dim=1, state=1, groups=2), 4),
        (Mamba2(heads=6, dim=1, state=1, groups=1), 4),
        (oracle.Mamba1(inner=6, state=1), 4),
    ],
)
def test_sizes_that_no_engine_could_run_are_refused(kind: Kind, tp: int) -> None:
    layers = model(kind)
    with pytest.raises(UnshardableError):
        manifests_of(case_of(layers, make_side(layers, tp=tp), make_side(layers), 4))


def test_compressed_entries_must_fill_the_kernel_block() -> None:
    layers = model(oracle.Compressed("entry", 2, 4))
    side = make_side(layers, Memory(6))
    with pytest.raises(ManifestError, match="multiple of 4"):
        manifests_of(case_of(layers, side, side, 4))


def bind_once(case: Case, **changes: object) -> KVFerryError:
    producers, consumers = manifests_of(case)
    binder = Binder(make_plans(consumers, producers)[0])
    binder.bind(request_of(case))
    with pytest.raises(BindError) as caught:
        binder.bind(replace(request_of(case), **changes))
    return caught.value


TWO_GROUPS = model(ATTENTION, Attention(12, 1, 1, 2, window(6)), Mamba2(heads=12, dim=1, state=1, groups=1))
BOUND = case_of(TWO_GROUPS, make_side(TWO_GROUPS, Memory(4)), make_side(TWO_GROUPS, Memory(4)), 18)
TOKEN_GROUPS = [g.id for g in BOUND.consumer.groups if g.tokens]
STATE_GROUP = next(g.id for g in BOUND.consumer.groups if not g.tokens)


def changed_table(side: str, group: int, position: int, value: int) -> dict[str, object]:
    old = BOUND.src if side == "src" else BOUND.dst
    table = list(old[group])
    table[position] = value
    return {side: {**old, group: table}}


@pytest.mark.parametrize("start", [1, 3, 5, 17, -4, 19])
def test_a_start_that_is_no_block_border_or_no_place_is_refused(start: int) -> None:
    bind_once(BOUND, start=start)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("group", [*TOKEN_GROUPS, STATE_GROUP])
@pytest.mark.parametrize("value", [40, -2, 1 << 40, 1 << 70])
def test_block_ids_out_of_range_are_refused(side: str, group: int, value: int) -> None:
    assert str(group) in str(bind_once(BOUND, **changed_table(side, group, -1, value)))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("group", [*TOKEN_GROUPS, STATE_GROUP])
def test_tables_that_are_too_short_are_refused(side: str, group: int) -> None:
    old = BOUND.src if side == "src" else BOUND.dst
    assert str(group) in str(bind_once(BOUND, **{side: {**old, group: old[group][:-1]}}))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("group", [*TOKEN_GROUPS, STATE_GROUP])
def test_tables_that_are_missing_are_refused(side: str, group: int) -> None:
    old = BOUND.src if side == "src" else BOUND.dst
    assert str(group) in str(bind_once(BOUND, **{side: {g: t for g, t in old.items() if g != group}}))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("group", [*TOKEN_GROUPS, STATE_GROUP])
def test_a_hole_where_a_needed_token_lies_is_refused(side: str, group: int) -> None:
    assert str(group) in str(bind_once(BOUND, **changed_table(side, group, -1, HOLE)))


@pytest.mark.parametrize("which", ["short", "hole"])
def test_every_source_group_of_a_consumers_group_is_checked(which: str) -> None:
    layers = model(ATTENTION, ATTENTION)
    producer = make_side(layers, groups=[Group(i, (x.name,), 4) for i, x in enumerate(layers)])
    case = case_of(layers, producer, make_side(layers), 18)
    for group in (0, 1):
        table = list(case.src[group])
        table = table[:-1] if which == "short" else [table[0], HOLE, *table[2:]]
        bind_once(case, src={**case.src, group: table})


@pytest.mark.parametrize("kv", ["packed", "paged", "transposed"])
@pytest.mark.parametrize("pool", ["layer", "block"])
@pytest.mark.parametrize("order", ["head", "token"])
def test_equal_sides_move_a_page_as_one_run(kv: str, pool: str, order: str) -> None:
    layers = model(*[Attention(4, 3, 3, 2)] * 5)
    side = make_side(layers, Memory(8, kv, order, pool=pool), tp=2, blocks=64)
    case = replace(case_of(layers, side, side, 24), src={0: [9, 3, 60]}, dst={0: [5, 20, 11]})
    out = ferry(case)
    for manifest, binding in zip(out.consumers, out.bindings, strict=True):
        assert sum(len(c) for c in binding.copies) == 3 * len(manifest.regions)
        assert len(manifest.regions) == (5 if pool == "layer" else 1)


def test_equal_sides_move_a_recurrent_page_as_one_run() -> None:
    layers = model(*[Mamba2(heads=4, dim=2, state=2, groups=4)] * 3)
    side = make_side(layers, tp=2)
    out = move(layers, side, side)
    assert out.runs == 2 * 3


def test_consecutive_blocks_of_equal_sides_join_into_one_run_per_region() -> None:
    layers = model(*[Attention(4, 3, 3, 2)] * 5)
    side = make_side(layers, Memory(8), blocks=64)
    case = replace(case_of(layers, side, side, 24), src={0: [9, 10, 11]}, dst={0: [20, 21, 22]})
    assert ferry(case).runs == 5


NEMOTRON = model(*[Attention(2, 128, 128, 2)] * 6, *[Mamba2(heads=64, dim=64, state=128, groups=8, ssm_item=4)] * 23)


def nemotron_side(hashed: bool) -> Side:
    mamba = names(NEMOTRON)[6:]
    dealt = [mamba[i::4] for i in range(4)]
    groups = [Group(0, names(NEMOTRON)[:6], 2096, hashed=hashed), *(Group(i + 1, x) for i, x in enumerate(dealt))]
    return make_side(NEMOTRON, Memory(16), groups=groups, blocks=1000)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_short_prompt_in_huge_blocks_moves_little_more_than_it_needs(hashed: bool) -> None:
    side = nemotron_side(hashed)
    case = case_of(NEMOTRON, side, side, 99)
    producers, consumers = manifests_of(case)
    binding = Binder(make_plans(consumers, producers)[0]).bind(request_of(case))
    states = 23 * (36_864 + 2_097_152)
    useful = 99 * 6 * 2 * 2 * 128 * 2
    assert useful <= binding.bytes - states <= 1.2 * useful
    assert binding.useful_bytes == useful + states


@pytest.mark.parametrize(("n", "complete"), [(3, 0), (4, 1), (10, 2), (12, 3)])
def test_an_incomplete_compressed_entry_is_not_counted_as_useful(n: int, complete: int) -> None:
    layers = model(oracle.Compressed("entry", 3, 4))
    side = make_side(layers, Memory(8))
    binding = ferry(case_of(layers, side, side, n)).bindings[0]
    assert binding.bytes == binding.useful_bytes == 3 * complete


def test_plans_and_prepared_rows_do_not_grow_with_the_pool() -> None:
    counts = []
    for blocks in (1_000, 1_000_000):
        producer = make_side(EVERY_KIND, Memory(4, "paged", "token", pool="block"), tp=3, blocks=blocks)
        consumer = make_side(EVERY_KIND, Memory(6, conv="sd"), tp=2, blocks=blocks)
        layers = [x for x in EVERY_KIND if not x.kind.moves_partial_entries]
        producer, consumer = (
            replace(s, stages=(names(layers),), groups=by_kind(layers, s.memory.block)) for s in (producer, consumer)
        )
        producers, consumers = manifests_of(case_of(layers, producer, consumer, 4))
        plans = make_plans(consumers, producers)
        runs = [sum(len(g.runs) for f in p.flows for g in f.grains) for p in plans]
        prepared = [PreparedRows(p, i) for p in plans for i in range(len(p.sources))]
        counts.append((runs, [(len(r.src), len(r.dst)) for r in prepared]))
    assert counts[0] == counts[1]


REPLICAS = {
    "latent, tp 4 to 6": (oracle.Latent(2, 1), 4, 1, 6, 1),
    "latent, tp 2 to 3, two stages here": (oracle.Latent(2, 1), 2, 1, 3, 2),
    "latent, tp 8 to 1": (oracle.Latent(2, 1), 8, 1, 1, 1),
    "latent, tp 4 to 2, two stages here": (oracle.Latent(2, 1), 4, 1, 2, 2),
    "2 heads, tp 8 to 4": (Attention(2, 1, 1, 2), 8, 1, 4, 1),
    "2 heads, tp 4 to 8": (Attention(2, 1, 1, 2), 4, 1, 8, 1),
    "1 head, tp 2 to 6": (Attention(1, 1, 1, 2), 2, 1, 6, 1),
    "4 heads, tp 8 to 2, two stages here": (Attention(4, 1, 1, 2), 8, 1, 2, 2),
    "2 heads, tp 8 to 4, four stages here": (Attention(2, 1, 1, 2), 8, 1, 4, 4),
    "latent, two stages there": (oracle.Latent(2, 1), 2, 2, 4, 1),
}


@pytest.mark.parametrize(("kind", "p", "p_stages", "d", "d_stages"), REPLICAS.values(), ids=REPLICAS.keys())
def test_replicas_share_their_readers_evenly(kind: Kind, p: int, p_stages: int, d: int, d_stages: int) -> None:
    layers = model(*[kind] * 4)
    out = move(layers, make_side(layers, tp=p, stages=p_stages), make_side(layers, tp=d, stages=d_stages))
    load = {r.producer: len(r.readers) for r in routes(out.producers, out.consumers)}

    def holds(manifest: Manifest) -> tuple[object, ...]:
        shapes = tuple((a.start, a.stop) for s in manifest.shapes for a in s.axes)
        return (manifest.identity.rank.pp, shapes)

    for _, equal in groupby(sorted(out.producers, key=holds), key=holds):
        loads = [load[x.identity.rank] for x in equal]
        assert max(loads) - min(loads) <= 1, f"readers of equal replicas: {loads}"


def loads(model: str, prefill: str, decode: str, readers: int) -> dict[str, list[float]]:
    """Bytes that each producer rank is read for a token, and for a state, by so many decode engines."""
    fleet = Fleet(manifests(load_model(model), models.Side.parse(prefill), engine="prefill", blocks=2))
    out: dict[str, dict[int, float]] = {
        kind: {m.identity.rank.ordinal: 0 for m in fleet.manifests} for kind in ("token", "state")
    }
    for i in range(readers):
        here = manifests(load_model(model), models.Side.parse(decode), engine=f"decode-{i}", blocks=2)
        for plan in make_plans(here, fleet, proof=False):
            for cost in costs(plan):
                out["token"][cost.source.ordinal] += cost.bytes_per_token
                out["state"][cost.source.ordinal] += cost.bytes_per_state
    return {kind: list(found.values()) for kind, found in out.items() if any(found.values())}


@pytest.mark.parametrize("readers", [1, 4, 8])
@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("deepseek-v3", "tp=8", "tp=1"),
        ("deepseek-v3", "tp=8", "tp=1,pp=2"),
        ("deepseek-v3", "tp=8", "tp=2"),
        ("deepseek-v3", "tp=8", "tp=16"),
        ("deepseek-v3", "tp=4,pp=2", "tp=1"),
        ("llama-3.1-8b", "tp=16", "tp=1"),
        ("qwen3-next-80b-a3b", "tp=8", "tp=2"),
        ("gpt-oss-20b", "tp=16", "tp=4"),
        ("kimi-linear-48b-a3b", "tp=8", "tp=2"),
    ],
)
def test_layers_are_dealt_among_replicas(name: str, prefill: str, decode: str, readers: int) -> None:
    for kind, found in loads(name, prefill, decode, readers).items():
        assert max(found) <= 1.25 * sum(found) / len(found), f"{kind}: {found}"


@pytest.mark.parametrize(("p", "d"), [(8, 3), (6, 8), (4, 6), (3, 2), (5, 7)])
def test_ranks_that_do_not_divide_each_other_share_replicas_evenly(p: int, d: int) -> None:
    layers = model(*[oracle.Latent(2, 1)] * 24)
    out = move(layers, make_side(layers, tp=p), make_side(layers, tp=d))
    read = dict.fromkeys((m.identity.rank for m in out.producers), 0)
    for plan, binding in zip(out.plans, out.bindings, strict=True):
        for source, copies in zip(plan.sources, binding.copies, strict=True):
            read[source.identity.rank] += copies.bytes
    assert max(read.values()) <= 1.25 * sum(read.values()) / p
    assert max(len(plan.sources) for plan in out.plans) <= -(-p // d) + 1


def test_readers_of_few_layers_begin_at_different_replicas() -> None:
    layers = model(oracle.Latent(2, 1))
    producers, (consumer,) = manifests_of(case_of(layers, make_side(layers, tp=8), make_side(layers), 9))
    chosen = [[s.identity.rank.tp for s in make_plan(consumer, producers, reader=f"decode-{i}").sources] for i in range(64)]
    assert all(len(sources) == 1 for sources in chosen)
    assert {tp for sources in chosen for tp in sources} == set(range(8))


def test_the_choice_among_replicas_depends_on_manifests_and_the_readers_name_alone() -> None:
    layers = model(*[oracle.Latent(2, 1)] * 5, Attention(2, 1, 1, 2))
    producers, consumers = manifests_of(case_of(layers, make_side(layers, tp=8), make_side(layers, tp=2), 9))
    named = make_plans(consumers, producers, reader="mine")
    assert named == make_plans(consumers, producers[::-1], reader="mine")
    assert named == tuple(make_plan(c, producers, consumers, reader="mine") for c in consumers)
    renamed = [with_fields(c, identity=with_fields(c.identity, engine="mine")) for c in consumers]
    assert [p.edges for p in make_plans(renamed, producers)] == [p.edges for p in named]
    assert [r.readers for r in routes(producers, renamed)] == [r.readers for r in routes(producers, consumers, "mine")]


def test_ranks_with_a_replica_each_read_that_one() -> None:
    layers = model(*[oracle.Latent(2, 1)] * 5)
    out = move(layers, make_side(layers, tp=4), make_side(layers, tp=4))
    assert [[s.identity.rank.tp for s in plan.sources] for plan in out.plans] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(("p", "d"), [(8, 1), (8, 4), (2, 3), (1, 8)])
def test_producer_ranks_know_who_reads_them_and_the_unread_are_told_once(p: int, d: int) -> None:
    layers = model(Attention(24, 1, 1, 2), oracle.Latent(2, 1)) if p == 2 else model(Attention(2, 1, 1, 2))
    out = move(layers, make_side(layers, tp=p), make_side(layers, tp=d))
    told = Counter(rank for plan in out.plans for rank in plan.tells)
    read = {s.identity.rank for plan in out.plans for s in plan.sources}
    everyone = {x.identity.rank for x in out.producers}
    assert set(told) == everyone - read
    assert set(told.values()) <= {1}


def test_a_plan_made_alone_equals_the_one_made_with_the_others() -> None:
    producers, consumers = manifests_of(case_of(GEMMA, make_side(GEMMA, tp=4), make_side(GEMMA, tp=2, stages=2), 9))
    together = make_plans(consumers, producers)
    alone = tuple(make_plan(c, producers, consumers) for c in consumers)
    assert together == alone


MUTANTS = case_of(EVERY_KIND, make_side(EVERY_KIND, tp=2), make_side(EVERY_KIND, Memory(kv="paged", spec=1), tp=3), 13)


def image_is_right(change: Callable[[list[Copy]], list[Copy]], poke: Callable[[oracle.World], None] = lambda _: None) -> bool:
    """Carry out one consumer rank's transfer with its copies changed, and compare."""
    producers, consumers = manifests_of(MUTANTS)
    world = oracle.build_world(MUTANTS)
    plan = make_plans(consumers, producers)[1]
    binding = Binder(plan).bind(request_of(MUTANTS))
    rank = place(plan.consumer.identity.rank)
    apply(change(copies_of(plan, binding)), binding.fills, world, rank)
    poke(world)
    return not list(oracle.differences(world.consumers[rank].buffers, world.expected[rank].memory.buffers))


def test_the_comparison_accepts_what_is_right() -> None:
    assert image_is_right(lambda copies: copies)


@pytest.mark.parametrize("which", [0, 1, 7, -1])
def test_the_comparison_notices_a_copy_that_is_dropped(which: int) -> None:
    def drop(copies: list[Copy]) -> list[Copy]:
        return [c for c in copies if c != copies[which]]

    assert not image_is_right(drop)


@pytest.mark.parametrize("which", [0, 1, 7, -2])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_the_comparison_notices_a_copy_that_is_shifted(which: int, side: str) -> None:
    def shift(copies: list[Copy]) -> list[Copy]:
        at = getattr(copies[which], side)
        moved = replace(copies[which], **{side: at + 1 if at == 0 else at - 1})
        return [moved if c == copies[which] else c for c in copies]

    assert not image_is_right(shift)


@pytest.mark.parametrize("region", [0, -1])
@pytest.mark.parametrize("at", [0, -1])
def test_the_comparison_notices_one_flipped_byte(region: int, at: int) -> None:
    def flip(world: oracle.World) -> None:
        world.consumers[1, 0].buffers[region][at] ^= 1

    assert not image_is_right(lambda copies: copies, flip)
