"""A small bar chart as SVG: how many times faster than each baseline, with a line where both are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log10
from xml.sax.saxutils import escape

_ROW = 18
_BAR = 14
_BETWEEN = 10
_LETTER = 7
_WIDTH = 420
_MARGIN = 60
_COLOURS = ("#3367a8", "#d08a3c", "#6a9a5b", "#8a6fa8")
_WIDE = 30.0


@dataclass(frozen=True)
class Bar:
    """One ratio of one case to one baseline; None where there is nothing to compare with."""

    case: str
    baseline: str
    ratio: float | None


def svg(title: str, bars: Sequence[Bar]) -> str:
    """Ratios on a logarithmic axis where they are far apart, on a linear one otherwise."""
    baselines = list(dict.fromkeys(bar.baseline for bar in bars))
    ratios = [bar.ratio for bar in bars if bar.ratio]
    axis = _Axis(min([1.0, *ratios]), max([1.0, *ratios]))
    cases = [(case, list(found)) for case, found in groupby(bars, lambda bar: bar.case)]
    left = 20 + _LETTER * max((len(case) for case, _ in cases), default=0)
    width = max(left + _WIDTH + 90, 24 + 9 * len(title), 12 + sum(map(_legend, baselines)))
    bottom = _MARGIN + _ROW * len(bars) + _BETWEEN * len(cases)
    height = bottom + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    x = 12
    for i, baseline in enumerate(baselines):
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{_COLOURS[i % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{x + 17}" y="44">{escape(baseline)}</text>')
        x += _legend(baseline)
    y = _MARGIN
    for case, found in cases:
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(case)}</text>')
        for bar in found:
            parts += _drawn(bar, left, y, axis, _COLOURS[baselines.index(bar.baseline) % len(_COLOURS)])
            y += _ROW
        y += _BETWEEN
    equal = left + axis.at(1.0)
    parts.append(f'<line x1="{equal:.1f}" x2="{equal:.1f}" y1="{_MARGIN - 6}" y2="{bottom}" stroke="#333333"/>')
    parts.append(f'<text x="{equal:.1f}" y="{bottom + 16}" text-anchor="middle">as fast{axis.remark}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _drawn(bar: Bar, left: int, y: int, axis: _Axis, colour: str) -> tuple[str, ...]:
    if bar.ratio is None:
        return (f'<text x="{left + 4}" y="{y + 12}" fill="#777777">none</text>',)
    long = max(axis.at(bar.ratio), 1.0)
    return (
        f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{_BAR}" fill="{colour}"/>',
        f'<text x="{left + long + 5:.1f}" y="{y + 12}">{_shown(bar.ratio)}</text>',
    )


def _legend(baseline: str) -> int:
    return 40 + _LETTER * len(baseline)


class _Axis:
    def __init__(self, low: float, high: float) -> None:
        self._wide = high > _WIDE
        self._low, self._high = (log10(low / 2), log10(high)) if self._wide else (0.0, high)
        self.remark = " (logarithmic)" if self._wide else ""

    def at(self, ratio: float) -> float:
        value = log10(ratio) if self._wide else ratio
        return (value - self._low) / (self._high - self._low) * _WIDTH


def _shown(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}"
