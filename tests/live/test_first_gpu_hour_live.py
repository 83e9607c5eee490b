"""``benchmarks/first_gpu_hour.py`` runs at all, tiny and on the CPU; RESULTS.md has one H100's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "first_gpu_hour.py"


def smoke(out: Path, *arguments: str) -> dict:
    command = [sys.executable, str(PROGRAM), "--smoke", "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "hour.json").read_text())


def test_kernels_are_compared_with_their_reference(tmp_path: Path) -> None:
    found = smoke(tmp_path, "--only", "varlen")
    assert list(found) == ["varlen"] and found["varlen"]["ended"] == "exit code 0"
    assert {each["says"] for each in found["varlen"]["claims"]} == {"proves"}
    assert max(found["varlen"]["figures"]["error_padded"]) < 1e-5


def test_all_eighteen_commands_run(tmp_path: Path) -> None:
    found = smoke(tmp_path)
    assert len(found) == 18
    for name, result in found.items():
        assert result["ended"] == "exit code 0" and result["figures"], name
        assert "refutes" not in [each["says"] for each in result["claims"]], name
    assert found["trace"]["figures"]["trace"]["rows"] > 0
    assert found["recovery"]["figures"]["cases"]["rank_kill"]["l_s"] > 0
