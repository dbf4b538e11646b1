"""Watches vLLM's own kernels step a recurrent state, and compares the page with what its manifest says.

A page is bound as vLLM binds it, its kernels are given numbers that name each channel, tap, head, dim and state, and the
bytes of the whole pool are compared: those that the manifest gives to a part hold that part's numbers, all others what was
there before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.platforms import current_platform

from kvferry.engines.vllm.evidence import Outcome, Trouble
from kvferry.engines.vllm.states import ON_CPU, ON_GPU, StateLayer, state_parts
from kvferry.errors import KVFerryError
from kvferry.manifest.kinds import Shard
from kvferry.manifest.page import PlacedPart
from kvferry.strided import spread

CONV_ORDER: Final = "VLLM_SSM_CONV_STATE_LAYOUT"
BLOCKS, BLOCK, PADDING = 4, 2, 96
BASE: Final = 128
CASES: Final = {
    "SD": ((Shard(), ("bfloat16", "float32")), (Shard(1, 2), ("float32", "float32"))),
    "DS": ((Shard(1, 2), ("bfloat16", "bfloat16")),),
}
"""Each of them is a kernel to be compiled, where kernels are compiled."""
UNTOUCHED: Final = 0xFF


class StateError(KVFerryError):
    """A kernel was seen to keep a state otherwise than its manifest says."""


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer of a model: what vLLM calls it, the sizes its object has, and the shapes of its state on a rank."""

    name: str
    mamba_type: str
    sizes: dict[str, Any]
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    step: Callable[[Any, Any, Any, Any], None] | None
    groups: int = 1
    speculative: int = 0
    exact: bool = True


def _mamba(state: Any, heads_dim: Any, states: Any, index: Any) -> None:
    """State [..., dim, state] becomes x (by all but the last) times B (by the last)."""
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    x = heads_dim.view(1, *state.shape[1:-1])
    ones = torch.ones_like(x)
    zeros = torch.zeros(state.shape[1:], dtype=torch.float32, device=state.device)
    B = states.view(1, 1, -1) if state.dim() == 4 else states.view(1, -1)
    one_head = torch.zeros(state.shape[1:-1], dtype=torch.float32, device=state.device)
    selective_state_update(
        state,
        x,
        ones,
        zeros,
        B,
        B,
        D=one_head,
        dt_bias=one_head,
        state_batch_indices=index,
        out=torch.empty_like(x),
    )


def _gated(state: Any, heads_dim: Any, states: Any, index: Any) -> None:
    """State [head, v, k] becomes v times k."""
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

    _, heads, v_dim, k_dim = state.shape
    k = states.view(1, 1, 1, k_dim).repeat(1, 1, heads, 1)
    by_head = torch.zeros(heads, dtype=torch.float32, device=state.device)
    open_gate = torch.full((1, heads), 60.0, dtype=heads_dim.dtype, device=state.device)
    fused_sigmoid_gating_delta_rule_update(
        A_log=by_head,
        a=torch.zeros_like(open_gate),
        b=open_gate,
        dt_bias=by_head,
        q=k,
        k=k,
        v=heads_dim.view(1, 1, heads, v_dim),
        initial_state=state,
        inplace_final_state=True,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=state.device),
        ssm_state_indices=index,
        use_qk_l2norm_in_kernel=False,
    )


def _gated_on_cpu(state: Any, heads_dim: Any, states: Any, index: Any) -> None:
    """State [head, k, v], in memory that is bound as [head, v, k], as vLLM hands it to the op."""
    from vllm import _custom_ops as ops

    blocks, heads, v_dim, k_dim = state.shape
    k = states.to(torch.bfloat16).view(1, 1, 1, k_dim).repeat(1, 1, heads, 1)
    open_gate = torch.full((1, heads), 60.0, dtype=torch.bfloat16)
    ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=torch.zeros(heads, dtype=torch.float32),
        dt_bias=torch.zeros(heads, dtype=torch.bfloat16),
        q=k,
        k=k,
        v=heads_dim.to(torch.bfloat16).view(1, 1, heads, v_dim),
        a=torch.zeros_like(open_gate),
        b=open_gate,
        initial_state_source=state.view(blocks, heads, k_dim, v_dim),
        initial_state_indices=index,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        use_qk_l2norm_in_kernel=False,
    )


