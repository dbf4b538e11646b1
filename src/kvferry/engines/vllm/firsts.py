"""First tokens that do not wait until another step has been launched.

vLLM launches a step before it looks at the tokens of the last one, which keeps the device busy where a step takes longer to
compute than to launch. Where it does not, as with kernels that are launched one by one, a token is there when its own step has
been launched, and waits for the launch of the next. There a step in which loaded requests compute their first tokens is
followed by one that computes nothing: vLLM looks at those tokens at once, and all requests go on in the step after.

Whether a step takes longer to compute than to launch shows when it is followed so: how long its results are then waited for.
That is tried where they have not been waited for after the launch of a next step either, and at first where kernels are known
to be launched one by one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from statistics import median
from typing import Any, Final

WAIT: Final = 0.25
"""How long results may be waited for when their step has been launched, of the time that the launch of another takes: for so
long the device is left alone, and whoever decodes beside the first tokens waits."""
EMPTY_S: Final = 0.001
"""vLLM rests for so long after a step that computes nothing."""
PATIENCE: Final = 64
"""After so many steps with first tokens it is tried again: what an engine computes changes."""
_REMEMBERED: Final = 8
_GUESSES: Final = 8
"""So often it is tried because of how kernels are launched, where nothing has been seen of what that takes."""
_NEVER: Final = 1 << 62


def may_hold(config: Any) -> bool:
    """Whether requests can be held: vLLM's runner keeps what it knows of those that a step leaves out, and no other engine
    waits for this one's steps."""
    alone = config.parallel_config.data_parallel_size == config.parallel_config.pipeline_parallel_size == 1
    ahead, keeps = config.scheduler_config.async_scheduling, getattr(config, "use_v2_model_runner", False)
    return bool(ahead and keeps and alone)


def launches_one_by_one(config: Any) -> bool:
    """Whether every kernel of a step is launched by itself, not as a part of a graph."""
    return bool(config.compilation_config.cudagraph_mode.name == "NONE")


class _Step(Enum):
    """FIRST: some requests compute their first token. NEXT: none does. HELD: nothing is computed, for the sake of first tokens.
    IDLE: there is nothing to compute."""

    FIRST = "first"
    NEXT = "next"
    HELD = "held"
    IDLE = "idle"


class Firsts:
    """Called on the engine's thread when a step is put together, is launched, has been launched, and when results have been
    looked at. `one_by_one`: so are the kernels of a step launched."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, one_by_one: bool = False) -> None:
        self._clock, self._one_by_one = clock, one_by_one
        self._launches: deque[float] = deque(maxlen=_REMEMBERED)
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._held_waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._refused = self._guesses = 0
        self._last = self._step = _Step.IDLE
        self._began = 0.0
        self._launched: float | None = None
        self._looked = False
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
        self._began, self._launched, self._looked = self._clock(), None, False
        self._chosen = requests if requests and not held and all(map(_can_be_held, requests)) and self._is_worth_it() else ()

    def _is_worth_it(self) -> bool:
        if not self._held_waits:
            return median(self._waits) <= 0 if self._waits else self._one_by_one and self._guesses < _GUESSES
        if median(self._held_waits) <= 0:
            return True
        self._refused += 1
        if self._refused >= PATIENCE:
            self._refused = 0
            self._held_waits.clear()
        return False

    @property
    def will_hold(self) -> bool:
        """Whether the requests of the last step that was put together are held in the next."""
        return bool(self._chosen) or bool(self._held)

    @property
    def holds(self) -> bool:
        """Whether this step computes nothing for the sake of the last one's tokens."""
        return self._step is _Step.HELD

    def launch(self) -> None:
        """vLLM has said of the requests of this step when they may be computed again, and is told otherwise."""
        chosen, self._chosen = self._chosen, ()
        if chosen and not self._waits and not self._held_waits:
            self._guesses += 1
        for request in chosen:
            self._held.append((request, request.next_decode_eligible_step))
            request.next_decode_eligible_step = _NEVER

    def launched(self) -> None:
        self._launched = self._clock()
        if self._step is _Step.NEXT and not self._looked:
            self._launches.append(self._launched - self._began)

    def looked(self) -> None:
        """At those of the last step that was launched before this one. Where vLLM needs them to launch this one it looks at
        them while it does: that tells nothing."""
        if self._launched is None:
            self._looked = True
            return
        wait_s, self._launched = self._clock() - self._launched, None
        if not self._launches:
            return
        allowed_s = WAIT * median(self._launches)
        if self._step is _Step.HELD:
            self._held_waits.append(wait_s + EMPTY_S - allowed_s)
        elif self._step is _Step.NEXT and self._last in (_Step.FIRST, _Step.NEXT) and not self._looked:
            self._waits.append(wait_s - allowed_s)


def _can_be_held(request: Any) -> bool:
    return hasattr(request, "next_decode_eligible_step")
