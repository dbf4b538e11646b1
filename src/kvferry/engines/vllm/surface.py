"""The part of vLLM's and torch's objects that the adapter reads, as protocols, so that neither is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Storage(Protocol):
    def data_ptr(self) -> int: ...

    def nbytes(self) -> int: ...


class Device(Protocol):
    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


class Tensor(Protocol):
    """A torch tensor; `dtype` is known by how it prints (`torch.float32`)."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    @property
    def device(self) -> Device: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...

    def data_ptr(self) -> int: ...

    def untyped_storage(self) -> Storage: ...


class Group(Protocol):
    """A KVCacheGroupSpec; the fields of its spec depend on the spec's class."""

    @property
    def layer_names(self) -> Sequence[str]: ...

    @property
    def kv_cache_spec(self) -> Any: ...

    @property
    def host_resident(self) -> bool: ...

    @property
    def enable_kv_transfer(self) -> bool: ...


class KVCacheConfig(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def kv_cache_groups(self) -> Sequence[Group]: ...


class VllmConfig(Protocol):
    """The configuration; its inner objects are read field by field, each with a named refusal where one is absent."""

    @property
    def model_config(self) -> Any: ...

    @property
    def cache_config(self) -> Any: ...

    @property
    def parallel_config(self) -> Any: ...

    @property
    def compilation_config(self) -> Any: ...

    @property
    def speculative_config(self) -> Any: ...


Layers = Mapping[str, Any]
"""Layer objects by name: the static forward context."""
