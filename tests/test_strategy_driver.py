"""Which kernels CUDA's driver is handed without Triton's launcher, and what it is called with then; by a made-up driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import TransportError
from kvferry.strategy import cuda_driver
from kvferry.strategy.cuda_driver import Arguments, Driver, Launchable

SIZES = (8, 8, 4, 4, 8)
ROOM = (8, 8)
FUNCTION = 0x7F00_0000_1230


class Call:
    """One of a library's functions, as ctypes has them: a thing to be called, which is told its arguments' types."""

    argtypes: Any = None

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __call__(self, *arguments: Any) -> int:
        return int(self._answer(*arguments))


class Library:
    """Calls end well and do nothing, but for those that are told otherwise."""

    def __init__(self, sizes: Sequence[int] | None) -> None:
        self.sizes = sizes
        self.launched: list[tuple[Any, ...]] = []
        self.status = 0
        self.modes = [0]

    def __getattr__(self, name: str) -> Call:
        if name == "cuFuncGetParamInfo" and self.sizes is None:
            raise AttributeError(name)
        answers = {
            "cuFuncGetParamInfo": self._parameter,
            "cuLaunchKernel": self._launch,
            "cuGetErrorString": self._words,
            "cuThreadExchangeStreamCaptureMode": self._exchange,
        }
        found = Call(answers.get(name, lambda *_: 0))
        setattr(self, name, found)
        return found

    def _parameter(self, function: Any, index: Any, _offset: Any, size: Any) -> int:
        assert function.value == FUNCTION
        assert self.sizes is not None
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def _launch(self, *arguments: Any) -> int:
        *shape, places, extra = arguments
        assert extra is None
        given = [ctypes.c_uint64.from_address(place).value for place in (ctypes.c_void_p * 8).from_address(places)]
        self.launched.append((*shape, given))
        return self.status

    def _exchange(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        mode._obj.value = self.modes[-2]
        return self.status

    @staticmethod
    def _words(_status: int, text: Any) -> int:
        text._obj.value = b"out of all things"
        return 0


def driver_of(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int] | None) -> tuple[Driver, Library]:
    library = Library(sizes)
    loaded = lambda _name: library  # noqa: E731
    monkeypatch.setattr(cuda_driver.ctypes, "PyDLL", loaded)
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", loaded)
    return Driver(), library


def made(**differing: Any) -> SimpleNamespace:
    """A kernel as Triton keeps it."""
    usual = {"num_warps": 16, "num_ctas": 1, "shared": 128, "launch_pdl": False, "launch_cooperative_grid": False}
    scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(function=FUNCTION, metadata=SimpleNamespace(**{**usual, **scratch, **differing}))


@pytest.mark.parametrize("behind", [(), (8,), ROOM, (8, 8, 8)])
def test_a_kernel_with_the_arguments_that_are_meant_is_handed_over(monkeypatch: pytest.MonkeyPatch, behind: Any) -> None:
    driver, _ = driver_of(monkeypatch, (*SIZES, *behind))
    kernel = made()
    assert driver.launchable(kernel, SIZES) == Launchable(kernel, FUNCTION, 512, 128)


@pytest.mark.parametrize(
    "sizes",
    [None, (), SIZES[:-1], (8, 8, 8, 4, 8, *ROOM), (8, 4, 4, 8, *ROOM), (*SIZES, 8, 4), (*SIZES, 8, 8, 8, 8)],
    ids=["unknown", "none", "too few", "a wider one", "one less", "a number behind", "more than there is room for"],
)
def test_a_kernel_with_other_arguments_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, sizes: Any) -> None:
    driver, _ = driver_of(monkeypatch, sizes)
    assert driver.launchable(made(), SIZES) is None


@pytest.mark.parametrize(
    "differing",
    [
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
        {"num_warps": None},
        {"shared": None},
    ],
    ids=lambda differing: next(iter(differing)),
)
def test_a_kernel_that_wants_more_than_arguments_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, differing: Any) -> None:
    driver, _ = driver_of(monkeypatch, (*SIZES, *ROOM))
    assert driver.launchable(made(**differing), SIZES) is None


@pytest.mark.parametrize("other", [None, SimpleNamespace(), SimpleNamespace(function=None, metadata=made().metadata)])
def test_what_is_no_compiled_kernel_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    driver, _ = driver_of(monkeypatch, (*SIZES, *ROOM))
    assert driver.launchable(other, SIZES) is None


def test_a_launch_finds_its_numbers_in_order_and_nothing_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = driver_of(monkeypatch, (*SIZES, *ROOM))
    one, given = driver.launchable(made(), SIZES), Arguments()
    assert one is not None
    given.hold(1 << 63, 7 << 40, 5, 3, 9 << 40)
    driver.launch(one, 128, 77, given)
    given.hold(11, 2)
    driver.launch(one, 4, 77, given)
    assert library.launched == [
        (FUNCTION, 128, 1, 1, 512, 1, 1, 128, 77, [1 << 63, 7 << 40, 5, 3, 9 << 40, 0, 0, 0]),
        (FUNCTION, 4, 1, 1, 512, 1, 1, 128, 77, [11, 2, 0, 0, 0, 0, 0, 0]),
    ]


def test_a_launch_that_fails_says_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = driver_of(monkeypatch, (*SIZES, *ROOM))
    library.status = 701
    with pytest.raises(TransportError, match="cuLaunchKernel: out of all things"):
        driver.launch(Launchable(None, FUNCTION, 512, 0), 1, 77, Arguments())


def test_a_thread_that_stands_aside_is_bound_by_its_own_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, in place of CU_STREAM_CAPTURE_MODE_GLOBAL."""
    driver, library = driver_of(monkeypatch, SIZES)
    driver.stand_aside()
    assert library.modes == [0, 1]
    library.status = 1
    with pytest.raises(TransportError, match="cuThreadExchangeStreamCaptureMode: out of all things"):
        driver.stand_aside()
