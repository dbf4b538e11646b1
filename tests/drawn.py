"""Manifests drawn directly, not through builders: any digits, strides, page strides, scratch, groups and ownership.

Everything follows from a seed, so that a failure is named by a number. Parts are put where a map of bytes says that there
is room; nothing here knows what makes a layout sensible, and few of these would occur to an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import lcm, prod
from random import Random

import numpy as np

import declared
from kvferry.manifest import (
    FULL,
    Axis,
    Chunk,
    Element,
    Group,
    Identity,
    Layer,
    Manifest,
    Part,
    Rank,
    Reach,
    Region,
    Shape,
    StatePaged,
    TokenAxis,
    TokenPaged,
    Window,
)
from kvferry.plan import Request

Digits = tuple[tuple[int, int], ...]
Box = tuple[tuple[int, int], ...]

ROOM = 1 << 15
MOST_REGIONS = 50
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}


class NoRoomError(Exception):
    """What was drawn is too large for a region."""


@dataclass(frozen=True)
class PartKind:
    """A part as the model has it: live extents by axis; tokens an entry stands for, 0 for a state."""

    name: str
    element: Element
    live: tuple[tuple[str, int], ...]
    per_entry: int
    partial: bool


@dataclass(frozen=True)
class LayerKind:
    parts: tuple[PartKind, ...]
    reach: Reach

    @property
    def state(self) -> bool:
        return self.parts[0].per_entry == 0


@dataclass(frozen=True)
class Case:
    """Two sides and a request; P has run `prefilled` tokens."""

    producers: tuple[Manifest, ...]
    consumers: tuple[Manifest, ...]
    request: Request
    prefilled: int


@cache
def _factors(count: int) -> tuple[tuple[int, ...], ...]:
    if count == 1:
        return ((),)
    return tuple((f, *rest) for f in range(2, count + 1) if count % f == 0 for rest in _factors(count // f))


def _counts(random: Random, count: int) -> list[int]:
    """A mixed radix of `count` indices."""
    found = list(random.choice(_factors(count))) if random.random() < 0.6 else [count]
    if random.random() < 0.1:
        found.insert(random.randint(0, len(found)), 1)
    return found


def _reach(random: Random) -> Reach:
    return random.choice([FULL, FULL, Window(random.randint(1, 12)), Chunk(random.randint(1, 9))])


def _keeps(random: Random, reaches: Sequence[Reach]) -> Reach:
    fitting = [
        k
        for k in [FULL, *(Window(n) for n in range(1, 14)), *(Chunk(n) for n in range(1, 20))]
        if all(declared.keeps_enough(k, r) for r in reaches)
    ]
    return FULL if random.random() < 0.5 else random.choice(fitting)


def layer_kind(random: Random, entries: Sequence[int]) -> LayerKind:
    state = random.random() < 0.25
    parts = []
    for i in range(random.choice([1, 1, 2, 3])):
        size = random.choice([1, 2, 4])
        opaque = random.random() < 0.15
        element = Element("opaque", random.randint(1, 9), opaque="private") if opaque else Element(DTYPES[size], size)
        names = random.sample(["head", "dim", "channel"], random.choice([0, 1, 1, 2, 2]))
        per_entry = 0 if state else random.choice(entries)
        partial = per_entry > 1 and random.random() < 0.5
        live = tuple((name, random.choice([1, 2, 3, 4, 5, 6])) for name in names)
        parts.append(PartKind(f"p{i}", element, live, per_entry, partial))
    return LayerKind(tuple(parts), FULL if state else _reach(random))


@dataclass
class _Memory:
    """The regions of one rank as they fill up: which block and which groups each byte belongs to."""

    regions: int
    overlay: bool
    owner: dict[int, np.ndarray] = field(default_factory=dict)
    taken: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    end: dict[int, int] = field(default_factory=dict)

    def fits(self, region: int, group: int, at: np.ndarray) -> bool:
        """Whether the bytes of [block, byte] are free for a group."""
        flat = at.reshape(-1)
        if flat.max() >= ROOM or len(np.unique(flat)) < len(flat):
            return False
        owner = self.owner.setdefault(region, np.full(ROOM, -1, np.int16))
        if self.taken.setdefault((region, group), np.zeros(ROOM, bool))[flat].any():
            return False
        there = owner[at]
        if self.overlay:
            return bool(((there == -1) | (there == np.arange(len(at))[:, None])).all())
        return bool((there == -1).all())

    def take(self, region: int, group: int, at: np.ndarray) -> None:
        self.owner[region][at] = np.arange(len(at))[:, None]
        self.taken[region, group][at.reshape(-1)] = True
        self.end[region] = max(self.end.get(region, 0), int(at.max()) + 1)


@dataclass(frozen=True)
class _Nest:
    """Strides for the block, the token digits and the digits of the axes, in this order."""

    block: int
    token: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]


def _nest(random: Random, blocks: int, token: Sequence[int], axes: Sequence[Sequence[int]], item: int) -> _Nest:
    """Dimensions inside each other in any order, with gaps; now and then strides that interleave."""
    dims = [(0, 0, blocks), *((1, i, c) for i, c in enumerate(token))]
    dims += [(2 + a, i, c) for a, counts in enumerate(axes) for i, c in enumerate(counts)]
    inner = dims[1:]
    random.shuffle(inner)
    at = len(inner) if random.random() < 0.6 else random.randint(0, len(inner))
    order = [*inner[:at], dims[0], *inner[at:]]
    gaps = random.choice([0.0, 0.1, 0.4])
    wild = random.random() < 0.08
    extent = item
    strides: dict[tuple[int, int], int] = {}
    for kind, i, count in order:
        stride = extent + (random.randint(1, 9) if random.random() < gaps else 0)
        if wild:
            stride = random.randint(item, item * 12)
        if count == 1:
            strides[kind, i] = random.randint(0, 30)
            continue
        if kind == 0 and random.random() < 0.3:
            stride += random.randint(0, 40)
        strides[kind, i] = stride
        extent += (count - 1) * stride
    return _Nest(
        strides[0, 0],
        tuple(strides[1, i] for i in range(len(token))),
        tuple(tuple(strides[2 + a, i] for i in range(len(counts))) for a, counts in enumerate(axes)),
    )


def _shape(kind: PartKind, nest: _Nest, token: Sequence[int], axes: Sequence[Sequence[int]], box: Box, sizes: Box) -> Shape:
    return Shape(
        kind.element,
        tuple(
            Axis(name, size, start, stop, tuple(zip(counts, strides, strict=True)), live if live < size or odd else None)
            for (name, live), (size, odd), (start, stop), counts, strides in zip(
                kind.live, sizes, box, axes, nest.axes, strict=True
            )
        ),
        TokenAxis(tuple(zip(token, nest.token, strict=True)), kind.per_entry, kind.partial) if kind.per_entry else None,
    )


def _bytes(shape: Shape, blocks: int, stride: int) -> np.ndarray:
    """Offsets of [block, byte]."""
    out = np.arange(shape.element.bytes)
    for axis in shape.axes:
        out = (declared.places(axis.digits)[:, None] + out).reshape(-1)
    if shape.token:
        out = (declared.places(shape.token.digits)[:, None] + out).reshape(-1)
    return np.arange(blocks)[:, None] * stride + out


def _cut(random: Random, size: int, pieces: int) -> list[tuple[int, int]]:
    cuts = sorted(random.sample(range(1, size), pieces - 1))
    return list(zip([0, *cuts], [*cuts, size], strict=True))


def _ownership(random: Random, kind: PartKind, tp: int) -> tuple[Box, list[Box]]:
    """Global sizes by axis (and whether to spell out that all is live), and what each tensor-parallel rank owns."""
    sizes = tuple(
        (live + (random.randint(1, 4) if random.random() < 0.2 else 0), random.randint(0, 1)) for _, live in kind.live
    )
    cells: list[Box] = [()]
    for size, _ in sizes:
        most = min(size, tp // len(cells))
        pieces = random.randint(1, most) if random.random() < 0.6 else 1
        cells = [(*cell, piece) for cell in cells for piece in _cut(random, size, pieces)]
    dealt = [cells[r * len(cells) // tp] if random.random() < 0.9 else None for r in range(tp)]
    missing = [cell for cell in cells if cell not in dealt]
    boxes = [cell or (missing.pop() if missing else random.choice(cells)) for cell in dealt]
    if missing:
        boxes = [cells[r * len(cells) // tp] for r in range(tp)]

    def wider(box: Box) -> Box:
        if random.random() < 0.85:
            return box
        ends = zip(box, sizes, strict=True)
        return tuple((random.randint(0, start), random.randint(stop, size)) for (start, stop), (size, _) in ends)

    return sizes, [wider(box) for box in boxes]


@dataclass(frozen=True)
class _Side:
    engine: str
    tp: int
    stages: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    group_of: dict[int, int]
    overlay: bool


def _groups(random: Random, kinds: dict[int, LayerKind], tokens: int) -> tuple[tuple[Group, ...], dict[int, int]]:
    members: dict[tuple[bool, int], list[int]] = {}
    for layer, kind in kinds.items():
        members.setdefault((kind.state, random.choice([0, 0, 1])), []).append(layer)
    ids = random.sample(range(len(members) + 2), len(members))
    groups, group_of = [], {}
    for group_id, ((state, _), layers) in zip(ids, members.items(), strict=True):
        group_of.update(dict.fromkeys(layers, group_id))
        if state:
            groups.append((group_id, StatePaged(), FULL, False, 1))
            continue
        step = lcm(*(part.per_entry for layer in layers for part in kinds[layer].parts))
        per_block = step * random.choice([n for n in (1, 2, 3, 4, 6) if n == 1 or step * n <= 12])
        kernel = random.choice([n for n in range(1, per_block + 1) if per_block % n == 0])
        keeps = _keeps(random, [kinds[layer].reach for layer in layers])
        places = -(-tokens // per_block) + random.randint(0, 1)
        groups.append((group_id, TokenPaged(per_block, kernel), keeps, random.random() < 0.5, places))
    return groups, group_of  # type: ignore[return-value]


def _side(random: Random, engine: str, kinds: dict[int, LayerKind], tokens: int) -> tuple[_Side, dict[int, int]]:
    """A side, and how many blocks the request's table of each group has."""
    tp, pp = random.choice([1, 1, 2, 2, 3, 4, 6]), random.choice([1, 1, 1, 2])
    found, group_of = _groups(random, kinds, tokens)
    overlay = random.random() < 0.6
    needed = {group_id: places for group_id, _, _, _, places in found}  # type: ignore[misc]
    total = sum(needed.values()) if overlay else max(needed.values(), default=1)
    groups = tuple(
        Group(group_id, paging, (total if overlay else needed[group_id]) + random.choice([0, 0, 1, 3]), keeps, hashed)
        for group_id, paging, keeps, hashed, _ in found  # type: ignore[misc]
    )
    stages: list[list[int]] = [[] for _ in range(pp)]
    for layer in kinds:
        stages[random.randrange(pp)].append(layer)
    return _Side(engine, tp, tuple(map(tuple, stages)), groups, group_of, overlay), needed


