"""The parts of `bench serve` that need no engine: arithmetic, arms, the client, kept results and what they show."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from concurrent.futures import Future
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from kvferry.errors import MeasureError
from kvferry.up.device import Device
from kvferry.up.watch import samples
from lab.bench.machine import Machine
from lab.bench.plot import svg
from lab.bench.serve import client, report, result, scatter, stats, trace
from lab.bench.serve.arms import ARMS, DIRECT_ALONE, STOCK_STATES, chosen, defined, turns
from lab.bench.serve.asking import Side, too_many
from lab.bench.serve.client import Prompt
from lab.bench.serve.engine import Engine, Place
from lab.bench.serve.measure import Measuring, read_lengths
from lab.bench.serve.models import SHAPES, model
from lab.bench.serve.result import Record, Row, Run, Settings
from lab.bench.serve.runner import Order, left
from lab.bench.serve.stats import percentile
from lab.bench.serve.trace import Span
from lab.cli import app
from lab.fleet import steps
from lab.fleet.blocks import Pool
from lab.fleet.connectors import OURS, STOCK
from lab.fleet.device import environment
from lab.fleet.patches import SWITCH_SECONDS
from lab.fleet.zygote import Start

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to.md"
MACHINE = Machine("a processor", 2, 8.0, "6", "3", {"kvferry": "0"})
SETTINGS = Settings(
    model="tiny-llama",
    device="cpu",
    dtype="float32",
    lengths=(257, 1025),
    repeats=2,
    at_once=4,
    at_once_length=257,
    rounds=1,
    beside=4,
    output=8,
    idle_s=1.0,
    prefills=4,
    rate=4.0,
    rate_s=1.0,
    kv_cache_bytes="64M",
    prefix_caching=True,
    seed=0,
)


# Runs of blocks


def brute_force_runs(pairs: list[tuple[int, int]]) -> int:
    """Pairs that nothing comes right before on both sides."""
    return sum((a - 1, b - 1) not in set(pairs) for a, b in pairs)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two tables without repetitions, with stretches in them as vLLM hands them out."""

    def table(size: int) -> list[int]:
        ids = draw(st.permutations(range(1, size + 1)))
        cut = draw(st.integers(0, size))
        return [*sorted(ids[:cut], reverse=draw(st.booleans())), *ids[cut:]]

    size = draw(st.integers(0, 40))
    return table(size), table(size)


@given(tables())
def test_runs_are_counted_as_by_brute_force_and_whichever_side_is_sorted(both):
    source, target = both
    expected = brute_force_runs(list(zip(source, target, strict=True)))
    assert scatter.runs(source, target) == expected
    assert scatter.runs(target, source) == expected


def test_blocks_that_descend_on_both_sides_are_one_run_and_on_one_side_none():
    assert scatter.runs([5, 4, 3, 2], [9, 8, 7, 6]) == 1
    assert scatter.runs([5, 4, 3, 2], [6, 7, 8, 9]) == 4


def test_scatter_covers_all_groups_without_missing_blocks_and_blocks_behind_the_prompt():
    found = scatter.scatter([[1, 2, 3, 4], [0, 9]], [[11, 12, 20, 21], [0, 7]], tokens=90, block_tokens=(32, 64))
    assert (found.blocks, found.runs) == (3 + 1, 2 + 1)


def test_the_least_scattered_request_speaks_for_all_and_short_ones_do_not():
    assert scatter.scattered({"a": scatter.Scatter(10, 10), "b": scatter.Scatter(10, 4), "c": scatter.Scatter(2, 1)}) == 0.4
    assert scatter.scattered({"c": scatter.Scatter(2, 2)}) == 0.0


# Samples


@given(st.lists(st.integers(0, 50), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_smallest_sample_that_enough_do_not_exceed(values, share):
    enough = Fraction(str(share)) * len(values)
    expected = min(v for v in values if sum(w <= v for w in values) >= enough)
    assert stats.percentile(values, share) == expected


def test_gaps_are_those_that_a_part_of_the_time_falls_into():
    marks = [0.0, 1.0, 3.0, 6.0, 10.0]
    assert list(stats.gaps(marks)) == [1.0, 2.0, 3.0, 4.0]
    assert list(stats.gaps(marks, 1.5, 3.5)) == [2.0, 3.0]


# Arms


def test_arms_take_turns_and_each_start_begins_with_another():
    arms = chosen("none,stock,kvferry")
    order = turns(arms, ["eager", "graphs"], 3)
    assert len({(start, mode, arm.name) for start, mode, arm in order}) == len(order) == 18
    assert [arm.name for start, mode, arm in order if (start, mode) == (1, "eager")] == ["stock", "kvferry", "none"]
    assert [start for start, _, _ in order] == sorted(start for start, _, _ in order)


def test_an_arm_that_reads_over_nixl_alone_says_so_in_one_place():
    connector = ARMS["kvferry-direct"].connector
    assert connector is not None
    assert json.loads(connector.flag())["kv_connector_extra_config"] == DIRECT_ALONE


def test_an_arm_can_be_defined_like_another():
    arm = defined('stock-8={"like": "stock-64", "settings": {"num_threads": 8}, "flags": ["--x"], "environment": {"A": "1"}}')
    assert (arm.name, arm.block, arm.flags, arm.environment) == ("stock-8", 64, ("--x",), {**STOCK_STATES, "A": "1"})
    assert arm.connector is not None
    assert json.loads(arm.connector.flag("kv_consumer"))["kv_connector_extra_config"] == {"num_threads": 8}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stock", "define an arm as"),
        ("a={", "the definition of the arm a"),
        ('a={"like": "stok"}', "did you mean stock"),
        ('a={"like": "stock", "blok": 1}', "blok"),
        ('a={"like": "none", "settings": {"b": 1}}', "no connector"),
    ],
)
def test_a_wrong_definition_is_told(text, said):
    with pytest.raises(MeasureError, match=said):
        defined(text)


