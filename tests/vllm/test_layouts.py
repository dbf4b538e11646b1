"""vLLM's cache-write ops and state kernels are watched, here those of the CPU; and whoever watches is watched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import stand_ins
import torch
from byte_crossing import cross, pair
from engine import Setup, start, workers
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.engines.vllm import certify_states
from kvferry.engines.vllm.certify import CPU_SUBJECTS, CUDA_SUBJECTS, LAYOUTS, OpError, Subject, certify, subjects
from kvferry.engines.vllm.certify_states import certify_states as watch_states
from kvferry.engines.vllm.certify_states import watch_state
from kvferry.engines.vllm.evidence import Evidence, recorded
from kvferry.engines.vllm.layouts import CERTIFICATES, replay
from kvferry.engines.vllm.state_kernels import StateError
from kvferry.errors import ManifestError
from kvferry.manifest.kinds import Shard

pytestmark = pytest.mark.vllm

RUNS_HERE = {"FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "DEEPSEEK_V32_INDEXER"}
TOKENS = 157


def small(subject: Subject) -> Subject:
    """The smallest shape of several heads, where there are several."""
    several = [shape for shape in subject.shapes if subject.latent or shape[1] > 1]
    return replace(subject, shapes=(min(several, key=lambda shape: shape[0] * shape[1] * sum(shape[2])),))


def of_gpu() -> list[Subject]:
    """All but the kernel that packs four bits, which has no stand-in."""
    known = (s for s in CUDA_SUBJECTS if s.backend in RUNS_HERE)
    return [small(replace(s, forms=tuple(form for form in s.forms if "int4" not in form))) for s in known]


@lru_cache(maxsize=1)
def seen_on_stand_ins() -> Evidence:
    return certify(of_gpu())


def test_the_ops_of_this_machine_write_as_the_table_says() -> None:
    start()
    run = certify()
    assert run.troubles == ()
    assert replay(run) == ()
    kept = {(s.backend, s.isa, s.form, s.layout): s.cases for kept in recorded() for s in kept.sightings if s.cases}
    for one in run.sightings:
        assert kept.get((one.backend, one.isa, one.form, one.layout), one.cases) == one.cases


def test_every_certificate_is_watched() -> None:
    watched = {(s.backend, s.isa, form) for s in (*CPU_SUBJECTS, *CUDA_SUBJECTS) for form in s.forms}
    assert {(c.backend, c.isa, form) for c in CERTIFICATES for form in c.formats} == watched


def test_a_run_on_a_gpu_goes_through_every_layout_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    stand_ins.install(monkeypatch)
    run = seen_on_stand_ins()
    assert run.troubles == ()
    assert replay(run) == ()
    assert {s.layout for s in run.sightings} == set(LAYOUTS)
    assert {s.form for s in run.sightings} >= {"float32", "fp8_e4m3", "fp8_ds_mla", "int8_per_token_head", "uint8"}


def _wrong(what: str) -> Any:
    def write(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any) -> None:
        if what == "K and V exchanged":
            keys, values = values, keys
        if what == "two dims exchanged":
            key = key.clone()
            key[..., [0, 1]] = key[..., [1, 0]]
        if what == "heads turned":
            value = value.roll(1, dims=1)
        stand_ins.kv(key, value, keys, values, slots, *rest)
        if what == "a byte too many":
            keys[-1, -1, -1, -1] = 1
        if what == "a token forgotten":
            keys[slots[0] // keys.shape[1], slots[0] % keys.shape[1]] = float("nan")

    return write


@pytest.mark.parametrize(
    "what", ["K and V exchanged", "two dims exchanged", "heads turned", "a byte too many", "a token forgotten"]
)
def test_control_an_op_that_writes_otherwise_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    stand_ins.install(monkeypatch, _wrong(what))
    flash = next(s for s in of_gpu() if s.backend == "FLASH_ATTN")
    run = certify([replace(flash, forms=("bfloat16",), layouts=("LBHNC", "LBNHC"))])
    assert run.sightings == ()
    assert len(run.troubles) == 2


@pytest.mark.parametrize(("refused", "left"), [("bfloat16", 1), ("auto", 0)])
def test_a_spelling_that_an_op_does_not_take_is_told_of_and_the_others_count(
    refused: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(key: Any, value: Any, keys: Any, values: Any, slots: Any, form: str, *scales: Any) -> None:
        if form == refused:
            raise RuntimeError(f"Unsupported data type of kv cache: {form}")
        stand_ins.kv(key, value, keys, values, slots, form, *scales)

    start()
    stand_ins.install(monkeypatch, picky)
    flash = next(s for s in of_gpu() if s.backend == "FLASH_ATTN")
    run = certify([replace(flash, forms=("bfloat16",), layouts=("LBHNC",))])
    assert [len(one.cases) for one in run.sightings] == [1] * left
    assert [trouble.what.rpartition(" ")[2] for trouble in run.troubles] == [refused]


def test_kernels_keep_states_where_the_manifest_says() -> None:
    start()
    outcomes, troubles = watch_states()
    assert {o.what.split(",")[0] for o in outcomes} == {"Mamba2", "Mamba1", "short convolution", "gated delta net", "KDA"}
    assert troubles == ()
    stepped = {o.what.split(",")[0] for o in outcomes if o.found.startswith("conv and state")}
    assert stepped == {"Mamba2", "Mamba1", "gated delta net"}


def test_control_a_kernel_that_keeps_a_state_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    right = causal_conv1d.causal_conv1d_update

    def turned(x: Any, *rest: Any) -> Any:
        return right(x.roll(1, dims=1), *rest)

    monkeypatch.setattr(causal_conv1d, "causal_conv1d_update", turned)
    kind = next(k for k in certify_states._recurrent() if k.name == "Mamba1")
    with pytest.raises(StateError, match=r"Mamba1: conv\.x is not kept by channels"):
        watch_state(kind, Shard(), "SD", ("float32", "float32"), torch.device("cpu"))


@pytest.fixture
def gpu_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers of GPU backends over stand-ins of their ops."""
    start()
    stand_ins.install(monkeypatch)
    stand_ins.choose_backends(monkeypatch)
    workers.cache_clear()
    pair.cache_clear()
    yield
    workers.cache_clear()
    pair.cache_clear()


