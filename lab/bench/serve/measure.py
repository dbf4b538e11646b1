"""One start of one arm, from its first request to its last row.

A prompt that is handed over several times is prefilled once, and D forgets it in between; P may remember it, since only D is
timed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Final

import numpy as np

from lab.bench.serve import client, stats
from lab.bench.serve.asking import Asking, Side
from lab.bench.serve.client import Prompt, Streamed, UnansweredError, body
from lab.bench.serve.result import Row, Run, Settings
from lab.bench.serve.scatter import FEW, SCATTERED, Scatter, scattered
from lab.bench.serve.trace import IDLE, LOADS, PREFILLS, Span, traced
from lab.fleet.metrics import Counters, counters

CONSECUTIVE: Final = "consecutive"
SHUFFLED: Final = "scattered"

FIRST: Final = "first"
ALONE: Final = "alone"
BUSY: Final = "busy"
AT_ONCE: Final = "at-once"
DECODE: Final = "decode"
PREFILL: Final = "prefill"
RATE: Final = "rate"
ANSWERS: Final = "answers"
ROWS: Final = (FIRST, CONSECUTIVE, SHUFFLED, BUSY, AT_ONCE, PREFILL, RATE, ANSWERS)
"""What is measured; `decode` comes with `at-once`. `busy` is `alone` to a D that decodes for others meanwhile."""
IN_TURNS: Final = "in-turns"
"""In place of the second and third, where they are to be compared with each other: both orders of blocks by turns."""

IN_ENGINE: Final = "in the engine"
"""First tokens as D's engine saw them, without what API servers take."""

SETTLE_S: Final = 0.3
COUNTED_S: Final = 8.0
ANSWERED: Final = 4
ENDED_BESIDE: Final = "a request beside the loads ended before they did: make --repeats or --at-once smaller"
FRESH: Final = 3
"""Hand-overs of a length on consecutive blocks: a pool has only so many that were never used."""

