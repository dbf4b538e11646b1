"""The proof of a plan against the manifests it claims to join.

It does not repeat the planner's reasoning. Every part is flattened into a line of global indices; where the lines of a
producer's part and a consumer's part overlap, bytes mean the same, and that is the list of all copies that would be right.
A plan is proved when, at its finest grain, every run lies inside that list, runs and fills tile every slot of the
consumer's blocks exactly once, and every coarser grain is the finer one repeated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np

from kvferry.bounds import end
from kvferry.errors import ProofError, ScatteredError
from kvferry.manifest.schema import Group, Identity, Layer, Manifest, Part, Rank, Reach, Shape, TokenPaged
from kvferry.plan.columns import expanded
from kvferry.plan.lines import (
    Triple,
    concatenate,
    coordinates,
    first_difference,
    overlay,
    picked,
    pieces_of,
    same,
    same_meaning,
    scratch_of,
    slots_of,
    sorted_and_merged,
)
from kvferry.plan.schema import Edge, Fill, Grain, Plan, Run
from kvferry.strided import Digits, Ints, canonical, cut, offsets, size

MAX_RUNS: Final = 1 << 21
MAX_LOOKS: Final = 1 << 24
"""Pieces of the producer's parts, and runs of finer tiles of which coarser ones are made: what is compared for one plan."""

LaneKey = tuple[int, Digits]
NeedKey = tuple[Reach, int, bool, int]
Tag = tuple[int, int, int, NeedKey, LaneKey, LaneKey]


def prove(plan: Plan, consumer: Manifest, producers: Sequence[Manifest]) -> None:
    """Raise ProofError, naming layer, part, axis and interval, unless `plan` loads `consumer` from `producers` exactly.

    Which ranks it must tell follows from the plans of all of the consumer's ranks: of one of several, `Proofs.prove_all` knows.
    """
    Proofs(producers).prove(plan, consumer)


class Proofs:
    """Proofs of plans over one producer. Plans of equal runs between ranks that differ in nothing but rank and addresses are
    looked at once; what each says of ranks is looked at in each."""

    def __init__(self, producers: Sequence[Manifest]) -> None:
        self._by_rank = {p.identity: p for p in producers}
        self._ranks = {p.identity.rank for p in producers}
        self._held = {layer.name for producer in producers for layer in producer.layers}
        self._bodies: dict[Identity, Manifest] = {}
        self._proved: set[tuple[object, ...]] = set()

    def prove_all(self, plans: Sequence[Plan], consumers: Sequence[Manifest]) -> None:
        """The plans of all ranks of a consumer, which together read every rank of the producer, or tell it, each by one."""
        for plan, consumer in zip(plans, consumers, strict=True):
            self.prove(plan, consumer)
        if not plans:
            return
        told = Counter(rank for plan in plans for rank in plan.tells)
        unread = self._ranks - {source.identity.rank for plan in plans for source in plan.sources}
        for rank in sorted(self._ranks | told.keys(), key=lambda rank: rank.ordinal):
            if told[rank] != (rank in unread):
                raise ProofError(f"producer rank {rank} is told of the end by {told[rank]} ranks, {int(rank in unread)} should")

    def prove(self, plan: Plan, consumer: Manifest) -> None:
        """As `prove` does."""
        sources = [_same_side(s.identity, s.regions, s.groups, self._by_rank.get(s.identity)) for s in plan.sources]
        _same_side(plan.consumer.identity, plan.consumer.regions, plan.consumer.groups, consumer)
        _check_sides(plan, consumer, sources, self._ranks)
        bodies = tuple(self._body(source) for source in sources)
        key = plan.lanes, plan.needs, plan.edges, plan.fills, consumer.body, bodies
        if key in self._proved:
            return
        prover = _Prover(plan, consumer, sources, self._held)
        prover.check_needs()
        prover.check_claims()
        prover.check_meanings()
        prover.check_tiling()
        prover.check_grains()
        self._proved.add(key)

    def _body(self, source: Manifest) -> Manifest:
        if source.identity not in self._bodies:
            self._bodies[source.identity] = source.body
        return self._bodies[source.identity]


