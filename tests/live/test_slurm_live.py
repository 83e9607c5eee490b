"""Runs on a real Slurm of four or five nodes in network namespaces: real cuts, real power failures, real limits."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import LiveRun, spec_of
from slurm_cluster import SlurmCluster, slurm_is_missing
from slurm_runs import RUN_FILE, Run, User, recovery_s, run_file

MISSING = slurm_is_missing()
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is a Slurm"),
]
#: Steps of the reference; losses are compared as far as both go.
REFERENCE_STEPS = 250


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 5, gpus=0) as found:
        yield found


@pytest.fixture
def user(cluster, tmp_path):
    found = User(cluster, tmp_path / "home")
    yield found
    for path in (found.home / "runs").glob("*"):
        found.muster("down", path.name, code=None)
    for name in cluster.names:
        cluster.heal(name)
        if not cluster.processes(name, "slurmd"):
            cluster.start_node(name)
    cluster.wait_until(lambda: cluster.states().count("idle") == len(cluster.names), "idle nodes", 60)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of a run that nothing happens to: one rank, no Slurm. Sums are exact: all others must equal it."""
    changes = {f"training.{key}": value for key, value in RUN_FILE["training"].items()}
    spec = spec_of(**{**changes, "training.steps": REFERENCE_STEPS, "resources.ranks_per_host": 1})
    with LiveRun(tmp_path_factory.mktemp("reference"), spec) as run:
        run.start()
        assert run.wait(200) == 0, run.story()
        return run.losses()


def same_losses(run: Run, reference: dict[int, str], *, beyond: int) -> None:
    """Step by step the reference's, to the bit, to well beyond the fault."""
    mine = run.losses()
    common = sorted(set(mine) & set(reference))
    assert common[-1] > beyond, run.story()
    assert set(range(1, common[-1] + 1)) <= set(mine), "no step is missing"
    assert [mine[step] for step in common] == [reference[step] for step in common]


def test_a_cut_link_and_then_the_supervisors_node_while_another_run_goes_on(cluster, user, reference):
    """Three nodes of two ranks and a spare: first a link is cut, then it heals, then the batch node loses its power."""
    run = user.submit(run_file(resources__spare_hosts=1, slurm__time_limit="30"))
    other = user.submit(run_file(name="beside", resources__hosts=1, resources__ranks_per_host=1))
    run.wait_for_step(8)
    run.wait_until(run.spares, "a spare")
    assert run.status()["state"] == "running"

    lost_host = next(host for _, (_, host) in sorted(run.ranks().items()) if run.nodes()[host] != run.supervisor_host())
    lost = run.nodes()[lost_host]
    began_ns = time.time_ns()
    cluster.cut(lost)
    run.wait_until(lambda: run.events("recovered"), "recovery")
    first_s, first_again = recovery_s(run, began_ns)
    assert run.actions() == ["swap"] and first_again <= 2, run.story()
    assert cluster.states().count("down") == 0, "Slurm itself has not noticed: nothing waited for it"
    _cannot_commit(cluster, run, lost)
    run.wait_until(lambda: not cluster.processes(lost, "muster.train.forkserver"), "the end of the cut-off ranks")
    cluster.heal(lost)
    run.wait_until(lambda: _connected(run, lost_host), "the return of the healed node")

    at, began_ns = run.step(), time.time_ns()
    batch = run.supervisor_host()
    cluster.power_off(batch)
    run.wait_for_step(at + 15)
    second_s, second_again = recovery_s(run, began_ns)
    assert run.supervisor_host() != batch and second_again <= 2, run.story()
    assert set(run.actions()) <= {"swap", "ignore"} and run.actions().count("swap") == 2, run.story()
    print(f"L: link cut {first_s:.2f} s, supervisor's and batch node lost {second_s:.2f} s")

    assert "running" in other.status()["state"], other.story()
    user.muster("stop", other.id)
    user.muster("stop", run.id)
    assert run.status()["state"] == "stopped" and run.status()["exit_code"] == 130
    same_losses(run, reference, beyond=at)
    same_losses(other, reference, beyond=5)
    run.wait_until(
        lambda: [state for _, state in run.jobs()] not in (["RUNNING"], ["COMPLETING"]), "a freed allocation"
    )
    assert user.muster("logs", run.id, "--rank", "0").stdout, "a rank's output"


