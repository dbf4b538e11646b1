"""Reads by way of staging, as a consumer sees them: the way of a plan, and what of a read is under way, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from kvferry.plan import Tiles
from kvferry.plan.detour import Detour, Key, Piece, Pieces
from kvferry.strategy.gathering import Ask
from kvferry.strategy.mapped import MappedPrepared, MappedRead
from kvferry.strategy.movers import Ticket
from kvferry.strategy.moves import Moves
from kvferry.strategy.sources import Source
from kvferry.transport.contract import Prepared, Read, State

Way = Literal["packed", "staged"]


class Stage(Enum):
    ASKED = "asked"
    READING = "reading"
    CHECKING = "checking"
    SCATTERING = "scattering"


@dataclass(eq=False)
class Flight:
    """A piece under way in one slot here and, if it is packed, in slot `there` of the producer. A `read` may be of several.
    `mapped`: what is copied out of the producer's slot as it is mapped here."""

    piece: Piece
    slot: int
    stage: Stage
    ticket: int = 0
    ask: Ask | None = None
    asked_at: float = 0.0
    tries: int = 1
    there: int = -1
    read: Read | None = None
    after: int = 0
    copies: Ticket | None = None
    mapped: MappedRead | None = None


@dataclass(frozen=True, eq=False)
class Detoured:
    """One way of a plan through staging. `wire` is what the transport prepared of a staged one, `plan` and `digest` are what a
    packed one is asked by; `mapped`: how it is copied out of a ring that is mapped here."""

    way: Way
    peer: str
    detour: Detour
    moves: Moves
    held: Any
    wire: Prepared | None = None
    source: Source | None = None
    plan: bytes = b""
    digest: bytes = b""
    mapped: MappedPrepared | None = None


@dataclass(eq=False)
class DetouredRead:
    """`left`: bytes of staging that pieces will take which have not begun. `polled`: when it was last looked at, counted in
    calls of `poll`. `refused`: why the producer does not gather it. Then it is read by descriptors, if `direct` was
    prepared; `instead` is that read."""

    detoured: Detoured
    tiles: Mapping[Key, Tiles]
    pieces: Pieces
    began: float
    moved_at: float
    room: int
    left: int
    notification: bytes = b""
    flights: list[Flight] = field(default_factory=list)
    ended: float = 0.0
    moved: int = 0
    size: int = 0
    runs: int = 0
    polled: int = 0
    posting_s: float = 0.0
    state: State = State.RUNNING
    error: str = ""
    refused: str = ""
    direct: Prepared | None = None
    instead: Read | None = None

    @property
    def peer(self) -> str:
        return self.detoured.peer

    def fail(self, reason: str) -> None:
        if self.state is State.RUNNING:
            self.state, self.error = State.FAILED, f"peer {self.peer}: {self.detoured.way}: {reason}"


@dataclass(eq=False)
class SharedRead:
    """One load's part of a read that is made for `several`, and over when all of it is: `size` bytes behind those of the loads
    `before` it. `polled`: when the read was last looked at as far as this load has heard. `left`: nobody asks after it any
    more; what others still want goes on."""

    read: DetouredRead
    several: list[SharedRead]
    before: int
    size: int
    polled: int
    left: bool = False

    @property
    def peer(self) -> str:
        return self.read.peer

    @property
    def error(self) -> str:
        return self.read.error

    @property
    def runs(self) -> int:
        """Its part of them by its bytes; all parts together are all of them."""
        first, end, total = self.before, self.before + self.size, max(1, self.read.size)
        return self.read.runs * end // total - self.read.runs * first // total
