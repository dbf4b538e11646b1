"""One request from P's blocks to D's: written by vLLM, moved by a plan, and what vLLM itself would have written at D.

The expectation knows global tensors, vLLM's ops, views and weight loaders, and the windows of the model's configuration;
it shares nothing with the manifest or the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine import DeviceMemory, Memory, Setup, Worker, workers
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.manifest import HOLE, Manifest
from kvferry.plan import Binder, Binding, Plan, Request, make_plans

Bytes = npt.NDArray[np.uint8]
Tables = dict[int, list[int]]


@lru_cache(maxsize=256)
def global_state(model: str, name: str, tokens: int, part: int, shape: tuple[int, ...]) -> torch.Tensor:
    """One part of one layer of the unsharded model; the same on every call."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(f"{model} {name} {tokens} {part}")) % (1 << 31)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def window(worker: Worker, name: str) -> int:
    """The layer's window by the model's configuration, 0 for none."""
    text = worker.vllm_config.model_config.hf_text_config
    index = int(next(piece for piece in name.split(".") if piece.isdigit()))
    kinds = getattr(text, "layer_types", None)
    return int(text.sliding_window) if kinds and kinds[index : index + 1] == ["sliding_attention"] else 0


def first_read(worker: Worker, name: str, tokens: int) -> int:
    """The first token that the layer reads when it computes token number `tokens`."""
    width = window(worker, name)
    return max(0, tokens - width + 1) if width else 0


def is_state(group: Any) -> bool:
    return isinstance(group.kv_cache_spec, MambaSpec)


def groups_of(ranks: Sequence[Worker]) -> list[Any]:
    """The groups of an engine with the layers of all its stages."""
    seen: list[dict[str, None]] = [{} for _ in ranks[0].kv_cache_config.kv_cache_groups]
    for worker in ranks:
        for names, group in zip(seen, worker.kv_cache_config.kv_cache_groups, strict=True):
            names.update(dict.fromkeys(group.layer_names))
    groups = ranks[0].kv_cache_config.kv_cache_groups
    return [replace(group, layer_names=list(names)) for names, group in zip(seen, groups, strict=True)]


