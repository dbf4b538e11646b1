"""Types that several threads may decode at once, the first time too: msgspec looks into a type then, and must have done so
before, or it ends the process. Python's lock changes hands as often as it can here."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import sys, threading
sys.setswitchinterval(1e-6)

def race(work, threads=8):
    go, ended = threading.Barrier(threads), []

    def one():
        go.wait()
        for _ in range(3):
            work()
        ended.append(1)

    many = [threading.Thread(target=one) for _ in range(threads)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    print(len(ended), "ended")
"""

METADATA = """
from kvferry.transport.metadata import Metadata, encode_metadata, open_metadata

data = encode_metadata(Metadata("nixl", "name", "host", (), b"blob"))
race(lambda: open_metadata(data))
"""

MANIFEST = """
from kvferry.manifest import Identity, Manifest, decode, encode

data = encode(Manifest(Identity("engine", "1", "model"), (), (), (), ()))
race(lambda: decode(data, Manifest))
"""

PLAN = """
from kvferry.manifest import Identity
from kvferry.manifest.codec import decode, encode
from kvferry.plan import Plan
from kvferry.plan.schema import Side

data = encode(Plan(Side(Identity("engine", "1", "model"), (), ()), (), (), (), (), ()))
race(lambda: decode(data, Plan))
"""

OFFER = """
from kvferry.strategy.gathering import Free, MARK, _MESSAGES, pack
from kvferry.strategy.scattered import _OFFERS
from kvferry.strategy.staging import Offer
import msgspec

data = msgspec.msgpack.encode(Offer(0, "dram", 0, 1 << 14, 1, 0, b"s" * 16))
told = pack(Free(b"s" * 16, (1,)))[len(MARK):]
race(lambda: (_OFFERS.decode(data), _MESSAGES.decode(told)))
"""


@pytest.mark.parametrize("work", [METADATA, MANIFEST, PLAN, OFFER], ids=["metadata", "manifest", "plan", "offer"])
def test_threads_that_decode_a_type_for_the_first_time_together_all_have_it(work: str) -> None:
    for _ in range(6):
        found = subprocess.run([sys.executable, "-c", HEAD + work], capture_output=True, text=True, check=False, timeout=60)
        assert (found.returncode, found.stdout) == (0, "8 ended\n"), found.stderr[-2000:]
