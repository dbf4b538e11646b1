"""Requests to servers: one connection each, bytes made beforehand, and a time for every piece that arrives.

A client that measures many streams at once must be cheap: pieces are counted where they end, and nothing is parsed but answers
that are not streamed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from kvferry.errors import MeasureError
from lab.fleet.server import MODEL

Address = tuple[str, int]
"""A host and a port."""

ANSWER_SECONDS: Final = 90.0
_PIECE_END: Final = b"\n\n"
_HEAD_END: Final = b"\r\n\r\n"
_KEPT: Final = 4096


class UnansweredError(MeasureError):
    """A request that failed, or got no answer in time."""


@dataclass(frozen=True)
class Prompt:
    """`key` says which prompt it is, in every arm alike; `encoded` is its tokens as JSON."""

    key: str
    tokens: int
    encoded: bytes

    @property
    def all_but_one(self) -> Prompt:
        return Prompt(f"{self.key}-all-but-one", self.tokens - 1, self.encoded.rpartition(b",")[0] + b"]")


@dataclass
class Streamed:
    """When the request left and when each piece of its answer came, in seconds of one clock."""

    sent: float
    marks: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.marks[0] - self.sent


def body(
    prompt: Prompt,
    max_new: int,
    *,
    stream: bool = False,
    params: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> bytes:
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": max_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **(more or {}),
    }
    if params is not None:
        fields["kv_transfer_params"] = dict(params)
    return json.dumps(fields, separators=(",", ":")).encode()[:-1] + b',"prompt":' + prompt.encoded + b"}"


def request(to: Address, content: bytes, request_id: str) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {to[0]}:{to[1]}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


class Connection(asyncio.Protocol):
    """One request and its answer. Pieces of a stream are timed; of other answers the bytes are kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.streamed = Streamed(0.0)
        self._head = b""
        self._body = bytearray()
        self._last = b""
        self._chunked = False
        self._stream = False
        self.status = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"{type(transport).__name__} cannot be written to")
        self._transport = transport

    def send(self, whole: bytes) -> None:
        if self._transport is None:
            raise UnansweredError(f"{self.name}: not connected")
        self.streamed.sent = perf_counter()
        self._transport.write(whole)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if not self.status:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            self.status = int(head.split(b" ", 2)[1])
            lowered = head.lower()
            self._chunked = b"transfer-encoding: chunked" in lowered
            self._stream = self.status == 200 and b"text/event-stream" in lowered
        if self._stream:
            pieces = (self._last + data).count(_PIECE_END)
            self._last = data[-1:] if data[-1:] == b"\n" and not data.endswith(_PIECE_END) else b""
            self.streamed.marks += [now] * pieces
            if pieces and not self.started.done():
                self.started.set_result(None)
            if len(self._body) < _KEPT or b'"error"' in data:
                self._body += data
        else:
            self._body += data

    def connection_lost(self, exc: Exception | None) -> None:
        for waiting in (self.started, self.ended):
            if not waiting.done():
                waiting.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def streamed_whole(self) -> Streamed:
        """The stream once it ended; its last piece is not a token but a farewell."""
        if self.status != 200 or len(self.streamed.marks) < 2 or b'"error"' in self._body:
            text = bytes(self._body[-_KEPT:]).decode(errors="replace")
            raise UnansweredError(f"{self.name}: {f'HTTP {self.status}' if self.status else 'no answer'}: {text[-500:]}")
        return Streamed(self.streamed.sent, self.streamed.marks[:-1])

    def answer(self) -> dict[str, Any]:
        content = _unchunked(bytes(self._body)) if self._chunked else bytes(self._body)
        if self.status != 200:
            said = content.decode(errors="replace")[:500]
            raise UnansweredError(f"{self.name}: {f'HTTP {self.status}' if self.status else 'no answer'}: {said}")
        found: dict[str, Any] = json.loads(content)
        return found


def _unchunked(content: bytes) -> bytes:
    out = bytearray()
    while content:
        size, _, rest = content.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        out += rest[:length]
        content = rest[length + 2 :]
    return bytes(out)


async def connect(to: Address, name: str) -> Connection:
    try:
        _, made = await asyncio.get_running_loop().create_connection(lambda: Connection(name), *to)
    except OSError as error:
        raise UnansweredError(f"{name}: the server at {to[0]}:{to[1]} takes no connection: {error}") from None
    return made


async def ended(connections: Sequence[Connection], seconds: float = ANSWER_SECONDS) -> None:
    """Waits for all of them; those that take too long are closed and named."""
    _, late = await asyncio.wait([it.ended for it in connections], timeout=seconds)
    if late:
        names = [it.name for it in connections if not it.ended.done()]
        for it in connections:
            it.close()
        raise UnansweredError(f"no answer within {seconds:g} s: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")


async def ask(to: Address, name: str, content: bytes) -> dict[str, Any]:
    """A request that is not streamed, and its answer."""
    connection = await connect(to, name)
    connection.send(request(to, content, name))
    await ended([connection])
    return connection.answer()


async def stream(to: Address, name: str, content: bytes) -> Streamed:
    (found,) = await stream_all(to, [(name, content)])
    return found


async def stream_all(to: Address, wanted: Sequence[tuple[str, bytes]]) -> list[Streamed]:
    """All of them at once, over connections made beforehand."""
    whole = [request(to, content, name) for name, content in wanted]
    connections = [await connect(to, name) for name, _ in wanted]
    for connection, data in zip(connections, whole, strict=True):
        connection.send(data)
    await ended(connections)
    return [it.streamed_whole() for it in connections]
