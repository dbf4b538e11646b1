"""The contract on plain memory, for tests and simulation: transports of one process meet in a `Harbour`, faults are scripted.

Nothing happens on its own: bytes land inside `poll` and `release`, and time is the clock that is passed in.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan import Plan, Tiles
from kvferry.plan.rows import PreparedRows, Rows
from kvferry.strided import Ints, merge
from kvferry.transport.addresses import Placed, place
from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry
from kvferry.transport.faults import Corrupt, Delay, Drop, Duplicate, Fault, LateLanding, PeerDeath, Reorder
from kvferry.transport.metadata import Metadata, StorageEntry, decode_metadata, encode_metadata, this_host
from kvferry.transport.order import ascending

CARRIER: Final = "in-process"

F = TypeVar("F", bound=Fault)


class Harbour:
    """Where in-process transports find each other, and where a peer can be stopped or killed."""

    def __init__(self) -> None:
        self._ends: dict[str, InProcessTransport] = {}
        self._stopped: set[str] = set()
        self._numbers = count()

    def join(self, name: str, end: InProcessTransport) -> str:
        unique = f"{name}#{next(self._numbers)}"
        self._ends[unique] = end
        return unique

    def find(self, name: str) -> InProcessTransport | None:
        return self._ends.get(name)

    def stopped(self, name: str) -> bool:
        return name in self._stopped

    def stop(self, name: str) -> None:
        """From now on nothing comes from the peer; what is under way may land when it resumes."""
        self._stopped.add(name)

    def resume(self, name: str) -> None:
        self._stopped.discard(name)

    def kill(self, name: str) -> None:
        """The peer is gone: nothing of its memory can be read any more."""
        self._ends.pop(name, None)
        self._stopped.discard(name)


@dataclass(frozen=True, eq=False)
class InProcessPrepared:
    """A plan's edges from one source, rows of both sides with their addresses."""

    peer: str
    indices: PreparedRows
    src: Placed
    dst: Placed
    anywhere: bool = False

    @property
    def rows(self) -> int:
        return len(self.indices.src) + len(self.indices.dst)

    def runs(self, tiles: Mapping[tuple[int, int], Tiles]) -> tuple[Ints, Ints, Ints]:
        """Source address, destination address and length of every run, neighbours merged."""
        src, dst = self.indices.indices(ascending(tiles))
        there, length = _elements(self.indices.src, self.src, src)
        here, _ = _elements(self.indices.dst, self.dst, dst)
        there, here, length = merge(there, here, length)
        return there, here, length


@dataclass(eq=False)
class InProcessRead:
    """A read: the runs, how many have landed, and the faults that it meets."""

    prepared: InProcessPrepared
    notification: bytes
    runs: tuple[Ints, Ints, Ints]
    faults: tuple[Fault, ...]
    started_at: float
    state: State = State.RUNNING
    error: str = ""
    landed: int = 0
    polls: int = 0
    releases: int = 0
    ended_at: float = 0.0
    safe: bool = False
    echoes: bool = False

    @property
    def peer(self) -> str:
        return self.prepared.peer

    @property
    def total(self) -> int:
        return len(self.runs[2])

    def fault(self, kind: type[F]) -> F | None:
        return next((f for f in self.faults if isinstance(f, kind)), None)

    def drops(self, of: str) -> bool:
        return any(isinstance(f, Drop) and f.of == of for f in self.faults)

    def doubles(self, of: str) -> bool:
        return any(isinstance(f, Duplicate) and f.of == of for f in self.faults)


