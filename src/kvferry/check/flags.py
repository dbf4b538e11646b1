"""An engine's command line as far as a transfer depends on it, read without vLLM.

    [NAME=VALUE ...] vllm serve MODEL --flag value --flag=value ...

Flags that matter to a transfer are read. A flag that is nearly one of them is an error. All others are listed as not looked at.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from kvferry.errors import SideError
from kvferry.findings import Finding, Severity

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_TRANSFER: Final = "kv_transfer_config"

NUMBERS: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "block_size",
    "max_model_len",
    "port",
)
MOST: Final = {"block_size": 1 << 16, "max_model_len": 1 << 26, "port": (1 << 16) - 1}
"""Sizes have fewer. Lengths may be written in other ways too (4k, auto), which do not matter here."""
WORDS: Final = (
    "model",
    "revision",
    "dtype",
    "kv_cache_dtype",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "attention_backend",
    "load_format",
    "quantization",
    "host",
    "served_model_name",
    "mm_processor_cache_gb",
)
SWITCHES: Final = (
    "enable_sleep_mode",
    "enable_return_routed_experts",
    "disable_hybrid_kv_cache_manager",
    "enable_prefix_caching",
    "enable_lora",
    "trust_remote_code",
    "enforce_eager",
)
OBJECTS: Final = (_TRANSFER, "speculative_config", "hf_overrides", "attention_config")
SHORT: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-q": "quantization",
    "-sc": "speculative_config",
    "-ac": "attention_config",
}
FIELDS: Final = {
    "spec_method": "speculative_config.method",
    "spec_model": "speculative_config.model",
    "spec_tokens": "speculative_config.num_speculative_tokens",
}
"""Flags that set a field of an object."""
KNOWN: Final = frozenset((*NUMBERS, *WORDS, *SWITCHES, *OBJECTS, *FIELDS))
_STATES: Final = ("auto", "bfloat16", "float16", "float32")
CHOICES: Final = {
    "dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"),
    "kv_cache_dtype": (
        *("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head"),
        *("int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "turboquant_3bit_nc"),
        *("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4", "ultraquant_4bit"),
    ),
    "mamba_cache_dtype": _STATES,
    "mamba_ssm_cache_dtype": _STATES,
}
"""The words that vLLM takes."""
UNPLANNED: Final = {
    "config": "it names a file with more flags",
    "hf_config_path": "it names another config.json",
    "kv_cache_dtype_skip_layers": "some layers are kept in another dtype",
    "mamba_block_size": "it changes the blocks of recurrent states",
    "disable_sliding_window": "it changes which tokens a layer keeps",
    "kv_sharing_fast_prefill": "it changes which layers are prefilled",
    "use_replayssm": "it changes what a recurrent state holds",
    "model_class_overrides": "it changes which layers there are",
}
"""Flags that change what a cache holds, and that are not planned from a command line."""
INSTEAD: Final = {
    "config": "write them into the command",
    "hf_config_path": "give that one with --model, and leave the flag out here",
}
"""What to do about these."""
ALIKE: Final = 0.8
"""A flag of which so much is that of one that matters is a slip of the pen."""
OTHERS: Final = frozenset(
    {
        "data_parallel_size_local",
        "ec_transfer_config",
        "mamba_cache_mode",
        "mm_processor_cache_type",
        "weight_transfer_config",
    }
)
"""Flags of vLLM that are so near to one that matters, and mean something else."""
OTHER_SHORT: Final = frozenset(
    ("-asc", "-n", "-r", "-dpn", "-dpr", "-dpl", "-dpa", "-dpp", "-dpb", "-dph", "-dpe", "-dpm", "-ep", "-dc", "-cc", "-h")
)
"""Short flags of vLLM that do not matter here."""
OTHER_SWITCHES: Final = frozenset(
    {"-h", "-ep", "-dph", "-dpe", "-dpm", "disable_sliding_window", "kv_sharing_fast_prefill", "use_replayssm", "headless"}
)
"""Flags without a value that do not begin as such."""
LONG: Final = {word: name for short, name in SHORT.items() if name in NUMBERS for word in (short[1:], f"{short[1:]}_size")}
"""How others write short flags: `--tp`, `--tp-size`. vLLM has none of them."""


@dataclass(frozen=True)
class Flags:
    """One engine as its command line has it. `transfer` is its kv_transfer_config, None where there is none. `unread` are flags
    that were not looked at."""

    model: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    troubles: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()

    def number(self, name: str, default: int = 1) -> int:
        return int(self.values.get(name, default))

    def word(self, name: str, default: str = "") -> str:
        return str(self.values.get(name, default))

    def switch(self, name: str, default: bool = False) -> bool:
        return bool(self.values.get(name, default))

    @property
    def connectors(self) -> tuple[Mapping[str, Any], ...]:
        """Those of a MultiConnector in their order, or the only one."""
        if self.transfer is None:
            return ()
        if self.transfer.get("kv_connector") == "MultiConnector":
            extra = self.transfer.get("kv_connector_extra_config")
            found = extra.get("connectors") if isinstance(extra, Mapping) else None
            return tuple(one for one in found if isinstance(one, Mapping)) if isinstance(found, list) else ()
        return (self.transfer,)

    @property
    def ferry(self) -> Mapping[str, Any] | None:
        """KVFerry's own part of the transfer configuration."""
        return next((one for one in self.connectors if one.get("kv_connector") == "KVFerryConnector"), None)

    @property
    def options(self) -> Mapping[str, Any]:
        found = (self.ferry or {}).get("kv_connector_extra_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def role(self) -> str:
        """That of KVFerry's own part; among several connectors it may be said once for all."""
        found = (self.ferry or {}).get("kv_role") or (self.transfer or {}).get("kv_role")
        return str(found or "")


def read_command(text: str) -> Flags:
    """Raises SideError where the text is no command line at all; what is wrong inside it is a finding."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise SideError(f"{text[:80]!r} is not a command line: {error}") from None
    environment: dict[str, str] = {}
    while words and (words[0] == "env" or _VARIABLE.match(words[0])):
        word = words.pop(0)
        if word != "env":
            name, _, value = word.partition("=")
            environment[name] = value
    values: dict[str, Any] = {}
    troubles: list[Finding] = []
    loose: list[str] = []
    before, words = _parted(words)
    if any(
        (word == "serve" and first.endswith("vllm")) or (word.endswith("api_server") and first == "-m")
        for first, word in pairwise(words)
    ):
        raise SideError("more than one engine is started there: give each side one `vllm serve` command, in a file of its own")
    unread = [word.partition("=")[0] for word in before if _is_flag(word) and word != "-m"]
    for name, said in _pairs(words, loose):
        _take(name, said, values, troubles, unread)
    transfer = values.pop(_TRANSFER, None)
    model = str(values.get("model", "")) or (loose[0] if loose else "")
    return Flags(model, values, transfer, environment, tuple(troubles), tuple(dict.fromkeys(unread)))


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """What starts vLLM, and what vLLM is given."""
    for i, word in enumerate(words):
        if word == "serve" or word.endswith("api_server"):
            return words[:i], words[i + 1 :]
    return [], words


def _pairs(words: Sequence[str], loose: list[str]) -> Iterator[tuple[str, str | None]]:
    """Flags with their values; a value is the next word unless that is a flag. `loose` takes what belongs to none.

    `--kv-transfer-config.kv_role` sets a field of an object.
    """
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if _is_flag(word):
            said, equals, value = word.partition("=")
            head, dot, field_of = said.partition(".")
            long = head.removeprefix("--").replace("-", "_") if head.startswith("--") else head
            name = f"{SHORT.get(head, long)}{dot}{field_of}"
            if equals:
                yield name, value
            elif i < len(words) and not _is_flag(words[i]) and not _switches(name):
                yield name, words[i]
                i += 1
            else:
                yield name, None
        else:
            loose.append(word)


def _is_flag(word: str) -> bool:
    """A negative number is a value."""
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


def _switches(name: str) -> bool:
    return name.removeprefix("no_") in SWITCHES or name in OTHER_SWITCHES or name.startswith(("enable_", "disable_", "no_"))


def _take(name: str, value: str | None, values: dict[str, Any], troubles: list[Finding], unread: list[str]) -> None:
    shown = _shown(name)
    name = FIELDS.get(name, name)
    head, _, tail = name.partition(".")
    if head in OBJECTS and tail:
        _set(values.setdefault(head, {}), tail.split("."), _read(value or ""))
    elif name in OBJECTS:
        found = _read(value or "")
        if not isinstance(found, dict):
            troubles.append(Finding("flag-value", f"{shown} is not a JSON object: {(value or '')[:80]!r}", _JSON))
            return
        values[name] = {**values.get(name, {}), **found}
    elif name in NUMBERS:
        most = MOST.get(name, 1024)
        if value is not None and value.isascii() and value.isdigit() and len(value) < 9 and 1 <= int(value) <= most:
            values[name] = int(value)
        elif name != "max_model_len" or value is None:
            troubles.append(Finding("flag-value", f"{shown} is {value!r}", f"give it a whole number from 1 to {most:,}"))
    elif name in WORDS:
        if value is None:
            troubles.append(Finding("flag-value", f"{shown} has no value", "give it one"))
            return
        values[name] = value
    elif name in SWITCHES:
        values[name] = value is None or value.lower() not in ("false", "0")
    elif name.removeprefix("no_") in SWITCHES:
        values[name.removeprefix("no_")] = False
    elif head in UNPLANNED:
        cure = INSTEAD.get(head, "ask the engines when they run (--engine), or leave the flag out")
        troubles.append(Finding("not-planned", f"{shown} is not planned for here: {UNPLANNED[head]}", cure))
    elif right := _meant(head):
        troubles.append(Finding("unknown-flag", f"vLLM has no flag {shown}", f"did you mean {_shown(right)}?"))
        if head in LONG:
            _take(right, value, values, troubles, unread)
    elif whole := _whole(head):
        seen = f"{shown} is not a whole flag; it is taken for {_shown(whole)}"
        troubles.append(Finding("unknown-flag", seen, "write the whole flag", Severity.WARNING))
        _take(whole + name[len(head) :], value, values, troubles, unread)
    else:
        unread.append(shown)


def _shown(name: str) -> str:
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"


def _meant(name: str) -> str:
    """The flag that matters and that this is a misspelling of; empty if it is none."""
    if name in OTHERS or name in OTHER_SHORT or _whole(name):
        return ""
    if name in LONG:
        return LONG[name]
    if name.startswith("-"):
        begun = [long for short, long in SHORT.items() if name.startswith(short)]
        if begun:
            return begun[0]
    near = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), KNOWN, 1, ALIKE)
    return near[0] if near else ""


def _whole(name: str) -> str:
    """vLLM takes the beginning of a flag for the flag, if no other begins so."""
    found = [known for known in KNOWN if len(name) > 2 and known.startswith(name)]
    return found[0] if len(found) == 1 else ""


_JSON: Final = 'write it like \'{"kv_connector": "KVFerryConnector", "kv_role": "kv_producer"}\', in single quotes'


def _read(text: str) -> Any:
    """A JSON value, or the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _set(where: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = where.get(name)
        where[name] = inner if isinstance(inner, dict) else {}
        where = where[name]
    where[path[-1]] = value
