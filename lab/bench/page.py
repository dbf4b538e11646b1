"""Results for people: rows of a table, bars of a picture, and the page of figures. Figures are ratios; above 1 is faster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvferry.errors import MeasureError
from lab.bench.bind import Bound
from lab.bench.handshake import Prepared
from lab.bench.machine import Machine
from lab.bench.plot import Bar
from lab.bench.transfer import Moved

BEGIN: Final = "<!-- device results: begin -->"
END: Final = "<!-- device results: end -->"

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


class DeviceRecord(Struct, frozen=True):
    """What `transfer --memory vram --json` writes."""

    machine: Machine
    repeats: int
    results: tuple[Moved, ...]


def read_device(path: Path) -> DeviceRecord:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=DeviceRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise MeasureError(f"--gpu {path}: not what `transfer --memory vram --json` writes: {error}") from None
    if not found.results or any(row.memory != "vram" for row in found.results):
        raise MeasureError(f"--gpu {path}: has results of host memory, or none; run `transfer --memory vram --json`")
    return found


def table(results: Sequence[Any]) -> Rows:
    """Head and rows for results of one benchmark."""
    if results and isinstance(results[0], Prepared):
        return _prepared(results)
    return _moved(results) if results and isinstance(results[0], Moved) else _bound(results)


def bars(results: Sequence[Any]) -> list[Bar]:
    found = []
    for row in results:
        found.append(Bar(row.case, "× stock", row.ratio_to_stock))
        if isinstance(row, Moved):
            found.append(Bar(row.case, "× one descriptor", row.ratio_to_one_descriptor))
            found.append(Bar(row.case, "× memcpy", row.ratio_to_memcpy))
    return found


def _prepared(results: Sequence[Prepared]) -> Rows:
    head = ("prepare a peer", "rows", "stock's descriptors", "× stock", "× less memory, peak", "× less, kept", "plan / prepare")
    return head, [
        (
            row.case, f"{row.rows:,}", f"{row.descriptors:,}", _ratio(row.ratio_to_stock),
            _ratio(row.peak_ratio), _ratio(row.kept_ratio), _ratio(row.plan_seconds / row.seconds),
        )
        for row in results
    ]  # fmt: skip


def _moved(results: Sequence[Moved]) -> Rows:
    head, body = _moved_ratios(results)
    return (*head, "GB/s"), [(*row, f"{found.gigabytes_per_second:,.1f}") for row, found in zip(body, results, strict=True)]


def _moved_ratios(results: Sequence[Moved]) -> Rows:
    head = ("move a request", "MB", "stock's MB", "runs", "× stock", "× one descriptor", "× memcpy", "bytes")
    return head, [
        (
            row.case, f"{row.bytes / 1e6:,.1f}", "" if row.stock_bytes is None else f"{row.stock_bytes / 1e6:,.1f}",
            f"{row.runs:,}", row.stock_remark or _ratio(row.ratio_to_stock),
            _ratio(row.ratio_to_one_descriptor), _ratio(row.ratio_to_memcpy), "right" if row.right else "WRONG",
        )
        for row in results
    ]  # fmt: skip


def _bound(results: Sequence[Bound]) -> Rows:
    head = ("bind a request", "indices", "stock's indices", "× stock", "addresses: runs", "addresses / indices, time")
    return head, [
        (
            row.case, f"{row.indices:,}", "" if row.stock_indices is None else f"{row.stock_indices:,}",
            row.stock_remark or _ratio(row.ratio_to_stock), f"{row.address_runs:,}",
            _ratio(row.address_seconds / row.seconds),
        )
        for row in results
    ]  # fmt: skip


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def described(machine: Machine) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in machine.packages.items())
    device = f", {machine.device}" if machine.device else ""
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_gib:g} GiB{device}, Linux {machine.kernel}, "
        f"Python {machine.python}, {packages}"
    )


def written(
    machine: Machine,
    repeats: int,
    prepared: Sequence[Prepared],
    moved: Sequence[Moved],
    bound: Sequence[Bound],
    device: DeviceRecord | None,
    before: str,
) -> str:
    """The page; the section on devices is written from `device`, or kept from the page that was there before."""
    return _PAGE.format(
        machine=described(machine),
        repeats=repeats,
        prepared=_markdown(_prepared(prepared)),
        moved=_markdown(_moved_ratios(moved)),
        bound=_markdown(_bound(bound)),
        device=f"{BEGIN}\n{_device(device, before)}\n{END}",
    )


def _device(device: DeviceRecord | None, before: str) -> str:
    if device is not None:
        return (
            f"Measured on {described(device.machine)}; medians of {device.repeats}. Both processes share one GPU: this is the "
            f"cost of descriptors and of the path that UCX chose ({device.results[0].path}), not of a network.\n\n"
            f"{_markdown(_moved(device.results))}"
        )
    kept = re.search(f"{BEGIN}\n(.*?)\n{END}", before, flags=re.DOTALL)
    return kept[1] if kept else "Not measured yet."


def _markdown(rows: Rows) -> str:
    head, body = rows
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


_PAGE: Final = """\
# Micro-benchmarks

Written by `python -m lab bench report --out docs/microbenchmarks.md`. In a round everything is measured in turn, and every
ratio is the median of the rounds' own, {repeats} of them; "× stock" above 1 means that KVFerry is so many times faster.
Ratios travel between machines better than seconds do, and still not well: repeat them on yours.

Machine: {machine}.

The baselines:

- **stock**: a model of what vLLM 0.32's NIXL connector does, not that connector itself (`lab.bench.stock` says what it
  models and leaves out): a dense list of a whole-page descriptor per block and region, four per Mamba state, prepared
  once on each side, indexed per request through Python lists; per source rank, its lists are cut in a loop;
- **one descriptor**: a single contiguous NIXL read of as many bytes, the limit of the wire;
- **memcpy**: a plain copy of as many bytes by one process, the limit of the memory.

## Preparing a peer

    python -m lab bench handshake

Rows do not grow with blocks. Memory is what a fresh process's resident set grows by, at its peak and for good, Python and
native together; less than a page of the kernel counts as one, so that the largest ratios are those of a page. What stock
keeps is its own array of descriptors: NIXL itself stores such a list compressed. Planning, which happens once for a pair of
sides and includes the proof, is shown as a multiple of preparing and is not in the ratio to stock: with it, equal sides are
some 20 times faster, not a hundred. Connecting two NIXL agents is counted for neither side; with it counted for KVFerry
alone, memory kept was 52 times less, and 215 times at the peak.

{prepared}

## Moving a request

    python -m lab bench transfer

Two processes, host memory, no progress threads. From block tables to the last byte: binding, posting, waiting. Bytes are
compared before anything is timed. Stock merges consecutive whole pages as well as we do, so that nobody wins there; where
a request needs less than whole blocks we move less; slices of pages and scattered pages cost a descriptor each for
everyone. Ratios below 1 are shown like all others. They vary from run to run: on two quiet cores, thirteen measurements of
equal sides gave 0.95 to 1.02 of stock; beside other work they mean little.

{moved}

## Binding a request

    python -m lab bench bind

From block tables to index arrays, both sides of all sources. Stock has an index per kernel block and region, KVFerry one per
block where whole blocks move. Explicit addresses (what a transport without prepared lists takes) are merged runs.

{bound}

## On a GPU

    python -m lab.bench.transfer --memory vram --json > results.json
    python -m lab bench report --out docs/microbenchmarks.md --gpu results.json

{device}
"""
