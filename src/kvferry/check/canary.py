"""A canary: bytes that are really transferred from running engines into memory of our own, and compared.

The beacon of every rank is read as leases' words are, and compared with what its card says: registration, remote keys,
addresses and the path work, and it is the memory of this very start. That disturbs nobody and needs no request.

With a reference, the request's blocks are read under their lease twice: page by page, whole, and as stand-ins for the decode
ranks load them, in their layout, the lease's word last. What arrived must be what the planned copies make of the pages, byte by
byte. That shows that what the transport scatters over a decode rank's layout is what the prefill engine holds. It does not
show that the decode engine's own memory can be reached: only that engine writes there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from kvferry.check.cards import Engine, Pair
from kvferry.check.pages import as_pages
from kvferry.errors import KVFerryError, SessionError, TransportError
from kvferry.explain.request import block_tables
from kvferry.findings import Finding, Severity
from kvferry.manifest import Manifest
from kvferry.manifest.check import check_manifest
from kvferry.manifest.schema import Identity, Layer, Part, Rank, Region
from kvferry.plan import Binder, Fills, Plan, Request, make_plans
from kvferry.session import Card, Ferry, Keys, Load, Meeting, Outcome, Reference, Release, Words, key_of
from kvferry.session.fills import apply_fills
from kvferry.session.key import is_loopback, split_address
from kvferry.session.messages import pack
from kvferry.session.wire import dial, find
from kvferry.strategy import Strategies
from kvferry.strategy.choose import stays_here
from kvferry.transport import NixlOptions, NixlTransport, Path, State, Storage
from kvferry.transport.fence import DEVICES, LOOPBACK
from kvferry.transport.interfaces import address_toward, addresses

PATIENCE_S: Final = 20.0
MOST_BYTES: Final = 2 << 30
_STALE: Final = 0xA5

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Carried:
    """What a canary did: ranks that were read, bytes that were compared, and how they travelled."""

    ranks: int
    compared: int
    paths: tuple[str, ...]
    findings: tuple[Finding, ...]


def options_for(metadata: bytes, address: str) -> NixlOptions:
    """For reading an end that exported `metadata` and answers at host:port: UCX opens a port here only if it has one there. One
    that is asked over loopback may have its port on any interface."""
    if stays_here(metadata):
        return NixlOptions(timeout_s=PATIENCE_S)
    here = address_toward(split_address(address)[0])
    if not is_loopback(here or LOOPBACK):
        return NixlOptions(timeout_s=PATIENCE_S, address=here)
    here = next((found for _, found in addresses() if not is_loopback(found)), LOOPBACK)
    return NixlOptions(timeout_s=PATIENCE_S, address=here, ucx={DEVICES: "all"})


def read_beacons(engine: Engine) -> Carried:
    """The beacon of every rank of an engine."""
    findings: list[Finding] = []
    paths: dict[str, None] = {}
    compared = ranks = 0
    try:
        options = options_for(engine.welcome.cards[0].transport, engine.address) if engine.welcome.cards else None
        transport = Strategies(NixlTransport("kvferry-check", options))
    except TransportError as error:
        return Carried(0, 0, (), (_unable(error, engine.address),))
    try:
        words = Words(1, Identity("kvferry-check", "0", "words", Rank()))
        transport.register([words.storage])
        for card in engine.welcome.cards:
            where = f"{engine.address} {card.caches.identity.rank}"
            if not card.beacon:
                seen = "its card tells of no beacon to compare with: it runs an older release"
                findings.append(
                    Finding("no-beacon", seen, "update the engine, or check without --canary", Severity.WARNING, where)
                )
                continue
            try:
                found, path = _beacon(transport, words, card)
            except KVFerryError as error:
                findings.append(_failed(error, where))
                continue
            ranks += 1
            compared += 8
            paths[path.name] = None
            findings += _judged(found, card.beacon, path, where)
    finally:
        transport.close()
    return Carried(ranks, compared, tuple(paths), tuple(findings))


def _judged(found: int, wanted: int, path: Path, where: str) -> list[Finding]:
    out = []
    if found != wanted:
        seen = f"its beacon is {wanted}, and {found} was read in its place"
        out.append(
            Finding(
                "canary-differs",
                seen,
                "do not serve from it: the transport reads other memory than the card names",
                where=where,
            )
        )
    if path.slow:
        out.append(Finding("slow-path", f"it is read by {path.name}", path.remedy, Severity.WARNING, where))
    return out


def _beacon(transport: Strategies, words: Words, card: Card) -> tuple[int, Path]:
    peer = transport.connect(card.transport)
    plan = words.plan(card.words)
    prepared = transport.prepare(plan, 0, peer)
    slot = card.words.groups[0].blocks - 1
    words.wipe(0)
    read = transport.read(prepared, Binder(plan).tiles(Request(1, {0: slot}, {0: 0})))
    _until(lambda: transport.poll(read) is not State.RUNNING, peer)
    if read.error:
        raise TransportError(read.error)
    path = transport.path(peer)
    transport.release(read)
    return words.landed(0), path


def _until(done: Callable[[], bool], peer: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise TransportError(f"{peer}: nothing arrived within {PATIENCE_S:g} s")
        time.sleep(0.0005)


def _unable(error: KVFerryError, where: str) -> Finding:
    return Finding("canary-unable", str(error), "`kvferry doctor` says what is missing on this machine", where=where)


def _failed(error: KVFerryError, where: str) -> Finding:
    return Finding("canary-failed", str(error), "`kvferry doctor --to HOST` measures the path from this machine", where=where)


def read_blocks(pair: Pair, reference: Reference, keys: Keys) -> Carried:
    """A leased request of the pair's producer, by stand-ins for the consumer; the lease is given back in any case."""
    where = pair.name
    try:
        pages = [_pages(card, reference) for card in pair.producer.welcome.cards]
        ranks = _StandIns(pair.consumer.manifests, reference)
        plans, paths = _carry(pair, reference, ranks)
        wrong, compared = _differing(plans, reference, ranks, pages)
    except KVFerryError as error:
        return Carried(0, 0, (), (_failed(error, where),))
    finally:
        release(reference, keys)
    findings = []
    if wrong:
        seen = f"{wrong:,} of {compared:,} bytes arrived otherwise than the prefill engine holds them"
        findings.append(Finding("canary-differs", seen, "do not serve with this pair; report it with both cards", where=where))
    return Carried(len(ranks.manifests), compared, paths, tuple(findings))


