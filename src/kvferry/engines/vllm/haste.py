"""Which loads are made in the very step that orders them, so that their requests are computed in it too.

vLLM lets a request that waits for a load run a step after the one in which the load ended, or two; for a copy that takes less
than a step that is most of what a hand-over costs. A load in a step holds up everybody else in it, and what fails of it must be
undone after the step has begun. So only loads that are known to be short are made so: out of memory that is mapped, at the pace
that was seen before; and only where vLLM undoes them whole: it fails requests by their blocks, which one group of blocks
allows, and takes nothing of a failed request's next step where it fails rather than recomputes it. All other loads, those of
models with recurrent layers or windows among them, are made beside the steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.engines.vllm.tables import keeps_every_token, specs_of
from kvferry.session import PeerKey

SHORT_S: Final = 0.008
"""All copies that one step may wait for: about a decode step of a small model. Copies of many loads are made while their
requests are launched, and may take as long as that."""
LOADS_A_STEP: Final = 16
"""Loads that one step takes on at least, in haste or not, unless it takes on none: of those that come together, the first need
not wait until the last are ordered, and who decodes beside them waits for a few only."""
LOADS_BESIDE: Final = 64
"""The same where loads are never made in a step: it only begins them, and all that begin together are computed together."""
LOAD_S: Final = 0.0005
"""About what a load costs the engine's thread: a long step takes on as many as would double it."""
FEW: Final = 4
"""Loads that do not hold up a step to speak of."""
_REMEMBERED: Final = 16


def may_hurry(config: Any, kv_cache_config: Any) -> bool:
    """Whether vLLM can undo a load of this engine in its step, and neither zeroes what was loaded nor needs it earlier. Blocks
    are findable by their hash before they are loaded, so that all layers must load all of them: none may have a window."""
    groups = kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and all(map(keeps_every_token, specs_of(groups[0].kv_cache_spec)))
        and not getattr(kv_cache_config, "needs_kv_cache_zeroing", True)
        and config.kv_transfer_config.kv_load_failure_policy == "fail"
        and config.parallel_config.pipeline_parallel_size == 1
        and config.speculative_config is None
    )


def looks_ahead(config: Any) -> bool:
    """Whether vLLM launches a step before it looks at the tokens of the last one."""
    return bool(config.scheduler_config.async_scheduling) or config.parallel_config.pipeline_parallel_size > 1


@dataclass
class _Pace:
    """Seconds a token of late, and the best of these."""

    late: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    best: float = math.inf


class Haste:
    """Knows how fast producers were read, and how much a step has taken on. `ahead`: a step is launched before the tokens of
    the last one are looked at; so one in which many were loaded is followed by one that takes on none, for whose launch alone
    their first tokens wait then. Requests that wait for their loads have none yet."""

    def __init__(self, possible: bool, clock: Callable[[], float] = time.monotonic, ahead: bool = False) -> None:
        self._possible, self._clock, self._ahead = possible, clock, ahead
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._began, self._computed = clock(), False
        self._paces: dict[PeerKey, _Pace] = {}
        self._spoken_for = 0.0
        self._taken = self._hurried = 0
        self._rests = False

    @property
    def has_enough(self) -> bool:
        """Whether the step has taken on as many loads as it should."""
        return self._rests or self._taken >= self.most

    @property
    def most(self) -> int:
        """Loads that a step takes on, and requests that first run in it since their loads have ended beside the steps."""
        least = LOADS_A_STEP if self._possible else LOADS_BESIDE
        return max(least, int(min(self._gaps, default=0.0) / LOAD_S))

    def allows(self, request: Any, peer: PeerKey, tokens: int) -> bool:
        if not self._possible or request.mm_features:
            return False
        seconds = self._seconds(peer, tokens)
        return seconds is not None and self._spoken_for + seconds <= max(SHORT_S, (self._hurried + 1) * LOAD_S)

    def took(self, peer: PeerKey, tokens: int, in_step: bool) -> None:
        """A load was ordered."""
        self._taken += 1
        if in_step:
            self._hurried += 1
            self._spoken_for += self._seconds(peer, tokens) or 0.0

    def new_step(self, idle: bool = False) -> None:
        """A step is ordered; `idle`: nothing is computed in it."""
        self._rests = self._ahead and self._hurried > FEW
        self._spoken_for, self._taken, self._hurried = 0.0, 0, 0
        began, self._began = self._began, self._clock()
        if self._computed and not idle:
            self._gaps.append(self._began - began)
        self._computed = not idle

    def knows(self, peer: PeerKey) -> bool:
        return peer in self._paces

    def saw(self, peer: PeerKey, tokens: int, seconds: float) -> None:
        """How long so many tokens took that any step could have waited for."""
        pace = self._paces.get(peer)
        if pace is None:
            pace = self._paces[peer] = _Pace()
        pace.late.append(seconds / tokens)
        pace.best = min(pace.late)

    def forget(self, peer: PeerKey) -> None:
        """Nothing is known of it any more: it is gone, or a load from it failed."""
        self._paces.pop(peer, None)

    def _seconds(self, peer: PeerKey, tokens: int) -> float | None:
        """At the best pace of late: short loads are slow for their length."""
        pace = self._paces.get(peer)
        return None if pace is None else pace.best * tokens
