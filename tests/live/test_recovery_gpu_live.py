"""``benchmarks/recovery_gpu.py`` runs at all, on a tiny model and the CPU; RESULTS.md has one H100's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "recovery_gpu.py"


def smoke(tmp_path, *cases):
    out = tmp_path / "out.json"
    command = [sys.executable, str(PROGRAM), "--smoke", "--json", str(out), "--only", *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_the_gpu_recovery_benchmark_breaks_a_rank_in_each_way(tmp_path):
    cases = ("rank_kill", "out_of_memory", "device_assert")
    found = smoke(tmp_path, *cases)
    for case in cases:
        figures = found["cases"][case]
        assert figures["trials"] == 1 and figures["steps_again"] <= 1
        assert sum(figures["stages_s"].values()) == pytest.approx(figures["l_s"], abs=0.01), "stages add up to L"
        for stage in ("noticed", "placed", "built", "stepped"):
            assert figures["stages_s"][stage] > 0, stage
    snapshot = found["snapshot"]
    assert snapshot["stall_s"] > 0 and snapshot["stall_s_per_gb"] > snapshot["stall_s"], "a tiny state: under a GB"
    assert snapshot["copies"]["dev_shm_gb_per_s"] > 0 and snapshot["copies"]["pageable_gb_per_s"] > 0
    assert found["standby_mib"] is None, "no GPU is here to ask"


@pytest.mark.soak
def test_standbys_without_a_context_are_measured_beside(tmp_path):
    found = smoke(tmp_path, "rank_kill_imports")
    assert found["cases"]["rank_kill_imports"]["l_s"] > 0 and "snapshot" not in found