def _check_sides(plan: Plan, consumer: Manifest, sources: Sequence[Manifest], producers: Set[Rank]) -> None:
    """The sources are ranks of one engine that one set of block tables serves, and all of them are read."""
    engines = {(s.identity.engine, s.identity.incarnation) for s in sources}
    models = {consumer.identity.model, *(s.identity.model for s in sources)}
    if len(engines) > 1 or len(models) > 1:
        raise ProofError("the plan joins ranks of different engines, incarnations or models")
    ranks = {s.identity.rank for s in sources}
    if len(ranks) < len(sources) or {e.source for e in plan.edges} != set(range(len(sources))):
        raise ProofError("a source is in the plan twice, or nothing is read from it")
    if len(set(plan.tells)) < len(plan.tells) or not set(plan.tells) <= producers - ranks:
        raise ProofError("the plan tells a rank twice, or one that it reads or that the producer does not have")
    alone = consumer.identity.rank.tp_size * consumer.identity.rank.pp_size == 1
    if alone and set(plan.tells) < producers - ranks:
        untold = min(producers - ranks - set(plan.tells), key=lambda rank: rank.ordinal)
        raise ProofError(f"the plan neither reads producer rank {untold} nor tells it of the end, and no other rank could")
    groups: dict[int, Group] = {}
    for side in sources:
        for group in side.groups:
            known = groups.setdefault(group.id, group)
            if (known.paging, known.blocks) != (group.paging, group.blocks):
                raise ProofError(f"group {group.id}: the producer's ranks have other blocks there, or another number")
    for group in (*groups.values(), *consumer.groups):
        if isinstance(group.paging, TokenPaged) and (group.paging.cyclic or group.paging.ring):
            raise ProofError(f"group {group.id}: tokens dealt to ranks or kept in a ring cannot be proved yet")


