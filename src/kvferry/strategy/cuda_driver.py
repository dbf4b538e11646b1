"""The few calls of CUDA's driver that a mover needs, and kernels that the driver is handed without Triton's launcher.

Triton's way to a kernel that it has made takes as long as thousands of runs do: it looks at every argument anew, and lets go of
Python's lock. The driver launches the same kernel in microseconds, where it is known to take the arguments that are meant.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvferry.errors import TransportError

HANDLE: Final = 64

_LAZY_PEER_ACCESS: Final = 1
_NOT_READY: Final = 600
_DEVICE_POINTER: Final = 3
_OF_THIS_THREAD: Final = 1
_WARP: Final = 32
_ARGUMENTS: Final = 8
_NOTHING: Final = (0,) * _ARGUMENTS
_UNUSUAL: Final = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
"""What a kernel may want of whoever launches it, besides its arguments."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE),)


_AT: Final = ctypes.c_void_p
_CALLS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cuGetErrorString": (ctypes.c_int, _AT),
    "cuCtxGetCurrent": (_AT,),
    "cuCtxSetCurrent": (_AT,),
    "cuDevicePrimaryCtxRetain": (_AT, ctypes.c_int),
    "cuThreadExchangeStreamCaptureMode": (_AT,),
    "cuMemGetAddressRange_v2": (_AT, _AT, ctypes.c_uint64),
    "cuPointerGetAttribute": (_AT, ctypes.c_int, ctypes.c_uint64),
    "cuIpcGetMemHandle": (_AT, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (_AT, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
    "cuEventCreate": (_AT, ctypes.c_uint),
    "cuEventRecord": (_AT, _AT),
    "cuEventQuery": (_AT,),
    "cuStreamWaitEvent": (_AT, _AT, ctypes.c_uint),
    "cuEventElapsedTime": (_AT, _AT, _AT),
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, _AT, ctypes.c_size_t, _AT),
    "cuLaunchKernel": (_AT, *(ctypes.c_uint,) * 7, _AT, _AT, _AT),
}
_PARAMETER: Final = "cuFuncGetParamInfo"
"""Not in drivers of before 2024."""


@dataclass(frozen=True)
class Launchable:
    """A kernel that is on the device: its handle, threads of a program, and their shared memory; `made` keeps it there."""

    made: Any
    function: int
    threads: int
    shared: int


class Arguments:
    """What a launch is called with: numbers in eight bytes each, of which a kernel reads the lower ones that it takes. When a
    launch returns, the driver has copied them."""

    def __init__(self) -> None:
        self._numbers = (ctypes.c_uint64 * _ARGUMENTS)()
        first = ctypes.addressof(self._numbers)
        self._places = (_AT * _ARGUMENTS)(*(first + 8 * i for i in range(_ARGUMENTS)))
        self.address = ctypes.addressof(self._places)

    def hold(self, *numbers: int) -> None:
        self._numbers[:] = [*numbers, *_NOTHING[len(numbers) :]]


class Driver:
    """Short calls keep Python's lock: a thread that lets go of it waits for the engine's to have it back. Mapping memory is not
    short."""

    def __init__(self) -> None:
        try:
            quick, slow = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(f"CUDA's driver is not here: {error}") from error
        self._calls = {name: getattr(slow if "Ipc" in name else quick, name) for name in _CALLS}
        for name, kinds in _CALLS.items():
            self._calls[name].argtypes = kinds
        self._parameter = getattr(quick, _PARAMETER, None)

    def call(self, name: str, *arguments: Any, fine: int = 0) -> bool:
        """Whether it went well; False for the one other status that is `fine`."""
        status = self._calls[name](*arguments)
        if status and status != fine:
            text = ctypes.c_char_p()
            self._calls["cuGetErrorString"](status, ctypes.byref(text))
            raise TransportError(f"{name}: {(text.value or b'').decode(errors='replace') or status}")
        return not status

    def enter(self, device: int) -> None:
        """Give the calling thread the device's context, which torch makes lazily and the driver's own calls need."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.call("cuCtxSetCurrent", context)

    def stand_aside(self) -> None:
        """Graphs that other threads capture are none of the calling thread's business from here on. Else whatever it asks of a
        device spoils them, and fails."""
        mode = ctypes.c_int(_OF_THIS_THREAD)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def allocation(self, address: int) -> tuple[int, int]:
        """Where the allocation that holds an address begins, and its length."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def seen(self, address: int) -> int:
        """Page-locked memory, as the device addresses it."""
        found = ctypes.c_uint64()
        self.call("cuPointerGetAttribute", ctypes.byref(found), _DEVICE_POINTER, address)
        return found.value

    def handle(self, base: int) -> bytes:
        found = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(found), base)
        return ctypes.string_at(ctypes.byref(found), HANDLE)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", address)

    def event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 0)
        return int(event.value or 0)

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def follow(self, stream: int, event: int) -> None:
        """What is handed to the stream from here on waits for the event, as it was recorded last."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def passed(self, event: int) -> bool:
        return self.call("cuEventQuery", event, fine=_NOT_READY)

    def between(self, event: int, other: int) -> float:
        """Seconds from one event to another."""
        found = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(found), event, other)
        return found.value / 1000

    def upload(self, device: int, host: int, length: int, stream: int) -> None:
        self.call("cuMemcpyHtoDAsync_v2", device, host, length, stream)

    def launchable(self, made: Any, sizes: Sequence[int]) -> Launchable | None:
        """A kernel that Triton has made and launched, if its arguments have these sizes and whatever comes behind them is room
        that it wants none of; None for one of which that is not known, which Triton launches."""
        function, known = getattr(made, "function", None), getattr(made, "metadata", None)
        warps, shared = getattr(known, "num_warps", None), getattr(known, "shared", None)
        if not isinstance(function, int) or not isinstance(warps, int) or not isinstance(shared, int):
            return None
        if getattr(known, "num_ctas", 1) != 1 or any(getattr(known, name, None) for name in _UNUSUAL):
            return None
        found = self._sizes(function)
        behind = found[len(sizes) :]
        if found[: len(sizes)] != tuple(sizes) or len(found) > _ARGUMENTS or any(size != 8 for size in behind):
            return None
        return Launchable(made, function, warps * _WARP, shared)

    def _sizes(self, function: int) -> tuple[int, ...]:
        """Bytes of each argument of a kernel, and one too many where there are more than can be given; none if unknown."""
        if self._parameter is None:
            return ()
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for index in range(_ARGUMENTS + 1):
            place = ctypes.c_void_p(function), ctypes.c_size_t(index)
            if self._parameter(*place, ctypes.byref(offset), ctypes.byref(size)):
                break
            found.append(size.value)
        return tuple(found)

    def launch(self, one: Launchable, programs: int, stream: int, given: Arguments) -> None:
        shape = programs, 1, 1, one.threads, 1, 1
        self.call("cuLaunchKernel", one.function, *shape, one.shared, stream, given.address, None)
