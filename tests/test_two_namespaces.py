"""What `benchmarks/two_namespaces.py` concludes, and that its commands are understood, without namespaces or engines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import which

import pytest
from msgspec.structs import replace

from kvferry.engines.vllm.options import option_troubles, read_options
from kvferry.errors import MeasureError
from lab.bench.serve.result import Row, Run

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"^    unshare -Urnm python -m benchmarks\.two_namespaces(.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("two_namespaces", ROOT / "benchmarks" / "two_namespaces.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def row(order: str, times: list[float], **other: object) -> Row:
    samples = {"ttft": times, "in the engine": [it - 10 for it in times], "on the wire": [it / 2 for it in times]}
    usual = {"moved_bytes": 300, "foretold_bytes": 300, "blocks": 30, "runs": 3 if order == "consecutive" else 30}
    return Row("alone", order, 33, samples, **{**usual, **other})


def made(*rows: Row, error: str = "") -> Run:
    return Run("kvferry", "eager", 0, 32, {}, rows=list(rows), error=error)


CONSECUTIVE, SCATTERED = row("consecutive", [100.0, 210.0, 90.0]), row("scattered", [120.0, 110.0, 400.0])


def test_a_start_is_told_by_ratios_of_medians_and_how_its_blocks_lay(script):
    line = script.told(made(CONSECUTIVE, SCATTERED), 600)
    assert "first token 100 and 120 ms (1.20 ×)" in line
    assert "in D's engine 90 and 110 ms (1.22 ×)" in line
    assert "on the wire 50 and 60 ms (1.20 ×)" in line
    assert "3 runs of 30 blocks and 30 runs of 30 blocks" in line


@pytest.mark.parametrize(
    ("found", "carried", "said"),
    [
        (made(CONSECUTIVE, SCATTERED), 599, "599 came over the interfaces"),
        (made(CONSECUTIVE, replace(SCATTERED, moved_bytes=200)), 900, "500 bytes were moved, 600 were foretold"),
        (made(replace(CONSECUTIVE, moved_bytes=400), replace(SCATTERED, moved_bytes=200)), 900, "600 were foretold"),
        (made(replace(CONSECUTIVE, void="32 of 33 prompt tokens came from P"), SCATTERED), 900, "32 of 33 prompt tokens"),
        (made(CONSECUTIVE, replace(SCATTERED, void="not scattered")), 900, "scattered: not scattered"),
        (made(CONSECUTIVE), 900, "only consecutive was measured"),
        (made(CONSECUTIVE, SCATTERED, error="D ended"), 900, "D ended"),
    ],
)
def test_figures_that_would_say_nothing_are_not_told(script, found, carried, said):
    with pytest.raises(MeasureError, match=re.escape(said)):
        script.told(found, carried)


def test_each_strategy_is_forced_once_beside_what_is_chosen(script):
    usual, *others = script.arms(script.parser().get_default("arms"), 1 << 26)
    assert usual.connector.settings == {}
    settings = [arm.connector.settings for arm in others]
    assert [list(option_troubles(one)) for one in settings] == [[]] * len(settings)
    every, *forced = (read_options(one).strategies for one in settings)
    assert forced == [("direct",), ("packed",), ("staged",)]
    assert set(every) == {"direct", "packed", "staged"}
    assert {read_options(one).staging_bytes for one in settings} == {1 << 26}


ENTERING = """
import os, signal, socket
from lab.fleet.namespaces import KINDS, enter, leave
seen, told = os.pipe()
child = os.fork()
if not child:
    leave()
    os.write(told, b"!")
    signal.pause()
def ours(process):
    return [os.readlink(f"/proc/{process}/ns/{kind}") for kind in KINDS]
os.read(seen, 1)
print(len(set(ours("self")) & set(ours(child))))
enter(child)
print(ours("self") == ours(child), [name for _, name in socket.if_nameindex()])
os.kill(child, signal.SIGKILL)
"""


def test_a_process_enters_the_network_and_mounts_of_another(tmp_path):
    outside = ["unshare", "-Urnm"]
    if which(outside[0]) is None or subprocess.run([*outside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*outside, sys.executable, "-c", ENTERING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0", "True ['lo']"]


def test_the_documented_commands_are_understood(script):
    pages = [(ROOT / "docs" / name).read_text() for name in ("performance.md", "how-to.md")]
    shown = [words for page in pages for words in SHOWN.findall(page)]
    assert len(shown) >= 3
    said = [script.parser().parse_args(shlex.split(words)) for words in shown]
    assert {one.engines for one in said} == {False, True}
