"""`config.json` as the installed transformers writes it: every family that is known is read, and planned from."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from kvferry.manifest import Chunk, LayerSpec, Window
from kvferry.models import ModelShape, Side, load_model, manifests, model_types, zoo_names
from kvferry.plan import make_plans

pytestmark = pytest.mark.vllm

ZOO = [name for name in zoo_names() if name != "synthetic-12"]
WORDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "mlp": "",
    "moe": "",
}


def plan(model: ModelShape) -> None:
    there, here = (manifests(model, Side(), engine=engine, blocks=4) for engine in ("prefill", "decode"))
    (found,) = make_plans(here, there)
    assert {name for need in found.needs for name in need.layers} == {spec.name for held in model.layers for spec in held}


@pytest.mark.parametrize("name", ZOO)
def test_a_config_that_transformers_has_saved_again_describes_the_same_model(name: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    published = json.loads((files("kvferry.models") / "zoo" / f"{name}.json").read_text(encoding="utf-8"))
    published.pop("_source")
    CONFIG_MAPPING[published["model_type"]].from_dict(published).save_pretrained(tmp_path)
    found = load_model(tmp_path)
    assert found.layers == load_model(name).layers
    assert found.fingerprint == load_model(name).fingerprint
    plan(found)


def kind(held: tuple[LayerSpec, ...]) -> str:
    """What the first cache of a layer is."""
    if not held:
        return ""
    first = held[0].kind
    if first.paging == "state":
        return "state"
    return "window" if isinstance(first.reach, Window) else "chunk" if isinstance(first.reach, Chunk) else "full"


@pytest.mark.parametrize("model_type", model_types())
def test_every_known_family_is_read_from_what_transformers_saves_by_default(model_type: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    config.save_pretrained(tmp_path)
    found = load_model(tmp_path)
    text = getattr(config, "text_config", config)
    assert len(found.layers) == text.num_hidden_layers
    words = getattr(text, "layer_types", None) or ()
    if set(words) <= WORDS.keys():
        assert all(WORDS[word] == kind(held) for word, held in zip(words, found.layers, strict=False))
    plan(found)
