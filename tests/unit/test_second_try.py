"""What ``tests/second_try.py`` and ``tests/conftest.py`` do to tests: a small suite in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TRIES = """
import pathlib, pytest

def number(name):
    tries = pathlib.Path(__file__).with_name(name)
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    return len(tries.read_text())
"""
LIVE = f"""{TRIES}
pytestmark = pytest.mark.live

def test_busy():
    print("it took long")
    assert number("busy") == 2, "the machine was busy"

@pytest.fixture
def place():
    assert number("place") == 2, "no place"

def test_place(place):
    pass

def test_good():
    assert number("good") == 1, "what has passed is not run again"
"""
BROKEN = f"""{TRIES}
pytestmark = pytest.mark.live

def test_broken():
    assert not number("broken"), "as it is"

def test_skipped():
    assert number("skipped") == 2, "and then it is skipped"
    pytest.skip("no second chance")

def test_mended():
    assert number("mended") == 2
"""
UNIT = f"""{TRIES}
def test_unit():
    assert number("unit") == 2, "no second try"
"""
MANY = f"""{TRIES}
@pytest.mark.live
@pytest.mark.parametrize("which", range(5))
def test_many(which):
    assert number(f"many{{which}}") == 2
"""


def run(folder: Path, files: dict[str, str], *arguments: str, second: bool = True) -> tuple[int, str, str]:
    """(exit status, output, notes)"""
    for name, text in files.items():
        path = folder / "suite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "suite" / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    notes = folder / "notes"
    # PYTEST_ADDOPTS: the -q of whoever runs this would take the inner summary away.
    env = {
        **os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "MUSTER_TIMES": "",
        "MUSTER_RECORD": "", "MUSTER_TESTS_RAN": str(folder / "ran"), "MUSTER_SECOND_TRY": str(notes) if second else "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder / "suite", env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, notes.read_text() if notes.exists() else ""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["here", "worker"])
def test_a_live_test_that_passes_at_the_second_try_is_told_loudly_and_fails_nothing(tmp_path, workers):
    code, output, notes = run(tmp_path, {"live/test_live.py": LIVE}, *workers)
    assert code == 0 and "2 passed only on the second try" in output and " failed" not in output.splitlines()[-1]
    _, _, summary = output.partition("LIVE TESTS THAT PASSED ONLY ON THE SECOND TRY")
    for name, reason in (("busy", "the machine was busy"), ("place", "no place")):
        assert f"live/test_live.py::test_{name}\n" in summary and reason in summary
        assert f"PASSED ONLY ON THE SECOND TRY: live/test_live.py::test_{name}\n" in notes and reason in notes
    assert "it took long" in summary and "it took long" in notes
    code, output, again = run(tmp_path, {}, *workers)  # everything ran: nothing is left, and that is no failure
    assert code == 0 and "passed" not in output and again == notes


def test_what_fails_twice_fails_and_a_unit_test_has_one_try(tmp_path):
    code, output, notes = run(tmp_path, {"live/test_broken.py": BROKEN, "test_unit.py": UNIT})
    assert code == 1 and "3 failed" in output and "1 passed only on the second try" in output
    assert "\nPASSED ONLY ON THE SECOND TRY: live/test_broken.py::test_mended\n" in f"\n{notes}"
    for test in ("live/test_broken.py::test_broken", "live/test_broken.py::test_skipped"):
        assert f"FAILED TWICE: {test}\n" in notes and f"FAILED {test}" in output
    assert "\nFAILED: test_unit.py::test_unit\n" in f"\n{notes}" and "no second try" in notes
    assert (tmp_path / "suite" / "unit").read_text() == "x"


def test_no_second_try_where_nobody_asked_or_too_many_failed(tmp_path):
    code, output, notes = run(tmp_path / "plain", {"live/test_live.py": LIVE}, second=False)
    assert code == 1 and "second try" not in output and not notes
    code, output, notes = run(tmp_path / "many", {"live/test_many.py": MANY})
    assert code == 1 and "5 failed" in output and notes.count("ONE OF 5 LIVE TESTS: TOO MANY FOR SECOND TRIES") == 5
