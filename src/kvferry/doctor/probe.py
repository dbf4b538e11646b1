"""What must run in a process of its own, since UCX reads its settings once and a library may end who loads it.

    python -m kvferry.doctor.probe nixl|host|mapped|device '{"bytes": 33554432}'

writes one line of JSON.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from kvferry.check.pages import as_pages
from kvferry.doctor.child import child
from kvferry.doctor.machine import Answer
from kvferry.doctor.memory import Memory, allocate, pattern
from kvferry.errors import KVFerryError, TransportError
from kvferry.manifest.schema import Region
from kvferry.plan import Binder, Request, make_plans
from kvferry.strategy.shared import OpenedBytes, SharedBytes
from kvferry.transport import NixlTransport, State

PAGE: Final = 1 << 18
START_S: Final = 40.0
PATIENCE_S: Final = 30.0
TIMES: Final = 3
_UCP: Final = re.compile(r"(\S+libucp\S*\.so\S*)")


class Held(msgspec.Struct, frozen=True):
    """Memory of the other process: where it lies and how it is reached, or what went wrong."""

    address: int = 0
    metadata: bytes = b""
    name: str = ""
    nonce: bytes = b""
    error: str = ""


def nixl() -> dict[str, Any]:
    try:
        transport = NixlTransport("kvferry-doctor")
    except KVFerryError as error:
        return {"error": str(error), "plugins": _plugins()}
    out = {"plugins": _plugins(), "ucx": _ucx()}
    transport.close()
    return out


def _plugins() -> list[str]:
    from kvferry.transport.agent import library

    try:
        api = library().api
        agent = api.nixl_agent("kvferry-doctor", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        return sorted(agent.get_plugin_list())
    except (KVFerryError, RuntimeError, ValueError, OSError):
        return []


def _ucx() -> str:
    """The version of the UCX that this process has loaded."""
    found = _UCP.search(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return ""
    ask = ctypes.CDLL(found[1]).ucp_get_version_string
    ask.restype = ctypes.c_char_p
    return bytes(ask()).decode(errors="replace")


def moved(memory: str, size: int) -> Answer:
    """Pages that lie scattered in another process's memory, read over NIXL, compared and timed."""
    kind: Any = "vram" if memory == "device" else "dram"
    size = max(PAGE, size // PAGE * PAGE)
    with child("the other process", _hold, kind, size) as other:
        held = msgspec.msgpack.decode(other.receive(START_S), type=Held)
        if held.error:
            return Answer(error=held.error)
        mine = allocate(size, kind)
        mine.clear()
        transport = NixlTransport("kvferry-doctor-reader")
        try:
            return read_pages(transport, held.metadata, held.address, mine, size, kind)
        finally:
            transport.close()
            other.send(b"")


def read_pages(transport: NixlTransport, metadata: bytes, address: int, mine: Memory, size: int, kind: Any) -> Answer:
    """Every page by itself, in no order, so that neighbours are not merged into one long read."""
    blocks = size // PAGE
    planes = [(0, 0, PAGE)]
    there = as_pages("there", [Region("there", size, address, kind)], planes, blocks)
    here = as_pages("here", [Region("here", size, mine.storage.address, kind)], planes, blocks)
    (plan,) = make_plans([here], [there])
    transport.register([mine.storage])
    peer = transport.connect(metadata)
    prepared, binder = transport.prepare(plan, 0, peer), Binder(plan)
    order = np.random.default_rng(1).permutation(blocks).tolist()
    best = float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        reads = [transport.read(prepared, binder.tiles(Request(1, {0: block}, {0: block}))) for block in order]
        _finish(transport, reads)
        best = min(best, time.perf_counter() - began)
    right = bool(np.array_equal(mine.read(), pattern(0, size)))
    path = transport.path(peer)
    return Answer(path.name, size, best, right, path.slow, path.remedy)


def _finish(transport: NixlTransport, reads: list[Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(transport.poll(read) is State.RUNNING for read in reads):
        if time.monotonic() > deadline:
            raise TransportError(f"the pages did not arrive within {PATIENCE_S:g} s")
    for read in reads:
        if read.error:
            raise TransportError(read.error)
        transport.release(read)


def _hold(parent: Connection, kind: Any, size: int) -> None:
    try:
        memory = allocate(size, kind)
        memory.write(pattern(0, size))
        transport = NixlTransport("kvferry-doctor-holder")
        transport.register([memory.storage])
    except KVFerryError as error:
        parent.send_bytes(msgspec.msgpack.encode(Held(error=str(error))))
        return
    parent.send_bytes(msgspec.msgpack.encode(Held(memory.storage.address, transport.metadata())))
    try:
        while not parent.poll(0.0005):
            transport.notifications()
    except (EOFError, ConnectionResetError):
        return
    transport.close()


def mapped(size: int) -> Answer:
    """Another process's memory in /dev/shm, mapped here and copied."""
    with child("the other process", _share, size) as other:
        held = msgspec.msgpack.decode(other.receive(START_S), type=Held)
        if held.error:
            return Answer(error=held.error)
        opened = OpenedBytes(held.name, held.nonce, size)
        there, here = opened.view(), np.zeros(size, np.uint8)
        best = _best(partial(np.copyto, here, there))
        right = bool(np.array_equal(here, pattern(0, size)))
        del there
        opened.close()
        other.send(b"")
    return Answer("mapped memory", size, best, right)


def _best(action: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best


def _share(parent: Connection, size: int) -> None:
    try:
        shared = SharedBytes(size)
    except TransportError as error:
        parent.send_bytes(msgspec.msgpack.encode(Held(error=str(error))))
        return
    shared.bytes[:] = pattern(0, size)
    parent.send_bytes(msgspec.msgpack.encode(Held(shared.address, name=shared.name, nonce=shared.nonce)))
    try:
        parent.poll(PATIENCE_S)
    finally:
        shared.close()


def main(kind: str, words: str) -> None:
    asked = msgspec.json.decode(words)
    size = int(asked.get("bytes", 1 << 25))
    answer: Any
    try:
        if kind == "nixl":
            answer = nixl()
        elif kind == "mapped":
            answer = mapped(size)
        else:
            answer = moved(kind, size)
    except KVFerryError as error:
        answer = Answer(error=str(error))
    sys.stdout.write("\n" + msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
