"""KVFerry's log: its records are told from others by their file, and no name in a message can begin a line of its own.

Peers, routers and clients choose names that end up in messages. Here, where all records pass, what is not printable is escaped,
and a line that we broke ourselves goes on indented.

One cause can fail many requests. `Bursts` writes the first lines of a burst, and then how many more there were.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvferry.errors import printable

LOGGERS: Final = ("kvferry.session", "kvferry.strategy", "kvferry.transport", "kvferry.vllm")

_PACKAGE: Final = f"{Path(__file__).parent}{os.sep}"

BURST_S: Final = 10.0
LINES: Final = 5
"""Lines of one kind that are written in that time."""


def indented(text: str) -> str:
    """Lines after the first begin with a space, and nothing but line ends is unprintable."""
    first, *others = (printable(line) for line in text.split("\n"))
    return "\n".join([first, *(line if line.startswith(" ") else f"  {line}" for line in others)])


class _Guard(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.pathname.startswith(_PACKAGE):
            record.filename = f"kvferry/{record.filename}"
        record.msg, record.args = indented(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = indented("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True


def guard() -> None:
    """Once, when the package is loaded."""
    for name in LOGGERS:
        found = logging.getLogger(name)
        if not any(isinstance(other, _Guard) for other in found.filters):
            found.addFilter(_Guard())


class Bursts:
    """Log lines of one kind, of which `LINES` are written in `BURST_S`. The last of them says that others are only counted; the
    next line after that time says how many they were. Used by one thread."""

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._level, self._clock = logger, level, clock
        self._began, self._written, self._held = clock(), 0, 0

    def log(self, message: str, *arguments: object) -> None:
        now = self._clock()
        if now - self._began >= BURST_S:
            self._began, self._written = now, 0
        if self._written == LINES:
            self._held += 1
            return
        self._written += 1
        before = f" ({self._held} lines before this one were not written)" if self._held else ""
        after = f" (more lines in the next {BURST_S:g} s are counted, not written)" if self._written == LINES else ""
        self._held = 0
        self._logger.log(self._level, f"{message}%s%s", *arguments, before, after, stacklevel=2)