def _connected(run: Run, host: str) -> bool:
    """Is the host a spare of the newest attempt?"""
    returned = [event for event in run.events("incident") if event.detail["incident"] == "host_returned"]
    return any(event.host == host for event in returned)


def _cannot_commit(cluster: SlurmCluster, run: Run, node: str) -> None:
    """What still runs on the cut-off node, if it reached the disk, would be refused: its attempt is fenced off."""
    fence = Path(run.dir / "checkpoints" / "fence.json")
    if not fence.exists():
        return
    code = (
        "import sys; from muster.core import fences; from muster.core.store import open_store\n"
        "fences.check(open_store(), sys.argv[1], run_id=sys.argv[2], attempt=1)"
    )
    space = f"/run/netns/{cluster.space(node)}"
    done = subprocess.run(
        ["nsenter", f"--net={space}", sys.executable, "-c", code, str(run.dir / "checkpoints"), run.id],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode and "is held by run" in done.stderr and "attempt 2" in done.stderr, done.stderr


def test_a_dead_node_and_a_requeue(cluster, user, reference):
    """slurmd and all processes of a node die; later an administrator requeues the job."""
    run = user.submit(run_file(resources__hosts=2, resources__ranks_per_host=1, resources__spare_hosts=1))
    run.wait_for_step(8)
    run.wait_until(run.spares, "a spare")
    lost = next(run.nodes()[host] for _, (_, host) in run.ranks().items() if run.nodes()[host] != run.supervisor_host())
    began_ns = time.time_ns()
    cluster.kill_processes(lost)
    run.wait_until(lambda: run.events("recovered"), "recovery")
    seconds, again = recovery_s(run, began_ns)
    assert run.actions() == ["swap"] and again <= 2, run.story()
    print(f"L: slurmd and all processes of a node killed {seconds:.2f} s")
    cluster.start_node(lost)

    at = run.step()
    (job,) = [job for job, _ in run.jobs()]
    cluster.ask("scontrol", "requeue", job)
    run.wait_until(lambda: [e for e in run.events("run.finished") if e.detail["outcome"] == "preempted"], "the save")
    run.wait_until(lambda: run.status()["state"] == "waiting", "a requeued job")
    assert "waits" in run.status()["reason"]
    run.wait_for_step(at + 10)
    restored = [event.step for event in run.events("checkpoint.restored") if event.detail["tier"] in ("disk", "bucket")]
    assert restored and max(restored) >= at, "nothing before the requeue is lost: it was saved on notice"
    assert [job for job, _ in run.jobs()] == [job], "one job all along"
    user.muster("stop", run.id)
    same_losses(run, reference, beyond=at)


def test_a_time_limit_is_continued_in_a_second_job(cluster, user, reference):
    """Slurm's notice before the limit: the run saves and leaves, and a further job goes on from there."""
    run = user.submit(
        run_file(resources__hosts=1, resources__ranks_per_host=1, slurm__time_limit="30", slurm__notice_s=60)
    )
    run.wait_for_step(8)
    ((first, _),) = run.jobs()
    elapsed = cluster.ask("squeue", "-h", "-j", first, "-o", "%M").strip()
    minutes = int(elapsed.rpartition(":")[0].rpartition(":")[2] or 0) + 1
    cluster.ask("scontrol", "update", f"JobId={first}", f"TimeLimit={minutes}")  # the limit is less than a minute away
    run.wait_until(lambda: len(run.jobs()) == 2, "a second job")
    (ended,) = run.events("run.finished")
    assert ended.detail["outcome"] == "preempted" and ended.detail["exit_code"] == 75, run.story()
    at = run.step()
    run.wait_until(lambda: run.step() > at + 5, "steps in the second job")
    (_, second) = sorted(job for job, _ in run.jobs())
    assert cluster.job_state(first) == "COMPLETED"
    assert f"job {second}, the 2nd of this run" in run.status()["reason"]
    assert run.events("checkpoint.restored")[-1].step == at, "it went on from where it saved"
    user.muster("down", run.id)
    assert {state for _, state in run.jobs()} <= {"COMPLETED", "CANCELLED"}
    same_losses(run, reference, beyond=min(at, REFERENCE_STEPS - 1))
