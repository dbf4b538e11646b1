"""Who reads what from whom: boxes of global index space cut at the producers' borders, and a choice among replicas.

The choice depends on manifests and the reader's name alone, so that whoever knows them arrives at the same one. Replicas of
a box are the stops of a circle. The ranks of a reader that read the same box have equal arcs of it, each deals its layers
along its arc in proportion to their bytes, and readers begin at places of their own. On an arc of many stops a rank uses few,
the same ones for all its layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

from kvferry.errors import MismatchError, ScatteredError
from kvferry.manifest.check import check_all, check_manifest
from kvferry.manifest.compare import Content, Mismatch, can_meet, compare, compare_ranks, content
from kvferry.manifest.schema import Layer, Manifest, Rank, Reach, Shape

CIRCLE: Final = 1 << 32
MOST_SOURCES: Final = 16
"""Ranks that one rank reads where fewer would do: each is a connection, a handshake, and a read of every request. What takes
more ranks to hold is read from all of them."""
MAX_LOOKS: Final = 1 << 19
"""Boxes that all parts are cut into by what the producer's ranks hold of them, each counted once more for every different box
that holds it. 256 ranks read by 256 need some thousands."""
_GOLDEN: Final = 2_654_435_769
"""The golden section of the circle: kinds of layers that follow each other begin far apart."""
_FINE: Final = 1 << 10

Interval = tuple[int, int]
Box = tuple[Interval, ...]
Cells = tuple[list[tuple[Box, list[int]]], list[Box]]
"""Boxes with the ranks that hold each, and boxes that no rank holds."""


@dataclass(frozen=True)
class Route:
    """A producer rank with the consumer ranks that read it; where nobody does, one `teller` tells it of the end."""

    producer: Rank
    readers: tuple[Rank, ...]
    teller: Rank | None


class Fleet:
    """An engine's ranks, checked and indexed by layer name. Layers of equal `alike` lie alike on all ranks. Layers of equal
    `held_by` are held by the same ranks. Ranks of equal number in `bodies` differ in nothing but rank and addresses.
    `looks` is what was spent of MAX_LOOKS."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = tuple(sorted(manifests, key=lambda m: m.identity.rank.ordinal))
        self.bodies = check_all(self.manifests)
        self.holders: dict[str, list[tuple[int, Layer]]] = defaultdict(list)
        signed: dict[int, dict[str, tuple[object, ...]]] = {}
        for index, (manifest, body) in enumerate(zip(self.manifests, self.bodies, strict=True)):
            if body not in signed:
                signed[body] = {layer.name: signature(layer) for layer in manifest.layers}
            for layer in manifest.layers:
                self.holders[layer.name].append((index, layer))
        # By layer: which of the ways to lie that a body has, so that long signatures are compared once.
        numbers: dict[tuple[object, ...], int] = {}
        ways = {
            body: {name: numbers.setdefault(s, len(numbers)) for name, s in found.items()} for body, found in signed.items()
        }
        kinds: dict[tuple[object, ...], int] = {}
        self.alike = {
            name: kinds.setdefault(tuple((index, ways[self.bodies[index]][name]) for index, _ in held), len(kinds))
            for name, held in self.holders.items()
        }
        sets: dict[tuple[int, ...], int] = {}
        self.held_by = {
            name: sets.setdefault(tuple([index for index, _ in held]), len(sets)) for name, held in self.holders.items()
        }
        self.models = {m.identity.model for m in self.manifests}
        self._contents: dict[int, set[Content]] = {}
        self._cells: dict[tuple[object, ...], Cells] = {}
        self.looks = 0
        self._boxes: dict[tuple[object, ...], tuple[tuple[int, Box], ...]] = {}

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks agree with each other and have nothing that is not supported."""
        return not any(compare_ranks(self.manifests))

    def is_all(self, layer: str, wanted: Content) -> bool:
        """Whether every rank that holds a layer holds this in it, all of them in one group."""
        alike = self.alike[layer]
        if alike not in self._contents:
            held = {self.bodies[index]: (self.manifests[index], other) for index, other in self.holders[layer]}
            one_group = len({other.group for _, other in held.values()}) == 1
            self._contents[alike] = {content(*found) for found in held.values()} if one_group else set()
        return self._contents[alike] == {wanted}

    def part_boxes(self, consumer: Manifest, layer: Layer, part: int, at: Place) -> tuple[tuple[int, Box], ...]:
        """The boxes of a consumer's part, each with the producer rank to read it from; `at` is the layer's place on its arc."""
        shape = consumer.shapes[layer.parts[part].shape]
        live = live_box(shape)
        key, (cells, _) = self._cut(layer, layer.parts[part].name, shape, live)
        arcs, arc = readers_of(shape, live, consumer.identity.rank)
        chosen = tuple(
            holders[(arc * CIRCLE + at.of(len(holders), arcs)) * len(holders) // (arcs * CIRCLE)] for _, holders in cells
        )
        found = self._boxes.get((key, chosen))
        if found is None:
            found = self._boxes[key, chosen] = _glued(list(zip(chosen, (cell for cell, _ in cells), strict=True)))
        return found

    def unheld(self, layer: Layer, part: str, shape: Shape) -> list[Box]:
        """The boxes of a consumer's part that no rank holds."""
        return self._cut(layer, part, shape, live_box(shape))[1][1]

    def _cut(self, layer: Layer, part: str, shape: Shape, live: Box) -> tuple[tuple[object, ...], Cells]:
        key = (self.alike.get(layer.name, -1), part, tuple(a.name for a in shape.axes), live)
        found = self._cells.get(key)
        if found is None:
            try:
                found, looks = _cells(live, self._held(layer.name, part, shape), MAX_LOOKS - self.looks)
            except ScatteredError as error:
                raise ScatteredError(f"{layer.name} {part}: {error}") from None
            self._cells[key] = found
            self.looks += looks
        return key, found

    def _held(self, layer: str, part: str, shape: Shape) -> list[tuple[int, Box]]:
        """What each rank holds of a part, its axes in the order of `shape`'s."""
        return [
            (index, owned_box(shape, self.manifests[index].shapes[twin.shape]))
            for index, other in self.holders.get(layer, ())
            for twin in other.parts
            if twin.name == part
        ]


