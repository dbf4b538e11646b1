"""Loads out of mapped memory, caches and words alike: what arrives, what is refused, and what a producer's death does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from kvferry.session import PeerKey, Release, Welcome, meet
from kvferry.strategy import HostMover, SharedBytes, Ticket
from kvferry.strategy.mapped import LOOK_S
from kvferry.strategy.moves import Bound
from kvferry.strided import Ints
from session_dock import Dock, berths, case, dock
from test_session_ferry import ENOUGH, PAIRS, errors

Made = Callable[..., Dock]


def killed(made: Dock) -> None:
    """The producer's process is killed, as far as anybody can tell: its names stay, its locks and its connections do not."""
    for berth in made.berths:
        made.harbour.kill(berth.transport.name)
        for memory in berth.memories:
            memory.disown()


@pytest.fixture
def docks() -> Iterator[Made]:
    held: list[Dock] = []

    def make(*arguments: object, **named: object) -> Dock:
        held.append(dock(case(*arguments), mapped=True, **named))  # type: ignore[arg-type]
        return held[-1]

    yield make
    for made in held:
        killed(made)
    SharedBytes(1).close()


def over_the_transport(made: Dock) -> int:
    """Reads that descriptors carried."""
    return sum(end._started for end in made.ends)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("tp_p", "tp_d"), PAIRS)
@pytest.mark.parametrize(("tokens", "start"), [(21, 0), (21, 8)])
def test_every_byte_arrives_and_none_by_descriptors(docks, hybrid, tp_p, tp_d, tokens, start):
    made = docks(hybrid, tp_p, tp_d, tokens, start)
    made.hand_in(made.load(made.lease()))
    outcomes = made.step(ENOUGH)
    assert errors(outcomes) == [""] * tp_d
    assert made.differing() == []
    assert [o.moved for o in outcomes] == [made.world.expected[rank].moved for rank in made.world.consumers]
    assert all(o.moved == o.predicted > 0 and o.runs > 0 for o in outcomes)
    assert over_the_transport(made) == 0
    assert made.free_landings == [8] * tp_d


class LateMover(HostMover):
    """Its copies are made at once, and seen to be only when they have been asked after `LATE` times."""

    LATE = 2

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def start(self, prepared: Ints, bound: Bound) -> Ticket:
        self.started += 1
        return Late(super().start(prepared, bound).moved, self.LATE)


@dataclass
class Late:
    moved: int
    left: int
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("ending", ["released", "expired"])
@pytest.mark.parametrize("by", ["the ferry's thread", "the engine's thread"])
@pytest.mark.parametrize("looks", range(6))
def test_blocks_that_are_given_away_while_a_load_is_under_way_fail_it_unless_its_words_were_read(
    docks, looks, by, ending, hybrid
):
    made_movers: list[LateMover] = []

    def mover() -> LateMover:
        made_movers.append(LateMover())
        return made_movers[-1]

    made = docks(hybrid, 2, 1, mover=mover)
    made.step(ENOUGH)
    (ferry,), (found,) = made.ferries, made_movers
    lease, before, said = made.lease(), found.started, []
    ferry.load(made.load(lease))
    assert found.started == before + 2
    for _ in range(looks):
        said += made.step() if by == "the ferry's thread" else ferry.outcomes()
    words_read = found.started == before + 4
    if ending == "released":
        made.producer.receive(Release("1", lease, "another"), made.clock.now)
    else:
        made.producer.expire(made.clock.now + 60)
    made.turn()
    for berth in made.berths:
        for memory in berth.memories[:-1]:
            memory.bytes[:] = ~memory.bytes
    (error,) = errors(said + made.step(ENOUGH))
    assert words_read or looks < 2
    assert looks or not words_read
    if words_read:
        assert error == ""
        assert made.differing() == []
    else:
        assert "has given the blocks of the reference away" in error
    assert over_the_transport(made) == 0


