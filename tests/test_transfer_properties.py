"""Random models on random pairs of engines: every byte of the consumer's memory is as the oracle says."""

from __future__ import annotations

from math import gcd, lcm

from hypothesis import event, given, note, settings
from hypothesis import strategies as st

import oracle
from ferrying import ferry, manifests_of
from kvferry.manifest import check_manifest, compare

Draw = st.DrawFn
DEPTH = settings().max_examples // 100

small = st.integers(1, 4)
items = st.sampled_from([1, 2, 2, 4])
local = st.one_of(st.integers(1, 20).map(oracle.window), st.integers(1, 16).map(oracle.chunk))
reaches = st.one_of(st.just(oracle.FULL), local)


@st.composite
def token_kinds(
    draw: Draw, tps: tuple[int, int], blocks: tuple[int, int], reaches: st.SearchStrategy[oracle.Reach]
) -> oracle.Kind:
    shared = [h for h in range(1, 13) if all(h % tp == 0 or tp % h == 0 for tp in tps)]
    ratios = [r for r in range(2, 13) if gcd(*blocks) % r == 0]
    names = [
        "attention",
        "attention",
        "latent",
        *(["compressed"] if ratios else []),
        *(["opaque"] if len({*blocks}) == 1 else []),
    ]
    reach = draw(reaches)
    match draw(st.sampled_from(names)):
        case "attention":
            heads = draw(st.sampled_from(shared))
            return oracle.Attention(heads, draw(small), draw(small), draw(items), reach)
        case "latent":
            return oracle.Latent(draw(small), draw(small), draw(st.integers(0, 3)), draw(items), draw(items), reach)
        case "compressed":
            planes = tuple((f"scale{i}", width) for i, width in enumerate(draw(st.lists(small, max_size=2))))
            align = draw(st.sampled_from([1, 1, 12]))
            width, ratio, partial = draw(small), draw(st.sampled_from(ratios)), draw(st.booleans())
            return oracle.Compressed("entry", width, ratio, draw(items), reach, planes, align, partial)
    return oracle.OpaqueCells("private", draw(small), draw(st.sampled_from([0, *shared])), reach)


@st.composite
def state_kinds(draw: Draw, tps: tuple[int, int]) -> oracle.Kind:
    units = st.sampled_from([u for u in range(1, 13) if u % lcm(*tps) == 0])
    common = {"kernel": draw(st.integers(2, 4)), "item": draw(items), "ssm_item": draw(items)}
    match draw(st.sampled_from(["mamba1", "mamba2", "mamba2", "delta", "short", "linear", "opaque"])):
        case "mamba1":
            return oracle.Mamba1(inner=draw(units), state=draw(small), **common)
        case "mamba2":
            groups = draw(st.one_of(st.just(1), units))
            return oracle.Mamba2(heads=draw(units), dim=draw(small), state=draw(small), groups=groups, **common)
        case "delta":
            sizes = {"k_heads": draw(units), "v_heads": draw(units), "k_dim": draw(small), "v_dim": draw(small)}
            return oracle.GatedDelta(**sizes, **common)
        case "short":
            return oracle.ShortConv(inner=draw(units), **common)
        case "linear":
            return oracle.LinearAttention(heads=draw(units), k_dim=draw(small), v_dim=draw(small), **common)
    return oracle.OpaqueState(size=draw(st.integers(1, 20)))


@st.composite
def models(draw: Draw, tps: tuple[int, int], blocks: tuple[int, int]) -> tuple[oracle.Layer, ...]:
    kinds = st.one_of(token_kinds(tps, blocks, draw(st.sampled_from([reaches, local]))), state_kinds(tps))
    distinct = draw(st.lists(kinds, min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(distinct) - 1), min_size=1, max_size=7))
    sides = st.sampled_from(["PD", "PD", "PD", "PD", "PD", "PD", "D", "P"])
    return tuple(oracle.Layer(f"layers.{i}", distinct[which], draw(sides)) for i, which in enumerate(order))


def keepable(draw: Draw, kinds: list[oracle.Kind]) -> oracle.Reach:
    """Something that a group's table may retain: all that its layers look back to, or more."""
    reaches = {k.looks_back for k in kinds}
    names = {r.kind for r in reaches}
    if names == {"window"}:
        widest = max(r.tokens for r in reaches)
        return draw(st.sampled_from([oracle.FULL, oracle.window(widest), oracle.window(widest + 3)]))
    if len(reaches) == 1 and names == {"chunk"}:
        return draw(st.sampled_from([oracle.FULL, *reaches]))
    return oracle.FULL


@st.composite
def groupings(draw: Draw, layers: tuple[oracle.Layer, ...], block: int) -> tuple[oracle.Group, ...]:
    """Layers dealt to groups of one paging each, in any order, with ids that say nothing."""
    dealt: dict[tuple[str, int], list[oracle.Layer]] = {}
    for layer in draw(st.permutations(layers)):
        dealt.setdefault((layer.kind.paged_by, draw(st.integers(0, 2))), []).append(layer)
    ids = draw(st.permutations(range(len(dealt) + 2)))
    groups = []
    for (paged_by, _), members in dealt.items():
        names = tuple(x.name for x in members)
        if paged_by == "state":
            groups.append(oracle.Group(ids[len(groups)], names))
        else:
            keeps = keepable(draw, [x.kind for x in members])
            uncut = all(x.kind.tokens_per_entry(oracle.Memory(1)) == 1 and not x.kind.moves_partial_entries for x in members)
            kernel = draw(st.sampled_from([0, 0, 1, 5, 8])) if uncut else 0
            tokens = (kernel or block) * draw(st.sampled_from([1, 1, 2, 3]))
            groups.append(oracle.Group(ids[len(groups)], names, tokens, keeps, draw(st.booleans()), kernel))
    return tuple(groups)


