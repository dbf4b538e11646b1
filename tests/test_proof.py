"""The proof refuses every plan that would move other bytes: real plans, taken apart in every way that matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.errors import KVFerryError, ProofError
from kvferry.manifest import FULL, Axis, Element, Manifest, Rank, TokenPaged, Window
from kvferry.plan import Edge, Fill, Grain, Lane, Plan, Run, make_plan, make_plans, prove
from kvferry.plan.prove import Proofs
from pairs import PAIRS, carried_out, manifests_of, plan_of, request_of

T = TypeVar("T")
Mutant = tuple[str, Plan]
Flow = Edge | Fill

names = pytest.mark.parametrize("name", PAIRS)


def put(items: tuple[T, ...], at: int, *new: T) -> tuple[T, ...]:
    return (*items[:at], *new, *items[at + 1 :])


def with_flow(plan: Plan, at: int, *new: Flow) -> Plan:
    """The plan with its flow `at` (edges first, then fills) replaced."""
    if at < len(plan.edges):
        return replace(plan, edges=put(plan.edges, at, *new))
    return replace(plan, fills=put(plan.fills, at - len(plan.edges), *new))


def with_runs(plan: Plan, at: int, level: int, runs: tuple[Run, ...]) -> Plan:
    flow = plan.flows[at]
    return with_flow(plan, at, replace(flow, grains=put(flow.grains, level, replace(flow.grains[level], runs=runs))))


def levels(plan: Plan) -> Iterator[tuple[int, int, Grain]]:
    for at, flow in enumerate(plan.flows):
        for level, grain in enumerate(flow.grains):
            yield at, level, grain


def bent_runs(run: Run) -> Iterator[tuple[str, Run]]:
    """A run that starts, ends, repeats or lies elsewhere."""
    for step in (1, -1, 2, -2, 8, 64):
        if run.src_offset + step >= 0:
            yield f"source {step:+}", replace(run, src_offset=run.src_offset + step)
        if run.dst_offset + step >= 0:
            yield f"destination {step:+}", replace(run, dst_offset=run.dst_offset + step)
        if min(run.src_offset, run.dst_offset) + step >= 0:
            yield f"both {step:+}", replace(run, src_offset=run.src_offset + step, dst_offset=run.dst_offset + step)
        if run.length + step >= 1:
            yield f"length {step:+}", replace(run, length=run.length + step)
    for i, (count, src, dst) in enumerate(run.repeats):
        for what, new in {
            "count +1": (count + 1, src, dst),
            "count -1": (count - 1, src, dst),
            "source stride +1": (count, src + 1, dst),
            "source stride doubled": (count, 2 * src, dst),
            "destination stride +1": (count, src, dst + 1),
            "strides swapped": (count, dst, src),
            "strides of 0": (count, 0, 0),
        }.items():
            yield f"repeat {i}: {what}", replace(run, repeats=put(run.repeats, i, new))
        yield f"repeat {i} dropped", replace(run, repeats=put(run.repeats, i))
    yield "a repeat more", replace(run, repeats=(*run.repeats, (2, run.length, run.length)))
    yield "source region", replace(run, src_region=run.src_region + 1)
    yield "destination region", replace(run, dst_region=run.dst_region + 1)
    yield "regions swapped", replace(run, src_region=run.dst_region, dst_region=run.src_region)
    yield "region 0", replace(run, src_region=0, dst_region=0)


def bent_grains(plan: Plan) -> Iterator[Mutant]:
    for at, level, grain in levels(plan):
        runs = grain.runs
        where = f"flow {at}, tiles of {grain.tokens}"
        for i, run in enumerate(runs):
            for what, new in bent_runs(run):
                yield f"{where}, run {i}: {what}", with_runs(plan, at, level, put(runs, i, new))
            for lane in range(len(plan.lanes) + 1):
                for field in ("src_lane", "dst_lane"):
                    if getattr(run, field) != lane:
                        new = replace(run, **{field: lane})
                        yield f"{where}, run {i}: {field} {lane}", with_runs(plan, at, level, put(runs, i, new))
            yield f"{where}, run {i}: dropped", with_runs(plan, at, level, put(runs, i))
            yield f"{where}, run {i}: twice", with_runs(plan, at, level, (*runs, run))
            for j in range(i):
                pair = (runs[j].src_region, runs[j].src_offset), (run.src_region, run.src_offset)
                swapped = [
                    replace(run, src_region=pair[0][0], src_offset=pair[0][1]),
                    replace(runs[j], src_region=pair[1][0], src_offset=pair[1][1]),
                ]
                bent = put(put(runs, i, swapped[0]), j, swapped[1])
                yield f"{where}, runs {i} and {j}: sources swapped", with_runs(plan, at, level, bent)


def bent_levels(plan: Plan) -> Iterator[Mutant]:
    """Grains with other tokens, levels dropped, doubled, emptied or put into another order."""
    for at, flow in enumerate(plan.flows):
        grains = flow.grains
        for level, grain in enumerate(grains):
            where = f"flow {at}, tiles of {grain.tokens}"
            for tokens in {0, 1, 2, grain.tokens * 2, grain.tokens // 2, grain.tokens + 1} - {grain.tokens}:
                new = replace(grain, tokens=tokens)
                yield f"{where}: {tokens} tokens", with_flow(plan, at, replace(flow, grains=put(grains, level, new)))
            if len(grains) > 1:
                yield f"{where}: level dropped", with_flow(plan, at, replace(flow, grains=put(grains, level)))
            yield f"{where}: level twice", with_flow(plan, at, replace(flow, grains=put(grains, level, grain, grain)))
            yield f"{where}: no runs", with_runs(plan, at, level, ())
            for other in (0, 1, 2, 4):
                empty = Grain(other, ())
                yield f"{where}: empty tiles of {other} before", with_flow(plan, at, replace(flow, grains=(empty, *grains)))
                yield f"{where}: empty tiles of {other} behind", with_flow(plan, at, replace(flow, grains=(*grains, empty)))
        if len(grains) > 1:
            yield f"flow {at}: levels reversed", with_flow(plan, at, replace(flow, grains=grains[::-1]))


def bent_lanes(plan: Plan) -> Iterator[Mutant]:
    for i, lane in enumerate(plan.lanes):
        bent = {
            "block stride +1": Lane(lane.block_stride + 1, lane.digits),
            "block stride 0": Lane(0, lane.digits),
            "a digit more": Lane(lane.block_stride, (*lane.digits, (2, 1))),
            "digits reversed": Lane(lane.block_stride, lane.digits[::-1]),
        }
        for j, (count, stride) in enumerate(lane.digits):
            bent[f"digit {j}: count +1"] = Lane(lane.block_stride, put(lane.digits, j, (count + 1, stride)))
            bent[f"digit {j}: stride +1"] = Lane(lane.block_stride, put(lane.digits, j, (count, stride + 1)))
            bent[f"digit {j}: stride 0"] = Lane(lane.block_stride, put(lane.digits, j, (count, 0)))
            bent[f"digit {j} dropped"] = Lane(lane.block_stride, put(lane.digits, j))
            if count % 2 == 0 and count > 2:
                halves = (2, stride), (count // 2, 2 * stride)
                bent[f"digit {j}: odd tokens behind even ones"] = Lane(lane.block_stride, put(lane.digits, j, *halves))
        for what, new in bent.items():
            if new != lane:
                yield f"lane {i}: {what}", replace(plan, lanes=put(plan.lanes, i, new))


def bent_flows(plan: Plan) -> Iterator[Mutant]:
    """Edges and fills that point elsewhere, are missing, or are there twice."""
    for at, flow in enumerate(plan.flows):
        yield f"flow {at}: dropped", with_flow(plan, at)
        yield f"flow {at}: twice", with_flow(plan, at, flow, flow)
        fields = ("source", "src_group", "dst_group", "need") if isinstance(flow, Edge) else ("group", "need")
        for field in fields:
            others: set[int | None] = {0, 1, 2, 3, 99} - {getattr(flow, field)}
            if isinstance(flow, Fill) and field == "need" and flow.need is not None:
                others.add(None)
            for other in others:
                yield f"flow {at}: {field} {other}", with_flow(plan, at, replace(flow, **{field: other}))


def bent_needs(plan: Plan) -> Iterator[Mutant]:
    for i, need in enumerate(plan.needs):
        bent = {
            "window": replace(need, reach=Window(7)),
            "full": replace(need, reach=FULL),
            "per entry": replace(need, per_entry=need.per_entry + 1),
            "state": replace(need, per_entry=0),
            "partial": replace(need, partial=not need.partial),
            "source group": replace(need, src_group=need.src_group + 1),
            "no layers": replace(need, layers=()),
            "a layer less": replace(need, layers=need.layers[1:]),
            "a layer twice": replace(need, layers=(*need.layers, need.layers[0])),
            "a layer more": replace(need, layers=(*need.layers, "nobody")),
            "another layer": replace(need, layers=("nobody", *need.layers[1:])),
        }
        for what, new in bent.items():
            if new != need:
                yield f"need {i}: {what}", replace(plan, needs=put(plan.needs, i, new))
        yield f"need {i}: dropped", replace(plan, needs=put(plan.needs, i))
        doubled = replace(plan, needs=(*plan.needs, need))
        yield f"need {i}: there twice", doubled
        for at, flow in enumerate(plan.flows):
            if flow.need == i:
                bent_flow = replace(flow, need=len(plan.needs))
                yield f"need {i}: there twice, flow {at} apart", with_flow(doubled, at, bent_flow)


def bent_sides(plan: Plan) -> Iterator[Mutant]:
    sides = [("consumer", plan.consumer), *((f"source {i}", s) for i, s in enumerate(plan.sources))]
    for i, (what, side) in enumerate(sides):
        for change, new in {
            "incarnation": replace(side, identity=replace(side.identity, incarnation="2")),
            "rank": replace(side, identity=replace(side.identity, rank=Rank(0, 64))),
            "region": replace(side, regions=put(side.regions, 0, replace(side.regions[0], length=1 << 30))),
            "address": replace(side, regions=put(side.regions, 0, replace(side.regions[0], address=7))),
            "blocks": replace(side, groups=put(side.groups, 0, replace(side.groups[0], blocks=1000))),
            "hashed": replace(side, groups=put(side.groups, 0, replace(side.groups[0], hashed=False))),
            "paging": replace(side, groups=put(side.groups, 0, replace(side.groups[0], paging=TokenPaged(64)))),
            "no groups": replace(side, groups=()),
        }.items():
            changed = {"consumer": new} if i == 0 else {"sources": put(plan.sources, i - 1, new)}
            yield f"{what}: other {change}", replace(plan, **changed)
    if len(plan.sources) > 1:
        yield "sources reversed", replace(plan, sources=plan.sources[::-1])
    yield "a source twice", replace(plan, sources=(*plan.sources, plan.sources[0]))
    yield "no sources", replace(plan, sources=())
    read = plan.sources[0].identity.rank
    yield "a rank that is read is told that nobody reads it", replace(plan, tells=(read,))
    yield "a rank that does not exist is told", replace(plan, tells=(Rank(9, 10),))


def refusal(plan: Plan, name: str) -> str:
    """Why the proof refuses a plan; empty if it does not."""
    try:
        prove(plan, *manifests_of(name))
    except ProofError as error:
        return str(error)
    return ""


def moves_the_same_bytes(plan: Plan, name: str) -> bool:
    """Carry out a plan and the real one for a few requests, and compare every byte of the consumer's memory."""
    consumer, producers = manifests_of(name)
    for tokens in (1, 7, 8, 23, 40):
        request = request_of(consumer, producers, tokens, tokens)
        wanted = carried_out(plan_of(name), request, consumer, producers)
        try:
            got = carried_out(plan, request, consumer, producers)
        except (KVFerryError, ArithmeticError, LookupError, ValueError):
            return False
        if not all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True)):
            return False
    return True