@pytest.mark.parametrize("name", list(SHAPES))
def test_arms_differ_in_their_connector_alone(name, tmp_path):
    made = model(name, tmp_path)
    assert json.loads((made.folder / "config.json").read_text())["vocab_size"] == made.vocabulary

    def flags(arm: str, mode: str) -> set[str]:
        engine = Engine(made, ARMS[arm], "D", mode, Device.CUDA, tmp_path / "w", "1G", 2048, 2048, True)
        return set(engine.arguments(1))

    (added,) = flags("kvferry", "eager") - flags("none", "eager")
    assert added.startswith("--kv-transfer-config=")
    assert flags("stock-64", "eager") - flags("stock", "eager") == {"--block-size=64"}
    assert flags("stock", "eager") - flags("stock", "graphs") == {"--enforce-eager"}


def test_engines_that_are_elsewhere_are_told_where_they_are_and_where_the_other_is(tmp_path):
    made = model("tiny-llama", tmp_path)
    places = {"P": Place("10.0.0.2", {"key_file": "k"}, {"UCX_NET_DEVICES": "p"}), "D": Place(settings={"key_file": "k"})}
    engines = {
        role: Engine(made, ARMS["kvferry"], role, "eager", Device.CPU, tmp_path, "1G", 99, 99, True, (), "10.0.0.2:7", place)
        for role, place in places.items()
    }

    def extra(role: str) -> dict:
        (flag,) = [it for it in engines[role].arguments(1) if it.startswith("--kv-transfer-config=")]
        return json.loads(flag.partition("=")[2])["kv_connector_extra_config"]

    assert extra("P") == {"listen": "10.0.0.2:7", "key_file": "k"}
    assert extra("D") == {"peers": ["10.0.0.2:7"], "key_file": "k"}
    assert "--host=10.0.0.2" in engines["P"].arguments(1)
    assert "--host=127.0.0.1" in engines["D"].arguments(1)
    assert engines["P"].variables(1)["UCX_NET_DEVICES"] == "p"
    assert "UCX_NET_DEVICES" not in engines["D"].variables(1)


def test_on_a_gpu_nothing_hides_it_and_what_was_set_outside_is_kept():
    outside = {"UCX_TLS": "tcp", "CUDA_VISIBLE_DEVICES": "3", "LD_PRELOAD": "x"}
    there = environment(Device.CUDA, outside)
    assert (there["UCX_TLS"], there["CUDA_VISIBLE_DEVICES"]) == ("tcp", "3")
    assert "LD_PRELOAD" not in there
    assert not any(name.startswith(("VLLM_CPU", "OMP")) for name in there)
    assert environment(Device.CPU, outside)["CUDA_VISIBLE_DEVICES"] == ""


# The client


@given(st.integers(1, 6), st.lists(st.integers(1, 40), max_size=12))
def test_every_piece_of_a_stream_is_counted_wherever_it_is_cut(pieces, cuts):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b""
    for data in [b'data: {"id":1,"token":"a"}\n\n'] * pieces + [b"data: [DONE]\n\n"]:
        body += f"{len(data):x}\r\n".encode() + data + b"\r\n"
    whole = head + body + b"0\r\n\r\n"

    async def fed() -> client.Streamed:
        connection = client.Connection("a request")
        at = 0
        for cut in cuts:
            connection.data_received(whole[at : at + cut])
            at += cut
        connection.data_received(whole[at:])
        connection.connection_lost(None)
        return connection.streamed_whole()

    found = asyncio.run(fed())
    assert len(found.marks) == pieces
    assert found.marks == sorted(found.marks)


