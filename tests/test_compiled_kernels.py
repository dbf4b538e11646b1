"""Where servers keep compiled kernels: they run what they find there, so that no other user may have put it there."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.up.device import Device
from lab.fleet import device
from lab.fleet.device import environment

NAME = f"torchinductor-{os.geteuid()}"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    device.kernels_in.cache_clear()
    monkeypatch.setattr(device.tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    device.kernels_in.cache_clear()


def used() -> Path:
    return Path(environment(Device.CUDA, {})["TORCHINDUCTOR_CACHE_DIR"])


def is_ours_alone(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def test_kernels_are_kept_in_a_folder_that_is_made_for_this_user_alone(parent, caplog):
    before = os.umask(0)
    try:
        folder = used()
    finally:
        os.umask(before)
    assert folder == parent / NAME
    assert is_ours_alone(folder)
    (folder / "kernel").write_text("compiled")
    device.kernels_in.cache_clear()
    assert (used() / "kernel").read_text() == "compiled"
    assert not caplog.records


def writable_by_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o707)


def writable_by_its_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def a_link_to_nothing(folder: Path) -> None:
    folder.symlink_to(folder.parent / "elsewhere")


def a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("made", [writable_by_others, writable_by_its_group, a_link, a_link_to_nothing, a_file])
def test_a_folder_that_others_may_have_filled_is_not_used(parent, caplog, made):
    made(parent / NAME)
    folders = [used(), used()]
    assert folders[0] == folders[1] != parent / NAME
    assert is_ours_alone(folders[0])
    assert not list(folders[0].iterdir())
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert str(parent / NAME) in said.getMessage()
    assert str(folders[0]) in said.getMessage()
    assert "\n" not in said.getMessage()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_a_folder_of_another_user_is_not_used(parent, caplog):
    (parent / NAME).mkdir(mode=0o700)
    os.chown(parent / NAME, 12345, -1)
    assert used() != parent / NAME
    assert is_ours_alone(used())
    assert f"{parent / NAME} belongs to user 12345" in caplog.text


def test_a_folder_that_is_set_outside_is_used_and_none_is_made(parent):
    found = environment(Device.CUDA, {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"})
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert not list(parent.iterdir())
    assert "TORCHINDUCTOR_CACHE_DIR" not in environment(Device.CPU, {})
