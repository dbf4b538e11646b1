"""Engines as a person asks for them."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvferry.errors import UpError

_LIMITS: Final = {"tp": 1024, "pp": 1024, "block": 1 << 16}
_EXAMPLE: Final = "write it like tp=2,pp=2,block=16"
OWN_FLAGS: Final = {
    "--model": "it is what the command is given",
    "--port": "set --first-port",
    "--host": "set --host",
    "--kv-transfer-config": "it is made here; start the engines yourself to set another (--dry-run prints how)",
    "--tensor-parallel-size": "write tp=2 in --prefill or --decode",
    "-tp": "write tp=2 in --prefill or --decode",
    "--pipeline-parallel-size": "write pp=2 in --prefill or --decode",
    "-pp": "write pp=2 in --prefill or --decode",
    "--block-size": "write block=16 in --prefill or --decode",
    "--served-model-name": "both sides and the router must agree on it: set --name",
}
"""Flags that both sides, the router or the address depend on."""


class Role(str, Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Engine:
    """One engine that is wanted; `block` 0 leaves the block size to vLLM. `flags` are vLLM's own."""

    role: Role
    index: int = 0
    tp: int = 1
    pp: int = 1
    block: int = 0
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.index}"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def sets(self, *flags: str) -> bool:
        """Whether one of vLLM's flags is among those of the engine."""
        return any(it.split("=", 1)[0].replace("_", "-") in flags for it in self.flags)


def engines(role: Role, sides: Sequence[str], flags: str = "") -> tuple[Engine, ...]:
    """One engine for every side; `flags` is a command line for all of them."""
    words = split_flags(flags, f"--{role.value}-flags")
    return tuple(_engine(role, index, side, words) for index, side in enumerate(sides or ("tp=1",)))


def split_flags(text: str, option: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UpError(f"{option} {text!r}: {error}") from None
    for word in words:
        named = word.split("=", 1)[0].replace("_", "-")
        if named in OWN_FLAGS:
            raise UpError(f"{option}: {named} is not set there: {OWN_FLAGS[named]}")
    return words


def _engine(role: Role, index: int, side: str, flags: tuple[str, ...]) -> Engine:
    found: dict[str, int] = {}
    for item in side.split(","):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if key not in _LIMITS:
            near = difflib.get_close_matches(key, _LIMITS, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near and equals else _EXAMPLE
            raise UpError(f"--{role.value} {side!r}: there is no key {key!r}; {hint}")
        if key in found:
            raise UpError(f"--{role.value} {side!r}: {key} is given twice")
        if not (value.isascii() and value.isdigit() and len(value) < 8 and 1 <= int(value) <= _LIMITS[key]):
            raise UpError(f"--{role.value} {side!r}: {key} is {value!r}; a whole number from 1 to {_LIMITS[key]:,} is needed")
        found[key] = int(value)
    return Engine(role, index, flags=flags, **found)
