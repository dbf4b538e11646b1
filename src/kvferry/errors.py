"""The errors KVFerry raises: one class per thing a reader can do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_ODD: Final = re.compile(r"[^ -~]")


def plain(text: str) -> str:
    """Words of others on one line: whatever could begin a new one, move a cursor or fail to be encoded is shown escaped."""
    return _ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """Like `plain`, but for letters of any script."""
    return text if text.isprintable() else "".join(c if c.isprintable() else plain(c) for c in text)


class KVFerryError(Exception):
    """Base of every error KVFerry raises on purpose. Its text is one line, whoever's names are in it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class DecodeError(KVFerryError):
    """Bytes from a peer or a file that are not a manifest or a plan we accept."""


class ManifestError(KVFerryError):
    """A manifest that contradicts itself: outside its regions, overlapping, not tiling."""


class UnshardableError(KVFerryError):
    """A tensor-parallel or pipeline-parallel size that no engine could run the model with."""


class MismatchError(KVFerryError):
    """Two sides whose manifests cannot be joined by a plan; carries every mismatch found."""

    def __init__(self, mismatches: Sequence[object]) -> None:
        self.mismatches = tuple(mismatches)
        lines = [printable(str(m)) for m in self.mismatches]
        head = "the two sides do not hold the same state"
        count = "1 mismatch" if len(lines) == 1 else f"{len(lines)} mismatches"
        super().__init__(f"{head} ({count}):\n  " + "\n  ".join(lines))

    def __str__(self) -> str:
        return str(self.args[0])


class ProofError(KVFerryError):
    """A plan whose copies and fills do not tile the destination, or that joins unequal meanings."""


class ScatteredError(ProofError):
    """A plan between caches that are kept in such different orders that it falls into more runs than are proved."""


class BindError(KVFerryError):
    """A request whose block tables or token range do not fit the plan."""


class TransportError(KVFerryError):
    """A transport that cannot register, connect, prepare or carry: names the peer and the way out."""


class ModelError(KVFerryError):
    """A model name or config.json from which no cache shapes can be derived."""


class SideError(KVFerryError):
    """A side description (``tp=2,pp=2,block=16``) that cannot be read."""


class MeasureError(KVFerryError):
    """Something that cannot be measured here."""


class UpError(KVFerryError):
    """Engines that cannot be started as asked, or that did not come up."""


class BadReferenceError(KVFerryError):
    """A reference that cannot be used: damaged, stale, or of another request. The consumer recomputes, or fails the request."""


class SessionError(KVFerryError):
    """A session that cannot be set up or used as asked: names the peer, the file or the option, and the way out."""
