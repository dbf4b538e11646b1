"""Memory of another process, mapped: the process is stopped, killed and started anew, and says what is not so of its memory."""

from __future__ import annotations

import gc
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.plan import Binder, Fleet, make_plans
from kvferry.strategy import HostMover, Mapped, SharedBytes, Strategies
from kvferry.strategy.choose import CARRIER
from kvferry.strategy.mapped import LOOK_S
from kvferry.strategy.shared import FOLDER
from kvferry.transport import Harbour, InProcessTransport, NixlOptions, NixlTransport, State
from kvferry.transport.metadata import Metadata, decode_metadata, encode_metadata
from transport_peer import PeerProcess, allocated, shared
from transport_suite import Crossing, MappedWharf, crossing, dense_case, finish, model_case, start

SLOW = settings(max_examples=60)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wharf() -> Iterator[MappedWharf]:
    made = MappedWharf(PeerProcess())
    yield made
    made.close()
    made.peer.close()


def reader(wharf: MappedWharf, made: Crossing, clock: Clock) -> Strategies:
    """A consumer whose looks at its peers are the test's to time."""
    out = Strategies(NixlTransport("d", NixlOptions(progress_thread=False)), Mapped([HostMover()], clock))
    out.register([s for rank in made.here for s in rank.storages])
    return out


