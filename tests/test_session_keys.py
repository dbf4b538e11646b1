"""Key files: which are taken, what they derive, where the one of a user is kept, and how keys are replaced in what runs."""

from __future__ import annotations

import base64
import itertools
import logging
import multiprocessing
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyed import Fixed
from kvferry.errors import KVFerryError, SessionError
from kvferry.session import (
    Courier,
    Hello,
    Keys,
    Lease,
    Listener,
    Reference,
    Release,
    Renew,
    Seek,
    from_params,
    keys_of,
    own_key,
    own_keys,
    read_keys,
    seek,
    to_params,
)
from kvferry.session import key as key_module
from kvferry.session import listener as listening
from kvferry.session.key import keys_in
from kvferry.session.wire import SilentError, ask
from test_session_wire import welcome
from transport_suite import until

HELLO = Hello("consumer", "d1")
PATIENCE_S = 30.0
SHORT_S = 1.5
TEXT = b"a key of the cluster, for all of its sides"
OLD, NEW = b"the old key of the cluster, forty letters", b"the new key of the cluster, forty letters"


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    """Whole at once, as an editor or Kubernetes replaces a file."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    beside.chmod(mode)
    beside.rename(path)
    return path


def secrets_in(content: bytes) -> list[str]:
    return [key.secret.decode() for key in keys_in(content, "the key file")]


# What 7e875d2 derived of these files.
VECTORS = {
    TEXT: "bb+u8?=C18NrtM)r<jC5iv<I<!%Th>VD(tcUYfIs",
    b" \t" + TEXT + b"\r\n\n": "bb+u8?=C18NrtM)r<jC5iv<I<!%Th>VD(tcUYfIs",
    base64.b64encode(bytes(range(32))) + b"\n": "!ve]{bB7-R58A0+]df]F^HLyq!YElgMV[UE-:hMi",
    base64.encodebytes(bytes(range(96))): "fH$@ayMp+Vmt?[)HO)?WRLt2JOGw?[ju<Xh]Dkg0",
    bytes(range(32, 64)) + b"\xff": "?fEK7UVWjP^x!31YgSDOVJ5yJ@&Jxm=7Vo>]t]Ms",
    b"\n" + bytes(range(1, 60)) + b" \x0b": "h%ydPD.2F=L[HQG/h0h-2<wYvCywkro^!wN9/lLW",
    b"key: one\nkey: two is long enough to be taken": "^fMb*TY#W{vM31Zj%3l%DQHWj6c)#g)-(7:>pI+W",
    "Ключ, общий для всех сторон".encode(): "6oV%6.H&PhK<KWGM#jn+n1w5%*}%Gxr?ftK+1I*O",
}


@pytest.mark.parametrize("content", VECTORS, ids=range(len(VECTORS)))
def test_keys_derive_what_they_always_derived(content):
    assert secrets_in(content) == [VECTORS[content]]


def test_raw_keys_are_taken_whatever_bytes_they_end_with():
    raw = bytes(range(200, 230))
    for head, tail in itertools.product((b"", b" ", b"\n\t"), (b"", b"\x0b", b"\r\n", b"  ")):
        content = head + raw + tail
        if len(content) >= 32:
            assert len(secrets_in(content)) == 1
    assert secrets_in(raw + b"\n\n") != secrets_in(raw + b"\n ")


@pytest.mark.parametrize(
    "content", [b"", b" " * 40, b"short", b"short" + b"\n" * 40, b"k" * 31 + b"\n", "é".encode() * 15 + b"\n\n"]
)
def test_a_text_that_is_too_short_is_no_key_however_many_spaces_are_around_it(content):
    with pytest.raises(SessionError, match=r"the key file has \d+ bytes; at least 32 are needed"):
        keys_in(content, "the key file")


@pytest.mark.parametrize(
    "content", [b"k" * 40, b"k" * 32 + b"\n", bytes(32), b"\xff" * 64, base64.b64encode(bytes(32)), b"a\n" * 40]
)
def test_a_key_of_one_letter_is_none(content):
    with pytest.raises(SessionError, match="the same letter throughout"):
        keys_in(content, "the key file")


def test_two_keys_are_one_a_line_under_a_first_line_that_says_so():
    both = b"kvferry keys\n" + OLD + b"\r\n\n  hex:" + NEW.hex().encode() + b"\n"
    assert secrets_in(both) == [*secrets_in(OLD), *secrets_in(NEW)]
    assert secrets_in(b"kvferry keys\n" + NEW + b"\n") == secrets_in(NEW)
    assert secrets_in(b"kvferry keys\n" + NEW + b"\n" + NEW) == secrets_in(NEW)
    assert secrets_in(b"kvferry keys\nhex:" + (NEW + b"\n").hex().encode()) == secrets_in(NEW)
    assert len(secrets_in(OLD + b"\n" + NEW)) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has 0 lines"),
        ([OLD, NEW, OLD], "has 3 lines"),
        ([OLD, b"short"], "has 5 bytes"),
        ([b"k" * 40], "the same letter"),
        ([b"hex:no"], "begins with hex:"),
        ([b"hex:\xff\xff"], "begins with hex:"),
    ],
)
def test_a_file_of_keys_that_is_not_in_order_is_refused(lines, said):
    with pytest.raises(SessionError, match=said):
        keys_in(b"\n".join([b"kvferry keys", *lines]), "the key file")


def test_key_files_are_read_or_refused_with_the_reason(tmp_path):
    one = written(tmp_path / "one", TEXT)
    assert read_keys(one).first == read_keys(str(one)).first
    with pytest.raises(SessionError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none")
    with pytest.raises(SessionError, match="cannot be read"):
        read_keys(tmp_path)
    key = read_keys(one).first
    assert key.secret.decode() not in repr(key)
    assert not read_keys(one).local
    assert not keys_of(str(one)).local


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_a_key_file_that_others_may_write_is_refused(tmp_path, mode):
    with pytest.raises(SessionError, match=rf"may be written by others \(mode {mode:o}\): chmod 600"):
        read_keys(written(tmp_path / "key", TEXT, mode))


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o400, 0), (0o440, 0), (0o644, 1), (0o444, 1)])
def test_one_that_all_may_read_is_warned_of_once(tmp_path, caplog, mode, warnings):
    path = written(tmp_path / "key", TEXT, mode)
    for _ in range(3):
        read_keys(path)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == warnings
    assert all(f"mode {mode:o}" in record.message for record in said)


def test_a_file_that_is_reached_by_links_and_one_that_is_no_file_are_read(tmp_path):
    """Kubernetes hands out links. A shell hands out a pipe."""
    (tmp_path / "..data").symlink_to(tmp_path / "first")
    (tmp_path / "first").mkdir()
    written(tmp_path / "first" / "key", TEXT)
    (tmp_path / "key").symlink_to("..data/key")
    known = read_keys(tmp_path / "key").first
    reading, writing = os.pipe()
    os.write(writing, TEXT)
    os.close(writing)
    assert read_keys(f"/dev/fd/{reading}").first == known
    os.close(reading)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """This user's runtime folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Of a user without a runtime folder."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(own_key, "TEMPORARY", str(tmp_path))
    monkeypatch.setattr(own_key, "RUNTIME", str(tmp_path / "run"))
    return tmp_path / f"kvferry-{os.geteuid()}"


