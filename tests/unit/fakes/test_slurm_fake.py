"""What the real ``scancel`` does not do at once, the fake does not either (scancel(1), slurm.conf(5): KillWait)."""

from __future__ import annotations

import time

import pytest
from fakes.slurm import EPILOG_S, FakeSlurm

QUEUE = ["squeue", "--format=%A %T"]


@pytest.fixture
def slurm(tmp_path):
    (tmp_path / "logs").mkdir()
    fake = FakeSlurm(configuration="KillWait                = 1 sec\n")

    def submit(script):
        path = tmp_path / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        fake.run(["sbatch", "--job-name=j", str(path)])
        return fake

    return submit


def states(fake, until, limit_s=10.0):
    """The job's states in the queue, in order, until ``until``."""
    seen, end = [], time.monotonic() + limit_s
    while time.monotonic() < end and until not in seen:
        state = fake.run(QUEUE).stdout.split()[1]
        seen += [state] if state not in seen[-1:] else []
        time.sleep(0.02)
    return seen


def test_a_cancelled_job_is_completing_until_its_nodes_have_cleared_up(slurm):
    fake, began = slurm("sleep 60"), time.monotonic()
    assert fake.run(["scancel", "1"]).returncode == 0
    assert states(fake, "CANCELLED") == ["COMPLETING", "CANCELLED"]
    assert time.monotonic() - began >= EPILOG_S


def test_a_job_that_ignores_sigterm_is_killed_after_kill_wait(slurm):
    fake = slurm("trap '' TERM; while true; do sleep 0.05; done")
    time.sleep(0.3)
    began = time.monotonic()
    fake.run(["scancel", "1"])
    assert states(fake, "CANCELLED") == ["COMPLETING", "CANCELLED"]
    assert time.monotonic() - began > 1.0 and fake.jobs["1"].process.returncode == -9


def test_a_job_that_waits_is_cancelled_at_once_and_one_that_has_ended_stays_what_it_was(slurm):
    fake = slurm("exit 3")
    assert states(fake, "FAILED")[-1] == "FAILED"
    fake.run(["scancel", "1"])
    assert states(fake, "FAILED") == ["FAILED"]
    fake.held = True
    slurm("true")
    fake.run(["scancel", "2"])
    assert fake.jobs["2"].state == "CANCELLED"
