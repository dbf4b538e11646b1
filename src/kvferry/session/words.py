"""The generation words of one rank: registered memory in which a lease's number stands while its blocks may be read.

The first half of the words are this rank's own leases, for consumers to read; the second half is where it lands the words it
reads from others. They are declared by a manifest and read by a plan, like everything else.
"""

from __future__ import annotations

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
from kvferry.plan import Plan, make_plan
from kvferry.session.reference import Lease
from kvferry.transport import Storage

WORD = 8
DEAD = 0


class Words:
    """`slots` leases and as many landing places, for one rank of one start of an engine."""

    def __init__(self, slots: int, identity: Identity) -> None:
        self.slots = slots
        self._words: npt.NDArray[np.int64] = np.zeros(2 * slots, np.int64)
        alone = Identity(identity.engine, identity.incarnation, "words", Rank())
        address = int(self._words.ctypes.data)
        shape = Shape(Element("int64", WORD), (Axis("word", 1, 0, 1, ((1, WORD),)),))
        self.manifest = Manifest(
            alone,
            (Region("words", self._words.nbytes, address),),
            (Group(0, StatePaged(), 2 * slots, hashed=False),),
            (shape,),
            (Layer("words", 0, (Part("generation", 0, 0, 0, WORD),)),),
        )

    @property
    def storage(self) -> Storage:
        return Storage(int(self._words.ctypes.data), self._words.nbytes)

    def live(self, lease: Lease) -> None:
        self._words[lease.slot] = lease.generation

    def kill(self, lease: Lease) -> None:
        """Only the lease's own number is wiped: its slot may have a new one."""
        if self._words[lease.slot] == lease.generation:
            self._words[lease.slot] = DEAD

    def plan(self, producer: Manifest) -> Plan:
        """How the words of one rank of a producer are read into this rank's landing places."""
        return make_plan(self.manifest, [producer])

    def landing(self, index: int) -> int:
        """The block that stands for a landing place."""
        return self.slots + index

    def landed(self, index: int) -> int:
        return int(self._words[self.slots + index])

    def wipe(self, index: int) -> None:
        self._words[self.slots + index] = DEAD
