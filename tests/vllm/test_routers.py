"""What routers make of `kv_transfer_params`: vllm-router itself between two servers that write down what they are asked;
Dynamo's own table of connectors; llm-d's sidecar and coordinator as their code has them handle a prefill engine's answer."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import engines, loaded, sides
from vllm.v1.engine import FinishReason

from kvferry.engines.vllm import dynamo, register
from kvferry.session import from_params, own_keys
from kvferry.session.reference import MAX_GENERATION, Lease, Reference, to_params
from kvferry.up.commands import ALERT
from kvferry.up.ports import free_port

KEYS = own_keys()

pytestmark = pytest.mark.vllm

PROMPT = list(range(7, 165))
ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What each of them says to a prefill engine."""

Answered = dict[str, Any]


def as_vllm_router(answer: Answered) -> Answered:
    """As it came."""
    return copy.deepcopy(answer)


def as_llm_d_sidecar(answer: Answered) -> Answered:
    """Through Go's maps: keys in alphabetical order, and numbers as floating point."""
    text = json.dumps(answer)
    return json.loads(json.dumps(json.loads(text, parse_int=lambda said: _of_go(float(said))), sort_keys=True))


def _of_go(number: float) -> int | float:
    return int(number) if number.is_integer() and abs(number) < 1e21 else number


def as_llm_d_coordinator(answer: Answered) -> Answered:
    """The same, and then it is said whatever the answer was."""
    return {**as_llm_d_sidecar(answer), "do_remote_decode": False, "do_remote_prefill": True}


def as_dynamo(answer: Answered) -> Answered:
    """Without the hint of its own router."""
    kept = copy.deepcopy(answer)
    kept.pop("router_hint", None)
    return kept


RELAYS: dict[str, Callable[[Answered], Answered]] = {
    "vllm-router": as_vllm_router,
    "llm-d sidecar": as_llm_d_sidecar,
    "llm-d coordinator": as_llm_d_coordinator,
    "dynamo": as_dynamo,
}


@pytest.mark.parametrize("relay", RELAYS.values(), ids=RELAYS)
class TestRelayed:
    def test_a_reference_is_what_it_was(self, relay: Callable[[Answered], Answered]) -> None:
        reference = Reference(
            "127.0.0.1:7600", "p", "p1", "r", Lease(2**31, MAX_GENERATION), 2**21, {"0": [2**40, 0, -1], "1": 7}, "digest"
        )
        said = relay({"kvferry": to_params(reference, KEYS.first)})
        assert from_params(said["kvferry"], KEYS) == reference

    def test_a_prompt_is_loaded(self, relay: Callable[[Answered], Answered]) -> None:
        with engines(*sides("nemotron-h", {}, {})) as (there, here):
            request = there.request("r", PROMPT, {**ASKS, "router_hint": {"worker": 3}})
            there.scheduler.add_request(request)
            params = relay(through_http(there.finish_prefill(request)))
            here.scheduler.add_request(here.request("r", PROMPT, params))
            assert loaded(there, here, {"r": len(PROMPT) - 1}).differences() == []
            here.step_until(lambda: "r" in here.outputs)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH

    def test_where_nothing_was_kept_the_prompt_is_computed_and_nothing_fails(
        self, relay: Callable[[Answered], Answered]
    ) -> None:
        with engines(*sides("llama", {}, {})) as (there, here):
            request = there.request("r", PROMPT[:1], dict(ASKS))
            there.scheduler.add_request(request)
            params = relay(through_http(there.finish_prefill(request)))
            here.scheduler.add_request(here.request("r", PROMPT[:1], params))
            here.step_until(lambda: "r" in here.outputs)
            assert here.outputs["r"].finish_reason is FinishReason.LENGTH
            assert here.scheduled["r"] == 1
            assert not here.counted["refused"]


def through_http(params: Answered | None) -> Answered:
    assert params is not None
    return json.loads(json.dumps(params))


