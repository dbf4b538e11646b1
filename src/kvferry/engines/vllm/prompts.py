"""What a prompt of vLLM's is by itself: what it is told apart by, and whether it can be handed over."""

from __future__ import annotations

import re
from typing import Any

from kvferry.engines.vllm.identity import adapter_of
from kvferry.engines.vllm.media import content_of
from kvferry.session import digest


def can_be_handed_over(request: Any) -> bool:
    """Whether a producer keeps anything of such a prompt: at least one token besides the last, which is no part of an image."""
    tokens = request.prompt_token_ids
    if tokens is None or len(tokens) < 2 or not is_told_by_tokens(request):
        return False
    media = (feature.mm_position for feature in request.mm_features)
    return not any(place.offset + place.length >= len(tokens) for place in media)


def is_handed_on(request: Any) -> bool:
    """Whether a request that came with a reference is also prefilled for others: then its last token was taken off it."""
    params = request.kv_transfer_params or {}
    return bool(params.get("do_remote_decode") and params.get("do_remote_prefill"))


def is_told_by_tokens(request: Any) -> bool:
    """Embeddings, also where they stand among tokens, are no part of a digest."""
    return request.prompt_embeds is None


def ends_after_one_step(request: Any) -> bool:
    """A prompt that is fed in pieces goes on; logprobs of the prompt and pooling want all of it."""
    return not request.resumable and not request.skip_reading_prefix_cache and request.pooling_params is None


def is_streamed_without_params(request: Any) -> bool:
    """Streams of vLLM's completions and chat completions, which it names so; who calls the engine itself sees every field."""
    sampling = request.sampling_params
    streamed = sampling is not None and sampling.output_kind.name == "DELTA"
    return streamed and re.match(r"(\d+_)?(chat)?cmpl-", request.request_id) is not None


def digest_of(request: Any, tokens: int, media_by_content: bool = False) -> str:
    media = [
        (content_of(feature) if media_by_content else feature.identifier, feature.mm_position.offset)
        for feature in request.mm_features
        if feature.mm_position.offset < tokens
    ]
    return digest(
        request.prompt_token_ids,
        count=tokens,
        adapter=adapter_of(request.lora_request),
        media=media,
        salt=request.cache_salt or "",
    )
