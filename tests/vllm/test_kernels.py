"""The kernels' indexing, without a GPU: Triton's interpreter runs them on plain memory, in a process of its own."""

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

SCRIPT = Path(__file__).parent / "interpreted_kernels.py"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_every_byte_is_where_the_plan_says_and_none_beside_it(found):
    assert [case["case"] for case in found if case["differing"]] == []


def test_the_kernels_count_the_bytes_that_the_plan_says(found):
    assert [case["case"] for case in found if case["counted"] != case["planned"]] == []
    assert sum(case["planned"] for case in found) > 1 << 20


def test_every_form_of_the_kernel_has_been_run(found):
    run = {tuple(form) for case in found for form in case["forms"] if case["planned"]}
    assert run == {(unit, columns) for unit in UNITS for columns in COLUMNS}


def test_topologies_drawn_plans_detours_and_zeros_are_among_the_cases(found):
    names = [case["case"] for case in found]
    assert len(set(names)) == len(names)
    for word in (" to ", "drawn ", "packed ", "zeros ", "by 1", "by 32"):
        assert any(word in name for name in names)
