"""The cost model: its counts against runs that are really there, and what it chooses where there is no doubt."""

from __future__ import annotations

import dataclasses
from functools import cache
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import oracle
from ferrying import elements, manifests_of, request_of
from kvferry.models import Side, load_model, manifests
from kvferry.plan import Binder, Fleet, Plan, Request, Tiles, make_plans
from kvferry.plan.detour import packed, staged
from kvferry.plan.rows import PreparedRows
from kvferry.strategy import HostMover, cost, probing
from kvferry.strategy.cost import PACKED_ROUNDS, STAGED_ROUNDS, Copying, Counter, Counts, Rates, Through, Way, Wire
from kvferry.strategy.forecast import USUAL, forecasts
from kvferry.strategy.landing import piece_bytes
from kvferry.strategy.probing import copying_of
from kvferry.strategy.scattered import Scattered, Settings
from kvferry.strategy.staging import DEVICE_CUT, HOST_CUT, PAGE, PINNED_CUT, Rings, host_staging, sized
from kvferry.strategy.ways import ScatteredPrepared
from kvferry.transport import Harbour, InProcessTransport
from lab.bench.scatters import cells
from test_transfer_properties import cases
from transport_peer import allocated
from transport_suite import dense_case, model_case

DEPTH = settings().max_examples // 100
ONE = Rates("NIC", Wire(1.0, 1.0, 1.0, 1.0), Copying(1.0, 1.0, 1.0), Copying(1.0, 1.0, 1.0))


@settings(max_examples=25 * DEPTH)
@given(cases())
def test_bytes_and_runs_are_those_that_binding_finds(case: oracle.Case) -> None:
    """Neighbours that only merge across grains or layers may be counted apart."""
    producers, consumers = manifests_of(case)
    request = request_of(case)
    for plan in make_plans(consumers, Fleet(producers)):
        binder = Binder(plan)
        bound, tiles = binder.bind(request), binder.tiles(request)
        for source, copies in enumerate(bound.copies):
            found = Counter(plan, source).count(tiles)
            assert found.bytes == copies.bytes
            assert found.runs >= len(copies)
            for detour in (packed(plan, source, 1 << 20, 1 << 17), staged(plan, source, 1 << 20, 1 << 17, 128)):
                load = cost.through(detour, tiles)
                assert load.bytes == copies.bytes <= load.staged or not copies.bytes


@pytest.mark.parametrize("scattered", [False, True])
def test_blocks_that_follow_each_other_are_one_run(scattered: bool) -> None:
    case = dense_case(layers=3, blocks=16, scattered=scattered)
    plan = make_plans(case.consumers, Fleet(case.producers))[0]
    runs = Counter(plan, 0).count(Binder(plan).tiles(case.request)).runs
    assert runs == (24 if scattered else 3)


def test_descending_blocks_are_one_run_too() -> None:
    case = dense_case(layers=3, blocks=16)
    plan = make_plans(case.consumers, Fleet(case.producers))[0]
    down = list(range(16))[::-1]
    assert Counter(plan, 0).count(Binder(plan).tiles(Request(256, {0: down}, {0: down}))).runs == 3


