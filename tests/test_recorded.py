"""What earlier releases say is understood, and they understand this one: their bytes were kept, and are replayed."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.errors import DecodeError, SessionError, TransportError
from kvferry.manifest.codec import decode
from kvferry.plan import Plan
from kvferry.session import (
    Found,
    Hello,
    Key,
    Keys,
    Lease,
    Listener,
    Reference,
    Refusal,
    Release,
    Renew,
    Welcome,
    messages,
    read_keys,
    seek,
    wire,
)
from kvferry.session import listener as listening
from kvferry.session.messages import Seek, VersionError, Versions, pack, unpack_reply, unpack_request, versions_of
from kvferry.session.reference import from_params
from kvferry.session.wire import ask, dial
from kvferry.strategy import choose
from kvferry.strategy.gathering import MARK, Ask, Asks, Free, Introduction, Message, digest_of
from kvferry.strategy.staging import Offer
from kvferry.transport.metadata import open_metadata
from recorded import first_release
from transport_suite import until

FOLDER = Path(__file__).parent / "recorded"
RECORDED = sorted(FOLDER.glob("[0-9]-*.json"))
PATIENCE_S = 20.0
LEASE = Lease(1, (1 << 62) + 5)
OTHER = Lease(0, 7)
HELLO = Hello("consumer", "d1")
NOT_REPEATED = ("versions", "grace_s")
"""What this release says otherwise, or no more."""

each = pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)


def recorded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def raw(text: str) -> bytes:
    return base64.b64decode(text)


def tree(data: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(data)


def keys_in(folder: Path, text: str) -> Keys:
    path = folder / "key"
    path.touch(0o600)
    path.write_text(text)
    return read_keys(path)


def reference_of(found: dict[str, Any], keys: Keys) -> Reference:
    return from_params(found["reference"], keys)


@pytest.fixture
def spoken(monkeypatch) -> Any:
    """This side as another release, which speaks these versions."""

    def speak(lowest: int, highest: int) -> None:
        for module in (messages, listening, wire):
            monkeypatch.setattr(module, "SPOKEN", Versions(lowest, highest))

    return speak


def test_there_are_recordings_of_the_first_release_and_of_this_one():
    assert [path.stem for path in RECORDED] == ["1-version-alone", "2-with-versions", "3-without-grace"]


@each
def test_what_a_consumer_of_an_earlier_release_says_is_answered_and_heard(path, tmp_path):
    found = recorded(path)
    keys = keys_in(tmp_path, found["key"])
    listener = Listener("127.0.0.1:0", keys, lambda incarnation, lease: incarnation == "p1" and lease in (LEASE, OTHER))
    welcome, reference = unpack_reply(raw(found["welcome"])), reference_of(found, keys)
    assert isinstance(welcome, Welcome)
    listener.welcome(welcome, lambda message: reference if message == Seek("p1", LEASE, reference.digest) else None)
    heard: list[Renew | Release] = []
    try:
        with zmq.Context() as context, dial(context, ("127.0.0.1", listener.port), keys.first, 1 << 28, {}) as end:
            for said in found["conversation"]:
                if "consumer" in said:
                    end.send(raw(said["consumer"]))
                    continue
                assert end.poll(PATIENCE_S * 1000)
                answer = end.recv()
                then, now = tree(raw(said["producer"])), tree(answer)
                assert {name: now.get(name) for name in then if name not in NOT_REPEATED} == {
                    name: value for name, value in then.items() if name not in NOT_REPEATED
                }
                assert now.get("versions", [1, 1])[0] == 1
                assert unpack_reply(answer) == unpack_reply(raw(said["producer"]))
            until(lambda: heard.extend(listener.take()) or len(heard) >= 2, "what was said of leases", PATIENCE_S)
    finally:
        listener.close()
    assert set(heard) == {Renew("p1", (LEASE, OTHER)), Release("p1", LEASE, "consumer@d1", "loaded")}
    assert listener.refused == 0


@pytest.fixture
def answering(tmp_path) -> Iterator[Any]:
    """A producer of an earlier release: it answers a greeting and a question with what was recorded."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as end:
        end.setsockopt(zmq.LINGER, 0)

        def answer(key: Key, replies: list[bytes]) -> str:
            end.curve_server, end.curve_secretkey, end.curve_publickey = True, key.secret, key.public
            port = end.bind_to_random_port("tcp://127.0.0.1")

            def serve() -> None:
                for reply in replies:
                    if not end.poll(PATIENCE_S * 1000):
                        return
                    sender, _ = end.recv_multipart()
                    end.send_multipart([sender, reply])

            threads.append(threading.Thread(target=serve, daemon=True))
            threads[-1].start()
            return f"127.0.0.1:{port}"

        threads: list[Any] = []
        yield answer
        for thread in threads:
            thread.join(PATIENCE_S)


