"""``benchmarks/evidence_cost.py``: of two kills one is looked at, of a stopped rank the evidence comes in time; and
``watching_cost.py``: what is always on is counted part by part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_measures_crashes_with_and_without_a_look_and_a_hang(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "evidence_cost.py"), "--pairs", "2", "--hangs", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    crash, hang = found["crash"], found["hang"]
    assert crash["looked_at"] == 2 and crash["with_s"] > 0 < crash["without_s"]
    assert crash["verdict"].startswith("not resolvable with 2 pairs")
    assert hang["named"] == 1 and 0 < hang["took_s"] <= 0.35, "the limit is the supervisor's own"


def test_it_counts_what_is_always_on(tmp_path):
    out = tmp_path / "out.json"
    given = ["--seconds", "5", "--length", "64", "--trials", "1", "--json", str(out)]
    command = [sys.executable, str(BENCHMARKS / "watching_cost.py"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["steps"] > 0 and found["collectives_a_step"] >= 1
    parts = found["of_the_ranks"]
    assert set(parts) >= {"arrivals", "evidence", "looks", "use of hosts", "flight recorder"}
    assert 0 < parts["arrivals"] < 0.05 and parts["use of hosts"] >= 0, "the hooks are in the run's programs"
