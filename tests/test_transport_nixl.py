"""What is NIXL's own: windows in flight, the path that is reported, settings, and how it starts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path as File
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.manifest import Identity
from kvferry.plan import Binder, Request, make_plans
from kvferry.plan.rows import Rows
from kvferry.session import Lease, Words
from kvferry.transport import NixlOptions, NixlTransport, Path, State, ucx
from kvferry.transport.addresses import MAX_DENSE, Placed, dense
from kvferry.transport.agent import NO_STRIDES, library, slowed_down
from kvferry.transport.metadata import decode_metadata, encode_metadata
from kvferry.transport.nixl import NixlRead
from transport_peer import PeerProcess, allocated
from transport_suite import (
    TCP,
    TIMEOUT_S,
    Crossing,
    NixlWharf,
    crossing,
    dense_case,
    finish,
    heard_so_far,
    start,
    until,
    without_strides,
)


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    peer = PeerProcess()
    yield peer
    peer.close()


@pytest.fixture
def wharf(process: PeerProcess) -> Iterator[NixlWharf]:
    """Over TCP, where a stopped peer keeps windows in flight."""
    made = NixlWharf(process, TCP)
    yield made
    made.close()


def reader(wharf: NixlWharf, made: Crossing, window: int = 4096, timeout_s: float = 30.0) -> NixlTransport:
    out = wharf.consumer(window, timeout_s)
    out.register([s for rank in made.here for s in rank.storages])
    return out


def in_flight(*reads: NixlRead) -> int:
    return sum(flight.descriptors for read in reads for flight in read.flying)


def test_no_more_descriptors_are_in_flight_than_the_window_allows(wharf):
    made = crossing(wharf, dense_case(layers=3, blocks=128, scattered=True))
    transport = reader(wharf, made, window=20)
    wharf.stop()
    reads = [start(transport, made, made.plans[0], 0) for _ in range(3)]
    for _ in range(20):
        states = [transport.poll(read) for read in reads]
    assert states == [State.RUNNING] * 3
    assert in_flight(*reads) == 20
    wharf.resume()

    def over() -> bool:
        assert in_flight(*reads) <= 20
        return all(transport.poll(read) is State.DONE for read in reads)

    until(over, "the reads")
    assert made.differing() == 0
    assert transport.telemetry(reads[0]).runs == 3 * 64
    assert transport.telemetry(reads[0]).wire_s >= transport.telemetry(reads[0]).posting_s > 0


def test_windows_behind_a_timed_out_one_are_never_posted(wharf):
    made = crossing(wharf, dense_case(layers=3, blocks=128, scattered=True))
    transport = reader(wharf, made, window=20, timeout_s=TIMEOUT_S)
    wharf.stop()
    read = start(transport, made, made.plans[0], 0, b"never")
    assert finish(transport, read) is State.FAILED
    assert "0 of 20 windows had arrived" in read.error
    total = made.differing()
    wharf.resume()
    until(lambda: transport.release(read), "the release")
    assert total / 2 < made.differing()
    assert heard_so_far(wharf, transport, read.peer) == []


def test_a_forgotten_peer_is_kept_until_its_reads_have_ended(wharf):
    made = crossing(wharf, dense_case(blocks=256))
    transport = reader(wharf, made)
    wharf.stop()
    read = start(transport, made, made.plans[0], 0)
    transport.forget(read.peer)
    assert transport.poll(read) is State.FAILED
    assert "forgotten" in read.error
    assert [transport.release(read) for _ in range(50)] == [False] * 50
    wharf.resume()
    until(lambda: transport.release(read), "the release")
    assert finish(transport, start(transport, made, made.plans[0], 0)) is State.DONE


def test_a_peer_forgotten_and_connected_while_a_read_lingers_is_prepared_anew(wharf):
    made = crossing(wharf, dense_case(blocks=256))
    transport = reader(wharf, made)
    wharf.stop()
    read = start(transport, made, made.plans[0], 0)
    transport.forget(read.peer)
    assert transport.connect(made.metadata[0]) == read.peer
    with pytest.raises(TransportError, match="prepare it again"):
        transport.read(read.prepared, {})
    wharf.resume()
    assert finish(transport, start(transport, made, made.plans[0], 0)) is State.DONE
    until(lambda: transport.release(read), "the release")
    assert made.differing() == 0


def test_metadata_that_names_another_agent_inside_is_refused(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    found = decode_metadata(made.metadata[0], "nixl")
    with pytest.raises(TransportError, match="sends NIXL metadata of p0#"):
        transport.connect(encode_metadata(msgspec.structs.replace(found, name="somebody else")))


def test_a_dead_peer_over_shared_memory_fails_and_the_next_one_works():
    wharf = NixlWharf(PeerProcess())
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made, timeout_s=TIMEOUT_S)
    assert finish(transport, start(transport, made, made.plans[0], 0)) is State.DONE
    wharf.kill()
    read = start(transport, made, made.plans[0], 0, b"never")
    assert finish(transport, read) is State.FAILED
    assert read.peer in read.error
    until(lambda: transport.release(read), "the release")
    transport.forget(read.peer)
    wharf.restart()
    other = crossing(wharf, dense_case())
    transport.register([s for rank in other.here for s in rank.storages])
    assert finish(transport, start(transport, other, other.plans[0], 0)) is State.DONE
    assert other.differing() == 0
    wharf.close()
    wharf.peer.close()


def needs_one_way_a_peer(transport):
    """UCX of NIXL before 1.5, which takes no strided lists, writes of every way that an agent has, not of a peer's."""
    if not transport._library.strided:
        pytest.skip("this NIXL names all ways that reads may take")


