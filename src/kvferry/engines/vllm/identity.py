"""Which model an engine serves, and which adapter a request asks for: short texts that are equal on both sides of a pair and
on no others."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvferry.engines.vllm.weights import SHOWN, digest_of
from kvferry.errors import SessionError

logger = logging.getLogger("kvferry.vllm")

VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"})
ADAPTER_CONFIG: Final = "adapter_config.json"
ABOUT_THE_BASE: Final = frozenset({"base_model_name_or_path", "revision", "peft_version", "inference_mode"})

_NAME: Final = 96


def fingerprint(config: Any, weights: str = "") -> str:
    """The model's class, a digest of its configuration, and what tells its weights from others: `weights` if the operator has
    named them."""
    model = config.model_config
    names = "+".join(getattr(model.hf_config, "architectures", None) or ["model"])[:_NAME]
    text = json.dumps(_kept(model.hf_config.to_dict()), sort_keys=True, default=str)
    return f"{names} (configuration {_short(text)}, weights {_fitting(weights or _weights(config))})"


def _kept(said: Any) -> Any:
    """A configuration without what differs between places that the same model lies in, or between versions that wrote it."""
    if isinstance(said, dict):
        return {name: _kept(value) for name, value in said.items() if name not in VOLATILE}
    return [_kept(value) for value in said] if isinstance(said, list | tuple) else said


def _weights(config: Any) -> str:
    """A digest of the checkpoint, wherever it lies; its name and revision where it cannot be read."""
    model, load = config.model_config, config.load_config
    if load.load_format == "dummy":
        return "dummy"
    name = str(getattr(model, "model_weights", "") or model.model)
    found = _digest(name, model.revision, load.download_dir)
    if not found:
        logger.warning("the weights of %s are not found here: they are told by this name and revision %s", name, model.revision)
    return found or f"{name}@{model.revision or 'main'}"


def adapter_of(lora: Any) -> str:
    """Its name, and a digest of what it consists of where that can be read."""
    if lora is None:
        return ""
    place = _place(lora.lora_path, None, None)
    return f"{lora.lora_name} {_adapter_at(place, _changed(place)) if place is not None else ''}".strip()


@lru_cache(maxsize=1024)
def _adapter_at(place: Path, changed: int) -> str:
    """`changed` makes an adapter that was written anew another one."""
    said = place / ADAPTER_CONFIG
    try:
        config = json.loads(said.read_bytes()) if said.is_file() else {}
        kept = {name: value for name, value in config.items() if name not in ABOUT_THE_BASE}
        found = digest_of(place)
        return _short(f"{json.dumps(kept, sort_keys=True)} {found}") if found else ""
    except (OSError, SessionError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the adapter at %s cannot be read (%s): it is told by its name", place, error)
        return ""


def _changed(place: Path) -> int:
    try:
        return max((file.stat().st_mtime_ns for file in place.iterdir()), default=0) if place.is_dir() else 0
    except OSError:
        return 0


def _digest(name: str, revision: str | None, cache: str | None) -> str:
    place = _place(name, revision, cache)
    if place is None:
        return ""
    try:
        return digest_of(place)
    except (OSError, SessionError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the weights at %s cannot be read: %s", place, error)
        return ""


def _place(name: str, revision: str | None, cache: str | None) -> Path | None:
    try:
        return _found(name, revision, cache)
    except (ImportError, OSError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _found(name: str, revision: str | None, cache: str | None) -> Path:
    """Where a checkpoint lies: as named, or in the cache of what was downloaded; raises where it is not there yet."""
    place = Path(name)
    if place.exists():
        return place
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:SHOWN]


def _fitting(text: str) -> str:
    return text if len(text) <= _NAME else _short(text)
