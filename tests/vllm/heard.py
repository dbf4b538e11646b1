"""What KVFerry's adapter writes to its log; the connector puts our logger below vLLM's, which passes nothing on in tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    @property
    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno == logging.WARNING]


@contextmanager
def hearing() -> Iterator[Heard]:
    logger, heard = logging.getLogger("kvferry.vllm"), Heard()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    try:
        yield heard
    finally:
        logger.removeHandler(heard)
        logger.setLevel(before)
