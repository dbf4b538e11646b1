"""Memory that scattered bytes pass through: a ring of slots to send from, one to land in, and words that say what is in a slot.

The two rings have equal slots and share a budget that is never exceeded; an end that only sends, or only lands, has one ring
and all of the budget in it. They lie on the device or in host memory. The words always lie in host memory: a slot's word is
the ticket of what was gathered into it, from when that is complete until the slot is given to something else. Whoever reads a
slot reads the board of words before, to find its ticket, and again after.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvferry.errors import TransportError
from kvferry.manifest.schema import FULL, Address, Group, Identity, Index, Region, StatePaged
from kvferry.plan import Plan, Tiles
from kvferry.plan.schema import Edge, Grain, Lane, Need, Run, Side
from kvferry.strategy.mapped import Tokens
from kvferry.strategy.shared import SharedBytes
from kvferry.transport.contract import Storage

logger = logging.getLogger("kvferry.strategy")

PAGE: Final = 1 << 14
"""Slots are a multiple of it."""
_PAGES: Final = 128
"""Slots are read by pages, those that follow each other as one descriptor: by 128 to 255 in the shorter slot."""
LEAST: Final = 4 * PAGE
BUDGET: Final = 256 << 20
_MOST_SLOTS: Final = 512
_WORD: Final = 8
_NOTE: Final = _MOST_SLOTS * _WORD
_NOTES: Final = 512
"""Producers whose boards there is room for: twice as many as a session knows, since one that ended idle is known for long."""

Words = npt.NDArray[np.int64]
Memory = Literal["dram", "vram"]
Rings = Literal["both", "sending", "landing"]
"""Which rings an end has."""
SECRET: Final = 16
Secret = Annotated[bytes, Meta(min_length=SECRET, max_length=SECRET)]


@dataclass(frozen=True)
class Cut:
    """How a ring is cut, and what passes through it: a piece is gathered while others are on the wire, so that there are
    `slots` of them at least; but each is asked for, read and checked by itself, which takes as long as `shortest` bytes do.
    A slot is no longer than `longest`."""

    shortest: int
    longest: int
    slots: int


HOST_CUT: Final = Cut(4 << 20, 8 << 20, 8)
PINNED_CUT: Final = Cut(8 << 20, 64 << 20, 4)
DEVICE_CUT: Final = Cut(1 << 30, 1 << 30, 4)
"""On an H200, in engines that decode meanwhile, a piece took its consumer's thread a millisecond or more, its producer's a
quarter of one, and the device 0.2 ms for 256 MiB: a few calls, each of which waits for the interpreter, and few bytes."""


class Offer(Struct, frozen=True, array_like=True):
    """What consumers must know of a producer's ring. Who knows the secret could read all that is gathered here anyway.
    `tokens` open the ring and the board, where they can be mapped."""

    ring: Address
    memory: Memory
    device: Index
    slot: Annotated[int, Meta(ge=PAGE, multiple_of=PAGE, le=1 << 40)]
    slots: Annotated[int, Meta(ge=1, le=_MOST_SLOTS)]
    board: Address
    secret: Secret
    tokens: Tokens = ()


@dataclass(frozen=True)
class Sizes:
    """Bytes of a slot, and how many the ring to send from has and the ring to land in; one that is not there has none."""

    slot: int
    sending: int
    landing: int

    @property
    def bytes(self) -> int:
        return self.slot * (self.sending + self.landing)


@dataclass(frozen=True, eq=False)
class Staging:
    """The rings in one storage, the ring to send from first; `keep` is whatever owns the memory, `shared` what others map it
    by, if it lies in host memory that they can."""

    storage: Storage
    sizes: Sizes
    keep: Any = None
    cut: Cut = HOST_CUT
    shared: SharedBytes | None = None

    @property
    def slot(self) -> int:
        return self.sizes.slot

    @property
    def sending(self) -> Storage:
        return self._ring(0, self.sizes.sending)

    @property
    def landing(self) -> Storage:
        return self._ring(self.sizes.sending, self.sizes.landing)

    def _ring(self, first: int, slots: int) -> Storage:
        of = self.storage
        return Storage(of.address + first * self.slot, slots * self.slot, of.memory, of.device)


def sized(budget: int, cut: Cut = HOST_CUT, rings: Rings = "both") -> Sizes:
    """Rings that together stay within a budget: equal ones, or the one that there is."""
    if budget < LEAST:
        raise TransportError(f"{budget:,} bytes of staging are too few: give {LEAST:,} at least")
    ring = budget // 2 if rings == "both" else budget
    slot = _round(ring // min(max(cut.slots, -(-ring // cut.longest)), _MOST_SLOTS, ring // PAGE))
    slots = min(ring // slot, _MOST_SLOTS)
    return Sizes(slot, slots if rings != "landing" else 0, slots if rings != "sending" else 0)


def _round(length: int) -> int:
    """Down to a multiple of a power of two, by a thirtieth at most: slots of any two ends then have long pages in common."""
    unit = max(PAGE, 1 << max(0, length.bit_length() - 6))
    return length // unit * unit


def host_staging(budget: int = BUDGET, rings: Rings = "both", mappable: bool = True) -> Staging:
    """A ring to send from lies where others can map it, unless that is not wanted or there is no room."""
    sizes = sized(budget, rings=rings)
    shared = _shared(sizes.bytes + PAGE) if mappable and sizes.sending else None
    memory = np.empty(sizes.bytes + PAGE, np.uint8) if shared is None else shared.bytes
    memory.fill(0)  # Pages that nobody has touched yet would cost the first loads more than their bytes.
    address = int(memory.ctypes.data)
    return Staging(Storage(address + -address % PAGE, sizes.bytes), sizes, memory, shared=shared)


def _shared(length: int) -> SharedBytes | None:
    try:
        return SharedBytes(length)
    except TransportError as error:
        logger.info("what is gathered here cannot be mapped by others (%s): it is read over the transport", error)
        return None


class Slots:
    """Which slots of a ring are free. One whose bytes may still be written to is kept until that is over. What became free last
    is taken first: it is the likeliest to be in a processor's cache."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        self._free.append(slot)


