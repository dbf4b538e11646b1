"""Manifests and plans as bytes: what comes back, what is refused, and what no bytes from a peer can do."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import kvferry.manifest.check
import kvferry.plan.make
from kvferry.errors import BindError, DecodeError, KVFerryError, ManifestError, MismatchError, ProofError
from kvferry.manifest import (
    MAX_ENCODED,
    Axis,
    Element,
    Group,
    Identity,
    Layer,
    Manifest,
    Part,
    Region,
    Shape,
    StatePaged,
    TokenAxis,
    TokenPaged,
    check_manifest,
    compare,
    decode,
    encode,
)
from kvferry.plan import Binder, Plan, make_plan, make_plans, prove
from kvferry.strided import Kept
from pairs import PAIRS, manifests_of, plan_of, request_of

BUDGET = 64 << 20
MUTANTS = 1000
BATCHES = 10

names = pytest.mark.parametrize("name", PAIRS)


def raw_of(value: msgspec.Struct) -> Any:
    """The plain lists and maps that a value is on the wire."""
    return msgspec.msgpack.decode(encode(value))


def packed(raw: Any) -> bytes:
    return msgspec.msgpack.encode(raw)


@names
def test_manifests_come_back_as_they_were(name):
    consumer, producers = manifests_of(name)
    for manifest in (consumer, *producers):
        assert decode(encode(manifest), Manifest) == manifest


@names
def test_plans_come_back_as_they_were_and_are_still_proved(name):
    plan = decode(encode(plan_of(name)), Plan)
    assert plan == plan_of(name)
    prove(plan, *manifests_of(name))


def insides(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all maps inside, the outermost first."""
    found = [path] if isinstance(raw, dict) else []
    inner = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    return found + [p for key, value in inner for p in insides(value, (*path, key))]


