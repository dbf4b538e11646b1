"""The proof of a plan against the manifests it claims to join.

It does not repeat the planner's reasoning. Every part is flattened into a line of global indices; where the lines of a
producer's part and a consumer's part overlap, bytes mean the same, and that is the list of all copies that would be right.
A plan is proved when, at its finest grain, every run lies inside that list, runs and fills tile every slot of the
consumer's blocks exactly once, and every coarser grain is the finer one repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from kvferry.errors import ProofError
from kvferry.manifest.schema import Axis, Layer, Manifest, Part, Reach, Shape
from kvferry.plan.schema import Edge, Fill, Grain, Plan, Run
from kvferry.strided import Digits, Ints, canonical, merge, offsets, size, spread

MAX_RUNS: Final = 1 << 21

LaneKey = tuple[int, Digits]
NeedKey = tuple[Reach, int, bool]
Tag = tuple[int, int, int, NeedKey, LaneKey, LaneKey]
Triple = tuple[Ints, Ints, Ints]


def prove(plan: Plan, consumer: Manifest, producers: Sequence[Manifest]) -> None:
    """Raise ProofError, naming layer, part, axis and interval, unless `plan` loads `consumer` from `producers` exactly."""
    prover = _Prover(plan, consumer, producers)
    prover.check_claims()
    prover.check_meanings()
    prover.check_tiling()
    prover.check_grains()


class _Prover:
    def __init__(self, plan: Plan, consumer: Manifest, producers: Sequence[Manifest]) -> None:
        self.plan = plan
        self.consumer = consumer
        by_rank = {p.identity: p for p in producers}
        self.sources = [_same_side(s.identity, s.regions, s.groups, by_rank.get(s.identity)) for s in plan.sources]
        _same_side(plan.consumer.identity, plan.consumer.regions, plan.consumer.groups, consumer)
        self.dst_base = _bases(consumer)
        self.src_base = [_bases(s) for s in self.sources]
        self.groups = {g.id: g for g in consumer.groups}

    def check_claims(self) -> None:
        """Every index refers to something, and expanding the runs stays within bounds."""
        plan = self.plan
        total = 0
        for flow in plan.flows:
            self._check_flow(flow)
            for grain in flow.grains:
                for run in grain.runs:
                    total += size((c, 0) for c, _, _ in run.repeats)
                    if total > MAX_RUNS:
                        raise ProofError(f"the plan has more than {MAX_RUNS:,} runs a tile")
                    if max(run.src_lane, run.dst_lane) >= len(plan.lanes):
                        raise ProofError("a run refers to a lane that the plan does not have")
                    bases = self.src_base[flow.source] if isinstance(flow, Edge) else self.dst_base
                    if run.src_region >= len(bases) or run.dst_region >= len(self.dst_base):
                        raise ProofError("a run refers to a region that its rank does not have")
                    self._check_tiles(flow, grain, run)

    def _check_flow(self, flow: Edge | Fill) -> None:
        plan = self.plan
        if flow.need is not None and flow.need >= len(plan.needs):
            raise ProofError(f"need {flow.need} is not in the plan")
        if isinstance(flow, Edge):
            if flow.source >= len(self.sources):
                raise ProofError(f"source {flow.source} is not in the plan")
            known = {g.id for g in self.sources[flow.source].groups}
            if flow.src_group not in known or flow.dst_group not in self.groups:
                raise ProofError(f"group {flow.src_group} there or {flow.dst_group} here is not declared")
        elif flow.group not in self.groups:
            raise ProofError(f"group {flow.group} is not declared")
        tokens = [g.tokens for g in flow.grains]
        if any(fine == 0 or coarse % fine for coarse, fine in pairwise(tokens)):
            raise ProofError(f"grains of {tokens} tokens do not divide each other")

    def _check_tiles(self, flow: Edge | Fill, grain: Grain, run: Run) -> None:
        dst = self.groups[flow.dst_group if isinstance(flow, Edge) else flow.group]
        src = self.sources[flow.source].group(flow.src_group) if isinstance(flow, Edge) else dst
        for group, lane in ((src, run.src_lane), (dst, run.dst_lane)):
            tiles = size(self.plan.lanes[lane].digits)
            if tiles * grain.tokens != group.tokens and not (grain.tokens == group.tokens == 0 and tiles == 1):
                raise ProofError(f"a lane of {tiles} tiles of {grain.tokens} tokens does not make a block of group {group.id}")

    def _expand(self, flow: Edge | Fill, grain: Grain) -> dict[tuple[LaneKey, LaneKey], Triple]:
        """All runs of a tile by their lanes, as (source, destination, length) on the ranks' lines of addresses."""
        src_base = self.src_base[flow.source] if isinstance(flow, Edge) else self.dst_base
        out: dict[tuple[int, int], list[Triple]] = defaultdict(list)
        for run in grain.runs:
            src = spread(src_base[run.src_region] + run.src_offset, [(c, s) for c, s, _ in run.repeats])
            dst = spread(self.dst_base[run.dst_region] + run.dst_offset, [(c, d) for c, _, d in run.repeats])
            out[run.src_lane, run.dst_lane].append((src, dst, np.full(len(src), run.length, np.int64)))
        return {(self._lane(s), self._lane(d)): _concatenate(triples) for (s, d), triples in out.items()}

    def _lane(self, index: int) -> LaneKey:
        lane = self.plan.lanes[index]
        return lane.block_stride, canonical(lane.digits)

    def _need(self, index: int) -> NeedKey:
        need = self.plan.needs[index]
        return need.reach, need.per_entry, need.partial

    def check_meanings(self) -> None:
        """Every run of the finest grain copies bytes that mean the same on both sides."""
        right = self._right_copies()
        for edge in self.plan.edges:
            need = self._need(edge.need)
            if edge.grains[-1].tokens != need[1]:
                raise ProofError(f"the finest grain has {edge.grains[-1].tokens} tokens, an entry stands for {need[1]}")
            for (src_lane, dst_lane), (src, dst, length) in self._expand(edge, edge.grains[-1]).items():
                tag = (edge.source, edge.src_group, edge.dst_group, need, src_lane, dst_lane)
                if tag not in right:
                    raise ProofError(
                        f"{self._whereabouts(edge.dst_group, int(dst[0]))}: no producer part is placed like this run says"
                    )
                there, here, whole = right[tag]
                at = np.searchsorted(here, dst, side="right") - 1
                inside = (at >= 0) & (dst + length <= here[at] + whole[at]) & (src - dst == there[at] - here[at])
                if not inside.all():
                    bad = int(dst[np.argmin(inside)])
                    raise ProofError(
                        f"{self._whereabouts(edge.dst_group, bad)}: would be read from bytes of "
                        f"{self.sources[edge.source].identity} that mean something else"
                    )

    def _right_copies(self) -> dict[Tag, Triple]:
        """All copies of one entry, in block 0, that join equal meanings; merged, by destination."""
        parts: dict[Tag, list[Triple]] = defaultdict(list)
        holders = [{layer.name: layer for layer in s.layers} for s in self.sources]
        for layer in self.consumer.layers:
            for index, held in enumerate(holders):
                other = held.get(layer.name)
                if other is None:
                    continue
                there = {p.name: p for p in other.parts}
                for part in layer.parts:
                    twin = there.get(part.name)
                    if twin is None:
                        continue
                    src_shape, shape = self.sources[index].shapes[twin.shape], self.consumer.shapes[part.shape]
                    tag = (
                        index,
                        other.group,
                        layer.group,
                        _need_of(layer, shape),
                        _lane_of(twin, src_shape),
                        _lane_of(part, shape),
                    )
                    src, dst, length = _overlay(src_shape, shape)
                    src_at = self.src_base[index][twin.region] + twin.offset
                    dst_at = self.dst_base[part.region] + part.offset
                    parts[tag].append((src + src_at, dst + dst_at, length))
        return {tag: _sorted_and_merged(_concatenate(triples)) for tag, triples in parts.items()}

    def check_tiling(self) -> None:
        """Per group: copies and unconditional fills tile all slots once; conditional fills are where copies are."""
        copied: dict[tuple[int, NeedKey], list[Triple]] = defaultdict(list)
        filled: dict[tuple[int, NeedKey], list[Triple]] = defaultdict(list)
        everything: dict[int, list[Triple]] = defaultdict(list)
        for edge in self.plan.edges:
            triples = [(dst, dst, n) for _, dst, n in self._expand(edge, edge.grains[-1]).values()]
            copied[edge.dst_group, self._need(edge.need)] += triples
            everything[edge.dst_group] += triples
        for fill in self.plan.fills:
            lanes = self._fill_lanes(fill)
            if fill.need is None:
                everything[fill.group] += lanes
            else:
                filled[fill.group, self._need(fill.need)] += lanes
        for group in self.groups:
            self._tiles(group, everything[group])
        for key, triples in copied.items():
            if key[1][1] == 0:
                continue
            wanted, got = _sorted_and_merged(_concatenate(triples)), _sorted_and_merged(_concatenate(filled.pop(key, [])))
            if not _same(wanted, got):
                raise ProofError(f"group {key[0]}: what is not copied would not be filled, or more than that")
        if any(filled.values()):
            raise ProofError("the plan fills for tokens that it never copies")

    def _fill_lanes(self, fill: Fill) -> list[Triple]:
        """The destination bytes of a fill's finest grain; its lanes must be those of the parts it covers."""
        out = []
        slots = self._slots_by_lane(fill.group)
        for (src_lane, dst_lane), (src, dst, n) in self._expand(fill, fill.grains[-1]).items():
            if src_lane != dst_lane or not np.array_equal(src, dst):
                raise ProofError(f"group {fill.group}: a fill must have the destination on both sides")
            here = slots.get(dst_lane)
            at = np.searchsorted(here[1], dst, side="right") - 1 if here is not None else None
            if here is None or at is None or not ((at >= 0) & (dst + n <= here[1][at] + here[2][at])).all():
                raise ProofError(f"{self._whereabouts(fill.group, int(dst[0]))}: filled where no part is placed like that")
            out.append((dst, dst, n))
        return out

    def _slots_by_lane(self, group: int) -> dict[LaneKey, Triple]:
        slots: dict[LaneKey, list[Triple]] = defaultdict(list)
        for layer in self.consumer.layers:
            if layer.group == group:
                for part in layer.parts:
                    shape = self.consumer.shapes[part.shape]
                    at, n = _slots(shape)
                    at = at + (self.dst_base[part.region] + part.offset)
                    slots[_lane_of(part, shape)].append((at, at, n))
        return {lane: _sorted_and_merged(_concatenate(triples)) for lane, triples in slots.items()}

    def _tiles(self, group: int, triples: list[Triple]) -> None:
        _, dst, length = _concatenate(triples)
        order = np.argsort(dst, kind="stable")
        dst, length = dst[order], length[order]
        twice = np.flatnonzero(dst[1:] < dst[:-1] + length[:-1])
        if len(twice):
            raise ProofError(f"{self._whereabouts(group, int(dst[twice[0] + 1]))}: would be written twice")
        wanted = _sorted_and_merged(_concatenate(list(self._slots_by_lane(group).values())))
        got = merge(dst, dst, length)
        if not _same(wanted, got):
            bad = _first_difference(wanted, got)
            raise ProofError(f"{self._whereabouts(group, bad)}: neither copied nor filled, or no slot of this group")

    def check_grains(self) -> None:
        """Every coarser grain is the next finer one, repeated over the tile."""
        for flow in self.plan.flows:
            group = flow.dst_group if isinstance(flow, Edge) else flow.group
            for coarse, fine in pairwise(flow.grains):
                bad = _not_repeated(self._expand(flow, coarse), self._expand(flow, fine), coarse.tokens // fine.tokens)
                if bad is not None:
                    where = self._whereabouts(group, bad)
                    raise ProofError(f"{where}: tiles of {coarse.tokens} tokens differ from those of {fine.tokens}")

    def _whereabouts(self, group: int, address: int) -> str:
        """The layer, part, axis and index of a destination byte of block 0, for an error."""
        for layer in self.consumer.layers:
            for part in layer.parts if layer.group == group else ():
                shape = self.consumer.shapes[part.shape]
                inside = address - self.dst_base[part.region] - part.offset
                found = _coordinates(shape, inside)
                if found is not None:
                    return f"{layer.name} {part.name} {found}"
        return f"group {group}, byte {address - max(b for b in self.dst_base if b <= address)} of its region"


def _same_side(identity: object, regions: object, groups: object, manifest: Manifest | None) -> Manifest:
    if manifest is None or (manifest.identity, manifest.regions, manifest.groups) != (identity, regions, groups):
        raise ProofError(f"the plan was made for {identity} with other regions, groups or incarnation than its manifest has")
    return manifest


def _bases(manifest: Manifest) -> list[int]:
    """Places of the regions on one line of addresses, with a gap between them so that no run joins two."""
    out, at = [], 0
    for region in manifest.regions:
        out.append(at)
        at += region.length + 1
    if at >= 1 << 61:
        raise ProofError(f"{manifest.identity}: regions of {at:,} bytes in all are too large to prove")
    return out


def _concatenate(triples: Sequence[Triple]) -> Triple:
    if not triples:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    return tuple(np.concatenate(column) for column in zip(*triples, strict=True))  # type: ignore[return-value]


def _sorted_and_merged(triple: Triple) -> Triple:
    src, dst, length = triple
    order = np.argsort(dst, kind="stable")
    return merge(src[order], dst[order], length[order])  # type: ignore[return-value]


def _same(one: Iterable[Ints], other: Iterable[Ints]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _first_difference(wanted: Iterable[Ints], got: Iterable[Ints]) -> int:
    """The lowest address at which two merged lists of intervals differ."""
    marks: list[set[int]] = []
    for _, start, length in (tuple(wanted), tuple(got)):
        marks.append({*start.tolist(), *(start + length).tolist()})
    return min(marks[0] ^ marks[1])


def _need_of(layer: Layer, shape: Shape) -> NeedKey:
    if shape.token is None:
        return layer.reach, 0, False
    return layer.reach, shape.token.per_entry, shape.element.opaque != ""


def _lane_of(part: Part, shape: Shape) -> LaneKey:
    return part.block_stride, canonical(shape.token.digits) if shape.token else ()


def _line(shape: Shape, order: Sequence[str], live: bool) -> tuple[Ints, Ints, int]:
    """A part as pieces of one length on the line of global indices: (place on the line, place in memory), in bytes."""
    axes = {a.name: a for a in shape.axes}
    unit = length = shape.element.bytes
    weight = 1
    start = 0
    line = np.zeros(1, np.int64)
    memory = np.zeros(1, np.int64)
    contiguous = True
    for name in reversed(order):
        axis = axes[name]
        count, full = _owned(axis, live)
        digits = canonical(axis.digits)
        if contiguous and (count <= 1 or (len(digits) == 1 and digits[0][1] == length)):
            length *= count
            start += axis.start * weight
            contiguous = axis.start == 0 and count == full
        else:
            contiguous = False
            at = np.arange(count, dtype=np.int64)
            line = ((axis.start + at)[:, None] * weight + line).reshape(-1)
            memory = (offsets(axis.digits, at)[:, None] + memory).reshape(-1)
        weight *= full
    return (line + start) * unit, memory, length


def _owned(axis: Axis, live: bool) -> tuple[int, int]:
    if not live:
        return axis.stop - axis.start, axis.size
    return max(0, min(axis.stop, axis.live_size) - axis.start), axis.live_size


def _memory_order(shape: Shape) -> list[str]:
    """Axis names, widest stride first."""
    return [a.name for a in sorted(shape.axes, key=lambda a: -min((s for _, s in canonical(a.digits)), default=0))]


@lru_cache(maxsize=16384)
def _overlay(src: Shape, dst: Shape) -> Triple:
    """Where the lines of two parts overlap: (source offset, destination offset, length) relative to their places."""
    order = _memory_order(dst)
    src_line, src_memory, src_length = _line(src, order, live=True)
    dst_line, dst_memory, dst_length = _line(dst, order, live=True)
    by_line = np.argsort(src_line, kind="stable")
    src_line, src_memory = src_line[by_line], src_memory[by_line]
    first = np.searchsorted(src_line + src_length, dst_line, side="right")
    last = np.searchsorted(src_line, dst_line + dst_length, side="left")
    count = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(dst_line)), count)
    other = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    start = np.maximum(src_line[other], dst_line[mine])
    stop = np.minimum(src_line[other] + src_length, dst_line[mine] + dst_length)
    triple = (start - src_line[other] + src_memory[other], start - dst_line[mine] + dst_memory[mine], stop - start)
    return _sorted_and_merged(triple)


