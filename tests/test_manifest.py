"""Builders of every layer kind, pools, and what makes a manifest contradict itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.errors import ManifestError, UnshardableError
from kvferry.manifest import (
    Attention,
    Axis,
    Chunk,
    Element,
    Entries,
    GatedDelta,
    Group,
    GroupSpec,
    Identity,
    LatentAttention,
    Layer,
    LayerKind,
    LayerSpec,
    Layout,
    LinearAttention,
    Mamba1,
    Mamba2,
    Manifest,
    OpaqueCells,
    OpaqueState,
    Part,
    Rank,
    Region,
    Shape,
    ShortConv,
    StatePaged,
    TokenAxis,
    TokenPaged,
    Window,
    build_manifest,
    check_manifest,
    page_bytes,
)
from kvferry.manifest.kinds import Shard

KINDS = {
    "gqa": Attention(4, 8),
    "mqa": Attention(1, 8),
    "window": Attention(4, 8, reach=Window(40), v_dim=4),
    "chunk": Attention(4, 8, "float8_e4m3fn", reach=Chunk(64), scales=(0.5, 0.25)),
    "mla": LatentAttention(16, 4),
    "mla+indexer": LatentAttention(16, 4, indexer=12),
    "entries": Entries("compressed", 24, tokens_per_entry=4),
    "mamba1": Mamba1(12, 4),
    "mamba2": Mamba2(4, 2, 3, groups=2, ssm_dtype="float32"),
    "mamba2 one group": Mamba2(4, 2, 3, groups=1),
    "gated delta": GatedDelta(2, 4, 3, 5),
    "short conv": ShortConv(12),
    "linear": LinearAttention(4, 2, 3),
    "opaque cells": OpaqueCells("flash", 10),
    "opaque head cells": OpaqueCells("flash", 10, head_slots=2),
    "opaque state": OpaqueState("private", 70),
}


def rank_of(tp: int = 0, tp_size: int = 1) -> Identity:
    return Identity("p", "1", "model", Rank(tp, tp_size))


def tokens_of(kind: LayerKind, tokens: int = 16) -> int:
    return tokens if kind.paging == "token" else 0


WHOLE = Shard()
PLAIN = Layout()


def one_layer(kind: LayerKind, shard: Shard = WHOLE, layout: Layout = PLAIN, blocks: int = 3) -> Manifest:
    group = GroupSpec(0, (LayerSpec("L", kind),), tokens_of(kind, layout.block))
    return build_manifest(rank_of(shard.rank, shard.size), (group,), layout, blocks)


def owned(manifest: Manifest, part: str, axis: str) -> tuple[int, int, int]:
    found = next(p for p in manifest.layers[0].parts if p.name == part)
    a = next(a for a in manifest.shapes[found.shape].axes if a.name == axis)
    return a.size, a.start, a.stop


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("gqa", {"k": ("head", "dim"), "v": ("head", "dim")}),
        ("window", {"k": ("head", "dim"), "v": ("head", "dim")}),
        ("mla", {"latent": ("dim",)}),
        ("mla+indexer", {"latent": ("dim",), "indexer": ("dim",)}),
        ("entries", {"compressed": ("dim",)}),
        ("mamba1", {"conv.x": ("channel", "tap"), "ssm": ("channel", "state")}),
        (
            "mamba2",
            {
                "conv.x": ("channel", "tap"),
                "conv.B": ("channel", "tap"),
                "conv.C": ("channel", "tap"),
                "ssm": ("head", "dim", "state"),
            },
        ),
        (
            "gated delta",
            {
                "conv.q": ("channel", "tap"),
                "conv.k": ("channel", "tap"),
                "conv.v": ("channel", "tap"),
                "ssm": ("head", "dim", "state"),
            },
        ),
        ("short conv", {"conv.x": ("channel", "tap")}),
        ("linear", {"ssm": ("head", "dim", "state")}),
        ("opaque cells", {"bytes": ()}),
        ("opaque head cells", {"bytes": ("head",)}),
        ("opaque state", {"bytes": ()}),
    ],
)
def test_a_kind_has_its_parts_and_axes(kind, parts):
    manifest = one_layer(KINDS[kind])
    layer = manifest.layers[0]
    assert {p.name: tuple(a.name for a in manifest.shapes[p.shape].axes) for p in layer.parts} == parts
    assert all((manifest.shapes[p.shape].token is not None) == (KINDS[kind].paging == "token") for p in layer.parts)
    assert layer.reach == KINDS[kind].reach


@pytest.mark.parametrize(
    ("kind", "part", "axis", "size", "extents"),
    [
        ("gqa", "k", "head", 4, [(0, 2), (2, 4)]),
        ("gqa", "v", "head", 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ("gqa", "k", "head", 4, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]),
        ("mqa", "k", "head", 1, [(0, 1)] * 3),
        ("mla+indexer", "latent", "dim", 20, [(0, 20)] * 3),
        ("mla+indexer", "indexer", "dim", 12, [(0, 12)] * 3),
        ("mamba1", "conv.x", "channel", 12, [(0, 4), (4, 8), (8, 12)]),
        ("mamba1", "ssm", "channel", 12, [(0, 4), (4, 8), (8, 12)]),
        ("mamba2", "conv.x", "channel", 8, [(0, 4), (4, 8)]),
        ("mamba2", "conv.B", "channel", 6, [(0, 3), (3, 6)]),
        ("mamba2", "ssm", "head", 4, [(0, 2), (2, 4)]),
        ("mamba2 one group", "conv.C", "channel", 3, [(0, 3)] * 4),
        ("mamba2 one group", "conv.x", "channel", 8, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("gated delta", "conv.q", "channel", 6, [(0, 3), (3, 6)]),
        ("gated delta", "conv.v", "channel", 20, [(0, 10), (10, 20)]),
        ("gated delta", "ssm", "head", 4, [(0, 2), (2, 4)]),
        ("short conv", "conv.x", "channel", 12, [(0, 6), (6, 12)]),
        ("linear", "ssm", "head", 4, [(0, 2), (2, 4)]),
        ("opaque head cells", "bytes", "head", 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
    ],
)
def test_ranks_own_the_extents_that_engines_give_them(kind, part, axis, size, extents):
    ranks = [one_layer(KINDS[kind], Shard(i, len(extents))) for i in range(len(extents))]
    assert [owned(m, part, axis) for m in ranks] == [(size, *extent) for extent in extents]


@pytest.mark.parametrize(
    ("kind", "tp", "reason"),
    [
        ("gqa", 3, "4 kv heads cannot be dealt evenly to 3 tensor-parallel ranks"),
        ("gqa", 6, "6 tensor-parallel ranks cannot share 4 kv heads evenly"),
        ("mamba1", 5, "12 channels cannot be dealt evenly to 5 tensor-parallel ranks"),
        ("mamba2", 3, "4 Mamba2 heads cannot be dealt evenly to 3 tensor-parallel ranks"),
        ("mamba2", 4, "2 Mamba2 groups cannot be dealt evenly to 4 tensor-parallel ranks"),
        ("gated delta", 4, "2 linear key heads cannot be dealt evenly to 4 tensor-parallel ranks"),
        ("linear", 8, "4 linear-attention heads cannot be dealt evenly to 8 tensor-parallel ranks"),
        ("short conv", 7, "12 channels cannot be dealt evenly to 7 tensor-parallel ranks"),
        ("opaque head cells", 3, "3 tensor-parallel ranks cannot share 2 head slots evenly"),
    ],
)
def test_a_size_that_no_engine_could_run_is_refused_with_the_reason(kind, tp, reason):
    with pytest.raises(UnshardableError, match=reason):
        one_layer(KINDS[kind], Shard(0, tp))


def strides_of(manifest: Manifest, part: str) -> dict[str, int]:
    """Strides by axis, and of the blocks, of a part whose axes have one digit each."""
    found = next(p for p in manifest.layers[0].parts if p.name == part)
    shape = manifest.shapes[found.shape]
    out = {a.name: a.digits[0][1] for a in shape.axes}
    assert all(len(a.digits) == 1 for a in shape.axes)
    if shape.token:
        assert [count for count, _ in shape.token.digits[:-1]] == [1] * (len(shape.token.digits) - 1)
        out["token"] = shape.token.digits[-1][1]
    return {"block": found.block_stride, **out}


def numpy_strides(order: str, counts: dict[str, int], dtype: str, last: int = 1) -> dict[str, int]:
    """Strides of a NumPy array whose axes lie in `order`; `last` elements share the innermost place."""
    names = order.split()
    array = np.zeros([*(counts[n] for n in names), last], dtype)
    return dict(zip(names, array.strides, strict=False))


COUNTS = {"block": 3, "head": 4, "token": 16, "dim": 8, "channel": 12, "tap": 3, "state": 4}


@pytest.mark.parametrize(
    ("layout", "k", "v"),
    [
        (Layout(kv="separate", order="head"), "block head token dim", "block head token dim"),
        (Layout(kv="separate", order="token"), "block token head dim", "block token head dim"),
    ],
)
def test_separate_tensors_have_the_strides_of_numpy(layout, k, v):
    manifest = one_layer(KINDS["gqa"], layout=layout)
    assert strides_of(manifest, "k") == numpy_strides(k, COUNTS, "int16")
    assert strides_of(manifest, "v") == numpy_strides(v, COUNTS, "int16")
    assert [p.region for p in manifest.layers[0].parts] == [0, 1]


@pytest.mark.parametrize("order", ["head", "token"])
def test_paged_tensors_have_the_strides_of_numpy_with_k_and_v_behind_each_other(order):
    manifest = one_layer(KINDS["gqa"], layout=Layout(kv="paged", order=order))
    array = np.zeros((3, 2, 4, 16, 8) if order == "head" else (3, 2, 16, 4, 8), np.int16)
    names = ("block", "kv", "head", "token", "dim") if order == "head" else ("block", "kv", "token", "head", "dim")
    wanted = dict(zip(names, array.strides, strict=True))
    distance = wanted.pop("kv")
    assert strides_of(manifest, "k") == strides_of(manifest, "v") == wanted
    assert [p.offset for p in manifest.layers[0].parts] == [0, distance]


@pytest.mark.parametrize("order", ["head", "token"])
def test_packed_tensors_have_the_strides_of_numpy_with_k_and_v_in_one_row(order):
    manifest = one_layer(KINDS["gqa"], layout=Layout(kv="packed", order=order))
    array = np.zeros((3, 4, 16, 16) if order == "head" else (3, 16, 4, 16), np.int16)
    names = ("block", "head", "token", "dim") if order == "head" else ("block", "token", "head", "dim")
    assert strides_of(manifest, "k") == strides_of(manifest, "v") == dict(zip(names, array.strides, strict=True))
    assert [p.offset for p in manifest.layers[0].parts] == [0, 16]


def test_a_transposed_k_has_the_strides_of_numpy():
    manifest = one_layer(KINDS["gqa"], layout=Layout(kv="transposed"))
    k = np.zeros((3, 4, 2, 8, 16), np.int16)
    v = np.zeros((3, 4, 2, 16, 8), np.int16)
    assert strides_of(manifest, "k") == dict(
        zip(("block", "head", "dim", "token"), (*k.strides[:2], *k.strides[3:]), strict=True)
    )
    assert strides_of(manifest, "v") == dict(
        zip(("block", "head", "token", "dim"), (*v.strides[:2], *v.strides[3:]), strict=True)
    )
    assert [p.offset for p in manifest.layers[0].parts] == [0, k.strides[2]]


@pytest.mark.parametrize(("conv", "order"), [("ds", "channel tap"), ("sd", "tap channel")])
def test_conv_states_have_the_strides_of_numpy(conv, order):
    manifest = one_layer(ShortConv(12, kernel=4), layout=Layout(conv=conv))
    assert strides_of(manifest, "conv.x") == numpy_strides(f"block {order}", COUNTS, "int16")


def test_conv_parts_share_rows_of_taps_where_taps_are_outermost():
    manifest = one_layer(Mamba2(4, 2, 3, groups=2), layout=Layout(conv="sd"))
    rows = np.zeros((3, 8 + 6 + 6), np.int16)
    assert {strides_of(manifest, f"conv.{p}")["tap"] for p in "xBC"} == {rows.strides[0]}
    assert [p.offset for p in manifest.layers[0].parts] == [0, 16, 28, rows.nbytes]


def test_an_ssm_state_has_the_strides_of_numpy():
    manifest = one_layer(LinearAttention(4, 6, 5))
    array = np.zeros((3, 4, 5, 6), np.float32)
    assert strides_of(manifest, "ssm") == dict(zip(("block", "head", "dim", "state"), array.strides, strict=True))


def test_kernel_blocks_are_a_further_digit_of_the_token_axis():
    group = GroupSpec(0, (LayerSpec("L", KINDS["gqa"]),), 48)
    manifest = build_manifest(rank_of(), (group,), Layout(block=16, kv="separate"), 5)
    array = np.zeros((5, 3, 4, 16, 8), np.int16)
    token = manifest.shapes[0].token
    assert token is not None
    assert token.digits == ((3, array.strides[1]), (16, array.strides[3]))
    assert manifest.layers[0].parts[0].block_stride == array.strides[0]
    assert manifest.groups[0].paging == TokenPaged(48, 3)


def test_an_entry_stands_for_its_tokens():
    manifest = one_layer(KINDS["entries"])
    assert manifest.shapes[0].token == TokenAxis(((1, 96), (4, 24)), 4, partial=False)
    with pytest.raises(ManifestError, match="compressed: a kernel block of 6 tokens does not hold whole entries of 4 tokens"):
        one_layer(KINDS["entries"], layout=Layout(block=6))


def test_an_opaque_cell_is_named_after_its_kernel_block():
    manifest = one_layer(KINDS["opaque head cells"], Shard(1, 2))
    assert manifest.shapes[0].element == Element("opaque", 160, opaque="flash/16")
    assert manifest.shapes[0].token is not None
    assert manifest.shapes[0].token.moves_partial
    assert owned(manifest, "bytes", "head") == (2, 1, 2)


def test_spec_taps_are_scratch_behind_the_live_ones():
    taps = one_layer(ShortConv(12, kernel=4), layout=Layout(spec=3)).shapes[0].axes[1]
    assert (taps.size, taps.live, taps.live_size) == (6, 3, 3)


HYBRID = (
    GroupSpec(0, (LayerSpec("layers.0", KINDS["gqa"]), LayerSpec("layers.2", KINDS["gqa"])), 16),
    GroupSpec(1, (LayerSpec("layers.1", KINDS["mamba2"]), LayerSpec("layers.3", KINDS["mamba2"]))),
    GroupSpec(2, (LayerSpec("layers.4", KINDS["window"]),), 32, Window(40)),
)


def test_a_layer_major_pool_has_a_region_per_slot():
    manifest = build_manifest(rank_of(), HYBRID, Layout(overlay=False), 5, base_address=4096)
    assert [r.name for r in manifest.regions] == [f"slot{i}.0" for i in range(5)]
    assert [(p.region, p.offset) for layer in manifest.layers for p in layer.parts[:1]] == [(i, 0) for i in range(5)]
    ends = [4096, *(r.address + r.length for r in manifest.regions)]
    assert [r.address for r in manifest.regions] == ends[:-1]


def test_a_block_major_pool_has_the_slots_of_a_block_behind_each_other():
    manifest = build_manifest(rank_of(), HYBRID, Layout(pool="block", overlay=False), 5)
    pages = {kind: page_bytes(KINDS[kind], Shard(), Layout()) for kind in ("gqa", "mamba2", "window")}
    sizes = [pages["gqa"]] * 2 + [pages["mamba2"]] * 2 + [2 * pages["window"]]
    assert [layer.parts[0].offset for layer in manifest.layers] == [sum(sizes[:i]) for i in range(5)]
    assert {p.block_stride for layer in manifest.layers for p in layer.parts} == {sum(sizes)}
    assert [r.length for r in manifest.regions] == [5 * sum(sizes)]


def test_overlaid_groups_share_slots_as_wide_as_the_widest_page():
    manifest = build_manifest(rank_of(), HYBRID, Layout(overlay=True), 5)
    assert len(manifest.regions) == 2
    assert [layer.parts[0].region for layer in manifest.layers] == [0, 1, 0, 1, 0]
    wide = 2 * page_bytes(KINDS["window"], Shard(), Layout())
    assert {p.block_stride for layer in manifest.layers for p in layer.parts if p.region == 0} == {wide}


def test_pages_are_padded_to_the_alignment():
    layout = Layout(page_align=512)
    manifest = one_layer(KINDS["mamba2"], layout=layout)
    used = page_bytes(KINDS["mamba2"], Shard(), layout)
    assert manifest.layers[0].parts[0].block_stride == -(-used // 512) * 512 > used


def test_a_layer_of_the_other_paging_is_refused():
    with pytest.raises(ManifestError, match=r"layers\.1: paged by state, but group 0 has 16 tokens a block"):
        build_manifest(rank_of(), (GroupSpec(0, (LayerSpec("layers.1", KINDS["mamba1"]),), 16),), Layout(), 2)
    with pytest.raises(ManifestError, match="a block of 24 tokens is not made of whole kernel blocks of 16"):
        build_manifest(rank_of(), (GroupSpec(0, (LayerSpec("layers.0", KINDS["gqa"]),), 24),), Layout(), 2)


LAYOUTS = [
    Layout(kv=kv, order=order, conv=conv, spec=spec, pool=pool, overlay=overlay, page_align=align)
    for kv, order, conv, spec, pool, overlay, align in [
        ("packed", "head", "ds", 0, "layer", True, 1),
        ("packed", "token", "sd", 2, "block", True, 64),
        ("paged", "head", "sd", 0, "block", False, 1),
        ("paged", "token", "ds", 1, "layer", False, 256),
        ("separate", "head", "ds", 0, "layer", True, 1),
        ("separate", "token", "sd", 3, "block", True, 1),
        ("transposed", "head", "ds", 0, "block", True, 128),
        ("transposed", "token", "sd", 0, "layer", False, 1),
    ]
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.kv}-{x.order}-{x.conv}-{x.pool}-{x.overlay}")
@pytest.mark.parametrize("tp", [1, 2])
def test_every_kind_in_every_layout_makes_sense(layout, tp):
    groups = tuple(
        GroupSpec(i, (LayerSpec(f"{name}.a", kind), LayerSpec(f"{name}.b", kind)), tokens_of(kind, 48))
        for i, (name, kind) in enumerate(KINDS.items())
    )
    for rank in range(tp):
        check_manifest(build_manifest(rank_of(rank, tp), groups, layout, 7, base_address=1 << 20))


def test_a_rank_without_layers_makes_sense():
    check_manifest(build_manifest(rank_of(), (), Layout(), 4))
    check_manifest(build_manifest(rank_of(), (GroupSpec(0, (), 16),), Layout(), 4))


BYTE = Element("uint8", 1)


def row(name: str, count: int, stride: int = 1) -> Axis:
    return Axis(name, count, 0, count, ((count, stride),))


def states(
    places: Iterable[tuple[str, Part]], shapes: tuple[Shape, ...], length: int, groups: tuple[Group, ...] = (), blocks: int = 4
) -> Manifest:
    """Parts by layer, in one region; a layer named `a@1` is in group 1."""
    layers: dict[str, list[Part]] = defaultdict(list)
    for layer, part in places:
        layers[layer].append(part)
    return Manifest(
        Identity("p", "1", "model"),
        (Region("pool", length),),
        groups or (Group(0, StatePaged(), blocks), Group(1, StatePaged(), blocks)),
        shapes,
        tuple(Layer(name, int(name[-1]) if "@" in name else 0, tuple(parts)) for name, parts in layers.items()),
    )


def refused(manifest: Manifest) -> str:
    with pytest.raises(ManifestError) as caught:
        check_manifest(manifest)
    return str(caught.value)


TEN = (Shape(BYTE, (row("dim", 10),)),)


def test_k_and_v_in_halves_of_one_region_make_sense():
    k = np.zeros((2, 6, 16, 2, 4), np.int16)
    token = TokenAxis(((16, k.strides[2]),))
    shape = Shape(Element("bfloat16", 2), (row("head", 2, k.strides[3]), row("dim", 4, 2)), token)
    parts = (Part("k", 0, 0, 0, k.strides[1]), Part("v", 0, 0, k.strides[0], k.strides[1]))
    manifest = Manifest(
        Identity("p", "1", "model"),
        (Region("kv", k.nbytes),),
        (Group(0, TokenPaged(16), 6),),
        (shape,),
        (Layer("layers.0", 0, parts),),
    )
    check_manifest(manifest)
    late = replace(manifest, layers=(Layer("layers.0", 0, (parts[0], replace(parts[1], offset=k.strides[0] - 2))),))
    assert "layers.0 k and layers.0 v share bytes of a block, or of different blocks" in refused(late)


def test_groups_may_overlay_the_same_blocks():
    places = [("a", Part("s", 0, 0, 0, 12)), ("b@1", Part("s", 0, 0, 2, 12))]
    check_manifest(states(places, TEN, 48))


def test_groups_may_not_overlay_other_blocks():
    places = [("a", Part("s", 0, 0, 0, 12)), ("b@1", Part("s", 0, 0, 12, 12))]
    assert "a s and b@1 s share bytes of a block, or of different blocks" in refused(states(places, TEN, 60))
    check_manifest(states([places[0], ("b@1", Part("s", 0, 0, 48, 12))], TEN, 96))


def test_groups_that_overlay_with_different_strides_are_refused():
    places = [("a", Part("s", 0, 0, 0, 12)), ("b@1", Part("s", 0, 0, 0, 14))]
    assert refused(states(places, TEN, 60)) == "region pool: a s and b@1 s overlap with different block strides"


def test_groups_of_one_block_have_no_stride_that_could_differ():
    places = [("a", Part("s", 0, 0, 0, 3)), ("b@1", Part("s", 0, 0, 0, 14))]
    check_manifest(states(places, TEN, 60, blocks=1))


def test_tensors_of_different_pages_may_lie_behind_each_other_in_one_region():
    wide = Shape(BYTE, (row("dim", 96),))
    narrow = Shape(BYTE, (row("dim", 64),))
    at = (0, 4 * 64, 4 * (64 + 96))
    strides = (64, 96, 64)
    places = [
        (f"layers.{i}", Part("k", int(n == 96), 0, where, n)) for i, (where, n) in enumerate(zip(at, strides, strict=True))
    ]
    check_manifest(states(places, (narrow, wide), 4 * (64 + 96 + 64)))
    late = [places[0], ("layers.1", replace(places[1][1], offset=at[1] - 1)), places[2]]
    assert "layers.0 k and layers.1 k overlap with different block strides" in refused(
        states(late, (narrow, wide), 4 * (64 + 96 + 64))
    )


def test_strides_that_interleave_are_right_where_no_byte_is_shared():
    def shape(stride: int) -> Shape:
        return Shape(BYTE, (row("head", 3, 2), row("dim", 2, stride)))

    check_manifest(states([("a", Part("x", 0, 0, 0, 8))], (shape(3),), 40))
    assert "steps inside" in refused(states([("a", Part("x", 0, 0, 0, 8))], (shape(2),), 40))


def test_different_strides_between_each_other_in_too_many_pieces_are_refused():
    one = Shape(BYTE, (row("dim", 1),))
    places = [("a", Part("x", 0, 0, 0, 4)), ("b", Part("x", 0, 0, 2, 8))]
    check_manifest(states(places, (one,), 1 << 15, blocks=1 << 12))
    assert "too many to check" in refused(states(places, (one,), 1 << 30, blocks=1 << 22))


def test_an_entry_of_several_tokens_says_whether_it_is_written_before_it_is_complete():
    manifest = one_layer(KINDS["entries"])
    token = TokenAxis(((1, 96), (4, 24)), 4)
    silent = replace(manifest, shapes=(replace(manifest.shapes[0], token=token),))
    assert "L compressed: an entry stands for 4 tokens, but it is not declared whether an incomplete one" in refused(silent)


def test_an_empty_region_shares_no_memory():
    manifest = one_layer(KINDS["gqa"])
    placed = replace(manifest.regions[0], address=4096)
    check_manifest(replace(manifest, regions=(placed, Region("empty", 0, 4100))))


def test_parts_of_one_block_may_not_share_a_byte():
    places = [("a", Part("x", 0, 0, 0, 30)), ("a", Part("y", 0, 0, 10, 30)), ("b", Part("z", 0, 0, 19, 30))]
    assert "a y and b z share bytes of a block" in refused(states(places, TEN, 120))
    places[2] = ("b", Part("z", 0, 0, 20, 30))
    check_manifest(states(places, TEN, 120))


def test_a_part_longer_than_its_block_stride_is_refused():
    assert "a x is longer than its block stride of 9 bytes" in refused(states([("a", Part("x", 0, 0, 0, 9))], TEN, 120))
    assert "a x is longer than its block stride of 0 bytes" in refused(states([("a", Part("x", 0, 0, 0, 0))], TEN, 120))
    check_manifest(states([("a", Part("x", 0, 0, 0, 0))], TEN, 120, blocks=1))


def test_a_page_that_is_packed_in_pieces_may_be_large():
    """Pieces of K and V that fill each other's gaps are one stretch, however many there are."""
    tokens, heads = 4096, 64
    token = TokenAxis(((tokens, 8),))
    shape = Shape(BYTE, (row("head", heads, 8 * tokens), row("dim", 4)), token)
    page = 8 * tokens * heads
    manifest = Manifest(
        Identity("p", "1", "model"),
        (Region("pool", 2 * 5 * page),),
        (Group(0, TokenPaged(tokens), 5),),
        (shape,),
        tuple(Layer(f"{i}", 0, (Part("k", 0, 0, i * page, 2 * page), Part("v", 0, 0, i * page + 4, 2 * page))) for i in (0, 1)),
    )
    check_manifest(manifest)
    crossed = replace(manifest.layers[1], parts=(manifest.layers[1].parts[0], Part("v", 0, 0, page + 3, 2 * page)))
    assert "1 k: more than 65,536 separate pieces" in refused(replace(manifest, layers=(manifest.layers[0], crossed)))


