"""From manifests to a plan: box intersection per part, strided runs, merging; then the proof.

The only place that decides which bytes go where. It has no case for any topology, layout or layer kind: layers that are
placed alike on all sides form a class, a class is worked out once, and its runs are laid at each layer's place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd, prod
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvferry.errors import ScatteredError
from kvferry.manifest.check import check_manifest
from kvferry.manifest.schema import Layer, Manifest, Part, Reach, Shape
from kvferry.plan.choose import (
    Box,
    Deal,
    Fleet,
    base,
    dealt,
    live_box,
    refuse_mismatches,
    routes,
    scratch_boxes,
    signature,
    volume,
)
from kvferry.plan.prove import Proofs
from kvferry.plan.schema import MAX_ITEMS, Edge, Fill, Grain, Lane, Need, Plan, Run, Side
from kvferry.strided import Digits, JointDigits, borders, canonical, cut, fitting_grain, fold, gather, joint, kept

LONGEST_STEP = 32
"""A partial tile is cut at the next finer grain into at most about this many tiles."""

MOST_RUNS = 1 << 19
"""A grain with more runs than this in one tile is left out where there is a finer one."""

MOST_PIECES: Final = 1 << 16
"""Strided runs that are looked at for one plan, in all grains and layers. A plan of so many could not be encoded."""

Base = tuple[int, int]
LaneKey = tuple[int, Digits]
NeedKey = tuple[Reach, int, bool, int]
Boxes = tuple[tuple[int, Box], ...]
"""Boxes of a part, each with the producer rank to read it from."""
_Made = dict[tuple[object, ...], Plan]


@dataclass
class _Room:
    """What is left of MOST_PIECES."""

    left: int = MOST_PIECES

    def take(self, pieces: int, layer: str) -> None:
        """Raises ScatteredError where it is not there."""
        self.left -= pieces
        if self.left < 0:
            raise ScatteredError(
                f"{layer}: the plan of one rank has more than {MOST_PIECES:,} strided runs: the orders of memory on both sides "
                "have too little in common"
            )


@dataclass(frozen=True)
class _Piece:
    """A strided run relative to the first part of its layer on either side: (region, offset) pairs, lanes by value."""

    src: Base
    dst: Base
    length: int
    repeats: JointDigits
    src_lane: LaneKey
    dst_lane: LaneKey


@dataclass(frozen=True)
class _Flow:
    """Where pieces belong: a source's group (or the destination's own, for fills), a consumer's group, a need, and the
    tokens that their entries stand for, since a flow is cut into tiles down to one entry."""

    source: int
    src_group: int
    dst_group: int
    need: NeedKey | None
    per_entry: int


Leveled = tuple[tuple[int, tuple[_Piece, ...]], ...]
"""Pieces by grain, coarsest first."""


class _Member(NamedTuple):
    """A box of one part with the part it comes from; for fills both are the destination's."""

    src_layer: Layer
    src: Part
    src_shape: Shape
    dst: Part
    dst_shape: Shape
    box: Box


@dataclass
class _Class:
    """Layers placed alike: the pieces of each flow and grain, and where each layer lies on every side."""

    pieces: dict[_Flow, Leveled]
    names: list[str] = field(default_factory=list)
    bases: list[dict[int, Base]] = field(default_factory=list)


_DESTINATION = -1


def make_plan(
    consumer: Manifest,
    producers: Sequence[Manifest] | Fleet,
    consumers: Sequence[Manifest] = (),
    *,
    proof: bool = True,
    reader: str = "",
) -> Plan:
    """The proved plan of one consumer rank over all ranks of a producer.

    `consumers` are all ranks of the consumer's engine. Unless they are all given, nobody can say which producer ranks are
    read by none of them, and `tells` stays empty. `reader` names the consumer among those that read the same producer, so
    that they do not all begin with the same of several replicas; it is the name of the consumer's engine unless given, and
    the same for all its ranks.
    Raises MismatchError with every mismatch, ManifestError for a manifest that contradicts itself, ProofError.
    """
    fleet = producers if isinstance(producers, Fleet) else Fleet(producers)
    check_manifest(consumer)
    refuse_mismatches(consumer, fleet)
    plan = _plan(consumer, fleet, reader, (0, {}))
    mine = consumer.identity.rank
    everyone = {c.identity.rank for c in consumers} | {mine}
    if len(everyone) == mine.tp_size * mine.pp_size:
        found = routes(fleet, consumers or (consumer,), reader)
        plan = replace(plan, tells=tuple(r.producer for r in found if r.teller == mine))
    if proof:
        Proofs(fleet.manifests).prove(plan, consumer)
    return plan


