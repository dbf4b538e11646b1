"""Dynamo's workers look up by the connector's name what they say to a prefill engine; ours is spoken to as vLLM's own is."""

from __future__ import annotations

import importlib
import sys
from typing import Final

WORKER: Final = "dynamo.vllm"
PROTOCOLS: Final = "dynamo.vllm.kv_connector_protocols"
SPOKEN_TO_AS: Final = "NixlConnector"


def make_known(name: str) -> None:
    """In a worker of Dynamo's, and nowhere else. Releases that have no such table speak to every connector alike."""
    if WORKER not in sys.modules:
        return
    try:
        table = importlib.import_module(PROTOCOLS).KV_CONNECTOR_PROTOCOLS
    except (ImportError, AttributeError):
        return
    if SPOKEN_TO_AS in table:
        table.setdefault(name, table[SPOKEN_TO_AS])
