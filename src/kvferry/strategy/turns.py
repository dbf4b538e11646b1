"""Whose turn it is to begin another piece: loads take slots in the order in which they were begun.

The first that still has pieces to begin takes as many slots as it likes but one, which is for those behind it: for the one that
has the least left, so that a short load waits for the end of no long one. Whoever waits becomes the first in the end, and holds
no slot until then but for pieces that are under way: nobody waits for ever, and nobody for a slot that is held and not used.
Loads that share a slot are one here.
"""

from __future__ import annotations

from collections.abc import Sequence


def turn(waiting: Sequence[tuple[int, int]], slots: int) -> int:
    """Which of several loads gets a slot that is free, out of so many in all. They stand in the order in which they were begun,
    each with how many it holds and how much of it has not begun."""
    held, _ = waiting[0]
    if len(waiting) == 1 or slots < 2 or held < slots - 1:
        return 0
    return min(range(1, len(waiting)), key=lambda index: waiting[index][1])
