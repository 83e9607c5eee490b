"""Plays JobSet and Kueue on the test control plane, as far as a run needs them.

JobSet: child Jobs of an unsuspended JobSet with the labels that the real one writes; pod failure policies (1.20's Jobs
have none); success policy; a Job that a rule fails fails the JobSet. Kueue: a Workload for each queued JobSet, admitted
at once, or after ``admit()`` where ``hold`` is set. Written from the two projects' documentation, not from their code:
what real controllers do besides is not checked here.
"""

import copy
import threading
import time

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2"
ROLE, INDEX, NAME = (f"jobset.sigs.k8s.io/{word}" for word in ("replicatedjob-name", "job-index", "jobset-name"))


class Controllers:
    """A thread that looks every 0.2 s; ``with Controllers(plane):``."""

    def __init__(self, plane, *, hold=False):
        self.plane, self.hold = plane, hold
        self.stopping = threading.Event()
        self.trouble = None
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.thread.join(10)
        assert self.trouble is None, self.trouble

    def admit(self):
        self.hold = False

    def _loop(self):
        while not self.stopping.wait(0.2):
            try:
                for jobset in self.plane.items(f"{JOBSETS}/jobsets"):
                    if not jobset["metadata"].get("deletionTimestamp"):
                        self._one(jobset)
            except OSError:
                time.sleep(0.5)
            except Exception as error:
                self.trouble = repr(error)
                raise

    def _one(self, jobset):
        done = {one["type"] for one in jobset.get("status", {}).get("conditions", []) if one["status"] == "True"}
        if done & {"Completed", "Failed"}:
            return
        if jobset["spec"].get("suspend"):
            self._queue(jobset)
            return
        jobs = {job["metadata"]["name"]: job for job in self._of(jobset, "/apis/batch/v1", "jobs")}
        for role in jobset["spec"]["replicatedJobs"]:
            for index in range(role["replicas"]):
                name = f"{jobset['metadata']['name']}-{role['name']}-{index}"
                if name not in jobs:
                    self._make_job(jobset, role, index, name)
        self._judge(jobset, jobs)

    # ---------------------------------------------------------------- Kueue

    def _queue(self, jobset):
        metadata = jobset["metadata"]
        path = f"{WORKLOADS}/namespaces/{metadata['namespace']}/workloads"
        name = f"jobset-{metadata['name']}"
        status, workload = self.plane.call("GET", f"{path}/{name}")
        if status == 404:
            pods = [{"name": "main", "count": 1, "template": {"spec": {"containers": []}}}]
            workload = {
                "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
                "metadata": {"name": name, "ownerReferences": [owner(jobset, "JobSet", "jobset.x-k8s.io/v1alpha2")]},
                "spec": {"podSets": pods, "queueName": metadata["labels"]["kueue.x-k8s.io/queue-name"]},
            }  # fmt: skip
            self.plane.call("POST", path, workload)
        elif not self.hold:
            conditions = [condition("QuotaReserved"), condition("Admitted")]
            self._status(f"{path}/{name}", {"conditions": conditions})
            self._patch(jobset, {"spec": {"suspend": False}})

    # ---------------------------------------------------------------- JobSet

    def _make_job(self, jobset, role, index, name):
        metadata = jobset["metadata"]
        template = copy.deepcopy(role["template"])
        labels = {NAME: metadata["name"], ROLE: role["name"], INDEX: str(index)}
        pod = template["spec"]["template"]
        pod.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        for unknown in ("podFailurePolicy", "podReplacementPolicy", "completionMode"):
            template["spec"].pop(unknown, None)
        job = {
            "apiVersion": "batch/v1", "kind": "Job", "spec": template["spec"],
            "metadata": {"name": name, "labels": {**metadata.get("labels", {}), **labels},
                         "ownerReferences": [owner(jobset, "JobSet", "jobset.x-k8s.io/v1alpha2")]},
        }  # fmt: skip
        status, found = self.plane.call("POST", f"/apis/batch/v1/namespaces/{metadata['namespace']}/jobs", job)
        assert status in (201, 409), found

    def _judge(self, jobset, jobs):
        """The supervisor's Job decides; a pod's exit code may fail its Job at once."""
        targets = jobset["spec"]["successPolicy"]["targetReplicatedJobs"]
        mine = [job for job in jobs.values() if job["metadata"]["labels"][ROLE] in targets]
        ends = [one["type"] for job in mine for one in job["status"].get("conditions", []) if one["status"] == "True"]
        if mine and ends.count("Complete") == len(mine):
            self._finish(jobset, jobs, condition("Completed", "AllJobsCompleted"))
            return
        for pod in self._of(jobset, "/api/v1", "pods"):
            failed = self._failed_by_policy(jobset, pod)
            if failed is not None and pod["metadata"]["labels"][ROLE] in targets:
                self._finish(jobset, jobs, condition("Failed", "FailJobSetFailurePolicyAction", failed))
                return

    def _failed_by_policy(self, jobset, pod):
        role = next(one for one in jobset["spec"]["replicatedJobs"] if one["name"] == pod["metadata"]["labels"][ROLE])
        for state in pod.get("status", {}).get("containerStatuses", []):
            code = (state.get("state", {}).get("terminated") or {}).get("exitCode")
            for rule in role["template"]["spec"].get("podFailurePolicy", {}).get("rules", []):
                wanted = rule.get("onExitCodes", {})
                if code and wanted.get("containerName") == state["name"] and code in wanted.get("values", []):
                    return f"exit code {code}" if rule["action"] == "FailJob" else None
        return None

    def _finish(self, jobset, jobs, verdict):
        """The verdict; what still runs is ended, what has ended stays to be looked at."""
        self._status(self._path(jobset), {"conditions": [verdict]})
        targets = jobset["spec"]["successPolicy"]["targetReplicatedJobs"]
        for job in jobs.values():
            path = f"/apis/batch/v1/namespaces/{job['metadata']['namespace']}/jobs/{job['metadata']['name']}"
            if job["metadata"]["labels"][ROLE] in targets:  # 1.20 knows no failure policy: no more pods for it
                self.plane.call("PATCH", path, {"spec": {"parallelism": 0}}, "application/merge-patch+json")
            elif not job["status"].get("completionTime"):
                self.plane.call("DELETE", path, {"propagationPolicy": "Background"})

    # ---------------------------------------------------------------- below

    def _of(self, jobset, group, plural):
        metadata = jobset["metadata"]
        path = f"{group}/namespaces/{metadata['namespace']}/{plural}?labelSelector={NAME}={metadata['name']}"
        return self.plane.items(path)

    def _path(self, jobset):
        return f"{JOBSETS}/namespaces/{jobset['metadata']['namespace']}/jobsets/{jobset['metadata']['name']}"

    def _patch(self, jobset, change):
        self.plane.call("PATCH", self._path(jobset), change, "application/merge-patch+json")

    def _status(self, path, status):
        found = self.plane.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")
        assert found[0] < 300, found


def owner(one, kind, api):
    metadata = one["metadata"]
    return {"apiVersion": api, "kind": kind, "name": metadata["name"], "uid": metadata["uid"], "controller": True,
            "blockOwnerDeletion": True}  # fmt: skip


def condition(kind, reason="Played", message=""):
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"type": kind, "status": "True", "reason": reason, "message": message or kind, "lastTransitionTime": stamp}
