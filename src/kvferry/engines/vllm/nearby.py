"""A rank that is its whole engine, on a device, and lives in its scheduler's process: it need not wait for vLLM to pass its
orders on, which on a GPU happens when a step's inputs are ready and its kernels are all but launched. Nor need the scheduler
wait for results to be passed on, which it looks at when the next step has been launched, to hear what has been loaded."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

from kvferry.engines.vllm.cargo import Orders, Report
from kvferry.session import PeerKey


class Nearby(Protocol):
    @property
    def meets(self) -> bool: ...

    def begin(self, orders: Orders) -> None: ...

    def loaded(self, most: int) -> tuple[set[str], Report]: ...

    def pace(self, peer: PeerKey) -> float | None: ...


_ranks: WeakValueDictionary[str, Nearby] = WeakValueDictionary()


def stay_nearby(engine: str, rank: Nearby) -> None:
    _ranks[engine] = rank


def rank_nearby(engine: str) -> Nearby | None:
    return _ranks.get(engine)