@pytest.mark.parametrize(
    ("places", "shapes", "length", "message"),
    [
        ([("a", Part("x", 0, 0, 1, 10))], TEN, 40, "a x: reaches byte 41 of region pool, which has 40"),
        ([("a", Part("x", 0, 0, 0, 11))], TEN, 42, "a x: reaches byte 43 of region pool, which has 42"),
        (
            [("a", Part("x", 0, 0, 0, 10))],
            (Shape(BYTE, (Axis("dim", 12, 0, 12, ((5, 2), (2, 1))),)),),
            48,
            "a x: axis dim: digits hold 10 indices, [0, 12) has 12",
        ),
        (
            [("a", Part("x", 0, 0, 0, 10))],
            (Shape(BYTE, (Axis("dim", 12, 4, 14, ((10, 1),)),)),),
            48,
            "a x: axis dim: [4, 14) is not inside [0, 12)",
        ),
        (
            [("a", Part("x", 0, 0, 0, 10))],
            (Shape(BYTE, (Axis("dim", 10, 0, 10, ((10, 1),), 11),)),),
            48,
            "a x: axis dim: 11 live indices of 10",
        ),
        (
            [("a", Part("x", 0, 0, 0, 20))],
            (Shape(BYTE, (row("head", 2, 4), row("dim", 5))),),
            80,
            "a x: a stride of 4 bytes steps inside 5 bytes already taken",
        ),
        (
            [("a", Part("x", 0, 0, 0, 20))],
            (Shape(BYTE, (row("dim", 5, 0),)),),
            80,
            "a x: a stride of 0 bytes steps inside 1 bytes already taken",
        ),
        (
            [("a", Part("x", 0, 0, 0, 20))],
            (Shape(BYTE, (row("dim", 5), row("dim", 2, 5))),),
            80,
            "a x: an axis is named twice, or a plain axis is named 'token'",
        ),
        (
            [("a", Part("x", 0, 0, 0, 20))],
            (Shape(BYTE, (row("token", 5),)),),
            80,
            "a x: an axis is named twice, or a plain axis is named 'token'",
        ),
        (
            [("a", Part("x", 0, 0, 0, 20))],
            (Shape(Element("float12", 2), ()),),
            80,
            "a x: dtype float12 of 2 bytes is unknown; known: bool, ",
        ),
        ([("a", Part("x", 0, 0, 0, 20))], (Shape(Element("float16", 4), ()),), 80, "a x: dtype float16 of 4 bytes is unknown"),
        (
            [("a", Part("x", 0, 0, 0, 20))],
            (Shape(Element("int8", 1, (float("nan"),)), ()),),
            80,
            "a x: scales (nan,) are not numbers",
        ),
        (
            [("a", Part("x", 0, 0, 0, 20)), ("b", Part("y", 1, 0, 10, 20))],
            (TEN[0], Shape(BYTE, (Axis("dim", 1 << 40, 0, 1, ()), Axis("head", 1 << 40, 0, 1, ())))),
            80,
            "b y: more than 1,125,899,906,842,624 bytes over all ranks",
        ),
        (
            [("a", Part("x", 0, 0, 0, 1 << 17))],
            (Shape(BYTE, (Axis("dim", 1 << 17, 0, 1 << 17, ((2, 1), (1 << 16, 2))),)),),
            1 << 20,
            "a x: axis dim: more than 65,536 indices in several digits",
        ),
        (
            [("a", Part("x", 0, 0, 0, 1 << 19))],
            (Shape(BYTE, (row("dim", 1 << 17, 2),)),),
            1 << 21,
            "a x: more than 65,536 separate pieces in one block",
        ),
        ([("a", Part("x", 1, 0, 0, 10))], TEN, 40, "a x: shape 1 is not declared"),
        ([("a", Part("x", 0, 1, 0, 10))], TEN, 40, "a x: region 1 is not declared"),
        ([("a@7", Part("x", 0, 0, 0, 10))], TEN, 40, "a@7: group 7 is not declared"),
        ([("a", Part("x", 0, 0, 0, 20)), ("a", Part("x", 0, 0, 10, 20))], TEN, 80, "a x is declared twice"),
    ],
)
def test_a_contradiction_is_refused_by_layer_and_part(places, shapes, length, message):
    assert message in refused(states(places, shapes, length))


