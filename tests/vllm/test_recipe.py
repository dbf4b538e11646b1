"""The recipe that builds any rank in one process against whole engines: both must publish the same manifest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from engine import Setup, workers

from kvferry.manifest import Manifest

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


def _placed(manifest: Manifest) -> Manifest:
    """A manifest but for the addresses of its regions."""
    regions = tuple(msgspec.structs.replace(region, address=0) for region in manifest.regions)
    return msgspec.structs.replace(manifest, regions=regions)


@pytest.mark.parametrize(("model", "tp", "conv"), [("nemotron-h", 1, "DS"), ("granite-h-1g", 2, "SD")])
def test_a_real_engine_publishes_the_same_manifest(model: str, tp: int, conv: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1], HERE.parents[1] / "src"))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    for leaked in ("LD_PRELOAD", "VLLM_SSM_CONV_STATE_LAYOUT"):
        environment.pop(leaked, None)
    command = [sys.executable, "real_engine.py", model, str(tp), conv, str(tmp_path)]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    there = [msgspec.json.decode((tmp_path / f"{rank}.json").read_bytes(), type=Manifest) for rank in range(tp)]
    here = [worker.manifest("P") for worker in workers(Setup(model, tp, conv=conv), "P")]
    assert [_placed(m) for m in there] == [_placed(m) for m in here]
