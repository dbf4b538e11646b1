"""One start of one arm, from its first request to its last row.

Every arm is asked the same: a prompt goes to P, and then to D with what P answered. In the arm without a connector both go to
D, which finds in its prefix cache what others hand over: the floor. A prompt that is handed over several times is
prefilled once, and D forgets it in between; P may remember it, since only D is timed.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np

from kvferry.bench.serve import client, stats
from kvferry.bench.serve.client import Prompt, Streamed, UnansweredError, body
from kvferry.bench.serve.result import Row, Run, Settings
from kvferry.bench.serve.scatter import FEW, SCATTERED, Scatter, scatter, scattered
from kvferry.bench.serve.trace import IDLE, LOADS, PREFILLS, Span, traced
from kvferry.fleet.blocks import Held, Pool, Window
from kvferry.fleet.legs import TO_PREFILL
from kvferry.fleet.metrics import Counters, counters
from kvferry.fleet.server import Server
from kvferry.fleet.steps import Steps

CONSECUTIVE: Final = "consecutive"
SHUFFLED: Final = "scattered"

FIRST: Final = "first"
ALONE: Final = "alone"
AT_ONCE: Final = "at-once"
DECODE: Final = "decode"
PREFILL: Final = "prefill"
RATE: Final = "rate"
ANSWERS: Final = "answers"
ROWS: Final = (FIRST, CONSECUTIVE, SHUFFLED, AT_ONCE, PREFILL, RATE, ANSWERS)
"""What is measured; `decode` comes with `at-once`."""
IN_TURNS: Final = "in-turns"
"""In place of the second and third, where they are to be compared with each other: both orders of blocks by turns."""

BESIDE_TOKENS: Final = 64
BESIDE_NEW: Final = 3000
SETTLE_S: Final = 0.3
QUIET_S: Final = 30.0
COUNTED_S: Final = 8.0
NUDGE_TOKENS: Final = 8
WAKING: Final = 8
"""Requests that wake API servers up, and how often so many are sent: none of four is left out by chance."""
READ_AT_MOST: Final = 16
ANSWERED: Final = 4
ANSWER_TOKENS: Final = 8
SHUFFLES: Final = 3
FRESH: Final = 3
"""Hand-overs of a length on consecutive blocks: a pool has only so many that were never used."""

_REQUEST: Final = re.compile(r"cmpl-(.+)-0-[0-9a-f]{8}$")

Told = Callable[[str], None]


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
        """Milliseconds of the steps that fall into that time, of those that ran at least so many requests."""
        return [_ms(gap) for gap in stats.gaps([at for at, size in self.steps if size >= least], begin, end)]


class Measuring:
    """`rows` are those wanted. `save` is called whenever there is something new to keep."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        vocabulary: int,
        sides: Mapping[str, Side],
        rows: Sequence[str],
        told: Told,
        save: Callable[[], None],
    ) -> None:
        self.run = run
        self.settings = settings
        self._vocabulary = vocabulary
        self._producer, self._consumer = sides["P"], sides["D"]
        self._alone = self._producer is self._consumer
        self._rows = rows
        self._told, self._save = told, save
        self._nudges = 0
        self._orders: dict[str, str] = {}
        self._spans: list[Span] = []

    async def all(self) -> None:
        """What was measured before something failed is judged too, where the engines still answer."""
        try:
            await self._in_turn()
        except UnansweredError:
            with suppress(UnansweredError, OSError):
                await self._judge()
            raise
        await self._phase("look", self._judge())

    async def _in_turn(self) -> None:
        if FIRST in self._rows:
            await self._phase(FIRST, self._first())
        if set(self._rows) - {FIRST}:
            await self._phase("wake", self._wake())
        if CONSECUTIVE in self._rows:
            await self._phase(CONSECUTIVE, self._lengths(CONSECUTIVE))
        if IN_TURNS in self._rows:
            await self._phase(IN_TURNS, self._in_both_orders())
        if set(self._rows) - {FIRST, CONSECUTIVE, IN_TURNS}:
            await self._phase("scatter", self._scatter())
        if SHUFFLED in self._rows:
            await self._phase(SHUFFLED, self._lengths(SHUFFLED))
        if AT_ONCE in self._rows:
            await self._phase(AT_ONCE, self._at_once())
        if ANSWERS in self._rows:
            await self._phase(ANSWERS, self._answers())
        if PREFILL in self._rows:
            await self._phase(PREFILL, self._prefill())
        if RATE in self._rows:
            await self._phase(RATE, self._rate())

    async def _phase(self, name: str, work: Awaitable[None]) -> None:
        self._told(name)
        began = perf_counter()
        try:
            await work
        finally:
            self.run.phases[name] = round(perf_counter() - began, 2)
            self._save()

    async def _first(self) -> None:
        tokens = self.settings.lengths[0]
        async with self._row(FIRST, CONSECUTIVE, tokens) as row:
            found = await self._hand(row, self._prompt(FIRST, tokens), 0)
            row.samples["ttft"] = [_ms(found.first)]

    async def _wake(self) -> None:
        """The first request of an API server takes it a tenth of a second more, and one that has run for an hour has had it.
        Blocks are in order after that, as they were."""
        for side in self._sides():
            for turn in range(WAKING):
                names = [f"wake-{turn}-{i}" for i in range(WAKING)]
                wanted = [(name, body(self._prompt(name, NUDGE_TOKENS), 2, stream=True)) for name in names]
                await client.stream_all(side.address, wanted)
            await self._lay(side, CONSECUTIVE, 0)

    async def _lengths(self, order: str) -> None:
        for tokens in self.settings.lengths:
            prompt = self._prompt(order, tokens)
            async with self._row(ALONE, order, tokens) as row:
                row.samples["ttft"] = []
                for turn in range(self.settings.repeats if order == SHUFFLED else min(self.settings.repeats, FRESH)):
                    if turn:
                        await self._forget()
                    found = await self._hand(row, prompt, turn)
                    row.samples["ttft"].append(_ms(found.first))

    async def _in_both_orders(self) -> None:
        """P computes every prompt anew: where it remembered one, its blocks would lie as they lay then."""
        for tokens in self.settings.lengths:
            rows = {order: Row(ALONE, order, tokens, {"ttft": [], "on the wire": []}) for order in (CONSECUTIVE, SHUFFLED)}
            self.run.rows += rows.values()
            for turn in range(self.settings.repeats):
                for order, row in rows.items():
                    await self._forget_all()
                    for number, side in enumerate(self._sides()):
                        await self._lay(side, order, 1 + turn * 2 + number)
                    before = row.wire_s
                    async with self._counting(row):
                        found = await self._hand(row, self._prompt(order, tokens), turn)
                    row.samples["ttft"].append(_ms(found.first))
                    row.samples["on the wire"].append(_ms(row.wire_s - before))

    async def _lay(self, side: Side, order: str, seed: int) -> None:
        """From now on, new requests get blocks in this order."""
        await self._quiet(side)
        if order == SHUFFLED:
            side.window.shuffle(seed)
        else:
            side.window.sort()
        await self._nudge(side)

    async def _scatter(self) -> None:
        """A prompt tells whether the blocks of new requests lie scattered now."""
        tokens = self.settings.lengths[0]
        for turn in range(SHUFFLES):
            for number, side in enumerate(self._sides()):
                await self._lay(side, SHUFFLED, 1 + turn * 2 + number)
            row = Row("probe", SHUFFLED, tokens, {})
            await self._hand(row, self._prompt(f"probe-{turn}", tokens), 0)
            for side in self._sides():
                await self._quiet(side)
            found = self._scatter_of(row)
            blocks = sum(it.blocks for it in found.values())
            if self._alone or blocks < FEW or scattered(found) >= SCATTERED:
                told = f"{sum(it.runs for it in found.values())} runs of {blocks} blocks"
                self._told(f"scattered: {told}" if blocks >= FEW else f"{told}: too few to tell whether they are scattered")
                return
        raise UnansweredError(
            f"after {SHUFFLES} shuffles of the free lists a prompt of {tokens} tokens has {scattered(found):.2f} × as many "
            f"runs as blocks; {SCATTERED} are needed: make the pool larger or the prompts longer"
        )

    async def _at_once(self) -> None:
        settings = self.settings
        tokens = settings.at_once_length
        prompts = [self._prompt(f"{AT_ONCE}-{i}", tokens) for i in range(settings.at_once)]
        decode = Row(DECODE, SHUFFLED, tokens, {"idle": [], "loaded": [], "idle seen": [], "loaded seen": [], "seconds": []})
        async with self._row(AT_ONCE, SHUFFLED, tokens) as row:
            row.samples |= {"ttft": [], "itl": []}
            for turn in range(settings.rounds):
                names = [self._name(AT_ONCE, SHUFFLED, tokens, turn, i) for i in range(len(prompts))]
                row.requests += names
                began = perf_counter()
                params = await self._prefill_all(list(zip(names, prompts, strict=True)))
                self._spans.append(Span(PREFILLS, began, perf_counter()))
                if turn:
                    await self._forget()
                wanted = [
                    (name, body(prompt, settings.output, stream=True, params=given))
                    for name, prompt, given in zip(names, prompts, params, strict=True)
                ]
                async with self._beside(turn) as beside:
                    await asyncio.sleep(SETTLE_S)
                    idle = perf_counter()
                    await asyncio.sleep(settings.idle_s / (1 + turn))
                    begun = perf_counter()
                    found = await client.stream_all(self._consumer.address, wanted)
                    begin, end = min(it.sent for it in found), max(it.marks[0] for it in found)
                    self._spans += [Span(IDLE, idle, begun), Span(LOADS, begin, end)]
                    row.samples["ttft"] += [_ms(it.first) for it in found]
                    row.samples["itl"] += [_ms(gap) for it in found for gap in stats.gaps(it.marks)]
                    decode.samples["seconds"].append(round(end - begin, 4))
                    for it in beside:
                        decode.samples["idle seen"] += [_ms(gap) for gap in stats.gaps(it.marks, idle, begun)]
                        decode.samples["loaded seen"] += [_ms(gap) for gap in stats.gaps(it.marks, begin, end)]
                    await self._consumer.look()
                    decode.samples["idle"] += self._consumer.steps_between(idle, begun, settings.beside)
                    decode.samples["loaded"] += self._consumer.steps_between(begin, end, settings.beside)
                    if any(it.marks[-1] < end for it in beside):
                        decode.void = "a request beside the loads ended before they did: allow it more tokens"
        self.run.rows.append(decode)

    async def _answers(self) -> None:
        """Not streamed: a stream would bring the prompt back with the first token, and that is not what is timed elsewhere."""
        settings = self.settings
        prompts = [self._prompt(f"{AT_ONCE}-{i}", settings.at_once_length) for i in range(min(ANSWERED, settings.at_once))]
        prompts += [self._prompt(SHUFFLED, tokens) for tokens in settings.lengths]
        await self._forget_all()
        for prompt in prompts:
            name = self._name(ANSWERS, SHUFFLED, prompt.tokens, 0, prompt.key)
            params = await self._prefill_one(name, prompt)
            self.run.answers[f"{prompt.tokens} {prompt.key}"] = await self._answer(name, prompt, params)
        if self._alone and settings.prefix_caching:
            await self._part(prompts)

    async def _part(self, prompts: Sequence[Prompt]) -> None:
        """Of tokens that fill whole blocks and one more, the prefix cache leaves that one to be computed."""
        await self._forget_all()
        for prompt in prompts:
            name = self._name(ANSWERS, "parted", prompt.tokens, prompt.key)
            await client.ask(self._consumer.address, f"{name}-all-but-one", body(prompt.all_but_one, 1))
            self.run.parted[f"{prompt.tokens} {prompt.key}"] = await self._answer(name, prompt, None)

    async def _answer(self, name: str, prompt: Prompt, params: Mapping[str, Any] | None) -> list[int]:
        content = body(prompt, ANSWER_TOKENS, params=params, more={"return_token_ids": True})
        answer = await client.ask(self._consumer.address, name, content)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    async def _prefill(self) -> None:
        """P's prompt tokens a second: alone, while D reads from it, and while D computes the same without reading. The last
        tells what two engines that share a device take from each other anyway."""
        settings = self.settings
        tokens, many = settings.at_once_length, min(settings.at_once, READ_AT_MOST)
        read = [self._prompt(f"{AT_ONCE}-{i}", tokens) for i in range(settings.at_once - many, settings.at_once)]
        async with self._row(PREFILL, SHUFFLED, tokens) as row:
            for turn in range(settings.rounds):
                alone = await self._prefills(f"alone-{turn}")
                _add(row, "alone", settings.prefills * tokens / alone)
                if self._alone:
                    continue
                names = [self._name(PREFILL, SHUFFLED, tokens, turn, i) for i in range(many)]
                row.requests += names
                params = await self._prefill_all(list(zip(names, read, strict=True)))
                await self._forget()
                loads = [
                    (name, body(prompt, 2, stream=True, params=given))
                    for name, prompt, given in zip(names, read, params, strict=True)
                ]
                seconds, found = await self._prefills_beside(f"read-{turn}", loads, alone / many)
                _add(row, "read", settings.prefills * tokens / seconds)
                row.samples.setdefault("ttft", []).extend(_ms(it.first) for it in found)
                if settings.prefix_caching:
                    hits = [(f"{name}-hit", body(prompt, 2, stream=True)) for name, prompt in zip(names, read, strict=True)]
                    seconds, _ = await self._prefills_beside(f"hits-{turn}", hits, alone / many)
                    _add(row, "hits", settings.prefills * tokens / seconds)

    async def _prefills(self, tag: str) -> float:
        """Seconds until P has answered as many new prompts as settings say, all sent at once."""
        prompts = [self._prompt(f"{PREFILL}-{tag}-{i}", self.settings.at_once_length) for i in range(self.settings.prefills)]
        wanted = [(f"{PREFILL}-{tag}-{i}", body(prompt, 1, stream=True)) for i, prompt in enumerate(prompts)]
        found = await client.stream_all(self._producer.address, wanted)
        return max(it.marks[0] for it in found) - min(it.sent for it in found)

    async def _prefills_beside(
        self, tag: str, loads: Sequence[tuple[str, bytes]], every_s: float
    ) -> tuple[float, list[Streamed]]:
        async def one(place: int, name: str, content: bytes) -> Streamed:
            await asyncio.sleep(place * every_s)
            return await client.stream(self._consumer.address, name, content)

        work = [asyncio.create_task(one(place, *load)) for place, load in enumerate(loads)]
        seconds = await self._prefills(tag)
        return seconds, list(await asyncio.gather(*work))

    async def _rate(self) -> None:
        """Arrivals at random, through both legs; P prefills the next while D loads the one before."""
        settings = self.settings
        if self._alone:
            return
        tokens = settings.at_once_length
        chosen = np.random.default_rng(settings.seed)
        times = np.cumsum(chosen.exponential(1 / settings.rate, max(int(settings.rate * settings.rate_s), 1))).tolist()
        prompts = [self._prompt(f"{RATE}-{i}", tokens) for i in range(len(times))]
        async with self._row(RATE, SHUFFLED, tokens) as row:
            names = [self._name(RATE, SHUFFLED, tokens, 0, i) for i in range(len(times))]
            row.requests += names
            began = perf_counter()

            async def one(name: str, prompt: Prompt, at: float) -> tuple[float, Streamed]:
                await asyncio.sleep(began + at - perf_counter())
                arrived = perf_counter()
                params = await self._prefill_one(name, prompt)
                content = body(prompt, settings.output, stream=True, params=params)
                return arrived, await client.stream(self._consumer.address, name, content)

            found = await asyncio.gather(*(one(*it) for it in zip(names, prompts, times, strict=True)))
            row.samples["both legs"] = [_ms(it.marks[0] - arrived) for arrived, it in found]
            row.samples["ttft"] = [_ms(it.first) for _, it in found]
            row.samples["itl"] = [_ms(gap) for _, it in found for gap in stats.gaps(it.marks)]

    async def _judge(self) -> None:
        """How the blocks of every request lay, and whether each row counts."""
        for side in self._sides():
            await self._quiet(side)
        for row in self.run.rows:
            found = self._scatter_of(row)
            row.blocks, row.runs = sum(it.blocks for it in found.values()), sum(it.runs for it in found.values())
            if any(it.blocks >= FEW for it in found.values()):
                row.scatter = round(scattered(found), 3)
            here = self._consumer.held
            first = [_ms(here[name].first_s) for name in row.requests if name in here]
            if first:
                row.samples["in the engine"] = first
            row.void = row.void or self._void(row, found)
        loads = self.run.row((AT_ONCE, SHUFFLED, self.settings.at_once_length))
        for row in self.run.rows:
            if row.name == DECODE and loads is None:
                row.samples = {name: samples for name, samples in row.samples.items() if name.startswith("idle")}

    def _void(self, row: Row, found: Mapping[str, Scatter]) -> str:
        if row.name == DECODE or not row.requests:
            return ""
        tokens = row.tokens * len(row.requests)
        if self._alone:
            if not self.settings.prefix_caching:
                return "without a prefix cache there is no floor"
            least = (row.tokens - 2 * self.run.block) * len(row.requests)
            return "" if row.cached >= least else f"{row.cached} of {tokens} prompt tokens were found in the prefix cache"
        if row.from_peer < tokens - len(row.requests):
            return f"{row.from_peer} of {tokens} prompt tokens came from P"
        if row.moved_bytes < row.foretold_bytes:
            return f"{row.moved_bytes} of {row.foretold_bytes} bytes that were foretold were moved"
        if len(found) < len(row.requests):
            return f"the blocks of {len(row.requests) - len(found)} requests are not known"
        telling = row.scatter >= 0
        if row.order == SHUFFLED and telling and row.scatter < SCATTERED:
            return f"a request's blocks form {row.scatter:.2f} × as many runs as there are blocks: not scattered"
        if row.order == CONSECUTIVE and telling and row.runs > row.blocks / 2:
            return f"{row.blocks} blocks form {row.runs} runs: not consecutive; make the pool larger"
        return ""

    def _scatter_of(self, row: Row) -> dict[str, Scatter]:
        there, here = self._producer.held, self._consumer.held
        return {
            name: scatter(there[name].tables, here[name].tables, row.tokens, self._consumer.block_tokens)
            for name in row.requests
            if name in there and name in here
        }

    def _sides(self) -> tuple[Side, ...]:
        return (self._producer,) if self._alone else (self._producer, self._consumer)

    def _prompt(self, key: str, tokens: int) -> Prompt:
        """The same in every arm and start; prompts of other keys share no prefix but by accident."""
        random = np.random.default_rng([self.settings.seed, zlib.crc32(f"{key} {tokens}".encode())])
        return Prompt(key, tokens, msgspec.json.encode(random.integers(4, self._vocabulary, tokens).tolist()))

    def _name(self, *parts: object) -> str:
        return "-".join(map(str, parts)).replace(" ", "-")

    async def _hand(self, row: Row, prompt: Prompt, turn: int) -> Streamed:
        name = self._name(row.name, row.order, row.tokens, turn, prompt.key)
        row.requests.append(name)
        began = perf_counter()
        params = await self._prefill_one(name, prompt)
        self._spans.append(Span(PREFILLS, began, perf_counter()))
        found = await client.stream(self._consumer.address, name, body(prompt, 2, stream=True, params=params))
        self._spans.append(Span(LOADS, found.sent, found.marks[0]))
        return found

    async def _prefill_one(self, name: str, prompt: Prompt) -> Mapping[str, Any] | None:
        given = None if self._alone else TO_PREFILL
        answer = await client.ask(self._producer.address, name, body(prompt, 1, params=given))
        params: Mapping[str, Any] | None = answer.get("kv_transfer_params")
        if given and not params:
            raise UnansweredError(f"{name}: P's answer brings no reference: {str(answer)[:300]}")
        return params if given else None

    async def _prefill_all(self, wanted: Sequence[tuple[str, Prompt]]) -> list[Mapping[str, Any] | None]:
        return list(await asyncio.gather(*(self._prefill_one(name, prompt) for name, prompt in wanted)))

    async def _forget(self) -> None:
        """D's prefix cache must not answer for P."""
        if not self._alone and self.settings.prefix_caching:
            self._consumer.window.forget()
            await self._nudge(self._consumer)

    async def _forget_all(self) -> None:
        """Every prompt is computed alone from now on, in batches of the same shape in every arm."""
        for side in self._sides() if self.settings.prefix_caching else ():
            side.window.forget()
            await self._nudge(side)

    async def _nudge(self, side: Side) -> None:
        """vLLM frees, counts and takes orders with a step, and without requests it takes none."""
        self._nudges += 1
        prompt = self._prompt(f"nudge-{self._nudges}", NUDGE_TOKENS)
        await client.ask(side.address, f"nudge-{self._nudges}", body(prompt, 2))

    async def _quiet(self, side: Side) -> None:
        """Waits until nothing is held, and takes down what was."""
        deadline = perf_counter() + QUIET_S
        while True:
            await self._nudge(side)
            pool = await side.look()
            if pool.free >= pool.blocks - 1:
                return
            if perf_counter() > deadline:
                raise UnansweredError(
                    f"{side.server.name} still holds {pool.blocks - 1 - pool.free} blocks after {QUIET_S:g} s"
                )

    @asynccontextmanager
    async def _beside(self, turn: int) -> AsyncIterator[list[Streamed]]:
        """Requests that decode on D meanwhile, given up at the end."""
        prompts = [self._prompt(f"beside-{turn}-{i}", BESIDE_TOKENS) for i in range(self.settings.beside)]
        connections = []
        try:
            for i, prompt in enumerate(prompts):
                connection = await client.connect(self._consumer.address, f"beside-{turn}-{i}")
                connections.append(connection)
                content = body(prompt, BESIDE_NEW, stream=True)
                connection.send(client.request(self._consumer.address, content, connection.name))
            await asyncio.wait([it.started for it in connections], timeout=client.ANSWER_SECONDS)
            yield [it.streamed for it in connections]
        finally:
            for connection in connections:
                connection.close()

    @asynccontextmanager
    async def _row(self, name: str, order: str, tokens: int) -> AsyncIterator[Row]:
        """Kept with what D counted meanwhile, even where it broke off."""
        row = Row(name, order, tokens, {})
        self.run.rows.append(row)
        async with self._counting(row):
            yield row

    @asynccontextmanager
    async def _counting(self, row: Row) -> AsyncIterator[None]:
        """What D counts meanwhile is the row's."""
        before, earlier = await asyncio.to_thread(counters, self._consumer.server), len(row.requests)
        self._spans, whole = [], Span(row.name, perf_counter(), float("inf"))
        try:
            yield
        except UnansweredError as error:
            row.void = str(error)
            raise
        finally:
            self._trace(row, self._spans or [replace(whole, end=perf_counter())])
            if not row.void:
                await self._count(row, before, len(row.requests) - earlier)
            self._save()

    def _trace(self, row: Row, spans: Sequence[Span]) -> None:
        """The steps of the time in which the row was measured are its own; an engine that was killed has left its too. Of more
        steps than are kept nothing is said."""
        for name, side in (("D", self._consumer), *((("P", self._producer),) if not self._alone else ())):
            if side.trace is not None:
                lost, marks = side.trace.lost, side.trace.since()
                row.traces += traced(name, marks, spans) if side.trace.lost == lost else []

    async def _count(self, row: Row, before: Counters, requests: int) -> None:
        await self._nudge(self._consumer)
        wanted = row.tokens * requests - requests
        deadline = perf_counter() + COUNTED_S
        while True:
            found = await asyncio.to_thread(counters, self._consumer.server) - before
            if self._alone or found.from_peer >= wanted or perf_counter() > deadline:
                break
            await asyncio.sleep(0.05)
        row.from_peer += found.from_peer
        row.computed += found.computed
        row.cached += found.cached
        row.moved_bytes += found.bytes_moved or found.stock_bytes
        row.foretold_bytes += found.bytes_predicted
        row.pieces += found.runs_moved or found.stock_descriptors
        row.wire_s += found.wire_s


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _add(row: Row, name: str, value: float) -> None:
    row.samples.setdefault(name, []).append(round(value, 1))
