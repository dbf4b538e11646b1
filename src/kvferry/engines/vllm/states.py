"""Recurrent layers of vLLM as layer kinds of a manifest: which attributes of a layer object say how large its state is.

Sizes are the model's, not the rank's. vLLM's Mamba2 mixer raises a single group to one per rank, so its group count is
taken from the model's configuration and only compared with the mixer. The state of a gated delta net is bound as [head, value
dim, key dim] everywhere, and kept so by the kernels of GPUs; those of CPUs take the same memory for [head, key dim, value dim].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from kvferry.engines.vllm.surface import Tensor
from kvferry.errors import ManifestError
from kvferry.manifest.kinds import GatedDelta, LayerKind, Layout, LinearAttention, Mamba1, Mamba2, Shard, ShortConv
from kvferry.manifest.page import PlacedPart, lay_out

GROUP_FIELDS: Final = ("n_groups", "mamba_n_groups", "mamba_ngroups")

ConvOrder = Literal["ds", "sd"]
ON_CPU: Final = "CPU"
ON_GPU: Final = ("cuda", "triton")
"""What a gated delta net calls the kernels of CPUs, and of GPUs."""


@dataclass(frozen=True)
class StateLayer:
    """A recurrent layer: its object, what its spec says, and the views vLLM bound to its pages."""

    name: str
    layer: Any
    mamba_type: str
    views: Sequence[Tensor]
    text_config: object

    def sizes(self, *names: str) -> tuple[int, ...]:
        absent = [n for n in names if not isinstance(getattr(self.layer, n, None), int)]
        if absent:
            raise ManifestError(
                f"{self.name}: {type(self.layer).__name__} of type {self.mamba_type} has no {', '.join(absent)}: this layer "
                "class is not known to the adapter; run the model without disaggregation"
            )
        return tuple(getattr(self.layer, n) for n in names)

    def dtype(self, view: int) -> str:
        return dtype_name(self.views[view])


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _mamba1(state: StateLayer, shard: Shard) -> tuple[LayerKind, int]:
    channels, size, kernel = state.sizes("intermediate_size", "ssm_state_size", "conv_kernel_size")
    return Mamba1(channels, size, kernel, state.dtype(0), state.dtype(-1)), 0


def _mamba2(state: StateLayer, shard: Shard) -> tuple[LayerKind, int]:
    heads, dim, size, kernel, spec, inflated = state.sizes(
        "num_heads", "head_dim", "ssm_state_size", "conv_kernel_size", "num_spec", "n_groups"
    )
    found = [getattr(state.text_config, f) for f in GROUP_FIELDS if hasattr(state.text_config, f)]
    groups = found[0] if found else inflated
    if (shard.size > 1 and not found) or inflated != (groups if groups % shard.size == 0 else shard.size):
        raise ManifestError(
            f"{state.name}: the mixer holds {inflated} groups for {shard.size} tensor-parallel ranks, and the model's "
            f"configuration says {found or 'nothing'} in {', '.join(GROUP_FIELDS)}: run it with tensor-parallel size 1"
        )
    return Mamba2(heads, dim, size, groups, kernel, state.dtype(0), state.dtype(-1)), spec


def _gated_delta(state: StateLayer, shard: Shard) -> tuple[LayerKind, int]:
    if hasattr(state.layer, "num_k_heads"):
        k_heads, v_heads, k_dim, v_dim, kernel, spec = state.sizes(
            "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "num_spec"
        )
    else:
        k_heads, k_dim, kernel, spec = state.sizes("num_heads", "head_dim", "conv_size", "num_spec")
        v_heads, v_dim = k_heads, k_dim
    return GatedDelta(k_heads, v_heads, k_dim, v_dim, kernel, state.dtype(0), state.dtype(-1)), spec


def _short_conv(state: StateLayer, shard: Shard) -> tuple[LayerKind, int]:
    channels, kernel, spec = state.sizes("conv_dim", "L_cache", "num_spec")
    return ShortConv(channels, kernel, state.dtype(0)), spec


def _linear(state: StateLayer, shard: Shard) -> tuple[LayerKind, int]:
    heads, dim = state.sizes("num_heads", "head_dim")
    return LinearAttention(heads, dim, dim, state.dtype(0)), 0


KINDS: Final[dict[str, Callable[[StateLayer, Shard], tuple[LayerKind, int]]]] = {
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "GDN_ATTN": _gated_delta,
    "SHORT_CONV": _short_conv,
    "LINEAR": _linear,
}


def state_parts(state: StateLayer, shard: Shard, conv: ConvOrder) -> tuple[PlacedPart, ...]:
    """The parts of one page, checked against every view that vLLM bound to it."""
    if state.mamba_type not in KINDS:
        known = ", ".join(KINDS)
        raise ManifestError(f"{state.name}: recurrent layers of type {state.mamba_type} are not supported; supported: {known}")
    kind, spec = KINDS[state.mamba_type](state, shard)
    bound = Layout(conv=conv, spec=spec)
    page = lay_out(kind.streams(shard, bound))
    first = state.views[0].data_ptr()
    views: list[PlacedPart | None] = [None] * len(state.views)
    for part in page.parts:
        index = 0 if part.name.startswith("conv") else len(state.views) - 1
        views[index] = views[index] or part
    declared = [_as_view(part) for part in views]
    held = [_view(view, first) for view in state.views]
    if declared != held or page.stream_bytes[0] != sum(_bytes(v) for v in state.views):
        raise ManifestError(
            f"{state.name}: {type(kind).__name__} with conv order {conv!r} and {spec} speculative taps would be {declared} "
            f"(offset, dtype, strides), but vLLM holds {held}: this variant of the layer is not supported"
        )
    if isinstance(kind, GatedDelta):
        page = lay_out(kind.streams(shard, replace(bound, delta=_delta(state))))
    return page.parts


def _delta(state: StateLayer) -> Literal["vk", "kv"]:
    kernels, device = getattr(state.layer, "gdn_decode_kernel", ""), state.views[-1].device.type
    if kernels == ON_CPU and device == "cpu":
        return "kv"
    if kernels in ON_GPU or (device == "cuda" and kernels != ON_CPU):
        return "vk"
    raise ManifestError(
        f"{state.name}: {type(state.layer).__name__} on {device} calls its kernels {kernels!r}, and in which order these keep "
        "the state is not known; run the model without disaggregation"
    )


def _as_view(part: PlacedPart | None) -> tuple[int, str, tuple[int, ...]] | None:
    if part is None:
        return None
    strides = sorted((stride for axis in part.shape.axes for _, stride in axis.digits), reverse=True)
    return part.offset, part.shape.element.dtype, tuple(strides)


def _view(view: Tensor, first: int) -> tuple[int, str, tuple[int, ...]]:
    strides = sorted((s * view.element_size() for s in view.stride()[1:]), reverse=True)
    return view.data_ptr() - first, dtype_name(view), tuple(strides)


def _bytes(view: Tensor) -> int:
    total = view.element_size()
    for count in view.shape[1:]:
        total *= count
    return total
