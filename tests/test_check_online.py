"""`kvferry check` on running engines: who answers, which pairs fit, and a canary whose bytes are compared."""

from __future__ import annotations

import json
import re
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

import running
from kvferry.check import canary
from kvferry.check.cards import Engine, ask_all, check_engines
from kvferry.cli import app
from kvferry.doctor.remote import Berth
from kvferry.errors import KVFerryError
from kvferry.explain import Title, document
from kvferry.explain.request import example_request
from kvferry.findings import errors
from kvferry.models import Side, load_model, manifests
from kvferry.session import Card, Hello, Keys, Listener, Welcome, Words, from_params, own_keys, read_keys
from kvferry.session.wire import ask
from kvferry.transport import NixlOptions
from kvferry.up.ports import free_port
from running import Running, launch, served
from transport_suite import until

pytest.importorskip("nixl_cu12")

HELLO = Hello("somebody", "d1")


@pytest.fixture
def engines() -> Iterator[Callable[..., Running]]:
    up: list[Running] = []

    def start(*words: Any, **named: Any) -> Running:
        up.append(launch(*words, **named))
        return up[-1]

    yield start
    for one in up:
        one.close()


def key_in(folder: Path, text: str) -> Keys:
    (folder / text[:4]).write_text(text)
    return read_keys(folder / text[:4])


