"""From a plan and one request's block tables to copies and fills.

Positions in tables are places in the sequence; HOLE marks a place without a block. Nothing here loops over blocks or
tokens: ranges are cut into tiles at the plan's grains, tiles become columns, and columns are added to the runs' places.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.errors import BindError
from kvferry.manifest.schema import HOLE, Group
from kvferry.plan.columns import Columns, expanded
from kvferry.plan.intervals import Intervals, cut_at, integers, interval, subtract, union
from kvferry.plan.overlay import Claim, Ids, Overlay
from kvferry.plan.schema import Edge, Fill, Need, Plan
from kvferry.strided import Ints, merge, offsets, size

Table = Sequence[int] | npt.NDArray[np.integer] | int
_ORIGIN: Final = np.zeros(1, np.int32)
_ORIGIN.setflags(write=False)
_NARROW: Final = np.iinfo(np.int32).max
_SHORT: Final = 512
"""A table up to here is sorted as fast as it is seen to be sorted."""
SPARE: Final = 16 << 10
"""Bytes that cost no more than a run does: up to here a transport is busy with descriptors, not with what they name."""


@dataclass(frozen=True)
class Request:
    """What one request asks of a plan: the consumer will hold `tokens` tokens and holds the first `start` already, with
    the state after them; if it holds all, nothing is moved.

    Tables are keyed by group id: for tokens, block ids by place in the sequence; for state, the one block that holds the
    state after `tokens` tokens.
    """

    tokens: int
    src: Mapping[int, Table]
    dst: Mapping[int, Table]
    start: int = 0


@dataclass(frozen=True)
class Copies:
    """Runs to copy from one source, as columns: regions by index, offsets in bytes."""

    src_region: Ints
    src_offset: Ints
    dst_region: Ints
    dst_offset: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class Fills:
    """Destination runs to zero, as columns."""

    region: Ints
    offset: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class Tiles:
    """Tiles of one edge at one grain: block id and place in the block, on either side."""

    src_block: Ids
    src_tile: Ids
    dst_block: Ids
    dst_tile: Ids


@dataclass(frozen=True)
class Binding:
    """One request's transfer: copies by source, fills, and per group the table positions of blocks that are right for
    this request but not whole for every layer, so that they must not become findable by their hash."""

    copies: tuple[Copies, ...]
    fills: Fills
    unhashable: Mapping[int, Ints]
    useful_bytes: int

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.copies)


@dataclass(frozen=True)
class Loading:
    """A binding for a transport: tiles instead of copies, by (edge, level of its grains), and the bytes they stand for."""

    tiles: Mapping[tuple[int, int], Tiles]
    fills: Fills
    unhashable: Mapping[int, Ints]
    bytes: int


@dataclass(frozen=True)
class Spans:
    """The tokens that each edge copies and each fill zeroes, in the plan's order; of a state, [0, 1) or nothing."""

    copied: tuple[Intervals, ...]
    filled: tuple[Intervals, ...]


@dataclass(frozen=True)
class _Range:
    """Tokens of one need in one group: copied intervals, the first one wanted, the first that its layers really read."""

    copied: Intervals
    low: int
    first: int


@dataclass
class _Ranges:
    """What a request loads into each group of the consumer, and the consumer's tables by group."""

    tables: dict[int, Ids] = field(default_factory=dict)
    needs: dict[tuple[int, int], _Range] = field(default_factory=dict)
    loaded: dict[int, tuple[int, int]] = field(default_factory=dict)
    holes: dict[int, Intervals] = field(default_factory=dict)
    unhashable: dict[int, list[Ints]] = field(default_factory=lambda: defaultdict(list))


