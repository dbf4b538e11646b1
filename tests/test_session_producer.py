"""A producer's leases against a model of plain lists and the words of two ranks, and what must never be seen of them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.errors import SessionError
from kvferry.session import Ending, FullError, Lease, Producer, Release, Renew
from kvferry.session.reference import MAX_GENERATION
from kvferry.session.words import DEAD

SLOTS, LEASE_S, RANKS = 3, 10.0, 2
OPEN, PUBLISHED, CLOSING, GONE = "open", "published", "closing", "gone"


@dataclass
class Told:
    """What the model knows of one lease."""

    request: str
    slot: int
    generation: int
    stage: str = OPEN
    deadline: float = 0.0
    ending: str = ""
    live: set[int] = field(default_factory=set)


def release(lease: Told, incarnation: str = "this", slot: int = 0, generation: int = 0) -> Release:
    return Release(incarnation, Lease(lease.slot + slot, lease.generation + generation), "reader")


class Leases(RuleBasedStateMachine):
    """The engine's steps are split in two: orders are taken, and each rank carries them out some time later."""

    @initialize()
    def start(self) -> None:
        self.producer = Producer("this", SLOTS, LEASE_S)
        self.now = 0.0
        self.told: list[Told] = []
        self.requests = 0
        self.orders: list[list[tuple[list[Told], list[Told]]]] = [[] for _ in range(RANKS)]
        self.words: list[dict[int, int]] = [dict.fromkeys(range(SLOTS), 0) for _ in range(RANKS)]
        self.unsaid_open: list[Told] = []
        self.unsaid_closing: list[Told] = []
        self.killed: dict[str, set[int]] = {}

    def of(self, *stages: str) -> list[Told]:
        return [t for t in self.told if t.stage in stages]

    def pick(self, data: st.DataObject, *stages: str) -> Told | None:
        found = self.of(*stages)
        return data.draw(st.sampled_from(found)) if found else None

    def end(self, lease: Told, ending: str) -> None:
        lease.ending = ending
        lease.stage = GONE if ending == "aborted" else CLOSING
        self.unsaid_closing.append(lease)
        if lease in self.unsaid_open:
            self.unsaid_open.remove(lease)

    @rule()
    def opens(self) -> None:
        request = f"r{self.requests}"
        self.requests += 1
        lease = self.producer.open(request)
        taken = {t.slot for t in self.of(OPEN, PUBLISHED, CLOSING)}
        if len(taken) == SLOTS:
            assert lease is None
            return
        assert lease is not None
        assert lease.slot not in taken
        assert 0 <= lease.slot < SLOTS
        assert lease.generation not in {0, *(t.generation for t in self.told)}
        self.told.append(Told(request, lease.slot, lease.generation))
        self.unsaid_open.append(self.told[-1])

    @rule(data=st.data())
    def opens_again(self, data: st.DataObject) -> None:
        lease = self.pick(data, OPEN, PUBLISHED, CLOSING)
        if lease is not None:
            again = self.producer.open(lease.request)
            assert again == (None if lease.stage == CLOSING else Lease(lease.slot, lease.generation))

    @rule(data=st.data())
    def publishes(self, data: st.DataObject) -> None:
        lease = self.pick(data, OPEN)
        if lease is not None:
            assert self.producer.publish(lease.request, self.now) == Lease(lease.slot, lease.generation)
            lease.stage, lease.deadline = PUBLISHED, self.now + LEASE_S

    @rule(data=st.data())
    def publishes_what_has_ended(self, data: st.DataObject) -> None:
        lease = self.pick(data, CLOSING, GONE)
        if lease is not None:
            with pytest.raises(SessionError, match=f"{lease.request} has no open lease"):
                self.producer.publish(lease.request, self.now)

    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        lease = self.pick(data, OPEN, PUBLISHED, CLOSING, GONE)
        if lease is not None:
            self.producer.abort(lease.request)
            if lease.stage == OPEN:
                self.end(lease, "aborted")

    @rule(data=st.data(), times=st.integers(1, 2))
    def a_consumer_releases(self, data: st.DataObject, times: int) -> None:
        lease = self.pick(data, OPEN, PUBLISHED, CLOSING, GONE)
        if lease is None:
            return
        for _ in range(times):
            self.producer.receive(release(lease), self.now)
        if lease.stage == PUBLISHED:
            self.end(lease, "released")

    @rule(data=st.data())
    def a_consumer_renews(self, data: st.DataObject) -> None:
        leases = data.draw(st.lists(st.sampled_from(self.told), max_size=4)) if self.told else []
        self.producer.receive(Renew("this", tuple(Lease(t.slot, t.generation) for t in leases)), self.now)
        for lease in leases:
            if lease.stage == PUBLISHED:
                lease.deadline = self.now + LEASE_S

    @rule(data=st.data(), slot=st.integers(0, 2), generation=st.integers(-2, 2), other=st.booleans())
    def a_stranger_speaks(self, data: st.DataObject, slot: int, generation: int, other: bool) -> None:
        lease = self.pick(data, OPEN, PUBLISHED, CLOSING, GONE)
        if lease is None:
            return
        wrong = release(lease, "another" if other else "this", slot, generation)
        named = (wrong.lease.slot, wrong.lease.generation)
        if not other and named in {(t.slot, t.generation) for t in self.told}:
            return
        self.producer.receive(wrong, self.now)
        self.producer.receive(Renew(wrong.incarnation, (wrong.lease,)), self.now)

    @rule()
    def the_cache_is_reset(self) -> None:
        held = self.of(OPEN, PUBLISHED)
        for lease in held:
            self.end(lease, "aborted" if lease.stage == OPEN else "reset")
        assert self.producer.reset() == (not self.of(CLOSING))

    @rule(passed=st.sampled_from([0.0, 1.0, 4.0, LEASE_S]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.producer.expire(self.now)
        for lease in self.of(PUBLISHED):
            if lease.deadline <= self.now:
                self.end(lease, "expired")

    @rule()
    def orders_are_taken(self) -> None:
        closing, opened = self.producer.take_closing(), self.producer.take_opened()
        assert sorted((c.request, c.lease.slot, c.lease.generation, c.ending.value) for c in closing) == sorted(
            (t.request, t.slot, t.generation, t.ending) for t in self.unsaid_closing
        )
        assert [(o.slot, o.generation) for o in opened] == [(t.slot, t.generation) for t in self.unsaid_open]
        for waiting in self.orders:
            waiting.append((self.unsaid_closing, self.unsaid_open))
        self.unsaid_closing, self.unsaid_open = [], []

    @rule(rank=st.integers(0, RANKS - 1))
    def a_rank_carries_orders_out(self, rank: int) -> None:
        if not self.orders[rank]:
            return
        closing, opened = self.orders[rank].pop(0)
        words = self.words[rank]
        for lease in closing:
            if words[lease.slot] == lease.generation:
                words[lease.slot] = 0
            lease.live.discard(rank)
            if lease.ending != "aborted":
                self.killed.setdefault(lease.request, set()).add(rank)
        for lease in opened:
            words[lease.slot] = lease.generation
            lease.live.add(rank)

    @rule()
    def the_engine_hears_of_dead_words(self) -> None:
        dead = [r for r, ranks in self.killed.items() if len(ranks) == RANKS]
        self.producer.close_all(dead)
        for request in dead:
            del self.killed[request]
            lease = next(t for t in self.of(CLOSING) if t.request == request)
            assert not lease.live
            lease.stage = GONE

    @rule(data=st.data())
    def a_report_of_what_is_not_closing(self, data: st.DataObject) -> None:
        lease = self.pick(data, OPEN, PUBLISHED, GONE)
        if lease is not None:
            self.producer.closed(lease.request)

    @invariant()
    def as_many_are_held_as_the_model_holds(self) -> None:
        held = self.of(OPEN, PUBLISHED, CLOSING)
        assert len(self.producer) == len(held)
        assert len({t.slot for t in held}) == len(held)

    @invariant()
    def a_word_stands_while_its_lease_does_and_never_after_it_closed(self) -> None:
        for rank, words in enumerate(self.words):
            for slot, generation in words.items():
                standing = [t for t in self.told if t.slot == slot and rank in t.live]
                assert [t.generation for t in standing][-1:] == ([generation] if generation else [])
        settled = not any(self.orders) and not self.unsaid_closing and not self.unsaid_open
        for lease in self.told:
            if settled:
                assert lease.live == (set(range(RANKS)) if lease.stage in (OPEN, PUBLISHED) else set())
            if lease.stage == GONE and lease.ending != "aborted":
                assert not lease.live

    @precondition(lambda self: self.told)
    @rule()
    def everything_ends_and_all_slots_come_back(self) -> None:
        for lease in self.of(OPEN):
            self.aborts_one(lease)
        self.time_passes(LEASE_S)
        self.orders_are_taken()
        for rank in range(RANKS):
            while self.orders[rank]:
                self.a_rank_carries_orders_out(rank)
        self.the_engine_hears_of_dead_words()
        assert len(self.producer) == 0
        assert all(word == 0 for words in self.words for word in words.values())
        for _ in range(SLOTS):
            self.opens()
        assert len(self.of(OPEN)) == SLOTS

    def aborts_one(self, lease: Told) -> None:
        self.producer.abort(lease.request)
        self.end(lease, "aborted")


Leases.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLeases = Leases.TestCase


def test_a_lease_that_is_aborted_before_its_word_went_live_never_makes_it_live():
    producer = Producer("this", 1, LEASE_S)
    producer.open("a")
    producer.abort("a")
    assert [(c.request, c.ending) for c in producer.take_closing()] == [("a", Ending.ABORTED)]
    assert producer.take_opened() == ()


def test_an_aborted_request_frees_its_slot_at_once_and_its_successor_has_another_generation():
    producer = Producer("this", 1, LEASE_S)
    first = producer.open("a")
    assert producer.open("b") is None
    producer.abort("a")
    second = producer.open("b")
    assert first is not None
    assert second is not None
    assert (second.slot, second.generation != first.generation) == (first.slot, True)


def test_what_is_published_ends_at_a_reset_which_is_over_once_its_word_is_dead_on_every_rank():
    producer = Producer("this", 2, LEASE_S)
    lease = producer.open("a")
    assert lease is not None
    producer.publish("a", 0.0)
    assert not producer.reset()
    assert not producer.reset()
    assert not producer.stands("this", lease)
    producer.receive(Renew("this", (lease,)), 1.0)
    producer.receive(Release("this", lease, "reader"), 1.0)
    producer.expire(2 * LEASE_S)
    assert [(c.request, c.lease, c.ending) for c in producer.take_closing()] == [("a", lease, Ending.RESET)]
    assert len(producer) == 1
    producer.closed("a")
    assert producer.reset()
    assert producer.take_closing() == ()


def test_what_is_under_way_at_a_reset_is_not_published_unless_it_is_opened_anew():
    producer = Producer("this", 1, LEASE_S)
    first = producer.open("a")
    assert producer.take_opened() == (first,)
    assert producer.reset()
    with pytest.raises(SessionError, match="a has no open lease"):
        producer.publish("a", 0.0)
    second = producer.open("a")
    assert second not in (None, first)
    assert [(c.lease, c.ending) for c in producer.take_closing()] == [(first, Ending.ABORTED)]
    assert producer.take_opened() == (second,)
    assert producer.publish("a", 0.0) == second


def test_generations_of_two_starts_are_apart():
    found = {lease.generation for _ in range(50) if (lease := Producer("this", 1, LEASE_S).open("a")) is not None}
    assert len(found) == 50


def test_no_generation_says_anything_of_the_next():
    producer = Producer("this", 200, LEASE_S)
    found = [lease.generation for name in range(200) if (lease := producer.open(str(name))) is not None]
    steps = {later - earlier for earlier, later in pairwise(found)}
    assert len(steps) == len(found) - 1
    assert min(map(abs, steps)) > 1 << 32
    assert len({generation >> 55 for generation in found}) > 50


@pytest.mark.parametrize("drawn", [0, MAX_GENERATION - 1])
def test_generations_are_numbers_that_a_reference_can_carry_and_never_that_of_a_dead_word(monkeypatch, drawn):
    monkeypatch.setattr(secrets, "randbelow", lambda below: min(drawn, below - 1))
    lease = Producer("this", 1, LEASE_S).open("a")
    assert lease is not None
    assert DEAD < lease.generation <= MAX_GENERATION
    assert lease.generation == drawn + 1


def test_a_lease_ends_at_its_greatest_age_however_often_it_is_renewed():
    producer = Producer("this", 2, LEASE_S, most_s=2.5 * LEASE_S)
    leases = {name: producer.open(name) for name in "ab"}
    producer.publish("a", 100.0)
    producer.publish("b", 105.0)
    ended = {}
    for now in range(100, 140):
        producer.receive(Renew("this", tuple(lease for lease in leases.values() if lease is not None)), float(now))
        producer.expire(float(now))
        ended |= {c.request: (now, c.ending) for c in producer.take_closing()}
    assert ended == {"a": (125, Ending.EXPIRED), "b": (130, Ending.EXPIRED)}


def test_a_lease_whose_greatest_age_is_short_ends_then_without_any_word():
    producer = Producer("this", 1, LEASE_S, most_s=LEASE_S / 2)
    producer.open("a")
    producer.publish("a", 0.0)
    producer.expire(LEASE_S / 2)
    assert [c.request for c in producer.take_closing()] == ["a"]


def test_a_word_counts_while_its_lease_is_published_and_for_no_other_start_slot_or_generation():
    producer = Producer("this", 2, LEASE_S)
    lease = producer.open("a")
    assert lease is not None
    assert not producer.stands("this", lease)
    producer.publish("a", 0.0)
    assert producer.stands("this", lease)
    for incarnation, other in (
        ("that", lease),
        ("this", Lease(lease.slot, lease.generation - 1)),
        ("this", Lease(lease.slot + 1, lease.generation)),
        ("this", Lease(1 << 40, lease.generation)),
    ):
        assert not producer.stands(incarnation, other)
    producer.expire(LEASE_S)
    assert not producer.stands("this", lease)


def test_a_renewal_moves_the_deadline_and_only_that_of_its_lease():
    producer = Producer("this", 2, LEASE_S)
    leases = {name: producer.open(name) for name in "ab"}
    for name in "ab":
        producer.publish(name, 0.0)
    renewed = leases["a"]
    assert renewed is not None
    producer.receive(Renew("this", (renewed,)), 9.0)
    producer.expire(10.0)
    assert [(c.request, c.ending) for c in producer.take_closing()] == [("b", Ending.EXPIRED)]
    producer.expire(18.9)
    assert producer.take_closing() == ()
    producer.expire(19.0)
    assert [c.request for c in producer.take_closing()] == ["a"]


class TestBlocks:
    """What published leases hold is bounded, so that the engine always has room for a request of its own."""

    def producer(self, most: int) -> Producer:
        producer = Producer("this", 8, LEASE_S, most_blocks=most)
        for request in "abcd":
            producer.open(request)
        return producer

    def test_a_lease_that_would_hold_too_much_is_not_published(self) -> None:
        producer = self.producer(10)
        producer.publish("a", 0.0, range(6))
        with pytest.raises(
            FullError, match=r"1 leases hold 6 of at most 10 blocks, the oldest that of request a for 2\.5 s; 5 more"
        ):
            producer.publish("b", 2.5, range(6, 11))
        assert producer.blocks == 6
        producer.publish("b", 2.5, range(6, 10))

    def test_blocks_that_leases_share_count_once_until_the_last_is_closed(self) -> None:
        producer = self.producer(10)
        for request, own in zip("abc", (8, 9, 10), strict=True):
            lease = producer.publish(request, 0.0, [*range(6), own])
            assert producer.blocks == 7 + "abc".index(request)
            assert lease
        for number, request in enumerate("abc"):
            producer._close(producer._held[request], Ending.RELEASED)
            assert producer.blocks == 9 - number
            producer.closed(request)
        assert producer.blocks == 0
        producer.publish("d", 0.0, range(10))

    def test_blocks_are_held_until_all_ranks_have_killed_the_word(self) -> None:
        producer = self.producer(6)
        lease = producer.publish("a", 0.0, range(6))
        producer.receive(Release("this", lease, "D"), 0.0)
        with pytest.raises(FullError):
            producer.publish("b", 0.0, [7])
        producer.closed("a")
        producer.publish("b", 0.0, [7])