class InProcessTransport:
    """One rank's end of a wire inside one process; `faults` are those of its first, second, ... read by number."""

    def __init__(
        self,
        name: str,
        harbour: Harbour,
        faults: Mapping[int, Sequence[Fault]] | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = harbour.join(name, self)
        self._harbour = harbour
        self._faults = {number: tuple(script) for number, script in (faults or {}).items()}
        self._timeout_s = timeout_s
        self._clock = clock
        self._storages: list[Storage] = []
        self._peers: dict[str, Metadata] = {}
        self._prepared: list[InProcessPrepared] = []
        self._reads: dict[InProcessRead, None] = {}
        self._started = 0
        self._inbox: list[tuple[str, bytes]] = []

    def script(self, faults: Mapping[int, Sequence[Fault]]) -> None:
        """Faults of the first, second, ... read from now on, instead of those that were scripted before."""
        self._faults = {self._started + number: tuple(script) for number, script in faults.items()}

    def register(self, storages: Sequence[Storage]) -> None:
        for storage in storages:
            if storage.memory != "dram":
                raise TransportError(f"{self.name}: memory of this process is dram, not {storage.memory}; use NIXL")
            self._storages.append(storage)

    def metadata(self) -> bytes:
        storages = tuple(StorageEntry(s.address, s.length, s.memory, s.device) for s in self._storages)
        return encode_metadata(Metadata(CARRIER, self.name, this_host(), storages, b""))

    def connect(self, metadata: bytes) -> str:
        found = decode_metadata(metadata, CARRIER)
        if self._harbour.find(found.name) is None:
            raise TransportError(f"peer {found.name} is not in this harbour: it was closed, or it died; fetch new metadata")
        known = self._peers.setdefault(found.name, found)
        if known.digest != found.digest:
            raise TransportError(
                f"peer {found.name} is connected with other metadata; forget it and release its reads, then connect again"
            )
        return found.name

    def _peer(self, name: str) -> Metadata:
        if name not in self._peers:
            raise TransportError(f"peer {name} is not connected; connect with its metadata first")
        return self._peers[name]

    def prepare(self, plan: Plan, source: int, peer: str) -> InProcessPrepared:
        theirs = self._peer(peer)
        rows = PreparedRows(plan, source)
        src = place(rows.src, plan.sources[source].regions, theirs.storages, f"peer {peer}")
        dst = place(rows.dst, plan.consumer.regions, self._storages, self.name)
        self._prepared.append(InProcessPrepared(peer, rows, src, dst))
        return self._prepared[-1]

    def read(self, prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], notification: bytes = b"") -> InProcessRead:
        if not isinstance(prepared, InProcessPrepared):
            raise TransportError(f"peer {prepared.peer}: prepared by another transport")
        self._peer(prepared.peer)
        if prepared not in self._prepared:
            raise TransportError(f"peer {prepared.peer} was forgotten since this plan was prepared; prepare it again")
        runs = prepared.runs(tiles)
        faults = self._faults.get(self._started, ())
        self._started += 1
        reorder = next((f for f in faults if isinstance(f, Reorder)), None)
        if reorder is not None:
            order = np.random.default_rng(reorder.seed).permutation(len(runs[2]))
            runs = (runs[0][order], runs[1][order], runs[2][order])
        read = InProcessRead(prepared, notification, runs, faults, self._clock())
        self._reads[read] = None
        return read

    def poll(self, read: Read) -> State:
        mine = _own(read)
        if mine.state is not State.RUNNING:
            self._echo(mine)
            return mine.state
        mine.polls += 1
        if self._harbour.find(mine.peer) is None:
            self._fail(mine, "it died", safe=True)
        elif mine.fault(LateLanding) is not None:
            self._fail(mine, "the read was lost, and may still land")
        elif self._due(mine):
            self._land(mine)
        if mine.state is State.RUNNING and self._clock() - mine.started_at > self._timeout_s:
            self._fail(mine, f"nothing arrived for {self._timeout_s:g} s: it is stopped, overloaded or unreachable")
        return mine.state

    def _due(self, read: InProcessRead) -> bool:
        if self._harbour.stopped(read.peer) or read.drops("bytes"):
            return False
        delay = read.fault(Delay) or Delay()
        return read.polls > delay.polls and self._clock() - read.started_at >= delay.seconds

    def _land(self, read: InProcessRead) -> None:
        """Let a share of the runs land, all of them unless they come reordered; then see whether the read is over."""
        reorder, death = read.fault(Reorder), read.fault(PeerDeath)
        share = -(-read.total // reorder.polls) if reorder is not None else read.total
        stop = min(read.total, read.landed + share)
        if death is not None:
            stop = min(stop, death.after_runs)
        self._copy(read, read.landed, stop)
        read.landed = stop
        if death is not None and stop == min(death.after_runs, read.total):
            self._harbour.kill(read.peer)
            self._fail(read, "it died", safe=True)
        elif stop == read.total:
            self._finish(read)

    def _copy(self, read: InProcessRead, start: int, stop: int) -> None:
        columns = (column[start:stop].tolist() for column in read.runs)
        for src, dst, length in zip(*columns, strict=True):
            ctypes.memmove(dst, src, length)
        corrupt = read.fault(Corrupt)
        if corrupt is not None and read.total and start <= corrupt.run % read.total < stop:
            run = corrupt.run % read.total
            at = int(read.runs[1][run]) + corrupt.byte % int(read.runs[2][run])
            ctypes.c_uint8.from_address(at).value ^= 0xFF

    def _finish(self, read: InProcessRead) -> None:
        read.state, read.ended_at, read.safe = State.DONE, self._clock(), True
        read.echoes = read.doubles("bytes")
        other = self._harbour.find(read.peer)
        if other is not None and read.notification and not read.drops("notification"):
            other.deliver(self.name, read.notification)
            if read.doubles("notification"):
                other.deliver(self.name, read.notification)

    def _echo(self, read: InProcessRead) -> None:
        """A duplicate of the bytes lands, once."""
        if read.echoes and self._harbour.find(read.peer) is not None:
            self._copy(read, 0, read.total)
        read.echoes = False

    def _fail(self, read: InProcessRead, reason: str, safe: bool = False) -> None:
        if read.state is not State.RUNNING:
            return
        read.state, read.ended_at, read.safe = State.FAILED, self._clock(), safe
        read.error = f"peer {read.peer}: {reason}; {read.landed} of {read.total} runs had arrived"

    def telemetry(self, read: Read) -> Telemetry:
        mine = _own(read)
        if mine.state is not State.DONE:
            raise TransportError(f"peer {mine.peer}: telemetry is of a read that is done; this one is {mine.state.value}")
        return Telemetry(int(mine.runs[2].sum()), mine.total, 0.0, mine.ended_at - mine.started_at)

    def release(self, read: Read) -> bool:
        mine = _own(read)
        self._fail(mine, "the read was given up here", safe=mine.drops("bytes"))
        self._echo(mine)
        if not mine.safe and not self._settled(mine):
            return False
        mine.safe = True
        self._reads.pop(mine, None)
        return True

    def _settled(self, read: InProcessRead) -> bool:
        """Whether what was still under way has landed, or never will."""
        if self._harbour.find(read.peer) is None or read.drops("bytes"):
            return True
        late = read.fault(LateLanding)
        read.releases += 1
        if self._harbour.stopped(read.peer) or (late is not None and read.releases <= late.releases):
            return False
        self._copy(read, read.landed, read.total)
        read.landed = read.total
        return True

    def notify(self, peer: str, message: bytes) -> None:
        self._peer(peer)
        other = self._harbour.find(peer)
        if other is None:
            raise TransportError(f"peer {peer}: it died; forget it and connect again")
        other.deliver(self.name, message)

    def deliver(self, sender: str, message: bytes) -> None:
        """Take in a notification; called by the other end."""
        self._inbox.append((sender, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        found, self._inbox = self._inbox, []
        return found

    def path(self, peer: str) -> Path:
        self._peer(peer)
        return Path("plain memory")

    def forget(self, peer: str) -> None:
        for read in self._reads:
            if read.peer == peer:
                self._fail(read, "it was forgotten here")
        self._prepared = [p for p in self._prepared if p.peer != peer]
        self._peers.pop(peer, None)

    def close(self) -> None:
        for read in self._reads:
            self._fail(read, "this end was closed")
            read.safe, read.echoes = True, False
        self._reads.clear()
        self._prepared.clear()
        self._peers.clear()
        self._harbour.kill(self.name)


def _elements(rows: Rows, placed: Placed, index: Ints) -> tuple[Ints, Ints]:
    """Address and length of elements by number."""
    ends: Ints = np.cumsum(rows.count)
    row = np.searchsorted(ends, index, side="right")
    place_in_row: Ints = index - (ends[row] - rows.count[row])
    return placed.address[row] + place_in_row * rows.stride[row], rows.length[row]


def _own(read: Read) -> InProcessRead:
    if not isinstance(read, InProcessRead):
        raise TransportError(f"peer {read.peer}: a read of another transport")
    return read
