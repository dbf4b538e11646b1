"""Which inner layouts of vLLM's attention cells are certified, and what they are.

A cell is one (kernel block, kv head) of a cache tensor; its strides do not say how a backend orders K and V in it. Only
what the engine's own cache-write op was seen to write is listed; everything else is an opaque cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.strided import Digits


@dataclass(frozen=True)
class Plane:
    """One part inside a cell, in elements: its first one, and the digits of its token and dim axes. A part that is not
    `by_head` has no head axis."""

    part: str
    start: int
    token: Digits
    dim: Digits
    by_head: bool = True


Cell = tuple[Plane, ...]


def _transposed_k(tokens: int, width: int) -> Cell:
    """K as [dim][token], then V as [token][dim]."""
    dim = width // 2
    return (
        Plane("k", 0, ((tokens, 1),), ((dim, tokens),)),
        Plane("v", tokens * dim, ((tokens, dim),), ((dim, 1),)),
    )


def _amx_tiles(tokens: int, width: int) -> Cell:
    """Tiles of 32 elements by rows of two, the operand order of AMX in bfloat16.

    K: [token / 16][dim / 2][token % 16][dim % 2]; V: [dim / 16][token / 2][dim % 16][token % 2].
    """
    dim = width // 2
    return (
        Plane("k", 0, ((tokens // 16, 16 * dim), (16, 2)), ((dim // 2, 32), (2, 1))),
        Plane("v", tokens * dim, ((tokens // 2, 32), (2, 1)), ((dim // 16, 16 * tokens), (16, 2))),
    )


def _rows(tokens: int, width: int) -> Cell:
    """MLA's latent as [token][dim], latent and rope behind each other."""
    return (Plane("latent", 0, ((tokens, width),), ((width, 1),), by_head=False),)


@dataclass(frozen=True)
class Certificate:
    """A layout that was seen, where it holds (multiples of tokens a cell and of elements a token), and how it was seen."""

    backend: str
    isa: str
    dtypes: frozenset[str]
    releases: frozenset[str]
    token_multiple: int
    width_multiple: int
    cell: Callable[[int, int], Cell]
    evidence: str


_OP_SWEEP: Final = (
    "vLLM 0.32.0 on x86-64: every byte that the cache-write op leaves in a cell, over dtypes, head sizes and block sizes "
    "(tests/vllm/test_layouts.py); whole caches moved between block sizes and TP sizes and compared with what the op writes "
    "there (tests/vllm/test_transfers.py)"
)
_RELEASES: Final = frozenset({"0.32"})

_FLOATS: Final = frozenset({"float32", "float16", "bfloat16"})

CERTIFICATES: Final = (
    Certificate("CPU_ATTN", "vec", _FLOATS, _RELEASES, 32, 64, _transposed_k, _OP_SWEEP),
    Certificate("CPU_ATTN", "vec16", _FLOATS, _RELEASES, 16, 32, _transposed_k, _OP_SWEEP),
    Certificate("CPU_ATTN", "amx", frozenset({"bfloat16"}), _RELEASES, 32, 64, _amx_tiles, _OP_SWEEP),
    Certificate("CPU_MLA", "", frozenset({"float32", "bfloat16"}), _RELEASES, 16, 64, _rows, _OP_SWEEP),
    Certificate("AMX_MLA", "", frozenset({"bfloat16"}), _RELEASES, 32, 64, _rows, _OP_SWEEP),
)


def certified(version: str, backend: str, isa: str, dtype: str, tokens: int, width: int) -> Cell | None:
    """The layout of a cell of `tokens` x `width` elements (K and V, or the latent), or None where none is certified."""
    release = ".".join(version.split(".")[:2])
    for one in CERTIFICATES:
        fits = tokens % one.token_multiple == 0 and width % one.width_multiple == 0
        if (one.backend, one.isa) == (backend, isa) and dtype in one.dtypes and release in one.releases and fits:
            return one.cell(tokens, width)
    return None
