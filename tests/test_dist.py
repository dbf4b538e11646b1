"""What is installed: a wheel and an sdist that have everything, a command with a version, and words that shells complete."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import kvferry

ROOT = Path(__file__).parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, env=found, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", made, cwd=ROOT)
    return made


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a virtual environment of its own; what it depends on is found where it is now."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, with_pip=True)
    told = run(place / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place)
    (wheel,) = dist.glob("*.whl")
    run(place / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=place)
    (Path(told.strip()) / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return place / "bin"


def packaged() -> set[str]:
    source = ROOT / "src"
    return {
        str(path.relative_to(source))
        for path in (source / "kvferry").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_package(dist: Path):
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert packaged() - names == set()
    assert {name for name in names if not name.startswith("kvferry/")} == {
        f"kvferry-{kvferry.__version__}.dist-info/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }


def test_the_wheel_says_its_version_extras_and_entry_points(dist: Path):
    (wheel,) = dist.glob("*.whl")
    inside = zipfile.ZipFile(wheel)
    about = inside.read(f"kvferry-{kvferry.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {kvferry.__version__}\n" in about
    assert set(re.findall(r"^Provides-Extra: (\S+)$", about, re.MULTILINE)) == {"dev", "nixl", "up"}
    entries = configparser.ConfigParser()
    entries.read_string(inside.read(f"kvferry-{kvferry.__version__}.dist-info/entry_points.txt").decode())
    assert dict(entries["console_scripts"]) == {"kvferry": "kvferry.cli:main"}
    assert dict(entries["vllm.general_plugins"]) == {"kvferry": "kvferry.engines.vllm:register"}


def test_what_is_installed_has_nothing_of_the_laboratory(dist: Path):
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(archive) as inside:
        names = [*zipfile.ZipFile(wheel).namelist(), *(name.partition("/")[2] for name in inside.getnames())]
    assert [name for name in names if {"lab", "bench", "crossing"} & set(Path(name).parts)] == []
    assert [name for name in names if Path(name).stem in ("spoiled", "patches")] == []


def test_the_sdist_has_what_the_wheel_is_made_of(dist: Path):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as inside:
        names = {name.partition("/")[2] for name in inside.getnames()}
    assert {f"src/{name}" for name in packaged()} | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names


def test_what_is_installed_runs_from_anywhere(installed: Path, tmp_path: Path):
    for command in ((installed / "kvferry",), (installed / "python", "-m", "kvferry")):
        assert run(*command, "--version", cwd=tmp_path) == f"kvferry {kvferry.__version__}\n"
    where = run(installed / "python", "-c", "import kvferry; print(kvferry.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    page = tmp_path / "page.html"
    sides = ("--model", "lfm2-1.2b", "--prefill", "tp=1", "--decode", "tp=2")
    assert "lfm2" in run(installed / "kvferry", "plan", *sides, cwd=tmp_path)
    run(installed / "kvferry", "explain", *sides, "--out", page, cwd=tmp_path)
    assert page.stat().st_size > 10_000


def test_an_installed_command_line_has_no_bench(installed: Path, tmp_path: Path):
    assert "bench" not in run(installed / "kvferry", "--help", cwd=tmp_path)
    done = subprocess.run([installed / "kvferry", "bench"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "No such command 'bench'" in done.stderr) == (2, True)


def test_the_changelog_knows_the_version_or_what_comes():
    assert re.search(rf"^## (Unreleased|{re.escape(kvferry.__version__)})", CHANGELOG, re.MULTILINE)


class TestCompletion:
    @pytest.mark.parametrize(("typed", "offered"), [("ver", "verify"), ("up --first", "--first-port")])
    def test_bash_completes_words(self, installed: Path, tmp_path: Path, typed: str, offered: str):
        """As bash does it: the script is sourced, and its function called."""
        words = ["kvferry", *typed.split()]
        program = (
            f"source <(kvferry completion bash); COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            '_kvferry_completion kvferry; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        found = run("bash", "-c", program, cwd=tmp_path, PATH=f"{installed}:{os.environ['PATH']}")
        assert offered in found.split()

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_there_is_a_script_for_each_shell(self, installed: Path, tmp_path: Path, shell: str):
        assert "_KVFERRY_COMPLETE" in run(installed / "kvferry", "completion", shell, cwd=tmp_path)
