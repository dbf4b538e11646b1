"""One consumer rank's loads, on a thread of their own. The engine's thread hands in meetings and loads and takes outcomes; the
transport is touched in turns.

The thread sleeps as long as it can: it shares an interpreter with the engine. Where reads may be made from any thread, the
engine's own begins a load when it is handed in and looks after it when outcomes are asked for, if the ferry's thread is not at
it: a copy that takes less than a millisecond would otherwise wait longer for the interpreter than for its bytes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from kvferry.errors import KVFerryError, SessionError, plain
from kvferry.plan import Fills
from kvferry.plan.explain import costs
from kvferry.session.bell import Bell
from kvferry.session.consumer import PeerKey
from kvferry.session.crossing import Crossing, Filled, Load, Outcome, is_lent
from kvferry.session.meeting import Meeting
from kvferry.session.passage import Passage
from kvferry.session.words import Words
from kvferry.transport import Transport

logger = logging.getLogger("kvferry.session")

_BUSY_S: Final = 0.0005
"""Between two looks at loads that have just moved on: a tenth of a decode step, and less than a short load takes."""
_LONGEST_S: Final = 0.002
"""Between two looks at loads that take long: a small part of what they take already."""
_PATIENCE: Final = 4
"""A load is looked at again after this part of the time in which nothing was seen of it."""
_READ_S: Final = 0.0015
"""Between two calls that let others read from this rank, where no thread of the transport's does that: emulated paths move
some megabytes at each, and connections take some calls to come about."""
_HURRIED_S: Final = 0.0003
"""Between two such calls while others wait for what this rank gathers for them, or have just fetched it."""
_LENT_S: Final = 0.005
"""Between two looks at loads that the engine's own thread looks after."""
_AT_LEAST: Final = 400e9
"""Bytes a second."""
_TOGETHER: Final = 2 << 30
"""Bytes of loads that are copied together where no step waits for all of them: a millisecond or two on a device."""
_SETTLING_S: Final = 0.00005
"""Between two looks at loads that a step waits for."""
_LOOK_S: Final = 0.00002
"""Rest for every load that is looked at, which takes a third of it or less: however many there are, the engine has most of the
interpreter."""
_IDLE_S: Final = 0.05
"""Between two looks at nothing: for consumers that connect before anything is prefilled for them, who can wait."""


