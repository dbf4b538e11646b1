"""What the demo carries: global tensors made from a seed, laid into a rank's memory and looked up there by strides alone.

Knows manifests and NumPy's strides, and nothing of plans: what a plan moved is compared with what it should have been.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from kvferry.manifest import HOLE, Layer, Manifest, Part, Shape
from kvferry.manifest.schema import Group

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Cargo:
    """One request: a seed for its state, the tokens it has, and the blocks it has on one side by group."""

    seed: int
    tokens: int
    tables: Mapping[int, Sequence[int]]


class Hold:
    """One rank's memory, region by region."""

    def __init__(self, manifest: Manifest, buffers: Sequence[Bytes]) -> None:
        self.manifest = manifest
        self.buffers = buffers

    def load(self, cargo: Cargo) -> None:
        """Write a request's state into its blocks, as if prefill had."""
        for layer, part, shape, group in _placed(self.manifest):
            view = self._view(part, shape, group)
            for block, content in self._contents(cargo, layer, part, shape, group):
                view[block] = content

    def differing_bytes(self, cargo: Cargo) -> tuple[int, int]:
        """Bytes of the request's blocks that are not as they should be, and bytes looked at."""
        wrong = looked = 0
        for layer, part, shape, group in _placed(self.manifest):
            view = self._view(part, shape, group)
            for block, content in self._contents(cargo, layer, part, shape, group, received=True):
                wrong += int((view[block] != content).sum())
                looked += content.size
        return wrong, looked

    def _view(self, part: Part, shape: Shape, group: Group) -> Bytes:
        """A part in all blocks: [block, token digits, axis digits, byte]."""
        dims = [(group.blocks, part.block_stride), *_dims(shape), (shape.element.bytes, 1)]
        return np.lib.stride_tricks.as_strided(
            self.buffers[part.region][part.offset :], [count for count, _ in dims], [stride for _, stride in dims]
        )

    def _contents(
        self, cargo: Cargo, layer: Layer, part: Part, shape: Shape, group: Group, received: bool = False
    ) -> Iterator[tuple[int, Bytes]]:
        """A request's blocks with what belongs there; in what was received, nothing follows the last token."""
        dims = [count for count, _ in _dims(shape)]
        if shape.token is None:
            tensor = _tensor(cargo.seed, layer, part, shape, 1)
            yield cargo.tables[group.id][0], tensor.reshape(*dims, shape.element.bytes)
            return
        table = cargo.tables[group.id]
        entries = shape.token.entries
        tensor = _tensor(cargo.seed, layer, part, shape, entries * len(table))
        if received:
            per_entry = shape.token.per_entry
            last = -(-cargo.tokens // per_entry) if shape.token.moves_partial else cargo.tokens // per_entry
            tensor[last:] = 0
        for place, block in enumerate(table):
            if block != HOLE:
                yield block, tensor[place * entries : (place + 1) * entries].reshape(*dims, shape.element.bytes)


def _placed(manifest: Manifest) -> Iterator[tuple[Layer, Part, Shape, Group]]:
    for layer in manifest.layers:
        for part in layer.parts:
            yield layer, part, manifest.shapes[part.shape], manifest.group(layer.group)


def _dims(shape: Shape) -> list[tuple[int, int]]:
    token = list(shape.token.digits) if shape.token else []
    return token + [digit for axis in shape.axes for digit in axis.digits]


def _tensor(seed: int, layer: Layer, part: Part, shape: Shape, entries: int) -> Bytes:
    """This rank's slice of a global tensor of random bytes: [entry, axes, byte]. A longer tensor begins like a shorter one."""
    sizes = [axis.size for axis in shape.axes]
    key = zlib.crc32(f"{layer.name} {part.name}".encode()) << 32 | seed
    one = prod(sizes) * shape.element.bytes
    whole = np.frombuffer(np.random.Generator(np.random.PCG64(key)).bytes(entries * one), np.uint8)
    owned = (slice(None), *(slice(axis.start, axis.stop) for axis in shape.axes))
    mine: Bytes = whole.reshape(entries, *sizes, shape.element.bytes)[owned].copy()
    return mine