ATTENTION = Setup("llama", dtype="bfloat16", backend="TRITON_ATTN", layout="BLHNC", block=16)
LATENT = Setup("deepseek", dtype="bfloat16", backend="TRITON_MLA", layout="BLHNC", block=16)
HYBRID = replace(ATTENTION, model="nemotron-h")
SINKS = replace(ATTENTION, model="gpt-oss", backend="FLASH_ATTN", blocks=120)
GATED = replace(ATTENTION, model="qwen3-next", backend="FLASH_ATTN")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ATTENTION, replace(ATTENTION, block=64, tp=2)),
        (replace(ATTENTION, layout="LBNHC", block=128, tp=2), replace(ATTENTION, layout="BHLNC")),
        (replace(ATTENTION, layout="LBHNC"), replace(ATTENTION, layout="LBNHC", tp=2)),
        (replace(ATTENTION, kv_cache_dtype="fp8"), replace(ATTENTION, kv_cache_dtype="fp8_e4m3", block=64, tp=2)),
        (replace(ATTENTION, kv_cache_dtype="bfloat16"), replace(ATTENTION, layout="BLNHC", block=32)),
        (LATENT, replace(LATENT, layout="LBNHC", block=64, tp=2)),
        (HYBRID, replace(HYBRID, block=64, tp=2, conv="DS")),
        (replace(HYBRID, tp=2), replace(HYBRID, layout="LBHNC", block=128)),
        (SINKS, replace(SINKS, block=64, tp=2)),
        (replace(SINKS, tp=2), replace(SINKS, layout="LBHNC", block=128)),
        (replace(GATED, tp=2), replace(GATED, layout="LBHNC", block=128)),
    ],
    ids=lambda s: f"{s.model}-{s.backend}-{s.layout}-{s.block}-tp{s.tp}-{s.kv_cache_dtype}",
)
@pytest.mark.usefixtures("gpu_backends")
def test_caches_of_gpu_backends_cross_between_layouts_blocks_and_ranks(source: Setup, target: Setup) -> None:
    for outcome in cross(pair(source, target), TOKENS):
        assert outcome.differences() == ""
        assert outcome.binding.bytes == outcome.needed_bytes > 0
        assert (outcome.got != outcome.before).any()


