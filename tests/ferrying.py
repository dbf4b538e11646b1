"""Takes an oracle's case through kvferry: manifests, plans, bindings, then plain memory copies, compared byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

import oracle
from kvferry import manifest as m
from kvferry.plan import Binder, Binding, Fills, Fleet, Grain, Plan, Request, make_plans, routes
from kvferry.plan.rows import PreparedRows, Rows

FAR = 1 << 40
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}


def reach_of(reach: oracle.Reach) -> m.Reach:
    if reach.kind == "window":
        return m.Window(reach.tokens)
    return m.Chunk(reach.tokens) if reach.kind == "chunk" else m.FULL


def kind_of(kind: oracle.Kind) -> m.LayerKind:
    match kind:
        case oracle.Attention():
            return m.Attention(kind.heads, kind.dim, DTYPES[kind.item], kind.v_dim, reach_of(kind.reach))
        case oracle.Latent():
            return m.LatentAttention(
                kind.latent, kind.rope, kind.indexer, DTYPES[kind.item], DTYPES[kind.indexer_item], reach_of(kind.reach)
            )
        case oracle.Compressed():
            return m.Entries(
                kind.part,
                kind.width,
                kind.tokens,
                DTYPES[kind.item],
                reach_of(kind.reach),
                planes=kind.planes,
                page_align=kind.align,
                partial=kind.partial,
            )
        case oracle.OpaqueCells():
            return m.OpaqueCells(kind.tag, kind.bytes_per_token, kind.head_slots, reach_of(kind.reach))
        case oracle.Mamba1():
            return m.Mamba1(kind.inner, kind.state, kind.kernel, DTYPES[kind.item], DTYPES[kind.ssm_item])
        case oracle.Mamba2():
            dtypes = (DTYPES[kind.item], DTYPES[kind.ssm_item])
            return m.Mamba2(kind.heads, kind.dim, kind.state, kind.groups, kind.kernel, *dtypes)
        case oracle.GatedDelta():
            dtypes = (DTYPES[kind.item], DTYPES[kind.ssm_item])
            return m.GatedDelta(kind.k_heads, kind.v_heads, kind.k_dim, kind.v_dim, kind.kernel, *dtypes)
        case oracle.ShortConv():
            return m.ShortConv(kind.inner, kind.kernel, DTYPES[kind.item])
        case oracle.LinearAttention():
            return m.LinearAttention(kind.heads, kind.k_dim, kind.v_dim, DTYPES[kind.ssm_item])
        case oracle.OpaqueState():
            return m.OpaqueState(kind.tag, kind.size)
    raise TypeError(kind)


def manifest_of(case: oracle.Case, side: oracle.Side, rank: tuple[int, int], engine: str) -> m.Manifest:
    tp, pp = rank
    mem = side.memory
    layout = m.Layout(mem.block, mem.kv, mem.order, mem.conv, mem.spec, mem.pool, mem.overlay, mem.page_align, mem.delta)  # type: ignore[arg-type]
    groups = tuple(
        m.GroupSpec(
            group.id,
            tuple(
                m.LayerSpec(name, kind_of(case.layer(name).kind), required="P" in case.layer(name).sides)
                for name in side.held(group, pp)
            ),
            group.tokens,
            reach_of(group.keeps),
            group.hashed,
            group.kernel,
        )
        for group in side.groups
    )
    identity = m.Identity(engine, "1", "model", m.Rank(tp, side.tp, pp, len(side.stages)))
    return m.build_manifest(identity, groups, layout, side.blocks)


def manifests_of(case: oracle.Case) -> tuple[list[m.Manifest], list[m.Manifest]]:
    producers = [manifest_of(case, case.producer, rank, "P") for rank in case.producer.ranks]
    return producers, [manifest_of(case, case.consumer, rank, "D") for rank in case.consumer.ranks]


def request_of(case: oracle.Case) -> Request:
    return Request(case.tokens, case.src, case.dst, case.start)


def place(rank: m.Rank) -> tuple[int, int]:
    return rank.tp, rank.pp


@dataclass
class Outcome:
    """What a transfer did, by consumer rank in the order of `consumers`."""

    case: oracle.Case
    producers: list[m.Manifest]
    consumers: list[m.Manifest]
    plans: tuple[Plan, ...]
    bindings: list[Binding]
    moved: int = 0

    @property
    def runs(self) -> int:
        return sum(len(c) for b in self.bindings for c in b.copies)


@dataclass(frozen=True)
class Copy:
    """One copied run: the producer rank, then region and offset on either side."""

    source: tuple[int, int]
    src_region: int
    src: int
    dst_region: int
    dst: int
    length: int


def copies_of(plan: Plan, binding: Binding) -> list[Copy]:
    out = []
    for side, copies in zip(plan.sources, binding.copies, strict=True):
        columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
        rows = zip(*(c.tolist() for c in columns), strict=True)
        out += [Copy(place(side.identity.rank), *row) for row in rows]
    return out


def apply(copies: Iterable[Copy], fills: Fills, world: oracle.World, rank: tuple[int, int]) -> list[oracle.Bytes]:
    """Carry out copies and fills in a consumer rank's memory; how often each byte was written."""
    here = world.consumers[rank].buffers
    written = [np.zeros(len(b), np.uint8) for b in here]
    for c in copies:
        there = world.producers[c.source].buffers[c.src_region]
        inside = 0 <= c.src <= len(there) - c.length and 0 <= c.dst <= len(here[c.dst_region]) - c.length
        assert inside, f"{c} leaves its region"
        here[c.dst_region][c.dst : c.dst + c.length] = there[c.src : c.src + c.length]
        written[c.dst_region][c.dst : c.dst + c.length] += 1
    for region, at, length in zip(fills.region.tolist(), fills.offset.tolist(), fills.length.tolist(), strict=True):
        assert 0 <= at <= len(here[region]) - length, f"fill of {length} bytes at {at} leaves region {region}"
        here[region][at : at + length] = 0
        written[region][at : at + length] += 1
    return written


