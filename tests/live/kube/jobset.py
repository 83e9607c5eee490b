"""Plays the JobSet controller 0.12.0, in the order of its own reconciliation.

Status counts; what is finished is cleaned up (active Jobs deleted in the foreground, the JobSet after its TTL); Jobs of
an earlier attempt deleted; failed Jobs judged by the failure policy, before success; service; missing Jobs made, also
while suspended; suspended or resumed, with what was injected into the templates merged in and nothing taken away. Not
played: startupPolicy InOrder, dependsOn, volume claims, RestartJob (its gate is off in a release), exclusive placement.
"""

import copy
import hashlib
import json
import re

from fakes.admission import coordinator, defaulted, refusals
from objects import (
    JOBS,
    JOBSETS,
    SPEC,
    full_spec,
    is_owned,
    is_true,
    named,
    owner,
    path_of,
    with_condition,
)

KEY = "jobset.sigs.k8s.io/"
MESSAGES = {
    "Completed": "jobset completed successfully", "Suspended": "jobset is suspended", "Resumed": "jobset is resumed",
    "FailJobSet": "applying FailJobSet failure policy action",
    "RestartJobSet": "applying RestartJobSet failure policy action",
    "ReachedMaxRestarts": "jobset failed due to reaching max number of restarts",
    "FailedJobs": "jobset failed due to one or more job failures",
}  # fmt: skip