@each
def test_what_a_producer_of_an_earlier_release_answers_is_understood(path, answering, tmp_path):
    found = recorded(path)
    keys = keys_in(tmp_path, found["key"])
    replies = [raw(said["producer"]) for said in found["conversation"] if "producer" in said]
    address = answering(keys.first, replies)
    welcome = ask(address, HELLO, keys, PATIENCE_S)
    assert (welcome.engine, welcome.incarnation, welcome.lease_s, welcome.version) == ("producer", "p1", 60.0, 1)
    assert (welcome.role, welcome.cards[0].beacon) == ("both", -5)
    assert welcome.cards[0].caches.groups
    reference = reference_of(found, keys)
    assert seek(address, Seek("p1", LEASE, reference.digest), keys, PATIENCE_S) == reference
    assert reference.lease == LEASE
    metadata = open_metadata(welcome.cards[0].transport)
    assert (metadata.carrier, metadata.name, metadata.storages[0].length) == ("nixl", "p.0#1", 1 << 20)
    offer = msgspec.msgpack.decode(metadata.more, type=Offer)
    assert (offer.slots, offer.tokens[0].token) == (4, b"what opens it")


@each
def test_an_engine_of_an_earlier_release_that_is_starting_is_understood(path, answering, tmp_path):
    found = recorded(path)
    keys = keys_in(tmp_path, found["key"])
    with pytest.raises(SessionError, match="refuses: this engine is still starting; ask again"):
        ask(answering(keys.first, [raw(found["refusal"])]), HELLO, keys, PATIENCE_S)


@each
def test_what_was_said_of_gathering_is_understood(path):
    said = {name: raw(text) for name, text in recorded(path)["packed"].items()}
    assert all(data.startswith(MARK) for data in said.values())
    heard = {name: msgspec.msgpack.decode(data[len(MARK) :], type=Message) for name, data in said.items()}
    introduction = heard["introduction"]
    assert isinstance(introduction, Introduction)
    assert decode(introduction.plan, Plan).edges
    digest, secret = digest_of(introduction.plan), bytes(range(16))
    assert heard["ask"] == Ask(secret, digest, 11, ((0, 0, bytes(8), b""),))
    assert heard["asks"] == Asks(secret, digest, ((12, ((0, 0, bytes(4), bytes(4)),)), (13, ())))
    assert heard["free"] == Free(secret, (11, 12))


def test_what_this_release_says_is_understood_by_the_first():
    renew = Renew("p1", (LEASE, OTHER))
    for message in (HELLO, renew, Release("p1", LEASE, "r", "loaded"), Seek("p1", LEASE, "digest")):
        found = msgspec.msgpack.decode(pack(message), type=first_release.Request)
        assert type(found).__name__ == type(message).__name__
        assert getattr(found, "version", 1) == 1
    (welcome,) = (unpack_reply(raw(recorded(path)["welcome"])) for path in RECORDED[:1])
    found = msgspec.msgpack.decode(pack(welcome), type=first_release.Reply)
    assert found.version == 1
    assert found.cards[0].caches == welcome.cards[0].caches
    assert msgspec.msgpack.decode(pack(Refusal("no")), type=first_release.Reply) == first_release.Refusal("no")