class _Prover:
    def __init__(self, plan: Plan, consumer: Manifest, sources: list[Manifest], held: Set[str]) -> None:
        self.plan = plan
        self.consumer = consumer
        self.sources = sources
        self.dst_base = _bases(consumer)
        self.src_base = [_bases(s) for s in self.sources]
        self.groups = {g.id: g for g in consumer.groups}
        self.block_bytes = _block_bytes(consumer)
        self.lanes: list[LaneKey] = [(lane.block_stride, canonical(lane.digits)) for lane in plan.lanes]
        self._slots_of: dict[int, dict[LaneKey, Triple]] = {}
        self._expanded: dict[tuple[int, int], dict[tuple[LaneKey, LaneKey], Triple]] = {}
        self._twins = list(self._find_twins())
        self.held = held

    def check_needs(self) -> None:
        """Every need is that of the layers it names, of all of them, and no other need is the same."""
        layers: dict[NeedKey, dict[str, None]] = defaultdict(dict)
        for _, layer, part, other, _ in self._twins:
            if not _holds_state(self.consumer.shapes[part.shape]):
                continue
            layers[_need_of(layer, self.consumer.shapes[part.shape], other.group)][layer.name] = None
        claimed = [self._need(i) for i in range(len(self.plan.needs))]
        if len(set(claimed)) < len(claimed):
            raise ProofError("the plan has two needs that are the same")
        for key, need in zip(claimed, self.plan.needs, strict=True):
            names = layers.get(key, {})
            if not need.layers or len(need.layers) != len(names) or names.keys() != set(need.layers):
                wrong = sorted(names.keys() ^ set(need.layers)) or [*need.layers[:1], "no layer"]
                raise ProofError(f"{wrong[0]}: is not one of the layers whose need the plan says it is, or is left out")

    def _find_twins(self) -> Iterable[tuple[int, Layer, Part, Layer, Part]]:
        """Parts of the consumer with those of the same name of the sources: source, layer, part, its layer, its part."""
        for index, source in enumerate(self.sources):
            held = {layer.name: layer for layer in source.layers}
            for layer in self.consumer.layers:
                other = held.get(layer.name)
                there = {p.name: p for p in other.parts} if other else {}
                for part in layer.parts:
                    if other and part.name in there:
                        yield index, layer, part, other, there[part.name]

    def check_claims(self) -> None:
        """Every index refers to something, every run stays in its regions, and expanding them stays within bounds."""
        total = 0
        for flow in self.plan.flows:
            self._check_flow(flow)
            group = self.groups[flow.dst_group if isinstance(flow, Edge) else flow.group]
            for grain in flow.grains:
                counts = [prod(c for c, _, _ in run.repeats) for run in grain.runs]
                total += sum(counts)
                if total > MAX_RUNS:
                    raise self._too_scattered()
                self._check_indices(flow, grain)
                self._check_reach(flow, grain, group)
                moved = sum(count * run.length for count, run in zip(counts, grain.runs, strict=True))
                if moved * max(group.tokens, 1) > self.block_bytes[group.id] * max(grain.tokens, 1):
                    where = self._run_whereabouts(group, grain.runs[-1])
                    raise ProofError(f"{where}: a tile of {grain.tokens} tokens would get {moved:,} bytes, more than it has")

    def _too_scattered(self) -> ScatteredError:
        """Says how many runs there are, and names what falls into most of them."""
        found = [
            (prod(c for c, _, _ in run.repeats), run, flow.dst_group if isinstance(flow, Edge) else flow.group)
            for flow in self.plan.flows
            for grain in flow.grains
            for run in grain.runs
        ]
        total = sum(count for count, _, _ in found)
        count, run, group = max(found, key=lambda one: one[0])
        known = group in self.groups and run.dst_region < len(self.dst_base)
        where = self._run_whereabouts(self.groups[group], run) if known else "a plan"
        return ScatteredError(
            f"{where}: the plan of one rank has {total:,} runs, {count:,} of {run.length:,} bytes here alone, and at most "
            f"{MAX_RUNS:,} are proved: both sides keep it in orders that have no longer runs in common; more tensor-parallel "
            "ranks here have fewer each"
        )

    def _check_indices(self, flow: Edge | Fill, grain: Grain) -> None:
        dst = self.groups[flow.dst_group if isinstance(flow, Edge) else flow.group]
        src = self.sources[flow.source].group(flow.src_group) if isinstance(flow, Edge) else dst
        src_regions = len((self.sources[flow.source] if isinstance(flow, Edge) else self.consumer).regions)
        if max(run.src_region for run in grain.runs) >= src_regions:
            raise ProofError("a run refers to a region that its source does not have")
        if max(run.dst_region for run in grain.runs) >= len(self.dst_base):
            raise ProofError("a run refers to a region that the consumer does not have")
        lanes = {(src.id, src.tokens, run.src_lane): run for run in grain.runs}
        lanes |= {(dst.id, dst.tokens, run.dst_lane): run for run in grain.runs}
        for (group, tokens, lane), run in lanes.items():
            if lane >= len(self.lanes):
                raise ProofError("a run refers to a lane that the plan does not have")
            tiles = size(self.lanes[lane][1])
            if tiles * grain.tokens != tokens or (tokens == 0 and tiles != 1):
                where = self._run_whereabouts(dst, run)
                raise ProofError(
                    f"{where}: a lane of {tiles} tiles of {grain.tokens} tokens does not make a block of group {group}"
                )

    def _check_reach(self, flow: Edge | Fill, grain: Grain, group: Group) -> None:
        src_regions = (self.sources[flow.source] if isinstance(flow, Edge) else self.consumer).regions
        dst_regions = self.consumer.regions
        for run in grain.runs:
            src = end(run.src_offset, run.length, [(count, stride) for count, stride, _ in run.repeats])
            dst = end(run.dst_offset, run.length, [(count, stride) for count, _, stride in run.repeats])
            for reached, region in ((src, src_regions[run.src_region]), (dst, dst_regions[run.dst_region])):
                if reached > region.length:
                    where = self._run_whereabouts(group, run)
                    raise ProofError(
                        f"{where}: a run reaches byte {reached:,} of region {region.name}, which has {region.length:,}"
                    )

    def _run_whereabouts(self, group: Group, run: Run) -> str:
        return self._whereabouts(group.id, self.dst_base[run.dst_region] + run.dst_offset)

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
            blocks = (self.sources[flow.source].group(flow.src_group).tokens, self.groups[flow.dst_group].tokens)
        elif flow.group not in self.groups:
            raise ProofError(f"group {flow.group} is not declared")
        else:
            blocks = (self.groups[flow.group].tokens, self.groups[flow.group].tokens)
        tokens = [g.tokens for g in flow.grains]
        if not _grains_fit(tokens, blocks):
            raise ProofError(f"grains of {tokens} tokens do not divide each other and blocks of {blocks} tokens")
        if flow.need is not None and tokens[-1] != plan.needs[flow.need].per_entry:
            per_entry = plan.needs[flow.need].per_entry
            raise ProofError(f"the finest grain has {tokens[-1]} tokens, an entry stands for {per_entry}")
        if not all(g.runs for g in flow.grains):
            raise ProofError(f"a grain of {tokens} tokens has no runs")

    def _expand(self, flow: Edge | Fill, grain: Grain) -> dict[tuple[LaneKey, LaneKey], Triple]:
        """All runs of a tile by their lanes, as (source, destination, length) on the ranks' lines of addresses."""
        if not self._expanded:
            self._expand_all()
        return self._expanded[id(flow), id(grain)]

    def _expand_all(self) -> None:
        """Expand all runs of the plan at once, then take them apart by grain and lanes."""
        grains = [(flow, grain) for flow in self.plan.flows for grain in flow.grains]
        runs = expanded([run for _, grain in grains for run in grain.runs])
        counts = [sum(prod(c for c, _, _ in run.repeats) for run in grain.runs) for _, grain in grains]
        dst_all = np.array(self.dst_base, np.int64)[runs.dst_region] + runs.dst_offset
        pairs = runs.src_lane * len(self.lanes) + runs.dst_lane
        stop = 0
        for (flow, grain), count in zip(grains, counts, strict=True):
            mine = slice(stop, stop := stop + count)
            base = self.src_base[flow.source] if isinstance(flow, Edge) else self.dst_base
            src = np.array(base, np.int64)[runs.src_region[mine]] + runs.src_offset[mine]
            found = self._by_lanes(pairs[mine], (src, dst_all[mine], runs.length[mine]))
            self._expanded[id(flow), id(grain)] = found

    def _by_lanes(self, pairs: Ints, triple: Triple) -> dict[tuple[LaneKey, LaneKey], Triple]:
        codes = [int(pairs[0])] if (pairs == pairs[0]).all() else np.unique(pairs).tolist()
        out: dict[tuple[LaneKey, LaneKey], list[Triple]] = defaultdict(list)
        for code in codes:
            src_lane, dst_lane = divmod(code, len(self.lanes))
            some = triple if len(codes) == 1 else picked(pairs == code, triple)
            out[self.lanes[src_lane], self.lanes[dst_lane]].append(some)
        return {lanes: triples[0] if len(triples) == 1 else concatenate(triples) for lanes, triples in out.items()}

    def _need(self, index: int) -> NeedKey:
        need = self.plan.needs[index]
        return need.reach, need.per_entry, need.partial, need.src_group

    def check_meanings(self) -> None:
        """Every run of the finest grain copies bytes that mean the same on both sides."""
        right = self._right_copies()
        for edge in self.plan.edges:
            need = self._need(edge.need)
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
        alike: dict[tuple[Tag, int, int], list[tuple[int, int]]] = defaultdict(list)
        for index, layer, part, other, twin in self._twins:
            src_shape, shape = self.sources[index].shapes[twin.shape], self.consumer.shapes[part.shape]
            if layer.reach != other.reach or not same_meaning(src_shape, shape):
                identity = self.sources[index].identity
                raise ProofError(f"{layer.name} {part.name}: {identity} holds something else under this name")
            need = _need_of(layer, shape, other.group)
            tag = (index, other.group, layer.group, need, _lane_of(twin, src_shape), _lane_of(part, shape))
            src_at = self.src_base[index][twin.region] + twin.offset
            alike[tag, twin.shape, part.shape].append((src_at, self.dst_base[part.region] + part.offset))
        parts: dict[Tag, list[Triple]] = defaultdict(list)
        total = looked = 0
        for (tag, src_index, dst_index), places in alike.items():
            src_shape, dst_shape = self.sources[tag[0]].shapes[src_index], self.consumer.shapes[dst_index]
            looked += pieces_of(src_shape, dst_shape)
            if looked > MAX_LOOKS:
                raise ScatteredError(f"group {tag[2]}: the producer's parts lie in more than {MAX_LOOKS:,} pieces")
            src, dst, length = overlay(src_shape, dst_shape)
            total += len(length) * len(places)
            if total > MAX_RUNS:
                raise ScatteredError(f"group {tag[2]}: more than {MAX_RUNS:,} runs would be right in one tile")
            at = np.array(places, np.int64)
            if len(length):
                parts[tag].append(((at[:, :1] + src).reshape(-1), (at[:, 1:] + dst).reshape(-1), np.tile(length, len(places))))
        return {tag: sorted_and_merged(concatenate(triples)) for tag, triples in parts.items()}

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
                self._check_unconditional(fill.group, lanes)
                everything[fill.group] += lanes
            else:
                filled[fill.group, self._need(fill.need)] += lanes
        for group in self.groups:
            self._tiles(group, everything[group])
        for key, triples in copied.items():
            if key[1][1] == 0:
                continue
            wanted, got = sorted_and_merged(concatenate(triples)), sorted_and_merged(concatenate(filled.pop(key, [])))
            if not same(wanted, got):
                where = self._whereabouts(key[0], first_difference(wanted, got))
                raise ProofError(f"{where}: what is not copied would not be filled, or more than that")
        for (group, _), triples in filled.items():
            raise ProofError(f"{self._whereabouts(group, int(triples[0][1][0]))}: filled for tokens that are never copied")

    def _fill_lanes(self, fill: Fill) -> list[Triple]:
        """The destination bytes of a fill's finest grain; its lanes must be those of the parts it covers."""
        out = []
        slots = self._slots_by_lane(fill.group)
        for (src_lane, dst_lane), (src, dst, n) in self._expand(fill, fill.grains[-1]).items():
            if src_lane != dst_lane or not np.array_equal(src, dst):
                where = self._whereabouts(fill.group, int(dst[0]))
                raise ProofError(f"{where}: a fill must have the destination on both sides")
            here = slots.get(dst_lane)
            at = np.searchsorted(here[1], dst, side="right") - 1 if here is not None else None
            if here is None or at is None or not ((at >= 0) & (dst + n <= here[1][at] + here[2][at])).all():
                raise ProofError(f"{self._whereabouts(fill.group, int(dst[0]))}: filled where no part is placed like that")
            out.append((dst, dst, n))
        return out

    def _check_unconditional(self, group: int, triples: list[Triple]) -> None:
        """What is filled in every loaded block is scratch, or belongs to a layer that no producer rank holds."""
        free: list[Triple] = []
        for layer in self.consumer.layers:
            for part in layer.parts if layer.group == group else ():
                shape = self.consumer.shapes[part.shape]
                at, n = scratch_of(shape) if layer.name in self.held else slots_of(shape)
                at = at + (self.dst_base[part.region] + part.offset)
                free.append((at, at, n))
        _, start, length = sorted_and_merged(concatenate(free))
        for _, dst, n in triples:
            at = np.searchsorted(start, dst, side="right") - 1
            inside = (at >= 0) & (dst + n <= start[at] + length[at]) if len(start) else np.zeros(len(dst), bool)
            if not inside.all():
                where = self._whereabouts(group, int(dst[np.argmin(inside)]))
                raise ProofError(f"{where}: would be zeroed in every block, but a producer rank holds it")

    def _slots_by_lane(self, group: int) -> dict[LaneKey, Triple]:
        if group in self._slots_of:
            return self._slots_of[group]
        slots: dict[LaneKey, list[Triple]] = defaultdict(list)
        for layer in self.consumer.layers:
            if layer.group == group:
                for part in layer.parts:
                    shape = self.consumer.shapes[part.shape]
                    at, n = slots_of(shape)
                    at = at + (self.dst_base[part.region] + part.offset)
                    slots[_lane_of(part, shape)].append((at, at, n))
        found = {lane: sorted_and_merged(concatenate(triples)) for lane, triples in slots.items()}
        self._slots_of[group] = found
        return found

    def _tiles(self, group: int, triples: list[Triple]) -> None:
        _, dst, length = concatenate(triples)
        order = np.argsort(dst, kind="stable")
        dst, length = dst[order], length[order]
        twice = np.flatnonzero(dst[1:] < dst[:-1] + length[:-1])
        if len(twice):
            raise ProofError(f"{self._whereabouts(group, int(dst[twice[0] + 1]))}: would be written twice")
        wanted = sorted_and_merged(concatenate(list(self._slots_by_lane(group).values())))
        got = sorted_and_merged((dst, dst, length))
        if not same(wanted, got):
            bad = first_difference(wanted, got)
            raise ProofError(f"{self._whereabouts(group, bad)}: neither copied nor filled, or no slot of this group")

    def check_grains(self) -> None:
        """Every coarser grain is the next finer one, repeated over the tile."""
        looked = 0
        for flow in self.plan.flows:
            group = flow.dst_group if isinstance(flow, Edge) else flow.group
            for coarse, fine in pairwise(flow.grains):
                ratio = coarse.tokens // fine.tokens
                tiles = self._expand(flow, fine)
                looked += ratio * sum(len(length) for _, _, length in tiles.values())
                if looked > MAX_LOOKS:
                    raise ScatteredError(f"tiles of {coarse.tokens} tokens: more than {MAX_LOOKS:,} runs would be compared")
                bad = _not_repeated(self._expand(flow, coarse), tiles, ratio)
                if bad is not None:
                    where = self._whereabouts(group, bad)
                    raise ProofError(f"{where}: tiles of {coarse.tokens} tokens differ from those of {fine.tokens}")

    def _whereabouts(self, group: int, address: int) -> str:
        """The layer, part, axis and index of a destination byte of block 0, or of the byte before it, for an error."""
        for at, side in ((address, ""), (address - 1, "behind ")):
            for layer in self.consumer.layers:
                for part in layer.parts if layer.group == group else ():
                    inside = at - self.dst_base[part.region] - part.offset
                    found = coordinates(self.consumer.shapes[part.shape], inside)
                    if found is not None:
                        return f"{side}{layer.name} {part.name} {found}"
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


