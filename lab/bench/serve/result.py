"""What was measured, as it is kept in a file: written after every row, so that little is lost where a run ends early."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvferry.errors import MeasureError
from lab.bench.machine import Machine

BENCH: Final = "serve"
VERSION: Final = 1


class Settings(Struct, frozen=True):
    """What every arm is asked to do. Figures of unlike settings are not comparable. `traced`: the engines' steps are recorded,
    which takes time of its own. `warmed`: a burst went before those that count."""

    model: str
    device: str
    dtype: str
    lengths: tuple[int, ...]
    repeats: int
    at_once: int
    at_once_length: int
    rounds: int
    beside: int
    output: int
    idle_s: float
    prefills: int
    rate: float
    rate_s: float
    kv_cache_bytes: str
    prefix_caching: bool
    seed: int
    traced: bool = False
    warmed: bool = False


class Trace(Struct, frozen=True):
    """Steps of the engine of one side while something went on. Milliseconds and counts, by column: `sums` over all `steps`, and
    the `slowest` of them one by one, in the order of time; `at` is counted from the first thing measured. A column that is not
    there is 0 throughout."""

    side: str
    during: str
    steps: int
    sums: dict[str, float]
    slowest: dict[str, list[float]]


class Row(Struct):
    """One thing measured. `order`: how the blocks lay. `samples`: times in milliseconds, rates per second. `blocks` and
    `runs` over all its requests, `scatter` of the one whose blocks lay closest. `foretold_bytes`: what plans said
    would be moved. `traces`: where steps spent their time, if that was asked for. `void` says why it does not count."""

    name: str
    order: str
    tokens: int
    samples: dict[str, list[float]]
    requests: list[str] = msgspec.field(default_factory=list)
    from_peer: int = 0
    computed: int = 0
    cached: int = 0
    moved_bytes: int = 0
    foretold_bytes: int = 0
    pieces: int = 0
    wire_s: float = 0.0
    blocks: int = 0
    runs: int = 0
    scatter: float = -1.0
    void: str = ""
    traces: list[Trace] = msgspec.field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.name, self.order, self.tokens


class Run(Struct):
    """One start of one arm. `answers`: first tokens of a few prompts, to be compared with another arm's. `parted`: the same of
    an engine alone that computed each prompt's last token in a step of its own, as D does. `phases`: seconds."""

    arm: str
    mode: str
    start: int
    block: int
    connector: dict[str, Any]
    phases: dict[str, float] = msgspec.field(default_factory=dict)
    rows: list[Row] = msgspec.field(default_factory=list)
    answers: dict[str, list[int]] = msgspec.field(default_factory=dict)
    parted: dict[str, list[int]] = msgspec.field(default_factory=dict)
    started_by: str = ""
    error: str = ""
    complete: bool = False

    @property
    def key(self) -> tuple[int, str, str]:
        return self.start, self.mode, self.arm

    def row(self, key: tuple[str, str, int]) -> Row | None:
        """Only one that counts: what was cut off before the blocks of its requests were looked at does not."""
        return next((it for it in self.rows if it.key == key and not it.void and (it.blocks or not it.requests)), None)


class Record(Struct, frozen=True):
    machine: Machine
    settings: Settings
    runs: list[Run]
    bench: str = BENCH
    version: int = VERSION

    def done(self) -> set[tuple[int, str, str]]:
        return {run.key for run in self.runs if run.complete}

    def keep(self, run: Run) -> None:
        """In the place of an earlier attempt at the same start."""
        self.runs[:] = [it for it in self.runs if it.key != run.key]
        self.runs.append(run)


def read(path: Path) -> Record:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise MeasureError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MeasureError(f"{path}: not what `python -m lab bench serve --out` writes: {error}") from None
    if (found.bench, found.version) != (BENCH, VERSION):
        raise MeasureError(f"{path}: of bench {found.bench}, version {found.version}; wanted {BENCH}, version {VERSION}")
    return found


def write(path: Path, record: Record) -> None:
    """All of it or nothing."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(msgspec.json.encode(record))
            os.chmod(name, 0o644)
            os.replace(name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
    except OSError as error:
        raise MeasureError(f"--out {path}: cannot be written: {error.strerror}") from None


def merged(records: Sequence[Record]) -> Record:
    """The runs of all. Starts are counted on from record to record, so that ratios stay within one run."""
    first = records[0]
    runs: list[Run] = []
    for record in records:
        refuse_unlike(first.settings, record.settings)
        before = 1 + max((run.start for run in runs), default=-1)
        runs += [replace(run, start=run.start + before) for run in record.runs]
    return Record(first.machine, first.settings, runs)


def refuse_unlike(one: Settings, other: Settings) -> None:
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in Settings.__struct_fields__}
    unlike = [f"{name} {a!r} and {b!r}" for name, (a, b) in pairs.items() if a != b]
    if unlike:
        raise MeasureError(f"runs with unlike settings cannot be compared: {', '.join(unlike)}")
