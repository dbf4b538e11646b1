"""What findings amount to: a pair serves, it does not, or that cannot be told yet."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from kvferry.findings import Finding, errors

UNREACHED: Final = frozenset({"not-reached", "no-answer", "refused"})
"""Names of findings that say that an engine could not be asked, which may be otherwise a moment later."""
UNKNOWN: Final = frozenset({"model-unknown", "model-assumed", "not-planned", "no-evidence", "certified-at-start"})
"""Names of findings that say that the caches of command lines were not planned as the engines have them."""
UNDECIDED: Final = UNREACHED | UNKNOWN


class Verdict(str, Enum):
    SERVES = "serves"
    REFUSED = "refused"
    UNDECIDED = "undecided"


def verdict(findings: Iterable[Finding]) -> Verdict:
    """What does not fit outweighs what is not known."""
    found = {one.name for one in errors(findings)}
    if not found:
        return Verdict.SERVES
    return Verdict.UNDECIDED if found <= UNDECIDED else Verdict.REFUSED
