"""References of requests that came together: who finds whose, and on what channel."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyed import KEYS
from kvferry.engines.vllm.siblings import Siblings, family_of, prompt_of
from kvferry.errors import SessionError
from kvferry.manifest import Identity, Manifest
from kvferry.session import Card, Hello, Lease, Listener, Reference, Seek, Welcome, seek
from kvferry.session.wire import ask

PATIENCE_S = 30.0


def reference(request: str, digest: str = "d", slot: int = 0) -> Reference:
    return Reference("127.0.0.1:1", "P", "1", request, Lease(slot, 100 + slot), 9, {"0": [1]}, digest)


def publish(siblings: Siblings, made: Reference) -> None:
    siblings.published(made.request, made)


@pytest.mark.parametrize(
    ("request_id", "family", "prompt"),
    [
        ("cmpl-1f-0-5a5a5a5a", "cmpl-1f", ""),
        ("cmpl-1f-12-5a5a5a5a", "cmpl-1f", ""),
        ("cmpl-1f-0", "cmpl-1f", ""),
        ("3_cmpl-1f-0-5a5a5a5a", "cmpl-1f", "cmpl-1f-0-5a5a5a5a"),
        ("chatcmpl-1f-5a5a5a5a", "chatcmpl-1f", ""),
        ("chatcmpl-1f_4-5a5a5a5a", "chatcmpl-1f", ""),
        ("cmpl-a-1-2-0-5a5a5a5a", "cmpl-a-1-2", ""),
        ("mine", "mine", ""),
        ("", "", ""),
        ("cmpl-\nx-0-5a5a5a5a", "cmpl-\nx", ""),
    ],
)
def test_names_say_what_came_together(request_id: str, family: str, prompt: str) -> None:
    assert family_of(request_id) == family
    assert prompt_of(request_id) == prompt


@given(st.text(st.sampled_from("0123456789abcdefz_-\n٣"), max_size=24))
@example("3_")
@example("3_-1")
@example("1_2_x-12345678-12345678")
@example("x_12345678")
@example("x-1-2-abcdef12-abcdef12")
def test_a_family_is_the_shortest_name_that_parts_and_answers_can_be_made_of(request_id: str) -> None:
    named = re.fullmatch(r"(?:\d+_)?(?P<base>.+?)(?:[-_]\d+)?(?:-[0-9a-f]{8})?", request_id, re.DOTALL)
    assert family_of(request_id) == (named["base"] if named else request_id)


class TestSiblings:
    def test_a_part_is_found_by_who_knows_the_lease_of_another(self) -> None:
        siblings = Siblings()
        one, other = reference("cmpl-1-0-aaaaaaaa", "one", 1), reference("cmpl-1-1-bbbbbbbb", "other", 2)
        stranger = reference("cmpl-2-0-cccccccc", "one", 3)
        for it in (one, other, stranger):
            publish(siblings, it)
        assert siblings.find(one.lease, "other") == other
        assert siblings.find(stranger.lease, "other") is None
        assert siblings.find(stranger.lease, "one") == stranger
        assert siblings.find(Lease(1, 7), "other") is None
        assert siblings.find(one.lease, "third") is None

    def test_a_lease_that_ended_still_says_which_family_while_others_stand(self) -> None:
        siblings = Siblings()
        one, other = reference("cmpl-1-0-aaaaaaaa", "one", 1), reference("cmpl-1-1-bbbbbbbb", "other", 2)
        publish(siblings, one)
        publish(siblings, other)
        siblings.ended(one.lease)
        assert siblings.find(one.lease, "one") is None
        assert siblings.find(one.lease, "other") == other
        siblings.ended(one.lease)
        siblings.ended(other.lease)
        siblings.ended(other.lease)
        assert siblings.find(one.lease, "other") is None
        assert not siblings._by_lease

    def test_a_prompt_that_was_published_again_stands_when_the_earlier_lease_ends(self) -> None:
        siblings = Siblings()
        one, again = reference("cmpl-1-0-aaaaaaaa", "one", 1), reference("cmpl-1-1-bbbbbbbb", "one", 2)
        publish(siblings, one)
        publish(siblings, again)
        siblings.ended(one.lease)
        assert siblings.find(one.lease, "one") == again
        siblings.ended(again.lease)
        assert not siblings._by_lease

    def test_what_was_published_before_all_ended_is_neither_found_nor_shared(self) -> None:
        siblings = Siblings()
        one, other = reference("0_cmpl-1-0-aaaaaaaa", "one", 1), reference("cmpl-1-1-bbbbbbbb", "other", 2)
        publish(siblings, one)
        publish(siblings, other)
        siblings.forget()
        assert siblings.find(one.lease, "other") is None
        assert siblings.twin("1_cmpl-1-0-aaaaaaaa", "one") is None
        assert siblings.twin("cmpl-1-2-cccccccc", "one") is None
        assert siblings.leases(["cmpl-1-2-cccccccc"]) == ()
        again = reference("cmpl-1-2-cccccccc", "third", 3)
        publish(siblings, again)
        siblings.ended(one.lease)
        siblings.ended(other.lease)
        assert siblings.find(again.lease, "third") == again

    def test_one_lease_does_for_all_answers_and_for_later_prompts_of_a_batch(self) -> None:
        siblings = Siblings()
        publish(siblings, reference("0_cmpl-1-1-aaaaaaaa", "one", 1))
        assert siblings.twin("1_cmpl-1-1-aaaaaaaa", "one") is not None
        assert siblings.twin("cmpl-1-2-bbbbbbbb", "one") is not None
        assert siblings.twin("cmpl-1-2-bbbbbbbb", "other") is None
        assert siblings.twin("cmpl-1-0-dddddddd", "one") is None
        assert siblings.twin("cmpl-1-1-dddddddd", "one") is None
        assert siblings.twin("1_cmpl-1-1-dddddddd", "one") is None
        assert siblings.twin("1_cmpl-2-1-aaaaaaaa", "one") is None

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("cmpl-job-5-0-aaaaaaaa", "cmpl-job-6-0-bbbbbbbb"),
            ("chatcmpl-job-5-aaaaaaaa", "chatcmpl-job-6-bbbbbbbb"),
            ("chatcmpl-job-aaaaaaaa", "chatcmpl-job-bbbbbbbb"),
            ("mine-1-aaaaaaaa", "mine-2-bbbbbbbb"),
        ],
    )
    def test_requests_that_a_client_numbered_are_no_parts_of_one(self, one: str, other: str) -> None:
        siblings = Siblings()
        publish(siblings, reference(one, "same", 1))
        assert siblings.twin(other, "same") is None

    def test_consumers_that_know_different_leases_find_different_ones(self) -> None:
        siblings = Siblings()
        firsts = [reference(f"cmpl-1-0-{letter * 8}", "first", slot) for slot, letter in enumerate("ab")]
        seconds = [reference(f"cmpl-1-1-{letter * 8}", "second", slot) for slot, letter in enumerate("cd", 2)]
        for it in (*firsts, *seconds):
            publish(siblings, it)
        found = [siblings.find(first.lease, "second") for first in (*firsts, *firsts)]
        assert found[:2] == found[2:]
        assert {it.lease for it in found if it} == {it.lease for it in seconds}
        siblings.ended(seconds[0].lease)
        assert [siblings.find(first.lease, "second") for first in firsts] == [seconds[1]] * 2

    def test_a_lease_that_was_given_out_is_found_last(self) -> None:
        siblings = Siblings()
        asked, alone = reference("cmpl-1-0-aaaaaaaa", "first", 0), reference("cmpl-1-0-bbbbbbbb", "second", 1)
        later = reference("cmpl-1-1-cccccccc", "second", 2)
        for it in (asked, later, alone):
            publish(siblings, it)
        assert siblings.find(asked.lease, "second") == later

    def test_leases_of_a_batch_whose_first_prompt_left_nothing_are_known_to_no_consumer(self) -> None:
        siblings = Siblings()
        publish(siblings, reference("cmpl-1-1-aaaaaaaa", "one", 1))
        publish(siblings, reference("cmpl-1-2-bbbbbbbb", "two", 2))
        assert siblings.unclaimed("cmpl-1-1-aaaaaaaa") == ()
        assert siblings.unclaimed("cmpl-2-0-cccccccc") == ()
        assert {lease.slot for lease in siblings.unclaimed("cmpl-1-0-cccccccc")} == {1, 2}
        publish(siblings, reference("cmpl-1-0-dddddddd", "one", 3))
        assert siblings.unclaimed("cmpl-1-0-cccccccc") == ()

    def test_leases_wait_for_those_of_their_family(self) -> None:
        siblings = Siblings()
        one, other = reference("cmpl-1-0-aaaaaaaa", "one", 1), reference("cmpl-2-0-bbbbbbbb", "two", 2)
        publish(siblings, one)
        publish(siblings, other)
        assert siblings.leases(["cmpl-1-1-cccccccc", "cmpl-3-0-dddddddd"]) == (one.lease,)
        assert siblings.leases([]) == ()


class TestSeeking:
    def test_a_producer_answers_on_its_channel(self) -> None:
        siblings = Siblings()
        one, other = reference("cmpl-1-0-aaaaaaaa", "one", 1), reference("cmpl-1-1-bbbbbbbb", "other", 2)
        for it in (one, other):
            publish(siblings, it)
        listener = Listener("127.0.0.1:0", KEYS)
        try:
            address = f"127.0.0.1:{listener.port}"
            assert seek(address, Seek("1", one.lease, "other"), KEYS, PATIENCE_S) is None
            empty = Manifest(Identity("P", "1", "m"), (), (), (), ())
            listener.welcome(Welcome("P", "1", 60.0, (Card(empty, empty, b""),)), lambda it: siblings.find(it.lease, it.digest))
            assert seek(address, Seek("1", one.lease, "other"), KEYS, PATIENCE_S) == other
            assert seek(address, Seek("1", one.lease, "third"), KEYS, PATIENCE_S) is None
            assert ask(address, Hello("D", "2"), KEYS, PATIENCE_S).engine == "P"
        finally:
            listener.close()

    def test_nobody_at_the_address_is_said(self) -> None:
        with pytest.raises(SessionError, match=r"nobody listens at 127\.0\.0\.1:1"):
            seek("127.0.0.1:1", Seek("1", Lease(0, 1), "d"), KEYS, PATIENCE_S)

    def test_a_side_that_closes_does_not_wait(self) -> None:
        stop = threading.Event()
        stop.set()
        listener = Listener("127.0.0.1:0", KEYS)
        listener._answer = lambda data: None  # type: ignore[method-assign]
        try:
            with pytest.raises(SessionError, match="this engine is closing"):
                seek(f"127.0.0.1:{listener.port}", Seek("1", Lease(0, 1), "d"), KEYS, PATIENCE_S, stop)
        finally:
            listener.close()
