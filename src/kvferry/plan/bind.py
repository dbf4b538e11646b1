"""From a plan and one request's block tables to copies and fills.

Positions in tables are places in the sequence; HOLE marks a place without a block. Nothing here loops over blocks or
tokens: ranges are cut into tiles at the plan's grains, tiles become columns, and columns are added to the runs' places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from kvferry.errors import BindError
from kvferry.manifest.schema import HOLE
from kvferry.plan.columns import Columns
from kvferry.plan.intervals import NOTHING, Intervals, cut_at, integers, interval, subtract, union
from kvferry.plan.overlay import Claim, Overlay
from kvferry.plan.schema import Edge, Fill, Need, Plan
from kvferry.plan.tables import Listed, Paged, Table, each_block_once, insist_on_blocks, listed, placed, stretch
from kvferry.plan.tiles import Runs, Tiles
from kvferry.strided import Ints, merge

_ORIGIN: Final = np.zeros(1, np.int32)
_ORIGIN.setflags(write=False)
_NONE: Final = NOTHING[0]
_WHOLE: Final = (int, np.integer)
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


_NO_FILLS: Final = Fills(_NONE, _NONE, _NONE)


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


class _Range(NamedTuple):
    """Tokens of one need in one group: copied intervals, the first one wanted, the first that its layers really read. Where
    all from the first one wanted on are copied, `stop` is the one behind the last."""

    copied: Intervals
    low: int
    first: int
    stop: int = -1


@dataclass
class _Ranges:
    """What a request loads into each group of the consumer, and the consumer's tables by group."""

    tables: Mapping[int, Listed] = field(default_factory=dict)
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
        self._edges = tuple(tuple(Runs(grain, plan.lanes) for grain in edge.grains) for edge in plan.edges)
        self._fills = tuple(tuple(Runs(grain, plan.lanes) for grain in fill.grains) for fill in plan.fills)
        self._src_groups: dict[int, Paged] = {}
        for edge in plan.edges:
            group = Paged.of("producer", plan.sources[edge.source].group(edge.src_group))
            known = self._src_groups.setdefault(edge.src_group, group)
            if group.blocks < known.blocks:
                self._src_groups[edge.src_group] = group
        self._dst_groups = {g.id: Paged.of("consumer", g) for g in plan.consumer.groups}
        self._grains = tuple(tuple(grain.tokens for grain in edge.grains) for edge in plan.edges)
        self._fill_grains = tuple(tuple(grain.tokens for grain in fill.grains) for fill in plan.fills)
        alike: dict[tuple[int, int, tuple[int, ...]], int] = {}
        # By edge, the first that has the same tiles, whatever their sources are.
        self._alike = tuple(
            alike.setdefault((e.dst_group, e.need, grains), i)
            for i, (e, grains) in enumerate(zip(plan.edges, self._grains, strict=True))
        )
        self._loaded_groups = {e.dst_group for e in plan.edges}
        self._known_groups = [self._dst_groups[g] for g in sorted(self._loaded_groups | {f.group for f in plan.fills})]
        self._ends = self._whole_ends(spare) if spare else {}

    @classmethod
    def of_sessions(cls, plan: Plan) -> Binder:
        """As loads are bound that are served, and whatever foretells, shows or checks them."""
        return cls(plan, SPARE)

    def ready(self) -> Binder:
        """Itself, with everything found that follows from the plan, which the first request would wait for."""
        _ = self._overlay_here, self._overlay_there
        for runs in (runs for tiles in (*self._edges, *self._fills) for runs in tiles):
            runs.ready()
        return self

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
                out[key] = tokens, spare * saved // sum(self._edges[i][-1].bytes for i in edges)
        return out

    def bind(self, request: Request) -> Binding:
        """The copies and fills of one request; raises BindError where its tables do not fit the plan."""
        tiles, ranges = self._tiles(request)
        self._load(request, ranges)
        parts: list[list[tuple[Ints, ...]]] = [[] for _ in self.plan.sources]
        for (i, level), found in tiles.items():
            parts[self.plan.edges[i].source].append(self._edges[i][level].at(found))
        copies = tuple(Copies(*_merged(columns)) for columns in parts)
        return Binding(copies, self._fill(request, ranges), self._unhashable(ranges), self._useful(request, ranges))

    def load(self, request: Request) -> Loading:
        """What `bind` says, with the copies left as tiles."""
        tiles, ranges = self._tiles(request)
        self._load(request, ranges)
        moved = sum(self._edges[i][level].bytes * len(t.src_block) for (i, level), t in tiles.items())
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
        counts = isinstance(request.start, _WHOLE) and isinstance(request.tokens, _WHOLE)
        if not counts or not 0 <= request.start <= request.tokens:
            raise BindError(f"{request.start} tokens held already of {request.tokens}: not a range of whole tokens")
        if request.start == request.tokens:
            return {}, ranges
        src, ranges.tables = self._listed(request)
        out: dict[tuple[int, int], Tiles] = {}
        known: dict[int, dict[int, Tiles]] = {}
        for i, first in enumerate(self._alike):
            if first == i:
                edge = self.plan.edges[i]
                known[i] = self._tiled(request, edge, self._grains[i], src[edge.src_group], ranges)
            for level, tiles in known[first].items():
                out[i, level] = tiles
        return out, ranges

    def _listed(self, request: Request) -> tuple[dict[int, Listed], dict[int, Listed]]:
        """The tables of the producer and of the consumer, as far as the plan knows their groups."""
        src = {g: listed(request.src, group) for g, group in self._src_groups.items()}
        each_block_once(self._overlay_there, src)
        dst: dict[int, Listed] = {}
        for group in self._known_groups:
            if group.id not in self._loaded_groups and group.id not in request.dst:
                continue
            dst[group.id] = listed(request.dst, group)
            if group.tokens and request.start % group.tokens:
                raise BindError(
                    f"{request.start} tokens held already are not whole blocks of {group.tokens} tokens of group {group.id}"
                )
        each_block_once(self._overlay_here, dst)
        return src, dst

    @cached_property
    def _overlay_here(self) -> Overlay:
        """Of the consumer's groups. Fills have all bytes of a group for tokens; of a state, only what is not copied."""
        claims = defaultdict(list)
        for fill, runs in zip(self.plan.fills, self._fills, strict=True):
            claims[fill.group].append(_claim_here(runs[0].columns))
        for edge, runs in zip(self.plan.edges, self._edges, strict=True):
            if edge.grains[0].tokens == 0:
                claims[edge.dst_group].append(_claim_here(runs[0].columns))
        return Overlay(claims, {g: group.blocks for g, group in self._dst_groups.items()}, self.plan.lanes)

    @cached_property
    def _overlay_there(self) -> Overlay:
        """Of the producer's groups, as far as they are read."""
        claims = defaultdict(list)
        for edge, runs in zip(self.plan.edges, self._edges, strict=True):
            found = runs[0].columns
            claim = Claim(edge.source, found.src_region, found.src_offset, found.length, found.src_lane)
            claims[edge.src_group].append(claim)
        return Overlay(claims, {g: group.blocks for g, group in self._src_groups.items()}, self.plan.lanes)

    def _tiled(self, request: Request, edge: Edge, grains: Sequence[int], there: Listed, ranges: _Ranges) -> dict[int, Tiles]:
        """The tiles of an edge by level, where there are any; those of other sources' edges of the same need and grains are
        the same."""
        here = ranges.tables[edge.dst_group]
        if grains[0] == 0:
            return {0: Tiles(there.ids, _ORIGIN, here.ids, _ORIGIN)}
        found = self._range(request, edge, there, here, ranges)
        if found.stop >= 0 and found.low % grains[0] == 0:
            return dict(_cut(there, here, found.low, found.stop, grains))
        return {
            level: Tiles(*placed(there, some, grains[level]), *placed(here, some, grains[level]))
            for level, some in enumerate(cut_at(found.copied, grains))
            if len(some[0])
        }

    def _load(self, request: Request, ranges: _Ranges) -> None:
        """Note which blocks of the consumer are loaded, and their holes: what fills look at."""
        lows: dict[int, int] = {}
        for (group_id, _), found in ranges.needs.items():
            lows[group_id] = min(found.low, lows.get(group_id, found.low))
        for group_id, table in ranges.tables.items():
            group = table.group
            if not group.tokens:
                ranges.loaded[group_id] = (0, 0)
                continue
            low = lows[group_id] if group_id in lows else max(request.start, group.keeps.first_needed(request.tokens))
            stop = -(-request.tokens // group.tokens)
            table.insist(stop)
            ranges.loaded[group_id] = loaded = (low // group.tokens * group.tokens, stop * group.tokens)
            ranges.holes[group_id] = table.holes(*loaded)

    def _range(self, request: Request, edge: Edge, there: Listed, here: Listed, ranges: _Ranges) -> _Range:
        """The tokens to copy for an edge's need; ranks of one producer agree on them, so they are found once."""
        known = ranges.needs.get((edge.dst_group, edge.need))
        if known is not None:
            return known
        need = self.plan.needs[edge.need]
        first, low, high = _wanted(need, here.group, request)
        tokens, most = self._ends.get((edge.dst_group, edge.need), (1, 0))
        missing = -high % tokens
        high += missing if low < high and missing <= most else 0
        for table in (there, here):
            table.insist(-(-high // table.group.tokens))
        absent, bad = there.holes(low, high), here.holes(low, high)
        copied, stop = interval(low, high), high
        if len(absent[0]) or len(bad[0]):
            for table in (there, here):
                insist_on_blocks(table, first, min(high, request.tokens), need)
            self._lose(request, here, absent, low, ranges)
            copied, stop = subtract(low, high, union(absent, bad)), -1
        found = ranges.needs[edge.dst_group, edge.need] = _Range(copied, low, first, stop)
        return found

    def _lose(self, request: Request, here: Listed, absent: Intervals, low: int, ranges: _Ranges) -> None:
        """Blocks of the consumer that lack what the producer has no block for must not be found by their hash."""
        group = here.group
        if group.hashed and len(absent[0]):
            # A block that is not full yet is only ever found by longer requests, and those look back less far.
            full = request.tokens // group.tokens
            lost = integers(np.maximum(absent[0], low) // group.tokens, -(-absent[1] // group.tokens))
            lost = np.unique(lost[lost < full])
            ranges.unhashable[group.id].append(lost[here.ids[lost] != HOLE])

    def _fill(self, request: Request, ranges: _Ranges) -> Fills:
        parts: list[tuple[Ints, ...]] = []
        for fill, runs, grains in zip(self.plan.fills, self._fills, self._fill_grains, strict=True):
            if fill.group not in ranges.loaded:
                continue
            table = ranges.tables[fill.group]
            if not table.group.tokens:
                parts.append(runs[0].filled(table.ids, _ORIGIN))
                continue
            tokens = self._filled(fill, ranges)
            for level, some in enumerate(cut_at(tokens, grains) if len(tokens[0]) else ()):
                if len(some[0]):
                    at = placed(table, some, grains[level])
                    near = len(some[0]) == 1 and at[0][0] == at[0][-1]
                    parts.append((runs[level].filled_on if near else runs[level].filled)(*at))
        if not parts:
            return _NO_FILLS
        region, offset, length = _joined(parts)
        offset, _, length, region = merge(offset, offset, length, region)
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

    def _unhashable(self, ranges: _Ranges) -> dict[int, Ints]:
        if not ranges.unhashable:
            return {}
        merged = {group: np.unique(np.concatenate(found)) for group, found in ranges.unhashable.items()}
        return {group: lost for group, lost in merged.items() if len(lost)}

    def _useful(self, request: Request, ranges: _Ranges) -> int:
        """Bytes that the consumer's layers will read, of those that are copied."""
        total = 0.0
        for i, edge in enumerate(self.plan.edges):
            entry = self._edges[i][-1].bytes
            found = ranges.needs.get((edge.dst_group, edge.need))
            if edge.grains[0].tokens == 0:
                total += entry if request.start < request.tokens else 0
            elif found is not None:
                total += entry * _entries_read(self.plan.needs[edge.need], request, found.first)
        return int(total)


def bind(plan: Plan, request: Request) -> Binding:
    """Bind one request; for many, keep a Binder."""
    return Binder(plan).bind(request)


def _cut(there: Listed, here: Listed, low: int, high: int, grains: Sequence[int]) -> Iterator[tuple[int, Tiles]]:
    """The tiles of the tokens [low, high) by level, each as coarse as it can be; `low` is where one of the coarsest begins. As
    numbers: an array of one number costs ten times what the number does."""
    for level, tokens in enumerate(grains):
        if low + tokens <= high:
            first, stop = low // tokens, high // tokens
            yield level, Tiles(*stretch(there, first, stop, tokens), *stretch(here, first, stop, tokens))
            low = stop * tokens


def _joined(parts: Sequence[tuple[Ints, ...]]) -> tuple[Ints, ...]:
    return parts[0] if len(parts) == 1 else tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _merged(parts: Sequence[tuple[Ints, ...]]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    if not parts:
        return _NONE, _NONE, _NONE, _NONE, _NONE
    src_region, src, dst_region, dst, length = _joined(parts)
    src, dst, length, src_region, dst_region = merge(src, dst, length, src_region, dst_region)
    return src_region, src, dst_region, dst, length


def _wanted(need: Need, group: Paged, request: Request) -> tuple[int, int, int]:
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
