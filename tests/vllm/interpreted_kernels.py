"""The kernels as Triton's interpreter runs them, in a process that was started for it: prints one line of JSON per case.

The interpreter must be chosen before Triton is imported; what a kernel does to memory is then done by NumPy, index by index.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np

if os.environ.get("TRITON_INTERPRET") != "1":
    sys.exit("start this with TRITON_INTERPRET=1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from drawn_moves import Guarded, drawn, seeded
from kvferry.plan import Binder, Fleet, make_plans
from kvferry.plan.detour import Pieces, packed, tiles_here, tiles_there
from kvferry.strategy import kernel
from kvferry.strategy.moves import COLUMNS, FIELDS, ROWS, Bound, Form, Moves
from transport_peer import allocated
from transport_suite import Case, model_case

PAIRS = [
    ("tp=1", "tp=1"),
    ("tp=2", "tp=3"),
    ("tp=2,conv=sd", "tp=4"),
    ("tp=1,layout=token", "tp=2"),
    ("tp=1,pool=block", "tp=2,kv=separate"),
    ("pp=2", "tp=2"),
]
PROGRAMS = (1, 3, 32)
SEEDS = (*range(8), 11, 12, 14, 16, 21, 23, 34, 38, 54)
"""So few that have every form at least twice."""
MEASURED = 1 << 16


def launched(moves: Moves, bound: Bound, programs: int) -> int:
    """One load by so many programs; bytes, as the kernels counted them."""
    pieces, table = torch.from_numpy(moves.pieces), torch.from_numpy(bound.table)
    moved = 0
    for launch in bound.launches:
        counts = torch.full((programs,), -1, dtype=torch.int64)
        kernel.launch(programs, pieces, table, launch.at, launch.jobs, counts, launch.form)
        moved += int(counts.sum())
    return moved


def forms_of(bound: Bound) -> set[tuple[int, int]]:
    return {(launch.form.unit, launch.form.columns) for launch in bound.launches}


def of_model(case: Case, programs: int) -> dict[str, object]:
    """All ranks of a model's request, against the copies that binding spells out."""
    there, here = allocated(case.producers, 1), allocated(case.consumers, 2)
    plans = make_plans([rank.manifest for rank in here], Fleet([rank.manifest for rank in there]))
    by_rank = {rank.manifest.identity.rank: rank for rank in there}
    differing, counted, planned, forms = 0, 0, 0, set()
    for rank, plan in zip(here, plans, strict=True):
        guarded = [Guarded(len(buffer), 0, (3, i)) for i, buffer in enumerate(rank.buffers)]
        for region, buffer in zip(guarded, rank.buffers, strict=True):
            region.bytes[:] = buffer
        want = [region.whole.copy() for region in guarded]
        binder = Binder(plan)
        tiles = binder.tiles(case.request)
        for number, copies in enumerate(binder.bind(case.request).copies):
            source = by_rank[plan.sources[number].identity.rank]
            columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
            for sr, so, dr, do, n in zip(*(c.tolist() for c in columns), strict=True):
                at = guarded[dr].start + do
                want[dr][at : at + n] = source.buffers[sr][so : so + n]
            moves = Moves(
                plan,
                number,
                lambda i, of=source: of.manifest.regions[i].address,  # type: ignore[misc]
                lambda i, of=guarded: of[i].address,  # type: ignore[misc]
            )
            bound = moves.bind(tiles)
            counted += launched(moves, bound, programs)
            planned += copies.bytes
            forms |= forms_of(bound)
        differing += sum(int((region.whole != w).sum()) for region, w in zip(guarded, want, strict=True))
    return {"differing": differing, "counted": counted, "planned": planned, "forms": sorted(forms)}


def of_seed(seed: int) -> dict[str, object]:
    """A drawn plan, source by source, against its runs one by one."""
    choose = seeded(seed)
    made, programs = drawn(choose, seed), choose((1, 2, 7, 32))
    differing, counted, planned, forms, read = 0, 0, 0, set(), []
    for source in range(len(made.plan.sources)):
        read.append(source)
        want = made.expected(*read)
        moves = made.moves(source)
        bound = moves.bind(made.tiles)
        counted += launched(moves, bound, programs)
        planned += made.bytes(source)
        forms |= forms_of(bound)
        differing += sum(int((region.whole != w).sum()) for region, w in zip(made.here, want, strict=True))
    return {"differing": differing, "counted": counted, "planned": planned, "forms": sorted(forms)}


