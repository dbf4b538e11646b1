"""Requests that came with a reference, and how it is found out what each of them is loaded by.

Each of them goes this way:

    arrived: seal verified, lease held -> checked against the prompt ────────────────────────────────────────> its lease held
                                              └ of another prompt of the request -> producer met -> asked -> checked ──┘

A lease is kept alive from the moment the request arrives: a busy engine looks at prompts few at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvferry.engines.vllm.prompts import can_be_handed_over, is_handed_on, is_told_by_tokens
from kvferry.engines.vllm.seeking import Seeking
from kvferry.errors import BadReferenceError, KVFerryError
from kvferry.session import Courier, Keys, Lease, Meeting, Reference, from_params
from kvferry.session.reference import Sizes, rehearse

CROSSED_KEPT: Final = 1024
"""Leases of other prompts that are remembered until vLLM's notices of their rejected requests may come."""


class Stage(Enum):
    """WAITING: no blocks yet. LOADING: ranks read. ABANDONED: it ended, and ranks still read. OVER: nothing is loaded for it by
    this connector, though another one may."""

    WAITING = "waiting"
    LOADING = "loading"
    ABANDONED = "abandoned"
    OVER = "over"


@dataclass(slots=True)
class Decode:
    """A request that came with a reference, `offered` until it is compared with the prompt; `reason` says why it is not used.
    `sibling` is one of another prompt, from whose producer the right one is `sought`. `family`: the request that it may be a
    part of. `in_step`: it is loaded in the step that first computes it; its `blocks`, from where it is loaded on, are then
    found by their hash before they are right. `counted`: it was counted as refused. `seconds`: how long its load took on the
    slowest rank."""

    family: str
    offered: Reference | None = None
    reference: Reference | None = None
    sibling: Reference | None = None
    sought: Future[Reference | None] | None = None
    reason: str = ""
    stage: Stage = Stage.WAITING
    in_step: bool = False
    blocks: Sequence[Sequence[int]] = ()
    tokens: int = 0
    counted: bool = False
    loaded: int = 0
    seconds: float = 0.0
    unhashable: frozenset[int] = frozenset()

    @property
    def is_under_way(self) -> bool:
        """Whether ranks read, or are about to."""
        return self.stage in (Stage.LOADING, Stage.ABANDONED)


class References:
    """Finds out what requests are loaded by. A prompt may go by any of its `digests`; no reference is larger than
    `sizes`. Without a courier nothing is loaded."""

    def __init__(
        self,
        courier: Courier[Meeting] | None,
        seeking: Seeking | None,
        keys: Keys,
        sizes: Sizes,
        digests: Callable[[Any, int], Iterator[str]],
    ) -> None:
        self._courier, self._seeking = courier, seeking
        self._keys, self._sizes, self._digests = keys, sizes, digests
        self._crossed: deque[Lease] = deque(maxlen=CROSSED_KEPT)
        rehearse(keys)

    def arrive(self, request: Any, decode: Decode, params: Mapping[str, Any]) -> None:
        """Whether the reference is in order; its lease is kept from here on."""
        try:
            if self._courier is None:
                raise BadReferenceError("kv_role is kv_producer: this engine loads nothing; make it kv_consumer or kv_both")
            if "kvferry" not in params:
                raise BadReferenceError("kv_transfer_params carry no reference of KVFerry; does the producer run it too?")
            decode.offered = from_params(params["kvferry"], self._keys, self._sizes)
        except BadReferenceError as error:
            decode.reason = str(error)
            return
        self._courier.hold(request.request_id, decode.offered)

    def check(self, request: Any, decode: Decode) -> None:
        """Whether the reference is of this prompt. The lease of another prompt is left to the request that it belongs to.

        vLLM's notice that it rejected a request has no prompt to compare. It releases the lease, unless the rejected request
        was seen to carry another prompt's."""
        offered, decode.offered = decode.offered, None
        if offered is None or self._courier is None:
            return
        try:
            if not request.abort_immediately:
                self._check(request, offered)
            elif offered.lease in self._crossed:
                raise _AnotherPromptError("the rejected request came with a reference of another prompt")
        except BadReferenceError as error:
            self._courier.drop(request.request_id, offered)
            if isinstance(error, _AnotherPromptError):
                self._crossed.append(offered.lease)
            if not isinstance(error, _AnotherPromptError) or request.abort_immediately:
                decode.reason = str(error)
            elif can_be_handed_over(request):
                decode.sibling, decode.reason = offered, str(error)
            return
        decode.reference = offered

    def _check(self, request: Any, reference: Reference) -> None:
        """The reference must be of this very prompt, or of its beginning."""
        tokens = request.prompt_token_ids
        if tokens is None or not is_told_by_tokens(request):
            raise BadReferenceError("a prompt of embeddings cannot be compared with what was prefilled")
        if reference.tokens >= len(tokens) + is_handed_on(request):
            raise _AnotherPromptError(f"the reference covers {reference.tokens} tokens, the prompt has {len(tokens)}")
        if reference.digest not in self._digests(request, reference.tokens):
            raise _AnotherPromptError("the reference is of another prompt, adapter, media or salt")

    def is_settled(self, request: Any, decode: Decode) -> bool:
        """Whether it is settled what becomes of a request that came with another prompt's reference: the producer that gave it
        is met, then asked."""
        sibling = decode.sibling
        if sibling is None or self._courier is None or self._seeking is None:
            return True
        if decode.sought is None:
            met = self._courier.peer(sibling)
            if met is not None and not isinstance(met, str):
                decode.sought = self._seeking.begin(sibling, self._named(request))
            elif met is not None:
                decode.sibling, decode.reason = None, met
            return decode.sibling is None
        if not decode.sought.done():
            return False
        decode.sibling = None
        self._take_sought(request, decode, decode.sought)
        return True

    def seek_for_nobody(self, request: Any, sibling: Reference) -> Future[Reference | None] | None:
        """For a request that has ended and came with another prompt's reference: its own is to be given back. None if so many
        are sought already that this one is left to its lease's end."""
        return self._seeking.begin_for_nobody(sibling, self._named(request)) if self._seeking is not None else None

    def _named(self, request: Any) -> Callable[[], Sequence[str]]:
        """What its producer may call a prompt; to be asked beside the engine."""
        return lambda: tuple(self._digests(request, len(request.prompt_token_ids) - 1))

    def _take_sought(self, request: Any, decode: Decode, sought: Future[Reference | None]) -> None:
        try:
            found = sought.result()
            if found is not None:
                self._check(request, found)
        except KVFerryError as error:
            decode.reason = f"{decode.reason}, and its own is not found: {error}"
            return
        if found is not None and self._courier is not None:
            decode.reference, decode.reason = found, ""
            self._courier.hold(request.request_id, found)


class _AnotherPromptError(BadReferenceError):
    """A reference is in order, and not of this prompt: its own may be found where that one is."""
