"""What `kvferry check` takes for granted about vLLM, against vLLM: its flags, its own connector's options, and its caches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm.distributed.kv_transfer.kv_connector.v1 as connectors
from engine import MODELS, Setup, workers
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvferry.check import read_command
from kvferry.check.flags import (
    CHOICES,
    KNOWN,
    NUMBERS,
    OBJECTS,
    OTHER_SHORT,
    OTHER_SWITCHES,
    OTHERS,
    SHORT,
    SWITCHES,
    UNPLANNED,
    WORDS,
)
from kvferry.check.offline import prove
from kvferry.check.shapes import engine_of
from kvferry.engines.vllm.options import STOCK_OPTIONS
from kvferry.manifest import Manifest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def flags() -> dict[str, Any]:
    """vLLM's own flags with what they take: None is a switch."""
    parser = make_arg_parser(FlexibleArgumentParser())
    return {option: action for action in parser._actions for option in action.option_strings}


def test_every_flag_that_is_looked_at_is_one_of_vllms(flags: dict[str, Any]) -> None:
    for name in KNOWN:
        assert f"--{name.replace('_', '-')}" in flags, name
    for short, name in SHORT.items():
        assert short in flags[f"--{name.replace('_', '-')}"].option_strings


def test_no_flag_of_vllms_is_taken_for_a_slip_of_the_pen(flags: dict[str, Any]) -> None:
    for option in flags:
        found = read_command(f"vllm serve m {option} 1")
        assert "unknown-flag" not in {one.name for one in found.troubles}, option


def test_flags_that_are_not_planned_for_are_flags_of_vllms(flags: dict[str, Any]) -> None:
    assert all(f"--{name.replace('_', '-')}" in flags for name in (*UNPLANNED, *OTHERS))
    assert set(OTHER_SHORT) <= set(flags)


def test_words_are_those_that_vllm_takes(flags: dict[str, Any]) -> None:
    for name, words in CHOICES.items():
        assert set(words) == set(flags[f"--{name.replace('_', '-')}"].choices), name


def test_flags_with_and_without_a_value_are_told_apart(flags: dict[str, Any]) -> None:
    for name in (*NUMBERS, *WORDS, *OBJECTS):
        assert flags[f"--{name.replace('_', '-')}"].nargs != 0, name
    for name in SWITCHES:
        assert flags[f"--{name.replace('_', '-')}"].nargs == 0, name
        assert f"--no-{name.replace('_', '-')}" in flags, name
    for name in OTHER_SWITCHES:
        assert flags[name if name.startswith("-") else f"--{name.replace('_', '-')}"].nargs == 0, name


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-parallel-size 2 -pp 3 --block-size=32 --dtype float16 --enable-lora --no-enable-prefix-caching",
        "-tp 4 --kv-cache-dtype fp8 --max-model-len 4096 --mamba-ssm-cache-dtype float32 --enable-sleep-mode",
    ],
)
def test_a_command_says_to_us_what_it_says_to_vllm(words: str) -> None:
    theirs = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(theirs)
    parsed = vars(theirs.parse_args(["--model", "m", *words.split()]))
    ours = read_command(f"vllm serve m {words}")
    assert ours.values
    for name, value in ours.values.items():
        assert str(parsed[name]) == str(value), name


def test_every_option_of_vllms_own_connector_is_on_the_page_of_migrating() -> None:
    folder = Path(connectors.__file__).parent / "nixl"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    asked = set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', source))
    assert len(asked) >= 5
    assert asked == set(STOCK_OPTIONS)
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert all(f"`{option}`" in page for option in asked)


CASES = [
    ("llama", 1, 32, "float32", "SD"),
    ("llama", 2, 64, "bfloat16", "SD"),
    ("gemma3", 2, 32, "float32", "SD"),
    ("nemotron-h", 1, 32, "float32", "DS"),
    ("nemotron-h", 2, 64, "float32", "SD"),
    ("granite-h-1g", 2, 32, "float32", "SD"),
    ("qwen3-next", 1, 32, "bfloat16", "SD"),
    ("lfm2", 1, 32, "float32", "DS"),
    ("jamba", 2, 32, "float32", "SD"),
]


@pytest.mark.parametrize(("model", "tp", "block", "dtype", "conv"), CASES)
def test_caches_are_shaped_as_a_worker_declares_them(
    model: str, tp: int, block: int, dtype: str, conv: str, tmp_path: Path
) -> None:
    """What is foretold from a command line can be moved to what vLLM's workers declare, and back."""
    MODELS[model]().save_pretrained(tmp_path)
    command = f"VLLM_SSM_CONV_STATE_LAYOUT={conv} vllm serve {tmp_path} -tp {tp} --block-size {block} --dtype {dtype}"
    engine = engine_of(read_command(command), "cpu", str(tmp_path))
    assert not engine.troubles
    foretold = engine.manifests("offline")
    declared = [
        _renamed(worker.manifest("P"), foretold[0].identity.model)
        for worker in workers(Setup(model, tp, block=block, dtype=dtype, conv=conv), "P")
    ]
    assert prove(tuple(declared), foretold, "")[0] == []
    assert prove(foretold, tuple(declared), "")[0] == []
    for there, here in zip(foretold, declared, strict=True):
        assert {layer.name for layer in there.layers} == {layer.name for layer in here.layers}
        assert sorted(group.tokens for group in there.groups) == sorted(group.tokens for group in here.groups)


def _renamed(manifest: Manifest, model: str) -> Manifest:
    return msgspec.structs.replace(manifest, identity=msgspec.structs.replace(manifest.identity, model=model))
