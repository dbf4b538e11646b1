"""Everything that is to be seen of cache layouts on a machine with a GPU, in one run of about a minute and a half.

    PYTHONPATH=src python3 tests/gpu/watch.py FOLDER [SECONDS] [NAME ...]
    PYTHONPATH=src python3 tests/gpu/watch.py merge EVIDENCE.json RUN.json ...

1. vLLM's cache-write ops, byte by byte, in every cache layout (as `kvferry certify` does);
2. its kernels for recurrent states;
3. whole caches of tiny models, allocated and written by vLLM, moved between backends, cache layouts, block sizes and
   tensor-parallel sizes by proved plans, and compared with what vLLM writes at the other side. Ranks of two share the GPU.

Each piece runs in a process of its own, forked once vLLM is imported, several at a time: what breaks one, or the GPU's context
in it, does not break the others. What fails is written down; FOLDER/evidence.json is written whenever something was seen. It is
what src/kvferry/engines/vllm/evidence/ keeps of a machine.

NAMEs choose: words joined by "+" choose moves by what they are called, the whole name of an op or state chooses that, and
`unseen` the moves that no run has which is kept with the package. `merge` adds runs, the latest last, to a file of evidence:
what was seen again is replaced, and what failed once and was seen later is no trouble any more. Where the file lies with the
package, docs/supported.md is made anew.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "tests" / "vllm", ROOT):
    sys.path.insert(0, str(place))
os.environ.update(
    {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "GLOO_SOCKET_IFNAME": "lo",
        "UCX_LOG_LEVEL": "error",
    }
)

import msgspec  # noqa: E402
import torch  # noqa: E402
from byte_crossing import cross, pair  # noqa: E402
from engine import Setup, start  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from kvferry.engines.vllm import certify, certify_states  # noqa: E402
from kvferry.engines.vllm.evidence import Evidence, Outcome, Trouble, recorded  # noqa: E402
from kvferry.engines.vllm.supported import page  # noqa: E402
from kvferry.up.device import Device  # noqa: E402
from lab.fleet.device import device_name  # noqa: E402
from lab.fleet.launch import unfit_for_forks  # noqa: E402
from lab.fleet.patches import inspect_models_here  # noqa: E402

TOKENS = 157
NO_TIME = ": no time was left"
DEVICE = current_platform.device_type
SECONDS = 130.0
AT_ONCE = {"cuda": 8, "cpu": 2}
UNSEEN = "unseen"
MODELS = ("llama", "nemotron_h", "gemma3", "gpt_oss", "granitemoehybrid")
"""Imported in advance. Others are not: what they import asks for the GPU's name, and a process that has may not fork."""


