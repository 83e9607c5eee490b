"""A sweep on a real Slurm: trials are jobs side by side; one whose node is lost goes on from its checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from slurm_cluster import SlurmCluster
from slurm_runs import MUSTER, User, needs_slurm
from waiting import eventually
from watched import Watched

from muster.storage import sweep_record

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(400),
    needs_slurm,
]
STEPS = 160
SPEC = {
    "name": "tune", "backend": "slurm",
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 64,
        },
        "tokenizer": {"kind": "word", "vocab_size": 256}, "dtype": "float32",
    },
    "data": {"sources": [{"type": "text2sql", "rows": 300, "heldout_rows": 30}]},
    "training": {
        "steps": STEPS, "sequence_length": 64, "global_batch_size": 2, "optimizer": {"schedule": "constant"},
    },
    "evaluation": {"at_start": False, "num_sequences": 8, "samples": 0, "final_num_questions": 0, "every_steps": 40},
    "checkpoint": {"every_steps": 20},
    "resources": {"hosts": 1, "ranks_per_host": 1, "device": "cpu", "threads_per_rank": 1},
    "recovery": {"heartbeat_timeout_s": 2.0, "grace_s": 20.0},
    "slurm": {"requeue": False},
    "output": {"tensorboard": False},
}  # fmt: skip
WORDS = ("--over", "training.optimizer.learning_rate=1e-4,1e-3,1e-2", "--sampler", "grid", "--trials", "3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 3, gpus=0, cpus=1) as found:
        yield found


def test_trials_are_jobs_and_one_whose_node_is_lost_goes_on_from_its_checkpoint(cluster, tmp_path):
    user = User(cluster, tmp_path / "home")
    (user.home / "tune.yaml").write_text(json.dumps(SPEC))
    told = (user.home / "told").open("w")
    running = subprocess.Popen(
        [*MUSTER, "sweep", "tune.yaml", *WORDS, "--parallel", "2", "--pruner", "none"],
        cwd=user.home, env=user.env, stdout=told, stderr=told,
    )  # fmt: skip
    folder = user.home / "sweeps" / "tune"
    try:
        first = Watched(folder / "trial-000")
        eventually(lambda: jobs(cluster, "RUNNING") == 2, 120)
        eventually(lambda: (folder / "trial-000" / "events").exists() and first.step() >= 45, 150)
        lost = node_of(cluster, sweep_record.read(folder).trials[0].run_id)
        cluster.power_off(lost)
        # What a controller does itself once SlurmdTimeout is over: 300 s on most clusters.
        cluster.ask("scontrol", "update", f"nodename={lost}", "state=down", "reason=lost")
        assert "NODE_FAIL" in cluster.ask("squeue", "-h", "-t", "all", "-o", "%T"), "Slurm itself ended the job"
        assert running.wait(300) == 0, (user.home / "told").read_text()
    finally:
        running.kill()
        user.end_all()
        cluster.ask("scancel", "--user", "root")
    said = (user.home / "told").read_text()
    again = next(line for line in said.splitlines() if "trial 0: lost its machine; it goes on from step" in line)
    assert int(again.rsplit(" ", 1)[1]) >= 45
    trials = sweep_record.read(folder).trials
    assert [trial.state for trial in trials] == ["complete"] * 3 and len({trial.run_id for trial in trials}) == 3
    resumed = [event.step for event in first.events("attempt.started") if event.step]
    assert first.step() == STEPS and (not resumed or min(resumed) >= 40), "from its checkpoint, not from the start"
    assert "3 trials (3 complete)" in user.muster("status").stdout


def test_a_cancelled_job_is_a_trial_that_a_person_stopped_and_ctrl_c_leaves_no_job(cluster, tmp_path):
    """At scancel a run saves and writes that it was preempted: the job's own end says who meant it."""
    user = User(cluster, tmp_path / "home")
    (user.home / "tune.yaml").write_text(json.dumps(SPEC))
    told = (user.home / "told").open("w")
    running = subprocess.Popen(
        [*MUSTER, "sweep", "tune.yaml", "training.steps=4000", *WORDS, "--parallel", "2", "--pruner", "none"],
        cwd=user.home, env=user.env, stdout=told, stderr=told,
    )  # fmt: skip
    folder = user.home / "sweeps" / "tune"
    try:
        first = Watched(folder / "trial-000")
        eventually(lambda: (folder / "trial-000" / "events").exists() and first.step() >= 20, 150)
        name = f"muster-{sweep_record.read(folder).trials[0].run_id}.1"
        cluster.ask("scancel", "--name", name)
        eventually(lambda: "trial 0: stopped by a person after step" in (user.home / "told").read_text(), 90)
        assert first.events("run.finished")[-1].detail["outcome"] == "preempted", "it could not know better"
        eventually(lambda: len(sweep_record.read(folder).trials) == 3, 60)
        running.send_signal(signal.SIGINT)
        assert running.wait(150) == 130, (user.home / "told").read_text()
        names = cluster.ask("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%j").split()
    finally:
        running.kill()
        user.end_all()
        cluster.ask("scancel", "--user", "root")
    said = (user.home / "told").read_text()
    assert names == [] and "has not ended yet" not in said, said
    assert "goes on from" not in said and {trial.state for trial in sweep_record.read(folder).trials} == {"open"}, said


def jobs(cluster: SlurmCluster, state: str) -> int:
    return cluster.ask("squeue", "-h", "-o", "%T").split().count(state)


def node_of(cluster: SlurmCluster, run_id: str | None) -> str:
    rows = [line.split() for line in cluster.ask("squeue", "-h", "-t", "running", "-o", "%j %N").splitlines()]
    return next(node for name, node in rows if name.startswith(f"muster-{run_id}"))
