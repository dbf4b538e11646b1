"""What one can do who has no key, and has references of his own, this source, and the ports: nothing."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from keyed import KEYS, NAMED, keys, sealed, secured
from kvferry.errors import BadReferenceError
from kvferry.session import (
    Courier,
    Hello,
    Lease,
    Listener,
    Producer,
    Reference,
    Release,
    Renew,
    Seek,
    from_params,
    seek,
)
from kvferry.session.messages import pack
from kvferry.session.reference import Sizes
from kvferry.session.wire import SilentError, ask
from test_session_wire import welcome
from transport_suite import until

sys.path.append(str(Path(__file__).parent / "vllm"))
from forging import forgeries

HELLO = Hello("consumer", "d1")
PATIENCE_S = 20.0
SHORT_S = 1.0


@pytest.fixture
def door() -> Iterator[tuple[int, list[Any]]]:
    """A port of this machine, and who came to it."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    came.append(server.accept())

        threading.Thread(target=take, daemon=True).start()
        yield server.getsockname()[1], came
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("held", [KEYS, NAMED, keys("the new one", "the old one")], ids=["own", "named", "two"])
def test_a_thousand_forged_references_lead_nowhere(held, door):
    """As the engine reads what comes with a request: whatever is refused here is never held, met or loaded."""
    port, came = door
    real, other = (
        Reference(f"127.0.0.1:{port}", "P", "p1", f"cmpl-{name}", Lease(slot, 7 + slot), 40, {"0": [slot, 5, 9]}, name * 32)
        for slot, name in ((1, "a"), (2, "b"))
    )
    mine, others = (json.loads(json.dumps(sealed(it, held))) for it in (real, other))
    courier: Courier[str] = Courier(HELLO, held, SHORT_S, lambda peer, found: "met")
    refused = 0
    try:
        for number, forged in enumerate(forgeries(mine, others, real, 1000)):
            try:
                found = from_params(forged, held, Sizes.of(4096, 1, [16]))
            except BadReferenceError:
                refused += 1
                continue
            courier.hold(f"r{number}", found)
            courier.peer(found)
        assert refused == 1000
        assert from_params(mine, held) == real
        assert came == []
        courier.hold("real", real)
        until(lambda: len(came) > 0, "the reference that was given out is followed")
    finally:
        courier.close()


@pytest.fixture
def producing() -> Iterator[tuple[Listener, Producer, list[Any]]]:
    """A producer with one lease that stands; `sought` is what it was asked for."""
    sought: list[Any] = []
    producer = Producer("p1", 4, 60.0)
    producer.open("r")
    producer.publish("r", 0.0)
    listener = Listener("127.0.0.1:0", KEYS, producer.stands)
    listener.welcome(welcome(), lambda asked: sought.append(asked))
    yield listener, producer, sought
    listener.close()


@pytest.mark.parametrize("held", [None, keys("a guess"), keys("another user's own", local=True)], ids=["none", "named", "own"])
def test_without_the_key_nobody_greets_renews_releases_or_seeks(producing, held):
    listener, producer, sought = producing
    lease = producer.publish("r", 0.0)
    words = [pack(word) for word in (HELLO, Seek("p1", lease, "d"), Renew("p1", (lease,)), Release("p1", lease, "reader"))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.setsockopt(zmq.LINGER, 0)
        if held is not None:
            secured(end, held)
        end.connect(f"tcp://127.0.0.1:{listener.port}")
        for word in words * 3:
            with suppress(zmq.Again):
                end.send(word, zmq.NOBLOCK)
        assert not end.poll(SHORT_S * 1000)
        if held is not None:
            with pytest.raises(SilentError):
                ask(f"127.0.0.1:{listener.port}", HELLO, held, SHORT_S)
            with pytest.raises(SilentError):
                seek(f"127.0.0.1:{listener.port}", Seek("p1", lease, "d"), held, SHORT_S)
    assert ask(f"127.0.0.1:{listener.port}", HELLO, KEYS, PATIENCE_S) == welcome()
    assert (listener.greeted, listener.refused, listener.take(), sought) == (1, 0, [], [])
    assert producer.stands("p1", lease)
