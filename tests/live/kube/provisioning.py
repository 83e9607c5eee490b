"""Plays Kueue's admission check for ProvisioningRequests, and by verbs the autoscaler that answers them.

Nobody answers by himself: ``accept``, ``provision``, ``fail``, ``expire``, ``revoke`` say what the autoscaler said.
"""

import copy

from objects import KUEUE, conditions_of, is_true, named, owner, path_of, stamp, with_condition
from quota import requests

REQUESTS = "/apis/autoscaling.x-k8s.io/v1"
PREFIX = "provreq.kueue.x-k8s.io/"
CONSUME = "autoscaling.x-k8s.io/consume-provisioning-request"
CLASS = "autoscaling.x-k8s.io/provisioning-class-name"


class Provisioning:
    def __init__(self, api, clock):
        self.api, self.clock = api, clock
        self.again: dict[str, float] = {}

    # ---------------------------------------------------------------- the autoscaler's words

    def accept(self, request, message="Provisioning request is accepted"):
        self._say(request, "Accepted", True, "Accepted", message)
        self._say(request, "Provisioned", False, "NotProvisioned", "Capacity is expected in about 2 hours")

    def provision(self, request):
        self._say(request, "Provisioned", True, "Provisioned", "Provisioning Request was successfully provisioned.")

    def fail(self, request, message="no capacity"):
        self._say(request, "Failed", True, "CapacityIsNotFound", message)

    def expire(self, request):
        self._say(request, "BookingExpired", True, "BookingExpired", "Capacity booking is expired")

    def revoke(self, request):
        self._say(request, "CapacityRevoked", True, "CapacityRevoked", "the nodes of this request were removed")

    def _say(self, request, kind, status, reason, message):
        rows = (request.get("status") or {}).get("conditions") or []
        request.setdefault("status", {})["conditions"] = with_condition(rows, kind, status, reason, message)
        self.api.status(path_of(request), {"conditions": request["status"]["conditions"]})

    def newest(self, jobset):
        """The request for a JobSet that was made last; None without one."""
        found = [one for one in self._all() if one["metadata"]["name"].startswith(f"jobset-{jobset}-")]
        return max(found, key=lambda one: int(one["metadata"]["name"].rpartition("-")[2]), default=None)

    def _all(self):
        kind = named("ProvisioningRequest", "autoscaling.x-k8s.io/v1")
        return list(map(kind, self.api.items(f"{REQUESTS}/provisioningrequests")))

    # ---------------------------------------------------------------- the check

    def checks(self, queue, admission):
        """Names of the checks that the assigned flavors have to pass."""
        flavors = {name for one in admission["podSetAssignments"] for name in one["flavors"].values()}
        rows = (queue["spec"].get("admissionChecksStrategy") or {}).get("admissionChecks") or []
        return [row["name"] for row in rows if not row.get("onFlavors") or flavors & set(row["onFlavors"])]

    def step(self, jobset, workload):
        """(states of the checks, None or (reason, message, whether it is deactivated) of an eviction)."""
        states, evict = [], None
        for old in (workload.get("status") or {}).get("admissionChecks") or []:
            new = self._judge(workload, copy.deepcopy(old))
            if new["state"] != old["state"] or new["message"] != old["message"]:
                new["lastTransitionTime"] = stamp()
            states.append(new)
            about = f'"{new["name"]}" ({new["message"]})'
            if new["state"] == "Retry":
                evict = "AdmissionCheck", f"Evicted due to AdmissionCheck in Retry state: {about}", False
            elif new["state"] == "Rejected":
                words = f"The workload is deactivated due to AdmissionCheck in Rejected state: {about}"
                evict = "DeactivatedDueToAdmissionCheck", words, True
        return states, evict

    def _config(self, check):
        found = self.api.get(f"{KUEUE}/admissionchecks/{check}")
        return self.api.get(f"{KUEUE}/provisioningrequestconfigs/{found['spec']['parameters']['name']}")["spec"]

    def _judge(self, workload, new):
        config, attempt = self._config(new["name"]), new.get("retryCount", 0) + 1
        managed = set(config.get("managedResources") or [])
        pod_sets = [
            one
            for one in workload["spec"]["podSets"]
            if not managed or managed & requests(one["template"]["spec"]).keys()
        ]
        if not pod_sets:
            return {**new, "state": "Ready", "message": "the provisioning request is not needed"}
        name = f"{workload['metadata']['name']}-{new['name']}-{attempt}"
        where = f"{REQUESTS}/namespaces/{workload['metadata']['namespace']}/provisioningrequests"
        request = self.api.get(f"{where}/{name}")
        if request is None:
            return {**new, "state": "Pending", "message": self._make(workload, config, pod_sets, where, name)}
        most = (config.get("retryStrategy") or {}).get("backoffLimitCount", 3)
        rows = conditions_of(request)
        if is_true(request, "Failed"):
            return self._again(workload, config, new, most, f"after failure: {rows['Failed']['message']}")
        if is_true(request, "CapacityRevoked"):
            return {
                **new,
                "state": "Rejected",
                "message": f"Capacity was revoked: {rows['CapacityRevoked']['message']}",
            }
        if is_true(request, "BookingExpired"):
            return self._again(
                workload, config, new, most, f"after booking expired: {rows['BookingExpired']['message']}"
            )
        if is_true(request, "Provisioned"):
            given = {CONSUME: name, CLASS: config["provisioningClassName"]}
            updates = [{"name": one["name"], "annotations": given} for one in pod_sets]
            return {**new, "state": "Ready", "message": rows["Provisioned"]["message"], "podSetUpdates": updates}
        return {**new, "state": "Pending", "message": rows.get("Provisioned", {}).get("message", "")}

    def _again(self, workload, config, new, most, why):
        attempt = new.get("retryCount", 0) + 1
        if attempt > most:
            return {**new, "state": "Rejected", "message": why.removeprefix("after ")}
        strategy = config.get("retryStrategy") or {}
        pause_s = min(strategy.get("backoffBaseSeconds", 60) * 2.0 ** (attempt - 1),
                      strategy.get("backoffMaxSeconds", 1800))  # fmt: skip
        self.again[workload["metadata"]["uid"]] = self.clock.now() + pause_s
        return {**new, "state": "Retry", "message": f"Retrying {why}", "retryCount": attempt}

    def again_at(self, workload):
        return self.again.get(workload["metadata"]["uid"], 0.0)

    def _make(self, workload, config, pod_sets, where, name):
        """Pod templates and the request; what went wrong, or nothing."""
        metadata = workload["metadata"]
        rows = []
        for one in pod_sets:
            template = {
                "apiVersion": "v1", "kind": "PodTemplate", "template": copy.deepcopy(one["template"]),
                "metadata": {"name": f"ppt-{name}-{one['name']}", "ownerReferences": [owner(workload)]},
            }  # fmt: skip
            self.api.post(f"/api/v1/namespaces/{metadata['namespace']}/podtemplates", template)
            rows.append({"podTemplateRef": {"name": template["metadata"]["name"]}, "count": one["count"]})
        asked = {
            key.removeprefix(PREFIX): value
            for key, value in (metadata.get("annotations") or {}).items()
            if key.startswith(PREFIX)
        }
        spec = {"provisioningClassName": config["provisioningClassName"], "podSets": rows,
                "parameters": {**(config.get("parameters") or {}), **asked}}  # fmt: skip
        body = {
            "apiVersion": "autoscaling.x-k8s.io/v1", "kind": "ProvisioningRequest", "spec": spec,
            "metadata": {"name": name, "namespace": metadata["namespace"], "ownerReferences": [owner(workload)],
                         "labels": {"kueue.x-k8s.io/managed": "true"}},
        }  # fmt: skip
        code, found = self.api.post(where, body)
        if code < 300:
            self.api.event(workload, "ProvisioningRequestCreated", f"Created ProvisioningRequest: {name}")
            return ""
        words = f"Error creating ProvisioningRequest {name!r}: {found.get('message', '')}"
        self.api.event(workload, "FailedCreate", words, "Warning")
        return words

    # ---------------------------------------------------------------- afterwards

    def revoked(self, workload):
        """Why an admitted workload has lost its nodes; None while it has them. An expired booking is of no account."""
        for request in self._of(workload):
            if is_true(request, "CapacityRevoked"):
                check = next(iter(workload["status"].get("admissionChecks") or [{"name": "?"}]))["name"]
                said = conditions_of(request)["CapacityRevoked"]["message"]
                return ("The workload is deactivated due to AdmissionCheck in Rejected state: "
                        f'"{check}" (Capacity was revoked: {said})')  # fmt: skip
        return None

    def reset(self, workload, gates):
        """The checks after an eviction; the requests of before are gone by default."""
        if gates["CleanupProvisioningRequestsOnEviction"]:
            self.clear(workload)
        return [
            {"name": one["name"], "state": "Pending", "lastTransitionTime": stamp(),
             "message": f"Reset to Pending after eviction. Previously: {one['state']}",
             **({"retryCount": one["retryCount"]} if "retryCount" in one else {})}
            for one in (workload.get("status") or {}).get("admissionChecks") or []
        ]  # fmt: skip

    def clear(self, workload):
        for request in self._of(workload):
            self.api.delete(path_of(request))

    def _of(self, workload):
        start = f"{workload['metadata']['name']}-"
        return [one for one in self._all() if one["metadata"]["name"].startswith(start)]
