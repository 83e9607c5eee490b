"""Plays the Job controller of Kubernetes 1.34: the control plane's own is of 1.20 and is switched off.

Pods are made here: Indexed, one at a time, the next only when the last has really ended where the Job asks for that
(podReplacementPolicy Failed); pod failure policy; backoffLimit; suspension. The delay before a replacement (10 s,
doubled at every failure in a row, at most 10 min) counts what the policy ignores too, as the real one does: Ignore only
keeps a failure from being charged to backoffLimit. What is not played: parallelism above 1, deadlines, success
policies, the finalizer of pods (a pod that vanishes unseen counts as failed).
"""

import copy
import json
from dataclasses import dataclass, field

from objects import GATES, JOBS, PODS, full_spec, is_owned, is_true, named, owner, path_of, stamp, with_condition

FIRST_DELAY_S, LONGEST_DELAY_S = 10.0, 600.0
SIDECARS = "played/native-sidecars"
"""Annotation of a pod for the played kubelet: which init containers are sidecars. (The field is younger.)"""
POD_OF_JOB = "batch.kubernetes.io/job-name"


@dataclass
class Record:
    """What is remembered of one Job."""

    counted: set = field(default_factory=set)
    known: dict = field(default_factory=dict)
    failed: int = 0
    succeeded: int = 0
    in_a_row: int = 0
    last_failure: float = 0.0
    refused: str = ""


class Jobs:
    def __init__(self, api, clock):
        self.api, self.clock = api, clock
        self.records: dict[str, Record] = {}
        self.ready: dict[str, int] = {}
        """Of each Job: pods that are ready. (The status field for it is younger than the control plane.)"""
        self.refusal = lambda: None
        """Why no pod can be made now: a webhook that does not answer."""

    def step(self):
        jobs = list(map(named("Job", "batch/v1"), self.api.items(f"{JOBS}/jobs")))
        pods = list(map(named("Pod", "v1"), self.api.items(f"{PODS}/pods")))
        for job in jobs:
            self._one(job, [pod for pod in pods if is_owned(pod, job)])
        living = {job["metadata"]["uid"] for job in jobs}
        for uid in set(self.records) - living:
            del self.records[uid]

    def _one(self, job, pods):
        uid = job["metadata"]["uid"]
        record, spec = self.records.setdefault(uid, Record()), full_spec(job)
        self.ready[uid] = sum(is_true(pod, "Ready") and not ended(pod) for pod in pods)
        if is_true(job, "Complete", "Failed"):
            return
        failures = self._count(record, spec, pods)
        active = [pod for pod in pods if not ended(pod) and not going(pod)]
        terminating = [pod for pod in pods if not ended(pod) and going(pod)]
        rows = (job.get("status") or {}).get("conditions") or []
        verdict = self._verdict(rows, record, spec, failures)
        if verdict is not None:
            for pod in active:
                self.api.delete(path_of(pod))
            rows = with_condition(rows, "FailureTarget", True, *verdict)
            if not active and not terminating:
                rows = with_condition(rows, "Failed", True, *verdict)
        elif not job["metadata"].get("deletionTimestamp"):
            rows = self._manage(job, spec, record, rows, active, terminating)
        self._write(job, rows, record, len(active))

    def _count(self, record, spec, pods):
        """Counts what has ended since the last look; returns every failed pod with what the policy says of it."""
        failures = [(pod, judged(spec, pod)) for pod in pods if phase(pod) == "Failed"]
        now = {pod["metadata"]["uid"]: pod for pod in pods}
        lost = [(pod, judged(spec, pod)) for uid, pod in record.known.items() if uid not in now]
        record.known = {uid: pod for uid, pod in now.items() if not ended(pod) and uid not in record.counted}
        for pod, (action, _) in failures + lost:
            if pod["metadata"]["uid"] not in record.counted:
                record.counted.add(pod["metadata"]["uid"])
                record.failed += action != "Ignore"
                record.in_a_row += 1
                record.last_failure = self.clock.now()
        for pod in pods:
            if phase(pod) == "Succeeded" and pod["metadata"]["uid"] not in record.counted:
                record.counted.add(pod["metadata"]["uid"])
                record.succeeded += 1
                record.in_a_row = 0
        return failures

    def _verdict(self, rows, record, spec, failures):
        for row in rows:
            if row["type"] == "FailureTarget":
                return row["reason"], row["message"]
        for _, (action, why) in failures:
            if action == "FailJob":
                return "PodFailurePolicy", why
        if record.failed > spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def _manage(self, job, spec, record, rows, active, terminating):
        if spec.get("suspend"):
            for pod in active:
                record.counted.add(pod["metadata"]["uid"])
                record.known.pop(pod["metadata"]["uid"], None)
                self.api.delete(path_of(pod))
            return with_condition(rows, "Suspended", True, "JobSuspended", "Job suspended")
        if any(row["type"] == "Suspended" for row in rows):
            rows = with_condition(rows, "Suspended", False, "JobResumed", "Job resumed")
        wanted = spec.get("completions", 1) - record.succeeded
        if wanted <= 0 and not active:
            rows = with_condition(rows, "SuccessCriteriaMet", True, "CompletionsReached", "Reached expected succeeded")
            return with_condition(
                rows, "Complete", True, "CompletionsReached", "Reached expected number of succeeded pods"
            )
        waits_for = terminating if waits(spec) else []
        if wanted > len(active) + len(waits_for) and self.clock.now() >= record.last_failure + self.delay(record):
            self._make(job, spec, record)
        return rows

    def delay(self, record):
        """Seconds between the last failure in a row and the next pod."""
        if record.in_a_row == 0:
            return 0.0
        return min(FIRST_DELAY_S * 2.0 ** min(record.in_a_row - 1, 20), LONGEST_DELAY_S)

    def _make(self, job, spec, record):
        refused = self.refusal()
        if refused is None:
            status, found = self.api.post(f"{PODS}/namespaces/{job['metadata']['namespace']}/pods", new_pod(job, spec))
            refused = None if status < 300 else found.get("message", "")
        if refused is not None and refused != record.refused:
            self.api.event(job, "FailedCreate", f"Error creating: {refused}", "Warning")
        record.refused = refused or ""

    def _write(self, job, rows, record, active):
        old = job.get("status") or {}
        new = {"active": active, "failed": record.failed, "succeeded": record.succeeded}
        if rows != (old.get("conditions") or []) or any(value != old.get(key, 0) for key, value in new.items()):
            done = any(row["type"] == "Complete" for row in rows)
            times = {"startTime": old.get("startTime") or stamp(), **({"completionTime": stamp()} if done else {})}
            self.api.status(path_of(job), {**new, **times, "conditions": rows})


