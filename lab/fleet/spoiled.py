"""Loads that are made wrong on purpose, in the ways in which a transfer between ranks goes wrong. For tests only.

A comparison that calls transfers right is worth what it says of these. A request whose id has a mark is spoiled at the
consumer: what is read, or what was read, before anything is computed with it. Every rank says in its log what it spoiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import count
from typing import Any

import msgspec

from kvferry.manifest.schema import HOLE, Layer, Manifest, Part
from kvferry.plan import Plan
from kvferry.session import Load, Meeting, PeerKey

VARIABLE = "FLEET_SPOILED"
"""The variable that asks for it."""
SAID = "spoiled on purpose"
EXCHANGED = "exchanged "
_MARK = re.compile(r"spoiled-([a-z]+)-(\d+)-")


class Spoiling(str, Enum):
    """`HEADS`: keys of two heads of a layer exchanged; `BLOCKS`: a block that is not of the prompt; `LAYERS`: two layers
    exchanged; `STATE`: a layer's state lost; `TAPS`: a layer's convolution a token late; `RANKS`: slices of ranks exchanged."""

    HEADS = "heads"
    BLOCKS = "blocks"
    LAYERS = "layers"
    STATE = "state"
    TAPS = "taps"
    RANKS = "ranks"


def marked(how: Spoiling, which: int, rest: str) -> str:
    """The id of a request to be spoiled; `which` chooses the layer, or the block."""
    return f"spoiled-{how.value}-{which}-{rest}"


def marks(request: str) -> tuple[Spoiling, int] | None:
    found = _MARK.search(request)
    return (Spoiling(found[1]), int(found[2])) if found else None


def was(request: str, log: str) -> bool:
    """Whether a consumer's log says that the request of this id was spoiled."""
    return any(line.find(SAID) >= 0 and request in line for line in log.splitlines())


def where_marked() -> None:
    """Once a process, before any engine; forked children inherit it."""
    from kvferry.engines.vllm.worker import WorkerHalf

    register, begin, step = WorkerHalf.register, WorkerHalf.begin, WorkerHalf.step
    results, loaded = WorkerHalf.results, WorkerHalf.loaded

    def registering(self: Any, kv_caches: Mapping[str, Any]) -> None:
        self.spoiled, self.turned, self.caches = {}, set(), kv_caches
        register(self, kv_caches)

    def beginning(self: Any, orders: Any) -> None:
        rank = self._rank.ordinal
        turned = [found for it in orders.meetings if (found := exchanged(it, rank)) is not None]
        self.turned.update(it.peer for it in turned)
        loads = tuple(read_wrongly(load, self.turned) for load in orders.loads)
        self.spoiled.update((load.request, load) for load in loads if marks(load.request))
        begin(self, replace(orders, meetings=(*orders.meetings, *turned), loads=loads))

    def stepping(self: Any, orders: Any) -> None:
        step(self, orders)
        hurried = [name for name in self._in_step if name in self.spoiled]
        if hurried:
            self._ferry.settle(hurried, self._options.read_s)
            _spoil(self, hurried)

    def ending(self: Any) -> Any:
        sent, received, failed = results(self)
        _spoil(self, received - failed)
        return sent, received, failed

    def ending_beside(self: Any, most: int) -> Any:
        received, report = loaded(self, most)
        _spoil(self, received)
        return received, report

    WorkerHalf.register, WorkerHalf.begin = registering, beginning  # type: ignore[method-assign]
    WorkerHalf.step, WorkerHalf.results = stepping, ending  # type: ignore[method-assign]
    WorkerHalf.loaded = ending_beside  # type: ignore[method-assign]


def exchanged(meeting: Meeting, rank: int) -> Meeting | None:
    """The same producer under another name, read as if ranks had each other's slices; None where no rank has a slice."""
    plan = meeting.plans[rank]
    sliced = any(card.caches.shapes != meeting.cards[0].caches.shapes for card in meeting.cards)
    if not sliced and all(it.edges == plan.edges for it in meeting.plans):
        return None
    other = meeting.plans[len(meeting.plans) - 1 - rank]
    turned: Plan = msgspec.structs.replace(other, consumer=plan.consumer, sources=other.sources[::-1])
    plans = tuple(turned if index == rank else it for index, it in enumerate(meeting.plans))
    return Meeting(_beside(meeting.peer), meeting.cards, plans)


def _beside(peer: PeerKey) -> PeerKey:
    return replace(peer, address=EXCHANGED + peer.address)


def read_wrongly(load: Load, turned: Collection[PeerKey]) -> Load:
    """What is spoiled by reading something else."""
    how, which = marks(load.request) or (None, 0)
    if how is Spoiling.RANKS and _beside(load.peer) in turned:
        _say(load.request, "ranks exchanged")
        return replace(load, peer=_beside(load.peer))
    if how is Spoiling.BLOCKS:
        taken = {block for table in load.src.values() for block in (table if isinstance(table, list) else [table])}
        for group, table in load.src.items():
            places = [i for i, block in enumerate(table) if block != HOLE] if isinstance(table, list) else []
            if isinstance(table, list) and len(places) > 1:
                at, instead = places[which % len(places)], next(block for block in count(1) if block not in taken)
                read = [instead if i == at else block for i, block in enumerate(table)]
                _say(load.request, f"block {at} of group {group} is read from {instead}, which is not of the prompt")
                return replace(load, src={**load.src, group: read})
    return load


