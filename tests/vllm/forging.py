"""References as one makes them who has leases of his own, everything that is written here, and not the key."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvferry.session import Key, Reference, to_params
from kvferry.session.key import keys_in
from kvferry.session.reference import SEAL

Params = dict[str, Any]
Forgery = Callable[[random.Random, Params, Params, Reference], Params]

EMPTY = Key(b"", b"")
"""What references were sealed with where no key was named."""


def _blocks(draw: random.Random) -> dict[str, Any]:
    return {
        str(group): [draw.randrange(1 << 20) for _ in range(draw.randrange(1, 12))] for group in range(draw.randrange(1, 4))
    }


def _changed(draw: random.Random, reference: Reference) -> Reference:
    """Another lease, request, producer or prompt than it was given out for; its blocks are others' in any case."""
    changes: dict[str, Any] = {
        "lease": type(reference.lease)(draw.randrange(64), draw.randrange(1, 1 << 63)),
        "incarnation": f"{draw.getrandbits(64):016x}",
        "engine": f"P{draw.randrange(9)}",
        "address": f"127.0.0.{draw.randrange(1, 9)}:{draw.randrange(1, 1 << 16)}",
        "tokens": draw.randrange(1, 1 << 12),
        "request": f"cmpl-{draw.getrandbits(64):x}",
    }
    chosen = draw.sample(sorted(changes), draw.randrange(len(changes)))
    return msgspec.structs.replace(reference, blocks=_blocks(draw), **{name: changes[name] for name in chosen})


def _guessed(draw: random.Random) -> Key:
    words = (b"kvferry", b"password", b"changeme", b"secret", bytes([draw.randrange(256)]))
    return keys_in(draw.choice(words) * 8 + draw.randbytes(32), "a guess")[0]


def _poisoned(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    """One's own lease, word and digest, with the blocks of another's prompt."""
    return to_params(msgspec.structs.replace(reference, blocks=others["blocks"]), EMPTY)


def _resealed(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    return to_params(_changed(draw, reference), EMPTY)


def _guessed_key(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    return to_params(_changed(draw, reference), _guessed(draw))


def _public_key(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    return to_params(_changed(draw, reference), Key(b"", draw.choice((b"\0" * 40, b"0" * 40, mine[SEAL].encode()))))


def _with_anothers_seal(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    return {**to_params(_changed(draw, reference), EMPTY), SEAL: draw.choice((mine, others))[SEAL]}


def _crossed(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    """Fields of two references that are both in order."""
    fields = draw.sample(["blocks", "digest", "lease", "request", "tokens"], draw.randrange(1, 5))
    out = {**mine, **{field: others[field] for field in fields}}
    return out if any(out[field] != mine[field] for field in fields) else {**out, "tokens": 1}


def _one_block(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    out = copy.deepcopy(mine)
    table = next(table for table in out["blocks"].values() if isinstance(table, list))
    at = draw.randrange(len(table))
    table[at] += draw.choice((-1, 1))
    return out


def _seal_of_no_kind(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    seal = mine[SEAL]
    wrong = (None, "", 0, True, [seal], {"": seal}, seal[:-1], seal.upper() + "0", f"{seal} ", "\ud800", b"", "0" * 32)
    return {**mine, SEAL: draw.choice(wrong)}


def _unsealed(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    return {name: value for name, value in mine.items() if name != SEAL}


def _long(draw: random.Random, mine: Params, others: Params, reference: Reference) -> Params:
    return {**mine, "blocks": {"0": [1] * draw.choice((10_000, 100_000))}}


KINDS: tuple[Forgery, ...] = (
    _poisoned,
    _resealed,
    _guessed_key,
    _public_key,
    _with_anothers_seal,
    _crossed,
    _one_block,
    _seal_of_no_kind,
    _unsealed,
    _long,
)


def forgeries(mine: Params, others: Params, reference: Reference, count: int, seed: int = 3) -> Iterator[Params]:
    """Of `mine`, which is `reference` as it was given out, and of another that was."""
    draw = random.Random(seed)
    for number in range(count):
        yield KINDS[number % len(KINDS)](draw, mine, others, reference)
