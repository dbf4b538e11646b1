"""Model shapes, sides, and the manifests of all ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import KVFerryError, ModelError, SideError, UnshardableError
from kvferry.manifest import (
    FULL,
    Attention,
    Chunk,
    Entries,
    GatedDelta,
    LatentAttention,
    Layout,
    LinearAttention,
    Mamba1,
    Mamba2,
    Manifest,
    OpaqueCells,
    OpaqueState,
    Rank,
    Shard,
    ShortConv,
    TokenPaged,
    Window,
    check_manifest,
    page_bytes,
)
from kvferry.models import (
    ModelShape,
    Side,
    block_tokens,
    engine_groups,
    from_config,
    legal,
    load_model,
    manifests,
    model_types,
    stages,
    zoo_names,
)

CONFIGS = {
    entry.name.removesuffix(".json"): json.loads(entry.read_text())
    for entry in (files("kvferry.models") / "zoo").iterdir()
    if entry.name.endswith(".json")
}
LLAMA = CONFIGS["llama-3.1-8b"]
ASKED_FOR = (
    "deepseek-v3",
    "deepseek-v4-flash",
    "falcon-h1-34b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "granite-4.0-h-tiny",
    "jamba-1.5-mini",
    "kimi-linear-48b-a3b",
    "lfm2-1.2b",
    "llama-3.1-8b",
    "llama-4-scout",
    "nemotron-3-nano-30b-a3b",
    "nemotron-h-8b",
    "qwen3-32b",
    "qwen3-next-80b-a3b",
    "synthetic-12",
)


def sizes_of(model: ModelShape, side: Side | None = None) -> list[int]:
    return [len(group.layers) for group in engine_groups(model, side or Side())]


def state_bytes(manifest: Manifest) -> tuple[int, int]:
    """Conv and ssm bytes of the first state layer, counted element by element."""
    states = {g.id for g in manifest.groups if g.tokens == 0}
    layer = next(layer for layer in manifest.layers if layer.group in states)
    found = {"conv": 0, "ssm": 0}
    for part in layer.parts:
        shape = manifest.shapes[part.shape]
        found[part.name.split(".")[0]] += shape.element.bytes * prod(a.stop - a.start for a in shape.axes)
    return found["conv"], found["ssm"]


def test_the_zoo_holds_the_models_it_promises_and_says_where_they_are_from() -> None:
    assert zoo_names() == ASKED_FOR
    assert all(load_model(name).source and load_model(name).name == name for name in zoo_names())


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_zoo_model_builds_well_formed_manifests_at_every_legal_size(name: str) -> None:
    model = load_model(name)
    built = 0
    for tp in (1, 2, 3, 4, 6, 12) if name == "synthetic-12" else (1, 2, 4, 8):
        for pp in (1, 2, 3):
            side = Side(tp, pp)
            if legal(model, side) is not None:
                continue
            ranks = manifests(model, side, engine="e", incarnation="i", blocks=3)
            assert [m.identity.rank for m in ranks] == [Rank(t, tp, p, pp) for p in range(pp) for t in range(tp)]
            for manifest in ranks:
                check_manifest(manifest)
            held = [layer.name for manifest in ranks[::tp] for layer in manifest.layers]
            assert sorted(held) == sorted(spec.name for spec in model.caches)
            built += 1
    assert built >= (18 if name == "synthetic-12" else 6)


@pytest.mark.parametrize("name", ASKED_FOR)
@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=2,block=64,layout=token,conv=sd,spec=3",
        "tp=2,pp=1,block=48,kv=separate,pool=block",
        "tp=1,pp=3,kv=transposed",
        "tp=2,pp=1,kv=paged,hma=off",
    ],
)
def test_every_layout_of_a_side_gives_well_formed_manifests(name: str, text: str) -> None:
    model, side = load_model(name), Side.parse(text)
    reason = legal(model, side)
    if not side.layout.overlay and (any(k.paging == "state" for k in model.kinds) or name == "deepseek-v4-flash"):
        assert reason is not None
        assert "hma=on" in reason
        return
    assert reason is None
    for manifest in manifests(model, side, blocks=2):
        check_manifest(manifest)


@pytest.mark.parametrize(
    ("name", "tps"),
    [
        ("granite-4.0-h-tiny", {1, 2, 4, 12}),
        ("falcon-h1-34b", {1, 2}),
        ("nemotron-3-nano-30b-a3b", {1, 2, 4, 8}),
        ("qwen3-next-80b-a3b", {1, 2, 4, 8, 16}),
        ("llama-4-scout", {1, 2, 4, 8, 40}),
        ("jamba-1.5-mini", {1, 2, 4, 8, 16, 32}),
        ("deepseek-v3", {1, 2, 4, 8, 16, 32, 64}),
        ("synthetic-12", {1, 2, 3, 4, 6, 12}),
    ],
)
def test_legal_tensor_parallel_sizes_are_the_ones_engines_run(name: str, tps: set[int]) -> None:
    model = load_model(name)
    assert {tp for tp in range(1, 65) if legal(model, Side(tp)) is None} == tps


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("nemotron-3-nano-30b-a3b", {1: 2096, 2: 2096, 4: 1056, 8: 528}),
        ("nemotron-h-8b", {1: 1040, 2: 1040, 4: 1040, 8: 1040}),
        ("kimi-linear-48b-a3b", {1: 1920, 2: 1024, 4: 512, 8: 256, 16: 128}),
        ("qwen3-next-80b-a3b", {1: 544, 2: 544, 4: 272, 8: 144, 16: 80}),
        ("granite-4.0-h-tiny", {1: 400, 2: 400, 4: 400, 12: 144}),
        ("jamba-1.5-mini", {1: 80, 2: 80, 4: 80, 8: 80, 16: 48}),
        ("falcon-h1-34b", {1: 1040, 2: 1040}),
        ("lfm2-1.2b", {1: 16, 2: 16, 4: 16, 8: 16}),
        ("llama-3.1-8b", {1: 16, 8: 16}),
    ],
)
def test_logical_blocks_are_as_long_as_vllm_makes_them(name: str, tokens: dict[int, int]) -> None:
    model = load_model(name)
    assert {tp: block_tokens(model, Side(tp)) for tp in tokens} == tokens
    for tp, expected in tokens.items():
        paged = [g.paging for g in manifests(model, Side(tp), blocks=1)[0].groups if isinstance(g.paging, TokenPaged)]
        assert {(p.tokens, p.kernel_blocks) for p in paged} == {(expected, expected // 16)}


def test_a_coarser_kernel_block_rounds_the_logical_block_up_to_its_multiple() -> None:
    assert block_tokens(load_model("nemotron-3-nano-30b-a3b"), Side(1, 1, Layout(block=128))) == 2176
    for block in (16, 24, 48, 128):
        assert block_tokens(load_model("kimi-linear-48b-a3b"), Side(1, 1, Layout(block=block))) % block == 0


@pytest.mark.parametrize(
    ("name", "conv", "ssm"),
    [
        ("nemotron-3-nano-30b-a3b", 36_864, 2_097_152),
        ("nemotron-h-8b", 61_440, 4_194_304),
        ("granite-4.0-h-tiny", 19_968, 786_432),
        ("falcon-h1-34b", 30_720, 2_097_152),
        ("jamba-1.5-mini", 49_152, 262_144),
        ("qwen3-next-80b-a3b", 49_152, 1_048_576),
        ("kimi-linear-48b-a3b", 73_728, 2_097_152),
        ("lfm2-1.2b", 8_192, 0),
    ],
)
def test_states_have_the_sizes_engines_report(name: str, conv: int, ssm: int) -> None:
    assert state_bytes(manifests(load_model(name), Side(), blocks=1)[0]) == (conv, ssm)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama-3.1-8b", [32]),
        ("deepseek-v3", [61]),
        ("gemma-3-27b", [9, 9, 9, 9, 8, 8, 10]),
        ("gpt-oss-20b", [12, 12]),
        ("llama-4-scout", [12, 12, 12, 12]),
        ("nemotron-3-nano-30b-a3b", [6, 6, 6, 5, 6]),
        ("nemotron-h-8b", [4, 4, 4, 4, 4, 4, 4]),
        ("granite-4.0-h-tiny", [4] * 10),
        ("falcon-h1-34b", [72, 72]),
        ("jamba-1.5-mini", [4] * 8),
        ("qwen3-next-80b-a3b", [12] * 4),
        ("lfm2-1.2b", [5, 5, 6]),
        ("kimi-linear-48b-a3b", [7, 7, 6, 7]),
        ("deepseek-v4-flash", [22, 21, 62, 42, 20]),
    ],
)
def test_groups_have_the_sizes_vllm_gives_them(name: str, sizes: list[int]) -> None:
    assert sizes_of(load_model(name)) == sizes


@pytest.mark.parametrize(
    ("name", "index", "names"),
    [
        ("llama-3.1-8b", 31, ["model.layers.31.self_attn.attn"]),
        ("gemma-3-27b", 5, ["language_model.model.layers.5.self_attn.attn"]),
        ("gpt-oss-20b", 0, ["model.layers.0.attn.attn"]),
        ("nemotron-h-8b", 7, ["model.layers.7.mixer.attn"]),
        ("nemotron-h-8b", 0, ["model.layers.0.mixer"]),
        ("nemotron-h-8b", 1, []),
        ("granite-4.0-h-tiny", 5, ["model.layers.5.self_attn.attn"]),
        ("falcon-h1-34b", 3, ["model.layers.3.attn", "model.75.mixer"]),
        ("jamba-1.5-mini", 4, ["model.layers.4.attn"]),
        ("qwen3-next-80b-a3b", 0, ["model.layers.0.linear_attn"]),
        ("lfm2-1.2b", 0, ["model.layers.0.short_conv"]),
        ("kimi-linear-48b-a3b", 26, ["model.layers.26.self_attn"]),
        ("deepseek-v4-flash", 0, ["model.layers.0.attn.swa_cache"]),
        (
            "deepseek-v4-flash",
            3,
            ["model.layers.3.attn.swa_cache", "model.layers.3.attn", "model.layers.3.attn.compressor.state_cache"],
        ),
    ],
)
def test_layers_are_named_as_vllm_names_them(name: str, index: int, names: list[str]) -> None:
    assert [spec.name for spec in load_model(name).layers[index]] == names


def test_a_group_keeps_what_all_its_layers_reach_unless_hma_is_off() -> None:
    model = load_model("gemma-3-27b")
    assert [g.keeps for g in engine_groups(model, Side())] == [Window(1024)] * 6 + [FULL]
    (single,) = engine_groups(model, Side.parse("tp=1,pp=1,hma=off"))
    assert (single.keeps, single.tokens, len(single.layers)) == (FULL, 16, 62)
    assert {layer.reach for layer in manifests(model, Side.parse("tp=1,pp=1,hma=off"))[0].layers} == {Window(1024), FULL}
    assert {g.keeps for g in engine_groups(load_model("llama-4-scout"), Side())} == {Chunk(8192), FULL}


def test_group_ids_are_the_engines_and_a_stage_keeps_groups_it_holds_no_layer_of() -> None:
    model = load_model("nemotron-h-8b")
    ranks = manifests(model, Side(1, 8))
    assert {tuple(g.id for g in m.groups) for m in ranks} == {tuple(range(7))}
    assert any({g.id for g in m.groups} - {layer.group for layer in m.layers} for m in ranks)
    owner = {spec.name: g.id for g in engine_groups(model, Side()) for spec in g.layers}
    assert all(owner[layer.name] == layer.group for m in ranks for layer in m.layers)


def test_synthetic_12_has_every_layer_kind() -> None:
    model = load_model("synthetic-12")
    classes = {type(kind) for kind in model.kinds}
    assert classes == {
        Attention,
        Entries,
        GatedDelta,
        LatentAttention,
        LinearAttention,
        Mamba1,
        Mamba2,
        OpaqueCells,
        OpaqueState,
        ShortConv,
    }
    assert {type(k.reach) for k in model.kinds if isinstance(k, Attention)} == {type(FULL), Window, Chunk}
    assert {k.groups for k in model.kinds if isinstance(k, Mamba2)} == {1, 12}
    assert {k.head_slots for k in model.kinds if isinstance(k, OpaqueCells)} == {0, 12}
    assert {block_tokens(model, Side(tp)) for tp in (1, 12)} == {16, 32}
    assert () in model.layers
    assert max(map(len, model.layers)) == 3


def test_ranks_share_their_shapes_in_memory() -> None:
    ranks = manifests(load_model("llama-3.1-8b"), Side(2, 3))
    assert len({id(shape) for m in ranks for shape in m.shapes}) == 2


def per_token(manifest: Manifest) -> Iterator[Fraction]:
    """Bytes that one more token adds, for every part that is kept for good."""
    for layer in manifest.layers:
        for part in layer.parts:
            shape = manifest.shapes[part.shape]
            if layer.reach == FULL and shape.token is not None:
                entry = shape.element.bytes * prod(a.stop - a.start for a in shape.axes)
                yield Fraction(entry, shape.token.per_entry)


def test_deepseek_v4_grows_by_3850_and_a_quarter_bytes_a_token() -> None:
    for side in (Side(), Side(8)):
        assert float(sum(per_token(manifests(load_model("deepseek-v4-flash"), side)[0]))) == 3850.25


def test_deepseek_v4_pages_are_padded_and_blocks_are_the_caches_own() -> None:
    model = load_model("deepseek-v4-flash")
    named = {spec.name.partition(".attn")[2]: spec.kind for spec in (*model.layers[2], *model.layers[0])}
    pages = {name: page_bytes(kind, Shard(), Layout()) for name, kind in named.items()}
    assert pages == {
        ".swa_cache": 37_440,
        "": 37_440,
        ".indexer.k_cache": 8_640,
        ".compressor.state_cache": 32_832,
        ".indexer.compressor.state_cache": 8_640,
    }
    assert [page_bytes(spec.kind, Shard(), Layout()) for spec in model.layers[3]] == [37_440, 1_728, 32_832]
    (manifest,) = manifests(model, Side())
    assert [(g.tokens, g.keeps) for g in manifest.groups] == [
        (64, Window(128)),
        (64, Window(128)),
        (256, FULL),
        (4, Window(8)),
        (8, Window(128)),
    ]
    assert all(isinstance(g.paging, TokenPaged) and g.paging.kernel_blocks == 1 for g in manifest.groups)


def test_parts_of_an_entry_lie_in_planes() -> None:
    (manifest,) = manifests(load_model("deepseek-v4-flash"), Side())
    window = next(layer for layer in manifest.layers if layer.name.endswith("0.attn.swa_cache"))
    latent, scale = window.parts
    assert (latent.name, scale.name, scale.offset - latent.offset) == ("latent", "latent.scale", 64 * 576)
    tokens = [manifest.shapes[part.shape].token for part in (latent, scale)]
    assert [token and token.digits[-1] for token in tokens] == [(64, 576), (64, 8)]


def test_a_fingerprint_does_not_depend_on_the_models_name_or_source() -> None:
    renamed = from_config({**LLAMA, "_source": "elsewhere"}, "another name")
    assert renamed.fingerprint == load_model("llama-3.1-8b").fingerprint
    assert len({load_model(name).fingerprint for name in zoo_names()}) == len(zoo_names())


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_any_number_that_changes_a_cache_changes_the_fingerprint(name: str) -> None:
    model = load_model(name)
    for i, held in enumerate(model.layers):
        for j, spec in enumerate(held[:1]):
            wider = replace(spec, kind=replace(spec.kind, dtype="float16"))  # type: ignore[type-var]
            layers = (*model.layers[:i], (*held[:j], wider, *held[j + 1 :]), *model.layers[i + 1 :])
            assert replace(model, layers=layers).fingerprint != model.fingerprint
    assert replace(model, layers=model.layers[:-1]).fingerprint != model.fingerprint
    assert replace(model, layers=(*model.layers, ())).fingerprint != model.fingerprint
    reach = from_config({**CONFIGS["gpt-oss-20b"], "sliding_window": 129}, "x")
    assert reach.fingerprint != load_model("gpt-oss-20b").fingerprint


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    tiny = from_config({**LLAMA, "num_hidden_layers": 1}, "tiny")
    assert tiny.fingerprint == "82cbdde9fcc93b4d"


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [
        (61, 2, [31, 30]),
        (62, 3, [21, 21, 20]),
        (61, 3, [20, 21, 20]),
        (43, 3, [14, 15, 14]),
        (27, 2, [14, 13]),
        (52, 3, [17, 18, 17]),
        (31, 4, [8, 8, 8, 7]),
        (29, 4, [7, 7, 8, 7]),
        (8, 1, [8]),
    ],
)
def test_a_remainder_of_layers_goes_to_the_stages_before_the_last(layers: int, pp: int, sizes: list[int]) -> None:
    split = stages(layers, pp)
    assert [len(stage) for stage in split] == sizes
    assert [i for stage in split for i in stage] == list(range(layers))


def test_what_no_engine_could_run_is_refused_with_the_reason() -> None:
    model = load_model("lfm2-1.2b")
    assert "16 layers, too few for 17 pipeline stages" in str(legal(model, Side(1, 17)))
    with pytest.raises(UnshardableError, match=r"32 query heads .* 3 tensor-parallel ranks"):
        manifests(model, Side(3))
    with pytest.raises(UnshardableError, match="hma=on"):
        manifests(model, Side.parse("tp=1,pp=1,hma=off"))
    assert "multiple of 4" in str(legal(load_model("synthetic-12"), Side.parse("tp=1,pp=1,block=2")))
    assert "block sizes of their own" in str(legal(load_model("deepseek-v4-flash"), Side.parse("tp=1,pp=1,hma=off")))


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("tp=2,pp=2", Side(2, 2)),
        ("pp=3", Side(1, 3)),
        (" tp = 2 , block = 64 ", Side(2, 1, Layout(block=64))),
        ("tp=2,pp=1,layout=token,conv=sd,spec=3", Side(2, 1, Layout(order="token", conv="sd", spec=3))),
        ("tp=1,pp=1,kv=transposed,pool=block,hma=off", Side(1, 1, Layout(kv="transposed", pool="block", overlay=False))),
    ],
)
def test_a_side_is_read_and_written_canonically(text: str, side: Side) -> None:
    assert Side.parse(text) == side
    assert Side.parse(str(side)) == side


def test_the_canonical_text_leaves_out_defaults() -> None:
    assert str(Side.parse("hma=on,block=16,pp=1,tp=4,conv=sd")) == "tp=4,pp=1,conv=sd"
    assert str(Side.parse("hma=off,block=32")) == "tp=1,pp=1,block=32,hma=off"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write it like"),
        ("tp", "write it like"),
        ("tp=2,,pp=1", "write it like"),
        ("tp=2,tp=2", "given twice"),
        ("tp=0", "from 1 to"),
        ("tp=-2", "from 1 to"),
        ("tp=two", "whole number"),
        ("tp=٣", "whole number"),
        ("tp=1.5", "whole number"),
        ("tp=", "whole number"),
        ("tp=99999999999999999999", "from 1 to"),
        ("block=1000000", "from 1 to"),
        ("spec=-1", "from 0 to"),
        ("blok=16", "did you mean block"),
        ("zzz=16", "known are tp, pp"),
        ("layout=heads", "head or token"),
        ("conv=DS", "ds or sd"),
        ("hma=maybe", "on or off"),
        ("=2", "known are tp, pp"),
    ],
)
def test_a_side_that_cannot_be_read_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(SideError, match=said):
        Side.parse(text)


@given(st.text(max_size=40) | st.lists(st.sampled_from(["tp", "pp", "=", ",", "2", "block", "0"])).map("".join))
def test_any_text_is_a_side_or_a_side_error(text: str) -> None:
    try:
        side = Side.parse(text)
    except SideError:
        return
    assert Side.parse(str(side)) == side


def test_a_missing_key_is_named() -> None:
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "model_type"):
        with pytest.raises(ModelError, match=f"mine: {key} is missing"):
            from_config({k: v for k, v in LLAMA.items() if k != key}, "mine")
    config = copy.deepcopy(CONFIGS["llama-4-scout"])
    del config["text_config"]["head_dim"]
    with pytest.raises(ModelError, match=r"text_config\.head_dim is missing"):
        from_config(config, "mine")


def test_a_list_with_an_item_for_each_layer_says_how_many_there_are() -> None:
    """As transformers writes Nemotron-H: words instead of a pattern, and no count of layers."""
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    for name in ("nemotron-h-8b", "nemotron-3-nano-30b-a3b"):
        config = copy.deepcopy(CONFIGS[name])
        pattern = config.pop("hybrid_override_pattern")
        assert config.pop("num_hidden_layers") == len(pattern)
        listed = {**config, "layers_block_type": [words[letter] for letter in pattern]}
        assert from_config(listed, name).layers == load_model(name).layers
        with pytest.raises(ModelError, match=r"layers_block_type has \d+ items, but the model has 3 layers"):
            from_config({**listed, "num_hidden_layers": 3}, name)


def test_compression_is_read_from_words_and_rates_too() -> None:
    """As transformers writes DeepSeek-V4."""
    config = copy.deepcopy(CONFIGS["deepseek-v4-flash"])
    ratios = config.pop("compress_ratios")[: config["num_hidden_layers"]]
    words = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    listed = {**config, "layer_types": [words[ratio] for ratio in ratios]}
    shared = {k: v for k, v in listed.items() if k != "qk_rope_head_dim"}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    for spelled in (listed, {**listed, "compress_rates": rates}, {**shared, "partial_rotary_factor": 0.125}):
        assert from_config(spelled, "mine").layers == load_model("deepseek-v4-flash").layers
    with pytest.raises(ModelError, match="known are 0, 4 and 128"):
        from_config({**listed, "compress_rates": {**rates, "compressed_sparse_attention": 5}}, "mine")
    with pytest.raises(ModelError, match="qk_rope_head_dim is missing"):
        from_config({**shared, "partial_rotary_factor": 7.0}, "mine")


def test_linear_layers_are_read_from_words_too() -> None:
    """As transformers writes Kimi Linear."""
    config = copy.deepcopy(CONFIGS["kimi-linear-48b-a3b"])
    linear = config.pop("linear_attn_config")
    full = set(linear["full_attn_layers"])
    words = ["full_attention" if i + 1 in full else "linear_attention" for i in range(config["num_hidden_layers"])]
    keys = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
    listed = {**config, "layer_types": words, **{new: linear[old] for old, new in keys.items()}}
    assert from_config(listed, "mine").layers == load_model("kimi-linear-48b-a3b").layers


def test_a_text_config_with_an_encoder_is_refused_as_one_by_itself_is() -> None:
    config = CONFIGS["llama-4-scout"]
    for changed in (
        {**config, "is_encoder_decoder": True},
        {**config, "text_config": {**config["text_config"], "is_encoder_decoder": True}},
    ):
        with pytest.raises(ModelError, match="is_encoder_decoder is true"):
            from_config(changed, "mine")
    assert from_config({**config, "is_encoder_decoder": False, "cross_attention_layers": []}, "mine")


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"did you mean llama4\? known are bamba, .*qwen3_next") as caught:
        from_config({**LLAMA, "model_type": "llama44"}, "mine")
    assert all(model_type in str(caught.value) for model_type in model_types())


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(ModelError, match="an object with keys is needed"):
        from_config(config, "mine")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama-3.1-8b", {"num_hidden_layers": "32"}, "whole number"),
        ("llama-3.1-8b", {"num_hidden_layers": True}, "whole number"),
        ("llama-3.1-8b", {"num_hidden_layers": 10**9}, "from 1 to 1,024"),
        ("llama-3.1-8b", {"num_attention_heads": 30}, "give head_dim"),
        ("llama-3.1-8b", {"torch_dtype": "int4"}, "bfloat16, float16, float32"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "one per layer"),
        ("gpt-oss-20b", {"layer_types": ["odd_attention"] * 24}, r"layer_types\[0\]"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-M-"}, "4 items, but the model has 52 layers"),
        ("nemotron-h-8b", {"conv_kernel": 1}, "conv_kernel is 1"),
        ("granite-4.0-h-tiny", {"mamba_d_head": 65}, "3072 inner channels"),
        ("lfm2-1.2b", {"full_attn_idxs": [16]}, "from 0 to 15"),
        ("llama-3.1-8b", {"is_encoder_decoder": True}, "is_encoder_decoder is true: a cache as long as an encoder's output"),
        ("llama-3.1-8b", {"is_encoder_decoder": "yes"}, "true or false is needed"),
        ("qwen3-32b", {"add_cross_attention": True}, "add_cross_attention is true: a cache as long as an encoder's output"),
        ("llama-3.1-8b", {"cross_attention_layers": [3, 8]}, "cross_attention_layers names layers that cache an encoder's"),
        ("deepseek-v4-flash", {"compress_ratios": [7] * 43}, "known are 0, 4 and 128"),
        ("deepseek-v4-flash", {"compress_ratios": [4]}, "1 items for 43 layers"),
        ("deepseek-v4-flash", {"qk_rope_head_dim": 512}, "head_dim 512"),
        ("deepseek-v4-flash", {"index_head_dim": 100}, "multiple of 128"),
        ("kimi-linear-48b-a3b", {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}}, "once, counted from 1"),
        (
            "llama-4-scout",
            {"text_config": {**CONFIGS["llama-4-scout"]["text_config"], "no_rope_layers": [2] * 48}},
            "0 .* and 1",
        ),
        ("qwen3-32b", {"model_type": "qwen3_moe", "use_sliding_window": True}, "give layer_types"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_by_key(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        from_config({**CONFIGS[name], **changes}, "mine")


def test_keys_are_read_as_engines_read_them() -> None:
    def kinds(config: dict[str, Any]) -> tuple[object, ...]:
        return from_config(config, "x").kinds

    assert kinds({**LLAMA, "torch_dtype": None, "dtype": "float16"}) == (Attention(8, 128, "float16"),)
    assert kinds({**LLAMA, "num_key_value_heads": None, "head_dim": 64}) == (Attention(32, 64),)
    assert kinds({**LLAMA, "model_type": "mistral", "sliding_window": 4096}) == (Attention(8, 128, reach=Window(4096)),)
    qwen2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 16}
    assert kinds(qwen2) == (Attention(8, 128), Attention(8, 128, reach=Window(64)))
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    assert kinds(gemma) == (Attention(4, 256, reach=Window(1024)), Attention(4, 256))
    bamba = {
        **{"model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_d_head": "auto", "mamba_n_heads": 128},
        **{"mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
    }
    assert kinds(bamba) == (Mamba2(128, 64, 128, 1), Attention(8, 128))


def test_qwen35_takes_its_state_dtype_from_the_config() -> None:
    text = {
        **CONFIGS["qwen3-next-80b-a3b"],
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4},
        **{"linear_num_value_heads": 48, "mamba_ssm_dtype": "float32"},
    }
    model = from_config({"model_type": "qwen3_5", "text_config": text}, "qwen3.5-27b")
    assert state_bytes(manifests(model, Side(), blocks=1)[0]) == (61_440, 3_145_728)
    assert [block_tokens(model, Side(tp)) for tp in (1, 2, 4, 8)] == [784, 784, 784, 400]


def test_deepseek_v32_has_an_indexer_of_132_bytes_a_token_in_the_latents_group() -> None:
    model = from_config({**CONFIGS["deepseek-v3"], "model_type": "deepseek_v32", "index_head_dim": 128}, "v3.2")
    assert sizes_of(model) == [122]
    assert float(sum(per_token(manifests(model, Side(4))[0]))) == 61 * (1152 + 132)


WRONG = st.sampled_from(["", "x" * 2000, "float32", None, -1, 0, 1, 10**30, 1.5, True, [], [0], ["mamba"] * 40, {}, {"a": 1}])


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A zoo config with a few keys dropped or replaced, at the top or one level down."""
    config = copy.deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(1, 3))):
        objects = [config, *(value for value in config.values() if isinstance(value, dict) and value)]
        target = draw(st.sampled_from(objects))
        key = draw(st.sampled_from(sorted(target)))
        if draw(st.booleans()):
            target.pop(key)
        elif isinstance(target[key], list) and target[key] and draw(st.booleans()):
            target[key][draw(st.integers(0, len(target[key]) - 1))] = draw(WRONG)
        else:
            target[key] = draw(WRONG)
        if not config:
            break
    return config


