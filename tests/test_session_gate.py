"""Who gets in without a key: this machine alone, whoever asks, and nothing is dialled or looked up to find that out."""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from keyed import KEYS, NAMED, opened, sealed
from kvferry.engines.vllm.options import read_options
from kvferry.errors import BadReferenceError, SessionError, TransportError
from kvferry.session import Card, Courier, Hello, Lease, Listener, PeerKey, Reference, Welcome, Words
from kvferry.session.key import loopback, reach
from kvferry.session.reference import seal
from kvferry.session.wire import ask
from kvferry.transport import NixlTransport
from kvferry.transport.metadata import Metadata, encode_metadata, this_host
from pairs import manifests_of
from transport_suite import until

HELLO = Hello("consumer", "d1")
ELSEWHERE = [
    "192.0.2.1",
    "10.0.0.1",
    "0.0.0.0",
    "0",
    "127.1",
    "2130706433",
    "0x7f000001",
    "017700000001",
    "127.0.0.1.example.org",
    "example.org",
    "localhost.example.org",
    "127.0.0.1.nip.io",
    "[::]",
    "[fe80::1%eth0]",
    "[::ffff:192.0.2.1]",
    "[2002:7f00:1::]",
    "[64:ff9b::7f00:1]",
    "::ffff:10.0.0.1",
    "*",
]
HERE = {
    "127.0.0.1": "127.0.0.1",
    "127.1.2.3": "127.1.2.3",
    "localhost": "127.0.0.1",
    "LocalHost": "127.0.0.1",
    "[::1]": "::1",
    "::1": "::1",
    "[0:0:0:0:0:0:0:1]": "::1",
    "[::1%eth0]": "::1",
    "[::ffff:127.0.0.1]": "127.0.0.1",
}


def reference(host: str, port: int = 7000) -> Reference:
    return Reference(f"{host}:{port}", "producer", "p1", "r", Lease(0, 7), 5, {"0": [1]}, "digest")


@pytest.fixture
def reached(monkeypatch) -> list[Any]:
    """Whatever was looked up or dialled, by whichever way; nothing of it happens."""
    out: list[Any] = []

    def note(*arguments: Any, **_: Any) -> Any:
        out.append(arguments)
        raise OSError("not in this test")

    for owner, name in ((socket, "getaddrinfo"), (socket.socket, "connect"), (zmq.Socket, "connect")):
        monkeypatch.setattr(owner, name, note)
    return out


@pytest.mark.parametrize("host", ELSEWHERE)
def test_without_a_key_a_reference_that_leads_beyond_this_machine_is_refused(host):
    if host == "*":
        pytest.skip("no reference can say so")
    params = json.loads(json.dumps(sealed(reference(host))))
    with pytest.raises(BadReferenceError, match=r"without a key none is believed .*: set key_file"):
        opened(params)


@pytest.mark.parametrize("host", HERE)
def test_without_a_key_references_of_this_machine_are_believed(host):
    assert opened(sealed(reference(host))) == reference(host)


def test_with_a_key_references_lead_anywhere():
    found = reference("prefill-0.example.org")
    assert opened(sealed(found, NAMED), NAMED) == found


@pytest.mark.parametrize("port", [0, 65536, 99999])
@pytest.mark.parametrize("held", [KEYS, NAMED])
def test_references_to_a_port_that_nobody_has_are_damaged(port, held):
    with pytest.raises(BadReferenceError, match="is damaged"):
        opened(sealed(reference("127.0.0.1", port), held), held)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_without_a_key_nothing_beyond_this_machine_is_dialled_or_looked_up(host, reached):
    with pytest.raises(SessionError, match=r"needs a key"):
        ask(f"{host}:7000", HELLO, KEYS, 1.0)
    courier: Courier[str] = Courier(HELLO, KEYS, 1.0, lambda peer, welcome: "met")
    try:
        with pytest.raises(SessionError, match="needs a key"):
            courier.introduce(f"{host}:7000")
        courier.hold("r", reference(host))
        until(lambda: courier.peer(reference(host)) is not None, "an answer")
        assert "needs a key" in str(courier.peer(reference(host)))
        courier.release("r", reference(host), "over")
    finally:
        courier.close()
    assert reached == []


@pytest.mark.parametrize("host", ELSEWHERE)
def test_without_a_key_nobody_beyond_this_machine_can_dial_in(host):
    with pytest.raises(SessionError, match="needs a key"):
        Listener(f"{host}:0", KEYS)


def test_this_machine_is_known_by_its_numbers_and_one_name():
    assert {host: loopback(host.strip("[]")) for host in HERE} == HERE
    assert not any(loopback(host.strip("[]")) for host in ("", *ELSEWHERE))


def test_a_name_that_others_could_give_a_meaning_is_never_looked_up(closing_listener, reached):
    """`localhost` stands for its number here, whatever the resolver says."""
    assert reach("localhost:7000", KEYS) == ("127.0.0.1", 7000)
    assert closing_listener.port
    assert reached == []


