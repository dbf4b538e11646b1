"""How fast the copying kernel copies scattered runs on this GPU, by form, warps and programs.

    python benchmarks/kernels.py [--only NAME] [--shape NAME] [--programs 128 256] [--mib 1024] [--budget-s 35] [--json FILE]

Beside a plain copy of as many bytes. Every cell's bytes are compared once. The variants come in order of what they tell, and
none is begun after the budget: compiling a kernel takes about a second. What wins is chosen by ROWS in
`kvferry.strategy.moves`, WARPS in `kvferry.strategy.kernel`, and PROGRAMS in `kvferry.strategy.cuda`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
import triton

from kvferry.manifest import Identity
from kvferry.manifest.schema import FULL, Group, Region, StatePaged
from kvferry.plan import Plan, Tiles
from kvferry.plan.schema import Edge, Grain, Lane, Need, Run, Side
from kvferry.strategy import kernel
from kvferry.strategy.cuda import PROGRAMS
from kvferry.strategy.moves import ROWS, Bound, Form, Moves

DEVICE: Final = "cuda"
REPEATS: Final = 5
NARROW: Final = {8: 256, 128: 16}


@dataclass(frozen=True)
class Shape:
    """`runs` runs of a tile, `length` bytes each: `stride` apart in the source, close together in the destination."""

    name: str
    length: int
    stride: int
    runs: int = 1


SHAPES: Final = (
    Shape("24,576-byte slices", 24_576, 49_152),
    Shape("49,152-byte pages", 49_152, 49_152),
    Shape("64 KiB pages", 1 << 16, 1 << 16),
    Shape("2 MiB blocks", 1 << 21, 1 << 21),
    Shape("8 KiB pages", 1 << 13, 1 << 13),
    Shape("1 KiB runs", 1 << 10, 1 << 11, 16),
    Shape("1,536-byte runs", 1536, 3072, 16),
)


@dataclass(frozen=True)
class Variant:
    """A kernel: elements of a row, and how many such rows a program has under way; and its warps."""

    name: str
    rows: Mapping[int, int] = field(default_factory=lambda: ROWS)
    warps: int = kernel.WARPS


VARIANTS: Final = (
    Variant("as it is"),
    Variant("8 warps", warps=8),
    Variant("rows of 2,048", {**NARROW, 2048: 1}),
    Variant("rows up to 1,024", {**NARROW, 1024: 4}),
    Variant("no rows of 1,024", {**NARROW, 4096: 1}),
)


@dataclass(frozen=True)
class Cell:
    """What was measured: 10^9 bytes copied a second, and those of a plain copy."""

    shape: str
    variant: str
    programs: int
    forms: tuple[str, ...]
    warps: int
    right: bool
    gbps: float
    plain_gbps: float


class Scattered:
    """One shape's bytes, in no order on either side: two memories, what the second must hold, and the tables of any variant."""

    def __init__(self, shape: Shape, source: Any, target: Any) -> None:
        self.shape, self.source = shape, source
        page, self.tile = shape.stride * shape.runs, shape.length * shape.runs
        self.tiles = min(len(source) // page, len(target) // self.tile)
        self.bytes = self.tiles * self.tile
        self.target = target[: self.bytes]
        order = np.random.default_rng(shape.length)
        there, here = (order.permutation(self.tiles).astype(np.int32) for _ in range(2))
        first = np.zeros(self.tiles, np.int32)
        self.places = {(0, 0): Tiles(there, first, here, first)}
        repeats = ((shape.runs, shape.stride, shape.length),) if shape.runs > 1 else ()
        run = Run(0, 0, 0, 0, shape.length, repeats, 0, 1)
        group = Group(0, StatePaged(), self.tiles, hashed=False)
        lengths = {"p": len(source), "d": self.bytes}
        sides = {name: Side(Identity(name, "1", "m"), (Region(name, size),), (group,)) for name, size in lengths.items()}
        lanes = Lane(page, ()), Lane(self.tile, ())
        needs = (Need(FULL, 0, False, 0, ("layer",)),)
        self.plan = Plan(sides["d"], (sides["p"],), lanes, needs, (Edge(0, 0, 0, 0, (Grain(0, (run,)),)),), ())
        kept = source[: self.tiles * page].view(self.tiles, shape.runs, shape.stride)[:, :, : shape.length]
        self.want = torch.empty_like(self.target)
        rows = [torch.from_numpy(ids.astype(np.int64)).to(DEVICE) for ids in (there, here)]
        self.want.view(self.tiles, shape.runs, shape.length)[rows[1]] = kept[rows[0]]

    def moves(self, variant: Variant) -> Moves:
        return Moves(self.plan, 0, lambda _: int(self.source.data_ptr()), lambda _: int(self.target.data_ptr()), variant.rows)


def launching(moves: Moves, bound: Bound, variant: Variant, programs: int) -> tuple[Callable[[], None], Any]:
    """What copies everything once; and where the bytes are counted."""
    pieces, table = torch.from_numpy(moves.pieces).to(DEVICE), torch.from_numpy(bound.table).to(DEVICE)
    counts = torch.zeros((len(bound.launches), programs), dtype=torch.int64, device=DEVICE)

    def launch() -> None:
        for one, count in zip(bound.launches, counts, strict=True):
            kernel.launch(programs, pieces, table, one.at, one.jobs, count, one.form, variant.warps)

    return launch, counts


def seconds(run: Callable[[], object]) -> float:
    """The best of some, on the device."""
    best = float("inf")
    for _ in range(REPEATS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1000)
    return best


def measured(scattered: Scattered, variant: Variant, programs: Sequence[int], plain: float) -> Iterator[Cell]:
    moves = scattered.moves(variant)
    bound = moves.bind(scattered.places)
    for count in programs:
        launch, counts = launching(moves, bound, variant, count)
        scattered.target.zero_()
        launch()
        right = bool(torch.equal(scattered.target, scattered.want)) and int(counts.sum()) == scattered.bytes
        yield Cell(
            scattered.shape.name, variant.name, count, tuple(map(_shown, moves.forms)), variant.warps, right,
            scattered.bytes / seconds(launch) / 1e9, plain,
        )  # fmt: skip


def cells(
    shapes: Sequence[Shape], variants: Sequence[Variant], programs: Sequence[int], mib: int, until: float
) -> Iterator[Cell]:
    """Variant by variant, those that would repeat a kernel's cell left out."""
    numbers = torch.randint(0, 1 << 62, (2 * mib << 17,), dtype=torch.int64, device=DEVICE)
    source, target = numbers.view(torch.uint8), torch.empty(mib << 20, dtype=torch.uint8, device=DEVICE)
    made = [Scattered(shape, source, target) for shape in shapes]
    plain = [one.bytes / seconds(lambda one=one: one.target.copy_(source[: one.bytes])) / 1e9 for one in made]
    known = set()
    for variant in variants:
        for scattered, beside in zip(made, plain, strict=True):
            kind = scattered.shape, scattered.moves(variant).forms, variant.warps
            if kind in known:
                continue
            if perf_counter() > until:
                print(
                    f"the budget is spent: {variant.name}, {scattered.shape.name} and what follows is not measured", flush=True
                )
                return
            known.add(kind)
            yield from measured(scattered, variant, programs, beside)


def _shown(form: Form) -> str:
    return f"{form.rows} x {form.columns} x {form.width}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--shape", default="", help="shapes whose name contains this")
    parser.add_argument("--programs", type=int, nargs="+", default=[PROGRAMS, 256])
    parser.add_argument("--mib", type=int, default=1024, help="MiB to copy; twice as many are scattered over")
    parser.add_argument("--budget-s", type=float, default=35.0, help="begin nothing after so many seconds")
    parser.add_argument("--json", type=Path, help="where to write all cells")
    return parser.parse_args()


