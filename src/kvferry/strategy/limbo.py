"""Slots that were given up while something may still land in them: kept apart until the transport has let go."""

from __future__ import annotations

from kvferry.strategy.staging import Slots
from kvferry.transport.contract import Read, Transport


class Limbo:
    """Slots of `slots` with the reads off `wire` that they are kept for."""

    def __init__(self, wire: Transport, slots: Slots) -> None:
        self._wire, self._slots = wire, slots
        self._kept: list[tuple[Read, int]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __len__(self) -> int:
        return len({slot for _, slot in self._kept})

    @property
    def peers(self) -> str:
        """Whose reads they are, for people."""
        return ", ".join(sorted({read.peer for read, _ in self._kept}))

    def of(self, peer: str) -> int:
        """How many slots are kept for what was read of one."""
        return len({slot for read, slot in self._kept if read.peer == peer})

    def keep(self, read: Read, slot: int) -> None:
        self._kept.append((read, slot))

    def tidy(self) -> None:
        """Give back those in which nothing can land any more."""
        if not self._kept:
            return
        reads = {id(read): read for read, _ in self._kept}
        held = {key for key, read in reads.items() if not self._wire.release(read)}
        kept = [(read, slot) for read, slot in self._kept if id(read) in held]
        for slot in {slot for _, slot in self._kept} - {slot for _, slot in kept}:
            self._slots.give(slot)
        self._kept = kept