def at(raw: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        raw = raw[key]
    return raw


def ignores_remarks(path: tuple[Any, ...]) -> bool:
    """Paths of values whose unknown fields change no meaning: the whole, its identities, and a plan's sides."""
    return path in ((), ("consumer",)) or path[-1] == "identity" or path[-2:-1] == ("sources",)


@pytest.mark.parametrize("kind", [Manifest, Plan])
def test_unknown_fields_are_refused_where_they_change_meaning_and_ignored_elsewhere(kind):
    name = "hybrid, two ranks to three"
    value = manifests_of(name)[0] if kind is Manifest else plan_of(name)
    refused, ignored = set(), set()
    for path in insides(raw_of(value)):
        raw = raw_of(value)
        at(raw, path)["remark"] = [1, {"deep": None}]
        kept = tuple("*" if isinstance(p, int) else p for p in path)
        if ignores_remarks(path):
            assert decode(packed(raw), kind) == value
            ignored.add(kept)
        else:
            with pytest.raises(DecodeError, match="unknown field `remark`"):
                decode(packed(raw), kind)
            refused.add(kept)
    if kind is Manifest:
        assert ignored == {(), ("identity",)}
        assert refused >= {("regions", "*"), ("groups", "*"), ("groups", "*", "paging"), ("shapes", "*"), ("layers", "*")}
        assert refused >= {("shapes", "*", "element"), ("shapes", "*", "axes", "*"), ("shapes", "*", "token")}
        assert refused >= {("layers", "*", "parts", "*"), ("layers", "*", "reach"), ("identity", "rank")}
    else:
        assert ignored >= {(), ("consumer",), ("consumer", "identity"), ("sources", "*"), ("sources", "*", "identity")}
        assert refused >= {("edges", "*"), ("fills", "*"), ("needs", "*"), ("edges", "*", "grains", "*")}


def test_values_behind_a_run_or_a_lane_are_refused():
    for path in (("lanes", 0), ("edges", 0, "grains", 0, "runs", 0), ("lanes", -1, 1, 0)):
        raw = raw_of(plan_of("hybrid, two ranks to three"))
        at(raw, path).append(1)
        with pytest.raises(DecodeError):
            decode(packed(raw), Plan)


@pytest.mark.parametrize("version", [0, 2, "1", None, 1 << 40])
def test_another_version_is_refused(version):
    for value in (manifests_of("blocks of 12 to 8")[0], plan_of("blocks of 12 to 8")):
        raw = raw_of(value) | {"version": version}
        with pytest.raises(DecodeError, match="version"):
            decode(packed(raw), type(value))


def test_what_a_peer_would_refuse_for_its_size_is_not_sent_and_not_read():
    manifest = manifests_of("blocks of 12 to 8")[0]
    layers = tuple(replace(manifest.layers[0], name=f"{i:0250}") for i in range(4096))
    with pytest.raises(DecodeError, match="a peer accepts at most 1,048,576"):
        encode(replace(manifest, layers=layers))
    with pytest.raises(DecodeError, match="the cap is 1,048,576"):
        decode(bytes(MAX_ENCODED + 1), Manifest)


def test_a_refusal_says_where():
    raw = raw_of(manifests_of("blocks of 12 to 8")[0])
    raw["layers"][1]["parts"][0]["offset"] = -1
    with pytest.raises(DecodeError, match=r"not a manifest this version accepts: .* `\$\.layers\[1\]\.parts\[0\]\.offset`"):
        decode(packed(raw), Manifest)
    with pytest.raises(DecodeError, match="not a plan this version accepts"):
        decode(packed(raw), Plan)


def take_in_manifest(data: bytes, name: str) -> str:
    """Everything a side does with a peer's manifest; where it ends."""
    try:
        manifest = decode(data, Manifest)
    except DecodeError:
        return "not decoded"
    try:
        check_manifest(manifest)
    except ManifestError:
        return "contradicts itself"
    consumer, producers = manifests_of(name)
    if manifest.identity.engine == consumer.identity.engine:
        here, there = manifest, producers
    else:
        here, there = consumer, (manifest, *(p for p in producers if p.identity.rank != manifest.identity.rank))
    found = compare(here, there)
    try:
        plan = make_plan(here, there)
    except MismatchError:
        return "mismatch"
    except ProofError:
        return "not proved"
    assert not found
    bind_a_little(plan, here, there)
    return "planned"


def take_in_plan(data: bytes, name: str) -> str:
    """Everything a side does with a plan it is given; where it ends."""
    try:
        plan = decode(data, Plan)
    except DecodeError:
        return "not decoded"
    consumer, producers = manifests_of(name)
    try:
        prove(plan, consumer, producers)
    except ProofError:
        return "not proved"
    bind_a_little(plan, consumer, producers)
    return "bound"


def bind_a_little(plan: Plan, consumer: Manifest, producers: tuple[Manifest, ...]) -> None:
    """Bind a small request; whatever is bound stays inside the regions of its ranks."""
    if max((g.tokens for m in (consumer, *producers) for g in m.groups), default=0) > 64:
        return
    try:
        binding = Binder(plan).bind(request_of(consumer, producers, 23, 1))
    except BindError:
        return
    regions = {p.identity: p.regions for p in producers}
    for side, copies in zip(plan.sources, binding.copies, strict=True):
        there = regions[side.identity]
        for region, offset, length in zip(copies.src_region, copies.src_offset, copies.length, strict=True):
            assert 0 <= offset <= there[region].length - length
        for region, offset, length in zip(copies.dst_region, copies.dst_offset, copies.length, strict=True):
            assert 0 <= offset <= consumer.regions[region].length - length
    fills = binding.fills
    for region, offset, length in zip(fills.region, fills.offset, fills.length, strict=True):
        assert 0 <= offset <= consumer.regions[region].length - length


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 1, 4, 64))) + data[place:]


def splice(data: bytes, rng: random.Random) -> bytes:
    one, other = rng.randrange(len(data)), rng.randrange(len(data))
    return data[:one] + data[other:]


def double(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 8, 64, 512)))
    return data[:stop] + data[start:]


def noise(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, len(data)))


