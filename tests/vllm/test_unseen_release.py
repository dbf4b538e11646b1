"""A release of vLLM that no run has seen: this one under another number, and with other names for three things that we use.

Its engines start, certify their own caches, serve unlike block sizes right, and say what is off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_engines import Ferried

import vllm
from kvferry.up.device import Device
from lab.crossing.checkpoints import checkpoint
from lab.crossing.compare import differences
from lab.crossing.engine import Engine
from lab.fleet.device import environment
from lab.fleet.legs import ask_all, cross_all, prompt
from lab.fleet.metrics import counted, counters
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

NUMBER = "0.99.0"
NAMES = {
    "CacheHitSource": "CacheOrigin",
    "aux_output_config": "extra_output_config",
    "needs_kv_cache_zeroing": "zeroes_new_blocks",
}
LENGTHS = (31, 64, 100, 300)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which vLLM is found under the other number and names; what is not Python is linked."""
    source, folder = Path(vllm.__file__).parent, tmp_path_factory.mktemp("unseen")
    changed = dict.fromkeys(NAMES, 0)
    for file in source.rglob("*"):
        if file.is_dir() or "__pycache__" in file.parts:
            continue
        target = folder / "vllm" / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".py":
            target.symlink_to(file)
            continue
        text = file.read_text(encoding="utf-8")
        for name, other in NAMES.items():
            changed[name] += text.count(name)
            text = text.replace(name, other)
        target.write_text(text, encoding="utf-8")
    assert all(changed.values()), "vLLM has these names, and here they are gone"
    (folder / "vllm" / "_version.py").write_text(f'__version__ = version = "{NUMBER}"\n__version_tuple__ = (0, 99, 0)\n')
    return folder


@pytest.fixture(scope="module")
def unseen(renamed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    found = environment(Device.CPU, os.environ)
    paths = os.pathsep.join((str(renamed), str(ROOT / "src"), str(ROOT)))
    with Zygote(tmp_path_factory.mktemp("logs"), variables={**found, "PYTHONPATH": paths}) as zygote:
        yield zygote


@pytest.mark.parametrize(("model", "blocks"), [("llama", (32, 64)), ("nemotron-h", (64, 32))])
def test_an_unseen_release_serves_unlike_block_sizes_right_and_says_what_is_off(
    unseen: Zygote, checkpoints: Path, model: str, blocks: tuple[int, int]
) -> None:
    made = checkpoint(model, checkpoints)
    ours = Ferried("ours", "KVFerryConnector", "kvferry.engines.vllm")
    engines = [Engine(made, ours, block=blocks[0]), Engine(made, ours, block=blocks[1]), Engine(made)]
    servers = [Server(engine, unseen, f"{model}-{i}") for i, engine in enumerate(engines)]
    try:
        producer, consumer, plain = (server.wait() for server in servers)
        prompts = [prompt(length) for length in LENGTHS]
        reference = ask_all(plain, prompts)
        before = counters(consumer)
        found = differences(cross_all(producer, consumer, prompts), reference, made.architecture.dtype)
        assert [it.why for it in found if not it.right] == []
        counts = counted(consumer, before, lambda c: c.prompt_tokens >= sum(LENGTHS))
        assert counts.from_peer == sum(LENGTHS) - len(LENGTHS)
        assert counts.bytes_moved == counts.bytes_predicted > 0
        for server in (producer, consumer):
            log = server.log.read_text()
            assert log.count(f"vLLM {NUMBER} was not seen by any recorded run") == 1
            assert "off are loads in the step that computes them" in log
            assert "are certified" in log
            assert "opaque" not in log
    finally:
        for server in servers:
            server.stop()
