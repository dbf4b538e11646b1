"""Benchmarks at small sizes: every case runs and compares bytes, every form of output is whole. Nothing is timed."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvferry.doctor.child import child
from kvferry.doctor.memory import pattern
from kvferry.errors import MeasureError
from kvferry.models import Side
from kvferry.plan import Binder
from lab.bench import bind, handshake, measure, page, strategies, transfer
from lab.bench.case import Case, placed
from lab.bench.machine import Machine, Record, this_machine
from lab.bench.plot import Bar, svg
from lab.bench.scatters import SCATTERS, cells
from lab.bench.stock import RefusedError, Stock, refuse
from lab.cli import app

ROOT = Path(__file__).parent.parent
SMALL = {"regions": 2, "page": 512}


@pytest.fixture
def nixl():
    try:
        transfer.load_nixl()
    except MeasureError as error:
        pytest.skip(str(error))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def stock_copies(case: Case) -> set[tuple[int, int, int]]:
    """Every byte that the baseline moves: source rank, source address, destination address."""
    producers = [placed(m, (1 + rank) << 40) for rank, m in enumerate(case.producers)]
    stock = Stock(placed(case.consumers[0], 0), producers)
    whole = stock.local_list()
    locals_ = [np.array(cut) for cut in stock.split_lists(whole)] if stock.splits > 1 else [whole]
    found = set()
    for source, (remote, local) in enumerate(stock.indices(case.request)):
        there, here = stock.remote_list(source)[remote], locals_[source][local]
        assert (there[:, 1] == here[:, 1]).all()
        for (src, length, _), (dst, _, _) in zip(there.tolist(), here.tolist(), strict=True):
            found |= {(source, src - ((1 + source) << 40) + i, dst + i) for i in range(length)}
    return found


def planned_copies(case: Case) -> set[tuple[int, int, int]]:
    plan = case.plan()
    found = set()
    for source, copies in enumerate(Binder(plan).bind(case.request).copies):
        src, dst = plan.sources[source].regions, plan.consumer.regions
        columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
        for a, b, c, d, n in zip(*(column.tolist() for column in columns), strict=True):
            found |= {(source, src[a].address + b + i, dst[c].address + d + i) for i in range(n)}
    return found


@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize(("prefill", "decode"), [("tp=1", "tp=1"), ("tp=2", "tp=1"), ("tp=1", "tp=2")])
def test_stock_moves_the_bytes_of_whole_blocks_that_the_plan_moves(prefill, decode, order):
    case = Case("small", prefill, decode, 48, order, blocks=9, **SMALL)
    assert stock_copies(case) == planned_copies(case)


def test_stock_moves_whole_blocks_where_the_plan_moves_less():
    case = Case("small", "tp=1", "tp=1", 20, blocks=9, **SMALL)
    assert stock_copies(case) > planned_copies(case)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ("tp=1,pp=2", "tp=1", "pipeline"),
        ("tp=2", "tp=3", "divide"),
        ("tp=1,layout=token", "tp=1", "layouts"),
        ("tp=2,conv=sd", "tp=1,conv=sd", "tap"),
        ("tp=2,layout=token", "tp=1,layout=token", "not modelled"),
    ],
)
def test_what_stock_refuses_is_said_so(prefill, decode, reason):
    layers = Case("hybrid", "tp=1", "tp=1", 16, model="nemotron-3-nano-30b-a3b").consumers[0].layers
    with pytest.raises(RefusedError, match=reason):
        refuse(Side.parse(prefill), Side.parse(decode), layers)


def test_patterns_tell_ranks_and_places_apart():
    words = np.concatenate([pattern(rank, 8 * 1000).view(np.uint64) for rank in range(3)])
    assert len(np.unique(words)) == len(words)
    assert len(pattern(0, 13)) == 13


def test_actions_take_turns_and_the_first_round_is_thrown_away():
    calls: list[str] = []

    def action(name: str):
        return lambda: calls.append(name) or float(len(calls))

    found = measure.measured({"a": action("a"), "b": action("b")}, 3)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found.samples == {"a": [4.0, 5.0, 8.0], "b": [3.0, 6.0, 7.0]}
    assert (found.median("a"), found.median("b")) == (5.0, 6.0)


def test_a_slow_spell_that_outlasts_a_round_does_not_change_a_ratio():
    rounds = measure.Rounds({"stock": [2.0, 2.0, 20.0, 20.0, 2.0], "kvferry": [1.0, 1.0, 10.0, 10.0, 10.0]})
    assert rounds.ratio("stock", "kvferry") == 2.0


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_goes_before_an_action_in_one_round_comes_after_it_in_the_next(count):
    calls: list[str] = []
    names = "abcd"[:count]
    measure.measured({name: lambda name=name: calls.append(name) or 1.0 for name in names}, 2 * count - 1)
    rounds = ["".join(calls[i : i + count]) for i in range(0, len(calls), count)]
    assert all(sorted(found) == list(names) for found in rounds)
    assert [found[::-1] for found in rounds[::2]] == rounds[1::2]
    assert {found[0] for found in rounds} == set(names)


def bad_child(parent: Connection) -> None:
    raise SystemExit(3)


def test_a_child_that_dies_is_named_with_its_exit_code():
    with child("the pilot", bad_child) as pilot, pytest.raises(MeasureError, match="the pilot died with exit code 3"):
        pilot.receive(60.0)
    assert not pilot.process.is_alive()


def test_every_bind_case_has_a_ratio_or_a_reason():
    found = bind.run(bind.cases(tokens=(200,)), 1)
    assert len(found) == 8
    assert all(row.indices and row.address_runs for row in found)
    assert all((row.ratio_to_stock is None) == bool(row.stock_remark) for row in found)


@pytest.mark.usefixtures("nixl")
def test_every_transfer_case_moves_the_right_bytes_through_two_processes():
    suite = transfer.host_cases(regions=2, blocks=8, page=512)
    assert {case.order for case in suite} == {"consecutive", "scattered"}
    small = [case if case.model == "pages" else replace(case, tokens=min(case.tokens, 99)) for case in suite]
    for row in transfer.run([*small, *transfer.device_cases(2, 8, 512)], repeats=1):
        assert row.right, row.case
        assert row.stock_right in (None, True), row.case
        assert (row.stock_right is None) == bool(row.stock_remark)
        assert row.bytes > 0
        assert row.runs > 0


@pytest.mark.usefixtures("nixl")
def test_handshake_rows_do_not_grow_with_blocks():
    small, large = handshake.run(handshake.cases(2, (500, 50_000), pairs=(("tp=2", "tp=1"),)), 1)
    assert small.rows == large.rows
    assert large.descriptors == 100 * small.descriptors
    assert small.footprint is not None
    assert large.stock_footprint.peak > large.footprint.peak


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (
            ("handshake", "--regions", "1", "--blocks", "30", "--prefill", "tp=1", "--decode", "tp=1"),
            {"rows", "descriptors", "ratio_to_stock", "footprint", "stock_footprint", "plan_seconds", "peak_ratio"},
        ),
        (
            ("transfer", "--regions", "1", "--blocks", "4", "--page", "512", "--prefill", "tp=2", "--decode", "tp=1"),
            {"bytes", "right", "ratio_to_stock", "ratio_to_one_descriptor", "ratio_to_memcpy", "stock_right", "path", "runs"},
        ),
        (
            ("bind", "--model", "llama-3.1-8b", "--tokens", "300", "--order", "scattered"),
            {"indices", "stock_indices", "ratio_to_stock", "address_runs", "address_seconds"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_run_as_json_and_as_a_picture(words, keys, tmp_path):
    picture = tmp_path / "out.svg"
    done = run("lab", "bench", *words, "--repeats", "1", "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bench"] == words[0]
    assert found["machine"]["cores"] >= 1
    assert all(keys <= row.keys() for row in found["results"])
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_a_run_as_a_table():
    done = CliRunner().invoke(app, ["bench", "bind", "--model", "llama-3.1-8b", "--tokens", "300", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    assert "× stock" in done.output


@pytest.mark.usefixtures("nixl")
def test_the_minimal_entry_needs_neither_rich_nor_typer():
    program = (
        "import sys; sys.modules['rich'] = sys.modules['typer'] = None\n"
        "import runpy; sys.argv = ['transfer', '--help']; runpy.run_module('lab.bench.transfer', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--memory" in done.stdout


def test_a_picture_escapes_names_and_shows_what_has_no_baseline():
    text = svg("a < b & c", [Bar("x <y>", "stock", None), Bar("x <y>", "memcpy", 0.5), Bar("z", "stock", 400.0)])
    words = [element.text for element in ET.fromstring(text).iter() if element.text and element.text.strip()]
    assert {"a < b & c", "x <y>", "none", "0.50", "400"} <= set(words)


def test_names_in_a_picture_are_beside_each_other_and_inside_it():
    cases, names = ("a" * 90, "b"), ("one", "a much longer name than the others have", "c" * 30)
    drawn = ET.fromstring(svg("t", [Bar(case, name, 2.0) for case in cases for name in names]))
    width = float(drawn.attrib["viewBox"].split()[2])
    texts = {it.text: it for it in drawn.iter() if it.text in (*cases, *names)}
    begins = [float(texts[name].attrib["x"]) for name in names]
    assert all(at + 6.5 * len(name) < end for at, name, end in zip(begins, names, [*begins[1:], width], strict=True))
    assert all(float(texts[case].attrib["x"]) > 6.5 * len(case) for case in cases)


def test_the_page_keeps_its_device_section_unless_a_new_one_is_given():
    before = f"{page.BEGIN}\nmeasured once\n{page.END}\n"
    kept = page.written(this_machine(), 15, [], [], [], None, before)
    assert f"{page.BEGIN}\nmeasured once\n{page.END}" in kept
    assert "Not measured yet." in page.written(this_machine(), 15, [], [], [], None, "")


def test_the_page_says_that_both_processes_share_one_gpu(tmp_path):
    row = transfer.Moved(
        "whole pages", "pages", "tp=1", "tp=1", "consecutive", "vram", 16, 1 << 20, 1, "CUDA IPC", True,
        1.0, 0.5, 2.0, 1 << 20, True, "", 0.9, 0.8, 2.0, 0.9, 0.8, 1.0,
    )  # fmt: skip
    record = {"bench": "transfer", "machine": this_machine("a GPU"), "repeats": 15, "results": [row]}
    (tmp_path / "gpu.json").write_bytes(page.msgspec.json.encode(record))
    device = page.read_device(tmp_path / "gpu.json")
    text = page.written(this_machine(), 15, [], [], [], device, "")
    assert re.search(r"Both processes share one GPU.*CUDA IPC.*whole pages", text, flags=re.DOTALL)


def test_host_results_are_not_taken_for_a_device(tmp_path):
    (tmp_path / "bad.json").write_text('{"machine": 1}')
    with pytest.raises(MeasureError, match="--gpu"):
        page.read_device(tmp_path / "bad.json")
    with pytest.raises(MeasureError, match="--gpu"):
        page.read_device(Path("/no/such/file"))


@pytest.mark.parametrize(
    "words",
    [
        ("handshake", "--blocks", "many"),
        ("handshake", "--blocks", "0"),
        ("handshake", "--regions", "0"),
        ("handshake", "--repeats", "0"),
        ("handshake", "--prefill", "tp=1"),
        ("handshake", "--prefill", "tp=1,pp=2", "--decode", "tp=1"),
        ("transfer", "--memory", "tape"),
        ("transfer", "--memory", "vram", "--blocks", "1", "--regions", "1"),
        ("transfer", "--order", "sideways"),
        ("transfer", "--page", "100"),
        ("transfer", "--blocks", "-1"),
        ("transfer", "--model", "no-such-model"),
        ("transfer", "--prefill", "tp=1", "--decode", "tp=3"),
        ("transfer", "--blocks", "10000000", "--regions", "1000"),
        ("bind", "--tokens", "1,x"),
        ("bind", "--tokens", "0"),
        ("bind", "--model", "llama-3.1-8b", "--tokens", "100", "--repeats", "1", "--plot", "/no/such/folder/out.svg"),
        ("report", "--out", "page.md", "--gpu", "/no/such/file"),
        ("sideways",),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("nixl")
def test_bad_arguments_are_one_clear_message_and_exit_code_2(words):
    done = run("lab", "bench", *words)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_every_strategy_moves_every_scatter_byte_by_byte(nixl):
    """Through less staging than most of them take."""
    few = [(replace(scatter, layers=min(scatter.layers, 2)), tokens) for scatter, tokens in cells([100])]
    found = strategies.run(few, repeats=1, budget=1 << 18)
    assert [cell.scatter for cell in found if not cell.right] == []
    assert {cell.scatter for cell in found} == {scatter.name for scatter in SCATTERS}
    for cell in found:
        assert set(strategies.HOST_WAYS) - set(cell.seconds) <= {"direct"}
        assert set(cell.foretold) == {"direct", "packed", "staged"}
        assert cell.took / cell.regret == pytest.approx(cell.best)
        assert 0 < cell.took <= cell.chosen_seconds
        assert 0 < cell.choosing_seconds < cell.chosen_seconds
        assert set(cell.chosen.split(" and ")) <= set(cell.foretold)
        assert (strategies.STOCK in cell.seconds) == (not cell.stock_remark) == (cell.stock_bytes >= cell.bytes)
    served = [cell.scatter for cell in found if strategies.STOCK in cell.seconds]
    assert served == ["consecutive blocks", "scattered blocks", "head slices, TP 1 → 2", "head slices, TP 2 → 1"]
    assert f"of {len(found)} cells" in strategies.verdict(found)


@pytest.mark.parametrize(
    ("chosen", "chosen_seconds", "regret"),
    [
        ("direct", 2.6, 1.0),
        ("direct", 1.8, 1.0),
        ("staged", 3.0, 1.5),
        ("staged", 4.0, 1.6),
        ("packed", 4.0, 2.0),
        ("direct and staged", 2.2, 1.1),
        ("staged", 0.0, 1.6),
    ],
)
def test_a_choice_is_judged_by_the_strategy_that_it_took(chosen, chosen_seconds, regret):
    """Two measurements of one strategy are of the same thing; `mapped` is not among what was to be chosen from."""
    seconds = {"direct": 2.0, "staged": 3.2, "mapped": 0.5}
    foretold = {"direct": 1.0, "staged": 2.0, "packed": 9.0}
    cell = strategies.Cell("a", 1, "dram", 1, 1, seconds, foretold, chosen, True, 0.1, "a path", chosen_seconds)
    assert cell.regret == pytest.approx(regret)


def test_what_it_takes_to_choose_is_a_part_of_the_choice():
    made = {"seconds": {"packed": 2.0, "direct": 3.0}, "foretold": {"packed": 1.0, "direct": 3.0}}
    for choosing, regret in ((0.0, 1.0), (1.0, 1.5), (2.0, 1.75)):
        cell = strategies.Cell("a", 1, "dram", 1, 1, **made, chosen="packed", right=True, memcpy_seconds=0.1, path="a path")
        cell = msgspec.structs.replace(cell, chosen_seconds=3.5, choosing_seconds=choosing)
        assert cell.regret == pytest.approx(regret)


def test_a_limit_holds_for_the_end_that_chooses_too(nixl):
    """Of mapped memory nothing is foretold; whatever is, would take longer than this."""
    [cell] = strategies.run(cells([100], "scattered blocks"), repeats=1, budget=1 << 20, limit_s=1e-9)
    assert (set(cell.seconds), cell.chosen, cell.chosen_seconds) == ({"mapped"}, "", 0.0)
    assert cell.stock_remark == "too long"
    assert cell.right
    assert strategies.verdict([cell]) == "nothing was chosen: every cell would take too long"
    assert "none chosen" in strategies.line(cell)


def test_a_cell_that_would_take_too_long_is_not_judged():
    done = strategies.Cell("a", 1, "dram", 1, 1, {"direct": 2.0}, {"direct": 1.0}, "direct", True, 0.1, "a path", 2.0)
    longer = strategies.Cell("b", 1, "dram", 1, 1, {"mapped": 2.0}, {"direct": 9.0}, "", True, 0.1, "a path")
    said = strategies.verdict([longer, done])
    assert "in 1 of 1 cells" in said
    assert "1 would take too long" in said


def test_strategies_are_shown_kept_and_drawn(nixl, tmp_path):
    words = [
        "bench",
        "strategies",
        "--tokens",
        "64",
        "--only",
        "TP 1 → 2",
        "--repeats",
        "1",
        "--staging-bytes",
        "1048576",
    ]
    kept = CliRunner().invoke(app, [*words, "--json"])
    assert kept.exit_code == 0, kept.output
    (tmp_path / "kept.json").write_text(kept.stdout)
    drawn = tmp_path / "heat.svg"
    shown = run("lab", "bench", "strategies", "--add", str(tmp_path / "kept.json"), "--plot", str(drawn))
    assert shown.returncode == 0, shown.stderr
    for word in (
        "token-major",
        "packed",
        "staged",
        "stock",
        "right",
        "the choice is within",
        f"Python {platform.python_version()}",
    ):
        assert word in shown.stdout
    again = CliRunner().invoke(app, ["bench", "strategies", *["--add", str(tmp_path / "kept.json")] * 2, "--json"])
    assert json.loads(again.stdout)["results"] == 2 * json.loads(kept.stdout)["results"]
    rectangles = ET.parse(drawn).getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(rectangles) == 1 + 3 * len(strategies.HOST_WAYS) + 1


KEPT = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*/strategies/*.json"))


def test_strategies_of_two_machines_are_not_shown_together(tmp_path):
    paths = []
    for cores in (2, 16):
        cell = strategies.Cell("a", 1, "dram", 1, 1, {"direct": 2.0}, {"direct": 1.0}, "direct", True, 0.1, "a path", 2.0)
        paths.append(tmp_path / f"{cores}.json")
        machine = Machine("a processor", cores, 8.0, "6.1", "3.11", {})
        paths[-1].write_bytes(msgspec.json.encode(Record("strategies", machine, 1, [cell])))
    said = run("lab", "bench", "strategies", "--add", str(paths[0]), "--add", str(paths[1]))
    assert said.returncode == 2
    assert "measured on two machines: 2 cores" in said.stderr


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
def test_strategies_that_were_measured_and_kept_can_be_shown(kept):
    shown = CliRunner().invoke(app, ["bench", "strategies", "--add", str(kept)])
    assert shown.exit_code == 0, shown.output
    assert "the choice is within" in shown.output


def test_what_paths_cost_is_measured_and_plans_are_judged_by_it(nixl, tmp_path):
    done = run("lab", "bench", "calibrate", "--staging-bytes", "4194304", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {rates["path"] for rates in found["rates"].values()} == {"shared memory", "TCP"}
    wires = [rates["wire"] for rates in found["rates"].values()]
    assert all(number > 0 or (name, number) == ("begin_s", 0) for wire in wires for name, number in wire.items())
    (tmp_path / "rates.json").write_text(done.stdout)
    sides = ("--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=2")
    plan = run("kvferry", "plan", *sides, "--rates", str(tmp_path / "rates.json"))
    assert plan.returncode == 0, plan.stderr
    assert "TCP, over TCP alone" in plan.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("strategies", "--only", "nothing"), "there is none of that name"),
        (("strategies", "--tokens", "many"), "--tokens many: give numbers"),
        (("strategies", "--memory", "tape"), "--memory tape: choose dram or vram"),
        (("strategies", "--repeats", "0"), "--repeats 0: give a number"),
        (("strategies", "--staging-bytes", "5"), "--staging-bytes 5: give a number"),
        (("strategies", "--add", "missing.json"), "--add missing.json: not what"),
        (("calibrate", "--memory", "tape"), "--memory tape: choose dram or vram"),
    ],
)
def test_wrong_words_about_strategies_are_one_message(words, said):
    done = run("lab", "bench", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
