"""What Kueue and a cloud take from a run: a node with no other to come, and everything at once by an eviction.

The losses afterwards are those of an undisturbed run on this machine, bit for bit. What stands in for GKE is in
``gke_runs``.
"""

import os
import signal
import time

import psutil
import pytest
from cluster import LiveRun
from gke_runs import JOBSETS, WORKLOADS, Run, document

from muster.config.spec import RunSpec

pytest_plugins = ["gke_runs"]
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
CHANGES = {"resources.hosts": 2, "resources.spare_hosts": 1, "checkpoint.every_steps": 50}


def test_a_node_lost_for_good_and_an_eviction_change_no_bit(plane, played, home, tmp_path):
    run = Run(plane, home, "losses", **CHANGES)
    run.wait_for_step(5, 240)
    a_node_is_lost_with_none_to_come(run, played)
    everything_is_evicted_and_admitted_again(run, played)
    compared = run.step()
    run.muster("down", run.id)
    plane.wait(lambda: not run.pods() and not plane.items(f"{JOBSETS}/jobsets"), "end")
    ours = run.losses()
    same = undisturbed(plane, tmp_path / "local", compared)
    # Of a dead machine the last seconds of events never reach the bucket.
    both = sorted(step for step in ours if step in same and step <= compared)
    assert both[-1] == compared and len(both) > 0.8 * compared
    assert [ours[step] for step in both] == [same[step] for step in both]


def a_node_is_lost_with_none_to_come(run, played):
    """Exactly hosts and spares have nodes. The spare trains on, no pod can replace the lost one, nobody is evicted."""
    plane = run.plane
    where = {pod["spec"]["nodeName"] for (role, _), pod in run.pods().items() if role == "host"}
    (free,) = set(plane.nodes) - where
    cordon(plane, free, True)
    held = {pod["spec"]["nodeName"] for (role, _), pod in run.pods().items() if role == "supervisor"}
    training = {event.host.rpartition("-")[0] for event in run.events("rank.started")}
    victim = next(
        pod for (role, index), pod in run.pods().items()
        if role == "host" and f"host-{index}" in training and pod["spec"]["nodeName"] not in held
    )  # fmt: skip
    node, attempt = victim["spec"]["nodeName"], run.attempt()
    plane.processes[node].terminate()  # takes the pods along: the machine is dead
    played.nodes.gone.add(node)
    run.wait_for_attempt(attempt, 240)
    plane.wait(lambda: node not in {one["metadata"]["name"] for one in plane.items("/api/v1/nodes")}, "node gone", 90)
    before = run.step()
    time.sleep(10)  # Kueue's clock: 50 minutes without a host
    run.wait_for_step(before + 2)
    (workload,) = plane.items(f"{WORKLOADS}/workloads")
    kinds = {row["type"]: row["status"] for row in workload["status"]["conditions"]}
    assert kinds["Admitted"] == "True" and "Evicted" not in kinds and kinds["PodsReady"] == "False", kinds
    cordon(plane, free, False)


def everything_is_evicted_and_admitted_again(run, played):
    """Every pod goes, the supervisors' too; the same JobSet starts again and goes on from what was saved."""
    jobset, attempt, before = run.jobset(), run.attempt(), run.step()
    old = {pod["metadata"]["name"] for pod in run.pods().values()}
    played.hold = True
    played.evict(jobset["metadata"]["name"], "Preempted", "by a test")
    run.plane.wait(lambda: not run.pods(), "all pods gone", 90)
    assert run.status()["state"] == "waiting"
    played.admit()
    run.wait_for_attempt(attempt, 300)
    first = min(event.step for event in run.events("step") if event.attempt == run.attempt())
    assert first > before - 60, f"of {before} steps it goes on with {first}"
    run.wait_for_step(before + 5)
    again = run.jobset()
    assert again["metadata"]["uid"] == jobset["metadata"]["uid"] and not again["status"].get("restarts")
    assert not old & {pod["metadata"]["name"] for pod in run.pods().values()}


def cordon(plane, node, closed):
    plane.call("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": closed}}, "application/merge-patch+json")


def undisturbed(plane, folder, step):
    """Step -> loss of the same run as processes of this machine, up to ``step``."""
    found = document(plane, "losses", **CHANGES)
    resources = {"hosts": 2, "ranks_per_host": 1, "device": "cpu", "threads_per_rank": 1}
    found |= {"backend": "local", "run_dir": None, "resources": resources, "checkpoint": {"every_steps": 0}}
    with LiveRun(folder, RunSpec.model_validate(found)) as live:
        live.start()
        live.wait_for_step(step, 240)
        return live.losses()


@pytest.mark.soak
def test_before_seven_days_are_over_the_rest_is_queued_and_goes_on_in_another_allocation(plane, played, home):
    """The supervisor's own clock rings: it saves, queues the rest by its own account, once, and ends well."""
    run = Run(plane, home, "rest", **{"resources.hosts": 2, "checkpoint.every_steps": 50})
    run.wait_for_step(3, 240)
    first, began = run.jobset(), time.monotonic()
    time.sleep(max(0.0, 75 - (time.monotonic() - began)))  # a run that asks sooner is not queued again
    played.hold = True
    ring(plane, run.pods()["supervisor", run.leader()])
    name = f"{first['metadata']['name']}-c2"
    plane.wait(lambda: (found := run.jobset()) and found["metadata"]["name"] == name, "rest in the queue", 120)
    saved = run.step()
    ended = f"{JOBSETS}/namespaces/default/jobsets/{first['metadata']['name']}"
    plane.wait(lambda: plane.get(ended).get("status", {}).get("terminalState") == "Completed", "first allocation's end")
    plane.wait(lambda: run.status()["state"] == "waiting", "waiting", 60)
    played.admit()
    attempt = run.attempt()
    run.wait_for_attempt(attempt, 240)
    made = min(event.step for event in run.events("step") if event.attempt == run.attempt())
    assert made == saved + 1, "it goes on from the step at which it saved"
    run.muster("down", run.id)
    plane.wait(lambda: not run.pods() and not plane.items(f"{JOBSETS}/jobsets"), "end")


def ring(plane, pod):
    """The pod's first program is told that its allocation is about to end."""
    mark = f"{plane.dir}/pods/{pod['metadata']['uid']}/"
    outer = [one for one in psutil.process_iter(["cmdline"]) if mark in " ".join(one.info["cmdline"] or [])]
    inner = [one for each in outer for one in each.children(recursive=True)]
    (first,) = {one.pid for one in inner if "muster.backends.gke.pod.main" in one.cmdline()}
    os.kill(first, signal.SIGALRM)
