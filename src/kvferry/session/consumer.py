"""The consumer's side of a session, sans I/O: which producers are known, and which leases it keeps alive.

A producer is known by its address, engine and incarnation, so that one that restarted is greeted again. It is asked at its
address, and whoever answers there answers for every start that was named there: one greeting is under way at an address at a
time, and few to addresses that have never answered, so that dead ones hold up nobody else. An address that let us wait in vain
is left alone for twice that time; one that refused at once may be asked at once for a start that is named there later: who
restarts has an address before anybody can name it. Events come in as method calls with the time; what is to be sent comes out
of `take`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Generic, TypeVar

from kvferry.errors import plain
from kvferry.session.messages import MAX_LEASES, Hello, Release, Renew
from kvferry.session.reference import Lease, Reference

T = TypeVar("T")


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


@dataclass
class _Address:
    """Where producers are asked; `proven` once somebody has answered there. `heard`: when the latest of the greetings began
    that were answered."""

    began: float | None = None
    waiting: bool = False
    proven: bool = False
    reason: str = ""
    retry_at: float = 0.0
    heard: float = -math.inf

    @property
    def busy(self) -> bool:
        return self.waiting or self.began is not None


@dataclass
class _Leases:
    """Leases of one producer, with the requests that hold each. `parting` are those that a request has released: until when
    they are kept for another one, and what the producer hears once no request holds them."""

    renewed_at: float
    held: dict[Lease, set[str]] = field(default_factory=dict)
    parting: dict[Lease, tuple[float, str]] = field(default_factory=dict)


class Consumer(Generic[T]):
    """`T` is what the driver makes of a welcome: manifests, plans. Of more than `most` producers those without a lease are
    forgotten, and so is an earlier start of one that is met again. At most `asking` greetings are under way, a quarter of them
    kept for addresses that have answered before."""

    def __init__(self, hello: Hello, retry_s: float = 5.0, renew_s: float = 5.0, most: int = 256, asking: int = 32) -> None:
        self._hello, self._retry_s, self._renew_s, self._most = hello, retry_s, renew_s, most
        self._reader = f"{hello.engine}@{hello.incarnation}"[:256]
        self._asking, self._unproven = asking, max(1, asking - asking // 4)
        self._peers: dict[PeerKey, _Peer[T]] = {}
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
            known = self._peers[peer] = _Peer(now, used_at=now)
        address = self._addresses.setdefault(peer.address, _Address())
        if now < address.retry_at:
            self._refuse(known, address.reason, now, address.retry_at)
            return
        known.asking, known.since = True, now
        address.waiting = address.waiting or address.began is None

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
        place.proven, place.reason, place.retry_at = True, "", 0.0
        under_way = began is None
        if began is None:
            began, place.began = now if place.began is None else place.began, None
        late, place.heard = began < place.heard, max(began, place.heard)
        here = answer.peer
        if answer.found is not None and not late:
            self.known(here, answer.found, answer.lease_s, began)
        elif here in self._peers and not late:
            self._refuse(self._peers[here], answer.reason, now, now + self._retry_s)
        for peer, known in self._peers.items():
            if peer.address != address or not known.asking:
                continue
            if late or known.since > began:
                place.waiting = place.waiting or under_way
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
        began = now if place.began is None else place.began
        took = now - began
        place.began, place.reason, place.retry_at = None, reason, now + 2 * took
        for peer, known in self._peers.items():
            if peer.address == address and known.asking:
                retry_at = now + self._retry_s if known.since <= began else now
                self._refuse(known, reason, now, max(place.retry_at, retry_at))

    def known(self, peer: PeerKey, found: T, lease_s: float, began: float) -> None:
        """What the driver made of the welcome to a greeting that `began` then, which answers doubts from before; leases there
        are renewed three times in `lease_s` at least."""
        known = self._peers.setdefault(peer, _Peer(0.0))
        known.found, known.reason, known.renew_s = found, "", min(self._renew_s, lease_s / 3)
        known.sure_at, known.asking = max(known.sure_at, began), False
        for other in self._idle():
            if other.address == peer.address and other != peer:
                self._forget(other)

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
        key = key_of(reference)
        leases = self._leases.get(key)
        holders = leases.held.get(reference.lease) if leases is not None else None
        if leases is None or holders is None or request not in holders:
            return
        holders.remove(request)
        leases.parting[reference.lease] = (until, note)
        if not holders and until == -math.inf:
            self._part(key, reference.lease, note)

    def drop(self, request: str, reference: Reference) -> None:
        """The request has nothing to do with the lease: no longer kept alive for it, and left to the requests that it is of."""
        key = key_of(reference)
        leases = self._leases.get(key)
        holders = leases.held.get(reference.lease) if leases is not None else None
        if leases is None or holders is None or request not in holders:
            return
        holders.remove(request)
        if not holders and reference.lease not in leases.parting:
            del leases.held[reference.lease]
        if not leases.held:
            del self._leases[key]

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

    def take(self, now: float) -> tuple[tuple[Greeting, ...], tuple[Word, ...]]:
        """What is to be sent now; greetings of addresses that are proven come first."""
        words, self._words = tuple(self._words), []
        under_way = sum(place.began is not None for place in self._addresses.values())
        unproven = sum(place.began is not None and not place.proven for place in self._addresses.values())
        greetings = []
        waiting = [(address, place) for address, place in self._addresses.items() if place.waiting and place.began is None]
        for address, place in sorted(waiting, key=lambda found: not found[1].proven):
            if under_way >= self._asking or (not place.proven and unproven >= self._unproven):
                continue
            place.waiting, place.began = False, now
            under_way, unproven = under_way + 1, unproven + (not place.proven)
            greetings.append(Greeting(address, self._hello))
        return tuple(greetings), words

    def take_forgotten(self) -> tuple[PeerKey, ...]:
        """Producers that are no longer known: whoever keeps something of them can let it go."""
        out, self._forgotten = tuple(self._forgotten), []
        return out

    def _idle(self) -> list[PeerKey]:
        return [key for key, peer in self._peers.items() if not peer.asking and key not in self._leases]

    def _make_room(self) -> None:
        excess = len(self._peers) + 1 - self._most
        if excess > 0:
            for key in sorted(self._idle(), key=lambda k: self._peers[k].used_at)[:excess]:
                self._forget(key)
        spare = [address for address, place in self._addresses.items() if not place.busy]
        spare.sort(key=lambda address: self._addresses[address].proven)
        for address in spare[: max(0, len(self._addresses) + 1 - self._most)]:
            del self._addresses[address]

    def _forget(self, key: PeerKey) -> None:
        if self._peers.pop(key).found is not None:
            self._forgotten.append(key)


def key_of(reference: Reference) -> PeerKey:
    """The same object for all references of a producer, so that it is found where it is looked up without a comparison."""
    return _key(reference.address, reference.engine, reference.incarnation)


_key = lru_cache(maxsize=1024)(PeerKey)
