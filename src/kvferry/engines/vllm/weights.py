"""What tells a checkpoint's weights from others of its configuration, without reading them all.

Every tensor's name, type and shape counts, and a few kilobytes from the middle of each of thousands of them: training moves
nearly all tensors, so that two fine-tunes differ in some of these. How tensors are dealt to files, and what these are called,
does not count: the same checkpoint is the same wherever it lies.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvferry.errors import SessionError

MOST_SAMPLES: Final = 4096
SAMPLE: Final = 4096
PIECES: Final = 64
MAX_HEADER: Final = 100 << 20
SHOWN: Final = 16

INDEX: Final = "model.safetensors.index.json"
OTHERS: Final = ("*.bin", "*.pt", "*.pth", "*.gguf")
NOT_WEIGHTS: Final = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
"""What trainers leave beside the weights."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file: its header's entry as text, and the bytes [start, stop) of the file."""

    said: str
    file: Path
    start: int
    stop: int


def digest_of(place: Path) -> str:
    """Of a checkpoint's folder, or of its one file; empty where there are no weights. Raises SessionError, OSError."""
    files = _files(place)
    tensors = [tensor for file in files for tensor in _tensors(file)]
    tensors.sort(key=lambda tensor: tensor.said)
    if not tensors:
        return ""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(struct.pack("<q", len(tensor.said)))
        state.update(tensor.said.encode())
    for tensor, data in _samples(tensors):
        state.update(struct.pack("<q", tensor.stop - tensor.start))
        state.update(data)
    return state.hexdigest()[:SHOWN]


def _files(place: Path) -> list[Path]:
    """Those that engines load: a folder may hold the same weights a second time, in another form."""
    if place.is_file():
        return [place]
    index = place / INDEX
    if index.is_file():
        named = json.loads(index.read_bytes())["weight_map"].values()
        return [place / name for name in sorted(set(named))]
    safe = sorted(place.glob("*.safetensors"))
    if safe:
        return [file for file in safe if not file.name.startswith("consolidated")] or safe
    for pattern in OTHERS:
        found = sorted(file for file in place.glob(pattern) if file.name not in NOT_WEIGHTS)
        if found:
            return found
    return []


def _tensors(file: Path) -> Iterator[_Tensor]:
    """Of a format that is not looked into, the file's pieces."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        borders = [size * piece // PIECES for piece in range(PIECES + 1)]
        for piece, (start, stop) in enumerate(pairwise(borders)):
            yield _Tensor(f"{file.name} {size} {piece:06}", file, start, stop)
        return
    with file.open("rb") as opened:
        header, first = _header(file, opened, size)
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (first + at for at in entry["data_offsets"])
            if not first <= start <= stop <= size:
                raise SessionError(f"{file}: the tensor {name} lies outside of the file; is it whole?")
            yield _Tensor(f"{name} {entry['dtype']} {entry['shape']}", file, start, stop)


def _header(file: Path, opened: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(opened.read(8), "little")
    if not 0 < length <= min(MAX_HEADER, size - 8):
        raise SessionError(f"{file}: not a safetensors file, or a part of one: a header of {length:,} bytes")
    found: dict[str, Any] = json.loads(opened.read(length))
    return found, 8 + length


def _samples(tensors: Sequence[_Tensor]) -> Iterator[tuple[_Tensor, bytes]]:
    """The middle of every tensor, or of some of them, evenly spread."""
    step = -(-len(tensors) // MOST_SAMPLES)
    with ExitStack() as stack:
        opened: dict[Path, BinaryIO] = {}
        for tensor in tensors[::step]:
            if tensor.file not in opened:
                opened[tensor.file] = stack.enter_context(tensor.file.open("rb", buffering=0))
            taken = min(SAMPLE, tensor.stop - tensor.start)
            opened[tensor.file].seek(tensor.start + (tensor.stop - tensor.start - taken) // 2)
            yield tensor, opened[tensor.file].read(taken)
