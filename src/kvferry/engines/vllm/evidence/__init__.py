"""What runs of `kvferry certify` saw: vLLM's own cache-write ops at work, one JSON file a machine, kept with the package."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files

import msgspec


class Case(msgspec.Struct, frozen=True, array_like=True):
    """One cache that was written to: tokens a kernel block, kv heads, elements a token and head, distances of tokens and of
    heads in elements, bytes of an element, and a digest of every place where the op was seen to write."""

    tokens: int
    heads: int
    width: int
    pitch: int
    head_stride: int
    size: int
    digest: str


class Sighting(msgspec.Struct, frozen=True):
    """A backend's op in one cache format and cache layout, as the table of layouts has it, in every case; or `by` whom it
    was seen, where no cases were recorded."""

    backend: str
    isa: str
    form: str
    layout: str
    cases: tuple[Case, ...]
    by: str = ""


class Trouble(msgspec.Struct, frozen=True):
    """What was tried and did not run, or was seen to be otherwise than the table has it."""

    what: str
    why: str


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A check beside the ops: its name, and what it found to be so. `finds`: of what was spoiled in some way on purpose, how
    much the check called wrong, of how much."""

    what: str
    found: str
    finds: dict[str, tuple[int, int]] = {}


class Evidence(msgspec.Struct, frozen=True):
    """One run on one machine."""

    vllm: str
    torch: str
    device: str
    sightings: tuple[Sighting, ...] = ()
    states: tuple[Outcome, ...] = ()
    moves: tuple[Outcome, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    digest: str = ""
    engines: tuple[Outcome, ...] = ()

    def sealed(self) -> Evidence:
        return msgspec.structs.replace(self, digest=self.seal)

    @property
    def seal(self) -> str:
        """A digest of everything else that the run says."""
        bare = msgspec.to_builtins(msgspec.structs.replace(self, digest=""))
        if not self.engines:
            del bare["engines"]  # Runs were sealed before engines were part of them.
        return sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


@lru_cache(maxsize=1)
def recorded() -> Sequence[Evidence]:
    """Every run that is kept with the package."""
    found = sorted((f for f in files(__package__).iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return tuple(msgspec.json.decode(f.read_bytes(), type=Evidence) for f in found)
