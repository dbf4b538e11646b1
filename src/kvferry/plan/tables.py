"""A request's block tables: every id checked against its group, places without a block, and where tiles lie."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import BindError
from kvferry.manifest.schema import HOLE, Group, Reach
from kvferry.plan.intervals import NOTHING, Intervals, integers
from kvferry.plan.overlay import Ids, Overlay
from kvferry.plan.schema import Need

Table = Sequence[int] | npt.NDArray[np.integer] | int
_NARROW: Final = np.iinfo(np.int32).max
_SHORT: Final = 512
"""A table up to here is a set as fast as it is sorted; and sorting lets go of Python's lock, which others then have."""


class Paged(NamedTuple):
    """A group of one side, as every request asks after it."""

    side: str
    id: int
    tokens: int
    blocks: int
    keeps: Reach
    hashed: bool
    ids: np.dtype[Any]

    @classmethod
    def of(cls, side: str, group: Group) -> Paged:
        ids = np.dtype(np.int32 if group.blocks <= _NARROW else np.int64)
        return cls(side, group.id, group.tokens, group.blocks, group.keeps, group.hashed, ids)

    @property
    def table(self) -> str:
        return f"the {self.side}'s block table of group {self.id}"


class Listed(NamedTuple):
    """A group's block table, every id checked against the group; `whole`: no place is without a block."""

    group: Paged
    ids: Ids
    whole: bool

    def insist(self, blocks: int) -> None:
        if len(self.ids) < blocks:
            raise BindError(f"{self.group.table} has {len(self.ids)} places, {blocks} are needed")

    def holes(self, low: int, high: int) -> Intervals:
        """The tokens of places without a block, among the places of the tokens [low, high)."""
        if self.whole:
            return NOTHING
        tokens = self.group.tokens
        first, stop = low // tokens, -(-high // tokens)
        at = first + np.flatnonzero(self.ids[first:stop] == HOLE)
        return at * tokens, (at + 1) * tokens


def listed(tables: Mapping[int, Table], group: Paged) -> Listed:
    """A group's table, every block id checked against the group."""
    if group.id not in tables:
        raise BindError(f"{group.table} is missing")
    given = tables[group.id]
    if (brief := without_holes(given, group)) is not None:
        return brief
    found = _numbers(given)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise BindError(f"{group.table} is not a list of block ids")
    if len(found) > 1:
        least, most = int(found.min()), int(found.max())
    else:
        least = most = found.item() if len(found) else 0
    if least < HOLE or most >= group.blocks:
        raise BindError(f"{group.table} has ids outside [0, {group.blocks})")
    if not group.tokens and (len(found) != 1 or least == HOLE):
        raise BindError(f"group {group.id} is paged by state: the {group.side} must name the one block that holds it")
    return Listed(group, found if found.dtype == group.ids else found.astype(group.ids), least != HOLE)


def without_holes(given: Table | None, group: Paged) -> Listed | None:
    """A short list of ids of this group, or the one of a state, as engines have them; None for anything else, which may be in
    order too. Python finds the least and the most of a short list sooner than NumPy does."""
    if type(given) is int:
        return Listed(group, np.array([given], group.ids), True) if 0 <= given < group.blocks else None
    if type(given) is not list or not group.tokens or not 0 < len(given) <= _SHORT:
        return None
    try:
        if min(given) < 0 or max(given) >= group.blocks:
            return None
        return Listed(group, np.frombuffer(struct.pack(f"{len(given)}{group.ids.char}", *given), group.ids), True)
    except (TypeError, ValueError, struct.error):
        return None


def _numbers(given: Table) -> npt.NDArray[Any]:
    """A table as an array of whatever it holds; lists of small numbers, as engines have them, are taken the short way."""
    if isinstance(given, list):
        try:
            return np.frombuffer(struct.pack(f"{len(given)}i", *given), np.int32)
        except struct.error:
            return np.asarray(given)
    found = np.asarray(given)
    return found.reshape(1) if found.ndim == 0 else found


def repeats(table: Ids) -> bool:
    """Whether a block is named twice."""
    if len(table) <= _SHORT:
        named: list[int] = table.tolist()
        return len(named) - named.count(HOLE) > len({*named} - {HOLE})
    if (table[1:] > table[:-1]).all():
        return False
    ordered = table.copy()
    ordered.sort()
    same = ordered[1:] == ordered[:-1]
    return bool(np.count_nonzero(same)) and int(ordered[1:][same].max()) != HOLE


def each_block_once(overlay: Overlay, tables: Mapping[int, Listed]) -> None:
    """Refuse a block that stands for two places of the sequence, in one table or in those of two groups that overlay each
    other: what it holds is right for one of them at most."""
    distinct = _one_group_each(overlay, tables)
    for group_id, table in tables.items():
        if group_id not in distinct and repeats(table.ids):
            raise BindError(f"{table.group.table} names block {_repeated(table.ids)} twice")


def _repeated(table: Ids) -> int:
    found, times = np.unique(table[table != HOLE], return_counts=True)
    return int(found[times > 1][0])


def _one_group_each(overlay: Overlay, tables: Mapping[int, Listed]) -> set[int]:
    """Refuse a block that is in the tables of two groups that overlay each other. The groups that were seen to name each block
    once, too."""
    distinct: set[int] = set()
    for cluster in overlay.clusters:
        found = [tables[group].ids for group in cluster if group in tables]
        if len(found) < 2:
            continue
        if not repeats(np.concatenate(found)):
            distinct.update(cluster)
            continue
        clash = overlay.clash({group: table.ids for group, table in tables.items()})
        if clash is not None:
            block, one, other = clash
            raise BindError(
                f"the {tables[one].group.side}'s block tables of groups {one} and {other} both name block {block}, and these "
                "groups share its memory: a block belongs to one group at a time"
            )
    return distinct


def insist_on_blocks(table: Listed, first: int, stop: int, need: Need) -> None:
    if first >= stop:
        return
    holes, _ = table.holes(first, stop)
    if len(holes):
        at, group = int(holes[0]), table.group
        raise BindError(
            f"{need.layers[0]}: the {group.side} has no block for tokens [{at}, {at + group.tokens}) in group {group.id}, "
            f"but tokens [{first}, {stop}) are needed"
        )


def placed(table: Listed, cut: Intervals, tokens: int) -> tuple[Ids, Ids]:
    """Block id and place in the block of the tiles of so many tokens that are numbered `cut`; there are some."""
    ids, per_block = table.ids, table.group.tokens // tokens
    low, high = cut
    if len(low) > 1:
        at = integers(low, high)
        place = at // per_block
        return ids[place], (at - place * per_block).astype(ids.dtype, copy=False)
    return stretch(table, int(low[0]), int(high[0]), tokens)


def stretch(table: Listed, start: int, stop: int, tokens: int) -> tuple[Ids, Ids]:
    """The same of the tiles [start, stop)."""
    ids, per_block = table.ids, table.group.tokens // tokens
    first = start // per_block
    blocks = ids[first : -(-stop // per_block)]
    inside = slice(start - first * per_block, stop - first * per_block)
    places = _places(per_block, 1 << (len(blocks) - 1).bit_length(), ids.dtype)
    return (blocks if per_block == 1 else blocks.repeat(per_block))[inside], places[inside]


@lru_cache(maxsize=256)
def _places(per_block: int, blocks: int, dtype: np.dtype[Any]) -> Ids:
    """The places of all tiles of so many blocks; asked for by powers of two, so that a few answers serve all requests."""
    found = np.tile(np.arange(per_block, dtype=dtype), blocks)
    found.setflags(write=False)
    return found
