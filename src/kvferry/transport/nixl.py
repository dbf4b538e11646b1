"""Reads over NIXL: strided rows prepared once, windows of merged descriptors, and destinations kept until nothing can land.

NIXL lets go of a read that is still under way when asked to, and forgets a peer likewise, yet the bytes may land afterwards.
So neither is asked of it before the read has ended: until then a failed read, and the peer it reads from, are kept here.
For the same reason the notification is a message of its own, sent once every byte has been seen to arrive: NIXL would send
one that is tied to a read also when a read that we gave up ends late.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import UNSET

from kvferry.errors import TransportError
from kvferry.plan import Plan, Tiles
from kvferry.plan.rows import PreparedRows, Rows
from kvferry.transport import ucx
from kvferry.transport.addresses import Placed, dense, place, strided
from kvferry.transport.agent import NO_STRIDES, NixlOptions, library, start
from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry
from kvferry.transport.fence import taking_ports
from kvferry.transport.metadata import Metadata, StorageEntry, decode_metadata, encode_metadata, this_host
from kvferry.transport.order import ascending
from kvferry.transport.peers import Flight, Lists, NixlPrepared, NixlRead, Peer, Peers
from kvferry.transport.process import Life, this_process
from kvferry.transport.windows import Merging, small

logger = logging.getLogger("kvferry.transport")

CARRIER: Final = "nixl"
MAX_ELEMENTS: Final = (1 << 31) - 1

_MEMORY: Final = {"dram": "DRAM", "vram": "VRAM"}
_LOCAL: Final = "NIXL_INIT_AGENT"
_POSTING_S: Final = 0.002
"""How long a round goes on posting. Over CUDA IPC a window takes some ten milliseconds to post; meanwhile nobody looks at
what has landed."""
_PASSED_OVER: Final = 64
"""For so many rounds at most are smaller reads preferred to one that waits."""
_TELLING: Final = 1 << 14
"""More bytes than this say how a peer is read: UCX takes other ways for a few of them, and for host memory, where the words lie
that a session reads to warm a connection up."""
_LOOK_S: Final = 0.05
"""How often it is asked whether a peer's process lives."""
_DRAINS: Final = 256
"""So often is UCX's queue looked through after a peer's death, four times what fits into it, until nothing can be in it that
the dead process wrote. UCX itself does not take a process for dead that its parent has not waited for."""
_LINGER_S: Final = 1.0
_CLOSE_S: Final = 5.0
"""How long a closing end waits for UCX to end the reads from dead peers, where a progress thread would go on with them."""
_GONE: Final = "its process has ended"
_LISTEN: Final = "give both a `listen` address that is not loopback, and the same key_file"
_NEAR: Final = (
    "UCX opens no port here, since this end's address is loopback: "
    "set `listen` to this machine's address (a decode engine too; port 0 will do), and key_file"
)
_SHARE_IPC: Final = (
    "UCX's shared memory does not lead there: let the containers share the IPC and PID namespaces and run as one user, or "
) + _LISTEN


