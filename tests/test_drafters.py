"""Which layers of an engine are a drafter's, by what vLLM calls them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.drafters import drafted_layers

OWN = [f"model.layers.{i}.self_attn.attn" for i in range(4)]


def config(method: str | None, layers: int = 4) -> Any:
    speculative = SimpleNamespace(
        use_eagle=lambda: method in ("eagle", "mtp"), uses_draft_model=lambda: method == "draft_model", method=method
    )
    return SimpleNamespace(
        speculative_config=speculative if method else None,
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
    )


def found(names: list[str], method: str | None, *, marked: tuple[str, ...] = ()) -> set[str]:
    layers = {name: SimpleNamespace(is_draft_layer=name in marked) for name in names}
    return set(drafted_layers(names, config(method), layers))


@pytest.mark.parametrize(
    ("method", "drafted"),
    [
        ("eagle", "model.layers.4.self_attn.attn"),
        ("mtp", "model.layers.5.mtp_block.self_attn.attn"),
        ("mtp", "mtp.layers.0.self_attn.attn"),
        ("mtp", "model.mtp_layers.0.self_attn.attn"),
        ("draft_model", "draft_model.model.layers.0.self_attn.attn"),
        ("eagle", "drafter.attn"),
    ],
)
def test_layers_past_the_models_own_and_under_other_names_are_the_drafters(method: str, drafted: str) -> None:
    assert found([*OWN, drafted], method) == {drafted}
    assert found([*OWN[2:], drafted], method) == {drafted}
    assert found(OWN, method) == set()


@pytest.mark.parametrize("method", [None, "ngram", "extract_hidden_states"])
def test_without_a_drafter_every_layer_is_the_models(method: str | None) -> None:
    assert found([*OWN, "model.layers.4.self_attn.attn", "cache_only_layers.0"], method) == set()


def test_what_vllm_marks_is_taken_from_it() -> None:
    assert found([*OWN, "model.layers.4.attn"], "eagle", marked=(OWN[1],)) == {OWN[1]}
