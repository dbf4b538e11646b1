"""What vLLM's backends keep in an attention cell, and which of it is certified.

A grid is one (kernel block, kv head) of a cache tensor; its strides do not say how a backend orders K and V in it. A
certificate says so for a backend and some cache formats. An engine declares the cell that its own cache-write op was seen to
write when it started (`certify_self`). What runs on other machines saw is kept as evidence, for `kvferry check` and the
documentation. All else is an opaque cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Final

import numpy as np

from kvferry.engines.vllm.evidence import Evidence, Sighting, recorded
from kvferry.engines.vllm.releases import release_of
from kvferry.strided import Digits, Ints, spread


@dataclass(frozen=True)
class Grid:
    """One head's tokens of a kernel block: how many, the elements of each, and how many elements they are apart."""

    tokens: int
    width: int
    pitch: int


@dataclass(frozen=True)
class Plane:
    """One part inside a grid, in elements: its first one, and the digits of its token and dim axes.

    A part that is not `by_head` has no head axis. One with `row` elements a token has no dims: a token's row is packed in a
    way of its own, and is moved whole.
    """

    part: str
    start: int
    token: Digits
    dim: Digits = ()
    by_head: bool = True
    row: int = 0


Cell = tuple[Plane, ...]


def _transposed_k(grid: Grid) -> Cell:
    """K as [dim][token], then V as [token][dim]."""
    tokens, dim = grid.tokens, grid.width // 2
    return (
        Plane("k", 0, ((tokens, 1),), ((dim, tokens),)),
        Plane("v", tokens * dim, ((tokens, dim),), ((dim, 1),)),
    )