class JobSets:
    def __init__(self, api, jobs, clock):
        self.api, self.jobs, self.clock = api, jobs, clock
        self.ended: dict[str, float] = {}
        """JobSet's uid -> when it was seen to have ended, by the clock of the TTL."""
        self.seen = set()
        """What has passed the webhooks' rules."""

    def step(self):
        jobs = list(map(named("Job", "batch/v1"), self.api.items(f"{JOBS}/jobs")))
        for jobset in map(named("JobSet", "jobset.x-k8s.io/v1alpha2"), self.api.items(f"{JOBSETS}/jobsets")):
            manager = jobset["spec"].get("managedBy", f"{KEY}jobset-controller")
            if not jobset["metadata"].get("deletionTimestamp") and manager == f"{KEY}jobset-controller":
                self._one(jobset, [job for job in jobs if is_owned(job, jobset)])

    def _one(self, jobset, jobs):
        version = jobset["metadata"]["uid"], hash(json.dumps(jobset["spec"]))
        if version not in self.seen:
            refused = refusals(jobset)
            assert not refused, f"the webhooks would not have let {jobset['metadata']['name']} in: {refused}"
            self.seen.add(version)
        status = copy.deepcopy(jobset.get("status") or {})
        rows = status.get("conditions") or []
        status["restarts"] = status.get("restarts", 0)
        status["replicatedJobsStatus"] = self._counts(jobset, jobs, status["restarts"])
        attempt = str(status["restarts"])
        now = [job for job in jobs if job["metadata"]["labels"][f"{KEY}restart-attempt"] == attempt]
        active = [job for job in now if not is_true(job, "Complete", "Failed")]
        if is_true(jobset, "Completed", "Failed"):
            self._delete(active)
            self._time_to_live(jobset)
        else:
            self._delete([job for job in jobs if job not in now])
            failed = [job for job in now if is_true(job, "Failed")]
            if failed:
                rows = self._failure(jobset, status, rows, failed)
            elif self._succeeded(jobset, [job for job in now if is_true(job, "Complete")]):
                rows = ending(rows, "Completed", "AllJobsCompleted", MESSAGES["Completed"])
            else:
                rows = self._run(jobset, rows, jobs, active, attempt)
        self._write(jobset, status, rows)

    def _counts(self, jobset, jobs, restarts):
        found = []
        for role in jobset["spec"]["replicatedJobs"]:
            count = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
            for job in jobs:
                labels, status = job["metadata"]["labels"], job.get("status") or {}
                if labels[f"{KEY}replicatedjob-name"] != role["name"]:
                    continue
                if labels[f"{KEY}restart-attempt"] != str(restarts):
                    continue
                spec = full_spec(job)
                wanted = min(spec.get("parallelism", 1), spec.get("completions", 2**31))
                if is_true(job, "Complete", "Failed"):
                    count["succeeded"] += is_true(job, "Complete")
                    count["failed"] += is_true(job, "Failed")
                    continue
                ready = self.jobs.ready.get(job["metadata"]["uid"], 0) + status.get("succeeded", 0)
                count["ready"] += ready >= wanted
                count["active"] += status.get("active", 0) > 0
                count["suspended"] += bool(spec.get("suspend"))
            found.append({"name": role["name"], **count})
        return found

    def _time_to_live(self, jobset):
        since = self.ended.setdefault(jobset["metadata"]["uid"], self.clock.now())
        keep = jobset["spec"].get("ttlSecondsAfterFinished")
        if keep is not None and self.clock.now() >= since + keep:
            self.api.delete(path_of(jobset), "Foreground")

    def _delete(self, jobs):
        for job in jobs:
            if not job["metadata"].get("deletionTimestamp"):
                self.api.delete(path_of(job), "Foreground")

    # ---------------------------------------------------------------- verdicts

    def _failure(self, jobset, status, rows, failed):
        policy = jobset["spec"].get("failurePolicy")
        if policy is None:
            return ending(rows, "Failed", "FailedJobs", said("FailedJobs", first(failed)))
        rule, job = next(
            ((rule, first(hit)) for rule in policy.get("rules", []) if (hit := [j for j in failed if fits(rule, j)])),
            ({"action": "RestartJobSet", "name": None}, first(failed)),
        )
        if rule["action"] == "FailJobSet":
            return ending(rows, "Failed", "FailJobSetFailurePolicyAction", said("FailJobSet", job))
        assert rule["action"].startswith("RestartJobSet"), f"{rule['action']}: its gate is off"
        counts = rule["action"] == "RestartJobSet"
        if counts and status.get("restartsCountTowardsMax", 0) >= policy.get("maxRestarts", 0):
            return ending(rows, "Failed", "ReachedMaxRestarts", said("ReachedMaxRestarts", job))
        status["restarts"] += 1
        status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + counts
        reason = f"FailurePolicy_{rule['name']}" if rule["name"] else "DefaultFailurePolicy"
        self.api.event(jobset, "RestartJobSetFailurePolicyAction", said("RestartJobSet", job), "Warning")
        return with_condition(rows, "RestartingJobSet", True, reason, said("RestartJobSet", job))

    def _succeeded(self, jobset, complete):
        policy = jobset["spec"].get("successPolicy") or {}
        roles = policy.get("targetReplicatedJobs") or [role["name"] for role in jobset["spec"]["replicatedJobs"]]
        done = sum(job["metadata"]["labels"][f"{KEY}replicatedjob-name"] in roles for job in complete)
        wanted = sum(role.get("replicas", 1) for role in jobset["spec"]["replicatedJobs"] if role["name"] in roles)
        return done >= (wanted if policy.get("operator", "All") == "All" else 1)

    # ---------------------------------------------------------------- running

    def _run(self, jobset, rows, jobs, active, attempt):
        self._service(jobset)
        names = {job["metadata"]["name"] for job in jobs}
        suspended = bool(jobset["spec"].get("suspend"))
        for role in jobset["spec"]["replicatedJobs"]:
            for index in range(role.get("replicas", 1)):
                if f"{jobset['metadata']['name']}-{role['name']}-{index}" not in names:
                    job = new_job(jobset, role, index, attempt)
                    code, found = self.api.post(f"{JOBS}/namespaces/{jobset['metadata']['namespace']}/jobs", job)
                    if code >= 300 and code != 409:
                        self.api.event(jobset, "JobCreationFailed", found.get("message", ""), "Warning")
        templates = {role["name"]: role["template"]["spec"]["template"] for role in jobset["spec"]["replicatedJobs"]}
        for job in active:
            spec = full_spec(job)
            if bool(spec.get("suspend")) != suspended and not job["metadata"].get("deletionTimestamp"):
                if not suspended:
                    resume(spec["template"], templates[job["metadata"]["labels"][f"{KEY}replicatedjob-name"]])
                spec["suspend"] = suspended
                change = {"metadata": {"annotations": {SPEC: json.dumps(spec)}}, "spec": {"suspend": suspended}}
                self.api.merge(path_of(job), change)
        if suspended:
            return with_condition(rows, "Suspended", True, "SuspendedJobs", MESSAGES["Suspended"])
        if any(row["type"] == "RestartingJobSet" for row in rows) and self._all_ready(jobset, active):
            rows = with_condition(rows, "RestartingJobSet", False, "JobsReady", "all jobs are ready")
        if any(row["type"] == "Suspended" for row in rows):
            return with_condition(rows, "Suspended", False, "ResumeJobs", MESSAGES["Resumed"])
        return rows

    def _all_ready(self, jobset, active):
        wanted = sum(role.get("replicas", 1) for role in jobset["spec"]["replicatedJobs"])
        return sum(self.jobs.ready.get(job["metadata"]["uid"], 0) > 0 for job in active) >= wanted

    def _service(self, jobset):
        """Taken as it is, whoever made it."""
        metadata, network = jobset["metadata"], jobset["spec"].get("network") or {}
        if not network.get("enableDNSHostnames", True):
            return
        services = f"/api/v1/namespaces/{metadata['namespace']}/services"
        name = network.get("subdomain") or metadata["name"]
        if self.api.get(f"{services}/{name}") is not None:
            return
        service = {
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "ownerReferences": [owner(jobset)]},
            "spec": {"clusterIP": "None", "selector": {f"{KEY}jobset-name": metadata["name"]},
                     "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True)},
        }  # fmt: skip
        code, found = self.api.post(services, service)
        if code >= 300:
            self.api.event(jobset, "HeadlessServiceCreationFailed", found.get("message", ""), "Warning")

    def _write(self, jobset, status, rows):
        old = jobset.get("status") or {}
        for kind in ("Completed", "Failed"):
            if any(row["type"] == kind and row["status"] == "True" for row in rows):
                status["terminalState"] = kind
        before = {row["type"]: row for row in old.get("conditions") or []}
        status["conditions"] = rows
        if status == old:
            return
        self.api.status(path_of(jobset), status)
        for row in rows:
            known = before.get(row["type"])
            if known is None or known["status"] != row["status"]:
                bad = row["type"] in ("Failed", "RestartingJobSet")
                self.api.event(jobset, row["reason"], row["message"], "Warning" if bad else "Normal")