HOST = Setup("llama", dtype="bfloat16", backend="CPU_ATTN", layout="LBHNC", isa="vec")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ATTENTION, replace(HOST, block=32, tp=2)),
        (replace(ATTENTION, backend="FLASH_ATTN", tp=2), replace(HOST, block=64)),
        (replace(HOST, block=32), replace(ATTENTION, backend="FLASH_ATTN", block=128, tp=2)),
        (replace(HOST, block=64, tp=2), replace(ATTENTION, layout="LBNHC")),
        (HYBRID, replace(HOST, model="nemotron-h", tp=2, conv="DS")),
        (replace(HOST, model="nemotron-h"), replace(HYBRID, tp=2)),
    ],
    ids=lambda s: f"{s.model}-{s.backend}-{s.block}-tp{s.tp}",
)
@pytest.mark.usefixtures("gpu_backends")
def test_caches_cross_between_backends_of_gpus_and_of_cpus(source: Setup, target: Setup) -> None:
    """The one's inner layout is a stand-in's here, the other's that of the CPU's own op."""
    for outcome in cross(pair(source, target), TOKENS):
        assert outcome.differences() == ""
        assert outcome.binding.bytes == outcome.needed_bytes > 0
        assert (outcome.got != outcome.before).any()


def test_backends_that_keep_tokens_outside_of_heads_take_no_other_layout() -> None:
    """So that no advice may tell a user to ask for one."""
    for name in ("FLEX_ATTENTION", "HPC_ATTN"):
        backend = AttentionBackendEnum[name].get_class()
        assert get_supported_kv_cache_layouts([backend]) == [KVCacheLayout.LBNHC]


def test_of_a_cpu_of_another_kind_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda *_: CpuArchEnum.RISCV)
    with pytest.raises(OpError, match="RISCV"):
        subjects.__wrapped__()


@pytest.mark.parametrize(("kind", "own", "other"), [(CpuArchEnum.X86, "vec", "neon"), (CpuArchEnum.ARM, "neon", "vec")])
def test_a_cpu_has_no_instructions_of_another_kind(monkeypatch: pytest.MonkeyPatch, kind: Any, own: str, other: str) -> None:
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda *_: kind)
    found = {subject.isa for subject in subjects.__wrapped__()}
    assert own in found
    assert other not in found


def test_subjects_are_of_this_machine() -> None:
    assert {s.backend for s in subjects()} <= {"CPU_ATTN", "CPU_MLA", "AMX_MLA"}


def test_a_gated_delta_net_on_a_cpu_declares_its_state_by_keys() -> None:
    """It is bound by values, as on a GPU, and its kernels take it for something else."""
    (worker,) = workers(Setup("qwen3-next"), "D")
    manifest = worker.manifest("D")
    states = [manifest.shapes[p.shape] for layer in manifest.layers for p in layer.parts if p.name == "ssm"]
    assert states
    for shape in states:
        strides = {axis.name: axis.digits[-1][1] for axis in shape.axes}
        assert strides["dim"] == shape.element.bytes < strides["state"]


@pytest.mark.parametrize("name", ["", "XPU", "another"])
def test_a_gated_delta_net_whose_kernels_nobody_has_watched_is_refused(name: str) -> None:
    (worker,) = workers(Setup("qwen3-next"), "D")
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "gdn_decode_kernel"):
            layer.gdn_decode_kernel = name
    with pytest.raises(ManifestError, match="in which order these keep the state is not known"):
        worker.manifest("D")
