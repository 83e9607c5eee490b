"""The tables of ``tests/sizes.py`` name tests that are there."""

import re
from pathlib import Path

import pytest
import sizes

TESTS = Path(__file__).parents[1]
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
CORE = [test for tests in sizes.CORE.values() for test in tests]


@pytest.mark.parametrize("test", [*sizes.SLOW, *CORE, *sizes.NIGHTLY])
def test_every_test_of_the_tables_is_there(test):
    file, _, function = test.partition("::")
    assert file in FILES
    assert re.search(rf"^def {re.escape(function.partition('[')[0])}", FILES[file].read_text(), re.MULTILINE)


def test_what_ci_leaves_out_is_covered_by_a_test_that_it_runs():
    for reason in sizes.NIGHTLY.values():
        for test in re.findall(r"test_\w+\.py(?:::test_\w+(?:\[.+\])?)?", reason):
            assert test.partition("::")[0] in FILES and test not in sizes.NIGHTLY, reason
    assert not set(CORE) & sizes.NIGHTLY.keys()


def test_file_names_are_unique():
    assert len(FILES) == len(list(TESTS.rglob("test_*.py")))
