"""The ways for bytes to be scattered that `python -m lab bench strategies` measures: made-up models between two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from kvferry.errors import MeasureError
from kvferry.manifest import Attention, LayerSpec
from kvferry.manifest.kinds import LayerKind, Layout, Mamba2, Paging, Shard
from kvferry.manifest.page import Stream
from kvferry.manifest.schema import FULL, Reach
from kvferry.models import ModelShape
from lab.bench.case import Case, Order

TOKENS: Final = (1_000, 16_000, 128_000)


@dataclass(frozen=True)
class ConvState:
    """The convolution state of Mamba2 without its matrices: `conv.x`, `conv.B` and `conv.C`."""

    whole: Mamba2
    paging: Paging = "state"
    reach: Reach = FULL

    def streams(self, shard: Shard, layout: Layout) -> tuple[Stream, ...]:
        return ((self.whole.streams(shard, layout)[0][0],),)


_HEADS: Final = Attention(12, 64)


@dataclass(frozen=True)
class Scatter:
    """A way for bytes to be scattered: what is cached, in how many layers, between which sides."""

    name: str
    prefill: str
    decode: str
    order: Order = "scattered"
    kind: LayerKind = _HEADS
    layers: int = 2
    tokens: int = 0

    def case(self, tokens: int) -> Case:
        return _Made(self.name, self.prefill, self.decode, tokens, self.order, scatter=self)


@dataclass(frozen=True)
class _Made(Case):
    """A case of a made-up model; a request takes all blocks of its pool but the first, a scattered one in no order."""

    scatter: Scatter | None = None

    @cached_property
    def shape(self) -> ModelShape:
        if self.scatter is None:
            raise MeasureError(f"{self.name}: nothing is cached")
        layers = tuple((LayerSpec(f"layers.{i}", self.scatter.kind),) for i in range(self.scatter.layers))
        return ModelShape("scattered", layers, "made up", query_heads=12)


_CONV: Final = ConvState(Mamba2(126, 64, 128, 6))
SCATTERS: Final[tuple[Scatter, ...]] = (
    Scatter("consecutive blocks", "tp=1", "tp=1", "consecutive"),
    Scatter("scattered blocks", "tp=1", "tp=1"),
    Scatter("head slices, TP 1 → 2", "tp=1", "tp=2"),
    Scatter("head slices, TP 2 → 1", "tp=2", "tp=1"),
    Scatter("head slices, TP 2 → 3", "tp=2", "tp=3"),
    Scatter("token-major, TP 1 → 2", "tp=1,layout=token", "tp=2,layout=token"),
    Scatter(
        "token-major K and V apart, TP 1 → 2",
        "tp=1,layout=token,kv=paged",
        "tp=2,layout=token,kv=paged",
        kind=Attention(8, 128),
    ),
    Scatter("transposed K, 4 bytes", "tp=1,kv=transposed", "tp=1,kv=paged", kind=Attention(1, 32, "float32"), layers=1),
    Scatter("cyclic tokens", "tp=1,block=1,layout=token", "tp=1,layout=token", kind=Attention(1, 128), layers=2),
    Scatter("conv (dim, tap), TP 2 → 1", "tp=2", "tp=1", kind=_CONV, layers=24, tokens=1),
    Scatter("conv (tap, dim), TP 2 → 1", "tp=2,conv=sd", "tp=1,conv=sd", kind=_CONV, layers=24, tokens=1),
    Scatter("conv (dim, tap) → (tap, dim)", "tp=2", "tp=1,conv=sd", kind=_CONV, layers=24, tokens=1),
)


def cells(tokens: Sequence[int] = TOKENS, only: str = "", layers: int = 0) -> list[tuple[Scatter, int]]:
    """Every way with every length, states once; `layers` instead of each one's own, but for states."""
    found = []
    for scatter in SCATTERS:
        if only in scatter.name:
            sized = replace(scatter, layers=layers) if layers and not scatter.tokens else scatter
            found += [(sized, count) for count in ((scatter.tokens,) if scatter.tokens else tokens)]
    if not found:
        raise MeasureError(f"--only {only}: there is none of that name; there are {', '.join(s.name for s in SCATTERS)}")
    return found
