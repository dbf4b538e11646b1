"""What a model caches, layer by layer, free of any topology and memory order; knows nothing of where the numbers come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cached_property

import msgspec

from kvferry.manifest.kinds import LayerKind
from kvferry.manifest.pool import LayerSpec


@dataclass(frozen=True)
class ModelShape:
    """The caches of a model: per transformer layer none (MoE, MLP), one, or several.

    `source` says where the numbers are from. A hybrid's logical block is a multiple of `alignment` tokens.
    `query_heads`, where it is known, must be divisible by the tensor-parallel size.
    """

    name: str
    layers: tuple[tuple[LayerSpec, ...], ...]
    source: str
    alignment: int = 16
    query_heads: int = 0

    @cached_property
    def caches(self) -> tuple[LayerSpec, ...]:
        """All cached layers in model order."""
        return tuple(spec for layer in self.layers for spec in layer)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds in order of first appearance."""
        return tuple(dict.fromkeys(spec.kind for spec in self.caches))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for models that cache the same, whatever they are called; any number that differs changes it."""
        layers = [[[spec.name, spec.required, *_described(spec.kind)] for spec in layer] for layer in self.layers]
        text = msgspec.json.encode([layers, self.alignment, self.query_heads])
        return hashlib.sha256(text).hexdigest()[:16]


def _described(kind: LayerKind) -> Iterator[object]:
    """Class and fields; a field that has its default is left out, so that a kind may gain fields and keep its print."""
    yield type(kind).__name__
    for field in fields(kind):  # type: ignore[arg-type]
        value = getattr(kind, field.name)
        if field.default is MISSING or value != field.default:
            yield field.name, value