def survivors(name: str, mutants: Iterator[Mutant]) -> tuple[int, list[str]]:
    """How many mutants there are, and those that are proved although they move other bytes."""
    count, alive = 0, []
    for what, mutant in mutants:
        if mutant == plan_of(name):
            continue
        count += 1
        if not refusal(mutant, name) and not moves_the_same_bytes(mutant, name):
            alive.append(what)
    return count, alive


@names
def test_a_real_plan_is_proved(name):
    assert refusal(plan_of(name), name) == ""
    assert moves_the_same_bytes(plan_of(name), name)


@names
def test_no_plan_with_a_bent_run_is_proved(name):
    count, alive = survivors(name, bent_grains(plan_of(name)))
    assert alive == []
    assert count > 100


@names
def test_no_plan_with_bent_grains_is_proved(name):
    count, alive = survivors(name, bent_levels(plan_of(name)))
    assert alive == []
    assert count > 10


@names
def test_no_plan_with_a_bent_lane_is_proved(name):
    count, alive = survivors(name, bent_lanes(plan_of(name)))
    assert alive == []
    assert count >= 4


@names
def test_no_plan_with_a_flow_that_points_elsewhere_is_proved(name):
    count, alive = survivors(name, bent_flows(plan_of(name)))
    assert alive == []
    assert count > 10


