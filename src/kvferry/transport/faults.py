"""What can go wrong on the way, as data: scripted read by read for the in-process transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Of = Literal["bytes", "notification"]


@dataclass(frozen=True)
class Drop:
    """Bytes never arrive, so that the read times out; or they do and the notification does not."""

    of: Of = "bytes"


@dataclass(frozen=True)
class Delay:
    """Nothing lands before so many polls and so many seconds of the transport's clock have passed."""

    polls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Duplicate:
    """The bytes land a second time at the next poll, or release, after the first; or the notification is delivered twice."""

    of: Of = "notification"


@dataclass(frozen=True)
class Reorder:
    """Runs land in another order, over so many polls."""

    seed: int = 0
    polls: int = 2


@dataclass(frozen=True)
class Corrupt:
    """One byte of one run arrives flipped; both count from 0 and wrap around."""

    run: int = 0
    byte: int = 0


@dataclass(frozen=True)
class LateLanding:
    """The read fails, and its bytes land all the same, while `release` has been refused so many times."""

    releases: int = 1


@dataclass(frozen=True)
class PeerDeath:
    """The peer dies once so many runs have landed."""

    after_runs: int = 0


Fault = Drop | Delay | Duplicate | Reorder | Corrupt | LateLanding | PeerDeath
