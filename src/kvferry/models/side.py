"""One side of a transfer as a person writes it (``tp=2,pp=2,block=16``); knows no model and no manifest."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Final

from kvferry.errors import SideError
from kvferry.manifest.kinds import Layout

_NUMBERS: Final = {"tp": (1, 1024), "pp": (1, 1024), "block": (1, 1 << 16), "spec": (0, 64)}
_CHOICES: Final[dict[str, tuple[str, dict[str, str | bool]]]] = {
    "layout": ("order", {"head": "head", "token": "token"}),
    "conv": ("conv", {"ds": "ds", "sd": "sd"}),
    "kv": ("kv", {"packed": "packed", "paged": "paged", "separate": "separate", "transposed": "transposed"}),
    "pool": ("pool", {"layer": "layer", "block": "block"}),
    "hma": ("overlay", {"on": True, "off": False}),
}
_KEYS: Final = ("tp", "pp", "block", "layout", "conv", "spec", "kv", "pool", "hma")
_EXAMPLE: Final = "write it like tp=2,pp=2,block=16"


@dataclass(frozen=True)
class Side:
    """How one side runs a model: tensor- and pipeline-parallel sizes and its memory layout."""

    tp: int = 1
    pp: int = 1
    layout: Layout = field(default_factory=Layout)

    @classmethod
    def parse(cls, text: str) -> Side:
        """Read `tp=2,pp=2[,block=16][,layout=head|token][,conv=ds|sd][,spec=0]` and `kv`, `pool`, `hma`; sizes default to 1."""
        found: dict[str, str | int | bool] = {}
        for item in text.split(","):
            key, equals, value = (piece.strip() for piece in item.partition("="))
            if not equals:
                raise SideError(f"side {text!r}: {item.strip()!r} is not key=value; {_EXAMPLE}")
            if key in found:
                raise SideError(f"side {text!r}: {key} is given twice")
            found[key] = _value(text, key, value)
        tp, pp = (int(found.pop(key, 1)) for key in ("tp", "pp"))
        layout = {_CHOICES[key][0] if key in _CHOICES else key: value for key, value in found.items()}
        return cls(tp, pp, Layout(**layout))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text that parses to this side, without what has its default."""
        shown = [f"tp={self.tp}", f"pp={self.pp}"]
        defaults = {f.name: f.default for f in fields(Layout)}
        for key in _KEYS[2:]:
            name, words = _CHOICES.get(key, (key, {}))
            value = getattr(self.layout, name)
            if value != defaults[name]:
                shown.append(f"{key}={next((word for word, meaning in words.items() if meaning == value), value)}")
        return ",".join(shown)


def _value(text: str, key: str, value: str) -> str | int | bool:
    if key in _NUMBERS:
        least, most = _NUMBERS[key]
        if not (value.isascii() and value.isdigit() and len(value) < 8 and least <= int(value) <= most):
            raise SideError(f"side {text!r}: {key} is {value!r}; a whole number from {least} to {most:,} is needed")
        return int(value)
    if key in _CHOICES:
        words = _CHOICES[key][1]
        if value not in words:
            raise SideError(f"side {text!r}: {key} is {value!r}; choose {' or '.join(words)}")
        return words[value]
    near = difflib.get_close_matches(key, _KEYS, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
    raise SideError(f"side {text!r}: there is no key {key!r}; {hint}")
