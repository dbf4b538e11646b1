"""Peers of the options, met by a rank before any request names them: one that cannot be keeps no other from it."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm import worker
from kvferry.engines.vllm.worker import WorkerHalf
from kvferry.errors import SessionError
from kvferry.session import own_keys

pytestmark = pytest.mark.vllm

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


def test_a_peer_that_fails_unexpectedly_keeps_no_other_from_being_met(monkeypatch, caplog):
    asked: list[str] = []

    def ask(address: str, *_: Any) -> Any:
        asked.append(address)
        if address == ADDRESSES[0]:
            return SimpleNamespace(cards=())
        if asked.count(address) == 1:
            raise SessionError("not there yet")
        raise RuntimeError("unheard of")

    monkeypatch.setattr(worker, "ask", ask)
    monkeypatch.setattr(worker, "RETRY_S", 0.0)
    half: Any = object.__new__(WorkerHalf)
    half._options = SimpleNamespace(peers=ADDRESSES, keys=own_keys, greeting_s=1.0)
    half._closing = threading.Event()
    half._config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="D"))
    half._meet_early(None, None)
    assert asked == [*ADDRESSES, *ADDRESSES[1:]]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == [f"{address} is connected to when the first request names it" for address in ADDRESSES]