class Place(NamedTuple):
    """Where on its arc a layer is read: at `exact`, unless an arc has more than `most` stops, which are then as many, as far
    from each other as can be, counted from `start`."""

    exact: int
    start: int
    most: int

    def of(self, holders: int, arcs: int) -> int:
        if holders <= arcs * self.most:
            return self.exact
        stop = (self.exact - self.start) % CIRCLE * self.most // CIRCLE
        return (self.start + stop * CIRCLE // self.most) % CIRCLE


_ANYWHERE: Final = Place(0, 0, MOST_SOURCES)


def base(layer: Layer) -> tuple[int, int]:
    """Region and offset of a layer's first part."""
    return layer.parts[0].region, layer.parts[0].offset


def signature(layer: Layer) -> tuple[object, ...]:
    """What makes layers of one manifest equal but for the place of their first part."""
    region, offset = base(layer)
    parts = tuple((p.name, p.shape, p.region - region, p.offset - offset, p.block_stride) for p in layer.parts)
    return (layer.group, layer.reach, parts)


def representatives(consumer: Manifest, fleet: Fleet) -> list[Layer]:
    """One layer of each class that lies alike on the consumer and on all ranks of the fleet."""
    found: dict[tuple[object, ...], Layer] = {}
    for layer in consumer.layers:
        if layer.name in fleet.alike:
            found.setdefault((signature(layer), fleet.alike[layer.name]), layer)
    return list(found.values())


def owned_box(order: Shape, shape: Shape) -> Box:
    """What `shape` owns, its axes in the order of `order`'s."""
    axes = {a.name: a for a in shape.axes}
    return tuple((axes[a.name].start, min(axes[a.name].stop, axes[a.name].live_size)) for a in order.axes)


def live_box(shape: Shape) -> Box:
    return tuple((a.start, max(a.start, min(a.stop, a.live_size))) for a in shape.axes)


def scratch_boxes(shape: Shape) -> tuple[Box, ...]:
    """The owned box less the live one, in disjoint boxes."""
    live, whole = live_box(shape), tuple((a.start, a.stop) for a in shape.axes)
    boxes = []
    for i, ((_, low), (_, high)) in enumerate(zip(live, whole, strict=True)):
        if low < high:
            boxes.append((*live[:i], (low, high), *whole[i + 1 :]))
    return tuple(b for b in boxes if all(start < stop for start, stop in b))


class Deal:
    """Where on its arc of replicas each layer of a consumer is read: layers that the same ranks hold and that need the same
    tokens are dealt among themselves."""

    def __init__(self, consumer: Manifest, fleet: Fleet, reader: str = "") -> None:
        self._consumer, self._fleet = consumer, fleet
        rank = consumer.identity.rank
        name = (reader or consumer.identity.engine).encode()
        start = int.from_bytes(blake2b(name, digest_size=4).digest(), "big") + rank.pp * CIRCLE // rank.pp_size
        dealt: dict[tuple[int, bool, Reach], list[Layer]] = defaultdict(list)
        for layer in consumer.layers:
            if layer.name in fleet.holders:
                state = consumer.shapes[layer.parts[0].shape].token is None
                dealt[fleet.held_by[layer.name], state, layer.reach].append(layer)
        most = max(1, MOST_SOURCES // max(1, len({held for held, _, _ in dealt})))
        self._at: dict[str, Place] = {}
        for turn, layers in enumerate(dealt.values()):
            sizes = [_weight(consumer, layer) for layer in layers]
            for layer, end, size in zip(layers, accumulate(sizes), sizes, strict=True):
                middle = (2 * end - size) * CIRCLE // (2 * sum(sizes))
                self._at[layer.name] = Place((start + turn * _GOLDEN + middle) % CIRCLE, start % CIRCLE, most)

    def boxes(self, layer: Layer, part: int) -> tuple[tuple[int, Box], ...]:
        """The boxes of a part, each with the index of the producer rank to read it from."""
        return self._fleet.part_boxes(self._consumer, layer, part, self._at.get(layer.name, _ANYWHERE))

    def sources(self) -> frozenset[int]:
        """Indices of the producer ranks that the consumer reads."""
        parts = [(layer, i) for layer in self._consumer.layers for i in range(len(layer.parts))]
        return frozenset(source for layer, i in parts for source, _ in self.boxes(layer, i))


def _weight(consumer: Manifest, layer: Layer) -> int:
    """A layer's bytes for each token, or of a state, in fractions of a byte; never nothing."""
    total = 1
    for part in layer.parts:
        shape = consumer.shapes[part.shape]
        per_entry = shape.token.per_entry if shape.token else 1
        total += volume(live_box(shape)) * shape.element.bytes * _FINE // per_entry
    return total


def readers_of(shape: Shape, live: Box, rank: Rank) -> tuple[int, int]:
    """How many ranks of one stage read the same live box, and which of them this one is: neighbours hold the same."""
    shards = prod(-(-axis.live_size // max(1, stop - start)) for axis, (start, stop) in zip(shape.axes, live, strict=True))
    readers = max(1, rank.tp_size // shards)
    return readers, rank.tp % readers


def _cells(wanted: Box, held: Sequence[tuple[int, Box]], most: int) -> tuple[Cells, int]:
    """`wanted` cut at the holders' borders: the cells with those who hold each, the cells that nobody holds, and how many looks
    that took; raises ScatteredError for more than `most`."""
    alike: dict[Box, list[int]] = defaultdict(list)
    for holder, box in held:
        alike[box].append(holder)
    borders = [
        sorted({start, stop, *(p for box in alike for p in box[axis] if start < p < stop)})
        for axis, (start, stop) in enumerate(wanted)
    ]
    inside = {box: [_between(cuts, interval) for cuts, interval in zip(borders, box, strict=True)] for box in alike}
    cells = prod(len(cuts) - 1 for cuts in borders)
    looks = cells + sum(prod(map(len, ranges)) for ranges in inside.values())
    if looks > most:
        raise ScatteredError(
            f"what {len(held):,} ranks of the producer hold of it cuts it into {cells:,} boxes, too many to find in "
            f"{len(alike):,}, with those of other layers: they share it out as no engine does"
        )
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for box, ranges in inside.items():
        for at in product(*ranges):
            holders[at] += alike[box]
    found: Cells = ([], [])
    for at in product(*(range(len(cuts) - 1) for cuts in borders)):
        cell = tuple((cuts[i], cuts[i + 1]) for cuts, i in zip(borders, at, strict=True))
        if at in holders:
            found[0].append((cell, sorted(holders[at])))
        else:
            found[1].append(cell)
    return found, looks


def _between(cuts: Sequence[int], interval: Interval) -> range:
    """Which of the stretches between cuts an interval covers; its ends are among them, or beyond."""
    start, stop = interval
    return range(bisect_left(cuts, start), max(0, bisect_right(cuts, stop) - 1)) if start < stop else range(0)


def _glued(cells: list[tuple[int, Box]]) -> tuple[tuple[int, Box], ...]:
    """Cells of one holder that touch, as larger boxes."""
    for axis in range(len(cells[0][1]) if cells else 0):
        cells = _glue(cells, axis)
    return tuple(cells)


def _glue(cells: list[tuple[int, Box]], axis: int) -> list[tuple[int, Box]]:
    """Join cells of one holder that touch along `axis`."""
    out: dict[tuple[int, Box, int], tuple[int, Box]] = {}
    for holder, box in sorted(cells, key=lambda c: (c[1][axis], c[0], c[1])):
        rest = (*box[:axis], *box[axis + 1 :])
        before = out.pop((holder, rest, box[axis][0]), None)
        start = before[1][axis][0] if before else box[axis][0]
        out[holder, rest, box[axis][1]] = (holder, (*box[:axis], (start, box[axis][1]), *box[axis + 1 :]))
    return sorted(out.values(), key=lambda c: (c[1], c[0]))


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def missing(consumer: Manifest, layers: Iterable[Layer], fleet: Fleet) -> tuple[Mismatch, ...]:
    """State of layers that no producer rank holds, named by axis and interval."""
    found = []
    for layer in layers:
        for i, part in enumerate(layer.parts):
            shape = consumer.shapes[part.shape]
            live = live_box(shape)
            if sum(volume(box) for _, box in fleet.part_boxes(consumer, layer, i, _ANYWHERE)) < volume(live):
                lacking = [(0, cell) for cell in fleet.unheld(layer, part.name, shape)]
                for n in range(len(live)):
                    lacking = _glue(lacking, n)
                for _, box in lacking:
                    cuts = [n for n, (mine, all_) in enumerate(zip(box, live, strict=True)) if mine != all_] or [0]
                    where = ", ".join(f"{shape.axes[n].name} [{box[n][0]}, {box[n][1]})" for n in cuts if box)
                    found.append(
                        Mismatch(f"{where or 'all of it'} is held by no producer rank", layer.name, part.name, "missing-ranks")
                    )
    return tuple(found)


def routes(producers: Sequence[Manifest] | Fleet, consumers: Sequence[Manifest], reader: str = "") -> tuple[Route, ...]:
    """For every producer rank, its readers; the ranks without any are dealt to the consumer's ranks in turn."""
    fleet = producers if isinstance(producers, Fleet) else Fleet(producers)
    for consumer in consumers:
        check_manifest(consumer)
        refuse_mismatches(consumer, fleet)
    return dealt(fleet, {c.identity.rank: Deal(c, fleet, reader).sources() for c in consumers})


def dealt(fleet: Fleet, read: Mapping[Rank, Set[int]]) -> tuple[Route, ...]:
    """The routes, given which producer ranks (by index) each consumer rank reads."""
    ranks = sorted(read, key=lambda rank: rank.ordinal)
    out = []
    for index, manifest in enumerate(fleet.manifests):
        readers = tuple(rank for rank in ranks if index in read[rank])
        out.append(Route(manifest.identity.rank, readers, None if readers or not ranks else ranks[index % len(ranks)]))
    return tuple(out)


def refuse_mismatches(consumer: Manifest, fleet: Fleet) -> None:
    """Raise MismatchError with all reasons why a checked `consumer` cannot be loaded from the fleet.

    Layers that lie alike match alike: one of each class is compared, and all of them only for the list of an error.
    """
    some = representatives(consumer, fleet)
    fits = (
        fleet.in_order
        and can_meet(consumer, fleet.models)
        and not any(layer.required for layer in consumer.layers if layer.name not in fleet.holders)
        and all(fleet.is_all(layer.name, content(consumer, layer)) for layer in some)
    )
    if not fits or missing(consumer, some, fleet):
        found = compare(consumer, fleet.manifests)
        unlike = {mismatch.layer for mismatch in found}
        alike = [layer for layer in consumer.layers if layer.name in fleet.holders and layer.name not in unlike]
        raise MismatchError((*found, *missing(consumer, alike, fleet)))