def test_without_a_file_a_user_has_a_key_on_this_machine_that_others_cannot_read(folder):
    made = keys_of("")
    path = folder / own_key.NAME
    assert made.local
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys_of("").all == made.all == keys_in(path.read_bytes(), "it")
    assert [entry.name for entry in folder.iterdir()] == [own_key.NAME]
    path.unlink()
    assert keys_of("").all != made.all


def make_own(folder: str, barrier: Any, made: Any) -> None:
    os.environ["XDG_RUNTIME_DIR"] = folder
    barrier.wait()
    made.put(own_keys().first.secret)


def test_engines_that_start_at_once_end_with_the_same_key(folder):
    context = multiprocessing.get_context("fork")
    for turn in range(5):
        (folder / str(turn)).mkdir(mode=0o700)
        barrier, made = context.Barrier(8), context.Queue()
        workers = [context.Process(target=make_own, args=(str(folder / str(turn)), barrier, made)) for _ in range(8)]
        for worker in workers:
            worker.start()
        assert len({made.get(timeout=PATIENCE_S) for _ in workers}) == 1
        for worker in workers:
            worker.join()


def test_a_user_without_a_runtime_folder_has_one_of_his_own_in_tmp(temporary):
    made = own_keys()
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    assert (temporary / own_key.NAME).exists()
    assert own_keys().all == made.all


