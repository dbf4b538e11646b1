"""How the engines of one start are asked, the same in every arm.

A prompt goes to P, and then to D with what P answered. In the arm without a connector both go to D, which finds in its prefix
cache what others hand over: the floor. vLLM does nothing between requests, so what an engine is to do before the next one,
free, forget or lay its free list in another order, takes a small request more.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np

from lab.bench.serve import client, stats
from lab.bench.serve.client import Prompt, Streamed, UnansweredError, body
from lab.bench.serve.result import Settings
from lab.bench.serve.scatter import FEW, SCATTERED, Scatter, Tables, scatter, scattered
from lab.bench.serve.trace import LOADS, PREFILLS, Span
from lab.fleet.blocks import Held, Pool, Window
from lab.fleet.legs import TO_PREFILL
from lab.fleet.server import Server
from lab.fleet.steps import Steps

BESIDE_TOKENS: Final = 64
BESIDE_NEW: Final = 3000
QUIET_S: Final = 30.0
NUDGE_TOKENS: Final = 8
WAKING: Final = 8
"""Requests that wake API servers up, and how often so many are sent: none of four is left out by chance."""
ANSWER_TOKENS: Final = 8
SHUFFLES: Final = 3

_REQUEST: Final = re.compile(r"cmpl-(.+)-0-[0-9a-f]{8}$")


@dataclass
class Side:
    """A server, its block pool, and the blocks of requests that it has let go. `trace`: its steps, where they are recorded."""

    server: Server
    window: Window
    trace: Steps | None = None
    held: dict[str, Held] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    block_tokens: tuple[int, ...] = ()

    @property
    def address(self) -> client.Address:
        return self.server.host, self.server.port

    async def look(self) -> Pool:
        """Takes down what the engine has seen since."""
        pool = await asyncio.to_thread(self.window.look)
        self.block_tokens = pool.block_tokens
        self.steps += pool.steps
        for held in pool.held:
            named = _REQUEST.match(held.request)
            if named:
                self.held[named[1]] = held
        return pool

    def steps_between(self, begin: float, end: float, least: int) -> list[float]:
        """Seconds of the steps that fall into that time, of those that ran at least so many requests."""
        return list(stats.gaps([at for at, size in self.steps if size >= least], begin, end))


class Asking:
    """`spans`: when P prefilled and when D loaded what was handed over, until somebody empties it."""

    def __init__(self, settings: Settings, vocabulary: int, sides: Mapping[str, Side]) -> None:
        self.producer, self.consumer = sides["P"], sides["D"]
        self.alone = self.producer is self.consumer
        self.spans: list[Span] = []
        self._settings = settings
        self._vocabulary = vocabulary
        self._nudges = 0

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.producer,) if self.alone else (self.producer, self.consumer)

    def prompt(self, key: str, tokens: int) -> Prompt:
        """The same in every arm and start; prompts of other keys share no prefix but by accident."""
        random = np.random.default_rng([self._settings.seed, zlib.crc32(f"{key} {tokens}".encode())])
        return Prompt(key, tokens, msgspec.json.encode(random.integers(4, self._vocabulary, tokens).tolist()))

    def name(self, *parts: object) -> str:
        return "-".join(map(str, parts)).replace(" ", "-")

    async def hand(self, name: str, prompt: Prompt) -> Streamed:
        began = perf_counter()
        params = await self.prefill_one(name, prompt)
        self.spans.append(Span(PREFILLS, began, perf_counter()))
        found = await client.stream(self.consumer.address, name, body(prompt, 2, stream=True, params=params))
        self.spans.append(Span(LOADS, found.sent, found.marks[0]))
        return found

    async def prefill_one(self, name: str, prompt: Prompt) -> Mapping[str, Any] | None:
        given = None if self.alone else TO_PREFILL
        answer = await client.ask(self.producer.address, name, body(prompt, 1, params=given))
        params: Mapping[str, Any] | None = answer.get("kv_transfer_params")
        if given and not params:
            raise UnansweredError(f"{name}: P's answer brings no reference: {str(answer)[:300]}")
        return params if given else None

    async def prefill_all(self, wanted: Sequence[tuple[str, Prompt]]) -> list[Mapping[str, Any] | None]:
        return list(await asyncio.gather(*(self.prefill_one(name, prompt) for name, prompt in wanted)))

    async def answer(self, name: str, prompt: Prompt, params: Mapping[str, Any] | None) -> list[int]:
        content = body(prompt, ANSWER_TOKENS, params=params, more={"return_token_ids": True})
        answer = await client.ask(self.consumer.address, name, content)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    @asynccontextmanager
    async def beside(self, key: object) -> AsyncIterator[list[Streamed]]:
        """Requests that decode on D meanwhile, given up at the end."""
        prompts = [self.prompt(f"beside-{key}-{i}", BESIDE_TOKENS) for i in range(self._settings.beside)]
        connections = []
        try:
            for i, prompt in enumerate(prompts):
                connection = await client.connect(self.consumer.address, f"beside-{key}-{i}")
                connections.append(connection)
                content = body(prompt, BESIDE_NEW, stream=True)
                connection.send(client.request(self.consumer.address, content, connection.name))
            await asyncio.wait([it.started for it in connections], timeout=client.ANSWER_SECONDS)
            yield [it.streamed for it in connections]
        finally:
            for connection in connections:
                connection.close()

    async def wake(self) -> None:
        """An API server's first answer takes it longer, and one that has run for an hour has given it.
        Blocks are in order after that, as they were."""
        for side in self.sides:
            for turn in range(WAKING):
                names = [f"wake-{turn}-{i}" for i in range(WAKING)]
                wanted = [(name, body(self.prompt(name, NUDGE_TOKENS), 2, stream=True)) for name in names]
                await client.stream_all(side.address, wanted)
            await self.lay(side, None)

    async def forget(self) -> None:
        """D's prefix cache must not answer for P."""
        if not self.alone and self._settings.prefix_caching:
            self.consumer.window.forget()
            await self.nudge(self.consumer)

    async def forget_all(self) -> None:
        """Every prompt is computed alone from now on, in batches of the same shape in every arm."""
        for side in self.sides if self._settings.prefix_caching else ():
            side.window.forget()
            await self.nudge(side)

    async def nudge(self, side: Side) -> None:
        """vLLM frees, counts and takes orders with a step, and without requests it takes none."""
        self._nudges += 1
        prompt = self.prompt(f"nudge-{self._nudges}", NUDGE_TOKENS)
        await client.ask(side.address, f"nudge-{self._nudges}", body(prompt, 2))

    async def quiet(self, side: Side) -> None:
        """Waits until nothing is held, and takes down what was."""
        deadline = perf_counter() + QUIET_S
        while True:
            await self.nudge(side)
            pool = await side.look()
            if pool.free >= pool.blocks - 1:
                return
            if perf_counter() > deadline:
                raise UnansweredError(
                    f"{side.server.name} still holds {pool.blocks - 1 - pool.free} blocks after {QUIET_S:g} s"
                )

    async def lay(self, side: Side, seed: int | None) -> None:
        """From now on, new requests get blocks in order, or as this seed shuffles them."""
        await self.quiet(side)
        if seed is None:
            side.window.sort()
        else:
            side.window.shuffle(seed)
        await self.nudge(side)

    async def shuffle(self) -> str:
        """A prompt tells whether the blocks of new requests lie scattered now; how they lie is returned."""
        tokens = self._settings.lengths[0]
        for turn in range(SHUFFLES):
            for number, side in enumerate(self.sides):
                await self.lay(side, 1 + turn * 2 + number)
            name = f"probe-{turn}"
            await self._probe(name, tokens)
            found = self.scatter_of([name], tokens)
            blocks = sum(it.blocks for it in found.values())
            if self.alone or blocks < FEW or scattered(found) >= SCATTERED:
                told = f"{sum(it.runs for it in found.values())} runs of {blocks} blocks"
                return f"scattered: {told}" if blocks >= FEW else f"{told}: too few to tell whether they are scattered"
        raise UnansweredError(
            f"after {SHUFFLES} shuffles of the free lists a prompt of {tokens} tokens has {scattered(found):.2f} × as many "
            f"runs as blocks; {SCATTERED} are needed: make the pool larger or the prompts longer"
        )

    def scatter_of(self, names: Sequence[str], tokens: int) -> dict[str, Scatter]:
        there, here = self.producer.held, self.consumer.held
        return {
            name: scatter(there[name].tables, here[name].tables, tokens, self.consumer.block_tokens)
            for name in names
            if name in there and name in here
        }

    async def refuse_too_many(self, prompts: int, tokens: int) -> None:
        """P keeps what it has prefilled until D reads it: where not all of it fits, the rest would be waited for in vain. What
        windows and states keep is not foretold but seen of one prompt."""
        if self.alone or not too_many(pool := await self.producer.look(), prompts, tokens):
            return
        name = "probe-room"
        await self._probe(name, tokens)
        held = self.producer.held.get(name)
        told = too_many(pool, prompts, tokens, held.tables) if held is not None else ""
        if told:
            raise UnansweredError(f"{self.producer.server.name}: {told}")

    async def _probe(self, name: str, tokens: int) -> None:
        """Its blocks are known after that."""
        await self.hand(name, self.prompt(name, tokens))
        for side in self.sides:
            await self.quiet(side)


def too_many(pool: Pool, prompts: int, tokens: int, tables: Tables | None = None) -> str:
    """Why a pool that keeps so many prompts has no room for the last of them, if it has none. `tables`: the blocks that one
    kept; without them every group is taken to keep all its tokens. Windows and states do not; but vLLM admits nobody without
    room for all tokens in every group. Block 0 is no request's."""
    many = [-(-tokens // size) for size in pool.block_tokens]
    whole = kept = sum(many)
    if tables is not None:
        kept = len({block for table, most in zip(tables, many, strict=False) for block in table[:most]} - {0})
    need, there = (prompts - 1) * kept + max(kept, whole), pool.blocks - 1
    if need <= there:
        return ""
    return (
        f"{prompts} prompts of {tokens:,} tokens at once need {need:,} blocks, and there are {there:,}: "
        "make --kv-cache-bytes larger, or --at-once or --prefills smaller"
    )