def _amx_tiles(grid: Grid) -> Cell:
    """Tiles of 32 elements by rows of two, the operand order of AMX in bfloat16.

    K: [token / 16][dim / 2][token % 16][dim % 2]; V: [dim / 16][token / 2][dim % 16][token % 2].
    """
    tokens, dim = grid.tokens, grid.width // 2
    return (
        Plane("k", 0, ((tokens // 16, 16 * dim), (16, 2)), ((dim // 2, 32), (2, 1))),
        Plane("v", tokens * dim, ((tokens // 2, 32), (2, 1)), ((dim // 16, 16 * tokens), (16, 2))),
    )


def _k_then_v(grid: Grid) -> Cell:
    """Token by token: K, and V behind it."""
    dim = grid.width // 2
    token = ((grid.tokens, grid.pitch),)
    return Plane("k", 0, token, ((dim, 1),)), Plane("v", dim, token, ((dim, 1),))


def _latent(grid: Grid) -> Cell:
    """MLA's latent as [token][dim], latent and rope behind each other."""
    return (Plane("latent", 0, ((grid.tokens, grid.pitch),), ((grid.width, 1),), by_head=False),)


def _packed_latent(grid: Grid) -> Cell:
    """A token's latent with its own scales."""
    return (Plane("row", 0, ((grid.tokens, grid.pitch),), by_head=False, row=grid.width),)


def _packed_kv(grid: Grid) -> Cell:
    """K and V of a token and head with their own scales."""
    return (Plane("row", 0, ((grid.tokens, grid.pitch),), row=grid.width),)


def _index_then_scales(grid: Grid) -> Cell:
    """The sparse indexer's keys of all tokens, then a float32 scale for each."""
    data = grid.width - 4
    return (
        Plane("index", 0, ((grid.tokens, data),), by_head=False, row=data),
        Plane("index.scale", grid.tokens * data, ((grid.tokens, 4),), by_head=False, row=4),
    )


@dataclass(frozen=True)
class Own:
    """What an engine saw of its own caches when it started: the cells that its ops write, by layer, and the recurrent layers
    whose kernels keep a state otherwise than declared. A layer without a cell is opaque."""

    cells: Mapping[str, Cell] = field(default_factory=dict)
    opaque_states: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Certificate:
    """A layout, and where it holds: tokens and elements a token are multiples of these, and tokens lie behind each other
    unless they may be `apart`, as the tensor's strides have it."""

    backend: str
    isa: str
    formats: frozenset[str]
    token_multiple: int
    width_multiple: int
    cell: Callable[[Grid], Cell]
    apart: bool = False

    def covers(self, backend: str, isa: str, form: str, grid: Grid) -> bool:
        return (self.backend, self.isa) == (backend, isa) and self.fits(form, grid)

    def fits(self, form: str, grid: Grid) -> bool:
        """Whether a backend might keep this grid so, whatever its name."""
        whole = grid.tokens % self.token_multiple == 0 and grid.width % self.width_multiple == 0
        return form in self.formats and whole and (self.apart or grid.pitch == grid.width)


_FLOATS: Final = frozenset({"float32", "float16", "bfloat16"})
_HALVES: Final = frozenset({"float16", "bfloat16"})
_FP8: Final = frozenset({"fp8_e4m3"})
_BY_TOKEN_AND_HEAD: Final = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"})

CERTIFICATES: Final = (
    Certificate("CPU_ATTN", "vec", _FLOATS, 32, 64, _transposed_k),
    Certificate("CPU_ATTN", "vec16", _FLOATS, 16, 32, _transposed_k),
    Certificate("CPU_ATTN", "neon", frozenset({"float32", "float16"}), 32, 64, _transposed_k),
    Certificate("CPU_ATTN", "amx", frozenset({"bfloat16"}), 32, 64, _amx_tiles),
    Certificate("CPU_MLA", "", frozenset({"float32", "bfloat16"}), 16, 64, _latent),
    Certificate("AMX_MLA", "", frozenset({"bfloat16"}), 32, 64, _latent),
    Certificate("FLASH_ATTN", "", _HALVES | _FP8, 16, 32, _k_then_v, apart=True),
    Certificate("TRITON_ATTN", "", _FLOATS | _FP8, 16, 32, _k_then_v, apart=True),
    Certificate("TRITON_ATTN", "", _BY_TOKEN_AND_HEAD, 16, 8, _packed_kv, apart=True),
    Certificate("FLEX_ATTENTION", "", _FLOATS, 16, 32, _k_then_v, apart=True),
    Certificate("TRITON_MLA", "", _HALVES | _FP8, 16, 64, _latent),
    Certificate("FLASHMLA", "", _HALVES | _FP8, 64, 64, _latent),
    Certificate("FLASH_ATTN_MLA", "", _HALVES, 16, 64, _latent),
    Certificate("CUTLASS_MLA", "", _HALVES | _FP8, 128, 64, _latent),
    Certificate("FLASHMLA_SPARSE", "", frozenset({"bfloat16"}), 64, 64, _latent),
    Certificate("FLASHMLA_SPARSE", "", frozenset({"fp8_ds_mla"}), 64, 656, _packed_latent),
    Certificate("DEEPSEEK_V32_INDEXER", "", frozenset({"uint8"}), 64, 132, _index_then_scales),
)


def candidate(backend: str, isa: str, form: str, grid: Grid) -> Cell | None:
    """What the table says, whether it was seen or not."""
    return next((one.cell(grid) for one in CERTIFICATES if one.covers(backend, isa, form, grid)), None)


def known(form: str, grid: Grid) -> tuple[Cell, ...]:
    """Every cell of the table that a grid of a cache format could be, each once."""
    return tuple(dict.fromkeys(one.cell(grid) for one in CERTIFICATES if one.fits(form, grid)))


def certified(version: str, backend: str, isa: str, form: str, layout: str, grid: Grid) -> Cell | None:
    """The layout of a grid of the cache format `form` in the cache layout `layout`; None where none is certified."""
    if (release_of(version), backend, isa, form, layout) not in _seen():
        return None
    return candidate(backend, isa, form, grid)


@lru_cache(maxsize=1)
def _seen() -> frozenset[tuple[str, str, str, str, str]]:
    return frozenset(
        (release_of(run.vllm), one.backend, one.isa, one.form, one.layout) for run in recorded() for one in run.sightings
    )


def elements_of(plane: Plane, heads: int, head_stride: int) -> Ints:
    """Where a part's elements lie, from the block's first: [head][token][dim], or [head][token][element] of packed rows."""
    shares = np.arange(heads if plane.by_head else 1, dtype=np.int64)[:, None, None] * head_stride
    tokens = spread(plane.start, plane.token)[:, None]
    return tokens + (np.arange(plane.row) if plane.row else spread(0, plane.dim)) + shares


def places(cell: Cell, heads: int, head_stride: int, size: int) -> Ints:
    """Bytes, from the block's first, where elements of `size` bytes are said to begin, in one fixed order.

    Numbers: [part][head][token][dim]. Packed rows: for each token all of its bytes, ascending.
    """
    planes = [elements_of(plane, heads, head_stride) for plane in cell]
    if not any(plane.row for plane in cell):
        return np.concatenate([plane.reshape(-1) for plane in planes]) * size
    by_token = [plane.transpose(1, 0, 2).reshape(plane.shape[1], -1) for plane in planes]
    elements = np.concatenate(by_token, axis=1) * size
    return np.sort((elements[:, :, None] + np.arange(size)).reshape(len(elements), -1), axis=1).reshape(-1)


def digest(found: Ints) -> str:
    return sha256(np.ascontiguousarray(found, "<i4").tobytes()).hexdigest()[:24]


def replay(run: Evidence) -> tuple[str, ...]:
    """Where the table differs from what a run saw; empty if it is the same everywhere."""
    return tuple(wrong for one in run.sightings for wrong in _differences(one))


def _differences(one: Sighting) -> Iterable[str]:
    where = " ".join(filter(None, (one.backend, one.isa, one.form, one.layout)))
    if not one.cases and not one.by:
        yield f"{where}: seen in no case"
    for case in one.cases:
        grid = Grid(case.tokens, case.width, case.pitch)
        cell = candidate(one.backend, one.isa, one.form, grid)
        if cell is None:
            yield f"{where}: nothing is said of {grid}"
        elif digest(places(cell, case.heads, case.head_stride, case.size)) != case.digest:
            yield f"{where}: {grid} with {case.heads} heads was seen to be kept in another order"