def tell(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {line}", flush=True)


def on(model: str, **given: object) -> Setup:
    return replace(Setup(model, device=DEVICE), **given)  # type: ignore[arg-type]


ACROSS_RANKS = {
    "deepseek": "TRITON_MLA",
    "gpt-oss": "FLASH_ATTN",
    "qwen3-next": "FLASH_ATTN",
    "granite-h-1g": "FLASH_ATTN",
    "gemma3": "FLASH_ATTN",
    "nemotron-h": "FLASH_ATTN",
    "llama": "FLASH_ATTN",
}
"""Models whose engines tests/gpu/matrix.py crosses in bfloat16 between one rank and two, with their backends."""
WINDOWED = ("gemma3", "gpt-oss")
"""Models whose groups of layers need more blocks."""


def both_ways(one: Setup) -> tuple[tuple[Setup, Setup], tuple[Setup, Setup]]:
    """From one rank to two and back, between other block sizes and layouts."""
    one = replace(one, blocks=120) if one.model in WINDOWED else one
    there = (one, replace(one, tp=2, block=64, conv="SD" if one.model == "deepseek" else "DS"))
    back = (replace(one, tp=2), replace(one, block=128, layout="LBHNC"))
    return there, back


def across_ranks() -> list[tuple[Setup, Setup]]:
    """Every model in both directions: what log-probabilities in bfloat16 cannot show, bytes do."""
    sides = [on(model, dtype="bfloat16", backend=backend, layout="BLHNC", block=16) for model, backend in ACROSS_RANKS.items()]
    return [pair for one in sides for pair in both_ways(one)]


def cuda_moves() -> list[tuple[Setup, Setup]]:
    """Pairs of sides, those that matter most first; sides are used again, since building one is what takes time."""
    return [*across_ranks(), *other_moves()]


def other_moves() -> list[tuple[Setup, Setup]]:
    flash = on("llama", dtype="bfloat16", backend="FLASH_ATTN")
    triton = on("llama", dtype="float32", backend="TRITON_ATTN")
    whole, halves = replace(flash, layout="BLHNC", block=16), replace(flash, layout="LBHNC", block=128, tp=2)
    into = (
        replace(flash, layout="BLHNC", block=64, tp=2),
        replace(flash, layout="LBNHC", block=16),
        replace(flash, layout="BHLNC", block=128),
        replace(flash, backend="TRITON_ATTN", layout="BLHNC", block=32),
    )
    pairs = [(source, target) for target in into for source in (whole, halves)]
    floats = (replace(triton, layout="BLHNC", block=16), replace(triton, layout="LBNHC", block=64, tp=2))
    pairs += [
        (floats[0], replace(triton, layout="BLHNC", block=128, tp=2)),
        (floats[1], replace(triton, layout="LBHNC", block=16)),
    ]
    latent = on("deepseek", dtype="bfloat16", layout="BLHNC")
    pairs.append((replace(latent, backend="FLASHMLA", block=64), replace(latent, backend="TRITON_MLA", block=16)))
    for model in ("jamba", "lfm2"):
        pairs += both_ways(on(model, dtype="bfloat16", backend="FLASH_ATTN", layout="BLHNC", block=16))
    quantized = replace(whole, kv_cache_dtype="fp8")
    pairs += [
        (quantized, replace(into[0], kv_cache_dtype="fp8_e4m3")),
        (replace(whole, kv_cache_dtype="bfloat16"), into[2]),
        (replace(flash, backend="FLEX_ATTENTION", layout="LBNHC", block=16), into[0]),
    ]
    return pairs


def cpu_moves() -> list[tuple[Setup, Setup]]:
    """With the CPU's backends, whose kernel blocks are at least twice as large."""
    one = on("llama", block=32)
    same = [on(model, dtype="bfloat16", block=32) for model in ACROSS_RANKS]
    pairs = [(there, replace(here, layout="")) for it in same for there, here in both_ways(it)]
    return [*pairs, (one, replace(one, block=64, tp=2)), (on("nemotron-h"), on("nemotron-h", tp=2, block=64, conv="DS"))]


def named(setup: Setup) -> str:
    parts = (setup.backend, setup.layout, f"block {setup.block}", f"TP{setup.tp}", f"conv {setup.conv}", setup.kv_cache_dtype)
    return " ".join(filter(None, parts))


def called(source: Setup, target: Setup) -> str:
    return f"{source.model} {source.dtype}: {named(source)} -> {named(target)}"


def move(source: Setup, target: Setup, tokens: int = TOKENS) -> Outcome:
    found = pair(source, target)
    outcomes = cross(found, tokens)
    for outcome in outcomes:
        if outcome.differences():
            raise ValueError(outcome.differences())
        if outcome.binding.bytes != outcome.needed_bytes or not (outcome.got != outcome.before).any():
            raise ValueError(f"{outcome.binding.bytes} bytes moved, {outcome.needed_bytes} needed")
    moved = sum(o.binding.bytes for o in outcomes)
    runs = sum(len(copies.length) for o in outcomes for copies in o.binding.copies)
    parts = ", ".join(sorted({part.name for layer in found.sources[0].layers for part in layer.parts}))
    return Outcome(
        called(source, target),
        f"{tokens} tokens, {moved:,} bytes of {parts} in {runs:,} copies; every byte of D's pool as vLLM writes it there",
    )


def moves(wanted: Sequence[tuple[Setup, Setup]], seen: Callable[[Evidence], None]) -> None:
    for source, target in wanted:
        what = called(source, target)
        try:
            found = move(source, target)
        except Exception as error:  # noqa: BLE001  what fails is written down, and the rest goes on
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            tell(f"{what}: FAILED {why}")
            seen(blank(troubles=(Trouble(what, why[:500]),)))
        else:
            tell(f"{what}: {found.found}")
            seen(blank(moves=(found,)))


def blank(**found: Any) -> Evidence:
    return Evidence("", "", "", **found)


@dataclass(frozen=True)
class Job:
    """A piece of the run; `work` is given a function that takes what was seen."""

    name: str
    work: Callable[[Callable[[Evidence], None]], None]


def of_ops() -> Iterator[Job]:
    for subject in certify.CUDA_SUBJECTS if DEVICE == "cuda" else certify.subjects():
        for form in subject.forms:
            one = replace(subject, forms=(form,))
            name = " ".join(filter(None, (subject.backend, subject.isa, form)))
            yield Job(name, lambda seen, one=one: seen(certify.certify([one], told=tell)))  # type: ignore[misc]


def of_states() -> Iterator[Job]:
    for kind in certify_states.on_this_machine():

        def work(seen: Callable[[Evidence], None], kind: Any = kind) -> None:
            states, troubles = certify_states.certify_states(told=tell, kinds=(kind,))
            seen(blank(states=states, troubles=troubles))

        yield Job(kind.name, work)


def chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(all(word in name for word in one.split("+")) for one in only)


def unseen(moves: Sequence[tuple[Setup, Setup]], kept: Sequence[Evidence]) -> list[tuple[Setup, Setup]]:
    """Those that no kept run has, in their order."""
    seen = {one.what for run in kept for one in run.moves}
    return [pair for pair in moves if called(*pair) not in seen]


def of_moves(only: Sequence[str] = ()) -> Iterator[Job]:
    wanted = cuda_moves() if DEVICE == "cuda" else cpu_moves()
    named = [name for name in only if name != UNSEEN]
    new = unseen(wanted, recorded()) if UNSEEN in only else []
    wanted = [pair for pair in wanted if pair in new or ((named or not only) and chosen(called(*pair), named))]
    for model, some in groupby(wanted, key=lambda it: (it[0].model, it[0].dtype)):
        together = tuple(some)

        def work(seen: Callable[[Evidence], None], together: Any = together) -> None:
            start()
            moves(together, seen)

        yield Job(f"moves of {' '.join(model)}", work)


def begin(job: Job, pipe: Connection) -> None:
    perform(job, lambda found: pipe.send_bytes(msgspec.json.encode(found)))


def perform(job: Job, seen: Callable[[Evidence], None]) -> None:
    try:
        if DEVICE == "cuda":
            torch.cuda.set_device(0)
            current_platform.import_kernels()
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("cuda:0"))
        job.work(seen)
    except Exception as error:  # noqa: BLE001  what fails is written down, and the rest goes on
        traceback.print_exc()
        seen(blank(troubles=(Trouble(job.name, f"{type(error).__name__}: {error}"[:500]),)))


