"""Who reads what from which of several replicas: no rank of a producer is read much more than the others."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.errors import MismatchError, ScatteredError
from kvferry.manifest import Axis, Element, Group, Identity, Layer, Manifest, Part, Rank, Region, Shape, StatePaged
from kvferry.models import Side, load_model, manifests
from kvferry.plan import Fleet, make_plan, make_plans
from kvferry.plan.choose import MAX_LOOKS, MOST_SOURCES
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


def boxes_of(ranks: int, axes: int, layers: int = 1) -> list[Manifest]:
    """Ranks that hold boxes of all sizes of states of several axes, no two of which end at the same place."""
    out = []
    for i in range(ranks):
        sides = [63 - 2 * i - number for number in range(layers)]
        lengths = [side**axes for side in sides]
        shapes = (tuple(Axis(f"a{n}", 64, i + 1, i + 1 + side, ((side, side**n),)) for n in range(axes)) for side in sides)
        out.append(
            Manifest(
                Identity("p", "1", "m", Rank(i, ranks)),
                tuple(Region(f"r{number}", length) for number, length in enumerate(lengths)),
                (Group(0, StatePaged(), 1),),
                tuple(Shape(Element("uint8", 1), owned) for owned in shapes),
                tuple(Layer(f"L{n}", 0, (Part("s", n, n, 0, length),)) for n, length in enumerate(lengths)),
            )
        )
    return out


def whole(axes: int, layers: int = 1) -> Manifest:
    """A rank that holds all of each."""
    axis = tuple(Axis(f"a{n}", 64, 0, 64, ((64, 64**n),)) for n in range(axes))
    return Manifest(
        Identity("d", "1", "m"), tuple(Region(f"r{n}", 64**axes) for n in range(layers)), (Group(0, StatePaged(), 1),),
        (Shape(Element("uint8", 1), axis),),
        tuple(Layer(f"L{n}", 0, (Part("s", 0, n, 0, 64**axes),)) for n in range(layers)),
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "axes"), [(30, 4), (20, 8), (8, 8)])
def test_boxes_that_share_nothing_out_are_refused_before_they_are_cut(ranks, axes):
    """Every axis is cut at every border: 41 places on each of 8 axes are 8 * 10^12 boxes."""
    with pytest.raises(ScatteredError, match=r"L0 s: what \d+ ranks of the producer hold of it cuts it into [\d,]+ boxes"):
        make_plan(whole(axes), boxes_of(ranks, axes))


def test_boxes_of_all_layers_together_are_bounded():
    """Each by itself is cut in a second; a manifest of 50 KB with 16 such layers took 44 s."""
    with pytest.raises(MismatchError):
        make_plan(whole(4), boxes_of(8, 4))
    with pytest.raises(ScatteredError, match=r"L[1-9]\d* s: .* with those of other layers"):
        make_plan(whole(4, 16), boxes_of(8, 4, 16))


@pytest.mark.parametrize("model", ["deepseek-v4-flash", "kimi-linear-48b-a3b", "jamba-1.5-mini"])
def test_boxes_of_engines_are_few(model):
    fleet = Fleet(manifests(load_model(model), Side.parse("tp=16,pp=4"), "P"))
    make_plans(manifests(load_model(model), Side.parse("tp=32"), "D"), fleet, proof=False)
    assert fleet.looks < MAX_LOOKS / 50
