"""What each test cost: ``tests/plugin/times.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin import times

ROOT = Path(__file__).parents[3]

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.plugin import times
def pytest_configure(config):
    config.pluginmanager.register(times)
"""
TESTS = """
import subprocess, sys, time, pytest
def burn():
    until = time.process_time() + 0.1
    while time.process_time() < until: pass
def test_own(): burn()
def test_child(): subprocess.run([sys.executable, "-S", "-c",
    "import time\\nwhile time.process_time() < 0.1: pass"], check=True)
@pytest.fixture
def slow_end():
    yield
    burn()
    assert False
def test_end(slow_end): pass
@pytest.mark.skip
def test_skipped(): pass
def test_failed(): assert False
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_test_has_a_line_whichever_process_ran_it(tmp_path, workers):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    env = os.environ | {"MUSTER_TIMES": str(tmp_path / "new" / "times.jsonl"), "PYTEST_ADDOPTS": ""}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "--dist", "loadfile"]
    subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, check=False)
    rows = {(row["file"], row["name"]): row for row in times.read(tmp_path / "new" / "times.jsonl")}
    assert len(rows) == 10
    for file in ("test_a.py", "test_b.py"):
        mine = {name: row for (of, name), row in rows.items() if of == file}
        outcomes = {name: row["outcome"] for name, row in mine.items()}
        assert outcomes == {
            "test_own": "passed", "test_child": "passed", "test_end": "failed", "test_skipped": "skipped",
            "test_failed": "failed",
        }  # fmt: skip
        assert mine["test_own"]["cpu_s"] >= 0.1 and mine["test_end"]["cpu_s"] >= 0.1
        assert mine["test_child"]["child_cpu_s"] >= 0.1 > mine["test_child"]["cpu_s"]
        assert all(row["wall_s"] > 0 for row in mine.values())
    assert set(times.seconds_by_file(tmp_path / "new" / "times.jsonl")) == {"test_a.py", "test_b.py"}


def test_the_table_has_the_slowest_live_tests_apart(tmp_path):
    def row(file, name, wall_s, cpu_s, child_cpu_s=0.0):
        cost = {"wall_s": wall_s, "cpu_s": cpu_s, "child_cpu_s": child_cpu_s}
        return {"file": file, "name": name, "outcome": "passed", **cost}

    rows = [row("tests/unit/test_a.py", f"test_{number}", number, 1.0) for number in range(100)]
    rows.append(row("tests/unit/test_a.py", "test_busy", 0.5, 1.0, 70.0))
    rows.append(row("tests/live/test_live.py", "test_run", 60.0, 2.0, 40.0))
    (tmp_path / "times").write_text("".join(json.dumps(each) + "\n" for each in rows))
    live, others = times.table(times.read(tmp_path / "times")).split("101 other tests")
    assert "1 live tests: 60 s wall, 42 s CPU" in live and live.count("test_run") == 2
    by_wall, by_cpu = others.split("slowest by CPU")
    assert "test_99" in by_wall and f"test_{99 - times.ROWS}\n" not in by_wall
    assert by_cpu.splitlines()[1].split() == ["0.5", "71.0", "70.0", "tests/unit/test_a.py::test_busy"]