def run_here(jobs: Sequence[Job], until: float, seen: Callable[[int, Evidence], None]) -> None:
    """One after the other, where children could not use the device."""
    for index, job in enumerate(jobs):
        if time.monotonic() > until:
            seen(index, blank(troubles=(Trouble(job.name, f"not tried{NO_TIME}"),)))
        else:
            perform(job, lambda found, index=index: seen(index, found))  # type: ignore[misc]


def run_apart(jobs: Sequence[Job], until: float, seen: Callable[[int, Evidence], None]) -> None:
    """Several at a time, each in a forked child; those that are not done in time are ended."""
    forking = mp.get_context("fork")
    waiting, running = list(enumerate(jobs)), {}
    while waiting or running:
        late = time.monotonic() > until
        while waiting and not late and len(running) < AT_ONCE[DEVICE]:
            index, job = waiting.pop(0)
            here, there = forking.Pipe(duplex=False)
            child = forking.Process(target=begin, args=(job, there), name=job.name)
            child.start()
            there.close()
            running[here] = (index, child)
        if late:
            for index, job in waiting:
                seen(index, blank(troubles=(Trouble(job.name, f"not tried{NO_TIME}"),)))
            waiting = []
        for pipe in wait(list(running), timeout=0.5) or (list(running) if late else ()):
            index, child = running[pipe]  # type: ignore[index]
            try:
                if late and not pipe.poll():  # type: ignore[union-attr]
                    child.kill()
                    seen(index, blank(troubles=(Trouble(child.name, f"not done{NO_TIME}"),)))
                    raise EOFError
                seen(index, msgspec.json.decode(pipe.recv_bytes(), type=Evidence))  # type: ignore[union-attr]
            except EOFError:
                child.join()
                del running[pipe]  # type: ignore[arg-type]
                tell(f"{child.name}: done")
                if child.exitcode and not late:
                    why = f"its process ended with {child.exitcode}"
                    seen(index, blank(troubles=(Trouble(child.name, why),)))