@names
def test_no_plan_with_other_needs_is_proved(name):
    proved = [what for what, mutant in bent_needs(plan_of(name)) if not refusal(mutant, name)]
    assert proved == []


@names
def test_no_plan_for_other_ranks_is_proved(name):
    proved = [what for what, mutant in bent_sides(plan_of(name)) if not refusal(mutant, name)]
    assert proved == []


@names
def test_a_refusal_of_a_bent_run_names_layer_and_part(name):
    consumer, _ = manifests_of(name)
    known = {f"{layer.name} {part.name}" for layer in consumer.layers for part in layer.parts}
    for at, level, grain in levels(plan_of(name)):
        for i, run in enumerate(grain.runs):
            for what, bent in (
                ("source", replace(run, src_offset=run.src_offset + 1)),
                ("destination", replace(run, dst_offset=run.dst_offset + 1)),
                ("length", replace(run, length=run.length + 1)),
                ("lane", replace(run, dst_lane=(run.dst_lane + 1) % len(plan_of(name).lanes))),
            ):
                message = refusal(with_runs(plan_of(name), at, level, put(grain.runs, i, bent)), name)
                assert any(message.removeprefix("behind ").startswith(f"{k} ") for k in known), (what, message)


def test_a_refusal_names_axis_and_interval():
    plan, name = plan_of("blocks of 12 to 8"), "blocks of 12 to 8"
    runs = plan.edges[0].grains[-1].runs
    message = refusal(with_runs(plan, 0, 0, put(runs, 0, replace(runs[0], src_offset=runs[0].src_offset + 2))), name)
    assert message.startswith("a k head [0, 1), dim [0, 1), token [0, 1): would be read from bytes of p tp0/1 pp0/1")


