"""Two engines that do not run yet: their command lines, and a model, against every rule; then compared, planned and proved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from msgspec.structs import replace

from kvferry.check.cures import CURES, of_mismatches
from kvferry.check.flags import Flags
from kvferry.check.rules import Seen, of_flags, of_one, of_two
from kvferry.check.shapes import RELEASE, Engine, engine_of
from kvferry.check.sources import Source, source_of, unlike
from kvferry.check.verdict import Verdict, verdict
from kvferry.engines.vllm.releases import OLDEST, is_seen, is_served, release_of, seen_releases
from kvferry.errors import ManifestError, MismatchError, ModelError, ProofError, ScatteredError, UnshardableError
from kvferry.findings import Finding, Severity, errors
from kvferry.manifest import Manifest
from kvferry.manifest.compare import Mismatch
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
class Basis:
    """What is known of one side's cache: a layout in a release of vLLM, and the evidence for it."""

    side: str
    vllm: str
    cache: str
    evidence: str


@dataclass(frozen=True)
class Outlook:
    """What would become of a pair; `moves` where its transfers are proved, and what that `rests_on`."""

    model: str
    findings: tuple[Finding, ...]
    moves: Moves | None = None
    rests_on: tuple[Basis, ...] = ()

    @property
    def works(self) -> bool:
        return verdict(self.findings) is Verdict.SERVES


def check_commands(
    prefill: Flags,
    decode: Flags,
    model: str = "",
    devices: tuple[str, str] = ("cuda", "cuda"),
    elsewhere: bool = False,
    vllm: tuple[str, str] = (RELEASE, RELEASE),
) -> Outlook:
    """`model` stands for the one that the commands name, where its configuration is not on this machine; `vllm` is the release
    of each side."""
    there = Seen("prefill", prefill, devices[0], elsewhere, is_seen(vllm[0]))
    here = Seen("decode", decode, devices[1], elsewhere, is_seen(vllm[1]))
    found = [replace(one, where=seen.side) for seen in (there, here) for one in of_one(seen)]
    found += [replace(one, where=BETWEEN) for one in of_two(there, here)]
    found += [_too_old(release, seen.side) for seen, release in zip((there, here), vllm, strict=True) if not is_served(release)]
    sources = [_source(seen, model, found) for seen in (there, here)]
    if sources[0] is not None and sources[1] is not None:
        found += [replace(one, where=BETWEEN) for one in unlike(sources[0], sources[1])]
    both = zip((there, here), sources, strict=True)
    shaped = [source is not None and _has_shape(seen, source, found) for seen, source in both]
    if sources[0] is None or sources[1] is None or not all(shaped):
        dtypes = [source.dtype if source is not None else "" for source in sources]
        found += [replace(one, where=BETWEEN) for one in of_flags(there, here, dtypes)]
        return Outlook(model or prefill.model, tuple(found))
    pair = _Pair((there, here), (sources[0], sources[1]), vllm)
    engines = pair.engines()
    for seen, engine in zip((there, here), engines, strict=True):
        found += [replace(one, where=seen.side) for one in engine.troubles]
    if errors(one for engine in engines for one in engine.troubles):
        return Outlook(sources[0].label, tuple(found))
    return pair.planned(found)


BETWEEN: Final = "prefill → decode"


@dataclass(frozen=True)
class _Pair:
    """Two sides whose caches can be shaped."""

    seen: tuple[Seen, Seen]
    sources: tuple[Source, Source]
    vllm: tuple[str, str]

    def engines(self, assume: bool = False) -> tuple[Engine, Engine]:
        there, here = (
            engine_of(seen.flags, seen.device, source, release, assume)
            for seen, source, release in zip(self.seen, self.sources, self.vllm, strict=True)
        )
        return there, here

    def planned(self, found: Sequence[Finding]) -> Outlook:
        """With what evidence there is. If that does not do, also with what engines may certify beyond it."""
        more, plans, engines = self._proved(assume=False)
        assumed = False
        if plans:
            more = [_no_evidence(one) for one in dict.fromkeys(map(release_of, self.vllm)) if not is_seen(one)]
        elif any(engine.opaque for engine in engines):
            still, other, certifying = self._proved(assume=True)
            more = [_at_start(engines, more)] if other else still
            assumed, plans, engines = bool(other), other, certifying if other else engines
        if any(one.name == "model" for one in found):
            more = [one for one in more if one.name != "model"]
        recorded = [not engine.opaque for engine in self.engines()]
        basis = [
            Basis(seen.side, release_of(engine.release), engine.cache, _evidence(known, assumed and not engine.opaque))
            for seen, engine, known in zip(self.seen, engines, recorded, strict=True)
        ]
        ranks = engines[0].side.tp * engines[0].side.pp
        moves = Moves.of(str(engines[0]), str(engines[1]), ranks, plans) if plans else None
        return Outlook(self.sources[0].label, (*found, *more), moves, tuple(basis))

    def _proved(self, assume: bool) -> tuple[list[Finding], tuple[Plan, ...], tuple[Engine, Engine]]:
        there, here = self.engines(assume)
        refused, plans = prove(there.manifests("prefill"), here.manifests("decode"), BETWEEN)
        return [*_told_apart(refused, there, here)], plans, (there, here)


