"""Which doors UCX opens, and what becomes of reads from processes that have ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.engines.vllm.options import option_troubles, read_options
from kvferry.errors import SessionError, TransportError
from kvferry.plan import Binder, make_plans
from kvferry.transport import NixlOptions, NixlTransport
from kvferry.transport import fence as module
from kvferry.transport.fence import Fence, allows_tcp, fence, port_range, taking_ports
from kvferry.transport.interfaces import addresses, free_ports, interface_of
from kvferry.transport.metadata import decode_metadata, encode_metadata
from kvferry.transport.process import Life, Process, started, this_process
from transport_peer import allocated, at_addresses
from transport_suite import TCP, dense_case, until

PATIENCE_S = 30.0
TESTS = Path(__file__).parent
WITHOUT_CMA = {"UCX_TLS": "^tcp,cma"}
CASE = dense_case(blocks=64)

PRODUCER = """
import json, sys, time
from kvferry.session import Card, Listener, Welcome, own_keys
from kvferry.transport import NixlOptions, NixlTransport
from transport_peer import allocated
from test_transport_fence import CASE
options = json.loads(sys.argv[1])
transport = NixlTransport("p", NixlOptions(**options))
there = allocated(CASE.producers, 1)[0]
transport.register(there.storages)
listener = Listener("127.0.0.1:0", own_keys())
print(json.dumps([[b.ctypes.data for b in there.buffers], transport.metadata().hex(), listener.port]), flush=True)
while True:
    transport.notifications()
    time.sleep(0.001)
