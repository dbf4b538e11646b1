"""The page that says what of vLLM's caches can be moved, made from certificates and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvferry.engines.vllm.evidence import Evidence, Outcome
from kvferry.engines.vllm.layouts import CERTIFICATES, Certificate, Grid, replay
from kvferry.engines.vllm.releases import order_of

HEAD: Final = """# What of vLLM's caches can be moved, and where that was seen

For operators who choose a backend, a block size or a release of vLLM. `kvferry certify --recorded --markdown` makes this page.

**An engine certifies its own caches when it starts.** Its cache-write ops and its state kernels write numbers into the empty
caches, KVFerry looks for every byte, and the caches are put back. The log names what is certified and what is not:

```text
caches of 32 layers (FLASH_ATTN bfloat16, kernel blocks of 16 tokens, 8 x 256) are certified
```

Certified caches are moved between any block sizes, any tensor- and pipeline-parallel sizes, any cache layouts, and any backends
that keep the same parts, on GPUs and on CPUs. Of a block that is not full, only the tokens are moved. In packed formats each
token carries scales of its own. They are moved token by token between sides of the same format.

All other caches are *opaque*. They are moved as whole cells between engines of the same release (major and minor), backend,
cache format, kernel block size and head size. If heads lie inside of tokens (cache layouts LBNHC and BLNHC), or if a backend's
slots are not heads (NVFP4), both engines also need the same tensor-parallel size. The same holds for states that are opaque.

The tables below are what runs on other machines recorded. `kvferry check` goes by them, since it has no engine to look at. An
engine does not: a backend or a release that is missing here is certified by the engine itself. Figures are of the first release
that a row names. Rows of hybrids that tell of loads in their step are of an earlier connector: hybrids load beside their step.
"""


def page(runs: Sequence[Evidence]) -> str:
    return "\n".join(
        [HEAD, *_certified(runs), *_unseen(runs), *_states(runs), *_moves(runs), *_engines(runs), *_machines(runs)]
    )


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    yield f"## {title}\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _named(one: Certificate) -> str:
    return f"{one.backend} ({one.isa})" if one.isa else one.backend


def _kind(one: Certificate) -> str:
    cell = one.cell(Grid(one.token_multiple, one.width_multiple, one.width_multiple))
    return ", ".join(f"`{plane.part}`" for plane in cell) + (" (packed)" if any(plane.row for plane in cell) else "")


def _seen_in(runs: Sequence[Evidence], one: Certificate, form: str) -> tuple[list[str], list[str]]:
    """Cache layouts, and machines with releases."""
    found = [
        (sighting.layout, f"{run.device}, vLLM {run.vllm}")
        for run in runs
        for sighting in run.sightings
        if (sighting.backend, sighting.isa, sighting.form) == (one.backend, one.isa, form)
    ]
    return list(dict.fromkeys(layout for layout, _ in found)), list(dict.fromkeys(where for _, where in found))


def _certified(runs: Sequence[Evidence]) -> Iterator[str]:
    rows = []
    for one in CERTIFICATES:
        by_place: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for form in sorted(one.formats):
            layouts, where = _seen_in(runs, one, form)
            if layouts:
                by_place.setdefault((tuple(layouts), tuple(where)), []).append(form)
        for (seen, places), forms in by_place.items():
            multiples = f"{one.token_multiple} tokens"
            rows.append((_named(one), ", ".join(forms), _kind(one), ", ".join(seen), multiples, "; ".join(places)))
    yield from _table(
        "Certified attention caches",
        ("backend", "cache format", "parts", "cache layouts", "blocks of a multiple of", "seen on"),
        rows,
    )


def _unseen(runs: Sequence[Evidence]) -> Iterator[str]:
    rows = []
    for one in CERTIFICATES:
        forms = [form for form in sorted(one.formats) if not _seen_in(runs, one, form)[0]]
        if forms:
            rows.append((_named(one), ", ".join(forms), _kind(one)))
    yield from _table("In the table, but recorded nowhere yet", ("backend", "cache format", "parts"), rows)


def _by_release(runs: Sequence[Evidence], kind: str) -> list[tuple[str, str, str]]:
    """What was seen, as the newest release has it, and everywhere that it was seen."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for run in sorted(runs, key=lambda run: order_of(run.vllm), reverse=True):
        for one in getattr(run, kind):
            found.setdefault((one.what, run.device), []).append((f"{one.found}{_finds(one)}", run.vllm))
    return [
        (what, seen[0][0], f"{device}, vLLM {', '.join(version for _, version in seen)}")
        for (what, device), seen in found.items()
    ]


def _states(runs: Sequence[Evidence]) -> Iterator[str]:
    rows = _by_release(runs, "states")
    yield from _table("Recurrent states, as vLLM's kernels keep them", ("state", "found", "seen on"), rows)


def _moves(runs: Sequence[Evidence]) -> Iterator[str]:
    rows = _by_release(runs, "moves")
    yield from _table("Whole caches moved, and compared with what vLLM writes there", ("from -> to", "found", "seen on"), rows)


def _engines(runs: Sequence[Evidence]) -> Iterator[str]:
    rows = _by_release(runs, "engines")
    rows += [(one.what, f"**{one.why}**", run.device) for run in runs if run.engines for one in run.troubles]
    title = "Requests between engines, compared with one engine that computes the same steps"
    yield from _table(title, ("model, engines", "found", "seen on"), rows)


def _finds(one: Outcome) -> str:
    told = ", ".join(f"{how} {found}/{tried}" for how, (found, tried) in one.finds.items())
    return f"; of loads spoiled on purpose it finds {told}" if told else ""


def _machines(runs: Sequence[Evidence]) -> Iterator[str]:
    rows = []
    for run in runs:
        cases = sum(len(sighting.cases) for sighting in run.sightings)
        told = f"{len(run.sightings)} in {cases:,} cases" if cases else run.sightings[0].by if run.sightings else "engines"
        rows.append((run.device, run.vllm, run.torch, told, f"`{run.digest[:16]}`", "no" if replay(run) else "yes"))
    head = ("machine", "vLLM", "torch", "formats and layouts", "digest of the run", "the table says the same")
    yield from _table("Runs", head, rows)