def test_a_layer_or_a_group_declared_twice_is_refused():
    manifest = states([("a", Part("x", 0, 0, 0, 20)), ("b", Part("x", 0, 0, 10, 20))], TEN, 80)
    twice = replace(manifest, layers=(manifest.layers[0], replace(manifest.layers[1], name="a")))
    assert refused(twice) == "layer a is declared twice"
    assert refused(replace(manifest, groups=(manifest.groups[0], replace(manifest.groups[0], blocks=2)))) == (
        "two groups have the same id"
    )


def test_token_counts_that_do_not_make_a_block_are_refused():
    manifest = one_layer(KINDS["gqa"])

    def with_paging(paging: TokenPaged | StatePaged) -> Manifest:
        return replace(manifest, groups=(replace(manifest.groups[0], paging=paging),))

    assert "L k: 16 entries of 1 tokens do not make the group's 15 tokens" in refused(with_paging(TokenPaged(15)))
    assert "L k: has a token axis, but group 0 is not paged so" in refused(with_paging(StatePaged()))
    assert "group 0: 16 tokens cannot be cut into 3 kernel blocks" in refused(with_paging(TokenPaged(16, 3)))
    assert "group 0: a block of 1,048,576 tokens" in refused(with_paging(TokenPaged(1 << 20)))
    state = one_layer(KINDS["mamba1"])
    paged = replace(state, groups=(replace(state.groups[0], paging=TokenPaged(16)),))
    assert "L conv.x: has no token axis, but group 0 is not paged so" in refused(paged)


