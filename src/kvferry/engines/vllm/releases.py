"""What differs between releases of vLLM. The one file that compares their numbers.

What a release has, a probe tells. What a release does, no probe can tell: when it zeroes blocks, when it hashes them, and what
it undoes of a load that is lost. What rests on that is off in a release that no recorded run has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from kvferry.engines.vllm.evidence import recorded
from kvferry.errors import KVFerryError

OLDEST: Final = "0.31"
ASKING: Final = "0.32"
"""The first that asks which groups of blocks are loaded."""
CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
NEEDED: Final = (
    (CONNECTORS, "KVConnectorBase_V1"),
    (CONNECTORS, "KVConnectorHandshakeMetadata"),
    (CONNECTORS, "KVConnectorTransferResults"),
    (CONNECTORS, "KVConnectorWorkerMetadata"),
    (CONNECTORS, "SupportsHMA"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics"),
    ("vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout"),
)
"""Without one of these there is no connector."""
MOVED: Final = {
    "get_kv_cache_config_from_groups": ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"),
    "make_arg_parser": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"),
}
"""Where releases have functions that `kvferry certify` and the launcher of engines call."""
IN_STEP: Final = "loads in the step that computes them"
LAGGING: Final = "prefix hits that attention has and recurrent states have not"


class ReleaseError(KVFerryError):
    """This release of vLLM cannot be served."""


@dataclass(frozen=True)
class Release:
    """A release of vLLM, as far as KVFerry depends on it."""

    version: str
    is_seen: bool
    asks_what_is_loaded: bool
    """It asks which groups of blocks are loaded, and zeroes none of them. Else it goes by token numbers, and zeroes states."""

    @property
    def off(self) -> tuple[str, ...]:
        return () if self.is_seen else (IN_STEP, LAGGING)

    def __str__(self) -> str:
        if self.is_seen:
            return f"vLLM {self.version}"
        seen = ", ".join(sorted(seen_releases()))
        return f"vLLM {self.version} was not seen by any recorded run (seen: {seen}): off are {' and '.join(self.off)}"


@lru_cache(maxsize=1)
def this_release() -> Release:
    """The vLLM of this process; raises ReleaseError where it cannot be served."""
    version = str(_module("vllm.version").__version__)
    if not is_served(version):
        raise ReleaseError(f"vLLM {version} is too old: KVFerry needs {OLDEST} or newer, and was seen with {_seen()}")
    absent = [f"{module}.{name}" for module, name in NEEDED if not hasattr(_module(module), name)]
    if absent:
        raise ReleaseError(
            f"vLLM {version} has no {', '.join(absent)}, without which KVFerry cannot serve: it was seen with {_seen()}. "
            "Upgrade KVFerry, or run one of these releases"
        )
    base = _module(CONNECTORS).KVConnectorBase_V1
    return Release(
        version,
        is_seen(version),
        hasattr(base, "get_loaded_kv_cache_group_ids"),
    )


def hit_source() -> Any:
    """What vLLM calls a prefix hit that came from another engine, or what it takes for granted; None if it does not ask."""
    found = getattr(_module("vllm.v1.metrics.cache_hit_source"), "CacheHitSource", None)
    return getattr(found, "P2P", getattr(_module(CONNECTORS).KVConnectorBase_V1, "_cache_hit_source", None))


def place_of(name: str) -> Any:
    """A function of vLLM's that has moved from module to module."""
    found = next((module for place in MOVED[name] if hasattr(module := _module(place), name)), None)
    if found is None:
        raise ReleaseError(f"vLLM has no {name} in {' or '.join(MOVED[name])}: it was seen with {_seen()}")
    return getattr(found, name)


def missing(error: ImportError) -> ReleaseError:
    """A name that no probe knows of has gone."""
    version = getattr(_module("vllm.version"), "__version__", "of this environment")
    return ReleaseError(
        f"vLLM {version} is not as KVFerry knows it: {error}. It was seen with {_seen()}: upgrade KVFerry, or run one of these"
    )


def is_served(version: str) -> bool:
    return order_of(version) >= order_of(OLDEST)


def asks_what_is_loaded(version: str) -> bool:
    """As `Release.asks_what_is_loaded`, of a release that is not here."""
    return order_of(version) >= order_of(ASKING)


def is_seen(version: str) -> bool:
    return release_of(version) in seen_releases()


def seen_releases() -> frozenset[str]:
    """Those that runs have recorded."""
    return frozenset(release_of(run.vllm) for run in recorded())


def release_of(version: str) -> str:
    """Patch releases keep what caches look like."""
    return ".".join(version.split(".")[:2])


def customized(backend: Any, spec: Any) -> Any:
    """A layer's cache spec as its backend wants it; releases before 0.32 had none that wants another."""
    customize = getattr(_module("vllm.v1.worker.utils"), "customize_attention_spec", None)
    return spec if customize is None else customize(backend, spec)


def zeroes_loads(version: str) -> tuple[str, str]:
    """What is wrong with a model whose blocks such a release zeroes, and the way out."""
    return (
        f"vLLM {version} zeroes blocks of this model after they were loaded (recurrent states, or caches of unlike dtypes)",
        "upgrade vLLM to 0.32 or newer, or run this model without disaggregation",
    )


def unserved(release: Release, zeroes: bool) -> Iterator[tuple[str, str]]:
    """What an engine of this release asks for that it cannot have, and the way out; `zeroes`: it zeroes blocks it hands out."""
    if zeroes and not release.asks_what_is_loaded:
        yield zeroes_loads(release.version)


def _seen() -> str:
    return ", ".join(sorted(seen_releases()))


def order_of(version: str) -> tuple[int, ...]:
    """What sorts releases by age."""
    return tuple(int(piece) if piece.isdigit() else 0 for piece in release_of(version).split("."))


def _module(name: str) -> Any:
    """A module, or something without any names."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None
