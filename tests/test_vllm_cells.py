"""What a vLLM worker declares of its attention caches, and which of two sides can be moved to each other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.engines.vllm import manifest as declaring
from kvferry.errors import ManifestError, MismatchError
from kvferry.manifest import check_manifest
from kvferry.plan import Binder, Binding, Request, make_plans
from vllm_stubs import BLOCKS, Side, as_if_seen, manifests

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
EVERYWHERE = {"FLASH_ATTN": LAYOUTS, "TRITON_ATTN": LAYOUTS}
SMALL = Side(layers=3, heads=4, dim=32)
NVFP4 = 5


def parts(side: Side) -> set[str]:
    return {part.name for manifest in manifests(side, "D") for layer in manifest.layers for part in layer.parts}


def bind(producer: Side, consumer: Side, tokens: int) -> list[Binding]:
    """Blocks that are nowhere consecutive, so that runs are those of single blocks."""
    order = np.random.default_rng(1).permutation(np.arange(1, BLOCKS, 2)).tolist()
    plans = make_plans(manifests(consumer, "D"), manifests(producer, "P"))
    blocks = {0: order[: -(-tokens // producer.block)]}, {0: order[: -(-tokens // consumer.block)]}
    return [Binder(plan).bind(Request(tokens, *blocks)) for plan in plans]


def copies(bindings: list[Binding]) -> list[int]:
    return [sum(len(c.length) for c in binding.copies) for binding in bindings]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_certified_cells_of_every_cache_layout_are_sound(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, EVERYWHERE)
    for tp in (1, 2):
        for manifest in manifests(replace(SMALL, layout=layout, tp=tp), "D"):
            check_manifest(manifest)
            assert {p.name for layer in manifest.layers for p in layer.parts} == {"k", "v"}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize(("tp", "blocks"), [((1, 1), (16, 16)), ((1, 2), (16, 64)), ((2, 1), (128, 16))])
def test_any_certified_layout_is_moved_to_any_other(
    source: str, target: str, tp: tuple[int, int], blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_seen(monkeypatch, EVERYWHERE)
    producer, consumer = (
        replace(SMALL, layout=at, tp=t, block=b) for at, t, b in zip((source, target), tp, blocks, strict=True)
    )
    bindings = bind(producer, consumer, 100)
    assert sum(b.bytes for b in bindings) == 100 * 3 * 4 * 2 * 32 * 2


RUNS = {
    "LBHNC": {(1, 1): 32, (1, 2): 32},
    "BLHNC": {(1, 1): 1, (1, 2): 32},
    "BHLNC": {(1, 1): 1, (1, 2): 1},
    "LBNHC": {(1, 1): 32, (1, 2): 16 * 32},
    "BLNHC": {(1, 1): 1, (1, 2): 16 * 32},
}


@pytest.mark.parametrize("layout", RUNS)
@pytest.mark.parametrize("tp", [(1, 1), (1, 2)], ids=["tp1to1", "tp1to2"])
def test_runs_of_a_full_block_of_32_layers(layout: str, tp: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A certified block is moved in no more runs than one whose inside is not known."""
    as_if_seen(monkeypatch, EVERYWHERE)
    producer, consumer = (Side(layout=layout, tp=t) for t in tp)
    assert copies(bind(producer, consumer, 160)) == [10 * RUNS[layout][tp]] * tp[1]


@pytest.mark.parametrize(("layout", "extra"), [("BLHNC", 256), ("BHLNC", 256), ("LBHNC", 256), ("LBNHC", 32), ("BLNHC", 32)])
def test_a_block_that_is_not_full_costs_a_run_for_each_layer_and_head(
    layout: str, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_seen(monkeypatch, EVERYWHERE)
    side = Side(layout=layout)
    full, more = bind(side, side, 160), bind(side, side, 165)
    assert copies(more)[0] - copies(full)[0] == extra
    assert more[0].bytes - full[0].bytes == 5 * 32 * 8 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Side(version="0.32.0"), Side(version="0.32.3")),
        (Side(asked="auto"), Side(asked="bfloat16")),
        (Side(asked="fp8", dtype="uint8", quantized=1), Side(asked="fp8_e4m3", dtype="uint8", quantized=1)),
    ],
    ids=["patch releases", "auto and bfloat16", "two names of fp8"],
)
@pytest.mark.parametrize("certified", [True, False], ids=["certified", "opaque"])
def test_what_the_bytes_do_not_depend_on_is_not_compared(
    one: Side, other: Side, certified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_seen(monkeypatch, EVERYWHERE if certified else {}, ("bfloat16", "fp8_e4m3"))
    assert parts(one) == ({"k", "v"} if certified else {"bytes"})
    for pair in ((one, other), (other, one)):
        assert copies(bind(*pair, 32)) == [2]


def test_two_backends_with_one_certified_layout_are_moved_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, EVERYWHERE)
    assert copies(bind(Side(), Side(backend="TRITON_ATTN"), 32)) == [2]


