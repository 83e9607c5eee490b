"""``benchmarks/healthy.py`` runs at all, and its figures have the right shape. What they say is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "healthy.py"


def measured(tmp_path, *words):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--quick", "--json", str(out), *words],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_the_overhead_of_a_healthy_run_is_measured(tmp_path):
    found = measured(tmp_path, "--only", "overhead", "--pairs", "1", "--steps", "6")["overhead"]
    assert found["step_s"] > 0 and found["interval_95"][0] <= found["overhead"] <= found["interval_95"][1]
    assert 0 < found["stall_s"] < found["on_step_s"], "a snapshot of every step held the loop"


def test_false_alarms_are_counted(tmp_path):
    found = measured(tmp_path, "--only", "alarms", "--minutes", "0.2")["alarms"]
    assert found["steps"] > 1 and found["minutes"] >= 0.2 and found["at_most_an_hour_95"] > 0
    assert found["gaps"] is None or sum(count for _, count in found["gaps"]["seen"]) > 50


def test_processor_time_is_read(tmp_path):
    (found,) = measured(tmp_path, "--only", "processes", "--seconds", "8", "--limits", "3")["processes"]
    assert {"rank", "rank's link", "agent", "supervisor", "watchdog", "replicator", "fork server"} <= found[
        "by_kind"
    ].keys()
    assert 0 < found["beside_the_ranks"] < 1 and found["by_kind"]["rank"]["of_one_core"] > 0.1