def new_pod(job, spec):
    """The pod of index 0."""
    template, name = copy.deepcopy(spec["template"]), job["metadata"]["name"]
    metadata, pod = template.setdefault("metadata", {}), template["spec"]
    uid = job["metadata"]["uid"]
    metadata["generateName"] = f"{name}-0-"
    metadata["labels"] = {
        **metadata.get("labels", {}), "job-name": name, "controller-uid": uid, POD_OF_JOB: name,
        "batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-completion-index": "0",
    }  # fmt: skip
    annotations = metadata.setdefault("annotations", {})
    annotations["batch.kubernetes.io/job-completion-index"] = "0"
    metadata["ownerReferences"] = [owner(job)]
    pod["hostname"] = f"{name}-0"
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": "0"})
    if native := [one["name"] for one in pod.get("initContainers", []) if one.get("restartPolicy") == "Always"]:
        annotations[SIDECARS] = ",".join(native)
    if gates := pod.get("schedulingGates"):
        annotations[GATES] = json.dumps([one["name"] for one in gates])
        pod["schedulerName"] = "gated"  # no scheduler looks at it until its gates are open
    return {"apiVersion": "v1", "kind": "Pod", **template}


def judged(spec, pod):
    """(action, why) of the first rule that matches a failed pod; ("Count", "") where none does."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    status = pod.get("status") or {}
    ends = {
        one["name"]: (one.get("state", {}).get("terminated") or {}).get("exitCode")
        for one in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    }
    for number, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
        for wanted in rule.get("onPodConditions") or []:
            for row in status.get("conditions") or []:
                if (row["type"], row["status"]) == (wanted["type"], wanted.get("status", "True")):
                    return rule[
                        "action"
                    ], f"Pod {where} has condition {row['type']} matching {rule['action']} rule at index {number}"
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        for name, code in ends.items():
            asked = codes.get("containerName") in (None, name)
            if asked and code and (code in codes["values"]) == (codes["operator"] == "In"):
                why = f"Container {name} for pod {where} failed with exit code {code} matching {rule['action']} rule"
                return rule["action"], f"{why} at index {number}"
    return "Count", ""


def waits(spec):
    """Whether the next pod waits for the end of one that is going; with a pod failure policy it always does."""
    return "podFailurePolicy" in spec or spec.get("podReplacementPolicy") == "Failed"


def phase(pod):
    return (pod.get("status") or {}).get("phase", "Pending")


def ended(pod):
    return phase(pod) in ("Succeeded", "Failed")


def going(pod):
    return bool(pod["metadata"].get("deletionTimestamp"))