def mapped_files() -> set[str]:
    """Shared memory that this process has mapped, and somebody still uses: what earlier tests left may go at any time."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        return {line.split()[-1] for line in file if f"{FOLDER}/kvferry-" in line}


def test_a_stopped_producer_is_read_all_the_same(wharf):
    made = crossing(wharf, model_case("synthetic-12", "tp=2", "tp=3"))
    transport = reader(wharf, made, Clock())
    wharf.stop()
    reads = [start(transport, made, plan, i) for plan in made.plans for i in range(len(plan.sources))]
    assert [finish(transport, read) for read in reads] == [State.DONE] * len(reads)
    assert made.differing() == 0
    assert {transport.path(read.peer).name for read in reads} == {"mapped memory"}
    wharf.resume()
    transport.close()


def test_a_killed_producer_is_let_go_of_and_its_successor_is_read(wharf, caplog):
    before, clock = mapped_files(), Clock()
    made = crossing(wharf, dense_case())
    transport = reader(wharf, made, clock)
    plan, tiles = made.plans[0], Binder(made.plans[0]).tiles(made.case.request)
    prepared = transport.prepare(plan, 0, transport.connect(made.metadata[0]))
    assert finish(transport, transport.read(prepared, tiles)) is State.DONE
    wharf.kill()
    with pytest.raises(TransportError, match="is gone: its process has ended"):
        transport.read(prepared, tiles)
    assert mapped_files() != before
    clock.now = LOOK_S
    with caplog.at_level(logging.INFO, "kvferry.strategy"):
        transport.notifications()
    assert "has ended; its memory is no longer mapped here" in caplog.text
    assert mapped_files() == before
    wharf.restart()
    other = crossing(wharf, dense_case())
    transport.register([s for rank in other.here for s in rank.storages])
    read = start(transport, other, other.plans[0], 0, b"done")
    assert finish(transport, read) is State.DONE
    assert other.differing() == 0
    assert transport.path(read.peer).name == "mapped memory"
    transport.close()
    assert mapped_files() == before


@dataclass
class Told:
    """A consumer, and a producer in the same process that tells it of its memory."""

    transport: Strategies
    made: Crossing
    memory: SharedBytes
    source: Strategies

    @property
    def ways(self) -> tuple[bytes, list[list[Any]]]:
        direct, tokens = msgspec.msgpack.decode(decode_metadata(self.source.metadata(), CARRIER).blob)
        return direct, tokens

    def sealed(self, blob: bytes) -> bytes:
        envelope = decode_metadata(self.source.metadata(), CARRIER)
        return encode_metadata(msgspec.structs.replace(envelope, blob=blob))

    def path(self, tokens: Any) -> str:
        """How a peer that says this of its memory is read."""
        name = self.transport.connect(self.sealed(msgspec.msgpack.encode((self.ways[0], tokens))))
        path = self.transport.path(name).name
        self.transport.forget(name)
        return path


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    case, harbour = dense_case(), Harbour()
    rank, memory = shared(allocated(case.producers, 1)[0])
    mover = HostMover()
    mover.share(memory)
    source = Strategies(InProcessTransport("p", harbour), Mapped([mover]))
    source.register(rank.storages)
    here = allocated(case.consumers, 2)
    transport = Strategies(InProcessTransport("d", harbour), Mapped([HostMover()]))
    transport.register(here[0].storages)
    plans = make_plans([here[0].manifest], Fleet([rank.manifest]))
    yield Told(transport, Crossing(case, [rank], [], here, plans), memory, source)
    memory.close()


def test_what_is_so_is_mapped(told):
    assert told.path(told.ways[1]) == "mapped memory"


def other_memory(length: int) -> tuple[str, bytes, int, int]:
    """Of a process that has ended: its name is there, and no lock on it."""
    made = SharedBytes(length)
    made.disown()
    return made.name, made.nonce, length, 0


FORGED = {
    "a name elsewhere": lambda t: ("../../etc/passwd", *t[1:]),
    "another name": lambda t: (f"kvferry-{secrets.token_hex(16)}", *t[1:]),
    "another number": lambda t: (t[0], bytes(16), *t[2:]),
    "no number": lambda t: (t[0], b"", *t[2:]),
    "more than there is": lambda t: (*t[:2], t[2] + 1, t[3]),
    "less than there is": lambda t: (*t[:2], t[2] - 1, t[3]),
    "a place before the first": lambda t: (*t[:3], -1),
    "a place past the last": lambda t: (*t[:3], t[2]),
    "a place far off": lambda t: (*t[:3], (1 << 63) - 1),
    "text": lambda t: "kvferry",
    "nothing": lambda t: (),
    "too much": lambda t: (*t, 0),
    "numbers for names": lambda t: (1, 2, 3, 4),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_what_is_not_so_of_one_storage_is_read_by_descriptors(told, forge):
    before = mapped_files()
    tokens = told.ways[1]
    tokens[1][4] = msgspec.msgpack.encode(forge(msgspec.msgpack.decode(tokens[1][4])))
    assert told.path(tokens) == "plain memory"
    assert mapped_files() == before


def test_a_longer_storage_than_the_memory_behind_it_is_not_mapped(told):
    tokens = told.ways[1]
    for length in (told.memory.length + 1, 1 << 49):
        longer = [[*tokens[0][:1], length, *tokens[0][2:]], *tokens[1:]]
        assert told.path(longer) == "plain memory"


def test_memory_whose_owner_has_ended_is_nobodys(told, tmp_path, monkeypatch):
    """In a folder that no other process sweeps."""
    monkeypatch.setattr("kvferry.strategy.shared.FOLDER", tmp_path)
    ended = msgspec.msgpack.encode(other_memory(max(length for _, length, *_ in told.ways[1])))
    tokens = [[*token[:4], ended] for token in told.ways[1]]
    with pytest.raises(TransportError, match="is gone: its process has ended"):
        told.path(tokens)
    SharedBytes(8).close()
    assert told.path(tokens) == "plain memory"


def test_addresses_that_are_not_the_regions_lead_nowhere(told):
    """What a peer says of its addresses only finds its windows: none of them becomes an address here."""
    direct, tokens = told.ways
    moved = [[token[0] + 4096, *token[1:]] for token in tokens]
    name = told.transport.connect(told.sealed(msgspec.msgpack.encode((direct, moved))))
    prepared = told.transport.prepare(told.made.plans[0], 0, name)
    assert type(prepared).__name__ == "InProcessPrepared"
    told.transport.forget(name)


numbers = st.one_of(st.integers(-2, 70_000), st.integers(-(1 << 63), (1 << 64) - 1))
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), numbers, st.binary(max_size=70), st.text(max_size=40), st.sampled_from(["dram", "vram"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@SLOW
@given(data=st.data())
def test_whatever_is_said_of_storages_only_a_transport_error_comes_of_it(told, data):
    direct, tokens = told.ways
    which, place = data.draw(st.integers(0, len(tokens) - 1)), data.draw(st.integers(0, 5))
    if place < 5:
        tokens[which][place] = data.draw(values)
    else:
        inner = list(msgspec.msgpack.decode(tokens[which][4]))
        inner[data.draw(st.integers(0, 3))] = data.draw(values)
        tokens[which][4] = msgspec.msgpack.encode(inner)
    try:
        name = told.transport.connect(told.sealed(msgspec.msgpack.encode((direct, tokens))))
        told.transport.prepare(told.made.plans[0], 0, name)
    except TransportError:
        pass
    finally:
        told.transport.forget(told.source.name)


@SLOW
@given(blob=st.one_of(st.binary(max_size=200), values.map(msgspec.msgpack.encode)))
def test_whatever_an_intact_envelope_holds_only_a_transport_error_comes_of_it(told, blob):
    with pytest.raises(TransportError):
        told.transport.connect(told.sealed(blob))


def test_an_envelope_under_another_name_is_not_that_peer_to_the_transport(told):
    envelope = decode_metadata(told.source.metadata(), CARRIER)
    name = told.transport.connect(encode_metadata(Metadata(CARRIER, "another#1", envelope.host, (), envelope.blob)))
    with pytest.raises(TransportError, match="peer another#1 sends metadata of p#0"):
        told.transport.notify(name, b"ahoy")
    told.transport.forget(name)
