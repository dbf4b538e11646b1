"""The page of a transfer in a real browser: every byte it is asked for, the pointer, the keyboard, the themes."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

import chromium
from explained import OTHERS, SAMPLES, SIDES, Meaning, address, columns, held, outcome, samples, shown, transfer
from kvferry.cli.plan import Shown
from kvferry.explain import Title, document, page
from kvferry.models import Side, load_model
from kvferry.plan import Binder, Request

pytestmark = pytest.mark.skipif(chromium.found() is None, reason="no Chromium here: `make browser` as root installs it")

ASK = """
(samples) => samples.map(([consumer, region, offset]) => {
  const ranks = document.querySelectorAll('g[aria-label="decode ranks"] .rank');
  if (kvferry.consumer !== consumer) ranks[consumer].dispatchEvent(new Event("click"));
  document.getElementById("goto-region").value = region;
  document.getElementById("goto-offset").value = offset;
  document.querySelector("#goto button").click();
  const pane = (name) => {
    const root = document.getElementById(`pane-${name}`);
    const facts = Object.fromEntries([...root.querySelectorAll("[data-fact]")].map((e) => [e.dataset.fact, e.textContent]));
    return { title: root.querySelector("h3").textContent, where: root.querySelector(".where").textContent, facts };
  };
  return { prefill: pane("prefill"), decode: pane("decode"), join: document.getElementById("join").textContent };
})
"""


def written(directory: Path, *transfer) -> Path:
    path = directory / "page.html"
    path.write_text(page(document(Title("a model", "a side", "another"), *transfer)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium.running() as found:
        yield found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(tmp_path_factory.mktemp("small"), *transfer("llama-3.1-8b", "tp=2", "tp=1,layout=token", 500))


@pytest.fixture
def tab(browser, small):
    found = browser.open(small)
    yield found
    complaints = found.complaints()
    found.close()
    assert complaints == []


def frame(tab) -> None:
    tab.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def name_of(side: str, rank: dict) -> str:
    return f"{side} tp{rank['tp']}" + (f" pp{rank['pp']}" if rank["pp_size"] > 1 else "")


def check_bytes(browser, tmp_path, found: Shown, plan: dict) -> None:
    """What the page shows of sampled bytes is what the plan's JSON says, and means the same by the address formula."""
    path = written(tmp_path, found.producers, found.consumers, found.request)
    asked = samples(plan)
    assert len(asked) == SAMPLES
    tab = browser.open(path)
    answers = tab.value(f"({ASK})({json.dumps([(s.consumer, s.region, s.offset) for s in asked])})")
    frame(tab)
    assert tab.complaints() == []
    assert tab.requested() == [path.as_uri()]
    tab.close()
    producers, consumers = plan["manifests"]["prefill"], plan["manifests"]["decode"]
    kinds = {"copy": 0, "fill": 0, "none": 0}
    for sample, answer in zip(asked, answers, strict=True):
        here = consumers[sample.consumer]
        assert answer["decode"]["title"] == name_of("decode", here["identity"]["rank"])
        assert answer["decode"]["where"] == f"{here['regions'][sample.region]['name']}, byte {sample.offset:,}"
        meaning = Meaning.read(answer["decode"]["facts"])
        if meaning:
            assert address(here, meaning) == (sample.region, sample.offset)
        kinds[sample.wanted[0]] += 1
        if sample.wanted[0] != "copy":
            assert ("zeros" in answer["prefill"]["where"]) == (sample.wanted[0] == "fill")
            assert answer["prefill"]["where"].startswith("nowhere")
            assert answer["prefill"]["facts"] == {}
            continue
        _, producer, region, offset = sample.wanted
        there = producers[producer]
        assert answer["prefill"]["title"] == name_of("prefill", there["identity"]["rank"])
        assert answer["prefill"]["where"] == f"{there['regions'][region]['name']}, byte {offset:,}"
        twin = Meaning.read(answer["prefill"]["facts"])
        assert address(there, twin) == (region, offset)
        assert (twin.layer, twin.part, dict(twin.axes), twin.token, twin.byte) == (
            meaning.layer, meaning.part, dict(meaning.axes), meaning.token, meaning.byte,
        )  # fmt: skip
        assert "the same meaning" in answer["join"]
    assert kinds["copy"] >= SAMPLES // 2


@pytest.mark.parametrize("model", sorted(SIDES))
def test_200_bytes_of_every_model_come_from_where_the_plan_says(browser, tmp_path, model):
    found = shown(model, *SIDES[model])
    check_bytes(browser, tmp_path, found, json.loads(msgspec.json.encode(found.document())))


