"""The contract, held by all that carry: NIXL, mapped memory and staging between two real processes, plain memory inside one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import msgspec
import pytest

from kvferry.errors import TransportError
from kvferry.plan import Binder, Request
from kvferry.strategy.scattered import Scattered
from kvferry.transport import State, Transport
from kvferry.transport.metadata import open_metadata
from transport_peer import PeerProcess
from transport_suite import (
    TCP,
    TIMEOUT_S,
    Crossing,
    DenseWharf,
    InProcessWharf,
    MappedWharf,
    NixlWharf,
    RingWharf,
    ScatteredWharf,
    StagedWharf,
    Wharf,
    crossing,
    dense_case,
    finish,
    heard_so_far,
    model_case,
    start,
    turned_case,
    until,
)

PAIRS = [
    ("tp=1", "tp=1"),
    ("tp=2", "tp=1"),
    ("tp=1", "tp=2"),
    ("tp=2", "tp=3"),
    ("tp=4", "tp=6"),
    ("tp=12", "tp=4"),
    ("pp=2", "pp=3"),
    ("tp=2,pp=2", "tp=3"),
    ("tp=3", "tp=2,pp=2"),
    ("tp=1,layout=token", "tp=2"),
    ("tp=2,conv=sd", "tp=4"),
    ("tp=1,pool=block", "tp=2,kv=separate"),
    ("tp=2,spec=3", "tp=2"),
]


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    peer = PeerProcess()
    yield peer
    peer.close()


BETWEEN = {
    "nixl": NixlWharf,
    "nixl, dense lists": DenseWharf,
    "mapped": MappedWharf,
    "packed": ScatteredWharf,
    "packed, ring mapped": RingWharf,
    "staged": StagedWharf,
}


@pytest.fixture(params=["in-process", *BETWEEN])
def wharf(request: pytest.FixtureRequest) -> Iterator[Wharf]:
    yield from opened(request)


@pytest.fixture(params=["in-process", "nixl", "nixl, dense lists", "mapped"])
def counted(request: pytest.FixtureRequest) -> Iterator[Wharf]:
    """A wharf whose runs are the plan's."""
    yield from opened(request)


def opened(request: pytest.FixtureRequest) -> Iterator[Wharf]:
    made: Wharf = InProcessWharf()
    if request.param != "in-process":
        made = BETWEEN[request.param](request.getfixturevalue("process"))
    yield made
    made.close()


@pytest.fixture(params=["in-process", "nixl"])
def breakable(request: pytest.FixtureRequest) -> Iterator[Wharf]:
    """A wharf whose producers may be stopped and killed, over a path that needs their help; mapped memory does not."""
    if request.param == "in-process":
        yield InProcessWharf()
        return
    made = NixlWharf(PeerProcess(), TCP)
    yield made
    made.close()
    made.peer.close()


def reader(wharf: Wharf, made: Crossing, **options: float) -> Transport:
    out = wharf.consumer(**options)  # type: ignore[arg-type]
    out.register([s for rank in made.here for s in rank.storages])
    return out


def assert_forced(wharf: Wharf, transport: Transport) -> None:
    """A strategy that cannot be had is replaced by descriptors, which would be right too."""
    if isinstance(wharf, ScatteredWharf) and isinstance(transport, Scattered):
        assert set(transport.carried) == {wharf.way}


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_layer_kind_arrives_byte_for_byte(wharf, prefill, decode):
    made = crossing(wharf, model_case("synthetic-12", prefill, decode))
    transport = reader(wharf, made)
    reads = [start(transport, made, plan, i) for plan in made.plans for i in range(len(plan.sources))]
    assert [finish(transport, read) for read in reads] == [State.DONE] * len(reads)
    assert made.differing() == 0
    moved = sum(Binder(plan).bind(made.case.request).bytes for plan in made.plans)
    assert sum(transport.telemetry(read).bytes for read in reads) == moved
    assert all(transport.release(read) for read in reads)
    assert_forced(wharf, transport)