"""

CONSUMER = """
import json, sys, time
from kvferry.transport import State
from test_transport_fence import consumer
found = consumer(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
read = found.read()
while (state := found.transport.poll(read)) is State.RUNNING:
    time.sleep(0.0005)
print(json.dumps([state.value, read.error, found.right()]), flush=True)
found.transport.release(read)
sys.stdin.readline()
read = found.read()
while (state := found.transport.poll(read)) is State.RUNNING:
    time.sleep(0.0005)
print(json.dumps([state.value, read.error, True]), flush=True)
deadline = time.monotonic() + 20
while not (free := found.transport.release(read)) and time.monotonic() < deadline:
    time.sleep(0.001)
print(json.dumps([free]), flush=True)
found.transport.close()
"""


class Consumer:
    """A decode side that reads CASE from a producer in another process."""

    def __init__(self, options: dict[str, Any], told: list[Any]) -> None:
        self.here = allocated(CASE.consumers, 2)[0]
        self.transport = NixlTransport("d", NixlOptions(**options))
        self.transport.register(self.here.storages)
        there = at_addresses(CASE.producers[0], told[0])
        (self.plan,) = make_plans([self.here.manifest], [there])
        self.peer = self.transport.connect(bytes.fromhex(told[1]))
        self.prepared = self.transport.prepare(self.plan, 0, self.peer)

    def read(self):
        return self.transport.read(self.prepared, Binder(self.plan).tiles(CASE.request))

    def right(self) -> bool:
        theirs = allocated(CASE.producers, 1)[0].buffers
        return any(bool(np.isin(there, here).all()) for there, here in zip(theirs, self.here.buffers, strict=True))


def consumer(options: dict[str, Any], told: list[Any]) -> Consumer:
    return Consumer(options, told)


def clean() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])}


@contextmanager
def running(script: str, *words: Any) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, *(json.dumps(word) for word in words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean(),
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait(PATIENCE_S)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def said(child: subprocess.Popen[str]) -> list[Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.poll()
    out: list[Any] = json.loads(line)
    return out


def stands(process: int) -> bool:
    """A thread that runs stops a moment after the signal was sent."""
    stats = (path.read_text(encoding="ascii") for path in Path(f"/proc/{process}/task").glob("*/stat"))
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def listening(process: int) -> list[int]:
    """TCP ports that a process listens on, by /proc."""
    own = {os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()}
    out = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                out.append(int(words[1].rpartition(":")[2], 16))
    return sorted(out)


@pytest.mark.parametrize("ucx", [{}, WITHOUT_CMA], ids=["with cma", "without cma"])
@pytest.mark.parametrize("progress_thread", [None, True])
def test_by_default_a_producer_and_its_consumer_listen_on_the_session_port_alone(ucx, progress_thread):
    with running(PRODUCER, {"ucx": ucx, "progress_thread": progress_thread}) as producer:
        told = said(producer)
        assert listening(producer.pid) == [told[2]]
        with running(CONSUMER, {"ucx": ucx, "progress_thread": progress_thread}, told) as child:
            assert said(child) == ["done", "", True]
            assert listening(child.pid) == []
            assert listening(producer.pid) == [told[2]]


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "a zombie"])
@pytest.mark.parametrize("progress_thread", [None, True, "slow"])
@pytest.mark.parametrize("ucx", [{}, WITHOUT_CMA], ids=["with cma", "without cma"])
def test_a_killed_producer_fails_its_reads_frees_their_blocks_and_the_consumer_ends_by_itself(ucx, progress_thread, reaped):
    options = {"ucx": ucx, "progress_thread": progress_thread}
    with running(PRODUCER, options) as producer:
        told = said(producer)
        with running(CONSUMER, options, told) as child:
            assert said(child) == ["done", "", True]
            producer.kill()
            if reaped:
                producer.wait(PATIENCE_S)
            else:
                os.waitid(os.P_PID, producer.pid, os.WEXITED | os.WNOWAIT)
            began = time.monotonic()
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            state, error, _ = said(child)
            assert state == "failed"
            assert time.monotonic() - began < 10, "the default timeout is 30 s"
            assert "has ended" in error or "REMOTE_DISCONNECT" in error
            assert said(child) == [True]
            assert child.wait(PATIENCE_S) == 0


def test_a_stopped_producer_does_not_keep_a_closing_consumer_with_a_progress_thread():
    options = {"ucx": WITHOUT_CMA, "progress_thread": True, "timeout_s": 1.0}
    with running(PRODUCER, options) as producer:
        told = said(producer)
        with running(CONSUMER.replace("time.monotonic() + 20", "time.monotonic()"), options, told) as child:
            assert said(child)[0] == "done"
            os.kill(producer.pid, signal.SIGSTOP)
            until(lambda: stands(producer.pid), "all threads of the producer stand still", PATIENCE_S)
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            assert said(child)[0] == "failed"
            assert child.wait(PATIENCE_S) == 0
            os.kill(producer.pid, signal.SIGCONT)


MAGIC = 0xCAFEBABE12345678
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15 + 1 + 31)
DEADLY = [struct.pack("<QBI", MAGIC, number, 0) for number in range(32)]


def drawn(number: int, count: int) -> Iterator[bytes]:
    rng = np.random.default_rng(number)
    for length in rng.integers(1, 200, count).tolist():
        yield rng.bytes(length)


def test_deadly_and_random_messages_to_every_open_port_end_nothing():
    """Of a connection whose greeting is wrong nothing more is read: every second one begins with ZeroMQ's own."""
    with running(PRODUCER, {}) as producer:
        told = said(producer)
        ports = listening(producer.pid)
        assert ports == [told[2]]
        for port in ports:
            for message in DEADLY:
                with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as one:
                    one.sendall(message)
            for number in range(2000):
                with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as one:
                    try:
                        one.sendall(b"".join([GREETING * (number % 2), *drawn(number, 50)]))
                    except (ConnectionResetError, BrokenPipeError):
                        continue
        assert producer.poll() is None
        with running(CONSUMER, {}, told) as child:
            assert said(child) == ["done", "", True]


def wake_ups(process: int) -> list[str]:
    """UCX's datagram sockets, by which shared memory wakes a sleeper; their names are in the abstract namespace."""
    own = {os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()}
    lines = Path(f"/proc/{process}/net/unix").read_text(encoding="ascii").splitlines()[1:]
    words = [line.split() for line in lines]
    return [w[7] for w in words if len(w) > 7 and w[7].startswith("@") and f"socket:[{w[6]}]" in own]


@pytest.mark.parametrize("posting_threads", [0, 2])
def test_whatever_comes_to_ucxs_wake_up_sockets_ends_nothing(posting_threads):
    """Without a progress thread of NIXL's, as by default: with one, an empty datagram ends the process (docs/reports)."""
    with running(PRODUCER, {"posting_threads": posting_threads}) as producer:
        told = said(producer)
        names = wake_ups(producer.pid)
        assert names
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as one:
            for name in names:
                for message in [*DEADLY, *drawn(1, 2000), b""]:
                    with suppress(BlockingIOError):
                        one.sendto(message, "\0" + name[1:])
        assert producer.poll() is None
        with running(CONSUMER, {}, told) as child:
            assert said(child) == ["done", "", True]


def test_metadata_of_an_end_without_a_port_names_its_process():
    transport = NixlTransport("d", NixlOptions(progress_thread=False))
    found = decode_metadata(transport.metadata(), "nixl")
    assert found.process == this_process()
    transport.close()


OPEN = NixlOptions(progress_thread=False, ucx=TCP)
CLOSED = NixlOptions(progress_thread=False)


@pytest.mark.parametrize(
    ("here", "there", "changed", "words"),
    [
        (CLOSED, OPEN, {}, "opens a UCX port, and this end none: it runs an older release"),
        (CLOSED, OPEN, {"host": "another"}, "is on another machine, and UCX opens no port here"),
        (OPEN, CLOSED, {}, "from its machine's loopback only: give both a `listen` address"),
        (CLOSED, CLOSED, {"process": Process(1, 1, "pid:[1]")}, "is in another PID namespace"),
    ],
)
def test_ends_that_cannot_reach_each_other_are_refused_in_words(here, there, changed, words):
    ends = [NixlTransport("d", here), NixlTransport("p", there)]
    found = decode_metadata(ends[1].metadata(), "nixl")
    with pytest.raises(TransportError, match=re.escape(words)):
        ends[0].connect(encode_metadata(msgspec.structs.replace(found, **changed)))
    for end in ends:
        end.close()


def test_metadata_of_an_end_with_a_port_is_what_it_was_in_the_last_release():
    """Field by field: who listens on a network may be upgraded before those who read it, and after."""
    transport = NixlTransport("p", OPEN)
    assert list(msgspec.msgpack.decode(transport.metadata())) == [
        "carrier", "name", "host", "storages", "blob", "digest", "version", "more",
    ]  # fmt: skip
    transport.close()


def test_a_process_is_known_by_more_than_its_number():
    here = this_process()
    assert Life(here).known
    assert not Life(here).ended
    assert Life(Process(here.number, here.started + 1, here.namespace)).ended
    child = subprocess.Popen(["sleep", "60"])
    life = Life(Process(child.pid, started(child.pid), here.namespace))
    assert not life.ended
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert life.ended
    child.wait()
    assert Life(Process(child.pid, 1, here.namespace)).ended
    life.close()
    life.close()


@pytest.mark.parametrize(
    ("transports", "allowed"),
    [
        ("all", True),
        ("tcp", True),
        ("rc,tcp,sm", True),
        ("^tcp", False),
        ("^tcp,cma", False),
        ("^cma", True),
        ("sm,self", False),
    ],
)
def test_ucx_tls_is_read_as_ucx_reads_it(transports, allowed):
    assert allows_tcp(transports) == allowed


def test_on_loopback_no_port_is_opened_unless_the_operator_lets_tcp_in():
    assert fence("127.0.0.1", "20000-20255", {}).near
    assert fence("localhost", "20000-20255", {}).settings["UCX_TLS"] == "^tcp"
    kept = fence("127.0.0.1", "20000-20255", {"UCX_TLS": "^tcp,cma"})
    assert kept.near
    assert kept.settings["UCX_TLS"] == "^tcp,cma"
    asked = fence("127.0.0.1", "20000-20255", {"UCX_TLS": "tcp,self"})
    assert not asked.near
    assert asked.settings["UCX_NET_DEVICES"] == "lo"
    assert "UCX_TLS=tcp,self lets TCP in" in asked.words


def test_on_a_network_the_fence_is_named(monkeypatch):
    monkeypatch.setattr(module, "interface_of", lambda host: {"10.0.0.2": "eth7"}.get(host, ""))
    monkeypatch.setattr(module, "addresses", lambda: iter([("eth7", "10.0.0.2")]))
    monkeypatch.setattr(module, "free_ports", lambda *_: 5)
    found = fence("10.0.0.2", "20000-20100", {}, 5)
    assert found.settings == {"UCX_NET_DEVICES": "eth7", "UCX_TCP_PORT_RANGE": "20000-20100"}
    assert "TCP ports 20000-20100 of eth7 (5 for this process), and authenticates no peer" in found.words
    assert 'nft add rule inet filter input iifname "eth7" tcp dport 20000-20100' in found.words
    other = fence("prefill-0", "20000-20100", {}, 5)
    assert "UCX_NET_DEVICES" not in other.settings
    assert "of all interfaces" in other.words
    assert "prefill-0 is no address of this machine" in other.words


def test_with_rdma_no_tcp_port_is_opened(monkeypatch):
    monkeypatch.setattr(module, "has_rdma", lambda: True)
    found = fence("10.0.0.2", "20000-20100", {})
    assert found.settings == {"UCX_TLS": "^tcp"}
    assert "RDMA" in found.words


def test_interfaces_are_found_by_their_addresses():
    assert ("lo", "127.0.0.1") in set(addresses())
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.250") in {"", *(name for name, _ in addresses())}
    assert interface_of("no such host.invalid") == ""


def test_a_range_without_a_free_port_is_refused_before_ucx_looks_for_one_for_ever():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        assert free_ports("lo", port, port, 1) == 0
        with pytest.raises(TransportError, match=f"0 of the ports {port}-{port} of lo are free, and UCX needs 1"):
            NixlTransport("p", NixlOptions(ucx=TCP, ports=f"{port}-{port}", posting_threads=0))


STARTING = """
import json, sys
from kvferry.errors import TransportError
from kvferry.transport import NixlOptions, NixlTransport
sys.stdin.readline()
try:
    transport = NixlTransport("p", NixlOptions(**json.loads(sys.argv[1])))
except TransportError as error:
    print(json.dumps(str(error)), flush=True)
else:
    print(json.dumps(""), flush=True)
    sys.stdin.readline()
"""


def test_of_processes_that_start_at_once_those_for_which_no_port_is_left_are_told():
    """All of them found the ports free, and those that came too late looked for one for ever."""
    options = {"ucx": TCP, "ports": "18400-18401", "posting_threads": 0, "progress_thread": False}
    with ExitStack() as stack:
        children = [stack.enter_context(running(STARTING, options)) for _ in range(5)]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        errors = []
        for child in children:
            assert child.stdout is not None
            waiting = select.poll()
            waiting.register(child.stdout, select.POLLIN | select.POLLHUP)
            assert waiting.poll(PATIENCE_S * 1000), "it looks for a port for ever"
            errors.append(said(child))
    assert errors.count("") == 2
    assert sum("0 of the ports 18400-18401 of lo are free, and UCX needs 1" in error for error in errors) == 3


def test_a_process_that_keeps_the_turn_for_long_keeps_no_other_from_starting(monkeypatch, caplog):
    monkeypatch.setattr(module, "TURN_S", 0.0)
    found = Fence(False, "", {"UCX_TCP_PORT_RANGE": "18402-18403", "UCX_NET_DEVICES": "lo"}, 1)
    with taking_ports(found), taking_ports(found):
        assert "another process takes UCX ports" in caplog.text


@pytest.mark.parametrize("posting_threads", [0, 2])
def test_ucx_takes_ports_of_the_range_alone(posting_threads):
    before = set(listening(os.getpid()))
    options = NixlOptions(ucx=TCP, ports="20300-20399", posting_threads=posting_threads, progress_thread=False)
    transport = NixlTransport("p", options)
    taken = set(listening(os.getpid())) - before
    assert len(taken) == 1 + posting_threads
    assert all(20300 <= port <= 20399 for port in taken)
    transport.close()


@pytest.mark.parametrize("text", ["", "20000", "20100-20000", "80-90", "20000-70000", "a-b"])
def test_a_range_that_is_none_is_refused_by_name(text):
    with pytest.raises(TransportError, match="is no range of ports"):
        port_range(text)
    with pytest.raises(SessionError, match="is no range of ports"):
        read_options({"ucx_ports": text})


def test_another_backend_is_left_alone():
    assert NixlOptions("LIBFABRIC", ucx={"UCX_TLS": "tcp"}).fence == Fence(False, "", {"UCX_TLS": "tcp"})


def test_an_engines_options_say_where_ucx_listens():
    assert read_options({}).nixl.address == "127.0.0.1"
    key = {"key_file": "/key"}
    assert read_options({"listen": "10.0.0.2:0", **key}).nixl.address == "10.0.0.2"
    for here in ("LocalHost:0", "[::ffff:127.0.0.1]:0", "[0:0:0:0:0:0:0:1]:0", "[::1%lo]:0", "127.0.0.9:7600"):
        assert read_options({"listen": here}).nixl.fence.near
        assert read_options({"listen": here, **key}).nixl.fence.near
    wide = {"listen": "0.0.0.0:7600", "advertise": "prefill-0", "ucx_ports": "20000-20010", **key}
    assert (read_options(wide).nixl.address, read_options(wide).nixl.ports) == ("prefill-0", "20000-20010")


def test_an_engine_on_loopback_that_is_to_meet_another_machine_is_told_before_it_starts(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    (found,) = option_troubles({"key_file": "/key", "peers": ["prefill-0:7600"]})
    assert found.name == "listen-loopback"
    assert "peers names prefill-0:7600" in found.seen
    assert not list(option_troubles({"key_file": "/key", "peers": ["prefill-0:7600"], "listen": "decode-0:0"}))
    assert not list(option_troubles({"key_file": "/key", "peers": ["prefill-0:7600"], "ucx": {"UCX_TLS": "tcp"}}))