@pytest.mark.parametrize(("model", "prefill", "decode"), OTHERS, ids=lambda value: value)
def test_other_memory_layouts_are_traced_as_well(browser, tmp_path, model, prefill, decode):
    found = shown(model, prefill, decode, 90)
    check_bytes(browser, tmp_path, found, json.loads(msgspec.json.encode(found.document())))


def test_scattered_blocks_holes_and_tokens_held_already_are_traced(browser, tmp_path):
    """An engine's own tables, not those that count up."""
    found = Shown(load_model("synthetic-12"), Side.parse("tp=2"), Side.parse("tp=3"), 200)
    random = np.random.default_rng(3)

    def shuffled(tables, blocks):
        ids = iter(random.permutation(np.arange(1, blocks)).tolist())
        return {group: [next(ids) if old >= 0 else -1 for old in table] for group, table in tables.items()}

    src, dst = (
        shuffled(t, m[0].groups[0].blocks)
        for t, m in ((found.request.src, found.producers), (found.request.dst, found.consumers))
    )
    found.request = Request(found.request.tokens, src, dst, start=64)
    found.bindings = [Binder.of_sessions(plan).bind(found.request) for plan in found.plans]
    check_bytes(browser, tmp_path, found, json.loads(msgspec.json.encode(found.document())))


def test_the_end_of_a_block_that_is_moved_whole_is_said_to_be(browser, tmp_path):
    tab = browser.open(written(tmp_path, *transfer("llama-3.1-8b", "tp=1,pool=block", "tp=1,pool=block", 24)))
    tab.value("document.getElementById('rows').focus()")
    tab.press("End")
    last = tab.value("document.getElementById('token').textContent")
    assert last.startswith("Token 23, ")
    assert (
        "decode computes it itself. Its slot is moved all the same, from prefill block 2, slot 7 to decode block 2, slot 7"
        in last
    )
    tab.close()


def test_padding_of_a_held_block_is_nobodys(browser, tmp_path):
    """Groups lie over each other: what another group would keep in a block that it does not hold is no part of it."""
    found = shown("granite-4.0-h-tiny", "tp=2", "tp=4", 60)
    plan = json.loads(msgspec.json.encode(found.document()))
    manifest, tables = plan["manifests"]["decode"][0], plan["request"]["tables"]["decode"]
    block, part = held(manifest, tables, 0)
    padding, used = np.flatnonzero(block & ~part), np.flatnonzero(part)
    assert len(padding)
    random = np.random.default_rng(1)
    asked = [*random.choice(padding, 40).tolist(), *random.choice(used, 40).tolist()]
    tab = browser.open(written(tmp_path, found.producers, found.consumers, found.request))
    answers = tab.value(f"({ASK})({json.dumps([(0, 0, at) for at in asked])})")
    assert [Meaning.read(a["decode"]["facts"]) is None for a in answers] == [True] * 40 + [False] * 40
    assert all(a["join"].startswith("Padding") for a in answers[:40])
    tab.close()


def boxes(tab, selector: str) -> list[dict]:
    return tab.value(f"[...document.querySelectorAll({selector!r})].map((e) => e.getBoundingClientRect().toJSON())")


def centre(tab, selector: str) -> tuple[float, float]:
    tab.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    frame(tab)
    box = boxes(tab, selector)[0]
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def cell(tab, side: str, at: int) -> tuple[float, float]:
    """Where a cell of a page's bytes is on the screen."""
    centre(tab, f"#bytes-{side}")
    x, y, width, height = tab.value(
        f"(() => {{ const g = kvferry.panes.{side}.cells, b = g.canvas.getBoundingClientRect(), [x, y] = g.corner({at}); "
        "return [b.x + x, b.y + y, g.cell, g.height] })()"
    )
    return x + width / 2, y + height / 2


def shown_byte(tab, side: str) -> int:
    return int(
        re.search(r"byte ([\d,]+)", tab.value(f"document.querySelector('#pane-{side} .where').textContent"))[1].replace(",", "")
    )


