"""Typed access to the keys of a config.json: whatever is missing or wrong becomes a ModelError that names the key."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.errors import ModelError

MAX_LAYERS: Final = 1024
MAX_NUMBER: Final = 1 << 24
CACHE_DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Fields:
    """One object of a config.json; `at` is its place there (``text_config.``). A null is a key that is absent."""

    values: Mapping[str, object]
    model: str
    at: str = ""

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.model}: {self.at}{key} {problem}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_NUMBER) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(key, f"is {reprlib.repr(value)}; a whole number from {least} to {most:,} is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {reprlib.repr(value)}; true or false is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {reprlib.repr(value)}; a string is needed")
        return value

    def section(self, key: str) -> Fields:
        value = self._value(key, None)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {reprlib.repr(value)}; an object with keys is needed")
        return Fields(value, self.model, f"{self.at}{key}.")

    def items(self, key: str, length: int | None = None) -> Sequence[object]:
        """A list, of exactly `length` items where that is given."""
        value = self._value(key, None)
        if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
            raise self.error(key, f"is {reprlib.repr(value)}; a list of at most {MAX_LAYERS:,} items is needed")
        if length is not None and len(value) != length:
            raise self.error(key, f"has {len(value)} items, but the model has {length} layers; one per layer is needed")
        return value

    def indices(self, key: str, layers: int, base: int = 0) -> frozenset[int]:
        """A list of layer indices that count from `base`, as indices that count from 0."""
        found = set()
        for item in self.items(key):
            if not isinstance(item, int) or isinstance(item, bool) or not base <= item < layers + base:
                raise self.error(key, f"holds {reprlib.repr(item)}; layers are counted from {base} to {layers + base - 1}")
            found.add(item - base)
        return frozenset(found)

    def words(self, key: str, layers: int | None, known: Mapping[str, str]) -> tuple[str, ...]:
        """A list with a word per layer, each translated by `known`; if `layers` is None, the list says how many there are."""
        words = []
        for i, item in enumerate(self.items(key, layers)):
            if not isinstance(item, str) or item not in known:
                raise self.error(f"{key}[{i}]", f"is {reprlib.repr(item)}; known are {', '.join(known)}")
            words.append(known[item])
        return tuple(words)

    def dtype(self, *keys: str, default: str) -> str:
        """The first of `keys` that is present; engines keep a cache in one of three dtypes unless told otherwise."""
        key = next((k for k in keys if self.has(k)), keys[0])
        value = self.text(key, default).removeprefix("torch.")
        if value not in CACHE_DTYPES:
            raise self.error(key, f"is {reprlib.repr(value)}; a cache is kept in {', '.join(CACHE_DTYPES)}")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing from the config; use the config.json that was published with the checkpoint")
        return value