def main() -> None:
    began = perf_counter()
    chosen = _arguments()
    shapes = [shape for shape in SHAPES if chosen.shape in shape.name]
    variants = [variant for variant in VARIANTS if chosen.only in variant.name]
    if not shapes or not variants:
        sys.exit("no variant or no shape is of that name")
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU that torch can use")
    found: list[Cell] = []
    device = torch.cuda.get_device_name()
    print(f"{device}, triton {triton.__version__}; GB/s, and of a plain copy's", flush=True)
    for cell in cells(shapes, variants, chosen.programs, chosen.mib, began + chosen.budget_s):
        found.append(cell)
        print(
            f"{perf_counter() - began:5.1f} s  {cell.variant:18}{cell.shape:20}{cell.programs:4} programs  {cell.gbps:6.0f}"
            f"  {cell.gbps / cell.plain_gbps:4.0%}  {'; '.join(cell.forms)}{'' if cell.right else '  WRONG BYTES'}",
            flush=True,
        )
        if chosen.json:
            whole = {"device": device, "triton": triton.__version__, "mib": chosen.mib, "cells": [asdict(one) for one in found]}
            chosen.json.write_text(json.dumps(whole, indent=1) + "\n")
    if not all(cell.right for cell in found):
        sys.exit("some cells copied wrong bytes")


if __name__ == "__main__":
    main()
