"""What was sent while a process was stopped is heard before time passes for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import zmq

from kvferry.session import Lease, Release, Renew
from kvferry.session.hearing import MOST_S, SETTLED_S, STOPPED_S, Hearing
from kvferry.session.key import read_keys
from kvferry.session.messages import pack
from kvferry.session.wire import dial
from transport_suite import until

TICK_S = 0.1


def turned(it: Hearing, began: float, times: int = 1, heard: bool = False) -> float:
    """Turns one after the other; returns when the next begins."""
    for _ in range(times):
        it.turned(began, heard, began + TICK_S)
        began += TICK_S
    return began


def test_with_every_turn_that_finds_nothing_all_was_heard_until_it_began():
    it, now = Hearing(0.0), 0.0
    for _ in range(50):
        it.turned(now, False, now + TICK_S)
        assert it.caught_up_at == now
        now += TICK_S


def test_what_is_not_heard_yet_holds_time_up_and_no_longer_than_may_be():
    it = Hearing(0.0)
    now = turned(it, 1.0)
    now = turned(it, now, 20, heard=True)
    assert it.caught_up_at == 1.0
    now = turned(it, now, 200, heard=True)
    assert it.caught_up_at == pytest.approx(now - TICK_S - MOST_S)
    turned(it, now)
    assert it.caught_up_at == now


@pytest.mark.parametrize("waiting", [0, 1, 30])
def test_after_a_stop_time_stands_still_until_nothing_is_found_for_a_while(waiting):
    it = Hearing(0.0)
    before = turned(it, 0.0, 5) - TICK_S
    now = turned(it, before + TICK_S + 60.0)
    assert it.caught_up_at == before
    now = turned(it, now, waiting, heard=True)
    while it.caught_up_at == before:
        quiet = now
        now = turned(it, now)
    assert now - (before + 60.0) > SETTLED_S + waiting * TICK_S
    assert it.caught_up_at == quiet


def test_a_message_that_comes_up_late_begins_the_while_anew():
    it = Hearing(0.0)
    before = turned(it, 0.0) - TICK_S
    now = turned(it, 60.0, 3)
    now = turned(it, now, heard=True)
    now = turned(it, now, 3)
    assert it.caught_up_at == before
    turned(it, now, 2)
    assert it.caught_up_at > 60.0


def test_messages_without_end_after_a_stop_hold_time_up_for_so_long_and_no_longer():
    it = Hearing(0.0)
    before = turned(it, 0.0) - TICK_S
    now = turned(it, 60.0, round(MOST_S / TICK_S), heard=True)
    assert it.caught_up_at == before
    now = turned(it, now, 3, heard=True)
    assert it.caught_up_at >= 60.0


def test_a_turn_that_is_a_little_late_is_no_stop():
    it = Hearing(0.0)
    it.turned(0.0, False, TICK_S)
    it.turned(TICK_S + STOPPED_S, False, 2 * TICK_S + STOPPED_S)
    assert it.caught_up_at == TICK_S + STOPPED_S


PRODUCER = """
import json, sys, time
from kvferry.session import Listener, Producer
from kvferry.session.key import read_keys
producer = Producer("p1", 2, 2.0)
listener = Listener("127.0.0.1:0", read_keys(sys.argv[1]), producer.stands)
producer.open("r")
lease = producer.publish("r", time.monotonic())
print(json.dumps([listener.port, lease.slot, str(lease.generation)]), flush=True)
sys.setswitchinterval(0.1)
while True:
    caught_up_at = listener.caught_up_at
    for message in listener.take():
        producer.receive(message, time.monotonic())
    producer.expire(min(time.monotonic(), caught_up_at))
    for end in producer.take_closing():
        print(json.dumps(end.ending.value), flush=True)
    until = time.monotonic() + 0.01
    while time.monotonic() < until:
        pass
"""


def test_a_lease_that_is_renewed_while_its_producer_is_stopped_stands_when_it_goes_on(tmp_path):
    """It would have expired twice meanwhile. When nothing is said any more, it does. The thread that expires leases computes,
    as an engine's does, and goes on before the listener's."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("Jr5SPBK8eS0yDlVcJ7xqfMpjjaQxn0q3s0pVnEXoP2I=")
    run = subprocess.Popen([sys.executable, "-c", PRODUCER, str(path)], stdout=subprocess.PIPE, text=True)
    said: list[str] = []
    try:
        if run.stdout is None:
            raise RuntimeError("no pipe")
        port, slot, generation = json.loads(run.stdout.readline())
        reader = threading.Thread(target=lambda: said.extend(run.stdout or ()), daemon=True)
        reader.start()
        key, renew = read_keys(path).first, pack(Renew("p1", (Lease(slot, int(generation)),)))
        with zmq.Context() as context, dial(context, ("127.0.0.1", port), key, 1 << 13, {}) as end:

            def renewed_for(seconds: float) -> None:
                until_then = time.monotonic() + seconds
                while time.monotonic() < until_then:
                    end.send(renew)
                    time.sleep(0.1)

            renewed_for(1.0)
            os.kill(run.pid, signal.SIGSTOP)
            renewed_for(4.5)
            os.kill(run.pid, signal.SIGCONT)
            renewed_for(3.0)
            assert said == []
            until(lambda: said == ['"expired"\n'], "the end of a lease that is not renewed", 20.0)
            end.send(pack(Release("p1", Lease(slot, int(generation)), "r")))
    finally:
        run.kill()
        run.wait()
