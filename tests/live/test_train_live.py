"""The trainer as a whole: figures while it trains, under torchrun, stopped by a signal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from trainranks import prepared_run, run_attempt, small

from muster.core import event_log

pytestmark = pytest.mark.live


def test_held_out_figures_are_the_same_bits_at_any_world_size(tmp_path: Path) -> None:
    """With exact sums the weights agree, so the held-out loss, the answers and the verdicts must too."""
    seen = []
    for ranks in (1, 2, 3):
        spec = small(
            tmp_path / "cache",
            training__exact=True,
            training__steps=3,
            evaluation={
                "at_start": True, "every_steps": 2, "num_sequences": 7, "num_questions": 5, "final_num_questions": 7,
                "samples": 2, "max_new_tokens": 12,
            },
        )  # fmt: skip
        done = run_attempt(tmp_path / str(ranks), spec, ranks=ranks)
        assert done.codes == [0] * ranks, done.errors[0]
        figures = [{**event.detail, "duration_ns": 0, "step": event.step} for event in done.of("eval")]
        samples = [(event.step, event.detail["completion"]) for event in done.of("generation")]
        seen.append((figures, samples))
    figures, samples = seen[0]
    assert [found["step"] for found in figures] == [0, 2, 3]
    assert [found["questions"] for found in figures] == [5, 5, 7]
    assert len(samples) == 6
    assert figures[-1]["loss"] < figures[0]["loss"]
    assert all(0.0 <= found["execution_accuracy"] <= 1.0 and "baseline_accuracy" in found for found in figures)
    assert seen[1] == seen[0] and seen[2] == seen[0]


def test_a_trace_and_the_phases_of_a_life(tmp_path: Path) -> None:
    spec = small(
        tmp_path / "cache",
        training__steps=4,
        training__profile={"trace_step": 2},
        checkpoint__every_steps=2,
        evaluation={"at_start": True, "num_sequences": 4, "samples": 0},
    )
    done = run_attempt(tmp_path / "run", spec, ranks=2)
    assert done.codes == [0, 0], done.errors[0]
    phases = [event.phase for event in done.of("phase.changed")]
    assert phases == ["start", "restore", "eval", "warmup", "train", "checkpoint", "train", "eval", "checkpoint"]
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "traces" / f"step-2.rank-{rank}.json").read_text())
        assert any("backward" in str(event.get("name", "")).lower() for event in trace["traceEvents"])
    assert {event.step for event in done.of("checkpoint.committed")} == {2, 4}
    for event in done.of("step"):
        assert event.detail["data_wait_ns"] >= 0 and event.detail["tflops_per_rank"] > 0


def torchrun(run_dir: Path) -> subprocess.Popen[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
            "-m", "muster.rank.worker", "--run-dir", str(run_dir),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def steps_in(run_dir: Path) -> list[int]:
    return [event.step for _, event in event_log.read(run_dir / "events") if event.kind == "step" and event.step]


def test_under_torchrun_a_sigterm_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prepared_run(run_dir, small(tmp_path / "cache", training__steps=400))
    first = torchrun(run_dir)
    deadline = time.monotonic() + 60
    while not steps_in(run_dir) and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=60)
    saved = [event for _, event in event_log.read(run_dir / "events") if event.kind == "checkpoint.committed"]
    assert len(saved) == 1, output
    stopped = max(steps_in(run_dir))
    assert saved[0].step == stopped < 400
    prepared_run(run_dir, small(tmp_path / "cache", training__steps=stopped + 2))
    second = torchrun(run_dir)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert steps_in(run_dir)[-2:] == [stopped + 1, stopped + 2]
