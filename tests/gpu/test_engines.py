"""Mapped memory between real CUDA engines: a producer that is killed comes back while its consumer lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.up.device import Device
from lab.bench.serve.models import model
from lab.fleet.connectors import OURS
from lab.fleet.legs import ask, cross, prompt
from lab.fleet.metrics import counters
from lab.fleet.server import MODEL, Server
from lab.fleet.zygote import Zygote


@dataclass(frozen=True)
class Tiny:
    """An engine whose cache takes so much memory that three of them have no room on the device."""

    folder: Path
    name: str
    role: str = ""
    cache: str = "56G"

    def arguments(self, port: int) -> list[str]:
        out = [
            f"--model={self.folder}", f"--served-model-name={MODEL}", "--host=127.0.0.1", f"--port={port}", "--dtype=float32",
            "--block-size=16", "--max-model-len=2048", "--max-num-seqs=16", f"--kv-cache-memory-bytes={self.cache}", "--seed=0",
            "--skip-tokenizer-init", "--gpu-memory-utilization=0.1", "--attention-backend=TRITON_ATTN", "--enforce-eager",
            "--load-format=dummy", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        return [*out, f"--kv-transfer-config={OURS.flag(self.role)}"] if self.role else out

    def variables(self, side_port: int) -> dict[str, str]:
        return {}


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("engines"), Device.CUDA) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model("tiny-llama", tmp_path_factory.mktemp("models")).folder


def words(tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(token % 250 + 4 for token in prompt(tokens, seed))


def crossed(producer: Server, consumer: Server, seed: int) -> tuple[int, ...]:
    before = counters(consumer)
    answer = cross(producer, consumer, words(500, seed), max_new=8).decode
    assert answer.good, answer.error
    found = counters(consumer) - before
    assert (found.from_peer, found.bytes_moved) == (499, found.bytes_predicted)
    assert found.bytes_moved > 0
    return answer.tokens


def test_a_producer_that_was_killed_starts_again_with_a_cache_as_large(zygote: Zygote, folder: Path) -> None:
    producer, consumer = Tiny(folder, "p", "kv_producer"), Tiny(folder, "d", "kv_consumer")
    with Server(consumer, zygote) as there, Server(producer, zygote) as first:
        before = crossed(first, there, 1)
        assert "mapped device memory" in there.log.read_text()
        first.stop()
        with Server(producer, zygote) as second:
            after = crossed(second, there, 2)
            alone = ask(there, words(500, 2), max_new=8).tokens
    assert before != after == alone
