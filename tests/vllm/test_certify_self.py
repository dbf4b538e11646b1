"""An engine certifies its own caches when it starts: what its ops write is found, and what no layout explains is opaque."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_ins
import torch
from byte_crossing import cross, pair
from engine import Setup, Worker, build, start
from heard import hearing
from test_layouts import of_gpu
from vllm.model_executor.layers.mamba.ops import causal_conv1d

from kvferry.engines.vllm.certify import Subject, Trial, _Cache, allocate
from kvferry.engines.vllm.certify_self import INDEXER, UnknownLayoutError, watch
from kvferry.engines.vllm.layouts import candidate
from kvferry.errors import MismatchError
from kvferry.manifest import Manifest
from vllm import _custom_ops as ops

pytestmark = pytest.mark.vllm

TOKENS = 157
ENGINES = (
    Setup("llama"),
    Setup("llama", dtype="bfloat16", block=64),
    Setup("llama", tp=2, rank=1, kernel=32, block=96),
    Setup("gemma3"),
    Setup("deepseek", backend="CPU_MLA"),
    Setup("nemotron-h"),
    Setup("nemotron-h", tp=2, rank=1, conv="DS"),
    Setup("granite-h-1g", tp=2),
    Setup("jamba"),
    Setup("lfm2"),
    Setup("qwen3-next", dtype="bfloat16"),
)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What other ops were seen to do is of this test alone."""
    pair.cache_clear()
    yield
    pair.cache_clear()


def names(manifest: Manifest) -> set[str]:
    return {part.name for layer in manifest.layers for part in layer.parts}


@pytest.mark.parametrize("setup", ENGINES, ids=lambda s: f"{s.model}-{s.dtype}-{s.block}-tp{s.tp}-{s.conv}")
def test_every_layer_is_certified_and_the_cache_is_left_as_it_was(setup: Setup) -> None:
    worker = build(setup)
    worker.memory[:] = np.random.default_rng(0).integers(0, 256, len(worker.memory), dtype=np.uint8)
    before = worker.memory.copy()
    with hearing() as heard:
        assert "bytes" not in names(worker.manifest("D"))
    assert (worker.memory == before).all()
    assert heard.warnings == []
    assert any("certified its caches in" in line for line in heard.lines)


def _layer(trial: Trial, subject: Subject, cache: _Cache) -> Any:
    """A layer whose op is the subject's, as much of one as is read."""
    named = SimpleNamespace(get_name=lambda: trial.backend)
    scales = {"_k_scale_float": 2.0, "_v_scale_float": 2.0 if subject.latent else 4.0, "_k_scale": None}
    layer = SimpleNamespace(get_attn_backend=lambda: named, kv_cache_dtype=trial.form, kv_cache=cache.view, **scales)

    def write(*given: Any) -> None:
        if subject.latent:
            latent, rope, view, slots, *_ = given
            subject.write(trial, view, [latent[:, None], rope], slots)
        else:
            _, key, value, view, slots = given
            subject.write(trial, view, [key, value], slots)

    layer.impl = SimpleNamespace(do_kv_cache_update=write)
    if trial.backend == INDEXER:
        layer.head_dim, layer.kv_cache = 132, cache.view.squeeze(1)
    elif subject.latent:
        layer.kv_lora_rank, layer.qk_rope_head_dim = trial.dims
    return layer


def _watched(trial: Trial, subject: Subject) -> tuple[Any, _Cache]:
    cache = allocate(trial, subject.latent, torch.device("cpu"))
    cache.memory.copy_(torch.randint(0, 256, cache.memory.shape, dtype=torch.uint8))
    before = cache.memory.clone()
    spec = SimpleNamespace(
        num_kv_heads=trial.heads, head_size=trial.dims[0], head_size_v=0 if subject.latent else trial.dims[0]
    )
    dtype = getattr(torch, trial.form) if trial.form in ("float32", "float16") else torch.bfloat16
    cell = watch(_layer(trial, subject, cache), spec, cache.view, trial.form, dtype)
    if "per_token_head" not in trial.form:  # The first write of these gives every scale of the cache a value.
        assert torch.equal(cache.memory, before)
    return cell, cache