def release(reference: Reference, keys: Keys) -> None:
    """Give the lease back; if nobody hears it, it ends at its deadline."""
    context = zmq.Context()
    try:
        number = find(reference.address, keys, PATIENCE_S)
        for key in keys.all:
            end = dial(context, number, key, 1 << 13, {})
            end.send(pack(Release(reference.incarnation, reference.lease, "kvferry-check", "canary")), zmq.NOBLOCK)
    except (zmq.ZMQError, SessionError):
        pass
    finally:
        context.destroy(linger=1000)


@dataclass(frozen=True)
class _Pages:
    """Whole pages of one prefill rank: by plane (region, first byte, bytes a block) the bytes of some blocks."""

    manifest: Manifest
    planes: Mapping[tuple[int, int, int], Bytes]
    places: Mapping[int, int]

    def run(self, region: int, offset: int, length: int) -> Bytes:
        """A run of the rank's memory; it may go on from page to page."""
        pieces = []
        while length:
            piece = self._piece(region, offset, length)
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return np.concatenate(pieces)

    def _piece(self, region: int, offset: int, length: int) -> Bytes:
        for (of, start, stride), data in self.planes.items():
            block, inside = divmod(offset - start, stride)
            if of == region and 0 <= block < self.manifest.groups[0].blocks and block in self.places:
                at = self.places[block] * stride + inside
                return data[at : at + min(length, stride - inside)]
        raise SessionError(f"{length} bytes at {offset} of region {region} lie in no page of the reference's blocks")