def _block_bytes(manifest: Manifest) -> dict[int, int]:
    """Bytes that the parts of each group have in one block."""
    total = {g.id: 0 for g in manifest.groups}
    for layer in manifest.layers:
        for part in layer.parts:
            shape = manifest.shapes[part.shape]
            entries = shape.token.entries if shape.token else 1
            total[layer.group] += prod((a.stop - a.start for a in shape.axes), start=entries) * shape.element.bytes
    return total


def _grains_fit(tokens: Sequence[int], blocks: Sequence[int]) -> bool:
    """Whole states at once, or tiles of tokens that divide the blocks of both sides and each other."""
    if 0 in tokens or 0 in blocks:
        return {*tokens, *blocks} == {0} and len(tokens) == 1
    divides = all(coarse > fine and coarse % fine == 0 for coarse, fine in pairwise(tokens))
    return divides and all(block % tokens[0] == 0 for block in blocks)


def _need_of(layer: Layer, shape: Shape, src_group: int) -> NeedKey:
    if shape.token is None:
        return layer.reach, 0, False, src_group
    return layer.reach, shape.token.per_entry, _partial(shape), src_group


def _holds_state(shape: Shape) -> bool:
    """Whether any index that a rank owns is ever written by prefill; the others are scratch."""
    return all(axis.start < (axis.size if axis.live is None else axis.live) for axis in shape.axes)


