"""`python -m lab bench serve` on real engines: what it says must be true of them. Nothing is judged by its time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.serve.result import Record, read
from lab.fleet.steps import OTHER

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
SMALL = "--repeats 2 --at-once 4 --idle-s 0.3 --prefills 4 --rate-s 1 --output 4"


def documented() -> list[str]:
    """The command of the documentation that a CPU can run."""
    page = (ROOT / "docs" / "how-to.md").read_text()
    (command,) = [line for line in page.splitlines() if line.startswith("$ python -m lab bench serve --model tiny")]
    return shlex.split(command.removeprefix("$ python "))


def bench(out: Path, *words: str) -> Record:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, *documented(), *SMALL.split(), "--out", str(out), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-3000:])
    assert "bench serve: " in done.stdout
    return read(out)


def test_a_floor_and_a_connector_are_measured_on_scattered_blocks_and_answer_alike(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    record = bench(out, "--arms", "none,kvferry", "--trace")
    floor, ferried = record.runs
    assert [run.arm for run in record.runs] == ["none", "kvferry"]
    for run in record.runs:
        assert run.complete
        assert [row.void for row in run.rows if row.void] == []
        assert {(row.name, row.order) for row in run.rows} >= {
            ("first", "consecutive"),
            ("alone", "consecutive"),
            ("alone", "scattered"),
            ("busy", "scattered"),
            ("at-once", "scattered"),
            ("decode", "scattered"),
            ("prefill", "scattered"),
        }
    for row in ferried.rows:
        if row.requests:
            assert row.from_peer >= len(row.requests) * (row.tokens - 1)
            assert row.moved_bytes > 0
            assert row.scatter >= 0.9 or row.order == "consecutive"
            assert len(row.samples["in the engine"]) == len(row.requests)
            assert all(first > 0 for first in row.samples["in the engine"])
    for run in record.runs:
        (row,) = [row for row in run.rows if row.name == "at-once"]
        (loads,) = [it for it in row.traces if (it.side, it.during) == ("D", "loads")]
        assert loads.sums.get("loads begun", 0) == loads.sums.get("loads ended", 0) == (4 if run is ferried else 0)
        assert loads.sums["new"] == 4
        assert all(loads.sums[part] > 0 for part in ("intake", "schedule", "launch", "update"))
        assert loads.sums.get(OTHER, 0) > -0.1, "nothing is counted twice"
        (busy,) = [it for row in run.rows if row.name == "busy" for it in row.traces if (it.side, it.during) == ("D", "loads")]
        assert busy.sums["running"] > 3 * busy.steps, "others are decoded for meanwhile"
    for row in ferried.rows:
        if row.name == "prefill":
            assert {"alone", "read", "hits", "decoding", "read while decoding"} <= row.samples.keys()
            assert len(row.samples["ttft, read"]) == len(row.samples["ttft, read-decoding"]) == len(row.requests) / 2
    (fresh,) = [row for row in ferried.rows if (row.name, row.order) == ("alone", "consecutive")]
    assert fresh.runs < fresh.blocks / 2
    assert all(row.moved_bytes == row.from_peer == 0 for row in floor.rows)
    assert ferried.answers == floor.answers
    assert len({tuple(tokens) for tokens in floor.answers.values()}) == len(floor.answers) > 4
    before = out.read_bytes()
    again = bench(out, "--arms", "none,kvferry", "--trace")
    assert out.read_bytes() == before, "what the file holds is not run again"
    assert again.done() == {(0, "eager", "none"), (0, "eager", "kvferry")}


def test_a_spawned_server_is_looked_into_as_a_forked_one_and_its_blocks_lie_in_either_order_by_turns(tmp_path: Path) -> None:
    record = bench(tmp_path / "serve.json", "--arms", "none", "--start", "spawn", "--only", "in-turns")
    (run,) = record.runs
    assert run.started_by == "spawn"
    assert run.complete
    laid = {row.order: row for row in run.rows}
    assert [row.void for row in run.rows] == ["", ""]
    assert laid["scattered"].blocks == laid["consecutive"].blocks > 0
    assert laid["consecutive"].runs == len(laid["consecutive"].requests) == 2
    assert laid["scattered"].runs > laid["scattered"].blocks / 2