@settings(max_examples=400)
@given(st.data())
def test_plans_bent_in_several_places_are_not_proved(data):
    name = data.draw(st.sampled_from(list(PAIRS)))
    plan = plan_of(name)
    for _ in range(data.draw(st.integers(2, 4))):
        at, level, grain = data.draw(st.sampled_from(list(levels(plan))))
        if grain.runs:
            i = data.draw(st.integers(0, len(grain.runs) - 1))
            _, bent = data.draw(st.sampled_from(list(bent_runs(grain.runs[i]))))
            plan = with_runs(plan, at, level, put(grain.runs, i, bent))
    assert refusal(plan, name) or moves_the_same_bytes(plan, name)


def split(run: Run) -> tuple[Run, Run]:
    """The same run in two halves."""
    half = run.length // 2
    rest = replace(run, src_offset=run.src_offset + half, dst_offset=run.dst_offset + half, length=run.length - half)
    return replace(run, length=half), rest


@names
def test_a_run_in_two_halves_is_proved_and_moves_the_same_bytes(name):
    plan = plan_of(name)
    for at, level, grain in levels(plan):
        for i, run in enumerate(grain.runs):
            if run.length > 1:
                mutant = with_runs(plan, at, level, put(grain.runs, i, *split(run)))
                assert refusal(mutant, name) == ""
                assert moves_the_same_bytes(mutant, name)


