"""The scheduler's half of the connector: which requests are prefilled for others, which are loaded, and what is owed to whom.

Knows vLLM's requests and block ids, never bytes. A request is at most one of two things here:

    prefill: see prefills.py
    decode:  reference checked (see decodes.py) -> producer met -> blocks allocated -> loading -> over; the lease is released at
             every way out.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from kvferry import __version__
from kvferry.engines.vllm.cargo import Orders, Pending, RankCard, Report
from kvferry.engines.vllm.decodes import Decode, References, Stage
from kvferry.engines.vllm.doubts import Doubts
from kvferry.engines.vllm.drafters import without_other_drafters
from kvferry.engines.vllm.haste import Haste, looks_ahead, may_hurry
from kvferry.engines.vllm.identity import fingerprint
from kvferry.engines.vllm.introducing import introduce
from kvferry.engines.vllm.media import are_named_by_request
from kvferry.engines.vllm.nearby import rank_nearby
from kvferry.engines.vllm.options import NOT_LOADED, Options
from kvferry.engines.vllm.prefills import Answer, Origin, Prefills
from kvferry.engines.vllm.prompts import digest_of
from kvferry.engines.vllm.releases import this_release
from kvferry.engines.vllm.room import most_leased
from kvferry.engines.vllm.seeking import Seeking, give_back_when_found
from kvferry.engines.vllm.siblings import family_of, prompt_of
from kvferry.engines.vllm.stats import FerryStats
from kvferry.engines.vllm.tables import keeps_every_token, sizes_of, specs_of, tables_of
from kvferry.errors import BadReferenceError, BindError, SessionError
from kvferry.logs import Bursts
from kvferry.session import (
    Card,
    Courier,
    Hello,
    Listener,
    Load,
    Meeting,
    PeerKey,
    Producer,
    Reference,
    Release,
    Renew,
    Welcome,
    key_of,
    meet,
)
from kvferry.session.messages import BOTH, CONSUMER, PRODUCER

logger = logging.getLogger("kvferry.vllm")

CHECKED_A_STEP = 8
"""Requests in vLLM's queue whose prompts are compared with their references; leases are kept alive without that."""
LINGER_S = 1.0
"""How long a lease is kept for other parts of a request than the one that has loaded. They come one after the other, and the
first may be over before the last is there."""


