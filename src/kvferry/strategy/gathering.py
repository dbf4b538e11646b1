"""The producer's part of `packed`: what consumers ask for is gathered into slots, in the order in which it was asked.

    asked ──> queued ──> gathering ──> ready ──> free
                 │           └───────────┴──> free, when its time is up
                 └──> refused ──> free

A slot's word is set when its gather is seen to be complete, and wiped before anything else is written there. Nobody waits for
a consumer: what it does not fetch is taken from it when its time is up, and it finds that out by the word, which it reads
again after the bytes.

Everything here happens on the thread that takes in notifications, in the connector the ferry's, never the engine's. On a GPU
the copies run on the mover's stream, beside whatever the engine has launched; on host memory that thread copies itself.

What is asked for by a plan that was refused is refused where the consumer looks. A slot is taken for it, and its word is
negative. It says which ticket it is about, and why (`refusal`). Consumers of earlier releases find their ticket nowhere, as
before.

Consumers introduce a plan by which they will ask, then ask by its digest: block by block, never by address. Whatever they say
is checked: regions lie in registered storages, runs in regions, blocks in groups.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import inf, prod
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvferry.bounds import holder
from kvferry.errors import KVFerryError, TransportError
from kvferry.manifest.codec import MAX_ENCODED, decode
from kvferry.manifest.schema import Index
from kvferry.plan import Plan, Tiles
from kvferry.plan.detour import MAX_PARTS
from kvferry.strategy.mapped import Token
from kvferry.strategy.movers import Mover, Over, Ticket
from kvferry.strategy.moves import Moves
from kvferry.strategy.staging import SECRET, Boards, Offer, Secret, Slots, Staging
from kvferry.strided import Ints, size
from kvferry.transport.contract import Storage

logger = logging.getLogger("kvferry.strategy")

MARK: Final = b"kvferry packed 1\n"
"""How messages of this strategy begin, so that other notifications are told from them."""
SLOT_S: Final = 10.0
"""How long a consumer may leave a slot, or its turn for one, unused."""
_REFUSED_S: Final = 1.0
"""How long a slot says that something is refused: a consumer that has not looked asks again, and one of an earlier release does
not look."""
MAX_RUNS: Final = 1 << 22
"""Runs of a plan's tiles, and so of the lines of its table: one for each run, and for every so many bytes of it (_CUT)."""
MAX_PLANS: Final = 256
MAX_HELD: Final = 1 << 22
"""Lines of all plans' tables together: what was asked by least lately is forgotten."""
_CUT: Final = 4096
"""Runs are cut into lines of a table at this many bytes or more."""
MAX_QUEUED: Final = 4096
MOST: Final = (1 << 63) - 1
AGAIN: Final = 1 << 60
"""What a ticket grows by each time that it is asked for again: whatever was gathered under it before, no word is set twice, so
that who finds the same one after its bytes as before has what it asked for."""
_AT_A_TIME_S: Final = 0.002
"""How long copies are begun before others who are read from this end get their turn."""
AWAKE_S: Final = 0.02
"""How long somebody is expected to ask again, who has just been served: for the next of several pieces, or of several prompts.
In engines on an H200 the first ask after a quiet while took 1.7 ms to be heard, where a piece's copies take 0.2 ms."""


class Why(Enum):
    """Why a producer does not gather; what precisely is wrong stands in its log."""

    FORM = 1
    PLAN = 2
    COPIES = 3


_WORDS: Final = {
    Why.FORM: "its release does not accept the plan by which it is asked",
    Why.PLAN: "the plan leads beyond the memory that it gathers from, or beyond a slot",
    Why.COPIES: "it cannot make the plan's copies ready",
}


def refusal(why: Why, ticket: int) -> int:
    """The word of a slot that stands for a refusal; no ticket is negative."""
    return -(why.value * AGAIN + ticket % AGAIN)