def places_of(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a decoded value."""
    inner = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    return [p for key, value in inner for p in ((*path, key), *places_of(value, (*path, key)))]


NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    16,
    64,
    255,
    4096,
    65537,
    1 << 20,
    1 << 31,
    1 << 40,
    1 << 50,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -1,
    -(1 << 63),
)


def bend_number(data: bytes, rng: random.Random) -> bytes:
    """Replace a number or two, by near ones, by ones from elsewhere in the value, or by huge ones."""
    raw = msgspec.msgpack.decode(data)
    numbers = [p for p in places_of(raw) if type(at(raw, p)) in (int, float)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        path = rng.choice(numbers)
        old = at(raw, path)
        other = at(raw, rng.choice(numbers))
        at(raw, path[:-1])[path[-1]] = rng.choice((rng.choice(NUMBERS), old + 1, old * 2, old - 1, other, other * old))
    return pack_or_keep(raw, data)


def bend_structure(data: bytes, rng: random.Random) -> bytes:
    """Drop, double, swap or empty something."""
    raw = msgspec.msgpack.decode(data)
    places = places_of(raw)
    path = rng.choice(places)
    parent, value = at(raw, path[:-1]), at(raw, path)
    change = rng.randrange(6)
    if change == 0:
        del parent[path[-1]]
    elif change == 1 and isinstance(parent, list):
        parent.insert(path[-1], value)
    elif change == 2 and isinstance(value, list):
        value.reverse()
    elif change == 3 and isinstance(value, (list, dict, str)):
        parent[path[-1]] = type(value)()
    elif change == 4:
        parent[path[-1]] = rng.choice((None, True, [], {}, "", "token", 0.5, float("nan"), b"\x00", [[]] * 20))
    else:
        parent[path[-1]] = at(raw, rng.choice(places))
    return pack_or_keep(raw, data)


def pack_or_keep(raw: Any, data: bytes) -> bytes:
    try:
        return packed(raw)[: 2 * MAX_ENCODED]
    except (OverflowError, RecursionError):
        return data


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip_bits, truncate, insert, splice, double, noise),
    *(bend_number, bend_number, bend_number, bend_structure, bend_structure),
)


@contextmanager
def within_budget() -> Iterator[None]:
    """Whatever happens inside, its memory stays within the budget."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BUDGET, f"{peak >> 20} MiB"


def taken_in(take_in: Callable[[bytes, str], str], encodings: list[tuple[str, bytes]], seed: int) -> Counter[str]:
    """Where mutants end; each in an error of our own or in a value that holds, and none with much memory."""
    rng = random.Random(seed)
    chosen = [(*rng.choice(encodings), rng.choice(MUTATIONS)) for _ in range(MUTANTS)]
    mutants = [(name, mutation.__name__, mutation(data, rng)) for name, data, mutation in chosen]
    ends: Counter[str] = Counter()
    with within_budget():
        for name, mutation, mutant in mutants:
            with told(f"{name}, {mutation}: {mutant.hex()}"):
                ends[take_in(mutant, name)] += 1
    return ends


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what an error that is not ours came from."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} from {what}") from error


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_manifests_end_in_our_errors_or_in_plans_that_hold(batch):
    encodings = [(name, encode(m)) for name in PAIRS for c, p in [manifests_of(name)] for m in (c, p[0])]
    ends = taken_in(take_in_manifest, encodings, batch)
    assert {"not decoded", "contradicts itself", "mismatch", "planned"} <= ends.keys()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_plans_end_in_our_errors_or_in_copies_that_hold(batch):
    ends = taken_in(take_in_plan, [(name, encode(plan_of(name))) for name in PAIRS], 1000 + batch)
    assert {"not decoded", "not proved", "bound"} <= ends.keys()


def small(**changes: Any) -> Any:
    """A tiny manifest on the wire, with some fields changed."""
    return (
        raw_of(
            Manifest(
                Identity("p", "1", "model"),
                (Region("pool", 1 << 20),),
                (Group(0, StatePaged(), 4),),
                (Shape(Element("uint8", 1), (Axis("dim", 8, 0, 8, ((8, 1),)),)),),
                (Layer("L", 0, (Part("s", 0, 0, 0, 64),)),),
            )
        )
        | changes
    )