def _kda(state: Any, heads_dim: Any, states: Any, index: Any) -> None:
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent_kda

    _, heads, v_dim, k_dim = state.shape
    k = states.view(1, 1, 1, k_dim).repeat(1, 1, heads, 1)
    fused_recurrent_kda(
        q=k,
        k=k,
        v=heads_dim.view(1, 1, heads, v_dim),
        raw_g=torch.zeros_like(k),
        raw_beta=torch.full((1, 1, heads), 60.0, dtype=heads_dim.dtype, device=state.device),
        A_log=torch.zeros(heads, dtype=torch.float32, device=state.device),
        dt_bias=torch.zeros(heads * k_dim, dtype=torch.float32, device=state.device),
        lower_bound=None,
        initial_state=state,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=state.device),
        ssm_state_indices=index,
    )


def _recurrent() -> tuple[Recurrent, ...]:
    mamba2 = {"num_heads": 16, "head_dim": 64, "ssm_state_size": 128, "conv_kernel_size": 4}
    one_group = {"num_heads": 16, "head_dim": 32, "ssm_state_size": 64, "conv_kernel_size": 4}
    gdn = {"num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 128, "head_v_dim": 128, "conv_kernel_size": 4, "num_spec": 0}
    return (
        Recurrent(
            "Mamba2, 8 groups", "MAMBA2", {**mamba2, "num_spec": 0, "n_groups": 8},
            lambda tp: Shapes.mamba2_state_shape(tp, 1024, 8, 16, 64, 128, 4), _mamba, 8,
        ),
        Recurrent(
            "Mamba2, 1 group", "MAMBA2", {**one_group, "num_spec": 0, "n_groups": 1},
            lambda tp: Shapes.mamba2_state_shape(tp, 512, 1, 16, 32, 64, 4), _mamba, 1,
        ),
        Recurrent(
            "Mamba2, 2 speculative tokens", "MAMBA2", {**mamba2, "num_spec": 2, "n_groups": 8},
            lambda tp: Shapes.mamba2_state_shape(tp, 1024, 8, 16, 64, 128, 4, 2), _mamba, 8, 2,
        ),
        Recurrent(
            "Mamba1", "MAMBA1", {"intermediate_size": 512, "ssm_state_size": 16, "conv_kernel_size": 4},
            lambda tp: Shapes.mamba1_state_shape(tp, 512, 16, 4), _mamba,
        ),
        Recurrent(
            "short convolution", "SHORT_CONV", {"conv_dim": 512, "L_cache": 3, "num_spec": 0},
            lambda tp: Shapes.short_conv_state_shape(tp, 512, 3), None,
        ),
        Recurrent(
            "gated delta net", "GDN_ATTN", gdn,
            lambda tp: Shapes.gated_delta_net_state_shape(tp, 4, 8, 128, 128, 4), _gated,
        ),
        Recurrent(
            "KDA", "GDN_ATTN", {"num_heads": 4, "head_dim": 128, "conv_size": 4, "num_spec": 0},
            lambda tp: Shapes.kda_state_shape(tp, 4, 128), _kda, exact=False,
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


@dataclass(frozen=True)
class _Page:
    """A pool of states, the views that vLLM binds to it, and the parts that the manifest puts there."""

    memory: Any
    views: tuple[Any, ...]
    parts: tuple[PlacedPart, ...]
    stride: int


def _page(kind: Recurrent, shard: Shard, order: str, dtypes: Sequence[str], device: Any) -> _Page:
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
    return _Page(memory, layer.kv_cache, state_parts(state, shard, "sd" if order == "SD" else "ds"), stride)


def watch_state(kind: Recurrent, shard: Shard, order: str, dtypes: Sequence[str], device: Any) -> None:
    """Raises where a kernel keeps anything elsewhere than the manifest says."""
    with _conv_order(order):
        page = _page(kind, shard, order, dtypes, device)
        _watch_conv(kind, page, order)
        if kind.step is not None:
            _watch_ssm(kind, page)


def _watch_conv(kind: Recurrent, page: _Page, order: str) -> None:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    conv = page.views[0] if order == "DS" else page.views[0].transpose(-1, -2)
    _, channels, taps = conv.shape
    live = taps - kind.speculative
    weight = torch.ones((channels, live + 1), dtype=conv.dtype, device=conv.device)
    index = torch.tensor([BLOCK], dtype=torch.int32, device=conv.device)
    at = torch.arange(channels, device=conv.device)
    taps_at = torch.arange(live, device=conv.device)
    for name, numbers in (
        ("channels", (at % BASE + 1)[:, None].expand(channels, live)),
        ("channels", (at // BASE + 1)[:, None].expand(channels, live)),
        ("taps", (taps_at + 1).expand(channels, live)),
    ):
        page.memory.fill_(UNTOUCHED)
        page.views[0][BLOCK] = 0
        for tap in range(live):
            causal_conv1d_update(numbers[:, tap].to(conv.dtype)[None].contiguous(), conv, weight, None, None, index)
        wanted = numbers.cpu().numpy()
        parts = [part for part in page.parts if part.name.startswith("conv")]
        _compare(kind, page, name, parts, np.split(wanted, _ends(parts)), conv.dtype)


def _ends(parts: Sequence[PlacedPart]) -> list[int]:
    counts = [_count(part, "channel") for part in parts]
    return [int(some) for some in np.cumsum(counts)[:-1]]


def _count(part: PlacedPart, axis: str) -> int:
    return next(a.stop - a.start for a in part.shape.axes if a.name == axis)


def _watch_ssm(kind: Recurrent, page: _Page) -> None:
    state = page.views[-1]
    step = kind.step
    if step is None:
        return
    index = torch.tensor([BLOCK], dtype=torch.int32, device=state.device)
    rows, columns = prod(state.shape[1:-1]), int(state.shape[-1])
    by_row, by_column = torch.arange(rows, device=state.device), torch.arange(columns, device=state.device)
    given = page.views[0].dtype
    for name, row, column in (
        ("heads and dims", by_row % BASE + 1, torch.ones_like(by_column)),
        ("heads and dims", by_row // BASE + 1, torch.ones_like(by_column)),
        ("states", torch.ones_like(by_row), by_column % BASE + 1),
    ):
        page.memory.fill_(UNTOUCHED)
        state[BLOCK] = 0
        step(state, row.to(given), column.to(given), index)
        wanted = (row[:, None] * column[None]).cpu().numpy().astype(np.float64)
        if not kind.exact:
            wanted = wanted / np.sqrt((column.cpu().numpy().astype(np.float64) ** 2).sum())
        _compare(kind, page, name, [p for p in page.parts if p.name == "ssm"], [wanted], state.dtype)


def _compare(kind: Recurrent, page: _Page, what: str, parts: Sequence[PlacedPart], wanted: Sequence[Any], dtype: Any) -> None:
    memory = page.memory.cpu().clone()
    pool = memory.view(BLOCKS, page.stride)
    touched = torch.zeros(page.stride, dtype=torch.bool)
    for part, numbers in zip(parts, wanted, strict=True):
        size = part.shape.element.bytes
        digits = [axis.digits for axis in part.shape.axes]
        at = torch.from_numpy(spread(part.offset, (d for one in digits for d in one)))
        within = at[:, None] + torch.arange(size)
        found = pool[BLOCK][within].reshape(-1).view(dtype).double().numpy()
        counts = [a.stop - a.start for a in part.shape.axes]
        found = found.reshape(counts)[tuple(slice(0, a.live_size) for a in part.shape.axes)].reshape(numbers.shape)
        touched[within.reshape(-1)] = True
        if not np.allclose(found, numbers, rtol=0 if kind.exact else 0.02, atol=0):
            raise StateError(f"{kind.name}: {part.name} is not kept by {what} as the manifest says")
    pool[BLOCK][touched] = UNTOUCHED
    if not (memory == UNTOUCHED).all():
        raise StateError(f"{kind.name}: bytes outside of {', '.join(p.name for p in parts)} are written")


def on_this_machine() -> Iterator[Recurrent]:
    """On a CPU the op of convolutions keeps the last taps, and is not used with speculation; states of gated delta nets are
    stepped by an op of its own, those of KDA by kernels of GPUs alone."""
    for kind in _recurrent():
        if not current_platform.is_cpu():
            yield kind
        elif kind.step is _gated:
            yield replace(kind, step=_gated_on_cpu, sizes={**kind.sizes, "gdn_decode_kernel": ON_CPU})
        elif kind.step is _kda:
            yield replace(kind, step=None, sizes={**kind.sizes, "gdn_decode_kernel": ON_GPU[0]})
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
                for shard, dtypes in cases:
                    watch_state(kind, shard, order, dtypes, where)
            except Exception as error:  # noqa: BLE001  any failure of foreign code is a finding of its own
                told(f"{name}: {type(error).__name__}: {error}")
                troubles.append(Trouble(name, f"{type(error).__name__}: {error}"[:500]))
                continue
            told(f"{name}: as declared")
            said = ", ".join(f"rank {s.rank} of {s.size} in {'/'.join(d)}" for s, d in cases)
            outcomes.append(Outcome(name, f"{'conv and state' if kind.step else 'conv'} as declared: {said}"))
    return tuple(outcomes), tuple(troubles)
