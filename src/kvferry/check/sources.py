"""Where the numbers of a model come from: its config.json, or one of the zoo that stands for it; and how two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvferry.check.flags import Flags
from kvferry.engines.vllm.identity import VOLATILE
from kvferry.errors import ModelError
from kvferry.findings import Finding, Severity
from kvferry.models import ModelShape, from_config, load_model, read_config, zoo_config, zoo_names

SHOWN: Final = 3
"""Keys that are named of those that differ."""
TELLING: Final = frozenset({"quantization_config"})
"""Keys that have no default."""
SAME: Final = "serve one model, with the same --hf-overrides, on both sides"


@dataclass(frozen=True)
class Source:
    """`config` is what was read, with the engine's overrides; `label` what the model is called there. `zoo` is set if the
    config is one of the zoo's, `assumed` if it stands for a model of another name."""

    config: Mapping[str, Any]
    label: str
    zoo: bool = False
    assumed: bool = False

    def shape(self, dtype: str = "") -> ModelShape:
        """In the dtype that the engine is told to compute in. Raises ModelError for a family that is not known."""
        return from_config(self.config, self.label, dtype) if self.config else load_model(self.label, dtype)

    @property
    def text(self) -> Mapping[str, Any]:
        """The part that is about the language model."""
        found = self.config.get("text_config")
        return found if isinstance(found, Mapping) else self.config

    @property
    def dtype(self) -> str:
        """As the config has it; empty if it does not say."""
        for part in (self.text, self.config):
            said = part.get("torch_dtype") or part.get("dtype")
            if isinstance(said, str):
                return said.removeprefix("torch.")
        return ""

    def undealt(self, tp: int) -> str:
        """Why vLLM does not deal the heads to so many ranks; empty if it does. For families whose shape is not known."""
        heads, kv = (self.text.get(f"num_{which}_heads") for which in ("attention", "key_value"))
        if isinstance(heads, int) and heads % tp:
            return f"{heads} query heads cannot be dealt evenly to {tp} tensor-parallel ranks"
        latent = self.text.get("kv_lora_rank") is not None
        if isinstance(kv, int) and kv > 0 and not latent and kv % tp and tp % kv:
            return f"{kv} KV heads can be neither dealt evenly to {tp} tensor-parallel ranks nor copied to them"
        return ""


def source_of(name: str, flags: Flags | None = None) -> Source:
    """A config.json or a folder with one, or a model of the zoo, also if an owner stands before its name (`org/Name`). No other
    name stands for a model of the zoo: `Name-AWQ` or `Name-Distill` may be anything. Raises ModelError."""
    over = flags.values.get("hf_overrides") if flags is not None else None
    owner, _, short = name.lower().rpartition("/")
    try:
        here = Path(name).exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"{name[:80]!r} cannot be looked for: {error}") from None
    if short in zoo_names() and not here and "/" not in owner and not name.startswith(("/", ".", "~")):
        return Source(_merged(zoo_config(short), over), short, True, bool(owner))
    config, label = read_config(name)
    if not isinstance(config, dict):
        raise ModelError(f"{label}: the config is a {type(config).__name__}; an object with keys is needed")
    return Source(_merged(config, over), label)


def _merged(config: Mapping[str, Any], over: Any) -> dict[str, Any]:
    """With the values that --hf-overrides gives."""
    out = dict(config)
    for name, value in over.items() if isinstance(over, Mapping) else ():
        inner = out.get(name)
        out[name] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out


def unlike(there: Source, here: Source) -> Iterator[Finding]:
    """What two configurations say differently; engines compare all of it. A key that only one of them has may be a default.

    The zoo has only a few keys of a config.json, which is then compared by the shape alone.
    """
    if there.zoo != here.zoo:
        return
    differ, alone = _differences(there.config, here.config)
    if differ:
        yield Finding("model", f"the configurations of {there.label} and {here.label} differ: {_listed(differ)}", SAME)
    elif alone:
        seen = f"only one of the configurations of {there.label} and {here.label} has {_listed(alone)}"
        yield Finding("model", seen, f"{SAME}; if the key has its default, this is well", Severity.WARNING)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], at: str = "") -> tuple[list[str], list[str]]:
    differ: list[str] = []
    alone: list[str] = []
    for name in sorted({*there, *here} - (VOLATILE if at else VOLATILE - {"architectures"})):
        mine, other = there.get(name), here.get(name)
        if mine == other:
            continue
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            inner = _differences(mine, other, f"{at}{name}.")
            differ += inner[0]
            alone += inner[1]
        elif (mine is None or other is None) and name not in TELLING:
            alone.append(f"{at}{name}")
        else:
            differ.append(f"{at}{name} is {_said(mine)} there, {_said(other)} here")
    return differ, alone


def _said(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more
