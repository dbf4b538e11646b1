"""Tiles of a grain, and its runs at them: from a block and a place in it to where bytes lie, on either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.plan.columns import expanded
from kvferry.plan.overlay import Ids
from kvferry.plan.schema import Grain, Lane
from kvferry.strided import Ints, size, split


@dataclass(frozen=True)
class Tiles:
    """Tiles of one edge at one grain: block id and place in the block, on either side."""

    src_block: Ids
    src_tile: Ids
    dst_block: Ids
    dst_tile: Ids


class _Side:
    """One side of a tile's runs: where each lies in tile 0 of block 0, and the lane that it travels by."""

    def __init__(self, region: Ints, offset: Ints, lane: Ints, lanes: Sequence[Lane]) -> None:
        used, self._which = np.unique(lane, return_inverse=True)
        self._region, self._offset = region, offset[:, None]
        self._lanes = [lanes[index] for index in used.tolist()]

    def at(self, block: Ids, tile: Ids) -> tuple[Ints, Ints]:
        """Region and offset of every run at every tile."""
        block, tile = block.astype(np.int64, copy=False), tile.astype(np.int64, copy=False)
        rows = [travelled(lane, block, tile) for lane in self._lanes]
        moved = rows[0] if len(rows) == 1 else np.array(rows)[self._which]
        return self._region.repeat(len(block)), (moved + self._offset).reshape(-1)


class Runs:
    """The runs of one tile of a grain, with what follows from the plan alone."""

    def __init__(self, grain: Grain, lanes: Sequence[Lane]) -> None:
        self.columns = expanded(grain.runs)
        self.bytes = int(self.columns.length.sum())
        self._lanes = lanes

    def __len__(self) -> int:
        return len(self.columns)

    def ready(self) -> None:
        _ = self._there, self._here, self._fills_blocks, self._touch

    def at(self, tiles: Tiles) -> tuple[Ints, ...]:
        """Every run at every tile: a run's tiles behind each other, so that consecutive blocks can be merged."""
        tiles, length = self._long(tiles)
        return (*self._there.at(tiles.src_block, tiles.src_tile), *self._here.at(tiles.dst_block, tiles.dst_tile), length)

    def filled(self, block: Ids, tile: Ids) -> tuple[Ints, ...]:
        """As `at`, of a fill: both of its sides are the destination."""
        tiles, length = self._long(Tiles(block, tile, block, tile))
        return (*self._here.at(tiles.dst_block, tiles.dst_tile), length)

    def filled_on(self, block: Ids, tile: Ids) -> tuple[Ints, ...]:
        """As `filled`, of tiles that follow each other in one block: a run for all of them where runs of neighbours touch."""
        if len(tile) < 2 or not self._touch:
            return self.filled(block, tile)
        return (*self._here.at(block[:1], tile[:1]), self.columns.length * len(tile))

    def _long(self, tiles: Tiles) -> tuple[Tiles, Ints]:
        """The tiles, and the lengths of all runs at each: consecutive blocks are one where all runs fill their blocks, before
        runs multiply them."""
        if not self._fills_blocks:
            return tiles, self.columns.length.repeat(len(tiles.src_block))
        tiles, joined = _consecutive(tiles)
        return tiles, (self.columns.length[:, None] * joined).reshape(-1)

    @cached_property
    def _there(self) -> _Side:
        return _Side(self.columns.src_region, self.columns.src_offset, self.columns.src_lane, self._lanes)

    @cached_property
    def _here(self) -> _Side:
        return _Side(self.columns.dst_region, self.columns.dst_offset, self.columns.dst_lane, self._lanes)

    @cached_property
    def _touch(self) -> bool:
        """Whether every run ends where the next tile of its block has the same run at the destination."""
        steps = [lane.digits[0][1] if len(lane.digits) == 1 else 0 for lane in self._lanes]
        return np.array_equal(self.columns.length, np.array(steps, np.int64)[self.columns.dst_lane])

    @cached_property
    def _fills_blocks(self) -> bool:
        """Whether a tile is a whole block on either side, and every run as long as blocks are apart: only then are blocks
        whose ids follow each other one stretch of memory. A tile of a block has neighbours in its own block."""
        apart = np.array([lane.block_stride if size(lane.digits) == 1 else 0 for lane in self._lanes], np.int64)
        sides = self.columns.src_lane, self.columns.dst_lane
        return all(np.array_equal(self.columns.length, apart[side]) for side in sides)


def travelled(lane: Lane, block: Ints, tile: Ints) -> Ints:
    """How many bytes a lane leads from tile 0 of block 0 to every tile."""
    far = block * lane.block_stride
    for stride, digit in split(lane.digits, tile):
        far += digit * stride
    return far


def _consecutive(tiles: Tiles) -> tuple[Tiles, Ints]:
    """The first of every stretch of whole blocks that follow each other on both sides, and how many they are."""
    breaks = (np.diff(tiles.src_block) != 1) | (np.diff(tiles.dst_block) != 1)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    count = np.diff(np.append(first, len(tiles.src_block)))
    return Tiles(tiles.src_block[first], tiles.src_tile[first], tiles.dst_block[first], tiles.dst_tile[first]), count
