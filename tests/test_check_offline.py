"""`kvferry check` on command lines: what is wrong is found by name with its cure, and what works is let through."""

from __future__ import annotations

import contextlib
import json
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvferry.check import Outlook, check_commands, read_command
from kvferry.check.cures import CURES
from kvferry.check.flags import KNOWN, SHORT
from kvferry.cli import app
from kvferry.engines.vllm.options import STOCK_OPTIONS, Options
from kvferry.errors import KVFerryError, SideError
from kvferry.findings import Finding, Severity, errors
from kvferry.models import Side, legal, load_model, zoo_names

ZOO = [name for name in zoo_names() if name != "synthetic-12"]
SOURCE = Path(__file__).parent.parent / "src" / "kvferry"
HYBRIDS = [name for name in ZOO if any(kind.paging == "state" for kind in load_model(name).kinds)]


def command(side: str, *flags: str, model: str = "llama-3.1-8b", variables: str = "", **transfer: Any) -> str:
    """A command line that works, with changes; a field of the transfer configuration that is None is left out."""
    usual = {"kv_connector": "KVFerryConnector", "kv_role": "kv_producer", "kv_connector_module_path": "kvferry.engines.vllm"}
    if side == "decode":
        usual |= {"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
    said = {name: value for name, value in {**usual, **transfer}.items() if value is not None}
    port = 8100 if side == "prefill" else 8200
    words = ["vllm", "serve", model, "--port", str(port)]
    if said:
        words += ["--kv-transfer-config", json.dumps(said)]
    return f"{variables} {shlex.join([*words, *flags])}".strip()


def outlook(prefill: str, decode: str, devices: tuple[str, str] = ("cuda", "cuda"), **rest: Any) -> Outlook:
    return check_commands(read_command(prefill), read_command(decode), devices=devices, **rest)


def named(found: Outlook) -> set[str]:
    return {one.name for one in found.findings}


@dataclass(frozen=True)
class Seed:
    """A pair of commands that is right but for one thing, what that is called, and words of its cure."""

    name: str
    cure: str
    prefill: str
    decode: str
    devices: tuple[str, str] = ("cuda", "cuda")
    severity: Severity = Severity.ERROR


def extra(**options: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": options}


P, D = "prefill", "decode"
MULTI = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
OTHERS = [
    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"},
]
OPAQUE = ("--kv-cache-dtype", "nvfp4", "--attention-backend", "FLASHINFER")
"""A format whose layout no engine certifies."""

SEEDS = [
    Seed(
        "no-connector",
        "add --kv-transfer-config",
        command(P, kv_connector=None, kv_role=None, kv_connector_module_path=None),
        command(D),
    ),
    Seed(
        "other-connector",
        "docs/migrating.md",
        command(P),
        command(D, kv_connector="NixlConnector", kv_connector_module_path=None),
    ),
    Seed(
        "connector-order",
        "KVFerryConnector first",
        command(P),
        command(D, **MULTI, kv_role="kv_both", **extra(connectors=OTHERS)),
    ),
    Seed("connector-module", "kvferry.engines.vllm", command(P, kv_connector_module_path="kvferry"), command(D)),
    Seed("role", "make it kv_producer", command(P, kv_role="kv_consumer"), command(D)),
    Seed("role", "make it kv_consumer", command(P), command(D, kv_role="kv_producer")),
    Seed("unknown-option", "did you mean lease_s?", command(P, **extra(leases=60)), command(D)),
    Seed("option-value", "table of options", command(P), command(D, **extra(window="many"))),
    Seed("lease-times", "raise it", command(P, **extra(lease_s=60, lease_most_s=30)), command(D)),
    Seed("key-needed", "set key_file", command(P, **extra(listen="10.0.0.7:7600")), command(D)),
    Seed("context-parallel", "leave --decode-context-parallel-size out", command(P), command(D, "-dcp", "2", "-tp", "2")),
    Seed("buffer-device", "leave it out", command(P, kv_buffer_device="xpu"), command(D)),
    Seed("permute-local-kv", "leave it out", command(P), command(D, enable_permute_local_kv=True)),
    Seed("kv-port", "listen in kv_connector_extra_config", command(P, kv_port=7600), command(D)),
    Seed("sleep-mode", "without --enable-sleep-mode", command(P), command(D, "--enable-sleep-mode")),
    Seed("routed-experts", "without --enable-return-routed-experts", command(P, "--enable-return-routed-experts"), command(D)),
    Seed("expandable-segments", "unset", command(P), command(D, variables="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")),
    Seed("same-port", "another port", command(P, **extra(listen="127.0.0.1:8100")), command(D)),
    Seed(
        "same-port",
        "its own port",
        command(P, **extra(listen="127.0.0.1:7600")),
        command(D, kv_role="kv_both", **extra(listen="127.0.0.1:7600")),
    ),
    Seed("cache-dtype", "same --kv-cache-dtype", command(P, "--kv-cache-dtype", "fp8"), command(D)),
    Seed("cache-dtype", "same --kv-cache-dtype and --dtype", command(P, "--dtype=float16"), command(D, "--dtype=bfloat16")),
    Seed(
        "ssm-dtype",
        "same --mamba-ssm-cache-dtype",
        command(P, "--mamba-ssm-cache-dtype", "float16", model="nemotron-3-nano-30b-a3b"),
        command(D, model="nemotron-3-nano-30b-a3b"),
    ),
    Seed(
        "conv-dtype",
        "same --mamba-cache-dtype",
        command(P, "--mamba-cache-dtype", "float32", "--mamba-ssm-cache-dtype", "float32", model="nemotron-3-nano-30b-a3b"),
        command(D, "--mamba-ssm-cache-dtype", "float32", model="nemotron-3-nano-30b-a3b"),
    ),
    Seed("model", "serve one model", command(P, model="falcon-h1-34b"), command(D)),
    Seed("tensor-size", "choose a --tensor-parallel-size", command(P, "--tensor-parallel-size=3"), command(D)),
    Seed("pipeline-size", "fewer --pipeline-parallel-size", command(P), command(D, "-pp", "33")),
    Seed("stages", "as many numbers", command(P, "-pp", "2", variables="VLLM_PP_LAYER_PARTITION=16,17"), command(D)),
    Seed("opaque-blocks", "same --block-size", command(P, *OPAQUE, "--block-size", "32"), command(D, *OPAQUE)),
    Seed(
        "backends", "same --attention-backend", command(P, *OPAQUE), command(D, *OPAQUE[:2], "--attention-backend", "HPC_ATTN")
    ),
    Seed(
        "rank-shares",
        "same --tensor-parallel-size",
        command(P, *OPAQUE, "-tp", "2", variables="VLLM_KV_CACHE_LAYOUT=LBNHC"),
        command(D, *OPAQUE, variables="VLLM_KV_CACHE_LAYOUT=LBNHC"),
    ),
    Seed(
        "hybrid-manager",
        "without --disable-hybrid-kv-cache-manager",
        command(P, "--disable-hybrid-kv-cache-manager", model="falcon-h1-34b"),
        command(D, model="falcon-h1-34b"),
    ),
    Seed("weights", "set weights to the same name", command(P, **extra(weights="a")), command(D, **extra(weights="b"))),
    Seed("weights", "serve the same checkpoint", command(P, "--load-format", "dummy"), command(D)),
    Seed("adapters", "the same adapters", command(P, "--enable-lora"), command(D)),
    Seed("engine-id", "make it unique", command(P, engine_id="e"), command(D, engine_id="e")),
    Seed("flag-value", "single quotes", command(P) + " --kv-transfer-config {broken", command(D)),
    Seed("flag-value", "whole number", command(P, "--tensor-parallel-size", "two"), command(D)),
    Seed(
        "unknown-flag",
        "did you mean --tensor-parallel-size?",
        command(P, "--tensor-paralel-size", "2"),
        command(D),
    ),
    Seed("load-failure-policy", "recompute", command(P), command(D, kv_load_failure_policy=None), severity=Severity.WARNING),
    Seed(
        "max-model-len",
        "same --max-model-len",
        command(P, "--max-model-len", "32768"),
        command(D, "--max-model-len", "8192"),
        severity=Severity.WARNING,
    ),
    Seed(
        "peers",
        "name the prefill engine's address",
        command(P, **extra(listen="127.0.0.1:7600")),
        command(D, **extra(peers=["127.0.0.1:7601"])),
        severity=Severity.WARNING,
    ),
    Seed("ucx-tls", "unset UCX_TLS", command(P, variables="UCX_TLS=tcp"), command(D), ("cpu", "cpu"), Severity.WARNING),
    Seed(
        "nixl-variables",
        "listen and advertise",
        command(P, variables="VLLM_NIXL_SIDE_CHANNEL_PORT=5600"),
        command(D),
        severity=Severity.WARNING,
    ),
    Seed(
        "media-cache",
        "--mm-processor-cache-gb",
        command(P),
        command(D, "--mm-processor-cache-gb", "0"),
        severity=Severity.WARNING,
    ),
    Seed("quantization", "give both the same", command(P, "--quantization", "fp8"), command(D), severity=Severity.WARNING),
    Seed("thread-binding", "nobind", command(P), command(D), ("cpu", "cpu"), Severity.WARNING),
    Seed("same-api-port", "its own --port", command(P, "--port", "8200"), command(D), severity=Severity.WARNING),
    Seed(
        "weights-named",
        "set weights",
        command(P, model="llama-3.1-8b"),
        command(D, model="meta-llama/Llama-3.1-8B"),
        severity=Severity.WARNING,
    ),
    Seed("not-planned", "--engine", command(P, "--mamba-block-size", "64"), command(D)),
    Seed("not-planned", "write them into the command", command(P, "--config", "flags.yaml"), command(D)),
    Seed("flag-value", "float16", command(P, "--dtype", "flaot16"), command(D)),
    Seed("flag-value", "did you mean FLASH_ATTN?", command(P, "--attention-backend", "FLASH_ATN"), command(D)),
]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_a_seeded_misconfiguration_is_found_by_name_with_its_cure(seed):
    found = outlook(seed.prefill, seed.decode, seed.devices)
    mine = [one for one in found.findings if one.name == seed.name]
    assert mine, found.findings
    assert any(seed.cure in one.cure for one in mine), mine
    assert {one.severity for one in mine} == {seed.severity}
    assert found.works == (seed.severity is not Severity.ERROR)
    assert all(one.seen and one.cure and one.where for one in found.findings)


def test_the_seeds_are_many_and_each_is_alone():
    """What is found beside a seed is what follows from it, never something else that is wrong with the pair."""
    assert len({seed.name for seed in SEEDS}) >= 40
    assert len([seed for seed in SEEDS if seed.severity is Severity.ERROR]) >= 25
    follows = {
        "model": {"weights-named", "missing-layer"},
        "ucx-tls": {"thread-binding"},
        "weights-named": {"model-assumed"},
        "flag-value": {"certified-at-start"},
    }
    for seed in SEEDS:
        found = named(outlook(seed.prefill, seed.decode, seed.devices))
        assert found - follows.get(seed.name, set()) == {seed.name}, seed.name


@pytest.mark.parametrize("option", STOCK_OPTIONS)
def test_options_of_vllms_own_connector_are_told_what_became_of_them(option):
    found = outlook(command(P, **extra(**{option: 1})), command(D))
    assert [(one.name, one.cure) for one in found.findings] == [("unknown-option", STOCK_OPTIONS[option])]
    here = STOCK_OPTIONS[option].partition("here it is ")[2].partition(",")[0]
    assert not here or here in Options.__struct_fields__
    assert f"`{option}`" in (SOURCE.parent.parent / "docs" / "migrating.md").read_text()


def test_keys_are_compared_where_they_can_be_read(tmp_path):
    for name, text in (("one", "one " * 10), ("other", "other" * 10), ("short", "k")):
        (tmp_path / name).write_text(text)
    keyed = {name: extra(key_file=str(tmp_path / name)) for name in ("one", "other", "short", "absent")}
    assert named(outlook(command(P, **keyed["one"]), command(D, **keyed["one"]))) == set()
    assert named(outlook(command(P, **keyed["one"]), command(D, **keyed["other"]))) == {"keys-differ"}
    assert named(outlook(command(P, **keyed["one"]), command(D))) == {"key-on-one-side"}
    assert named(outlook(command(P, **keyed["short"]), command(D, **keyed["short"]))) == {"key-file"}
    absent = outlook(command(P, **keyed["absent"]), command(D, **keyed["absent"]))
    assert named(absent) == {"key-file"}
    assert "cannot be read" in absent.findings[0].seen
    assert named(outlook(command(P, **keyed["absent"]), command(D, **keyed["absent"]), elsewhere=True)) == set()


def test_a_wildcard_is_no_address_for_others(tmp_path):
    (tmp_path / "key").write_text("the key " * 10)
    wide = {"listen": "0.0.0.0:7600", "key_file": str(tmp_path / "key")}
    keyed = command(D, **extra(key_file=wide["key_file"]))
    assert named(outlook(command(P, **extra(**wide)), keyed)) == {"advertise"}
    assert named(outlook(command(P, **extra(**wide, advertise="prefill-0")), keyed)) == set()
    kept = command(P, **extra(**wide, advertise="prefill-0"), variables="UCX_NET_DEVICES=lo")
    assert named(outlook(kept, keyed)) == {"ucx-devices"}


@pytest.mark.parametrize(
    ("device", "allowed", "direct"),
    [
        ("cpu", "all", True),
        ("cpu", "tcp", False),
        ("cpu", "tcp,sm", True),
        ("cpu", "rc_x,tcp", True),
        ("cpu", "^cma", False),
        ("cpu", "^tcp", True),
        ("cuda", "tcp,cuda_copy", False),
        ("cuda", "cuda_copy,cuda_ipc,tcp,sm,self", True),
        ("cuda", "rc,cuda_copy", True),
        ("cuda", "tcp,sm", False),
        ("cuda", "^cuda_ipc", False),
    ],
)
def test_transports_that_cannot_read_directly_are_told(device, allowed, direct):
    quiet = "VLLM_CPU_OMP_THREADS_BIND=nobind"
    found = outlook(command(P, variables=f"{quiet} UCX_TLS={allowed}"), command(D, variables=quiet), (device, device))
    assert ("ucx-tls" in named(found)) is not direct


def test_peers_are_compared_by_what_they_stand_for():
    there = command(P, **extra(listen="localhost:7600"))
    assert named(outlook(there, command(D, **extra(peers=["127.0.0.1:7600"])))) == set()


def test_weights_of_two_folders_are_compared(tmp_path):
    zoo = SOURCE / "models" / "zoo" / "llama-3.1-8b.json"
    for name, value in (("one", 1), ("same", 1), ("other", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(zoo.read_text())
        header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value]) * 64)
    one, same, other = (str(tmp_path / name) for name in ("one", "same", "other"))
    assert named(outlook(command(P, model=one), command(D, model=same))) == set()
    found = outlook(command(P, model=one), command(D, model=other))
    assert named(found) == {"weights"}
    assert not found.works


def test_every_mismatch_has_a_cure_of_its_own():
    source = "".join((SOURCE / name).read_text() for name in ("manifest/compare.py", "plan/choose.py"))
    names = {word for word in CURES if f'"{word}"' in source}
    assert names >= {"model", "missing-layer", "missing-ranks", "ranks", "context-parallel", "token-ring", "paging", "reach"}
    assert names >= {"parts", "opaque-blocks", "entries", "rank-shares", "sizes", "backends", "cache-dtype", "scales"}
    assert set(CURES) - names == {"ssm-dtype", "conv-dtype"}


SIZES = ((1, 1), (4, 1), (2, 2), (1, 3))


@pytest.mark.parametrize("model", ZOO)
def test_pairs_of_sizes_that_an_engine_can_run_are_let_through(model):
    """TP and PP of the crossing matrix and beyond, for every model of the zoo, on GPUs with equal blocks."""
    shape, proved = load_model(model), 0
    sizes = [(tp, pp) for tp, pp in SIZES if legal(shape, Side(tp, pp)) is None]
    for there in sizes:
        for here in sizes:
            flags = [("-tp", str(tp), "-pp", str(pp)) for tp, pp in (there, here)]
            found = outlook(command(P, *flags[0], model=model), command(D, *flags[1], model=model))
            assert not found.findings, (there, here, found.findings)
            assert found.moves is not None
            proved += 1
    assert proved >= 4


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", *HYBRIDS[:2]])
@pytest.mark.parametrize("blocks", [(32, 64), (64, 32), (64, 96)])
def test_certified_caches_cross_between_block_sizes(model, blocks):
    quiet = "VLLM_CPU_OMP_THREADS_BIND=nobind"
    there, here = (("--block-size", str(block), "-tp", str(tp)) for block, tp in zip(blocks, (1, 2), strict=True))
    found = outlook(
        command(P, *there, model=model, variables=quiet), command(D, *here, model=model, variables=quiet), ("cpu", "cpu")
    )
    assert not found.findings
    assert found.moves is not None


@pytest.mark.parametrize("conv", [("SD", "DS"), ("DS", "SD")])
def test_hybrids_cross_between_convolution_layouts(conv):
    there, here = (f"VLLM_SSM_CONV_STATE_LAYOUT={layout}" for layout in conv)
    model = "granite-4.0-h-tiny"
    found = outlook(command(P, "-tp", "2", model=model, variables=there), command(D, "-tp", "4", model=model, variables=here))
    assert found.works
    assert found.moves is not None
    assert found.moves.bytes_per_state > 0


def test_uneven_stages_are_taken_from_the_environment():
    there = command(P, "-pp", "2", variables="VLLM_PP_LAYER_PARTITION=20,12")
    found = outlook(there, command(D, "-tp", "2"))
    assert found.works
    assert found.moves is not None


def test_flags_are_read_as_vllm_reads_them():
    text = (
        "env A=1 UCX_TLS=all vllm serve org/model -tp 4 --pipeline_parallel_size=2 --kv-transfer-config.kv_role kv_both "
        "--kv-transfer-config.kv_connector=KVFerryConnector --kv-transfer-config.kv_connector_extra_config.lease_s 30 "
        "--no-enable-prefix-caching --enable-lora --max-model-len 4k --gpu-memory-utilization 0.5 # and so on"
    )
    found = read_command(text)
    assert (found.model, found.environment) == ("org/model", {"A": "1", "UCX_TLS": "all"})
    assert (found.number("tensor_parallel_size"), found.number("pipeline_parallel_size")) == (4, 2)
    assert (found.role, dict(found.options)) == ("kv_both", {"lease_s": 30})
    assert (found.switch("enable_prefix_caching", True), found.switch("enable_lora")) == (False, True)
    assert not found.troubles
    assert read_command("python -m vllm.entrypoints.openai.api_server --model m --block-size 32").model == "m"


def test_a_model_that_is_not_here_leaves_the_flags_to_be_checked():
    found = outlook(command(P, model="org/unheard-of"), command(D, "--enable-sleep-mode", model="org/unheard-of"))
    assert named(found) == {"model-unknown", "sleep-mode"}
    given = check_commands(read_command(command(P, model="org/x")), read_command(command(D, model="org/x")), "llama-3.1-8b")
    assert [(one.name, one.severity) for one in given.findings] == [("model-assumed", Severity.NOTE)] * 2
    assert given.works


FLAGS = [f"--{name.replace('_', '-')}" for name in sorted(KNOWN)] + [*SHORT, "--no-enable-lora", "--kv-transfer-config.kv_port"]
NUMBERS = ["", "0", "-1", "1", "3", "7", "4096", "9" * 20]
VALUES = [*NUMBERS, "auto", "fp8", "float16", "nvfp4", "x", "{}", "[]", "{", "null", '{"backend": 3}']
NAMES = ["kv_connector", "kv_role", "kv_port", "kv_connector_extra_config", "connectors", *Options.__struct_fields__]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 70000)
    | st.sampled_from(["", "KVFerryConnector", "MultiConnector", "127.0.0.1:x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
OURS = {"kv_connector": st.just("KVFerryConnector"), "kv_role": ANYTHING, "kv_connector_extra_config": ANYTHING}
TRANSFER = ANYTHING | st.fixed_dictionaries(OURS) | st.just({"kv_connector": "KVFerryConnector", "kv_role": "kv_both"})


@given(
    st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(VALUES)), max_size=5),
    TRANSFER,
    st.sampled_from(["llama-3.1-8b", "granite-4.0-h-tiny", "deepseek-v3", "nowhere"]),
    st.sampled_from(["cpu", "cuda"]),
)
@settings(max_examples=150)
def test_whatever_a_command_says_ends_in_findings(flags, transfer, model, device):
    said = shlex.join([*(word for pair in flags for word in pair if word), "--kv-transfer-config", json.dumps(transfer)])
    try:
        found = outlook(f"vllm serve {model} {said}", command(D, model=model), (device, device))
    except KVFerryError:
        return
    assert all(isinstance(one, Finding) and str(one) for one in found.findings)


