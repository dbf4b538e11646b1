"""The generation words of one rank: registered memory in which a lease's number stands while its blocks may be read.

The first half of the words are this rank's own leases, published for consumers to read, and behind them a beacon: a number
that stands there from the start, for whoever wants to see that it is this memory that is read. It is negative, and so never a
lease's. The second half, which nobody else is told of, is where the rank lands the words it reads from others. Both are
declared by a manifest and read by a plan, like everything.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.manifest.schema import (
    Axis,
    Element,
    Group,
    Identity,
    Layer,
    Manifest,
    Part,
    Rank,
    Region,
    Shape,
    StatePaged,
)
from kvferry.plan import Plan, Tiles, make_plan
from kvferry.session.reference import MAX_GENERATION, Lease
from kvferry.transport import Storage

WORD = 8
DEAD = 0

Column = npt.NDArray[np.int64]


class Words:
    """`slots` leases and as many landing places, for one rank of one start of an engine; in `memory`, if others are to map it,
    which has room for them (see `size`) and holds zeros."""

    def __init__(self, slots: int, identity: Identity, memory: npt.NDArray[np.uint8] | None = None) -> None:
        self.slots = slots
        self._words: Column = np.zeros(2 * slots + 1, np.int64) if memory is None else memory.view(np.int64)
        self._own, self._landed = self._words[: slots + 1], self._words[slots + 1 :]
        self.beacon = -1 - secrets.randbelow(MAX_GENERATION)
        self._own[slots] = self.beacon
        self._alive = 0
        self._watcher: Callable[[], None] | None = None
        alone = Identity(identity.engine, identity.incarnation, "words", Rank())
        self.manifest = _manifest(alone, self._own)
        self._landing = _manifest(alone, self._landed)

    @staticmethod
    def size(slots: int) -> int:
        return (2 * slots + 1) * WORD

    @property
    def storage(self) -> Storage:
        return Storage(int(self._words.ctypes.data), self._words.nbytes)

    @property
    def alive(self) -> int:
        """How many leases stand: while there are any, somebody may be reading from this rank."""
        return self._alive

    def watch(self, watcher: Callable[[], None]) -> None:
        """Called whenever a lease stands after none did."""
        self._watcher = watcher

    def live(self, lease: Lease) -> None:
        self._alive += int(self._own[lease.slot] == DEAD)
        self._own[lease.slot] = lease.generation
        if self._alive == 1 and self._watcher is not None:
            self._watcher()

    def kill(self, lease: Lease) -> None:
        """Only the lease's own number is wiped: its slot may have a new one."""
        if self._own[lease.slot] == lease.generation:
            self._own[lease.slot] = DEAD
            self._alive -= 1

    def plan(self, producer: Manifest) -> Plan:
        """How the words of one rank of a producer are read into this rank's landing places, which are the blocks here."""
        return make_plan(self._landing, [producer])

    def landed(self, place: int) -> int:
        return int(self._landed[place])

    def wipe(self, place: int) -> None:
        self._landed[place] = DEAD


def _manifest(identity: Identity, words: Column) -> Manifest:
    shape = Shape(Element("int64", WORD), (Axis("word", 1, 0, 1, ((1, WORD),)),))
    return Manifest(
        identity,
        (Region("words", words.nbytes, int(words.ctypes.data)),),
        (Group(0, StatePaged(), len(words), hashed=False),),
        (shape,),
        (Layer("words", 0, (Part("generation", 0, 0, 0, WORD),)),),
    )


def tiles_of_words(
    first: Mapping[tuple[int, int], Tiles], slots: Sequence[int], landings: Sequence[int]
) -> dict[tuple[int, int], Tiles]:
    """Words of a producer into landing places, from the tile of its first word into the first place."""
    there, here = np.array(slots, np.int64), np.array(landings, np.int64)
    zeros = np.zeros_like(there)
    return {
        key: Tiles(there + one.src_block, zeros + one.src_tile, here + one.dst_block, zeros + one.dst_tile)
        for key, one in first.items()
    }
