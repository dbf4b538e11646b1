"""References of requests that came together: several prompts in one request, or several answers to one prompt.

vLLM answers such a request with the parameters of its first prompt, and gives them to every part at the consumer. So a part
whose prompt they are not of asks the producer for its own, by what was prefilled; that it knows the lease of another part says
that it may.

Nothing tells two requests apart that have the same X-Request-Id, as repeated and hedged ones do. Each of them has a first
prompt, whose reference is given out: it has a lease of its own. Later prompts are only asked for, and may share one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvferry.session import Lease, Reference

_PART: Final = re.compile(r"[-_](?:\d+(?:-[0-9a-f]{8})?|(?<=-)[0-9a-f]{8})\Z")
_ANSWER: Final = re.compile(r"\d+_(?P<prompt>.+)\Z", re.DOTALL)
_PROMPT: Final = re.compile(r"(?P<batch>cmpl-.+)-(?P<place>\d{1,9})-[0-9a-f]{8}\Z", re.DOTALL)


def family_of(request: str) -> str:
    """What vLLM's names for parts of one request have in common: they end in the part's number and in random digits, and begin
    with the number of the answer where there are several."""
    named = prompt_of(request) or request
    found = _PART.search(named, 1)
    return named[: found.start()] if found else named


def prompt_of(request: str) -> str:
    """The same for all answers to one prompt; empty where there is one answer."""
    found = _ANSWER.match(request)
    return found["prompt"] if found else ""


def place_of(request: str) -> tuple[str, int]:
    """The batch of prompts that a completions request is a part of, and its place there. Any other request has one prompt, in
    place 0 of a batch of its own name."""
    named = prompt_of(request) or request
    found = _PROMPT.match(named)
    return (found["batch"], int(found["place"])) if found else (named, 0)


def may_share(request: str, other: str) -> bool:
    """Whether one lease does for two requests with one prompt, of which the other has published it: they are answers to one
    prompt, or the first is a later prompt of such a batch, whose reference is not given out."""
    if prompt_of(request) and prompt_of(request) == prompt_of(other):
        return True
    (batch, place), (its_batch, its_place) = place_of(request), place_of(other)
    return batch == its_batch and its_place < place


@dataclass
class _Family:
    """`standing` are published references with their requests, by digest. `asked`: for whom a lease was found, by the lease
    that the asker knew."""

    standing: dict[str, dict[Lease, tuple[str, Reference]]] = field(default_factory=dict)
    asked: dict[Lease, Lease] = field(default_factory=dict)
    leases: set[Lease] = field(default_factory=set)


class Siblings:
    """What a producer has published, by family, while anything of it stands. Looked up from any thread."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._by_lease: dict[Lease, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def published(self, request: str, reference: Reference) -> None:
        name = family_of(request)
        with self._lock:
            family = self._families.setdefault(name, _Family())
            family.standing.setdefault(reference.digest, {})[reference.lease] = request, reference
            family.leases.add(reference.lease)
            self._by_lease[reference.lease] = name, reference.digest

    def ended(self, lease: Lease) -> None:
        """A family is forgotten when nothing of it stands."""
        with self._lock:
            name, digest = self._by_lease.get(lease, ("", ""))
            family = self._families.get(name)
            if family is None:
                return
            family.asked.pop(lease, None)
            same = family.standing.get(digest, {})
            same.pop(lease, None)
            if not same:
                family.standing.pop(digest, None)
            if not family.standing:
                del self._families[name]
                for one in family.leases:
                    del self._by_lease[one]

    def forget(self) -> None:
        """All have ended."""
        with self._lock:
            self._families.clear()
            self._by_lease.clear()

    def twin(self, request: str, digest: str) -> Reference | None:
        """What was published of the same prompt for a part of the same request: one lease does for both."""
        with self._lock:
            family = self._families.get(family_of(request))
            same = family.standing.get(digest, {}) if family is not None else {}
            return next((reference for other, reference in same.values() if may_share(request, other)), None)

    def find(self, lease: Lease, digest: str) -> Reference | None:
        """The reference of a prompt, for a consumer that knows the lease of another part. Consumers that know different leases
        may have come with different requests: each has one of its own, as long as there are several."""
        with self._lock:
            family = self._families.get(self._by_lease.get(lease, ("", ""))[0])
            same = family.standing.get(digest, {}) if family is not None else {}
            if family is None or not same:
                return None
            mine = (it for it in same if family.asked.get(it) == lease)
            free = (it for it, (request, _) in same.items() if it not in family.asked and place_of(request)[1])
            found = next(mine, None) or next(free, None) or next(reversed(same))
            family.asked.setdefault(found, lease)
            return same[found][1]

    def leases(self, requests: Iterable[str]) -> tuple[Lease, ...]:
        """Those that wait for others of their family, which are among `requests`."""
        with self._lock:
            names = {family_of(request) for request in requests} & self._families.keys()
            return tuple(lease for name in names for same in self._families[name].standing.values() for lease in same)

    def unclaimed(self, request: str) -> tuple[Lease, ...]:
        """Leases that no consumer can know of, if the first prompt of a batch leaves nothing: those of its later prompts,
        unless a request of the same name has given the reference of its first one out."""
        batch, place = place_of(request)
        with self._lock:
            family = self._families.get(family_of(request))
            if family is None or place:
                return ()
            all_of_it = [(it, other) for same in family.standing.values() for it, (other, _) in same.items()]
            of_batch = [(it, *place_of(other)) for it, other in all_of_it if place_of(other)[0] == batch]
            return () if any(not place for _, _, place in of_batch) else tuple(it for it, _, _ in of_batch)