def test_emulation_is_named_and_warned_about_once(wharf, caplog):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    needs_one_way_a_peer(transport)
    with caplog.at_level(logging.WARNING, logger="kvferry.transport"):
        reads = [start(transport, made, made.plans[0], 0) for _ in range(2)]
        assert [finish(transport, read) for read in reads] == [State.DONE] * 2
    path = transport.path(reads[0].peer)
    assert path.name == "emulation over TCP (software emulation, tcp/lo)"
    assert path.slow
    assert "RDMA" in path.remedy
    assert sum("a slow path" in record.message for record in caplog.records) == 1


def test_the_path_is_unknown_before_the_first_read(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    needs_one_way_a_peer(transport)
    assert transport.path(transport.connect(made.metadata[0])).name == "unknown"


@pytest.mark.parametrize("progress_thread", [True, False, "slow"])
@pytest.mark.parametrize("posting_threads", [0, 2])
@pytest.mark.parametrize("sync", ["none", "strict"])
def test_bytes_arrive_however_nixl_is_run(process, progress_thread, posting_threads, sync):
    wharf = NixlWharf(process)
    made = crossing(wharf, dense_case(layers=3, blocks=512, scattered=True))
    options = NixlOptions(progress_thread=progress_thread, posting_threads=posting_threads, sync=sync)
    transport = NixlTransport("d", options)
    assert transport.progresses == bool(progress_thread)
    transport.register(made.here[0].storages)
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    assert made.differing() == 0
    assert transport.telemetry(read).runs == 3 * 256
    transport.close()
    wharf.close()


@pytest.mark.parametrize("progress_thread", [True, "slow"])
def test_a_progress_thread_serves_reads_of_a_side_that_never_calls(progress_thread):
    """Both ends in this process, over TCP, where the side that is read has to send."""
    case = dense_case()
    there, here = allocated(case.producers, 1), allocated(case.consumers, 2)
    source = NixlTransport("p", NixlOptions(progress_thread=progress_thread, ucx=TCP))
    target = NixlTransport("d", NixlOptions(ucx=TCP))
    source.register(there[0].storages)
    target.register(here[0].storages)
    plan = make_plans([here[0].manifest], [there[0].manifest])[0]
    prepared = target.prepare(plan, 0, target.connect(source.metadata()))
    assert finish(target, target.read(prepared, Binder(plan).tiles(case.request))) is State.DONE
    target.close()
    source.close()


def test_nothing_of_nixls_runs_beside_the_engine_by_default(monkeypatch):
    """No progress thread; threads that post only where there are cores for them."""
    transport = NixlTransport("d")
    assert not transport.progresses
    transport.close()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    assert NixlOptions().parameters == {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert NixlOptions().parameters["num_threads"] == "4"
    assert NixlOptions(posting_threads=0).parameters == {}
    assert NixlOptions("LIBFABRIC").parameters == {}
    assert NixlOptions(posting_threads=2, backend_parameters={"num_threads": "3"}).parameters["num_threads"] == "3"


def test_a_nixl_without_a_slow_thread_goes_on_without_one(monkeypatch, caplog):
    bind = library().api.nixlBind
    monkeypatch.setattr(bind, "nixlAgentConfig", lambda make=bind.nixlAgentConfig: Blind(make()))
    agent = SimpleNamespace(agent=bind.nixlAgent.__new__(bind.nixlAgent), backends={})
    with caplog.at_level(logging.WARNING, logger="kvferry.transport"):
        assert not slowed_down(agent, "d", bind.NIXL_THREAD_SYNC_NONE, bind)
    assert "no slow progress thread (its configuration has no pthrDelay)" in caplog.text


class Blind:
    """A configuration that does not know the delay."""

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, name: str) -> object:
        if name == "pthrDelay":
            raise AttributeError(name)
        return getattr(self._config, name)


def test_a_closed_transport_says_so_and_closes_again():
    transport = NixlTransport("d", NixlOptions(progress_thread=False))
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="was closed"):
        transport.metadata()


