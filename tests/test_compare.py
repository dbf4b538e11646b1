"""Mismatches between two sides: every one is found and named in the words of an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvferry.errors import MismatchError
from kvferry.manifest import (
    Attention,
    Chunk,
    Cyclic,
    Element,
    Entries,
    GatedDelta,
    GroupSpec,
    Identity,
    Layer,
    LayerKind,
    LayerSpec,
    Layout,
    Mamba1,
    Mamba2,
    Manifest,
    Mismatch,
    OpaqueCells,
    OpaqueState,
    Rank,
    Shape,
    ShortConv,
    TokenPaged,
    Window,
    build_manifest,
    check_manifest,
    compare,
)
from kvferry.manifest.compare import compare_layers, content
from kvferry.plan import Fleet, make_plan, make_plans

MIXER = Mamba2(4, 2, 3, groups=2, ssm_dtype="float32")
LAYERS: dict[str, LayerKind] = {"layers.0.attn": Attention(4, 8), "layers.7.mixer": MIXER, "layers.9.mixer": MIXER}


def side(engine: str, layers: dict[str, LayerKind], layout: Layout | None = None, tp: int = 1) -> list[Manifest]:
    """All ranks of an engine, attention in group 0 and states in group 1."""
    groups = (
        GroupSpec(0, tuple(LayerSpec(n, k) for n, k in layers.items() if k.paging == "token"), 16),
        GroupSpec(1, tuple(LayerSpec(n, k) for n, k in layers.items() if k.paging == "state")),
    )
    ranks = [Identity(engine, "1", "model", Rank(i, tp)) for i in range(tp)]
    return [build_manifest(rank, groups, layout or Layout(), 4) for rank in ranks]


def differences(there: dict[str, LayerKind], here: dict[str, LayerKind], spec: tuple[int, int] = (0, 0)) -> list[str]:
    producers, consumers = side("p", there, Layout(spec=spec[0])), side("d", here, Layout(spec=spec[1]))
    return [str(m) for m in compare(consumers[0], producers)]


def test_sides_that_hold_the_same_state_have_no_mismatch():
    other = Layout(block=8, kv="separate", order="token", conv="sd", spec=2, pool="block", overlay=False)
    for consumer in side("d", LAYERS, other, tp=2):
        assert compare(consumer, side("p", LAYERS)) == ()
        assert compare(consumer, side("p", LAYERS, tp=2)) == ()


@pytest.mark.parametrize(
    ("there", "here", "mismatch"),
    [
        (ShortConv(12, kernel=5), ShortConv(12, kernel=8), "L conv.x: 4 taps there, 7 here"),
        (
            Mamba1(12, 4, ssm_dtype="float32"),
            Mamba1(12, 4, ssm_dtype="bfloat16"),
            "L ssm: float32 there, bfloat16 here; cache dtypes must be equal on both sides",
        ),
        (
            Attention(4, 8, "float8_e4m3fn"),
            Attention(4, 8, "float8_e5m2"),
            "L k: float8_e4m3fn there, float8_e5m2 here; cache dtypes must be equal on both sides",
        ),
        (
            Attention(4, 8, "int8", scales=(0.5, 0.25)),
            Attention(4, 8, "int8", scales=(0.5, 2.0)),
            "L v: scales (0.25,) there, (2.0,) here; the same bytes would mean different numbers",
        ),
        (
            Attention(4, 8, "int8", scales=(0.5, 0.25)),
            Attention(4, 8, "int8"),
            "L k: scales (0.5,) there, () here; the same bytes would mean different numbers",
        ),
        (
            OpaqueState("flash", 64),
            OpaqueState("triton", 64),
            "L bytes: opaque cells 'flash' of 64 bytes there, opaque cells 'triton' of 64 bytes here; run the same backend",
        ),
        (
            OpaqueState("flash", 64),
            OpaqueState("flash", 72),
            "L bytes: opaque cells 'flash' of 64 bytes there, opaque cells 'flash' of 72 bytes here",
        ),
        (
            Attention(4, 8, reach=Window(128)),
            Attention(4, 8),
            "L: a window of 128 tokens there, full attention here",
        ),
        (
            Attention(4, 8, reach=Window(128)),
            Attention(4, 8, reach=Chunk(128)),
            "L: a window of 128 tokens there, chunks of 128 tokens here",
        ),
        (Attention(4, 8), ShortConv(12), "L: paged by token there, by state here"),
        (ShortConv(12), Attention(4, 8), "L: paged by state there, by token here"),
        (Attention(4, 8), Attention(8, 8), "L k: 4 heads there, 8 here"),
        (Attention(4, 8), Attention(4, 16), "L v: 8 dims there, 16 here"),
        (Mamba1(12, 4), Mamba1(24, 4), "L conv.x: 12 channels there, 24 here"),
        (Mamba1(12, 4), Mamba1(12, 8), "L ssm: 4 states there, 8 here"),
        (Mamba1(12, 4), MIXER, "L conv.B: the producer does not hold this part"),
        (MIXER, Mamba1(8, 3), "L conv.B: the consumer does not hold this part"),
        (MIXER, Mamba1(8, 3), "L ssm: axes (head, dim, state) there, (channel, state) here"),
        (
            Entries("c", 8, tokens_per_entry=4),
            Entries("c", 8, tokens_per_entry=2),
            "L c: an entry stands for 4 tokens there, 2 here",
        ),
        (GatedDelta(2, 4, 3, 5), GatedDelta(2, 4, 3, 6), "L conv.v: 20 channels there, 24 here"),
    ],
)
def test_a_mismatch_names_layer_part_and_both_sides(there, here, mismatch):
    found = differences({"L": there}, {"L": here})
    assert any(f.startswith(mismatch) for f in found), found


def test_taps_are_named_in_the_words_of_the_operator():
    there = {**LAYERS, "layers.7.mixer": Mamba2(4, 2, 3, groups=2, kernel=5, ssm_dtype="float32")}
    here = {**LAYERS, "layers.7.mixer": Mamba2(4, 2, 3, groups=2, kernel=8, ssm_dtype="float32")}
    assert differences(there, here) == [f"layers.7.mixer conv.{p}: 4 taps there, 7 here" for p in "xBC"]


def test_spec_taps_are_scratch_and_no_mismatch():
    assert differences(LAYERS, LAYERS, (0, 3)) == differences(LAYERS, LAYERS, (2, 0)) == []


def test_an_ssm_dtype_is_named_for_every_layer_that_differs():
    here = {n: replace_dtype(k) for n, k in LAYERS.items()}
    assert differences(LAYERS, here) == [
        f"layers.{i}.mixer ssm: float32 there, float16 here; cache dtypes must be equal on both sides" for i in (7, 9)
    ]


def replace_dtype(kind: LayerKind) -> LayerKind:
    return Mamba2(4, 2, 3, groups=2, ssm_dtype="float16") if isinstance(kind, Mamba2) else kind


def test_sides_that_disagree_on_incomplete_entries_are_named():
    there, here = ({"L": Entries("scale", 2, tokens_per_entry=16, partial=partial)} for partial in (True, False))
    assert differences(there, here) == [
        "L scale: an incomplete entry holds its first tokens (partial) there, holds nothing yet here"
    ]


def test_opaque_cells_of_other_kernel_blocks_say_what_to_do():
    producers = side("p", {"L": OpaqueCells("flash", 10)})
    consumers = side("d", {"L": OpaqueCells("flash", 10)}, Layout(block=8))
    found = [str(m) for m in compare(consumers[0], producers)]
    assert any("an entry stands for 16 tokens there, 8 here; opaque cells cannot be cut" in f for f in found)
    assert any("'flash/16' of 160 bytes there, opaque cells 'flash/8' of 80 bytes here" in f for f in found)


def test_a_layer_that_no_producer_holds_is_named_unless_it_is_not_required():
    here = {**LAYERS, "draft.0": Attention(4, 8)}
    assert differences(LAYERS, here) == [
        "draft.0: held by no producer rank; does the producer run the whole model, and all of its ranks?"
    ]
    consumer = side("d", here)[0]
    layers = tuple(replace(layer, required=layer.name != "draft.0") for layer in consumer.layers)
    assert compare(replace(consumer, layers=layers), side("p", LAYERS)) == ()


def test_a_layer_that_only_the_producer_holds_is_no_mismatch():
    assert differences({**LAYERS, "draft.0": Attention(4, 8)}, LAYERS) == []


def renamed(manifest: Manifest, **changes: object) -> Manifest:
    return replace(manifest, identity=replace(manifest.identity, **changes))


def test_ranks_that_disagree_on_a_group_are_named():
    one, other = side("p", LAYERS, tp=2)
    fewer = replace(other, groups=tuple(replace(g, blocks=3) for g in other.groups))
    assert [str(m) for m in compare(side("d", LAYERS)[0], [one, fewer])] == [
        f"the producer's ranks disagree on group {i}: one block table cannot serve them all" for i in (0, 1)
    ]


def test_another_model_is_named():
    producers = [renamed(m, model="llama@2") for m in side("p", LAYERS)]
    assert [str(m) for m in compare(side("d", LAYERS)[0], producers)] == ["model llama@2 there, model here"]


def test_ranks_of_different_incarnations_are_named():
    one, other = side("p", LAYERS, tp=2)
    found = compare(side("d", LAYERS)[0], [one, renamed(other, incarnation="2")])
    assert [str(m) for m in found] == ["the producer's ranks are of different engines or incarnations: p@1, p@2"]


def test_ranks_of_different_engines_are_named():
    one, other = side("p", LAYERS, tp=2)
    found = compare(side("d", LAYERS)[0], [one, renamed(other, engine="q")])
    assert [str(m) for m in found] == ["the producer's ranks are of different engines or incarnations: p@1, q@1"]


def test_a_producer_rank_that_appears_twice_is_named():
    one, other = side("p", LAYERS, tp=2)
    assert [str(m) for m in compare(side("d", LAYERS)[0], [one, other, one])] == ["producer rank tp0/2 pp0/1 appears twice"]


def test_a_layer_in_different_groups_on_the_ranks_of_a_producer_is_named():
    one, other = side("p", {"a": Attention(4, 8), "b": Attention(4, 8)}, tp=2)
    token = (*other.groups[:1], replace(other.groups[0], id=5))
    moved = replace(other, groups=token, layers=(other.layers[0], replace(other.layers[1], group=5)))
    check_manifest(moved)
    consumer = side("d", {"a": Attention(4, 8), "b": Attention(4, 8)})[0]
    assert [str(m) for m in compare(consumer, [one, moved])] == ["b: the producer's ranks put it in different groups"]


@pytest.mark.parametrize(
    ("paging", "mismatch"),
    [
        (
            TokenPaged(16, cyclic=Cyclic(0, 2, 16)),
            "p tp0/1 pp0/1: group 0 deals its tokens to context-parallel ranks: not supported yet",
        ),
        (TokenPaged(16, ring=8), "p tp0/1 pp0/1: group 0 is a ring of tokens: not supported yet"),
    ],
)
def test_what_the_schema_can_say_but_no_plan_can_do_is_refused(paging, mismatch):
    producer = side("p", LAYERS)[0]
    groups = (replace(producer.groups[0], paging=paging), *producer.groups[1:])
    assert [str(m) for m in compare(side("d", LAYERS)[0], [replace(producer, groups=groups)])] == [mismatch]


def with_shapes(manifest: Manifest, change: Callable[[Shape], Shape]) -> Manifest:
    return replace(manifest, shapes=tuple(change(s) for s in manifest.shapes))


def with_layers(manifest: Manifest, change: Callable[[Layer], Layer]) -> Manifest:
    return replace(manifest, layers=tuple(change(layer) for layer in manifest.layers))


def test_all_mismatches_are_returned_and_not_the_first():
    there = {
        "layers.0.attn": Attention(8, 8, reach=Window(64)),
        "layers.7.mixer": Mamba2(4, 2, 3, groups=2, kernel=8, ssm_dtype="float16"),
        "layers.9.mixer": MIXER,
    }
    producers = [renamed(m, model="other") for m in side("p", there)]
    here = {**LAYERS, "draft.0": Attention(1, 8)}
    found = compare(side("d", here)[0], producers)
    assert [str(m) for m in found] == [
        "model other there, model here",
        "layers.0.attn: a window of 64 tokens there, full attention here",
        "layers.0.attn k: 8 heads there, 4 here",
        "layers.0.attn v: 8 heads there, 4 here",
        "draft.0: held by no producer rank; does the producer run the whole model, and all of its ranks?",
        "layers.7.mixer conv.x: 7 taps there, 3 here",
        "layers.7.mixer conv.B: 7 taps there, 3 here",
        "layers.7.mixer conv.C: 7 taps there, 3 here",
        "layers.7.mixer ssm: float16 there, float32 here; cache dtypes must be equal on both sides",
    ]


def test_a_mismatch_is_told_once_however_many_ranks_have_it():
    found = compare(side("d", LAYERS)[0], side("p", {**LAYERS, "layers.0.attn": Attention(8, 8)}, tp=2))
    assert [str(m) for m in found] == [f"layers.0.attn {p}: 8 heads there, 4 here" for p in "kv"]


def test_one_rank_that_differs_is_found_among_equal_ones():
    producers = side("p", LAYERS, tp=2)
    odd = with_shapes(producers[1], lambda s: replace(s, element=Element("int16", 2)) if s.token else s)
    found = [str(m) for m in compare(side("d", LAYERS)[0], [producers[0], odd])]
    assert found == [f"layers.0.attn {p}: int16 there, bfloat16 here; cache dtypes must be equal on both sides" for p in "kv"]


def test_one_layer_that_differs_is_found_among_layers_of_its_kind():
    producer = side("p", {f"layers.{i}": Attention(4, 8) for i in range(6)})[0]
    odd = with_layers(producer, lambda layer: replace(layer, reach=Window(8)) if layer.name == "layers.4" else layer)
    consumer = side("d", {f"layers.{i}": Attention(4, 8) for i in range(6)})[0]
    assert [str(m) for m in compare(consumer, [odd])] == ["layers.4: a window of 8 tokens there, full attention here"]


def test_parts_are_matched_by_name_and_not_by_place():
    def turned(layer: Layer) -> Layer:
        return replace(layer, parts=layer.parts[::-1])

    producers = [with_layers(m, turned) for m in side("p", LAYERS)]
    assert compare(side("d", LAYERS)[0], producers) == ()


def test_planning_raises_every_mismatch():
    there = {**LAYERS, "layers.0.attn": Attention(8, 8), "layers.7.mixer": Mamba2(4, 2, 3, groups=2, kernel=8)}
    consumer = side("d", LAYERS)[0]
    with pytest.raises(MismatchError) as caught:
        make_plan(consumer, side("p", there))
    assert caught.value.mismatches == compare(consumer, side("p", there))
    assert len(caught.value.mismatches) == 6
    assert "layers.7.mixer conv.x: 7 taps there, 3 here" in str(caught.value)
    assert "(6 mismatches)" in str(caught.value)


def test_state_that_the_ranks_present_do_not_hold_is_named_by_axis_and_interval():
    consumer = side("d", LAYERS)[0]
    with pytest.raises(MismatchError) as caught:
        make_plan(consumer, side("p", LAYERS, tp=2)[1:])
    found = caught.value.mismatches
    assert Mismatch("head [0, 2) is held by no producer rank", "layers.0.attn", "k") in found
    assert Mismatch("channel [0, 4) is held by no producer rank", "layers.7.mixer", "conv.x") in found


def test_an_extent_that_is_not_there_is_named_for_every_layer():
    layers = {f"l{i}": Attention(4, 2) for i in range(5)}
    with pytest.raises(MismatchError) as refused:
        make_plan(side("d", layers)[0], side("p", layers, tp=2)[:1])
    lines = [str(m) for m in refused.value.mismatches]
    for name in layers:
        assert f"{name} k: head [2, 4) is held by no producer rank" in lines


def test_missing_extents_are_named_beside_other_mismatches():
    here = {"a": Attention(4, 2), "b": Attention(4, 2)}
    there = {"a": Attention(4, 2), "b": Attention(4, 2, dtype="float16")}
    with pytest.raises(MismatchError) as refused:
        make_plan(side("d", here)[0], side("p", there, tp=2)[:1])
    lines = [str(m) for m in refused.value.mismatches]
    assert any(line.startswith("b k: float16 there, bfloat16 here") for line in lines)
    assert any(line.startswith("a k: head [2, 4)") for line in lines)


KINDS: tuple[LayerKind, ...] = (
    Attention(4, 8), Attention(4, 8, dtype="float16"), Attention(4, 8, reach=Window(16)), Attention(4, 8, reach=Chunk(16)),
    Attention(2, 8), Attention(4, 8, scales=(1.0, 2.0)), Attention(4, 8, scales=(1.0, 3.0)), Entries("latent", 8),
    Entries("latent", 8, tokens_per_entry=4), Entries("latent", 8, tokens_per_entry=4, partial=True), OpaqueCells("a", 8),
    OpaqueCells("b", 8), OpaqueCells("a", 8, head_slots=4), OpaqueState("a", 64), OpaqueState("b", 64), MIXER, Mamba1(8, 2),
    GatedDelta(2, 4, 2, 2), ShortConv(12, kernel=5), ShortConv(12, kernel=8),
)  # fmt: skip


@pytest.mark.parametrize("spec", [(0, 0), (0, 2)])
def test_layers_of_equal_content_are_those_without_a_mismatch(spec: tuple[int, int]):
    """Planning looks at contents, once for all ranks that hold the same, and goes layer by layer only for an error's words."""
    equal = 0
    for there in KINDS:
        for here in KINDS:
            (producer,) = side("p", {"L": there}, Layout(spec=spec[0]))
            (consumer,) = side("d", {"L": here}, Layout(spec=spec[1], kv="separate", order="token"))
            held = {"L": [(producer, producer.layers[0])]}
            found = compare_layers(consumer, consumer.layers, held)
            same = content(consumer, consumer.layers[0]) == content(producer, producer.layers[0])
            assert same == (not found)
            assert Fleet([producer]).is_all("L", content(consumer, consumer.layers[0])) == same
            equal += same
    assert equal == len(KINDS)


def test_ranks_that_hold_the_same_are_compared_and_checked_once(monkeypatch: pytest.MonkeyPatch):
    """All ranks hold all of a latent: what is looked at does not grow with their number."""
    seen: list[int] = []
    for ranks in (2, 32):
        calls = 0

        def counted(manifest: Manifest, layer: Layer) -> object:
            nonlocal calls
            calls += 1
            return content(manifest, layer)

        monkeypatch.setattr("kvferry.plan.choose.content", counted)
        layers: dict[str, LayerKind] = {f"layers.{i}": Entries("latent", 8) for i in range(4)}
        make_plans(side("d", layers, tp=ranks), side("p", layers, tp=ranks))
        seen.append(calls)
    assert seen[0] == seen[1] > 0
