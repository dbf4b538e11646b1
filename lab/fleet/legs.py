"""One request across a pair of engines: a leg to P that prefills, a leg to D that decodes with what P's leg returned."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lab.fleet.server import MODEL, Server

MAX_NEW = 24
TOP = 4
AT_ONCE = 24
LEG_SECONDS = 60.0
TOKEN_IDS = 256
"""Every model has at least as many."""
TO_PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}

Prompt = tuple[int, ...]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Answer:
    """What a leg brought: tokens with their log-probabilities, the best candidates at each place, and P's reference.
    `status` 0 means that the connection broke."""

    status: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    candidates: tuple[tuple[tuple[int, float], ...], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def good(self) -> bool:
        return self.status == 200


@dataclass(frozen=True)
class Crossed:
    """Both legs of one request."""

    prompt: Prompt
    prefill: Answer
    decode: Answer


class Leg:
    """A request on its way. `abort` closes the connection, at whatever moment it is called."""

    def __init__(
        self,
        server: Server,
        prompt: Sequence[int],
        *,
        params: Mapping[str, Any] | None = None,
        max_new: int = MAX_NEW,
        stream: bool = False,
        request_id: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": max_new,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": stream,
            **(settings or {}),
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=LEG_SECONDS)
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def answer(self) -> Answer:
        """All of it, for a leg that is not streamed."""
        try:
            response = self._connection.getresponse()
            text = response.read()
        except OSError as error:
            return Answer(0, error=f"{type(error).__name__}: {error}")
        except http.client.HTTPException as error:
            return Answer(0, error=f"{type(error).__name__}: {error}")
        finally:
            self._connection.close()
        return _read(response.status, text)

    def first(self) -> str:
        """For a streamed leg: waits for the first piece and returns it."""
        response = self._connection.getresponse()
        return response.readline().decode()

    def abort(self) -> None:
        self._connection.close()


def _read(status: int, text: bytes) -> Answer:
    if status != 200:
        return Answer(status, error=text.decode(errors="replace")[:500])
    found = json.loads(text)
    choice = found["choices"][0]
    if choice["finish_reason"] == "error":
        return Answer(500, error=str(choice))
    probabilities = choice["logprobs"]
    return Answer(
        status,
        tuple(choice["token_ids"]),
        tuple(probabilities["token_logprobs"]),
        tuple(
            tuple(sorted(((_token_id(name), value) for name, value in place.items()), key=lambda it: -it[1]))
            for place in probabilities["top_logprobs"]
        ),
        found.get("kv_transfer_params") or {},
    )


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def prompt(tokens: int, seed: int = 0) -> Prompt:
    """Random tokens; two prompts share no prefix but by accident."""
    chosen = random.Random(f"{tokens} {seed}")
    return tuple(chosen.randrange(TOKEN_IDS) for _ in range(tokens))


def ask(server: Server, tokens: Sequence[int], *, max_new: int = MAX_NEW, **settings: Any) -> Answer:
    """One engine alone."""
    return Leg(server, tokens, max_new=max_new, **settings).answer()


def prefill(server: Server, tokens: Sequence[int], **settings: Any) -> Answer:
    return Leg(server, tokens, params=TO_PREFILL, max_new=1, **settings).answer()


def decode(
    server: Server, tokens: Sequence[int], params: Mapping[str, Any], *, max_new: int = MAX_NEW, **settings: Any
) -> Answer:
    return Leg(server, tokens, params=params, max_new=max_new, **settings).answer()


def cross(
    producer: Server,
    consumer: Server,
    tokens: Prompt,
    *,
    max_new: int = MAX_NEW,
    request_id: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Crossed:
    """D's leg is not sent where P's leg failed or returned no reference."""
    there = prefill(producer, tokens, request_id=request_id)
    if not there.good or not there.params:
        missing = Answer(there.status, error=f"P's leg brought no reference. {there.error}".strip())
        return Crossed(tokens, there, missing)
    how: dict[str, Any] = {"max_new": max_new, "request_id": request_id, "settings": settings}
    return Crossed(tokens, there, decode(consumer, tokens, there.params, **how))


def cross_all(
    producer: Server, consumer: Server, prompts: Sequence[Prompt], *, max_new: int = MAX_NEW, in_flight: int = AT_ONCE
) -> list[Crossed]:
    """Once one got no answer, those not yet sent are given up: each would wait as long."""
    lost = threading.Event()

    def one(tokens: Prompt) -> Crossed:
        if lost.is_set():
            given_up = Answer(0, error="not sent: an earlier request got no answer")
            return Crossed(tokens, given_up, given_up)
        found = cross(producer, consumer, tokens, max_new=max_new)
        if not found.decode.status:
            lost.set()
        return found

    return at_once(one, prompts, in_flight)


def ask_all(server: Server, prompts: Sequence[Prompt], *, max_new: int = MAX_NEW, in_flight: int = AT_ONCE) -> list[Answer]:
    return at_once(lambda tokens: ask(server, tokens, max_new=max_new), prompts, in_flight)


def at_once(work: Callable[[T], U], items: Sequence[T], threads: int = AT_ONCE) -> list[U]:
    """In order, up to `threads` of them in flight."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
