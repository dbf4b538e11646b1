"""Do two sides hold the same state? Every difference is returned, named by layer and part, in the words of an operator.

"There" is the producer, "here" the consumer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.manifest.schema import Axis, Chunk, Element, Layer, Manifest, Reach, Shape, TokenPaged, Window

_HOLDS = {True: "holds its first tokens (partial)", False: "holds nothing yet"}
_PLURAL = {
    "head": "heads",
    "dim": "dims",
    "channel": "channels",
    "tap": "taps",
    "group": "groups",
    "state": "states",
    "shard": "shards",
    "slot": "slots",
}


@dataclass(frozen=True)
class Mismatch:
    """One difference; `layer` and `part` are empty where it concerns the engines as a whole. `name` says which kind of
    difference it is, for whoever looks up what to do about it; two that say the same are equal whatever they are called."""

    what: str
    layer: str = ""
    part: str = ""
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = " ".join(w for w in (self.layer, self.part) if w)
        return f"{where}: {self.what}" if where else self.what


Holders = Mapping[str, Sequence[tuple[Manifest, Layer]]]


class _Meaning(NamedTuple):
    """What the numbers of a part are, and how many there are of them."""

    element: Element
    entries: tuple[int, bool]
    sizes: tuple[tuple[str, int], ...]


Content = tuple[bool, Reach, tuple[tuple[str, _Meaning], ...]]


def compare(consumer: Manifest, producers: Sequence[Manifest]) -> tuple[Mismatch, ...]:
    """All reasons why `consumer` cannot be loaded from `producers`, the ranks of one engine; empty if there is none."""
    holders: dict[str, list[tuple[Manifest, Layer]]] = defaultdict(list)
    for producer in producers:
        for layer in producer.layers:
            holders[layer.name].append((producer, layer))
    return (*compare_engines(consumer, producers), *compare_layers(consumer, consumer.layers, holders))


def compare_engines(consumer: Manifest, producers: Sequence[Manifest]) -> tuple[Mismatch, ...]:
    """What is wrong between the engines as a whole."""
    ranks, unsupported = compare_ranks(producers)
    return (*_models(consumer, producers), *ranks, *_unsupported(consumer), *unsupported)


def compare_ranks(producers: Sequence[Manifest]) -> tuple[tuple[Mismatch, ...], tuple[Mismatch, ...]]:
    """What is wrong with the ranks of an engine, whatever reads them: between them, and what they have that nothing reads."""
    return tuple(_identities(producers)), tuple(found for producer in producers for found in _unsupported(producer))


def can_meet(consumer: Manifest, models: Set[str]) -> bool:
    """Whether nothing is wrong between a consumer and engines of the models, whose own ranks are in order."""
    return models <= {consumer.identity.model} and not any(_unsupported(consumer))


def content(manifest: Manifest, layer: Layer) -> Content:
    """What a layer holds, wherever it lies and whatever share of it. Two layers have equal content exactly if `compare_layers`
    finds nothing between them."""
    parts = sorted((part.name, _meaning(manifest.shapes[part.shape])) for part in layer.parts)
    return manifest.group(layer.group).tokens == 0, layer.reach, tuple(parts)


def _meaning(shape: Shape) -> _Meaning:
    token = shape.token
    entries = (token.per_entry, token.moves_partial) if token else (0, False)
    return _Meaning(shape.element, entries, tuple(sorted((axis.name, axis.live_size) for axis in shape.axes)))


def compare_layers(consumer: Manifest, layers: Iterable[Layer], holders: Holders) -> tuple[Mismatch, ...]:
    """What is wrong between some layers of the consumer and those who hold them."""
    found: list[Mismatch] = []
    for layer in layers:
        held = holders.get(layer.name, ())
        if not held and layer.required:
            found.append(
                Mismatch(
                    "held by no producer rank; does the producer run the whole model, and all of its ranks?",
                    layer.name,
                    name="missing-layer",
                )
            )
        if len({other.group for _, other in held}) > 1:
            found.append(Mismatch("the producer's ranks put it in different groups", layer.name, name="ranks"))
        for producer, other in held:
            found += _layers(layer, consumer, other, producer)
    return tuple(dict.fromkeys(found))


def _models(consumer: Manifest, producers: Sequence[Manifest]) -> Iterator[Mismatch]:
    for model in sorted({p.identity.model for p in producers} - {consumer.identity.model}):
        yield Mismatch(f"model {model} there, {consumer.identity.model} here", name="model")


def _identities(producers: Sequence[Manifest]) -> Iterator[Mismatch]:
    engines = {(p.identity.engine, p.identity.incarnation) for p in producers}
    if len(engines) > 1:
        names = ", ".join(f"{engine}@{incarnation}" for engine, incarnation in sorted(engines))
        yield Mismatch(f"the producer's ranks are of different engines or incarnations: {names}", name="ranks")
    ranks = Counter(p.identity.rank for p in producers)
    for rank in sorted(str(r) for r, times in ranks.items() if times > 1):
        yield Mismatch(f"producer rank {rank} appears twice", name="ranks")
    blocks: dict[int, set[object]] = defaultdict(set)
    for groups in {p.groups for p in producers}:
        for group in groups:
            blocks[group.id].add((group.paging, group.blocks))
    for group_id, same in sorted(blocks.items()):
        if len(same) > 1:
            what = f"the producer's ranks disagree on group {group_id}: one block table cannot serve them all"
            yield Mismatch(what, name="ranks")


def _unsupported(manifest: Manifest) -> Iterator[Mismatch]:
    for group in manifest.groups:
        if isinstance(group.paging, TokenPaged):
            if group.paging.cyclic is not None:
                yield Mismatch(
                    f"{manifest.identity}: group {group.id} deals its tokens to context-parallel ranks: not supported yet",
                    name="context-parallel",
                )
            if group.paging.ring is not None:
                what = f"{manifest.identity}: group {group.id} is a ring of tokens: not supported yet"
                yield Mismatch(what, name="token-ring")


def _layers(layer: Layer, consumer: Manifest, other: Layer, producer: Manifest) -> Iterator[Mismatch]:
    group, other_group = consumer.group(layer.group), producer.group(other.group)
    if (group.tokens == 0) != (other_group.tokens == 0):
        kinds = ["state" if g.tokens == 0 else "token" for g in (other_group, group)]
        yield Mismatch(f"paged by {kinds[0]} there, by {kinds[1]} here", layer.name, name="paging")
        return
    if layer.reach != other.reach:
        yield Mismatch(f"{_reach(other.reach)} there, {_reach(layer.reach)} here", layer.name, name="reach")
    there = {p.name: producer.shapes[p.shape] for p in other.parts}
    here = {p.name: consumer.shapes[p.shape] for p in layer.parts}
    if not here.keys() & there.keys() and _opaque(there) != _opaque(here):
        hint = "what is inside of such cells is not known: run the same backend on both sides, or certified ones"
        yield Mismatch(f"{_held(there)} there, {_held(here)} here; {hint}", layer.name, name="backends")
        return
    for name in sorted(here.keys() ^ there.keys()):
        side = "producer" if name in here else "consumer"
        yield Mismatch(f"the {side} does not hold this part", layer.name, name, "parts")
    for name, shape in here.items():
        if name in there:
            for called, what in _shapes(there[name], shape):
                yield Mismatch(what, layer.name, name, called)


def _opaque(parts: Mapping[str, Shape]) -> bool:
    return any(shape.element.opaque for shape in parts.values())


def _held(parts: Mapping[str, Shape]) -> str:
    return ", ".join(
        str(shape.element) if shape.element.opaque else f"{name} in {shape.element}" for name, shape in parts.items()
    )


def _reach(reach: Reach) -> str:
    if isinstance(reach, Window):
        return f"a window of {reach.tokens} tokens"
    if isinstance(reach, Chunk):
        return f"chunks of {reach.tokens} tokens"
    return "full attention"


def _shapes(there: Shape, here: Shape) -> Iterator[tuple[str, str]]:
    """Differences with their names."""
    if there.element != here.element:
        yield from _elements(there.element, here.element)
    per_entry = tuple(s.token.per_entry if s.token else 0 for s in (there, here))
    if per_entry[0] != per_entry[1]:
        opaque = bool(here.element.opaque)
        hint = "; opaque cells cannot be cut: use the same kernel block size on both sides" if opaque else ""
        what = f"an entry stands for {per_entry[0]} tokens there, {per_entry[1]} here{hint}"
        yield "opaque-blocks" if opaque else "entries", what
    partial = tuple(bool(s.token and s.token.moves_partial) for s in (there, here))
    if per_entry[0] == per_entry[1] and partial[0] != partial[1]:
        yield "entries", f"an incomplete entry {_HOLDS[partial[0]]} there, {_HOLDS[partial[1]]} here"
    axes = ({a.name: a for a in there.axes}, {a.name: a for a in here.axes})
    if axes[0].keys() != axes[1].keys():
        yield "parts", f"axes ({', '.join(axes[0])}) there, ({', '.join(axes[1])}) here"
        return
    for name, axis in axes[1].items():
        yield from _axes(axes[0][name], axis)


def _axes(there: Axis, here: Axis) -> Iterator[tuple[str, str]]:
    if there.live_size != here.live_size:
        unit = _PLURAL.get(here.name, here.name)
        called = "rank-shares" if here.name == "shard" else "sizes"
        yield called, f"{there.live_size} {unit} there, {here.live_size} here"


def _alike(there: Element, here: Element) -> str:
    """Cells that hold several heads are not cut by them."""
    return ", and equally many ranks" if there.opaque != here.opaque and there.bytes != here.bytes else ""


def _elements(there: Element, here: Element) -> Iterator[tuple[str, str]]:
    if there.opaque or here.opaque:
        hint = f"run the same backend with the same kernel block on both sides{_alike(there, here)}"
        yield "backends", f"{there} there, {here} here; {hint}"
    elif there.dtype != here.dtype:
        yield "cache-dtype", f"{there} there, {here} here; cache dtypes must be equal on both sides"
    else:
        yield "scales", f"scales {there.scales} there, {here.scales} here; the same bytes would mean different numbers"
