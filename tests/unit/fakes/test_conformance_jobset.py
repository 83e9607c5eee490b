"""The played JobSet controller does what JobSet 0.12 does, and Muster's JobSet gets along with it."""

import copy
import hashlib

import pytest
from cases import placement, run_objects, spec
from fakes.kubernetes import in_memory
from fakes.plane import Play

from muster.backends.gke.manifests.placement import Options
from muster.backends.gke.operate.cluster_snapshot import take_snapshot

INSTANCE = "app.kubernetes.io/instance"
KEY = "jobset.sigs.k8s.io/"
OWN = [
    "jobset-name", "jobset-uid", "replicatedjob-name", "restart-attempt", "replicatedjob-replicas", "global-replicas",
    "job-index", "job-key", "job-global-index", "group-name", "group-replicas", "job-group-index",
]  # fmt: skip


def jobset(hosts=2, **changes):
    """Ours without a queue, with ``changes`` of its spec."""
    where = placement(spec("g2-standard-48", "spot", hosts=hosts), Options(kueue=False))
    found = copy.deepcopy(run_objects(where, "", "")[-1])
    found["spec"] |= changes
    return found


def roles(play):
    return {row["name"]: row for row in play.one("JobSet")["status"]["replicatedJobsStatus"]}


def jobs(play):
    return {one["metadata"]["name"].removeprefix(name(play) + "-"): one for one in play.server.of_kind("Job")}


def name(play):
    return play.one("JobSet")["metadata"]["name"]


def test_row_02_jobs_and_service_are_there_while_it_is_suspended():
    play = Play(jobset(suspend=True))
    play.run()
    supervisors = [one for one in jobs(play) if one.startswith("supervisor")]
    assert supervisors and {"host-0", "host-1"} < set(jobs(play))
    assert not play.pods() and play.one("Service")["spec"]["clusterIP"] == "None"
    assert play.conditions("JobSet")["Suspended"]["status"] == "True"
    assert roles(play)["host"]["suspended"] == 2
    # What was injected is merged into the Jobs at the start; what the JobSet no longer has stays in them.
    changed = copy.deepcopy(play.one("JobSet")["spec"]["replicatedJobs"])
    changed[-1]["template"]["spec"]["template"]["spec"]["nodeSelector"]["added"] = "by-kueue"
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{name(play)}"
    play.plane.call("PATCH", path, {"spec": {"suspend": False, "replicatedJobs": changed}})
    play.run()
    assert all(pod["spec"]["nodeSelector"]["added"] == "by-kueue" for pod in play.pods("host"))
    assert play.conditions("JobSet")["Suspended"]["status"] == "False", "and it stays in the list"


def test_row_03_labels_and_annotations_are_its_own_and_the_templates():
    play = Play(jobset())
    play.run()
    pod, job = play.pod("host", 1), jobs(play)["host-1"]
    for one in (pod["metadata"]["labels"], pod["metadata"]["annotations"], job["metadata"]["labels"]):
        assert {key.removeprefix(KEY) for key in one if key.startswith(KEY)} == set(OWN)
    labels = pod["metadata"]["labels"]
    assert labels[f"{KEY}job-key"] == hashlib.sha1(f"default/{name(play)}-host-1".encode()).hexdigest()
    first = sum(role["replicas"] for role in play.one("JobSet")["spec"]["replicatedJobs"][:-1])
    assert (labels[f"{KEY}job-global-index"], labels[f"{KEY}restart-attempt"]) == (str(first + 1), "0")
    assert labels[f"{KEY}group-name"] == "default" and labels[f"{KEY}global-replicas"] == str(first + 2)
    assert "app.kubernetes.io/instance" not in job["metadata"]["labels"], "a JobSet's own labels do not go to its Jobs"
    assert labels["app.kubernetes.io/instance"], "the template's do"


def test_row_03_jobs_are_found_by_the_labels_that_they_carry():
    """By the run's own label nobody would find one."""
    play = Play(jobset())
    play.run()
    found = take_snapshot(in_memory(play.server), "default", play.one("JobSet")["metadata"]["labels"][INSTANCE])
    assert found.jobset and not [one for one in jobs(play).values() if INSTANCE in one["metadata"]["labels"]]
    play.end(play.pod("supervisor"), 0)
    play.run()
    found = take_snapshot(in_memory(play.server), "default", play.one("JobSet")["metadata"]["labels"][INSTANCE])
    assert len(found.jobs) == len([one for one in jobs(play) if one.startswith("supervisor")])


def test_row_04_a_headless_service_named_as_the_subdomain():
    play = Play(jobset())
    play.run()
    pod, service = play.pod("host", 0), play.one("Service")
    assert service["metadata"]["name"] == pod["spec"]["subdomain"] == play.one("JobSet")["spec"]["network"]["subdomain"]
    assert service["spec"]["selector"] == {f"{KEY}jobset-name": name(play)}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["spec"]["hostname"] == f"{name(play)}-host-0-0" and pod["metadata"]["name"].startswith(
        f"{name(play)}-host-0-0-"
    )


def test_row_04_a_service_of_that_name_is_taken_as_it_is():
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken", "namespace": "default"},
               "spec": {"clusterIP": "None"}}  # fmt: skip
    play = Play(foreign, jobset(network={"subdomain": "taken"}))
    play.run()
    assert "ownerReferences" not in play.one("Service")["metadata"]


