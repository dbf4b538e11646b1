"""What runs of tests/gpu/matrix.py and watch.py come to, when they are made into one file of evidence, and how they compare."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.vllm.evidence import Evidence, Outcome, Trouble
from kvferry.engines.vllm.supported import page
from lab.fleet import spoiled
from lab.fleet.legs import Answer, Crossed
from lab.fleet.spoiled import Spoiling

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import likeness
import matrix
import watch
from matrix import LATE, STOCK_D, STOCK_P, Row, as_evidence, merged

pytestmark = pytest.mark.vllm

FAMILY = "llama float32 TRITON_ATTN"
COUNTS = {"from_peer": 9, "bytes_moved": 90}


def row(producer: str, consumer: str, verdict: str, connector: str = "kvferry", **said: Any) -> Row:
    return Row(FAMILY, producer, consumer, connector, verdict, requests=2, counts=COUNTS, **said)


def run_of(folder: Path, *rows: Row, vllm: str = "0.32.0") -> Path:
    folder.mkdir()
    told = {"name": "GPU", "vllm": vllm, "torch": "2", "rows": [asdict(it) for it in rows]}
    (folder / "matrix.json").write_text(json.dumps(told))
    return folder / "matrix.json"


def test_later_rows_win_but_for_those_that_came_to_nothing(tmp_path: Path) -> None:
    first = run_of(
        tmp_path / "1",
        row("b16", "b64", "wrong"),
        row("b64", "b16", "right"),
        row("b16", "b128", "right"),
        row("b1", "b2", "right"),
    )
    second = run_of(
        tmp_path / "2",
        row("b16", "b64", "right"),
        row("b64", "b16", "wrong"),
        row("b16", "b128", "failed"),
        row("b128", "b16", LATE),
    )
    rows, *versions = merged([first, second])
    assert {(it.producer, it.consumer): it.verdict for it in rows} == {
        ("b16", "b64"): "right",
        ("b64", "b16"): "wrong",
        ("b16", "b128"): "right",
        ("b128", "b16"): LATE,
    }
    seen = as_evidence(rows, *versions)
    assert [it.what for it in seen.engines] == [f"{FAMILY}: b16 -> b64", f"{FAMILY}: b16 -> b128"]
    assert [it.what for it in seen.troubles] == [f"{FAMILY}: b64 -> b16"]
    assert seen.digest == seen.seal


def test_what_vllms_own_connector_got_wrong_stands_beside(tmp_path: Path) -> None:
    stock = row(STOCK_P, STOCK_D, "wrong", "stock", right=1, apart=0.1, detail="143 tokens: log-probabilities off by 0.1")
    (found,) = as_evidence(*merged([run_of(tmp_path / "1", row("b16", "b64", "right"), stock)])).engines
    assert "vLLM's own connector, equal blocks: wrong for 1 of 2 (off by 0.1)" in found.found


def test_runs_of_two_releases_are_not_one_piece_of_evidence(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / version, row("b16", "b64", "right"), vllm=version) for version in ("0.32.0", "0.33.0")]
    with pytest.raises(SystemExit, match=r"0\.33\.0"):
        merged(runs)


def test_prompts_that_share_prefixes_are_no_two_pairs_the_same() -> None:
    one, other = matrix.shared_prompts(0), matrix.shared_prompts(1)
    assert one[1][:300] == one[0][:300] != other[0][:300]
    assert not {it[:32] for it in one} & {it[:32] for it in other}


def answered(token: int, logprob: float) -> Answer:
    return Answer(200, (token,), (logprob,), (((token, logprob), (token + 1, logprob - 2)),))


@pytest.mark.parametrize(
    ("from_its_cache", "anew", "right"),
    [
        (answered(5, -0.5), answered(9, -0.7), True),
        (answered(9, -0.7), answered(9, -0.7), True),
        (answered(7, -0.7), answered(9, -0.7), False),
        (answered(5, -1.5), answered(5, -0.5), False),
    ],
)
def test_a_prefix_cache_is_poisoned_where_d_answers_like_nobody(
    from_its_cache: Answer, anew: Answer, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(server: Any, tokens: Any, *, max_new: int, settings: Any = None) -> Answer:
        return anew if settings else from_its_cache

    monkeypatch.setattr(matrix, "ask", ask)
    server: Any = None
    assert matrix.strange(server, (1, 2), answered(5, -0.5), "bfloat16").right == right


def said(*tokens: int, logprob: float = -0.5) -> Answer:
    places = tuple(((token, logprob), (token + 100, logprob - 2)) for token in tokens)
    return Answer(200, tokens, (logprob,) * len(tokens), places)


ONE, TWO = said(1, 2, 3, 4), said(1, 2, 7, 8)
"""One rank alone and two alone, which part at the third token."""


@pytest.mark.parametrize(
    ("got", "alone", "right"),
    [
        (ONE, (ONE, TWO), True),
        (TWO, (ONE, TWO), True),
        (said(1, 2, 9, 9), (ONE, TWO), True),
        (said(1, 2, 3, 9), (ONE, TWO), True),
        (said(1, 9, 3, 4), (ONE, TWO), False),
        (said(1, 2, 9, 9, logprob=-0.9), (ONE, TWO), False),
        (said(1, 2, 9, 9), (ONE, ONE), False),
        (said(1, 2, 9, 9), (ONE,), False),
        (Answer(500, error="no"), (ONE, TWO), False),
    ],
)
def test_a_pair_answers_as_one_rank_or_as_two_alone_unless_these_have_parted_already(
    got: Answer, alone: tuple[Answer, ...], right: bool
) -> None:
    assert matrix.nearest(9, got, alone, "bfloat16", 0.2, 0.4).right == right


def rows_of(*logprobs: float) -> Answer:
    """One place, and its candidates."""
    return Answer(200, (0,), (logprobs[0],), (tuple(enumerate(logprobs)),))


@pytest.mark.parametrize(
    ("got", "right"),
    [
        (rows_of(-0.5, -2.05, -3.0), True),
        (rows_of(-0.5, -2.13, -3.1), True),
        (rows_of(-0.5, -2.0, -3.4), False),
        (rows_of(-0.51, -2.0, -2.7), False),
    ],
)
def test_candidates_that_were_not_chosen_are_as_near_as_one_rank_is_to_two(got: Answer, right: bool) -> None:
    alone = rows_of(-0.5, -2.0, -3.0), rows_of(-0.5, -2.1, -3.1)
    assert matrix.difference(9, got, alone[0], "bfloat16", 0.2, 0.4).right
    assert matrix.nearest(9, got, alone, "bfloat16", 0.2, 0.4).right == right


def test_candidates_are_compared_as_far_as_the_context_is_the_same() -> None:
    one, other = said(1, 2, 3), said(1, 7, 3, logprob=-1.5)
    assert likeness.distance(one, one) == 0
    assert likeness.distance(one, other) == pytest.approx(((1 + 1 + 9 + 1 + 1 + 0) / 6) ** 0.5)
    later = said(1, 2, 3, 4, 5, logprob=-0.5), said(1, 2, 3, 4, 9, logprob=-0.5)
    assert likeness.distance(*later) == 0


class Server:
    """With a log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.write_text("")


