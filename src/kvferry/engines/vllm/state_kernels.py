"""vLLM's own kernels step a recurrent state; the bytes of its page are compared with what the manifest says.

The kernels are given numbers that name each channel, tap, head, dim and state. Bytes that the manifest gives to a part must
hold that part's numbers, and all others what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import torch

from kvferry.engines.vllm.states import ON_CPU
from kvferry.errors import KVFerryError
from kvferry.manifest.page import PlacedPart
from kvferry.strided import spread

BLOCKS, BLOCK = 4, 2
BASE: Final = 128
UNTOUCHED: Final = 0xFF


class StateError(KVFerryError):
    """A kernel was seen to keep a state otherwise than its manifest says."""


Step = Callable[[Any, Any, Any, Any], None]
"""Given a state, one number for each row and one for each column of it, and the block to step."""


@dataclass(frozen=True)
class StatePage:
    """The first pages of a pool as bytes [block, byte], the views that vLLM binds to the pool, and the parts of a page."""

    name: str
    pages: Any
    views: tuple[Any, ...]
    parts: tuple[PlacedPart, ...]
    order: str
    speculative: int = 0


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


def step_of(layer: Any, mamba_type: str, device: str) -> tuple[Step | None, bool]:
    """The kernel that steps a layer's matrix state, and whether what it keeps is exact. None: there is no such kernel here."""
    if mamba_type in ("MAMBA1", "MAMBA2"):
        return _mamba, True
    if mamba_type != "GDN_ATTN":
        return None, True
    if hasattr(layer, "num_k_heads"):
        return (_gated_on_cpu if getattr(layer, "gdn_decode_kernel", "") == ON_CPU else _gated), True
    return (None if device == "cpu" else _kda), False


def watch_page(page: StatePage, step: Step | None, exact: bool = True) -> None:
    """Raises StateError where a kernel keeps anything elsewhere than the manifest says. Leaves numbers in the pages."""
    _watch_conv(page)
    if step is not None:
        _watch_ssm(page, step, exact)


def _watch_conv(page: StatePage) -> None:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    conv = page.views[0] if page.order == "DS" else page.views[0].transpose(-1, -2)
    _, channels, taps = conv.shape
    live = taps - page.speculative
    weight = torch.ones((channels, live + 1), dtype=conv.dtype, device=conv.device)
    index = torch.tensor([BLOCK], dtype=torch.int32, device=conv.device)
    at = torch.arange(channels, device=conv.device)
    taps_at = torch.arange(live, device=conv.device)
    for name, numbers in (
        ("channels", (at % BASE + 1)[:, None].expand(channels, live)),
        ("channels", (at // BASE + 1)[:, None].expand(channels, live)),
        ("taps", (taps_at + 1).expand(channels, live)),
    ):
        page.pages.fill_(UNTOUCHED)
        page.views[0][BLOCK] = 0
        for tap in range(live):
            causal_conv1d_update(numbers[:, tap].to(conv.dtype)[None].contiguous(), conv, weight, None, None, index)
        wanted = numbers.cpu().numpy()
        parts = [part for part in page.parts if part.name.startswith("conv")]
        _compare(page, name, parts, np.split(wanted, _ends(parts)), conv.dtype)


def _ends(parts: Sequence[PlacedPart]) -> list[int]:
    counts = [_count(part, "channel") for part in parts]
    return [int(some) for some in np.cumsum(counts)[:-1]]


def _count(part: PlacedPart, axis: str) -> int:
    return next(a.stop - a.start for a in part.shape.axes if a.name == axis)


def _watch_ssm(page: StatePage, step: Step, exact: bool) -> None:
    state = page.views[-1]
    index = torch.tensor([BLOCK], dtype=torch.int32, device=state.device)
    rows, columns = prod(state.shape[1:-1]), int(state.shape[-1])
    by_row, by_column = torch.arange(rows, device=state.device), torch.arange(columns, device=state.device)
    given = page.views[0].dtype
    for name, row, column in (
        ("heads and dims", by_row % BASE + 1, torch.ones_like(by_column)),
        ("heads and dims", by_row // BASE + 1, torch.ones_like(by_column)),
        ("states", torch.ones_like(by_row), by_column % BASE + 1),
    ):
        page.pages.fill_(UNTOUCHED)
        state[BLOCK] = 0
        step(state, row.to(given), column.to(given), index)
        wanted = (row[:, None] * column[None]).cpu().numpy().astype(np.float64)
        if not exact:
            wanted = wanted / np.sqrt((column.cpu().numpy().astype(np.float64) ** 2).sum())
        _compare(page, name, [p for p in page.parts if p.name == "ssm"], [wanted], state.dtype, exact)


def _compare(
    page: StatePage, what: str, parts: Sequence[PlacedPart], wanted: Sequence[Any], dtype: Any, exact: bool = True
) -> None:
    pages = page.pages.cpu().clone()
    touched = torch.zeros(pages.shape[1], dtype=torch.bool)
    for part, numbers in zip(parts, wanted, strict=True):
        size = part.shape.element.bytes
        digits = [axis.digits for axis in part.shape.axes]
        at = torch.from_numpy(spread(part.offset, (d for one in digits for d in one)))
        within = at[:, None] + torch.arange(size)
        found = pages[BLOCK][within].reshape(-1).view(dtype).double().numpy()
        counts = [a.stop - a.start for a in part.shape.axes]
        found = found.reshape(counts)[tuple(slice(0, a.live_size) for a in part.shape.axes)].reshape(numbers.shape)
        touched[within.reshape(-1)] = True
        if not np.allclose(found, numbers, rtol=0 if exact else 0.02, atol=0):
            raise StateError(f"{page.name}: {part.name} is not kept by {what} as the manifest says")
    pages[BLOCK][touched] = UNTOUCHED
    if not (pages == UNTOUCHED).all():
        raise StateError(f"{page.name}: bytes outside of {', '.join(p.name for p in parts)} are written")
