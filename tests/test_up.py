"""`kvferry up`: what is run, what each engine gets of the machine, what is shown; and that nothing outlives it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import kvferry
from kvferry.cli import app
from kvferry.cli import up as up_module
from kvferry.engines.vllm.options import read_options
from kvferry.errors import UpError
from kvferry.up import ports
from kvferry.up.commands import Command, Fleet, Place, Serving, curl, router, script
from kvferry.up.device import Device
from kvferry.up.engines import OWN_FLAGS, Engine, Role, engines
from kvferry.up.harbour import Seen
from kvferry.up.machine import Share, found_gpus, shares
from kvferry.up.ports import PORTS, free_port
from kvferry.up.view import view
from kvferry.up.watch import FIRST, STAGES, Counts, State, carried_by, counts, stage, total

PRETENDERS = Path(__file__).parent / "pretenders"
SOURCES = str(Path(kvferry.__file__).parents[1])
PATIENCE = 60.0


class TestWhatIsAskedFor:
    def test_a_side_is_an_engine_each(self):
        found = engines(Role.DECODE, ["tp=2,pp=3,block=64", "tp=1"], "--max-model-len 100 --dtype=float32")
        assert found[0] == Engine(Role.DECODE, 0, 2, 3, 64, ("--max-model-len", "100", "--dtype=float32"))
        assert [it.name for it in found] == ["decode-0", "decode-1"]
        assert (found[0].ranks, found[1].block) == (6, 0)
        assert engines(Role.PREFILL, [])[0] == Engine(Role.PREFILL)

    @pytest.mark.parametrize(
        ("side", "words"),
        [
            ("tp=0", "from 1 to"),
            ("tp=x", "tp is 'x'"),
            ("tq=1", "did you mean tp?"),
            ("tp=1,tp=2", "twice"),
            ("", "write it like"),
            ("tp", "tp is ''"),
            ("layout=token", "there is no key 'layout'"),
        ],
    )
    def test_what_is_wrong_with_a_side_is_said(self, side: str, words: str):
        with pytest.raises(UpError, match=re.escape(words)):
            engines(Role.PREFILL, [side])

    @pytest.mark.parametrize("flag", sorted(OWN_FLAGS))
    def test_flags_that_all_sides_depend_on_are_not_taken(self, flag: str):
        for text in (f"{flag} x", f"{flag}=x", f"--seed 1 {flag.replace('-', '_').replace('__', '--', 1)}=x"):
            with pytest.raises(UpError, match="is not set there"):
                engines(Role.PREFILL, [], text)

    def test_flags_that_are_no_command_line_are_refused(self):
        with pytest.raises(UpError, match="--decode-flags"):
            engines(Role.DECODE, [], "--name 'open")


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=4)


def of_sizes(found: list[tuple[int, int]], *flags: str) -> list[Engine]:
    return [Engine(Role.PREFILL, i, tp, pp, flags=flags) for i, (tp, pp) in enumerate(found)]


class TestTheMachine:
    @given(sizes, st.integers(1, 130), st.integers(0, 40))
    def test_cores_are_shared_out_and_none_is_bound_twice(self, found: list[tuple[int, int]], cores: int, first: int):
        wanted = of_sizes(found)
        has = [str(first + i) for i in range(cores)]
        dealt = shares(Device.CPU, wanted, has, {})
        each = cores // sum(it.ranks for it in wanted)
        bound: list[str] = []
        for engine, share in zip(wanted, dealt, strict=True):
            bind = share.variables["VLLM_CPU_OMP_THREADS_BIND"]
            if each < 4:
                assert bind == "nobind"
                assert int(share.variables["OMP_NUM_THREADS"]) == max(1, each)
                continue
            ranks = bind.split("|")
            assert len(ranks) == engine.ranks
            assert all(len(rank.split(",")) == each - 1 for rank in ranks)
            bound += [core for rank in ranks for core in rank.split(",")]
        assert len(bound) == len(set(bound))
        assert set(bound) <= set(has)

    @given(sizes, st.integers(1, 16))
    def test_gpus_are_dealt_in_order_and_memory_is_never_promised_twice(self, found: list[tuple[int, int]], gpus: int):
        wanted, has = of_sizes(found), [str(i) for i in range(gpus)]
        if max(it.ranks for it in wanted) > gpus:
            with pytest.raises(UpError, match=rf"GPUs .* there are {gpus}"):
                shares(Device.CUDA, wanted, has, {})
            return
        promised = dict.fromkeys(has, 0.0)
        for engine, share in zip(wanted, shares(Device.CUDA, wanted, has, {}), strict=True):
            mine = share.variables["CUDA_VISIBLE_DEVICES"].split(",")
            assert len(mine) == len(set(mine)) == engine.ranks
            used = float(share.flags[0].partition("=")[2]) if share.flags else 0.9
            for gpu in mine:
                promised[gpu] += used
        assert all(used < 0.93 for used in promised.values())
        if sum(it.ranks for it in wanted) <= gpus:
            assert not any(share.flags for share in shares(Device.CUDA, wanted, has, {}))

    def test_memory_that_is_set_by_hand_is_left_alone(self):
        for device, has in ((Device.CPU, ["0", "1"]), (Device.CUDA, ["0"])):
            for flag in ("--gpu-memory-utilization=0.2", "--kv-cache-memory-bytes"):
                assert all(not share.flags for share in shares(device, of_sizes([(1, 1)] * 2, flag), has, {}))
            both = shares(device, of_sizes([(1, 1)] * 2), has, {})
            assert all(share.flags[0].startswith("--gpu-memory-utilization=0.") for share in both)

    def test_what_the_operator_has_set_stays(self):
        set_outside = {"OMP_NUM_THREADS": "7", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
        assert shares(Device.CPU, of_sizes([(1, 1)]), ["0"], set_outside)[0].variables == {}

    def test_gpus_are_those_that_cuda_would_show(self):
        assert found_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ("3", "1")
        assert found_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def two_machines(**changes: object) -> Fleet:
    wanted = (Engine(Role.PREFILL, 0, tp=2), Engine(Role.PREFILL, 1), Engine(Role.DECODE, 0, flags=("--max-num-seqs=8",)))
    hosts = ("p.example", "p.example", "d.example")
    places = tuple(Place("0.0.0.0", host, 8100 + i, 7600 + i % 2) for i, host in enumerate(hosts))
    made = {"key_file": "/run/a key", **changes}
    return Fleet("some/model", wanted, places, (Share(),) * 3, **made)  # type: ignore[arg-type]


def transfer(command: Command) -> dict[str, object]:
    found: dict[str, object] = json.loads(command.words[command.words.index("--kv-transfer-config") + 1])
    return found


class TestCommands:
    def test_the_sides_of_two_machines_name_each_other_and_the_key(self):
        fleet = two_machines()
        first, second, decode = fleet.commands()
        assert first.words[:7] == ("vllm", "serve", "some/model", "--host", "0.0.0.0", "--port", "8100")
        assert transfer(first)["kv_connector_extra_config"] == {
            "key_file": "/run/a key",
            "listen": "0.0.0.0:7600",
            "advertise": "p.example",
        }
        assert transfer(second)["kv_connector_extra_config"]["listen"] == "0.0.0.0:7601"  # type: ignore[index]
        assert transfer(decode) == {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "key_file": "/run/a key",
                "listen": "d.example:7600",
                "peers": ["p.example:7600", "p.example:7601"],
            },
        }
        for command in (first, second, decode):
            read_options(transfer(command)["kv_connector_extra_config"])  # type: ignore[arg-type]
        over = router(("vllm-router",), fleet.commands(), Place("0.0.0.0", "d.example", 8000))
        assert [w for flag, w in zip(over.words, over.words[1:], strict=False) if flag == "--prefill"] == [
            "http://p.example:8100",
            "http://p.example:8101",
        ]
        assert over.url == "http://d.example:8000"

    def test_between_machines_a_key_is_needed(self):
        with pytest.raises(UpError, match="--key-file"):
            two_machines(key_file="").commands()

    def test_on_one_machine_nothing_leaves_it(self):
        wanted = (Engine(Role.PREFILL), Engine(Role.DECODE, block=64))
        places = (Place("127.0.0.1", "127.0.0.1", 1, 3), Place("127.0.0.1", "127.0.0.1", 2, 4))
        fleet = Fleet("m", wanted, places, (Share({"A": "b c"}, ("--x=1",)), Share()), Serving(("py", "-m", "api"), True), "n")
        first, second = fleet.commands()
        assert first.line.startswith("A='b c' py -m api --model m --host 127.0.0.1 --port 1 --served-model-name n ")
        assert first.words[-1] == "--x=1"
        assert "--disable-access-log-for-endpoints=/health,/metrics" in first.words
        assert transfer(first) == {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.engines.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"listen": "127.0.0.1:3"},
        }
        assert transfer(second)["kv_connector_extra_config"] == {"listen": "127.0.0.1:4"}
        assert second.words[second.words.index("--block-size") + 1] == "64"

    def test_what_is_printed_can_be_pasted(self, tmp_path: Path):
        key = tmp_path / "a key"
        fleet = two_machines(key_file=str(key))
        over = router(("vllm-router",), fleet.commands(), Place("0.0.0.0", "d.example", 8000))
        page = script([*fleet.commands(), over], str(key), "some/model", ["true"])
        where, commands = "", {}
        for line in page.splitlines():
            where = line if line.startswith("# ") else where
            if line and not line.startswith("#"):
                commands.setdefault(where, []).append(line)
        made, *firsts, asked = commands.values()
        assert (firsts[0], firsts[2]) == (["true"], ["true"])
        prefill, decode = firsts[1], firsts[3]
        subprocess.run(made[0], shell=True, check=True)
        assert len(key.read_bytes()) >= 32
        assert key.stat().st_mode & 0o077 == 0
        assert [tuple(shlex.split(line)) for line in (*prefill, *decode)] == [it.words for it in (*fleet.commands(), over)]
        words = shlex.split(asked[0])
        assert words[:2] == ["curl", "http://d.example:8000/v1/completions"]
        assert json.loads(words[-1])["model"] == "some/model"

    def test_a_quote_in_a_name_does_not_end_it(self):
        assert json.loads(shlex.split(curl("http://x", "it's"))[-1])["model"] == "it's"


class TestDryRun:
    def test_two_machines(self):
        command = "up some/model --dry-run --prefill tp=2 --decode tp=4 --prefill-host p --decode-host d"
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
        assert "/etc/kvferry.key" in done.output
        assert "# On p, each" in done.output
        assert "vllm-router --vllm-pd-disaggregation --host 0.0.0.0 --port 8000 --prefill http://p:8100" in done.output

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "name a model"),
            (["m", "--tiny"], "not both"),
            (["m", "--prefill-host", "p"], "go together"),
            (["m", "--dry-run", "--decode-host", "d"], "go together"),
            (["m", "--prefill-host", "p", "--decode-host", "d"], "with --dry-run"),
            (["m", "--dry-run", "--device", "tpu"], "choose cpu or cuda"),
            (["m", "--dry-run", "--flags", "--port 1"], "--port is not set there"),
            (["m", "--tokens", "0"], "--tokens 0: give a number from 1 on"),
            *(
                ([*words, *more], said)
                for words in (["m"], ["m", "--dry-run"], ["m", "--dry-run", "--prefill-host", "p", "--decode-host", "d"])
                for more, said in (
                    (["--port", "99999"], "--port 99999: give a number from 0, for any free one, to 65535"),
                    (["--port", "-1"], "--port -1: give a number from 0, for any free one, to 65535"),
                    (["--first-port", "99999"], "--first-port 99999: give a number from 0, for any free ones, to 65532"),
                    (["--first-port", "65533"], "the 2 engines take 4 ports from it on"),
                    (["--first-port", "-8"], "--first-port -8"),
                    (["--port", "8103"], "--port 8103: engines take ports 8100 to 8103"),
                )
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, arguments: list[str], words: str):
        done = CliRunner().invoke(app, ["up", *arguments])
        assert isinstance(done.exception, UpError)
        assert words in str(done.exception)


class TestWatching:
    def test_how_far_an_engine_is_follows_its_log(self):
        log, seen = "", [stage("")]
        for words, _ in STAGES:
            log += f"INFO {words} of something\nINFO something else\n"
            seen.append(stage(log))
        assert seen == [FIRST, *(meaning for _, meaning in STAGES)]

    def test_counts_are_summed_over_labels_that_do_not_matter(self):
        page = (PRETENDERS / "vllm/entrypoints/openai/api_server.py").read_text().split('"""')[3]
        found = counts(page)
        assert found == Counts(answered=4, loaded=4, tokens=396, moved=811008, wire_s=0.01)
        assert found.hand_over_ms == pytest.approx(2.5)
        assert Counts().hand_over_ms == 0
        assert total([found, found]) - found == found
        assert counts('kvferry_loads_total{outcome="refused"} 2\nkvferry_loads_total{outcome="failed"} 1\n') == Counts(
            refused=2, failed=1
        )

    def test_what_carries_the_bytes_is_what_was_said_last(self):
        assert carried_by("x") == ""
        assert carried_by("a; carried by tcp\nb; carried by shared memory (cma)\nc\n") == "shared memory (cma)"

    def test_the_table_says_where_each_is_and_what_moved(self):
        engine = Command("decode-0", "decode", "h", "http://h:1", ("x",))
        seen = [
            Seen(Command("prefill-0", "prefill", "h", "http://h:2", ("x",)), State.STARTING, "loading weights"),
            Seen(
                engine, State.SERVING, restarts=1, counts=Counts(4, 1, loaded=3, refused=1, tokens=90, moved=4096, wire_s=0.3)
            ),
        ]
        page = Console(file=io.StringIO(), width=160)
        page.print(view("t", seen, Counts(loaded=1, wire_s=0.05), ["a note"]))
        shown = page.file.getvalue()  # type: ignore[attr-defined]
        for words in ("loading weights", "serving, started again", "a note", "3 prompts handed over, 90 tokens, 4,096 bytes"):
            assert words in shown
        assert "100.0 ms each (lately 50.0), 1 computed instead" in shown