@pytest.mark.parametrize(
    "other",
    [
        Side(backend="TRITON_ATTN"),
        Side(version="0.99.0"),
        Side(dtype="float16"),
        Side(block=32),
        Side(asked="fp8", dtype="uint8", quantized=1),
    ],
    ids=["backend", "release", "format", "block", "quantization"],
)
def test_opaque_cells_compare_what_their_bytes_depend_on(other: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, {})
    with pytest.raises(MismatchError, match="opaque cells"):
        bind(Side(), other, 32)


def test_scales_of_quantized_caches_are_part_of_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, EVERYWHERE, ("fp8_e4m3",))
    one = replace(SMALL, asked="fp8", dtype="uint8", quantized=1, scales=(0.5, 0.25))
    assert copies(bind(one, one, 16)) == [1]
    shapes = {s.element.dtype: s.element.scales for s in manifests(one, "D")[0].shapes}
    assert set(shapes) == {"float8_e4m3fn"}
    with pytest.raises(MismatchError, match=r" v: scales \(0\.25,\) there, \(0\.5,\) here"):
        bind(one, replace(one, scales=(0.5, 0.5)), 16)


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_token_major_blocks_that_are_not_certified_are_moved_whole(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, {})
    side = replace(SMALL, backend="FLEX_ATTENTION", layout=layout)
    assert parts(side) == {"bytes"}
    for tp in (1, 2):
        bindings = bind(replace(side, tp=tp), replace(side, tp=tp), 32)
        assert [b.bytes for b in bindings] == [2 * 16 * 3 * (4 // tp) * 2 * 32 * 2] * tp


def test_token_major_blocks_that_are_not_certified_are_not_cut_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, {})
    side = replace(SMALL, backend="FLEX_ATTENTION", layout="LBNHC")
    with pytest.raises(
        MismatchError, match=r"of 4 heads' of \d+ bytes there.*of 2 heads' .*; run the same .*equally many ranks"
    ):
        bind(side, replace(side, tp=2), 32)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC", "LBNHC"])
def test_slots_that_are_not_heads_are_moved_between_equally_many_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4: K and V of a head in slots of their own."""
    as_if_seen(monkeypatch, EVERYWHERE)
    side = replace(SMALL, backend="FLASHINFER", layout=layout, dtype="uint8", asked="nvfp4", quantized=NVFP4, slots=8, width=18)
    (binding,) = bind(side, side, 32)
    assert binding.bytes == 2 * 16 * 3 * 8 * 18
    with pytest.raises(MismatchError, match="opaque cells"):
        bind(side, replace(side, tp=2, slots=4), 32)


def test_ranks_that_hold_the_same_head_serve_each_other_as_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, {})
    side = replace(SMALL, backend="FLEX_ATTENTION", layout="LBNHC", heads=1)
    assert len(bind(replace(side, tp=2), side, 32)) == 1
    assert len(bind(side, replace(side, tp=2), 32)) == 2


def test_an_order_that_nothing_explains_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, {})
    with pytest.raises(ManifestError, match=r"layers\.0\.self_attn\.attn: no order of heads and tokens explains"):
        manifests(replace(SMALL, layout="LNBHC"), "D")


def test_a_cache_of_another_spec_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_seen(monkeypatch, {})
    monkeypatch.setattr(declaring, "TOKEN_SPECS", frozenset({"SomethingElseSpec"}))
    with pytest.raises(ManifestError, match=r"a cache of spec \w+ is not supported; supported: MambaSpec, SomethingElseSpec"):
        manifests(SMALL, "D")


class FullAttentionSpec: ...


class SinkFullAttentionSpec: ...


class CrossAttentionSpec: ...


@pytest.mark.parametrize(("spec", "why"), [(SinkFullAttentionSpec, ""), (CrossAttentionSpec, r" \(.*an encoder's output.*\)")])
def test_every_layer_of_a_group_is_of_a_known_spec_and_not_the_first_alone(spec: type, why: str) -> None:
    """vLLM puts layers whose specs inherit from each other into one group."""
    specs = {"layers.0": FullAttentionSpec(), "layers.1": spec()}
    group = SimpleNamespace(
        layer_names=[*specs], kv_cache_spec=SimpleNamespace(kv_cache_specs=specs), host_resident=False, enable_kv_transfer=True
    )
    with pytest.raises(ManifestError, match=rf"layers\.1: a cache of spec {spec.__name__} is not supported{why}; supported: "):
        declaring._group(0, group, {}, None, False)  # type: ignore[arg-type]
