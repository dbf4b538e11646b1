"""Recurrent layers of every kind, each with a pool of its own that is bound as vLLM binds it, for an operator's machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.platforms import current_platform

from kvferry.engines.vllm.evidence import Outcome, Trouble
from kvferry.engines.vllm.state_kernels import BLOCKS, UNTOUCHED, StatePage, step_of, watch_page
from kvferry.engines.vllm.states import ON_CPU, ON_GPU, StateLayer, state_parts
from kvferry.manifest.kinds import Shard

CONV_ORDER: Final = "VLLM_SSM_CONV_STATE_LAYOUT"
PADDING: Final = 96
CASES: Final = {
    "SD": ((Shard(), ("bfloat16", "float32")), (Shard(1, 2), ("float32", "float32"))),
    "DS": ((Shard(1, 2), ("bfloat16", "bfloat16")),),
}
"""Each of them is a kernel to be compiled, where kernels are compiled."""


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer of a model: what vLLM calls it, the sizes its object has, and the shapes of its state on a rank."""

    name: str
    mamba_type: str
    sizes: dict[str, Any]
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    groups: int = 1
    speculative: int = 0


def _recurrent() -> tuple[Recurrent, ...]:
    mamba2 = {"num_heads": 16, "head_dim": 64, "ssm_state_size": 128, "conv_kernel_size": 4}
    one_group = {"num_heads": 16, "head_dim": 32, "ssm_state_size": 64, "conv_kernel_size": 4}
    gdn = {"num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 128, "head_v_dim": 128, "conv_kernel_size": 4, "num_spec": 0}
    return (
        Recurrent(
            "Mamba2, 8 groups", "MAMBA2", {**mamba2, "num_spec": 0, "n_groups": 8},
            lambda tp: Shapes.mamba2_state_shape(tp, 1024, 8, 16, 64, 128, 4), 8,
        ),
        Recurrent(
            "Mamba2, 1 group", "MAMBA2", {**one_group, "num_spec": 0, "n_groups": 1},
            lambda tp: Shapes.mamba2_state_shape(tp, 512, 1, 16, 32, 64, 4), 1,
        ),
        Recurrent(
            "Mamba2, 2 speculative tokens", "MAMBA2", {**mamba2, "num_spec": 2, "n_groups": 8},
            lambda tp: Shapes.mamba2_state_shape(tp, 1024, 8, 16, 64, 128, 4, 2), 8, 2,
        ),
        Recurrent(
            "Mamba1", "MAMBA1", {"intermediate_size": 512, "ssm_state_size": 16, "conv_kernel_size": 4},
            lambda tp: Shapes.mamba1_state_shape(tp, 512, 16, 4),
        ),
        Recurrent(
            "short convolution", "SHORT_CONV", {"conv_dim": 512, "L_cache": 3, "num_spec": 0},
            lambda tp: Shapes.short_conv_state_shape(tp, 512, 3),
        ),
        Recurrent(
            "gated delta net", "GDN_ATTN", gdn,
            lambda tp: Shapes.gated_delta_net_state_shape(tp, 4, 8, 128, 128, 4),
        ),
        Recurrent(
            "KDA", "GDN_ATTN", {"num_heads": 4, "head_dim": 128, "conv_size": 4, "num_spec": 0},
            lambda tp: Shapes.kda_state_shape(tp, 4, 128),
        ),
    )  # fmt: skip


@contextmanager
def _conv_order(order: str) -> Iterator[None]:
    before = os.environ.get(CONV_ORDER)
    os.environ[CONV_ORDER] = order
    mamba_utils.get_conv_state_layout.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(CONV_ORDER)
        if before is not None:
            os.environ[CONV_ORDER] = before
        mamba_utils.get_conv_state_layout.cache_clear()


def _page(kind: Recurrent, shard: Shard, order: str, dtypes: Sequence[str], device: Any) -> tuple[Any, StatePage]:
    """A layer and its pages."""
    shapes = tuple(kind.shapes(shard.size))
    types = [getattr(torch, name) for name in dtypes[: len(shapes)]]
    stride = sum(prod(shape) * some.itemsize for shape, some in zip(shapes, types, strict=True)) + PADDING
    memory = torch.full((BLOCKS * stride,), UNTOUCHED, dtype=torch.uint8, device=device)
    layer = SimpleNamespace(get_state_shape=lambda: shapes, get_state_dtype=lambda: types, **kind.sizes)
    if "n_groups" in kind.sizes and kind.groups % shard.size:
        layer.n_groups = shard.size
    MambaBase.bind_kv_cache(layer, memory.view(torch.int8).view(BLOCKS, 1, 1, stride))
    text = SimpleNamespace(n_groups=kind.groups)
    state = StateLayer(kind.name, layer, kind.mamba_type, layer.kv_cache, text)
    parts = state_parts(state, shard, "sd" if order == "SD" else "ds")
    return layer, StatePage(kind.name, memory.view(BLOCKS, stride), layer.kv_cache, parts, order, kind.speculative)


def watch_state(kind: Recurrent, shard: Shard, order: str, dtypes: Sequence[str], device: Any) -> bool:
    """Raises where a kernel keeps anything elsewhere than the manifest says; whether there is one for the matrix state."""
    with _conv_order(order):
        layer, page = _page(kind, shard, order, dtypes, device)
        step, exact = step_of(layer, kind.mamba_type, torch.device(device).type)
        watch_page(page, step, exact)
    return step is not None


def on_this_machine() -> Iterator[Recurrent]:
    """On a CPU the op of convolutions keeps the last taps, and is not used with speculation; states of gated delta nets are
    stepped by an op of its own, those of KDA by kernels of GPUs alone."""
    for kind in _recurrent():
        if not current_platform.is_cpu():
            yield kind
        elif kind.mamba_type == "GDN_ATTN":
            kernels = ON_CPU if "num_k_heads" in kind.sizes else ON_GPU[0]
            yield replace(kind, sizes={**kind.sizes, "gdn_decode_kernel": kernels})
        elif not kind.speculative:
            yield kind


def certify_states(
    device: str = "", told: Callable[[str], None] = lambda line: None, kinds: Iterable[Recurrent] | None = None
) -> tuple[tuple[Outcome, ...], tuple[Trouble, ...]]:
    """Every kind of recurrent layer, in both conv orders."""
    where = torch.device(device or current_platform.device_type)
    outcomes, troubles = [], []
    for kind in on_this_machine() if kinds is None else kinds:
        for order, cases in CASES.items():
            name = f"{kind.name}, conv {order}"
            try:
                stepped = [watch_state(kind, shard, order, dtypes, where) for shard, dtypes in cases]
            except Exception as error:  # noqa: BLE001  any failure of foreign code is a finding of its own
                told(f"{name}: {type(error).__name__}: {error}")
                troubles.append(Trouble(name, f"{type(error).__name__}: {error}"[:500]))
                continue
            told(f"{name}: as declared")
            said = ", ".join(f"rank {s.rank} of {s.size} in {'/'.join(d)}" for s, d in cases)
            outcomes.append(Outcome(name, f"{'conv and state' if all(stepped) else 'conv'} as declared: {said}"))
    return tuple(outcomes), tuple(troubles)