def test_only_loads_that_were_spoiled_count_and_those_that_the_comparison_calls_wrong_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer: Any = Server(tmp_path / "log")

    def cross(p: Any, d: Any, tokens: Any, *, max_new: int, request_id: str, settings: Any) -> Crossed:
        how, which = spoiled.marks(request_id) or (None, 0)
        if how in (Spoiling.HEADS, Spoiling.STATE) or (how is Spoiling.BLOCKS and which < 2):
            consumer.log.write_text(f"{consumer.log.read_text()}{spoiled.SAID}: cmpl-{request_id}-0: so\n")
        wrong = how is Spoiling.HEADS or (how is Spoiling.BLOCKS and which == 1)
        return Crossed(tokens, ONE, said(1, 9, 9, 9) if wrong else ONE)

    monkeypatch.setattr(matrix, "cross", cross)
    family = matrix.ranks("llama", "float32", "")
    prompts = [(7,) * n for n in (3, 9, 8, 7, 6)]
    found = matrix.control(family, prompts, [[ONE] * 5], consumer, consumer)
    assert found == {"heads": (4, 4), "blocks": (1, 2), "state": (0, 4)}


def test_a_spoiled_load_that_fails_is_not_one_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer: Any = Server(tmp_path / "log")
    monkeypatch.setattr(matrix, "cross", lambda *rest, **settings: Crossed((), ONE, Answer(500, error="no")))
    with pytest.raises(ValueError, match="failed instead: no"):
        matrix.control(matrix.ranks("llama", "float32", ""), [(7, 7)], [[ONE]], consumer, consumer)