class NixlTransport:
    """One rank's end of the wire over NIXL; see the contract for the order of calls.

    `name` gets a suffix that is new at each start, so that a restarted peer is never taken for its predecessor.
    """

    def __init__(self, name: str, options: NixlOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options or NixlOptions()
        self.name = f"{name}#{secrets.token_hex(4)}"
        self._clock = clock
        self._fence = self.options.fence
        with ucx.environment(self._fence.settings), taking_ports(self._fence):
            self._library = library()
            self._started, self.progresses = start(self.name, self.options, self._library)
        if self._fence.words:
            logger.warning("%s: %s", self.name, self._fence.words)
        if not self._library.strided:
            logger.info("%s: %s", self.name, NO_STRIDES)
        self._stuck = ""
        self._storages: list[Storage] = []
        self._registered: list[Any] = []
        self._peers = Peers()

    @property
    def closed(self) -> bool:
        return self._started is None

    @property
    def _agent(self) -> Any:
        if self._started is None:
            raise TransportError(f"{self.name} was closed; make a new transport")
        return self._started

    def register(self, storages: Sequence[Storage]) -> None:
        for memory, named in _MEMORY.items():
            for device in sorted({s.device for s in storages if s.memory == memory}):
                chosen = [s for s in storages if (s.memory, s.device) == (memory, device)]
                rows = np.array([(s.address, s.length, s.device) for s in chosen], np.uint64)
                try:
                    self._registered.append(self._agent.register_memory(rows, named))
                except self._library.errors as error:
                    raise TransportError(
                        f"{self.name}: NIXL cannot register {len(chosen)} storages of {memory} {device}: {error}; "
                        f"is the memory allocated, and may this process lock it (ulimit -l)?"
                    ) from error
                self._storages += chosen

    def metadata(self) -> bytes:
        storages = tuple(StorageEntry(s.address, s.length, s.memory, s.device) for s in self._storages)
        blob = self._agent.get_agent_metadata()
        process = this_process() if self._fence.near else UNSET
        return encode_metadata(Metadata(CARRIER, self.name, this_host(), storages, blob, process=process))

    def connect(self, metadata: bytes) -> str:
        found = decode_metadata(metadata, CARRIER)
        if self._peers.again(found):
            return found.name
        if found.name == self.name:
            self._peers.add(found)
            return found.name
        self._refuse_unreachable(found)
        try:
            loaded = self._agent.add_remote_agent(found.blob)
        except self._library.errors as error:
            cure = _SHARE_IPC if self._fence.near else "fetch it again"
            raise TransportError(f"peer {found.name}: NIXL does not accept its metadata: {error}; {cure}") from error
        name = loaded.decode("utf-8", "replace") if isinstance(loaded, bytes) else str(loaded)
        if name != found.name:
            raise TransportError(f"peer {found.name} sends NIXL metadata of {name}; fetch its own")
        self._peers.add(found, None if found.process is UNSET else Life(found.process))
        return name

    def _refuse_unreachable(self, found: Metadata) -> None:
        """One end without a port and one with, or two that share no process numbers, would wait for each other in silence."""
        if self.options.backend != "UCX" or (not self._fence.near and found.process is UNSET):
            return
        if found.host != this_host():
            raise TransportError(f"peer {found.name} is on another machine, and {_NEAR}")
        if not self._fence.near:
            raise TransportError(f"peer {found.name} can be reached from its machine's loopback only: {_LISTEN}")
        if found.process is UNSET:
            raise TransportError(
                f"peer {found.name} opens a UCX port, and this end none: it runs an older release of KVFerry, or listens "
                f"beyond this machine; run the same release on both, and {_LISTEN}"
            )
        if found.process.namespace != this_process().namespace:
            raise TransportError(
                f"peer {found.name} is in another PID namespace, where UCX's shared memory does not lead: let the containers "
                f"share one (docker --pid, Kubernetes shareProcessNamespace), or {_LISTEN}"
            )

    def prepare(self, plan: Plan, source: int, peer: str) -> NixlPrepared:
        known = self._peers.connected(peer)
        rows = PreparedRows(plan, source)
        most = max(rows.src.elements, rows.dst.elements)
        if most > MAX_ELEMENTS:
            raise TransportError(
                f"peer {peer}: {most:,} elements; NIXL counts to {MAX_ELEMENTS:,}: use larger blocks or fewer of them"
            )
        src = place(rows.src, plan.sources[source].regions, known.metadata.storages, f"peer {peer}")
        dst = place(rows.dst, plan.consumer.regions, self._storages, self.name)
        prepared = NixlPrepared(
            peer,
            len(rows.src) + len(rows.dst),
            rows,
            Merging(rows),
            Lists(self._list(peer, rows.src, src, peer), self._list(_LOCAL, rows.dst, dst, peer)),
        )
        known.prepared.append(prepared)
        return prepared

    def _list(self, agent: str, rows: Rows, placed: Placed, peer: str) -> Any:
        if not len(rows):
            return None
        listed = strided(rows, placed) if self._library.strided else dense(rows, placed, f"peer {peer}")
        try:
            return self._agent.prep_xfer_dlist(agent, listed, _MEMORY[placed.memory])
        except self._library.errors as error:
            side = "this end's" if agent == _LOCAL else "its"
            raise TransportError(f"peer {peer}: NIXL cannot prepare {len(rows)} rows of {side} memory: {error}") from error

    def read(self, prepared: Prepared, tiles: Mapping[tuple[int, int], Tiles], notification: bytes = b"") -> NixlRead:
        if not isinstance(prepared, NixlPrepared):
            raise TransportError(f"peer {prepared.peer}: prepared by another transport")
        peer = self._peers.connected(prepared.peer)
        if prepared not in peer.prepared:
            raise TransportError(f"peer {prepared.peer} was forgotten since this plan was prepared; prepare it again")
        src, dst = prepared.indices.indices(ascending(tiles))
        waiting = deque(prepared.merging.windows(src, dst, self.options.window)) if len(src) else deque()
        left = sum(window.descriptors for window in waiting)
        is_small = left <= small(self.options.window)
        read = NixlRead(prepared, notification, waiting, len(waiting), left, is_small, self._clock(), peer.round)
        peer.reads[read] = None
        if self._ended(peer):
            self._fail(read, _GONE)
            return read
        if read.small:
            while read.waiting:
                self._post(peer, read)
        else:
            peer.queue[read] = None
            self._dispatch(peer)
        self._settle(peer, read, read.moved_at)
        return read

    def poll(self, read: Read) -> State:
        """Whoever is asked after a second time begins a round: all flights of the peer are looked at once, for all reads."""
        mine = _own(read)
        if mine.state is State.RUNNING:
            peer = self._peers.connected(mine.peer)
            if mine.looked_at_in == peer.round:
                self._sweep(peer)
            mine.looked_at_in = peer.round
        return mine.state

    def _sweep(self, peer: Peer) -> None:
        """A round: take in what landed, post what there is room for, and see which reads are over."""
        peer.round += 1
        for read in tuple(peer.reads):
            self._land(peer, read)
        if self._ended(peer):
            for read in tuple(peer.reads):
                self._end(peer, read)
            return
        self._dispatch(peer)
        now = self._clock()
        for read in tuple(peer.reads):
            self._settle(peer, read, now)

    def _ended(self, peer: Peer) -> bool:
        """Whether the peer's process was seen to end; asked now and then."""
        if peer.life is None or peer.ended_at is not None:
            return peer.ended_at is not None
        now = self._clock()
        if now - peer.looked_at < _LOOK_S:
            return False
        peer.looked_at = now
        if not peer.life.ended:
            return False
        peer.ended_at = now
        logger.info("peer %s: %s", peer.metadata.name, _GONE)
        if not peer.idle and self._emulated(peer):
            self._stuck = peer.metadata.name
        return True

    def _end(self, peer: Peer, read: NixlRead) -> None:
        """A read of a dead peer that is not over by now; what has arrived of it counts."""
        if read.state is State.RUNNING and (read.waiting or read.flying):
            self._fail(read, _GONE)
        elif read.state is State.RUNNING:
            self._finish(peer, read)

    def _emulated(self, peer: Peer) -> bool:
        return self._path(peer).name.startswith("emulation")

    def _drained(self, peer: Peer) -> bool:
        """Whether nothing that a dead peer wrote can still be on its way here."""
        if peer.ended_at is None or not self._emulated(peer):
            return False
        peer.drained += 1
        return peer.drained > _DRAINS and self._clock() - peer.ended_at > _LINGER_S

    def _dispatch(self, peer: Peer) -> None:
        """Post windows while there is room, not so long that whoever waits for a round would notice."""
        began = self._clock()
        while (read := self._next(peer)) is not None:
            self._post(peer, read)
            if self._clock() - began > _POSTING_S:
                return

    def _next(self, peer: Peer) -> NixlRead | None:
        """Whose window is posted next: the read's that has the least to post, unless another was passed over for long."""
        for read in tuple(peer.queue):
            if not read.waiting:
                del peer.queue[read]
        if not peer.queue:
            return None
        first = min(peer.queue, key=lambda read: (peer.round - read.posted_in < _PASSED_OVER, read.left))
        fits = not peer.descriptors or peer.descriptors + first.waiting[0].descriptors <= self.options.window
        return first if fits else None

    def _settle(self, peer: Peer, read: NixlRead, now: float) -> None:
        if read.state is not State.RUNNING:
            return
        if not read.waiting and not read.flying:
            self._finish(peer, read)
            return
        since = read.moved_at if read.flying else max(read.moved_at, peer.moved_at)
        if now - since > self.options.timeout_s:
            self._fail(read, f"nothing arrived for {self.options.timeout_s:g} s: {self._silence(peer)}")

    def _silence(self, peer: Peer) -> str:
        if not self._stuck or self._stuck == peer.metadata.name or not self._emulated(peer):
            return "it is stopped, overloaded or unreachable"
        return (
            f"it is stopped or overloaded, or {self._stuck}, which died while it was read, has blocked UCX's queue here: "
            f"if no peer can be read, start this engine again"
        )

    def _post(self, peer: Peer, read: NixlRead) -> None:
        """Post the next window of a read; the only calls that a window costs before it lands are these two."""
        lists, window = read.prepared.lists, read.waiting.popleft()
        read.left -= window.descriptors
        read.posted_in = peer.round
        try:
            handle = self._agent.make_prepped_xfer("READ", lists.dst, window.dst, lists.src, window.src)
        except self._library.errors as error:
            self._fail(read, f"NIXL cannot make a read of {window.descriptors} descriptors: {error}")
            return
        flight = Flight(handle, window.descriptors)
        read.flying.append(flight)
        peer.descriptors += 0 if read.small else window.descriptors
        read.moved_at = self._clock()
        try:
            status = self._agent.transfer(handle)
        except self._library.errors as error:
            self._fail(read, f"NIXL cannot post a read: {error}")
            return
        if status == "DONE":
            self._landed(peer, read, flight)
        elif status == "ERR":
            self._fail(read, "NIXL refused to post a read")

    def _land(self, peer: Peer, read: NixlRead) -> None:
        """Ask NIXL after every window in flight; those of failed reads too, since they hold their destination."""
        for flight in tuple(read.flying):
            if flight.over:
                self._let_go(peer, read, flight)
                continue
            try:
                status = self._agent.check_xfer_state(flight.handle)
            except self._library.errors as error:
                status = str(error) or type(error).__name__
            if status == "DONE":
                self._landed(peer, read, flight)
            elif status == "PROC" and self._drained(peer):
                flight.over = True
                self._fail(read, _GONE)
                self._let_go(peer, read, flight)
            elif status != "PROC":
                flight.over = True
                self._let_go(peer, read, flight)
                self._fail(read, f"NIXL lost it ({status}); it died or its connection broke")

    def _landed(self, peer: Peer, read: NixlRead, flight: Flight) -> None:
        flight.over = True
        try:
            read.landed.append(self._agent.get_xfer_telemetry(flight.handle))
        except self._library.errors as error:
            self._fail(read, f"NIXL does not say what it moved: {error}")
        read.moved_at = peer.moved_at = self._clock()
        self._let_go(peer, read, flight)

    def _let_go(self, peer: Peer, read: NixlRead, flight: Flight) -> None:
        """Give back a window's handle; NIXL has said that the window is over."""
        try:
            self._agent.release_xfer_handle(flight.handle)
        except self._library.errors as error:
            logger.debug("peer %s: NIXL keeps a handle for now: %s", read.peer, error)
            return
        read.flying.remove(flight)
        peer.descriptors -= 0 if read.small else flight.descriptors

    def _finish(self, peer: Peer, read: NixlRead) -> None:
        if read.notification:
            try:
                self._agent.send_notif(read.peer, read.notification)
            except self._library.errors as error:
                self._fail(read, f"all bytes arrived, but NIXL cannot notify it: {error}")
                return
        read.state = State.DONE
        if not peer.warned and sum(t.totalBytes for t in read.landed) > _TELLING:
            peer.warned = True
            path = self.path(read.peer)
            if path.slow:
                logger.warning("peer %s is read by %s, a slow path: %s", read.peer, path.name, path.remedy)

    def _fail(self, read: NixlRead, reason: str) -> None:
        if read.state is State.FAILED:
            return
        read.state = State.FAILED
        read.waiting.clear()
        log = ucx.ucx_log()
        complaint = log.drain() if log is not None else ""
        if complaint:
            reason = f"{reason} (UCX: {complaint})"
        read.error = f"peer {read.peer}: {reason}; {len(read.landed)} of {read.total} windows had arrived"

    def telemetry(self, read: Read) -> Telemetry:
        mine = _own(read)
        if mine.state is not State.DONE:
            raise TransportError(f"peer {mine.peer}: telemetry is of a read that is done; this one is {mine.state.value}")
        if not mine.landed:
            return Telemetry(0, 0, 0.0, 0.0)
        first = min(t.startTime for t in mine.landed)
        last = max(t.startTime + t.xferDuration for t in mine.landed)
        return Telemetry(
            sum(t.totalBytes for t in mine.landed),
            sum(t.descCount for t in mine.landed),
            sum(t.postDuration for t in mine.landed) * 1e-6,
            (last - first) * 1e-6,
        )

    def release(self, read: Read) -> bool:
        mine = _own(read)
        if mine.state is State.RUNNING:
            self._fail(mine, "the read was given up here")
        peer = self._peers.known(mine.peer)
        if peer is None or mine not in peer.reads:
            return True
        self._land(peer, mine)
        if mine.flying:
            return False
        del peer.reads[mine]
        peer.queue.pop(mine, None)
        self._drop_when_idle(peer)
        return True

    def notify(self, peer: str, message: bytes) -> None:
        if self._ended(self._peers.connected(peer)):
            raise TransportError(f"peer {peer}: {_GONE}; forget it")
        try:
            self._agent.send_notif(peer, message)
        except self._library.errors as error:
            raise TransportError(f"peer {peer}: NIXL cannot notify it: {error}; forget it and connect again") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        try:
            found = self._agent.get_new_notifs()
        except self._library.errors as error:
            raise TransportError(f"{self.name}: NIXL cannot take in notifications: {error}") from error
        return [(peer, message) for peer, messages in found.items() for message in messages]

    def path(self, peer: str) -> Path:
        """How reads from the peer travel, known from the first one on; `kvferry.transport.ucx` says how it is found out."""
        return self._path(self._peers.connected(peer))

    def _path(self, known: Peer) -> Path:
        log = ucx.ucx_log()
        if self.options.backend != "UCX":
            return Path(self.options.backend)
        if log is None:
            return Path("unknown", remedy="UCX logs elsewhere: unset UCX_LOG_FILE to have the path found out")
        used = known.moved_at > 0 or not known.idle
        return ucx.classify(log.ways(self.name, known.metadata.host == this_host(), used))

    def forget(self, peer: str) -> None:
        known = self._peers.known(peer)
        if known is None:
            return
        known.drop()
        for read in known.reads:
            if read.state is State.RUNNING:
                self._fail(read, "it was forgotten here")
            self._land(known, read)
        self._drop_when_idle(known)

    def _drop_when_idle(self, peer: Peer) -> None:
        if not peer.dropped or not peer.idle:
            return
        name = peer.metadata.name
        self._release_lists(peer)
        try:
            self._disconnect(name)
        except self._library.errors as error:
            logger.warning("peer %s: NIXL does not forget it: %s", name, error)
        self._peers.remove(name)

    def _disconnect(self, name: str) -> None:
        """An agent knows itself from its start on: it refuses its own metadata, and cannot be made to forget itself."""
        if name != self.name:
            self._agent.remove_remote_agent(name)

    def _release_lists(self, peer: Peer) -> None:
        for found in peer.take_lists():
            self._agent.release_dlist_handle(found)

    def close(self) -> None:
        """End the agent and with it every connection: afterwards nothing can land, whatever was in flight."""
        if self.closed:
            return
        for _, peer in self._peers:
            for read in peer.reads:
                if read.state is State.RUNNING:
                    self._fail(read, "this end was closed")
        kept = self.progresses and self._hang_on()
        for name, peer in self._peers:
            for read in peer.reads:
                for flight in tuple(read.flying):
                    self._let_go(peer, read, flight)
            self._release_lists(peer)
            try:
                self._disconnect(name)
            except self._library.errors as error:
                logger.debug("peer %s: NIXL does not forget it: %s", name, error)
        self._peers.clear()
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        self._storages.clear()
        if kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._started))
        self._started = None

    def _hang_on(self) -> bool:
        """Let reads that were given up end; whether one has not. UCX's progress thread would then never end either, and whoever
        waited for it: it is left to the process."""
        deadline = time.monotonic() + _CLOSE_S
        busy = True
        while busy and time.monotonic() < deadline:
            for _, peer in self._peers:
                self._ended(peer)
                for read in tuple(peer.reads):
                    self._land(peer, read)
            busy = any(not peer.idle for _, peer in self._peers)
            if busy:
                time.sleep(0.001)
        if busy:
            names = ", ".join(name for name, peer in self._peers if not peer.idle)
            logger.warning("%s: reads from %s are not over, and hold their memory until this process ends", self.name, names)
        return busy


def _own(read: Read) -> NixlRead:
    if not isinstance(read, NixlRead):
        raise TransportError(f"peer {read.peer}: a read of another transport")
    return read
