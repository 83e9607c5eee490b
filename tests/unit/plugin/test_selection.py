"""The tests that a change can affect: none is missed. ``tests/plugin/closure.py``, ``tests/plugin/select.py``."""

import json
from pathlib import Path

import pytest

from tests.plugin import select
from tests.plugin.closure import INPUTS, ROOT, Graph, covers, matches

EVERY = {"test_search.py", "test_families.py", "test_words.py", "test_lazy.py", "test_program.py", "test_page.py"}


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("src/muster/plan/search.py", {"test_search.py"}),
        ("src/muster/core/deep.py", {"test_lazy.py"}),
        # Imported in a function by `search`, and at the top by the fake that the folder's conftest imports.
        ("src/muster/core/units.py", {"test_search.py", "test_families.py"}),
        ("tests/fakes/clock.py", {"test_search.py", "test_families.py"}),
        ("tests/unit/plan/conftest.py", {"test_search.py", "test_families.py"}),
        ("src/muster/core/words.py", {"test_words.py", "test_program.py", "test_page.py"}),
        ("src/muster/plan/__init__.py", {"test_search.py", "test_families.py"}),
        ("src/muster/plan/member.py", {"test_families.py"}),
        ("src/muster/plan/tables/prices.csv", {"test_search.py", "test_families.py"}),
        ("src/muster/rank/program.py", {"test_program.py"}),
        ("src/muster/rank/__init__.py", {"test_program.py", "test_lazy.py"}),
        ("tools/helper.py", {"test_page.py"}),
        ("docs/page.md", {"test_page.py"}),
        ("docs/other.md", set()),
        ("tests/unit/core/test_words.py", {"test_words.py"}),
        ("pyproject.toml", EVERY),
        ("tests/conftest.py", EVERY),
        ("tests/plugin/select.py", EVERY),
        ("requirements/all.lock", EVERY),
    ],
)
def test_a_changed_file_selects_what_depends_on_it(repository, path, tests):
    repository.write({path: "# changed\n"})
    assert repository.affected() == tests
    repository.commit()
    assert repository.affected() == tests, "committed since the base"


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("src/muster/core/units.py", {"test_search.py", "test_families.py"}),
        ("src/muster/plan/member.py", {"test_families.py"}),
        ("src/muster/plan/tables/prices.csv", {"test_search.py", "test_families.py"}),
        ("src/muster/core/__init__.py", EVERY),
        ("tests/unit/plan/conftest.py", {"test_search.py", "test_families.py"}),
        ("docs/page.md", {"test_page.py"}),
        ("examples/a.yaml", {"test_page.py"}),
        ("tools/helper.py", {"test_page.py"}),
    ],
)
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_deleted_file_selects_what_depended_on_it(repository, path, tests, is_committed):
    (repository.root / path).unlink()
    if is_committed:
        repository.commit()
    assert repository.affected() == tests


def test_a_moved_file_selects_what_depended_on_its_old_name(repository):
    repository.git("mv", "src/muster/core/units.py", "src/muster/core/measures.py")
    assert repository.affected() == {"test_search.py", "test_families.py"}


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("examples/b.yaml", {"test_page.py"}),
        ("examples/deeper/c.yaml", set()),
        ("src/muster/plan/tables/new.csv", {"test_search.py", "test_families.py"}),
        ("tests/unit/conftest.py", EVERY),
        ("tests/unit/core/test_new.py", {"test_new.py"}),
        # Found before the fake of that name, or after it: both may be meant.
        ("tests/unit/plan/fakes/clock.py", {"test_search.py", "test_families.py"}),
    ],
)
def test_a_new_file_counts_before_git_knows_it(repository, path, tests):
    repository.write({path: "1\n"})
    assert repository.affected() == tests


def test_an_ignored_file_counts_for_nothing(repository):
    repository.write({".gitignore": "*.log\n"})
    repository.base = repository.commit()
    repository.write({"examples/b.log": "1\n"})
    assert repository.affected() == set()


def test_without_a_base_that_the_clone_has_everything_runs(repository):
    def chosen():
        _, selection = select.select(repository.root)
        return {Path(test).name for test in selection.tests}

    assert chosen() == EVERY, "no tools/base-commit"
    repository.write({select.BASE: "0" * 40 + "\n"})
    assert chosen() == EVERY, "a commit of another clone"
    repository.write({select.BASE: f"{repository.base}\n"})
    assert chosen() == set()
    repository.write({"docs/page.md": "changed\n"})
    assert chosen() == {"test_page.py"}


def test_what_passed_with_the_same_inputs_is_left_out_until_they_change(repository):
    repository.write({"src/muster/core/units.py": "KILO = 1024\n"})
    graph = Graph(repository.root)
    select.note_green(graph, graph.test_files, [])
    green = select.read_green(repository.root)
    assert repository.affected(green) == set()
    select.note_green(graph, [], ["tests/unit/plan/test_search.py"])
    assert repository.affected(select.read_green(repository.root)) == {"test_search.py"}
    repository.write({"tests/unit/plan/test_families.py": "# changed\n"})
    assert repository.affected(green) == {"test_families.py"}
    repository.write({"constraints.txt": "torch==0\n"})
    assert repository.affected(green) == EVERY, "other packages"


def test_a_changed_file_that_no_test_reads_is_named(repository):
    repository.write({select.BASE: f"{repository.base}\n", "docs/other.md": "changed\n", "docs/page.md": "changed\n"})
    _, selection = select.select(repository.root)
    assert selection.unread == ("docs/other.md",)


def test_why_names_the_chain(repository):
    graph = Graph(repository.root)
    test = "tests/unit/plan/test_search.py"
    assert graph.why(test, "src/muster/core/units.py")[-1] == "src/muster/core/units.py"
    assert graph.why("tests/unit/core/test_page.py", "docs/page.md")[1] == "docs/page.md (reads docs/page.md)"
    for each in graph.test_files:
        for path in graph.inputs(each):
            assert graph.why(each, path), (each, path)


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("docs/*.md", ["docs/a.md"], ["docs/b/a.md", "docs/a.txt"]),
        ("docs/**", ["docs/a.md", "docs/b/a.md"], ["docs", "docs2/a"]),
        ("*", ["README.md"], ["docs/a.md"]),
    ],
)
def test_patterns(pattern, matched, others):
    assert all(matches(path, pattern) for path in matched) and not any(matches(path, pattern) for path in others)


def test_a_pattern_covers_another():
    assert (
        covers("a/**", "a/b/*") and covers("a/*", "a/*") and not covers("a/*", "a/b/*") and not covers("a/b/**", "a/*")
    )


def test_declared_inputs_are_there():
    graph = Graph(ROOT)
    table = json.loads((ROOT / INPUTS).read_text())
    assert not table.keys() - set(graph.test_files)
    for test in graph.test_files:
        for pattern in graph.declared(test, "reads"):
            assert any(matches(path, pattern) for path in graph.paths), f"{test} reads {pattern}"
        for name in graph.declared(test, "loads"):
            assert name in graph.facts or graph.files_of(name), f"{test} loads {name}"
