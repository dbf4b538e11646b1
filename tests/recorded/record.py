"""Writes down what this release says to another one.

    PYTHONPATH=src:tests python tests/recorded/record.py NAME > tests/recorded/NAME.json

Every release that changes a message adds a recording, and none is ever changed: `test_recorded.py` replays all of them.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvferry.manifest.codec import encode
from kvferry.session import Card, Hello, Lease, Listener, Reference, Release, Renew, Seek, Welcome, Words
from kvferry.session.key import Keys, read_keys
from kvferry.session.messages import Request, pack
from kvferry.session.reference import to_params
from kvferry.session.wire import dial
from kvferry.strategy.gathering import Ask, Asks, Free, Introduction, digest_of
from kvferry.strategy.gathering import pack as pack_packed
from kvferry.strategy.mapped import Token
from kvferry.strategy.staging import Offer
from kvferry.transport.metadata import Metadata, StorageEntry, encode_metadata
from pairs import PAIRS

KEY = "Jr5SPBK8eS0yDlVcJ7xqfMpjjaQxn0q3s0pVnEXoP2I="
"""Of these recordings alone."""
PAIR = PAIRS["blocks of 12 to 8"]
CACHES = PAIR.producers[0]
HOST = "0c8b6f0e-6a4b-4c8e-9a4f-2f1f4d1f5a11"
LEASE = Lease(1, (1 << 62) + 5)
SECRET = bytes(range(16))
REFERENCE = Reference("127.0.0.1:7100", "producer", "p1", "request 1", LEASE, 9, {"0": [4, -1, 2]}, "5f0c" * 8)
HELLO = Hello("consumer", "d1")
SEEK = Seek("p1", LEASE, REFERENCE.digest)


def main(name: str) -> None:
    print(json.dumps({"name": name, "key": KEY, **recorded()}, indent=1))


def recorded() -> dict[str, Any]:
    sent = [HELLO, SEEK, Renew("p1", (LEASE, Lease(0, 7))), Release("p1", LEASE, "consumer@d1", "loaded")]
    welcome, plan = _welcome(), encode(PAIR.plan())
    return {
        "reference": to_params(REFERENCE, _keys().first),
        "welcome": _text(pack(welcome)),
        "conversation": _conversation(sent, welcome),
        "refusal": _text(_starting()),
        "packed": {
            "introduction": _text(pack_packed(Introduction(SECRET, plan))),
            "ask": _text(pack_packed(Ask(SECRET, digest_of(plan), 11, ((0, 0, bytes(8), b""),)))),
            "asks": _text(pack_packed(Asks(SECRET, digest_of(plan), ((12, ((0, 0, bytes(4), bytes(4)),)), (13, ()))))),
            "free": _text(pack_packed(Free(SECRET, (11, 12)))),
        },
    }


def _welcome() -> Welcome:
    token = Token(1 << 20, 1 << 16, "dram", 0, b"what opens it")
    offer = Offer(1 << 20, "dram", 0, 1 << 16, 4, 1 << 21, SECRET, (token,))
    storages = (StorageEntry(1 << 30, 1 << 20, "dram", 0),)
    metadata = Metadata("nixl", "p.0#1", HOST, storages, b"blob", more=msgspec.msgpack.encode(offer))
    card = Card(CACHES, Words(2, CACHES.identity).manifest, encode_metadata(metadata), -5)
    return Welcome("producer", "p1", 60.0, (card,), role="both")


def _conversation(sent: list[Request], welcome: Welcome) -> list[dict[str, str]]:
    listener = Listener("127.0.0.1:0", _keys())
    listener.welcome(welcome, lambda message: REFERENCE)
    try:
        return _told(listener, sent)
    finally:
        listener.close()


def _starting() -> bytes:
    """What an engine answers that has no cards yet."""
    listener = Listener("127.0.0.1:0", _keys())
    try:
        return base64.b64decode(_told(listener, [HELLO])[-1]["producer"])
    finally:
        listener.close()


def _told(listener: Listener, sent: list[Request]) -> list[dict[str, str]]:
    out: list[dict[str, str]] = []
    with zmq.Context() as context, dial(context, ("127.0.0.1", listener.port), _keys().first, 1 << 28, {}) as end:
        for message in sent:
            end.send(pack(message))
            out.append({"consumer": _text(pack(message)), "type": type(message).__name__})
            if isinstance(message, (Hello, Seek)):
                if not end.poll(20_000):
                    raise RuntimeError(f"{message} is not answered")
                out.append({"producer": _text(end.recv()), "type": "reply"})
    return out


def _keys() -> Keys:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.touch(0o600)
        path.write_text(KEY)
        return read_keys(path)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    main(sys.argv[1])
