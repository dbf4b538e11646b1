"""Up to when everything that had arrived has been heard, by a thread that looks for messages in turns; sans I/O.

A process that was stopped, or whose threads got no turn for long, finds what was sent meanwhile when it goes on. It takes some
moments until all of it has come up from the kernel. Until then time has not passed for whoever waits for such messages.
"""

from __future__ import annotations

from typing import Final

STOPPED_S: Final = 1.0
"""A turn that begins so much later than it was to begin follows a stop."""
SETTLED_S: Final = 0.3
"""After a stop nothing must be found for so long."""
TURNS: Final = 3
"""And in so many turns."""
MOST_S: Final = 10.0
"""With messages without end it is never later than this that time passes."""


class Hearing:
    """`caught_up_at` may be read by any thread."""

    def __init__(self, now: float) -> None:
        self.caught_up_at = now
        self._next_by = now + MOST_S
        self._behind_since: float | None = None
        self._quiet_since = now
        self._quiet = 0

    def turned(self, began: float, heard: bool, next_by: float) -> None:
        """A turn that `began` then has heard a message, or found none; the next is to begin by then at the latest."""
        if began > self._next_by + STOPPED_S:
            self._behind_since, self._quiet = began, 0
        self._next_by = next_by
        if heard:
            self._quiet = 0
        elif not self._quiet:
            self._quiet_since = began
        self._quiet += not heard
        if self._behind_since is not None:
            settled = self._quiet >= TURNS and began - self._quiet_since >= SETTLED_S
            if not settled and began - self._behind_since <= MOST_S:
                return
            self._behind_since = None
        self.caught_up_at = max(self.caught_up_at, began - MOST_S if heard else began)
