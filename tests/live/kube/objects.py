"""What the played controllers share: requests to a server, conditions, owners, a clock that can be faster than ours."""

import datetime
import json
import time

JOBS, PODS = "/apis/batch/v1", "/api/v1"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
KUEUE = WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2"
SPEC = "played/spec"
"""Annotation of a Job: its spec as sent. The control plane is older than most of its fields and drops them."""
GATES = "played/gates"
"""Annotation of a pod: its scheduling gates, which the control plane does not know either."""


class Api:
    """Requests as the administrator; ``plane`` has ``call(method, path, body, kind)``."""

    def __init__(self, plane):
        self.plane = plane

    def items(self, path):
        """No answer is no empty list: a controller would forget all that it counted."""
        return self._answered("GET", path)[1].get("items") or []

    def get(self, path):
        """None where it is absent."""
        status, found = self._answered("GET", path)
        return found if status < 300 else None

    def post(self, path, body):
        """(status, answer): a refusal is an answer."""
        return self.plane.call("POST", path, body)

    def merge(self, path, change):
        """Merge patch; False where the object is gone."""
        status, found = self._answered("PATCH", path, change, "application/merge-patch+json")
        assert status < 300 or status == 404, (path, status, found.get("message"))
        return status < 300

    def status(self, path, status):
        return self.merge(f"{path}/status", {"status": status})

    def delete(self, path, how=None, grace_s=None):
        body = {"propagationPolicy": how} if how else {}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        status, found = self._answered("DELETE", path, body)
        assert status < 300 or status in (404, 409), (path, status, found.get("message"))

    def _answered(self, method, path, *rest):
        """(status, answer). Raises ConnectionError where the server was too busy: a controller looks again."""
        status, found = self.plane.call(method, path, *rest)
        if status == 429 or status >= 500:
            raise ConnectionError(f"{method} {path}: {status} {found.get('message')}")
        return status, found

    def event(self, about, reason, message, kind="Normal"):
        metadata = about["metadata"]
        involved = {"kind": about["kind"], "apiVersion": about["apiVersion"], "name": metadata["name"],
                    "namespace": metadata["namespace"], "uid": metadata["uid"]}  # fmt: skip
        body = {
            "apiVersion": "v1", "kind": "Event", "type": kind, "reason": reason, "message": message[:1024],
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": involved, "source": {"component": "played"}, "firstTimestamp": stamp(),
            "lastTimestamp": stamp(), "count": 1,
        }  # fmt: skip
        self.post(f"/api/v1/namespaces/{metadata['namespace']}/events", body)


class Clock:
    """Seconds that pass ``speed`` times as fast as the machine's, and that a test can let pass at once."""

    def __init__(self, speed=1.0, source=time.monotonic):
        self.speed, self.source, self.skipped_s = speed, source, 0.0

    def now(self):
        return self.source() * self.speed + self.skipped_s

    def advance(self, seconds):
        self.skipped_s += seconds


def path_of(one):
    """The path of a namespaced object of the kinds that are played."""
    folders = {
        "Pod": f"{PODS}/namespaces/%s/pods", "Job": f"{JOBS}/namespaces/%s/jobs",
        "JobSet": f"{JOBSETS}/namespaces/%s/jobsets", "Workload": f"{KUEUE}/namespaces/%s/workloads",
        "ProvisioningRequest": "/apis/autoscaling.x-k8s.io/v1/namespaces/%s/provisioningrequests",
    }  # fmt: skip
    metadata = one["metadata"]
    return f"{folders[one['kind']] % metadata['namespace']}/{metadata['name']}"


def owner(one):
    metadata = one["metadata"]
    return {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": metadata["name"], "uid": metadata["uid"],
            "controller": True, "blockOwnerDeletion": True}  # fmt: skip


def is_owned(one, by):
    return any(each.get("uid") == by["metadata"]["uid"] for each in one["metadata"].get("ownerReferences") or [])


def named(kind, api):
    """List items of a server say neither their kind nor their version."""

    def complete(one):
        return {"kind": kind, "apiVersion": api, **one}

    return complete


def conditions_of(one):
    """Type -> condition."""
    return {row["type"]: row for row in (one.get("status") or {}).get("conditions") or []}


def is_true(one, *kinds):
    found = conditions_of(one)
    return any(found.get(kind, {}).get("status") == "True" for kind in kinds)


def with_condition(rows, kind, status, reason, message):
    """The conditions with one set; its time changes with its status alone. The same list where nothing changes."""
    value = {True: "True", False: "False"}[status]
    old = next((row for row in rows if row["type"] == kind), None)
    if old is not None and (old["status"], old["reason"], old["message"]) == (value, reason, message):
        return rows
    since = old["lastTransitionTime"] if old is not None and old["status"] == value else stamp()
    new = {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": since}
    return [new if row is old else row for row in rows] if old is not None else [*rows, new]


def stamp():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def full_spec(job):
    """A Job's spec as its maker sent it."""
    text = (job["metadata"].get("annotations") or {}).get(SPEC)
    return json.loads(text) if text else job["spec"]