def test_what_is_found_of_spoiled_loads_stands_beside_the_pair(tmp_path: Path) -> None:
    run = run_of(tmp_path / "1", row("b16", "b64", "right", finds={"heads": (4, 4), "blocks": (1, 2)}))
    seen = as_evidence(*merged([run]))
    (found,) = seen.engines
    assert found.finds == {"heads": (4, 4), "blocks": (1, 2)}
    assert "of loads spoiled on purpose it finds heads 4/4, blocks 1/2" in page([seen])
    assert seen.digest == seen.seal


def test_engines_keep_what_new_runs_say_nothing_of(tmp_path: Path) -> None:
    kept = run_of(tmp_path / "1", row("b16", "b64", "right"), row("b64", "b16", "right"), row("b16", "b128", "wrong"))
    new = run_of(tmp_path / "2", row("b64", "b16", "wrong"), row("b16", "b128", "right"))
    out = tmp_path / "engines.json"
    matrix.merge(str(out), str(kept))
    matrix.merge(str(out), str(new))
    seen = matrix.msgspec.json.decode(out.read_bytes(), type=Evidence)
    assert [it.what for it in seen.engines] == [f"{FAMILY}: b16 -> b64", f"{FAMILY}: b16 -> b128"]
    assert [it.what for it in seen.troubles] == [f"{FAMILY}: b64 -> b16"]
    assert seen.digest == seen.seal
    with pytest.raises(SystemExit, match=r"0\.33\.0"):
        matrix.merge(str(out), str(run_of(tmp_path / "3", row("b64", "b16", "right"), vllm="0.33.0")))


def test_every_pair_of_one_rank_and_two_that_is_crossed_in_bfloat16_has_moves_both_ways() -> None:
    crossed = {(it.model, it.backend) for it in matrix.cuda_families() if it.dtype == "bfloat16" and "TP1-TP2" in it.name}
    assert crossed == set(watch.ACROSS_RANKS.items())
    moves = watch.cuda_moves()
    first = moves[: 2 * len(crossed)]
    assert {(one.model, one.tp, other.tp) for one, other in first} == {
        (model, *sizes) for model, _ in crossed for sizes in ((1, 2), (2, 1))
    }
    assert {one.dtype for pair in first for one in pair} == {"bfloat16"}


def seen_moves(*what: str, troubles: tuple[str, ...] = (), why: str = "why", device: str = "GPU") -> Evidence:
    outcomes = tuple(Outcome(it, "found") for it in what)
    return Evidence("0.32.0", "2", device, moves=outcomes, troubles=tuple(Trouble(it, why) for it in troubles)).sealed()


def test_the_last_word_on_a_move_counts_whichever_it_is() -> None:
    run = watch.merged([seen_moves("a", "e", troubles=("b", "c")), seen_moves("b", "d", troubles=("a",))])
    assert [it.what for it in run.moves] == ["e", "b", "d"]
    assert sorted(it.what for it in run.troubles) == ["a", "c"]
    assert run.digest == run.seal


def test_want_of_time_is_no_word_on_a_move() -> None:
    run = watch.merged([seen_moves("a"), seen_moves(troubles=("a", "b"), why=f"not tried{watch.NO_TIME}")])
    assert [it.what for it in run.moves] == ["a"]
    assert run.troubles == ()


def test_moves_of_another_machine_or_of_a_changed_file_are_not_merged() -> None:
    with pytest.raises(SystemExit, match="of one machine"):
        watch.merged([seen_moves("a"), seen_moves("b", device="another")])
    changed = matrix.msgspec.structs.replace(seen_moves("a"), torch="2", moves=())
    with pytest.raises(SystemExit, match="not as they were"):
        watch.merged([changed])


def test_moves_are_chosen_by_name_or_because_nobody_has_seen_them() -> None:
    moves = watch.cuda_moves()
    kept = seen_moves(*(watch.called(*it) for it in moves[1:]))
    assert watch.unseen(moves, [kept]) == moves[:1]
    assert watch.chosen("gpt-oss bfloat16: TP1 -> TP2", ["llama", "gpt+TP2"])
    assert not watch.chosen("gpt-oss bfloat16: TP1 -> TP2", ["llama", "gpt+TP4"])
