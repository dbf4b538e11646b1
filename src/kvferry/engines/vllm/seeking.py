"""References of prompts that came with another prompt's: the producer that gave that one is asked, beside the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any, Final

from kvferry.errors import KVFerryError, SessionError
from kvferry.session import Courier, Reference, Seek, key_of, seek
from kvferry.session.key import Keys

logger = logging.getLogger("kvferry.vllm")

SEEKERS: Final = 4
FOR_NOBODY: Final = 64
"""References that may be sought at a time only to be given back: what is not ends with its lease."""
FOR_NOBODY_S: Final = 2.0
"""How long each may take: whoever is silent for longer is gone, and its blocks with it."""


class Seeking:
    """`patience_s`: how long a producer may take to answer; `closing` ends whatever waits for one."""

    def __init__(self, keys: Keys, patience_s: float, closing: threading.Event) -> None:
        self._keys, self._patience_s, self._closing = keys, patience_s, closing
        self._seekers = ThreadPoolExecutor(SEEKERS, "kvferry-seeking")
        self._cleaner = ThreadPoolExecutor(1, "kvferry-giving-back")
        self._for_nobody = BoundedSemaphore(FOR_NOBODY)

    def begin(self, sibling: Reference, digests: Callable[[], Sequence[str]]) -> Future[Reference | None]:
        return _submitted(self._seekers, self._seek, sibling, digests, self._patience_s)

    def begin_for_nobody(self, sibling: Reference, digests: Callable[[], Sequence[str]]) -> Future[Reference | None] | None:
        """Where it holds up nobody who waits; None where too much is sought so already."""
        if not self._for_nobody.acquire(blocking=False):
            return None
        found = _submitted(self._cleaner, self._seek, sibling, digests, min(FOR_NOBODY_S, self._patience_s))
        found.add_done_callback(lambda _: self._for_nobody.release())
        return found

    def _seek(self, sibling: Reference, digests: Callable[[], Sequence[str]], patience_s: float) -> Reference | None:
        """What is found must be where the sibling is, and not be it: then the sibling was changed on its way."""
        try:
            for wanted in digests():
                message = Seek(sibling.incarnation, sibling.lease, wanted)
                found = seek(sibling.address, message, self._keys, patience_s, self._closing)
                if found is not None and key_of(found) == key_of(sibling) and found.lease != sibling.lease:
                    return found
        except KVFerryError:
            raise
        except BaseException as error:
            logger.exception("%s cannot be asked for a prompt", key_of(sibling))
            raise SessionError(f"{type(error).__name__}: {error}") from None
        return None

    def close(self) -> None:
        for pool in (self._seekers, self._cleaner):
            pool.shutdown(wait=True, cancel_futures=True)


def _submitted(pool: ThreadPoolExecutor, seek: Callable[..., Reference | None], *given: Any) -> Future[Reference | None]:
    """Where no thread can be started, that is what came of it."""
    try:
        return pool.submit(seek, *given)
    except (RuntimeError, MemoryError) as error:
        failed: Future[Reference | None] = Future()
        failed.set_exception(SessionError(f"no thread can ask for it: {error}; does this process have too many threads?"))
        return failed


def give_back_when_found(sought: Future[Reference | None], identity: str, courier: Courier[Any]) -> None:
    """A reference that nobody waits for any more."""

    def over(ended: Future[Reference | None]) -> None:
        if ended.cancelled() or ended.exception() is not None:
            return
        found = ended.result()
        if found is not None:
            courier.hold(identity, found)
            courier.release(identity, found, "finished before it was loaded")

    sought.add_done_callback(over)
