"""Seconds and peak memory of reading a long run: status, report, compare, and the first page of ``watch --web``.

    python benchmarks/reading.py [--steps 10000 100000 1000000] [--again] [--json FILE]

The run is written by the product's own writer (``core.event_log.EventLog``) with the details that a trainer on a
processor writes: three attempts, a rank that fails, steps that are taken again, phases, saves and evaluations. Each
verb is a program of its own; its memory is the most that was resident (``wait4``), its seconds those on the wall, the
start of Python included. ``--home`` keeps the runs; ``--again``: each verb a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.config import load
from muster.core.event_log import EventLog
from muster.storage import run_registry

SECOND = 1_000_000_000
STEP_NS = 38_000_000
WALL = 1_795_000_000 * SECOND
RUN_FILE = """\
name: long
model:
  config: {model_type: llama, hidden_size: 32, num_attention_heads: 4}
  tokenizer: {kind: word}
data: {sources: [{type: text2sql}]}
training: {steps: 2000000}
"""
PAGE = """
import sys
from muster.app.web.watch_page import Looks
from muster.storage import run_registry
looks = Looks([run_registry.find(sys.argv[1])], 1.0)
looks.look(looks._watchers[0])
assert looks.answer({})["runs"][0]["version"] == 1
"""


@dataclass
class SteppedClock:
    """Moves where it is put."""

    ns: int = 10**12

    def monotonic_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return WALL + self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


def write_run(home: Path, steps: int, seed: int = 1) -> str:
    """Write a run of so many steps below ``home``; return its id."""
    run_id = f"long-{steps}-{seed}"
    spec = load.loads(RUN_FILE).spec.model_dump_json()
    run = run_registry.create(run_id, home / "runs" / run_id, run_file=RUN_FILE, resolved=spec)
    rng, clock = random.Random(seed), SteppedClock()
    logs = {
        name: EventLog(run_id, run.events, writer, attempt, clock)
        for name, writer, attempt in (("client", "client", 0), ("supervisor", "supervisor", 1))
    }
    logs["client"].append("run.submitted", detail={"spec_digest": "0" * 64, "backend": "local", "version": "0"})
    clock.sleep(1)
    boss = logs["supervisor"]
    boss.append("supervisor.started", detail={"term": 1, "pid": 1})
    price = {"gpus": 2, "role": "active", "usd_per_hour": 24.0}
    boss.append("host.allocated", host="host-0", detail=price)
    ends = [steps // 3, 2 * steps // 3, steps]
    first = 1
    for attempt, last in enumerate(ends, 1):
        cause = (
            {"cause": f"i{attempt - 1}", "resume_step": first - 1, "resume_attempt": attempt - 1} if first > 1 else {}
        )
        world = {"world_size": 2, "layout": {"dp_shard": 2}, "hosts": {"host-0": [0, 1]}}
        boss.append("attempt.started", attempt=attempt, detail={**world, **cause})
        host = EventLog(run_id, run.events, "host-0", attempt, clock)
        for rank in (0, 1):
            host.append("phase.changed", rank=rank, phase="train", detail={})
        for step in range(first, last + 1):
            took = round(STEP_NS * rng.uniform(0.95, 1.2))
            clock.ns += took + 40_000  # the event is written after the step's end
            host.append("step", rank=0, step=step, detail=step_detail(rng, step, took))
            if step % 5_000 == 0:
                uri = f"checkpoints/step-{step:08d}.a{attempt}"
                saved = {"tier": "disk", "uri": uri, "bytes": 1 << 20}
                host.append("checkpoint.committed", step=step, detail=saved)
                host.append("eval", rank=0, step=step, detail={"loss": 2.0 + 1 / step})
        host.close()
        first = max(1, last - 20)  # steps that are taken again
        if last < steps:
            found = {"incident_id": f"i{attempt}", "incident": "rank_exit", "evidence": "rank 1 was killed"}
            boss.append("incident.detected", host="host-0", rank=1, attempt=attempt, detail=found)
            chosen = {"incident_id": f"i{attempt}", "action": "restart", "reason": "a rank exited"}
            boss.append("incident.decided", attempt=attempt, detail=chosen)
            clock.sleep(2)
    for log in logs.values():
        log.close()
    return run_id


def step_detail(rng: random.Random, step: int, took: int) -> dict[str, Any]:
    flops = 7_247_757_312.0
    return {
        "loss": 2 + 4 * 0.9999**step + rng.gauss(0, 0.05), "grad_norm": rng.uniform(0.5, 2.0), "learning_rate": 3e-4,
        "step_ns": took, "tokens": 4096 - rng.randrange(64), "supervised_tokens": 4000 - rng.randrange(64),
        "padding_tokens": rng.randrange(64), "data_wait_ns": rng.randrange(200_000), "stall_ns": rng.randrange(900_000),
        "tokens_per_s": 4096 / took * 1e9, "memory_bytes": 934_805_504 + 4096 * rng.randrange(9), "rows": 8,
        "padding_rounds": 0, "compute_ns": round(took * 0.8), "comm_ns": rng.randrange(3_000_000),
        "host_gap_ns": rng.randrange(2_000_000), "model_flops": flops, "tflops_per_rank": flops / took / 2e3,
        "mfu": flops / (took / 1e9 * 2e12), "snapshot_step": max(0, step - 1),
    }  # fmt: skip


def measured(argv: list[str]) -> dict[str, float]:
    """Seconds and MiB of a program, which must succeed."""
    began = time.monotonic()
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{argv[-2:]} ended with {child.returncode}")
    return {"s": round(time.monotonic() - began, 2), "processor_s": round(used.ru_utime + used.ru_stime, 2),
            "mib": round(used.ru_maxrss / 1024, 1)}  # fmt: skip


def verbs(run: str, other: str) -> dict[str, list[str]]:
    muster = [str(Path(sys.executable).parent / "muster")]
    return {
        "status": [*muster, "status", run],
        "report": [*muster, "report", run],
        "compare": [*muster, "compare", run, other],
        "page": [sys.executable, "-c", PAGE, run],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--home", type=Path, help="keep the runs here, and use those that are there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = given.home or Path(folder)
        os.environ["MUSTER_HOME"] = str(home)
        for steps in given.steps:
            runs = [f"long-{steps}-{seed}" for seed in (1, 2)]
            for seed, run in enumerate(runs, 1):
                if not (home / "runs" / run).is_dir():
                    write_run(home, steps, seed)
            size = sum(path.stat().st_size for path in (home / "runs" / runs[0]).rglob("*") if path.is_file())
            for look in ("first", "again")[: 1 + given.again]:
                for verb, argv in verbs(*runs).items():
                    row = {"steps": steps, "look": look, "verb": verb, **measured(argv), "bytes_a_step": size // steps}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
