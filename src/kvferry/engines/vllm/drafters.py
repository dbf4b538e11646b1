"""Layers of a speculative drafter: what they hold only decides how well the next tokens are guessed, never which are right.

So they are not required of a producer: where it runs no drafter, or another one, they are filled with zeros. The blocks stay in
the prefix cache, since loading them anew would leave the same zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from kvferry.manifest import Manifest
from kvferry.manifest.compare import compare_layers
from kvferry.session import Welcome

logger = logging.getLogger("kvferry.vllm")


def drafted_layers(names: Sequence[str], config: Any, layers: Any) -> frozenset[str]:
    """Those of `names`, in the order of their making, that belong to a drafter. Only one of vLLM's two model runners marks
    them. In the other they are those that are no layers of the model's own: numbered past its last, or under another name."""
    marked = frozenset(name for name in names if getattr(layers[name], "is_draft_layer", False))
    speculative = config.speculative_config
    if marked or speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return marked
    count = config.model_config.get_total_num_hidden_layers()
    stem, _ = _numbered(names[0]) if names else ("", 0)
    return frozenset(name for name in names if _numbered(name)[0] != stem or _numbered(name)[1] >= count)


def _numbered(name: str) -> tuple[str, int]:
    """What stands before the first number in a layer's name, and the number."""
    pieces = name.split(".")
    at = next((i for i, piece in enumerate(pieces) if piece.isdigit()), len(pieces))
    return ".".join(pieces[:at]), int(pieces[at]) if at < len(pieces) else 0


def without_other_drafters(welcome: Welcome, consumers: Iterable[Manifest]) -> Welcome:
    """The producer without those layers that the consumer can do without and that are shaped otherwise here."""
    holders: dict[str, list[Any]] = {}
    for card in welcome.cards:
        for layer in card.caches.layers:
            holders.setdefault(layer.name, []).append((card.caches, layer))
    other = {
        mismatch.layer
        for consumer in consumers
        for mismatch in compare_layers(consumer, [layer for layer in consumer.layers if not layer.required], holders)
    }
    if not other:
        return welcome
    logger.warning("%s runs another drafter: %s are filled, not loaded", welcome.engine, ", ".join(sorted(other)))
    cards = []
    for card in welcome.cards:
        kept = tuple(layer for layer in card.caches.layers if layer.name not in other)
        cards.append(replace(card, caches=replace(card.caches, layers=kept)))
    return replace(welcome, cards=tuple(cards))