@names
def test_half_of_a_run_in_another_lane_is_not_proved(name):
    plan = plan_of(name)
    for at, level, grain in levels(plan):
        for i, run in enumerate(grain.runs):
            if run.length > 1:
                first, second = split(run)
                for lane in set(range(len(plan.lanes))) - {run.dst_lane}:
                    bent = put(grain.runs, i, first, replace(second, dst_lane=lane))
                    assert refusal(with_runs(plan, at, level, bent), name)


@names
def test_tiles_of_a_coarse_run_in_another_lane_are_not_proved(name):
    plan = plan_of(name)
    for at, level, grain in levels(plan):
        for i, run in enumerate(grain.runs):
            for j, (count, src, dst) in enumerate(run.repeats):
                rest = put(run.repeats, j, (count - 1, src, dst))
                tail = replace(run, src_offset=run.src_offset + src, dst_offset=run.dst_offset + dst, repeats=rest)
                for lane in set(range(len(plan.lanes))) - {run.dst_lane}:
                    bent = put(grain.runs, i, replace(run, repeats=put(run.repeats, j)), replace(tail, dst_lane=lane))
                    assert refusal(with_runs(plan, at, level, bent), name)


@names
def test_runs_hidden_behind_a_lane_that_is_there_twice_are_seen(name):
    plan = plan_of(name)
    for at, level, grain in levels(plan):
        run = grain.runs[0]
        twice = replace(plan, lanes=(*plan.lanes, plan.lanes[run.dst_lane]))
        wrong = replace(run, dst_offset=run.dst_offset + 1, src_offset=run.src_offset + 1, dst_lane=len(plan.lanes))
        for runs in ((wrong, *grain.runs), (*grain.runs, wrong)):
            assert refusal(with_runs(twice, at, level, runs), name)


def test_a_run_that_reaches_the_next_region_is_not_proved():
    name = "hybrid, two ranks to three"
    plan = plan_of(name)
    regions = plan.sources[0].regions
    found = 0
    for at, level, grain in levels(plan):
        for i, run in enumerate(grain.runs):
            if isinstance(plan.flows[at], Edge) and run.src_region:
                before = plan.sources[plan.flows[at].source].regions[run.src_region - 1].length
                for gap in (0, 1):
                    bent = replace(run, src_region=run.src_region - 1, src_offset=run.src_offset + before + gap)
                    message = refusal(with_runs(plan, at, level, put(grain.runs, i, bent)), name)
                    assert "of region" in message
                    found += 1
    assert found
    assert len(regions) > 1


def test_a_head_copied_from_another_head_of_the_same_size_is_not_proved():
    name = "blocks of 12 to 8"
    plan = plan_of(name)
    grain = plan.edges[0].grains[-1]
    run = next(r for r in grain.runs if r.repeats)
    count, src, dst = run.repeats[0]
    one = replace(run, repeats=run.repeats[1:], src_offset=run.src_offset + src)
    other = replace(run, repeats=run.repeats[1:], dst_offset=run.dst_offset + dst)
    rest = replace(
        run,
        repeats=((count - 2, src, dst), *run.repeats[1:]),
        src_offset=run.src_offset + 2 * src,
        dst_offset=run.dst_offset + 2 * dst,
    )
    crossed = tuple(x for r in grain.runs for x in ((one, other, rest) if r == run else (r,)))
    assert "mean something else" in refusal(with_runs(plan, 0, 0, crossed), name)