@st.composite
def stages(draw: Draw, layers: tuple[oracle.Layer, ...]) -> tuple[tuple[str, ...], ...]:
    count = draw(st.sampled_from([1, 1, 2, 3]))
    cuts = sorted(draw(st.lists(st.integers(0, len(layers)), min_size=count - 1, max_size=count - 1)))
    names = [x.name for x in layers]
    return tuple(tuple(names[a:b]) for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True))


@st.composite
def memories(draw: Draw, block: int) -> oracle.Memory:
    return oracle.Memory(
        block,
        draw(st.sampled_from(["packed", "paged", "separate", "transposed"])),
        draw(st.sampled_from(["head", "token"])),
        draw(st.sampled_from(["ds", "sd"])),
        draw(st.sampled_from([0, 0, 1, 3])),
        draw(st.sampled_from(["layer", "block"])),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 8, 64])),
        draw(st.sampled_from(["vk", "kv"])),
    )


@st.composite
def tables(
    draw: Draw, case_layers: tuple[oracle.Layer, ...], side: oracle.Side, tokens: int, start: int, which: str
) -> dict[int, list[int]]:
    """Distinct ids (over all groups where they overlay each other), holes where no layer that is moved looks."""
    by_name = {x.name: x for x in case_layers}
    free = draw(st.permutations(range(side.blocks)))
    out = {}
    at = 0
    for group in side.groups:
        if not side.memory.overlay:
            at = 0
        count = 1
        if group.tokens:
            count = -(-tokens // group.tokens) + draw(st.integers(0, 1))
        ids = list(free[at : at + count])
        at += count
        if group.tokens:
            moved = [by_name[n].kind.looks_back.first(tokens) for n in group.layers if by_name[n].sides == "PD"]
            lowest = min(moved, default=tokens)
            if which == "P":
                lowest = max(lowest, start)
            spare = list(range(min(count, lowest // group.tokens)))
            gone = draw(st.sampled_from(["none", "some", "all"]))
            if gone == "some" and spare:
                spare = draw(st.lists(st.sampled_from(spare), unique=True))
            for position in spare if gone != "none" else ():
                ids[position] = oracle.HOLE
        out[group.id] = ids
    return out


@st.composite
def sides(draw: Draw, layers: tuple[oracle.Layer, ...], tp: int, block: int, tokens: int) -> oracle.Side:
    groups = draw(groupings(layers, block))
    memory = draw(memories(block))
    needed = [-(-tokens // g.tokens) + 1 if g.tokens else 1 for g in groups]
    blocks = (sum(needed) if memory.overlay else max(needed, default=1)) + draw(st.integers(0, 3))
    return oracle.Side(tp, draw(stages(layers)), groups, memory, max(1, blocks))


@st.composite
def cases(draw: Draw) -> oracle.Case:
    tps = (draw(st.sampled_from([1, 1, 2, 3, 4, 6])), draw(st.sampled_from([1, 1, 2, 3, 4, 6])))
    block = draw(st.integers(1, 12))
    blocks = (block, draw(st.one_of(st.just(block), st.integers(1, 12))))
    layers = draw(models(tps, blocks))
    tokens = draw(st.integers(1, 48 if min(blocks) > 2 else 20))
    producer = draw(sides(tuple(x for x in layers if "P" in x.sides), tps[0], blocks[0], tokens))
    consumer = draw(sides(tuple(x for x in layers if "D" in x.sides), tps[1], blocks[1], tokens))
    step = lcm(*(g.tokens for g in consumer.groups if g.tokens))
    start = step * draw(st.integers(0, (tokens - 1) // step)) if draw(st.booleans()) else 0
    if draw(st.integers(0, 19)) == 19:
        start = tokens
    return oracle.Case(
        layers,
        producer,
        consumer,
        tokens,
        draw(tables(layers, producer, tokens, start, "P")),
        draw(tables(layers, consumer, tokens, start, "D")),
        start,
        tokens + draw(st.integers(0, 2)),
        draw(st.integers(0, 1000)),
    )


@settings(max_examples=800 * DEPTH)
@given(cases())
def test_every_byte_is_as_an_independent_oracle_says(case: oracle.Case) -> None:
    note(repr(case))
    out = ferry(case)
    event("bytes moved" if out.moved else "nothing to move")
    event(f"holes in a source: {any(oracle.HOLE in t for t in case.src.values())}")
    event(f"blocks kept from the hash: {any(b.unhashable for b in out.bindings)}")


@settings(max_examples=200 * DEPTH)
@given(cases())
def test_what_the_builders_make_passes_the_checks(case: oracle.Case) -> None:
    producers, consumers = manifests_of(case)
    for manifest in (*producers, *consumers):
        check_manifest(manifest)
    for consumer in consumers:
        assert compare(consumer, producers) == ()
