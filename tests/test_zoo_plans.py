"""Plans of the zoo are, byte for byte, those that were recorded. `python tests/test_zoo_plans.py` records them."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from kvferry.errors import MismatchError
from kvferry.manifest.codec import encode
from kvferry.models import Side, legal, load_model, manifests, zoo_names
from kvferry.plan import make_plans

RECORDED = Path(__file__).parent / "recorded" / "zoo_plans.json"
SIDES = ("tp=1", "tp=2", "tp=4,block=64", "pp=2", "tp=2,pp=2")


def digest(name: str) -> str:
    """Of every plan between sides that are legal for a model."""
    model, found = load_model(name), sha256()
    sides = [side for side in map(Side.parse, SIDES) if legal(model, side) is None]
    for prefill, decode in product(sides, sides):
        found.update(f"{prefill} -> {decode}: ".encode())
        try:
            plans = make_plans(manifests(model, decode, "decode"), manifests(model, prefill, "prefill"), proof=False)
        except MismatchError:
            found.update(b"refused")
        else:
            for plan in plans:
                found.update(encode(plan))
    return found.hexdigest()


@pytest.mark.parametrize("name", zoo_names())
def test_plans_are_those_that_were_recorded(name: str) -> None:
    assert digest(name) == json.loads(RECORDED.read_text())[name]


def test_every_model_of_the_zoo_is_recorded() -> None:
    assert sorted(json.loads(RECORDED.read_text())) == sorted(zoo_names())


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({name: digest(name) for name in zoo_names()}, indent=1) + "\n")