def _spoil(half: Any, requests: Collection[str]) -> None:
    """What is spoiled once it is there."""
    for name in requests:
        load = half.spoiled.pop(name, None)
        if load is not None:
            spoil(half._card.caches, half.caches.values(), load)


def spoil(manifest: Manifest, caches: Any, load: Load) -> None:
    how, which = marks(load.request) or (None, 0)
    change = CHANGES.get(how) if how is not None else None
    if change is None:
        return
    memories = _memories(manifest, caches)
    _wait_for(memories)
    views = Views(manifest, memories, load)
    said = change(views, which)
    _wait_for(memories)
    if said:
        _say(load.request, said)


class Views:
    """A load's blocks of a layer's parts, as bytes with a dimension for each digit of each axis."""

    def __init__(self, manifest: Manifest, memories: Sequence[Any], load: Load) -> None:
        self.manifest, self._memories, self._load = manifest, memories, load

    def layers(self, begins: str) -> Iterator[tuple[Layer, list[Part]]]:
        """Those with parts whose names begin so."""
        for layer in self.manifest.layers:
            parts = [part for part in layer.parts if part.name.startswith(begins)]
            if parts and layer.group in self._load.dst:
                yield layer, parts

    def chosen(self, begins: str, which: int) -> tuple[Layer, list[Part]] | None:
        found = list(self.layers(begins))
        return found[which % len(found)] if found else None

    def read(self, layer: Layer, part: Part) -> Any:
        return self._view(part)[self._blocks(layer)]

    def write(self, layer: Layer, part: Part, values: Any) -> None:
        self._view(part)[self._blocks(layer)] = values

    def dimension(self, part: Part, axis: str) -> int:
        """Of the most significant digit of an axis."""
        shape = self.manifest.shapes[part.shape]
        at = 1 + len(shape.token.digits if shape.token is not None else ())
        for one in shape.axes:
            if one.name == axis:
                return at
            at += len(one.digits)
        raise KeyError(f"part {part.name} has no axis {axis}")

    def _blocks(self, layer: Layer) -> Any:
        import torch

        table = self._load.dst[layer.group]
        ids = [block for block in table if block != HOLE] if isinstance(table, list) else [table]
        return torch.tensor(ids, device=self._memories[0].device)

    def _view(self, part: Part) -> Any:
        shape, group = self.manifest.shapes[part.shape], self._group(part)
        digits = [*(shape.token.digits if shape.token is not None else ()), *(it for axis in shape.axes for it in axis.digits)]
        counts, strides = [group.blocks, *(n for n, _ in digits)], [part.block_stride, *(stride for _, stride in digits)]
        size, step = (*counts, shape.element.bytes), (*strides, 1)
        return self._memories[part.region].as_strided(size, step, part.offset)

    def _group(self, part: Part) -> Any:
        return self.manifest.group(next(layer.group for layer in self.manifest.layers if part in layer.parts))


def _exchange_heads(views: Views, which: int) -> str:
    found = views.chosen("k", which)
    if found is None:
        return ""
    layer, (part, *_) = found
    held = views.read(layer, part)
    heads = held.movedim(views.dimension(part, "head"), 0)
    if len(heads) < 2:
        return ""
    heads[[0, 1]] = heads[[1, 0]]
    views.write(layer, part, held)
    return f"keys of two heads of {layer.name} exchanged"


def _exchange_layers(views: Views, which: int) -> str:
    same: dict[Any, list[Layer]] = {}
    for layer in views.manifest.layers:
        same.setdefault((layer.group, layer.reach, tuple((part.name, part.shape) for part in layer.parts)), []).append(layer)
    found = [layers for layers in same.values() if len(layers) > 1]
    if not found:
        return ""
    layers = found[which % len(found)]
    one, other = layers[which % len(layers)], layers[(which + 1) % len(layers)]
    for part, its in zip(one.parts, other.parts, strict=True):
        held, instead = views.read(one, part), views.read(other, its)
        views.write(one, part, instead)
        views.write(other, its, held)
    return f"{one.name} and {other.name} exchanged"


def _lose_state(views: Views, which: int) -> str:
    found = views.chosen("ssm", which)
    if found is None:
        return ""
    layer, (part, *_) = found
    views.write(layer, part, 0)
    return f"the state of {layer.name} lost"


def _delay_taps(views: Views, which: int) -> str:
    found = views.chosen("conv", which)
    if found is None:
        return ""
    layer, parts = found
    for part in parts:
        views.write(layer, part, views.read(layer, part).roll(1, views.dimension(part, "tap")))
    return f"the convolution of {layer.name} a token late"


CHANGES: Mapping[Spoiling, Callable[[Views, int], str]] = {
    Spoiling.HEADS: _exchange_heads,
    Spoiling.LAYERS: _exchange_layers,
    Spoiling.STATE: _lose_state,
    Spoiling.TAPS: _delay_taps,
}


def _memories(manifest: Manifest, caches: Any) -> list[Any]:
    """vLLM's storages as bytes, by region."""
    import torch

    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in caches}
    empty = [torch.empty(0, dtype=torch.uint8, device=found[region.address].device) for region in manifest.regions]
    return [bare.set_(found[region.address].untyped_storage()) for bare, region in zip(empty, manifest.regions, strict=True)]


def _wait_for(memories: Sequence[Any]) -> None:
    if memories[0].is_cuda:
        import torch

        torch.cuda.synchronize(memories[0].device)


def _say(request: str, what: str) -> None:
    print(f"{SAID}: {request}: {what}", file=sys.stderr, flush=True)