@each
def test_an_earlier_consumer_relies_on_no_block_after_its_lease_has_ended(path):
    """Earlier producers said for how long they left blocks alone; to earlier consumers nothing said is no time at all."""
    welcome = unpack_reply(raw(recorded(path)["welcome"]))
    assert msgspec.msgpack.decode(pack(welcome), type=first_release.Reply).grace_s == 0


def test_greetings_of_either_side_say_which_versions_are_spoken():
    welcome = unpack_reply(raw(recorded(RECORDED[0])["welcome"]))
    assert versions_of(raw(recorded(RECORDED[0])["welcome"])) == Versions(1, 1)
    for greeting in (HELLO, welcome, Refusal("no")):
        assert tree(pack(greeting))["versions"] == [messages.SPOKEN.lowest, messages.SPOKEN.highest]
        assert versions_of(pack(greeting)) == messages.SPOKEN
    for other in (Renew("p1", ()), Found(None)):
        assert versions_of(pack(other)) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 3), (1, 2), 2), ((1, 2), (3, 4), None), ((4, 4), (1, 3), None)],
)
def test_the_highest_common_version_is_spoken_whoever_is_newer(ours, theirs, common):
    assert Versions(*ours).common(Versions(*theirs)) == Versions(*theirs).common(Versions(*ours)) == common


def greeting(**fields: Any) -> bytes:
    """Of a release that is not there yet: its greeting has another type, other fields, and the range."""
    return msgspec.msgpack.encode({"type": "hello-3", "engine": 7, "new": {"a": [1]}, **fields})


def test_a_greeting_that_has_no_version_in_common_is_refused_in_words_whatever_else_it_holds():
    for data in (greeting(versions=[2, 4]), greeting(version=2, versions=[2, 4, 9])):
        with pytest.raises(VersionError, match=r"consumer speaks version 2 to 4 .* producer 1: .*update .* producer"):
            unpack_request(data)
        with pytest.raises(VersionError, match=r"consumer speaks version 1 .* producer 2 to 4: .*update .* consumer"):
            unpack_reply(data)
    for data in (greeting(versions=[0, 0]), greeting(versions=[1, 0])):
        with pytest.raises(VersionError, match="none in common"):
            unpack_request(data)


@pytest.mark.parametrize("versions", ["1", [1], [-1, 1], {"a": 1}, [1 << 65, 1], 1.5, None, []])
def test_versions_that_are_none_are_refused_or_not_heard(versions):
    data = (
        msgspec.msgpack.encode({"type": "hello", "engine": "e", "incarnation": "i", "version": 1, "versions": versions})
        if (versions != [1 << 65, 1])
        else b"\x81\xa8versions\x92\xcf" + b"\xff" * 8 + b"\x01"
    )
    try:
        assert unpack_request(data) == Hello("e", "i")
    except DecodeError:
        assert versions == [1 << 65, 1]


def test_a_newer_consumer_that_still_speaks_this_version_is_answered_in_it(spoken, tmp_path):
    keys = keys_in(tmp_path, recorded(RECORDED[0])["key"])
    welcome = unpack_reply(raw(recorded(RECORDED[0])["welcome"]))
    spoken(1, 3)
    newer = pack(Hello("consumer", "d1", version=1))
    spoken(1, 1)
    listener = Listener("127.0.0.1:0", keys)
    listener.welcome(welcome)
    with zmq.Context() as context, dial(context, ("127.0.0.1", listener.port), keys.first, 1 << 28, {}) as end:
        end.send(newer)
        assert end.poll(PATIENCE_S * 1000)
        answer = end.recv()
    listener.close()
    assert versions_of(newer) == Versions(1, 3)
    spoken(1, 3)
    assert unpack_reply(answer) == welcome
    assert unpack_reply(answer).version == 1


