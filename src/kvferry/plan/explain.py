"""What a plan costs and who reads what, in numbers for people and programs; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvferry.manifest.schema import Manifest, Rank
from kvferry.plan.choose import Deal, Fleet, live_box
from kvferry.plan.schema import Edge, Plan


@dataclass(frozen=True)
class Read:
    """One consumer rank reads `extents` of the parts of `layers` layers from one producer rank."""

    consumer: Rank
    producer: Rank
    layers: int
    example: str
    parts: tuple[str, ...]
    extents: str


@dataclass(frozen=True)
class Cost:
    """What flows from one source to one group: strided runs in the plan, runs per block (or state) of the consumer,
    bytes for every token or for every request."""

    source: Rank
    group: int
    strided_runs: int
    runs_per_block: int
    bytes_per_token: float
    bytes_per_state: int


def reads(consumer: Manifest, fleet: Fleet, reader: str = "") -> tuple[Read, ...]:
    """Who reads what from whom, one line per source and kind of layer."""
    deal = Deal(consumer, fleet, reader)
    merged: dict[tuple[int, tuple[str, ...], str], tuple[int, str]] = {}
    for layer in consumer.layers:
        lines: dict[tuple[int, str], list[str]] = {}
        for i, part in enumerate(layer.parts):
            axes = consumer.shapes[part.shape].axes
            live = live_box(consumer.shapes[part.shape])
            for source, box in deal.boxes(layer, i):
                cuts = [
                    f"{axis.name} [{low}, {high})"
                    for axis, (low, high), (start, stop) in zip(axes, box, live, strict=True)
                    if (low, high) != (0, axis.live_size) or (low, high) != (start, stop)
                ]
                lines.setdefault((source, ", ".join(cuts) or "whole"), []).append(part.name)
        for (source, extents), parts in lines.items():
            so_far, example = merged.get((source, tuple(parts), extents), (0, layer.name))
            merged[source, tuple(parts), extents] = (so_far + 1, example)
    return tuple(
        Read(consumer.identity.rank, fleet.manifests[source].identity.rank, layers, example, parts, extents)
        for (source, parts, extents), (layers, example) in sorted(merged.items(), key=lambda item: item[0][0])
    )


def costs(plan: Plan) -> tuple[Cost, ...]:
    """The cost of every edge, per source and consumer's group."""
    found: dict[tuple[int, int], list[Edge]] = {}
    for edge in plan.edges:
        found.setdefault((edge.source, edge.dst_group), []).append(edge)
    out = []
    for (source, group), edges in found.items():
        tokens = plan.consumer.group(group).tokens
        strided = runs = fixed = 0
        per_token = 0.0
        for edge in edges:
            coarse, fine = edge.grains[0], edge.grains[-1]
            tiles = tokens // coarse.tokens if coarse.tokens else 1
            strided += sum(len(grain.runs) for grain in edge.grains)
            runs += tiles * sum(prod(c for c, _, _ in run.repeats) for run in coarse.runs)
            entry = sum(run.length * prod(c for c, _, _ in run.repeats) for run in fine.runs)
            if fine.tokens:
                per_token += entry / fine.tokens
            else:
                fixed += entry
        out.append(Cost(plan.sources[source].identity.rank, group, strided, runs, per_token, fixed))
    return tuple(out)