def refused(words: npt.NDArray[np.int64], ticket: int) -> str:
    """Why what was asked for is refused, by the words of a board; empty if they say nothing of it."""
    said = -words[words < 0]
    found = said[said % AGAIN == ticket % AGAIN].tolist()
    known = {why.value: text for why, text in _WORDS.items()}
    return known.get(found[0] // AGAIN, "its reason is none that this release knows") if found else ""


Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Number = Annotated[int, Meta(ge=1, le=MOST)]
Numbers = Annotated[bytes, Meta(max_length=1 << 26)]
Shares = Annotated[tuple[tuple[Index, Index, Numbers, Numbers], ...], Meta(max_length=MAX_PARTS)]


class Introduction(Struct, frozen=True, array_like=True, tag="plan"):
    """A plan from this end's caches into one slot."""

    secret: Secret
    plan: Annotated[bytes, Meta(max_length=MAX_ENCODED)]


class Ask(Struct, frozen=True, array_like=True, tag="ask"):
    """Gather these tiles of an introduced plan into a slot, and set its word to the ticket: for each part its number, the
    first block in the slot, and blocks and tiles here as 32-bit numbers; no tiles: the first of each block."""

    secret: Secret
    plan: Digest
    ticket: Number
    shares: Shares


class Asks(Struct, frozen=True, array_like=True, tag="asks"):
    """Several asks by one plan: for each its ticket, and its shares."""

    secret: Secret
    plan: Digest
    pieces: Annotated[tuple[tuple[Number, Shares], ...], Meta(max_length=MAX_QUEUED)]


class Free(Struct, frozen=True, array_like=True, tag="free"):
    """Nothing more is read of what these tickets stand for."""

    secret: Secret
    tickets: Annotated[tuple[Number, ...], Meta(max_length=MAX_QUEUED)]


Message = Introduction | Ask | Asks | Free
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    return MARK + msgspec.msgpack.encode(message)


def digest_of(plan: bytes) -> bytes:
    return hashlib.sha256(plan).digest()[:16]


@dataclass(frozen=True, eq=False)
class _Known:
    """A plan that was introduced, checked and prepared; for each part the blocks and tiles that there are, and room."""

    moves: Moves
    held: Any
    blocks: tuple[int, ...]
    tiles: tuple[int, ...]
    rooms: tuple[int, ...]


class _RefusedError(TransportError):
    """Something that is not gathered, and what the consumer is told of that."""

    def __init__(self, why: Why, error: Exception) -> None:
        super().__init__(str(error))
        self.why = why


@contextmanager
def _refusing(why: Why) -> Iterator[None]:
    try:
        yield
    except (KVFerryError, OverflowError, RecursionError) as error:
        raise _RefusedError(why, error) from error


@dataclass(eq=False)
class _Order:
    """`until` is when its time is up; `copies` are under way in `slot`, or complete if `ready`. `why`: it is refused."""

    ask: Ask
    until: float
    slot: int = -1
    size: int = 0
    copies: Ticket | None = None
    ready: bool = False
    why: Why | None = None


class Gathering:
    """`storages` are those that may be gathered from: whoever registers more adds to them. Without a ring to send from there is
    no offer to be made, and nobody is heard. `tokens` open the ring and the board, where they can be mapped."""

    def __init__(
        self,
        staging: Staging,
        boards: Boards,
        mover: Mover,
        storages: Sequence[Storage],
        slot_s: float = SLOT_S,
        clock: Callable[[], float] = time.monotonic,
        tokens: tuple[Token, ...] = (),
    ) -> None:
        self._staging, self._words, self._mover, self._storages = staging, boards.words, mover, storages
        self._slot_s, self._clock = slot_s, clock
        ring = staging.sending
        board, secret = boards.storage.address, secrets.token_bytes(SECRET)
        slots = staging.sizes.sending
        self.offers = slots > 0
        self.offer = Offer(ring.address, ring.memory, ring.device, staging.slot, slots, board, secret, tokens)
        self._slots = Slots(slots)
        self._plans: OrderedDict[bytes, _Known] = OrderedDict()
        self._refused: OrderedDict[bytes, Why] = OrderedDict()
        self._queue: deque[_Order] = deque()
        self._orders: dict[int, _Order] = {}
        self._leaving: list[_Order] = []
        self._served_at = -inf
        self.gathered = 0
        self.refused = 0

    @property
    def free(self) -> int:
        return self._slots.free

    @property
    def _lines(self) -> int:
        """Of the tables of all plans that are known."""
        return sum(len(known.moves.pieces) for known in self._plans.values())

    @property
    def busy(self) -> bool:
        """Whether somebody waits for what happens here, or was served so lately that they may ask again at once."""
        return bool(self._orders or self._leaving) or self._clock() - self._served_at < AWAKE_S

    def hear(self, data: bytes) -> None:
        """Take in a consumer's message; one that is not right is said to the log alone."""
        try:
            self._hear(data)
        except (KVFerryError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            self.refused += 1
            level = logging.WARNING if self.refused & (self.refused - 1) == 0 else logging.DEBUG
            logger.log(level, "%d. message of a consumer that cannot be served: %s", self.refused, error)

    def _hear(self, data: bytes) -> None:
        if not self.offers:
            raise TransportError("nothing is gathered here: this end only reads, and has no ring to send from")
        message = _MESSAGES.decode(data[len(MARK) :])
        if not hmac.compare_digest(message.secret, self.offer.secret):
            raise TransportError("it does not know this end's secret: it is of another start, or nobody's")
        if isinstance(message, Introduction):
            try:
                self._introduce(message.plan)
            except _RefusedError as error:
                self._refused[digest_of(message.plan)] = error.why
                while len(self._refused) > MAX_PLANS:
                    self._refused.popitem(last=False)
                raise
        elif isinstance(message, Free):
            for ticket in message.tickets:
                order = self._orders.pop(ticket % AGAIN, None)
                if order is not None:
                    self._served_at = self._clock() if order.ready else self._served_at
                    self._end(order)
        elif isinstance(message, Ask):
            self._queue_up(message)
        else:
            for ticket, shares in message.pieces:
                self._queue_up(Ask(message.secret, message.plan, ticket, shares))

    def _queue_up(self, ask: Ask) -> None:
        """What is asked for again keeps its place, or what was gathered for it; whoever asks for what waits is alive."""
        before = self._orders.get(ask.ticket % AGAIN)
        if before is not None:
            if not before.ready:
                before.until = self._clock() + self._slot_s
            if ask.ticket > before.ask.ticket:
                before.ask = msgspec.structs.replace(before.ask, ticket=ask.ticket)
                self._set_word(before)
            return
        if len(self._orders) >= MAX_QUEUED:
            raise TransportError(f"{MAX_QUEUED:,} gathers are waiting already")
        order = self._orders[ask.ticket % AGAIN] = _Order(ask, self._clock() + self._slot_s)
        self._queue.append(order)

    def _introduce(self, data: bytes) -> None:
        digest = digest_of(data)
        if digest in self._plans:
            self._plans.move_to_end(digest)
            return
        with _refusing(Why.FORM):
            plan = decode(data, Plan)
        with _refusing(Why.PLAN):
            _checked(plan, self._storages, self._mover.memory, self._staging.slot)
        with _refusing(Why.COPIES):
            moves = Moves(plan, 0, lambda index: plan.sources[0].regions[index].address, lambda _: self.offer.ring)
            held = self._mover.prepare(moves)
        there = {group.id: group.blocks for group in plan.sources[0].groups}
        known = _Known(
            moves,
            held,
            tuple(there[edge.src_group] for edge in plan.edges),
            tuple(min(size(plan.lanes[run.src_lane].digits) for run in edge.grains[0].runs) for edge in plan.edges),
            tuple(plan.consumer.group(edge.dst_group).blocks for edge in plan.edges),
        )
        self._refused.pop(digest, None)
        self._plans[digest] = known
        while len(self._plans) > 1 and (len(self._plans) > MAX_PLANS or self._lines > MAX_HELD):
            self._plans.popitem(last=False)

    def step(self) -> None:
        """Say what is complete, take back what nobody fetched, and begin what there is a slot for."""
        if not self._orders and not self._leaving:
            return
        now = self._clock()
        for order in self._leaving:
            self._see(order)
        self._leaving = [order for order in self._leaving if not self._gave_back(order)]
        for ticket, order in tuple(self._orders.items()):
            self._see(order)
            if order.until <= now:
                logger.info("a gather was asked for and not fetched within %g s; its slot is free again", self._slot_s)
                del self._orders[ticket]
                self._end(order)
        while self._queue and self._slots.free:
            self._begin(self._queue.popleft())
            if self._clock() - now > _AT_A_TIME_S:
                return

    def _begin(self, order: _Order) -> None:
        ticket = order.ask.ticket % AGAIN
        if self._orders.get(ticket) is not order:
            return
        known, why = self._plans.get(order.ask.plan), self._refused.get(order.ask.plan)
        if known is None and why is None:
            del self._orders[ticket]
            return
        slot = self._slots.take()
        if slot is None:
            self._queue.appendleft(order)
            return
        order.slot = slot
        if known is None or why is not None:
            self._refuse(order, why or Why.FORM)
            return
        self._plans.move_to_end(order.ask.plan)
        try:
            tiles = _tiles(order.ask, known)
            wanted, _ = known.moves.size(tiles)
            if wanted > self._staging.slot:
                raise TransportError(f"{wanted:,} bytes at once do not fit a slot of {self._staging.slot:,}")
            bound = known.moves.bind(tiles, dst_shift=slot * self._staging.slot)
            order.copies, order.size = self._mover.start(known.held, bound), bound.bytes
        except Exception as error:
            # Copies are made in their order: whatever was begun of this one is over before the slot's next begins.
            del self._orders[ticket]
            order.slot = -1
            self._slots.give(slot)
            expected = isinstance(error, TransportError)
            logger.warning("what a consumer asks for cannot be gathered: %s", error, exc_info=None if expected else error)
            return
        self._see(order)

    def _refuse(self, order: _Order, why: Why) -> None:
        """Say so in the slot's word, until the consumer has seen it or its time is up."""
        order.why, order.copies, order.ready = why, Over(0), True
        order.until = self._clock() + min(self._slot_s, _REFUSED_S)
        self._set_word(order)

    def _see(self, order: _Order) -> None:
        if order.ready or order.copies is None or not order.copies.done:
            return
        order.ready, order.until = True, self._clock() + self._slot_s
        if order.copies.moved != order.size:
            logger.error("%d bytes of %d were gathered; report this", order.copies.moved, order.size)
        elif self._orders.get(order.ask.ticket % AGAIN) is order:
            self.gathered += order.size
            self._served_at = self._clock()
            self._set_word(order)

    def _set_word(self, order: _Order) -> None:
        """Of copies that are complete and all there, or of a refusal."""
        if order.why is not None:
            self._words[order.slot] = refusal(order.why, order.ask.ticket)
        elif order.ready and order.copies is not None and order.copies.moved == order.size:
            self._words[order.slot] = order.ask.ticket

    def _end(self, order: _Order) -> None:
        if order.slot >= 0 and not self._gave_back(order):
            self._leaving.append(order)

    def _gave_back(self, order: _Order) -> bool:
        """Whether its slot is free again: not before nothing can be written there any more, and the word is wiped."""
        if order.copies is None or not order.copies.done:
            return False
        self._words[order.slot] = 0
        self._slots.give(order.slot)
        return True


def _tiles(ask: Ask, known: _Known) -> dict[tuple[int, int], Tiles]:
    out: dict[tuple[int, int], Tiles] = {}
    for part, first, blocks, tiles in ask.shares:
        if part >= len(known.blocks) or (part, 0) in out:
            raise TransportError(f"part {part} of {len(known.blocks)}, or the same twice")
        block = _numbers(blocks)
        tile = _numbers(tiles) if tiles else np.zeros_like(block)
        if len(tile) != len(block) or not len(block):
            raise TransportError(f"{len(block)} blocks and {len(tile)} tiles")
        lowest = min(block.min(), tile.min())
        inside = lowest >= 0 and block.max() < known.blocks[part] and tile.max() < known.tiles[part]
        if not inside or first + len(block) > known.rooms[part]:
            raise TransportError(f"blocks or tiles of part {part} that are not there, or more than a slot holds")
        here = np.arange(first, first + len(block), dtype=np.int64)
        out[part, 0] = Tiles(block, tile, here, np.zeros_like(here))
    return out


def _numbers(data: bytes) -> Ints:
    if len(data) % 4:
        raise TransportError(f"{len(data)} bytes are no list of 32-bit numbers")
    return np.frombuffer(data, np.int32).astype(np.int64)


def _checked(plan: Plan, storages: Sequence[Storage], memory: str, slot: int) -> None:
    """Raises TransportError for a plan that could lead anywhere but from registered memory into one slot; what its runs reach
    inside their regions is looked at where they become tables."""
    if len(plan.sources) != 1 or len(plan.consumer.regions) != 1 or plan.fills or not plan.edges:
        raise TransportError("a plan leads from one rank into one slot")
    source, staging = plan.sources[0], plan.consumer
    if staging.regions[0].length > slot:
        raise TransportError(f"{staging.regions[0].length:,} bytes do not fit a slot of {slot:,}")
    for region in source.regions:
        if holder(storages, region) is None or region.memory != memory:
            raise TransportError(f"region {region.name} lies in no memory that is gathered from here")
    groups = {group.id for group in source.groups}, {group.id for group in staging.groups}
    if (len(groups[0]), len(groups[1])) != (len(source.groups), len(staging.groups)):
        raise TransportError("a group that is there twice")
    total = 0
    for edge in plan.edges:
        if edge.source or edge.src_group not in groups[0] or edge.dst_group not in groups[1] or len(edge.grains) != 1:
            raise TransportError("an edge between groups that are not there")
        if not edge.grains[0].runs:
            raise TransportError("an edge without runs")
        taken = 0
        for run in edge.grains[0].runs:
            lanes = max(run.src_lane, run.dst_lane) < len(plan.lanes)
            if not lanes or run.src_region >= len(source.regions) or run.dst_region:
                raise TransportError("a run in lanes or regions that are not there")
            runs = prod(count for count, _, _ in run.repeats)
            taken += runs * run.length
            total += runs * (1 + run.length // _CUT)
            if total > MAX_RUNS:
                raise TransportError(f"more than {MAX_RUNS:,} runs, each counted for every {_CUT:,} bytes")
            if taken > slot:
                raise TransportError(f"a tile of more than the {slot:,} bytes of a slot")
