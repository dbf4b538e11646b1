"""Engines without an engine: ranks with memory of their own on real NIXL, leases and a listener, to be asked and read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvferry.explain.request import block_tables, blocks_needed
from kvferry.manifest import Manifest
from kvferry.models import Side, load_model, manifests
from kvferry.session import Card, Ferry, Keys, Listener, Producer, Reference, Release, Welcome, Words, own_keys, to_params
from kvferry.strategy import Strategies
from kvferry.transport import NixlOptions, NixlTransport, Storage

Bytes = npt.NDArray[np.uint8]
LOOPBACK = NixlOptions(ucx={"UCX_NET_DEVICES": "lo"})
TOKENS = 64


@dataclass
class Rank:
    manifest: Manifest
    memory: list[Bytes]
    words: Words
    ferry: Ferry
    card: Card


@dataclass
class Running:
    """One engine; `released` are leases that were given back."""

    name: str
    role: str
    keys: Keys
    listener: Listener
    producer: Producer
    ranks: list[Rank]
    released: list[Release] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    @property
    def manifests(self) -> list[Manifest]:
        return [rank.manifest for rank in self.ranks]

    def answer(self, **changes: Any) -> None:
        cards = tuple(rank.card for rank in self.ranks)
        made = Welcome(self.name, self.producer.incarnation, 60.0, cards, role=self.role)  # type: ignore[arg-type]
        self.listener.welcome(replace(made, **changes))

    def prefill(self, tokens: int) -> dict[str, Any]:
        """A request of `tokens` tokens in blocks that nobody else has, under a lease that is live on every rank."""
        request = f"r{len(self.producer)}"
        self.producer.open(request)
        lease = self.producer.publish(request, 0.0)
        for rank in self.ranks:
            for opened in self.producer.take_opened() or (lease,):
                rank.words.live(opened)
        tables = block_tables(self.manifests[0].groups, tokens)
        blocks: dict[str, Any] = {
            str(group.id): tables[group.id] if group.tokens else tables[group.id][0] for group in self.manifests[0].groups
        }
        reference = Reference(self.address, self.name, self.producer.incarnation, request, lease, tokens, blocks, "digest")
        return {"do_remote_prefill": True, "kvferry": to_params(reference, self.keys.first)}

    def close(self) -> None:
        self.listener.close()
        for rank in self.ranks:
            rank.ferry.close()


def launch(
    name: str, model: str, side: str, role: str = "both", key: Keys | None = None, listening: bool = True, blocks: int = 0
) -> Running:
    shape = load_model(model)
    groups = manifests(shape, Side.parse(side), engine=name, blocks=2)[0].groups
    count = blocks or blocks_needed(groups, TOKENS)
    ranks = []
    for manifest in manifests(shape, Side.parse(side), engine=name, incarnation=f"{name}-1", blocks=count):
        random = np.random.default_rng(manifest.identity.rank.ordinal + len(name))
        memory: list[Bytes] = [random.integers(1, 256, region.length, dtype=np.uint8) for region in manifest.regions]
        regions = tuple(
            replace(region, address=int(data.ctypes.data)) for region, data in zip(manifest.regions, memory, strict=True)
        )
        placed = replace(manifest, regions=regions)
        words = Words(count, placed.identity)
        transport = Strategies(NixlTransport(f"{name}.{placed.identity.rank.ordinal}", LOOPBACK))
        transport.register([*(Storage(int(data.ctypes.data), data.nbytes) for data in memory if data.nbytes), words.storage])
        ferry = Ferry(transport, words, placed.identity.rank.ordinal, lambda fills: None)
        ferry.start()
        card = Card(placed, words.manifest, transport.metadata(), words.beacon)
        ranks.append(Rank(placed, memory, words, ferry, card))
    producer = Producer(f"{name}-1", count, 60.0)
    keys = key or own_keys()
    listener = Listener("127.0.0.1:0", keys, producer.stands)
    made = Running(name, role, keys, listener, producer, ranks)
    if listening:
        made.answer()
    return made


@contextmanager
def served(engine: Running, tokens: int = 48, dropped: bool = False) -> Iterator[str]:
    """The engine's API as far as a canary uses it: prompts of `tokens` tokens; `dropped`: without a reference."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say({"data": [{"id": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["kv_transfer_params"] == {"do_remote_decode": True}
            self._say({"kv_transfer_params": None if dropped else engine.prefill(tokens)})

        def _say(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
