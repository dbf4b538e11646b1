"""What vLLM has hashed of loads that may be lost in the step that orders them.

vLLM hashes what a step is to compute when it puts the step together. Of a load that is lost it fails who runs with its blocks,
and forgets these; not what others computed behind them, nor anything of a request that was preempted or aborted meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from kvferry.engines.vllm.decodes import Decode
from kvferry.engines.vllm.tables import spec_of


class Doubts:
    """Steps that were put together since a load in its step was ordered of which nobody knows yet how it ended."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._tokens = [spec_of(group.kv_cache_spec).block_size for group in groups]
        self._steps: deque[tuple[Any, set[str]]] = deque()

    def ordered(self, step: Any, loads: Iterable[str]) -> None:
        """A step was put together, with these loads in it."""
        found = set(loads)
        if found or self._steps:
            self._steps.append((step, found))

    def over(self, load: str) -> None:
        for _, loads in self._steps:
            loads.discard(load)

    def settle(self) -> None:
        """What is over was dealt with."""
        while self._steps and not self._steps[0][1]:
            self._steps.popleft()

    def hashed_too_soon(self, lost: Sequence[Decode]) -> Iterator[int]:
        """Of loads that were lost in their step, all from where they were to be loaded on: not what was there before. And all
        that requests were given since to compute, who may have looked at what was lost."""
        for decode in lost:
            if decode.reference is not None:
                yield from self._from(decode.tokens - decode.loaded, decode.blocks)
        for step, _ in self._steps if lost else ():
            for request in step.scheduled_new_reqs:
                yield from self._from(request.num_computed_tokens, request.block_ids)
            for blocks in filter(None, step.scheduled_cached_reqs.new_block_ids):
                yield from chain.from_iterable(blocks)

    def _from(self, token: int, blocks: Sequence[Sequence[int]]) -> Iterator[int]:
        for size, table in zip(self._tokens, blocks, strict=False):
            yield from table[token // size :]