@given(st.text(max_size=80))
def test_any_text_is_a_command_or_bad_input(text):
    with contextlib.suppress(SideError):
        assert read_command(text).values is not None


def test_what_is_no_command_line_is_bad_input():
    with pytest.raises(SideError, match="is not a command line"):
        read_command("vllm serve 'unclosed")


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *words], catch_exceptions=True)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("changes", "code"),
    [((), 0), (("--enable-sleep-mode",), 1), (("--max-model-len", "10"), 0)],
)
def test_exit_codes_tell_pipelines_what_to_do(changes, code):
    there, here = command(P, "--max-model-len", "100"), command(D, *changes)
    assert run("--prefill", there, "--decode", here)[0] == code
    if changes:
        assert run("--prefill", there, "--decode", here, "--strict")[0] == 1


def test_json_says_the_same(tmp_path):
    (tmp_path / "prefill.sh").write_text(command(P, "--kv-cache-dtype", "fp8").replace(" --port", " \\\n  --port"))
    code, out = run("--prefill", f"@{tmp_path / 'prefill.sh'}", "--decode", command(D), "--json")
    found = json.loads(out)
    assert (code, found["works"], found["version"]) == (1, False, 1)
    assert [(one["name"], one["severity"], one["where"]) for one in found["findings"]] == [
        ("cache-dtype", "error", "prefill → decode")
    ]
    code, out = run("--prefill", command(P, "-tp", "2"), "--decode", command(D), "--json")
    moves = json.loads(out)["pairs"][0]["moves"]
    assert (code, moves["ranks"], moves["bytes_per_token"]) == (0, [2, 1], 131072)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--prefill", "vllm serve m"),
        ("--prefill", "a", "--decode", "b", "--engine", "127.0.0.1:1"),
        ("--prefill", "a", "--decode", "b", "--canary"),
        ("--engine", "127.0.0.1:1", "--model", "m"),
        ("--prefill", "@/nowhere", "--decode", "b"),
        ("--prefill", "a", "--decode", "b", "--device", "tpu"),
    ],
)
def test_bad_input_is_told_apart_from_a_bad_pair(words):
    done = CliRunner().invoke(app, ["check", *words])
    assert isinstance(done.exception, SideError)


def test_findings_are_plain_data():
    one = Finding("name", "seen\x1b[31m", "cure")
    assert "\x1b" not in str(one)
    assert errors([one]) == [one]


def test_a_file_that_starts_several_engines_is_refused(tmp_path):
    both = tmp_path / "both.sh"
    both.write_text("vllm serve m --port 1 &\npython -m vllm.entrypoints.openai.api_server --model m --port 2 &\n")
    done = CliRunner().invoke(app, ["check", "--prefill", f"@{both}", "--decode", "vllm serve m --served-model-name serve"])
    assert done.exit_code == 1
    assert "more than one engine is started there" in str(done.exception)
