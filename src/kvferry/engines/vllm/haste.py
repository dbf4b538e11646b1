"""Which loads are made in the very step that orders them, so that their requests are computed in it too.

vLLM lets a request that waits for a load run a step after the one in which the load ended, or two; for a copy that takes less
than a step that is most of what a hand-over costs. A load in a step holds up everybody else in it, and what fails of it must be
undone after the step has begun. So only loads that are known to be short are made so: out of memory that is mapped, at the pace
that was seen before; and only where vLLM undoes them whole: it fails requests by their blocks, which one group of blocks
allows, and takes nothing of a failed request's next step where it fails rather than recomputes it. Or where nothing can fail:
where the producer pledges to leave its blocks alone for longer than the copies take, whatever becomes of the lease. vLLM asks
of such a connector that it fail the whole step otherwise, and that is what happens if the time is over and the lease too.
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
"""About what a load costs the engine's thread: a long step takes on as many as would double it. And about what a request costs
the thread that takes it in."""
FEW: Final = 4
"""Loads that do not hold up a step to speak of, and requests that are no crowd."""
FIRST_STEPS: Final = 2
"""While a crowd comes in, requests that take half a step to be taken in or longer, a step takes on none, for so many steps at
most. vLLM takes them in on another thread, and until that has done with Python's lock a step takes as long as both."""
GRACE_S: Final = 0.25
"""Many times what passes from when a lease is seen to stand until its copies are seen to be complete, in one step; and little
beside how long a producer's blocks are kept for a consumer anyway."""
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


def may_pledge(config: Any, kv_cache_config: Any) -> bool:
    """Whether loads of this engine can be made in a step if they cannot fail, into blocks that are the request's alone: nothing
    is found by its hash, and of all layers either every token is kept or one state."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
    return (
        all(keeps_every_token(spec) or getattr(spec, "mamba_cache_mode", "") == "none" for spec in specs)
        and all(group.enable_kv_transfer for group in kv_cache_config.kv_cache_groups)
        and not config.cache_config.enable_prefix_caching
        and config.parallel_config.pipeline_parallel_size == 1
        and config.speculative_config is None
    )


def grace_s(kv_cache_config: Any) -> float:
    """How long blocks are left alone after their lease has ended, for consumers of the same model that cannot undo a load."""
    groups = kv_cache_config.kv_cache_groups
    states = any(hasattr(spec, "mamba_cache_mode") for group in groups for spec in specs_of(group.kv_cache_spec))
    return GRACE_S if states else 0.0


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
        self._taken = self._hurried = self._came = self._crowded = 0
        self._rests = False

    @property
    def has_enough(self) -> bool:
        """Whether the step has taken on as many loads as it should."""
        if self._rests or (self._possible and self._computed and self._is_crowd and self._crowded < FIRST_STEPS):
            return True
        return self._taken >= self.most

    @property
    def most(self) -> int:
        """Loads that a step takes on, and requests that first run in it since their loads have ended beside the steps."""
        least = LOADS_A_STEP if self._possible else LOADS_BESIDE
        return max(least, int(min(self._gaps, default=0.0) / LOAD_S))

    @property
    def _is_crowd(self) -> bool:
        return self._came > max(FEW, min(self._gaps, default=0.0) / LOAD_S / 2)

    def came(self) -> None:
        """A request that may be loaded came in."""
        self._came += 1

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
        if self._is_crowd:
            self._crowded += 1
        elif not self._rests:
            self._crowded = 0
        self._rests = self._ahead and self._hurried > FEW
        self._spoken_for, self._taken, self._hurried, self._came = 0.0, 0, 0, 0
        began, self._began = self._began, self._clock()
        if self._computed and not idle:
            self._gaps.append(self._began - began)
        self._computed = not idle

    def rest(self) -> None:
        """The next step takes on none."""
        self._rests = True

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