Told = Callable[[str], None]


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
        self._asking = Asking(settings, vocabulary, sides)
        self._rows = rows
        self._told, self._save = told, save

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
            await self._phase("wake", self._asking.wake())
        if CONSECUTIVE in self._rows:
            await self._phase(CONSECUTIVE, self._lengths(CONSECUTIVE))
        if IN_TURNS in self._rows:
            await self._phase(IN_TURNS, self._in_both_orders())
        if set(self._rows) - {FIRST, CONSECUTIVE, IN_TURNS}:
            await self._phase("scatter", self._scatter())
        if SHUFFLED in self._rows:
            await self._phase(SHUFFLED, self._lengths(SHUFFLED))
        if BUSY in self._rows:
            await self._phase(BUSY, self._busy())
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
            found = await self._hand(row, self._asking.prompt(FIRST, tokens), 0)
            row.samples["ttft"] = [_ms(found.first)]

    async def _lengths(self, order: str) -> None:
        for tokens in self.settings.lengths:
            async with self._row(ALONE, order, tokens) as row:
                await self._repeat(row, self.settings.repeats if order == SHUFFLED else min(self.settings.repeats, FRESH))

    async def _busy(self) -> None:
        asking = self._asking
        for tokens in self.settings.lengths:
            async with self._row(BUSY, SHUFFLED, tokens) as row, asking.beside(f"{BUSY}-{tokens}") as beside:
                await asyncio.sleep(SETTLE_S)
                await asking.forget()
                last = await self._repeat(row, self.settings.repeats)
                if any(it.marks[-1] < last for it in beside):
                    row.void = ENDED_BESIDE

    async def _repeat(self, row: Row, times: int) -> float:
        """One prompt, handed over so often; when D was asked for it for the last time."""
        prompt = self._asking.prompt(row.order, row.tokens)
        row.samples["ttft"] = []
        for turn in range(times):
            if turn:
                await self._asking.forget()
            found = await self._hand(row, prompt, turn)
            row.samples["ttft"].append(_ms(found.first))
        return found.sent

    async def _in_both_orders(self) -> None:
        """P computes every prompt anew: where it remembered one, its blocks would lie as they lay then."""
        asking = self._asking
        for tokens in self.settings.lengths:
            rows = {order: Row(ALONE, order, tokens, {"ttft": [], "on the wire": []}) for order in (CONSECUTIVE, SHUFFLED)}
            self.run.rows += rows.values()
            for turn in range(self.settings.repeats):
                for order, row in rows.items():
                    await asking.forget_all()
                    for number, side in enumerate(asking.sides):
                        await asking.lay(side, 1 + turn * 2 + number if order == SHUFFLED else None)
                    before = row.wire_s
                    async with self._counting(row):
                        found = await self._hand(row, asking.prompt(order, tokens), turn)
                    row.samples["ttft"].append(_ms(found.first))
                    row.samples["on the wire"].append(_ms(row.wire_s - before))

    async def _scatter(self) -> None:
        self._told(await self._asking.shuffle())

    async def _at_once(self) -> None:
        asking, settings = self._asking, self.settings
        tokens = settings.at_once_length
        await asking.refuse_too_many(settings.at_once, tokens)
        prompts = [asking.prompt(f"{AT_ONCE}-{i}", tokens) for i in range(settings.at_once)]
        decode = Row(DECODE, SHUFFLED, tokens, {"idle": [], "loaded": [], "idle seen": [], "loaded seen": [], "seconds": []})
        await self._warm(prompts)
        async with self._row(AT_ONCE, SHUFFLED, tokens) as row:
            row.samples |= {"ttft": [], "itl": []}
            for turn in range(settings.rounds):
                names = [asking.name(AT_ONCE, SHUFFLED, tokens, turn, i) for i in range(len(prompts))]
                row.requests += names
                began = perf_counter()
                wanted = await self._prefilled(names, prompts, settings.output)
                asking.spans.append(Span(PREFILLS, began, perf_counter()))
                async with asking.beside(turn) as beside:
                    await asyncio.sleep(SETTLE_S)
                    idle = perf_counter()
                    await asyncio.sleep(settings.idle_s / (1 + turn))
                    begun = perf_counter()
                    found = await client.stream_all(asking.consumer.address, wanted)
                    begin, end = min(it.sent for it in found), max(it.marks[0] for it in found)
                    asking.spans += [Span(IDLE, idle, begun), Span(LOADS, begin, end)]
                    row.samples["ttft"] += [_ms(it.first) for it in found]
                    row.samples["itl"] += [_ms(gap) for it in found for gap in stats.gaps(it.marks)]
                    decode.samples["seconds"].append(round(end - begin, 4))
                    for it in beside:
                        decode.samples["idle seen"] += [_ms(gap) for gap in stats.gaps(it.marks, idle, begun)]
                        decode.samples["loaded seen"] += [_ms(gap) for gap in stats.gaps(it.marks, begin, end)]
                    await asking.consumer.look()
                    decode.samples["idle"] += map(_ms, asking.consumer.steps_between(idle, begun, settings.beside))
                    decode.samples["loaded"] += map(_ms, asking.consumer.steps_between(begin, end, settings.beside))
                    if any(it.marks[-1] < end for it in beside):
                        decode.void = ENDED_BESIDE
        self.run.rows.append(decode)

    async def _warm(self, prompts: Sequence[Prompt]) -> None:
        """A batch of so many new requests takes D some 10 ms longer the first time, whatever its connector; one that has run
        for an hour has had it."""
        asking = self._asking
        wanted = await self._prefilled([asking.name("warm", i) for i in range(len(prompts))], prompts, self.settings.output)
        async with asking.beside("warm"):
            await client.stream_all(asking.consumer.address, wanted)

    async def _prefilled(self, names: Sequence[str], prompts: Sequence[Prompt], new: int) -> list[tuple[str, bytes]]:
        """What is asked of D, `new` tokens each, after P has prefilled all of them, none of which D knows."""
        params = await self._asking.prefill_all(list(zip(names, prompts, strict=True)))
        await self._asking.forget()
        return [
            (name, body(prompt, new, stream=True, params=given))
            for name, prompt, given in zip(names, prompts, params, strict=True)
        ]

    async def _answers(self) -> None:
        """Not streamed: a stream would bring the prompt back with the first token, and that is not what is timed elsewhere."""
        asking, settings = self._asking, self.settings
        prompts = [asking.prompt(f"{AT_ONCE}-{i}", settings.at_once_length) for i in range(min(ANSWERED, settings.at_once))]
        prompts += [asking.prompt(SHUFFLED, tokens) for tokens in settings.lengths]
        await asking.forget_all()
        for prompt in prompts:
            name = asking.name(ANSWERS, SHUFFLED, prompt.tokens, 0, prompt.key)
            params = await asking.prefill_one(name, prompt)
            self.run.answers[f"{prompt.tokens} {prompt.key}"] = await asking.answer(name, prompt, params)
        if asking.alone and settings.prefix_caching:
            await self._part(prompts)

    async def _part(self, prompts: Sequence[Prompt]) -> None:
        """Of tokens that fill whole blocks and one more, the prefix cache leaves that one to be computed."""
        asking = self._asking
        await asking.forget_all()
        for prompt in prompts:
            name = asking.name(ANSWERS, "parted", prompt.tokens, prompt.key)
            await client.ask(asking.consumer.address, f"{name}-all-but-one", body(prompt.all_but_one, 1))
            self.run.parted[f"{prompt.tokens} {prompt.key}"] = await asking.answer(name, prompt, None)

    async def _prefill(self) -> None:
        """P's prompt tokens a second: alone, while D reads from it, and while D computes the same without reading. The last
        tells what two engines that share a device take from each other anyway; so does P's speed beside a D that decodes for
        others, as one in a cluster does: what it computes of what it reads then joins steps that it takes anyway. D reads about
        as many tokens as P prefills meanwhile, in short prompts and in long ones, of which it computes little."""
        settings = self.settings
        for tokens in read_lengths(settings):
            many = -(-settings.prefills * settings.at_once_length // tokens)
            try:
                await self._asking.refuse_too_many(many, tokens)
            except UnansweredError as error:
                self.run.rows.append(Row(PREFILL, SHUFFLED, tokens, {}, void=str(error)))
            else:
                await self._prefill_beside(tokens, many)

    async def _prefill_beside(self, tokens: int, many: int) -> None:
        asking, settings = self._asking, self.settings
        read = [asking.prompt(f"{AT_ONCE}-{i}", tokens) for i in range(many)]
        prefilled = settings.prefills * settings.at_once_length
        async with self._row(PREFILL, SHUFFLED, tokens) as row:
            for turn in range(settings.rounds):
                alone = await self._prefills(f"alone-{tokens}-{turn}")
                _add(row, "alone", prefilled / alone)
                if asking.alone:
                    continue
                names, seconds, _ = await self._prefills_read(row, "read", read, turn, alone)
                _add(row, "read", prefilled / seconds)
                if settings.prefix_caching:
                    hits = [(f"{name}-hit", body(prompt, 1, stream=True)) for name, prompt in zip(names, read, strict=True)]
                    seconds, _ = await self._prefills_beside(f"hits-{tokens}-{turn}", hits, alone / many)
                    _add(row, "hits", prefilled / seconds)
                async with asking.beside(f"{PREFILL}-{tokens}-{turn}") as beside:
                    await asyncio.sleep(SETTLE_S)
                    alone = await self._prefills(f"decoding-{tokens}-{turn}")
                    _add(row, "decoding", prefilled / alone)
                    _, seconds, last = await self._prefills_read(row, "read-decoding", read, turn, alone)
                    _add(row, "read while decoding", prefilled / seconds)
                    if any(it.marks[-1] < last for it in beside):
                        row.void = ENDED_BESIDE

    async def _prefills_read(
        self, row: Row, tag: str, read: Sequence[Prompt], turn: int, alone: float
    ) -> tuple[list[str], float, float]:
        """What D was asked to read, the seconds that P's prefill took meanwhile, and when D was asked for the last time."""
        names = [self._asking.name(PREFILL, SHUFFLED, row.tokens, tag, turn, i) for i in range(len(read))]
        row.requests += names
        loads = await self._prefilled(names, read, 1)
        seconds, found = await self._prefills_beside(f"{tag}-{row.tokens}-{turn}", loads, alone / len(read))
        row.samples.setdefault(f"ttft, {tag}", []).extend(_ms(it.first) for it in found)
        return names, seconds, max(it.sent for it in found)

    async def _prefills(self, tag: str) -> float:
        """Seconds until P has answered as many new prompts as settings say, all sent at once."""
        asking, settings = self._asking, self.settings
        prompts = [asking.prompt(f"{PREFILL}-{tag}-{i}", settings.at_once_length) for i in range(settings.prefills)]
        wanted = [(f"{PREFILL}-{tag}-{i}", body(prompt, 1, stream=True)) for i, prompt in enumerate(prompts)]
        found = await client.stream_all(asking.producer.address, wanted)
        return max(it.marks[0] for it in found) - min(it.sent for it in found)

    async def _prefills_beside(
        self, tag: str, loads: Sequence[tuple[str, bytes]], every_s: float
    ) -> tuple[float, list[Streamed]]:
        async def one(place: int, name: str, content: bytes) -> Streamed:
            await asyncio.sleep(place * every_s)
            return await client.stream(self._asking.consumer.address, name, content)

        work = [asyncio.create_task(one(place, *load)) for place, load in enumerate(loads)]
        seconds = await self._prefills(tag)
        return seconds, list(await asyncio.gather(*work))

    async def _rate(self) -> None:
        """Arrivals at random, through both legs; P prefills the next while D loads the one before."""
        asking, settings = self._asking, self.settings
        if asking.alone:
            return
        tokens = settings.at_once_length
        chosen = np.random.default_rng(settings.seed)
        times = np.cumsum(chosen.exponential(1 / settings.rate, max(int(settings.rate * settings.rate_s), 1))).tolist()
        prompts = [asking.prompt(f"{RATE}-{i}", tokens) for i in range(len(times))]
        async with self._row(RATE, SHUFFLED, tokens) as row:
            names = [asking.name(RATE, SHUFFLED, tokens, 0, i) for i in range(len(times))]
            row.requests += names
            began = perf_counter()

            async def one(name: str, prompt: Prompt, at: float) -> tuple[float, Streamed]:
                await asyncio.sleep(began + at - perf_counter())
                arrived = perf_counter()
                params = await asking.prefill_one(name, prompt)
                content = body(prompt, settings.output, stream=True, params=params)
                return arrived, await client.stream(asking.consumer.address, name, content)

            found = await asyncio.gather(*(one(*it) for it in zip(names, prompts, times, strict=True)))
            row.samples["both legs"] = [_ms(it.marks[0] - arrived) for arrived, it in found]
            row.samples["ttft"] = [_ms(it.first) for _, it in found]
            row.samples["itl"] = [_ms(gap) for _, it in found for gap in stats.gaps(it.marks)]

    async def _judge(self) -> None:
        """How the blocks of every request lay, and whether each row counts."""
        for side in self._asking.sides:
            await self._asking.quiet(side)
        for row in self.run.rows:
            found = self._asking.scatter_of(row.requests, row.tokens)
            row.blocks, row.runs = sum(it.blocks for it in found.values()), sum(it.runs for it in found.values())
            if any(it.blocks >= FEW for it in found.values()):
                row.scatter = round(scattered(found), 3)
            here = self._asking.consumer.held
            first = [_ms(here[name].first_s) for name in row.requests if name in here]
            if first:
                row.samples[IN_ENGINE] = first
            row.void = row.void or self._void(row, found)
        loads = self.run.row((AT_ONCE, SHUFFLED, self.settings.at_once_length))
        for row in self.run.rows:
            if row.name == DECODE and loads is None:
                row.samples = {name: samples for name, samples in row.samples.items() if name.startswith("idle")}

    def _void(self, row: Row, found: Mapping[str, Scatter]) -> str:
        if row.name == DECODE or not row.requests:
            return ""
        tokens = row.tokens * len(row.requests)
        if self._asking.alone:
            if not row.cached and not self.settings.prefix_caching:
                return "without a prefix cache there is no floor"
            times, whole = _times_found(row, self._rows), max(self._asking.consumer.block_tokens)
            if row.cached >= (row.tokens - 2 * self.run.block) * times:
                return ""
            there = f"{row.cached} of {row.tokens * times} prompt tokens"
            return f"{there} were found in the prefix cache: choose lengths of whole blocks of {whole:,} tokens, and one more"
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

    async def _hand(self, row: Row, prompt: Prompt, turn: int) -> Streamed:
        name = self._asking.name(row.name, row.order, row.tokens, turn, prompt.key)
        row.requests.append(name)
        return await self._asking.hand(name, prompt)

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
        before, earlier = await asyncio.to_thread(counters, self._asking.consumer.server), len(row.requests)
        self._asking.spans, whole = [], Span(row.name, perf_counter(), float("inf"))
        try:
            yield
        except UnansweredError as error:
            row.void = str(error)
            raise
        finally:
            self._trace(row, self._asking.spans or [replace(whole, end=perf_counter())])
            if not row.void:
                await self._count(row, before, len(row.requests) - earlier)
            self._save()

    def _trace(self, row: Row, spans: Sequence[Span]) -> None:
        """The steps of the time in which the row was measured are its own; an engine that was killed has left its too. Of more
        steps than are kept nothing is said."""
        asking = self._asking
        for name, side in (("D", asking.consumer), *((("P", asking.producer),) if not asking.alone else ())):
            if side.trace is not None:
                lost, marks = side.trace.lost, side.trace.since()
                row.traces += traced(name, marks, spans) if side.trace.lost == lost else []

    async def _count(self, row: Row, before: Counters, requests: int) -> None:
        await self._asking.nudge(self._asking.consumer)
        wanted = row.tokens * requests - requests
        deadline = perf_counter() + COUNTED_S
        while True:
            found = await asyncio.to_thread(counters, self._asking.consumer.server) - before
            if self._asking.alone or found.from_peer >= wanted or perf_counter() > deadline:
                break
            await asyncio.sleep(0.05)
        row.from_peer += found.from_peer
        row.computed += found.computed
        row.cached += found.cached
        row.moved_bytes += found.bytes_moved or found.stock_bytes
        row.foretold_bytes += found.bytes_predicted
        row.pieces += found.runs_moved or found.stock_descriptors
        row.wire_s += found.wire_s


def _times_found(row: Row, rows: Sequence[str]) -> int:
    """How often an engine that is asked for everything finds a prompt of a row: every time but the first, and each is asked for
    twice; only the second time where it forgets in between."""
    return len(row.requests) if IN_TURNS in rows else 2 * len(row.requests) - 1


def read_lengths(settings: Settings) -> tuple[int, ...]:
    """Of the prompts that D reads while P prefills."""
    short, longest = settings.at_once_length, max(settings.lengths)
    return (short, longest) if longest > short else (short,)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _add(row: Row, name: str, value: float) -> None:
    row.samples.setdefault(name, []).append(round(value, 1))
