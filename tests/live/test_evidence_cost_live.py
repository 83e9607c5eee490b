"""``benchmarks/evidence_cost.py``: of two kills one is looked at, of a stopped rank the evidence comes in time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "evidence_cost.py"


def test_it_measures_crashes_with_and_without_a_look_and_a_hang(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(PROGRAM), "--pairs", "2", "--hangs", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    crash, hang = found["crash"], found["hang"]
    assert crash["looked_at"] == 2 and crash["with_s"] > 0 < crash["without_s"]
    assert crash["verdict"].startswith("not resolvable with 2 pairs")
    assert hang["named"] == 1 and 0 < hang["took_s"] <= 0.35, "the limit is the supervisor's own"
