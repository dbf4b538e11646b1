"""The producer's side of the scheduler's half: requests that are prefilled for others, and references to what is kept of them.

Each of them goes this way:

    truncated to N-1 tokens -> lease opened with its first blocks -> published when it finishes -> ended -> freed
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvferry.engines.vllm.prompts import can_be_handed_over, ends_after_one_step, is_streamed_without_params
from kvferry.engines.vllm.siblings import Siblings, place_of
from kvferry.engines.vllm.stats import FerryStats
from kvferry.engines.vllm.tables import NULL_BLOCK, tables_of
from kvferry.errors import BindError, SessionError
from kvferry.logs import Bursts
from kvferry.session import Closing, Ending, FullError, Keys, Lease, Producer, Reference, Release, Renew, Seek, to_params

logger = logging.getLogger("kvferry.vllm")

FINISHED: Final = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
ABORTED: Final = "FINISHED_ABORTED"
NOTHING: Final = {"do_remote_prefill": False, "do_remote_decode": False, "kvferry": None}
"""Nothing is kept. Some routers say `do_remote_prefill` whatever the producer said, and some want an answer: so there is one,
and it says once more that there is no reference."""

LONGEST_NAME: Final = 200
"""Of a request, in a reference: the other side takes a little more. A client chooses its X-Request-Id."""
_BATCHES: Final = 1024
"""Batches of prompts that are remembered because the first prompt left nothing."""

Answer = tuple[bool, dict[str, Any] | None]
"""Whether a request's blocks stay for a consumer, and the reference to them."""


@dataclass(frozen=True)
class Origin:
    """Who gives references out, and the keys of which the first seals them."""

    address: str
    engine: str
    incarnation: str
    keys: Keys


@dataclass(frozen=True)
class _Prefill:
    tokens: int
    digest: str