def test_pointing_at_a_byte_marks_the_one_it_comes_from(tab):
    plan = json.loads(msgspec.json.encode(shown("llama-3.1-8b", "tp=2", "tp=1,layout=token", 500).document()))
    rank = columns(plan["request"]["ranks"][0])
    frame(tab)
    window = tab.value("kvferry.panes.decode.window")
    count = tab.value("kvferry.panes.decode.cells.shown.count")
    owners = set()
    for at in (0, 5, count // 2 - 1, count // 3 * 2, count - 1):
        tab.point(*cell(tab, "decode", at))
        byte = shown_byte(tab, "decode")
        assert byte == window["start"] + at * window["per"]
        _, producer, _, offset = outcome(rank, 0, byte)
        assert shown_byte(tab, "prefill") == offset
        assert tab.value("document.querySelector('#pane-prefill h3').textContent") == f"prefill tp{producer}"
        assert (
            tab.value("document.querySelector('g[aria-label=\"prefill ranks\"] .chosen').getAttribute('aria-label')")
            == f"prefill tp{producer}"
        )
        owners.add(producer)
    assert owners == {0, 1}


def test_pointing_at_a_prefill_byte_shows_where_it_goes(tab):
    plan = json.loads(msgspec.json.encode(shown("llama-3.1-8b", "tp=2", "tp=1,layout=token", 500).document()))
    rank = columns(plan["request"]["ranks"][0])
    frame(tab)
    for at in (3, 200):
        tab.point(*cell(tab, "prefill", at))
        assert outcome(rank, 0, shown_byte(tab, "decode"))[1:] == (0, 0, shown_byte(tab, "prefill"))
    assert "copied from prefill tp0" in tab.value("document.getElementById('join').textContent")


def test_a_byte_that_another_rank_reads_says_so(browser, tmp_path):
    tab = browser.open(written(tmp_path, *transfer("llama-3.1-8b", "tp=1", "tp=2", 40)))
    frame(tab)
    tab.point(*cell(tab, "prefill", tab.value("kvferry.panes.prefill.cells.shown.count") - 1))
    assert "read by decode tp1" in tab.value("document.getElementById('join').textContent")
    tab.point(*centre(tab, 'g[aria-label="decode ranks"] .rank:nth-of-type(2)'), click=True)
    assert tab.value("document.querySelector('#pane-decode h3').textContent") == "decode tp1"
    assert tab.complaints() == []
    tab.close()


def test_choosing_a_prefill_rank_shows_a_byte_that_comes_from_it(tab):
    tab.point(*centre(tab, 'g[aria-label="prefill ranks"] .rank:nth-of-type(2)'), click=True)
    assert tab.value("document.querySelector('#pane-prefill h3').textContent") == "prefill tp1"
    assert "copied from prefill tp1" in tab.value("document.getElementById('join').textContent")
    assert tab.value("document.querySelector('#facts-decode [data-fact=axes]').textContent") == "head 4, dim 0"


def test_pointing_at_a_token_tells_its_blocks_and_a_click_shows_its_bytes(tab):
    x, y = centre(tab, ".row canvas")
    tab.point(x, y, click=True)
    found = tab.value("document.getElementById('token').textContent")
    token = int(re.match(r"Token (\d+), group 0, 32 layers: copied", found)[1])
    assert 200 < token < 300
    assert f"to decode block {1 + token // 16}, slot {token % 16}" in found
    for side in ("prefill", "decode"):
        assert tab.value(f"document.querySelector('#facts-{side} [data-fact=token]').textContent") == str(token)


def test_everything_is_reached_with_the_tab_key_in_reading_order(tab):
    tab.value("document.querySelector('.skip').focus()")
    stops = []
    for _ in range(30):
        stops.append(
            tab.value(
                "(() => { const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.textContent })()"
            )
        )
        tab.press("Tab")
        if tab.value("document.activeElement === document.body"):
            break
    wanted = [
        "To the memory", "theme", "prefill tp0", "decode tp0", "rows",
        "model.layers.0.self_attn.attn: k v, every earlier token",
        "Pages of the prefill rank", "look closer", "bytes-prefill", "Pages of the decode rank", "look closer", "bytes-decode",
        "goto-region", "goto-offset", "Show",
    ]  # fmt: skip
    assert stops == wanted


def test_arrows_walk_ranks_tokens_layers_and_bytes(browser, tmp_path):
    tab = browser.open(written(tmp_path, *transfer("gemma-3-27b", "tp=2", "tp=4,block=32", 3000)))
    tab.value('document.querySelector(\'g[aria-label="decode ranks"] [tabindex="0"]\').focus()')
    tab.press("ArrowRight", "ArrowRight")
    assert tab.value("document.querySelector('#pane-decode h3').textContent") == "decode tp2"
    assert tab.value("document.activeElement.getAttribute('aria-label')") == "decode tp2"
    assert "head [8, 12)" in tab.value("document.getElementById('reads').textContent")

    tab.value("document.getElementById('rows').focus()")
    tab.press("Home", "ArrowRight", "PageDown")
    assert tab.value("document.getElementById('rows').getAttribute('aria-valuenow')") == "33"
    assert "not loaded. These layers look back to token 1,976 only" in tab.value("document.getElementById('token').textContent")
    tab.press("End")
    assert "the prompt's last one" in tab.value("document.getElementById('token').textContent")
    tab.press("Home", *["ArrowDown"] * 6, *["ArrowRight"] * 3)
    assert "Token 3, group 6, 10 layers: copied from prefill" in tab.value("document.getElementById('token').textContent")
    tab.press("Enter")
    assert tab.value("document.querySelector('#facts-decode [data-fact=token]').textContent") == "3"

    tab.value("document.querySelector('#layers [aria-checked=true]').focus()")
    before = tab.value("document.querySelector('#facts-decode [data-fact=layer]').textContent")
    tab.press("ArrowRight")
    after = tab.value("document.querySelector('#facts-decode [data-fact=layer]').textContent")
    assert after != before
    assert after == tab.value("document.activeElement.dataset.layer")

    frame(tab)
    tab.value("document.getElementById('bytes-decode').focus()")
    first, per = shown_byte(tab, "decode"), tab.value("kvferry.panes.decode.window.per")
    tab.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert shown_byte(tab, "decode") == first + per
    tab.press("Enter", "Enter", "Enter")
    assert tab.value("kvferry.panes.decode.window.per") == 1
    tab.press("ArrowRight")
    assert shown_byte(tab, "decode") == first + per + 1
    assert "byte 1 of 2" in tab.value("document.querySelector('#facts-prefill [data-fact=part]').textContent")
    tab.press("Escape", "Escape", "Escape", "Escape")
    assert tab.value("kvferry.panes.decode.window.per") == per
    assert tab.complaints() == []
    tab.close()


def test_the_theme_is_the_systems_until_the_button_says_otherwise(browser, small):
    tab = browser.open(small, scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    drawing = "document.getElementById('bytes-decode').toDataURL()"
    frame(tab)
    dark, drawn = tab.value(paper), tab.value(drawing)
    assert tab.value("document.documentElement.dataset.theme") == "dark"
    tab.point(*centre(tab, "#theme"), click=True)
    frame(tab)
    assert tab.value("document.documentElement.dataset.theme") == "light"
    assert tab.value(paper) != dark
    assert tab.value(drawing) != drawn
    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        frame(tab)
    assert (tab.value(paper), tab.value(drawing)) == (dark, drawn)
    assert tab.complaints() == []
    tab.close()


@pytest.mark.parametrize(
    ("model", "prefill", "decode"), [("qwen3-32b", "tp=8,pp=8", "tp=64"), ("deepseek-v3", "tp=64", "tp=64")]
)
def test_64_ranks_stand_side_by_side_and_each_can_be_chosen(browser, tmp_path, model, prefill, decode):
    tab = browser.open(written(tmp_path, *transfer(model, prefill, decode)))
    for side in ("prefill", "decode"):
        ranks = boxes(tab, f'g[aria-label="{side} ranks"] rect')
        assert len(ranks) == 64
        assert all(one["right"] <= other["left"] for one, other in pairwise(ranks))
        assert ranks[0]["left"] >= 0
        assert ranks[-1]["right"] <= 1280
    tab.point(*centre(tab, 'g[aria-label="decode ranks"] .rank:nth-of-type(38)'), click=True)
    assert tab.value("document.querySelector('#pane-decode h3').textContent") == "decode tp37"
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    frame(tab)
    assert tab.complaints() == []
    tab.close()


def test_a_narrow_window_stacks_instead_of_overflowing(browser, small):
    tab = browser.open(small, width=560)
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    left, right = (
        tab.value(f"document.getElementById('pane-{side}').getBoundingClientRect().top") for side in ("prefill", "decode")
    )
    assert left < right
    tab.close()


def test_the_policy_keeps_the_page_from_reaching_anything(browser, small):
    tab = browser.open(small)
    tried = "fetch('http://127.0.0.1:9/').then(() => 'reached', () => 'refused')"
    assert tab.value(tried) == "refused"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints())
    tab.close()


def test_a_prompt_of_one_token_and_a_bad_address_are_no_errors(browser, tmp_path):
    tab = browser.open(written(tmp_path, *transfer("nemotron-h-8b", "tp=2", "tp=1", 1)))
    tab.value("document.getElementById('goto-offset').value = '99999999999999'")
    tab.value("document.querySelector('#goto button').click()")
    assert tab.value("document.getElementById('goto-offset').validity.customError")
    frame(tab)
    assert tab.complaints() == []
    tab.close()