def told(run: Evidence) -> str:
    return f"{len(run.sightings)} sightings, {len(run.states)} states, {len(run.moves)} moves, {len(run.troubles)} troubles"


def merged(runs: Sequence[Evidence]) -> Evidence:
    """The latest word on everything, seen or trouble; for want of time nothing was said. Digests are made anew, so that what
    was sealed must be whole."""
    spoken = {(run.vllm, run.torch, run.device) for run in runs}
    if len(spoken) != 1:
        raise SystemExit(f"evidence is of one machine and release, and the runs say {sorted(spoken)}")
    broken = [run.digest[:16] for run in runs if run.digest != run.seal]
    if broken:
        raise SystemExit(f"runs are not as they were when they were sealed: {', '.join(broken)}")

    def latest(kind: str, key: Callable[[Any], Any]) -> tuple[Any, ...]:
        return tuple({key(one): one for run in runs for one in getattr(run, kind)}.values())

    words: dict[str, Outcome | Trouble] = {}
    for run in runs:
        said = [one for one in run.troubles if not one.why.endswith(NO_TIME)]
        words.update((one.what, one) for one in (*run.states, *run.moves, *said))
    states, moves, troubles = (
        tuple(one for one in latest(kind, lambda it: it.what) if one == words.get(one.what))
        for kind in ("states", "moves", "troubles")
    )
    sightings = latest("sightings", lambda it: (it.backend, it.isa, it.form, it.layout))
    seen = {
        " ".join(filter(None, (it.backend, it.isa, it.form, it.layout))): index
        for index, run in enumerate(runs)
        for it in run.sightings
    }
    failed = {it.what: index for index, run in enumerate(runs) for it in run.troubles}
    troubles = tuple(it for it in troubles if failed[it.what] >= seen.get(it.what.partition(":")[0], 0))
    engines = latest("engines", lambda it: it.what)
    return Evidence(*spoken.pop(), sightings, states, moves, troubles, engines=engines).sealed()


def merge(evidence: str, *files: str) -> None:
    out = Path(evidence).resolve()
    runs = [msgspec.json.decode(Path(it).read_bytes(), type=Evidence) for it in (evidence, *files)]
    run = merged(runs)
    out.write_bytes(msgspec.json.encode(run) + b"\n")
    tell(f"{told(run)}: {out}")
    if out.parent == ROOT / "src/kvferry/engines/vllm/evidence":
        recorded.cache_clear()
        (ROOT / "docs/supported.md").write_text(page(recorded()), encoding="utf-8")


def main(folder: str, seconds: str = "", *only: str) -> None:
    until = BEGAN + float(seconds or SECONDS)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        with suppress(ImportError, AttributeError, OSError, RuntimeError):
            importlib.import_module(f"vllm.model_executor.models.{model}")
    inspect_models_here()
    why = unfit_for_forks(Device(DEVICE))
    tell(f"imported; {why or 'children may use the device'}")
    run_all = run_here if why else run_apart
    found: dict[int, list[Evidence]] = {}

    def together() -> Evidence:
        parts = [part for index in sorted(found) for part in found[index]]
        kinds = ("sightings", "states", "moves", "troubles")
        all_of = {kind: tuple(one for part in parts for one in getattr(part, kind)) for kind in kinds}
        device = next((part.device for part in parts if part.device), "") or device_name(Device(DEVICE)) or "x86-64 CPU"
        return Evidence(certify.__version__, str(torch.__version__), device, **all_of).sealed()

    def keep(index: int, part: Evidence) -> None:
        found.setdefault(index, []).append(part)
        (out / "evidence.json").write_bytes(msgspec.json.encode(together()) + b"\n")

    first = [job for job in (*of_ops(), *of_states()) if not only or job.name in only]
    run_all(first, until, keep)
    run_all([*of_moves(only)], until, lambda index, part: keep(len(first) + index, part))
    run = together()
    tell(told(run))


if __name__ == "__main__":
    merge(*sys.argv[2:]) if sys.argv[1:2] == ["merge"] else main(*sys.argv[1:])
