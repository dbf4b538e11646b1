"""Manifests drawn directly: no contradiction is accepted, nothing right is refused, and every byte ends where it must.

`HYPOTHESIS_PROFILE=deep` takes 20,000 transfers and 60,000 small manifests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings

import declared
import drawn
from declared import Bytes
from kvferry.errors import BindError, ManifestError
from kvferry.manifest import (
    Axis,
    Element,
    Group,
    Identity,
    Layer,
    Manifest,
    Part,
    Rank,
    Region,
    Shape,
    StatePaged,
    TokenAxis,
    TokenPaged,
    check_manifest,
    decode,
    encode,
)
from kvferry.plan import Binder, Fills, Plan, Request, make_plans
from kvferry.plan.rows import PreparedRows, Rows

SHARDS = 8
TRANSFERS, SMALL = (240, 2_400) if settings().max_examples == 100 else (20_000, 60_000)

Copy = tuple[int, int, int, int, int, int]
"""Source, source region, source offset, destination region, destination offset, length."""


def carried_out(copies: Iterable[Copy], fills: Fills, there: list[list[Bytes]], before: list[Bytes]) -> tuple[list[Bytes], int]:
    """Memory after copies and fills, and bytes copied; no byte may be written twice, none outside its region."""
    here = [region.copy() for region in before]
    written = [np.zeros(len(region), np.uint8) for region in before]
    moved = 0
    for source, src_region, src, dst_region, dst, n in copies:
        data = there[source][src_region][src : src + n]
        assert src >= 0 <= dst
        assert len(data) == len(here[dst_region][dst : dst + n]) == n > 0
        here[dst_region][dst : dst + n] = data
        written[dst_region][dst : dst + n] += 1
        moved += n
    for region, at, n in zip(fills.region.tolist(), fills.offset.tolist(), fills.length.tolist(), strict=True):
        assert at >= 0
        assert len(here[region][at : at + n]) == n > 0
        here[region][at : at + n] = 0
        written[region][at : at + n] += 1
    assert all(w.max(initial=0) <= 1 for w in written), "a byte was written twice"
    return here, moved


def explicit(binder: Binder, request: Request) -> Iterable[Copy]:
    for source, found in enumerate(binder.bind(request).copies):
        columns = (found.src_region, found.src_offset, found.dst_region, found.dst_offset, found.length)
        yield from ((source, *row) for row in zip(*(c.tolist() for c in columns), strict=True))


def indexed(binder: Binder, request: Request) -> Iterable[Copy]:
    tiles = binder.tiles(request)
    for source in range(len(binder.plan.sources)):
        prepared = PreparedRows(binder.plan, source)
        assert min(prepared.src.stride.min(), prepared.dst.stride.min()) > 0
        theirs, ours = elements(prepared.src), elements(prepared.dst)
        for i, j in zip(*(numbers.tolist() for numbers in prepared.indices(tiles)), strict=True):
            (src_region, src, n), (dst_region, dst, other) = theirs[i], ours[j]
            assert n == other
            yield source, src_region, src, dst_region, dst, n


def elements(rows: Rows) -> list[tuple[int, int, int]]:
    columns = (rows.region, rows.offset, rows.length, rows.stride, rows.count)
    return [
        (region, offset + i * stride, length)
        for region, offset, length, stride, count in zip(*(c.tolist() for c in columns), strict=True)
        for i in range(count)
    ]


def ferry(case: drawn.Case, seed: int) -> int:
    """Plan, bind and carry out the case for every consumer rank, in explicit copies and in prepared rows; bytes moved."""
    truth = declared.Truth(case.prefilled, seed)
    memory = {m.identity: declared.prefilled(m, case.request.src, truth) for m in case.producers}
    total = 0
    for plan, consumer in zip(make_plans(case.consumers, case.producers), case.consumers, strict=True):
        there = [memory[side.identity] for side in plan.sources]
        before = declared.garbage(consumer, (seed, 2))
        wanted = declared.image(consumer, case.producers, case.request, truth, before)
        total += wanted.moved
        insist(plan, case.request, there, before, wanted)
    return total


def insist(plan: Plan, request: Request, there: list[list[Bytes]], before: list[Bytes], wanted: declared.Image) -> None:
    assert decode(encode(plan), Plan) == plan, "a number of the plan is one that a peer would refuse"
    binder = Binder(plan)
    binding, loading = binder.bind(request), binder.load(request)
    for copies, fills, claimed, unhashable in (
        (explicit(binder, request), binding.fills, binding.bytes, binding.unhashable),
        (indexed(binder, request), loading.fills, loading.bytes, loading.unhashable),
    ):
        here, moved = carried_out(copies, fills, there, before)
        assert not list(declared.differences(here, wanted.memory))
        assert moved == claimed == wanted.moved
        assert {group: set(found.tolist()) for group, found in unhashable.items()} == wanted.unhashable
    assert 0 <= binding.useful_bytes <= binding.bytes


@pytest.mark.parametrize("shard", range(SHARDS))
def test_drawn_manifests_are_carried_byte_by_byte(shard: int) -> None:
    moved = manifests = 0
    for seed in range(shard, TRANSFERS, SHARDS):
        case = drawn.case(seed)
        for manifest in (*case.producers, *case.consumers):
            assert declared.contradiction(manifest) is None, f"seed {seed}: {declared.contradiction(manifest)}"
        try:
            moved += ferry(case, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        manifests += len(case.producers) + len(case.consumers)
    assert moved > 100 * TRANSFERS / SHARDS
    assert manifests > 2 * TRANSFERS / SHARDS


BYTE = Element("uint8", 1)


def side(engine: str, tokens: int, blocks: int, *placed: tuple[Shape, int, int], ranks: int = 1) -> tuple[Manifest, ...]:
    """A layer of one part for every (shape, offset, block stride), in one region; the same on all ranks."""
    layers = tuple(Layer(f"layers.{i}", 0, (Part("k", i, 0, at, stride),)) for i, (_, at, stride) in enumerate(placed))
    return tuple(
        Manifest(
            Identity(engine, "1", "model", Rank(rank, ranks)),
            (Region("pool", 4096),),
            (Group(0, TokenPaged(tokens), blocks),),
            tuple(shape for shape, _, _ in placed),
            layers,
        )
        for rank in range(ranks)
    )


def dims(count: int, stride: int = 1) -> Axis:
    return Axis("dim", count, 0, count, ((count, stride),))


def test_tokens_that_lie_outside_of_blocks_are_moved_one_by_one():
    """[token][block][dim]: the next block is behind a token, not the next token."""
    tokens, blocks, width = 2, 6, 3
    outside = Shape(BYTE, (dims(width),), TokenAxis(((tokens, blocks * width),)))
    inside = Shape(BYTE, (dims(width),), TokenAxis(((tokens, width),)))
    odd, plain = (outside, 0, width), (inside, 0, tokens * width)
    for there, here in ((odd, odd), (odd, plain), (plain, odd)):
        for table in ([0, 1, 2], [1, 2, 3], [4, 2, 3]):
            case = drawn.Case(
                side("P", tokens, blocks, there), side("D", tokens, blocks, here), Request(5, {0: [1, 2, 3]}, {0: table}), 6
            )
            assert ferry(case, 1) == 5 * width


def test_digits_that_count_backwards_in_memory_are_moved():
    """A rank that begins in the middle of a digit whose next step leads back."""
    halves = Axis("dim", 7, 1, 7, ((3, 1), (2, 10)))
    there = Shape(BYTE, (halves,), TokenAxis(((2, 40),)))
    here = Shape(BYTE, (Axis("dim", 7, 2, 7, ((5, 1),)),), TokenAxis(((2, 5),)))
    case = drawn.Case(side("P", 2, 4, (there, 0, 80)), side("D", 2, 4, (here, 0, 10)), Request(4, {0: [1, 3]}, {0: [2, 1]}), 4)
    assert ferry(case, 1) == 4 * 5


@pytest.mark.parametrize("tokens", range(1, 20))
@pytest.mark.parametrize("partial", [True, False])
def test_an_entry_for_a_block_is_moved_before_it_is_complete_if_it_is_declared_so(tokens, partial):
    """A scale for 8 tokens beside their keys: cleared in a last block that is not full, unless it is declared `partial`."""
    keys = Shape(BYTE, (dims(4),), TokenAxis(((8, 4),)))
    scale = Shape(Element("float32", 4), (), TokenAxis(((1, 4),), 8, partial))
    placed = (keys, 0, 36), (scale, 32, 36)
    request = Request(tokens, {0: [1, 2, 0]}, {0: [3, 0, 1]})
    case = drawn.Case(side("P", 8, 4, *placed), side("D", 8, 4, *placed), request, tokens)
    assert ferry(case, 1) == tokens * 4 + (-(-tokens // 8) if partial else tokens // 8) * 4


@pytest.mark.parametrize("ranks", [(6, 6), (1, 6), (6, 1), (4, 6), (6, 5)])
def test_a_rank_that_owns_nothing_but_scratch_is_cleared(ranks):
    """10 heads padded to 12: the last of 6 ranks holds padding only, on either side, of a paged part and of a state."""

    def rank(engine: str, index: int, count: int) -> Manifest:
        start, stop = index * 12 // count, (index + 1) * 12 // count
        heads = Axis("head", 12, start, stop, ((stop - start, 2),), 10)
        paged = Shape(BYTE, (heads, dims(2)), TokenAxis(((4, 2 * (stop - start)),)))
        state = Shape(BYTE, (heads, dims(2)))
        return Manifest(
            Identity(engine, "1", "model", Rank(index, count)),
            (Region("kv", 1024), Region("ssm", 1024)),
            (Group(0, TokenPaged(4), 4), Group(1, StatePaged(), 4)),
            (paged, state),
            (Layer("a", 0, (Part("k", 0, 0, 0, 120),)), Layer("m", 1, (Part("ssm", 1, 1, 0, 40),))),
        )

    producers, consumers = (tuple(rank(e, i, n) for i in range(n)) for e, n in zip("PD", ranks, strict=True))
    request = Request(6, {0: [1, 2], 1: 3}, {0: [3, 0], 1: 1})
    assert ferry(drawn.Case(producers, consumers, request, 7), 1) == 10 * 2 * (6 + 1)


def overlaid(engine: str, offsets: tuple[int, int], strides: tuple[int, int]) -> tuple[Manifest]:
    shape = Shape(BYTE, (dims(2),), TokenAxis(((2, 2),)))
    places = zip(offsets, strides, strict=True)
    return (
        Manifest(
            Identity(engine, "1", "model"),
            (Region("pool", 4096),),
            (Group(0, TokenPaged(2), 8), Group(1, TokenPaged(2), 8)),
            (shape,),
            tuple(Layer(f"layers.{g}", g, (Part("k", 0, 0, at, stride),)) for g, (at, stride) in enumerate(places)),
        ),
    )


@pytest.mark.parametrize("whose", ["producer", "consumer"])
def test_a_block_in_the_tables_of_two_groups_that_overlay_is_refused(whose):
    together, apart = ((0, 2), (8, 8)), ((0, 4), (8, 8))
    tables = {0: [3, 5], 1: [6, 3]}, {0: [1, 2], 1: [4, 5]}
    src, dst = tables if whose == "producer" else tables[::-1]
    for places in (together, apart):
        there, here = (places, apart) if whose == "producer" else (apart, places)
        binder = Binder(make_plans(overlaid("D", *here), overlaid("P", *there))[0])
        if places is apart:
            assert binder.bind(Request(3, src, dst)).bytes == 12
            continue
        with pytest.raises(BindError, match=f"the {whose}'s block tables of groups 0 and 1 both name block 3"):
            binder.bind(Request(3, src, dst))
        with pytest.raises(BindError, match="a block belongs to one group at a time"):
            binder.load(Request(3, src, dst))


def shared(manifest: Manifest, one: int, other: int, block: int) -> bool:
    """Whether two groups have a byte of a block in common."""
    found = declared.spots(manifest)
    marked: dict[int, set[tuple[int, int]]] = {one: set(), other: set()}
    for layer in manifest.layers:
        for part in layer.parts if layer.group in marked else ():
            spot = found[layer.name, part.name].bytes_of(block).reshape(-1).tolist()
            marked[layer.group].update((part.region, at) for at in spot)
    return bool(marked[one] & marked[other])


def bound(plan: Plan, request: Request) -> str:
    """Why a request is refused, if it is."""
    try:
        Binder(plan).bind(request)
    except BindError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shard", range(2))
def test_a_drawn_request_is_refused_where_two_groups_would_write_a_byte_and_only_there(shard: int) -> None:
    """An id of one group's table is put into another's, on either side; of the producer's, only what is read matters."""
    refused = carried = 0
    for seed in range(shard, TRANSFERS // 2, 2):
        case = drawn.case(seed)
        for name in ("src", "dst"):
            tables = {group: list(table) for group, table in getattr(case.request, name).items()}
            taken = [(g, i) for g, table in tables.items() for i, block in enumerate(table) if block != declared.HOLE]
            pairs = [(a, b) for a in taken for b in taken if a[0] < b[0]]
            if not pairs or case.request.start == case.request.tokens:
                continue
            (one, i), (other, j) = pairs[seed % len(pairs)]
            block = tables[one][i]
            blocks = {g.id: g.blocks for g in (case.producers if name == "src" else case.consumers)[0].groups}
            if block >= blocks[other] or block in tables[other]:
                continue
            tables[other][j] = block
            request = replace(case.request, **{name: tables})
            for plan, consumer in zip(make_plans(case.consumers, case.producers), case.consumers, strict=True):
                sides = [m for m in case.producers if any(m.identity == s.identity for s in plan.sources)]
                meet = any(shared(m, one, other, block) for m in (sides if name == "src" else [consumer]))
                verdict = bound(plan, request)
                assert not (verdict and not meet), f"seed {seed}: {verdict}"
                assert verdict or not meet or name == "src", f"seed {seed}: {name} {one} {other}"
                refused, carried = refused + bool(verdict), carried + (not verdict)
    assert refused
    assert carried


def accepted(manifest: Manifest) -> bool:
    try:
        check_manifest(manifest)
    except ManifestError:
        return False
    return True


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_verdict_on_a_drawn_manifest_is_that_of_marking_every_byte(shard: int) -> None:
    verdicts = []
    for seed in range(shard, SMALL, SHARDS):
        manifest = drawn.small(seed)
        wrong = declared.contradiction(manifest)
        assert accepted(manifest) == (wrong is None), f"seed {seed}: {wrong}"
        verdicts.append(wrong is None)
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8
