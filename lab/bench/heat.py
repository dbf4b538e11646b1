"""Cells as a heat map in SVG: how many times longer than the best of its row each strategy took, and which one is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from xml.sax.saxutils import escape

_LEFT = 330
_WIDE = 118
_HIGH = 24
_TOP = 78
_HOT = 30.0


@dataclass(frozen=True)
class Row:
    """A request: its name, seconds by strategy, the strategy that is chosen, and what is said of those without seconds."""

    name: str
    seconds: dict[str, float]
    chosen: str
    missing: Mapping[str, str] = field(default_factory=dict)


def svg(title: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
    width, height = _LEFT + _WIDE * len(columns) + 20, _TOP + _HIGH * len(rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        '<text x="12" y="42" fill="#555555">milliseconds; white: best of its row, dark: 30 times longer; framed: chosen</text>',
    ]
    for i, name in enumerate(columns):
        x = _LEFT + _WIDE * i + _WIDE / 2
        parts.append(f'<text x="{x:.0f}" y="{_TOP - 8}" text-anchor="middle" font-weight="bold">{escape(name)}</text>')
    for j, row in enumerate(rows):
        y = _TOP + _HIGH * j
        best = min(row.seconds.values())
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(row.name)}</text>')
        for i, name in enumerate(columns):
            seconds = row.seconds.get(name)
            if seconds is None:
                parts.append(_said(_LEFT + _WIDE * i, y, row.missing.get(name, "too long")))
            else:
                parts += _cell(_LEFT + _WIDE * i, y, seconds, best, name == row.chosen)
    return "\n".join([*parts, "</svg>\n"])


def _said(x: int, y: int, words: str) -> str:
    return f'<text x="{x + _WIDE / 2:.0f}" y="{y + 16}" text-anchor="middle" fill="#999999">{escape(words)}</text>'


def _cell(x: int, y: int, seconds: float, best: float, chosen: bool) -> list[str]:
    heat = min(1.0, log(seconds / best) / log(_HOT)) if seconds > best else 0.0
    red, green, blue = (round(255 - heat * (255 - end)) for end in (150, 50, 40))
    frame = ' stroke="#1f4f8a" stroke-width="2.5"' if chosen else ' stroke="#dddddd"'
    ink = "#ffffff" if heat > 0.6 else "#111111"
    size = f'x="{x + 2}" y="{y + 2}" width="{_WIDE - 4}" height="{_HIGH - 4}"'
    shown = f"{1000 * seconds:,.2f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"
    return [
        f'<rect {size} fill="#{red:02x}{green:02x}{blue:02x}"{frame}/>',
        f'<text x="{x + _WIDE / 2:.0f}" y="{y + 16}" text-anchor="middle" fill="{ink}">{shown}</text>',
    ]