def ferry(case: oracle.Case) -> Outcome:
    """Move the case's request to every consumer rank and insist on every byte of every buffer."""
    producers, consumers = manifests_of(case)
    world = oracle.build_world(case)
    check_regions(producers, world.producers)
    check_regions(consumers, world.consumers)
    plans = make_plans(consumers, Fleet(producers))
    out = Outcome(case, producers, consumers, plans, [])
    for plan in plans:
        rank = place(plan.consumer.identity.rank)
        binder = Binder(plan)
        binding = binder.bind(request_of(case))
        wanted = world.expected[rank]
        check_rows(binder, case, world, rank)
        insist(copies_of(plan, binding), binding.fills, world, rank)
        assert binding.bytes == wanted.moved, f"{binding.bytes} bytes were copied, {wanted.moved} are needed"
        assert 0 <= binding.useful_bytes <= binding.bytes, "more bytes are useful than are copied"
        unhashable = {group: set(positions.tolist()) for group, positions in binding.unhashable.items()}
        assert unhashable == wanted.unhashable
        check_spans(binder, binding, request_of(case))
        out.bindings.append(binding)
        out.moved += binding.bytes
    check_routes(out)
    return out


def check_regions(manifests: list[m.Manifest], memories: dict[tuple[int, int], oracle.RankMemory]) -> None:
    for manifest in manifests:
        lengths = [len(b) for b in memories[place(manifest.identity.rank)].buffers]
        assert [r.length for r in manifest.regions] == lengths


def elements(rows: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Address (regions far apart) and length of every element that rows stand for, in their numbering."""
    first = rows.region * FAR + rows.offset
    steps = np.concatenate([np.arange(c) for c in rows.count.tolist()]) if len(rows) else np.empty(0, np.int64)
    address = np.repeat(first, rows.count) + steps * np.repeat(rows.stride, rows.count)
    return address, np.repeat(rows.length, rows.count)


def check_rows(binder: Binder, case: oracle.Case, world: oracle.World, rank: tuple[int, int]) -> None:
    """What a transport is given, index arrays into prepared rows, leaves what the oracle says; memory is put back."""
    loading, wanted = binder.load(request_of(case)), world.expected[rank]
    copies = []
    for source, side in enumerate(binder.plan.sources):
        prepared = PreparedRows(binder.plan, source)
        src, dst = prepared.indices(loading.tiles)
        (src_at, src_length), (dst_at, dst_length) = elements(prepared.src), elements(prepared.dst)
        assert np.array_equal(src_length[src], dst_length[dst])
        columns = (*np.divmod(src_at[src], FAR), *np.divmod(dst_at[dst], FAR), src_length[src])
        copies += [Copy(place(side.identity.rank), *row) for row in zip(*(c.tolist() for c in columns), strict=True)]
    before = [buffer.copy() for buffer in world.consumers[rank].buffers]
    insist(copies, loading.fills, world, rank)
    for buffer, old in zip(world.consumers[rank].buffers, before, strict=True):
        buffer[:] = old
    assert loading.bytes == sum(c.length for c in copies) == wanted.moved
    assert {g: set(at.tolist()) for g, at in loading.unhashable.items()} == wanted.unhashable


def insist(copies: Iterable[Copy], fills: Fills, world: oracle.World, rank: tuple[int, int]) -> None:
    """Carry out copies and fills, and compare every byte of the rank with the oracle."""
    written = apply(copies, fills, world, rank)
    found = list(oracle.differences(world.consumers[rank].buffers, world.expected[rank].memory.buffers))
    assert not found, f"consumer {rank}: " + "; ".join(found)
    assert all(w.max(initial=0) <= 1 for w in written), "a byte was written twice"


def check_spans(binder: Binder, binding: Binding, request: Request) -> None:
    """The tokens that are said to be copied and filled have, at the finest grain, as many bytes as are."""
    spans = binder.spans(request)
    copied = [0] * len(binder.plan.sources)
    for edge, tokens in zip(binder.plan.edges, spans.copied, strict=True):
        copied[edge.source] += bytes_of(edge.grains[-1], tokens)
    assert copied == [copies.bytes for copies in binding.copies]
    filled = [bytes_of(fill.grains[-1], tokens) for fill, tokens in zip(binder.plan.fills, spans.filled, strict=True)]
    assert sum(filled) == binding.fills.bytes


def bytes_of(grain: Grain, tokens: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]) -> int:
    tile = sum(run.length * prod(count for count, _, _ in run.repeats) for run in grain.runs)
    size = grain.tokens or 1
    assert not any((edge % size).any() for edge in tokens)
    return tile * int((tokens[1] - tokens[0]).sum()) // size


def check_routes(out: Outcome) -> None:
    """Producer ranks know their readers; a rank without any is told by exactly one consumer rank."""
    for route in routes(out.producers, out.consumers):
        readers = {p.consumer.identity.rank for p in out.plans if route.producer in {s.identity.rank for s in p.sources}}
        tellers = [p.consumer.identity.rank for p in out.plans if route.producer in p.tells]
        assert set(route.readers) == readers
        assert len(route.readers) == len(readers)
        assert tellers == ([] if readers else [route.teller])
