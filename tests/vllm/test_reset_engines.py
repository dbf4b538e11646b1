"""Weights are replaced in running engines, over HTTP: no text is made with caches of the old ones."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from shared_engines import Fleet, meter, since, until

from lab.crossing.compare import difference
from lab.crossing.engine import Engine
from lab.fleet import legs
from lab.fleet.legs import Answer, prompt
from lab.fleet.patches import ASYNCHRONOUS
from lab.fleet.server import Server
from lab.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def fleet(zygote: Zygote, checkpoints: Path) -> Iterator[Fleet]:
    fleet = Fleet(zygote, checkpoints)
    yield fleet
    fleet.close()


def engine(fleet: Fleet, which: str) -> Engine:
    """One that is told by HTTP to replace its weights."""
    environment = (("KVFERRY_TEST_ENGINE", which), (ASYNCHRONOUS, "1"), ("VLLM_SERVER_DEV_MODE", "1"))
    return fleet.engine("llama", environment=environment, prefix_caching=True)


def post(server: Server, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def reset(server: Server) -> bool:
    status, answer = post(server, "/reset_prefix_cache?reset_external=true")
    assert status == 200
    return bool(answer["success"])


def tuned(folder: Path, into: Path) -> Path:
    """A checkpoint of the same model with other weights."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    for file in into.glob("*.safetensors"):
        save_file({name: weight * 1.5 if "v_proj" in name else weight for name, weight in load_file(file).items()}, file)
    return into


def assert_right(got: Answer, wanted: Answer) -> None:
    assert difference(0, got, wanted, "float32").right, (got, wanted)


def test_what_was_prefilled_before_weights_were_replaced_is_never_decoded_after(fleet: Fleet, tmp_path: Path) -> None:
    plain = engine(fleet, "P")
    producer, consumer = fleet.up(plain, engine(fleet, "D"))
    tokens, other = prompt(300, 1), prompt(300, 2)
    old = legs.ask(consumer, other)
    assert_right(legs.cross(producer, consumer, other).decode, old)
    before, there, here = legs.prefill(producer, tokens), meter(producer), meter(consumer)
    assert before.params["do_remote_prefill"]
    folder = tuned(plain.checkpoint.folder, tmp_path / "tuned")
    for server in (producer, consumer):
        assert post(server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})[0] == 200
    assert not reset(producer)
    for server in (producer, consumer):
        until(f"{server.name} is reset", lambda server=server: reset(server), bool)
    [alone] = fleet.up(replace(plain, checkpoint=replace(plain.checkpoint, folder=folder), connector=None))
    wanted, new = legs.ask(alone, tokens), legs.ask(alone, other)
    assert not difference(0, old, new, "float32").right
    assert_right(legs.decode(consumer, tokens, before.params), wanted)
    assert since(consumer, here, lambda m: m.failed == 1).loaded == 0
    assert_right(legs.cross(producer, consumer, other).decode, new)
    assert since(consumer, here, lambda m: m.loaded == 1).failed == 1
    assert since(producer, there, lambda m: m.released == 1).reset == 1