def test_a_load_is_begun_and_ended_by_the_thread_that_asks_for_it(docks):
    made = docks(True, 2, 1)
    made.step(ENOUGH)
    (ferry,) = made.ferries
    ferry.load(made.load(made.lease()))
    assert errors(ferry.outcomes()) == [""]
    assert made.differing() == []


def test_a_load_that_comes_while_the_ferrys_thread_is_at_it_is_left_to_it(docks):
    made = docks(True, 2, 1)
    made.step(ENOUGH)
    (ferry,) = made.ferries
    with ferry._turn:
        ferry.load(made.load(made.lease()))
        assert ferry.outcomes() == []
    assert errors(made.step(ENOUGH)) == [""]
    assert made.differing() == []


def test_what_goes_wrong_under_the_engines_thread_is_cleared_up_by_the_ferrys(docks):
    made = docks(True, 2, 1)
    made.step(ENOUGH)
    (ferry,), lease = made.ferries, made.lease()
    made.berths[1].words.kill(lease)
    ferry._wake.wait(0)
    ferry.load(made.load(lease))
    assert ferry.outcomes() == []
    assert ferry._wake.wait(0)
    assert "given the blocks" in errors(made.step(ENOUGH))[0]
    assert made.free_landings == [8]


def test_a_reference_that_is_replayed_after_its_slot_was_reused_fails(docks):
    made = docks(False, 1, 2, slots=1)
    lease = made.lease()
    made.hand_in(made.load(lease))
    assert errors(made.step(ENOUGH)) == ["", ""]
    made.producer.receive(Release("1", lease, "reader"), made.clock.now)
    made.turn()
    other = made.lease("other")
    assert other.slot == lease.slot
    made.hand_in(made.load(lease, "replayed"))
    assert all("for a second time" in error for error in errors(made.step(ENOUGH)))
    made.hand_in(made.load(other, "other"))
    assert errors(made.step(ENOUGH)) == ["", ""]


@pytest.mark.parametrize("looks", [False, True])
def test_loads_from_a_producer_that_has_ended_say_so_and_its_next_start_is_read(docks, looks):
    made = docks(True, 2, 1)
    lease = made.lease()
    made.hand_in(made.load(lease, "a"))
    assert errors(made.step(ENOUGH)) == [""]
    killed(made)
    if looks:
        made.clock.now += LOOK_S
        assert made.step() == []
    for name, said in (("b", "is gone: its process has ended"), ("c", "is gone or out of reach")):
        made.hand_in(made.load(lease, name))
        assert [said in error for error in errors(made.step(ENOUGH))] == [True]
    peer = restart(made, "2")
    made.hand_in(made.load(made.lease("d"), "d", peer=peer))
    assert errors(made.step(ENOUGH)) == [""]
    assert made.differing() == []
    assert over_the_transport(made) == 0


def restart(made: Dock, incarnation: str) -> PeerKey:
    """The producer's memory under a new start, met by every ferry."""
    manifests = [replace(b.manifest, identity=replace(b.manifest.identity, incarnation=incarnation)) for b in made.berths]
    made.berths = berths(made.world, manifests, made.harbour, 8, mapped=True)
    peer = PeerKey(made.peer.address, "P", incarnation)
    welcome = Welcome("P", incarnation, 60.0, tuple(b.card for b in made.berths))
    for ferry in made.ferries:
        ferry.meet(meet(peer, welcome, made.consumers))
    return peer


def test_a_forgotten_producer_leaves_nothing_mapped_and_can_be_met_again(docks):
    made = docks(True, 2, 1)
    made.hand_in(made.load(made.lease("a"), "a"))
    assert errors(made.step(ENOUGH)) == [""]
    made.ferries[0].forget(made.peer)
    made.step()
    mapped = made.ferries[0]._transport._mapped  # type: ignore[attr-defined]
    assert not mapped._peers
    assert not mapped._leaving
    made.ferries[0].meet(made.meeting)
    made.hand_in(made.load(made.lease("b"), "b"))
    assert errors(made.step(ENOUGH)) == [""]
