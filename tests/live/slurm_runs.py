"""Runs on a live Slurm as a user starts them: by the command line, in a home of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, slurm_is_missing
from watched import Watched

#: A mark.
needs_slurm = pytest.mark.skipif(bool(MISSING := slurm_is_missing()), reason=MISSING or "there is a Slurm")
MUSTER = (sys.executable, "-P", "-m", "muster.cli.main")

RUN_FILE: dict[str, Any] = {
    "name": "on-slurm",
    "backend": "slurm",
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
        },
        "dtype": "float32",
    },
    "data": {"sources": [{"type": "random", "rows": 512}]},
    # Sums in fixed point: the losses are the same bits whatever the number of ranks, so one reference serves all.
    "training": {
        "steps": 100_000, "sequence_length": 64, "global_batch_size": 12, "micro_batch_size": 2, "exact": True,
        "optimizer": {"schedule": "constant"},
    },
    "evaluation": {"at_start": False, "num_sequences": 0, "samples": 0},
    "checkpoint": {"every_steps": 0},
    "resources": {"hosts": 3, "ranks_per_host": 2, "device": "cpu", "threads_per_rank": 1},
    "recovery": {"heartbeat_timeout_s": 2.0, "grace_s": 20.0},
    "output": {"tensorboard": False, "peak_tflops": 0.1},
}  # fmt: skip


def run_file(**changes: Any) -> dict[str, Any]:
    """``RUN_FILE`` with dotted keys changed (``__`` for the dot): ``run_file(resources__hosts=2)``."""
    found: dict[str, Any] = json.loads(json.dumps(RUN_FILE))
    for key, value in changes.items():
        *path, last = key.split("__")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


class User:
    """A user with a home directory and a shell on the login node."""

    def __init__(self, cluster: SlurmCluster, home: Path) -> None:
        self.cluster, self.home = cluster, home
        home.mkdir(parents=True, exist_ok=True)
        self.env = {**cluster.env, "MUSTER_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        for name in ("MUSTER_RUN_ID", "MUSTER_RUN_DIR", "MUSTER_MEMORY_DIR"):
            self.env.pop(name, None)

    def muster(self, *words: str, code: int | None = 0, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*MUSTER, *words], cwd=self.home, env=self.env, capture_output=True, text=True, timeout=limit_s, check=False
        )
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, spec: dict[str, Any], *more: str) -> Run:
        path = self.home / f"{spec['name']}.yaml"
        path.write_text(json.dumps(spec))  # JSON is YAML
        run_id = self.muster("submit", str(path), *more).stdout.strip()
        return Run(self, run_id)

    def end_all(self) -> None:
        """Remove all of this user's runs."""
        for path in (self.home / "runs").glob("*"):
            self.muster("down", path.name, code=None)


class Run(Watched):
    """A run that was submitted."""

    def __init__(self, user: User, run_id: str) -> None:
        super().__init__(user.home / "runs" / run_id)
        self.user, self.cluster, self.id = user, user.cluster, run_id

    # ------------------------------------------------------------ looking

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.user.muster("status", self.id, "--json").stdout)
        return found

    def jobs(self) -> list[tuple[str, str]]:
        """(id, state) of the run's jobs, oldest first."""
        text = self.cluster.ask("squeue", "-h", "-t", "all", "-o", "%A %T %j")
        rows = [line.split() for line in text.splitlines()]
        return sorted((row[0], row[1]) for row in rows if row[2].startswith(f"muster-{self.id}"))

    def nodes(self) -> dict[str, str]:
        """Host -> node in the newest job."""
        path = max(self.dir.glob("hosts-*.json"), key=lambda found: found.stat().st_mtime)
        found: dict[str, str] = json.loads(path.read_text())
        return found

    def supervisor_host(self) -> str:
        """The node whose address the lease names."""
        address = json.loads((self.dir / "lease.json").read_text())["address"][0]
        return next(name for name in self.cluster.names if self.cluster.address(name) == address)

    # ------------------------------------------------------------ waiting

    def wait_until(self, condition, what: str, timeout_s: float = 150) -> Any:  # type: ignore[no-untyped-def]
        until = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < until, f"no {what} within {timeout_s} s\n{self.story()}"
            time.sleep(0.1)
        return found

    def wait_for_step(self, step: int, timeout_s: float = 150) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}", timeout_s)

    def story(self) -> str:
        lines = [
            f"{event.wall_ns / 1e9:.2f} {event.host} a{event.attempt} {event.kind} r={event.rank} s={event.step} "
            f"{dict(event.detail)}"
            for event in self.events()
            if event.kind not in ("step", "clock.offset")
        ]
        logs = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-1200:]}"
            for path in sorted((self.dir / "logs").glob("*.log"))
            if not path.name.startswith(("replicator", "prepare"))
        ]
        return "\n".join([*lines[-60:], *logs, self.cluster.story()])


def recovery_s(run: Run, began_ns: int) -> tuple[float, int]:
    """(L in seconds, steps applied twice) of a fault at ``began_ns`` (wall): to the end of the first step beyond.

    A step that was all but done ends just after the fault; where a new attempt began, its first step counts.
    """
    steps = run.events("step")
    earlier = [event for event in steps if event.wall_ns < began_ns]
    before, attempt = max(event.step or 0 for event in earlier), max(event.attempt for event in earlier)
    later = [event for event in steps if event.wall_ns > began_ns and (event.step or 0) > before]
    first = min(event.wall_ns for event in [e for e in later if e.attempt > attempt] or later)
    again = {event.step for event in steps if event.wall_ns > began_ns and (event.step or 0) <= before}
    return (first - began_ns) / 1e9, len(again)
