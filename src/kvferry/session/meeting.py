"""What a consumer makes of a producer's cards: compared, planned, proved, before any request is served from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.manifest.schema import Manifest, Rank
from kvferry.plan import Plan, make_plans
from kvferry.plan.explain import costs
from kvferry.session.consumer import PeerKey
from kvferry.session.messages import Card, Welcome
from kvferry.session.words import Words


@dataclass(frozen=True)
class Meeting:
    """A producer with its cards, and a proved plan for every rank of the consumer, by ordinal."""

    peer: PeerKey
    cards: tuple[Card, ...]
    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        """The pair of topologies, and what the costliest consumer rank pays."""
        there, here = (_topology(rank) for rank in (self.cards[0].caches.identity.rank, self.plans[0].consumer.identity.rank))
        found = [
            (
                sum(c.bytes_per_token for c in costs(plan)),
                sum(c.bytes_per_state for c in costs(plan)),
                max((c.runs_per_block for c in costs(plan) if c.bytes_per_token), default=0),
                max((c.runs_per_block for c in costs(plan) if c.bytes_per_state), default=0),
            )
            for plan in self.plans
        ]
        token, state, runs, state_runs = (max(column) for column in zip(*found, strict=True))
        paged = f"up to {runs} runs a block, {token:,.0f} bytes a token" if token else ""
        kept = f"up to {state_runs} runs and {state:,} bytes a state" if state else ""
        return f"{self.peer}: {there} -> {here}; a rank reads {', '.join(filter(None, (paged, kept))) or 'nothing'}"


def _topology(rank: Rank) -> str:
    return f"TP{rank.tp_size}" if rank.pp_size == 1 else f"TP{rank.tp_size},PP{rank.pp_size}"


def meet(peer: PeerKey, welcome: Welcome, consumers: Sequence[Manifest]) -> Meeting:
    """Raises MismatchError with every mismatch, ManifestError or ProofError where the producer cannot be read."""
    words = Words(1, consumers[0].identity)
    for card in welcome.cards:
        words.plan(card.words)
    plans = make_plans(consumers, [card.caches for card in welcome.cards])
    return Meeting(peer, welcome.cards, plans)
