"""Every command and program in the documentation runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.check import check_commands, read_command
from kvferry.check.cures import CURES
from kvferry.cli.plan import Shown
from kvferry.doctor.remote import _UNHEARD
from kvferry.doctor.rules import KNOWN
from kvferry.engines.vllm.options import Options, option_troubles
from kvferry.findings import errors
from kvferry.models import Side, load_model
from kvferry.session import read_keys

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = ROOT / "src" / "kvferry" / "models" / "zoo" / "llama-3.1-8b.json"


def blocks(page: Path, info: str) -> list[str]:
    return re.findall(rf"^ *```{info}\n(.*?)^ *```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def console_commands() -> list[str]:
    """In lists too."""
    lines = [line.strip() for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return list(dict.fromkeys(line.removeprefix("$ ") for line in lines if line.startswith("$ ")))


def make_targets() -> set[str]:
    return {t for page in PAGES for t in re.findall(r"^    make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_documentation_shows_commands():
    assert len(console_commands()) >= 8
    assert {"demo", "test"} <= make_targets()


def shown_engines() -> tuple[str, str]:
    """The two commands of the page on vLLM, for a model that is known without its checkpoint."""
    first, second, *_ = (block.strip().replace("MODEL", "llama-3.1-8b") for block in blocks(ROOT / "docs" / "vllm.md", "vllm"))
    return first, second


@pytest.mark.parametrize("command", console_commands())
def test_a_shown_command_works(command, tmp_path):
    (tmp_path / "config.json").write_text(CONFIG.read_text())
    for name, shown in zip(("prefill.sh", "decode.sh"), shown_engines(), strict=True):
        (tmp_path / name).write_text(shown)
    words = shlex.split(command)
    words = words[1:] if words[:3] == ["python", "-m", "lab"] else ["-m", *words]
    assert words[1] in ("kvferry", "lab")
    done = run(sys.executable, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [block.strip() for page in PAGES for block in blocks(page, "vllm")])
def test_a_shown_engine_has_nothing_that_check_would_find(command):
    first, second = (read_command(one) for one in shown_engines())
    mine = read_command(command.replace("MODEL", "llama-3.1-8b"))
    pair = (mine, second) if mine.role != "kv_consumer" else (first, mine)
    assert errors(check_commands(*pair).findings) == []
    assert mine.ferry is not None


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_shown_steps_replace_a_key(end, tmp_path):
    """A Secret's key often has no newline: two such keys on one line were read as a third one."""
    page = (ROOT / "docs" / "how-to.md").read_text().partition("## Replace the cluster's key")[2].partition("\n## ")[0]
    steps = re.findall(r"^ +```sh\n(.*?)^ +```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(steps) == 3
    old, used = tmp_path / "old.key", tmp_path / "used"
    old.touch(0o600)
    old.write_text("the key that all engines have used until now" + end)
    held = []
    for step in steps:
        shown = step.replace("/run/secrets/kvferry", str(used))
        done = run("sh", "-ec", "umask 077\n" + shown, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        held.append(read_keys(used).all)
    (first,), (new,) = read_keys(old).all, read_keys(tmp_path / "new.key").all
    assert held == [(first, new), (new, first), (new,)]


def test_shown_options_are_options():
    pages = [ROOT / "docs" / name for name in ("vllm.md", "operations.md", "migrating.md")]
    shown = [json.loads(text) for page in pages for text in re.findall(r"`(\{\"[^`]*\})`", page.read_text())]
    options = [one for one in shown if set(one) & set(Options.__struct_fields__)]
    assert options
    for one in options:
        assert list(option_troubles(one)) == []


def test_every_finding_is_on_the_page_of_checks_and_no_other_is():
    source = [path.read_text() for path in (ROOT / "src" / "kvferry").rglob("*.py")]
    made = {name for text in source for name in re.findall(r"Finding\(\s*\"([a-z-]+)\"", text)}
    made |= {*CURES, *(known.name for known in KNOWN), *(name for _, name, _ in _UNHEARD)}
    tables = (ROOT / "docs" / "checking.md").read_text().partition("## Findings of check")[2]
    names = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    shown = {name for cell in names for name in re.findall(r"`([a-z-]+)`", cell)}
    assert made - shown == set()
    assert shown - made == set()


def test_threads_lead_to_tests_that_there_are():
    text = (ROOT / "docs" / "vllm-threads.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", text)
    assert len(named) >= 40
    for file, test in named:
        assert re.search(rf"def {test}\(", (ROOT / file).read_text()), f"{file}::{test}"
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| in the thread")]
    assert all("::test_" in row for row in rows)


@pytest.mark.parametrize("target", sorted(make_targets()))
def test_a_shown_make_target_exists(target):
    assert run("make", "--dry-run", target, cwd=ROOT).returncode == 0


def test_readme_opens_with_the_two_commands():
    assert re.findall(r"^    make (\w+)", "\n".join((ROOT / "README.md").read_text().splitlines()[:5]), re.MULTILINE) == [
        "demo",
        "test",
    ]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_a_shown_program_runs(page, tmp_path):
    for program in blocks(page, "python"):
        done = run(sys.executable, "-c", program, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_the_replay_program_moves_what_kvferry_would_without_kvferry(tmp_path):
    (program,) = blocks(ROOT / "docs" / "formats.md", "python replay")
    assert len(program.splitlines()) <= 32
    assert "kvferry" not in program
    shown = Shown(load_model("synthetic-12"), Side.parse("tp=2,pp=2,conv=sd"), Side.parse("tp=3,layout=token"), 30)
    document = json.loads(json.dumps(shown.document()))
    random = np.random.default_rng(7)
    memory = {
        side: [[random.integers(1, 256, r.length, dtype=np.uint8) for r in m.regions] for m in manifests]
        for side, manifests in (("prefill", shown.producers), ("decode", shown.consumers))
    }
    for side, ranks in memory.items():
        for ordinal, regions in enumerate(ranks):
            for i, data in enumerate(regions):
                (tmp_path / f"{side}.{ordinal}.{i}").write_bytes(data.tobytes())
    (tmp_path / "plan.json").write_text(json.dumps(document))
    (tmp_path / "replay.py").write_text(program)
    done = run(sys.executable, "-I", "replay.py", "plan.json", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    moved = 0
    for target, plan, binding in zip(memory["decode"], shown.plans, shown.bindings, strict=True):
        for side, copies in zip(plan.sources, binding.copies, strict=True):
            source = memory["prefill"][side.identity.rank.ordinal]
            for a, b, c, d, n in zip(
                copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length, strict=True
            ):
                target[c][d : d + n] = source[a][b : b + n]
                moved += int(n)
        for region, offset, length in zip(binding.fills.region, binding.fills.offset, binding.fills.length, strict=True):
            target[region][offset : offset + length] = 0
    assert done.stdout == f"{moved} bytes moved\n"
    assert moved > 0
    for ordinal, regions in enumerate(memory["decode"]):
        for i, data in enumerate(regions):
            assert (tmp_path / f"decode.{ordinal}.{i}").read_bytes() == data.tobytes()