@lru_cache(maxsize=16384)
def _slots(shape: Shape) -> tuple[Ints, Ints]:
    """All bytes of one entry of a part in its block: (offset, length)."""
    _, memory, length = _line(shape, _memory_order(shape), live=False)
    memory = np.sort(memory)
    _, start, lengths = merge(memory, memory, np.full(len(memory), length, np.int64))
    return start, lengths


def _coordinates(shape: Shape, offset: int) -> str | None:
    """The indices of the element at `offset` of a part in block 0, or None if there is none."""
    named = [(a.name, a.digits, a.start) for a in shape.axes]
    if shape.token:
        named.append(("token", shape.token.digits, 0))
    rest, index = offset, dict.fromkeys((n for n, _, _ in named), 0)
    steps = []
    for name, digits, _ in named:
        weight = 1
        for count, stride in reversed(digits):
            steps.append((stride, count, name, weight))
            weight *= count
    for stride, count, name, weight in sorted(steps, reverse=True):
        digit = min(rest // stride, count - 1) if stride and rest > 0 else 0
        rest -= digit * stride
        index[name] += digit * weight
    if not 0 <= rest < shape.element.bytes:
        return None
    return ", ".join(f"{name} [{start + index[name]}, {start + index[name] + 1})" for name, _, start in named)


def _not_repeated(
    coarse: dict[tuple[LaneKey, LaneKey], Triple], fine: dict[tuple[LaneKey, LaneKey], Triple], ratio: int
) -> int | None:
    """A destination address where `coarse` is not `ratio` tiles of `fine`, or None."""
    tiles = np.arange(ratio, dtype=np.int64)
    triples = []
    for (src_lane, dst_lane), (src, dst, length) in fine.items():
        src_tiles = src + offsets(src_lane[1], tiles)[:, None]
        dst_tiles = dst + offsets(dst_lane[1], tiles)[:, None]
        triples.append((src_tiles.reshape(-1), dst_tiles.reshape(-1), np.tile(length, ratio)))
    wanted = _sorted_and_merged(_concatenate(triples))
    got = _sorted_and_merged(_concatenate(list(coarse.values())))
    if not _same(wanted, got):
        return int(got[1][0]) if _same(wanted[1:], got[1:]) else _first_difference(wanted, got)
    for (src_lane, dst_lane), (_, dst, length) in coarse.items():
        order = np.argsort(dst)
        dst, length = dst[order], length[order]
        for (fine_src, fine_dst), (_, fine_at, _) in fine.items():
            at = np.searchsorted(dst, fine_at, side="right") - 1
            inside = (at >= 0) & (fine_at < dst[at] + length[at])
            if inside.any() and not (_upper(fine_src, src_lane, ratio) and _upper(fine_dst, dst_lane, ratio)):
                return int(fine_at[np.argmax(inside)])
    return None


def _upper(fine: LaneKey, coarse: LaneKey, ratio: int) -> bool:
    """Do `ratio` tiles of the fine lane make one of the coarse, everywhere in the block?"""
    at = np.arange(size(coarse[1]), dtype=np.int64)
    inner = np.arange(ratio, dtype=np.int64)
    joined = offsets(fine[1], at[:, None] * ratio + inner)
    return fine[0] == coarse[0] and bool((joined == offsets(coarse[1], at)[:, None] + offsets(fine[1], inner)).all())
