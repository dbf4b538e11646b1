"""Engines of one model that run at the same time, each P of some pairs and D of others, and what they should answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.crossing.checkpoints import Checkpoint, checkpoint
from lab.crossing.engine import Engine
from lab.fleet.connectors import Connector
from lab.fleet.legs import AT_ONCE, Answer, Prompt, ask_all, prompt
from lab.fleet.server import Server, servers
from lab.fleet.zygote import Zygote

AROUND = (32, 64, 96, 128, 160, 192, 224, 288)
LENGTHS = tuple(sorted({border + step for border in AROUND for step in range(-2, 3)} | {2, 17, 320, 333, 511, 513, 700}))
FEW = (31, 33, 64, 97, 159, 191, 224, 333, 700)

ALONE: dict[str, Any] = {}
TWO_RANKS = {"tp": 2}
TWO_STAGES = {"pp": 2}


@dataclass(frozen=True)
class Fleet:
    """`engines` by a letter, as changes to the default engine, `settings` among them being our connector's; `pairs` as the
    letters of P and D. `in_flight`: how many requests at once."""

    name: str
    model: str
    engines: Mapping[str, Mapping[str, Any]]
    pairs: tuple[str, ...]
    lengths: tuple[int, ...] = LENGTHS
    in_flight: int = AT_ONCE


@dataclass(frozen=True)
class Running:
    """A fleet at sea: its servers, the prompts, and the answers of an engine without a connector."""

    fleet: Fleet
    connector: Connector
    servers: Mapping[str, Server]
    prompts: tuple[Prompt, ...]
    reference: tuple[Answer, ...]
    dtype: str = field(default="float32")

    def pair(self, letters: str) -> tuple[Server, Server]:
        producer, consumer = (self.servers[letter].wait() for letter in letters)
        return producer, consumer


def ranks(model: str) -> Fleet:
    return Fleet(model, model, {"A": ALONE, "B": ALONE, "C": TWO_RANKS}, ("AB", "AC", "CA"))


def stages(model: str) -> Fleet:
    engines = {"A": ALONE, "B": ALONE, "C": TWO_RANKS, "E": TWO_STAGES}
    return Fleet(model, model, engines, ("AB", "AC", "CA", "EA", "AE", "EC", "CE"))


def lopsided(model: str, cut: tuple[int, int]) -> Fleet:
    """A stage that lacks a kind of layer; vLLM wants attention in every stage. One request at a time: vLLM without a
    connector answers batches of requests wrongly where one stage has Mamba layers and the other has none."""
    engines = {"A": ALONE, "C": TWO_RANKS, "F": {"pp": 2, "stages": cut}}
    return Fleet(f"{model}-lopsided", model, engines, ("FA", "AF", "FC"), FEW, 1)


def blocks(model: str) -> Fleet:
    return Fleet(f"{model}-blocks", model, {"A": ALONE, "G": {"block": 64}}, ("AG", "GA"))


def staging(model: str) -> Fleet:
    """Every strategy that goes by staging forced, through less of it than a prompt takes."""
    packed, staged = ({"settings": {"strategies": [way], "staging_bytes": 1 << 18}} for way in ("packed", "staged"))
    return Fleet(f"{model}-staging", model, {"A": packed, "C": {**TWO_RANKS, **packed}, "S": staged}, ("AC", "CA", "CS"), FEW)


FLEETS = {
    it.name: it
    for it in (
        stages("llama"),
        ranks("mqa"),
        stages("gemma3"),
        stages("nemotron-h"),
        ranks("granite-h-1g"),
        ranks("granite-h-2g"),
        lopsided("gemma3", (2, 4)),
        lopsided("nemotron-h", (5, 1)),
        blocks("llama"),
        blocks("gemma3"),
        staging("nemotron-h"),
    )
}


class Harbour:
    """One fleet at a time: asking for another ends the one before."""

    def __init__(self, connector: Connector, zygote: Zygote, cache: Path) -> None:
        self._connector, self._zygote, self._cache = connector, zygote, cache
        self._stack = ExitStack()
        self._out: Running | None = None

    def fleet(self, name: str) -> Running:
        if self._out is None or self._out.fleet.name != name:
            self.close()
            self._out = self._stack.enter_context(running(FLEETS[name], self._connector, self._zygote, self._cache))
        return self._out

    def close(self) -> None:
        self._out = None
        self._stack.close()


def engine_of(made: Checkpoint, connector: Connector, settings: Mapping[str, Any] | None = None, **changes: Any) -> Engine:
    ours = (
        replace(connector, settings={**connector.settings, **settings}) if settings and connector.name == "ours" else connector
    )
    return Engine(made, ours, **changes)


@contextmanager
def running(fleet: Fleet, connector: Connector, zygote: Zygote, cache: Path) -> Iterator[Running]:
    """An engine that did not come up is missed only by the pairs that need it."""
    made = checkpoint(fleet.model, cache)
    prompts = tuple(prompt(n) for n in fleet.lengths)
    engines = {letter: engine_of(made, connector, **changes) for letter, changes in fleet.engines.items()}
    with servers(zygote, {**engines, "plain": Engine(made)}, or_refused=True) as up:
        plain = up.pop("plain")
        reference = tuple(ask_all(plain.wait(), prompts))
        plain.stop()
        yield Running(fleet, connector, up, prompts, reference, made.architecture.dtype)
