"""From logical parts to memory order: a page as streams of panels, and a panel as nested axes.

A panel holds parts that share their outer axes and lie behind each other inside them:

    outer (head, token), inner k (dim), v (dim)            | k k k v v v | k k k v v v | ...   packed
    outer (),            inner k (token, head, dim), v ...  | k k k k k k k | v v v v v v |     paged
    outer (head),        inner k (dim, token), v (token, dim)                                  transposed
    outer (tap),         inner x (channel), B (channel)     | x x x x B B | x x x x B B | ...   conv as (tap, dim)

A stream is a stack of panels that fills a page of its own region. Knows no layer kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ManifestError
from kvferry.manifest.schema import Axis, Element, Shape, TokenAxis


@dataclass(frozen=True)
class Extent:
    """An axis before it has a place in memory: global size, owned interval, leading indices that prefill writes."""

    name: str
    size: int
    start: int
    stop: int
    live: int | None = None

    @property
    def count(self) -> int:
        return self.stop - self.start


def whole(name: str, size: int, live: int | None = None) -> Extent:
    return Extent(name, size, 0, size, live)


@dataclass(frozen=True)
class PartSpec:
    """A part before it has a place in memory. `per_entry` is the tokens one entry stands for; 0: no token axis. `partial`
    as in the manifest."""

    name: str
    element: Element
    extents: tuple[Extent, ...]
    per_entry: int = 0
    partial: bool = False


@dataclass(frozen=True)
class Panel:
    """Parts with their inner axis orders, outermost first, inside the shared `outer` axes."""

    parts: tuple[tuple[PartSpec, tuple[str, ...]], ...]
    outer: tuple[str, ...] = ()


Stream = tuple[Panel, ...]


@dataclass(frozen=True)
class PlacedPart:
    """A part in its page: its stream, its offset there, and its strides."""

    name: str
    stream: int
    offset: int
    shape: Shape


@dataclass(frozen=True)
class Page:
    """One layer's block: bytes per stream, and the parts in them."""

    stream_bytes: tuple[int, ...]
    parts: tuple[PlacedPart, ...]


def lay_out(streams: Sequence[Stream], tokens: int = 0, kernel_blocks: int = 1) -> Page:
    """Give every part its strides. `tokens` per block, cut into `kernel_blocks`; 0 for a page that holds a state."""
    placed: list[PlacedPart] = []
    sizes: list[int] = []
    for index, stream in enumerate(streams):
        at = 0
        offsets: list[tuple[PartSpec, int, dict[str, int]]] = []
        for panel in stream:
            panel_bytes, inside = _panel(panel, tokens // kernel_blocks)
            offsets += [(part, at + offset, strides) for part, offset, strides in inside]
            at += panel_bytes
        sizes.append(at * kernel_blocks)
        placed += [
            PlacedPart(part.name, index, offset, _shape(part, strides, tokens, kernel_blocks, at))
            for part, offset, strides in offsets
        ]
    return Page(tuple(sizes), tuple(placed))


def _counts(part: PartSpec, kernel_tokens: int) -> dict[str, int]:
    counts = {e.name: e.count for e in part.extents}
    if part.per_entry:
        entries, rest = divmod(kernel_tokens, part.per_entry)
        if rest or not entries:
            raise ManifestError(
                f"part {part.name}: a kernel block of {kernel_tokens} tokens does not hold whole entries of "
                f"{part.per_entry} tokens; choose a block that is a multiple of {part.per_entry}"
            )
        counts["token"] = entries
    return counts


def _panel(panel: Panel, kernel_tokens: int) -> tuple[int, list[tuple[PartSpec, int, dict[str, int]]]]:
    """Bytes of the panel, and for each part its offset and strides by axis."""
    inside: list[tuple[PartSpec, int, dict[str, int]]] = []
    cell = 0
    shared: dict[str, int] = {}
    for part, order in panel.parts:
        counts = _counts(part, kernel_tokens)
        if sorted((*panel.outer, *order)) != sorted(counts):
            raise ManifestError(f"part {part.name}: axes {sorted(counts)} are laid out as {[*panel.outer, *order]}")
        running = part.element.bytes
        strides: dict[str, int] = {}
        for name in reversed(order):
            strides[name] = running
            running *= counts[name]
        inside.append((part, cell, strides))
        cell += running
        for name in panel.outer:
            if shared.setdefault(name, counts[name]) != counts[name]:
                raise ManifestError(f"part {part.name}: axis {name} is shared in its panel but has another count there")
    for name in reversed(panel.outer):
        for _, _, strides in inside:
            strides[name] = cell
        cell *= shared[name]
    return cell, inside


def _shape(part: PartSpec, strides: dict[str, int], tokens: int, kernel_blocks: int, kernel_page: int) -> Shape:
    axes = tuple(Axis(e.name, e.size, e.start, e.stop, ((e.count, strides[e.name]),), e.live) for e in part.extents)
    token = None
    if part.per_entry:
        entries = tokens // kernel_blocks // part.per_entry
        partial = part.partial if part.per_entry > 1 else None
        token = TokenAxis(((kernel_blocks, kernel_page), (entries, strides["token"])), part.per_entry, partial)
    return Shape(part.element, axes, token)
