"""A whole vLLM engine with a connector that publishes nothing and only writes down its worker's manifest.

Run as a program: real_engine.py MODEL TP CONV FOLDER. It starts as many processes as vLLM does for that TP size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


class Recorder(KVConnectorBase_V1, SupportsHMA):
    """Every hook does nothing, but for the one that receives the tensors."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._cache = vllm_config, kv_cache_config

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from vllm.distributed import parallel_state
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
        from vllm.version import __version__

        from kvferry.engines.vllm import manifest_of
        from kvferry.engines.vllm.certify_self import certify_self
        from kvferry.manifest import Identity, Rank
        from kvferry.manifest.kinds import Shard

        extra = self._config.kv_transfer_config.kv_connector_extra_config
        rank = Rank(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
        manifest = manifest_of(
            self._cache,
            kv_caches,
            self._config,
            Identity("P", "1", extra["model"], rank),
            version=__version__,
            conv_layout=get_conv_state_layout(),
            own=certify_self(
                self._cache, kv_caches, self._config, Shard(rank.tp, rank.tp_size), get_conv_state_layout(), recorded=True
            ),
        )
        (Path(extra["folder"]) / f"{rank.tp}.json").write_bytes(msgspec.json.encode(manifest))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


def main(model: str, tp: str, conv: str, folder: str) -> None:
    from engine import Setup, engine_args

    from vllm import LLM

    with engine_args(Setup(model, int(tp), conv=conv)) as args:
        LLM(
            **args,
            kv_transfer_config={
                "kv_connector": "Recorder",
                "kv_connector_module_path": "real_engine",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"model": model, "folder": folder},
            },
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