class Running:
    """`kvferry up` in a process of its own, over pretenders."""

    def __init__(self, folder: Path, *arguments: str, ports: bool = True) -> None:
        self.folder = folder
        self.said = folder / "said"
        self.port = free_port()
        place: tuple[str, ...] = ("--port", str(self.port), "--first-port", "0") if ports else ()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PRETENDERS), SOURCES]), "TMPDIR": str(folder)}
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvferry", "up", *arguments, "--device", "cpu", *place],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def until(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.said.read_text()):
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.05)
        return self.said.read_text()

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def processes(self) -> set[int]:
        """All that have the folder in their environment."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        return found - {self.process.pid}

    def command(self, process: int) -> bytes:
        """Nothing, if it has ended."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{process}/cmdline").read_bytes()
        return b""

    def of(self, name: str) -> int:
        """The process that a name leads, by its port in what was said last of it."""
        port = re.findall(rf"{name} at http://127.0.0.1:(\d+)", self.said.read_text())[-1]
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if f"--port\0{port}".encode() in self.command(pid) and os.getpgid(pid) == pid:
                    return pid
        raise AssertionError(f"{name} does not run")

    def nothing_is_left(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while (self.processes() or list(self.folder.glob("kvferry-up-*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.processes()
        assert [it.name for it in self.folder.iterdir() if it != self.said] == []


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*arguments: str, **choices: bool) -> Running:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Running(folder, *arguments, **choices))
        return started[-1]

    yield start
    for it in started:
        it.process.kill()
        it.process.wait()


READY = "OpenAI-compatible at"


def test_free_ports_are_given_out_once_and_none_that_somebody_has(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        pair = free_port(2)
        found = [pair, pair + 1, *(free_port() for _ in range(20))]
        assert len({taken.getsockname()[1], *found}) == 23
        monkeypatch.setattr(ports, "_tried", itertools.count(PORTS.index(taken.getsockname()[1])))
        assert free_port() != taken.getsockname()[1]


def test_ports_that_were_told_are_not_given_out_though_nobody_has_them_yet(monkeypatch):
    told = free_port(2)
    monkeypatch.setattr(ports, "_reserved", set())
    monkeypatch.setattr(ports, "_tried", itertools.count(PORTS.index(told)))
    ports.reserve(told, told + 1)
    assert free_port() not in (told, told + 1)


def test_an_engine_does_not_take_the_port_that_the_router_was_told_to_use(monkeypatch):
    told, given = free_port(), []

    def taken(host: str, url: str, port: int) -> Place:
        raise UpError(f"{given}")

    def usable(port: int, option: str, host: str = "") -> int:
        given.append(port or free_port())
        return given[-1]

    monkeypatch.setattr(ports, "_reserved", set())
    monkeypatch.setattr(ports, "_tried", itertools.count(PORTS.index(told)))
    for name, stand_in in (("check_installed", lambda: None), ("usable", usable), ("Place", taken)):
        monkeypatch.setattr(up_module, name, stand_in)
    CliRunner().invoke(app, ["up", "m", "--device", "cpu", "--port", str(told), "--first-port", "0"])
    assert len(given) == len(set(given)) == 5
    assert given[-1] == told


class TestProcesses:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
    def test_nothing_outlives_it_however_it_ends(self, up: Callable[..., Running], number: signal.Signals):
        it = up("pretender", "--prefill", "tp=1", "--prefill", "tp=1")
        said = it.until(READY)
        assert {"prefill-0", "prefill-1", "decode-0", "router"} <= set(re.findall(r"(\S+) at http://\S+: serving", said))
        assert len(it.processes()) == 9
        os.kill(it.process.pid, number)
        assert it.ended() == (-9 if number is signal.SIGKILL else 0)
        it.nothing_is_left()

    def test_ctrl_c_before_anything_serves_ends_it_too(self, up: Callable[..., Running]):
        it = up("pretender")
        it.until("starting")
        os.kill(it.process.pid, signal.SIGINT)
        assert it.ended() == 0
        it.nothing_is_left()

    def test_killing_what_runs_the_engines_ends_them(self, up: Callable[..., Running]):
        it = up("pretender")
        it.until(READY)
        (keeper,) = [p for p in it.processes() if b"kvferry.up.supervise" in it.command(p)]
        os.kill(keeper, signal.SIGKILL)
        assert it.ended() == 2
        assert "has ended" in it.said.read_text()
        it.nothing_is_left()

    def test_an_engine_that_dies_is_started_again_where_it_was(self, up: Callable[..., Running]):
        it = up("pretender")
        it.until(READY)
        for name in ("prefill-0", "decode-0", "router"):
            before = it.of(name)
            os.kill(before, signal.SIGKILL)
            it.until(rf"{name} at http://\S+: serving, started again")
            assert it.of(name) != before
        os.kill(it.process.pid, signal.SIGINT)
        assert it.ended() == 0
        it.nothing_is_left()

    def test_one_that_does_not_come_up_ends_everything_with_its_reason(self, up: Callable[..., Running]):
        it = up("dies")
        assert it.ended() == 2
        said = it.said.read_text()
        assert re.search(r"kvferry: (prefill|decode)-0 ended before it served: ValueError: no pretender is called so", said)
        assert "Resolved architecture" in said
        it.nothing_is_left()

    def test_what_is_asked_is_answered_and_what_moved_is_shown(self, up: Callable[..., Running]):
        it = up("pretender", "--ask", "there", "--ask", "off")
        assert it.ended() == 0, it.said.read_text()
        said = it.said.read_text()
        assert "> there\nthere and back\n" in said
        assert "> off\noff and back\n" in said
        assert "4 prompts handed over, 396 tokens, 811,008 bytes, 2.5 ms each, by shared memory (zero-copy, cma/memory)" in said
        assert said.endswith("same text: prefill-0 alone gives the same 2 answers, with nothing handed over\n")
        it.nothing_is_left()

    def test_an_answer_that_one_engine_alone_does_not_give_is_shown_and_is_a_failure(self, up: Callable[..., Running]):
        it = up("alters", "--ask", "there", "--ask", "off")
        assert it.ended() == 1, it.said.read_text()
        said = it.said.read_text()
        assert "there and elsewhere\n" in said
        assert "DIFFERENT TEXT: prefill-0 alone answers 'there' with 'there and back'" in said.splitlines()[-1]
        it.nothing_is_left()

    def test_logs_are_kept_where_they_are_wanted(self, up: Callable[..., Running], tmp_path: Path):
        it = up("pretender", "--ask", "x", "--logs", str(tmp_path / "logs"))
        assert it.ended() == 0
        assert {path.name for path in (tmp_path / "logs").iterdir()} == {"prefill-0.0.log", "decode-0.0.log", "router.0.log"}
        it.nothing_is_left()

    def test_a_port_that_is_taken_is_named(self, up: Callable[..., Running]):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            number = taken.getsockname()[1]
            it = up("pretender", "--port", str(number), "--first-port", "0", ports=False)
            assert it.ended() == 2
        assert f"port {number} cannot be used: Address already in use; set --port" in it.said.read_text()
        it.nothing_is_left()

    def test_a_folder_for_logs_that_cannot_be_made_is_named(self, up: Callable[..., Running], tmp_path: Path):
        (tmp_path / "file").touch()
        it = up("pretender", "--logs", str(tmp_path / "file" / "logs"))
        assert it.ended() == 2
        assert (
            it.said.read_text() == f"kvferry: --logs {tmp_path}/file/logs: Not a directory; name a folder that can be written\n"
        )
        it.nothing_is_left()

    def test_a_host_that_is_not_here_is_named(self, up: Callable[..., Running]):
        for host in ("nowhere.invalid", "192.0.2.1"):
            it = up("pretender", "--host", host)
            assert it.ended() == 2
            assert re.fullmatch(rf"kvferry: --host {host}: .*; name an address of this machine\n", it.said.read_text())
            it.nothing_is_left()

    def test_what_is_not_installed_is_named(self, tmp_path: Path):
        command = [sys.executable, "-m", "kvferry", "up", "m"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": SOURCES})
        assert done.returncode == 2
        assert "vLLM is not installed" in done.stderr