class Binder:
    """A plan made ready for requests.

    `spare`: bytes that may be moved for every run that this saves. A block of several layers that is one run falls into a run
    for each layer and head where it is cut at the last token, and what is left of it into as many fills; up to there it is
    moved whole, with what the producer has behind the last token. A large block with few tokens is cut all the same.
    """

    def __init__(self, plan: Plan, spare: int = 0) -> None:
        self.plan = plan
        self._edges = tuple(tuple(expanded(grain.runs) for grain in edge.grains) for edge in plan.edges)
        self._fills = tuple(tuple(expanded(grain.runs) for grain in fill.grains) for fill in plan.fills)
        self._strides = np.array([lane.block_stride for lane in plan.lanes], np.int64)
        self._whole = np.array([size(lane.digits) == 1 for lane in plan.lanes], bool)
        self._src_groups: dict[int, Group] = {}
        for edge in plan.edges:
            group = plan.sources[edge.source].group(edge.src_group)
            known = self._src_groups.setdefault(edge.src_group, group)
            if group.blocks < known.blocks:
                self._src_groups[edge.src_group] = group
        self._dst_groups = {g.id: g for g in plan.consumer.groups}
        self._grains = tuple(tuple(grain.tokens for grain in edge.grains) for edge in plan.edges)
        self._loaded_groups = {e.dst_group for e in plan.edges}
        self._filled_groups = {f.group for f in plan.fills} - self._loaded_groups
        self._ends = self._whole_ends(spare) if spare else {}

    @classmethod
    def of_sessions(cls, plan: Plan) -> Binder:
        """As loads are bound that are served, and whatever foretells, shows or checks them."""
        return cls(plan, SPARE)

    def _whole_ends(self, spare: int) -> dict[tuple[int, int], tuple[int, int]]:
        """By group and need: the tokens of a tile that is one run of several layers on either side, and how many of them may be
        moved without need. Layers that come from several stages may be a run each."""
        by_need: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, edge in enumerate(self.plan.edges):
            by_need[edge.dst_group, edge.need].append(i)
        out = {}
        for key, edges in by_need.items():
            sizes = {self._grains[i] for i in edges}
            several = len(self.plan.needs[key[1]].layers) > len(edges) and len({self.plan.edges[i].source for i in edges}) == 1
            single = several and all(len(self._edges[i][0]) == 1 for i in edges)
            (tokens, *finer) = sizes.pop() if len(sizes) == 1 else (0,)
            if tokens and single and finer and finer[-1] == self.plan.needs[key[1]].per_entry == 1:
                saved = sum(len(self._edges[i][-1]) - 1 for i in edges)
                out[key] = tokens, spare * saved // sum(int(self._edges[i][-1].length.sum()) for i in edges)
        return out

    def bind(self, request: Request) -> Binding:
        """The copies and fills of one request; raises BindError where its tables do not fit the plan."""
        tiles, ranges = self._tiles(request)
        self._load(request, ranges)
        parts: list[list[tuple[Ints, ...]]] = [[] for _ in self.plan.sources]
        for (i, level), placed in tiles.items():
            parts[self.plan.edges[i].source].append(self._place(self._edges[i][level], placed))
        copies = tuple(Copies(*_merged(columns)) for columns in parts)
        return Binding(copies, self._fill(request, ranges), self._unhashable(ranges), self._useful(request, ranges))

    def load(self, request: Request) -> Loading:
        """What `bind` says, with the copies left as tiles."""
        tiles, ranges = self._tiles(request)
        self._load(request, ranges)
        moved = sum(int(self._edges[i][level].length.sum()) * len(t.src_block) for (i, level), t in tiles.items())
        return Loading(tiles, self._fill(request, ranges), self._unhashable(ranges), moved)

    def runs(self, request: Request) -> int:
        """How many contiguous runs the copies of a request have before neighbours are merged."""
        return sum(len(self._edges[i][level]) * len(t.src_block) for (i, level), t in self.tiles(request).items())

    def tiles(self, request: Request) -> dict[tuple[int, int], Tiles]:
        """The tiles to copy, by (edge, level of its grains)."""
        return self._tiles(request)[0]

    def spans(self, request: Request) -> Spans:
        """Which tokens a request copies and fills, for those who explain it: the work of tiles and runs left undone."""
        tiles, ranges = self._tiles(request)
        self._load(request, ranges)
        moved = {i for i, _ in tiles}
        tokens = {key: found.copied for key, found in ranges.needs.items()}
        return Spans(
            tuple(tokens.get((e.dst_group, e.need), interval(0, int(i in moved))) for i, e in enumerate(self.plan.edges)),
            tuple(self._filled(fill, ranges) for fill in self.plan.fills),
        )

    def _tiles(self, request: Request) -> tuple[dict[tuple[int, int], Tiles], _Ranges]:
        ranges = _Ranges()
        counts = (request.start, request.tokens)
        if not all(isinstance(count, (int, np.integer)) for count in counts) or not 0 <= request.start <= request.tokens:
            raise BindError(f"{request.start} tokens held already of {request.tokens}: not a range of whole tokens")
        if request.start == request.tokens:
            return {}, ranges
        src = {g: _table(request.src, group, "producer") for g, group in self._src_groups.items()}
        for group in (self._dst_groups[g] for g in self._read_groups(request)):
            ranges.tables[group.id] = _table(request.dst, group, "consumer")
            if group.tokens and request.start % group.tokens:
                raise BindError(
                    f"{request.start} tokens held already are not whole blocks of {group.tokens} tokens of group {group.id}"
                )
        _one_group_each(self._overlay_there, src, "producer")
        distinct = _one_group_each(self._overlay_here, ranges.tables, "consumer")
        for group_id, table in ranges.tables.items():
            if group_id not in distinct and _repeats(table):
                raise BindError(f"the consumer's block table of group {group_id} names a block twice")
        out: dict[tuple[int, int], Tiles] = {}
        known: dict[tuple[int, int, tuple[int, ...]], list[Tiles]] = {}
        for i, edge in enumerate(self.plan.edges):
            alike = edge.dst_group, edge.need, self._grains[i]
            if alike not in known:
                known[alike] = self._tiled(request, edge, self._grains[i], src[edge.src_group], ranges)
            for level, tiles in enumerate(known[alike]):
                if len(tiles.src_block):
                    out[i, level] = tiles
        return out, ranges

    @cached_property
    def _overlay_here(self) -> Overlay:
        """Of the consumer's groups. Fills have all bytes of a group for tokens; of a state, only what is not copied."""
        claims = defaultdict(list)
        for fill, columns in zip(self.plan.fills, self._fills, strict=True):
            claims[fill.group].append(_claim_here(columns[0]))
        for edge, columns in zip(self.plan.edges, self._edges, strict=True):
            if edge.grains[0].tokens == 0:
                claims[edge.dst_group].append(_claim_here(columns[0]))
        return Overlay(claims, {g: group.blocks for g, group in self._dst_groups.items()}, self.plan.lanes)

    @cached_property
    def _overlay_there(self) -> Overlay:
        """Of the producer's groups, as far as they are read."""
        claims = defaultdict(list)
        for edge, columns in zip(self.plan.edges, self._edges, strict=True):
            found = columns[0]
            claim = Claim(edge.source, found.src_region, found.src_offset, found.length, found.src_lane)
            claims[edge.src_group].append(claim)
        return Overlay(claims, {g: group.blocks for g, group in self._src_groups.items()}, self.plan.lanes)

    def _tiled(self, request: Request, edge: Edge, grains: Sequence[int], there: Ids, ranges: _Ranges) -> list[Tiles]:
        """The tiles of an edge by level; those of other sources' edges of the same need and grains are the same."""
        here = ranges.tables[edge.dst_group]
        if grains[0] == 0:
            return [Tiles(there, _ORIGIN, here, _ORIGIN)]
        found = self._range(request, edge, there, here, ranges)
        src_tokens, dst_tokens = self._src_groups[edge.src_group].tokens, self._dst_groups[edge.dst_group].tokens
        return [
            Tiles(*_placed(there, cut, src_tokens // tokens), *_placed(here, cut, dst_tokens // tokens))
            for tokens, cut in zip(grains, cut_at(found.copied, grains), strict=True)
        ]

    def _load(self, request: Request, ranges: _Ranges) -> None:
        """Note which blocks of the consumer are loaded, and their holes: what fills look at."""
        for group, table in ((self._dst_groups[g], table) for g, table in ranges.tables.items()):
            if not group.tokens:
                ranges.loaded[group.id] = (0, 0)
                continue
            wanted = [r.low for (g, _), r in ranges.needs.items() if g == group.id]
            low = min(wanted, default=max(request.start, group.keeps.first_needed(request.tokens)))
            stop = -(-request.tokens // group.tokens)
            first = low // group.tokens
            _covers(table, stop, group, "consumer")
            ranges.loaded[group.id] = (first * group.tokens, stop * group.tokens)
            ranges.holes[group.id] = _holes(table, first, stop, group.tokens)

    def _read_groups(self, request: Request) -> list[int]:
        return sorted(self._loaded_groups | {group for group in self._filled_groups if group in request.dst})

    def _range(self, request: Request, edge: Edge, there: Ids, here: Ids, ranges: _Ranges) -> _Range:
        """The tokens to copy for an edge's need; ranks of one producer agree on them, so they are found once."""
        known = ranges.needs.get((edge.dst_group, edge.need))
        if known is not None:
            return known
        need, group = self.plan.needs[edge.need], self._dst_groups[edge.dst_group]
        source = self._src_groups[edge.src_group]
        first, low, high = _wanted(need, group, request)
        tokens, most = self._ends.get((edge.dst_group, edge.need), (1, 0))
        missing = -high % tokens
        high += missing if low < high and missing <= most else 0
        sides = ((there, source, "producer"), (here, group, "consumer"))
        for table, side, name in sides:
            _covers(table, -(-high // side.tokens), side, name)
        if all(_whole(table, side, low, high) for table, side, _ in sides):
            copied = interval(low, high)
        else:
            for table, side, name in sides:
                _no_holes(table, side, first, min(high, request.tokens), need, name)
            copied = self._copied(request, source, group, there, here, low, high, ranges)
        found = ranges.needs[edge.dst_group, edge.need] = _Range(copied, low, first)
        return found

    def _copied(
        self, request: Request, source: Group, group: Group, there: Ids, here: Ids, low: int, high: int, ranges: _Ranges
    ) -> Intervals:
        """[low, high) less what has a hole on either side; blocks that lack something must not be found by their hash."""
        bad = [_holes(t, low // g.tokens, -(-high // g.tokens), g.tokens) for t, g in ((there, source), (here, group))]
        if group.hashed and len(bad[0][0]):
            # A block that is not full yet is only ever found by longer requests, and those look back less far.
            full = request.tokens // group.tokens
            lost = integers(np.maximum(bad[0][0], low) // group.tokens, -(-bad[0][1] // group.tokens))
            lost = np.unique(lost[lost < full])
            ranges.unhashable[group.id].append(lost[here[lost] != HOLE])
        return subtract(low, high, union(*bad))

    def _fill(self, request: Request, ranges: _Ranges) -> Fills:
        parts: list[tuple[Ints, ...]] = []
        for i, fill in enumerate(self.plan.fills):
            if fill.group not in ranges.loaded:
                continue
            group = self._dst_groups[fill.group]
            table = ranges.tables[fill.group]
            if not group.tokens:
                parts.append(self._place(self._fills[i][0], Tiles(table, _ORIGIN, table, _ORIGIN)))
                continue
            grains = [grain.tokens for grain in fill.grains]
            for level, cut in enumerate(cut_at(self._filled(fill, ranges), grains)):
                block, tile = _placed(table, cut, group.tokens // grains[level])
                if len(block):
                    parts.append(self._place(self._fills[i][level], Tiles(block, tile, block, tile)))
        _, _, region, offset, length = _merged(parts)
        return Fills(region, offset, length)

    def _filled(self, fill: Fill, ranges: _Ranges) -> Intervals:
        """The tokens of loaded blocks that a fill zeroes: all, or those that were not copied for its need."""
        if fill.group not in ranges.loaded:
            return interval(0, 0)
        if not self._dst_groups[fill.group].tokens:
            return interval(0, 1)
        bad = ranges.holes[fill.group]
        if fill.need is not None and (fill.group, fill.need) in ranges.needs:
            bad = union(bad, ranges.needs[fill.group, fill.need].copied)
        return subtract(*ranges.loaded[fill.group], bad)

    def _place(self, columns: Columns, tiles: Tiles) -> tuple[Ints, ...]:
        """Every run at every tile: a run's tiles behind each other, so that consecutive blocks can be merged.

        Where all runs fill their blocks, consecutive blocks are merged before runs multiply them.
        """
        if self._fills_blocks(columns):
            tiles, joined = _consecutive(tiles)
            length = columns.length[:, None] * joined
        else:
            length = np.broadcast_to(columns.length[:, None], (len(columns), len(tiles.src_block)))
        src = self._moved(columns.src_lane, tiles.src_block, tiles.src_tile) + columns.src_offset[:, None]
        dst = self._moved(columns.dst_lane, tiles.dst_block, tiles.dst_tile) + columns.dst_offset[:, None]
        count = len(tiles.src_block)
        return (
            np.repeat(columns.src_region, count), src.reshape(-1),
            np.repeat(columns.dst_region, count), dst.reshape(-1),
            length.reshape(-1),
        )  # fmt: skip

    def _fills_blocks(self, columns: Columns) -> bool:
        """Whether a tile is a whole block on either side, and every run as long as blocks are apart: only then are blocks
        whose ids follow each other one stretch of memory. A tile of a block has neighbours in its own block."""
        lanes = columns.src_lane, columns.dst_lane
        return all(np.array_equal(columns.length, self._strides[side]) and self._whole[side].all() for side in lanes)

    def _moved(self, lanes: Ints, block: Ids, tile: Ids) -> Ints:
        used, which = np.unique(lanes, return_inverse=True)
        block = block.astype(np.int64, copy=False)
        rows = np.empty((len(used), len(block)), np.int64)
        for row, index in enumerate(used.tolist()):
            lane = self.plan.lanes[index]
            rows[row] = block * lane.block_stride + offsets(lane.digits, tile)
        return rows[which]

    def _unhashable(self, ranges: _Ranges) -> dict[int, Ints]:
        merged = {group: np.unique(np.concatenate(found)) for group, found in ranges.unhashable.items()}
        return {group: lost for group, lost in merged.items() if len(lost)}

    def _useful(self, request: Request, ranges: _Ranges) -> int:
        """Bytes that the consumer's layers will read, of those that are copied."""
        total = 0.0
        for i, edge in enumerate(self.plan.edges):
            entry = int(self._edges[i][-1].length.sum())
            found = ranges.needs.get((edge.dst_group, edge.need))
            if edge.grains[0].tokens == 0:
                total += entry if request.start < request.tokens else 0
            elif found is not None:
                total += entry * _entries_read(self.plan.needs[edge.need], request, found.first)
        return int(total)


def bind(plan: Plan, request: Request) -> Binding:
    """Bind one request; for many, keep a Binder."""
    return Binder(plan).bind(request)


def _merged(parts: Sequence[tuple[Ints, ...]]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    if not parts:
        empty = np.empty(0, np.int64)
        return empty, empty, empty, empty, empty
    src_region, src, dst_region, dst, length = (np.concatenate(c) for c in zip(*parts, strict=True))
    src, dst, length, src_region, dst_region = merge(src, dst, length, src_region, dst_region)
    return src_region, src, dst_region, dst, length


def _consecutive(tiles: Tiles) -> tuple[Tiles, Ints]:
    """The first of every stretch of whole blocks that follow each other on both sides, and how many they are."""
    breaks = (np.diff(tiles.src_block) != 1) | (np.diff(tiles.dst_block) != 1)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    count = np.diff(np.append(first, len(tiles.src_block)))
    return Tiles(tiles.src_block[first], tiles.src_tile[first], tiles.dst_block[first], tiles.dst_tile[first]), count


def _table(tables: Mapping[int, Table], group: Group, name: str) -> Ids:
    """A group's table, every block id checked against the group."""
    if group.id not in tables:
        raise BindError(f"the {name}'s block table of group {group.id} is missing")
    found = _numbers(tables[group.id])
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise BindError(f"the {name}'s block table of group {group.id} is not a list of block ids")
    if not _inside(found, group.blocks):
        raise BindError(f"the {name}'s block table of group {group.id} has ids outside [0, {group.blocks})")
    if not group.tokens and (len(found) != 1 or found[0] == HOLE):
        raise BindError(f"group {group.id} is paged by state: the {name} must name the one block that holds it")
    return found.astype(np.int32 if group.blocks <= _NARROW else np.int64, copy=False)


def _numbers(given: Table) -> npt.NDArray[Any]:
    """A table as an array of whatever it holds; lists of small numbers, as engines have them, are taken the short way."""
    if isinstance(given, list):
        try:
            return np.frombuffer(struct.pack(f"{len(given)}i", *given), np.int32)
        except struct.error:
            return np.asarray(given)
    found = np.asarray(given)
    return found.reshape(1) if found.ndim == 0 else found


def _inside(table: npt.NDArray[Any], blocks: int) -> bool:
    """Whether all ids are a block's or HOLE."""
    if len(table) == 1:
        return HOLE <= int(table[0]) < blocks
    return not len(table) or (int(table.min()) >= HOLE and int(table.max()) < blocks)


def _repeats(table: Ids) -> bool:
    """Whether a block is named twice."""
    if len(table) < 2 or (len(table) > _SHORT and (table[1:] > table[:-1]).all()):
        return False
    ordered = np.sort(table)
    same = ordered[1:] == ordered[:-1]
    return bool(same.any()) and int(ordered[1:][same].max()) != HOLE


def _wanted(need: Need, group: Group, request: Request) -> tuple[int, int, int]:
    """The first token that the need's layers will read, and the interval to copy, in whole entries.

    A block that will be found by its hash must be whole, however little of it this request reads.
    """
    first = need.reach.first_needed(request.tokens)
    low = first
    if group.hashed:
        low = min(low, group.keeps.first_needed(request.tokens)) // group.tokens * group.tokens
    per_entry = need.per_entry
    high = -(-request.tokens // per_entry) if need.partial else request.tokens // per_entry
    low = max(low, request.start) // per_entry * per_entry
    return max(first, request.start), low, max(low, high * per_entry)


def _entries_read(need: Need, request: Request, first: int) -> float:
    """Entries that layers read: complete ones, or, of partial ones, the share that holds tokens they look at."""
    if need.partial:
        return (request.tokens - first) / need.per_entry
    return max(0, request.tokens // need.per_entry - first // need.per_entry)


def _claim_here(columns: Columns) -> Claim:
    return Claim(0, columns.dst_region, columns.dst_offset, columns.length, columns.dst_lane)


def _one_group_each(overlay: Overlay, tables: Mapping[int, Ids], name: str) -> set[int]:
    """Refuse a block that is in the tables of two groups that overlay each other: what one wrote there, the other lost.
    The groups that were seen to name each block once, too."""
    distinct: set[int] = set()
    for cluster in overlay.clusters:
        found = [tables[group] for group in cluster if group in tables]
        if len(found) < 2:
            continue
        if not _repeats(np.concatenate(found)):
            distinct.update(cluster)
            continue
        clash = overlay.clash(tables)
        if clash is not None:
            block, one, other = clash
            raise BindError(
                f"the {name}'s block tables of groups {one} and {other} both name block {block}, and these groups share its "
                "memory: a block belongs to one group at a time"
            )
    return distinct


def _covers(table: Ids, blocks: int, group: Group, name: str) -> None:
    if len(table) < blocks:
        raise BindError(f"the {name}'s block table of group {group.id} has {len(table)} places, {blocks} are needed")


def _whole(table: Ids, group: Group, low: int, high: int) -> bool:
    """Whether every place of the tokens [low, high) has a block."""
    tokens = group.tokens
    places = table[low // tokens : -(-high // tokens)]
    return not len(places) or int(places.min()) != HOLE


def _no_holes(table: Ids, group: Group, first: int, stop: int, need: Need, name: str) -> None:
    if first >= stop:
        return
    low, high = first // group.tokens, -(-stop // group.tokens)
    holes = np.flatnonzero(table[low:high] == HOLE)
    if len(holes):
        at = (low + int(holes[0])) * group.tokens
        raise BindError(
            f"{need.layers[0]}: the {name} has no block for tokens [{at}, {at + group.tokens}) in group {group.id}, "
            f"but tokens [{first}, {stop}) are needed"
        )


def _holes(table: Ids, first: int, stop: int, tokens: int) -> Intervals:
    at = first + np.flatnonzero(table[first:stop] == HOLE)
    return at * tokens, (at + 1) * tokens


def _placed(table: Ids, cut: Intervals, per_block: int) -> tuple[Ids, Ids]:
    """Block id and place in the block of the tiles that are numbered `cut`, `per_block` of them to a block."""
    low, high = cut
    if not len(low):
        return table[:0], table[:0]
    if len(low) > 1:
        at = integers(low, high)
        place = at // per_block
        return table[place], (at - place * per_block).astype(table.dtype, copy=False)
    start, stop = int(low[0]), int(high[0])
    first = start // per_block
    blocks = table[first : -(-stop // per_block)]
    inside = slice(start - first * per_block, stop - first * per_block)
    places = np.tile(np.arange(per_block, dtype=table.dtype), len(blocks))
    return np.repeat(blocks, per_block)[inside], places[inside]
