"""The consumer's half of a session by a clock of its own: who is greeted when, what is renewed, and what is said last."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace as with_fields

from kvferry.session import Answer, Consumer, Hello, Lease, PeerKey, Reference, Release, Renew, key_of
from kvferry.session.consumer import Greeting, Word
from kvferry.session.messages import MAX_LEASES, pack, unpack_request

HELLO = Hello("d", "d1")
PEER = PeerKey("10.0.0.1:7000", "p", "p1")
RESTARTED = replace(PEER, incarnation="p2")
RETRY_S = RENEW_S = 5.0


def reference(slot: int = 0, peer: PeerKey = PEER, generation: int = 7) -> Reference:
    return Reference(peer.address, peer.engine, peer.incarnation, "r", Lease(slot, generation), 5, {"0": [1]}, "digest")


def consumer(most: int = 256) -> Consumer[str]:
    return Consumer(HELLO, RETRY_S, RENEW_S, most)


def take(it: Consumer[str], now: float) -> tuple[tuple[Greeting, ...], tuple[Word, ...]]:
    """Where every address that is sought is reached at once."""
    for sought in it.seek(now):
        it.reached(sought.address)
    return it.take(now)


def greeted(it: Consumer[str], now: float = 0.0) -> list[str]:
    greetings, words = take(it, now)
    assert not words
    assert all(greeting.hello == HELLO for greeting in greetings)
    return [greeting.address for greeting in greetings]


def answer(it: Consumer[str], peer: PeerKey, found: str | None, now: float, lease_s: float = 60.0, reason: str = "") -> None:
    it.answered(peer.address, Answer(peer, found, lease_s, reason), now)


def said(it: Consumer[str]) -> list[Renew | Release]:
    greetings, words = take(it, 0.0)
    assert not greetings
    assert all(unpack_request(pack(word.message)) == word.message for word in words)
    return [word.message for word in words]


def test_a_producer_is_greeted_once_per_start():
    it = consumer()
    for _ in range(3):
        it.greet(PEER, 0.0)
    assert greeted(it) == [PEER.address]
    assert it.peer(PEER, 0.0) is None
    it.greet(PEER, 100.0)
    assert greeted(it) == []
    answer(it, PEER, "plans", 100.0)
    it.greet(PEER, 1000.0)
    assert greeted(it) == []
    assert it.peer(PEER, 1000.0) == "plans"
    it.greet(RESTARTED, 1000.0)
    assert greeted(it) == [PEER.address]
    assert it.peer(RESTARTED, 1000.0) is None


def test_a_refusal_stands_for_a_pause_and_is_then_asked_about_again():
    it = consumer()
    it.greet(PEER, 0.0)
    assert greeted(it) == [PEER.address]
    it.unanswered(PEER.address, "still starting", 1.0)
    for now in (1.0, 5.9):
        it.greet(PEER, now)
        assert it.peer(PEER, now) == "still starting"
        assert not it.due(PEER, now)
    assert greeted(it) == []
    assert it.due(PEER, 6.0)
    assert it.peer(PEER, 6.0) is None
    it.greet(PEER, 6.0)
    it.greet(PEER, 6.0)
    assert greeted(it, 6.0) == [PEER.address]
    answer(it, PEER, "plans", 6.0)
    assert it.peer(PEER, 6.0) == "plans"


def test_a_refusal_of_long_ago_is_no_answer():
    it = consumer()
    it.greet(PEER, 0.0)
    take(it, 0.0)
    it.unanswered(PEER.address, "nobody listens", 0.0)
    assert it.peer(PEER, 3600.0) is None
    assert it.due(PEER, 3600.0)


def test_all_starts_that_are_named_at_an_address_cost_one_greeting_and_those_that_do_not_answer_are_gone():
    it = consumer()
    stale = [replace(PEER, incarnation=f"old{i}") for i in range(50)]
    for peer in (*stale, PEER, replace(PEER, engine="q")):
        it.greet(peer, 0.0)
    assert greeted(it) == [PEER.address]
    answer(it, PEER, "plans", 1.0)
    assert it.peer(PEER, 1.0) == "plans"
    assert all("is p since its start p1; the reference is of p, start old" in str(it.peer(peer, 1.0)) for peer in stale)
    assert "the reference is of q, start p1: it is gone" in str(it.peer(replace(PEER, engine="q"), 1.0))
    assert greeted(it) == []


def test_a_start_that_is_named_while_another_is_being_asked_is_asked_for_after_it():
    it = consumer()
    it.greet(PEER, 0.0)
    assert greeted(it, 1.0) == [PEER.address]
    it.greet(RESTARTED, 2.0)
    assert greeted(it, 2.0) == []
    answer(it, PEER, "old", 3.0)
    assert it.peer(RESTARTED, 3.0) is None
    assert greeted(it, 3.0) == [PEER.address]
    answer(it, RESTARTED, "new", 4.0)
    assert it.peer(RESTARTED, 4.0) == "new"


def test_an_address_that_was_waited_for_in_vain_is_left_alone_twice_as_long_whoever_is_named_there():
    it = consumer()
    it.greet(PEER, 0.0)
    assert greeted(it, 0.0) == [PEER.address]
    it.unanswered(PEER.address, "says nothing", 15.0)
    for now in (15.0, 44.0):
        other = replace(PEER, incarnation=f"at {now}")
        it.greet(other, now)
        assert it.peer(other, now) == "says nothing"
        assert greeted(it, now) == []
    it.greet(replace(PEER, incarnation="later"), 45.0)
    assert greeted(it, 45.0) == [PEER.address]


def test_a_start_that_is_named_where_nobody_was_a_moment_ago_is_asked_for_at_once():
    it = consumer()
    it.greet(PEER, 0.0)
    assert greeted(it, 0.0) == [PEER.address]
    it.unanswered(PEER.address, "nobody listens", 0.25)
    it.greet(RESTARTED, 0.5)
    assert it.peer(RESTARTED, 0.5) == "nobody listens"
    later = replace(PEER, incarnation="p3")
    it.greet(later, 0.75)
    assert greeted(it, 0.75) == [PEER.address]
    answer(it, later, "plans", 1.0)
    assert it.peer(later, 1.0) == "plans"


def test_a_start_that_is_named_while_nobody_answers_is_asked_for_as_soon_as_its_address_may_be():
    it = consumer()
    it.greet(PEER, 0.0)
    assert greeted(it, 0.0) == [PEER.address]
    it.greet(RESTARTED, 0.125)
    it.unanswered(PEER.address, "nobody listens", 0.25)
    assert it.peer(RESTARTED, 0.5) == it.peer(PEER, 0.5) == "nobody listens"
    it.greet(PEER, 0.75)
    assert greeted(it, 0.75) == []
    it.greet(RESTARTED, 0.75)
    assert greeted(it, 0.75) == [PEER.address]


REACH_S = 4.0


def sought(it: Consumer[str], now: float) -> list[str]:
    return [found.address for found in it.seek(now)]


def addresses(count: int, net: int = 1) -> list[PeerKey]:
    return [PeerKey(f"10.{net}.{i // 250}.{i % 250}:7000", "p", "p1") for i in range(count)]


@pytest.mark.parametrize("before", [0, 500, 900, 1000])
@pytest.mark.parametrize("count", [1000, 3000])
def test_however_many_silent_addresses_are_named_a_real_one_is_asked_within_seconds(before, count):
    """It is named first, between them, or last; silent ones are given up when they were waited for as long as may be."""
    if count > 1000 and before not in (0, 1000):
        pytest.skip("of more than are sought at a time only the ends are bounded")
    it, waiting, step = consumer(), dict[str, float](), 0.25
    dead = addresses(count)
    real = PeerKey("10.0.0.9:7000", "p", "p1")
    named = [*dead[:before], real, *dead[before:]] if before < 1000 else [*dead, real]
    for peer in named:
        it.greet(peer, 0.0)
    for tick in range(200):
        now = tick * step
        for address in sought(it, now):
            if address == real.address:
                it.reached(address)
            else:
                waiting[address] = now
        if [greeting.address for greeting in it.take(now)[0]] == [real.address]:
            break
        for address in [address for address, since in waiting.items() if now - since >= REACH_S]:
            it.unanswered(address, "says nothing", now)
            del waiting[address]
        assert len(waiting) <= 512
    assert now <= 2 * REACH_S


def test_addresses_that_never_answered_are_sought_after_those_that_were_never_tried_and_less_often_each_time():
    it = Consumer[str](HELLO, RETRY_S, RENEW_S, seeking=2)
    dead, (fresh,) = addresses(2), addresses(1, net=2)
    now, pauses = 0.0, []
    for _ in range(6):
        began = now
        for peer in dead:
            while not it.due(peer, now):
                now += 0.5
            it.greet(peer, now)
            while it.peer(peer, now) is not None:
                now += 0.5
                it.greet(peer, now)
        pauses.append(now - began)
        assert {found.first for found in it.seek(now)} == {len(pauses) == 1}
        now += 1.0
        for peer in dead:
            it.unanswered(peer.address, "says nothing", now)
    assert pauses[1:] == sorted(pauses[1:])
    assert 12.0 < pauses[-1] <= 17.0
    now += 100.0
    for peer in (*dead, fresh):
        it.greet(peer, now)
    assert fresh.address in sought(it, now)


def test_what_is_reached_takes_few_places_and_proven_addresses_have_some_of_their_own():
    it = Consumer[str](HELLO, RETRY_S, RENEW_S, asking=8)
    known = PeerKey("10.0.0.9:7000", "p", "p1")
    it.greet(known, 0.0)
    assert greeted(it) == [known.address]
    answer(it, known, "plans", 0.0)
    stuck = addresses(100)
    for peer in stuck:
        it.greet(peer, 1.0)
    first = greeted(it, 1.0)
    assert len(first) == 6
    it.greet(replace(known, incarnation="p2"), 2.0)
    assert greeted(it, 2.0) == [known.address]
    it.unanswered(first[3], "does not answer", 2.0)
    assert len(greeted(it, 2.0)) == 1


def test_a_producer_whose_cards_do_not_fit_is_refused_with_the_reason_and_its_address_is_not():
    it = consumer()
    it.greet(PEER, 0.0)
    take(it, 0.0)
    answer(it, PEER, None, 1.0, reason="the two sides do not hold the same state")
    assert it.peer(PEER, 1.0) == "the two sides do not hold the same state"
    it.greet(RESTARTED, 1.0)
    assert greeted(it, 1.0) == [PEER.address]
    assert it.due(PEER, 6.0)


def doubted() -> Consumer[str]:
    """A producer was met, and something failed later that was read from it."""
    it = consumer()
    it.greet(PEER, 0.0)
    take(it, 0.0)
    answer(it, PEER, "plans", 0.0)
    it.doubt(PEER, 1.0)
    return it


def test_a_producer_in_doubt_is_asked_before_the_next_load_and_known_as_before_if_it_is_there():
    it = doubted()
    assert it.due(PEER, 1.0)
    assert it.peer(PEER, 1.0) is None
    it.greet(PEER, 1.0)
    assert greeted(it, 1.0) == [PEER.address]
    assert it.found(PEER) == "plans"
    answer(it, PEER, it.found(PEER), 1.0)
    assert it.peer(PEER, 1.0) == "plans"
    assert it.take_forgotten() == ()


def test_a_doubt_while_a_producer_is_being_asked_is_asked_too():
    """What failed may have failed after the producer answered."""
    it = doubted()
    it.greet(PEER, 1.0)
    assert greeted(it, 1.0) == [PEER.address]
    it.doubt(PEER, 1.5)
    answer(it, PEER, it.found(PEER), 2.0)
    assert it.peer(PEER, 2.0) is None
    it.greet(PEER, 2.0)
    assert greeted(it, 2.0) == [PEER.address]
    answer(it, RESTARTED, "new plans", 2.0)
    assert "it is gone" in str(it.peer(PEER, 2.0))


def test_an_answer_from_before_a_doubt_leaves_the_doubt_and_the_greeting_that_is_under_way():
    it = doubted()
    it.greet(PEER, 2.0)
    assert greeted(it, 3.0) == [PEER.address]
    it.answered(PEER.address, Answer(PEER, "plans", 60.0), 4.0, began=0.5)
    assert it.peer(PEER, 4.0) is None
    it.greet(PEER, 4.0)
    assert greeted(it, 4.0) == []
    answer(it, PEER, "plans", 5.0)
    assert it.peer(PEER, 5.0) == "plans"


def test_an_answer_of_an_earlier_start_says_nothing_of_one_that_was_named_since():
    it = consumer()
    it.greet(RESTARTED, 1.0)
    assert greeted(it, 1.0) == [PEER.address]
    it.answered(PEER.address, Answer(PEER, "plans", 60.0), 2.0, began=0.5)
    assert it.peer(RESTARTED, 2.0) is None
    assert greeted(it, 2.0) == []
    answer(it, RESTARTED, "new plans", 3.0)
    assert it.peer(RESTARTED, 3.0) == "new plans"
    assert greeted(it, 3.0) == []


def test_an_answer_from_before_another_says_nothing_of_who_is_there_now():
    it = doubted()
    it.greet(PEER, 1.0)
    take(it, 1.0)
    answer(it, RESTARTED, "new plans", 2.0)
    it.answered(PEER.address, Answer(PEER, "plans", 60.0), 3.0, began=0.5)
    assert "it is gone" in str(it.peer(PEER, 3.0))
    assert it.peer(RESTARTED, 3.0) == "new plans"


def test_a_greeting_that_was_overtaken_is_sent_again_for_whoever_still_waits():
    it = consumer()
    it.greet(PEER, 1.0)
    take(it, 1.0)
    it.answered(PEER.address, Answer(RESTARTED, "new plans", 60.0), 3.0, began=2.0)
    assert "it is gone" in str(it.peer(PEER, 3.0))
    third = replace(PEER, incarnation="p3")
    it.greet(third, 3.5)
    assert greeted(it, 3.5) == []
    answer(it, PEER, "plans", 4.0)
    assert "it is gone" in str(it.peer(PEER, 4.0))
    assert it.peer(RESTARTED, 4.0) == "new plans"
    assert greeted(it, 4.0) == [PEER.address]
    answer(it, third, "newest plans", 5.0)
    assert it.peer(third, 5.0) == "newest plans"


@pytest.mark.parametrize("refused", ["by its address", "by who answers", "by nobody"])
def test_what_was_refused_after_a_doubt_is_not_asked_for_before_its_time(refused):
    it = doubted()
    it.greet(PEER, 1.0)
    take(it, 1.0)
    if refused == "by who answers":
        answer(it, PEER, None, 3.0, reason="another model")
    else:
        it.unanswered(PEER.address, "says nothing", 3.0)
    if refused == "by its address":
        it.doubt(PEER, 3.5)
        it.greet(PEER, 4.0)
    assert not it.due(PEER, 4.0)
    assert it.peer(PEER, 4.0) == ("another model" if refused == "by who answers" else "says nothing")


def test_a_later_answer_of_an_earlier_greeting_brings_no_doubt_back():
    it = doubted()
    it.greet(PEER, 2.0)
    take(it, 3.0)
    answer(it, PEER, "plans", 4.0)
    it.known(PEER, "plans", 60.0, 0.5)
    assert it.peer(PEER, 4.0) == "plans"


def test_a_producer_in_doubt_that_has_restarted_is_gone_and_forgotten():
    it = doubted()
    it.greet(PEER, 1.0)
    take(it, 1.0)
    it.hold("a", reference(), 1.0)
    answer(it, RESTARTED, "new plans", 1.0)
    assert "is p since its start p2; the reference is of p, start p1: it is gone" in str(it.peer(PEER, 1.0))
    assert it.take_forgotten() == ()
    it.release("a", reference(), "failed")
    take(it, 1.0)
    answer(it, RESTARTED, "new plans", 2.0)
    assert it.take_forgotten() == (PEER,)


def test_a_producer_in_doubt_that_does_not_answer_is_who_it_was_when_it_does():
    it = doubted()
    it.greet(PEER, 1.0)
    take(it, 1.0)
    it.unanswered(PEER.address, "says nothing", 1.0)
    assert it.peer(PEER, 1.0) == "says nothing"
    it.greet(PEER, 6.0)
    take(it, 6.0)
    assert it.found(PEER) == "plans"
    answer(it, PEER, it.found(PEER), 6.0)
    assert it.peer(PEER, 6.0) == "plans"


def test_what_was_never_met_cannot_be_doubted():
    it = consumer()
    it.doubt(PEER, 0.0)
    it.greet(PEER, 0.0)
    it.doubt(PEER, 0.0)
    assert greeted(it) == [PEER.address]
    it.unanswered(PEER.address, "nobody listens", 0.0)
    it.doubt(PEER, 0.0)
    assert it.peer(PEER, 0.0) == "nobody listens"


def test_leases_of_who_was_refused_and_never_met_are_not_renewed():
    it = consumer()
    it.greet(PEER, 0.0)
    take(it, 0.0)
    it.hold("a", reference(), 0.0)
    it.unanswered(PEER.address, "nobody listens", 0.0)
    it.renew(100.0)
    assert said(it) == []


def test_a_producer_that_nobody_greeted_is_to_be_asked():
    it = consumer()
    assert it.due(PEER, 0.0)
    assert it.peer(PEER, 0.0) is None


@pytest.mark.parametrize(("lease_s", "every"), [(60.0, 5.0), (15.0, 5.0), (9.0, 3.0), (0.3, 0.1)])
def test_leases_are_renewed_three_times_in_their_time_and_not_more_often_than_that(lease_s, every):
    it = consumer()
    it.known(PEER, "plans", lease_s, 0.0)
    it.hold("a", reference(), 0.0)
    renewed = []
    for tick in range(1, 600):
        now = tick * every / 10
        it.renew(now)
        renewed += [now for _ in said(it)]
    apart = [b - a for a, b in zip([0.0, *renewed], renewed, strict=False)]
    assert len(renewed) > 50
    assert min(apart) > every * 0.99
    assert max(apart) < every * 1.11
    assert max(apart) <= lease_s / 2


def test_leases_of_a_producer_that_is_being_asked_are_renewed_too():
    it = consumer()
    it.greet(PEER, 0.0)
    take(it, 0.0)
    it.hold("a", reference(), 0.0)
    it.renew(4.9)
    assert said(it) == []
    it.renew(5.0)
    assert said(it) == [Renew("p1", (Lease(0, 7),))]


def test_a_release_is_said_once_and_ends_the_renewals():
    it = consumer()
    it.known(PEER, "plans", 60.0, 0.0)
    it.hold("a", reference(0), 0.0)
    it.hold("b", reference(1), 0.0)
    it.release("a", reference(0), "loaded")
    assert said(it) == [Release("p1", Lease(0, 7), "d@d1", "loaded")]
    it.release("a", reference(0), "again")
    assert said(it) == []
    it.renew(5.0)
    assert said(it) == [Renew("p1", (Lease(1, 7),))]
    it.release("b", reference(1), "failed")
    assert said(it) == [Release("p1", Lease(1, 7), "d@d1", "failed")]
    it.renew(100.0)
    assert said(it) == []


def test_a_lease_that_was_never_held_is_not_released():
    it = consumer()
    it.release("a", reference(), "?")
    it.hold("a", reference(0), 0.0)
    it.release("a", reference(0, generation=8), "?")
    it.release("b", reference(0), "?")
    assert said(it) == []


def test_a_lease_that_two_requests_hold_is_released_by_the_last():
    it = consumer()
    for request in ("a", "b"):
        it.hold(request, reference(), 0.0)
    it.renew(5.0)
    assert said(it) == [Renew("p1", (Lease(0, 7),))]
    it.release("a", reference(), "loaded")
    assert said(it) == []
    it.release("b", reference(), "loaded")
    assert said(it) == [Release("p1", Lease(0, 7), "d@d1", "loaded")]


def test_long_names_and_notes_are_cut_to_what_a_producer_reads():
    it: Consumer[str] = Consumer(Hello("e" * 256, "i" * 256))
    it.hold("a", reference(), 0.0)
    it.release("a", reference(), "n" * 5000)
    (message,) = said(it)
    assert isinstance(message, Release)
    assert (len(message.reader), len(message.note)) == (256, 256)


def test_more_leases_than_one_message_holds_are_all_renewed():
    it = consumer()
    for slot in range(MAX_LEASES + 3):
        it.hold(f"r{slot}", reference(slot), 0.0)
    it.renew(5.0)
    messages = said(it)
    assert [len(m.leases) for m in messages if isinstance(m, Renew)] == [MAX_LEASES, 3]
    assert len({lease for m in messages if isinstance(m, Renew) for lease in m.leases}) == MAX_LEASES + 3


def starts(count: int) -> list[PeerKey]:
    return [PeerKey(f"10.0.0.1:{7000 + i}", "p", f"p{i}") for i in range(count)]


def test_an_earlier_start_is_forgotten_once_the_next_is_met_unless_a_lease_of_it_is_held():
    it = consumer()
    for peer in (PEER, RESTARTED):
        it.greet(peer, 0.0)
    it.known(PEER, "old", 60.0, 0.0)
    it.hold("a", reference(), 0.0)
    it.known(RESTARTED, "new", 60.0, 0.0)
    assert it.take_forgotten() == ()
    it.release("a", reference(), "loaded")
    again = replace(PEER, incarnation="p3")
    it.known(again, "newest", 60.0, 0.0)
    assert set(it.take_forgotten()) == {PEER, RESTARTED}
    assert it.take_forgotten() == ()
    assert it.peer(again, 0.0) == "newest"
    assert it.due(PEER, 0.0)


def test_producers_without_leases_are_forgotten_the_longest_unused_first():
    it = consumer(most=3)
    peers = starts(5)
    for i, peer in enumerate(peers[:3]):
        it.greet(peer, float(i))
        it.known(peer, peer.incarnation, 60.0, 0.0)
    it.hold("a", reference(0, peers[0]), 3.0)
    it.greet(peers[1], 4.0)
    it.greet(peers[3], 5.0)
    assert it.take_forgotten() == (peers[2],)
    it.known(peers[3], "p3", 60.0, 0.0)
    it.greet(peers[4], 6.0)
    assert it.take_forgotten() == (peers[1],)
    assert [it.peer(peer, 6.0) for peer in peers] == ["p0", None, None, "p3", None]


def test_refused_producers_do_not_pile_up():
    it = consumer(most=10)
    for i in range(500):
        peer = PeerKey(f"10.0.0.1:{i}", "p", "p1")
        it.greet(peer, float(i))
        take(it, float(i))
        it.unanswered(peer.address, "nobody listens", float(i))
    assert len(it._peers) <= 10
    assert len(it._addresses) <= 10
    assert it.take_forgotten() == ()


def test_a_lease_is_kept_for_others_until_then():
    it = consumer()
    it.hold("a", reference(), 0.0)
    it.release("a", reference(), "loaded", until=1.0)
    it.part(0.9)
    assert said(it) == []
    it.hold("b", reference(), 0.9)
    it.part(5.0)
    assert said(it) == []
    it.release("b", reference(), "loaded", until=6.0)
    it.release("b", reference(), "again")
    it.part(5.9)
    assert said(it) == []
    it.part(6.0)
    it.part(7.0)
    assert said(it) == [Release("p1", Lease(0, 7), "d@d1", "loaded")]


def test_a_lease_that_is_kept_for_others_is_renewed():
    it = consumer()
    it.hold("a", reference(), 0.0)
    it.release("a", reference(), "loaded", until=20.0)
    it.renew(6.0)
    assert said(it) == [Renew("p1", (Lease(0, 7),))]


class Conversation(RuleBasedStateMachine):
    """Any order of events: one greeting under way at an address at a time, one release for every lease that was held."""

    peers = st.sampled_from([PEER, RESTARTED, PeerKey("10.0.0.2:7000", "q", "q1")])

    @initialize()
    def start(self) -> None:
        self.it = consumer()
        self.now = 0.0
        self.asked: dict[str, set[PeerKey]] = {}
        self.named: set[PeerKey] = set()
        self.refused: set[PeerKey] = set()
        self.holders: dict[tuple[PeerKey, Lease], set[str]] = {}
        self.renewed: dict[PeerKey, float] = {}

    def hear(self) -> list[Renew | Release]:
        greetings, words = take(self.it, self.now)
        for greeting in greetings:
            assert greeting.address not in self.asked
            self.asked[greeting.address] = {peer for peer in self.named if peer.address == greeting.address}
        return [word.message for word in words]

    @rule(peer=peers)
    def greet(self, peer: PeerKey) -> None:
        due = self.it.due(peer, self.now)
        self.it.greet(peer, self.now)
        asked = self.it.peer(peer, self.now) is None
        assert asked <= (due or peer in self.named)
        if asked:
            self.named.add(peer)
        elif self.it.peer(peer, self.now) == "no":
            self.refused.add(peer)
        assert self.hear() == []
        assert not asked or peer.address in self.asked
        self.now += 0.125

    @rule(peer=peers, welcome=st.booleans())
    def answer(self, peer: PeerKey, welcome: bool) -> None:
        concerned = self.asked.pop(peer.address, None)
        if concerned is None:
            return
        self.now += 0.5
        if welcome:
            answer(self.it, peer, peer.incarnation, self.now, lease_s=9.0)
            assert self.it.peer(peer, self.now) == peer.incarnation
            self.refused.discard(peer)
            self.named.discard(peer)
            concerned.discard(peer)
        else:
            concerned = {named for named in self.named if named.address == peer.address}
            self.it.unanswered(peer.address, "no", self.now)
        for other in concerned:
            assert ("no" if not welcome else "it is gone") in str(self.it.peer(other, self.now))
            self.refused.add(other)
            self.named.discard(other)
        assert self.hear() == []

    @rule(peer=peers, request=st.sampled_from("abc"), slot=st.integers(0, 1))
    def hold(self, peer: PeerKey, request: str, slot: int) -> None:
        found = reference(slot, peer)
        if not any(key == peer for key, _ in self.holders):
            self.renewed[peer] = self.now
        self.it.hold(request, found, self.now)
        self.holders.setdefault((peer, found.lease), set()).add(request)

    @rule(peer=peers, request=st.sampled_from("abc"), slot=st.integers(0, 1))
    def release(self, peer: PeerKey, request: str, slot: int) -> None:
        found = reference(slot, peer)
        holders = self.holders.get((peer, found.lease), set())
        last = holders == {request}
        self.it.release(request, found, "over")
        holders.discard(request)
        if not holders:
            self.holders.pop((peer, found.lease), None)
        assert self.hear() == ([Release(peer.incarnation, found.lease, "d@d1", "over")] if last else [])

    @rule(passed=st.sampled_from([0.0, 1.0, 3.0, 6.0]))
    def renew(self, passed: float) -> None:
        self.now += passed
        self.it.renew(self.now)
        heard = {m.incarnation: set(m.leases) for m in self.hear() if isinstance(m, Renew)}
        for peer in {key for key, _ in self.holders}:
            wanted = {lease for key, lease in self.holders if key == peer}
            since = self.now - self.renewed[peer]
            if peer.incarnation in heard:
                assert heard.pop(peer.incarnation) == wanted
                assert since >= 3.0
                self.renewed[peer] = self.now
            else:
                assert since < RENEW_S or peer in self.refused
        assert heard == {}

    @invariant()
    def what_is_asked_has_no_answer_yet(self) -> None:
        assert all(self.it.peer(peer, self.now) is None for peer in self.named)


Conversation.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestConversation = Conversation.TestCase


def test_a_producer_is_known_by_address_engine_and_start():
    found = reference()
    assert key_of(found) == PEER
    for change in ({"address": "10.0.0.1:7001"}, {"engine": "q"}, {"incarnation": "p2"}):
        assert key_of(with_fields(found, **change)) != PEER


class TestDrops:
    """A request that came with another's reference keeps its lease alive until its prompt is looked at, and no longer."""

    def test_a_dropped_lease_is_neither_renewed_nor_released(self) -> None:
        it = consumer()
        it.hold("crossed", reference(1), 0.0)
        it.drop("crossed", reference(1))
        it.drop("crossed", reference(1))
        it.drop("never held", reference(2))
        it.renew(RENEW_S)
        it.part(math.inf)
        assert it.take(RENEW_S)[1] == ()
        assert not it._leases

    @pytest.mark.parametrize("dropped_first", [True, False])
    def test_a_release_is_said_whatever_others_drop(self, dropped_first: bool) -> None:
        it = consumer()
        for name in ("its own", "crossed"):
            it.hold(name, reference(1), 0.0)
        if dropped_first:
            it.drop("crossed", reference(1))
        it.release("its own", reference(1), "loaded", until=1.0)
        it.hold("late", reference(1), 0.5)
        it.drop("late", reference(1))
        if not dropped_first:
            it.part(2.0)
            assert it.take(2.0)[1] == ()
            it.drop("crossed", reference(1))
        it.part(2.0)
        (word,) = it.take(2.0)[1]
        assert isinstance(word.message, Release)
        assert not it._leases
