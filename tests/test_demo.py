"""The demo moves bytes between two processes, and its comparison can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from kvferry.demo import crossing
from kvferry.demo.cargo import Cargo, Hold
from kvferry.errors import TransportError
from kvferry.models import Side, load_model, manifests


def kvferry(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvferry", *words], capture_output=True, text=True, timeout=300, check=False)


def hold() -> Hold:
    manifest = manifests(load_model("synthetic-12"), Side.parse("tp=3"), blocks=64)[1]
    return Hold(manifest, [np.full(r.length, 255, np.uint8) for r in manifest.regions])


def cargo(tokens: int, seed: int = 3) -> Cargo:
    groups = hold().manifest.groups
    return Cargo(
        seed, tokens, {g.id: [2 * g.id + 1, 2 * g.id + 2][: -(-tokens // g.tokens) if g.tokens else 1] for g in groups}
    )


@pytest.mark.parametrize("requests", [12])
def test_every_byte_that_two_processes_exchange_is_right(requests):
    done = kvferry("demo", "--requests", str(requests), "--tokens", "40", "--json")
    assert done.returncode == 0, done.stderr
    log = json.loads(done.stdout)
    assert log["carried"] == requests
    assert log["wrong"] == 0
    assert log["bytes"] > 100_000
    assert log["compared"] >= log["bytes"]
    assert log["paths"]


def test_what_was_loaded_is_what_is_looked_for_but_for_what_follows_the_last_token():
    ship = hold()
    tokens = 2 * max(g.tokens for g in ship.manifest.groups)
    ship.load(cargo(tokens))
    wrong, looked = ship.differing_bytes(cargo(tokens))
    assert wrong == 0
    assert looked > 0
    assert ship.differing_bytes(cargo(tokens - 1))[0] > 0


def test_one_wrong_byte_is_seen():
    ship = hold()
    tokens = 2 * max(g.tokens for g in ship.manifest.groups)
    ship.load(cargo(tokens))
    part = ship.manifest.layers[0].parts[0]
    ship.buffers[part.region][part.offset + part.block_stride] ^= 1
    assert ship.differing_bytes(cargo(tokens))[0] == 1


def test_another_requests_state_is_seen():
    ship = hold()
    ship.load(cargo(32))
    assert ship.differing_bytes(cargo(32, seed=4))[0] > 0


@pytest.mark.parametrize(
    "words", [("--requests", "0"), ("--tokens", "-1"), ("--model", "nothing"), ("--decode", "tp=5")], ids=" ".join
)
def test_bad_input_is_one_message(words):
    done = kvferry("demo", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


WITHOUT_NIXL = """
import sys
for name in ("nixl", "nixl_cu12", "nixl_cu13"):
    sys.modules[name] = sys.modules[f"{name}._api"] = None
"""


def test_without_nixl_it_says_what_to_install_and_nothing_else(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NIXL)
    found = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", "--requests", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert found.returncode == 2
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("kvferry: NIXL is not installed")
    assert "pip install --no-deps nixl-cu12" in line


def test_its_last_line_says_whether_every_byte_is_right():
    done = kvferry("demo", "--requests", "3", "--tokens", "20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("One process holds")
    assert done.stdout.splitlines()[-1] == "every byte that arrived is right"


def test_a_producer_that_dies_is_no_traceback(monkeypatch):
    monkeypatch.setattr(crossing, "produce", os._exit)
    with pytest.raises(TransportError, match=r"^the producer's process ended"):
        crossing.sail(crossing.Voyage("synthetic-12", "tp=1", "tp=1", 1, 8), lambda _: None)