@pytest.fixture
def closing_listener() -> Iterator[Listener]:
    made = Listener("localhost:0", KEYS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ({"listen": "0.0.0.0:7600"}, "listen on 0.0.0.0"),
        ({"listen": "prefill-0:7600"}, "listen on prefill-0"),
        ({"advertise": "10.0.0.7"}, "advertise 10.0.0.7"),
        ({"advertise": "prefill-0"}, "advertise prefill-0"),
        ({"peers": ["127.0.0.1:1", "10.0.0.7:7600"]}, "peers with 10.0.0.7"),
        ({"peers": ["example.org:7600"]}, "peers with example.org"),
    ],
)
def test_options_that_lead_beyond_this_machine_need_a_key_at_the_start(said, option, tmp_path):
    with pytest.raises(SessionError, match=f"{option} needs a key: set key_file"):
        read_options(said)
    assert read_options({"listen": "0.0.0.0:0", **said, "key_file": str(tmp_path / "key")})


def test_options_of_this_machine_need_none():
    found = read_options({"listen": "localhost:0", "advertise": "::1", "peers": ["127.0.0.1:7600", "[::1]:7600"]})
    assert found.advertised(7) == "[::1]:7"


def test_a_greatest_age_below_the_time_of_a_silent_consumer_is_refused_at_the_start():
    with pytest.raises(SessionError, match="lease_most_s 30 is less than lease_s 60"):
        read_options({"lease_most_s": 30})
    assert read_options({"lease_most_s": 60}).lease_most_s == 60


def test_threads_of_a_gpu_engine_switch_sooner_and_none_ever_later_than_they_did():
    usual, told = read_options({}), read_options({"switch_s": 0.001})
    assert [usual.switching_s(device, 0.005) for device in ("cuda", "cpu")] == [0.0001, 0.005]
    assert [told.switching_s(device, 0.005) for device in ("cuda", "cpu")] == [0.001, 0.001]
    assert usual.switching_s("cuda", 0.00005) == told.switching_s("cpu", 0.00005) == 0.00005
    with pytest.raises(SessionError, match="switch_s"):
        read_options({"switch_s": 0})


@pytest.mark.parametrize("host", ["http://prefill-0", "prefill 0", "prefill-0\nINFO", "[::1]", "é"])
def test_what_is_no_host_is_not_advertised(host, tmp_path):
    options = read_options({"advertise": host, "key_file": str(tmp_path / "key")})
    with pytest.raises(SessionError, match="is not an address"):
        options.advertised(7600)


CACHES = manifests_of("blocks of 12 to 8")[0]


def card(metadata: bytes) -> Card:
    return Card(CACHES, Words(2, CACHES.identity).manifest, metadata)


def of_host(host: str) -> bytes:
    return encode_metadata(Metadata("nixl", "p.0#1", host, (), b"blob"))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (of_host("another"), r"peer p\.0#1 is on another host, and without a key"),
        (b"anything", "not a peer's metadata"),
        (of_host("another")[:-1], "not a peer's metadata"),
    ],
)
def test_without_a_key_the_answer_of_another_host_is_not_handed_to_the_transport(metadata, said):
    """A port of this machine may be the end of a tunnel."""
    for held, cards in ((KEYS, (of_host(this_host()), metadata)), (NAMED, (metadata,)), (KEYS, (of_host(this_host()),))):
        listener = Listener("127.0.0.1:0", held)
        listener.welcome(Welcome("producer", "p1", 60.0, tuple(card(found) for found in cards)))
        met: list[PeerKey] = []
        courier: Courier[str] = Courier(HELLO, held, 20.0, lambda peer, welcome, met=met: met.append(peer) or "met")
        found = reference("127.0.0.1", listener.port)
        try:
            until(lambda courier=courier, found=found: courier.peer(found) is not None, "an answer")
            if metadata in cards and held is KEYS:
                assert re.search(said, str(courier.peer(found)))
                with pytest.raises(TransportError, match=said):
                    courier.introduce(found.address)
                assert met == []
            else:
                assert courier.peer(found) == "met"
        finally:
            courier.close()
            listener.close()


def listening_beyond() -> list[str]:
    """Addresses of other interfaces on which this process listens."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()}
    out = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, state, inode = fields[1], fields[3], fields[9]
        if f"socket:[{inode}]" in mine and state == "0A" and not local.startswith("0100007F"):
            out.append(local)
    return out


def test_without_a_key_the_transport_too_listens_on_this_machine_only(monkeypatch):
    pytest.importorskip("nixl_cu12")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = listening_beyond()
    transport = NixlTransport("p", read_options({"progress_thread": False}).nixl)
    try:
        assert listening_beyond() == before
    finally:
        transport.close()
    assert "UCX_NET_DEVICES" not in read_options({"key_file": "/run/key"}).nixl.ucx
    assert read_options({"ucx": {"UCX_NET_DEVICES": "lo,eth0"}}).nixl.ucx == {"UCX_NET_DEVICES": "lo,eth0"}


def test_seals_are_compared_in_a_time_that_tells_nothing(monkeypatch):
    compared = []
    compare = hmac.compare_digest

    def noted(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    params = sealed(reference("127.0.0.1"), NAMED)
    assert opened(params, NAMED) == reference("127.0.0.1")
    wanted = seal(reference("127.0.0.1"), NAMED.first).encode()
    assert compared == [(wanted, wanted)]


@pytest.mark.parametrize("said", [None, 7, b"x", "", "é", "\ud800", "0" * 31, "0" * 32, "0" * 100_000, ["0" * 32]])
def test_a_seal_of_any_kind_is_compared_and_refused(said):
    with pytest.raises(BadReferenceError, match="not as it was given out"):
        opened({**sealed(reference("127.0.0.1")), "seal": said})
