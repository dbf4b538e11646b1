"""Peers of the options, met before any request names them."""

from __future__ import annotations

import logging
import threading
from typing import Any

from kvferry.engines.vllm.options import RETRY_S
from kvferry.errors import KVFerryError, SessionError
from kvferry.session import Courier

logger = logging.getLogger("kvferry.vllm")


def introduce(courier: Courier[Any], address: str, closing: threading.Event) -> None:
    """A peer that is there and cannot be read ends the start; one that is not there yet is asked for until it is, or until
    `closing`."""
    try:
        courier.introduce(address)
    except SessionError as error:
        logger.warning("%s; it is asked for beside the engine", error)
        threading.Thread(target=_ask_for, args=(courier, address, closing), name="kvferry-meeting", daemon=True).start()


def _ask_for(courier: Courier[Any], address: str, closing: threading.Event) -> None:
    while not closing.wait(RETRY_S) and not _has_answered(courier, address):
        pass


def _has_answered(courier: Courier[Any], address: str) -> bool:
    try:
        courier.introduce(address)
    except SessionError as error:
        logger.debug("%s", error)
        return False
    except KVFerryError as error:
        logger.error("%s cannot be read, which the requests that name it will find too: %s", address, error)
    except Exception:
        logger.exception("%s cannot be met before the first request names it", address)
    return True
