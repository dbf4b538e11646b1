"""What tells a checkpoint's weights from others of the same configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.engines.vllm import weights
from kvferry.engines.vllm.identity import adapter_of, fingerprint
from kvferry.engines.vllm.weights import INDEX, digest_of
from kvferry.errors import SessionError

NAMES = [f"layers.{i}.{part}" for i in range(5) for part in ("q", "k", "v", "norm")]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(7 if name.endswith("norm") else (48, 64)).astype(np.float32) for name in NAMES}


def write(file: Path, held: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": file.name}}
    at = 0
    for name, tensor in held.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in held.values()))


def saved(folder: Path, held: dict[str, np.ndarray], files: int = 1) -> Path:
    """Dealt to several files round robin, in reverse order, with an index."""
    folder.mkdir()
    dealt = [list(held)[::-1][i::files] for i in range(files)]
    for i, some in enumerate(dealt):
        write(folder / f"model-{i}.safetensors", {name: held[name] for name in some})
    if files > 1:
        index = {"weight_map": {name: f"model-{i}.safetensors" for i, some in enumerate(dealt) for name in some}}
        (folder / INDEX).write_text(json.dumps(index))
    return folder


def model(place: Path | str, **changes: Any) -> Any:
    """As much of vLLM's configuration as names a model."""
    said = {"hidden_size": 64, "_name_or_path": str(place), "text_config": {"layers": 5, "_name_or_path": str(place)}}
    hf = SimpleNamespace(architectures=["Tiny"], to_dict=lambda: {**said, **changes})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, model=str(place), revision=None, model_weights=""),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
    )


def test_the_same_checkpoint_is_the_same_wherever_it_lies_and_however_it_is_dealt(tmp_path: Path) -> None:
    places = [saved(tmp_path / str(files), tensors(), files) for files in (1, 3, 20)]
    assert len({digest_of(place) for place in places}) == 1
    assert len({fingerprint(model(place)) for place in places}) == 1
    shutil.copytree(places[0], tmp_path / "copy")
    assert digest_of(tmp_path / "copy") == digest_of(places[0])


@pytest.mark.parametrize("changed", [NAMES[0], NAMES[3], NAMES[10], NAMES[-1]])
def test_one_tensor_of_other_values_makes_other_weights(tmp_path: Path, changed: str) -> None:
    held = tensors()
    one = saved(tmp_path / "one", held)
    held[changed] = held[changed] * np.float32(1.001)
    other = saved(tmp_path / "other", held)
    assert fingerprint(model(one)) != fingerprint(model(other))
    assert fingerprint(model(one)).partition(", weights")[0] == fingerprint(model(other)).partition(", weights")[0]


@pytest.mark.parametrize("change", ["name", "dtype", "shape"])
def test_what_the_header_says_of_a_tensor_counts(tmp_path: Path, change: str) -> None:
    held = tensors()
    one = saved(tmp_path / "one", held)
    if change == "name":
        held["layers.9.q"] = held.pop(NAMES[0])
    else:
        held[NAMES[0]] = held[NAMES[0]].reshape(64, 48)
    other = saved(tmp_path / "other", held)
    if change == "dtype":
        shutil.copytree(one, other, dirs_exist_ok=True)
        file = other / "model-0.safetensors"
        file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    assert digest_of(one) != digest_of(other)


def test_of_very_many_tensors_some_are_looked_at_and_all_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_SAMPLES", 8)
    one = saved(tmp_path / "one", tensors(1))
    other = saved(tmp_path / "other", tensors(2))
    assert digest_of(one) == digest_of(saved(tmp_path / "again", tensors(1), 3))
    assert digest_of(one) != digest_of(other)


def test_weights_that_lie_there_twice_count_once(tmp_path: Path) -> None:
    place = saved(tmp_path / "one", tensors())
    alone = digest_of(place)
    write(place / "consolidated.safetensors", tensors())
    (place / "training_args.bin").write_bytes(b"anything")
    assert digest_of(place) == alone


def test_formats_that_are_not_looked_into_are_told_by_their_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(np.random.default_rng(seed).bytes(1 << 20))
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "same") != digest_of(tmp_path / "other")
    assert digest_of(tmp_path / "one" / "pytorch_model.bin") == digest_of(tmp_path / "one")


@pytest.mark.parametrize("content", [b"", b"abc", (1 << 60).to_bytes(8, "little"), b"\x05" + b"\0" * 7 + b"{}   "])
def test_a_file_that_is_not_whole_is_refused_or_told_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    said = fingerprint(model(tmp_path))
    assert said == fingerprint(model(tmp_path))
    if len(content) != 13:
        with pytest.raises(SessionError, match="not a safetensors file, or a part of one"):
            digest_of(tmp_path)


def test_without_a_checkpoint_at_hand_the_name_and_revision_tell(tmp_path: Path) -> None:
    named = {model_name: fingerprint(model(model_name)) for model_name in ("some/one", "some/other")}
    assert "weights some/one@main" in named["some/one"]
    assert named["some/one"] != named["some/other"]
    pinned = model("some/one")
    pinned.model_config.revision = "abc"
    assert "weights some/one@abc" in fingerprint(pinned)


def test_weights_that_are_made_up_or_named_by_the_operator_are_not_read(tmp_path: Path) -> None:
    dummies = [model(tmp_path / name) for name in ("one", "other")]
    for dummy in dummies:
        dummy.load_config.load_format = "dummy"
    assert len({fingerprint(dummy) for dummy in dummies}) == 1
    assert fingerprint(model(tmp_path), "release 7") == fingerprint(model("some/one"), "release 7")


def test_a_configuration_that_differs_is_another_model_and_one_that_moved_is_not(tmp_path: Path) -> None:
    place = saved(tmp_path / "one", tensors())
    assert fingerprint(model(place, transformers_version="4")) == fingerprint(model(place, transformers_version="5"))
    assert fingerprint(model(place, hidden_size=65)) != fingerprint(model(place))


class TestAdapters:
    def adapter(self, folder: Path, seed: int, **said: Any) -> Any:
        saved(folder, tensors(seed))
        config = {"r": 8, "lora_alpha": 16, "base_model_name_or_path": str(folder), **said}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return SimpleNamespace(lora_name="mine", lora_path=str(folder))

    def test_an_adapter_is_told_by_what_it_consists_of(self, tmp_path: Path) -> None:
        one, same, other = (self.adapter(tmp_path / name, seed) for name, seed in (("one", 1), ("same", 1), ("other", 2)))
        scaled = self.adapter(tmp_path / "scaled", 1, lora_alpha=32)
        assert adapter_of(one) == adapter_of(same)
        assert len({adapter_of(it) for it in (one, other, scaled)}) == 3
        assert adapter_of(None) == ""

    def test_an_adapter_that_is_replaced_in_place_is_another_one(self, tmp_path: Path) -> None:
        adapter = self.adapter(tmp_path / "one", 1)
        before = adapter_of(adapter)
        write(tmp_path / "one" / "model-0.safetensors", tensors(2))
        assert adapter_of(adapter) != before

    def test_an_adapter_that_is_not_at_hand_is_told_by_its_name(self) -> None:
        assert adapter_of(SimpleNamespace(lora_name="mine", lora_path="some/adapter")) == "mine"
