"""First tokens that do not wait until another step has been launched.

vLLM launches a step before it looks at the tokens of the last one, which keeps the device busy where a step takes longer to
compute than to launch. Where it does not, as with kernels that are launched one by one, a token is there when its own step has
been launched, and waits for the launch of the next. There a step in which loaded requests compute their first tokens is
followed by one that computes nothing: vLLM looks at those tokens at once, and all requests go on in the step after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from statistics import median
from typing import Any, Final

WAIT: Final = 0.25
"""How long results may be waited for when their step has been launched, of the time that this took: for so long the device is
left alone, and whoever decodes beside the first tokens waits."""
_REMEMBERED: Final = 8
_NEVER: Final = 1 << 62


class _Step(Enum):
    """FIRST: some requests compute their first token. NEXT: none does. HELD: nothing is computed, for the sake of first tokens.
    IDLE: there is nothing to compute."""

    FIRST = "first"
    NEXT = "next"
    HELD = "held"
    IDLE = "idle"


class Firsts:
    """Knows how long results are waited for. Called on the engine's thread when a step is put together, is launched, has been
    launched, and when results have been looked at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = self._step = _Step.IDLE
        self._began = self._launch_s = 0.0
        self._launched: float | None = None
        self._chosen: Sequence[Any] = ()
        self._held: list[tuple[Any, int]] = []

    def begin(self, idle: bool, requests: Sequence[Any] = ()) -> None:
        """A step is put together. `requests` are all of it if some have their first token in it; None is one that cannot be
        held."""
        held, self._held = self._held, []
        for request, eligible in held:
            request.next_decode_eligible_step = eligible
        self._last = self._step
        self._step = (_Step.HELD if held else _Step.IDLE) if idle else _Step.FIRST if requests else _Step.NEXT
        self._began, self._launched = self._clock(), None
        quick = bool(self._waits) and median(self._waits) <= 0
        self._chosen = requests if quick and all(map(_can_be_held, requests)) else ()

    @property
    def will_hold(self) -> bool:
        """Whether the requests of this step are held in the next."""
        return bool(self._chosen)

    @property
    def holds(self) -> bool:
        """Whether this step computes nothing for the sake of the last one's tokens."""
        return self._step is _Step.HELD

    def launch(self) -> None:
        """vLLM has said of the requests of this step when they may be computed again, and is told otherwise."""
        self._held = [(request, request.next_decode_eligible_step) for request in self._chosen]
        for request in self._chosen:
            request.next_decode_eligible_step = _NEVER

    def launched(self) -> None:
        self._launched = self._clock()
        if self._step in (_Step.FIRST, _Step.NEXT):
            self._launch_s = self._launched - self._began

    def looked(self) -> None:
        """Those of the last step that was launched before this one, if it computed anything."""
        if self._launched is None:
            return
        wait_s, self._launched = self._clock() - self._launched, None
        if self._step is _Step.HELD or (self._step is _Step.NEXT and self._last in (_Step.FIRST, _Step.NEXT)):
            self._waits.append(wait_s - WAIT * self._launch_s)


def _can_be_held(request: Any) -> bool:
    return hasattr(request, "next_decode_eligible_step")
