"""A run on a real Kubernetes control plane, driven as its user drives it, its home in an unkind bucket.

The way of a user: `muster submit`, `status`, `logs`, `restart`, `exec`, `stop`, `down`, with the manifests that GKE
gets, while pods and supervisors are lost. What stands in for GKE is in ``gke_runs``.
"""

import signal
import subprocess
import sys
import time

import pytest
from gke_runs import JOBSETS, WORKLOADS, Run

pytest_plugins = ["gke_runs"]
pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


def test_a_run_from_submit_to_its_end_with_everything_that_a_user_does(plane, played, home):
    """Queued, failed by its user, held, corrected; followed; the supervisor, a host and a link lost; stopped."""
    played.hold = True
    changes = {
        "model.config.head_dim": 17, "recovery.keep_hosts_after_failure_s": 900.0, "checkpoint.every_steps": 50,
        # After a cut of 6 s TCP may send again only after 12.6 s.
        "recovery.heartbeat_timeout_s": 60.0,
    }  # fmt: skip
    run = Run(plane, home, "whole", **changes)
    plane.wait(lambda: plane.items(f"{WORKLOADS}/workloads"), "Workload")
    assert run.status()["state"] == "waiting" and not run.pods()
    played.admit()
    plane.wait(lambda: any(event.phase == "hold" for event in run.events("phase.changed")), "hold", 300)
    with run.followed() as follower:
        started = time.monotonic()
        run.muster("restart", run.id, "model.config.head_dim=16")
        run.wait_for_step(2)
        print(f"restart to step 2: {time.monotonic() - started:.1f} s")
        is_as_it_is_said(run)
        a_terminal_reaches_in(run)
        the_supervisor_goes(run)
        a_hosts_pod_goes(run)
        a_link_is_cut(run)
        stopped = run.muster("stop", run.id)
        plane.wait(lambda: run.status()["exit_code"] == 130, f"exit code 130 after {stopped.stderr!r}")
        assert follower.wait(300) == 0, "following ends with the run"
    told_once(run, (home / "followed").read_text())
    its_time_to_live_runs_out(run, played)
    run.muster("down", run.id)
    assert not run.pods() and not plane.items(f"{JOBSETS}/jobsets")


def is_as_it_is_said(run):
    # What the supervisor writes of itself is up to 30 s old.
    status = run.plane.wait(lambda: (found := run.status())["step"] and found, "status with a step")
    assert (status["state"], status["phase"]) == ("running", "run"), status
    assert {"host-0", "host-1", "host-2", "supervisor"} <= {task.partition(" ")[0] for task in status["tasks"]}, status
    nodes = [pod["spec"]["nodeName"] for (role, _), pod in run.pods().items() if role == "host"]
    assert len(set(nodes)) == 3, "one host a node"


def a_terminal_reaches_in(run):
    """One rank's log as far as it is in the bucket; commands on hosts."""
    run.plane.wait(lambda: run.muster("logs", run.id, "--rank", "2").stdout, "rank 2's log")
    argv = [sys.executable, "-m", "muster.cli.main", "logs", "-f", run.id, "--rank", "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout.readline().strip()
        following.send_signal(signal.SIGINT)
        assert following.wait(120) == 130, following.stderr.read()
    where = "import os; print(os.environ['MUSTER_NODE'])"
    asked = run.muster("exec", run.id, "--host", "1", "--", "python", "-c", f"{where}; exit(7)", check=False)
    assert (asked.returncode, asked.stdout.strip()) == (7, run.pods()["host", "1"]["spec"]["nodeName"])


def the_supervisor_goes(run):
    """Killed without a word: the one that stands by takes over, or the pod that its Job makes anew where that is first,
    and training goes on in the same attempt."""
    attempt, before, began = run.attempt(), run.step(), time.monotonic()
    holder = run.plane.wait(run.leader, "holder of the lease")
    killed = run.pod_name("supervisor", holder)
    run.plane.kill_pod(run.pods()["supervisor", holder])
    run.plane.wait(lambda: run.events("attempt.adopted"), "takeover")
    print(f"supervisor killed to takeover: {time.monotonic() - began:.1f} s")
    run.wait_for_step(before + 2)
    assert run.attempt() == attempt, "nothing was restarted"
    run.plane.wait(lambda: run.pod_name("supervisor", run.leader()) not in (None, killed), "another holds the run")
    run.plane.wait(lambda: len([1 for role, _ in run.pods() if role == "supervisor"]) == 2, "one that stands by again")


def a_hosts_pod_goes(run):
    """A drain: its Job makes another one, and the run recovers onto it."""
    attempt, old = run.attempt(), run.delete_pod("host", 2)
    run.plane.wait(lambda: run.pod_name("host", 2) not in (None, old), "new host")
    run.wait_for_attempt(attempt)


def a_link_is_cut(run):
    """For a few seconds nobody reaches a host: training waits for it, and nothing is started anew."""
    attempt, before = run.attempt(), run.step()
    node = run.pods()["host", "1"]["spec"]["nodeName"]
    run.plane.network.cut(node)
    time.sleep(6)
    run.plane.network.heal(node)
    run.wait_for_step(before + 20)
    assert run.attempt() == attempt


def told_once(run, text):
    """What was followed: every line of every rank that lived to the end, in order, once; and who else spoke."""
    told = {}
    for line in text.splitlines():
        task, _, words = line.partition(" | ")
        told.setdefault(task, []).append(words)

    def written():
        """Pods that were told to leave ship their last output; the run's end does not wait for them."""
        run.mirror("logs")
        last = sorted((run.dir / "logs").glob(f"rank-*.a{run.attempt()}.log"))
        return len(last) == 3 and all(told.get(path.stem) == path.read_text().splitlines() for path in last)

    run.plane.wait(written, f"output in the bucket that is what was followed ({told.keys()})", 120)
    assert {"host-0", "host-1", "host-2", "supervisor"} & set(told) and "rank-0.a1" in told, "from before as well"


def its_time_to_live_runs_out(run, played):
    """Three days later the JobSet is gone; `down` finds what it did not own."""
    played.jobsets.clock.advance(3 * 24 * 3600)
    run.plane.wait(lambda: not run.plane.items(f"{JOBSETS}/jobsets"), "JobSet gone")
    assert run.plane.items("/api/v1/namespaces/default/configmaps?labelSelector=app.kubernetes.io/instance=" + run.id)
