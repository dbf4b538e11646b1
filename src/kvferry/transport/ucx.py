"""UCX under NIXL: the settings it needs, with reasons, and what it says about how it carries bytes.

UCX takes settings from the environment, when its library is loaded and when a backend is created. They are put there for
that moment only, from `NixlOptions`, and never over what the operator set.

How a path is found out: `UCX_PROTO_INFO` makes UCX write, for every kind of connection of every agent, which protocol each
operation got; it goes to a file of our own (`UCX_LOG_FILE`), which is unlinked as soon as UCX has opened it, and offered
again to the next backend where it has not. UCX chooses at the first read, so before it nothing is known. It names kinds of
connections, not peers: with several kinds to peers equally near, all of them are reported, and agents of one process whose
names agree in the first 31 characters share their report. Nothing is known where the operator sends UCX's log elsewhere, or
where something else in the process loaded the same UCX before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Final, TextIO

from kvferry.transport.contract import Path

logger = logging.getLogger("kvferry.transport")

WORKER_NAME: Final = 31


@dataclass(frozen=True)
class Setting:
    """One UCX setting, why it is made, and the file without which UCX does not know it and would complain."""

    name: str
    value: str
    reason: str
    needs: str = "/"


SETTINGS: Final = (
    Setting(
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY",
        "on",
        "without NVLink UCX leaves cuda_ipc out for reads and emulates them over TCP, some thousand times slower",
        needs="/dev/nvidiactl",
    ),
    Setting("UCX_PROTO_INFO", "y", "says which protocol really carries reads; see the module's docstring"),
)
_LOG_FILE: Final = "UCX_LOG_FILE"
_DESCRIPTORS: Final = "/proc/self/fd"

_RDMA: Final = re.compile(r"\b(rc|dc|ud|gga|ib|srd)(_\w+)?/")
_SHARED: Final = re.compile(r"\b(cma|xpmem|knem|sysv|posix|mm)/")
_TITLE: Final = re.compile(r"^(?P<worker>.*) (?P<near>self|intra-node|inter-node) cfg#\d+$")
_HEADS: Final = ["Range", "Description", "Config"]
_UNNAMED: Final = "ucp_context_"
_READ: Final = "remote memory read by ucp_get"


class Log:
    """UCX's log of this process: protocols by agent, and complaints passed on to `logging`."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="kvferry-ucx-")
        os.close(handle)
        self.file = File(name)
        self._stream: TextIO = self.file.open(encoding="utf-8", errors="replace")
        self._rest = ""
        self._title: re.Match[str] | None = None
        self._operation = ""
        self._way: list[str] = []
        self._reads: dict[tuple[str, str], dict[str, None]] = {}

    @property
    def opened(self) -> bool:
        """Whether UCX has it open; it does from when it is loaded."""
        mine = self._stream.fileno()
        others = (int(name) for name in os.listdir(_DESCRIPTORS) if int(name) != mine)
        return any(_same_file(other, mine) for other in others)

    def close(self) -> None:
        self._stream.close()
        self.file.unlink(missing_ok=True)

    def drain(self) -> str:
        """Take in what UCX wrote since, and return its last complaint. UCX buffers; only flushing C's streams brings all."""
        ctypes.CDLL(None).fflush(None)
        *lines, self._rest = (self._rest + self._stream.read()).split("\n")
        complaint = ""
        for line in lines:
            if "UCX  WARN" in line or "UCX  ERROR" in line:
                complaint = line.rpartition("UCX  ")[2].partition(" ")[2].strip()
                logger.warning("UCX: %s", complaint)
            body = line.partition("]   ")[2] or line
            if body.startswith("|"):
                self._row([cell.strip() for cell in body.strip("|").split("|")])
            elif self._way or not body.startswith("+"):
                self._close_table()
        return complaint

    def reads(self, agent: str, near: str) -> list[str]:
        """Ways in which the agent reads from peers that are `intra-node` or `inter-node`. NIXL gives UCX the agent's name from
        its release 1.5 on; with an earlier one these are the ways of all agents of this process."""
        self.drain()
        mine = self._reads.get((agent[:WORKER_NAME], near))
        if mine is not None:
            return list(mine)
        unnamed = (ways for (worker, at), ways in self._reads.items() if at == near and worker.startswith(_UNNAMED))
        return list(dict.fromkeys(way for ways in unnamed for way in ways))

    def _row(self, cells: list[str]) -> None:
        """A title and an operation, in one row or in two, head a table; its last row is that of large reads."""
        title = _TITLE.match(cells[0])
        if title is not None:
            self._close_table()
            self._title, self._operation = title, "".join(cells[1:])
        elif not self._operation:
            self._operation = cells[0]
        elif cells != _HEADS:
            self._way = cells

    def ways(self, agent: str, here: bool, used: bool) -> list[str]:
        """Ways in which the agent reads from a peer on this machine, or from one elsewhere. UCX counts a peer on this machine
        as inter-node if no shared memory leads to it, as over TCP between network namespaces; told once it was `used`."""
        found = self.reads(agent, "intra-node" if here else "inter-node")
        return found or (self.reads(agent, "inter-node") if here and used else [])

    def _close_table(self) -> None:
        title, operation, way = self._title, self._operation, self._way
        self._title, self._operation, self._way = None, "", []
        if title is None or title["near"] == "self" or not operation.startswith(_READ) or len(way) != 3:
            return
        _, description, config = way
        self._reads.setdefault((title["worker"], title["near"]), {})[f"{description}, {config}"] = None


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