@pytest.mark.parametrize("said", ["relative", "/nonexistent", "/", ""])
def test_a_runtime_folder_that_is_not_this_users_alone_is_not_used(temporary, monkeypatch, said, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder in (said, str(tmp_path / "open")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        if folder != "/" or os.geteuid():
            own_keys()
            assert (temporary / own_key.NAME).exists()
    assert list((tmp_path / "open").iterdir()) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: at.symlink_to(at.parent), "is no folder"),
        (lambda at: at.write_text(""), "is no folder"),
        (lambda at: (at.mkdir(), at.chmod(0o777)), "may be written by others"),
        (lambda at: (at.mkdir(), at.chmod(0o720)), "may be written by others"),
    ],
    ids=["link", "file", "all", "group"],
)
def test_a_folder_in_tmp_that_others_prepared_is_refused(temporary, make, said):
    make(temporary)
    with pytest.raises(SessionError, match=rf"kvferry-\d+ {said}.*; remove it, or set key_file"):
        own_keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_refused(temporary):
    temporary.mkdir(mode=0o700)
    os.chown(temporary, 12345, -1)
    with pytest.raises(SessionError, match="belongs to user 12345; remove it, or set key_file"):
        own_keys()
    os.chown(temporary, 0, -1)
    own_keys()
    os.chown(temporary / own_key.NAME, 12345, -1)
    with pytest.raises(SessionError, match="belongs to user 12345: remove it"):
        own_keys()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: at.symlink_to(at.parent / "target"), "is a link"),
        (lambda at: at.mkdir(), "is no file"),
        (lambda at: os.mkfifo(at, 0o600), "is no file"),
        (lambda at: (at.write_bytes(TEXT), at.chmod(0o644)), "may be read by others"),
        (lambda at: (at.write_bytes(TEXT), at.chmod(0o620)), "may be written by others"),
        (lambda at: (at.write_bytes(b"short"), at.chmod(0o600)), "has 5 bytes"),
    ],
    ids=["link", "folder", "pipe", "readable", "writable", "short"],
)
def test_an_own_key_that_is_not_as_it_was_made_is_refused(folder, make, said):
    written(folder / "target", TEXT)
    make(folder / own_key.NAME)
    with pytest.raises(SessionError, match=said) as caught:
        own_keys()
    assert own_key.NAME in str(caught.value)


def test_where_no_key_can_be_kept_the_error_names_the_option(temporary, monkeypatch):
    monkeypatch.setattr(own_key, "TEMPORARY", "/proc")
    with pytest.raises(SessionError, match=r"no folder for this user's own key.*set key_file"):
        own_keys()


def looked(held: Keys) -> None:
    """As a thread does that looks again and again."""
    for _ in range(2):
        held._look_at = 0.0
        held.look()


def test_a_file_that_has_changed_is_read_again(tmp_path):
    path = written(tmp_path / "key", OLD)
    held = read_keys(path)
    before = held.all
    looked(held)
    assert held.all is before
    written(path, b"kvferry keys\n" + OLD + b"\n" + NEW)
    looked(held)
    assert held.all == (*keys_in(OLD, ""), *keys_in(NEW, ""))
    written(path, NEW)
    looked(held)
    assert held.all == keys_in(NEW, "")


def test_a_file_is_not_read_while_it_is_being_written(tmp_path):
    path = written(tmp_path / "key", OLD)
    held = read_keys(path)
    for content in (b"kvferry keys\n" + NEW, b"kvferry keys\n" + NEW + b"\n" + OLD):
        written(path, content)
        held._look_at = 0.0
        held.look()
        assert held.all == keys_in(OLD, "")
    held._look_at = 0.0
    held.look()
    assert held.all == (*keys_in(NEW, ""), *keys_in(OLD, ""))


