"""Whether a pair of engines answers as engines alone do, as nearly as these are to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lab.crossing.compare import FIRST, Difference, difference
from lab.fleet.legs import Answer

TIMES = 1.6
"""How much farther from the nearer engine alone a pair may be than the two engines alone are from each other: pairs were seen
to be 0.1 to 1.43 times as far, and spoiled ones 1.8 times and more, but for one block among many of a single layer."""
LEAST = 0.02
"""A distance that is near in bfloat16 whatever engines alone say."""
LAST = 1 << 20
"""A place that no answer has: those that part nowhere are the longest alike."""
CANDIDATES = {"logprobs": 20}
"""As many as vLLM gives."""


def distance(one: Answer, other: Answer) -> float:
    """Root of the mean square of what all candidates of the first places are apart, up to where the tokens part: until then the
    context is the same. What one of them does not have among its candidates is no better there than the last that it has."""
    parted = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), FIRST)
    squares: list[float] = []
    for mine, its in list(zip(one.candidates, other.candidates, strict=False))[: min(FIRST, parted + 1)]:
        here, there = dict(mine), dict(its)
        for token in here | there:
            a, b = here.get(token, min(here.values())), there.get(token, min(there.values()))
            known = token in here and token in there
            squares.append((a - b) ** 2 if known else max(0.0, a - b if token in here else b - a) ** 2)
    return math.sqrt(sum(squares) / max(1, len(squares)))


def times_apart(got: Answer, alone: Sequence[Answer]) -> float:
    """How far it is from the nearer of two, as a multiple of what these are apart."""
    return min(distance(got, one) for one in alone) / max(distance(alone[0], alone[1]), LEAST)


def nearest(
    tokens: int, got: Answer, alone: Sequence[Answer], dtype: str, within: float | None, tie: float | None
) -> Difference:
    """From whichever engine alone it is like. Where it is like neither of two, rounding decides only if these have parted from
    each other by then, and the first log-probabilities up to there are as near as may be. And where there are two, all
    candidates are as near as these are to each other."""
    found = [difference(tokens, got, one, dtype, within, tie) for one in alone]
    best = next((it for it in found if it.right), max(found, key=lambda it: it.parted_at % (LAST + 1)))
    if len(alone) < 2 or not got.good:
        return best
    if not best.right and best.parted_at >= 0:
        apart = difference(tokens, alone[1], alone[0], dtype, within, 0.0).parted_at
        before = [begun(it, best.parted_at) for it in (got, *alone)]
        near = any(difference(tokens, before[0], it, dtype, within, tie).right for it in before[1:])
        best = replace(best, why="") if 0 <= apart <= best.parted_at and near else best
    times = times_apart(got, alone)
    if best.right and times > TIMES:
        far = f"{tokens} tokens: candidates {times:.2g} times as far from one rank and from two as these are from each other"
        return replace(best, why=far)
    return best


def begun(answer: Answer, places: int) -> Answer:
    return replace(
        answer,
        tokens=answer.tokens[:places],
        logprobs=answer.logprobs[:places],
        candidates=answer.candidates[:places],
    )
