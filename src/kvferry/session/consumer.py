"""The consumer's side of a session, sans I/O: which producers are known, and which leases it keeps alive.

A producer is known by its address, engine and incarnation, so that one that restarted is greeted again. It is asked at its
address, and whoever answers there answers for every start that was named there: one greeting is under way at an address at a
time.

    idle ──> named ──> sought ──> reached ──> asked ──> idle
                          └──────────────────────┴──> idle (nobody was reached, or it did not answer)

To seek costs a socket, and is done at many addresses at once. Only what is reached takes one of the few places of those that
are asked, a quarter of which is kept for addresses that have answered before. Addresses that failed are sought after those
that were never tried, of which the newest and the oldest take turns. So the next one that is named is sought within the time
that one is waited for, however many silent ones were named. An address that let us wait in vain is left alone for twice that
time, and for longer each time after that. One that refused at once may be asked at once for a start that is named there
later: who restarts has an address before anybody can name it. Events come in as method calls with the time; what is to be
done comes out of `seek` and `take`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import Final, Generic, TypeVar

from kvferry.errors import plain
from kvferry.session.messages import MAX_LEASES, Hello, Release, Renew
from kvferry.session.reference import Lease, Reference

T = TypeVar("T")

_LONGEST_BACK_OFF: Final = 4
"""An address that never answers is left alone for up to 2 to this power times what it was waited for."""


@dataclass(frozen=True)
class PeerKey:
    """One start of one producer."""

    address: str
    engine: str
    incarnation: str

    def __str__(self) -> str:
        """Names come from others."""
        return plain(f"{self.engine} at {self.address}")


@dataclass(frozen=True)
class Sought:
    """Find out whether a session is spoken at an address, and report it with `reached` or `unanswered`; `first`: it was never
    tried before."""

    address: str
    first: bool


@dataclass(frozen=True)
class Greeting:
    """Send `hello` and report the outcome with `answered` or `unanswered`."""

    address: str
    hello: Hello


@dataclass(frozen=True)
class Answer(Generic[T]):
    """Who answers at an address, and what the driver made of it; without that, why nothing can be read there."""

    peer: PeerKey
    found: T | None
    lease_s: float
    reason: str = ""


@dataclass(frozen=True)
class Word:
    """A message without an answer."""

    address: str
    message: Renew | Release


@dataclass
class _Peer(Generic[T]):
    """`found` outlives a reason: whoever comes back is who it was. A peer that is doubted later than something was sure of it
    is asked whether it is still there.

    One thread asks and another reads what came of it. Nothing but `asking` changes when that begins, so whoever does not see
    it yet sees the peer open; what came of it is there before the peer is no longer open."""

    since: float
    found: T | None = None
    reason: str = ""
    retry_at: float = 0.0
    renew_s: float = 0.0
    used_at: float = 0.0
    asking: bool = True
    doubted_at: float = -math.inf
    sure_at: float = -math.inf

    def open(self, now: float) -> bool:
        """Whether what is known of the peer says nothing of it now: it is being asked, or is to be."""
        return self.asking or self.doubted_at > self.sure_at or (bool(self.reason) and now >= self.retry_at)

    def due(self, now: float) -> bool:
        return not self.asking and self.open(now)


class _Step(Enum):
    IDLE = "idle"
    NAMED = "named"
    SOUGHT = "sought"
    REACHED = "reached"
    ASKED = "asked"


@dataclass
class _Address:
    """Where producers are asked; `proven` once somebody has answered there. `began`: when the step did that is under way.
    `failures`: how often in turn it did not answer. `heard`: when the latest of the greetings began that were answered."""

    step: _Step = _Step.IDLE
    began: float = 0.0
    proven: bool = False
    failures: int = 0
    reason: str = ""
    retry_at: float = 0.0
    heard: float = -math.inf


@dataclass
class _Leases:
    """Leases of one producer, with the requests that hold each. `parting` are those that a request has released: until when
    they are kept for another one, and what the producer hears once no request holds them."""

    renewed_at: float
    held: dict[Lease, set[str]] = field(default_factory=dict)
    parting: dict[Lease, tuple[float, str]] = field(default_factory=dict)


class Consumer(Generic[T]):
    """`T` is what the driver makes of a welcome: manifests, plans. Of more than `most` producers those without a lease are
    forgotten, and so is an earlier start of one that is met again. At most `seeking` addresses are sought at a time. At most
    `asking` greetings are under way, a quarter of them kept for addresses that have answered before."""

    def __init__(
        self,
        hello: Hello,
        retry_s: float = 5.0,
        renew_s: float = 5.0,
        most: int = 256,
        asking: int = 32,
        seeking: int = 512,
    ) -> None:
        self._hello, self._retry_s, self._renew_s, self._most = hello, retry_s, renew_s, most
        self._reader = f"{hello.engine}@{hello.incarnation}"[:256]
        self._asking, self._unproven, self._seeking = asking, max(1, asking - asking // 4), seeking
        self._peers: dict[PeerKey, _Peer[T]] = {}
        self._at: dict[str, dict[PeerKey, None]] = {}
        self._addresses: dict[str, _Address] = {}
        self._leases: dict[PeerKey, _Leases] = {}
        self._words: list[Word] = []
        self._forgotten: list[PeerKey] = []

    def due(self, peer: PeerKey, now: float) -> bool:
        """Whether the producer is to be asked: it is not known, nor being asked, nor was it refused a moment ago."""
        known = self._peers.get(peer)
        return known is None or known.due(now)

    def greet(self, peer: PeerKey, now: float) -> None:
        """Ask a producer for its cards, if that is due and its address may be asked."""
        known = self._peers.get(peer)
        if known is not None:
            known.used_at = now
            if not known.due(now):
                return
        else:
            self._make_room()
            known = self._know(peer, _Peer(now, used_at=now))
        address = self._addresses.setdefault(peer.address, _Address())
        if now < address.retry_at:
            self._refuse(known, address.reason, now, address.retry_at)
            return
        known.asking, known.since = True, now
        if address.step is _Step.IDLE:
            address.step = _Step.NAMED

    def doubt(self, peer: PeerKey, now: float) -> None:
        """Something failed that was read from the producer: ask whether it is still there before the next load, again if it is
        being asked already. Any thread may say so."""
        known = self._peers.get(peer)
        if known is not None and known.found is not None:
            known.doubted_at = now

    def found(self, peer: PeerKey) -> T | None:
        """What was made of a producer's welcome, whether or not it can be read at the moment; any thread may ask."""
        known = self._peers.get(peer)
        return known.found if known is not None else None

    def answered(self, address: str, answer: Answer[T], now: float, began: float | None = None) -> None:
        """What came of a greeting, of the one that is under way there unless it says when it `began`. Others that were named
        at the address are gone, but for those named since it was sent, who may have come there in the meantime. What was sent
        before another that was answered says nothing any more. Whoever is left to be asked for then, is."""
        place = self._addresses.setdefault(address, _Address())
        place.proven, place.failures, place.reason, place.retry_at = True, 0, "", 0.0
        under_way = began is None
        if began is None:
            began, place.step = place.began if place.step is _Step.ASKED else now, _Step.IDLE
        late, place.heard = began < place.heard, max(began, place.heard)
        here = answer.peer
        if answer.found is not None and not late:
            self.known(here, answer.found, answer.lease_s, began)
        elif here in self._peers and not late:
            self._refuse(self._peers[here], answer.reason, now, now + self._retry_s)
        for peer, known in self._named(address):
            if not known.asking:
                continue
            if late or known.since > began:
                place.step = _Step.NAMED if under_way else place.step
                continue
            gone = (
                f"{address} is {here.engine} since its start {here.incarnation}; "
                f"the reference is of {peer.engine}, start {peer.incarnation}: it is gone"
            )
            self._refuse(known, plain(gone), now, now + self._retry_s)

    def unanswered(self, address: str, reason: str, now: float) -> None:
        """A greeting came to nothing, for everybody who was named at the address. Those named since it was sent may have come
        there in the meantime, and are asked for as soon as the address may be."""
        place = self._addresses.setdefault(address, _Address())
        began = place.began if place.step in (_Step.SOUGHT, _Step.REACHED, _Step.ASKED) else now
        place.failures += 1
        took = (now - began) * 2 ** (1 if place.proven else min(place.failures, _LONGEST_BACK_OFF))
        place.step, place.reason, place.retry_at = _Step.IDLE, reason, now + took
        for _, known in self._named(address):
            if known.asking:
                retry_at = now + self._retry_s if known.since <= began else now
                self._refuse(known, reason, now, max(place.retry_at, retry_at))

    def known(self, peer: PeerKey, found: T, lease_s: float, began: float) -> None:
        """What the driver made of the welcome to a greeting that `began` then, which answers doubts from before; leases there
        are renewed three times in `lease_s` at least."""
        known = self._peers.get(peer) or self._know(peer, _Peer(0.0))
        known.found, known.reason, known.renew_s = found, "", min(self._renew_s, lease_s / 3)
        known.sure_at, known.asking = max(known.sure_at, began), False
        for other, _ in self._named(peer.address):
            if other != peer and self._is_idle(other):
                self._forget(other)

    def _know(self, peer: PeerKey, known: _Peer[T]) -> _Peer[T]:
        self._peers[peer] = known
        self._at.setdefault(peer.address, {})[peer] = None
        return known

    def _named(self, address: str) -> list[tuple[PeerKey, _Peer[T]]]:
        """All starts that are known of producers there."""
        return [(peer, self._peers[peer]) for peer in self._at.get(address, ())]

    def _refuse(self, known: _Peer[T], reason: str, now: float, retry_at: float) -> None:
        known.reason, known.retry_at, known.sure_at, known.asking = reason, retry_at, now, False

    def peer(self, peer: PeerKey, now: float) -> T | str | None:
        """What is known of a producer; the reason if it cannot be read; None while it is being asked, or is to be."""
        known = self._peers.get(peer)
        if known is None or known.open(now):
            return None
        return known.reason or known.found

    def hold(self, request: str, reference: Reference, now: float) -> None:
        """Keep the lease alive until `release`."""
        key, lease = key_of(reference), reference.lease
        leases = self._leases.get(key)
        if leases is None:
            leases = self._leases[key] = _Leases(now)
        leases.held.setdefault(lease, set()).add(request)

    def release(self, request: str, reference: Reference, note: str, until: float = -math.inf) -> None:
        """The request needs its lease no more; the producer hears of it once, when no other request here does. Another may
        still come for the lease `until` then."""
        leases = self._leave(request, reference)
        if leases is None:
            return
        leases.parting[reference.lease] = (until, note)
        if not leases.held[reference.lease] and until == -math.inf:
            self._part(key_of(reference), reference.lease, note)

    def drop(self, request: str, reference: Reference) -> None:
        """The request has nothing to do with the lease: no longer kept alive for it, and left to the requests that it is of."""
        leases = self._leave(request, reference)
        if leases is None:
            return
        if not leases.held[reference.lease] and reference.lease not in leases.parting:
            del leases.held[reference.lease]
        if not leases.held:
            del self._leases[key_of(reference)]

    def _leave(self, request: str, reference: Reference) -> _Leases | None:
        """The leases that a request was among the holders of, and is no more; None if it was not."""
        leases = self._leases.get(key_of(reference))
        holders = leases.held.get(reference.lease) if leases is not None else None
        if leases is None or holders is None or request not in holders:
            return None
        holders.remove(request)
        return leases

    def _part(self, key: PeerKey, lease: Lease, note: str) -> None:
        leases = self._leases[key]
        del leases.held[lease]
        leases.parting.pop(lease, None)
        if not leases.held:
            del self._leases[key]
        self._words.append(Word(key.address, Release(key.incarnation, lease, self._reader, note[:256])))

    def part(self, now: float) -> None:
        """Say of leases that nobody came for that they are over; called often."""
        for key, leases in list(self._leases.items()):
            for lease, (until, note) in list(leases.parting.items()):
                if until <= now and not leases.held[lease]:
                    self._part(key, lease, note)

    def renew(self, now: float) -> None:
        """Renew what is due; called often. From who was refused and never met nothing will be loaded."""
        for key, leases in self._leases.items():
            peer = self._peers.get(key)
            if peer is not None and peer.reason and peer.found is None:
                continue
            if now - leases.renewed_at < (peer.renew_s if peer and peer.renew_s else self._renew_s):
                continue
            leases.renewed_at = now
            every = iter(leases.held)
            while some := tuple(islice(every, MAX_LEASES)):
                self._words.append(Word(key.address, Renew(key.incarnation, some)))

    def seek(self, now: float) -> tuple[Sought, ...]:
        """Which addresses are to be sought now. Those that have answered come first, then those that were never tried."""
        room = self._seeking - sum(place.step is _Step.SOUGHT for place in self._addresses.values())
        named = [(address, place) for address, place in self._addresses.items() if place.step is _Step.NAMED]
        if not named or room <= 0:
            return ()
        proven = [found for found in named if found[1].proven]
        fresh = deque(found for found in named if not found[1].proven and not found[1].failures)
        failed = [found for found in named if not found[1].proven and found[1].failures]
        turns = [fresh.pop() if turn % 2 else fresh.popleft() for turn in range(len(fresh))]
        out = [*proven, *turns, *sorted(failed, key=lambda found: found[1].failures)][:room]
        for _, place in out:
            place.step, place.began = _Step.SOUGHT, now
        return tuple(Sought(address, not place.proven and not place.failures) for address, place in out)

    def reached(self, address: str) -> None:
        """A session is spoken there."""
        place = self._addresses.get(address)
        if place is not None and place.step is _Step.SOUGHT:
            place.step = _Step.REACHED

    def take(self, now: float) -> tuple[tuple[Greeting, ...], tuple[Word, ...]]:
        """What is to be sent now; greetings of addresses that are proven come first."""
        words, self._words = tuple(self._words), []
        asked = [place for place in self._addresses.values() if place.step is _Step.ASKED]
        under_way, unproven = len(asked), sum(not place.proven for place in asked)
        greetings = []
        reached = [(address, place) for address, place in self._addresses.items() if place.step is _Step.REACHED]
        for address, place in sorted(reached, key=lambda found: not found[1].proven):
            if under_way >= self._asking or (not place.proven and unproven >= self._unproven):
                continue
            place.step, place.began = _Step.ASKED, now
            under_way, unproven = under_way + 1, unproven + (not place.proven)
            greetings.append(Greeting(address, self._hello))
        return tuple(greetings), words

    def take_forgotten(self) -> tuple[PeerKey, ...]:
        """Producers that are no longer known: whoever keeps something of them can let it go."""
        out, self._forgotten = tuple(self._forgotten), []
        return out

    def _idle(self) -> list[PeerKey]:
        return [key for key, peer in self._peers.items() if not peer.asking and key not in self._leases]

    def _is_idle(self, key: PeerKey) -> bool:
        return not self._peers[key].asking and key not in self._leases

    def _make_room(self) -> None:
        excess = len(self._peers) + 1 - self._most
        if excess > 0:
            for key in sorted(self._idle(), key=lambda k: self._peers[k].used_at)[:excess]:
                self._forget(key)
        excess = len(self._addresses) + 1 - self._most
        spare = [] if excess <= 0 else [address for address, place in self._addresses.items() if place.step is _Step.IDLE]
        spare.sort(key=lambda address: self._addresses[address].proven)
        for address in spare[: max(0, excess)]:
            del self._addresses[address]

    def _forget(self, key: PeerKey) -> None:
        del self._at[key.address][key]
        if not self._at[key.address]:
            del self._at[key.address]
        if self._peers.pop(key).found is not None:
            self._forgotten.append(key)


def key_of(reference: Reference) -> PeerKey:
    """The same object for all references of a producer, so that it is found where it is looked up without a comparison."""
    return _key(reference.address, reference.engine, reference.incarnation)


_key = lru_cache(maxsize=1024)(PeerKey)