def _partial(shape: Shape) -> bool:
    """Whether there can be entries that are incomplete and hold something."""
    return shape.token is not None and shape.token.per_entry != 1 and shape.token.partial is True


def _lane_of(part: Part, shape: Shape) -> LaneKey:
    return part.block_stride, _token_digits(shape)


@lru_cache(maxsize=4096)
def _token_digits(shape: Shape) -> Digits:
    return canonical(shape.token.digits) if shape.token else ()


def _not_repeated(
    coarse: dict[tuple[LaneKey, LaneKey], Triple], fine: dict[tuple[LaneKey, LaneKey], Triple], ratio: int
) -> int | None:
    """A destination address where `coarse` is not `ratio` tiles of `fine`, or None."""
    tiles = np.arange(ratio, dtype=np.int64)
    wanted: dict[tuple[LaneKey, LaneKey], list[Triple]] = defaultdict(list)
    for (src_lane, dst_lane), (src, dst, length) in fine.items():
        if ratio * len(length) > MAX_RUNS:
            raise ScatteredError(f"{ratio} tiles of {len(length):,} runs are too many to prove: the plan lacks a grain between")
        try:
            (src_upper, src_inner), (dst_upper, dst_inner) = cut(src_lane[1], ratio), cut(dst_lane[1], ratio)
        except ValueError:
            return int(dst[0])
        src_tiles, dst_tiles = src + offsets(src_inner, tiles)[:, None], dst + offsets(dst_inner, tiles)[:, None]
        lanes = (src_lane[0], src_upper), (dst_lane[0], dst_upper)
        wanted[lanes].append((src_tiles.reshape(-1), dst_tiles.reshape(-1), np.tile(length, ratio)))
    for lanes in {**wanted, **coarse}:
        right = sorted_and_merged(concatenate(wanted.get(lanes, [])))
        got = sorted_and_merged(concatenate([coarse[lanes]] if lanes in coarse else []))
        if not same(right, got):
            return first_difference(right, got)
    return None
