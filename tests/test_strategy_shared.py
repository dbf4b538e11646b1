"""Memory that other processes map: who may open it, what tells its owner's death, and what the dead leave behind."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing as mp
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli import demo
from kvferry.engines.vllm import wharf
from kvferry.engines.vllm.options import Options
from kvferry.errors import TransportError
from kvferry.strategy import HostMover, SharedBytes, shared
from kvferry.strategy.shared import HEADER, OpenedBytes
from kvferry.transport import Storage
from pairs import manifests_of
from transport_suite import until

PATIENCE_S = 20
CACHES = manifests_of("blocks of 12 to 8")[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of one test, where nobody else has any."""
    monkeypatch.setattr(shared, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def made(folder: Path) -> Iterator[SharedBytes]:
    out = SharedBytes(1000)
    out.bytes[:] = np.arange(1000) % 251
    yield out
    out.close()


def opened(of: SharedBytes) -> OpenedBytes:
    return OpenedBytes(of.name, of.nonce, of.length)


def test_what_is_opened_is_the_same_memory_while_it_is_written(made):
    other = opened(made)
    assert np.array_equal(other.view(), made.bytes)
    made.bytes[500] = 77
    assert other.view()[500] == 77
    assert other.address != made.address


def test_what_is_opened_cannot_be_written(made):
    with pytest.raises(ValueError, match="read-only"):
        opened(made).view()[0] = 1


def test_an_owner_that_closes_is_gone_though_its_memory_is_still_in_use(made):
    other = opened(made)
    assert other.alive
    made.close()
    made.close()
    assert not other.alive
    assert np.array_equal(other.view(), made.bytes)
    with pytest.raises(TransportError, match="cannot be opened"):
        opened(made)


def test_nobody_who_looks_takes_the_lock_away(made):
    first, second = opened(made), opened(made)
    assert [first.alive, second.alive, first.alive] == [True] * 3
    first.close()
    assert not first.alive
    assert second.alive


def own_until_told(pipe: Connection) -> None:
    out = SharedBytes(1000)
    pipe.send((out.name, out.nonce, os.getpid()))
    pipe.recv()


OWNER = """
import os, sys, time
from kvferry.strategy import SharedBytes
out = SharedBytes(1000)
child = os.fork()
if not child:
    sys.stdin.read()
    os._exit(0)
print(out.name, out.nonce.hex(), child, flush=True)
time.sleep(600)
"""


def test_an_owner_that_is_killed_is_seen_to_be_gone_and_swept():
    pipe, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=own_until_told, args=(theirs,), daemon=True)
    process.start()
    name, nonce, pid = pipe.recv()
    other = OpenedBytes(name, nonce, 1000)
    alive = SharedBytes(8)
    assert other.alive
    assert (shared.FOLDER / name).exists()
    os.kill(pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    assert not other.alive
    SharedBytes(8).close()
    assert not (shared.FOLDER / name).exists()
    assert (shared.FOLDER / alive.name).exists()
    assert not other.view().any()
    alive.close()


def test_an_owner_that_is_killed_is_gone_though_a_child_that_it_forked_lives_on():
    run = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if run.stdout is None or run.stdin is None:
        raise RuntimeError("no pipes")
    name, nonce, child = run.stdout.readline().split()
    other = OpenedBytes(name, bytes.fromhex(nonce), 1000)
    assert other.alive
    run.kill()
    run.wait()
    os.kill(int(child), 0)
    until(lambda: not other.alive, "the owner's death", PATIENCE_S)
    os.kill(int(child), signal.SIGKILL)
    (shared.FOLDER / name).unlink(missing_ok=True)


def test_a_child_that_was_forked_leaves_its_parents_memory_alone(made):
    child = os.fork()
    if not child:
        made.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert opened(made).alive


def test_a_child_that_is_forked_while_memory_is_made_leaves_it_alone(folder, monkeypatch):
    reserved = shared._reserved

    def forking(path: Path, length: int) -> Any:
        child = os.fork()
        if not child:
            for found in shared._own:
                found.close()
            os._exit(len(shared._own) != 1)
        assert os.waitpid(child, 0)[1] == 0
        return reserved(path, length)

    monkeypatch.setattr(shared, "_own", WeakSet())
    monkeypatch.setattr(shared, "_reserved", forking)
    late = SharedBytes(8)
    assert opened(late).alive


def test_what_another_process_makes_at_the_same_time_is_not_swept(folder, monkeypatch):
    """Another one sweeps between the making of the file and the taking of its lock."""
    real = fcntl.flock
    swept = []

    def flock(file: int, operation: int) -> None:
        if not swept:
            swept.append(True)
            SharedBytes(8)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    late = SharedBytes(8)
    assert swept
    assert opened(late).alive


def test_a_dead_owner_is_dead_while_what_it_left_is_swept(made, monkeypatch):
    other, real, seen = opened(made), Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        seen.append((path.name, other.alive))
        real(path, missing_ok)

    made.disown()
    monkeypatch.setattr(Path, "unlink", unlink)
    SharedBytes(8).close()
    assert (made.name, False) in seen


def test_only_what_this_user_left_behind_is_swept(folder, monkeypatch):
    names = [f"kvferry-{secrets.token_hex(16)}" for _ in range(4)]
    for name in ("kvferry-other", "other", *names):
        (folder / name).write_bytes(b"x")
    (folder / names[1]).unlink()
    (folder / names[1]).mkdir()
    (folder / names[2]).unlink()
    (folder / names[2]).symlink_to(folder / "other")
    SharedBytes(8).close()
    left = {path.name for path in folder.iterdir()}
    assert left == {"kvferry-other", "other", names[1], names[2]}
    (folder / names[3]).write_bytes(b"x")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    SharedBytes(8).close()
    assert (folder / names[3]).exists()


def test_files_of_others_are_not_opened_however_many_there_are(folder, monkeypatch):
    """Of very many that may be ours some are looked at, and each in the end."""
    names = {f"kvferry-{secrets.token_hex(16)}" for _ in range(1500)}
    for name in names:
        (folder / name).touch()
    for number in range(300):
        (folder / f"kvferry-{number}").touch()
    real, ours, opened_files, looked_at = os.open, shared._ours, list[str](), list[bool]()

    def counted(path: Any, *arguments: Any, **named: Any) -> int:
        opened_files.append(os.path.basename(path))
        return real(path, *arguments, **named)

    def counting(found: os.stat_result) -> bool:
        looked_at.append(ours(found))
        return looked_at[-1]

    monkeypatch.setattr(os, "open", counted)
    monkeypatch.setattr(shared, "_ours", counting)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        SharedBytes(8).close()
        assert not names.intersection(opened_files)
        assert len(looked_at) <= 1024
    SharedBytes(8).close()
    assert len(names.intersection(opened_files)) == 1024
    SharedBytes(8).close()
    assert names.issubset(opened_files)
    assert len(list(folder.iterdir())) == 300


def test_a_peer_that_lets_go_of_a_killed_owners_memory_removes_it_and_no_one_elses():
    pipe, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=own_until_told, args=(theirs,), daemon=True)
    process.start()
    name, nonce, pid = pipe.recv()
    first, second = OpenedBytes(name, nonce, 1000), OpenedBytes(name, nonce, 1000)
    first.close()
    assert (shared.FOLDER / name).exists()
    assert second.alive
    os.kill(pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    second.close()
    second.close()
    assert not (shared.FOLDER / name).exists()


def begin_an_engines_rank() -> None:
    wharf.Wharf("r", CACHES, Options(), 1, CACHES.identity)


def begin_a_demo() -> None:
    demo.demo_command(requests=1)


@pytest.mark.parametrize(
    "begin", [begin_an_engines_rank, begin_a_demo, lambda: SharedBytes(8)], ids=["engine", "demo", "packed"]
)
def test_whatever_starts_removes_what_a_killed_engine_left(begin, folder, monkeypatch):
    class BegunError(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise BegunError

    left = folder / f"kvferry-{secrets.token_hex(16)}"
    left.write_bytes(bytes(1000))
    for module, name in ((wharf, "NixlTransport"), (demo, "sail"), (shared, "_reserved")):
        monkeypatch.setattr(module, name, stop)
    with pytest.raises(BegunError):
        begin()
    assert not left.exists()


def test_a_pipe_that_somebody_put_there_holds_nobody_up(folder):
    name = f"kvferry-{secrets.token_hex(16)}"
    os.mkfifo(folder / name)
    errors: list[Exception] = []

    def attempt() -> None:
        SharedBytes(8).close()
        try:
            OpenedBytes(name, bytes(16), 8)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_memory_that_is_not_there_is_an_error_when_it_is_made_and_leaves_nothing(folder, monkeypatch):
    """Pages of a file in memory are handed out when they are first touched, where nobody can catch that there are none."""

    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=r"no memory can be shared with other processes in .*: .*No space left"):
        SharedBytes(8)
    assert not list(folder.iterdir())


def test_a_folder_that_is_not_there_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(shared, "FOLDER", folder / "nowhere")
    with pytest.raises(TransportError, match="no memory can be shared"):
        SharedBytes(8)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../secret",
        "/etc/passwd",
        "kvferry-",
        *(f"kvferry-{'0' * 31}{end}" for end in ("", "0", "0/", "0\n", "A", "/", "\0")),
    ],
)
def test_a_name_that_is_none_is_refused(made, name):
    with pytest.raises(TransportError, match=r"is no name of shared memory|cannot be opened here"):
        OpenedBytes(name, made.nonce, made.length)


