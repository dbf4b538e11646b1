"""References of requests that came together: several prompts in one request, or several answers to one prompt.

vLLM answers such a request with the parameters of one of its parts, and gives them to every part at the consumer. So a part
whose prompt they are not of asks the producer for its own, by what was prefilled; that it knows the lease of another part says
that it may.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvferry.session import Lease, Reference

_PART: Final = re.compile(r"[-_](?:\d+(?:-[0-9a-f]{8})?|(?<=-)[0-9a-f]{8})\Z")
_ANSWER: Final = re.compile(r"\d+_(?P<prompt>.+)\Z", re.DOTALL)


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


@dataclass
class _Family:
    """`standing` by digest; `awaited` are parts that were still being prefilled when one was published."""

    standing: dict[str, Reference]
    awaited: set[str]
    leases: set[Lease]


class Siblings:
    """What a producer has published, by family, while anything of it stands. Looked up from any thread."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._by_lease: dict[Lease, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def published(self, reference: Reference, awaited: Iterable[str]) -> None:
        name = family_of(reference.request)
        with self._lock:
            family = self._families.setdefault(name, _Family({}, set(), set()))
            family.standing[reference.digest] = reference
            family.awaited.update(awaited)
            family.leases.add(reference.lease)
            self._by_lease[reference.lease] = name, reference.digest

    def ended(self, lease: Lease) -> None:
        """A family is forgotten when nothing of it stands."""
        with self._lock:
            name, digest = self._by_lease.get(lease, ("", ""))
            family = self._families.get(name)
            if family is None:
                return
            found = family.standing.get(digest)
            if found is not None and found.lease == lease:
                del family.standing[digest]
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
            found = family.standing.get(digest) if family is not None else None
            if family is None or found is None:
                return None
            prompt = prompt_of(request)
            same = request in family.awaited or (prompt and prompt == prompt_of(found.request))
            return found if same else None

    def find(self, lease: Lease, digest: str) -> Reference | None:
        """The reference of a prompt, for whoever knows the lease of another part."""
        with self._lock:
            family = self._families.get(self._by_lease.get(lease, ("", ""))[0])
            return family.standing.get(digest) if family is not None else None

    def leases(self, requests: Iterable[str]) -> tuple[Lease, ...]:
        """Those that wait for others of their family, which are among `requests`."""
        with self._lock:
            names = {family_of(request) for request in requests} & self._families.keys()
            return tuple(it.lease for name in names for it in self._families[name].standing.values())