def refused(action: Callable[[], object]) -> str:
    """The error of our own that an action ends in, within the budget."""
    with within_budget(), pytest.raises(KVFerryError) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def hostile(message: bytes) -> str:
    """Take in a hostile manifest as a producer's and as a consumer's; what it is refused with."""
    peer = decode(packed(small()), Manifest)

    def take_in() -> None:
        manifest = decode(message, Manifest)
        check_manifest(manifest)
        make_plans([peer], [manifest])
        make_plans([manifest], [peer])

    return refused(take_in)


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
@pytest.mark.parametrize("claim", [1 << 16, 1 << 24, (1 << 32) - 1])
def test_lengths_that_are_only_claimed_are_refused(head, claim):
    claimed = head + struct.pack(">I", claim)
    assert hostile(claimed).startswith("DecodeError")
    for field in ("layers", "shapes", "regions", "groups", "unknown"):
        message = b"\x81" + packed(field) + claimed
        assert hostile(message).startswith("DecodeError")


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_deep_nesting_is_refused(opening):
    deep = opening * 300_000
    assert hostile(deep).startswith("DecodeError")
    assert hostile(b"\x81" + packed("layers") + deep).startswith("DecodeError")
    assert hostile(b"\x81" + packed("unknown") + deep).startswith("DecodeError")


def test_names_of_a_mebibyte_are_refused():
    long = "x" * (MAX_ENCODED - 1000)
    for raw in (
        small(identity={"engine": long, "incarnation": "1", "model": "m"}),
        small(regions=[{"name": long, "length": 1}]),
        small(shapes=[{"element": {"dtype": "uint8", "bytes": 1, "opaque": long}, "axes": []}]),
    ):
        assert hostile(packed(raw)).startswith("DecodeError")
    assert "the cap is" in hostile(packed(small(unknown="x" * MAX_ENCODED)))


def axis(digits: list[list[int]], size: int = 8) -> dict[str, Any]:
    return {"name": "dim", "size": size, "start": 0, "stop": size, "digits": digits}


def with_axes(*axes: dict[str, Any]) -> list[Any]:
    return [{"element": {"dtype": "uint8", "bytes": 1}, "axes": list(axes)}]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"shapes": with_axes(axis([[1 << 40, 1]] * 16))}, "ManifestError: L s: axis dim: digits hold"),
        ({"shapes": with_axes(axis([[1 << 41, 1]]))}, "DecodeError"),
        ({"shapes": with_axes(axis([[2, 1]] * 17))}, "DecodeError"),
        ({"shapes": with_axes(axis([[8, 1 << 50]]))}, "ManifestError: L s: reaches byte"),
        ({"shapes": with_axes(*[axis([[1, 1]], 1)] * 9)}, "DecodeError"),
        ({"shapes": with_axes(axis([[1 << 40, 1]], 1 << 40))}, "ManifestError: L s: reaches byte"),
        ({"regions": [{"name": "pool", "length": 1 << 50, "address": (1 << 63) - 1}]}, "ManifestError: region pool ends"),
        ({"regions": [{"name": "pool", "length": 1 << 51}]}, "DecodeError"),
        ({"regions": [{"name": "pool", "length": 1}] * 4097}, "DecodeError"),
        ({"groups": [{"id": 0, "paging": {"type": "state"}, "blocks": 1 << 40}]}, "ManifestError: L s: reaches byte"),
        (
            {"groups": [{"id": 0, "paging": {"type": "token", "tokens": 1 << 40}, "blocks": 1}]},
            "ManifestError: group 0: a block",
        ),
        ({"layers": [{"name": "L", "group": 0, "parts": []}]}, "DecodeError"),
        ({"version": 1 << 63}, "DecodeError"),
    ],
)
def test_numbers_beyond_reason_are_refused(changes, error):
    assert hostile(packed(small(**changes))).startswith(error)