class Ferry:
    """`rank` is this rank's ordinal. `fill` begins to zero destination runs of this rank's regions, and returns what says
    whether that is done, or None if it is already; it is only called where there is something to fill.

    A load from a producer whose connection broke waits until nothing of that connection is under way, `patience_s` at most.
    `tended` is a transport that lets others read from this rank only while it is called, and `hurried` says when they wait for
    that: what they ask this rank to gather is begun, and seen to be complete, on this thread, in its calls of the transport.
    `entering` is called on the ferry's thread before anything else. If the thread ends by itself, all loads fail with the
    reason: the transport is closed first, and nothing lands after that.
    """

    def __init__(
        self,
        transport: Transport,
        words: Words,
        rank: int,
        fill: Callable[[Fills], Filled | None],
        patience_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        tended: bool = True,
        hurried: Callable[[], bool] = bool,
        entering: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._words, self._rank = transport, words, rank
        self._clock, self._tended, self._hurried, self._entering = clock, tended, hurried, entering
        self._commands: deque[Meeting | Load | PeerKey] = deque()
        self._passage = Passage(transport, words, rank, fill, patience_s, clock)
        self._links = self._passage.links
        self._heard_at = -math.inf
        self._unsettled = self._closed = False
        self._stumbled = self._ended = ""
        self._wake = Bell()
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-ferry", daemon=True)
        words.watch(self._wake.set)

    def start(self) -> None:
        self._thread.start()

    def meet(self, meeting: Meeting) -> None:
        self._hand_in(meeting)

    def load(self, *loads: Load, meetings: Sequence[Meeting] = ()) -> None:
        """Producers are met first, but for those of which nothing is loaded in this step: what is would wait for that."""
        if self._ended:
            self._passage.outcomes.extend(Outcome(load.request, self._ended) for load in loads)
            return
        hurried = [load for load in loads if load.in_step]
        near = {load.peer for load in hurried}
        self._unsettled = self._unsettled or bool(hurried)
        for meeting in (it for it in meetings if it.peer in near):
            self.meet(meeting)
        if hurried:
            self._load_in_step(hurried)
        for meeting in (it for it in meetings if it.peer not in near):
            self.meet(meeting)
        for load in self._begun([load for load in loads if not load.in_step]):
            self._hand_in(load)

    @property
    def meets(self) -> bool:
        """Whether a producer is being met, or about to be: whoever wants the ferry's turn would wait for that."""
        return any(isinstance(command, Meeting) for command in tuple(self._commands))

    def _load_in_step(self, loads: Sequence[Load]) -> None:
        """What is not begun here and now fails: the step does not wait for a connection, nor for a read that may never end."""
        with self._turn:
            self._take_in({load.peer for load in loads})
            self._passage.depart_together([crossing for load in loads if (crossing := self._passage.embark(load)) is not None])

    def pace(self, key: PeerKey) -> float | None:
        """Seconds a token at a pace that any device's memory has, of a producer that any thread may read from."""
        peer = self._links.mapped(key)
        return None if peer is None else sum(cost.bytes_per_token for cost in costs(peer.binder.plan)) / _AT_LEAST

    def linger(self, limit_s: float) -> None:
        """Wait until the loads that were begun on the engine's own thread are over, and no longer than this."""
        deadline = self._clock() + limit_s
        while self._lent_move_on() and self._clock() < deadline:
            time.sleep(_SETTLING_S)

    def settle(self, requests: Collection[str], limit_s: float) -> None:
        """Wait until the loads of these requests, which were made in a step, are over. Raises SessionError if they are not in
        such a time: whatever copies them is stuck. Time in which the ferry's thread has the turn does not count."""
        left_s = limit_s
        while True:
            with self._turn:
                since = self._clock()
                waited_for = [crossing for crossing in self._passage.under_way if crossing.load.request in requests]
                self._passage.check_together(waited_for)
                for crossing in waited_for:
                    self._passage.move_on(crossing)
            if not waited_for:
                self._unsettled = False
                return
            if left_s < 0:
                said = ", ".join(plain(crossing.load.request) for crossing in waited_for[:3])
                raise SessionError(f"copies of {said} have not ended in {limit_s:g} s, and a step waits for them")
            time.sleep(_SETTLING_S)
            left_s -= self._clock() - since

    def _begun(self, loads: Sequence[Load]) -> Sequence[Load]:
        """Those that could not begin here and now, as loads out of mapped memory do; none does before anything that was handed
        in earlier."""
        if not loads or self._commands or not self._turn.acquire(blocking=False):
            return loads
        try:
            left = [load for load in loads if self._links.mapped(load.peer) is None]
            ready = (self._passage.embark(load) for load in loads if self._links.mapped(load.peer) is not None)
            crossings = [crossing for crossing in ready if crossing is not None]
            for several in _convoys(crossings):
                self._passage.depart_together(several)
            for crossing in crossings:
                self._call_for_help(crossing)
            return left
        finally:
            self._turn.release()

    def _call_for_help(self, crossing: Crossing) -> None:
        """What went wrong is for the ferry's thread to clear up."""
        if crossing.error:
            self._wake.set()

    def forget(self, peer: PeerKey) -> None:
        """Let go of a producer from which nothing more is to be loaded, unless it is met again."""
        self._hand_in(peer)

    def _hand_in(self, command: Meeting | Load | PeerKey) -> None:
        if self._ended and not isinstance(command, Load):
            return
        self._commands.append(command)
        self._wake.set()

    def outcomes(self) -> list[Outcome]:
        self._lent_move_on()
        if self._ended:
            self._fail_all()
        out = []
        while self._passage.outcomes:
            out.append(self._passage.outcomes.popleft())
        return out

    def _lent_move_on(self) -> bool:
        """Whether there are loads that the engine's own thread looks after, which it has just done."""
        if not self._passage.under_way or not self._turn.acquire(blocking=False):
            return False
        try:
            before = len(self._passage.under_way)
            lent = [crossing for crossing in self._passage.under_way if is_lent(crossing)]
            self._passage.check_together(lent)
            for crossing in lent:
                self._passage.move_on(crossing)
                self._call_for_help(crossing)
            return before - len(self._passage.under_way) < len(lent)
        finally:
            self._turn.release()

    def close(self, limit_s: float = 10.0) -> None:
        """End the thread and the transport; loads under way are never reported. A thread that is held up in the transport keeps
        it: both end with the process."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.error(
                "rank %d: the transport has not returned in %g s; it is left to the process's end", self._rank, limit_s
            )
            return
        if not self._closed:
            self._transport.close()

    def _run(self) -> None:
        try:
            self._enter()
            self._carry_on()
        except BaseException as error:
            said = plain(f"the load thread of rank {self._rank} has ended ({type(error).__name__}: {error})")
            self._ended = f"{said}: nothing is loaded any more; restart the engine"
            with suppress(BaseException):
                logger.exception("%s", self._ended)
            with suppress(BaseException):
                self._fail_all()

    def _enter(self) -> None:
        try:
            self._entering()
        except KVFerryError as error:
            logger.error("rank %d: the ferry's thread was not prepared; it goes on: %s", self._rank, error)
        except Exception:
            logger.exception("rank %d: the ferry's thread was not prepared; it goes on", self._rank)

    def _fail_all(self) -> None:
        """Once the thread has ended, which the engine's then stands in for: loads fail as soon as nothing can land in their
        blocks."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._closed = True
                self._close_transport()
            for crossing in tuple(self._passage.under_way):
                crossing.error = crossing.error or self._ended
                self._passage.move_on(crossing)
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, Load):
                    self._passage.outcomes.append(Outcome(command.request, self._ended))
        finally:
            self._turn.release()

    def _close_transport(self) -> None:
        try:
            self._transport.close()
        except Exception:
            logger.exception("rank %d: the transport cannot be closed; loads wait until nothing can land", self._rank)

    def _carry_on(self) -> None:
        while not self._stop.is_set():
            pause = _LONGEST_S
            try:
                self.step()
                pause = self._pause()
            except Exception as error:
                if str(error) != self._stumbled:
                    logger.exception("the ferry stumbled; it goes on")
                self._stumbled = str(error)
            self._wake.wait(pause)

    def _pause(self) -> float:
        """How long nothing needs to be done, unless something is handed in."""
        rest, crossings = self._listening, self._passage.under_way
        others = self._links.warming or self._passage.spent
        if crossings and not others and all(map(is_lent, crossings)):
            return min(rest, _LENT_S)
        if crossings or others:
            rest = min(rest, _LONGEST_S, max(_BUSY_S, (self._clock() - self._passage.moved_at) / _PATIENCE))
        return max(rest, min(_LONGEST_S, _LOOK_S * len(crossings)))

    @property
    def _listening(self) -> float:
        """How long others who read from this rank, or connect to it, may go without a call."""
        if self._hurried():
            return _HURRIED_S
        return _READ_S if self._tended and self._words.alive else _IDLE_S

    def step(self) -> None:
        """Take in what was handed in, and move every load on; also what a producer needs to be read from."""
        with self._turn:
            self._take_in(() if self._unsettled else None)
            self._passage.move_all_on()
            self._links.look_after(self._passage.under_way)
            if self._passage.spent:
                self._passage.sweep()
            now = self._clock()
            if now - self._heard_at >= self._listening / 2:
                self._heard_at = now
                self._transport.notifications()

    def _take_in(self, met: Collection[PeerKey] | None = None) -> None:
        """What was handed in, up to a producer that is not among those to be `met`, if these are given: to connect to one and
        to make ready what it is read by takes long."""
        if self._commands:
            self._passage.moved_at = self._clock()
        while self._commands:
            command = self._commands[0]
            if isinstance(command, Meeting) and met is not None and command.peer not in met:
                return
            try:
                self._carry_out(command)
            except Exception:
                logger.exception("the ferry could not do what it was told; it goes on")
            self._commands.popleft()

    def _carry_out(self, command: Meeting | Load | PeerKey) -> None:
        if isinstance(command, Load):
            self._passage.embark(command)
        elif isinstance(command, Meeting):
            self._links.know(command, self._passage.under_way)
        else:
            self._passage.forget(command)


def _convoys(crossings: Sequence[Crossing]) -> list[list[Crossing]]:
    """In turn, as many together as are copied in a moment: a short load does not wait for long ones."""
    out: list[list[Crossing]] = []
    size = _TOGETHER
    for crossing in crossings:
        if size + crossing.loading.bytes > _TOGETHER:
            out.append([])
            size = 0
        out[-1].append(crossing)
        size += crossing.loading.bytes
    return out
