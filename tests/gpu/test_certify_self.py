"""An engine on a GPU certifies its own caches when it starts: every backend, packed rows, and states by their kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager

sys.path.insert(0, str(Path(__file__).parent.parent / "vllm"))

from engine import Setup, build, start

from kvferry.engines.vllm.certify_self import certify_self
from kvferry.engines.vllm.layouts import Own
from kvferry.manifest.kinds import Shard

HALF = Setup("llama", dtype="bfloat16", device="cuda", layout="BLHNC", block=16)
ENGINES = (
    replace(HALF, backend="FLASH_ATTN"),
    replace(HALF, backend="FLASH_ATTN", kv_cache_dtype="fp8"),
    replace(HALF, backend="TRITON_ATTN", dtype="float32"),
    replace(HALF, backend="TRITON_ATTN", kv_cache_dtype="fp8_per_token_head"),
    replace(HALF, backend="TRITON_ATTN", kv_cache_dtype="int8_per_token_head"),
    replace(HALF, model="deepseek", backend="TRITON_MLA"),
    replace(HALF, model="deepseek", backend="FLASHMLA", block=64),
    replace(HALF, model="nemotron-h", backend="FLASH_ATTN"),
    replace(HALF, model="granite-h-1g", backend="FLASH_ATTN", tp=2, rank=1, conv="DS"),
    replace(HALF, model="qwen3-next", backend="FLASH_ATTN"),
    replace(HALF, model="jamba", backend="FLASH_ATTN"),
    replace(HALF, model="lfm2", backend="FLASH_ATTN"),
)


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    torch.cuda.set_device(0)
    current_platform.import_kernels()
    init_workspace_manager(torch.device("cuda:0"))
    start()


@pytest.mark.parametrize("setup", ENGINES, ids=lambda s: f"{s.model}-{s.backend}-{s.dtype}-{s.kv_cache_dtype}")
def test_every_layer_is_certified_and_the_cache_is_left_as_it_was(setup: Setup) -> None:
    worker, shard = build(setup), Shard(setup.rank, setup.tp)

    def certified() -> Own:
        return certify_self(worker.kv_cache_config, worker.kv_caches, worker.vllm_config, shard, setup.conv, recorded=False)

    certified()  # The first write of a packed cache gives every scale a value.
    memory = worker.memory.tensor  # type: ignore[union-attr]
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    before = memory.clone()
    own = certified()
    groups = worker.kv_cache_config.kv_cache_groups
    recurrent = {name for it in groups if type(it.kv_cache_spec).__name__ == "MambaSpec" for name in it.layer_names}
    assert set(own.cells) == set(worker.kv_caches) - recurrent
    assert own.cells
    assert not own.opaque_states
    assert torch.equal(memory, before)