def test_a_rank_that_cannot_exist_is_refused():
    manifest = one_layer(KINDS["gqa"])
    for rank in (Rank(2, 2), Rank(0, 1, 3, 3)):
        assert "does not exist" in refused(replace(manifest, identity=replace(manifest.identity, rank=rank)))


def test_regions_that_share_memory_are_refused():
    manifest = one_layer(KINDS["mla+indexer"])
    at = [replace(r, address=4096 + i * r.length) for i, r in enumerate(manifest.regions)]
    assert "regions slot0.0 and slot0.1 share memory" in refused(replace(manifest, regions=tuple(at)))
    check_manifest(replace(manifest, regions=(at[0], replace(at[1], memory="vram"))))
    check_manifest(replace(manifest, regions=(at[0], replace(at[1], device=1))))
    check_manifest(replace(manifest, regions=(at[0], replace(at[1], address=at[0].address + at[0].length))))
    high = replace(at[1], address=(1 << 63) - 1)
    assert "past any address" in refused(replace(manifest, regions=(at[0], high)))


def bytes_touched(manifest: Manifest, part: Part) -> list[int]:
    """Bytes of block 0, by plain loops."""
    shape = manifest.shapes[part.shape]
    out = [part.offset]
    digits = [d for a in shape.axes for d in a.digits]
    for count, stride in digits:
        out = [at + i * stride for at in out for i in range(count)]
    return [at + i for at in out for i in range(shape.element.bytes)]


