"""What ``tests/second_try.py`` and ``tests/conftest.py`` do to tests: a small suite in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUITE = """
import pathlib, pytest

tries = pathlib.Path(__file__).with_name("tries")

@pytest.fixture(scope="module")
def shared():
    yield []

@pytest.mark.timing("its clock is the machine's")
def test_second(shared):
    number = len(tries.read_text()) if tries.exists() else 0
    tries.write_text("x" * (number + 1))
    assert number == 1, f"try {number}"

@pytest.mark.timing("never fast enough")
def test_never(shared):
    assert not "slow"

def test_once(shared):
    assert not tries.with_name("once").exists()
    tries.with_name("once").touch()
    assert False, "no second try"
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    # PYTEST_ADDOPTS: the -q of whoever runs this would take the inner summary away.
    env = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(TESTS), "MUSTER_TESTS_RAN": str(folder / "ran")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_suite.py"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["here", "worker"])
def test_only_what_depends_on_the_machine_is_tried_twice_and_the_summary_says_so(tmp_path, workers):
    code, output = run(tmp_path, *workers)
    assert code == 1 and "2 failed, 1 passed" in output
    _, _, summary = output.partition("the second try counted")
    assert "test_suite.py::test_second: passed; the first try: " in summary
    assert "(its clock is the machine's)" in summary
    assert "test_suite.py::test_never: failed; the first try: " in summary
    assert "test_once:" not in summary and "no second try" in output
    code, output = run(tmp_path, *workers)  # everything ran: nothing is left, and that is no failure
    assert code == 0 and "passed" not in output
