"""Whether D answered what an engine alone answers: where tokens part, and how near is near enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.crossing.compare import difference
from lab.fleet.legs import Answer

WANTED = Answer(
    200,
    tokens=(5, 6, 7),
    logprobs=(-0.5, -1.0, -0.25),
    candidates=(((5, -0.5), (9, -0.6)), ((6, -1.0), (8, -1.0005)), ((7, -0.25), (4, -3.0))),
)


def got(place: int, token: int, logprob: float) -> Answer:
    tokens, logprobs = list(WANTED.tokens), list(WANTED.logprobs)
    tokens[place], logprobs[place] = token, logprob
    return replace(WANTED, tokens=tuple(tokens), logprobs=tuple(logprobs))


@pytest.mark.parametrize(
    ("answer", "dtype", "within", "tie", "why"),
    [
        (WANTED, "float32", None, None, ""),
        (got(0, 5, -0.5001), "float32", None, None, "off by 0.0001"),
        (got(0, 5, -0.5001), "float32", 1e-3, None, ""),
        (got(1, 8, -1.0005), "float32", None, None, "other text from token 1"),
        (got(1, 8, -1.0005), "bfloat16", None, None, ""),
        (got(0, 9, -0.6), "bfloat16", None, None, "other text from token 0"),
        (got(0, 9, -0.6), "bfloat16", 0.2, 0.4, ""),
        (got(0, 9, -0.9), "bfloat16", 0.2, 0.4, "off by 0.3"),
        (got(0, 3, -0.6), "bfloat16", 0.2, 0.4, "other text from token 0"),
        (got(2, 4, -0.3), "bfloat16", 0.2, 0.4, "other text from token 2"),
        (replace(WANTED, tokens=(5, 6)), "bfloat16", 0.2, 0.4, "other text from token 2"),
    ],
)
def test_tokens_part_only_where_the_one_that_came_is_as_good_and_as_likely_as_was_wanted(
    answer: Answer, dtype: str, within: float | None, tie: float | None, why: str
) -> None:
    found = difference(3, answer, WANTED, dtype, within, tie)
    assert found.right == (not why)
    assert why in found.why