def make_plans(
    consumers: Sequence[Manifest] | Fleet, producers: Sequence[Manifest] | Fleet, *, proof: bool = True, reader: str = ""
) -> tuple[Plan, ...]:
    """The plans of all ranks of a consumer, in the order of their ordinals, as `make_plan` gives them one by one."""
    fleet = producers if isinstance(producers, Fleet) else Fleet(producers)
    readers = consumers if isinstance(consumers, Fleet) else Fleet(consumers)
    made: _Made = {}
    compared: set[tuple[int, str]] = set()
    plans = []
    for consumer, body in zip(readers.manifests, readers.bodies, strict=True):
        if (body, consumer.identity.model) not in compared:
            refuse_mismatches(consumer, fleet)
            compared.add((body, consumer.identity.model))
        plans.append(_plan(consumer, fleet, reader, (body, made)))
    index = {m.identity: i for i, m in enumerate(fleet.manifests)}
    read = {p.consumer.identity.rank: {index[s.identity] for s in p.sources} for p in plans}
    told = {r.producer: r.teller for r in dealt(fleet, read)}
    plans = [replace(p, tells=tuple(r for r, teller in told.items() if teller == p.consumer.identity.rank)) for p in plans]
    if proof:
        Proofs(fleet.manifests).prove_all(plans, readers.manifests)
    return tuple(plans)


def _plan(consumer: Manifest, fleet: Fleet, reader: str, before: tuple[int, _Made]) -> Plan:
    """`before`: the number of the consumer's body, and what was made for others by theirs."""
    deal = Deal(consumer, fleet, reader)
    boxes = [tuple(deal.boxes(layer, i) for i in range(len(layer.parts))) for layer in consumer.layers]
    sources = sorted({source for parts in boxes for part in parts for source, _ in part})
    place = {source: i for i, source in enumerate(sources)}
    # What is read is the same where the same boxes are read in the same order from ranks of the same bodies.
    read = tuple(tuple((place[source], box) for source, box in part) for parts in boxes for part in parts)
    key = before[0], tuple(fleet.bodies[source] for source in sources), read
    known = before[1].get(key)
    if known is None:
        room = _Room()
        known = before[1][key] = _assemble(consumer, fleet, _classify(consumer, fleet, boxes, room), room)
    return replace(known, consumer=side_of(consumer), sources=tuple(side_of(fleet.manifests[i]) for i in sources))


def _classify(consumer: Manifest, fleet: Fleet, found_boxes: Sequence[tuple[Boxes, ...]], room: _Room) -> list[_Class]:
    classes: dict[tuple[object, ...], _Class] = {}
    for layer, boxes in zip(consumer.layers, found_boxes, strict=True):
        key = (signature(layer), fleet.alike.get(layer.name, -1), boxes)
        found = classes.get(key)
        if found is None:
            found = classes[key] = _Class(_pieces(consumer, layer, fleet, boxes, room))
        found.names.append(layer.name)
        read = {source for part in boxes for source, _ in part}
        held = fleet.holders.get(layer.name, ()) if read else ()
        found.bases.append({_DESTINATION: base(layer), **{index: base(other) for index, other in held if index in read}})
    return list(classes.values())


def _need(layer: Layer, shape: Shape, src_group: int) -> NeedKey:
    if shape.token is None:
        return (layer.reach, 0, False, src_group)
    return (layer.reach, shape.token.per_entry, shape.token.moves_partial, src_group)


def _pieces(consumer: Manifest, layer: Layer, fleet: Fleet, boxes: Sequence[Boxes], room: _Room) -> dict[_Flow, Leveled]:
    """All flows of one layer, given its parts' boxes and their sources, each as (grain, merged pieces), coarsest first."""
    flows: dict[_Flow, list[_Member]] = defaultdict(list)
    holders = dict(fleet.holders.get(layer.name, []))
    for part, dealt_boxes in zip(layer.parts, boxes, strict=True):
        shape = consumer.shapes[part.shape]
        for source, box in dealt_boxes:
            other = holders[source]
            need = _need(layer, shape, other.group)
            twin = next(p for p in other.parts if p.name == part.name)
            twin_shape = fleet.manifests[source].shapes[twin.shape]
            flows[_Flow(source, other.group, layer.group, need, need[1])].append(
                _Member(other, twin, twin_shape, part, shape, box)
            )
        per_entry = shape.token.per_entry if shape.token else 0
        live, always = live_box(shape), _Flow(_DESTINATION, layer.group, layer.group, None, per_entry)
        flows[always] += [_Member(layer, part, shape, part, shape, box) for box in scratch_boxes(shape)]
        here = _Member(layer, part, shape, part, shape, live)
        if not volume(live):
            continue
        if not holders:
            flows[always].append(here)
        elif shape.token is not None:
            need = _need(layer, shape, next(iter(holders.values())).group)
            flows[_Flow(_DESTINATION, layer.group, layer.group, need, per_entry)].append(here)
    return {
        flow: tuple(
            (tokens, _merge(p for member in members for p in _box_pieces(layer, member, tokens, room)))
            for tokens in _grains((m.src_shape, m.dst_shape) for m in members)
        )
        for flow, members in flows.items()
        if members
    }


