"""What the paths of this machine cost, in the few numbers by which loads choose their strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvferry.doctor.memory import MemoryKind
from kvferry.strategy.cost import Rates
from kvferry.strategy.staging import BUDGET
from lab.bench.agents import load_nixl
from lab.bench.case import placed, size_of
from lab.bench.scatters import SCATTERS
from lab.bench.staging_ends import AUTO, Ask, consumer_end, holder, memory_of

TCP: Final = {"UCX_TLS": "tcp,cuda_copy"}
WIRES: Final[Mapping[str, Mapping[str, str]]] = {"as UCX chooses": {}, "over TCP alone": TCP}


def run(memory: MemoryKind = "dram", budget: int = BUDGET) -> dict[str, Rates]:
    """Rates to a process of its own on this machine, by how the two are made to meet."""
    load_nixl()
    return {name: _measured(memory, budget, ucx) for name, ucx in WIRES.items()}


def _measured(memory: MemoryKind, budget: int, ucx: Mapping[str, str]) -> Rates:
    scatter = replace(SCATTERS[1], layers=1)
    case = scatter.case(1_000)
    with holder() as held:
        ready = held.hold(Ask(scatter.name, 1, 1_000, memory, budget, dict(ucx)))
        here = memory_of(size_of(case.consumers[0]), memory, shared=False)
        end = consumer_end(AUTO, here, memory, budget, ucx)
        try:
            producer = placed(case.producers[0], ready.ranks[0].address, memory)
            plan = case.plan([producer], placed(case.consumers[0], here.memory.storage.address, memory))
            name = end.transport.connect(ready.ranks[0].transport)
            end.transport.prepare(plan, 0, name)
            return end.scattered.rates(name)
        finally:
            end.close()
