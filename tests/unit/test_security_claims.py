"""SECURITY.md and docs/explanation/faults.md say nothing that no test shows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("SECURITY.md", "docs/explanation/faults.md")}
TEST = r"`(test_\w+\.py)::(test_\w+)`"
NAMED = [found for text in PAGES.values() for found in re.findall(TEST, text)]
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
#: What makes objects of bytes: whoever wrote the bytes then runs code.
UNPICKLES = re.compile(
    r"\b(import|from) (pickle|marshal|shelve|dill|cloudpickle)\b|\btorch\.load\(|\ballow_pickle=True|"
    r"\b(broadcast|gather|all_gather|scatter|send|recv)_object(_list)?\b|\byaml\.(load|unsafe_load)\(|(?<![.\w])eval\("
)


@pytest.mark.parametrize(("file", "function"), sorted(set(NAMED)))
def test_every_test_that_is_named_is_there(file, function):
    assert re.search(rf"^def {function}\(", FILES[file].read_text(), re.MULTILINE)


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 20), ("docs/explanation/faults.md", 16)])
def test_every_row_names_a_test(page, least):
    rows = [line for line in PAGES[page].splitlines() if line.startswith("|") and not re.fullmatch(r"\|[-:| ]+", line)]
    claims = [row for row in rows if not row.endswith("shown by |")]
    assert len(claims) >= least
    assert not [row for row in claims if not re.search(TEST, row.rstrip("| ").rpartition(" | ")[2])]


def test_every_paragraph_that_claims_something_names_a_test():
    """Beside the tables: what is asked of the reader, and how the page is read, claims nothing."""
    page = PAGES["SECURITY.md"].partition("## In short")[2]
    paragraphs = re.split(r"\n(?:\n|(?=\* ))", page)
    free = ("|", "#", "He can", "Three readers", "Known gaps")
    claims = [one.strip() for one in paragraphs if one.strip() and not one.strip().startswith(free)]
    assert len(claims) >= 7
    assert [one for one in claims if not re.search(TEST, one)] == []


def lines_with(pattern):
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (ROOT / "src" / "muster").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_nothing_of_ours_unpickles():
    assert not lines_with(UNPICKLES)


def test_code_in_a_models_folder_is_not_run():
    """transformers runs none unless it is asked to."""
    assert not lines_with("trust_remote_code=True")