def check(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["check", *words, "--json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


def names(report: dict[str, Any]) -> set[str]:
    return {one["name"] for one in report["findings"]}


def test_a_pair_is_asked_compared_planned_proved_and_read_from(engines):
    there = engines("prefill", "granite-4.0-h-tiny", "tp=2,block=32,conv=sd", role="producer")
    here = engines("decode", "granite-4.0-h-tiny", "tp=4,block=16", role="consumer")
    with served(there) as url:
        code, found = check("--engine", there.address, "--engine", here.address, "--canary", "--through", url)
    assert (code, found["works"], found["findings"]) == (0, True, [])
    (pair,) = found["pairs"]
    assert (pair["prefill"], pair["decode"], pair["moves"]["ranks"]) == (there.address, here.address, [2, 4])
    beacons, blocks = found["canaries"]
    assert (beacons["what"], beacons["ranks"], beacons["bytes"]) == ("beacons", 2, 16)
    assert (blocks["what"], blocks["ranks"]) == ("48 tokens", 4)
    assert blocks["bytes"] > 1_000_000
    assert any("shared memory" in path for path in blocks["paths"])


def test_an_engine_on_loopback_whose_ucx_may_use_tcp_is_read_from(engines, monkeypatch):
    monkeypatch.setattr(running, "LOOPBACK", NixlOptions(ucx={"UCX_TLS": "tcp,sm,self"}))
    there = engines("prefill", "llama-3.1-8b", "tp=1", role="producer")
    here = engines("decode", "llama-3.1-8b", "tp=2", role="consumer")
    with served(there) as url:
        code, found = check("--engine", there.address, "--engine", here.address, "--canary", "--through", url)
    assert (code, found["findings"]) == (0, [])


def test_the_canary_gives_its_lease_back(engines):
    there = engines("prefill", "llama-3.1-8b", "tp=1", role="producer")
    here = engines("decode", "llama-3.1-8b", "tp=2", role="consumer")
    with served(there) as url:
        code, _ = check("--engine", there.address, "--engine", here.address, "--through", url)
    assert code == 0
    until(lambda: there.listener.take() != [], "the lease's release")


def test_all_pairs_of_a_fleet_are_checked(engines):
    fleet = [engines(f"e{i}", "lfm2-1.2b", side) for i, side in enumerate(("tp=1", "tp=2", "tp=1,pp=2", "tp=2,block=32"))]
    code, found = check(*(word for one in fleet for word in ("--engine", one.address)))
    assert code == 0
    assert len(found["pairs"]) == 12
    assert all(pair["works"] and pair["moves"] for pair in found["pairs"])


def test_a_pair_that_does_not_fit_is_told_from_those_that_do(engines):
    there = engines("prefill", "llama-3.1-8b", "tp=2", role="producer")
    right = engines("right", "llama-3.1-8b", "tp=1,layout=token", role="consumer")
    wrong = engines("wrong", "gemma-3-27b", "tp=1", role="consumer")
    code, found = check(*(word for one in (there, right, wrong) for word in ("--engine", one.address)))
    assert code == 1
    assert [(pair["decode"], pair["works"]) for pair in found["pairs"]] == [(right.address, True), (wrong.address, False)]
    assert {"model", "missing-layer"} <= names(found)
    assert {one["where"] for one in found["findings"]} == {f"{there.address} → {wrong.address}"}
    assert all(one["cure"] for one in found["findings"])


def test_why_an_engine_could_not_be_asked_is_told(engines, tmp_path):
    key, other = key_in(tmp_path, "mine" * 10), key_in(tmp_path, "yours" * 10)
    up = engines("up", "llama-3.1-8b", "tp=1", key=key)
    starting = engines("starting", "llama-3.1-8b", "tp=1", listening=False)
    stranger = socket.create_server(("127.0.0.1", 0))
    reasons = {
        f"127.0.0.1:{free_port()}": (own_keys(), "not-reached", "open the port"),
        f"127.0.0.1:{stranger.getsockname()[1]}": (own_keys(), "not-reached", "open the port"),
        up.address: (own_keys(), "no-answer", "give --key-file the engine's key"),
        starting.address: (own_keys(), "refused", "wait until the engine is up"),
        "10.255.255.1:7600": (own_keys(), "key-needed", "--key-file"),
    }
    for address, (held, name, cure) in reasons.items():
        (found,) = ask_all([address], held, 3.0).findings
        assert (found.name, found.where) == (name, address)
        assert cure in found.cure
    (found,) = ask_all([up.address], other, 3.0).findings
    assert (found.name, found.cure) == ("no-answer", "give --key-file the key that the engine has; without one if it has none")
    assert ask_all([up.address], key, 30.0).engines[0].welcome.engine == "up"
    stranger.close()


def test_an_engine_that_is_not_up_is_no_engine_that_does_not_fit(engines):
    """What a readiness probe may wait for has an exit code of its own."""
    up = engines("up", "llama-3.1-8b", "tp=1")
    missing = f"127.0.0.1:{free_port()}"
    code, found = check("--engine", up.address, "--engine", missing, "--timeout-s", "30")
    assert (code, names(found)) == (3, {"not-reached"})
    other = engines("other", "llama-3.1-8b", "tp=2")
    code, found = check("--engine", up.address, "--engine", other.address, "--engine", missing, "--timeout-s", "30")
    assert (code, names(found)) == (3, {"not-reached"})


def test_engines_of_one_side_make_no_pair(engines):
    pair = [engines(name, "llama-3.1-8b", "tp=1", role="producer") for name in ("one", "two")]
    code, found = check(*(word for one in pair for word in ("--engine", one.address)))
    assert (code, names(found)) == (1, {"no-pair"})
    assert "a decode engine answers only where its option listen names a port" in found["findings"][0]["cure"]


def test_an_engine_that_is_named_twice_counts_once(engines):
    up = engines("up", "llama-3.1-8b", "tp=1")
    found = ask_all([up.address, up.address.replace("127.0.0.1", "localhost")], own_keys())
    assert len(found.engines) == 1
    assert [one.name for one in found.findings] == ["same-engine"]


def test_a_beacon_that_is_not_there_is_told(engines):
    there = engines("prefill", "llama-3.1-8b", "tp=2", role="producer")
    here = engines("decode", "llama-3.1-8b", "tp=1", role="consumer")
    there.ranks[1].card = replace(there.ranks[1].card, beacon=there.ranks[1].card.beacon + 1)
    there.answer()
    code, found = check("--engine", there.address, "--engine", here.address, "--canary")
    assert (code, names(found)) == (1, {"canary-differs"})
    assert found["findings"][0]["where"] == f"{there.address} tp1/2 pp0/1"
    there.ranks[1].card = replace(there.ranks[1].card, beacon=0)
    there.answer()
    code, found = check("--engine", there.address, "--engine", here.address, "--canary")
    assert (code, names(found)) == (0, {"no-beacon"})


def test_blocks_that_change_under_the_canary_are_told(engines, monkeypatch):
    there = engines("prefill", "granite-4.0-h-tiny", "tp=1", role="producer")
    here = engines("decode", "granite-4.0-h-tiny", "tp=2", role="consumer")
    carry = canary._carry

    def scribble(*words: Any) -> Any:
        for data in there.ranks[0].memory:
            data[:] ^= 1
        return carry(*words)

    monkeypatch.setattr(canary, "_carry", scribble)
    with served(there) as url:
        code, found = check("--engine", there.address, "--engine", here.address, "--through", url)
    assert (code, names(found)) == (1, {"canary-differs"})


def test_a_lease_that_does_not_stand_fails_the_canary(engines):
    there = engines("prefill", "llama-3.1-8b", "tp=1", role="producer")
    here = engines("decode", "llama-3.1-8b", "tp=1", role="consumer")
    asked = ask_all([there.address, here.address], own_keys())
    pairs, _ = check_engines(asked.engines)
    reference = from_params(there.prefill(40)["kvferry"], own_keys())
    there.ranks[0].words.kill(reference.lease)
    done = canary.read_blocks(pairs[0], reference, own_keys())
    assert [one.name for one in done.findings] == ["canary-failed"]
    assert done.compared == 0


def test_an_api_that_gives_no_reference_is_told(engines):
    there = engines("prefill", "llama-3.1-8b", "tp=1", role="producer")
    here = engines("decode", "llama-3.1-8b", "tp=1", role="consumer")
    words = ("--engine", there.address, "--engine", here.address)
    with served(there, dropped=True) as url:
        assert names(check(*words, "--through", url)[1]) == {"no-reference"}
    assert names(check(*words, "--through", url)[1]) == {"no-reference"}
    other = engines("other", "llama-3.1-8b", "tp=1")
    with served(other) as url:
        code, found = check(*words, "--through", url)
    assert (code, names(found)) == (1, {"no-reference"})


def answered(name: str, model: str, side: str) -> Engine:
    """An engine's answer, without an engine behind it."""
    ranks = manifests(load_model(model), Side.parse(side), engine=name, incarnation=name)
    cards = tuple(Card(m, Words(2, m.identity).manifest, b"") for m in ranks)
    return Engine(f"{name}:1", Welcome(name, name, 60.0, cards))


def test_sixty_four_ranks_meet_sixty_four(monkeypatch):
    pairs, findings = check_engines([answered("p", "deepseek-v3", "tp=64"), answered("d", "deepseek-v3", "tp=8,pp=8,block=32")])
    assert not findings
    assert {(pair.moves.ranks if pair.moves else None) for pair in pairs} == {(64, 64)}
    assert not any(errors(pair.findings) for pair in pairs)


def test_a_fleet_of_alike_engines_is_planned_once(monkeypatch):
    made = []
    from kvferry.check import cards

    prove = cards.prove

    def counted(*words: Any) -> Any:
        made.append(words)
        return prove(*words)

    monkeypatch.setattr(cards, "prove", counted)
    pairs, _ = check_engines([answered(f"e{i}", "llama-3.1-8b", "tp=4") for i in range(12)])
    assert (len(pairs), len(made)) == (132, 1)
    assert {pair.name for pair in pairs} == {f"e{i}:1 → e{j}:1" for i in range(12) for j in range(12) if i != j}


def test_a_beacon_is_no_lease():
    """It stands at every start, behind the leases, and is negative: no generation is."""
    words = Words(3, manifests(load_model("llama-3.1-8b"), Side())[0].identity)
    assert words.beacon < 0
    assert words.manifest.groups[0].blocks == 4
    assert words.alive == 0
    assert Words.size(3) == words.storage.length
    shared = Words(3, words.manifest.identity, np.zeros(Words.size(3), np.uint8))
    assert shared.beacon != words.beacon


def test_what_an_engine_says_of_itself_reaches_who_asks(engines):
    up = engines("up", "llama-3.1-8b", "tp=1", role="consumer")
    found = ask(up.address, HELLO, own_keys(), 30.0)
    assert (found.role, found.cards[0].beacon) == ("consumer", up.ranks[0].words.beacon)
    old = Listener("127.0.0.1:0", own_keys())
    old.welcome(Welcome("old", "1", 60.0, tuple(replace(card, beacon=0) for card in found.cards)))
    answer = ask(f"127.0.0.1:{old.port}", HELLO, own_keys(), 30.0)
    assert Engine("a", answer).is_a("producer")
    assert Engine("a", answer).is_a("consumer")
    old.close()


def test_a_page_of_two_running_engines_shows_what_they_hold(engines, tmp_path):
    there = engines("prefill", "granite-4.0-h-tiny", "tp=2,block=32", role="producer")
    here = engines("decode", "granite-4.0-h-tiny", "tp=4", role="consumer")
    page = tmp_path / "live.html"
    words = ["explain", "--engine", here.address, "--engine", there.address, "--tokens", "50", "--out", str(page)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    text = page.read_text()
    shown = json.loads(re.search(r'type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert (len(shown["prefill"]), len(shown["decode"]), shown["request"]["tokens"]) == (2, 4, 49)
    assert shown["title"]["source"] == f"asked of {there.address} and {here.address}"
    assert (shown["title"]["prefill"], shown["title"]["decode"]) == ("TP2", "TP4")
    planned = document(
        Title("", "", ""), there.manifests, here.manifests, example_request(there.manifests[0], here.manifests[0], 50)
    )
    assert shown["plans"] == json.loads(msgspec.json.encode(planned["plans"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "127.0.0.1:1"), "give the prefill engine's address and the decode engine's"),
        (("--engine", "127.0.0.1:1", "--engine", "127.0.0.1:2"), "nobody listens"),
        (("--engine", "127.0.0.1:1", "--model", "llama-3.1-8b"), "give --model, --prefill and --decode, or"),
        ((), "give --model, --prefill and --decode, or"),
    ],
)
def test_a_page_of_engines_that_are_not_there_is_refused(words, said):
    done = CliRunner().invoke(app, ["explain", *words])
    assert isinstance(done.exception, KVFerryError)
    assert said in str(done.exception)


def test_a_prompt_that_an_engine_has_no_blocks_for_is_not_shown(engines):
    pair = [engines(name, "llama-3.1-8b", "tp=1") for name in ("one", "two")]
    done = CliRunner().invoke(app, ["explain", *(w for one in pair for w in ("--engine", one.address)), "--tokens", "100000"])
    assert "too few for such a prompt" in str(done.exception)


def shown_for_engines() -> list[str]:
    """Commands of the page, that of the readiness probe among them."""
    page = (Path(__file__).parent.parent / "docs" / "checking.md").read_text()
    blocks = re.findall(r"^```engines\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (probe,) = re.findall(r"^```yaml\n.*?command: \[(.*?)\]", page, flags=re.MULTILINE | re.DOTALL)
    probed = shlex.join(word.strip().strip('"') for word in probe.split(","))
    return [*(line.removeprefix("$ ") for block in blocks for line in block.splitlines()), probed]


def test_commands_that_are_shown_for_running_engines_work(engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in (own_keys(), key_in(tmp_path, "key=" * 10)):
        there = engines("prefill", "lfm2-1.2b", "tp=2", role="producer", key=key)
        here = engines("decode", "lfm2-1.2b", "tp=1", role="consumer", key=key)
        (tmp_path / "key").write_text("key=" * 10)
        mine = [command for command in shown_for_engines() if ("--key-file" in command) != key.local]
        assert mine
        with served(there) as url, Berth("127.0.0.1:0", key, 1 << 20) as berth:
            serving = threading.Thread(target=berth.serve, args=(60.0,), daemon=True)
            serving.start()
            places = {
                "prefill-0:7600": there.address,
                "decode-0:7601": here.address,
                "/run/secrets/kvferry/key": "key",
                "127.0.0.1:7600": there.address,
                "127.0.0.1:7601": here.address,
                "http://127.0.0.1:8100": url,
                "--serve 127.0.0.1:7602": "--serve 127.0.0.1:0 --serve-s 0.1",
                "127.0.0.1:7602": f"127.0.0.1:{berth.port}",
            }
            for shown in mine:
                command = shown
                for place, real in places.items():
                    command = command.replace(place, real)
                words = shlex.split(command)
                assert words[0] == "kvferry"
                done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
                assert done.exit_code == 0, (command, done.output)
                assert done.stdout.strip()
