"""Settings of vLLM that the connector does not serve: each is refused when the engine starts, none is ignored."""

from __future__ import annotations

from typing import Any, Final

from kvferry.engines.vllm.manifest import refuse_context_parallel
from kvferry.errors import SessionError

PORT: Final = 14579
"""vLLM's default for kv_port, which nobody has to have set."""


def refuse_unserved(config: Any, device: str) -> None:
    """Raises with the first of them and what to do; `device` is the kind of device that the caches lie on."""
    refuse_context_parallel(config)
    transfer = config.kv_transfer_config
    if transfer.kv_buffer_device not in (device, "cpu"):
        raise SessionError(
            f"kv_buffer_device is {transfer.kv_buffer_device!r}, but caches are read and written, and staged, where they are, "
            f"on {device!r}; leave it out"
        )
    if transfer.enable_permute_local_kv:
        raise SessionError(
            "enable_permute_local_kv is set, but caches are never permuted: orders that differ between two sides are planned "
            "for; leave it out"
        )
    if transfer.kv_port != PORT:
        raise SessionError(
            f"kv_port is {transfer.kv_port}, but it is not used: say where to listen with listen in kv_connector_extra_config"
        )
    if config.model_config.enable_sleep_mode:
        raise SessionError(
            "sleep mode frees cache memory that consumers may be reading and that stays registered for them: start the engine "
            "without --enable-sleep-mode"
        )
    if config.aux_output_config.enable_return_routed_experts:
        raise SessionError(
            "the experts of tokens that another engine prefilled are not known here: start the engine without "
            "--enable-return-routed-experts"
        )
