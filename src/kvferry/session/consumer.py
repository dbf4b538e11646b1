"""The consumer's side of a session, sans I/O: which producers are known, and which leases it keeps alive.

A producer is known by its address, engine and incarnation, so that one that restarted is greeted again. Events come in
as method calls with the time; what is to be sent comes out of `take`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.session.messages import Hello, Release, Renew
from kvferry.session.reference import Lease, Reference

T = TypeVar("T")


@dataclass(frozen=True)
class PeerKey:
    """One start of one producer."""

    address: str
    engine: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.engine} at {self.address}"


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
    asking: bool = True


@dataclass
class _Leases:
    renewed_at: float
    held: dict[str, Lease] = field(default_factory=dict)


class Consumer(Generic[T]):
    """`T` is what the driver makes of a welcome: manifests, plans."""

    def __init__(self, hello: Hello, retry_s: float = 5.0, renew_s: float = 5.0) -> None:
        self._hello, self._retry_s, self._renew_s = hello, retry_s, renew_s
        self._peers: dict[PeerKey, _Peer[T]] = {}
        self._leases: dict[PeerKey, _Leases] = {}
        self._greetings: list[Greeting] = []
        self._words: list[Word] = []

    def greet(self, peer: PeerKey, now: float) -> None:
        """Ask a producer for its cards, unless they are known, being asked for, or were refused a moment ago."""
        known = self._peers.get(peer)
        if known is not None and (known.asking or known.found is not None or now < known.retry_at):
            return
        if known is None:
            self._peers[peer] = _Peer()
        else:
            known.asking = True
        self._greetings.append(Greeting(peer, self._hello))

    def known(self, peer: PeerKey, found: T, lease_s: float) -> None:
        """What the driver made of a welcome; leases there are renewed three times in `lease_s` at least."""
        self._peers[peer] = _Peer(found, renew_s=min(self._renew_s, lease_s / 3), asking=False)

    def refused(self, peer: PeerKey, reason: str, now: float) -> None:
        """Why nothing can be read from the producer for now; it is asked again after a pause."""
        self._peers[peer] = _Peer(reason=reason, retry_at=now + self._retry_s, asking=False)

    def peer(self, peer: PeerKey) -> T | str | None:
        """What is known of a producer; the reason if it cannot be read; None while it is being asked."""
        known = self._peers.get(peer)
        if known is None or known.asking:
            return None
        return known.found if known.found is not None else known.reason

    def stale(self, peer: PeerKey, now: float) -> bool:
        """Whether the reason against a producer is old enough to ask it again."""
        known = self._peers.get(peer)
        return known is not None and known.found is None and not known.asking and now >= known.retry_at

    def hold(self, request: str, reference: Reference, now: float) -> None:
        """Keep the lease alive until `release`."""
        self._leases.setdefault(key_of(reference), _Leases(now)).held[request] = reference.lease

    def release(self, request: str, reference: Reference, note: str) -> None:
        key = key_of(reference)
        leases = self._leases.get(key)
        if leases is not None and leases.held.pop(request, None) is not None and not leases.held:
            del self._leases[key]
        reader = f"{self._hello.engine}@{self._hello.incarnation}"
        self._words.append(Word(key.address, Release(key.incarnation, reference.lease, reader, note[:256])))

    def renew(self, now: float) -> None:
        """Renew what is due; called often."""
        for key, leases in self._leases.items():
            peer = self._peers.get(key)
            if now - leases.renewed_at >= (peer.renew_s if peer and peer.renew_s else self._renew_s):
                leases.renewed_at = now
                self._words.append(Word(key.address, Renew(key.incarnation, tuple(leases.held.values())[: 1 << 14])))

    def take(self) -> tuple[tuple[Greeting, ...], tuple[Word, ...]]:
        out = tuple(self._greetings), tuple(self._words)
        self._greetings, self._words = [], []
        return out


def key_of(reference: Reference) -> PeerKey:
    return PeerKey(reference.address, reference.engine, reference.incarnation)
