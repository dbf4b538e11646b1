"""In place of ops that only run on a GPU: ops that write what those are said to write, by the views that vLLM gives them.

They say nothing about the real ops. With them, whatever watches, declares and moves caches of a GPU runs here, on vLLM's own
specs, views and layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm import _custom_ops

FP8 = torch.float8_e4m3fn


def _put(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, form: str, scale: Any) -> None:
    values, slots = values[slots >= 0], slots[slots >= 0]
    at = slots // cache.shape[1], slots % cache.shape[1]
    if form.startswith("fp8"):
        cache.view(torch.uint8)[at] = (values.float() / scale).to(FP8).view(torch.uint8)
    else:
        cache[at] = values


def kv(key: Any, value: Any, keys: Any, values: Any, slots: Any, form: str, k_scale: Any, v_scale: Any) -> None:
    _put(keys, slots, key, form, k_scale)
    _put(values, slots, value, form, v_scale)


def latent(kv_c: Any, k_pe: Any, cache: Any, slots: Any, kv_cache_dtype: str, scale: Any) -> None:
    if kv_cache_dtype != "fp8_ds_mla":
        _put(cache, slots, torch.cat([kv_c, k_pe], 1), kv_cache_dtype, scale)
        return
    tiles = kv_c.float().view(len(kv_c), 4, -1)
    own = tiles.abs().amax(2) / 448
    numbers = (tiles / own[:, :, None]).to(FP8).view(torch.uint8).flatten(1)
    row = torch.cat([numbers, own.view(torch.uint8), k_pe.contiguous().view(torch.uint8)], 1)
    _put(cache, slots, row, "", None)


def index(k: Any, cache: Any, slots: Any, width: int, form: str) -> None:
    tokens, dim = cache.shape[1], k.shape[1]
    own = k.float().abs().amax(1, keepdim=True) / 448
    numbers = (k.float() / own).to(FP8).view(torch.uint8)
    pages = cache.as_strided((cache.shape[0], tokens * cache.shape[2]), (cache.stride(0), 1))
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, at = divmod(slot, tokens)
        pages[block, at * dim : (at + 1) * dim] = numbers[i]
        pages[block, tokens * dim + at * 4 : tokens * dim + (at + 1) * 4] = own[i].view(torch.uint8)


def by_token_and_head(
    key: Any, value: Any, keys: Any, values: Any, k_scales: Any, v_scales: Any, slots: Any, kv_quant_mode: Any
) -> None:
    key, value, slots = key[slots >= 0], value[slots >= 0], slots[slots >= 0]
    at = slots // keys.shape[1], slots % keys.shape[1]
    for given, cache, scales in ((key, keys, k_scales), (value, values, v_scales)):
        own = given.float().abs().amax(2) / 100
        cache[(*at, slice(None), slice(0, given.shape[2]))] = (given.float() / own[:, :, None]).to(cache.dtype)
        scales[at] = own


def install(monkeypatch: pytest.MonkeyPatch, write_kv: Any = kv) -> None:
    """The ops of FLASH_ATTN, TRITON_ATTN, MLA and the indexer."""
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write_kv, raising=False)
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", write_kv)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash_per_token_head_quant", by_token_and_head)
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", latent)
    monkeypatch.setattr(_custom_ops, "indexer_k_quant_and_cache", index)


def choose_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers get the backend that is asked for, whatever it runs on."""

    def chosen(cls: Any, selected: AttentionBackendEnum, **kwargs: Any) -> str:
        return str(selected.get_path())

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(chosen))
