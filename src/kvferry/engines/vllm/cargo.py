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
    are refused. `idle`: nothing is computed in this step. `begun`: ranks have all of it already."""

    closing: tuple[Closing, ...] = ()
    opened: tuple[Lease, ...] = ()
    forgotten: tuple[PeerKey, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    loads: tuple[Load, ...] = ()
    refused: tuple[str, ...] = ()
    idle: bool = False
    begun: bool = False


@dataclass
class Pending:
    """Orders since the last step."""

    meetings: list[Meeting] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class RankCard(KVConnectorHandshakeMetadata):
    """`alone`: the engine has no other connector beside this one."""

    card: Card
    alone: bool = True


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Of loaded requests: blocks that must not become findable by their hash, how long the copies took on the slowest rank, and
    which were copied out of mapped memory (`anywhere`). Of loads that were made in the step that ordered them, which vLLM hears
    nothing of: those that ended, and of these those that failed. Every rank says so with the same step."""

    unhashable: dict[str, frozenset[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    anywhere: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        if not isinstance(other, Report):
            return self
        blocks, seconds = dict(self.unhashable), dict(self.seconds)
        for request, found in other.unhashable.items():
            blocks[request] = blocks.get(request, frozenset()) | found
        for request, took in other.seconds.items():
            seconds[request] = max(seconds.get(request, 0.0), took)
        return Report(blocks, seconds, self.anywhere | other.anywhere, self.ended | other.ended, self.failed | other.failed)

    def __bool__(self) -> bool:
        return bool(self.unhashable or self.seconds or self.ended)