def _pages(card: Card, reference: Reference) -> _Pages:
    """Read the pages of all blocks of a reference whole, without regard to what is in them."""
    manifest = card.caches
    blocks = sorted({block for table in reference.tables.values() for block in _ids(table) if block >= 0})
    places = {block: i for i, block in enumerate(blocks)}
    planes = sorted(
        {
            (part.region, part.offset // span * span, part.block_stride)
            for layer in manifest.layers
            for part in layer.parts
            for span in (manifest.group(layer.group).blocks * part.block_stride,)
        }
    )
    count = max((group.blocks for group in manifest.groups), default=0)
    memory = [np.full(len(blocks) * stride, _STALE, np.uint8) for _, _, stride in planes]
    there = as_pages("prefill", manifest.regions, planes, count)
    regions = tuple(Region(f"page{i}", len(data), int(data.ctypes.data)) for i, data in enumerate(memory))
    here = as_pages("kvferry-check", regions, [(i, 0, stride) for i, (_, _, stride) in enumerate(planes)], len(blocks))
    (plan,) = make_plans([here], [there])
    transport = Strategies(NixlTransport("kvferry-check", options_for(card.transport, reference.address)))
    try:
        transport.register([Storage(int(data.ctypes.data), data.nbytes) for data in memory])
        peer = transport.connect(card.transport)
        prepared, binder = transport.prepare(plan, 0, peer), Binder(plan)
        for block, place in places.items():
            read = transport.read(prepared, binder.tiles(Request(1, {0: block}, {0: place})))
            _until(lambda read=read: transport.poll(read) is not State.RUNNING, peer)  # type: ignore[misc]
            if read.error:
                raise TransportError(read.error)
            transport.release(read)
    finally:
        transport.close()
    return _Pages(manifest, dict(zip(planes, memory, strict=True)), places)


class _StandIns:
    """Ranks like those of an engine, with memory of our own and no more blocks than the reference takes."""

    def __init__(self, like: Sequence[Manifest], reference: Reference) -> None:
        self.tables = block_tables(like[0].groups, reference.tokens)
        self.manifests: list[Manifest] = []
        self.memories: list[list[Bytes]] = []
        blocks = 1 + max((block for table in self.tables.values() for block in table), default=0)
        for manifest in like:
            small = shrunk(manifest, blocks)
            if sum(region.length for region in small.regions) > MOST_BYTES:
                raise SessionError(f"{manifest.identity.rank}: even a few blocks take more than {MOST_BYTES:,} bytes")
            memory: list[Bytes] = [np.full(region.length, _STALE, np.uint8) for region in small.regions]
            placed = tuple(
                msgspec.structs.replace(region, address=int(data.ctypes.data))
                for region, data in zip(small.regions, memory, strict=True)
            )
            self.manifests.append(msgspec.structs.replace(small, regions=placed))
            self.memories.append(memory)


def _ids(table: list[int] | int) -> list[int]:
    return table if isinstance(table, list) else [table]


def shrunk(manifest: Manifest, blocks: int) -> Manifest:
    """The same rank with few blocks, in host memory: planes of layers that share a region get one each."""
    planes: dict[tuple[int, int], int] = {}
    lengths: list[int] = []
    layers: list[Layer] = []
    for layer in manifest.layers:
        parts: list[Part] = []
        for part in layer.parts:
            plane, offset = divmod(part.offset, manifest.group(layer.group).blocks * part.block_stride)
            index = planes.setdefault((part.region, plane), len(planes))
            if index == len(lengths):
                lengths.append(0)
            lengths[index] = max(lengths[index], blocks * part.block_stride)
            parts.append(msgspec.structs.replace(part, region=index, offset=offset))
        layers.append(msgspec.structs.replace(layer, parts=tuple(parts)))
    starts = [0, *accumulate(lengths)]
    regions = tuple(Region(f"canary{i}", length, starts[i]) for i, length in enumerate(lengths))
    groups = tuple(msgspec.structs.replace(group, blocks=blocks) for group in manifest.groups)
    identity = msgspec.structs.replace(manifest.identity, engine="kvferry-check", incarnation="0")
    out = msgspec.structs.replace(manifest, identity=identity, regions=regions, groups=groups, layers=tuple(layers))
    check_manifest(out)
    return out


def _carry(pair: Pair, reference: Reference, into: _StandIns) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """Load the reference into stand-ins as an engine's ranks would, their lease's words included."""
    plans = make_plans(into.manifests, pair.producer.manifests)
    meeting = Meeting(key_of(reference), pair.producer.welcome.cards, plans)
    paths: dict[str, None] = {}
    options = options_for(pair.producer.welcome.cards[0].transport, reference.address)
    for rank, (manifest, memory) in enumerate(zip(into.manifests, into.memories, strict=True)):
        words = Words(4, manifest.identity)
        transport = Strategies(NixlTransport("kvferry-check", options))
        storages = [Storage(int(data.ctypes.data), data.nbytes) for data in memory if data.nbytes]
        transport.register([*storages, words.storage])

        def fill(fills: Fills, memory: list[Bytes] = memory) -> None:
            apply_fills(fills, memory)

        ferry = Ferry(transport, words, rank, fill)
        try:
            ferry.meet(meeting)
            ferry.load(Load("canary", meeting.peer, reference.lease, reference.tokens, 0, reference.tables, into.tables))
            outcomes: list[Outcome] = []
            _until(lambda ferry=ferry, out=outcomes: _stepped(ferry, out), str(meeting.peer))  # type: ignore[misc]
            if outcomes[0].error:
                raise TransportError(outcomes[0].error)
            for source in plans[rank].sources:
                card = next(c for c in meeting.cards if c.caches.identity.rank == source.identity.rank)
                paths[transport.path(transport.connect(card.transport)).name] = None
        finally:
            ferry.close()
    return plans, tuple(paths)


def _stepped(ferry: Ferry, outcomes: list[Outcome]) -> bool:
    ferry.step()
    outcomes += ferry.outcomes()
    return bool(outcomes)


def _differing(plans: Sequence[Plan], reference: Reference, ranks: _StandIns, pages: Sequence[_Pages]) -> tuple[int, int]:
    """Bytes of the stand-ins that differ from what the planned copies make of the pages, and how many were copied."""
    held = {page.manifest.identity.rank: page for page in pages}
    wrong = compared = 0
    for plan, memory in zip(plans, ranks.memories, strict=True):
        made: list[Bytes] = [np.full(data.size, _STALE, np.uint8) for data in memory]
        binding = Binder.of_sessions(plan).bind(Request(reference.tokens, reference.tables, ranks.tables))
        for source, copies in zip(plan.sources, binding.copies, strict=True):
            page = held[source.identity.rank]
            columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
            for a, b, c, d, n in zip(*(column.tolist() for column in columns), strict=True):
                made[c][d : d + n] = page.run(a, b, n)
        apply_fills(binding.fills, made)
        wrong += sum(int((one != other).sum()) for one, other in zip(made, memory, strict=True))
        compared += binding.bytes
    return wrong, compared
