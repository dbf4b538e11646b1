"""The order in which tiles are copied: behind each other here, so that whatever can merge with its neighbour lies beside it.

Engines hand out blocks in any order, descending ones among them. Two runs merge where the second follows the first on both
sides; a place here is written once, so that in the order of places here every run that has such a neighbour meets it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvferry.plan import Tiles


def ascending(tiles: Mapping[tuple[int, int], Tiles]) -> Mapping[tuple[int, int], Tiles]:
    """The same tiles, those of every grain by their place here; grains that share their tiles go on sharing them."""
    sorted_: dict[int, Tiles] = {}
    for found in tiles.values():
        if id(found) not in sorted_:
            sorted_[id(found)] = _ascending(found)
    return {key: sorted_[id(found)] for key, found in tiles.items()}


def _ascending(tiles: Tiles) -> Tiles:
    block, tile = tiles.dst_block, tiles.dst_tile
    if (block[1:] > block[:-1]).all():
        return tiles
    place = block.astype(np.int64) * (int(tile.max()) + 1) + tile
    if (place[1:] >= place[:-1]).all():
        return tiles
    order = np.argsort(place)
    return Tiles(tiles.src_block[order], tiles.src_tile[order], block[order], tile[order])
