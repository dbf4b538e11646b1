"""The one JSON document that the page reads: ranks, plans, one request and costs, whatever repeats being said once.

Takes manifests, so that it does not matter whether they come from a model of the zoo, a file or two running engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from kvferry.explain.cost import Load, strategies
from kvferry.manifest import Manifest
from kvferry.manifest.schema import Layer, Rank
from kvferry.plan import Fleet, Grain, Request, make_plans
from kvferry.plan.explain import Read, reads
from kvferry.plan.intervals import Intervals
from kvferry.plan.tables import Table
from kvferry.strided import Ints

DOCUMENT_VERSION: Final = 1


@dataclass(frozen=True)
class Title:
    """What the transfer is called: the model, and the two sides as a person would write them."""

    model: str
    prefill: str
    decode: str
    source: str = ""


def document(title: Title, producers: Sequence[Manifest], consumers: Sequence[Manifest], request: Request) -> dict[str, Any]:
    """Plan, prove and bind; raises what planning and binding raise."""
    fleet, readers = Fleet(producers), Fleet(consumers)
    plans = make_plans(readers, fleet)
    ordinal = {m.identity.rank: i for i, m in enumerate(fleet.manifests)}
    loads = [Load.of(plan, request) for plan in plans]
    once = _Once()
    return {
        "version": DOCUMENT_VERSION,
        "title": msgspec.to_builtins(title),
        "prefill": [_rank(manifest, once) for manifest in fleet.manifests],
        "decode": [_rank(manifest, once) for manifest in readers.manifests],
        "plans": [_plan(load, ordinal, once) for load in loads],
        "reads": [[_read(read, ordinal) for read in reads(consumer, fleet)] for consumer in readers.manifests],
        "request": {
            "tokens": int(request.tokens),
            "start": int(request.start),
            "prefill": _tables(request.src),
            "decode": _tables(request.dst),
        },
        "strategies": [msgspec.to_builtins(strategy) for strategy in strategies(loads)],
        "once": once.values,
    }


class _Once:
    """Values that many ranks share, each kept once under its kind and named by its place there."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self._places: dict[tuple[str, bytes], int] = {}

    def put(self, kind: str, value: Any) -> int:
        place = self._places.get(key := (kind, msgspec.json.encode(value)))
        if place is None:
            kept = self.values.setdefault(kind, [])
            place = self._places[key] = len(kept)
            kept.append(msgspec.to_builtins(value))
        return place


def _rank(manifest: Manifest, once: _Once) -> dict[str, Any]:
    rank = manifest.identity.rank
    return {
        "rank": [rank.tp, rank.tp_size, rank.pp, rank.pp_size],
        "regions": once.put("regions", [[r.name, r.length, r.memory] for r in manifest.regions]),
        "groups": once.put("groups", manifest.groups),
        "shapes": once.put("shapes", manifest.shapes),
        "layers": once.put("layers", [_layer(layer) for layer in manifest.layers]),
    }


def _layer(layer: Layer) -> list[Any]:
    parts = [[p.name, p.shape, p.region, p.offset, p.block_stride] for p in layer.parts]
    return [layer.name, layer.group, layer.reach, layer.required, parts]


def _plan(load: Load, ordinal: Mapping[Rank, int], once: _Once) -> dict[str, Any]:
    """The finest grain alone says for every byte where it comes from; coarser ones are the same, joined."""
    plan, spans = load.plan, load.spans
    return {
        "sources": [ordinal[source.identity.rank] for source in plan.sources],
        "tells": [ordinal[rank] for rank in plan.tells],
        "lanes": once.put("lanes", plan.lanes),
        "needs": once.put("needs", plan.needs),
        "edges": [
            [e.source, e.src_group, e.dst_group, e.need, _grain(e.grains[-1], once), once.put("spans", _pairs(tokens))]
            for e, tokens in zip(plan.edges, spans.copied, strict=True)
        ],
        "fills": [
            [f.group, f.need, _grain(f.grains[-1], once), once.put("spans", _pairs(tokens))]
            for f, tokens in zip(plan.fills, spans.filled, strict=True)
        ],
        "bytes": list(load.bytes),
        "runs": list(load.runs),
        "filled": load.filled,
        "unhashable": {group: _pairs(_stretches(lost)) for group, lost in load.unhashable.items()},
    }


def _grain(grain: Grain, once: _Once) -> int:
    return once.put("grains", [grain.tokens, grain.runs])


def _read(read: Read, ordinal: Mapping[Rank, int]) -> list[Any]:
    return [ordinal[read.producer], read.layers, read.example, list(read.parts), read.extents]


def _pairs(intervals: Intervals) -> list[list[int]]:
    starts, stops = intervals
    return [list(pair) for pair in zip(starts.tolist(), stops.tolist(), strict=True)]


def _stretches(found: Ints) -> Intervals:
    """Consecutive numbers as half-open intervals."""
    if not len(found):
        return found, found
    ends = np.flatnonzero(np.diff(found) != 1)
    return found[np.concatenate([[0], ends + 1])], found[np.concatenate([ends, [len(found) - 1]])] + 1


def _tables(tables: Mapping[int, Table]) -> dict[int, list[list[int]]]:
    """Block tables as [first id, how many]: ids that count up, or holes."""
    out = {}
    for group, table in tables.items():
        ids = np.asarray(table, np.int64).reshape(-1)
        step = np.where(ids[1:] < 0, ids[:-1] < 0, (ids[:-1] >= 0) & (ids[1:] == ids[:-1] + 1))
        first = np.concatenate([[0], np.flatnonzero(~step) + 1]) if len(ids) else np.empty(0, np.int64)
        out[group] = np.stack([ids[first], np.diff(np.append(first, len(ids)))], axis=1).tolist()
    return out