class Boards:
    """The words of this end's slots, and notes of others' words; where others can map them, if that is wanted."""

    def __init__(self, slots: int, mappable: bool = False) -> None:
        count = _MOST_SLOTS * (1 + _NOTES)
        self.shared = _shared(count * _WORD) if mappable else None
        self._memory: Words = np.zeros(count, np.int64) if self.shared is None else self.shared.bytes.view(np.int64)
        self.words = self._memory[:slots]
        self._notes = deque(range(_NOTES))

    @property
    def board(self) -> Storage:
        """The words alone."""
        return Storage(self.storage.address, self.words.nbytes)

    @property
    def storage(self) -> Storage:
        return Storage(int(self._memory.ctypes.data), self._memory.nbytes)

    @property
    def notes(self) -> Region:
        return Region("notes", _NOTES * _NOTE, self.storage.address + _NOTE)

    def take_note(self) -> int:
        if not self._notes:
            raise TransportError(f"{_NOTES} producers with staging are connected already")
        return self._notes.popleft()

    def give_note(self, note: int) -> None:
        self._notes.append(note)

    def noted(self, note: int, slots: int) -> Words:
        words: Words = self._memory[(1 + note) * _MOST_SLOTS :][:slots].copy()
        return words


def page_of(offer: Offer, own_slot: int) -> int:
    """Bytes of a page, which slots of either ring are a multiple of."""
    page = gcd(offer.slot, own_slot)
    while page % (2 * PAGE) == 0 and page * _PAGES > min(offer.slot, own_slot):
        page //= 2
    return page


def ring_plan(offer: Offer, staging: Staging) -> Plan:
    """Pages of a producer's ring into pages of the ring to land in."""
    landing, page = staging.landing, page_of(offer, staging.slot)
    there = ring_of(offer)
    here = Region("landing", landing.length, landing.address, landing.memory, landing.device)
    return paged(there, here, page, (page, there.length // page), (page, here.length // page))


def pages(offer: Offer, slot: int, own_slot: int, own: int, length: int) -> dict[tuple[int, int], Tiles]:
    """The first `length` bytes of a producer's slot, into slot `own` of the ring to land in, whose slots have `own_slot`."""
    page = page_of(offer, own_slot)
    at = np.arange(-(-length // page), dtype=np.int64)
    zeros = np.zeros_like(at)
    return {(0, 0): Tiles(at + slot * (offer.slot // page), zeros, at + own * (own_slot // page), zeros)}


def ring_of(offer: Offer) -> Region:
    return Region("ring", offer.slot * offer.slots, offer.ring, offer.memory, offer.device)


def board_of(offer: Offer) -> Region:
    return Region("board", offer.slots * _WORD, offer.board)


def board_plan(offer: Offer, notes: Region) -> Plan:
    """A producer's whole board into one of the notes, which are the blocks here."""
    board = board_of(offer)
    return paged(board, notes, board.length, (board.length, 1), (_NOTE, _NOTES))


def noting(note: int) -> dict[tuple[int, int], Tiles]:
    at, zero = np.array([note], np.int64), np.zeros(1, np.int64)
    return {(0, 0): Tiles(zero, zero, at, zero)}


def paged(there: Region, here: Region, length: int, src: tuple[int, int], dst: tuple[int, int]) -> Plan:
    """Runs of `length` bytes between blocks that lie so far apart, and are so many, on either side."""
    sides = [
        Side(Identity("staging", "1", "staging"), (region,), (Group(0, StatePaged(), blocks, hashed=False),))
        for region, (_, blocks) in ((there, src), (here, dst))
    ]
    run = Run(0, 0, 0, 0, length, (), 0, 1)
    lanes = (Lane(src[0], ()), Lane(dst[0], ()))
    need = Need(FULL, 0, False, 0, ("staging",))
    return Plan(sides[1], (sides[0],), lanes, (need,), (Edge(0, 0, 0, 0, (Grain(0, (run,)),)),), ())