def test_a_transport_that_is_given_its_own_metadata_reads_its_own_memory():
    words = Words(8, Identity("engine", "1", "model"))
    transport = NixlTransport("alone", NixlOptions(progress_thread=False))
    transport.register([words.storage])
    words.live(Lease(3, 77))
    plan = words.plan(words.manifest)
    for landing in (5, 6):
        name = transport.connect(transport.metadata())
        read = transport.read(transport.prepare(plan, 0, name), Binder(plan).tiles(Request(1, {0: 3}, {0: landing})))
        assert finish(transport, read) is State.DONE
        assert words.landed(landing) == 77
        assert transport.release(read)
        transport.forget(name)
    transport.connect(transport.metadata())
    transport.close()


def test_a_backend_that_is_not_there_is_refused_by_name():
    with pytest.raises(TransportError, match="NIXL has no backend CARRIER_PIGEON here"):
        NixlTransport("d", NixlOptions("CARRIER_PIGEON"))


def test_without_nixl_the_way_to_install_it_is_named(monkeypatch):
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransportError, match="kvferry\\[nixl\\]"):
        NixlTransport("d")


class TestANixlWithoutStridedLists:
    """Releases 1.3 and 1.4; `test_transport_contract.py` holds the contract to it."""

    def test_is_known_by_what_it_takes(self, monkeypatch):
        bind = library().api.nixlBind
        monkeypatch.setattr(bind, "nixlAgent", SimpleNamespace(prepXferDlist=prepared_by_elements))
        assert not library().strided

    def test_is_said_once_by_each_transport(self, caplog):
        with caplog.at_level(logging.INFO, logger="kvferry.transport"), without_strides():
            NixlTransport("d", NixlOptions(progress_thread=False)).close()
        assert [record.getMessage().partition(": ")[2] for record in caplog.records if NO_STRIDES in record.getMessage()] == [
            NO_STRIDES
        ]

    def test_holds_every_element_of_every_row(self):
        rows = Rows(*map(np.array, ([0, 1], [0, 8], [4, 8], [16, 8], [3, 2])), elements=5)
        placed = Placed(np.array([1000, 2008]), np.array([0, 1]), "dram")
        assert dense(rows, placed, "peer p").tolist() == [
            [1000, 4, 0],
            [1016, 4, 0],
            [1032, 4, 0],
            [2008, 8, 1],
            [2016, 8, 1],
        ]

    def test_refuses_lists_that_memory_should_not_hold(self):
        rows = Rows(*map(np.array, ([0], [0], [1], [1], [MAX_DENSE + 1])), elements=MAX_DENSE + 1)
        with pytest.raises(TransportError, match=r"^peer p: .*would hold 16,777,217 descriptors.*install NIXL 1\.5"):
            dense(rows, Placed(np.array([0]), np.array([0]), "dram"), "peer p")


def prepared_by_elements() -> None:
    """prepXferDlist(self: nixlAgent, agent_name: str, descs: nixlXferDList, backend: Sequence = []) -> int"""


