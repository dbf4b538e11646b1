"""What a check found: a name that does not change, what was seen, and what to do about it. Data, for tables and programs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from kvferry.errors import printable


class Severity(str, Enum):
    """ERROR: it does not work so. WARNING: it works, and not as one would wish. NOTE: good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(Struct, frozen=True):
    """One finding; `where` is the engine, the pair or the path that it is about."""

    name: str
    seen: str
    cure: str
    severity: Severity = Severity.ERROR
    where: str = ""

    def __str__(self) -> str:
        """On one line, whoever's words are in it."""
        return printable(f"{self.seen}: {self.cure}" if self.cure else self.seen)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [found for found in findings if found.severity is Severity.ERROR]
