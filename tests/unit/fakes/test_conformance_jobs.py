"""The played Job controller does what the one of Kubernetes 1.34 does."""

import copy

from cases import placement, run_objects, spec
from fakes.plane import Play

from muster.backends.gke.manifests.placement import Options


def play(**changes):
    """Ours without a queue; ``changes`` are fields of every Job."""
    found = copy.deepcopy(run_objects(placement(spec("g2-standard-48", "spot"), Options(kueue=False)), "", "")[-1])
    for role in found["spec"]["replicatedJobs"]:
        role["template"]["spec"] |= changes
    result = Play(found)
    result.run()
    return result


def job(of, role="host", index=0):
    name = of.one("JobSet")["metadata"]["name"]
    return next(one for one in of.server.of_kind("Job") if one["metadata"]["name"] == f"{name}-{role}-{index}")


def why(of, role="host"):
    return {row["type"]: row for row in job(of, role)["status"].get("conditions", [])}


def test_row_05_a_pod_that_is_going_is_not_replaced_before_it_has_ended():
    run = play()
    pod = run.pod("host", 0)
    run.delete(pod)
    run.step(3600)
    assert len(run.pods("host")) == 2, "an hour later still"
    run.end(pod, 75)
    run.forget(pod)
    run.run(60)
    assert run.pod("host", 0)["metadata"]["name"] != pod["metadata"]["name"]
    assert job(run)["status"]["failed"] == 0, "75 is free"


def test_row_05_a_host_on_a_node_that_hangs_is_never_replaced():
    """Nobody can say that its pod has ended, until the node object goes: then the pod is Failed, and free."""
    run = play()
    run.add_node("hangs", {})
    pod = run.pod("host", 1)
    pod["spec"]["nodeName"] = "hangs"
    run.lose("hangs", deleted=False)
    run.step(24 * 3600)
    assert len(run.pods("host")) == 2
    run.plane.call("DELETE", "/api/v1/nodes/hangs", {})
    run.step()
    run.run(60)
    assert run.pod("host", 1)["metadata"]["name"] != pod["metadata"]["name"]
    assert job(run, index=1)["status"]["failed"] == 0, "a disruption is not charged"


def test_row_05_the_next_pod_waits_longer_after_every_failure_ignored_or_not():
    """10, 20, 40 s ... and at most 10 minutes; a pod that ended with 75 is not charged, but waits as long."""
    run = play()
    for failures, code in enumerate((137, 75, 75, 137, 75, 137, 75, 75)):
        run.end(run.pod("host", 0), code)
        run.step()
        wait_s = min(10 * 2**failures, 600)
        run.step(wait_s - 1)
        assert len([pod for pod in run.pods("host") if pod["status"].get("phase") == "Running"]) == 1
        run.run(2)
        assert run.pod("host", 0)["status"]["phase"] == "Running"
    assert job(run)["status"]["failed"] == 3


def test_row_05_an_init_container_that_fails_is_charged_whatever_its_code():
    run = play(backoffLimit=1)
    for _ in range(2):
        pod = run.pod("host", 0)
        run.end(pod, 75, container="place")
        pod["status"]["initContainerStatuses"] = pod["status"].pop("containerStatuses")
        run.step()
        run.run(1000)
    assert why(run)["Failed"]["reason"] == "BackoffLimitExceeded"
    assert run.conditions("JobSet")["Failed"], "no rule of ours matches it, and nothing may start anew"


def test_row_05_a_verdict_is_a_target_first_and_a_failure_once_all_pods_have_ended():
    run = play()
    supervisor = run.pod("supervisor")
    run.end(supervisor, 130)
    run.step()
    target, failed = why(run, "supervisor")["FailureTarget"], why(run, "supervisor")["Failed"]
    assert target["reason"] == failed["reason"] == "PodFailurePolicy"
    assert f"for pod default/{supervisor['metadata']['name']} failed with exit code 130" in failed["message"]
    run.run(3600)
    assert not [pod for pod in run.pods("supervisor") if pod["status"]["phase"] == "Running"]


def test_row_05_suspended_its_pods_are_asked_to_go_and_are_not_charged():
    run = play()
    name = run.one("JobSet")["metadata"]["name"]
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{name}"
    run.plane.call("PATCH", path, {"spec": {"suspend": True}})
    run.step()
    assert all(pod["metadata"]["deletionTimestamp"] for pod in run.pods()), "the supervisor's too"
    run.run()
    assert not run.pods() and why(run)["Suspended"]["status"] == "True"
    run.plane.call("PATCH", path, {"spec": {"suspend": False}})
    run.run()
    assert run.pod("host", 1) and job(run)["status"]["failed"] == 0, "at once, without a delay"
    assert why(run)["Suspended"]["status"] == "False"


def test_row_05_no_pod_of_a_jobset_can_be_made_without_its_webhook():
    """Also no replacement; the Job says so."""
    run = play()
    run.controllers.jobset_down = True
    run.end(run.pod("host", 0), 75)
    run.step()
    run.run(60)
    assert [pod["status"]["phase"] for pod in run.pods("host")].count("Running") == 1
    assert "failed calling webhook" in run.events("FailedCreate")[0] and len(run.events("FailedCreate")) == 1
    run.controllers.jobset_down = False
    run.run(60)
    assert run.pod("host", 0)


def test_row_05_two_kinds_of_preemption_are_free():
    """A Spot node's notice (15 s, then the node is gone), and a deletion with 75."""
    run = play()
    run.add_node("spot", {})
    pod = run.pod("host", 0)
    pod["spec"]["nodeName"] = "spot"
    run.controllers.nodes.notify("spot")
    pod = next(one for one in run.pods("host") if one["spec"]["nodeName"] == "spot")
    assert pod["metadata"]["deletionTimestamp"]
    assert run.server.objects["api/v1/nodes/spot"]["spec"]["taints"][0]["key"].endswith("impending-node-termination")
    run.end(pod, 137)  # it did not make it
    run.controllers.nodes.gone.add("spot")
    run.lose("spot", deleted=False)
    run.step()
    run.run(60)
    assert job(run)["status"]["failed"] == 0 and run.pod("host", 0)["spec"]["nodeName"] == "any"
    assert "api/v1/nodes/spot" not in run.server.objects, "the cloud has taken the object away"
