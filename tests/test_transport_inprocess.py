"""The in-process transport's faults: each does what it says, and nothing happens without a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.plan import Binder
from kvferry.transport import InProcessTransport, State, Storage
from kvferry.transport.faults import Corrupt, Delay, Drop, Duplicate, Fault, LateLanding, PeerDeath, Reorder
from kvferry.transport.inprocess import InProcessRead
from transport_suite import Clock, Crossing, InProcessWharf, crossing, dense_case


@dataclass
class Scene:
    """One crossing with faults scripted by read."""

    wharf: InProcessWharf
    made: Crossing
    transport: InProcessTransport
    clock: Clock

    def read(self, notification: bytes = b"done") -> InProcessRead:
        plan = self.made.plans[0]
        prepared = self.transport.prepare(plan, 0, self.transport.connect(self.made.metadata[0]))
        return self.transport.read(prepared, Binder(plan).tiles(self.made.case.request), notification)

    def heard(self) -> list[bytes]:
        return [message for _, _, message in self.wharf.heard()]

    def blank(self) -> None:
        for buffer in self.made.here[0].buffers:
            buffer[:] = 0


def scene(*scripts: Sequence[Fault]) -> Scene:
    wharf, clock = InProcessWharf(), Clock()
    made = crossing(wharf, dense_case(scattered=True))
    transport = InProcessTransport("d", wharf.harbour, dict(enumerate(scripts)), timeout_s=5, clock=clock)
    transport.register(made.here[0].storages)
    return Scene(wharf, made, transport, clock)


def test_without_faults_bytes_land_at_the_first_poll_and_not_before():
    s = scene()
    read = s.read()
    assert s.made.differing()
    assert s.heard() == []
    assert s.transport.poll(read) is State.DONE
    assert s.made.differing() == 0
    assert s.heard() == [b"done"]


def test_dropped_bytes_time_out_by_the_clock_that_was_passed_in():
    s = scene([Drop()])
    read = s.read()
    before = [b.copy() for b in s.made.here[0].buffers]
    assert [s.transport.poll(read) for _ in range(100)] == [State.RUNNING] * 100
    s.clock.now = 5.1
    assert s.transport.poll(read) is State.FAILED
    assert "nothing arrived for 5 s" in read.error
    assert s.transport.release(read)
    assert all(np.array_equal(a, b) for a, b in zip(before, s.made.here[0].buffers, strict=True))
    assert s.heard() == []
    assert s.transport.poll(s.read()) is State.DONE


def test_a_dropped_notification_leaves_the_bytes():
    s = scene([Drop("notification")])
    assert s.transport.poll(s.read()) is State.DONE
    assert s.made.differing() == 0
    assert s.heard() == []


def test_delay_by_polls():
    s = scene([Delay(polls=3)])
    read = s.read()
    assert [s.transport.poll(read) for _ in range(4)] == [State.RUNNING] * 3 + [State.DONE]


def test_delay_by_the_clock():
    s = scene([Delay(seconds=2)])
    read = s.read()
    assert s.transport.poll(read) is State.RUNNING
    assert s.made.differing()
    s.clock.now = 2.0
    assert s.transport.poll(read) is State.DONE
    assert s.transport.telemetry(read).wire_s == 2.0


def test_a_duplicate_notification_is_delivered_twice():
    s = scene([Duplicate()])
    assert s.transport.poll(s.read()) is State.DONE
    assert s.heard() == [b"done", b"done"]


def test_duplicate_bytes_land_again_until_released():
    s = scene([Duplicate("bytes")])
    read = s.read()
    assert s.transport.poll(read) is State.DONE
    s.blank()
    assert s.transport.release(read)
    assert any(b.any() for b in s.made.here[0].buffers)
    s.blank()
    s.transport.poll(read)
    assert not any(b.any() for b in s.made.here[0].buffers)


def test_reordered_runs_land_over_several_polls_and_all_of_them_do():
    s = scene([Reorder(seed=3, polls=4)])
    read = s.read()
    missing = [s.made.differing()]
    while s.transport.poll(read) is State.RUNNING:
        assert s.heard() == []
        missing.append(s.made.differing())
    assert missing == sorted(missing, reverse=True)
    assert len(set(missing)) == 4
    assert s.made.differing() == 0
    first = scene([Reorder(seed=4, polls=4)])
    assert not np.array_equal(first.read().runs[1], scene().read().runs[1])


def test_corrupt_flips_one_byte():
    s = scene([Corrupt(run=100, byte=7)])
    assert s.transport.poll(s.read()) is State.DONE
    assert s.made.differing() == 1


def test_a_late_landing_fails_first_and_lands_before_release_says_true():
    s = scene([LateLanding(releases=2)])
    read = s.read()
    assert s.transport.poll(read) is State.FAILED
    s.blank()
    assert [s.transport.release(read) for _ in range(2)] == [False, False]
    assert not any(b.any() for b in s.made.here[0].buffers)
    assert s.transport.release(read)
    assert any(b.any() for b in s.made.here[0].buffers)
    s.blank()
    s.transport.poll(read)
    assert not any(b.any() for b in s.made.here[0].buffers)
    assert s.heard() == []


def test_a_peer_that_dies_in_the_middle_leaves_part_of_the_bytes():
    s = scene([PeerDeath(after_runs=5)])
    whole = s.made.differing()
    read = s.read()
    assert s.transport.poll(read) is State.FAILED
    assert "it died; 5 of 24 runs had arrived" in read.error
    assert 0 < s.made.differing() < whole
    assert s.transport.release(read)
    with pytest.raises(TransportError, match="not in this harbour"):
        InProcessTransport("other", s.wharf.harbour).connect(s.made.metadata[0])
    with pytest.raises(TransportError, match="it died"):
        s.transport.notify(read.peer, b"?")


def test_faults_are_those_of_the_read_they_were_scripted_for():
    s = scene([], [Drop()], [])
    reads = [s.read() for _ in range(3)]
    assert [s.transport.poll(read) for read in reads] == [State.DONE, State.RUNNING, State.DONE]


def test_device_memory_is_refused():
    with pytest.raises(TransportError, match="use NIXL"):
        scene().transport.register([Storage(0, 1, "vram")])