@settings(max_examples=400, deadline=None)
@given(mutated(), st.sampled_from([Side(), Side(2, 2), Side.parse("tp=2,hma=off")]))
def test_a_mutated_config_gives_a_shape_or_an_error_of_our_own(config: dict[str, Any], side: Side) -> None:
    try:
        model = from_config(config, "mutated")
        ranks = manifests(model, side, blocks=1)
    except KVFerryError:
        return
    assert legal(model, side) is None
    assert len(ranks) == side.tp * side.pp


def test_a_model_is_loaded_by_name_in_any_case_by_file_and_by_directory(tmp_path: Path) -> None:
    directory = tmp_path / "my-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    loaded = [load_model(m) for m in ("Llama-3.1-8B", directory, str(directory / "config.json"))]
    assert [model.name for model in loaded] == ["llama-3.1-8b", "my-llama", "my-llama"]
    assert len({model.fingerprint for model in loaded}) == 1


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ModelError, match=r"did you mean .*qwen3-32b"):
        load_model("qwen-32b")
    with pytest.raises(ModelError, match="known are deepseek-v3"):
        load_model("zzzzzzzz")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "an object with keys"),
        (b"9" * 5000, "needed|not JSON"),
        (b" " * (1 << 21), "at most"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="neither a model of the zoo"):
        load_model(tmp_path / "missing.json")
    with pytest.raises(ModelError):
        load_model("\0")
    with pytest.raises(ModelError):
        load_model("x" * 5000)
