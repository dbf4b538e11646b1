"""A request to look at: block tables as an engine would hand them out, for a prompt of a given length."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.manifest import HOLE, Manifest
from kvferry.manifest.schema import Group
from kvferry.models import ModelShape, Side, manifests
from kvferry.plan import Request


def blocks_needed(groups: Sequence[Group], tokens: int) -> int:
    """Block ids that one request of `tokens` tokens takes, and the null block."""
    return 1 + sum(-(-tokens // g.tokens) if g.tokens else 1 for g in groups)


def block_tables(groups: Sequence[Group], tokens: int) -> dict[int, list[int]]:
    """Ids in turn from 1 (0 is the engine's null block); a group that keeps a window has holes before it."""
    tables: dict[int, list[int]] = {}
    free = 1
    for group in groups:
        if not group.tokens:
            tables[group.id] = [free]
            free += 1
            continue
        stop = -(-tokens // group.tokens)
        first = min(group.keeps.first_needed(tokens) // group.tokens, stop)
        tables[group.id] = [HOLE] * first + list(range(free, free + stop - first))
        free += stop - first
    return tables


def sized_manifests(model: ModelShape, side: Side, engine: str, tokens: int) -> tuple[Manifest, ...]:
    """A side's manifests with as many blocks as a request of `tokens` tokens takes."""
    groups = manifests(model, side, engine=engine, blocks=2)[0].groups
    return manifests(model, side, engine=engine, blocks=blocks_needed(groups, tokens))


def example_request(producer: Manifest, consumer: Manifest, prompt: int) -> Request:
    """A prompt of `prompt` tokens: the last one is computed by the consumer, so one less is loaded."""
    tokens = max(prompt - 1, 0)
    return Request(tokens, block_tables(producer.groups, tokens), block_tables(consumer.groups, tokens))
