"""``benchmarks/check_gpu.py`` runs at all, on a tiny model and the CPU; RESULTS.md has one H100's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "check_gpu.py"


def test_the_gpu_check_benchmark_measures_each_part(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(PROGRAM), "--smoke", "--json", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["passive"]["looks"] == 2 and found["passive"]["rungs_s"]["settings"] >= 0
    assert {figure["what"] for figure in found["full"]["figures"]} >= {"matmul", "all_reduce", "loopback"}
    assert set(found["start"]) == {"off", "passive"} and all(mode["seconds"] > 0 for mode in found["start"].values())
    beside = found["beside"]
    assert beside["looks"] >= 1 and beside["step_s"] > 0 and beside["gpu_mib"] is None, "no GPU is here to ask"
