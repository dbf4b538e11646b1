"""The consumer's side of a session, sans I/O: which producers are known, and which leases it keeps alive.

A producer is known by its address, engine and incarnation, so that one that restarted is greeted again. Events come in
as method calls with the time; what is to be sent comes out of `take`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

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
        """Names come from others: what no log could encode is shown escaped."""
        return f"{self.engine} at {self.address}".encode("ascii", "backslashreplace").decode()


@dataclass(frozen=True)
class Greeting:
    """Send `hello` and report the outcome with `known` or `refused`."""

    peer: PeerKey
    hello: Hello


@dataclass(frozen=True)
class Word:
    """A message without an answer."""

    address: str
    message: Renew | Release


@dataclass
class _Peer(Generic[T]):
    found: T | None = None
    reason: str = ""
    retry_at: float = 0.0
    renew_s: float = 0.0
    used_at: float = 0.0
    asking: bool = True

    def due(self, now: float) -> bool:
        return not self.asking and self.found is None and now >= self.retry_at


@dataclass
class _Leases:
    """Leases of one producer, with the requests that hold each."""

    renewed_at: float
    held: dict[Lease, set[str]] = field(default_factory=dict)


class Consumer(Generic[T]):
    """`T` is what the driver makes of a welcome: manifests, plans. Of more than `most` producers those without a lease are
    forgotten, and so is an earlier start of one that is met again."""

    def __init__(self, hello: Hello, retry_s: float = 5.0, renew_s: float = 5.0, most: int = 256) -> None:
        self._hello, self._retry_s, self._renew_s, self._most = hello, retry_s, renew_s, most
        self._peers: dict[PeerKey, _Peer[T]] = {}
        self._leases: dict[PeerKey, _Leases] = {}
        self._greetings: list[Greeting] = []
        self._words: list[Word] = []
        self._forgotten: list[PeerKey] = []

    def due(self, peer: PeerKey, now: float) -> bool:
        """Whether the producer is to be asked: it is not known, nor being asked, nor was it refused a moment ago."""
        known = self._peers.get(peer)
        return known is None or known.due(now)

    def greet(self, peer: PeerKey, now: float) -> None:
        """Ask a producer for its cards, if that is due."""
        known = self._peers.get(peer)
        if known is None:
            self._make_room()
            self._peers[peer] = _Peer(used_at=now)
        elif known.due(now):
            known.asking, known.used_at = True, now
        else:
            known.used_at = now
            return
        self._greetings.append(Greeting(peer, self._hello))

    def known(self, peer: PeerKey, found: T, lease_s: float) -> None:
        """What the driver made of a welcome; leases there are renewed three times in `lease_s` at least."""
        used_at = self._peers[peer].used_at if peer in self._peers else 0.0
        self._peers[peer] = _Peer(found, renew_s=min(self._renew_s, lease_s / 3), used_at=used_at, asking=False)
        for other in self._idle():
            if other.address == peer.address and other != peer:
                self._forget(other)

    def refused(self, peer: PeerKey, reason: str, now: float) -> None:
        """Why nothing can be read from the producer for now; it is asked again after a pause."""
        self._peers[peer] = _Peer(reason=reason, retry_at=now + self._retry_s, used_at=now, asking=False)

    def peer(self, peer: PeerKey, now: float) -> T | str | None:
        """What is known of a producer; the reason if it cannot be read; None while it is being asked, or is to be."""
        known = self._peers.get(peer)
        if known is None or known.asking or known.due(now):
            return None
        return known.found if known.found is not None else known.reason

    def hold(self, request: str, reference: Reference, now: float) -> None:
        """Keep the lease alive until `release`."""
        leases = self._leases.setdefault(key_of(reference), _Leases(now))
        leases.held.setdefault(reference.lease, set()).add(request)

    def release(self, request: str, reference: Reference, note: str) -> None:
        """The request needs its lease no more; the producer hears of it once, when no other request here does."""
        key = key_of(reference)
        leases = self._leases.get(key)
        holders = leases.held.get(reference.lease) if leases is not None else None
        if leases is None or holders is None or request not in holders:
            return
        holders.remove(request)
        if holders:
            return
        del leases.held[reference.lease]
        if not leases.held:
            del self._leases[key]
        reader = f"{self._hello.engine}@{self._hello.incarnation}"[:256]
        self._words.append(Word(key.address, Release(key.incarnation, reference.lease, reader, note[:256])))

    def renew(self, now: float) -> None:
        """Renew what is due; called often."""
        for key, leases in self._leases.items():
            peer = self._peers.get(key)
            if now - leases.renewed_at < (peer.renew_s if peer and peer.renew_s else self._renew_s):
                continue
            leases.renewed_at = now
            every = iter(leases.held)
            while some := tuple(islice(every, MAX_LEASES)):
                self._words.append(Word(key.address, Renew(key.incarnation, some)))

    def take(self) -> tuple[tuple[Greeting, ...], tuple[Word, ...]]:
        out = tuple(self._greetings), tuple(self._words)
        self._greetings, self._words = [], []
        return out

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

    def _forget(self, key: PeerKey) -> None:
        if self._peers.pop(key).found is not None:
            self._forgotten.append(key)


def key_of(reference: Reference) -> PeerKey:
    return PeerKey(reference.address, reference.engine, reference.incarnation)
