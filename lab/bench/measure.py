"""Actions measured in turn, so that a machine's moods hit all of them alike, and what the rounds say of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from kvferry.doctor.memory import Memory
from kvferry.errors import MeasureError

Action = Callable[[], float]
Tick = Callable[[], None]

REPEATS = 31


def silent() -> None:
    """A tick for when nobody watches."""


def timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def copier(memory: Memory, length: int) -> Action:
    """Seconds of one plain copy of `length` bytes from the first to the second half."""
    whole = memory.view(1)
    there, here = whole[:length], whole[length : 2 * length]

    def copy() -> None:
        here[:] = there
        memory.view(1)  # waits for the device

    return lambda: timed(copy)


@dataclass(frozen=True)
class Rounds:
    """Seconds of every action, round by round."""

    samples: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return median(self.samples[name])

    def ratio(self, baseline: str, name: str) -> float:
        """How many times faster than the baseline: the median of the rounds' own ratios, since a slow spell that outlasts a
        round slows both, and would tear two medians apart."""
        pairs = zip(self.samples[baseline], self.samples[name], strict=True)
        return median(theirs / ours for theirs, ours in pairs)


def measured(actions: Mapping[str, Action], repeats: int, tick: Tick = silent) -> Rounds:
    """Every action says how long it took, so that cleaning up is not counted; one round goes first and is thrown away.

    Rounds begin with every action in turn, and every other one runs backwards: what goes before an action, and leaves it
    its caches, comes after it in the next round.
    """
    if repeats < 1:
        raise MeasureError(f"{repeats} repeats: give at least 1; medians of fewer than 15 are noisy")
    found: dict[str, list[float]] = {name: [] for name in actions}
    gc.collect()
    names = list(actions)
    for turn in range(repeats + 1):
        first = turn // 2 * 2 % len(names)
        for name in (names[first:] + names[:first])[:: -1 if turn % 2 else 1]:
            seconds = actions[name]()
            if turn:
                found[name].append(seconds)
        tick()
    return Rounds(found)
