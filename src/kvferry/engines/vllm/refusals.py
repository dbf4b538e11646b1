"""Settings of vLLM that the connector does not serve: each is refused when the engine starts, none is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvferry.engines.vllm.manifest import refuse_context_parallel
from kvferry.engines.vllm.releases import Release
from kvferry.engines.vllm.releases import unserved as unserved_by
from kvferry.errors import SessionError
from kvferry.findings import Finding

PORT: Final = 14579
"""vLLM's default for kv_port, which nobody has to have set."""

CONTEXT_PARALLEL: Final = ("decode_context_parallel_size", "prefill_context_parallel_size")


def refuse_unserved(config: Any, device: str, release: Release, kv_cache_config: Any) -> None:
    """Raises with the first of them and what to do; `device` is the kind of device that the caches lie on."""
    refuse_context_parallel(config)
    for seen, cure in unserved_by(release, getattr(kv_cache_config, "needs_kv_cache_zeroing", False)):
        raise SessionError(str(Finding("vllm-release", seen, cure)))
    for found in unserved(config, device):
        raise SessionError(str(found))


def unserved(config: Any, device: str) -> Iterator[Finding]:
    """All of them but those of a release."""
    for name in CONTEXT_PARALLEL:
        size = getattr(config.parallel_config, name, 1)
        if size > 1:
            seen = f"{name} is {size}, but tokens that are dealt to context-parallel ranks are not carried"
            yield Finding("context-parallel", seen, f"leave --{name.replace('_', '-')} out")
    transfer = config.kv_transfer_config
    if transfer.kv_buffer_device not in (device, "cpu"):
        seen = (
            f"kv_buffer_device is {transfer.kv_buffer_device!r}, but caches are read and written, and staged, where they are, "
            f"on {device!r}"
        )
        yield Finding("buffer-device", seen, "leave it out")
    if transfer.enable_permute_local_kv:
        seen = "enable_permute_local_kv is set, but caches are never permuted, since orders that differ are planned for"
        yield Finding("permute-local-kv", seen, "leave it out")
    if transfer.kv_port != PORT:
        seen = f"kv_port is {transfer.kv_port}, but it is not used"
        yield Finding("kv-port", seen, "say where to listen with listen in kv_connector_extra_config")
    if config.model_config.enable_sleep_mode:
        seen = "sleep mode frees cache memory that consumers may be reading and that stays registered for them"
        yield Finding("sleep-mode", seen, "start the engine without --enable-sleep-mode")
    extra = getattr(config, "aux_output_config", None)
    if getattr(extra, "enable_return_routed_experts", False):
        seen = "the experts of tokens that another engine prefilled are not known here"
        yield Finding("routed-experts", seen, "start the engine without --enable-return-routed-experts")
