"""What a round of polling costs and whom it serves first, counted on an agent of our own making."""

from __future__ import annotations

import pytest

from kvferry.transport import State
from nixl_agent import Sea


def rounds(sea: Sea, *reads, until, most: int = 1000) -> int:
    """How many rounds it takes until `until` is over, with all reads asked after in each."""
    for number in range(most):
        if until.state is not State.RUNNING:
            return number
        sea.round(reads)
    raise TimeoutError(f"not over in {most} rounds")


@pytest.mark.parametrize("count", [8, 64, 256])
def test_a_round_looks_at_each_flight_once_however_many_reads_wait(monkeypatch, count):
    sea = Sea(monkeypatch, window=64, blocks=32, rate=0)
    reads = [sea.read(32) for _ in range(count)]
    sea.round(reads)
    assert len(sea.agent.flying) == 2
    for _ in range(3):
        sea.agent.calls.clear()
        sea.round(reads)
        assert sea.agent.calls == {"check": 2}


def test_small_reads_that_are_all_in_flight_are_looked_at_once_a_round(monkeypatch):
    sea = Sea(monkeypatch, window=4096, blocks=64, rate=0)
    reads = [sea.read(20) for _ in range(256)]
    sea.round(reads)
    sea.agent.calls.clear()
    sea.round(reads)
    assert sea.agent.calls == {"check": 256}


def test_a_read_within_the_cap_costs_one_call_of_each_kind(monkeypatch):
    sea = Sea(monkeypatch, window=4096, blocks=4096, rate=4096)
    read = sea.read(4096)
    assert sea.agent.calls == {"make": 1, "transfer": 1}
    assert rounds(sea, read, until=read) <= 2
    assert sea.transport.release(read)
    assert sea.agent.calls == {"make": 1, "transfer": 1, "check": 1, "telemetry": 1, "release": 1}


@pytest.mark.parametrize("descriptors", [1, 4, 10, 100])
def test_a_small_read_does_not_wait_behind_a_large_one(monkeypatch, descriptors):
    """It has at most what is in flight before it: a window of the large one, which is 256 descriptors or 8 rounds."""
    sea = Sea(monkeypatch, window=256, blocks=4096)
    large = sea.read(4096)
    sea.round([large])
    tiny = sea.read(descriptors)
    assert rounds(sea, large, tiny, until=tiny) <= 8 + descriptors // 32 + 3
    assert rounds(sea, large, tiny, until=large) >= 100


def test_a_word_is_posted_at_once_whatever_is_in_flight(monkeypatch):
    sea = Sea(monkeypatch, window=8, blocks=64, rate=0)
    for _ in range(4):
        sea.read(64)
    before = sea.agent.calls["transfer"]
    sea.read(1)
    assert sea.agent.calls["transfer"] == before + 1


def test_of_equal_reads_one_ends_after_the_other(monkeypatch):
    """Shared evenly, all would end last; served in turn, half of them have ended when half of the bytes have landed."""
    sea = Sea(monkeypatch, window=64, blocks=512)
    reads = [sea.read(512) for _ in range(8)]
    left = set(reads)
    over = []
    while left:
        sea.round(reads)
        ended = {read for read in left if read.state is State.DONE}
        over.append(len(ended))
        left -= ended
    assert sum(over[: len(over) * 5 // 8]) >= 4


def test_a_large_read_ends_although_smaller_ones_keep_coming(monkeypatch):
    sea = Sea(monkeypatch, window=64, blocks=640)
    large = sea.read(640)
    others = [sea.read(60) for _ in range(4)]
    for _ in range(2000):
        if large.state is State.DONE:
            return
        sea.round([large, *others])
        others = [sea.read(60) if read.state is State.DONE else read for read in others]
    raise AssertionError("the large read starved")


def test_no_more_is_in_flight_than_the_window_and_small_reads_beside_it(monkeypatch):
    sea = Sea(monkeypatch, window=128, blocks=1024)
    reads = [sea.read(n) for n in (1024, 100, 2, 640, 1, 128, 2)]
    while any(read.state is State.RUNNING for read in reads):
        sea.round(reads)
    assert sea.agent.most <= 128 + 5


def test_a_round_does_not_post_for_long(monkeypatch):
    """Posting takes 10 us a descriptor here, and everything lands at once: other reads are heard between windows."""
    now = [0.0]
    sea = Sea(monkeypatch, window=1024, blocks=4096, rate=1 << 20, clock=lambda: now[0])
    sea.agent.posting = lambda descriptors: now.__setitem__(0, now[0] + 1e-5 * descriptors)
    large = sea.read(4096)
    while large.state is State.RUNNING:
        before = now[0]
        sea.round([large])
        assert now[0] - before <= 1e-5 * 512 + 1e-9
    assert sea.agent.calls["transfer"] == 8


def test_a_read_of_which_nobody_says_what_it_moved_fails_and_its_handle_is_given_back(monkeypatch):
    sea = Sea(monkeypatch, window=64, blocks=32, rate=64)
    read = sea.read(32)

    def silent(handle: object) -> None:
        raise RuntimeError("no telemetry")

    monkeypatch.setattr(sea.agent, "get_xfer_telemetry", silent)
    rounds(sea, read, until=read)
    assert read.state is State.FAILED
    assert "no telemetry" in read.error
    assert sea.transport.release(read)
    assert sea.agent.flying == []
