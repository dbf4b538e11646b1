"""A load as it crosses: what is asked, what is under way, how it ended, and the connection that it goes over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvferry.plan import Binder, Loading, Tiles
from kvferry.session.consumer import PeerKey
from kvferry.session.meeting import Meeting
from kvferry.session.reference import Lease
from kvferry.transport import Prepared, Read, Telemetry

Tables = Mapping[int, list[int] | int]
Filled = Callable[[], bool]
"""Says whether what was to be filled has been, without waiting for it."""


@dataclass(frozen=True)
class Load:
    """Bring a request's tokens [start, tokens) and its state from a producer's blocks into ours. `in_step`: the engine computes
    with them in the step that it is in, and waits for the load's end before it tells of the step's."""

    request: str
    peer: PeerKey
    lease: Lease
    tokens: int
    start: int
    src: Tables
    dst: Tables
    in_step: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a load ended on this rank; `error` is empty where all arrived and the lease still stood. Then `predicted` is what
    the plan said would move and `moved` what the transport saw; `unhashable` are blocks, by group, that must not become
    findable by their hash. `anywhere`: any thread could have read it, so that a step may wait for another."""

    request: str
    error: str = ""
    tokens: int = 0
    predicted: int = 0
    moved: int = 0
    runs: int = 0
    posting_s: float = 0.0
    wire_s: float = 0.0
    total_s: float = 0.0
    unhashable: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    anywhere: bool = False


@dataclass(eq=False)
class Link:
    """A connection to those ranks of a producer that this one reads: what reads their data and their words, by source of the
    plan; with words the tile of the first. `anywhere`: any thread may read over it. `lost` says why it is no longer used."""

    names: tuple[str, ...]
    data: tuple[Prepared, ...]
    words: tuple[tuple[Mapping[tuple[int, int], Tiles], Prepared], ...]
    anywhere: bool
    lost: str = ""


@dataclass(eq=False)
class Peer:
    """A producer as this rank reads it; without a link until the first load, and after one was lost."""

    meeting: Meeting
    binder: Binder
    link: Link | None = None
    told: bool = False

    @cached_property
    def slots(self) -> int:
        """Words that every one of its ranks has."""
        return min(card.words.groups[0].blocks for card in self.meeting.cards)


@dataclass(eq=False)
class Warming:
    """A read whose only purpose is that those after it find the connection in use."""

    peer: PeerKey
    link: Link
    read: Read
    landing: int


@dataclass(eq=False)
class Crossing:
    """A load under way; without a link until it may depart, with a `filled` while something of it is being filled. Its data has
    arrived when it is `checking`."""

    load: Load
    peer: Peer
    loading: Loading
    started: float
    link: Link | None = None
    filled: Filled | None = None
    reads: list[Read] = field(default_factory=list)
    landings: list[int] = field(default_factory=list)
    seen: list[Telemetry] = field(default_factory=list)
    checking: bool = False
    waits: bool = False
    error: str = ""


def is_lent(crossing: Crossing) -> bool:
    """Whether the engine's own thread looks after it."""
    return crossing.link is not None and crossing.link.anywhere and not crossing.error


def is_one_start(one: PeerKey, other: PeerKey) -> bool:
    """Whether both are the same engine since the same start, by whichever address."""
    return (one.engine, one.incarnation) == (other.engine, other.incarnation)