def of_detour(seed: int) -> dict[str, object]:
    """A drawn plan gathered into slots and scattered out of them, piece after piece, against its runs one by one."""
    choose = seeded(seed)
    made, programs, room = drawn(choose, seed), choose((1, 5)), 1 << 15
    differing, counted, planned, forms, read = 0, 0, 0, set(), []
    for source in range(len(made.plan.sources)):
        read.append(source)
        want, there = made.expected(*read), made.sources[source]
        detour = packed(made.plan, source, room, room // 8)
        ring = Guarded(3 * room, 0, (seed,))
        ways = (
            Moves(detour.there, 0, lambda i, of=there: of[i].address, lambda _, of=ring: of.address),  # type: ignore[misc]
            Moves(detour.here, 0, lambda _, of=ring: of.address, lambda i: made.here[i].address),  # type: ignore[misc]
        )
        own = {part.key for part in detour.parts}
        pieces = Pieces(detour.parts, {key: len(found.src_block) for key, found in made.tiles.items() if key in own})
        slot = 0
        while not pieces.over:
            piece = pieces.take(0, room)
            slot = (slot + 1) % 3
            into = ways[0].bind(tiles_there(piece, detour.parts, made.tiles), dst_shift=slot * room)
            launched(ways[0], into, programs)
            out = ways[1].bind(tiles_here(piece, detour.parts, made.tiles), src_shift=slot * room)
            counted += launched(ways[1], out, programs)
            forms |= forms_of(into) | forms_of(out)
        planned += made.bytes(source)
        differing += sum(int((region.whole != w).sum()) for region, w in zip(made.here, want, strict=True))
    return {"differing": differing, "counted": counted, "planned": planned, "forms": sorted(forms)}


def of_rounds(columns: int, programs: int) -> dict[str, object]:
    """Jobs that begin where the last one ended, and whose items just fill a round, or all programs' rounds, or just do not, or
    need another: two pieces, one of them short, each of a source lane of its own, at tiles in no order."""
    rows, page = ROWS[columns], 16 * columns
    full = programs * rows
    tiles_of = sorted({1, rows // 2 or 1, rows // 2 + 1, full // 2, full // 2 + 1, full, 2 * full + 1})
    rng = np.random.default_rng(columns)
    there, here = (Guarded(sum(tiles_of) * page, 0, (columns, side)) for side in range(2))
    want = here.whole.copy()
    shapes = ((0, columns), (8 * columns, columns - 4))
    jobs: list[tuple[int, ...]] = []
    places: list[np.ndarray] = []
    at, turn, first = len(tiles_of) * FIELDS, 0, 0
    for tiles in tiles_of:
        jobs.append((0, len(shapes), tiles, at, turn))
        lanes = [(rng.permutation(tiles) + first) * page for _ in range(len(shapes) + 1)]
        places += lanes
        for (offset, elements), lane in zip(shapes, lanes[:-1], strict=True):
            for source, target in zip(lane.tolist(), lanes[-1].tolist(), strict=True):
                piece = there.bytes[source + offset : source + offset + 8 * elements]
                want[here.start + target + offset : here.start + target + offset + 8 * elements] = piece
        at, turn, first = at + len(lanes) * tiles, turn + -(-len(shapes) * tiles // rows), first + tiles
    table = np.concatenate([np.array(jobs).reshape(-1), *places])
    pieces = [[there.address + at, here.address + at, elements, i, len(shapes)] for i, (at, elements) in enumerate(shapes)]
    counts = torch.full((programs,), -1, dtype=torch.int64)
    tables = torch.tensor(pieces), torch.from_numpy(table)
    kernel.launch(programs, *tables, 0, len(jobs), counts, Form(16, columns, rows))
    planned = 8 * sum(elements for _, elements in shapes) * sum(tiles_of)
    return {"differing": int((here.whole != want).sum()), "counted": int(counts.sum()), "planned": planned, "forms": []}


def of_zeros(programs: int) -> dict[str, object]:
    """Runs of all lengths and alignments, some next to each other."""
    rng = np.random.default_rng(programs)
    region = Guarded(40_000, 3, (programs,))
    want = region.whole.copy()
    at, runs = 0, []
    for length in (1, 2, 15, 16, 17, 4095, 4096, 4097, 9000, *rng.integers(1, 300, 20).tolist()):
        runs.append((region.address + at, length))
        want[region.start + at : region.start + at + length] = 0
        at += length + int(rng.integers(0, 5))
    table = torch.from_numpy(np.array(runs, np.int64))
    kernel.zero[(programs,)](table, len(runs), COLUMNS=4096)
    return {"differing": int((region.whole != want).sum()), "counted": 0, "planned": 0, "forms": []}


def of_benchmark(script: ModuleType, number: int) -> dict[str, object]:
    """One of the variants that are compared on a GPU, with a shape of its turn."""
    variant = script.VARIANTS[number]
    fitting = [shape for shape in script.SHAPES if shape.length < MEASURED]
    source = torch.from_numpy(np.random.default_rng(number).integers(0, 256, 2 * MEASURED, np.uint8))
    scattered = script.Scattered(fitting[number % len(fitting)], source, torch.zeros(MEASURED, dtype=torch.uint8))
    moves = scattered.moves(variant)
    launch, counts = script.launching(moves, moves.bind(scattered.places), variant, 3)
    launch()
    differing = int((scattered.target != scattered.want).sum())
    return {"differing": differing, "counted": int(counts.sum()), "planned": scattered.bytes, "forms": []}


def benchmark() -> ModuleType:
    spec = spec_from_file_location("kernels", Path(__file__).parents[2] / "benchmarks" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    script.DEVICE = "cpu"
    return script


def cases() -> Iterator[tuple[str, dict[str, object]]]:
    for number, (prefill, decode) in enumerate(PAIRS):
        case = model_case("synthetic-12", prefill, decode)
        for programs in PROGRAMS if not number else (3 + number,):
            yield f"{prefill} to {decode} by {programs}", of_model(case, programs)
    for seed in SEEDS:
        yield f"drawn {seed}", of_seed(seed)
    for seed in SEEDS[:4]:
        yield f"packed {seed}", of_detour(seed)
    for columns in COLUMNS:
        yield f"rounds of {columns}", of_rounds(columns, 3)
    script = benchmark()
    for number, variant in enumerate(script.VARIANTS):
        yield f"benchmark, {variant.name}", of_benchmark(script, number)
    for programs in PROGRAMS:
        yield f"zeros by {programs}", of_zeros(programs)


if __name__ == "__main__":
    for name, found in cases():
        print(json.dumps({"case": name, **found}), flush=True)
