"""KVFerry's log: no record of it begins a line of its own, whoever's names are in it.

Peers, routers and clients choose names that end up in messages. Here, where all records pass, what is not printable is escaped,
and a line that we broke ourselves goes on indented.
"""

from __future__ import annotations

import logging
import traceback
from typing import Final

from kvferry.errors import printable

LOGGERS: Final = ("kvferry.fleet", "kvferry.session", "kvferry.strategy", "kvferry.transport", "kvferry.vllm")


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
