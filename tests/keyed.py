"""Keys for tests: of a text, without a file; and how to speak to a listener by hand."""

from __future__ import annotations

from typing import Any

import zmq

from kvferry.session import Reference, from_params, to_params
from kvferry.session.key import Key, Keys, keys_in


class Fixed:
    """Keys that are what the test makes them."""

    def __init__(self, *texts: bytes) -> None:
        self.texts = texts

    def stamp(self) -> object:
        return self.texts

    def read(self) -> tuple[Key, ...]:
        return tuple(keys_in(text.ljust(32, b"-"), "the test's key")[0] for text in self.texts)


def keys(*texts: str, local: bool = False) -> Keys:
    return Keys(Fixed(*(text.encode() for text in texts)), local)


KEYS = keys("this user's own", local=True)
"""As an engine without key_file has them."""
NAMED = keys("the cluster's")


def secured(end: zmq.Socket[Any], held: Keys = KEYS) -> zmq.Socket[Any]:
    """A socket that may dial a listener with these keys."""
    end.curve_publickey, end.curve_secretkey = zmq.curve_keypair()
    end.curve_serverkey = held.first.public
    return end


def sealed(reference: Reference, held: Keys = KEYS) -> dict[str, Any]:
    return to_params(reference, held.first)


def opened(params: object, held: Keys = KEYS) -> Reference:
    return from_params(params, held)
