"""The benchmarks run at all, on tiny shapes, and what they report has the shape and the sense that readers rely on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def smoke(tmp_path: Path, program: str, *arguments: str) -> dict:
    """Run a benchmark's smoke mode without any peer installed; what its --json says."""
    out = tmp_path / "out.json"
    environment = {**os.environ, "MUSTER_BENCH_HOME": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / program), "--smoke", "--json", str(out), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_the_gpu_benchmark_trains_tiny_shapes_on_the_cpu(tmp_path: Path) -> None:
    found = smoke(tmp_path, "trainer_gpu.py", "--only", "1b", "8b-lora", "--systems", "muster")
    for shape in ("1b", "8b-lora"):
        row = found["shapes"][shape]["muster"]
        assert row["tokens_per_s"] > 0 and row["peak_gib"] > 0, row
        # Attention counted whole is more work than counted causally; no data sheet, so no MFU.
        assert row["tflops"]["full"] >= row["tflops"]["causal"] and row["mfu"] is None
    assert found["ceiling_tflops"]["before"] > 0


def test_the_cpu_benchmark_measures_preparation(tmp_path: Path) -> None:
    found = smoke(tmp_path, "trainer_cpu.py", "--only", "prepare")
    for workers in ("workers_1", "workers_2"):
        part = found["prepare"][workers]
        assert list(part) == ["muster"], "no peer is installed here"
        assert part["muster"]["tokens"] > 5000 and part["muster"]["tokens_per_s"] > 0
    assert found["prepare"]["workers_1"]["muster"]["tokens"] == found["prepare"]["workers_2"]["muster"]["tokens"]


def test_rates_leave_the_warm_up_out() -> None:
    from loops.job import measured

    # One slow first step, then 0.5 s each of 100 tokens, 40 of them supervised.
    ends = [10_000_000_000 + n * 500_000_000 for n in range(6)]
    found = measured({"ends_ns": ends, "tokens": [100] * 6, "supervised": [40] * 6}, began_ns=4_000_000_000, warmup=2)
    assert found.step_s == pytest.approx(0.5)
    assert found.tokens_per_s == pytest.approx(200.0)
    assert found.supervised_per_s == pytest.approx(80.0)
    assert found.start_s == pytest.approx(6.0)


def test_a_peer_that_is_not_installed_reports_null_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_BENCH_HOME", str(tmp_path))
    from peers.recovery import SHAPES, measure_peers

    found = measure_peers(1, length=80)
    assert set(found) == {"torchrun", "torchrun_tuned", "nvrx", "nvrx_tuned", "torchft", "torchft_tuned"}
    for figures in found.values():
        for case in SHAPES:
            assert figures[f"{case}_s"] is None and "setup.sh" in figures[f"{case}_why"]
