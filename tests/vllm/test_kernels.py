"""The kernels without a GPU: run by Triton's interpreter on plain memory, and compiled; in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.strategy.moves import COLUMNS, UNITS

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


def lines_of(script: str, interpreted: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": interpreted}
    command = [sys.executable, HERE / script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return lines_of("interpreted_kernels.py", "1")


def test_aligned_rows_are_fetched_and_stored_16_bytes_at_a_time():
    """The compiler says nothing where it cannot see the alignment: it takes twice as many accesses of half the bytes."""
    found = lines_of("compiled_kernels.py", "0")
    assert [form["columns"] for form in found] == list(COLUMNS)
    for form in found:
        assert form["fetches"]
        assert all(one.endswith(".v2.b64") for one in form["fetches"]), form
        *bytes_of, count = form["stores"]
        assert len(bytes_of) == len(form["fetches"])
        assert all(one == "st.global.v2.b64" for one in bytes_of), form
        assert count == "st.global.b64"


def test_every_byte_is_where_the_plan_says_and_none_beside_it(found):
    assert [case["case"] for case in found if case["differing"]] == []


def test_the_kernels_count_the_bytes_that_the_plan_says(found):
    assert [case["case"] for case in found if case["counted"] != case["planned"]] == []
    assert sum(case["planned"] for case in found) > 1 << 20


def test_every_form_of_the_kernel_has_been_run(found):
    run = {tuple(form) for case in found for form in case["forms"]}
    assert run == {(unit, columns) for unit in UNITS for columns in COLUMNS}


def test_topologies_drawn_plans_detours_rounds_benchmarks_and_zeros_are_among_the_cases(found):
    names = [case["case"] for case in found]
    assert len(set(names)) == len(names)
    for word in (" to ", "drawn ", "packed ", "rounds of ", "benchmark, ", "zeros ", "by 1", "by 32"):
        assert any(word in name for name in names)