class Prefills:
    """`digest` names a request's first so many tokens. Leases of a request whose other parts are still being prefilled are
    renewed every `renewed_s`."""

    def __init__(
        self,
        origin: Origin,
        producer: Producer,
        groups: Sequence[Any],
        stats: FerryStats,
        digest: Callable[[Any, int], str],
        renewed_s: float,
    ) -> None:
        self._origin, self._producer, self._groups = origin, producer, groups
        self._stats, self._digest, self._renewed_s = stats, digest, renewed_s
        self._siblings = Siblings()
        self._renewed_at = -math.inf
        self._under_way: dict[str, _Prefill] = {}
        self._headless: OrderedDict[str, None] = OrderedDict()
        self._full = False
        self._streamed, self._lacking, self._unclaimed = Bursts(logger), Bursts(logger), Bursts(logger, logging.WARNING)

    def arrive(self, request: Any) -> None:
        """N-1 tokens and one step, for every model: the consumer computes the last token itself."""
        request.max_tokens = 1
        if is_streamed_without_params(request):
            self._streamed.log(
                "request %s asks for a prefill for others in a stream, and vLLM's streams carry no kv_transfer_params: nothing "
                "is kept for it; ask with stream false",
                request.request_id,
            )
            return
        if not can_be_handed_over(request) or not ends_after_one_step(request):
            return
        tokens = request.prompt_token_ids
        del tokens[-1:]
        del request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1
        self._under_way[request.request_id] = _Prefill(len(tokens), self._digest(request, len(tokens)))

    def allocated(self, identity: str) -> None:
        if identity in self._under_way and self._producer.open(identity) is None:
            self._lacking.log("request %s: no lease is free; its consumer will recompute it", identity)

    def turn(
        self, messages: Iterable[Renew | Release], now: float, unheard_s: float = 0.0
    ) -> tuple[tuple[Closing, ...], tuple[Lease, ...]]:
        """What consumers said is heard; the leases that end, and those that are new. What they said in the last `unheard_s`
        may still wait to be heard, as after the process was stopped: no lease ends for want of it."""
        for message in messages:
            self._producer.receive(message, now)
        self._renew_siblings(now)
        self._producer.expire(now - unheard_s)
        closing = self._producer.take_closing()
        for end in closing:
            if end.ending is not Ending.ABORTED:
                self._stats.count(end.ending.value)
            if end.ending is Ending.EXPIRED:
                self._unclaimed.log(
                    "request %s: its lease expired, and no decode engine had given it back. If all expire: the router must "
                    "pass kv_transfer_params on, the decode engine must run KVFerry, and both sides need the same key_file",
                    end.request,
                )
            self._siblings.ended(end.lease)
        return closing, self._producer.take_opened()

    def _renew_siblings(self, now: float) -> None:
        """The answer to a request of several prompts leaves when all are prefilled: until then nobody else renews."""
        if self._under_way and now - self._renewed_at >= self._renewed_s:
            self._renewed_at = now
            leases = self._siblings.leases(self._under_way)
            if leases:
                self._producer.receive(Renew(self._origin.incarnation, leases), now)

    def reset(self) -> bool:
        """What is computed from now on may be handed over, and nothing of before. Whether that can be read no more."""
        self._siblings.forget()
        return self._producer.reset()

    def find(self, message: Seek) -> Reference | None:
        """Beside the engine."""
        ours = message.incarnation == self._origin.incarnation
        return self._siblings.find(message.lease, message.digest) if ours else None

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]], now: float) -> Answer:
        prefill = self._under_way.pop(request.request_id, None)
        if prefill is None:
            params = request.kv_transfer_params or {}
            return self._nothing(request, now) if params.get("do_remote_decode") else (False, None)
        return self._publish(request, prefill, block_ids, now)

    def _nothing(self, request: Any, now: float) -> Answer:
        """Where it is the first prompt of a batch, the answer names no reference at all: no later prompt is handed over."""
        identity = request.request_id
        if not request.abort_immediately:
            self._stats.count("prefill_aborted" if request.status.name == ABORTED else "prefill_nothing")
        batch, place = place_of(identity)
        if not place and batch != identity:
            self._headless[batch] = None
            self._headless.move_to_end(batch)
            while len(self._headless) > _BATCHES:
                self._headless.popitem(last=False)
            for lease in self._siblings.unclaimed(identity):
                self._producer.receive(Release(self._origin.incarnation, lease, self._origin.engine, "not given out"), now)
        return False, dict(NOTHING)

    def _publish(self, request: Any, prefill: _Prefill, block_ids: Sequence[Sequence[int]], now: float) -> Answer:
        identity = request.request_id
        batch, place = place_of(identity)
        try:
            computed = request.num_computed_tokens
            if request.status.name not in FINISHED or computed != prefill.tokens:
                raise SessionError(f"it ended as {request.status.name} after {computed} of {prefill.tokens} tokens")
            if place and batch in self._headless:
                raise SessionError("the first prompt of its batch left nothing, so no reference is given out")
            twin = self._siblings.twin(identity, prefill.digest)
            if twin is not None:
                self._producer.abort(identity)
                self._stats.count("prefill_shared")
                return False, self._params(twin)
            blocks = tables_of(self._groups, block_ids, prefill.tokens)
            lease = self._producer.publish(
                identity, now, (block for table in block_ids for block in table if block != NULL_BLOCK)
            )
        except (SessionError, BindError) as error:
            self._producer.abort(identity)
            self._say_why(identity, error)
            return self._nothing(request, now)
        self._full = False
        self._headless.pop(batch, None)
        self._stats.count("published")
        origin = self._origin
        reference = Reference(
            origin.address,
            origin.engine,
            origin.incarnation,
            _fitting(identity),
            lease,
            prefill.tokens,
            {str(group): table for group, table in blocks.items()},
            prefill.digest,
        )
        self._siblings.published(identity, reference)
        return True, self._params(reference)

    def _say_why(self, identity: str, error: Exception) -> None:
        """An engine whose leases hold all that they may says so once, until it publishes again."""
        full = isinstance(error, FullError)
        level = logging.WARNING if full and not self._full else logging.INFO
        self._full = self._full or full
        logger.log(level, "request %s leaves nothing for a consumer: %s", identity, error)

    def _params(self, reference: Reference) -> dict[str, Any]:
        host, _, port = self._origin.address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._origin.engine,
            "remote_request_id": reference.request,
            "remote_host": host,
            "remote_port": int(port),
            "kvferry": to_params(reference, self._origin.keys.first),
        }


def _fitting(identity: str) -> str:
    """A request's name for a reference; a long one is cut, and told apart by a digest of all of it."""
    if len(identity) <= LONGEST_NAME:
        return identity
    return f"{identity[:LONGEST_NAME]} {hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
