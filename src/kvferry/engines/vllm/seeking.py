"""References of prompts that came with another prompt's: the producer that gave that one is asked, beside the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from kvferry.errors import KVFerryError, SessionError
from kvferry.session import Courier, Reference, Seek, key_of, seek
from kvferry.session.key import Key

logger = logging.getLogger("kvferry.vllm")

SEEKERS: Final = 4


class Seeking:
    """`patience_s`: how long a producer may take to answer; `closing` ends whatever waits for one."""

    def __init__(self, key: Key | None, patience_s: float, closing: threading.Event) -> None:
        self._key, self._patience_s, self._closing = key, patience_s, closing
        self._seekers = ThreadPoolExecutor(SEEKERS, "kvferry-seeking")

    def begin(self, sibling: Reference, digests: Sequence[str]) -> Future[Reference | None]:
        return self._seekers.submit(self._seek, sibling, digests)

    def _seek(self, sibling: Reference, digests: Sequence[str]) -> Reference | None:
        """What is found must be where the sibling is, and not be it: then the sibling was changed on its way."""
        try:
            for wanted in digests:
                message = Seek(sibling.incarnation, sibling.lease, wanted)
                found = seek(sibling.address, message, self._key, self._patience_s, self._closing)
                if found is not None and key_of(found) == key_of(sibling) and found.lease != sibling.lease:
                    return found
        except KVFerryError:
            raise
        except Exception as error:
            logger.exception("%s cannot be asked for a prompt", key_of(sibling))
            raise SessionError(f"{type(error).__name__}: {error}") from None
        return None

    def close(self) -> None:
        self._seekers.shutdown(wait=True, cancel_futures=True)


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
