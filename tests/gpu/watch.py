"""Everything that is to be seen of cache layouts on a machine with a GPU, in one run of about a minute.

    PYTHONPATH=src python3 tests/gpu/watch.py evidence.json

1. vLLM's cache-write ops, byte by byte, in every cache layout (as `kvferry certify` does);
2. its kernels for recurrent states;
3. whole caches of tiny models, allocated and written by vLLM, moved between backends, cache layouts, block sizes and
   tensor-parallel sizes by proved plans, and compared with what vLLM writes at the other side. Ranks of two share the GPU.

What fails is written down, and the rest goes on; the file is written after every step. It is what
src/kvferry/engines/vllm/evidence/ keeps of a machine.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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

from kvferry.engines.vllm import layouts  # noqa: E402
from kvferry.engines.vllm.certify import certify  # noqa: E402
from kvferry.engines.vllm.certify_states import certify_states  # noqa: E402
from kvferry.engines.vllm.evidence import Evidence, Outcome, Trouble  # noqa: E402

TOKENS = 157
DEVICE = current_platform.device_type
BEGAN = time.monotonic()


def tell(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {line}", flush=True)


def on(model: str, **given: object) -> Setup:
    return replace(Setup(model, device=DEVICE), **given)  # type: ignore[arg-type]


def cuda_moves() -> list[tuple[Setup, Setup]]:
    """Pairs of sides, those that matter most first; sides are used again, since building one is what takes time."""
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
    mla = on("deepseek", dtype="bfloat16", layout="BLHNC")
    pairs += [
        (replace(mla, backend="TRITON_MLA", block=16), replace(mla, backend="TRITON_MLA", block=64, tp=2)),
        (replace(mla, backend="FLASHMLA", block=64), replace(mla, backend="TRITON_MLA", block=16)),
    ]
    for model in ("nemotron-h", "granite-h-1g", "qwen3-next", "gemma3", "jamba", "lfm2"):
        hybrid = on(model, dtype="bfloat16", backend="FLASH_ATTN", layout="BLHNC", block=16)
        hybrid = replace(hybrid, blocks=120) if model == "gemma3" else hybrid
        pairs.append((hybrid, replace(hybrid, tp=2, block=64, conv="DS")))
        if model == "nemotron-h":
            pairs.append((replace(hybrid, tp=2), replace(hybrid, block=128, layout="LBHNC")))
    quantized = replace(whole, kv_cache_dtype="fp8")
    pairs += [
        (quantized, replace(into[0], kv_cache_dtype="fp8_e4m3")),
        (replace(whole, kv_cache_dtype="bfloat16"), into[2]),
        (replace(flash, backend="FLEX_ATTENTION", layout="LBNHC", block=16), into[0]),
    ]
    return pairs


def cpu_moves() -> list[tuple[Setup, Setup]]:
    one = on("llama", block=32)
    return [(one, replace(one, block=64, tp=2)), (on("nemotron-h"), on("nemotron-h", tp=2, block=64, conv="DS"))]


def named(setup: Setup) -> str:
    parts = (setup.backend, setup.layout, f"block {setup.block}", f"TP{setup.tp}", f"conv {setup.conv}", setup.kv_cache_dtype)
    return " ".join(filter(None, parts))


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
        f"{source.model} {source.dtype}: {named(source)} -> {named(target)}",
        f"{tokens} tokens, {moved:,} bytes of {parts} in {runs:,} copies; every byte of D's pool as vLLM writes it there",
    )


def moves(
    wanted: Sequence[tuple[Setup, Setup]], seconds: float, tell: Callable[[str], None] = tell
) -> tuple[tuple[Outcome, ...], tuple[Trouble, ...]]:
    until = time.monotonic() + seconds
    done, troubles = [], []
    for source, target in wanted:
        what = f"{source.model} {source.dtype}: {named(source)} -> {named(target)}"
        if time.monotonic() > until:
            troubles.append(Trouble(what, "not tried: no time was left"))
            continue
        try:
            done.append(move(source, target))
            tell(f"{what}: {done[-1].found}")
        except Exception as error:  # noqa: BLE001  what fails is written down, and the rest goes on
            last = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(last.filename).name}:{last.lineno}"
            tell(f"{what}: FAILED {type(error).__name__}: {error} ({at})")
            troubles.append(Trouble(what, f"{type(error).__name__}: {error} ({at})"[:500]))
    return tuple(done), tuple(troubles)


def trust(run: Evidence) -> None:
    """What was seen a moment ago counts for the rest of this run."""
    kept = layouts.recorded()
    layouts.recorded = lambda: (*kept, run)  # type: ignore[attr-defined]
    layouts._seen.cache_clear()


def main(out: str, seconds: str = "60") -> None:
    def keep(run: Evidence) -> None:
        Path(out).write_bytes(msgspec.json.encode(run.sealed()) + b"\n")

    tell("imported")
    run = certify(told=tell)
    keep(run)
    states, troubles = certify_states(told=tell)
    run = msgspec.structs.replace(run, states=states, troubles=run.troubles + troubles)
    keep(run)
    trust(run)
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device("cuda:0"))
    start()
    done, troubles = moves(cuda_moves() if DEVICE == "cuda" else cpu_moves(), float(seconds))
    run = msgspec.structs.replace(run, moves=done, troubles=run.troubles + troubles)
    keep(run)
    tell(f"{len(run.sightings)} sightings, {len(run.states)} states, {len(run.moves)} moves, {len(run.troubles)} troubles")


if __name__ == "__main__":
    main(*sys.argv[1:])
