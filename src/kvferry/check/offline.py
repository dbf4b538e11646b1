"""Two engines that do not run yet: their command lines, and a model, against every rule; then compared, planned and proved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from kvferry.check.cures import CURES, of_mismatches
from kvferry.check.flags import Flags
from kvferry.check.rules import Seen, of_one, of_two
from kvferry.check.shapes import Engine, engine_of, find_model
from kvferry.errors import ManifestError, MismatchError, ModelError, ProofError, ScatteredError, UnshardableError
from kvferry.findings import Finding, Severity, errors
from kvferry.manifest import Manifest
from kvferry.manifest.compare import Mismatch
from kvferry.models import ModelShape
from kvferry.plan import Fleet, Plan, make_plans
from kvferry.plan.explain import costs


@dataclass(frozen=True)
class Moves:
    """What a pair moves: the costliest rank's runs, and the bytes of all ranks together."""

    prefill: str
    decode: str
    ranks: tuple[int, int]
    runs_per_block: int
    runs_per_state: int
    bytes_per_token: float
    bytes_per_state: int

    @classmethod
    def of(cls, prefill: str, decode: str, producers: int, plans: Iterable[Plan]) -> Moves:
        found = [[*costs(plan)] for plan in plans]
        blocks = [max((c.runs_per_block for c in rank if c.bytes_per_token), default=0) for rank in found]
        states = [max((c.runs_per_block for c in rank if c.bytes_per_state), default=0) for rank in found]
        every = [*chain.from_iterable(found)]
        return cls(
            prefill,
            decode,
            (producers, len(found)),
            max(blocks, default=0),
            max(states, default=0),
            sum(c.bytes_per_token for c in every),
            sum(c.bytes_per_state for c in every),
        )


@dataclass(frozen=True)
class Outlook:
    """What would become of a pair; `moves` where its transfers are proved."""

    model: str
    findings: tuple[Finding, ...]
    moves: Moves | None = None
    certain: bool = field(default=True)

    @property
    def works(self) -> bool:
        return not errors(self.findings)


def check_commands(
    prefill: Flags, decode: Flags, model: str = "", devices: tuple[str, str] = ("cuda", "cuda"), elsewhere: bool = False
) -> Outlook:
    """`model` stands for the one that the commands name, where its configuration is not on this machine."""
    there, here = Seen("prefill", prefill, devices[0], elsewhere), Seen("decode", decode, devices[1], elsewhere)
    found = [replace(one, where=seen.side) for seen in (there, here) for one in of_one(seen)]
    found += [replace(one, where="prefill → decode") for one in of_two(there, here)]
    shapes = [_shape(seen, model, found) for seen in (there, here)]
    if shapes[0] is None or shapes[1] is None:
        return Outlook(model or prefill.model, tuple(found), certain=False)
    engines = [engine_of(seen.flags, seen.device, model or seen.flags.model) for seen in (there, here)]
    for seen, engine in zip((there, here), engines, strict=True):
        found += [replace(one, where=seen.side) for one in engine.troubles]
    named = shapes[0].name
    if errors(one for engine in engines for one in engine.troubles):
        return Outlook(named, tuple(found))
    producers, consumers = engines[0].manifests("prefill"), engines[1].manifests("decode")
    refused, plans = prove(producers, consumers, "prefill → decode")
    moves = Moves.of(str(engines[0]), str(engines[1]), len(producers), plans) if plans else None
    return Outlook(named, (*found, *_told_apart(refused, engines[0], engines[1])), moves)


def _told_apart(refused: Sequence[Finding], there: Engine, here: Engine) -> Iterator[Finding]:
    """Cells say in one breath which backend made them, of what numbers and how large; flags tell which of it differs."""
    for one in refused:
        if one.name != "backends" or there.backend != here.backend:
            yield one
        elif there.form != here.form:
            yield replace(one, name="cache-dtype", cure=CURES["cache-dtype"])
        elif there.side.layout.block == here.side.layout.block:
            yield replace(one, name="rank-shares", cure=CURES["rank-shares"])


def _shape(seen: Seen, model: str, found: list[Finding]) -> ModelShape | None:
    name = model or seen.flags.model
    if not name:
        cure = "name it behind `vllm serve`, or with --model"
        found.append(Finding("no-model", "the command names no model", cure, where=seen.side))
        return None
    try:
        return find_model(name)
    except ModelError as error:
        cure = "give its config.json with --model; until then only the flags are checked"
        found.append(Finding("model-unknown", str(error), cure, Severity.WARNING, seen.side))
        return None


def prove(
    producers: tuple[Manifest, ...] | Fleet, consumers: tuple[Manifest, ...] | Fleet, where: str
) -> tuple[list[Finding], tuple[Plan, ...]]:
    """Compared, planned and proved: what is refused, or the plans of all ranks."""
    try:
        return [], make_plans(consumers, producers)
    except MismatchError as error:
        return of_mismatches([one for one in error.mismatches if isinstance(one, Mismatch)], where), ()
    except (ManifestError, UnshardableError) as error:
        return [Finding("manifest", str(error), "an engine contradicts itself: report it with its manifest", where=where)], ()
    except ScatteredError as error:
        cure = "give the decode engine more --tensor-parallel-size, or run both sides on devices that keep it alike"
        return [Finding("too-scattered", str(error), cure, where=where)], ()
    except ProofError as error:
        return [Finding("proof", str(error), "a defect of KVFerry or a manifest that lies: report it", where=where)], ()
