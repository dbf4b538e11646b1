"""Requests as engines have them, lists of blocks without a hole, are bound by a shorter way: what comes out is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings

import drawn
import oracle
from ferrying import manifests_of, request_of
from kvferry.errors import BindError
from kvferry.explain.request import block_tables
from kvferry.models import Side, load_model, manifests
from kvferry.plan import SPARE, Binder, Loading, Plan, Request, make_plans
from kvferry.plan.tiles import Runs
from test_transfer_properties import DEPTH, cases

BLOCKS = 400
TOKENS = 4_000
SHAPES = [("llama-3.1-8b", "tp=1,block=64,pool=block"), ("nemotron-h-8b", "tp=1,pool=block")]
WRONGS = ("twice", "beyond", "negative", "a hole", "too short", "no number", "missing", "unaligned")


def as_engines_have_it(case: oracle.Case) -> Request:
    """A state's block is a number, and not a list of one."""

    def given(side: oracle.Side, tables: Mapping[int, Sequence[int]]) -> dict[int, list[int] | int]:
        tokens = {group.id: group.tokens for group in side.groups}
        return {group: list(table) if tokens[group] else table[0] for group, table in tables.items()}

    return Request(case.tokens, given(case.producer, case.src), given(case.consumer, case.dst), case.start)


def as_columns(request: Request) -> Request:
    """The same in arrays, which are always looked at closely."""
    src, dst = (
        {group: np.atleast_1d(np.array(t, np.int64)) for group, t in side.items()} for side in (request.src, request.dst)
    )
    return replace(request, src=src, dst=dst)


def said(binder: Binder, request: Request) -> str | dict[str, object]:
    try:
        found: Loading = binder.load(request)
    except BindError as error:
        return str(error)
    columns = ("src_block", "src_tile", "dst_block", "dst_tile")
    return {
        "tiles": {key: [getattr(tiles, name).tolist() for name in columns] for key, tiles in found.tiles.items()},
        "fills": [column.tolist() for column in (found.fills.region, found.fills.offset, found.fills.length)],
        "unhashable": {group: at.tolist() for group, at in found.unhashable.items()},
        "bytes": found.bytes,
    }


@settings(max_examples=300 * DEPTH)
@given(cases())
def test_lists_and_arrays_are_bound_alike(case: oracle.Case) -> None:
    producers, consumers = manifests_of(case)
    request, short = request_of(case), as_engines_have_it(case)
    for plan in make_plans(consumers, producers):
        for spare in (0, SPARE):
            binder = Binder(plan, spare)
            wanted = said(binder, as_columns(request))
            assert said(binder, request) == said(binder, short) == wanted
            event(f"bound: {not isinstance(wanted, str)}")


def a_plan(model: str, side: str) -> Plan:
    there, here = (manifests(load_model(model), Side.parse(side), engine=name, blocks=BLOCKS) for name in ("p", "d"))
    (plan,) = make_plans(list(here), list(there))
    return plan


def a_request(plan: Plan, tokens: int = TOKENS) -> Request:
    numbers = {group.id: group.tokens for group in plan.consumer.groups}
    found = {g: t if numbers[g] else t[0] for g, t in block_tables(plan.consumer.groups, tokens).items()}
    return Request(tokens, found, {group: table if isinstance(table, int) else [*table] for group, table in found.items()})


@pytest.mark.parametrize(("model", "side"), SHAPES)
class TestOfRealShapes:
    def test_what_is_sound_is_bound(self, model: str, side: str) -> None:
        binder = Binder.of_sessions(a_plan(model, side))
        request = a_request(binder.plan)
        wanted = said(binder, as_columns(request))
        assert isinstance(wanted, dict)
        assert wanted["bytes"]
        assert said(binder, request) == wanted

    @pytest.mark.parametrize("end", ["src", "dst"])
    @pytest.mark.parametrize("change", WRONGS)
    def test_what_is_not_is_said_as_ever(self, model: str, side: str, end: str, change: str) -> None:
        binder = Binder.of_sessions(a_plan(model, side))
        request = a_request(binder.plan)
        tables = dict(getattr(request, end))
        group = next(found for found, table in tables.items() if isinstance(table, list))
        table = tables[group]
        assert isinstance(table, list)
        changed: dict[str, object] = {
            "twice": [table[0], table[0], *table[2:]],
            "beyond": [*table[:-1], BLOCKS],
            "negative": [*table[:-1], -2],
            "a hole": [-1, *table[1:]],
            "too short": table[:-1],
            "no number": [*table[:-1], 1.5],
            "unaligned": table,
        }
        if change == "missing":
            del tables[group]
        else:
            tables[group] = changed[change]
        request = replace(request, start=1 if change == "unaligned" else 0, **{end: tables})
        if change != "no number":
            assert said(binder, request) == said(binder, as_columns(request))
        with pytest.raises(BindError):
            binder.load(request)


@pytest.mark.parametrize("end", ["src", "dst"])
def test_a_block_that_two_groups_name_is_refused_on_either_side(end: str) -> None:
    binder = Binder.of_sessions(a_plan(*SHAPES[1]))
    request = a_request(binder.plan)
    tables = dict(getattr(request, end))
    (state, *_), (block, *_) = (
        [t for t in tables.values() if isinstance(t, int)],
        [g for g in tables if not isinstance(tables[g], int)],
    )
    table = tables[block]
    assert isinstance(table, list)
    tables[block] = [state, *table[1:]]
    with pytest.raises(BindError, match=f"both name block {state}"):
        binder.load(replace(request, **{end: tables}))


class Odd:
    """A number as NumPy and torch have them: no two are equal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number

    def __lt__(self, other: object) -> bool:
        return self.number < int(other)  # type: ignore[call-overload]

    def __gt__(self, other: object) -> bool:
        return self.number > int(other)  # type: ignore[call-overload]

    def __ge__(self, other: object) -> bool:
        return self.number >= int(other)  # type: ignore[call-overload]

    def __int__(self) -> int:
        return self.number


def test_a_block_that_is_named_twice_is_refused_whatever_stands_for_its_number() -> None:
    binder = Binder.of_sessions(a_plan(*SHAPES[0]))
    request = a_request(binder.plan)
    table = request.dst[0]
    assert isinstance(table, list)
    again = [Odd(number) for number in (table[0], table[0], *table[2:])]
    with pytest.raises(BindError, match="names block 1 twice"):
        binder.load(replace(request, dst={0: again}))  # type: ignore[dict-item]


def bytes_of(columns: tuple[np.ndarray, ...]) -> list[tuple[int, int]]:
    region, offset, length = (column.tolist() for column in columns)
    return sorted((r, o + i) for r, o, n in zip(region, offset, length, strict=True) for i in range(n))


def test_a_stretch_of_tiles_is_filled_as_they_are_one_by_one() -> None:
    apart = together = 0
    for seed in range(120):
        case = drawn.case(seed)
        for plan in make_plans(case.consumers, case.producers):
            tokens = {group.id: group.tokens for group in plan.consumer.groups}
            for fill in plan.fills:
                for grain in fill.grains:
                    tiles = tokens[fill.group] // grain.tokens if grain.tokens else 1
                    runs = Runs(grain, plan.lanes)
                    for first in range(tiles - 1):
                        tile = np.arange(first, tiles, dtype=np.int64)
                        block = np.zeros_like(tile)
                        found = runs.filled_on(block, tile)
                        assert bytes_of(found) == bytes_of(runs.filled(block, tile))
                        together += len(found[0]) < len(tile) * len(runs)
                        apart += len(found[0]) == len(tile) * len(runs)
    assert together
    assert apart