def test_a_file_that_is_not_the_peers_is_refused(made, folder, monkeypatch):
    files = len(os.listdir("/proc/self/fd"))
    for nonce in (bytes(16), b"", made.nonce + b"\0", made.nonce[:-1]):
        with pytest.raises(TransportError, match="is another one than the peer's"):
            OpenedBytes(made.name, nonce, made.length)
    for length in (0, 999, 1001, -HEADER, -1, 1 << 62, (1 << 63) - 1):
        with pytest.raises(TransportError, match="of another user or size"):
            OpenedBytes(made.name, made.nonce, length)
    link = f"kvferry-{secrets.token_hex(16)}"
    (folder / link).symlink_to(folder / made.name)
    with pytest.raises(TransportError, match="cannot be opened here"):
        OpenedBytes(link, made.nonce, made.length)
    (folder / link).unlink()
    (folder / link).mkdir()
    with pytest.raises(TransportError, match="of another user or size"):
        OpenedBytes(link, made.nonce, made.length)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TransportError, match="of another user or size"):
        opened(made)
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_that_cannot_be_mapped_here_is_an_error_and_no_file_stays_open(made, monkeypatch):
    files = len(os.listdir("/proc/self/fd"))

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared.mmap, "mmap", refuse)
    with pytest.raises(TransportError, match="cannot be opened here: Cannot allocate memory"):
        opened(made)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_storage_is_exported_wherever_it_lies_in_shared_memory(made):
    mover = HostMover()
    inside = Storage(made.address + 100, 50)
    with pytest.raises(TransportError, match="was not made to be shared"):
        mover.export(inside)
    mover.share(made)
    token = mover.export(inside)
    found = mover.open(token, 50)
    there = (np.ctypeslib.ctypes.c_uint8 * 50).from_address(found.address)
    assert bytes(there) == made.bytes[100:150].tobytes()
    assert found.alive
    found.close()
    for outside in (Storage(made.address - 1, 5), Storage(made.address + 996, 5), Storage(made.address, 1001)):
        with pytest.raises(TransportError, match="was not made to be shared"):
            mover.export(outside)
    for length in (901, -101, 1 << 62):
        with pytest.raises(TransportError):
            mover.open(token, length)


@given(st.binary(max_size=80))
def test_whatever_a_peer_sends_is_opened_or_is_an_error(token):
    with pytest.raises(TransportError):
        HostMover().open(token, 8)


names = st.one_of(st.text(max_size=40), st.just(f"kvferry-{'0' * 32}"))


@given(st.tuples(names, st.binary(max_size=20), st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-(1 << 63), (1 << 64) - 1)))
def test_whatever_a_peer_claims_is_opened_or_is_an_error(claimed):
    with pytest.raises(TransportError):
        HostMover().open(msgspec.msgpack.encode(claimed), 8)