def _manifests(random: Random, side: _Side, kinds: dict[int, LayerKind], optional: set[int]) -> tuple[Manifest, ...]:
    owned = {(layer, part.name): _ownership(random, part, side.tp) for layer, kind in kinds.items() for part in kind.parts}
    alike: dict[tuple[LayerKind, str, Box], tuple[_Nest, list[int], list[list[int]], int]] = {}
    groups = {group.id: group for group in side.groups}
    out = []
    for pp, stage in enumerate(side.stages):
        for tp in range(side.tp):
            memory = _Memory(random.choice([1, 1, 2, 3]), side.overlay)
            shapes: dict[Shape, int] = {}
            layers = []
            for layer in stage:
                kind, group = kinds[layer], groups[side.group_of[layer]]
                parts = []
                for part in kind.parts:
                    sizes, boxes = owned[layer, part.name]
                    known = alike.get((kind, part.name, boxes[tp])) if random.random() < 0.7 else None
                    shape, region, offset, stride = _placed(random, part, group, sizes, boxes[tp], memory, alike, known, kind)
                    parts.append(Part(part.name, shapes.setdefault(shape, len(shapes)), region, offset, stride))
                layers.append(Layer(f"layers.{layer}", group.id, tuple(parts), kind.reach, layer not in optional))
            regions = tuple(Region(f"r{i}", memory.end.get(i, 0) + random.choice([0, 0, 5])) for i in range(memory.regions))
            identity = Identity(side.engine, "1", "model", Rank(tp, side.tp, pp, len(side.stages)))
            out.append(Manifest(identity, regions, side.groups, tuple(shapes), tuple(layers)))
    return tuple(out)


