"""What two sides say to each other, as bytes: it comes back as it was, and of anything else only DecodeError is heard."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest

from kvferry.errors import DecodeError
from kvferry.session import Card, Hello, Lease, Refusal, Release, Renew, Welcome, Words
from kvferry.session.messages import MAX_LEASES, MAX_REQUEST, MAX_WELCOME, Reply, Request, pack, unpack_reply, unpack_request
from pairs import manifests_of

MUTANTS = 5000
BUDGET = 64 << 20

CACHES = manifests_of("blocks of 12 to 8")[0]
CARD = Card(CACHES, Words(4, CACHES.identity).manifest, b"how to reach it")
REQUESTS: list[Request] = [
    Hello("engine", "start"),
    Renew("start", (Lease(0, 1), Lease(1 << 40, (1 << 63) - 1))),
    Renew("start", ()),
    Release("start", Lease(3, 4), "reader", "loaded"),
]
REPLIES: list[Reply] = [Welcome("engine", "start", 60.0, (CARD, CARD)), Refusal("not here")]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_come_back_as_they_were(message):
    assert unpack_request(pack(message)) == message
    with pytest.raises(DecodeError, match="not a reply"):
        unpack_reply(pack(message))


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_come_back_as_they_were(message):
    assert unpack_reply(pack(message)) == message
    with pytest.raises(DecodeError, match="not a request"):
        unpack_request(pack(message))


def test_fields_of_a_newer_version_are_ignored_except_in_a_lease():
    raw = msgspec.msgpack.decode(pack(REQUESTS[3])) | {"remark": 1}
    assert unpack_request(msgspec.msgpack.encode(raw)) == REQUESTS[3]
    raw["lease"]["remark"] = 1
    with pytest.raises(DecodeError, match="remark"):
        unpack_request(msgspec.msgpack.encode(raw))


def test_what_is_longer_than_the_other_side_takes_is_not_read_and_not_sent(monkeypatch):
    with pytest.raises(DecodeError, match="the cap is 16,384"):
        unpack_request(bytes(MAX_REQUEST + 1))
    monkeypatch.setattr("kvferry.session.messages.MAX_WELCOME", 100)
    with pytest.raises(DecodeError, match="the cap is 100"):
        unpack_reply(bytes(101))
    with pytest.raises(DecodeError, match=r"a Welcome of .* bytes is not sent"):
        pack(REPLIES[0])
    with pytest.raises(DecodeError, match=r"a Hello of .* bytes is not sent"):
        pack(Hello("e" * MAX_REQUEST, "start"))
    assert MAX_WELCOME >= 256 * MAX_REQUEST


def test_as_many_leases_as_one_renewal_may_name_fit_into_it():
    leases = tuple(Lease((1 << 40) - i, (1 << 63) - 1 - i) for i in range(MAX_LEASES))
    assert unpack_request(pack(Renew("s" * 256, leases))) == Renew("s" * 256, leases)
    with pytest.raises(DecodeError):
        unpack_request(pack(Renew("s", (*leases, Lease(0, 1)))))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (REQUESTS[0], "engine", ""),
        (REQUESTS[0], "engine", "e" * 257),
        (REQUESTS[0], "version", "1"),
        (REQUESTS[0], "type", "hallo"),
        (REQUESTS[3], "note", "n" * 257),
        (REQUESTS[3], "lease", {"slot": -1, "generation": 1}),
        (REQUESTS[3], "lease", {"slot": 0, "generation": 0}),
        (REQUESTS[3], "lease", {"slot": 0, "generation": 1 << 63}),
        (REPLIES[0], "lease_s", 0.0),
        (REPLIES[0], "lease_s", -1.0),
        (REPLIES[0], "lease_s", float("nan")),
        (REPLIES[0], "lease_s", "60"),
        (REPLIES[0], "cards", []),
        (REPLIES[1], "reason", "r" * 4097),
    ],
)
def test_values_out_of_their_range_are_refused(message, field, value):
    raw = msgspec.msgpack.decode(pack(message)) | {field: value}
    with pytest.raises(DecodeError):
        (unpack_request if message in REQUESTS else unpack_reply)(msgspec.msgpack.encode(raw))


def mutant(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            out[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 2:
            del out[at : at + rng.randint(1, 9)]
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            out[at : at + 5] = rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + struct.pack(">I", rng.getrandbits(32))
        else:
            out[at : at + 9] = rng.choice([b"\xcf", b"\xd3", b"\xcb"]) + rng.randbytes(8)
    return bytes(out)


def heard(unpack: Any, data: bytes) -> Any:
    try:
        return unpack(data)
    except DecodeError:
        return None


@pytest.mark.parametrize(("unpack", "messages"), [(unpack_request, REQUESTS), (unpack_reply, REPLIES)])
def test_mutants_are_messages_or_refused_and_take_little_memory(unpack, messages):
    rng = random.Random(11)
    packed = [pack(message) for message in messages]
    mutants = [mutant(rng, rng.choice(packed)) for _ in range(MUTANTS)]
    tracemalloc.start()
    found = [heard(unpack, data) is None for data in mutants]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < BUDGET
    assert MUTANTS // 3 < sum(found) < MUTANTS


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x91" * 100_000, b"\x81\xa4type" * 1000, b"\xff" * 100]
)
def test_what_is_no_message_at_all_is_refused(data):
    for unpack in (unpack_request, unpack_reply):
        with pytest.raises(DecodeError):
            unpack(data)