def new_job(jobset, role, index, attempt):
    """A child Job as JobSet makes it: the labels of the role's template and JobSet's own, never the JobSet's."""
    template, keys = copy.deepcopy(role["template"]), keys_of(jobset, role, index, attempt)
    spec, metadata = template["spec"], template.get("metadata") or {}
    pod = spec["template"].setdefault("metadata", {})
    for key in ("labels", "annotations"):
        pod[key] = {**(pod.get(key) or {}), **keys}
    if (network := jobset["spec"].get("network") or {}).get("enableDNSHostnames", True):
        spec["template"]["spec"]["subdomain"] = network.get("subdomain") or jobset["metadata"]["name"]
    spec["suspend"] = bool(jobset["spec"].get("suspend"))
    return {
        "apiVersion": "batch/v1", "kind": "Job", "spec": spec,
        "metadata": {
            "name": f"{jobset['metadata']['name']}-{role['name']}-{index}",
            "namespace": jobset["metadata"]["namespace"],
            "labels": {**(metadata.get("labels") or {}), **keys},
            "annotations": {**(metadata.get("annotations") or {}), **keys, SPEC: json.dumps(spec)},
            "ownerReferences": [owner(jobset)],
        },
    }  # fmt: skip


def keys_of(jobset, role, index, attempt):
    """What JobSet writes on Jobs and pods, as labels and once more as annotations."""
    metadata, roles = jobset["metadata"], defaulted(jobset)["spec"]["replicatedJobs"]
    role = next(one for one in roles if one["name"] == role["name"])
    before = roles[: roles.index(role)]
    group = [one for one in roles if one["groupName"] == role["groupName"]]
    where = f"{metadata['namespace']}/{metadata['name']}-{role['name']}-{index}"
    found = {
        "jobset-name": metadata["name"],
        "jobset-uid": metadata["uid"],
        "replicatedjob-name": role["name"],
        "restart-attempt": attempt,
        "replicatedjob-replicas": role["replicas"],
        "global-replicas": sum(one["replicas"] for one in roles),
        "job-index": index,
        "job-key": hashlib.sha1(where.encode(), usedforsecurity=False).hexdigest(),
        "job-global-index": sum(one["replicas"] for one in before) + index,
        "group-name": role["groupName"],
        "group-replicas": sum(one["replicas"] for one in group),
        "job-group-index": sum(one["replicas"] for one in before if one in group) + index,
    }
    if "coordinator" in jobset["spec"]:
        found["coordinator"] = coordinator(jobset)
    return {f"{KEY}{key}": str(value) for key, value in found.items()}


def resume(template, wanted):
    """Merges what the JobSet's template has now into a Job's; what is no longer there stays, as with the real one."""
    metadata, pod = template.setdefault("metadata", {}), template["spec"]
    for key in ("labels", "annotations"):
        metadata[key] = {**(metadata.get(key) or {}), **((wanted.get("metadata") or {}).get(key) or {})}
    pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **(wanted["spec"].get("nodeSelector") or {})}
    for key in ("tolerations", "schedulingGates"):
        old = pod.get(key) or []
        pod[key] = old + [one for one in wanted["spec"].get(key) or [] if one not in old]


def ending(rows, kind, reason, message):
    return with_condition(rows, kind, True, reason, message)


def fits(rule, job):
    row = next(row for row in job["status"]["conditions"] if row["type"] == "Failed")
    patterns = rule.get("onJobFailureMessagePatterns") or [""]
    return (
        row["reason"] in (rule.get("onJobFailureReasons") or [row["reason"]])
        and any(re.search(one, row["message"]) for one in patterns)
        and job["metadata"]["labels"][f"{KEY}replicatedjob-name"]
        in (rule.get("targetReplicatedJobs") or [job["metadata"]["labels"][f"{KEY}replicatedjob-name"]])
    )


def first(failed):
    """Of several the one that failed first."""
    return min(
        failed,
        key=lambda job: next(row for row in job["status"]["conditions"] if row["type"] == "Failed")[
            "lastTransitionTime"
        ],
    )


def said(what, job):
    return f"{MESSAGES[what]} (first failed job: {job['metadata']['name']})"
