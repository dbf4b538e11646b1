"""A transport for scattered bytes: around one that pays for every descriptor, with staging at both ends.

To whoever reads it is a transport like any other, with the same promises. Each load goes the way that costs least by the
numbers of its path, out of those that were asked for: by descriptors (`direct`), gathered by the producer (`packed`), or
covered and extracted here (`staged`). What cannot go by staging goes by descriptors, and that is said once. A producer's ring
is mapped where it can be, though its caches may not: what it gathers is then copied out of it as it is.

A process has both parts, or the one that it has a ring for: others ask it to gather what it holds, and it lands what it reads.
One thread calls it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvferry.errors import DecodeError, TransportError
from kvferry.manifest.codec import encode
from kvferry.manifest.schema import Group, Region, StatePaged
from kvferry.plan import Edge, Grain, Lane, Plan, Run, Tiles
from kvferry.plan.detour import packed, staged
from kvferry.plan.schema import Side
from kvferry.strategy import cost
from kvferry.strategy.cost import Copying, Counter, Rates, Way, Wire
from kvferry.strategy.flights import Detoured, DetouredRead, SharedRead
from kvferry.strategy.gathering import MARK, SLOT_S, Gathering, digest_of
from kvferry.strategy.landing import TIMEOUT_S, Landing
from kvferry.strategy.mapped import Mapped, PeerGoneError, Token
from kvferry.strategy.movers import HostMover, Mover
from kvferry.strategy.moves import joined
from kvferry.strategy.probing import copying_of, probed
from kvferry.strategy.sources import Source
from kvferry.strategy.staging import Boards, Offer, Staging
from kvferry.strategy.ways import Connection, ScatteredPrepared
from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry, Transport
from kvferry.transport.metadata import encode_metadata, open_metadata

logger = logging.getLogger("kvferry.strategy")

_WORD: Final = 8
"""A plan that reads a single run of no more bytes than this reads words, which are to be read where they stand."""
_OFFERS: Final = msgspec.msgpack.Decoder(Offer)
_MOMENT_S: Final = 0.002
"""What loads that share a slot may take on the wire: the shortest waits for all of them."""
_PARTS: Final = 8
"""Tiles that are larger than this part of a slot are cut, so that little of a slot is left over."""


@dataclass(frozen=True)
class Settings:
    """`ways`: those that are allowed; one alone is forced. `rates` of every path, `copying` at this end: instead of what is
    measured. `maps`: whether others may map the ring here, and theirs are mapped."""

    ways: tuple[Way, ...] = ("packed", "staged", "direct")
    rates: Rates | None = None
    copying: Copying | None = None
    timeout_s: float = TIMEOUT_S
    slot_s: float = SLOT_S
    maps: bool = True


class Scattered:
    """`staging` and `mover` are of this end; they may be of another kind than the peers'."""

    def __init__(
        self,
        wire: Transport,
        staging: Staging,
        mover: Mover,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wire, self._settings, self._clock = wire, settings or Settings(), clock
        self._storages: list[Storage] = []
        maps = self._settings.maps
        boards = Boards(staging.sizes.sending, maps and staging.sizes.sending > 0)
        self._staging = staging
        host = mover if isinstance(mover, HostMover) and mover.memory == "dram" else HostMover()
        self._rings = Mapped([host] if host is mover else [host, mover], clock) if maps else None
        tokens = _tokens(self._rings, host, staging, boards)
        self.gathering = Gathering(staging, boards, mover, self._storages, self._settings.slot_s, clock, tokens)
        self.landing = Landing(wire, staging, boards, mover, self._settings.timeout_s, clock, self._rings)
        self._wire.register([staging.storage, boards.storage])
        self._copying = self._settings.copying or cost.HOST
        if self._settings.copying is None and self._settings.rates is None and self._settings.ways != ("direct",):
            self._copying = copying_of(mover, staging.landing if staging.sizes.landing else staging.sending)
        self._keep = boards
        self._offers: dict[str, Connection] = {}
        self._sources: dict[str, Source] = {}
        self._rates: dict[str, Rates] = {}
        self._reads: set[DetouredRead] = set()
        self._said: set[str] = set()
        self._mapped: set[str] = set()
        self._heard: list[tuple[str, bytes]] = []
        self._listened = 0
        self.carried: Tally[str] = Tally()
        self.closed = False

    @property
    def name(self) -> str:
        return self._wire.name

    @property
    def hurried(self) -> bool:
        """Whether somebody waits for what this end gathers, or for what it asked others to."""
        return self.gathering.busy or self.landing.busy

    def register(self, storages: Sequence[Storage]) -> None:
        self._wire.register(storages)
        self._storages += storages
        if self._rings is not None:
            self._rings.admit(storages)

    def metadata(self) -> bytes:
        """The transport's own, and the ring to send from, if there is one: an end without staging reads it all the same."""
        if not self.gathering.offers:
            return self._wire.metadata()
        own = open_metadata(self._wire.metadata())
        return encode_metadata(msgspec.structs.replace(own, more=msgspec.msgpack.encode(self.gathering.offer)))

    def connect(self, metadata: bytes) -> str:
        found = open_metadata(metadata)
        before = self._offers.get(found.name)
        if before is not None and before.digest != found.digest:
            raise TransportError(f"peer {found.name} is connected with other metadata; forget it, then connect again")
        try:
            offer = _OFFERS.decode(found.more) if found.more else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise TransportError(f"peer {found.name} does not say how it gathers ({error}); fetch its metadata again") from None
        name = self._wire.connect(metadata)
        if before is None:
            self._offers[name] = Connection(found.digest, offer)
        return name

    def prepare(self, plan: Plan, source: int, peer: str) -> Prepared:
        """Every way that is allowed and possible. Reads of words are the transport's own."""
        self._connected(peer)
        counter = Counter(plan, source)
        if (counter.tile_runs == 1 and counter.tile_bytes <= _WORD) or self._settings.ways == ("direct",):
            return self._wire.prepare(plan, source, peer)
        direct: Prepared | None = None
        reasons: list[str] = []
        try:
            direct = self._wire.prepare(plan, source, peer)
        except TransportError as error:
            reasons.append(str(error))
            if self._staging.sizes.landing:
                self._reach(plan, source, peer)
        detours: dict[Way, Detoured] = {}
        for way in self._settings.ways:
            if way not in ("packed", "staged"):
                continue
            try:
                detours[way] = self._packed(plan, source, peer) if way == "packed" else self._staged(plan, source, peer)
            except (TransportError, DecodeError) as error:
                self._say(f"what is read of peer {peer} cannot go {way} ({error})")
                reasons.append(f"nor can it go {way}: {error}")
        if detours and all(found.mapped is None for found in detours.values()):
            self.landing.peers.add(peer)
        if detours and "direct" not in self._settings.ways:
            direct = None
        if direct is None and not detours:
            raise TransportError(f"peer {peer}: {'; '.join(reasons)}")
        rates = self.rates(peer)
        rows = direct.rows if direct is not None else sum(len(found.moves.pieces) for found in detours.values())
        return ScatteredPrepared(peer, rows, direct, detours, counter, rates, self.landing, self._connected(peer))

    def _reach(self, plan: Plan, source: int, peer: str) -> None:
        """Raises TransportError where the transport does not reach all of the peer's memory: then there is no way at all.
        Else it is only that there are too many descriptors."""
        regions = plan.sources[source].regions
        kept = tuple(Run(i, 0, 0, i, 1, (), 0, 0) for i, region in enumerate(regions) if region.length)
        group = Group(0, StatePaged(), 1, hashed=False)
        landing = self._staging.landing
        here = Region("landing", landing.length, landing.address, landing.memory, landing.device)
        sides = [Side(plan.sources[source].identity, found, (group,)) for found in (regions, (here,))]
        edge = Edge(0, 0, 0, 0, (Grain(0, kept),))
        self._wire.prepare(Plan(sides[1], (sides[0],), (Lane(0, ()),), plan.needs, (edge,), ()), 0, peer)

    def _packed(self, plan: Plan, source: int, peer: str) -> Detoured:
        met = self._source(peer)
        room = self.landing.room(met)
        detour = packed(plan, source, room, room // _PARTS)
        encoded = encode(detour.there)
        mapped = self.landing.mapped(detour.here, met)
        moves, held = (mapped.moves, mapped.held) if mapped else self.landing.scattering(detour.here, self._storages)
        out = Detoured("packed", peer, detour, moves, held, None, met, encoded, digest_of(encoded), mapped)
        self.landing.introduce(out)
        return out

    def _staged(self, plan: Plan, source: int, peer: str) -> Detoured:
        wire = self.rates(peer).wire
        self.landing.require()
        landing, slot = self._staging.landing, self._staging.slot
        gap = int(min(slot // _PARTS, wire.descriptor_s / max(wire.byte_s, 1e-15)))
        detour = staged(plan, source, landing.length, slot // _PARTS, gap)
        region = detour.there.consumer.regions[0]
        here = msgspec.structs.replace(region, address=landing.address, memory=landing.memory, device=landing.device)
        consumer = msgspec.structs.replace(detour.there.consumer, regions=(here,))
        there = msgspec.structs.replace(detour.there, consumer=consumer)
        moves, held = self.landing.scattering(detour.here, self._storages)
        return Detoured("staged", peer, detour, moves, held, self._wire.prepare(there, 0, peer))

    def _source(self, peer: str) -> Source:
        if peer not in self._sources:
            offer = self._connected(peer).offer
            if offer is None:
                raise TransportError("it does not gather: it has no ring to send from")
            self._sources[peer] = self.landing.meet(peer, offer)
        return self._sources[peer]

    def rates(self, peer: str) -> Rates:
        """What the path to a peer costs; found out by reading its ring, the first time."""
        if self._settings.rates is not None:
            return self._settings.rates
        if peer not in self._rates:
            copying = self._copying
            try:
                wire, path = self._probed(peer)
            except TransportError as error:
                self._say(f"what the path to peer {peer} costs is not known, usual numbers are taken ({error})")
                device = self._staging.storage.memory == "vram"
                path = cost.of_path(self._wire.path(peer).name, device)
                wire = cost.WIRES[path]
            self._rates[peer] = Rates(path, wire, copying, copying)
        return self._rates[peer]

    def _probed(self, peer: str) -> tuple[Wire, str]:
        source, slot = self._source(peer), self.landing.borrow()
        kept: list[Read] = []
        try:
            return probed(self._wire, source, self._staging, slot, kept, self._clock)
        finally:
            self.landing.give_back(slot, kept)

    def read(self, prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], notification: bytes = b"") -> Read:
        if not isinstance(prepared, ScatteredPrepared):
            return self._wire.read(prepared, tiles, notification)
        detoured = self._chosen(prepared, tiles)
        if detoured is None and prepared.direct is not None:
            self.carried["direct"] += 1
            return self._wire.read(prepared.direct, tiles, notification)
        if detoured is None:
            reason = f": it refuses to gather, since {prepared.refused}" if prepared.refused else ""
            raise TransportError(f"peer {prepared.peer}: nothing was prepared that could carry this load{reason}")
        return self._detour(detoured, tiles, notification, prepared.direct)

    def read_together(self, prepared: Prepared, loads: Sequence[Mapping[tuple[int, int], Tiles]]) -> Iterator[Read]:
        """Loads that fit into one slot, and cross the wire in a moment, are gathered, read and checked as one, and are over
        together."""
        packed = prepared.detours.get("packed") if isinstance(prepared, ScatteredPrepared) else None
        if not isinstance(prepared, ScatteredPrepared) or packed is None or packed.source is None:
            for tiles in loads:
                yield self.read(prepared, tiles)
            return
        room = self.landing.room(packed.source)
        if packed.mapped is None:
            room = min(room, int(_MOMENT_S / max(prepared.rates.wire.byte_s, 1e-15)))
        for several in _slotfuls(packed, loads, room):
            whole = joined(several)
            detoured = self._chosen(prepared, whole) if len(several) > 1 else None
            if detoured is None:
                for tiles in several:
                    yield self.read(prepared, tiles)
            else:
                yield from self._shared(self._detour(detoured, whole, direct=prepared.direct), several)

    def _shared(self, read: DetouredRead, loads: Sequence[Mapping[tuple[int, int], Tiles]]) -> list[SharedRead]:
        self.carried[read.detoured.way] += len(loads) - 1
        out: list[SharedRead] = []
        before = 0
        for tiles in loads:
            size = cost.through(read.detoured.detour, tiles).bytes
            out.append(SharedRead(read, out, before, size, read.polled))
            before += size
        return out

    def _chosen(self, prepared: ScatteredPrepared, tiles: Mapping[tuple[int, int], Tiles]) -> Detoured | None:
        """The way through staging that a load takes; None: by descriptors."""
        if prepared.connection.gone:
            raise PeerGoneError(prepared.peer)
        if self._connected(prepared.peer) is not prepared.connection:
            raise TransportError(f"peer {prepared.peer} was forgotten since this plan was prepared; prepare it again")
        way = prepared.way(tiles)
        self._tell(prepared, way, tiles)
        return prepared.detours.get(way)

    def _detour(
        self,
        detoured: Detoured,
        tiles: Mapping[tuple[int, int], Tiles],
        notification: bytes = b"",
        direct: Prepared | None = None,
    ) -> DetouredRead:
        if detoured.mapped is not None:
            self._mapped.add(detoured.peer)
        read = self.landing.read(detoured, tiles, notification)
        read.direct = direct
        self._reads.add(read)
        self.carried[detoured.way] += 1
        self._notify_if_done(read)
        return read

    def _connected(self, peer: str) -> Connection:
        if peer not in self._offers:
            raise TransportError(f"peer {peer} is not connected; connect with its metadata first")
        return self._offers[peer]

    def _tell(self, prepared: ScatteredPrepared, way: Way, tiles: Mapping[tuple[int, int], Tiles]) -> None:
        words = f"peer {prepared.peer} is read {way}"
        if words not in self._said:
            self._said.add(words)
            shown = sorted(prepared.costs(tiles).items(), key=lambda found: found[1])
            others = ", ".join(f"{other} {1000 * seconds:.2f} ms" for other, seconds in shown)
            logger.info("%s: the first such load would take %s", words, others)

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            logger.info("%s", words)

    def poll(self, read: Read) -> State:
        if isinstance(read, SharedRead):
            if read.polled >= read.read.polled:
                self.poll(read.read)
            read.polled = read.read.polled
            return read.read.state
        if not isinstance(read, DetouredRead):
            return self._wire.poll(read)
        if read.instead is not None:
            self._mirror(read, read.instead)
        elif read.state is State.RUNNING:
            before = read.polled
            self.landing.poll(read)
            if read.detoured.mapped is not None and before >= self._listened:
                self._listened = read.polled
                try:
                    self._listen()
                except TransportError as error:
                    read.fail(str(error))
        if read.refused and read.instead is None:
            self._read_otherwise(read)
        self._notify_if_done(read)
        return read.state

    def _read_otherwise(self, read: DetouredRead) -> None:
        """What the producer refuses to gather is read by descriptors, and so are later loads by the same plan."""
        source, digest = read.detoured.source, read.detoured.digest
        if source is not None and digest not in source.refused:
            source.refused[digest] = read.refused
            logger.warning("peer %s refuses to gather, since %s; its log says more", read.peer, read.refused)
        if read.direct is None or read.flights:
            return
        try:
            read.instead = self._wire.read(read.direct, read.tiles)
        except TransportError as error:
            read.error = f"{read.error}; nor can it be read by descriptors: {error}"
            read.direct = None
            return
        self.carried[read.detoured.way] -= 1
        self.carried["direct"] += 1
        read.state, read.error = State.RUNNING, ""
        self._mirror(read, read.instead)

    def _mirror(self, read: DetouredRead, instead: Read) -> None:
        if read.state is not State.RUNNING:
            return
        read.state, read.error = self._wire.poll(instead), instead.error
        if read.state is State.DONE:
            found = self._wire.telemetry(instead)
            read.moved, read.runs, read.ended = found.bytes, found.runs, self._clock()

    def _notify_if_done(self, read: DetouredRead) -> None:
        if read.state is not State.DONE or not read.notification:
            return
        notification, read.notification = read.notification, b""
        try:
            self._wire.notify(read.peer, notification)
        except TransportError as error:
            read.state = State.RUNNING
            read.fail(f"all bytes arrived, but it cannot be notified: {error}")

    def _listen(self) -> None:
        """What is asked for out of a mapped ring leaves with the transport's next turn, and no read of it gives it one. Where
        many are polled in turn, one of them does, as long as nobody else has since it was polled last."""
        self._heard += self._wire.notifications()

    def telemetry(self, read: Read) -> Telemetry:
        if isinstance(read, SharedRead):
            whole = self.landing.telemetry(read.read)
            share = read.size / max(1, read.read.size)
            return Telemetry(read.size, read.runs, whole.posting_s * share, whole.wire_s * share)
        return self.landing.telemetry(read) if isinstance(read, DetouredRead) else self._wire.telemetry(read)

    def release(self, read: Read) -> bool:
        if isinstance(read, SharedRead):
            read.left = True
            wanted = read.read.state is State.RUNNING and not all(it.left for it in read.several)
            return not wanted and self.release(read.read)
        if not isinstance(read, DetouredRead):
            return self._wire.release(read)
        if read.instead is not None and not self._wire.release(read.instead):
            read.fail("the read was given up here")
            return False
        if not self.landing.release(read):
            return False
        self._reads.discard(read)
        return True

    def notify(self, peer: str, message: bytes) -> None:
        self._wire.notify(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Those that are not about gathering; that is done meanwhile. Peers that have died are let go of."""
        for name in self._rings.look() if self._rings is not None else ():
            self._leave(name, gone=True)
        out = []
        self._listen()
        heard, self._heard = self._heard, []
        for sender, message in heard:
            if message.startswith(MARK):
                self.gathering.hear(message)
            else:
                out.append((sender, message))
        self.gathering.step()
        self.landing.tidy()
        return out

    def path(self, peer: str) -> Path:
        return Path("mapped ring") if peer in self._mapped else self._wire.path(peer)

    def forget(self, peer: str) -> None:
        self._leave(peer)

    def _leave(self, peer: str, gone: bool = False) -> None:
        """A peer that lives learns which of its slots are free, while there is still a way to tell it."""
        source = self._sources.pop(peer, None)
        if source is not None:
            source.dropped = gone
        for read in self._reads:
            if read.peer == peer:
                read.fail("its process has ended" if gone else "it was forgotten here")
                self.landing.release(read)
        connection = self._offers.pop(peer, None)
        self.landing.peers.discard(peer)
        if connection is not None:
            connection.gone = gone
        self._rates.pop(peer, None)
        self._mapped.discard(peer)
        if source is not None:
            source.dropped = True
        self._wire.forget(peer)
        if source is not None:
            self.landing.leave(source)

    def close(self) -> None:
        for read in self._reads:
            read.fail("this end was closed")
        self.closed = True
        if self._rings is not None:
            self._rings.close()
        self._wire.close()
        for shared in (self._staging.shared, self._keep.shared):
            if shared is not None:
                shared.close()


def _slotfuls(
    packed: Detoured, loads: Sequence[Mapping[tuple[int, int], Tiles]], room: int
) -> Iterator[list[Mapping[tuple[int, int], Tiles]]]:
    """In their order, as many together as a slot holds."""
    several: list[Mapping[tuple[int, int], Tiles]] = []
    held = 0
    for tiles in loads:
        staged = cost.through(packed.detour, tiles).staged
        if several and held + staged > room:
            yield several
            several, held = [], 0
        several.append(tiles)
        held += staged
    if several:
        yield several


def _tokens(rings: Mapped | None, host: HostMover, staging: Staging, boards: Boards) -> tuple[Token, ...]:
    """What opens the ring to send from and its board elsewhere; none where others cannot map both."""
    if rings is None or not staging.sizes.sending:
        return ()
    for shared in (staging.shared, boards.shared):
        if shared is not None:
            host.share(shared)
    try:
        return rings.register([staging.sending, boards.board])
    except TransportError as error:
        logger.info("the ring here cannot be mapped by others (%s): it is read over the transport", error)
        return ()
