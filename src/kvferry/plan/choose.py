"""Who reads what from whom: boxes of global index space cut at the producers' borders, and a choice among replicas.

The choice depends on manifests alone, so every rank of both sides arrives at the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from kvferry.errors import MismatchError
from kvferry.manifest.check import check_manifest
from kvferry.manifest.compare import Mismatch, compare, compare_engines, compare_layers
from kvferry.manifest.schema import Layer, Manifest, Rank, Shape

Interval = tuple[int, int]
Box = tuple[Interval, ...]


@dataclass(frozen=True)
class Route:
    """A producer rank with the consumer ranks that read it; where nobody does, one `teller` tells it of the end."""

    producer: Rank
    readers: tuple[Rank, ...]
    teller: Rank | None


class Fleet:
    """A producer engine's ranks, checked and indexed by layer name. Layers of equal `alike` lie alike on all ranks."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = tuple(sorted(manifests, key=lambda m: m.identity.rank.ordinal))
        self.holders: dict[str, list[tuple[int, Layer]]] = defaultdict(list)
        for index, manifest in enumerate(self.manifests):
            check_manifest(manifest)
            for layer in manifest.layers:
                self.holders[layer.name].append((index, layer))
        kinds: dict[tuple[object, ...], int] = {}
        self.alike = {
            name: kinds.setdefault(tuple((index, signature(layer)) for index, layer in held), len(kinds))
            for name, held in self.holders.items()
        }
        self._boxes: dict[tuple[object, ...], tuple[tuple[int, Box], ...]] = {}

    def part_boxes(self, consumer: Manifest, layer: Layer, part: int) -> tuple[tuple[int, Box], ...]:
        """The boxes of a consumer's part, each with the producer rank to read it from."""
        mine = layer.parts[part]
        shape = consumer.shapes[mine.shape]
        wanted, place = live_box(shape), turn(shape, consumer.identity.rank)
        key = (self.alike.get(layer.name, -1), mine.name, tuple(a.name for a in shape.axes), wanted, place)
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = _assign(wanted, self.held(layer.name, mine.name, shape), place)
        return found

    def held(self, layer: str, part: str, shape: Shape) -> list[tuple[int, Box]]:
        """What each rank holds of a part, its axes in the order of `shape`'s."""
        return [
            (index, owned_box(shape, self.manifests[index].shapes[twin.shape]))
            for index, other in self.holders.get(layer, ())
            for twin in other.parts
            if twin.name == part
        ]


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


def turn(shape: Shape, rank: Rank) -> int:
    """A rank's place among the ranks of its engine that read the same box, those of earlier stages first."""
    shards = prod(
        -(-axis.live_size // max(1, stop - start)) for axis, (start, stop) in zip(shape.axes, live_box(shape), strict=True)
    )
    readers = max(1, rank.tp_size // shards)
    return rank.pp * readers + rank.tp % readers


def _cells(wanted: Box, held: Sequence[tuple[int, Box]]) -> Iterator[tuple[Box, list[int]]]:
    """`wanted` cut at the holders' borders, each cell with those who hold it."""
    cuts = []
    for axis, (start, stop) in enumerate(wanted):
        cuts.append(list(pairwise(sorted({start, stop, *(p for _, box in held for p in box[axis] if start < p < stop)}))))
    for cell in product(*cuts):
        yield cell, [h for h, box in held if all(a <= c and d <= b for (a, b), (c, d) in zip(box, cell, strict=True))]


def _assign(wanted: Box, held: Sequence[tuple[int, Box]], place: int) -> tuple[tuple[int, Box], ...]:
    """Every cell of `wanted` with one holder; readers of a cell go to replicas in turn."""
    cells = [(holders[place % len(holders)], cell) for cell, holders in _cells(wanted, held) if holders]
    for axis in range(len(wanted)):
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
            if sum(volume(box) for _, box in fleet.part_boxes(consumer, layer, i)) < volume(live):
                lacking = [(0, cell) for cell, holders in _cells(live, fleet.held(layer.name, part.name, shape)) if not holders]
                for n in range(len(live)):
                    lacking = _glue(lacking, n)
                for _, box in lacking:
                    cuts = [n for n, (mine, all_) in enumerate(zip(box, live, strict=True)) if mine != all_] or [0]
                    where = ", ".join(f"{shape.axes[n].name} [{box[n][0]}, {box[n][1]})" for n in cuts if box)
                    found.append(Mismatch(f"{where or 'all of it'} is held by no producer rank", layer.name, part.name))
    return tuple(found)


def sources_of(consumer: Manifest, fleet: Fleet) -> frozenset[int]:
    """Indices of the producer ranks that `consumer` reads."""
    read: set[int] = set()
    for layer in representatives(consumer, fleet):
        for i in range(len(layer.parts)):
            read.update(source for source, _ in fleet.part_boxes(consumer, layer, i))
    return frozenset(read)


def routes(producers: Sequence[Manifest] | Fleet, consumers: Sequence[Manifest]) -> tuple[Route, ...]:
    """For every producer rank, its readers; the ranks without any are dealt to the consumer's ranks in turn."""
    fleet = producers if isinstance(producers, Fleet) else Fleet(producers)
    for consumer in consumers:
        check_manifest(consumer)
        refuse_mismatches(consumer, fleet)
    return dealt(fleet, {c.identity.rank: sources_of(c, fleet) for c in consumers})


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
    engines = compare_engines(consumer, fleet.manifests)
    some = representatives(consumer, fleet)
    absent = [layer for layer in consumer.layers if layer.name not in fleet.holders]
    holders = {layer.name: [(fleet.manifests[i], other) for i, other in fleet.holders[layer.name]] for layer in some}
    if engines or compare_layers(consumer, (*some, *absent), holders) or missing(consumer, some, fleet):
        found = compare(consumer, fleet.manifests)
        unlike = {mismatch.layer for mismatch in found}
        alike = [layer for layer in consumer.layers if layer.name in fleet.holders and layer.name not in unlike]
        raise MismatchError((*found, *missing(consumer, alike, fleet)))