class SchedulerHalf:
    """One engine's half; `clock` is for leases' deadlines. `can_undo`: loads may be lost in the step that computes their
    requests."""

    def __init__(
        self, config: Any, kv_cache_config: Any, options: Options, clock: Callable[[], float] = time.monotonic
    ) -> None:
        transfer = config.kv_transfer_config
        self._engine: str = transfer.engine_id
        self._model = fingerprint(config, options.weights)
        self._media_by_content = are_named_by_request(config)
        self._incarnation = secrets.token_hex(8)
        self._groups: Sequence[Any] = kv_cache_config.kv_cache_groups
        self._options, self._clock = options, clock
        self._keeps_every_token = all(
            keeps_every_token(spec) for group in self._groups for spec in specs_of(group.kv_cache_spec)
        )
        self._recompute = transfer.kv_load_failure_policy == "recompute"
        keys = options.keys()
        self._cards: tuple[Card, ...] = ()
        most = most_leased(config, kv_cache_config)
        _say_what_leases_may_hold(most, kv_cache_config.num_blocks)
        self._producer = Producer(self._incarnation, kv_cache_config.num_blocks, options.lease_s, options.lease_most_s, most)
        self._listener: Listener | None = None
        self._address = ""
        self._produces: bool = transfer.is_kv_producer
        self._role = (BOTH if transfer.is_kv_consumer else PRODUCER) if self._produces else CONSUMER
        if options.answers(self._produces):
            index = getattr(config.parallel_config, "data_parallel_index", 0)
            self._listener = Listener(options.listening(index), keys, self._producer.stands)
            self._address = options.advertised(self._listener.port)
        self._courier: Courier[Meeting] | None = None
        if transfer.is_kv_consumer:
            hello = Hello(self._engine, self._incarnation)
            self._courier = Courier(hello, keys, options.greeting_s, self._meet)
        self._closing = threading.Event()
        self._seeking = Seeking(keys, options.greeting_s, self._closing) if transfer.is_kv_consumer else None
        sizes = sizes_of(self._groups, config.model_config.max_model_len)
        self._references = References(self._courier, self._seeking, keys, sizes, self._digests)
        self._evict: Callable[[set[int]], None] | None = None
        self._decodes: dict[str, Decode] = {}
        self._unhashable: dict[str, Decode] = {}
        self._unchecked: dict[str, Any] = {}
        self._families: Counter[str] = Counter()
        self._announced: set[PeerKey] = set()
        self._leaving: set[PeerKey] = set()
        self._pending = Pending()
        self._doubts = Doubts(self._groups)
        self.can_undo = this_release().is_seen and may_hurry(config, kv_cache_config)
        self._haste = Haste(self.can_undo, ahead=looks_ahead(config))
        self._stats = FerryStats()
        self._refusals, self._misplaced = Bursts(logger), Bursts(logger, logging.WARNING)
        origin = Origin(self._address, self._engine, self._incarnation, keys)
        self._prefills = Prefills(origin, self._producer, self._groups, self._stats, self._digest, options.lease_s / 3)

    def bind_cache(self, evict: Callable[[set[int]], None]) -> None:
        """How blocks are taken out of the prefix cache."""
        self._evict = evict

    def ranks(self, cards: Mapping[tuple[int, int], RankCard]) -> None:
        """The cards of all ranks, once; from now on greetings are answered. Meets the peers of the options.

        Beside other connectors the first one's cards are given to all; and no load is made in its step, since the others keep
        what that step computes before it is known to be right, and this half is not told what becomes of loads that fail."""
        for found in cards.values():
            if not isinstance(found, RankCard):
                raise SessionError(
                    f"{type(found).__name__} was given in place of KVFerry's cards: of several connectors, name "
                    "KVFerryConnector first"
                )
        self._cards = tuple(self._stamped(found.card) for _, found in sorted(cards.items()))
        if not all(found.alone for found in cards.values()):
            self.can_undo = False
            self._haste = Haste(False)
        if self._listener is not None:
            welcome = Welcome(self._engine, self._incarnation, self._options.lease_s, self._cards, role=self._role)
            self._listener.welcome(welcome, self._prefills.find)
            asking = "decode engines" if self._produces else "kvferry check"
            logger.info("KVFerry %s answers %s at %s (engine %s)", __version__, asking, self._address, self._engine)
        else:
            logger.info("KVFerry %s loads what prefill engines hand over (engine %s)", __version__, self._engine)
        if self._courier is None:
            return
        for address in self._options.peers:
            introduce(self._courier, address, self._closing)

    def _stamped(self, card: Card) -> Card:
        """Ranks know neither the start they belong to, nor, where they have no checkpoint at hand, the weights they serve."""
        identity = msgspec.structs.replace(card.caches.identity, incarnation=self._incarnation, model=self._model)
        return msgspec.structs.replace(card, caches=msgspec.structs.replace(card.caches, identity=identity))

    def _meet(self, peer: PeerKey, welcome: Welcome) -> Meeting:
        if not self._cards:
            raise SessionError("this engine is still starting; ask again")
        mine = [card.caches for card in self._cards]
        meeting = meet(peer, without_other_drafters(welcome, mine), mine)
        logger.info("%s", meeting)
        return meeting

    def arrive(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and self._produces:
            self._prefills.arrive(request)
        elif params.get("do_remote_decode"):
            self._misplaced.log("request %s asks for a prefill for others, but kv_role is kv_consumer", request.request_id)
        if "kvferry" in params and params["kvferry"] is None:
            self._stats.count("recomputed", 0 if request.abort_immediately else request.num_prompt_tokens)
        elif params.get("do_remote_prefill") and (self._courier is not None or not params.get("do_remote_decode")):
            self._arrive_decode(request, params)

    def _arrive_decode(self, request: Any, params: Mapping[str, Any]) -> None:
        found = self._decodes[request.request_id] = Decode(family_of(request.request_id))
        self._families[found.family] += 1
        self._references.arrive(request, found, params)
        if found.offered is not None:
            self._unchecked[request.request_id] = request

    def _check(self, request: Any, found: Decode) -> None:
        """Once, and of few requests a step: all that arrive together would hold the step up."""
        if self._unchecked.pop(request.request_id, None) is not None:
            self._references.check(request, found)

    def _digests(self, request: Any, tokens: int) -> Iterator[str]:
        """What the producer may call the prompt: it may have no other name for media than their content."""
        yield self._digest(request, tokens)
        if request.mm_features and not self._media_by_content:
            yield digest_of(request, tokens, True)

    def _digest(self, request: Any, tokens: int) -> str:
        return digest_of(request, tokens, self._media_by_content)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` will be loaded; None while the producer is being met."""
        decode = self._decodes.get(request.request_id)
        if decode is None or decode.stage is not Stage.WAITING:
            return 0, False
        if self._haste.has_enough:
            return None, False
        self._check(request, decode)
        if decode.sibling is not None and not self._references.is_settled(request, decode):
            return None, False
        reference, decode.in_step = decode.reference, False
        if not decode.reason and reference is not None and self._courier is not None:
            found = self._courier.peer(reference)
            if found is None:
                return None, False
            if isinstance(found, str):
                decode.reason = found
        if decode.reason:
            return self._refuse(request, decode, computed)
        decode.tokens = 0 if reference is None or request.skip_reading_prefix_cache else self._loadable(request, reference)
        count = decode.tokens - computed
        if reference is None or count <= 0:
            return 0, False
        peer, rank = key_of(reference), rank_nearby(self._engine)
        if not self._haste.knows(peer) and rank is not None and (pace := rank.pace(peer)) is not None:
            self._haste.saw(peer, 1, pace)
        decode.in_step = self._haste.allows(request, peer, count) and not (rank is not None and rank.meets)
        return count, not decode.in_step

    def _loadable(self, request: Any, reference: Reference) -> int:
        """All tokens of a reference; but one, where it covers a prompt that is handed on, of which vLLM must compute something:
        windows and states are not there of a shorter prompt."""
        beyond = reference.tokens - (request.num_prompt_tokens - 1)
        if beyond <= 0:
            return reference.tokens
        return reference.tokens - beyond if self._keeps_every_token else 0

    def _refuse(self, request: Any, decode: Decode, computed: int) -> tuple[int, bool]:
        """Recomputed here, or, where vLLM's policy is to fail, reported by the ranks as a load that failed."""
        self._say_refused(request, decode, decode.reason, request.num_prompt_tokens - computed)
        count = 0 if self._recompute or request.skip_reading_prefix_cache else request.num_prompt_tokens - 1 - computed
        return (count, True) if count > 0 else (0, False)

    def _say_refused(self, request: Any, decode: Decode, reason: str, tokens: int) -> None:
        """Once a request, of which so many tokens are computed here."""
        if decode.counted:
            return
        decode.counted = True
        self._stats.count("refused")
        self._count_recomputed(tokens)
        outcome = NOT_LOADED["recompute" if self._recompute else "fail"]
        self._refusals.log("request %s is not loaded: %s; %s", request.request_id, _in_a_line(reason), outcome)

    def _count_recomputed(self, tokens: int) -> None:
        if self._recompute:
            self._stats.count("recomputed", tokens)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        identity = request.request_id
        self._prefills.allocated(identity)
        decode = self._decodes.get(identity)
        if decode is None:
            return
        self._check(request, decode)
        if decode.stage is not Stage.WAITING:
            if self._unhashable.pop(identity, None) is not None:
                self._forget_hashes(decode.unhashable)
                decode.unhashable = frozenset()
            return
        if external <= 0:
            if not decode.reason:
                self._stats.count("nothing")
            self._over(identity, decode, "nothing to load")
            return
        decode.stage = Stage.LOADING
        if decode.reason or decode.reference is None:
            self._pending.refused.append(identity)
            return
        self._order(request, decode, decode.reference, block_ids, external)

    def _order(
        self, request: Any, decode: Decode, reference: Reference, block_ids: Sequence[Sequence[int]], external: int
    ) -> None:
        """A request that is computed in this step can no longer be refused: ranks that do not know its producer fail it."""
        peer = key_of(reference)
        meeting = self._courier.peer(reference) if self._courier is not None else None
        try:
            if not isinstance(meeting, Meeting):
                if not decode.in_step:
                    raise BadReferenceError(f"{peer} went away: {meeting}")
            elif peer not in self._announced:
                self._announced.add(peer)
                self._pending.meetings.append(meeting)
            here = tables_of(self._groups, block_ids, decode.tokens)
        except (BadReferenceError, BindError) as error:
            self._say_refused(request, decode, str(error), external)
            self._pending.refused.append(request.request_id)
            return
        decode.loaded = external
        if decode.in_step:
            decode.blocks = block_ids
        start = decode.tokens - external
        self._pending.loads.append(
            Load(
                request.request_id,
                peer,
                reference.lease,
                decode.tokens,
                start,
                reference.tables,
                here,
                decode.in_step,
            )
        )
        self._haste.took(peer, external, decode.in_step)

    def _over(self, identity: str, decode: Decode, note: str) -> None:
        """Nothing more is loaded; the producer may have its blocks back."""
        decode.stage = Stage.OVER
        if decode.reference is not None and self._courier is not None:
            linger_s = LINGER_S if self._is_part(identity, decode) else 0.0
            self._courier.release(identity, decode.reference, note, linger_s)

    def _is_part(self, identity: str, decode: Decode) -> bool:
        """Whether others may come with the same reference: several answers to a prompt, or a prompt that is there twice."""
        return bool(prompt_of(identity)) or decode.sought is not None or self._families[decode.family] > 1

    def _forget(self, identity: str) -> None:
        decode = self._decodes.pop(identity)
        self._unhashable.pop(identity, None)
        self._families[decode.family] -= 1
        if not self._families[decode.family]:
            del self._families[decode.family]

    def _forget_hashes(self, blocks: Iterable[int]) -> None:
        """vLLM hashes what was loaded when it takes the request up again, at any step from here on. What was lost in its step
        it has hashed before, and forgets only where somebody runs with it: not where that was preempted or aborted."""
        found = set(blocks)
        if found and self._evict is not None:
            self._evict(found)

    def orders(self, step: Any) -> Orders:
        """For a step that has been put together."""
        idle = not step.num_scheduled_tokens
        unheard_s, heard = self._heard()
        closing, opened = self._prefills.turn(heard, self._clock(), unheard_s)
        pending, self._pending = self._pending, Pending()
        self._doubts.ordered(step, (load.request for load in pending.loads if load.in_step))
        self._haste.new_step(idle)
        for request in [*islice(self._unchecked.values(), CHECKED_A_STEP)]:
            self._check(request, self._decodes[request.request_id])
        for decode in self._unhashable.values():
            self._forget_hashes(decode.unhashable)
        orders = Orders(
            closing,
            opened,
            self._forgotten(),
            tuple(pending.meetings),
            tuple(pending.loads),
            tuple(pending.refused),
            idle,
        )
        rank = rank_nearby(self._engine)
        if rank is None:
            return orders
        rank.begin(orders)
        return Orders(idle=orders.idle, begun=True)

    def _heard(self) -> tuple[float, Sequence[Renew | Release]]:
        """For how long consumers may have said more than what they have been heard to say, and that."""
        if self._listener is None:
            return 0.0, ()
        unheard_s = time.monotonic() - self._listener.caught_up_at
        return max(0.0, unheard_s), self._listener.take()

    def _forgotten(self) -> tuple[PeerKey, ...]:
        """Producers that ranks may let go of, once nothing is loaded from them: a load may have been ordered just before the
        courier forgot its producer."""
        gone = self._leaving.union(self._courier.forgotten() if self._courier is not None else ()) & self._announced
        if not gone:
            return ()
        used = {
            key_of(decode.reference)
            for decode in self._decodes.values()
            if decode.reference is not None and decode.is_under_way
        }
        self._leaving, gone = gone & used, gone - used
        self._announced -= gone
        for peer in gone:
            self._haste.forget(peer)
        return tuple(gone)

    def results(self, sent: set[str], received: set[str], failed: set[str], report: Report | None) -> set[str]:
        """What all ranks have reported of leases and loads, and what a rank nearby has loaded since; all loads of which vLLM is
        to hear now, so that it runs those that are whole in the step that it puts together next."""
        self._producer.close_all(sent)
        report, rank = report or Report(), rank_nearby(self._engine)
        if rank is not None:
            since, seen = rank.loaded(self._haste.most)
            if since:
                received, report = received | since, report.aggregate(seen)
        for identity, blocks in report.unhashable.items():
            decode = self._decodes.get(identity)
            if decode is not None:
                decode.unhashable |= blocks
                self._unhashable[identity] = decode
        for identity, seconds in report.seconds.items():
            self._learn(identity, seconds, identity in report.anywhere)
        failed = failed | report.failed
        loaded = tokens = in_step = 0
        wire_s = 0.0
        lost: list[Decode] = []
        for identity in received | report.ended:
            self._doubts.over(identity)
            decode = self._decodes.get(identity)
            if decode is None or not decode.is_under_way:
                continue
            abandoned = decode.stage is Stage.ABANDONED
            if identity in failed:
                lost += [decode] if decode.in_step else []
                decode.unhashable = frozenset()
                self._unhashable.pop(identity, None)
                if decode.reference is not None and self._courier is not None:
                    self._courier.doubt(decode.reference)
                    self._haste.forget(key_of(decode.reference))
                if not decode.counted:
                    self._stats.count("failed")
                    if not abandoned:
                        self._count_recomputed(decode.loaded)
            else:
                loaded, tokens, in_step = loaded + 1, tokens + decode.loaded, in_step + decode.in_step
                wire_s += decode.seconds
            self._over(identity, decode, "failed" if identity in failed else "loaded")
            if abandoned:
                self._forget(identity)
        self._forget_hashes(self._doubts.hashed_too_soon(lost))
        self._doubts.settle()
        if loaded:
            self._stats.count("loaded", loaded)
            self._stats.count("tokens", tokens)
            self._stats.count("wire_s", wire_s)
        if in_step:
            self._stats.count("in_step", in_step)
        return received

    def _learn(self, identity: str, seconds: float, anywhere: bool) -> None:
        decode = self._decodes.get(identity)
        if decode is None:
            return
        decode.seconds = max(decode.seconds, seconds)
        if anywhere and decode.reference is not None and decode.loaded:
            self._haste.saw(key_of(decode.reference), decode.loaded, seconds)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> Answer:
        self._finish_decode(request)
        return self._prefills.finished(request, block_ids, self._clock())

    def _finish_decode(self, request: Any) -> None:
        decode = self._decodes.get(identity := request.request_id)
        if decode is None:
            return
        self._check(request, decode)
        if decode.stage is Stage.LOADING:
            decode.stage = Stage.ABANDONED
            return
        if decode.stage is Stage.WAITING:
            if decode.sibling is not None and self._courier is not None:
                sought = decode.sought or self._references.seek_for_nobody(request, decode.sibling)
                if sought is not None:
                    give_back_when_found(sought, identity, self._courier)
            if not decode.counted and not request.abort_immediately:
                self._stats.count("load_aborted")
            self._over(identity, decode, "finished before it was loaded")
        self._forget(identity)

    def reset(self) -> bool:
        """Nothing of what the cache holds now is handed over any more. True once nothing of it can be read and nothing is being
        loaded; steps are made until then, for the sake of what is kept."""
        over, loads = self._prefills.reset(), sum(decode.is_under_way for decode in self._decodes.values())
        if not over or loads:
            ending = len(self._producer)
            logger.info("the cache is not reset yet: %d leases end, %d loads are under way; ask again", ending, loads)
        return over and not loads

    def stats(self) -> FerryStats | None:
        return self._stats.take()

    def close(self) -> None:
        self._closing.set()
        if self._seeking is not None:
            self._seeking.close()
        if self._courier is not None:
            self._courier.close()
        if self._listener is not None:
            self._listener.close()


def _say_what_leases_may_hold(most: float, blocks: int) -> None:
    if most == math.inf:
        return
    level = logging.INFO if most * 2 >= blocks else logging.WARNING
    logger.log(
        level,
        "this engine loads and leases (kv_both): leases may hold %d of its %d blocks, since a request of max_model_len must "
        "fit beside them; for more make it kv_producer or kv_consumer, lower max_model_len, or give it more cache",
        most,
        blocks,
    )


def _in_a_line(reason: str) -> str:
    """Of several mismatches the first: all were logged when the engines met."""
    head, *found = reason.split("\n")
    more = f" (and {len(found) - 1} more: see the line that begins with `nothing can be read from`)" if len(found) > 1 else ""
    return f"{head} {found[0].strip()}{more}" if found else head
