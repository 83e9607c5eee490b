"""SECURITY.md says nothing that no test shows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
#: What makes objects of bytes: whoever wrote the bytes then runs code.
UNPICKLES = re.compile(
    r"\b(import|from) (pickle|marshal|shelve|dill|cloudpickle)\b|\btorch\.load\(|\ballow_pickle=True|"
    r"\b(broadcast|gather|all_gather|scatter|send|recv)_object(_list)?\b|\byaml\.(load|unsafe_load)\(|(?<![.\w])eval\("
)


@pytest.mark.parametrize(("file", "function"), sorted(set(NAMED)))
def test_every_test_that_is_named_is_there(file, function):
    assert re.search(rf"^def {function}\(", FILES[file].read_text(), re.MULTILINE)


def test_every_row_names_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not re.fullmatch(r"\|[-| ]+", line)]
    claims = [row for row in rows if row != "| what | shown by |"]
    assert len(claims) >= 20 and len(NAMED) >= len(claims)
    assert not [row for row in claims if not re.search(r"`test_\w+\.py::test_\w+`", row.split("|")[2])]


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