def _placed(
    random: Random,
    part: PartKind,
    group: Group,
    sizes: Box,
    box: Box,
    memory: _Memory,
    alike: dict[tuple[LayerKind, str, Box], tuple[_Nest, list[int], list[list[int]], int]],
    known: tuple[_Nest, list[int], list[list[int]], int] | None,
    kind: LayerKind,
) -> tuple[Shape, int, int, int]:
    """A shape with its region, offset and block stride: like an earlier layer's, or drawn until there is room."""
    region = random.randrange(memory.regions)
    if known is not None:
        nest, token, axes, last = known
        if prod(token) * part.per_entry == group.tokens:
            shape = _shape(part, nest, token, axes, box, sizes)
            at = _bytes(shape, group.blocks, nest.block)
            for offset in (last + random.choice([8, 16, 24]), *range(0, 40, 4), memory.end.get(region, 0)):
                if memory.fits(region, group.id, at + offset):
                    memory.take(region, group.id, at + offset)
                    alike[kind, part.name, box] = nest, token, axes, offset
                    return shape, region, offset, nest.block
    for _ in range(MOST_REGIONS):
        token = _counts(random, group.tokens // part.per_entry) if part.per_entry else []
        axes = [_counts(random, stop - start) for start, stop in box]
        nest = _nest(random, group.blocks, token, axes, part.element.bytes)
        shape = _shape(part, nest, token, axes, box, sizes)
        at = _bytes(shape, group.blocks, nest.block)
        end = memory.end.get(region, 0)
        for offset in (*(random.randint(0, max(16, end)) for _ in range(6)), 0, end, end + random.randint(0, 9)):
            if memory.fits(region, group.id, at + offset):
                memory.take(region, group.id, at + offset)
                alike[kind, part.name, box] = nest, token, axes, offset
                return shape, region, offset, nest.block
        region, memory.regions = memory.regions, memory.regions + 1
    raise NoRoomError(f"{part} in {group.blocks} blocks of {group.tokens} tokens")


def _tables(
    random: Random,
    side: _Side,
    needed: dict[int, int],
    kinds: dict[int, LayerKind],
    moved: set[int],
    tokens: int,
    start: int,
) -> dict[int, list[int]]:
    """Distinct ids (over all groups where they overlay), holes where no layer that is moved looks."""
    total = min((group.blocks for group in side.groups), default=0)
    free = random.sample(range(total), total) if random.random() < 0.6 else list(range(total))
    if random.random() < 0.5:
        free = sorted(free, reverse=random.random() < 0.2)
    out: dict[int, list[int]] = {}
    at = 0
    for group in side.groups:
        if not side.overlay:
            at, free = 0, random.choice([random.sample(range(group.blocks), group.blocks), list(range(group.blocks))])
        ids = free[at : at + needed[group.id]]
        at += needed[group.id]
        if group.tokens:
            lows = [
                kinds[layer].reach.first_needed(tokens)
                for layer, home in side.group_of.items()
                if home == group.id and layer in moved
            ]
            lowest = min(lows, default=tokens)
            if side.engine == "P":
                lowest = max(lowest, start)
            gone = random.choice([0.0, 0.0, 0.5, 1.0])
            for position in range(min(len(ids), lowest // group.tokens)):
                if random.random() < gone:
                    ids[position] = declared.HOLE
        out[group.id] = ids
    return out


def case(seed: int) -> Case:
    """Two sides of one model, manifests of all ranks, and a request."""
    try:
        return _case(Random(seed))
    except NoRoomError:
        return case(seed + 1_000_003)


def _case(random: Random) -> Case:
    entries = random.choice([(1,), (1,), (1, 2), (1, 4), (3,), (1, 2, 4)])
    distinct = [layer_kind(random, entries) for _ in range(random.randint(1, 3))]
    kinds = {i: random.choice(distinct) for i in range(random.randint(1, 5))}
    homes = {i: random.choice(["PD"] * 8 + ["P", "D"]) for i in kinds}
    here, there = ({i: kinds[i] for i in kinds if side in homes[i]} for side in "DP")
    tokens = random.randint(1, 20)
    producer, needed_there = _side(random, "P", there, tokens)
    consumer, needed_here = _side(random, "D", here, tokens)
    step = lcm(*(group.tokens for group in consumer.groups if group.tokens))
    start = step * random.randint(0, tokens // step) if random.random() < 0.4 else 0
    moved = {i for i in kinds if homes[i] == "PD"}
    return Case(
        _manifests(random, producer, there, set()),
        _manifests(random, consumer, here, {i for i in here if homes[i] == "D"}),
        Request(
            tokens,
            _tables(random, producer, needed_there, kinds, moved, tokens, start),
            _tables(random, consumer, needed_here, kinds, moved, tokens, start),
            start,
        ),
        tokens + random.choice([0, 0, 1]),
    )


def small(seed: int) -> Manifest:
    """One small manifest that may contradict itself: a few parts at drawn places in one or two regions."""
    random = Random(seed)
    count = random.choice([1, 2, 2, 3])
    groups, tokens = [], []
    same = random.choice([0, 0, 1, 2, 3, 4])
    for i in range(count):
        tokens.append(random.choice([0, 0, 1, 2, 4, 6]))
        paging = TokenPaged(tokens[i]) if tokens[i] else StatePaged()
        keeps = _reach(random)
        groups.append(Group(i, paging, same or random.randint(1, 5), keeps if random.random() < 0.3 else FULL))
    pitch = random.choice([0, 0, random.randint(1, 24), random.choice([8, 12, 16])])
    shapes, layers, ends = [], [], [0, 0]
    nests: list[tuple[_Nest, list[int], list[list[int]]]] = []
    for i in range(random.choice([1, 2, 2, 3, 4])):
        group = groups[random.randrange(count)]
        parts = []
        for j in range(random.choice([1, 1, 2])):
            live = tuple((name, random.randint(1, 4)) for name in random.sample(["head", "dim"], random.choice([0, 1, 1, 2])))
            per_entry = random.choice([n for n in (1, 2, 4) if group.tokens % n == 0]) if group.tokens else 0
            kind = PartKind("p", Element("uint8", 1), live, per_entry, per_entry > 1)
            if random.random() < 0.2:
                kind = PartKind("p", Element("opaque", random.randint(1, 5), opaque="x"), live, per_entry, per_entry > 1)
            token = _counts(random, group.tokens // per_entry) if per_entry else []
            if token and random.random() < 0.02:
                token[0] += 1
            axes = [_counts(random, size) for _, size in live]
            nest = _nest(random, group.blocks, token, axes, kind.element.bytes)
            if nests and random.random() < 0.3:
                other, other_token, other_axes = random.choice(nests)
                if (other_token, other_axes) == (token, axes):
                    nest = other
            nests.append((nest, token, axes))
            shape = _shape(kind, nest, token, axes, tuple((0, n) for _, n in live), tuple((n, 0) for _, n in live))
            stride = pitch if pitch and random.random() < 0.9 else nest.block
            region = random.choice([0, 0, 0, 1])
            at = _bytes(shape, group.blocks, stride)
            offset = random.choice([0, random.randint(0, 30), ends[region], max(0, ends[region] - 1), random.randint(0, 12)])
            ends[region] = max(ends[region], offset + int(at.max()) + 1)
            parts.append(Part(f"p{j}", len(shapes), region, offset, stride))
            shapes.append(shape)
        layers.append(Layer(f"l{i}", group.id, tuple(parts), _reach(random) if random.random() < 0.3 else Window(1)))
    spare = -1 if random.random() < 0.03 else 0
    regions = tuple(Region(f"r{i}", max(0, end + spare)) for i, end in enumerate(ends))
    return Manifest(Identity("p", "1", "model"), regions, tuple(groups), tuple(shapes), tuple(layers))