@pytest.mark.parametrize("which", range(len(of_gpu())), ids=lambda i: f"{of_gpu()[i].backend}-{of_gpu()[i].forms[0]}")
def test_caches_of_gpus_are_found_in_every_layout_and_format(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    stand_ins.install(monkeypatch)
    subject = of_gpu()[which]
    for _, _, trials in subject.trials():
        cell, cache = _watched(trials[0], subject)
        assert cell == candidate(trials[0].backend, "", trials[0].form, cache.grid)


Ruin = Callable[..., None]
real_write = ops.cpu_attn_reshape_and_cache


def _value_transposed(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any, **more: Any) -> None:
    """V as [dim][token] too."""
    real_write(key, value, keys, values, slots, *rest, **more)
    tokens, dim = values.shape[2], values.shape[3]
    for block in {int(slot) // tokens for slot in slots if slot >= 0}:
        kept = values[block].reshape(values.shape[1], tokens, dim).transpose(1, 2).contiguous()
        values[block] = kept.reshape(values[block].shape)


def _two_dims_exchanged(key: Any, value: Any, *rest: Any, **more: Any) -> None:
    key = key.clone()
    key[..., [0, 1]] = key[..., [1, 0]]
    real_write(key, value, *rest, **more)


def _one_byte_beside(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any, **more: Any) -> None:
    real_write(key, value, keys, values, slots, *rest, **more)
    keys[0, 0, 0, 0] += 1


def _cannot_be_called(*given: Any, **more: Any) -> None:
    raise TypeError("cpu_attn_reshape_and_cache() takes 9 positional arguments")


def _some_tokens_forgotten(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any, **more: Any) -> None:
    real_write(key[1:], value[1:], keys, values, slots[1:], *rest, **more)


@pytest.mark.parametrize(
    ("ruin", "said"),
    [
        (_value_transposed, "writes otherwise than any known layout"),
        (_two_dims_exchanged, "writes otherwise"),
        (_one_byte_beside, "writes otherwise"),
        (_some_tokens_forgotten, "writes otherwise"),
        (_cannot_be_called, r"could not be called (TypeError: cpu_attn"),
    ],
)
def test_control_an_op_that_writes_otherwise_makes_its_layers_opaque(
    ruin: Ruin, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = build(Setup("llama"))
    worker.memory[:] = np.random.default_rng(0).integers(0, 64, len(worker.memory), dtype=np.uint8)
    before = worker.memory.copy()
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", ruin)
    with hearing() as heard:
        assert names(worker.manifest("D")) == {"bytes"}
    assert (worker.memory == before).all()
    (line,) = heard.warnings
    assert said in line
    assert "CPU_ATTN vec float32" in line
    assert "equal block sizes" in line


def test_a_backend_that_transposes_is_served_between_equal_sides_and_refused_between_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are written one by one and last, so that the transposition of the whole block comes once."""
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", _value_transposed)
    alike = pair(Setup("llama"), Setup("llama"))
    assert names(alike.sources[0]) == {"bytes"}
    with pytest.raises(MismatchError, match="opaque cells cannot be cut"):
        pair(Setup("llama"), Setup("llama", block=64))
    monkeypatch.undo()
    (outcome,) = cross(alike, TOKENS, blank=True)
    assert outcome.differences() == ""
    assert outcome.binding.bytes == outcome.needed_bytes // TOKENS * 160


def test_a_kernel_that_keeps_a_state_otherwise_makes_it_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    right = causal_conv1d.causal_conv1d_update
    monkeypatch.setattr(causal_conv1d, "causal_conv1d_update", lambda x, *rest: right(x.roll(1, dims=1), *rest))
    worker = build(Setup("nemotron-h"))
    with hearing() as heard:
        manifest = worker.manifest("D")
    states = [layer for layer in manifest.layers if "bytes" in {part.name for part in layer.parts}]
    assert len(states) > 0
    assert {"k", "v", "bytes"} == names(manifest)
    (line,) = heard.warnings
    assert "is not kept by channels as the manifest says" in line
    with pytest.raises(MismatchError, match="mixer"):
        pair(Setup("nemotron-h"), Setup("nemotron-h", tp=2))


def test_opaque_states_are_moved_whole_between_equal_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    right = causal_conv1d.causal_conv1d_update
    monkeypatch.setattr(causal_conv1d, "causal_conv1d_update", lambda x, *rest: right(x.roll(1, dims=1), *rest))
    sides = pair(Setup("nemotron-h", tp=2), Setup("nemotron-h", tp=2))
    for outcome in cross(sides, TOKENS):
        assert outcome.differences() == ""
        assert outcome.binding.bytes > 0


def test_too_few_blocks_to_look_at_make_a_layer_opaque() -> None:
    worker: Worker = build(replace(Setup("llama"), blocks=40))
    name = next(iter(worker.kv_caches))
    spec = worker.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    with pytest.raises(UnknownLayoutError, match="it has 3 kernel blocks, and 4 are looked at"):
        watch(worker.layers[name], spec, worker.kv_caches[name][:3], "float32", torch.float32)
