"""``tools/house.py --check`` refuses words in docstrings, comments, messages and pages, and subjects of commits."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import facts
import house

CODE = '''"""Told by whoever asks."""
TOLD = {"told": 1}  # mended
beside = f"lonely {TOLD}"  # plain
"""The key ``rung`` is a name.

But this is done anew, for
ever."""
'''


def test_words_in_docstrings_comments_and_messages_and_not_in_names():
    seen = facts.words_of(CODE, ast.parse(CODE))
    assert sorted((line, text.split(":")[0]) for line, text in seen) == [
        (1, "told"), (1, "whoever"), (2, "mended"), (3, "lonely"), (6, "anew"), (6, "for ever"),
    ]  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/page.md", "src/muster/core/x.py", "src/table.yaml"])
def test_a_file_with_such_a_word_breaks_the_limit_unless_it_is_allowed(repository, monkeypatch, page):
    text = "# somebody's text, `nobody` and [a page](beside.md)\n"
    repository.write({page: text})
    columns = {"checkout": house.measured(repository.root)}
    (found,) = columns["checkout"]["src"]["words"]
    assert found.startswith(f"{page}:1: somebody: # somebody's text, ________ and [a page____")
    assert any(line.startswith("refused words") for line in house.broken(columns))
    monkeypatch.setattr(house, "WORDS_ALLOWED", {(page, "somebody"): "a reason"})
    assert house.measured(repository.root)["src"]["words"] == []


@pytest.mark.parametrize("subject", ["no area", "core: " + "x" * 67, "What a fresh reading found: this and that"])
def test_subjects_of_commits_after_the_base(repository, subject):
    repository.write({"tools/base-commit": f"{repository.base}\n"})
    repository.commit()
    assert house.bad_subjects(repository.root) == []
    repository.git("commit", "-q", "--allow-empty", "-m", subject)
    (problem,) = house.bad_subjects(repository.root)
    assert problem.endswith(f": {subject}")
    (repository.root / "tools/base-commit").write_text("0" * 40 + "\n")
    assert house.bad_subjects(repository.root) == [], "a clone without the base"
