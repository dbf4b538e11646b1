"""The producer's leases, sans I/O: who may still read which request's blocks, and when they are given up.

    open ──> published ──> closing ──> closed (the slot is free again)
      └──────────────────────┘ a request that is aborted, or under way at a reset, closes without having been published

A slot's word goes live on every rank when its lease opens, before any reference can name it. It is dead on every rank before
a block is freed: the engine frees only once `closed` was said of every rank. Times are the caller's.

Published leases hold at most `most_blocks` blocks. An engine that also loads sets it such that a request of any length fits
beside them: two such engines can then never wait for each other's leases.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvferry.errors import SessionError
from kvferry.session.messages import Release, Renew
from kvferry.session.reference import MAX_GENERATION, Lease


class Ending(Enum):
    """Why a lease ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"
    RESET = "reset"


@dataclass(frozen=True)
class Closing:
    """A word to kill on every rank; after that the engine frees the blocks of `request`, unless it was aborted: then they
    were never kept for anybody."""

    request: str
    lease: Lease
    ending: Ending


class FullError(SessionError):
    """Published leases hold as many blocks as they may; the request is not handed over."""


@dataclass
class _Held:
    """`since` is when the lease was published, `last` when it ends however often it is renewed; it keeps `blocks`."""

    request: str
    lease: Lease
    deadline: float | None = None
    since: float = math.inf
    last: float = math.inf
    blocks: frozenset[int] = frozenset()
    closing: bool = False


class Producer:
    """Leases of one start of one engine. A lease ends `lease_s` after the last word of its consumer, and `most_s` after it was
    published whatever is said. Published leases hold `most_blocks` blocks at most. Generations are random: who knows one can
    end its lease, and no other."""

    def __init__(
        self, incarnation: str, slots: int, lease_s: float, most_s: float = math.inf, most_blocks: float = math.inf
    ) -> None:
        self.incarnation, self.lease_s, self.most_s, self.most_blocks = incarnation, lease_s, most_s, most_blocks
        self._users: Counter[int] = Counter()
        self._free = deque(range(slots))
        self._held: dict[str, _Held] = {}
        self._by_slot: dict[int, _Held] = {}
        self._opened: list[_Held] = []
        self._closing: list[Closing] = []

    def __len__(self) -> int:
        return len(self._held)

    def open(self, request: str) -> Lease | None:
        """A lease for a request that is about to be prefilled; None while all slots are taken, or while an earlier lease of
        the request is closing."""
        known = self._held.get(request)
        if known is not None:
            return None if known.closing else known.lease
        if not self._free:
            return None
        held = _Held(request, Lease(self._free.popleft(), 1 + secrets.randbelow(MAX_GENERATION)))
        self._held[request] = self._by_slot[held.lease.slot] = held
        self._opened.append(held)
        return held.lease

    @property
    def blocks(self) -> int:
        """How many blocks published leases hold, where they are bounded; leases with one prefix share its blocks."""
        return len(self._users)

    def publish(self, request: str, now: float, blocks: Iterable[int] = ()) -> Lease:
        """The request's blocks may be read from now on, until it is released or its time is up. Raises FullError if leases
        would then hold more blocks than they may."""
        held = self._held.get(request)
        if held is None or held.closing:
            raise SessionError(f"request {request} has no open lease: none was free, or the cache was reset since it began")
        if self.most_blocks < math.inf:
            self._keep(held, frozenset(blocks), now)
        held.since, held.last = now, now + self.most_s
        held.deadline = min(now + self.lease_s, held.last)
        return held.lease

    def _keep(self, held: _Held, blocks: frozenset[int], now: float) -> None:
        more = len(blocks.difference(self._users))
        if self.blocks + more > self.most_blocks:
            raise FullError(f"{self._occupied(now)}; {more} more would leave too few for the engine's own requests")
        held.blocks = blocks
        self._users.update(blocks)

    def _occupied(self, now: float) -> str:
        """What holds blocks, for the log."""
        published = [held for held in self._held.values() if held.deadline is not None]
        holding = f"leases hold {self.blocks} of at most {self.most_blocks:g} blocks"
        if not published:
            return holding
        oldest = min(published, key=lambda held: held.since)
        return f"{len(published)} {holding}, the oldest that of request {oldest.request} for {now - oldest.since:.1f} s"

    def abort(self, request: str) -> None:
        """A request that ends unpublished: its blocks are the engine's at once, and so is its slot."""
        held = self._held.get(request)
        if held is not None and held.deadline is None and not held.closing:
            self._close(held, Ending.ABORTED)
            self.closed(request)

    def reset(self) -> bool:
        """Nothing that was computed until now is handed over any more: published leases end, and open ones are gone at once,
        since nobody knows them; a request that is computed anew opens another. Whether nothing of it can be read any more:
        that is so once every rank has killed the words."""
        for held in list(self._held.values()):
            self.abort(held.request)
            if not held.closing:
                self._close(held, Ending.RESET)
        return not self._held

    def receive(self, message: Renew | Release, now: float) -> None:
        """A consumer's word on its leases; what names another start, or a lease that has ended, changes nothing."""
        if message.incarnation != self.incarnation:
            return
        if isinstance(message, Release):
            held = self._live(message.lease)
            if held is not None:
                self._close(held, Ending.RELEASED)
            return
        for lease in message.leases:
            held = self._live(lease)
            if held is not None:
                held.deadline = min(now + self.lease_s, held.last)

    def stands(self, incarnation: str, lease: Lease) -> bool:
        """Whether a word on the lease would change anything; any thread may ask."""
        return incarnation == self.incarnation and self._live(lease) is not None

    def _live(self, lease: Lease) -> _Held | None:
        held = self._by_slot.get(lease.slot)
        if held is None or held.lease != lease or held.closing or held.deadline is None:
            return None
        return held

    def expire(self, now: float) -> None:
        for held in list(self._held.values()):
            if held.deadline is not None and held.deadline <= now and not held.closing:
                self._close(held, Ending.EXPIRED)

    def _close(self, held: _Held, ending: Ending) -> None:
        held.closing = True
        self._closing.append(Closing(held.request, held.lease, ending))

    def take_opened(self) -> tuple[Lease, ...]:
        """Leases whose words must go live on every rank, in this order with `take_closing`: closings first. One that closes
        before it was taken never goes live."""
        out, self._opened = tuple(held.lease for held in self._opened if not held.closing), []
        return out

    def take_closing(self) -> tuple[Closing, ...]:
        out, self._closing = tuple(self._closing), []
        return out

    def closed(self, request: str) -> None:
        """Every rank has killed the word; of a lease that is not closing this says nothing."""
        held = self._held.get(request)
        if held is not None and held.closing:
            del self._held[request], self._by_slot[held.lease.slot]
            self._free.append(held.lease.slot)
            self._users.subtract(held.blocks)
            for block in held.blocks:
                if not self._users[block]:
                    del self._users[block]

    def close_all(self, requests: Iterable[str]) -> None:
        for request in requests:
            self.closed(request)
