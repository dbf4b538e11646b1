"""Media of a request by what they are, for engines that name them by request."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import torch


def are_named_by_request(config: Any) -> bool:
    """Whether vLLM's names for media say nothing of them: without any cache it does not look at them."""
    media = config.model_config.multimodal_config
    return media is not None and media.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching


def content_of(feature: Any) -> str:
    """A digest of what the processor made of one item; its name where that is not at hand."""
    if feature.data is None:
        return str(feature.identifier)
    state = hashlib.sha256(feature.modality.encode())
    _take_in(state, feature.data.get_data())
    return f"content {state.hexdigest()[:32]}"


def _take_in(state: Any, found: Any) -> None:
    """Every value behind its kind and length, so that no two things read alike."""
    if isinstance(found, torch.Tensor):
        said = f"{found.dtype} {tuple(found.shape)}"
        flat = found.detach().cpu().contiguous().flatten()
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    elif isinstance(found, Mapping):
        said, data = f"mapping {len(found)}", b""
    elif isinstance(found, list | tuple):
        said, data = f"sequence {len(found)}", b""
    else:
        said, data = type(found).__name__, repr(found).encode()
    state.update(struct.pack("<qq", len(said), len(data)))
    state.update(said.encode())
    state.update(data)
    if isinstance(found, Mapping):
        for name in sorted(found):
            _take_in(state, name)
            _take_in(state, found[name])
    elif isinstance(found, list | tuple):
        for one in found:
            _take_in(state, one)