@pytest.mark.parametrize(("consumer", "producer", "version"), [((1, 2), (1, 3), 2), ((2, 4), (1, 3), 3), ((1, 1), (1, 3), 1)])
def test_a_listener_answers_in_the_highest_version_that_both_speak(consumer, producer, version, spoken, tmp_path):
    welcome = unpack_reply(raw(recorded(RECORDED[0])["welcome"]))
    keys = keys_in(tmp_path, recorded(RECORDED[0])["key"])
    spoken(*consumer)
    hello = pack(Hello("consumer", "d1", version=consumer[0]))
    spoken(*producer)
    listener = Listener("127.0.0.1:0", keys)
    listener.welcome(welcome)
    with zmq.Context() as context, dial(context, ("127.0.0.1", listener.port), keys.first, 1 << 28, {}) as end:
        end.send(hello)
        assert end.poll(PATIENCE_S * 1000)
        answer = end.recv()
    listener.close()
    assert unpack_reply(answer).version == version


def test_two_releases_without_a_common_version_tell_each_other_so(spoken, tmp_path):
    keys = keys_in(tmp_path, recorded(RECORDED[0])["key"])
    welcome = unpack_reply(raw(recorded(RECORDED[0])["welcome"]))
    first = raw(recorded(RECORDED[0])["conversation"][0]["consumer"])
    spoken(2, 3)
    listener = Listener("127.0.0.1:0", keys)
    listener.welcome(welcome)
    with zmq.Context() as context, dial(context, ("127.0.0.1", listener.port), keys.first, 1 << 28, {}) as end:
        end.send(first)
        assert end.poll(PATIENCE_S * 1000)
        answer = end.recv()
    listener.close()
    refusal = msgspec.msgpack.decode(answer, type=first_release.Reply)
    assert refusal.reason.startswith(
        "the consumer speaks version 1 of the session, the producer 2 to 3: there is none in common"
    )
    assert listener.refused == 1
    spoken(1, 1)
    with pytest.raises(VersionError, match="the consumer speaks version 1 of the session, the producer 2 to 3: there is none"):
        unpack_reply(answer)


def test_an_answer_in_a_version_that_was_not_asked_for_is_an_error(answering, spoken, tmp_path):
    keys = keys_in(tmp_path, recorded(RECORDED[0])["key"])
    welcome = unpack_reply(raw(recorded(RECORDED[0])["welcome"]))
    spoken(1, 5)
    answer = pack(msgspec.structs.replace(welcome, version=5))
    spoken(1, 1)
    with pytest.raises(SessionError, match="answers in version 5 of the session, this side speaks 1"):
        ask(answering(keys.first, [answer]), HELLO, keys, PATIENCE_S)


def test_a_producer_of_another_version_without_a_range_is_refused_in_words(answering, tmp_path):
    keys = keys_in(tmp_path, recorded(RECORDED[0])["key"])
    answer = msgspec.msgpack.encode(tree(raw(recorded(RECORDED[0])["welcome"])) | {"version": 2})
    with pytest.raises(VersionError, match="the consumer speaks version 1 of the session, the producer 2: there is none"):
        ask(answering(keys.first, [answer]), HELLO, keys, PATIENCE_S)


def test_remarks_of_a_newer_transport_are_ignored_and_damage_is_not():
    metadata = unpack_reply(raw(recorded(RECORDED[0])["welcome"])).cards[0].transport
    newer = msgspec.msgpack.encode(tree(metadata) | {"remark": {"a": [1]}})
    assert open_metadata(newer) == open_metadata(metadata)
    with pytest.raises(TransportError, match="damaged"):
        open_metadata(msgspec.msgpack.encode(tree(metadata) | {"remark": 1, "blob": b"another"}))


def test_a_newer_rank_may_say_more_of_how_it_is_read():
    ways = msgspec.msgpack.encode([b"direct", [], {"more": 1}])
    assert msgspec.msgpack.decode(ways, type=choose._Ways).direct == b"direct"