def _grains(shapes: Iterable[tuple[Shape, Shape]]) -> tuple[int, ...]:
    """Tile sizes in tokens, coarsest first: each fits every token axis concerned and divides the one before."""
    edges: set[int] = set()
    limit = unit = 0
    for pair in shapes:
        for shape in pair:
            if shape.token is None:
                return (0,)
            unit = max(unit, shape.token.per_entry)
            edges.update(borders(canonical(shape.token.digits), shape.token.per_entry))
            limit = gcd(limit, shape.token.entries * shape.token.per_entry)
    grains = [fitting_grain(limit, edges)]
    while grains[-1] > unit:
        below = {fitting_grain(gcd(grains[-1], b), edges) for b in {*edges, unit} if b < grains[-1]}
        target = max(below)
        while grains[-1] // target > LONGEST_STEP:
            step = _middle(grains[-1], target, edges)
            if step is None:
                break
            grains.append(step)
        grains.append(target)
    return tuple(grains)


def _middle(above: int, below: int, edges: set[int]) -> int | None:
    """A fitting tile between two grains that makes the longer of the two steps as short as it can be."""
    ratio = above // below
    fitting = [
        d for d in range(2, ratio) if ratio % d == 0 and all((below * d) % e == 0 or e % (below * d) == 0 for e in edges)
    ]
    return below * min(fitting, key=lambda d: max(d, above // below // d)) if fitting else None


def _box_pieces(layer: Layer, member: _Member, tokens: int, room: _Room) -> list[_Piece]:
    """One box of one part, for a tile of `tokens` tokens, as strided runs."""
    (src_region, src_offset), (dst_region, dst_offset) = base(member.src_layer), base(layer)
    twin, part = member.src, member.dst
    src = (twin.region - src_region, twin.offset - src_offset)
    dst = (part.region - dst_region, part.offset - dst_offset)
    src_upper, dst_upper, pieces = _box_runs(member.src_shape, member.dst_shape, member.box, tokens)
    room.take(len(pieces), layer.name)
    src_lane, dst_lane = (twin.block_stride, src_upper), (part.block_stride, dst_upper)
    return [
        _Piece((src[0], src[1] + s), (dst[0], dst[1] + d), length, repeats, src_lane, dst_lane)
        for s, d, length, repeats in pieces
    ]


@kept(lambda found: len(found[2]), 1 << 16)
def _box_runs(
    src: Shape, dst: Shape, box: Box, tokens: int
) -> tuple[Digits, Digits, tuple[tuple[int, int, int, JointDigits], ...]]:
    """Token digits above the tile on either side, and (source offset, destination offset, length, repeats) in it."""
    src_axes = {a.name: a for a in src.axes}
    factors = []
    for axis, (start, stop) in zip(dst.axes, box, strict=True):
        other = src_axes[axis.name]
        factors.append(joint(other.digits, start - other.start, axis.digits, start - axis.start, stop - start))
    src_upper: Digits = ()
    dst_upper: Digits = ()
    if src.token is not None and dst.token is not None:
        entries = tokens // dst.token.per_entry
        src_upper, src_inner = cut(canonical(src.token.digits), entries)
        dst_upper, dst_inner = cut(canonical(dst.token.digits), entries)
        factors.append(joint(src_inner, 0, dst_inner, 0, entries))
    if prod(len(f) for f in factors) > MAX_ITEMS:
        raise ScatteredError(
            f"a part falls into more than {MAX_ITEMS:,} strided runs: its digits and the other side's do not fit"
        )
    runs = []
    for pieces in product(*factors):
        length, repeats = fold(dst.element.bytes, [d for _, _, digits in pieces for d in digits])
        runs.append((sum(p[0] for p in pieces), sum(p[1] for p in pieces), length, repeats))
    return src_upper, dst_upper, tuple(runs)


def _merge(pieces: Iterable[_Piece]) -> tuple[_Piece, ...]:
    """Join pieces that lie behind each other on both sides and repeat alike, until nothing changes."""
    merged = sorted(pieces, key=lambda p: (p.src[0], p.dst, p.src))
    while True:
        out: list[_Piece] = []
        for piece in merged:
            last = out[-1] if out else None
            if last is not None and _continues(last, piece):
                length, repeats = fold(last.length + piece.length, last.repeats)
                out[-1] = _Piece(last.src, last.dst, length, repeats, last.src_lane, last.dst_lane)
            else:
                out.append(piece)
        if len(out) == len(merged):
            return tuple(out)
        merged = out


def _continues(one: _Piece, other: _Piece) -> bool:
    return (
        one.repeats == other.repeats
        and one.src_lane == other.src_lane
        and one.dst_lane == other.dst_lane
        and other.src == (one.src[0], one.src[1] + one.length)
        and other.dst == (one.dst[0], one.dst[1] + one.length)
    )


def _lay(found: _Class, flow: _Flow, pieces: Sequence[_Piece], room: _Room) -> list[_Piece]:
    """A class's pieces at the places of all its layers; layers at equal distances become a repeat."""
    room.take(len(pieces) * (len(found.bases) - 1), found.names[0])
    out = []
    for piece in pieces:
        by_region: dict[tuple[int, int], list[tuple[int, int, JointDigits]]] = defaultdict(list)
        for bases in found.bases:
            (src_region, src), (dst_region, dst) = bases[flow.source], bases[_DESTINATION]
            regions = (src_region + piece.src[0], dst_region + piece.dst[0])
            by_region[regions].append((src + piece.src[1], dst + piece.dst[1], ()))
        for (src_region, dst_region), places in by_region.items():
            for src, dst, digits in gather(places):
                length, repeats = fold(piece.length, (*digits, *piece.repeats))
                out.append(_Piece((src_region, src), (dst_region, dst), length, repeats, piece.src_lane, piece.dst_lane))
    return out


def _worthwhile(levels: Sequence[tuple[int, tuple[_Piece, ...]]]) -> list[tuple[int, tuple[_Piece, ...]]]:
    """The finest grain, and of the coarser ones those that join runs of finer tiles, unless they still have very many."""
    kept = [levels[-1]]
    for tokens, pieces in reversed(levels[:-1]):
        runs, finer = (sum(prod(c for c, _, _ in p.repeats) for p in found) for found in (pieces, kept[0][1]))
        if runs < tokens // kept[0][0] * finer and runs <= MOST_RUNS:
            kept.insert(0, (tokens, pieces))
    return kept


def _assemble(consumer: Manifest, fleet: Fleet, classes: Sequence[_Class], room: _Room) -> Plan:
    flows: dict[tuple[_Flow, tuple[int, ...]], list[tuple[_Class, Leveled]]] = defaultdict(list)
    layers: dict[NeedKey, list[str]] = defaultdict(list)
    for found in classes:
        for flow, leveled in found.pieces.items():
            flows[flow, tuple(tokens for tokens, _ in leveled)].append((found, leveled))
        for need in {flow.need for flow in found.pieces if flow.need is not None}:
            layers[need] += found.names
    needs = {need: i for i, need in enumerate(layers)}
    read = sorted({flow.source for flow, _ in flows} - {_DESTINATION})
    lanes: dict[LaneKey, int] = {}
    edges, fills = [], []
    for (flow, grains), members in sorted(flows.items(), key=lambda item: (item[0][0].source, item[0][0].dst_group)):
        levels = [
            (tokens, _merge(p for found, pieces in members for p in _lay(found, flow, pieces[level][1], room)))
            for level, tokens in enumerate(grains)
        ]
        tiles = tuple(Grain(tokens, tuple(_run(piece, lanes) for piece in pieces)) for tokens, pieces in _worthwhile(levels))
        need_index = None if flow.need is None else needs[flow.need]
        if flow.source == _DESTINATION:
            fills.append(Fill(flow.dst_group, need_index, tiles))
        elif need_index is not None:
            edges.append(Edge(read.index(flow.source), flow.src_group, flow.dst_group, need_index, tiles))
    return Plan(
        side_of(consumer),
        tuple(side_of(fleet.manifests[index]) for index in read),
        tuple(Lane(stride, digits) for stride, digits in lanes),
        tuple(Need(*need, tuple(names)) for need, names in layers.items()),
        tuple(edges),
        tuple(fills),
    )


def side_of(manifest: Manifest) -> Side:
    return Side(manifest.identity, manifest.regions, manifest.groups)


def _run(piece: _Piece, lanes: dict[LaneKey, int]) -> Run:
    return Run(
        *piece.src,
        *piece.dst,
        piece.length,
        piece.repeats,
        lanes.setdefault(piece.src_lane, len(lanes)),
        lanes.setdefault(piece.dst_lane, len(lanes)),
    )
