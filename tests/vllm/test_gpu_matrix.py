"""What the runs of tests/gpu/matrix.py come to, when they are made into one file of evidence."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvferry.fleet.legs import Answer

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import matrix
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
