"""docs/how-to/first-gpu.md: every point has a row, a status, and tests that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "first-gpu.md").read_text()
STATUSES = ("fixed", "disproved", "part", "open")


def rows(heading: str) -> dict[int, list[str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {int(row[0]): row[1:] for row in cells if row[0].isdigit()}


DEFECTS, LOSSES = rows("What would break"), rows("What would cost speed")


def test_all_are_there() -> None:
    assert list(DEFECTS) == list(range(1, 21)) and list(LOSSES) == list(range(1, 12))


@pytest.mark.parametrize("row", [*DEFECTS.values(), *LOSSES.values()], ids=lambda row: row[0][:40])
def test_what_is_called_mended_names_a_test_that_there_is(row: list[str]) -> None:
    _, now, named, status = row
    assert status.startswith(STATUSES), status
    tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", named)
    if status.startswith(("fixed", "part")) and "(text)" not in status:
        assert tests or named.startswith("as above"), now
    for file, name in tests:
        (path,) = (path for kind in ("unit", "live") for path in (ROOT / "tests" / kind).rglob(file))
        assert name in {
            node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
        }


@pytest.mark.parametrize("row", [*DEFECTS.values(), *LOSSES.values()], ids=lambda row: row[0][:40])
def test_the_files_it_names_are_there(row: list[str]) -> None:
    sources = [path.as_posix() for path in (ROOT / "src" / "muster").rglob("*.py")]
    for name in re.findall(r"`([a-z_0-9/]+\.py)`", row[1]):
        assert any(path.endswith("/" + name) for path in sources), name