def test_it_is_looked_at_every_few_seconds_and_by_one_thread(tmp_path, monkeypatch):
    source = Fixed(b"one")
    stamps: list[float] = []
    held = Keys(source)
    monkeypatch.setattr(source, "stamp", lambda: stamps.append(0.0))
    for _ in range(1000):
        held.look()
    assert stamps == []
    held._look_at = 0.0
    for _ in range(1000):
        held.look()
    assert len(stamps) == 1
    held._look_at = 0.0
    with held._looking:
        held.look()
    assert len(stamps) == 1


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: written(path, b"short"), lambda path: path.chmod(0o666)]
)
def test_a_file_that_became_bad_is_said_once_and_the_keys_stay(tmp_path, caplog, spoil):
    path = written(tmp_path / "key", OLD)
    held = read_keys(path)
    spoil(path)
    for _ in range(5):
        looked(held)
    assert held.all == keys_in(OLD, "")
    assert len([record for record in caplog.records if "the keys read before are still used" in record.message]) == 1
    written(path, NEW)
    looked(held)
    assert held.all == keys_in(NEW, "")


def test_a_users_own_key_that_was_cleaned_away_is_put_back(folder, temporary, monkeypatch):
    """A runtime folder goes with the last session of its user, and with it what engines beside it agreed on."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    folder.chmod(0o700)
    held = own_keys()
    (folder / own_key.NAME).unlink()
    looked(held)
    assert own_keys().all == held.all
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    looked(held)
    assert (temporary / own_key.NAME).exists()
    assert own_keys().all == held.all


def test_of_two_own_keys_all_come_to_have_the_one_that_is_there(folder):
    held = own_keys()
    (folder / own_key.NAME).unlink()
    newer = own_keys()
    assert newer.all != held.all
    looked(held)
    assert newer.all == held.all == own_keys().all


def of_lines(*keys: bytes) -> bytes:
    return b"\n".join([b"kvferry keys", *keys, b""]) if len(keys) > 1 else keys[0]


@pytest.fixture
def sides(tmp_path, monkeypatch) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """A producer's listener and a consumer's courier, each with a key file of its own."""
    monkeypatch.setattr(key_module, "LOOK_S", 0.05)
    opened: list[Any] = []

    def make(there: bytes, here: bytes) -> tuple[Listener, Courier[str]]:
        files = [read_keys(written(tmp_path / name, content)) for name, content in (("there", there), ("here", here))]
        listener = Listener("127.0.0.1:0", files[0], lambda incarnation, lease: True)
        listener.welcome(welcome(lease_s=0.6), lambda asked: reference_at(listener, 1))
        courier: Courier[str] = Courier(HELLO, files[1], PATIENCE_S, lambda peer, found: "met")
        opened.extend((courier, listener))
        return listener, courier

    yield make
    for one in opened:
        one.close()


def reference_at(listener: Listener, slot: int = 0) -> Reference:
    return Reference(f"127.0.0.1:{listener.port}", "producer", "p1", "r", Lease(slot, 7), 5, {"0": [1]}, "digest")


@pytest.mark.parametrize(
    ("there", "here", "answered"),
    [
        ((OLD,), (OLD, NEW), True),
        ((NEW,), (OLD, NEW), True),
        ((OLD, NEW), (OLD,), True),
        ((NEW, OLD), (OLD, NEW), True),
        ((NEW, OLD), (NEW,), True),
        ((NEW, OLD), (OLD,), False),
        ((NEW,), (OLD,), False),
    ],
)
def test_who_dials_tries_all_keys_and_who_listens_answers_to_the_first(sides, there, here, answered):
    listener, courier = sides(of_lines(*there), of_lines(*here))
    address = f"127.0.0.1:{listener.port}"
    if not answered:
        with pytest.raises(SilentError, match="has it another key"):
            ask(address, HELLO, courier._keys, SHORT_S)
        assert listener.greeted == 0
        return
    assert ask(address, HELLO, courier._keys, PATIENCE_S).engine == "producer"
    assert seek(address, Seek("p1", Lease(0, 7), "d"), courier._keys, PATIENCE_S) == reference_at(listener, 1)
    courier.hold("r", reference_at(listener))
    courier.release("r", reference_at(listener), "loaded")
    until(lambda: any(isinstance(word, Release) for word in listener.take()), "the release is heard")
    found = reference_at(listener)
    assert from_params(to_params(found, listener._keys.first), courier._keys) == found


@pytest.mark.parametrize("order", [("there", "here"), ("here", "there")])
def test_keys_are_replaced_in_three_steps_under_load_and_nothing_fails(sides, tmp_path, order):
    """Greetings, references and renewals go on all the while, however the two sides follow each other within a step."""
    listener, courier = sides(OLD, OLD)
    held, told, over = reference_at(listener, 3), reference_at(listener, 2), threading.Event()
    failed: list[str] = []
    done = {"asked": 0, "read": 0, "renewed": 0}

    def greeting() -> None:
        ask(held.address, HELLO, courier._keys, PATIENCE_S)
        done["asked"] += 1

    def reading() -> None:
        from_params(to_params(told, listener._keys.first), courier._keys)
        done["read"] += 1
        over.wait(0.001)

    def hearing() -> None:
        done["renewed"] += any(isinstance(word, Renew) and held.lease in word.leases for word in listener.take())
        over.wait(0.01)

    def again(work: Callable[[], None]) -> None:
        try:
            while not over.is_set():
                work()
        except KVFerryError as error:
            failed.append(str(error))

    courier.hold("held", held)
    threads = [threading.Thread(target=again, args=(work,)) for work in (greeting, greeting, greeting, reading, hearing)]
    for thread in threads:
        thread.start()

    def works_on() -> None:
        before = dict(done)
        until(lambda: bool(failed) or all(done[what] >= before[what] + 3 for what in done), "all goes on")

    try:
        works_on()
        for step in ((OLD, NEW), (NEW, OLD), (NEW,)):
            for side in order:
                written(tmp_path / side, of_lines(*step))
                keys = listener._keys if side == "there" else courier._keys
                until(lambda keys=keys, step=step: keys.all == tuple(keys_in(key, "")[0] for key in step), "it is read again")
                works_on()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert listener._key == keys_in(NEW, "")[0]
    assert {key for _, key in courier._ends} == {keys_in(NEW, "")[0]}
    with pytest.raises(SilentError):
        ask(held.address, HELLO, read_keys(written(tmp_path / "old", OLD)), SHORT_S)


def test_a_port_stays_open_while_its_key_is_replaced(sides, tmp_path):
    """Who connects at that moment waits, and is not refused; and nobody else can take the port."""
    listener, courier = sides(of_lines(OLD, NEW), of_lines(OLD, NEW))
    refused: list[OSError] = []
    over = threading.Event()

    def connecting() -> None:
        try:
            while not over.is_set():
                socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S).close()
        except ConnectionRefusedError as error:
            refused.append(error)

    thread = threading.Thread(target=connecting)
    thread.start()
    for turn in range(20):
        first = (NEW, OLD)[turn % 2]
        written(tmp_path / "there", of_lines(first, (OLD, NEW)[turn % 2]))
        until(lambda first=first: listener._key == keys_in(first, "")[0], "it answers to the other")
    over.set()
    thread.join()
    assert refused == []
    assert ask(f"127.0.0.1:{listener.port}", HELLO, courier._keys, PATIENCE_S).engine == "producer"


def test_a_listener_that_cannot_turn_to_another_key_at_once_tries_again(sides, tmp_path, monkeypatch):
    listener, courier = sides(OLD, of_lines(OLD, NEW))
    secure, failed = listening._secure, []

    def stumbles(end: Any, key: Any) -> None:
        if len(failed) < 3:
            failed.append(key)
            raise OSError("unheard of")
        secure(end, key)

    monkeypatch.setattr(listening, "_secure", stumbles)
    written(tmp_path / "there", NEW)
    until(lambda: listener._key == keys_in(NEW, "")[0], "it answers to the other")
    assert len(failed) == 3
    assert ask(f"127.0.0.1:{listener.port}", HELLO, courier._keys, PATIENCE_S).engine == "producer"


def test_words_that_a_key_cannot_carry_do_not_pile_up(sides):
    """An end that takes no more is made anew, and what waited in it is gone: its lease ends at its deadline."""
    listener, courier = sides(OLD, of_lines(NEW, OLD))
    courier._stop.set()
    courier._thread.join()
    wrong = courier._keys.first
    told = [courier._tell(("127.0.0.1", listener.port), wrong, b"x" * 100) for _ in range(3000)]
    assert told.count(False) == 2
    assert told.index(False) == 1000
