"""What the connector's halves pass to each other through vLLM: orders down with every step, reports up."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.session import Card, Closing, Lease, Load, Meeting, PeerKey


@dataclass
class Orders(KVConnectorMetadata):
    """For every rank: words to kill, then words to make live; producers forgotten, then those met; loads to start; loads that
    are refused."""

    closing: tuple[Closing, ...] = ()
    opened: tuple[Lease, ...] = ()
    forgotten: tuple[PeerKey, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    loads: tuple[Load, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass
class RankCard(KVConnectorHandshakeMetadata):
    card: Card


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Blocks of loaded requests that must not become findable by their hash."""

    unhashable: dict[str, frozenset[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        merged = dict(self.unhashable)
        if isinstance(other, Report):
            for request, blocks in other.unhashable.items():
                merged[request] = merged.get(request, frozenset()) | blocks
        return Report(merged)
