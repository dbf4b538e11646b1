"""The telling cases: pairs of engines where connectors differ, and what came of each with one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path

from lab.crossing.checkpoints import Checkpoint, checkpoint
from lab.crossing.compare import Difference, differences
from lab.crossing.engine import Engine
from lab.fleet.connectors import Connector
from lab.fleet.legs import Answer, Crossed, ask_all, cross_all, prompt
from lab.fleet.metrics import Counters, counted, counters
from lab.fleet.server import Server, servers
from lab.fleet.zygote import Zygote


@dataclass(frozen=True)
class Topology:
    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        sizes = ((name, size) for name, size in (("TP", self.tp), ("PP", self.pp)) if size > 1)
        return "".join(f"{name}{size}" for name, size in sizes) or "1"


ONE, TWO, STAGES = Topology(), Topology(tp=2), Topology(pp=2)


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    model: str
    producer: Topology
    consumer: Topology
    lengths: tuple[int, ...]
    block: int = 32


PLAIN = "plain"
MIXED = (31, 32, 33, 64, 100, 191, 300, 700)

CASES = (
    Case("granite-tp1-tp2", "Granite-H, one group", "granite-h-1g", ONE, TWO, MIXED),
    Case("granite-tp2-tp1", "Granite-H, one group", "granite-h-1g", TWO, ONE, MIXED),
    Case("nemotron-pp2-1", "Nemotron-H, pipeline", "nemotron-h", STAGES, ONE, MIXED),
    Case("nemotron-1-pp2", "Nemotron-H, pipeline", "nemotron-h", ONE, STAGES, MIXED),
    Case("llama-pp2-1", "Llama, pipeline", "llama", STAGES, ONE, MIXED),
    Case("gemma-window", "Gemma-3, window edges", "gemma3", ONE, ONE, (158, 159, 160, 190, 191, 192, 222, 223, 224)),
    Case("short-prompt", "Nemotron-H, 100 tokens in a large block", "nemotron-h-large-state", ONE, ONE, (100,)),
)


class Verdict(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    RECOMPUTED = "recomputed at D"
    FAILED = "failed"
    REFUSED = "refused at start"


@dataclass(frozen=True)
class Outcome:
    """`moved` is in bytes; `from_peer` counts prompt tokens by vLLM's own metrics."""

    case: Case
    connector: str
    verdict: Verdict
    detail: str
    requests: int
    right: int
    from_peer: int = 0
    prompt_tokens: int = 0
    moved: int = 0


def run(
    chosen: Sequence[Case], connectors: Sequence[Connector], zygote: Zygote, cache: Path, told: Callable[[str], None]
) -> Iterator[Outcome]:
    """Cases of one model share their engines; `told` hears of progress."""
    for model, same in groupby(chosen, key=lambda case: case.model):
        cases = tuple(same)
        made = checkpoint(model, cache)
        lengths = sorted({n for case in cases for n in case.lengths})
        reference: dict[int, Answer] = {}
        for connector in connectors:
            told(f"{model}: starting engines with {connector.name}")
            engines = _engines(cases, made, connector)
            if not reference:
                engines[PLAIN] = Engine(made, block=cases[0].block)
            with servers(zygote, engines, or_refused=True) as up:
                if PLAIN in up:
                    answers = ask_all(up[PLAIN].wait(), [prompt(n) for n in lengths])
                    reference = dict(zip(lengths, answers, strict=True))
                for case in cases:
                    told(f"{case.name}: {connector.name}")
                    yield _outcome(case, connector, up, reference, made.architecture.dtype)


def _engines(cases: Sequence[Case], made: Checkpoint, connector: Connector) -> dict[str, Engine]:
    out = {}
    for case in cases:
        for role, topology in (("P", case.producer), ("D", case.consumer)):
            out[_engine_name(case, role)] = Engine(made, connector, topology.tp, topology.pp, case.block)
    return out


def _engine_name(case: Case, role: str) -> str:
    """Between unlike topologies an engine may be P of one case and D of another."""
    topology = case.producer if role == "P" else case.consumer
    return f"{topology}-{role}" if case.producer == case.consumer else str(topology)


def _outcome(case: Case, connector: Connector, up: dict[str, Server], reference: dict[int, Answer], dtype: str) -> Outcome:
    producer, consumer = (up[_engine_name(case, role)] for role in "PD")
    for server in (producer, consumer):
        if server.died():
            return Outcome(case, connector.name, Verdict.REFUSED, server.reason(), len(case.lengths), 0)
    before = counters(consumer)
    crossed = cross_all(producer, consumer, [prompt(n) for n in case.lengths])
    found = differences(crossed, [reference[n] for n in case.lengths], dtype)
    broken = any(not it.decode.good for it in crossed)
    tokens = sum(case.lengths)
    counts = counters(consumer) - before if broken else counted(consumer, before, lambda c: c.prompt_tokens >= tokens)
    verdict, detail = _broken(crossed, consumer) if broken else _judged(found, counts)
    return Outcome(
        case,
        connector.name,
        verdict,
        detail,
        len(found),
        sum(it.right for it in found),
        counts.from_peer,
        tokens,
        counts.bytes_moved or counts.stock_bytes,
    )


def _broken(crossed: Sequence[Crossed], consumer: Server) -> tuple[Verdict, str]:
    status = next(it.decode.status for it in crossed if not it.decode.good)
    return Verdict.FAILED, f"{f'HTTP {status}' if status else 'no answer'}; {consumer.reason()}"


def _judged(found: Sequence[Difference], counts: Counters) -> tuple[Verdict, str]:
    """Right text proves nothing where D computed the prompt itself."""
    wrong = [it for it in found if not it.right]
    if wrong:
        texts = sum(it.parted_at >= 0 for it in wrong)
        apart = max(it.apart for it in wrong)
        lengths = ", ".join(str(it.tokens) for it in wrong)
        return Verdict.WRONG, f"HTTP 200; other text in {texts}, log-probabilities off by up to {apart:.2g}; N = {lengths}"
    needed = sum(it.tokens - 1 for it in found)
    if counts.from_peer < needed:
        return Verdict.RECOMPUTED, f"{counts.from_peer} of {needed} prompt tokens came from P"
    if counts.bytes_moved != counts.bytes_predicted:
        return Verdict.WRONG, f"{counts.bytes_moved} bytes moved, {counts.bytes_predicted} foretold"
    return Verdict.RIGHT, ""