def tables(ranks: Sequence[Worker], tokens: int, seed: int) -> Tables:
    """Scattered blocks for each group: never block 0, never one block for two groups, holes where a window let go."""
    free = np.random.default_rng(seed).permutation(np.arange(1, ranks[0].kv_cache_config.num_blocks)).tolist()
    out: Tables = {}
    for index, group in enumerate(groups_of(ranks)):
        if is_state(group):
            out[index] = [free.pop()]
            continue
        block = group.kv_cache_spec.block_size
        gone = min(first_read(ranks[0], name, tokens) for name in group.layer_names) // block
        out[index] = [HOLE if i < gone else free.pop() for i in range(-(-tokens // block))]
    return out


def garbage(worker: Worker, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, len(worker.memory), dtype=np.uint8)


def write_kv(worker: Worker, name: str, table: list[int], first: int, tokens: int) -> None:
    """Tokens [first, tokens) of the rank's heads, through vLLM's cache-write op."""
    cache = worker.kv_caches[name]
    (heads,) = worker.held[name]
    latent = getattr(worker.layers[name], "kv_lora_rank", cache.shape[3] // 2)
    key, value = (
        global_state(worker.setup.model, name, tokens, part, (tokens, heads.total, dim))[first:, heads.indices]
        for part, dim in enumerate((latent, cache.shape[3] - latent))
    )
    given = worker.vllm_config.model_config.dtype
    worker.write_kv(name, key.to(given), value.to(given), table, first)


def live_taps(worker: Worker, name: str) -> int:
    conv = worker.layers[name].kv_cache[0]
    return int(conv.shape[2 if worker.setup.conv == "DS" else 1]) - worker.setup.speculative


def write_state(worker: Worker, name: str, block: int, tokens: int) -> None:
    """The rank's share of conv and ssm, through the views that vLLM bound; speculative taps stay as they are."""
    conv, *ssm = worker.layers[name].kv_cache
    channels, *units = worker.held[name]
    taps = live_taps(worker, name)
    whole = global_state(worker.setup.model, name, tokens, 0, (channels.total, taps))
    mine = whole[channels.indices].to(conv.device, conv.dtype)
    if worker.setup.conv == "DS":
        conv[block, :, :taps] = mine
    else:
        conv[block, :taps] = mine.T
    for view, held in zip(ssm, units, strict=True):
        whole = global_state(worker.setup.model, name, tokens, 1, (held.total, *view.shape[2:]))
        view[block] = whole[held.indices].to(view.device, view.dtype)


def fill_producer(worker: Worker, table: Tables, tokens: int) -> None:
    """What a prefill of `tokens` tokens leaves in the blocks that P still holds."""
    for index, group in enumerate(worker.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if is_state(group):
                write_state(worker, name, table[index][0], tokens)
            else:
                held = table[index].count(HOLE) * group.kv_cache_spec.block_size
                write_kv(worker, name, table[index], held, tokens)


def retained_by(ranks: Sequence[Worker], table: Tables) -> dict[str, int]:
    """The first token that an engine still holds of each layer."""
    return {
        name: table[i].count(HOLE) * group.kv_cache_spec.block_size
        for i, group in enumerate(groups_of(ranks))
        for name in group.layer_names
    }


def expect_at_consumer(worker: Worker, table: Tables, tokens: int, retained: dict[str, int], start: int = 0) -> int:
    """Zero every loaded block, write what D must have; returns the bytes that had to come from P.

    `retained` is the first token that P still holds of each layer, without those that P does not have; D had the blocks
    before token `start` already.
    """
    moved = 0
    hashed = worker.setup.prefix_caching
    for index, group in enumerate(worker.kv_cache_config.kv_cache_groups):
        names, ids = group.layer_names, table[index]
        if is_state(group):
            for name in names:
                page = worker.kv_caches[name][ids[0]]
                page.zero_()
                write_state(worker, name, ids[0], tokens)
                conv = worker.layers[name].kv_cache[0]
                scratch = worker.setup.speculative * len(worker.held[name][0].indices) * conv.element_size()
                moved += page.numel() - scratch
            continue
        block = group.kv_cache_spec.block_size
        low = {name: first_read(worker, name, tokens) for name in names}
        if hashed:
            kept = ids.count(HOLE) * block
            low = {name: max(kept, retained.get(name, 0)) for name in names}
        low = {name: max(first, start) for name, first in low.items()}
        for name in names:
            for i in range(min(low.values()) // block, len(ids)):
                cache = worker.kv_caches[name]
                cache.unflatten(0, (worker.kv_cache_config.num_blocks, -1))[ids[i]].zero_()
            if name not in retained:
                continue
            write_kv(worker, name, ids, low[name], tokens)
            cache = worker.kv_caches[name]
            moved += (tokens - low[name]) * cache.shape[1] * cache.shape[3] * cache.element_size()
    return moved


@dataclass(frozen=True)
class Pair:
    """P and D with their manifests and proved plans."""

    producers: tuple[Worker, ...]
    consumers: tuple[Worker, ...]
    sources: tuple[Manifest, ...]
    plans: tuple[Plan, ...]
    binders: tuple[Binder, ...]


@lru_cache(maxsize=8)
def pair(producer: Setup, consumer: Setup) -> Pair:
    there, here = workers(producer, "P"), workers(consumer, "D")
    sources = tuple(w.manifest("P") for w in there)
    plans = make_plans([w.manifest("D") for w in here], sources)
    return Pair(there, here, sources, plans, tuple(Binder(p) for p in plans))


def apply(binding: Binding, plan: Plan, memories: dict[int, Memory], consumer: Memory) -> None:
    """Plain copies and fills; each rank has one region."""
    if isinstance(consumer, DeviceMemory):
        _apply_there(binding, plan, memories, consumer)
        return
    for side, copies in zip(plan.sources, binding.copies, strict=True):
        source = memories[side.identity.rank.tp]
        assert not copies.src_region.any()
        assert not copies.dst_region.any()
        for length in np.unique(copies.length):
            of = copies.length == length
            reach = np.arange(length)
            consumer[copies.dst_offset[of, None] + reach] = source[copies.src_offset[of, None] + reach]
    for offset, length in zip(binding.fills.offset, binding.fills.length, strict=True):
        consumer[offset : offset + length] = 0


def _apply_there(binding: Binding, plan: Plan, memories: dict[int, Memory], consumer: DeviceMemory) -> None:
    """The same on a device."""
    device = consumer.tensor.device
    for side, copies in zip(plan.sources, binding.copies, strict=True):
        source = memories[side.identity.rank.tp]
        assert isinstance(source, DeviceMemory)
        assert not copies.src_region.any()
        assert not copies.dst_region.any()
        for length in np.unique(copies.length).tolist():
            of = copies.length == length
            reach = torch.arange(length, device=device)
            src, dst = (
                torch.from_numpy(np.ascontiguousarray(o[of])).to(device) for o in (copies.src_offset, copies.dst_offset)
            )
            consumer.tensor[dst[:, None] + reach] = source.tensor[src[:, None] + reach]
    for offset, length in zip(binding.fills.offset.tolist(), binding.fills.length.tolist(), strict=True):
        consumer.tensor[offset : offset + length] = 0


@dataclass(frozen=True)
class Outcome:
    """One D rank after a transfer, beside what it should hold and what it held before."""

    worker: Worker
    before: Bytes
    got: Bytes
    wanted: Bytes
    binding: Binding
    needed_bytes: int

    def differences(self) -> str:
        """Empty where every byte of the allocation is as it should be."""
        at = np.flatnonzero(self.got != self.wanted)
        if not len(at):
            return ""
        return f"{self.worker.setup}: {len(at)} of {len(self.got)} bytes differ, the first at {at[0]}"


def cross(found: Pair, tokens: int, *, blank: bool = False, seed: int = 7) -> tuple[Outcome, ...]:
    """Write at P, move, and compare. `blank`: P's blocks are zeroed before the prefill, as vLLM does for new blocks."""
    there, here = found.producers, found.consumers
    src, dst = tables(there, tokens, seed), tables(here, tokens, seed + 1)
    for worker in there:
        worker.memory[:] = 0 if blank else garbage(worker, seed + 2 + worker.setup.rank)
        fill_producer(worker, src, tokens)
    retained = retained_by(there, src)
    request = Request(tokens, _by_group(there[0], src), _by_group(here[0], dst))
    memories = {worker.setup.rank: worker.memory for worker in there}
    out = []
    for worker, plan, binder in zip(here, found.plans, found.binders, strict=True):
        before = garbage(worker, seed + 100 + worker.setup.rank)
        worker.memory[:] = before
        needed = expect_at_consumer(worker, dst, tokens, retained)
        wanted = worker.memory.copy()
        worker.memory[:] = before
        binding = binder.bind(request)
        apply(binding, plan, memories, worker.memory)
        out.append(Outcome(worker, before, worker.memory.copy(), wanted, binding, needed))
    return tuple(out)


def _by_group(worker: Worker, table: Tables) -> dict[int, Sequence[int] | int]:
    groups = worker.kv_cache_config.kv_cache_groups
    return {i: ids[0] if is_state(groups[i]) else ids for i, ids in table.items()}