class Clerk:
    """A server that answers like an engine, and writes down what it was asked."""

    def __init__(self, params: Answered | None) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        clerk = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self._say({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                clerk.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                choices = [{"index": i, "text": f"{i}", "finish_reason": "length"} for i in range(body.get("n", 1))]
                usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": None}
                self._say({"id": "x", "choices": choices, "usage": usage, "kv_transfer_params": params})

            def _say(self, what: Any) -> None:
                said = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


REFERENCE = to_params(
    Reference("127.0.0.1:7600", "p", "p1", "r", Lease(3, MAX_GENERATION), 9, {"0": [5, -1, 2**40]}, "d"), KEYS.first
)
ANSWER = {"do_remote_prefill": True, "do_remote_decode": False, "more": [2**63 - 1, 0.1, None], "kvferry": REFERENCE}


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    if importlib.util.find_spec("vllm_router") is None:
        pytest.skip("vllm-router is not installed: make router")
    prefill, decode, port = Clerk(ANSWER), Clerk(None), free_port()
    words = ["-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--port", str(port), *ALERT]
    places = ["--prefill", prefill.url, "--decode", decode.url, f"--prometheus-port={free_port()}"]
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as said:
        process = subprocess.Popen([sys.executable, *words, *places], stdout=said, stderr=said)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/health", process, log)
        yield SimpleNamespace(url=url, prefill=prefill, decode=decode)
    finally:
        process.kill()
        process.wait()
        prefill.close()
        decode.close()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not _is_there(url):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _is_there(url: str) -> bool:
    try:
        urllib.request.urlopen(url)
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


class TestVllmRouter:
    """What is written of it in docs/routers.md."""

    def ask(self, routed: SimpleNamespace, path: str, body: dict[str, Any]) -> tuple[Any, Any, Any]:
        headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
        request = urllib.request.Request(f"{routed.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)
        return said, routed.prefill.asked[-1], routed.decode.asked[-1]

    def test_the_answer_of_the_prefill_engine_is_relayed_as_it_is(self, routed: SimpleNamespace) -> None:
        own = {"do_remote_prefill": True, "kvferry": "a client's own"}
        body = {"model": "m", "prompt": [[1, 2], [3]], "max_tokens": 5, "n": 2, "kv_transfer_params": own, "cache_salt": "s"}
        said, (_, _, first), (_, _, second) = self.ask(routed, "/v1/completions", body)
        assert first["kv_transfer_params"] == ASKS
        assert second["kv_transfer_params"] == ANSWER
        assert from_params(second["kv_transfer_params"]["kvferry"], KEYS) == from_params(REFERENCE, KEYS)
        assert [choice["text"] for choice in said["choices"]] == ["0", "1"]
        for leg in (first, second):
            assert (leg["prompt"], leg["n"], leg["cache_salt"]) == ([[1, 2], [3]], 2, "s")

    def test_the_leg_to_the_prefill_engine_is_one_token_and_no_stream(self, routed: SimpleNamespace) -> None:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "messages": messages, "max_completion_tokens": 9, "min_tokens": 4, "stream": True}
        _, (path, _, first), (_, _, second) = self.ask(
            routed, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        assert path == "/v1/chat/completions"
        assert (first["max_tokens"], first["max_completion_tokens"], first["min_tokens"]) == (1, 1, 1)
        assert first["stream"] is False
        assert "stream_options" not in first
        assert (second["max_completion_tokens"], second["min_tokens"], second["stream"]) == (9, 4, True)
        assert second["stream_options"] == {"include_usage": True}
        assert first["messages"] == second["messages"] == messages

    def test_both_legs_have_one_name_that_is_not_the_clients(self, routed: SimpleNamespace) -> None:
        _, (_, first, _), (_, second, _) = self.ask(routed, "/v1/completions", {"model": "m", "prompt": "x"})
        assert first["x-request-id"] == second["x-request-id"]
        assert first["x-request-id"].startswith("___prefill_addr_")


class TestDynamo:
    def table(self, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any] | None) -> types.ModuleType:
        module = types.ModuleType(dynamo.PROTOCOLS)
        if content is not None:
            module.KV_CONNECTOR_PROTOCOLS = content  # type: ignore[attr-defined]
        for name in ("dynamo", dynamo.WORKER):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, dynamo.PROTOCOLS, module)
        return module

    def test_its_own_worker_speaks_to_the_connector_as_to_vllms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Against the table that the release has."""
        if importlib.util.find_spec("dynamo") is None:
            pytest.skip("Dynamo is not installed: make router")
        importlib.import_module(dynamo.WORKER)
        register()
        protocols = importlib.import_module(dynamo.PROTOCOLS)
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="KVFerryConnector"))
        protocol = protocols.make_kv_connector_protocol(config)
        assert protocol.prefill_request_kv_transfer_params() == ASKS
        assert protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=ANSWER)) is ANSWER
        among = {"connectors": [{"kv_connector": "KVFerryConnector"}]}
        several = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=among)
        protocol = protocols.make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=several))
        assert protocol.prefill_request_kv_transfer_params() == ASKS

    def test_a_release_without_the_table_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table(monkeypatch, None)
        dynamo.make_known("KVFerryConnector")
        module = self.table(monkeypatch, {"Other": 1})
        dynamo.make_known("KVFerryConnector")
        assert module.KV_CONNECTOR_PROTOCOLS == {"Other": 1}

    def test_what_somebody_has_entered_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = self.table(monkeypatch, {"NixlConnector": 1, "KVFerryConnector": 2})
        dynamo.make_known("KVFerryConnector")
        assert module.KV_CONNECTOR_PROTOCOLS["KVFerryConnector"] == 2

    def test_outside_of_its_workers_nothing_of_it_is_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = self.table(monkeypatch, {"NixlConnector": 1})
        monkeypatch.delitem(sys.modules, dynamo.WORKER)
        dynamo.make_known("KVFerryConnector")
        assert module.KV_CONNECTOR_PROTOCOLS == {"NixlConnector": 1}
