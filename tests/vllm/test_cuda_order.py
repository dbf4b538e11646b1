"""In which order a device is handed what a copy needs, by a made-up driver: nothing of it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.strategy.cuda import _LEAST, CudaMover, _Slot
from kvferry.strategy.cuda_driver import Arguments, Launchable
from kvferry.strategy.moves import COLUMNS, FIELDS, ROWS, Bound, Form, Launch

pytestmark = pytest.mark.vllm

COPIES, UPLOADS = 11, 22
THERE, BEGAN, ENDED = 1, 2, 3
FORM = Form(16, COLUMNS[0], ROWS[COLUMNS[0]])


class Driver:
    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.called.append((name, *given))


def mover(driver: Driver) -> CudaMover:
    made = object.__new__(CudaMover)
    made._driver, made._index, made._programs, made._share = driver, 0, 4, 4
    made._handle, made._uploading = COPIES, UPLOADS
    made._none = np.zeros(4, np.int64).data
    host, counts = np.zeros(_LEAST, np.int64), np.ones(4, np.int64)
    made._free = {_LEAST: [_Slot(host.data, 100, None, 200, None, counts, 300, THERE, BEGAN, ENDED, Arguments())]}
    made._ready = {FORM: Launchable(None, 7, 512, 0)}
    made._zeroing = Launchable(None, 8, 512, 0)
    return made


def order(driver: Driver) -> list[tuple[str, int, int]]:
    """Which call, of which event, on which stream."""
    found = {
        "upload": lambda call: (call[0], 0, call[4]),
        "record": lambda call: call,
        "follow": lambda call: (call[0], call[2], call[1]),
        "launch": lambda call: (call[0], 0, call[3]),
    }
    return [found[call[0]](call) for call in driver.called if call[0] in found]


def test_between_copies_no_kernel_waits_for_an_upload_that_waits_for_a_kernel() -> None:
    class Pieces:
        def data_ptr(self) -> int:
            return 400

    driver = Driver()
    table = np.arange(FIELDS + 4, dtype=np.int64)
    mover(driver).start(Pieces(), Bound(table, (Launch(FORM, 0, 1),), 64, 1))
    assert order(driver) == [
        ("upload", 0, UPLOADS),
        ("record", THERE, UPLOADS),
        ("follow", THERE, COPIES),
        ("record", BEGAN, COPIES),
        ("launch", 0, COPIES),
        ("record", ENDED, COPIES),
    ]


def test_fills_have_their_table_before_they_are_launched() -> None:
    driver = Driver()
    mover(driver).zero(np.array([[4096, 8], [8192, 8]], np.int64))
    assert [call for call, _, _ in order(driver)] == ["upload", "record", "follow", "record", "launch", "record"]
