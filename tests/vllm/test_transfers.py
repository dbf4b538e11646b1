"""Whole caches of vLLM moved between block sizes, TP sizes, instruction sets and conv layouts, and compared byte by byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from byte_crossing import Outcome, cross, pair
from engine import Setup, workers

from kvferry.errors import ManifestError, MismatchError
from kvferry.manifest import FULL, Window

pytestmark = pytest.mark.vllm

TOKENS = 157
FOUR = ("llama", "gemma3", "nemotron-h", "granite-h-1g")
HYBRIDS = ("nemotron-h", "granite-h-1g")
TP_PAIRS = ((1, 1), (1, 2), (2, 1), (2, 2))
BLOCK_PAIRS = ((32, 64), (64, 32), (64, 96), (32, 32))
CONV_PAIRS = (("SD", "SD"), ("DS", "DS"), ("SD", "DS"), ("DS", "SD"))
NUMBERS = {
    "float32": ("float32", "vec", "vec"),
    "bf16-vec": ("bfloat16", "vec", "vec"),
    "bf16-amx": ("bfloat16", "amx", "amx"),
    "bf16-amx-vec": ("bfloat16", "amx", "vec"),
    "bf16-vec-amx": ("bfloat16", "vec", "amx"),
}


@pytest.fixture(params=NUMBERS)
def numbers(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    if "amx" in request.param and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX: its layout is certified where there is one")
    return NUMBERS[request.param]


def assert_exact(outcomes: tuple[Outcome, ...]) -> None:
    for outcome in outcomes:
        assert outcome.differences() == ""
        assert outcome.binding.bytes == outcome.needed_bytes > 0
        assert (outcome.got != outcome.before).any()


@pytest.mark.parametrize("blocks", BLOCK_PAIRS, ids=lambda b: f"{b[0]}to{b[1]}")
@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
@pytest.mark.parametrize("model", FOUR)
def test_every_byte_is_what_the_engine_writes_at_the_consumer(
    model: str, tp: tuple[int, int], blocks: tuple[int, int], numbers: tuple[str, str, str]
) -> None:
    dtype, *isas = numbers
    producer, consumer = (Setup(model, t, block=b, dtype=dtype, isa=i) for t, b, i in zip(tp, blocks, isas, strict=True))
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.parametrize("conv", CONV_PAIRS, ids=lambda c: f"{c[0]}to{c[1]}")
@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", HYBRIDS)
def test_conv_state_crosses_between_its_two_layouts(model: str, dtype: str, tp: tuple[int, int], conv: tuple[str, str]) -> None:
    producer, consumer = (Setup(model, t, dtype=dtype, conv=c) for t, c in zip(tp, conv, strict=True))
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.parametrize("conv", [("SD", "DS"), ("DS", "SD")], ids=lambda c: f"{c[0]}to{c[1]}")
@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["jamba", "qwen3-next", "lfm2"])
def test_other_recurrent_layers(model: str, dtype: str, tp: tuple[int, int], conv: tuple[str, str]) -> None:
    producer, consumer = (Setup(model, t, block=b, dtype=dtype, conv=c) for t, b, c in zip(tp, (32, 64), conv, strict=True))
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
def test_latents_on_the_plain_backend(tp: tuple[int, int]) -> None:
    producer, consumer = (Setup("deepseek", t, backend="CPU_MLA") for t in tp)
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX: certified where there is one")
@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
@pytest.mark.parametrize(
    "sides",
    [("CPU_MLA", 16, "AMX_MLA", 64), ("AMX_MLA", 96, "CPU_MLA", 16), ("AMX_MLA", 32, "AMX_MLA", 64)],
    ids=lambda s: "-".join(map(str, s)),
)
def test_latents_between_backends_and_block_sizes(sides: tuple[str, int, str, int], tp: tuple[int, int]) -> None:
    producer, consumer = (
        Setup("deepseek", t, block=sides[i + 1], dtype="bfloat16", backend=sides[i]) for t, i in zip(tp, (0, 2), strict=True)
    )
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.parametrize("blocks", [(64, 32, 32, 32), (32, 32, 96, 32), (128, 64, 64, 32), (64, 32, 64, 64)],
                         ids=lambda b: "{}x{}-{}x{}".format(*b))  # fmt: skip
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda t: f"tp{t[0]}to{t[1]}")
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_blocks_that_are_cut_into_kernel_blocks(model: str, tp: tuple[int, int], blocks: tuple[int, int, int, int]) -> None:
    producer, consumer = (Setup(model, t, block=blocks[i], kernel=blocks[i + 1]) for t, i in zip(tp, (0, 2), strict=True))
    found = pair(producer, consumer)
    assert {g.paging.kernel_blocks for g in found.sources[0].groups} == {blocks[0] // blocks[1]}
    assert_exact(cross(found, TOKENS))


@pytest.mark.parametrize("speculative", [(0, 2), (2, 0), (1, 2)], ids=lambda s: f"{s[0]}to{s[1]}")
@pytest.mark.parametrize("conv", CONV_PAIRS, ids=lambda c: f"{c[0]}to{c[1]}")
@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
def test_speculative_taps_on_one_side_are_filled_and_never_read(
    tp: tuple[int, int], conv: tuple[str, str], speculative: tuple[int, int]
) -> None:
    producer, consumer = (
        Setup("granite-h-1g", t, conv=c, speculative=s) for t, c, s in zip(tp, conv, speculative, strict=True)
    )
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.parametrize(("model", "tp"), [("llama-mqa", (1, 2)), ("llama-mqa", (2, 1)), ("llama-mqa", (2, 4)),
                                           ("llama-2kv", (4, 1)), ("llama-2kv", (1, 4)), ("llama-2kv", (4, 2))])  # fmt: skip
def test_replicated_kv_heads(model: str, tp: tuple[int, int]) -> None:
    producer, consumer = Setup(model, tp[0], block=64), Setup(model, tp[1], block=32)
    assert_exact(cross(pair(producer, consumer), TOKENS))


@pytest.mark.parametrize("blocks", [(32, 32), (32, 64), (64, 32)], ids=lambda b: f"{b[0]}to{b[1]}")
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "hashed"])
def test_windows_at_every_residue_of_the_block_size(blocks: tuple[int, int], prefix_caching: bool) -> None:
    producer, consumer = (Setup("gemma3", block=b, prefix_caching=prefix_caching) for b in blocks)
    found = pair(producer, consumer)
    for tokens in (1, 31, 32, 33, 62, 63, 64, *range(126, 194)):
        assert_exact(cross(found, tokens))


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "hashed"])
@pytest.mark.parametrize("hma", [(True, False), (False, True), (False, False)], ids=["on-off", "off-on", "off-off"])
def test_hybrid_manager_on_one_side_only(hma: tuple[bool, bool], prefix_caching: bool) -> None:
    producer, consumer = (
        Setup("gemma3", t, block=b, hma=h, prefix_caching=prefix_caching) for t, b, h in zip((1, 2), (32, 64), hma, strict=True)
    )
    found = pair(producer, consumer)
    outcomes = cross(found, TOKENS)
    assert_exact(outcomes)
    lost = prefix_caching and hma == (True, False)
    assert [bool(o.binding.unhashable) for o in outcomes] == [lost, lost]


def test_reach_is_the_models_and_keeps_is_the_block_tables() -> None:
    on, off = (workers(Setup("gemma3", hma=h), "D")[0].manifest("D") for h in (True, False))
    assert {layer.name: layer.reach for layer in on.layers} == {layer.name: layer.reach for layer in off.layers}
    assert [group.keeps for group in on.groups] == [Window(64), Window(64), FULL]
    assert [group.keeps for group in off.groups] == [FULL]


@pytest.mark.parametrize("model", FOUR)
def test_control_one_wrong_byte_is_seen(model: str) -> None:
    (outcome,) = cross(pair(Setup(model), Setup(model, block=64)), TOKENS)
    assert outcome.differences() == ""
    written = np.flatnonzero(outcome.wanted != outcome.before)
    outcome.got[written[len(written) // 2]] ^= 1
    assert "1 of" in outcome.differences()


def test_control_digits_of_another_instruction_set_are_seen() -> None:
    truth = Setup("llama", dtype="bfloat16", isa="vec")
    (outcome,) = cross(pair(replace(truth, declared_isa="amx"), replace(truth, block=64)), TOKENS)
    assert outcome.binding.bytes == outcome.needed_bytes
    assert "bytes differ" in outcome.differences()


def test_control_the_wrong_conv_layout_is_refused() -> None:
    worker = workers(Setup("nemotron-h", conv="DS"), "D")[0]
    with pytest.raises(ManifestError, match=r"layers\.0\.mixer: Mamba2 with conv order 'sd'"):
        replace(worker, setup=replace(worker.setup, conv="SD")).manifest("D")


def _uncertified(setup: Setup, isa: str = "rvv") -> Setup:
    """An engine on an instruction set that is not certified."""
    return replace(setup, declared_isa=isa)


@pytest.mark.parametrize("tp", TP_PAIRS, ids=lambda t: f"tp{t[0]}to{t[1]}")
def test_an_uncertified_layout_moves_as_whole_cells(tp: tuple[int, int]) -> None:
    producer, consumer = (_uncertified(Setup("llama", t)) for t in tp)
    found = pair(producer, consumer)
    assert {part.name for layer in found.sources[0].layers for part in layer.parts} == {"bytes"}
    for outcome in cross(found, TOKENS, blank=True):
        assert outcome.differences() == ""
        assert outcome.binding.bytes == outcome.needed_bytes // TOKENS * 160


def test_an_uncertified_layout_is_not_cut_along_tokens() -> None:
    with pytest.raises(MismatchError, match=r"layers\.0\.self_attn\.attn bytes: .*opaque cells cannot be cut"):
        pair(_uncertified(Setup("llama")), _uncertified(Setup("llama", block=64)))


def test_two_uncertified_layouts_do_not_meet() -> None:
    with pytest.raises(
        MismatchError,
        match=r"opaque cells 'vllm .* rvv .*' of \d+ bytes there, opaque cells 'vllm .* vxe .*' of \d+ bytes here",
    ):
        pair(_uncertified(Setup("llama")), _uncertified(Setup("llama"), "vxe"))


def test_a_certified_and_an_uncertified_layout_do_not_meet() -> None:
    with pytest.raises(MismatchError, match=r"layers\.0\.self_attn\.attn: .* what is inside of such cells is not known"):
        pair(_uncertified(Setup("llama")), Setup("llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_caches_are_opaque_and_carry_their_scales(dtype: str) -> None:
    manifest = workers(Setup("llama", dtype=dtype, kv_cache_dtype="fp8"), "D")[0].manifest("D")
    assert {(shape.element.dtype, shape.element.scales) for shape in manifest.shapes} == {("opaque", (1.0, 1.0))}
