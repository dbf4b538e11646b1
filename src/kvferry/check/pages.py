"""Memory as planes of pages whose content is nobody's business: for whoever reads memory as such, to compare or to measure."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.manifest import Manifest
from kvferry.manifest.schema import Element, Group, Identity, Layer, Part, Rank, Region, Shape, StatePaged

Plane = tuple[int, int, int]
"""A region, the first byte, and the bytes of a page."""


def as_pages(engine: str, regions: Sequence[Region], planes: Sequence[Plane], blocks: int) -> Manifest:
    """One rank that holds `blocks` blocks in each of the planes, each page one cell."""
    sizes = sorted({size for _, _, size in planes})
    shapes = tuple(Shape(Element("opaque", size, opaque="page"), ()) for size in sizes)
    layers = tuple(
        Layer(f"plane{i}", 0, (Part("bytes", sizes.index(size), region, start, size),))
        for i, (region, start, size) in enumerate(planes)
    )
    identity = Identity(engine, "0", "pages", Rank())
    return Manifest(identity, tuple(regions), (Group(0, StatePaged(), blocks, hashed=False),), shapes, layers)
