"""An engine's command line as far as a transfer depends on it, read without vLLM.

    [NAME=VALUE ...] vllm serve MODEL --flag value --flag=value ...

Flags that have no bearing on a transfer are left alone; one that is nearly, but not quite, one of those that have is told.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
}
KNOWN: Final = frozenset((*NUMBERS, *WORDS, *SWITCHES, *OBJECTS))
ALIKE: Final = 0.87
"""So near to a flag that matters that it is a slip of the pen; near misses of vLLM's own flags are further apart."""
OTHERS: Final = frozenset({"ec_transfer_config"})
"""Flags of vLLM that are near to others and mean something else."""


@dataclass(frozen=True)
class Flags:
    """One engine as its command line has it. `transfer` is its kv_transfer_config, None where there is none."""

    model: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    troubles: tuple[Finding, ...] = ()

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
    for name, said in _pairs(words, loose):
        _take(name, said, values, troubles)
    transfer = values.pop(_TRANSFER, None)
    positional = loose[loose.index("serve") + 1 :] if "serve" in loose else loose
    model = str(values.get("model", "")) or (positional[0] if positional else "")
    return Flags(model, values, transfer, environment, tuple(troubles))


def _pairs(words: Sequence[str], loose: list[str]) -> Iterator[tuple[str, str | None]]:
    """Flags with their values; a value is the next word unless that is a flag. `loose` takes what belongs to none."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.startswith("--") or word in SHORT:
            name, equals, value = word.partition("=")
            name = SHORT[name] if name in SHORT else name.removeprefix("--").partition(".")[0].replace("-", "_") + _dotted(name)
            if equals:
                yield name, value
            elif i < len(words) and not _is_flag(words[i]) and not _switches(name):
                yield name, words[i]
                i += 1
            else:
                yield name, None
        elif not word.startswith("-"):
            loose.append(word)


def _dotted(name: str) -> str:
    """`--kv-transfer-config.kv_role` sets a field of an object."""
    dot = name.find(".")
    return name[dot:] if dot >= 0 else ""


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in SHORT


def _switches(name: str) -> bool:
    return name.removeprefix("no_") in SWITCHES


def _take(name: str, value: str | None, values: dict[str, Any], troubles: list[Finding]) -> None:
    shown = f"--{name.replace('_', '-')}"
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
    elif name not in OTHERS and (near := difflib.get_close_matches(name, KNOWN, 1, ALIKE)):
        right = f"--{near[0].replace('_', '-')}"
        troubles.append(Finding("unknown-flag", f"there is hardly a flag {shown}", f"did you mean {right}?", Severity.WARNING))


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
