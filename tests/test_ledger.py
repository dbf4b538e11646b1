"""The ledger of behaviours names every test, and no test that is gone."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
LEDGER = TESTS / "ledger.md"
WENT = "## What went"
TO_DO = "Add it to the row of its behaviour in tests/ledger.md, or add a row."
GONE = (
    "If a test was renamed or moved, change its name in tests/ledger.md. "
    f'If it went, move its row or its name to "{WENT[3:]}", with the reason.'
)


@dataclass(frozen=True)
class Row:
    line: int
    cells: tuple[str, ...]

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(name.strip(" `") for name in self.cells[1].split(",")) if len(self.cells) > 1 else ()


@cache
def written() -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """The rows of both parts, without the heads of their tables."""
    parts: tuple[list[Row], list[Row]] = ([], [])
    went = 0
    for number, line in enumerate(LEDGER.read_text().splitlines(), 1):
        went = went or int(line == WENT)
        if line.startswith("|") and not line.startswith(("| behaviour |", "|---")):
            parts[went].append(Row(number, tuple(cell.strip() for cell in line.strip("|").split("|"))))
    return tuple(parts[0]), tuple(parts[1])


def names_in(body: list[ast.stmt], prefix: str = "") -> list[str]:
    """Functions, those of classes, and state machines of hypothesis: `TestLoads = Loads.TestCase`."""
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += names_in(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.append(prefix + node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase":
            found += [prefix + target.id for target in node.targets if isinstance(target, ast.Name)]
    return found


@cache
def there() -> dict[str, tuple[str, ...]]:
    """The tests of every file, without importing it."""
    files = sorted(TESTS.rglob("test_*.py"))
    return {file.relative_to(TESTS).as_posix(): tuple(names_in(ast.parse(file.read_text()).body)) for file in files}


def meant(name: str) -> set[str]:
    """The tests that a name in a row stands for."""
    file, _, wanted = name.partition("::")
    return {f"{file}::{test}" for test in there().get(file, ()) if fnmatchcase(test, wanted or "*")}


def listed(lines: list[str], to_do: str) -> str:
    return "\n".join(["", *lines, to_do])


def test_every_row_has_a_behaviour_and_its_tests():
    wrong = [f"line {row.line}" for row in written()[0] if len(row.cells) != 2 or not all(row.cells) or not all(row.tests)]
    assert not wrong, listed(wrong, "A row of tests/ledger.md is `| behaviour | tests |`, and neither cell is empty.")


def test_every_test_that_a_row_names_is_there():
    gone = [f"line {row.line}: {name}" for row in written()[0] for name in row.tests if not meant(name)]
    assert not gone, listed(gone, GONE)


def test_every_test_is_named_in_a_row():
    named = {test for row in written()[0] for name in row.tests for test in meant(name)}
    missing = [f"{file}::{test}" for file, tests in there().items() for test in tests if f"{file}::{test}" not in named]
    assert not missing, listed(missing, TO_DO)


def test_every_test_file_is_named_in_a_row():
    named = {name.partition("::")[0] for row in written()[0] for name in row.tests}
    missing = [file for file in there() if file not in named]
    assert not missing, listed(missing, TO_DO)


def test_what_went_is_gone_and_has_a_reason():
    wrong = [f"line {row.line}: no reason" for row in written()[1] if len(row.cells) != 3 or not all(row.cells)]
    back = [f"line {row.line}: {name} is there" for row in written()[1] for name in row.tests if meant(name)]
    assert not wrong + back, listed(wrong + back, "A row of what went is `| behaviour | tests that went | reason |`.")


def test_a_test_of_every_form_is_seen():
    source = "def test_a(): ...\nclass TestB:\n    async def test_c(self): ...\nTestD = Machine.TestCase\ndef helper(): ...\n"
    assert names_in(ast.parse(source).body) == ["test_a", "TestB::test_c", "TestD"]