def huge(shape: Shape, length: int = 1 << 50, blocks: int = 1, paging: StatePaged | TokenPaged | None = None) -> Manifest:
    return Manifest(
        Identity("p", "1", "model"),
        (Region("pool", length),),
        (Group(0, paging or StatePaged(), blocks),),
        (shape,),
        (Layer("L", 0, (Part("s", 0, 0, 0, length // blocks),)),),
    )


BYTE = Element("uint8", 1)


def bits_reversed(name: str, bits: int, unit: int) -> Axis:
    return Axis(name, 1 << bits, 0, 1 << bits, tuple((2, unit << i) for i in range(bits)))


def straight(name: str, count: int, unit: int) -> Axis:
    return Axis(name, count, 0, count, ((count, unit),))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (
            Shape(BYTE, (bits_reversed("x", 16, 1 << 16), bits_reversed("y", 16, 1))),
            Shape(BYTE, (straight("x", 1 << 16, 1 << 16), straight("y", 1 << 16, 1))),
        ),
        (
            Shape(BYTE, (straight("x", 1 << 20, 1 << 20), straight("y", 1 << 20, 1))),
            Shape(BYTE, (straight("x", 1 << 20, 1), straight("y", 1 << 20, 1 << 20))),
        ),
        (
            Shape(BYTE, (straight("x", 1 << 24, 1), straight("y", 1 << 24, 1 << 24))),
            Shape(BYTE, (straight("x", 1 << 24, 1), straight("y", 1 << 24, 1 << 24))),
        ),
        (
            Shape(BYTE, tuple(bits_reversed(n, 5, 1 << 5 * i) for i, n in enumerate("abcdefgh"))),
            Shape(BYTE, tuple(straight(n, 32, 1 << 5 * i) for i, n in enumerate("abcdefgh"))),
        ),
    ],
)
def test_states_of_petabytes_and_every_order_cost_little(there, here):
    """Two manifests that are well formed by themselves end in a plan or a refusal, not in memory."""
    producer, consumer = huge(there), replace(huge(here), identity=Identity("d", "1", "model"))
    with within_budget():
        check_manifest(producer)
        check_manifest(consumer)
        with suppress(ProofError):
            make_plan(consumer, [producer])


def test_many_layers_of_scattered_parts_cost_little():
    scattered = Shape(BYTE, (straight("x", 1 << 8, 1), straight("y", 1 << 8, 1 << 8)))
    dense = Shape(BYTE, (straight("x", 1 << 8, 1 << 8), straight("y", 1 << 8, 1)))

    def side(engine: str, shape: Shape) -> Manifest:
        layers = tuple(Layer(f"{i}", 0, (Part("s", 0, 0, i << 16, 1 << 28),)) for i in range(4096))
        return replace(huge(shape), identity=Identity(engine, "1", "model"), layers=layers)

    assert "runs" in refused(lambda: make_plan(side("d", dense), [side("p", scattered)]))


def test_pieces_in_every_stride_are_checked_quickly():
    blocks, pieces = 4, 60_000
    shape = Shape(BYTE, (straight("x", pieces, 16 * blocks),))
    manifest = replace(huge(shape, 1 << 40, blocks), layers=(Layer("L", 0, (Part("s", 0, 0, 0, 16),)),))
    check_manifest(manifest)


def test_blocks_of_many_tokens_are_planned_or_refused_quickly():
    tokens = (1 << 18) - 5
    shape = Shape(BYTE, (), TokenAxis(((tokens, 1),)))
    producer = huge(shape, tokens * 4, 4, TokenPaged(tokens))
    consumer = replace(producer, identity=Identity("d", "1", "model"))
    with within_budget(), suppress(ProofError):
        make_plan(consumer, [producer])


def hostile_plan(raw: Any, name: str) -> str:
    data, (consumer, producers) = packed(raw), manifests_of(name)
    return refused(lambda: prove(decode(data, Plan), consumer, producers))


@pytest.mark.parametrize(
    "repeats",
    [
        [[1 << 40, 0, 0]],
        [[1 << 40, 1 << 50, 1 << 50]],
        [[1 << 20, 0, 0], [1 << 20, 0, 0]],
        [[2, 0, 0]] * 32,
        [[1 << 21, 1, 1]],
        [[1 << 15, 0, 0]],
        [[1 << 21, 0, 0]],
    ],
)
def test_repeats_that_would_expand_into_millions_of_runs_are_refused(repeats):
    name = "hybrid, two ranks to three"
    for level in (0, -1):
        raw = raw_of(plan_of(name))
        raw["edges"][0]["grains"][level]["runs"][0][5] = repeats
        assert hostile_plan(raw, name).startswith(("ProofError", "ScatteredError"))


@pytest.mark.parametrize(
    "changes",
    [
        {"tells": [{}] * 1_000_000},
        {"lanes": [[0, []]] * 300_000},
        {"sources": [{}] * 1_000_000},
        {"fills": [{"group": 0, "need": None, "grains": [{"tokens": 0, "runs": []}]}] * 10_000},
        {"lanes": [[1 << 50, [[1 << 40, 1 << 50]] * 16]] * 64},
        {"lanes": []},
        {"needs": []},
        {"edges": []},
    ],
)
def test_plans_of_many_small_things_are_refused(changes):
    name = "hybrid, two ranks to three"
    hostile_plan(raw_of(plan_of(name)) | changes, name)


def test_text_that_is_no_text_is_refused():
    good = encode(manifests_of("blocks of 12 to 8")[0])
    bad = good.replace(b"model", b"mod\xff\xfe", 1)
    with pytest.raises(DecodeError):
        decode(bad, Manifest)


def scattered(layers: int) -> Manifest:
    """Layers that are each kept in another order of their bits."""
    shapes = []
    for seed in range(layers):
        bits = random.Random(seed).sample(range(16), 16)
        axes = (tuple((2, 1 << b) for b in half) for half in (bits[:8], bits[8:]))
        shapes.append(Shape(BYTE, tuple(Axis(n, 256, 0, 256, digits) for n, digits in zip("xy", axes, strict=True))))
    found = tuple(Layer(f"{i}", 0, (Part("s", i, 0, i << 16, 1 << 40),)) for i in range(layers))
    return replace(huge(shapes[0]), shapes=tuple(shapes), layers=found)


def test_layers_that_are_each_kept_in_another_order_are_refused_before_they_are_all_looked_at():
    """Each alone is within bounds: millions of runs of a byte were laid out, one object each, before the proof refused them."""
    dense = Shape(BYTE, (straight("x", 256, 256), straight("y", 256, 1)))
    layers = tuple(Layer(f"{i}", 0, (Part("s", 0, 0, i << 16, 1 << 40),)) for i in range(40))
    consumer = replace(huge(dense), identity=Identity("d", "1", "model"), layers=layers)
    with counting(kvferry.plan.make, "_box_runs") as calls:
        assert "strided runs" in refused(lambda: make_plan(consumer, [scattered(40)]))
    assert len(calls) < 40


def test_a_block_of_many_tokens_whose_places_are_in_no_order_is_refused_before_layers_are_laid():
    tokens = 1 << 13

    def side(engine: str, digits: tuple[tuple[int, int], ...]) -> Manifest:
        shape = Shape(BYTE, (straight("h", 1, 0),), TokenAxis(digits))
        layers = tuple(Layer(f"{i}", 0, (Part("s", 0, 0, i * tokens, 60 * tokens),)) for i in range(60))
        found = huge(shape, 60 * tokens * 1024, 1024, TokenPaged(tokens))
        return replace(found, identity=Identity(engine, "1", "model"), layers=layers)

    turned = side("p", tuple((2, 1 << b) for b in range(13)))
    assert "strided runs" in refused(lambda: make_plan(side("d", ((tokens, 1),)), [turned]))


def test_shapes_whose_strides_interleave_are_spelled_out_up_to_a_limit_for_all_of_them():
    """2 and 3, 8 and 12, and so on: no two of the 65,536 places are the same, and none lies inside another's."""
    digits = tuple((2, start * 4**k) for start in (3, 2) for k in range(8))
    shapes = tuple(Shape(Element("uint8", 1, opaque=f"{i}"), (Axis("x", 1 << 16, 0, 1 << 16, digits),)) for i in range(2000))
    layers = tuple(Layer(f"{i}", 0, (Part("s", i, 0, i << 30, 1 << 40),)) for i in range(2000))
    manifest = replace(huge(shapes[0]), shapes=shapes, layers=layers)
    assert decode(encode(manifest), Manifest) == manifest
    with counting(kvferry.manifest.check, "spread") as calls:
        assert "strides interleave in more than" in refused(lambda: check_manifest(manifest))
    assert len(calls) <= 1 + kvferry.manifest.check.MAX_SPELLED // (1 << 16)


def test_answers_about_a_peers_memory_are_kept_by_their_weight():
    known = Kept(lambda number: (number,) * number, len, 100)
    for number in range(1, 60):
        assert known(number) == (number,) * number
        assert known.weight <= 100
    assert known(59) is known(59)
    assert known(150) == (150,) * 150
    assert known.weight == 0


@contextmanager
def counting(module: Any, name: str) -> Iterator[list[Any]]:
    function, calls = getattr(module, name), []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, counted)
        yield calls