async def _answering(reply: bytes, ask):
    """A server that answers every request with the same bytes."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])
        heard.append(head + await reader.readexactly(length))
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await ask(server.sockets[0].getsockname()), heard


def test_a_request_carries_its_name_prompt_and_reference():
    prompt = client.Prompt("p", 3, b"[1,2,3]")
    content = client.body(prompt, 2, params={"remote": 7})
    reply = b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"a": 17}'
    answer, (heard,) = asyncio.run(_answering(reply, lambda to: client.ask(to, "name-1", content)))
    assert answer == {"a": 17}
    head, _, sent = heard.partition(b"\r\n\r\n")
    assert b"X-Request-Id: name-1" in head
    assert json.loads(sent)["prompt"] == [1, 2, 3]
    assert json.loads(sent)["kv_transfer_params"] == {"remote": 7}


def test_an_answer_in_chunks_is_put_together():
    reply = b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n'
    answer, _ = asyncio.run(_answering(reply, lambda to: client.ask(to, "n", b"{}")))
    assert answer == {"a": 1}


@pytest.mark.parametrize("reply", [b"HTTP/1.1 500 No\r\n\r\nbroken", b""])
def test_a_failed_request_is_named(reply):
    with pytest.raises(client.UnansweredError, match=r"name-7: (HTTP 500: broken|no answer)"):
        asyncio.run(_answering(reply, lambda to: client.ask(to, "name-7", b"{}")))
    with pytest.raises(client.UnansweredError, match=r"name-7: (HTTP 500: broken|no answer)"):
        asyncio.run(_answering(reply, lambda to: client.stream(to, "name-7", b"{}")))


def test_a_stream_that_ends_with_an_error_is_no_answer():
    reply = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\ndata: {"error": "lost"}\n\ndata: [DONE]\n\n'
    with pytest.raises(client.UnansweredError, match="lost"):
        asyncio.run(_answering(reply, lambda to: client.stream(to, "n", b"{}")))


def test_metrics_are_read_with_their_labels():
    text = '# HELP a b\na_total{engine="0",source="x, \\"y\\""} 3.0\nb 1e+06\n'
    assert list(samples(text)) == [("a_total", {"engine": "0", "source": 'x, \\"y\\"'}, 3.0), ("b", {}, 1e6)]


# Results


def a_run(arm: str, start: int, factor: float, mode: str = "eager", **changes: object) -> Run:
    """A start in which everything takes `factor` times as long."""
    rows = [Row("first", "consecutive", 257, {"ttft": [30.0 * factor], "in the engine": [20.0]})]
    for order in ("consecutive", "scattered"):
        samples = {n: {"ttft": [n * factor, n * factor + 2], "in the engine": [n / 16]} for n in (257, 1025)}
        rows += [Row("alone", order, n, it, scatter=0.97) for n, it in samples.items()]
    rows.append(Row("at-once", "scattered", 257, {"ttft": [10 * factor, 20 * factor, 30 * factor, 40 * factor]}))
    rows.append(Row("decode", "scattered", 257, {"idle": [5.0, 5.0], "loaded": [5 * factor, 6 * factor, 60 * factor]}))
    rows += [Row("busy", "scattered", n, {"ttft": [2 * n * factor]}, scatter=0.97) for n in (257, 1025)]
    rows.append(Row("prefill", "scattered", 257, {"alone": [1000.0], "read": [1000.0 / factor], "hits": [990.0]}))
    beside = {"decoding": [500.0], "read while decoding": [495.0]}
    rows.append(Row("prefill", "scattered", 1025, {"alone": [1000.0], "read": [980.0], "hits": [990.0], **beside}))
    connector = ARMS[arm].connector
    configured = json.loads(connector.flag()) if connector else {}
    run = Run(arm, mode, start, 16, configured, {"start": 5.0}, rows, {"257 a": [1, 2], "257 b": [3, 4]}, complete=True)
    return replace(run, **changes)


def a_record() -> Record:
    runs = []
    for start, mood in enumerate((1.0, 3.0, 1.5)):
        factors = {"none": 1.0, "stock": 8.0, "stock-64": 6.0, "kvferry": 2.0}
        runs += [a_run(arm, start, factor * mood) for arm, factor in factors.items()]
    return Record(MACHINE, SETTINGS, runs)


def shown(record: Record, title: str) -> report.Shown:
    return next(it for it in report.summary(record).figures if it.title == title)


def test_ratios_are_of_arms_of_one_start_and_stock_is_taken_at_its_best():
    found = shown(a_record(), "4 × 257 at once, p50")
    assert found.times_faster_than_stock == {"kvferry": 3.0}
    assert found.times_the_floor["kvferry"] == 2.0
    assert found.values["kvferry"] == 25 * 2 * 1.5
    assert found.starts["none"] == [25.0, 75.0, 37.5]


def test_more_is_better_for_what_is_a_rate():
    found = shown(a_record(), "P's prefill, prompts of 257 being read ÷ alone")
    assert found.values["stock"] == pytest.approx(1 / 12)
    assert found.times_faster_than_stock["kvferry"] == pytest.approx(3.0)


def test_what_is_handed_to_a_decode_engine_that_decodes_and_long_prompts_beside_prefill_have_figures_of_their_own():
    assert shown(a_record(), "1,025 tokens, scattered, D decoding").starts["none"] == [2050.0, 6150.0, 3075.0]
    assert shown(a_record(), "1,025 tokens, scattered").starts["none"] == [1026.0, 3076.0, 1538.5]
    assert shown(a_record(), "P's prefill, prompts of 1,025 being read ÷ alone").values["stock"] == 0.98
    assert shown(a_record(), "P's prefill, prompts of 1,025 being read ÷ D not reading").values["stock"] == pytest.approx(
        98 / 99
    )
    assert shown(a_record(), "P's prefill, prompts of 1,025 being read, D decoding ÷ D not reading").values["stock"] == 0.99


def test_only_longer_prompts_than_the_short_ones_are_read_beside_prefill_too():
    assert read_lengths(SETTINGS) == (257, 1025)
    assert read_lengths(replace(SETTINGS, lengths=(1025, 129))) == (257, 1025)
    assert read_lengths(replace(SETTINGS, at_once_length=4097)) == (4097,)


def test_the_first_request_is_compared_with_later_ones_with_and_without_the_api_servers():
    assert shown(a_record(), "first request ÷ later ones").starts["none"][0] == 30 / 258
    assert shown(a_record(), "first request ÷ later ones, in D's engine").values["none"] == 20 / (257 / 16)


def test_percentiles_and_the_worst_step_come_from_all_samples():
    assert shown(a_record(), "decode step, during the loads, worst").starts["none"] == [60.0, 180.0, 90.0]
    assert shown(a_record(), "decode step, during the loads, worst ÷ p50").values["none"] == 10.0


def test_rows_are_compared_within_one_run():
    assert shown(a_record(), "first request ÷ later ones").starts["none"] == [30 / 258, 90 / 772, 45 / 386.5]
    assert shown(a_record(), "1,025 tokens, scattered ÷ consecutive").values["stock"] == 1.0


def test_a_void_row_counts_for_nothing_and_is_told_with_its_reason():
    record = a_record()
    for run in record.runs:
        if run.arm == "kvferry" and run.start < 2:
            for row in run.rows[3:5]:
                row.void = "not scattered"
    found = shown(record, "257 tokens, scattered")
    assert len(found.starts["kvferry"]) == 1
    told = [it for it in report.remarks(report.summary(record)) if it.startswith("void")]
    assert told == [f"void: kvferry eager {n}: alone scattered 257, alone scattered 1025: not scattered" for n in (1, 2)]


def test_a_row_that_was_cut_off_before_its_blocks_were_looked_at_does_not_count():
    record = a_record()
    for run in record.runs:
        run.rows[0].requests = ["a"]
        run.rows[0].blocks = 9 if run.arm == "stock" else 0
    assert list(shown(record, "first request, 257 tokens").values) == ["stock"]


@pytest.mark.parametrize(
    ("order", "runs", "moved", "void"),
    [
        ("scattered", 20, 640, ""),
        ("scattered", 20, 639, "639 of 640 bytes that were foretold were moved"),
        ("scattered", 17, 640, "not scattered"),
        ("consecutive", 2, 640, ""),
        ("consecutive", 20, 640, "not consecutive"),
    ],
)
def test_a_row_counts_where_all_was_moved_and_blocks_lay_as_wanted(order, runs, moved, void):
    producer, consumer = (Side(None, None) for _ in range(2))
    measuring = Measuring(Run("kvferry", "eager", 0, 32, {}), SETTINGS, 256, {"P": producer, "D": consumer}, (), print, print)
    row = Row("alone", order, 641, {}, ["a"], from_peer=640, moved_bytes=moved, foretold_bytes=640, blocks=20, runs=runs)
    found = {"a": scatter.Scatter(20, runs)}
    row.scatter = scatter.scattered(found)
    said = measuring._void(row, found)
    assert void in said
    assert bool(said) == bool(void)


@pytest.mark.parametrize(
    ("caching", "rows", "cached", "void"),
    [
        (True, (), 5 * 4192, ""),
        (False, (), 5 * 4192, ""),
        (True, (), 6 * 4192, ""),
        (False, (), 0, "without a prefix cache there is no floor"),
        (True, (), 0, "0 of 20965 prompt tokens were found in the prefix cache"),
        (False, (), 5 * 4160, "choose lengths of whole blocks of 2,096 tokens, and one more"),
        (True, ("in-turns",), 3 * 4192, ""),
        (True, ("in-turns",), 3 * 4160, "12480 of 12579 prompt tokens"),
    ],
    ids=[
        "found",
        "a cache of its own",
        "known before",
        "no cache",
        "none found",
        "all but 33",
        "forgotten",
        "forgotten, all but 33",
    ],
)
def test_a_floor_counts_where_the_prompts_were_found_in_the_prefix_cache(caching, rows, cached, void):
    alone = Side(None, None, block_tokens=(2096, 2096))
    settings = replace(SETTINGS, prefix_caching=caching)
    measuring = Measuring(Run("none", "graphs", 0, 16, {}), settings, 256, {"P": alone, "D": alone}, rows, print, print)
    said = measuring._void(Row("alone", "scattered", 4193, {}, ["a", "b", "c"], cached=cached), {})
    assert void in said
    assert bool(said) == bool(void)


@pytest.mark.parametrize(
    ("blocks", "groups", "tables", "said"),
    [
        (509, (32,), None, "48 prompts of 2,001 tokens at once need 3,024 blocks, and there are 508: make --kv-cache"),
        (3024, (32,), None, "and there are 3,023"),
        (3025, (32,), None, ""),
        (3025, (32, 32), None, "need 6,048 blocks"),
        (3025, (32, 32), [range(1, 64), [*[0] * 58, *range(64, 69)]], "need 3,322 blocks, and there are 3,024"),
        (3322, (32, 32), [range(1, 64), [*[0] * 58, *range(64, 69)]], "need 3,322 blocks, and there are 3,321"),
        (3323, (32, 32), [range(1, 64), [*[0] * 58, *range(64, 69)]], ""),
        (3073, (32, 8192), [range(1, 64), [64]], ""),
        (3025, (32,), [range(1, 65)], ""),
    ],
    ids=[
        "far",
        "by one",
        "exactly",
        "two groups at most",
        "a window",
        "no room for the last",
        "a window fits",
        "states",
        "a block behind the prompt",
    ],
)
def test_prompts_at_once_are_refused_where_the_blocks_that_they_keep_do_not_fit(blocks, groups, tables, said):
    told = too_many(Pool(blocks, blocks - 1, 0, groups, (), ()), 48, 2001, tables)
    assert re.search(said, told)
    assert bool(told) == bool(said)


def test_a_figure_without_samples_is_not_shown():
    record = Record(MACHINE, SETTINGS, [Run("kvferry", "eager", 0, 16, {})])
    assert report.summary(record).figures == []


def test_answers_are_compared_with_those_of_the_engine_without_a_connector():
    record = a_record()
    record.runs[3].answers["257 b"] = [3, 5]
    (stock, *_, kvferry) = report.summary(record).agreements
    assert (stock.same, stock.prompts, stock.unlike) == (6, 6, 2)
    assert (kvferry.arm, kvferry.same, kvferry.prompts) == ("kvferry", 5, 6)


def test_our_answers_are_compared_with_an_engine_that_computes_the_last_token_apart_as_ours_do():
    record = a_record()
    for run in record.runs:
        run.connector = {"kv_connector": {"kvferry": OURS.kind, "stock": STOCK.kind, "stock-64": STOCK.kind}.get(run.arm, "")}
        if run.arm == "none":
            run.parted = {key: [9, *tokens[1:]] for key, tokens in run.answers.items()}
        if run.arm == "kvferry":
            run.answers = {key: [9, *tokens[1:]] for key, tokens in run.answers.items()}
    found = {it.arm: it.same for it in report.summary(record).agreements}
    assert found == {"stock": 6, "stock-64": 6, "kvferry": 6}


def test_a_prompt_without_its_last_token_is_the_same_json_otherwise():
    assert Prompt("k", 3, b"[5,6,7]").all_but_one == Prompt("k-all-but-one", 2, b"[5,6]")


def test_a_result_survives_its_file_and_a_half_done_start_is_done_again(tmp_path):
    record = a_record()
    record.runs[5].complete = False
    path = tmp_path / "serve.json"
    result.write(path, record)
    back = result.read(path)
    assert msgspec.json.encode(back) == msgspec.json.encode(record)
    made = model("tiny-llama", tmp_path)
    order = Order(made, chosen("none,stock"), ("eager",), 4, Device.CPU, Start.FORK)
    assert {(start, arm.name) for start, _, arm in left(order, back)} == {(1, "stock"), (3, "none"), (3, "stock")}
    back.keep(a_run("stock", 1, 1.0))
    assert len(back.runs) == len(record.runs)
    assert [path.name for path in tmp_path.glob("*serve*")] == ["serve.json"]


def test_records_are_merged_with_starts_counted_on():
    both = result.merged([a_record(), a_record()])
    assert [run.start for run in both.runs if run.arm == "stock"] == [0, 1, 2, 3, 4, 5]
    assert shown(both, "4 × 257 at once, p50").times_faster_than_stock == {"kvferry": 3.0}


def test_unlike_settings_are_not_merged():
    other = Record(MACHINE, replace(SETTINGS, at_once=48), [])
    with pytest.raises(MeasureError, match="at_once 4 and 48"):
        result.merged([a_record(), other])


@pytest.mark.parametrize("text", ["", "{}", '{"bench": "transfer"}', "no JSON"])
def test_a_file_that_is_no_result_is_told(text, tmp_path):
    path = tmp_path / "serve.json"
    path.write_text(text)
    with pytest.raises(MeasureError, match=r"serve\.json: "):
        result.read(path)


def test_the_picture_has_what_most_wait_for_and_what_those_that_decode_do_at_worst():
    record = a_record()
    bars = report.bars(report.summary(record))
    assert {bar.baseline for bar in bars} == {"kvferry"}
    cases = [bar.case for bar in bars]
    assert {"4 × 257 at once, p50", "decode step, idle, p50", "decode step, during the loads, p99"} <= {*cases}
    assert [case for case in cases if "engine" in case or "first" in case or "p90" in case or "(" in case] == []
    drawn = ET.fromstring(svg("title", bars))
    assert [it.text for it in drawn.iter() if it.text in cases] == cases
    both = Record(record.machine, record.settings, [*record.runs, *(replace(run, mode="graphs") for run in record.runs)])
    assert [bar.case for bar in report.bars(report.summary(both))] == [
        f"{it} ({m})" for m in ("eager", "graphs") for it in cases
    ]


# Where steps spend their time


def recorded(*found: dict[str, float]) -> np.ndarray:
    return np.array([[it.get(name, 0.0) for name in steps.COLUMNS] for it in found])


def test_steps_belong_to_what_went_on_while_some_part_of_them_ran():
    spans = [Span("idle", 10.0, 11.0), Span("loads", 11.0, 12.0), Span("loads", 20.0, 21.0)]
    marks = recorded(*({"at": at, "step": 0.2} for at in (9.7, 9.9, 10.9, 11.5, 13.0, 19.9, 21.0)))
    idle, loads = trace.traced("D", marks, spans)
    assert (idle.during, idle.slowest["at"]) == ("idle", [-100.0, 900.0])
    assert (loads.during, loads.slowest["at"]) == ("loads", [900.0, 1500.0, 9900.0])
    assert trace.traced("D", marks[:0], spans) == []


def test_parts_and_the_rest_sum_to_the_step_and_waiting_is_not_being_kept_from_running():
    mark = {"at": 1.0, "step": 0.010, "off": 0.006, "schedule": 0.002, "wait": 0.004, "wait off": 0.004, "loads begun": 3}
    (found,) = trace.traced("D", recorded(mark), [Span("loads", 0.0, 2.0)])
    assert found.sums == {"step": 10.0, "schedule": 2.0, "wait": 4.0, "wait off": 4.0, "loads begun": 3.0, "other": 4.0} | {
        "not running": 2.0
    }


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 60), st.floats(0.01, 1.0))
def test_of_steps_that_are_too_many_the_slowest_are_kept_and_shares_are_exact_or_not_told(took, most, share):
    marks = recorded(*({"at": i, "step": ms / 1000} for i, ms in enumerate(took)))
    (found,) = trace.traced("D", marks, [Span("loads", -1.0, 1e9)], most)
    assert found.steps == len(took)
    assert sorted(found.slowest["step"]) == sorted(took)[-most:]
    assert trace.share(found, share) in (None, percentile(took, share))
    assert trace.share(found, 1.0) == max(took)
    assert len(took) > most or trace.share(found, share) is not None


def a_traced_record() -> Record:
    record = a_record()
    for run in record.runs:
        for row in run.rows:
            if row.name == "at-once":
                marks = recorded(
                    {"at": 0.1, "step": 0.004, "launch": 0.003, "loads begun": 1},
                    {"at": 0.2, "step": 0.040 + 0.001 * run.start, "schedule": 0.030, "loads begun": 3, "loads ended": 2},
                )
                row.traces += trace.traced("D", marks, [Span("loads", 0.0, 1.0)])
                row.traces += trace.traced("P", marks, [Span("loads", 0.0, 1.0)])
    return record


def test_the_slowest_step_of_all_starts_is_split():
    found = [it for it in report.summary(a_traced_record()).steps if it.arm == "stock"]
    assert [(it.title, it.shown) for it in found] == [("at-once 257, D, loads", True), ("at-once 257, P, loads", False)]
    assert (found[0].steps, found[0].p50, found[0].p99) == (6, 4.0, 41.0)
    assert (found[0].worst["step"], found[0].worst["schedule"], found[0].worst["launch"]) == (42.0, 30.0, 0.0)
    assert found[0].mean["schedule"] == 15.0
    assert (found[0].counts["loads begun"], found[0].worst_counts["loads begun"]) == (12, 3)


def test_traces_are_shown_from_a_file_where_there_are_some(tmp_path):
    path = tmp_path / "serve.json"
    result.write(path, a_traced_record())
    text = shown_by("--starts", "0", "--add", str(path), "--trace")
    assert "stock, eager: where steps spend their time" in text
    assert re.search(r"schedule +│ +15.00 │ +30.00", text)
    assert "where steps spend" not in shown_by("--starts", "0", "--add", str(path))
    result.write(path, a_record())
    assert "No steps were recorded" in shown_by("--starts", "0", "--add", str(path), "--trace")


class Clocks:
    """Seconds that passed, and those in which the thread ran. They pass only where a test says so."""

    def __init__(self, monkeypatch):
        self.now, self.ran = 100.0, 7.0
        monkeypatch.setattr(steps, "perf_counter", lambda: self.now)
        monkeypatch.setattr(steps, "thread_time", lambda: self.ran)

    def takes(self, seconds, off=0.0, answer=None):
        def call(*args, **kwargs):
            self.now += seconds
            self.ran += seconds - off
            return answer

        return call


class FakeEngine:
    """Calls what vLLM calls, in its order."""

    def __init__(self, clocks):
        self.clocks = clocks
        self.worker = SimpleNamespace(**{name: clocks.takes(0) for name in (*steps.BEGINNING, *steps.SETTLING)})
        self.worker.bind_connector_metadata = clocks.takes(4)
        self.worker.get_transfer_results = clocks.takes(5)
        connector = SimpleNamespace(**{name: clocks.takes(0) for name in steps.SCHEDULERS})
        connector.on_new_request = clocks.takes(1)
        connector.get_num_new_matched_tokens = clocks.takes(2, answer=(7, False))
        connector.update_state_after_alloc = clocks.takes(3)
        self.scheduler = SimpleNamespace(
            connector=connector, schedule=self._schedule, update_from_output=self._update, get_request_counts=lambda: (2, 5)
        )
        graphs = SimpleNamespace(run_fullgraph=clocks.takes(0.375))
        self.runner = SimpleNamespace(
            add_requests=clocks.takes(1.5), prepare_attn=clocks.takes(2.5), cudagraph_manager=graphs, sample=self._sample
        )
        self.model_executor = SimpleNamespace(
            execute_model=self._execute,
            sample_tokens=clocks.takes(0),
            driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=self.runner)),
        )

    def has_work(self):
        return False

    def loop(self):
        self._process_input_queue()
        self._process_engine_step()

    def _process_input_queue(self):
        self.has_work()
        self.clocks.takes(1000, off=1000)()
        self._handle_client_request()

    def _handle_client_request(self):
        self.scheduler.connector.on_new_request("request")
        self.clocks.takes(0.5)()

    def _process_engine_step(self):
        self.step_fn()
        self.clocks.takes(0.25)()
        return True

    def step_fn(self):
        self.scheduler.schedule()
        self.model_executor.execute_model().result()
        self.clocks.takes(0.125)()
        self.scheduler.update_from_output(SimpleNamespace(finished_recving={"a", "b"}))

    def _schedule(self):
        self.scheduler.connector.get_num_new_matched_tokens("request", 0)
        self.scheduler.connector.update_state_after_alloc("request", None, 7)
        self.clocks.takes(8, off=6)()
        return SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1}, scheduled_new_reqs=["b"], total_num_scheduled_tokens=2)

    def _update(self, output):
        self.scheduler.connector.update_connector_output(output)
        self.clocks.takes(16)()

    def _sample(self):
        self.worker.get_transfer_results(set())
        self.clocks.takes(0.75)()

    def _execute(self):
        self.runner.add_requests()
        self.runner.prepare_attn()
        self.worker.bind_connector_metadata(None)
        self.runner.cudagraph_manager.run_fullgraph()
        self.clocks.takes(32)()
        self.runner.sample()
        clocks = self.clocks

        class Output(Future):
            def result(self, timeout=None):
                clocks.takes(64, off=60)()

        return Output()


def test_an_engine_records_what_each_part_of_a_step_took_itself(tmp_path, monkeypatch):
    reader = steps.Steps(tmp_path / "steps", kept=4)
    engine = FakeEngine(Clocks(monkeypatch))
    steps.trace(engine, engine.worker, steps.Marks(reader.path))
    for _ in range(3):
        engine.loop()
    found = [dict(zip(steps.COLUMNS, row.tolist(), strict=True)) for row in reader.since()]
    assert [it.pop("at") for it in found] == pytest.approx([1100.0, 1100.0 + 1141.0, 1100.0 + 2 * 1141.0])
    expected = {
        "step": 141.0,
        "off": 66.0,
        "intake": 0.5,
        "schedule": 8.0,
        "connector": 6.0,
        "begin loads": 4.0,
        "settle": 5.0,
        "take on": 1.5,
        "inputs": 2.5,
        "compute": 0.375,
        "sample": 0.75,
    }
    expected |= {"launch": 32.0, "wait": 64.0, "update": 16.0, "hand out": 0.25, "schedule off": 6.0, "wait off": 60.0}
    expected |= {"running": 2, "new": 1, "tokens": 2, "waiting": 5, "loads begun": 1, "loads ended": 3}
    assert [{name: value for name, value in it.items() if value} for it in found] == [expected] * 3
    assert len(reader.since()) == 0
    for _ in range(6):
        engine.loop()
    assert (len(reader.since()), reader.lost) == (4, 2)


def test_a_garbage_collection_while_outputs_are_handed_out_is_counted_once(tmp_path, monkeypatch):
    reader, clocks = steps.Steps(tmp_path / "steps"), Clocks(monkeypatch)
    marks, oldest = steps.Marks(reader.path), {"generation": 2}
    marks.enter()
    marks.leave()
    marks.collected("start", oldest)
    clocks.takes(8)()
    marks.collected("stop", oldest)
    clocks.takes(2)()
    marks.end(computed=True)
    (row,) = reader.since()
    found = dict(zip(steps.COLUMNS, row.tolist(), strict=True))
    assert (found["collect"], found["hand out"], found["step"]) == (8.0, 2.0, 10.0)


def test_what_other_threads_call_is_no_part_of_a_step(tmp_path, monkeypatch):
    reader = steps.Steps(tmp_path / "steps")
    engine = FakeEngine(Clocks(monkeypatch))
    steps.trace(engine, engine.worker, steps.Marks(reader.path))
    engine.loop()
    other = threading.Thread(target=engine.worker.bind_connector_metadata)
    other.start()
    other.join()
    engine.loop()
    assert reader.since()[:, steps.COLUMNS.index("begin loads")].tolist() == [4.0, 4.0]


def test_an_arm_may_say_how_long_threads_keep_the_lock():
    arm = defined('quick={"like": "kvferry-64", "switch_s": 0.0005}')
    assert float(arm.environment[SWITCH_SECONDS]) == 0.0005
    assert SWITCH_SECONDS not in defined('usual={"like": "kvferry-64"}').environment
    with pytest.raises(MeasureError, match="switch_s 0: give seconds"):
        defined('never={"like": "kvferry-64", "switch_s": 0}')


# The command


def shown_by(*words: str) -> str:
    done = CliRunner().invoke(app, ["bench", "serve", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_kept_results_are_shown_without_vllm(tmp_path):
    path, picture = tmp_path / "serve.json", tmp_path / "serve.svg"
    result.write(path, a_record())
    text = shown_by("--starts", "0", "--add", str(path), "--plot", str(picture))
    assert "1,025 tokens, scattered" in text
    assert "stock ÷ kvferry" in text
    assert "0.97" in text
    assert picture.read_text().startswith("<svg")
    document = json.loads(shown_by("--starts", "0", "--add", str(path), "--json"))
    assert document["settings"]["at_once"] == 4
    assert {it["title"] for it in document["figures"]} >= {"first request, 257 tokens"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arms", "stok"), "did you mean stock"),
        (("--modes", "fast"), "choose eager or graphs"),
        (("--modes", "graphs", "--device", "cpu"), "CUDA graphs need a GPU"),
        (("--only", "rats"), "choose among first"),
        (("--only", "in-turns,scattered"), "measures consecutive and scattered blocks itself"),
        (("--lengths", "4k"), "give numbers of tokens"),
        (("--lengths", "1"), "at least 2 tokens"),
        (("--rounds", "0"), "--rounds 0"),
        (("--model", "nowhere"), "a folder with a config.json"),
        (("--start", "run"), "choose fork or spawn"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(words, said):
    done = CliRunner().invoke(app, ["bench", "serve", *words])
    assert isinstance(done.exception, MeasureError)
    assert said in str(done.exception)


def test_results_of_other_settings_are_not_continued(tmp_path):
    path = tmp_path / "serve.json"
    result.write(path, a_record())
    done = CliRunner().invoke(app, ["bench", "serve", "--out", str(path), "--device", "cpu"])
    assert "unlike settings" in str(done.exception)


def documented() -> list[str]:
    pages = "".join(page.read_text() for page in sorted(HOW_TO.parent.glob("*.md")))
    blocks = re.findall(r"^```serve\n(.*?)^```", pages, flags=re.MULTILINE | re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_is_understood(command, tmp_path):
    words = shlex.split(command)
    assert words[:5] == ["python", "-m", "lab", "bench", "serve"]
    for option, path in pairwise(words):
        if option == "--add":
            result.write(tmp_path / path, a_record())
    done = subprocess.run(
        [sys.executable, *words[1:], "--starts", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HOW_TO.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_are_documented():
    assert len(documented()) >= 2


KEPT = [path for path in (HOW_TO.parents[1] / "benchmarks" / "results").rglob("*.json") if path.parent.name != "strategies"]


@pytest.mark.parametrize("kept", sorted(KEPT), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_results_that_are_kept_can_be_shown(kept):
    done = CliRunner().invoke(app, ["bench", "serve", "--starts", "0", "--add", str(kept)])
    assert done.exit_code == 0, done.output
    assert "NVIDIA H200" in done.output
