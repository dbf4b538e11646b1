"""Whether D answered what an engine that computed everything itself answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.fleet.legs import Answer, Crossed

FIRST = 4
TIE = 1e-3
WITHIN = {"float32": 1e-5, "bfloat16": 0.05}


@dataclass(frozen=True)
class Difference:
    """One request: where the tokens part (-1: nowhere) and how far the first log-probabilities are apart at most."""

    tokens: int
    parted_at: int
    apart: float
    why: str = ""

    @property
    def right(self) -> bool:
        return not self.why


def difference(
    tokens: int, got: Answer, wanted: Answer, dtype: str, within: float | None = None, tie: float | None = None
) -> Difference:
    """`why` is empty where they agree. Tokens that part at a tie between the two best candidates agree up to there. `within`
    and `tie` where rounding alone may bring more than it does between engines whose steps are the same."""
    within = WITHIN[dtype] if within is None else within
    tie = (0.0 if dtype == "float32" else TIE) if tie is None else tie
    if not wanted.good:
        raise ValueError(f"the reference for {tokens} tokens failed with HTTP {wanted.status}: {wanted.error}")
    if not got.good:
        return Difference(tokens, 0, float("inf"), f"HTTP {got.status}: {got.error}")
    parted = _parted_at(got, wanted)
    pairs = list(zip(got.logprobs, wanted.logprobs, strict=False))[:FIRST]
    other = _runner_up(got, wanted, parted, tie)
    tied = other is not None
    if parted >= 0:
        pairs = pairs[: parted if tied else parted + 1]
    if other is not None and parted < FIRST:
        pairs.append((got.logprobs[parted], other))
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    if parted >= 0 and not tied:
        return Difference(tokens, parted, apart, f"{tokens} tokens: other text from token {parted} on")
    if apart > within:
        return Difference(tokens, parted, apart, f"{tokens} tokens: log-probabilities off by {apart:.2g}")
    return Difference(tokens, parted, apart)


def differences(crossed: Sequence[Crossed], wanted: Sequence[Answer], dtype: str) -> list[Difference]:
    return [difference(len(it.prompt), it.decode, ref, dtype) for it, ref in zip(crossed, wanted, strict=True)]


def _parted_at(got: Answer, wanted: Answer) -> int:
    if len(got.tokens) != len(wanted.tokens):
        return min(len(got.tokens), len(wanted.tokens))
    return next((i for i, (a, b) in enumerate(zip(got.tokens, wanted.tokens, strict=True)) if a != b), -1)


def _runner_up(got: Answer, wanted: Answer, place: int, tie: float) -> float | None:
    """The log-probability that was wanted of the token that came instead, where it is as good as the best."""
    if not 0 <= place < min(len(got.tokens), len(wanted.candidates)):
        return None
    best = wanted.candidates[place]
    found = dict(best).get(got.tokens[place])
    return found if found is not None and best[0][1] - found < tie else None
