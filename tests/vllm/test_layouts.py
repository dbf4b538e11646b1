"""The table of certified cells against every byte that vLLM's cache-write op leaves in a cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import vllm._custom_ops as ops
from engine import start
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.version import __version__ as vllm_version

from kvferry.engines.vllm.layouts import CERTIFICATES, certified
from kvferry.strided import spread

pytestmark = pytest.mark.vllm

BLOCKS, HEADS = 3, 2
CASES = [
    (isa, dtype, dim, tokens)
    for isa, dtypes, dims, sizes in (
        ("vec", ("float32", "float16", "bfloat16"), (32, 64, 128, 256), (32, 64, 96)),
        ("vec16", ("float32", "float16", "bfloat16"), (48, 80, 112), (16, 32, 64, 96)),
        ("amx", ("bfloat16",), (32, 64, 96, 128, 256), (32, 64, 96, 160)),
    )
    for dtype in dtypes
    for dim in dims
    for tokens in sizes
]


@pytest.mark.parametrize(("isa", "dtype", "dim", "tokens"), CASES)
def test_the_op_writes_where_the_table_says(isa: str, dtype: str, dim: int, tokens: int) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX: its layout is certified where there is one")
    start()
    cell = certified(vllm_version, "CPU_ATTN", isa, dtype, tokens, 2 * dim)
    assert cell is not None
    numbers = getattr(torch, dtype)
    cache = torch.full((BLOCKS, HEADS, 2 * tokens, dim), float("nan"), dtype=numbers)
    key, value = (torch.randn(2 * tokens - 5, HEADS, dim).to(numbers) for _ in range(2))
    order = torch.randperm(len(key))
    slots = torch.where(order < tokens, order + 2 * tokens, order - tokens)
    for half in (slice(0, 7), slice(7, None)):
        ops.cpu_attn_reshape_and_cache(
            key[order][half].contiguous(), value[order][half].contiguous(), *cache.chunk(2, dim=2), slots[half], isa
        )
    wanted = np.full((BLOCKS, HEADS, 2 * tokens * dim), np.nan, np.float32)
    for plane, source in zip(cell, (key, value), strict=True):
        at = spread(plane.start, (*plane.token, *plane.dim))
        for block, first in ((2, 0), (0, tokens)):
            some = source[first : first + tokens].float().numpy()
            wanted[block][:, at[: some.shape[0] * dim]] = some.transpose(1, 0, 2).reshape(HEADS, -1)
    assert np.array_equal(cache.float().numpy().reshape(wanted.shape), wanted, equal_nan=True)


MLA_CASES = [
    ("CPU_MLA", "float32", (512, 64), 16),
    ("CPU_MLA", "bfloat16", (512, 64), 16),
    ("AMX_MLA", "bfloat16", (512, 64), 32),
    ("AMX_MLA", "bfloat16", (512, 64), 96),
]


@pytest.mark.parametrize(("backend", "dtype", "width", "tokens"), MLA_CASES)
def test_latents_are_written_row_by_row(backend: str, dtype: str, width: tuple[int, int], tokens: int) -> None:
    if backend == "AMX_MLA" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX: its layout is certified where there is one")
    start()
    cell = certified(vllm_version, backend, "", dtype, tokens, sum(width))
    assert cell is not None
    (plane,) = cell
    numbers = getattr(torch, dtype)
    cache = torch.full((BLOCKS, tokens, sum(width)), float("nan"), dtype=numbers)
    latent, rope = (torch.randn(2 * tokens - 5, w).to(numbers) for w in width)
    order = torch.randperm(len(latent))
    slots = torch.where(order < tokens, order + 2 * tokens, order - tokens)
    update = AttentionBackendEnum[backend].get_class().get_impl_cls().do_kv_cache_update
    update(None, latent[order], rope[order][:, None], cache, slots, "auto", torch.ones(()))
    wanted = np.full((BLOCKS, tokens * sum(width)), np.nan, np.float32)
    at = spread(plane.start, (*plane.token, *plane.dim))
    whole = torch.cat([latent, rope], dim=1).float().numpy()
    for block, first in ((2, 0), (0, tokens)):
        some = whole[first : first + tokens].reshape(-1)
        wanted[block][at[: len(some)]] = some
    assert np.array_equal(cache.float().numpy().reshape(wanted.shape), wanted, equal_nan=True)


def test_every_certificate_is_swept() -> None:
    swept = {("CPU_ATTN", isa, dtype) for isa, dtype, *_ in CASES} | {(b, "", dtype) for b, dtype, *_ in MLA_CASES}
    assert {(c.backend, c.isa, dtype) for c in CERTIFICATES for dtype in c.dtypes} == swept


@pytest.mark.parametrize(
    "unknown",
    [
        ("0.33.0", "CPU_ATTN", "vec", "float32", 32, 64),
        ("0.32.0", "FLASH_ATTN", "", "bfloat16", 32, 64),
        ("0.32.0", "CPU_ATTN", "neon", "bfloat16", 32, 64),
        ("0.32.0", "CPU_ATTN", "amx", "float32", 32, 64),
        ("0.32.0", "CPU_ATTN", "amx", "bfloat16", 48, 64),
        ("0.32.0", "CPU_ATTN", "vec", "uint8", 32, 64),
    ],
    ids=lambda u: "-".join(map(str, u)),
)
def test_what_was_not_seen_is_not_certified(unknown: tuple[str, str, str, str, int, int]) -> None:
    assert certified(*unknown) is None
