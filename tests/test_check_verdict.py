"""`kvferry check` says that a pair would serve only if it planned it: what it assumed and what it did not look at is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.check import ask_all, check_commands, read_command
from kvferry.check.flags import CHOICES
from kvferry.check.verdict import UNDECIDED, Verdict, verdict
from kvferry.cli import app
from kvferry.cli.completion import model_names
from kvferry.engines.vllm.options import option_troubles
from kvferry.errors import SideError
from kvferry.findings import Finding, Severity
from kvferry.models import zoo_names
from kvferry.session import own_keys
from test_check_offline import command, extra, named, outlook

SERVES = "would serve"


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *words])
    return done.exit_code, " ".join(done.output.split())


def pair(*flags: str, there: tuple[str, ...] = (), model: str = "llama-3.1-8b", more: tuple[str, ...] = ()) -> tuple[int, str]:
    return run("--prefill", command("prefill", *there, model=model), "--decode", command("decode", *flags, model=model), *more)


@pytest.mark.parametrize(
    "model", ["deepseek-v3-distill-qwen-7b", "Qwen/Qwen3-32B-AWQ", "llama-3.1-8b-instruct", "acme/private"]
)
def test_an_unknown_model_leaves_the_flags_alone_to_be_compared(model):
    code, out = pair(model=model)
    assert (code, SERVES in out) == (3, False)
    assert "only the flags were compared" in out
    code, out = pair("--enable-sleep-mode", model=model)
    assert (code, SERVES in out) == (1, False)


def test_a_shape_that_stands_for_a_model_is_named():
    found = outlook(command("prefill", model="deepseek-ai/DeepSeek-V3"), command("decode", model="deepseek-ai/DeepSeek-V3"))
    assert [one.name for one in found.findings] == ["model-assumed"] * 2
    assert "the zoo's deepseek-v3 stands for it" in found.findings[0].seen
    code, out = pair(model="deepseek-ai/DeepSeek-V3")
    assert (code, "model-assumed" in out) == (0, True)
    assert pair(model="deepseek-ai/DeepSeek-V3", more=("--strict",))[0] == 3
    assert "model-assumed" not in pair(model="deepseek-v3")[1]
    code, out = pair(model="acme/private", more=("--model", "llama-3.1-8b"))
    assert code == 0
    assert "the shape of llama-3.1-8b stands for acme/private" in out


def test_a_folder_is_read_even_if_it_is_called_like_a_model_of_the_zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (folder / "config.json").write_text(json.dumps(config))
    found = outlook(command("prefill"), command("decode"))
    assert found.moves is not None
    assert found.moves.bytes_per_token == 2 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (("--dtype", "bfloat16"), ("--dtype", "float16")),
        (("--kv-cache-dtype", "fp8"), ()),
        (("--mamba-ssm-cache-dtype", "float32"), ("--mamba-ssm-cache-dtype", "float16")),
        (("--hf-overrides", '{"sliding_window": 8}'), ()),
        (("--revision", "a"), ("--revision", "b")),
    ],
)
def test_flags_that_differ_are_errors_for_an_unknown_model_too(there, here):
    assert pair(*here, there=there, model="acme/private")[0] == 1
    assert pair(*there, there=there, model="acme/private")[0] == 3


def test_models_of_two_names_are_errors_unless_their_weights_are_named():
    there, here = "acme/one", "acme/other"
    found = outlook(command("prefill", model=there), command("decode", model=here))
    assert verdict(found.findings) is Verdict.REFUSED
    assert "weights-named" in named(found)
    alike = extra(weights="mine")
    found = outlook(command("prefill", model=there, **alike), command("decode", model=here, **alike))
    assert verdict(found.findings) is Verdict.UNDECIDED


def test_a_downloaded_checkpoint_is_the_one_of_the_hub():
    folder = "/hub/models--acme--one/snapshots/abc"
    for other, expected in (("abc", Verdict.UNDECIDED), ("def", Verdict.REFUSED)):
        found = outlook(command("prefill", model=folder), command("decode", "--revision", other, model="acme/one"))
        assert verdict(found.findings) is expected


def folder_of(tmp_path: Path, name: str, **config: Any) -> str:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "tp", "expected"),
    [
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, 6, Verdict.REFUSED),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, 5, Verdict.REFUSED),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, 16, Verdict.UNDECIDED),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, 4, Verdict.UNDECIDED),
        ({"text_config": {"num_attention_heads": 12, "num_key_value_heads": 4}}, 6, Verdict.REFUSED),
        ({"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512}, 6, Verdict.REFUSED),
    ],
)
def test_heads_that_vllm_does_not_deal_are_errors_in_families_that_are_not_known(config, tp, expected, tmp_path):
    model = folder_of(tmp_path, "m", model_type="unheard-of", **config)
    found = outlook(command("prefill", "-tp", str(tp), model=model), command("decode", "-tp", str(tp), model=model))
    assert verdict(found.findings) is expected


@pytest.mark.parametrize("tp", [3, 6, 12, 24])
def test_heads_that_vllm_does_not_deal_are_errors_in_families_that_are_known(tp, tmp_path):
    """24 query heads divide by each; 16 KV heads are neither divided by it nor copied."""
    shape = {"num_attention_heads": 24, "num_key_value_heads": 16, "head_dim": 64, "hidden_size": 1536}
    model = folder_of(tmp_path, "m", model_type="llama", num_hidden_layers=2, **shape)
    found = outlook(command("prefill", "-tp", str(tp), model=model), command("decode", model=model))
    assert named(found) == {"tensor-size"}


def test_configurations_that_differ_are_one_error(tmp_path):
    shape = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    there = folder_of(tmp_path, "m", **shape, rope_theta=10000.0)
    (tmp_path / "other").mkdir()
    here = folder_of(tmp_path / "other", "m", **shape, rope_theta=500000.0)
    found = outlook(command("prefill", model=there), command("decode", model=here))
    assert [one.seen for one in found.findings if one.name == "model"] == [
        "the configurations of m and m differ: rope_theta is 10000.0 there, 500000.0 here"
    ]
    scaled = ("--hf-overrides", '{"rope_theta": 500000.0}')
    assert outlook(command("prefill", *scaled, model=there), command("decode", model=here)).works
    telling = ("--hf-overrides", '{"quantization_config": {"quant_method": "fp8"}}')
    assert not outlook(command("prefill", *telling, model=there), command("decode", model=there)).works


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("--tensor-paralel-size", "2"), "--tensor-parallel-size"),
        (("--tensor-parallelism", "2"), "--tensor-parallel-size"),
        (("--tp", "2"), "--tensor-parallel-size"),
        (("--tp-size=2",), "--tensor-parallel-size"),
        (("-tp2",), "--tensor-parallel-size"),
        (("-tensor-parallel-size", "2"), "--tensor-parallel-size"),
        (("--dcp", "1"), "--decode-context-parallel-size"),
        (("--kv-cache-type", "fp8"), "--kv-cache-dtype"),
        (("--blocksize", "32"), "--block-size"),
        (("--kv-transfer-cfg.kv_role", "x"), "--kv-transfer-config"),
    ],
)
def test_a_misspelled_flag_is_an_error_that_names_the_right_one(words, meant):
    found = outlook(command("prefill", *words), command("decode"))
    mine = [one for one in found.findings if one.name == "unknown-flag"]
    assert [one.severity for one in mine] == [Severity.ERROR]
    assert f"did you mean {meant}?" in mine[0].cure
    assert not found.works


@pytest.mark.parametrize(
    "words", [("--dcp", "2"), ("-dcp", "2"), ("-dcp=2",), ("--prefill-context-parallel-size", "2"), ("--pcp=2",)]
)
def test_context_parallelism_is_refused_by_name_however_it_is_written(words):
    found = outlook(command("prefill"), command("decode", *words, "-tp", "2"))
    assert "context-parallel" in named(found)
    assert not found.works


def test_the_beginning_of_a_flag_is_taken_for_it_as_vllm_does():
    found = outlook(command("prefill", "--tensor-parallel", "2"), command("decode"))
    assert [(one.name, one.severity) for one in found.findings] == [("unknown-flag", Severity.WARNING)]
    assert found.moves is not None
    assert found.moves.ranks == (2, 1)


def test_other_flags_are_listed_as_not_looked_at():
    found = outlook(command("prefill", "--max-num-seqs", "8", "-ep", "--foo", "-cc.mode", "3"), command("decode"))
    assert [(one.name, one.severity, one.where) for one in found.findings] == [("not-looked-at", Severity.NOTE, "prefill")]
    assert found.findings[0].seen == "not looked at: --max-num-seqs, -ep, --foo, -cc.mode"
    assert found.works
    assert pair("--max-num-seqs", "8", more=("--strict",))[0] == 0


def test_switches_that_are_not_known_take_no_word_from_the_model():
    assert read_command("vllm serve --enable-expert-parallel org/m -tp 2").model == "org/m"
    assert read_command("vllm serve --enforce-eager -ep org/m").model == "org/m"
    assert read_command("python -m vllm.entrypoints.openai.api_server --model org/m -n -1").model == "org/m"


def test_speculative_tokens_count_however_they_are_written():
    said = read_command("vllm serve m --spec-method ngram --spec-tokens 3")
    assert said.values["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", CHOICES)
def test_a_word_that_vllm_does_not_take_is_told_with_those_that_it_takes(name):
    flag = f"--{name.replace('_', '-')}"
    found = outlook(command("prefill", flag, "nonsense"), command("decode", flag, "nonsense"))
    mine = [one for one in found.findings if one.name == "flag-value"]
    assert len(mine) == 2
    assert all(word in mine[0].cure for word in CHOICES[name])


BLOCKS = ("--block-size", "64")


def sides(*flags: str) -> list[str]:
    return ["check", "--prefill", command("prefill"), "--decode", command("decode", *flags)]


def test_the_answer_says_what_it_rests_on():
    code, out = pair(more=("--json",))
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, "serves")
    assert [(one["side"], one["vllm"], one["cache"], one["evidence"]) for one in found["rests_on"]] == [
        (side, "0.32", "FLASH_ATTN bfloat16 in BLHNC", "recorded") for side in ("prefill", "decode")
    ]
    assert "what this rests on" in pair()[1]


def test_a_release_without_evidence_is_not_taken_for_one_with():
    code, out = pair(*BLOCKS, more=("--vllm", "0.99.0"))
    assert (code, SERVES in out) == (3, False)
    found = json.loads(CliRunner().invoke(app, [*sides(*BLOCKS), "--vllm", "0.99.0", "--json"]).stdout)
    assert [one["name"] for one in found["findings"]] == ["certified-at-start"]
    assert "no evidence is recorded for FLASH_ATTN bfloat16 in BLHNC of vLLM 0.99" in found["findings"][0]["seen"]
    code, out = pair(*BLOCKS, more=("--vllm", "0.32.1"))
    assert (code, SERVES in out) == (0, True)


def test_equal_blocks_of_one_release_do_not_depend_on_evidence():
    code, out = pair(more=("--vllm", "0.99.0", "--json"))
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, "serves")
    assert [one["name"] for one in found["findings"]] == ["no-evidence"]
    assert "no evidence is recorded for vLLM 0.99 (it is for 0.32, 0.33)" in found["findings"][0]["seen"]
    assert {one["evidence"] for one in found["rests_on"]} == {"none recorded: moved whole"}
    assert pair(more=("--vllm", "0.99.0", "--strict"))[0] == 3


def test_two_releases_depend_on_what_the_newer_one_certifies():
    code, out = pair(more=("--vllm", "0.32.0,0.99.0", "--json"))
    found = json.loads(out)
    assert (code, found["works"], found["verdict"]) == (3, False, "undecided")
    assert [one["evidence"].partition(":")[0] for one in found["rests_on"]] == ["recorded", "none recorded"]


def test_a_backend_without_evidence_depends_on_what_the_engine_certifies():
    backend = ("--attention-backend", "FLASHINFER")
    code, out = pair(*BLOCKS, *backend, there=backend)
    assert (code, SERVES in out, "certified-at-start" in out) == (3, False, True)
    code, out = pair(*backend, there=backend, more=("--json",))
    assert (code, {one["evidence"] for one in json.loads(out)["rests_on"]}) == (0, {"none recorded: moved whole"})


def test_what_no_certification_cures_is_refused_in_a_release_without_evidence():
    opaque = ("--attention-backend", "FLASHINFER", "--kv-cache-dtype", "nvfp4")
    code, out = pair(*BLOCKS, *opaque, there=opaque, more=("--vllm", "0.99.0"))
    assert (code, "opaque-blocks" in out) == (1, True)
    code, out = pair("--kv-cache-dtype", "fp8", more=("--vllm", "0.99.0"))
    assert (code, "cache-dtype" in out) == (1, True)
    code, out = pair("--kv-cache-dtype", "new", there=("--kv-cache-dtype", "new"), more=("--vllm", "0.99.0"))
    assert (code, "flag-value" in out) == (0, True)


@pytest.mark.parametrize(
    ("release", "model", "code"),
    [
        ("0.30.2", "llama-3.1-8b", 1),
        ("0.31.0", "llama-3.1-8b", 0),
        ("0.31.0", "granite-4.0-h-tiny", 1),
        ("0.31.0", "gemma-3-27b", 0),
        ("0.99.0", "granite-4.0-h-tiny", 0),
    ],
)
def test_what_a_release_cannot_serve_is_refused(release, model, code):
    found = pair(model=model, more=("--vllm", release))
    assert (found[0], "vllm-release" in found[1]) == (code, code == 1)
    assert pair(model=model, more=("--vllm", f"0.32.0,{release}"))[0] == (code or 3)


@pytest.mark.parametrize("said", ["", "new", "0", "0.32.0,0.33.0,0.34.0", "0.99.0,", "0.99.0 "])
def test_what_is_no_release_is_bad_input(said):
    words = ["check", "--prefill", command("prefill"), "--decode", command("decode"), "--vllm", said]
    assert isinstance(CliRunner().invoke(app, words).exception, SideError)


@pytest.mark.parametrize("word", ["foo", "vllm", "http://127.0.0.1:8100", "127.0.0.1"])
def test_what_is_no_engine_is_not_blamed_on_the_key(word):
    with pytest.raises(SideError, match="is no engine: write the address that a running vLLM engine listens on") as caught:
        ask_all([word], own_keys())
    assert "key" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("sync", "no", '"none" or "strict"'),
        ("strategies", ["direct", "x"], '"mapped" or "packed" or "staged" or "direct"'),
        ("progress_thread", "fast", 'true or false or "slow"'),
        ("cache_layout", "X", '"LBHNC"'),
    ],
)
def test_an_option_with_a_wrong_word_is_told_with_the_right_ones(option, value, words):
    assert words in next(option_troubles({option: value})).cure
    found = check_commands(read_command(command("prefill", **extra(**{option: value}))), read_command(command("decode")))
    assert any(words in one.cure for one in found.findings if one.name == "option-value")


def test_names_of_models_are_completed():
    assert model_names("Qwen3") == ["qwen3-32b", "qwen3-next-80b-a3b"]
    assert tuple(model_names("")) == zoo_names()
    assert model_names("./") == []
    asked = {"_KVFERRY_COMPLETE": "complete_bash", "COMP_WORDS": "kvferry check --model deepseek-v3", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "kvferry"], env={**os.environ, **asked}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["deepseek-v3"]


def test_only_what_can_change_is_undecided():
    for name in UNDECIDED:
        assert verdict([Finding(name, "seen", "cure")]) is Verdict.UNDECIDED
        assert verdict([Finding(name, "seen", "cure"), Finding("role", "seen", "cure")]) is Verdict.REFUSED
    assert verdict([Finding("role", "seen", "cure", Severity.WARNING)]) is Verdict.SERVES


def test_the_documented_readiness_probe_asks_one_engine_alone():
    docs = Path(__file__).parent.parent / "docs"
    shown = [block for page in docs.rglob("*.md") for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    probes = [block for block in shown if "readinessProbe" in block]
    assert probes
    assert all("/health" in probe and "kvferry" not in probe for probe in probes)
