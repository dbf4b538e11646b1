"""The table of certified layouts against what runs on machines saw, which is kept with the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.engines.vllm import layouts
from kvferry.engines.vllm.evidence import Case, Evidence, recorded
from kvferry.engines.vllm.layouts import CERTIFICATES, Certificate, Grid, candidate, certified, digest, places, replay
from kvferry.engines.vllm.releases import release_of
from kvferry.engines.vllm.supported import page
from vllm_stubs import as_if_seen

RUNS = recorded()
SEEN = sorted({(run.vllm, s.backend, s.isa, s.form, s.layout) for run in RUNS for s in run.sightings})
HAND_COUNTED = [
    ("FLASH_ATTN", "bfloat16", Grid(2, 4, 12), 3, 4, 2,
     [0, 2, 24, 26, 8, 10, 32, 34, 16, 18, 40, 42, 4, 6, 28, 30, 12, 14, 36, 38, 20, 22, 44, 46]),
    ("CPU_MLA", "float32", Grid(2, 3, 3), 1, 0, 4, [0, 4, 8, 12, 16, 20]),
    ("FLASHMLA_SPARSE", "fp8_ds_mla", Grid(2, 3, 3), 1, 0, 1, [0, 1, 2, 3, 4, 5]),
    ("DEEPSEEK_V32_INDEXER", "uint8", Grid(2, 6, 6), 1, 0, 1, [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.device)
def test_the_table_says_what_every_run_saw(run: Evidence) -> None:
    assert replay(run) == ()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.device)
def test_a_run_is_kept_as_it_was_told(run: Evidence) -> None:
    assert run.digest == run.seal


@pytest.mark.parametrize("run", [run for run in RUNS if any(s.cases for s in run.sightings)], ids=lambda run: run.device)
def test_control_another_order_is_noticed(run: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "CERTIFICATES", tuple(map(_shifted, CERTIFICATES)))
    assert len(replay(run)) == sum(len(s.cases) for s in run.sightings)


def _shifted(one: Certificate) -> Certificate:
    def cell(grid: Grid) -> layouts.Cell:
        first, *others = one.cell(grid)
        return (replace(first, start=first.start + 1), *others)

    return replace(one, cell=cell)


@pytest.mark.parametrize(("backend", "form", "grid", "heads", "stride", "size", "wanted"), HAND_COUNTED)
def test_places_counted_by_hand(
    backend: str, form: str, grid: Grid, heads: int, stride: int, size: int, wanted: list[int]
) -> None:
    cell = next(c.cell(grid) for c in CERTIFICATES if c.backend == backend and form in c.formats)
    assert places(cell, heads, stride, size).tolist() == wanted


def test_patch_releases_of_a_seen_release_are_certified_and_others_are_not() -> None:
    version, *what = next(one for one in SEEN if one[1] == "CPU_ATTN" and one[2] == "vec")
    grid = Grid(32, 64, 64)
    assert certified(version, *what, grid) is not None
    assert certified(release_of(version) + ".99", *what, grid) is not None
    assert certified("0.99.0", *what, grid) is None


@pytest.mark.parametrize("certificate", CERTIFICATES, ids=lambda c: " ".join((c.backend, c.isa, *sorted(c.formats))))
def test_nothing_counts_that_was_not_seen(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(certificate.token_multiple, certificate.width_multiple, certificate.width_multiple)
    named = [(certificate.backend, certificate.isa, form) for form in certificate.formats]
    assert all(candidate(*one, grid) is not None for one in named)
    as_if_seen(monkeypatch, {})
    assert all(certified("0.32.0", *one, layout, grid) is None for one in named for layout in ("LBHNC", "LBNHC", "BLHNC"))


@pytest.mark.parametrize(
    "unknown",
    [
        ("CPU_ATTN", "neon", "bfloat16", "LBHNC", Grid(32, 64, 64)),
        ("CPU_ATTN", "amx", "float32", "LBHNC", Grid(32, 64, 64)),
        ("CPU_ATTN", "amx", "bfloat16", "LBHNC", Grid(48, 64, 64)),
        ("CPU_ATTN", "vec", "uint8", "LBHNC", Grid(32, 64, 64)),
        ("CPU_ATTN", "vec", "float32", "LBHNC", Grid(32, 64, 128)),
        ("CPU_ATTN", "vec", "float32", "BLHNC", Grid(32, 64, 64)),
    ],
    ids=str,
)
def test_what_was_not_seen_is_not_certified(unknown: tuple[str, str, str, str, Grid]) -> None:
    assert certified("0.32.0", *unknown) is None


def test_a_digest_is_of_every_place() -> None:
    case = Case(16, 2, 64, 64, 1024, 2, "")
    cell = candidate("FLASH_ATTN", "", "bfloat16", Grid(case.tokens, case.width, case.pitch))
    assert cell is not None
    found = places(cell, case.heads, case.head_stride, case.size)
    assert len(found) == 16 * 2 * 64
    moved = found.copy()
    moved[[3, 4]] = moved[[4, 3]]
    assert digest(found) != digest(moved)


def test_the_page_of_what_is_supported_is_in_step() -> None:
    kept = Path(__file__).parent.parent / "docs" / "supported.md"
    assert kept.read_text() == page(RUNS), "make it anew: kvferry certify --recorded --markdown > docs/supported.md"


def test_the_page_names_what_was_seen_and_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = page(())
    assert "## Certified" not in nowhere
    assert "FLASH_ATTN" in nowhere
    as_if_seen(monkeypatch, {"FLASH_ATTN": ("BLHNC",)})
    told = page(layouts.recorded())
    assert "| FLASH_ATTN | bfloat16 | `k`, `v` | BLHNC | 16 tokens | " in told
    assert "| FLASH_ATTN | float16, fp8_e4m3 | `k`, `v` |" in told.partition("recorded nowhere yet")[2]