def test_nixl_is_found_under_every_name_it_is_installed_as(monkeypatch):
    api = library().api
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "nixl", type(sys)("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    assert library().api is api


def test_settings_are_in_the_environment_for_a_moment_and_never_over_the_operators(monkeypatch, caplog):
    monkeypatch.setenv("UCX_PROTO_INFO", "n")
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = dict(os.environ)
    with caplog.at_level(logging.INFO, logger="kvferry.transport"), ucx.environment({"UCX_TLS": "tcp"}):
        assert os.environ["UCX_TLS"] == "tcp"
        assert os.environ["UCX_PROTO_INFO"] == "n"
    assert dict(os.environ) == before
    assert "UCX_PROTO_INFO=n comes from the environment and stays" in caplog.text


def test_every_setting_has_a_reason():
    assert all(len(setting.reason) > 20 for setting in ucx.SETTINGS)


TABLE = """\
[1.2] [host:1:0]   +---------+-------------+--------+
[1.2] [host:1:0]   | {worker} {near} cfg#2             |
[1.2] [host:1:0]   | {operation} |
[1.2] [host:1:0]   +---------+-------------+--------+
[1.2] [host:1:0]   |  Range  | Description | Config |
[1.2] [host:1:0]   +---------+-------------+--------+
[1.2] [host:1:0]   | 0..8184 | short       | tcp/lo |
[1.2] [host:1:0]   | 8185..inf | {way} |
[1.2] [host:1:0]   +---------+-------------+--------+
"""
GET = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda"


def log_of(*tables: str) -> ucx.Log:
    log = ucx.Log()
    log.file.write_text("".join(tables))
    return log


@pytest.mark.parametrize(
    ("way", "path", "slow"),
    [
        ("zero-copy | cuda_ipc/cuda", "CUDA IPC (zero-copy, cuda_ipc/cuda)", False),
        ("zero-copy | rc_mlx5/mlx5_0:1/path0", "RDMA (zero-copy, rc_mlx5/mlx5_0:1/path0)", False),
        ("zero-copy | cma/memory", "shared memory (zero-copy, cma/memory)", False),
        ("software emulation | tcp/eth0", "emulation over TCP (software emulation, tcp/eth0)", True),
        ("software emulation | rc_mlx5/mlx5_0:1", "emulation (software emulation, rc_mlx5/mlx5_0:1)", True),
        ("zero-copy | tcp/eth0", "TCP (zero-copy, tcp/eth0)", True),
        ("copy-out | unheard_of/0", "copy-out, unheard_of/0 (copy-out, unheard_of/0)", False),
    ],
)
def test_ucx_tables_become_paths(way, path, slow):
    log = log_of(TABLE.format(worker="d#1", near="inter-node", operation=GET, way=way))
    found = ucx.classify(log.reads("d#1", "inter-node"))
    assert (found.name, found.slow) == (path, slow)
    assert bool(found.remedy) == slow
    assert log.reads("d#1", "intra-node") == log.reads("d#2", "inter-node") == []
    log.file.unlink()


@pytest.mark.parametrize(
    ("here", "used", "path"), [(True, True, "emulation over TCP"), (True, False, ""), (False, True, "emulation over TCP")]
)
def test_a_peer_of_this_machine_that_is_read_over_tcp_has_a_path_once_it_was_read(here, used, path):
    """UCX calls it inter-node if no shared memory leads to it, as between network namespaces."""
    log = log_of(TABLE.format(worker="d#1", near="inter-node", operation=GET, way="software emulation | tcp/eth0"))
    assert [ucx.classify([way]).name.partition(" (")[0] for way in log.ways("d#1", here, used)] == [path] * bool(path)
    log.file.unlink()


def test_a_peer_that_shares_memory_has_no_path_of_a_peer_elsewhere():
    elsewhere = TABLE.format(worker="d#1", near="inter-node", operation=GET, way="software emulation | tcp/eth0")
    here = TABLE.format(worker="d#1", near="intra-node", operation=GET, way="zero-copy | cma/memory")
    log = log_of(elsewhere, here)
    assert log.ways("d#1", True, True) == ["zero-copy, cma/memory"]
    assert log.ways("d#1", False, True) == ["software emulation, tcp/eth0"]
    log.file.unlink()


def test_several_kinds_of_connections_are_all_named_and_the_slow_one_decides():
    one = TABLE.format(worker="d#1", near="inter-node", operation=GET, way="zero-copy | rc_mlx5/a")
    other = TABLE.format(worker="d#1", near="inter-node", operation=GET, way="software emulation | tcp/b")
    put = TABLE.format(worker="d#1", near="inter-node", operation="remote memory write by ucp_put*", way="zero-copy | x/y")
    log = log_of(one, other, put)
    found = ucx.classify(log.reads("d#1", "inter-node"))
    assert found.name == "RDMA (zero-copy, rc_mlx5/a) or emulation over TCP (software emulation, tcp/b)"
    assert found.slow
    log.file.unlink()


def test_a_read_that_ucx_has_no_way_for_is_no_way():
    none = TABLE.format(worker="d#1", near="intra-node", operation=GET, way="a | b").replace("a | b", "no protocol")
    log = log_of(none, "[1.2] [host:1:0]  select.c:9 UCX  ERROR cannot find remote protocol\n")
    assert log.drain() == "cannot find remote protocol"
    assert log.reads("d#1", "intra-node") == []
    log.file.unlink()


def test_tables_whose_title_and_operation_share_a_row_are_read_too():
    """As UCX writes them in NIXL 1.3, one behind the other, without heads of columns."""
    title = "d#1 intra-node cfg#1"
    heads, ways = (f"{title} | {GET}", f"{title} | active message"), ("zero-copy | cma/memory", "copy-in | tcp/b")
    rule = "+-----+-----+-----+"
    lines = [
        line
        for head, way in zip(heads, ways, strict=True)
        for line in (rule, f"| {head} |", rule, "| 0..8184 | short | tcp/lo |", f"| 8185..inf | {way} |", rule)
    ]
    log = log_of("".join(f"[1.2] [host:1:0]   {line}\n" for line in lines))
    assert log.reads("d#1", "intra-node") == ["zero-copy, cma/memory"]
    log.file.unlink()


def test_reads_of_a_nixl_that_names_no_worker_are_those_of_its_process():
    """Releases 1.3 and 1.4."""
    near, other = (
        TABLE.format(worker=f"ucp_context_{number}", near=near, operation=GET, way=way)
        for number, (near, way) in enumerate([("intra-node", "zero-copy | cma/memory"), ("inter-node", "zero-copy | tcp/b")])
    )
    log = log_of(near, other)
    assert log.reads("d#1", "intra-node") == ["zero-copy, cma/memory"]
    assert log.reads("d#1", "inter-node") == ["zero-copy, tcp/b"]
    log.file.unlink()


def test_ucx_complaints_reach_logging(caplog):
    log = log_of("[1.2] [host:1:0]  tcp_ep.c:9 UCX  ERROR the wire is wet\n")
    assert log.drain() == "the wire is wet"
    assert "the wire is wet" in caplog.text
    assert log.drain() == ""
    log.file.unlink()


def test_nothing_known_is_an_unknown_path():
    assert ucx.classify([]) == Path("unknown")


NO_BACKEND_FIRST = """
from kvferry.errors import TransportError
from kvferry.manifest import Identity
from kvferry.plan import Binder, Request, make_plans
from kvferry.session import Lease, Words
from kvferry.transport import NixlOptions, NixlTransport, ucx
from transport_peer import PeerProcess, allocated
from transport_suite import NixlWharf, crossing, dense_case, finish, start

with ucx.environment({}):
    unused = ucx.ucx_log().file
assert not unused.exists()
try:
    NixlTransport("d", NixlOptions("CARRIER_PIGEON"))
except TransportError:
    assert ucx.ucx_log() is None
wharf = NixlWharf(PeerProcess(), {"UCX_TLS": "tcp"})
made = crossing(wharf, dense_case())
transport = wharf.consumer()
transport.register(made.here[0].storages)
read = start(transport, made, made.plans[0], 0)
finish(transport, read)
print(transport.path(read.peer).name)
wharf.close()
wharf.peer.close()
"""


def test_ucx_writes_to_our_log_also_where_the_first_backend_did_not_come_about():
    done = subprocess.run(
        [sys.executable, "-c", NO_BACKEND_FIRST],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "emulation over TCP (software emulation, tcp/lo)\n"


def test_no_log_file_is_left_behind():
    transport = NixlTransport("d", NixlOptions(progress_thread=False))
    log = ucx.ucx_log()
    assert log is not None
    assert not File(log.file).exists()
    transport.close()