def test_tiles_whose_bytes_lie_between_each_other_arrive(wharf):
    made = crossing(wharf, turned_case())
    transport = reader(wharf, made)
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    assert made.differing() == 0
    assert_forced(wharf, transport)


def test_a_read_that_is_done_may_be_asked_after_and_let_go_of_again(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    for _ in range(2):
        assert transport.release(read)
        assert transport.poll(read) is State.DONE
    other = start(transport, made, made.plans[0], 0)
    assert finish(transport, other) is State.DONE
    assert transport.release(other)
    assert made.differing() == 0


def test_the_notification_arrives_once_and_after_the_bytes(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    read = start(transport, made, made.plans[0], 0, b"done 7")
    early = [message for _, _, message in wharf.heard()]
    assert not early or not made.differing()
    assert finish(transport, read) is State.DONE
    assert made.differing() == 0
    assert early + heard_so_far(wharf, transport, read.peer) == [b"done 7"]


def test_a_read_of_nothing_is_done_and_notifies(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    plan = made.plans[0]
    prepared = transport.prepare(plan, 0, transport.connect(made.metadata[0]))
    read = transport.read(prepared, Binder(plan).tiles(Request(0, {}, {})), b"none")
    assert finish(transport, read) is State.DONE
    until(lambda: [(sender, m) for _, sender, m in wharf.heard()] == [(transport.name, b"none")], "the notification")
    assert transport.telemetry(read).bytes == 0
    assert transport.release(read)


def test_both_ends_can_notify_without_a_read(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    transport.notify(transport.connect(made.metadata[0]), b"ahoy")
    until(lambda: [m for _, _, m in wharf.heard()] == [b"ahoy"], "the notification")
    wharf.notify_back(0, wharf.connect_back(0, transport.metadata()), b"ahoy yourself")
    heard: list[tuple[str, bytes]] = []

    def arrived() -> bool:
        heard.extend(transport.notifications())
        return bool(heard)

    until(arrived, "the answer")
    assert [message for _, message in heard] == [b"ahoy yourself"]


def test_consecutive_blocks_of_whole_pages_become_one_run_per_region(counted):
    made = crossing(counted, dense_case(layers=3))
    transport = reader(counted, made)
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    assert transport.telemetry(read).runs == (3 if counted.merges else 3 * 8)


def test_descending_blocks_of_whole_pages_become_one_run_per_region(counted):
    """As vLLM hands out blocks that it was given back."""
    case = dense_case(layers=3)
    down = list(range(16))[::-1]
    made = crossing(counted, replace(case, request=Request(16 * 16, {0: down}, {0: down})))
    transport = reader(counted, made)
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    assert transport.telemetry(read).runs == (3 if counted.merges else 3 * 16)
    assert made.differing() == 0


def test_scattered_blocks_are_a_run_each(counted):
    made = crossing(counted, dense_case(layers=3, blocks=16, scattered=True))
    transport = reader(counted, made)
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    assert transport.telemetry(read).runs == 3 * 8
    assert made.differing() == 0


def test_several_reads_from_one_peer_run_side_by_side(wharf):
    made = crossing(wharf, dense_case(scattered=True))
    transport = reader(wharf, made, window=4)
    plan = made.plans[0]
    prepared = transport.prepare(plan, 0, transport.connect(made.metadata[0]))
    tiles = Binder(plan).tiles(made.case.request)
    reads = [transport.read(prepared, tiles, b"%d" % i) for i in range(5)]
    assert finish(transport, reads[-1]) is State.DONE
    assert [finish(transport, read) for read in reads] == [State.DONE] * 5
    heard: set[bytes] = set()

    def arrived() -> bool:
        heard.update(m for _, _, m in wharf.heard())
        return len(heard) == 5

    until(arrived, "all notifications")


def test_telemetry_is_of_a_read_that_is_done(breakable):
    made = crossing(breakable, dense_case())
    transport = reader(breakable, made)
    breakable.stop()
    read = start(transport, made, made.plans[0], 0)
    with pytest.raises(TransportError, match="running"):
        transport.telemetry(read)
    breakable.resume()
    assert finish(transport, read) is State.DONE


def test_a_stopped_peer_fails_the_read_and_holds_its_destination(breakable):
    made = crossing(breakable, dense_case(blocks=256))
    transport = reader(breakable, made, timeout_s=TIMEOUT_S)
    breakable.stop()
    read = start(transport, made, made.plans[0], 0, b"never")
    assert finish(transport, read) is State.FAILED
    assert read.peer in read.error
    assert f"nothing arrived for {TIMEOUT_S:g} s" in read.error
    assert not transport.release(read)
    assert made.differing()
    breakable.resume()
    until(lambda: transport.release(read), "the release")
    for rank in made.here:
        for buffer in rank.buffers:
            buffer[:] = 0
    assert heard_so_far(breakable, transport, read.peer) == []
    assert not any(buffer.any() for rank in made.here for buffer in rank.buffers)


def test_after_a_timeout_the_same_peer_can_be_read_again(breakable):
    made = crossing(breakable, dense_case(blocks=256))
    transport = reader(breakable, made, timeout_s=TIMEOUT_S)
    breakable.stop()
    lost = start(transport, made, made.plans[0], 0)
    assert finish(transport, lost) is State.FAILED
    transport.forget(lost.peer)
    assert not transport.release(lost)
    breakable.resume()
    until(lambda: transport.release(lost), "the release")
    read = start(transport, made, made.plans[0], 0)
    assert finish(transport, read) is State.DONE
    assert made.differing() == 0


def test_a_peer_that_dies_in_the_middle_fails_its_read_and_the_next_peer_works(breakable):
    made = crossing(breakable, dense_case(blocks=256))
    transport = reader(breakable, made, timeout_s=TIMEOUT_S)
    breakable.stop()
    read = start(transport, made, made.plans[0], 0, b"never")
    assert transport.poll(read) is State.RUNNING
    breakable.kill()
    assert finish(transport, read) is State.FAILED
    assert read.peer in read.error
    until(lambda: transport.release(read), "the release")
    transport.forget(read.peer)
    breakable.restart()
    other = crossing(breakable, dense_case())
    transport.register([s for rank in other.here for s in rank.storages])
    assert finish(transport, start(transport, other, other.plans[0], 0)) is State.DONE
    assert other.differing() == 0


def test_a_read_given_up_sends_no_notification(breakable):
    made = crossing(breakable, dense_case(blocks=256))
    transport = reader(breakable, made)
    breakable.stop()
    read = start(transport, made, made.plans[0], 0, b"never")
    assert not transport.release(read)
    assert transport.poll(read) is State.FAILED
    breakable.resume()
    until(lambda: transport.release(read), "the release")
    assert heard_so_far(breakable, transport, read.peer) == []


def test_closing_ends_what_is_under_way(breakable):
    made = crossing(breakable, dense_case(blocks=256))
    transport = reader(breakable, made)
    breakable.stop()
    read = start(transport, made, made.plans[0], 0)
    transport.close()
    assert transport.release(read)
    for rank in made.here:
        for buffer in rank.buffers:
            buffer[:] = 0
    breakable.resume()
    breakable.heard()
    assert not any(buffer.any() for rank in made.here for buffer in rank.buffers)


def test_memory_not_registered_here_is_refused(wharf):
    made = crossing(wharf, dense_case())
    transport = wharf.consumer()
    transport.register(made.here[0].storages[1:])
    peer = transport.connect(made.metadata[0])
    with pytest.raises(TransportError, match=r"region slot0\.0 .* lies in no registered storage"):
        transport.prepare(made.plans[0], 0, peer)


def test_memory_not_registered_there_is_refused(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    peer = transport.connect(made.metadata[0])
    plan = made.plans[0]
    moved = [msgspec.structs.replace(r, address=r.address + (1 << 20)) for r in plan.sources[0].regions]
    side = msgspec.structs.replace(plan.sources[0], regions=tuple(moved))
    with pytest.raises(TransportError, match=f"peer {peer}: region .* lies in no registered storage"):
        transport.prepare(msgspec.structs.replace(plan, sources=(side,)), 0, peer)


def test_mixed_kinds_of_memory_are_refused(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    peer = transport.connect(made.metadata[0])
    plan = made.plans[0]
    regions = tuple(msgspec.structs.replace(r, memory="vram" if i else "dram") for i, r in enumerate(plan.consumer.regions))
    changed = msgspec.structs.replace(plan, consumer=msgspec.structs.replace(plan.consumer, regions=regions))
    mixed = f"{transport.name}: one read cannot touch several kinds of memory .region .* in dram, region .* in vram"
    with pytest.raises(TransportError, match=mixed):
        transport.prepare(changed, 0, peer)


@pytest.mark.parametrize("spoil", [lambda m: b"", lambda m: b"garbage" * 20, lambda m: m[:-9], lambda m: b"\xc1" * 99])
def test_garbage_is_no_metadata(wharf, spoil):
    made = crossing(wharf, dense_case())
    with pytest.raises(TransportError):
        reader(wharf, made).connect(spoil(made.metadata[0]))


def test_damaged_metadata_is_refused_wherever_the_damage_is_unless_it_says_the_same(wharf):
    """Names of fields that were left at their defaults may be damaged: a field that is not known is no field."""
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    data = made.metadata[0]
    for at, bit in product(range(len(data)), (1, 0x80)):
        damaged = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        try:
            found = open_metadata(damaged)
        except TransportError:
            with pytest.raises(TransportError):
                transport.connect(damaged)
        else:
            assert found == open_metadata(data)
    assert finish(transport, start(transport, made, made.plans[0], 0)) is State.DONE


def test_metadata_of_another_kind_of_transport_is_refused(process):
    nixl, plain = NixlWharf(process), InProcessWharf()
    made = crossing(plain, dense_case())
    with pytest.raises(TransportError, match="use the same transport on both"):
        nixl.consumer().connect(made.metadata[0])
    nixl.close()


def test_connecting_twice_is_connecting_once(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    assert transport.connect(made.metadata[0]) == transport.connect(made.metadata[0])


def test_an_unknown_peer_is_refused(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    for call in (
        lambda: transport.prepare(made.plans[0], 0, "nobody"),
        lambda: transport.notify("nobody", b""),
        lambda: transport.path("nobody"),
    ):
        with pytest.raises(TransportError, match="peer nobody is not connected"):
            call()


def test_a_forgotten_peer_connects_again_and_its_plans_are_prepared_again(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    plan = made.plans[0]
    peer = transport.connect(made.metadata[0])
    old = transport.prepare(plan, 0, peer)
    tiles = Binder(plan).tiles(made.case.request)
    transport.forget(peer)
    transport.forget(peer)
    with pytest.raises(TransportError, match="not connected"):
        transport.read(old, tiles)
    assert transport.connect(made.metadata[0]) == peer
    with pytest.raises(TransportError, match="prepare it again"):
        transport.read(old, tiles)
    assert finish(transport, transport.read(transport.prepare(plan, 0, peer), tiles)) is State.DONE
    assert made.differing() == 0


def test_what_another_transport_made_is_refused(wharf, process):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    read = start(transport, made, made.plans[0], 0)
    finish(transport, read)
    foreign = NixlWharf(process) if isinstance(wharf, InProcessWharf) else InProcessWharf()
    other = foreign.consumer()
    with pytest.raises(TransportError, match="another transport"):
        other.poll(read)
    other.close()


def test_the_path_has_a_name_after_the_first_read(wharf):
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made)
    read = start(transport, made, made.plans[0], 0)
    finish(transport, read)
    assert transport.path(read.peer).name.split(" (")[0] == wharf.path


def test_importing_the_transports_does_not_import_nixl():
    code = "import sys, kvferry.transport; sys.exit(any(n.partition('.')[0].startswith('nixl') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