def test_a_fill_over_bytes_that_are_copied_is_not_proved():
    name = "spec taps on one side"
    plan = plan_of(name)
    always = next(f for f in plan.fills if f.need is None)
    run = always.grains[0].runs[0]
    wide = replace(run, src_offset=run.src_offset - 2, dst_offset=run.dst_offset - 2, length=run.length + 2)
    at = len(plan.edges) + plan.fills.index(always)
    assert "would be zeroed in every block" in refusal(with_runs(plan, at, 0, put(always.grains[0].runs, 0, wide)), name)


@pytest.mark.parametrize("count", [1 << 22, 1 << 40])
def test_repeats_that_would_expand_without_end_are_refused_before_they_are(count):
    name = "blocks of 12 to 8"
    plan = plan_of(name)
    runs = plan.edges[0].grains[-1].runs
    for repeats in (((count, 0, 0),), ((count, 1 << 50, 1 << 50),), ((count, 1, 1),) * 32):
        assert refusal(with_runs(plan, 0, 0, put(runs, 0, replace(runs[0], repeats=repeats))), name)


def changed(manifest: Manifest, **changes: object) -> Manifest:
    return replace(manifest, shapes=tuple(replace(s, **changes) for s in manifest.shapes))


def renamed(axis: Axis) -> Axis:
    return replace(axis, name=f"other {axis.name}")


@names
def test_a_plan_is_not_proved_against_manifests_of_another_meaning(name):
    consumer, producers = manifests_of(name)
    plan = plan_of(name)
    for bent in (
        [changed(p, element=Element("int8", 1)) for p in producers],
        [replace(p, shapes=tuple(replace(s, axes=tuple(map(renamed, s.axes))) for s in p.shapes)) for p in producers],
        [replace(p, layers=tuple(replace(layer, reach=Window(3)) for layer in p.layers)) for p in producers],
        [replace(p, layers=p.layers[1:]) for p in producers],
        [replace(p, groups=tuple(replace(g, blocks=3) for g in p.groups)) for p in producers],
    ):
        if bent != list(producers):
            with pytest.raises(ProofError):
                prove(plan, consumer, bent)
    with pytest.raises(ProofError):
        prove(plan, consumer, [])


def test_planning_proves_what_it_makes_unless_told_not_to(monkeypatch):
    calls: list[Plan] = []

    def refuse(proofs: Proofs, plan: Plan, consumer: Manifest) -> None:
        calls.append(plan)
        raise ProofError("refused")

    monkeypatch.setattr(Proofs, "prove", refuse)
    consumer, producers = manifests_of("block-major to block-major")
    with pytest.raises(ProofError, match="refused"):
        make_plan(consumer, producers)
    with pytest.raises(ProofError, match="refused"):
        make_plans([consumer], producers)
    assert len(calls) == 2
    assert make_plan(consumer, producers, proof=False) == calls[0] == make_plans([consumer], producers, proof=False)[0]
    assert len(calls) == 2


@names
def test_every_plan_of_a_pair_is_proved_again_with_the_ranks_it_tells(name):
    pair = PAIRS[name]
    producers, consumers = pair.producers, pair.consumers
    for plan, consumer in zip(make_plans(consumers, producers), consumers, strict=True):
        prove(plan, consumer, producers)


