"""The page of a transfer as a file: what it holds, how large it is, and how the command line takes what it is given."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from explained import SIDES, shown, transfer
from kvferry.cli import app
from kvferry.errors import BindError, KVFerryError
from kvferry.explain import Title, document, page
from kvferry.explain.cost import Load
from kvferry.explain.document import _tables
from kvferry.plan import Request, make_plans

TITLE = Title("a model", "tp=2", "tp=1")


def explain(*words: str):
    return CliRunner().invoke(app, ["explain", *words])


def embedded(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)[1])


def test_the_command_writes_one_page_and_says_where(tmp_path):
    out = tmp_path / "here.html"
    done = explain("--model", "lfm2-1.2b", "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "50", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert str(out) in done.output
    found = embedded(out.read_text())
    assert found["title"] == {
        "model": "lfm2-1.2b",
        "prefill": "tp=2,pp=1",
        "decode": "tp=1,pp=1",
        "source": found["title"]["source"],
    }
    assert (len(found["prefill"]), len(found["decode"]), found["request"]["tokens"]) == (2, 1, 49)


def test_a_page_names_nothing_outside_itself_and_may_load_nothing():
    text = page(document(TITLE, *transfer("lfm2-1.2b", "tp=1", "tp=1")))
    outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)))
    assert outside == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:script|img|iframe)[^>]+src=|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", text)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for name, content in (("script-src", script), ("style-src", style)):
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>{{script}}<!--"
    text = page(document(Title(evil, evil, evil), *transfer("lfm2-1.2b", "tp=1", "tp=1")))
    assert text.count("<script>") == 1
    assert "alert(1)</script>" not in text
    assert embedded(text)["title"]["model"] == evil
    assert "new Transfer(" in re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]


@pytest.mark.parametrize(
    ("model", "prefill", "decode"), [("deepseek-v3", "tp=64", "tp=64"), ("qwen3-32b", "tp=8,pp=8", "tp=64")]
)
def test_64_ranks_on_either_side_stay_a_small_page(model, prefill, decode):
    found = document(TITLE, *transfer(model, prefill, decode, 1000))
    assert len(found["plans"]) == len(found["prefill"]) == 64
    assert len(page(found)) < 400_000


def test_a_saved_plan_explains_the_same_transfer(tmp_path):
    words = ("--model", "granite-4.0-h-tiny", "--prefill", "tp=2", "--decode", "tp=1,pp=2", "--tokens", "60")
    saved = tmp_path / "plan.json"
    saved.write_text(CliRunner().invoke(app, ["plan", *words, "--json"]).stdout)
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    assert explain(*words, "--out", str(one)).exit_code == 0
    done = explain("--plan", str(saved), "--out", str(other))
    assert done.exit_code == 0, done.output
    assert one.read_text() == other.read_text()


@pytest.mark.parametrize("model", sorted(SIDES))
def test_what_a_rank_reads_is_counted_as_the_plan_counts_it(model):
    found = shown(model, *SIDES[model])
    explained = document(TITLE, found.producers, found.consumers, found.request)
    for plan, binding in zip(explained["plans"], found.bindings, strict=True):
        assert plan["bytes"] == [copies.bytes for copies in binding.copies]
        assert plan["runs"] == [len(copies) for copies in binding.copies]
        assert plan["filled"] == binding.fills.bytes
    direct, mapped, *staging = explained["strategies"]
    measures = {m["label"]: m["ranks"] for m in direct["measures"]}
    assert list(measures["descriptors"]) == [sum(len(c) for c in b.copies) for b in found.bindings]
    assert list(measures["read"]) == [b.bytes for b in found.bindings]
    measures = {m["label"]: m["ranks"] for m in mapped["measures"]}
    assert list(measures["moved"]) == [b.bytes for b in found.bindings]
    for launches, mapped_ranks, plan in zip(
        measures["launches"], measures["prefill ranks mapped"], explained["plans"], strict=True
    ):
        assert mapped_ranks == len(plan["sources"])
        assert sum(moved > 0 for moved in plan["bytes"]) <= launches < 12 * max(1, len(plan["sources"]))
    assert [strategy["name"] for strategy in staging] == ["packed", "staged"]
    by_packing, by_covering = ({m["label"]: m["ranks"] for m in strategy["measures"]} for strategy in staging)
    for rank, binding in enumerate(found.bindings):
        assert by_covering["read"][rank] >= by_packing["read"][rank] >= binding.bytes
        assert by_packing["read"][rank] <= 1.1 * binding.bytes + 4096 * by_packing["gathered"][rank]
        assert 0 < by_covering["descriptors"][rank] <= by_packing["gathered"][rank]


def test_very_many_runs_are_counted_before_merging_instead_of_refused():
    producers, consumers, request = transfer("llama-3.1-8b", "tp=1", "tp=1,kv=transposed", 3000)
    (plan,) = make_plans(consumers, producers)
    load = Load.of(plan, request)
    assert not load.merged
    assert load.bytes == (32 * 2 * 8 * 128 * 2 * 2999,)
    labels = {m["label"]: m["meaning"] for m in document(TITLE, producers, consumers, request)["strategies"][0]["measures"]}
    assert "not yet merged" in labels["descriptors"]


def test_a_prompt_of_one_token_moves_nothing():
    found = document(TITLE, *transfer("gemma-3-27b", "tp=2", "tp=1", 1))
    assert [sum(p["bytes"]) for p in found["plans"]] == [0]
    assert page(found)


def test_block_tables_keep_their_holes_and_order():
    tables = {0: [-1, -1, 4, 5, 9, 8], 1: [3], 2: [], 3: [-1]}
    packed = _tables(tables)
    assert packed == {0: [[-1, 2], [4, 2], [9, 1], [8, 1]], 1: [[3, 1]], 2: [], 3: [[-1, 1]]}
    for group, runs in packed.items():
        ids = [np.full(n, -1) if first < 0 else np.arange(first, first + n) for first, n in runs]
        assert (np.concatenate(ids).tolist() if ids else []) == tables[group]


def test_a_request_that_does_not_fit_is_refused_as_binding_refuses_it():
    producers, consumers, request = transfer("llama-3.1-8b", "tp=1", "tp=1")
    with pytest.raises(BindError, match="block table"):
        document(TITLE, producers, consumers, Request(request.tokens, {0: [10_000] * 7}, request.dst))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--model, --prefill and --decode"),
        (("--model", "lfm2-1.2b", "--prefill", "tp=1"), "--model, --prefill and --decode"),
        (("--model", "lfm2-1.2b", "--prefill", "tp=1", "--decode", "tp=1", "--plan", "x.json"), "leave out"),
        (("--plan", "/no/such/plan.json"), "cannot be read"),
        (("--plan", "/"), "cannot be read"),
        (("--plan", __file__), "kvferry plan --json"),
        (("--model", "lfm2-1.2b", "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "0"), "--tokens 0"),
        (("--model", "lfm2-1.2b", "--prefill", "tp=1", "--decode", "tp=1", "--out", "/no/such/page.html"), "cannot be written"),
        (("--model", "lfm2-1.2b", "--prefill", "tp=1", "--decode", "tp=1", "--out", "/"), "cannot be written"),
    ],
)
def test_bad_input_is_named(words, says):
    found = explain(*words).exception
    assert isinstance(found, KVFerryError)
    assert says in str(found)


def test_a_saved_plan_is_checked_like_any_peer(tmp_path):
    saved = shown("lfm2-1.2b", "tp=1", "tp=1", 30).document()
    for path, value in ((("manifests", "prefill"), []), (("request", "tokens"), -4), (("request", "tokens"), 10**9)):
        broken = json.loads(msgspec.json.encode(saved))
        broken[path[0]][path[1]] = value
        (tmp_path / "plan.json").write_text(json.dumps(broken))
        found = explain("--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "page.html")).exception
        assert isinstance(found, KVFerryError)
