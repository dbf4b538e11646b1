"""Requests that have a block in every place, as nearly all have: found by numbers where the general way takes columns.

An engine's thread binds dozens of these in a step, and an array of one number costs ten times what the number does. Says
nothing of any other request: what is wrong with it, if anything is, is for the binder to find and to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvferry.plan.tables import Listed, Paged, Table, stretch, without_holes
from kvferry.plan.tiles import Tiles

ORIGIN: Final = np.zeros(1, np.int32)
ORIGIN.setflags(write=False)


class Whole(NamedTuple):
    """The tables of a request by group, of either side."""

    there: Mapping[int, Listed]
    here: Mapping[int, Listed]


class Sides:
    """The groups of a producer that a plan reads, those of the consumer that it knows, of which some are `loaded`, and on
    either side the sets of groups that share memory, among which a request may name a block once."""

    def __init__(
        self,
        there: Sequence[Paged],
        here: Sequence[Paged],
        loaded: set[int],
        shared_there: Sequence[Sequence[int]],
        shared_here: Sequence[Sequence[int]],
    ) -> None:
        self._there, self._here, self._loaded = tuple(there), tuple(here), loaded
        self._shared_there = tuple(map(tuple, shared_there))
        among = {group for cluster in shared_here for group in cluster}
        alone = [(group.id,) for group in here if group.tokens and group.id not in among]
        self._shared_here = (*map(tuple, shared_here), *alone)

    def tables(self, src: Mapping[int, Table], dst: Mapping[int, Table], start: int) -> Whole | None:
        """The tables, if each is a list of blocks without a hole, and no block is named twice where that would matter."""
        there: dict[int, Listed] = {}
        for group in self._there:
            found = without_holes(src.get(group.id), group)
            if found is None:
                return None
            there[group.id] = found
        here: dict[int, Listed] = {}
        for group in self._here:
            if group.id not in dst and group.id not in self._loaded:
                continue
            found = without_holes(dst.get(group.id), group)
            if found is None or (group.tokens and start % group.tokens):
                return None
            here[group.id] = found
        if _twice(self._shared_there, there) or _twice(self._shared_here, here):
            return None
        return Whole(there, here)


def _twice(clusters: Sequence[Sequence[int]], tables: Mapping[int, Listed]) -> bool:
    """Whether some block is named twice among the groups of a cluster."""
    for cluster in clusters:
        named: list[int] = []
        for group in cluster:
            if group in tables:
                named += tables[group].ids.tolist()
        if len({*named}) < len(named):
            return True
    return False


def cut(there: Listed, here: Listed, low: int, high: int, grains: Sequence[int]) -> Iterator[tuple[int, Tiles]]:
    """The tiles of the tokens [low, high) by level, each as coarse as it can be; `low` is where one of the coarsest begins."""
    for level, tokens in enumerate(grains):
        if low + tokens <= high:
            first, stop = low // tokens, high // tokens
            yield level, Tiles(*stretch(there, first, stop, tokens), *stretch(here, first, stop, tokens))
            low = stop * tokens