@names
def test_an_engine_without_a_reader_is_told_of_the_end_by_exactly_one_rank(name):
    pair = PAIRS[name]
    producers, consumers = pair.producers, pair.consumers
    more = [replace(p, identity=replace(p.identity, rank=Rank(i, 40 * pair.producer.tp))) for i, p in enumerate(producers * 40)]
    plans = make_plans(consumers, more, proof=False)
    told = [plan for plan in plans if plan.tells]
    assert told
    Proofs(more).prove_all(plans, consumers)
    for at, plan in enumerate(plans):
        for tells in (plan.tells[1:], ()) if plan.tells else ():
            with pytest.raises(ProofError, match="of the end"):
                Proofs(more).prove_all(put(plans, at, replace(plan, tells=tells)), consumers)
        if plan is not told[0]:
            with pytest.raises(ProofError, match="of the end by 2 ranks"):
                Proofs(more).prove_all(put(plans, at, replace(plan, tells=(*plan.tells, told[0].tells[0]))), consumers)


def test_a_consumer_of_one_rank_tells_every_rank_that_it_does_not_read():
    pair = PAIRS["block-major to block-major"]
    producers = [replace(p, identity=replace(p.identity, rank=Rank(i, 30))) for i, p in enumerate(pair.producers * 30)]
    (consumer,) = pair.consumers
    plan = make_plan(consumer, producers)
    prove(plan, consumer, producers)
    assert len(plan.tells) + len(plan.sources) == 30
    assert plan.tells
    with pytest.raises(ProofError, match=r"neither reads producer rank tp\d+/30 pp0/1 nor tells it of the end"):
        prove(replace(plan, tells=plan.tells[1:]), consumer, producers)


@names
def test_what_was_proved_of_one_plan_proves_no_other(name):
    consumer, producers = manifests_of(name)
    plan, proofs = plan_of(name), Proofs(producers)
    proofs.prove(plan, consumer)
    proofs.prove(plan, consumer)
    at, edge = next((i, e) for i, e in enumerate(plan.edges))
    run = edge.grains[-1].runs[0]
    grain = replace(edge.grains[-1], runs=put(edge.grains[-1].runs, 0, replace(run, src_offset=run.src_offset + 1)))
    bent = replace(plan, edges=put(plan.edges, at, replace(edge, grains=(*edge.grains[:-1], grain))))
    for _ in range(2):
        with pytest.raises(ProofError):
            proofs.prove(bent, consumer)
    with pytest.raises(ProofError):
        proofs.prove(plan, replace(consumer, layers=consumer.layers[1:]))


@names
def test_required_state_is_never_zeroed_instead_of_copied(name):
    plan, (consumer, producers) = plan_of(name), manifests_of(name)
    zeroed = replace(plan, sources=(), edges=(), needs=(), tells=(), fills=tuple(replace(f, need=None) for f in plan.fills))
    with pytest.raises(ProofError):
        prove(zeroed, consumer, producers)
    for at, edge in enumerate(plan.edges):
        grains = tuple(
            replace(
                g,
                runs=tuple(
                    replace(
                        r, src_region=r.dst_region, src_offset=r.dst_offset, src_lane=r.dst_lane,
                        repeats=tuple((c, d, d) for c, _, d in r.repeats),
                    )
                    for r in g.runs
                ),
            )
            for g in edge.grains
        )  # fmt: skip
        others = tuple(f for f in plan.fills if f.need != edge.need)
        filled = replace(plan, edges=put(plan.edges, at), fills=(*others, Fill(edge.dst_group, None, grains)))
        with pytest.raises(ProofError):
            prove(filled, consumer, producers)


def test_the_refusal_to_zero_what_a_producer_holds_names_layer_and_part():
    name = next(n for n in PAIRS if plan_of(n).fills and any(f.need is not None for f in plan_of(n).fills))
    plan, (consumer, producers) = plan_of(name), manifests_of(name)
    zeroed = replace(plan, sources=(), edges=(), needs=(), tells=(), fills=tuple(replace(f, need=None) for f in plan.fills))
    with pytest.raises(
        ProofError, match=r"\w+ \S+ .*\[\d+, \d+\).*would be zeroed in every block, but a producer rank holds it"
    ):
        prove(zeroed, consumer, producers)
