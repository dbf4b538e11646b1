"""The command line: what it prints, what it exits with, and that bad input never ends in a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import kvferry as kvferry_package
from kvferry.cli import COMMANDS, app, verify
from kvferry.errors import ProofError, ScatteredError
from kvferry.models import zoo_names


def kvferry(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvferry", *words], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_what_needs_no_command_imports_none(word):
    program = f"import sys; from kvferry.cli import app; app(['{word}'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kvferry.cli" in loaded
    assert loaded & {"numpy", "zmq", "msgspec", "rich", "kvferry.manifest", "kvferry.cli.check"} == set()


def test_shells_are_told_commands_without_importing_them():
    words = {"_KVFERRY_COMPLETE": "complete_bash", "COMP_WORDS": "kvferry ", "COMP_CWORD": "1"}
    program = "import atexit, sys; from kvferry.cli import main; atexit.register(lambda: print(*sys.modules)); main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **words}, capture_output=True, text=True, timeout=300
    )
    *offered, loaded = done.stdout.splitlines()
    assert [word for line in offered for word in line.split()] == list(COMMANDS)
    assert set(loaded.split()) & {"numpy", "zmq", "msgspec"} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_on_one_line(name):
    shown = CliRunner().invoke(app, ["--help"], catch_exceptions=False).stdout
    assert re.search(rf"^  {name} +{re.escape(COMMANDS[name])}$", shown, re.MULTILINE)
    assert f"Usage: kvferry {name} [OPTIONS]" in CliRunner().invoke(app, [name, "--help"], catch_exceptions=False).stdout


def test_every_public_name_is_there_and_no_other():
    for name in kvferry_package.__all__:
        assert getattr(kvferry_package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'BenchError'"):
        _ = kvferry_package.BenchError


def plan(*words: str) -> dict:
    done = CliRunner().invoke(app, ["plan", *words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_plan_tells_who_reads_whom_and_what_a_request_moves():
    done = kvferry("plan", "--model", "granite-4.0-h-tiny", "--prefill", "tp=2", "--decode", "tp=4", "--tokens", "500")
    assert done.returncode == 0, done.stderr
    for words in ("who reads what from whom", "who is read by whom", "runs and bytes", "499 loaded", "conv.B", "proved"):
        assert words in done.stdout


def test_plan_json_carries_manifests_plans_and_a_bound_request():
    document = plan("--model", "nemotron-3-nano-30b-a3b", "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "100")
    (rank,) = document["request"]["ranks"]
    assert document["request"]["tokens"] == 99
    assert sum(c[5] for c in rank["copies"]) == rank["bytes"]
    attention = 6 * 1024 * 99
    state = 23 * (36_864 + 2_097_152)
    assert rank["useful_bytes"] == attention + state
    assert rank["bytes"] - state <= 1.2 * attention
    paging = [g["paging"] for g in document["manifests"]["decode"][0]["groups"]]
    assert {"type": "token", "tokens": 2096, "kernel_blocks": 131} in [
        {k: p.get(k) for k in ("type", "tokens", "kernel_blocks")} for p in paging
    ]


def test_plan_json_names_a_teller_for_every_producer_rank_that_nobody_reads():
    document = plan("--model", "deepseek-v3", "--prefill", "tp=64", "--decode", "tp=1", "--tokens", "20")
    assert [r["teller"] for r in document["routes"]] == [None if r["readers"] else 0 for r in document["routes"]]
    assert sum(bool(r["readers"]) for r in document["routes"]) == 16


def test_verify_counts_pairs_and_lists_illegal_ones_with_the_reason():
    done = CliRunner().invoke(app, ["verify", "--model", "falcon-h1-34b", "--tp", "1,4", "--pp", "1", "--jobs", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["proved"], found["failed"], found["refused"], found["skipped"]) == (1, 0, 0, 3)
    assert len(found["pairs"]) == 4
    assert all("groups" in p["reason"] for p in found["pairs"] if p["status"] == "skipped")


def test_verify_shows_a_table_for_people():
    done = kvferry("verify", "--model", "lfm2-1.2b", "--tp", "1,2", "--pp", "1")
    assert done.returncode == 0, done.stderr
    assert "lfm2-1.2b" in done.stdout


def test_verify_exits_1_when_a_proof_fails(monkeypatch):
    def refuse(*_args, **_options):
        raise ProofError("layers.3 k head [0, 1): would be written twice")

    monkeypatch.setattr(verify, "make_plans", refuse)
    done = CliRunner().invoke(app, ["verify", "--model", "lfm2-1.2b", "--tp", "1", "--pp", "1", "--jobs", "1"])
    assert done.exit_code == 1
    assert "FAILED" in done.output
    assert "would be written twice" in " ".join(done.output.split())


REFUSED = ["verify", "--model", "synthetic-12", "--tp", "2", "--pp", "1", "--decode", "block=32", "--jobs", "1"]


def test_verify_exits_1_when_a_pair_that_engines_could_run_is_refused():
    """Opaque cells of other kernel blocks: it said `skipped`, as of what no engine could run, and exited with 0."""
    done = CliRunner().invoke(app, [*REFUSED, "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["proved"], found["failed"], found["refused"], found["skipped"]) == (0, 0, 1, 0)
    assert "opaque cells" in found["pairs"][0]["reason"]
    shown = CliRunner().invoke(app, REFUSED)
    assert shown.exit_code == 1
    assert "their caches do not fit each other" in " ".join(shown.output.split())


def test_verify_exits_1_when_what_is_kept_alike_nowhere_is_refused(monkeypatch):
    def refuse(*_args, **_options):
        raise ScatteredError("layers.3 ssm: 5,000,000 runs")

    monkeypatch.setattr(verify, "make_plans", refuse)
    done = CliRunner().invoke(app, ["verify", "--model", "lfm2-1.2b", "--tp", "1", "--pp", "1", "--jobs", "1", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["refused"] == 1


def test_verify_exits_1_when_nothing_was_proved():
    done = CliRunner().invoke(app, ["verify", "--model", "falcon-h1-34b", "--tp", "3", "--pp", "1", "--jobs", "1", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["skipped"] == 1


def test_verify_covers_the_zoo_by_default_with_enough_pairs():
    work = verify.work_of(None, "", "1,2,3", "", "")
    assert {name for name, _, _ in work} == set(zoo_names())
    legal = sum(1 for name, ours, theirs in work for other in theirs if verify.why_not(name, ours, other) is None)
    assert legal >= 1_900


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--model", "no-such-model", "--prefill", "tp=1", "--decode", "tp=1"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=zwei", "--decode", "tp=1"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tpp=1", "--decode", "tp=1"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=0", "--decode", "tp=1"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=3", "--decode", "tp=1"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=1,pp=999", "--decode", "tp=1"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "0"),
        ("plan", "--model", "/", "--prefill", "tp=1", "--decode", "tp=1"),
        ("verify", "--model", "llama-3.1-8b", "--tp", "one"),
        ("verify", "--model", "llama-3.1-8b", "--pp", "0"),
        ("verify", "--model", "llama-3.1-8b", "--jobs", "-5"),
        ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=1,kv=transposed", "--decode", "tp=1", "--tokens", "100000"),
        ("plan", "--model", "", "--prefill", "tp=1", "--decode", "tp=1"),
        ("verify", "--model", "llama-3.1-8b", "--decode", "layout=sideways"),
        ("explain", "--model", "no-such-model", "--prefill", "tp=1", "--decode", "tp=1"),
        ("explain", "--plan", "/no/such/plan.json"),
        ("frobnicate",),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_clear_message_and_exit_code_2(words):
    done = kvferry(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert done.stdout == ""


def test_a_reader_that_goes_away_is_not_a_failed_proof():
    command = f"{sys.executable} -m kvferry verify --model lfm2-1.2b --tp 1 --pp 1 | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_one_message():
    command = f"{sys.executable} -m kvferry verify --model lfm2-1.2b --tp 1 --pp 1 --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvferry: standard output")
    assert "Traceback" not in done.stderr


def test_a_terminal_without_arrows_still_gets_its_tables():
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "plan", "--model", "lfm2-1.2b", "--prefill", "tp=1", "--decode", "tp=1"],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "proved" in done.stdout


def test_certify_shows_and_replays_what_was_seen_elsewhere():
    shown = kvferry("certify", "--recorded")
    assert shown.returncode == 0, shown.stderr
    assert "CPU_ATTN (vec)" in shown.stdout
    runs = json.loads(kvferry("certify", "--recorded", "--json").stdout)
    assert {sighting["backend"] for run in runs for sighting in run["sightings"]} >= {"CPU_ATTN", "CPU_MLA"}


def test_certify_without_vllm_says_what_to_do():
    told = kvferry("certify")
    assert told.returncode == 2
    assert "--recorded" in told.stderr