def test_row_06_what_no_rule_matches_starts_everything_anew_until_the_limit():
    """A host Job that fails takes the supervisor along; Muster's limit is 0, so it would end the run."""
    limit = {"maxRestarts": 1, "rules": jobset()["spec"]["failurePolicy"]["rules"]}
    play = Play(jobset(failurePolicy=limit))
    for restart in (1, 2):
        play.run()
        supervisor = play.pod("supervisor")["metadata"]["name"]
        jobs(play)["host-1"]["status"] = {"conditions": [{
            "type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]}  # fmt: skip
        play.run()
        if restart == 1:
            assert play.one("JobSet")["status"]["restarts"] == 1
            assert play.events("DefaultFailurePolicy") and play.events("RestartJobSetFailurePolicyAction")
            found = play.conditions("JobSet")["RestartingJobSet"]
            assert (found["status"], found["reason"]) == ("False", "JobsReady"), "all are there again"
            assert play.pod("supervisor")["metadata"]["name"] != supervisor
            assert play.pod("host")["metadata"]["labels"][f"{KEY}restart-attempt"] == "1"
    ended = play.conditions("JobSet")["Failed"]
    assert ended["reason"] == "ReachedMaxRestarts" and ended["message"].endswith(
        f"(first failed job: {name(play)}-host-1)"
    )


def test_row_06_failure_is_judged_before_success():
    play = Play(jobset())
    play.run()
    for one in jobs(play).values():
        kind = "Failed" if one["metadata"]["name"].endswith("host-1") else "Complete"
        one["status"] = {"conditions": [{"type": kind, "status": "True", "reason": "BackoffLimitExceeded",
                                         "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}  # fmt: skip
    play.run()
    assert "Completed" not in play.conditions("JobSet") and play.conditions("JobSet")["Failed"]


@pytest.mark.parametrize("code", [1, 6, 130])
def test_row_07_a_verdict_of_the_supervisor_fails_the_jobset_without_its_code(code):
    """The exit code is in the Job's own message, and nowhere in the JobSet."""
    play = Play(jobset())
    play.run()
    play.end(play.pod("supervisor"), code)
    play.run()
    ended = play.conditions("JobSet")["Failed"]
    job = f"{name(play)}-supervisor-0"
    assert (ended["reason"], ended["status"]) == ("FailJobSetFailurePolicyAction", "True")
    assert ended["message"] == f"applying FailJobSet failure policy action (first failed job: {job})"
    failed = next(row for row in jobs(play)["supervisor-0"]["status"]["conditions"] if row["type"] == "Failed")
    assert failed["reason"] == "PodFailurePolicy" and f"failed with exit code {code} " in failed["message"]
    assert play.one("JobSet")["status"]["terminalState"] == "Failed"


def test_row_08_at_the_end_active_jobs_go_in_the_foreground_and_nothing_replaces_them():
    play = Play(jobset())
    play.run()
    play.end(play.pod("supervisor"), 0)
    play.step()
    assert play.conditions("JobSet")["Completed"]["reason"] == "AllJobsCompleted"
    assert all(pod["metadata"]["deletionTimestamp"] for pod in play.pods("host")), "each is asked to end"
    assert "host-0" in jobs(play), "its Job waits for it"
    play.run()
    play.run(3600)
    assert not play.pods("host") and "host-0" not in jobs(play) and "supervisor-0" in jobs(play)


def test_row_09_conditions_are_read_by_their_status():
    """Suspended stays in the list with False after the end; each change is told as an event."""
    play = Play(jobset(suspend=True))
    play.run()
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{name(play)}"
    play.plane.call("PATCH", path, {"spec": {"suspend": False}})
    play.run()
    assert (roles(play)["host"]["ready"], roles(play)["host"]["active"]) == (2, 2)
    play.end(play.pod("supervisor"), 0)
    play.run()
    found = play.conditions("JobSet")
    assert (found["Suspended"]["status"], found["Completed"]["status"]) == ("False", "True")
    assert found["Suspended"]["reason"] == "ResumeJobs" and roles(play)["supervisor"]["succeeded"] >= 1
    assert play.one("JobSet")["status"]["terminalState"] == "Completed"
    assert play.events("SuspendedJobs") and play.events("ResumeJobs") and play.events("AllJobsCompleted")


def test_row_10_a_job_that_somebody_deletes_comes_again():
    play = Play(jobset())
    play.run()
    before = jobs(play)["host-1"]["metadata"]["uid"]
    play.plane.call("DELETE", f"/apis/batch/v1/namespaces/default/jobs/{name(play)}-host-1", {})
    play.run()
    again = jobs(play)["host-1"]
    assert again["metadata"]["uid"] != before and again["metadata"]["labels"][f"{KEY}restart-attempt"] == "0"
    assert not play.one("JobSet")["status"]["restarts"]


def test_row_10_after_its_time_to_live_the_jobset_is_gone_and_what_it_does_not_own_stays():
    play = Play(*run_objects(placement(spec("g2-standard-48", "spot"), Options(kueue=False)), "", ""))
    play.run()
    play.end(play.pod("supervisor"), 0)
    play.run()
    play.run(3 * 24 * 3600 - 10)
    assert play.server.of_kind("JobSet")
    play.run(20)
    play.run()
    assert not play.server.of_kind("JobSet") and not play.server.of_kind("Job") and not play.server.of_kind("Pod")
    assert play.server.of_kind("ConfigMap"), "nobody owns it: `muster down` has to see it still"