@st.composite
def scattered_loads(draw: st.DrawFn) -> tuple[Plan, dict[tuple[int, int], Tiles]]:
    """Whole blocks of one kind of layer, of any two sizes, in any order or in stretches that ascend."""
    there, here = draw(st.sampled_from([(16, 16), (16, 64), (64, 16), (16, 48), (32, 48), (1, 16)]))
    plan = plan_of(there, here)
    tokens = lcm(there, here) * draw(st.integers(1, 4))
    tables = []
    for size in (there, here):
        free = list(range(2 * tokens // size))
        cut = draw(st.integers(0, len(free)))
        tables.append({0: draw(st.sampled_from([free, free[cut:] + free[:cut], free[::-1], draw(st.permutations(free))]))})
    request = Request(tokens, *({0: table[0][: tokens // size]} for table, size in zip(tables, (there, here), strict=True)))
    return plan, dict(Binder(plan).tiles(request))


@cache
def plan_of(there: int, here: int) -> Plan:
    shape = load_model("deepseek-v3")
    sides = [manifests(shape, Side.parse(f"tp=1,block={size}"), name, blocks=512) for size, name in ((there, "P"), (here, "D"))]
    return make_plans(sides[1], Fleet(sides[0]))[0]


def runs_of(plan: Plan, tiles: dict[tuple[int, int], Tiles]) -> int:
    """Those that no other ends where they begin, on both sides, one by one."""
    rows = PreparedRows(plan, 0)
    (there, length), (here, _) = elements(rows.src), elements(rows.dst)
    src, dst = rows.indices(tiles)
    row_there, row_here = (np.repeat(np.arange(len(side)), side.count) for side in (rows.src, rows.dst))
    pieces = {
        (int(row_there[s]), int(there[s]), int(row_here[d]), int(here[d])): int(length[s])
        for s, d in zip(src, dst, strict=True)
    }
    ends = {(a, at + size, b, to + size) for (a, at, b, to), size in pieces.items()}
    return sum(begin not in ends for begin in pieces)


@given(scattered_loads(), st.integers(1, 300))
def test_runs_are_those_that_no_other_ends_where_they_begin_and_a_look_at_some_finds_no_more(
    load: tuple[Plan, dict[tuple[int, int], Tiles]], some: int
) -> None:
    plan, tiles = load
    counter = Counter(plan, 0)
    found = counter.count(tiles)
    assert found.runs == runs_of(plan, tiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "SOME", some)
        least = counter.least(tiles)
    assert least.bytes == found.bytes
    assert 1 <= least.runs <= found.runs


def test_two_stretches_that_take_turns_are_two_runs_of_a_layer_and_a_look_at_some_finds_no_more() -> None:
    plan = plan_of(16, 16)
    there, here = ([at + far * (turn % 2) for turn, at in enumerate(sorted([*range(20)] * 2))] for far in (40, 60))
    counter, tiles = Counter(plan, 0), Binder(plan).tiles(Request(16 * 40, {0: there}, {0: here}))
    layers = counter.count(Binder(plan).tiles(Request(16, {0: [0]}, {0: [0]}))).runs
    assert counter.count(tiles).runs == 2 * layers
    assert counter.least(tiles).runs == 2 * layers


def choosing_end(descriptor_s: float) -> ScatteredPrepared:
    """Cyclic tokens, of which a source keeps each in a block of its own, by an end that may choose."""
    [(scatter, tokens)] = cells([1024], "cyclic tokens", layers=2)
    case, harbour = scatter.case(tokens), Harbour()
    there, here = allocated(case.producers, 1)[0], allocated(case.consumers, 2)[0]
    rates = Rates("TCP", Wire(1e-6, descriptor_s, 1e-9, 1e-3), cost.HOST, cost.HOST)
    wires = [InProcessTransport(name, harbour) for name in "pd"]
    ends = [Scattered(wire, host_staging(1 << 18), HostMover(), Settings(rates=rates)) for wire in wires]
    for end, memory in zip(ends, (there, here), strict=True):
        end.register(memory.storages)
    prepared = ends[1].prepare(case.plan([there.manifest], here.manifest), 0, ends[1].connect(ends[0].metadata()))
    assert isinstance(prepared, ScatteredPrepared)
    return prepared


def cyclic(table: list[int]) -> dict[tuple[int, int], Tiles]:
    """From blocks of one token into blocks that are behind each other."""
    at = np.arange(len(table), dtype=np.int32)
    return {(0, 0): Tiles(np.array(table, np.int32), np.zeros_like(at), at // 16, at % 16)}


IN_ORDER = list(range(1000))
SHUFFLED = [block * 7 % 1000 for block in range(1000)]


@pytest.mark.parametrize("some", [1, 10, 1 << 20])
@pytest.mark.parametrize("descriptor_s", [1e-9, 1e-6, 3e-6, 1e-5, 1e-3])
@pytest.mark.parametrize(
    "table",
    [IN_ORDER, SHUFFLED, IN_ORDER[::-1], IN_ORDER[:500] + SHUFFLED[500:]],
    ids=["in order", "shuffled", "descending", "half"],
)
def test_a_look_at_some_tiles_leads_to_the_same_choice(
    table: list[int], descriptor_s: float, some: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = choosing_end(descriptor_s)
    monkeypatch.setattr(cost, "SOME", some)
    tiles = cyclic(table)
    assert prepared.way(tiles) == cost.best(prepared.costs(tiles))


def test_tiles_are_put_in_order_only_where_descriptors_may_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = choosing_end(1e-3)
    counted = []
    monkeypatch.setattr(Counter, "count", lambda self, tiles: counted.append(tiles) or Counts(0, 1))
    monkeypatch.setattr(cost, "SOME", 100)
    assert prepared.way(cyclic(SHUFFLED)) != "direct"
    assert counted == []
    assert prepared.way(cyclic(IN_ORDER)) == "direct"
    assert len(counted) == 1


def test_every_number_is_charged_for() -> None:
    assert cost.direct_s(Counts(10, 3), ONE) == 1 + 3 + 10
    longer = replace(ONE, wire=replace(ONE.wire, begin_s=64.0))
    assert [cost.direct_s(Counts(10, runs), longer) for runs in (0, 3, 64, 99)] == [11, 1 + 2 * 3 + 10, 139, 1 + 64 + 99 + 10]
    assert cost.mapped_s(Counts(10, 3), ONE) == 1 + 3 + 10
    load = Through(bytes=8, staged=10, gathered=2, scattered=3)
    assert cost.packed_s(load, ONE, 10, 4) == 1 + 1 + (1 + 2 + 8) + (PACKED_ROUNDS + 1 + 10) + (1 + 3 + 8)
    assert cost.staged_s(load, ONE, 10) == (STAGED_ROUNDS + 2 + 10) + (1 + 3 + 8)
    assert cost.staged_s(load, longer, 10) == (STAGED_ROUNDS + 2 * 2 + 10) + (1 + 3 + 8)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({"direct": 1.0, "packed": 2.0, "staged": 3.0}, "direct"),
        ({"direct": 1.05, "packed": 1.0}, "direct"),
        ({"direct": 1.05, "staged": 1.0, "packed": 1.02}, "direct"),
        ({"direct": 1.2, "staged": 1.0, "packed": 1.02}, "staged"),
        ({"direct": 1.05, "mapped": 1.0, "packed": 1.5}, "mapped"),
        ({"packed": 1.0, "staged": 1.01}, "packed"),
        ({"packed": 1.0, "staged": 1.0}, "packed"),
    ],
)
def test_staging_is_used_where_it_is_clearly_cheaper(found: dict[Way, float], chosen: Way) -> None:
    assert cost.best(found) == chosen


def test_a_thread_that_does_it_all_itself_gains_nothing_by_more_pieces() -> None:
    """Each is handled by itself: on host memory reading and scattering take turns, and only the gather is beside them."""
    load = Through(bytes=1000, staged=1000, gathered=10, scattered=10)
    for pieces in (2, 4, 10):
        extra = (pieces - 1) * (STAGED_ROUNDS + ONE.scattering.launch_s)
        assert cost.staged_s(load, ONE, 1000 // pieces) == pytest.approx(cost.staged_s(load, ONE, 1000) + extra)


@given(st.integers(1, 1 << 36), st.integers(PAGE, 1 << 27))
def test_pieces_fit_a_slot_and_small_loads_are_one(staged: int, slot: int) -> None:
    for cut in (HOST_CUT, PINNED_CUT, DEVICE_CUT):
        piece = piece_bytes(staged, slot, cut)
        assert 0 < piece <= slot
        assert -(-staged // piece) <= 4 or piece == slot
        if staged <= min(slot, cut.shortest):
            assert piece >= staged


@pytest.mark.parametrize(
    ("staged", "rings", "pieces"), [(512 << 20, "landing", 1), (4_200_000_000, "landing", 4), (512 << 20, "both", 1)]
)
def test_a_prompt_goes_through_a_device_in_few_pieces_which_are_all_under_way_at_once(
    staged: int, rings: Rings, pieces: int
) -> None:
    """Prompts of 4k and of 32k tokens, at 128 KiB a token, through 4 GiB."""
    sizes = sized(4 << 30, DEVICE_CUT, rings)
    assert -(-staged // piece_bytes(staged, sizes.slot, DEVICE_CUT)) == pieces <= sizes.landing


def test_what_is_read_to_learn_what_a_path_costs_is_no_whole_slot_if_that_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_LENGTH", 1 << 16)
    monkeypatch.setattr(probing, "_LONG", 1 << 17)
    monkeypatch.setattr(probing, "_SOON_S", 60.0)
    lengths: list[int] = []

    class Noting(InProcessTransport):
        def read(self, prepared: Any, tiles: Any, notification: bytes = b"") -> Any:
            read = super().read(prepared, tiles, notification)
            lengths.append(int(read.runs[2].sum()))
            return read

    harbour = Harbour()
    wires = InProcessTransport("p", harbour), Noting("d", harbour)
    source, target = (Scattered(wire, host_staging(1 << 23), HostMover(), Settings(("packed",))) for wire in wires)
    found = target.rates(target.connect(source.metadata()))
    assert found.wire.byte_s != cost.WIRES[found.path].byte_s
    assert max(lengths) == 1 << 17 < host_staging(1 << 23).slot


def test_what_the_first_descriptors_cost_beyond_the_others_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(wire: Any, prepared: Any, tiles: Any, *_: Any) -> float:
        count = len(tiles[0, 0].src_block)
        return 1e-4 if count == 1 else 4e-4 + 2e-6 * count

    monkeypatch.setattr(probing, "_timed", took)
    harbour = Harbour()
    source, target = (
        Scattered(InProcessTransport(name, harbour), host_staging(1 << 23), HostMover(), Settings(("packed",))) for name in "pd"
    )
    found = target.rates(target.connect(source.metadata())).wire
    assert (found.round_s, found.descriptor_s, found.begin_s) == pytest.approx((1e-4, 2e-6, 3e-4))


@pytest.mark.parametrize(("cores", "memory", "rests"), [(3, "vram", True), (4, "vram", False), (4, "dram", True)])
def test_a_device_is_asked_after_without_rest_where_cores_are_not_few(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: Any, rests: bool
) -> None:
    rested: set[float] = set()
    monkeypatch.setattr(probing.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(probing, "_timed", lambda *found: rested.add(found[-1]) or 1e-4)
    harbour = Harbour()
    source, target = (
        Scattered(InProcessTransport(name, harbour), host_staging(1 << 23), HostMover(), Settings(("packed",))) for name in "pd"
    )
    told = target._staging
    monkeypatch.setattr(target, "_staging", dataclasses.replace(told, storage=dataclasses.replace(told.storage, memory=memory)))
    target.rates(target.connect(source.metadata()))
    assert {found > 0 for found in rested} == {rests}


def test_pieces_overlap_and_a_small_ring_is_waited_for() -> None:
    load = Through(bytes=1000, staged=1000, gathered=10, scattered=10)
    rates = replace(ONE, scattering=replace(ONE.scattering, beside=True))
    alone, several = cost.packed_s(load, rates, 1000, 8), cost.packed_s(load, rates, 250, 8)
    assert several < alone
    assert cost.packed_s(load, rates, 250, 1) > several
    assert cost.staged_s(load, rates, 250) < cost.staged_s(load, rates, 1000)


def test_a_thread_that_copies_itself_waits_for_no_wire_meanwhile() -> None:
    load = Through(bytes=1000, staged=1000, gathered=10, scattered=10)
    beside = replace(ONE, scattering=replace(ONE.scattering, beside=True))
    assert cost.packed_s(load, ONE, 250, 8) > cost.packed_s(load, beside, 250, 8)
    assert cost.staged_s(load, ONE, 250) >= cost.staged_s(load, ONE, 1000)


@pytest.mark.parametrize("beside", [False, True])
def test_out_of_a_mapped_ring_only_a_devices_bytes_cross_the_transports_path(beside: bool) -> None:
    load = Through(bytes=1000, staged=1000, gathered=10, scattered=10)
    rates = replace(ONE, scattering=replace(ONE.scattering, beside=beside))
    slower = replace(rates, wire=replace(rates.wire, byte_s=7))
    more = cost.packed_s(load, slower, 1000, 8, mapped=True) - cost.packed_s(load, rates, 1000, 8, mapped=True)
    assert more == (6 * 1000 if beside else 0)


def chosen(model: str, prefill: str, decode: str, path: str, tokens: int = 4000) -> str:
    from kvferry.cli.plan import Shown

    shown = Shown(load_model(model), Side.parse(prefill), Side.parse(decode), tokens)
    return {found.path: found.chosen for found in shown.forecasts}[path]


@pytest.mark.parametrize("path", ["NIC", "shared memory", "TCP"])
def test_few_long_runs_are_read_by_descriptors(path: str) -> None:
    assert chosen("llama-3.1-8b", "tp=1", "tp=1", path) == "direct"


@pytest.mark.parametrize("path", USUAL)
def test_what_is_scattered_by_tokens_is_not(path: str) -> None:
    assert chosen("llama-3.1-8b", "tp=1,layout=token", "tp=2", path, 1000) != "direct"


def test_memory_that_can_be_mapped_is_on_a_device() -> None:
    for path in ("same GPU", "NVLink"):
        assert chosen("llama-3.1-8b", "tp=1,layout=token", "tp=2", path, 1000) == "mapped"


def test_every_path_has_a_forecast_for_every_way() -> None:
    case = model_case("synthetic-12", "tp=2", "tp=3")
    plans = make_plans(case.consumers, Fleet(case.producers))
    for found in forecasts(plans, case.request):
        assert {"direct", "packed", "staged"} <= set(found.seconds)
        assert found.seconds[found.chosen] <= min(found.seconds.values()) * (cost.WORTH if found.chosen == "direct" else 1)


@given(st.floats(1e-9, 1e-6), st.floats(1e-11, 1e-8))
def test_two_factors_are_found_again(run_s: float, byte_s: float) -> None:
    xs = [(1000.0, 4000.0), (100.0, 1e5), (4.0, 1e6)]
    found = cost.fitted(xs, [runs * run_s + moved * byte_s for runs, moved in xs])
    assert np.allclose(found, (run_s, byte_s), rtol=1e-3)


def test_what_copies_cost_is_found_out_without_touching_what_lies_beside_the_ring() -> None:
    staging = host_staging(1 << 20)
    sending = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * staging.sending.length).from_address(staging.sending.address)
    )
    sending[:] = 7
    found = copying_of(HostMover(), staging.landing)
    assert found.launch_s > 0
    assert found.run_s > 0 or found.byte_s > 0
    assert (sending == 7).all()
