"""Who reads what from which of several replicas: no rank of a producer is read much more than the others."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.models import Side, load_model, manifests
from kvferry.plan import make_plans
from kvferry.plan.explain import costs


@pytest.mark.parametrize("readers", [1, 4, 8])
def test_latents_that_every_rank_holds_are_read_from_all_of_them_alike(readers):
    shape = load_model("deepseek-v3")
    producers = manifests(shape, Side.parse("tp=8"), "P")
    read = Counter(dict.fromkeys(range(8), 0.0))
    for number in range(readers):
        consumers = manifests(shape, Side.parse("tp=1"), f"D{number}")
        (plan,) = make_plans(consumers, producers)
        for cost in costs(plan):
            read[cost.source.tp] += cost.bytes_per_token
    assert max(read.values()) <= 1.25 * sum(read.values()) / len(read)
