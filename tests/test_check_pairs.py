"""`kvferry check` on pairs whose verdicts were written first: no wrong one would serve, no right one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from check_pairs import CONFIGS, PAIRS, Pair, Verdict
from kvferry.cli import app

SERVE = "would serve"


def check(pair: Pair, folder: Path, *more: str) -> Result:
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    sides = []
    for side, words in (("prefill", pair.prefill), ("decode", pair.decode)):
        for name in CONFIGS:
            words = words.replace(f"{{{name}}}", str(folder / name))
        sides += [f"--{side}", words]
    return CliRunner().invoke(app, ["check", *sides, *more])


def test_half_of_the_pairs_are_wrong() -> None:
    assert len(PAIRS) >= 20
    assert 2 * sum(pair.verdict is Verdict.REFUSED for pair in PAIRS) == len(PAIRS)
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_pair_gets_the_verdict_that_was_written_down_for_it(pair: Pair, tmp_path: Path) -> None:
    found = check(pair, tmp_path)
    assert found.exit_code == pair.verdict.value, f"{pair.why}\n{found.output}"
    assert (SERVE in " ".join(found.output.split())) is (pair.verdict is Verdict.SERVES), found.output


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_programs_read_the_same_verdict(pair: Pair, tmp_path: Path) -> None:
    found = check(pair, tmp_path, "--json")
    assert found.exit_code == pair.verdict.value, f"{pair.why}\n{found.output}"
    assert json.loads(found.stdout)["works"] is (pair.verdict is Verdict.SERVES)
