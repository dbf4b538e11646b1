"""KVFerry's log: no record of it begins a line of its own, whoever's names are in it.

Peers, routers and clients choose names that end up in messages. Here, where all records pass, what is not printable is escaped,
and a line that we broke ourselves goes on indented.

One cause can fail many requests. `Bursts` writes the first lines of a burst, and how many more there were when it is over.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final

from kvferry.errors import printable

LOGGERS: Final = ("kvferry.fleet", "kvferry.session", "kvferry.strategy", "kvferry.transport", "kvferry.vllm")


BURST_S: Final = 10.0
LINES: Final = 5
"""Lines of one kind that are written in that time."""


def indented(text: str) -> str:
    """Lines after the first begin with a space, and nothing but line ends is unprintable."""
    first, *others = (printable(line) for line in text.split("\n"))
    return "\n".join([first, *(line if line.startswith(" ") else f"  {line}" for line in others)])


class _Guard(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
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
    """Log lines of one kind, of which a burst writes `LINES` in `BURST_S`. The last one that was held back is written when that
    time is over, and says how many others were. Used by one thread, which calls `turn` now and then."""

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._level, self._clock = logger, level, clock
        self._began, self._written, self._held = clock(), 0, 0
        self._last: tuple[str, tuple[object, ...]] = ("", ())

    def log(self, message: str, *arguments: object) -> None:
        self.turn()
        now = self._clock()
        if now - self._began >= BURST_S:
            self._began, self._written = now, 0
        if self._written < LINES:
            self._written += 1
            self._logger.log(self._level, message, *arguments, stacklevel=2)
        else:
            self._held += 1
            self._last = message, arguments

    def turn(self) -> None:
        """Write what was held back, if it is time."""
        if self._held and self._clock() - self._began >= BURST_S:
            self.close()

    def close(self) -> None:
        """Write what was held back."""
        if not self._held:
            return
        (message, arguments), others, self._held = self._last, self._held - 1, 0
        more = f" (and {others} more like this, not written here)" if others else ""
        self._logger.log(self._level, f"{message}%s", *arguments, more)