_LOGS: list[Log] = []


def ucx_log() -> Log | None:
    """This process's log, if UCX writes one for us."""
    return _LOGS[0] if _LOGS else None


@contextmanager
def environment(extra: Mapping[str, str]) -> Iterator[None]:
    """The settings, for as long as a backend is being created; what the operator set stays and is reported."""
    wanted = {s.name: s.value for s in SETTINGS if File(s.needs).exists()} | dict(extra)
    if not _LOGS and _LOG_FILE not in os.environ and _LOG_FILE not in wanted:
        _LOGS.append(Log())
        wanted[_LOG_FILE] = str(_LOGS[0].file)
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    for name, value in kept.items():
        if value != wanted[name]:
            logger.info("%s=%s comes from the environment and stays; KVFerry would set %s", name, value, wanted[name])
    mine = {name: value for name, value in wanted.items() if name not in kept}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
        if _LOG_FILE in mine and _LOGS and not _LOGS[0].opened:
            _LOGS.pop().close()
        for log in _LOGS:
            log.file.unlink(missing_ok=True)


def classify(ways: list[str]) -> Path:
    """Ways to read, as UCX words them, as a path; the slowest decides."""
    if not ways:
        return Path("unknown")
    found = [_classify(way) for way in ways]
    name = " or ".join(dict.fromkeys(f"{path.name} ({way})" for path, way in zip(found, ways, strict=True)))
    slow = next((path for path in found if path.slow), found[0])
    return Path(name, slow.slow, slow.remedy)


def _classify(way: str) -> Path:
    if "software emulation" in way:
        return Path("emulation over TCP" if "tcp/" in way else "emulation", True, _EMULATED)
    if "cuda_ipc/" in way:
        return Path("CUDA IPC")
    if _RDMA.search(way):
        return Path("RDMA")
    if _SHARED.search(way):
        return Path("shared memory")
    if "tcp/" in way:
        return Path("TCP", True, _TCP)
    return Path(way)


_EMULATED: Final = (
    "UCX found no way to read this memory directly, so that the peer's CPU copies every byte, and only while it polls or has a "
    "progress thread: on one machine let processes read each other's memory (containers: share the PID namespace and add "
    "SYS_PTRACE; kernel.yama.ptrace_scope 0 or 1; no UCX_TLS without cma and cuda_ipc); between machines give both ends RDMA "
    "devices (and GPUDirect for device memory)"
)
_TCP: Final = "UCX found no RDMA device both ends can use: check ibv_devinfo, UCX_TLS and UCX_NET_DEVICES on both"