def _evidence(recorded: bool, assumed: bool) -> str:
    if recorded:
        return "recorded"
    return "none recorded: the engine certifies it when it starts, or does not" if assumed else "none recorded: moved whole"


def _too_old(release: str, side: str) -> Finding:
    seen = f"vLLM {release} is too old: KVFerry needs {OLDEST} or newer"
    return Finding("vllm-release", seen, f"upgrade vLLM to {OLDEST} or newer", where=side)


def _no_evidence(release: str) -> Finding:
    seen = (
        f"no evidence is recorded for vLLM {release} (it is for {', '.join(sorted(seen_releases()))}): its caches are taken to "
        "be moved whole, which this pair allows"
    )
    return Finding("no-evidence", seen, "ask the engines when they run (--engine)", Severity.WARNING, BETWEEN)


def _at_start(engines: Sequence[Engine], refused: Sequence[Finding]) -> Finding:
    """Not decided here: the engines' own certification decides it."""
    unknown = dict.fromkeys(f"{one.cache} of vLLM {release_of(one.release)}" for one in engines if one.opaque)
    wrong = "; ".join(one.seen for one in refused)
    seen = (
        f"no evidence is recorded for {' and '.join(unknown)}: it depends on what the engines certify when they start; "
        f"moved whole, {wrong}"
    )
    cure = f"{refused[0].cure if refused else 'run one release on both sides'}; or start the engines, and ask them (--engine)"
    return Finding("certified-at-start", seen, cure, where=BETWEEN)


def _told_apart(refused: Sequence[Finding], there: Engine, here: Engine) -> Iterator[Finding]:
    """Cells say in one breath which backend made them, of what numbers and how large; flags tell which of it differs."""
    for one in refused:
        other = release_of(there.release) != release_of(here.release)
        if one.name != "backends" or there.backend != here.backend or other:
            yield one
        elif there.form != here.form:
            yield replace(one, name="cache-dtype", cure=CURES["cache-dtype"])
        elif there.side.layout.block == here.side.layout.block:
            yield replace(one, name="rank-shares", cure=CURES["rank-shares"])


def _source(seen: Seen, model: str, found: list[Finding]) -> Source | None:
    """Where a side's numbers come from; a model that is not the one of the command is told."""
    own = seen.flags.model
    if not (model or own):
        cure = "name it behind `vllm serve`, or with --model"
        found.append(Finding("no-model", "the command names no model", cure, where=seen.side))
        return None
    try:
        source = source_of(model or own, seen.flags)
    except ModelError as error:
        found.append(_unknown(error, seen))
        return None
    if model and own and own.lower() not in (model.lower(), source.label.lower()):
        told = f"the shape of {source.label} stands for {own}, as --model says"
        found.append(Finding("model-assumed", told, "mind that the model has this shape", Severity.NOTE, seen.side))
    elif source.assumed:
        told = f"the config.json of {own} is not here: the zoo's {source.label} stands for it, by its name"
        cure = f"give its config.json with --model, or say --model {source.label} if it has this shape"
        found.append(Finding("model-assumed", told, cure, Severity.WARNING, seen.side))
    return source


def _has_shape(seen: Seen, source: Source, found: list[Finding]) -> bool:
    try:
        source.shape()
    except ModelError as error:
        found.append(_unknown(error, seen))
        reason = source.undealt(seen.flags.number("tensor_parallel_size"))
        if reason:
            found.append(Finding("tensor-size", reason, "choose a --tensor-parallel-size that divides", where=seen.side))
        return False
    return True


def _unknown(error: ModelError, seen: Seen) -> Finding:
    cure = "give its config.json with --model; without it only the flags are compared"
    return Finding("model-unknown", str(error), cure, where=seen.side)


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