def makes_sense(manifest: Manifest) -> bool:
    """Mark every byte with its owners: one block id, and no group twice."""
    owners: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    blocks = {g.id: g.blocks for g in manifest.groups}
    for layer in manifest.layers:
        for part in layer.parts:
            for block, at in product(range(blocks[layer.group]), bytes_touched(manifest, part)):
                owners[part.region, at + block * part.block_stride].append((block, layer.group))
    return all(len({b for b, _ in who}) == 1 and len({g for _, g in who}) == len(who) for who in owners.values())


@st.composite
def placements(draw: st.DrawFn, strides: st.SearchStrategy[int], blocks: st.SearchStrategy[int]) -> Manifest:
    shapes = []
    for _ in range(draw(st.integers(1, 2))):
        inner = draw(st.integers(1, 4))
        outer = draw(st.integers(1, 3))
        step = draw(st.sampled_from([inner, inner + 1, inner + 3, 12, 24, 36]))
        shapes.append(Shape(BYTE, (row("head", outer, max(step, inner)), row("dim", inner))))
    places = [
        (f"l{i}@{draw(st.integers(0, 1))}", Part("x", draw(st.integers(0, len(shapes) - 1)), 0, draw(offset), draw(strides)))
        for i, offset in enumerate([st.integers(0, 40)] * draw(st.integers(1, 4)))
    ]
    groups = tuple(Group(i, StatePaged(), draw(blocks)) for i in range(2))
    return states(places, tuple(shapes), 400, groups)


def accepted(manifest: Manifest) -> bool:
    try:
        check_manifest(manifest)
    except ManifestError:
        return False
    return True


@settings(max_examples=1500)
@given(placements(st.just(12), st.integers(2, 4)) | placements(st.just(7), st.just(1)) | placements(st.just(5), st.just(3)))
def test_the_verdict_on_shared_bytes_is_that_of_marking_every_byte(manifest):
    assert accepted(manifest) == makes_sense(manifest)


@settings(max_examples=500)
@given(placements(st.integers(0, 40), st.integers(1, 4)))
def test_whatever_the_strides_no_shared_byte_is_accepted(manifest):
    assert not accepted(manifest) or makes_sense(manifest)
