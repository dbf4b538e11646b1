"""Mismatches of two manifests as findings: what each kind of difference is called here, and what cures it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvferry.findings import Finding
from kvferry.manifest.compare import Mismatch

SHOWN: Final = 3
"""Layers that are named of those with the same difference."""

CURES: Final = {
    "model": "serve one model and one checkpoint on both sides; where they are the same in two forms, set weights to one name",
    "missing-layer": "start both engines with the same model, and let all ranks of the prefill engine come up",
    "missing-ranks": "some ranks of the prefill engine are missing from its answer: restart it as a whole",
    "ranks": "the ranks of the prefill engine do not belong together: restart it as a whole",
    "context-parallel": "leave --decode-context-parallel-size and --prefill-context-parallel-size out",
    "token-ring": "caches that are rings of tokens are not carried: run the model with a backend that has none",
    "paging": "the two engines run different layers under one name: start both with the same model",
    "reach": "the windows of the two differ: use the same config.json, and the same --hf-overrides, on both sides",
    "parts": "the two engines keep different state for one layer: run the same attention backend on both sides",
    "entries": "the caches compress tokens differently: run the same model with the same attention backend on both sides",
    "sizes": "the shapes of the two models differ: start both engines with the same model",
    "rank-shares": (
        "cells that cannot be cut by heads need equally many ranks: give both sides the same --tensor-parallel-size, or a "
        "cache layout with heads outside of tokens (cache_layout)"
    ),
    "opaque-blocks": "give both sides the same --block-size, since this backend's cells are moved whole",
    "backends": (
        "run both sides with the same --attention-backend, --block-size, --kv-cache-dtype and vLLM release (major and minor), "
        "or each with a backend that is certified (docs/supported.md)"
    ),
    "cache-dtype": "give both sides the same --kv-cache-dtype and --dtype",
    "conv-dtype": "give both sides the same --mamba-cache-dtype and --dtype",
    "ssm-dtype": "give both sides the same --mamba-ssm-cache-dtype",
    "scales": "load the same checkpoint with the same scales, or --kv-cache-dtype auto, on both sides",
}


def named(mismatch: Mismatch) -> str:
    """The name of its finding: dtypes of states have flags of their own."""
    if mismatch.name == "cache-dtype":
        return {"ssm": "ssm-dtype", "conv": "conv-dtype"}.get(mismatch.part.partition(".")[0], "cache-dtype")
    return mismatch.name


def of_mismatches(mismatches: Sequence[Mismatch], where: str) -> list[Finding]:
    """One finding for all layers that differ in the same way."""
    alike: dict[tuple[str, str], list[Mismatch]] = {}
    for one in mismatches:
        alike.setdefault((named(one), one.what), []).append(one)
    out = []
    for (name, what), found in alike.items():
        places = [" ".join(filter(None, (one.layer, one.part))) for one in found if one.layer]
        shown = ", ".join(places[:SHOWN]) + (f" and {len(places) - SHOWN:,} more" if len(places) > SHOWN else "")
        out.append(Finding(name, f"{shown}: {what}" if shown else what, CURES.get(name, CURES["sizes"]), where=where))
    return out
