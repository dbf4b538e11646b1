"""Who reads what from which of several replicas: no rank of a producer is read much more than the others."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from kvferry.errors import ScatteredError
from kvferry.manifest import Axis, Element, Group, Identity, Layer, Manifest, Part, Rank, Region, Shape, StatePaged
from kvferry.models import Side, load_model, manifests
from kvferry.plan import Fleet, make_plan, make_plans
from kvferry.plan.choose import MOST_SOURCES
from kvferry.plan.explain import costs


@pytest.mark.parametrize("readers", [1, 4, 8])
def test_latents_that_every_rank_holds_are_read_from_all_of_them_alike(readers):
    shape = load_model("deepseek-v3")
    producers = manifests(shape, Side.parse("tp=8"), "P")
    read = Counter(dict.fromkeys(range(8), 0.0))
    for number in range(readers):
        consumers = manifests(shape, Side.parse("tp=1"), f"D{number}")
        (plan,) = make_plans(consumers, producers)
        for cost in costs(plan):
            read[cost.source.tp] += cost.bytes_per_token
    assert max(read.values()) <= 1.25 * sum(read.values()) / len(read)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "most"),
    [
        ("deepseek-v4-flash", "tp=64,pp=4", "tp=1", MOST_SOURCES),
        ("deepseek-v4-flash", "tp=64,pp=4", "tp=2,pp=2", MOST_SOURCES),
        ("deepseek-v3", "tp=64,pp=4", "tp=4", MOST_SOURCES),
        ("deepseek-v3", "tp=2,pp=61", "tp=1", 61),
        ("kimi-linear-48b-a3b", "tp=32", "tp=1", 32),
    ],
)
def test_a_rank_reads_few_of_many_replicas_and_all_ranks_that_alone_hold_something(model, prefill, decode, most):
    """Each source is a connection and a read of every request: a rank read 127 of 256 that hold the same four stages."""
    shape = load_model(model)
    producers = manifests(shape, Side.parse(prefill), "P")
    for plan in make_plans(manifests(shape, Side.parse(decode), "D"), producers):
        assert len(plan.sources) <= most


def test_few_replicas_of_many_are_others_for_every_reader_so_that_all_are_read_alike():
    shape = load_model("deepseek-v4-flash")
    fleet = Fleet(manifests(shape, Side.parse("tp=64"), "P"))
    read = Counter(dict.fromkeys(range(64), 0.0))
    sources = []
    for number in range(64):
        (plan,) = make_plans(manifests(shape, Side.parse("tp=1"), f"D{number}"), fleet, proof=False)
        sources.append(tuple(side.identity.rank.tp for side in plan.sources))
        mine = Counter(dict.fromkeys(sources[-1], 0.0))
        for cost in costs(plan):
            read[cost.source.tp] += cost.bytes_per_token
            mine[cost.source.tp] += cost.bytes_per_token
        assert max(mine.values()) <= 3 * sum(mine.values()) / len(mine)
    assert {len(found) for found in sources} == {MOST_SOURCES}
    assert len(set(sources)) > 2
    assert max(read.values()) <= 2 * sum(read.values()) / len(read)
    (again,) = make_plans(manifests(shape, Side.parse("tp=1"), "D0"), fleet, proof=False)
    assert tuple(side.identity.rank.tp for side in again.sources) == sources[0]


def boxes_of(ranks: int, axes: int) -> list[Manifest]:
    """Ranks that hold boxes of all sizes of a state of several axes, no two of which end at the same place."""
    out = []
    for i in range(ranks):
        owned = tuple(
            Axis(f"a{n}", 64, i + 1, 64 - i, ((63 - 2 * i, prod((63 - 2 * i) for _ in range(n))),)) for n in range(axes)
        )
        length = (63 - 2 * i) ** axes
        out.append(
            Manifest(
                Identity("p", "1", "m", Rank(i, ranks)),
                (Region("r", length),),
                (Group(0, StatePaged(), 1),),
                (Shape(Element("uint8", 1), owned),),
                (Layer("L", 0, (Part("s", 0, 0, 0, length),)),),
            )
        )
    return out


@pytest.mark.parametrize(("ranks", "axes"), [(30, 4), (20, 8), (8, 8)])
def test_boxes_that_share_nothing_out_are_refused_before_they_are_cut(ranks, axes):
    """Every axis is cut at every border: 41 places on each of 8 axes are 8 * 10^12 boxes."""
    axis = tuple(Axis(f"a{n}", 64, 0, 64, ((64, 64**n),)) for n in range(axes))
    consumer = Manifest(
        Identity("d", "1", "m"), (Region("r", 64**axes),), (Group(0, StatePaged(), 1),),
        (Shape(Element("uint8", 1), axis),), (Layer("L", 0, (Part("s", 0, 0, 0, 64**axes),)),),
    )  # fmt: skip
    with pytest.raises(ScatteredError, match=r"L s: what \d+ ranks of the producer hold of it cuts it into [\d,]+ boxes"):
        make_plan(consumer, boxes_of(ranks, axes))
