"""Plays Kueue 0.19.2 for JobSets: quota, admission checks, injection, eviction, waitForPodsReady.

It reads its Configuration from the ConfigMap of the cluster, as the real manager: at its start, and again only when its
Deployment is rolled; without one it has the released defaults, and with one that the real one refuses it does nothing.
Its clock is 300 times as fast as ours: 30 minutes are 6 seconds. ``tas`` plays topology-aware scheduling, and
``provisioning`` the admission check. Not played: cohorts, preemption by other workloads, partial admission, fair
sharing, other kinds of jobs.
"""

import copy
import hashlib

from claims import claimed
from fakes.admission import queue_of
from fakes.kueue_config import CONFIG_MAP, gates_of, kueue_config_refusals, ready_limits
from objects import JOBSETS, KUEUE, PODS, conditions_of, is_owned, is_true, named, owner, path_of, stamp, with_condition
from provisioning import Provisioning
from quota import NoFit, assign
from tas import Topologies

FINALIZER = "kueue.x-k8s.io/resource-in-use"
FORCE = "kueue.x-k8s.io/safe-to-forcefully-delete"
FORCED_AFTER_S = 60.0
DEPLOYMENT = "/apis/apps/v1/namespaces/kueue-system/deployments/kueue-controller-manager"
JOBSET = ("JobSet", "jobset.x-k8s.io/v1alpha2")


class Kueue:
    def __init__(self, api, clock):
        self.api, self.clock = api, clock
        self.hold = False
        """As a ClusterQueue's stopPolicy Hold: nothing is admitted, what runs runs on."""
        self.own_keys = True
        """How a pod's selector counts for a flavor: see ``quota.assign``. False: as 0.16, 0.17.5 and 0.18.1."""
        self.down = False
        self.configuration, self.rolled = None, ()
        self.refused: list[str] = []
        """Why the manager does not start; nothing is done then."""
        self.times: dict[tuple[str, str], float] = {}
        """(Workload's uid, what) -> when, by Kueue's clock."""
        self.wanted: dict[str, tuple[str, str]] = {}
        """JobSet's name -> (reason, message) of an eviction that a test asks for."""
        self.provisioning = Provisioning(api, clock)
        self.topologies = Topologies(api)

    def evict(self, jobset, reason, message="evicted by a test"):
        """Suspend the JobSet as Kueue does for any reason; it is queued again at once."""
        self.wanted[jobset] = reason, message

    def step(self):
        if self.down or not self._started():
            return
        workloads = list(map(named("Workload", "kueue.x-k8s.io/v1beta2"), self.api.items(f"{KUEUE}/workloads")))
        jobsets = list(map(named(*JOBSET), self.api.items(f"{JOBSETS}/jobsets")))
        living = {jobset["metadata"]["uid"] for jobset in jobsets if not jobset["metadata"].get("deletionTimestamp")}
        for workload in list(workloads):
            owners = {one["uid"] for one in workload["metadata"].get("ownerReferences") or []}
            if workload["metadata"].get("deletionTimestamp") or not owners & living:
                workloads.remove(workload)
                self.api.merge(path_of(workload), {"metadata": {"finalizers": None}})
        if self.gates["FailureRecoveryPolicy"]:
            self._recover()
        for jobset in jobsets:
            if queue_of(jobset) and jobset["metadata"]["uid"] in living:
                self._one(jobset, next((one for one in workloads if is_owned(one, jobset)), None), workloads)

    def _recover(self):
        """A pod that says so is ended by force a minute after it was asked to go, where its node is unreachable."""
        for pod in map(named("Pod", "v1"), self.api.items(f"{PODS}/pods")):
            metadata = pod["metadata"]
            if (metadata.get("annotations") or {}).get(FORCE) != "true" or not metadata.get("deletionTimestamp"):
                continue
            since = self.times.setdefault((metadata["uid"], "going"), self.clock.now())
            node = self.api.get(f"{PODS}/nodes/{pod['spec'].get('nodeName')}") or {}
            taints = {one["key"] for one in (node.get("spec") or {}).get("taints") or []}
            if self.clock.now() >= since + FORCED_AFTER_S and "node.kubernetes.io/unreachable" in taints:
                status = pod.get("status") or {}
                words = f"Pod forcefully terminated due to unreachable node `{pod['spec']['nodeName']}`"
                rows = with_condition(conditions(pod), "KueueFailureRecovery", True, "KueueForcefullyDeleted", words)
                ended = status.get("phase") in ("Succeeded", "Failed")
                self.api.status(path_of(pod), {"phase": status["phase"] if ended else "Failed", "conditions": rows})
                if ended or (metadata["uid"], "forced") in self.times:
                    self.api.delete(path_of(pod), grace_s=0)
                self.times[metadata["uid"], "forced"] = self.clock.now()  # seen once as Failed before it goes

    def _started(self):
        """Whether a manager runs, and with which Configuration."""
        deployment = self.api.get(DEPLOYMENT) or {}
        rolled = repr((deployment.get("spec") or {}).get("template"))
        if self.configuration is None or rolled != self.rolled:
            namespace, name, key = CONFIG_MAP
            found = self.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")
            self.configuration, self.rolled = read(found["data"][key]) if found else {}, rolled
            self.refused = kueue_config_refusals(self.configuration) if found else []
        return not self.refused

    @property
    def gates(self):
        return gates_of(self.configuration or {})

    def _one(self, jobset, workload, workloads):
        if is_true(jobset, "Completed", "Failed"):
            self._finished(jobset, workload)
        elif workload is None:
            if not jobset["spec"].get("suspend"):
                self._stop(jobset, None, "Missing Workload; unable to restore pod templates")
            self._queue(jobset)
        elif is_true(workload, "Evicted") and is_true(workload, "QuotaReserved"):
            self._leave(jobset, workload)
        elif not workload["spec"].get("active", True):
            if not jobset["spec"].get("suspend"):
                self._evict(workload, "Deactivated", "The workload is deactivated")
        elif not is_true(workload, "QuotaReserved"):
            self._reserve(jobset, workload, workloads)
        elif not is_true(workload, "Admitted"):
            self._check(jobset, workload)
        else:
            self._watch(jobset, workload)

    # ---------------------------------------------------------------- to the start

    def _queue(self, jobset):
        metadata = jobset["metadata"]
        annotations = {
            key: value
            for key, value in (metadata.get("annotations") or {}).items()
            if key.startswith("provreq.kueue.x-k8s.io/")
        }
        pod_sets = []
        for role in jobset["spec"]["replicatedJobs"]:
            job = role["template"]["spec"]
            count = role.get("replicas", 1) * min(job.get("parallelism", 1), job.get("completions", 2**31))
            pod_sets.append({"name": role["name"], "count": count, "template": copy.deepcopy(job["template"])})
            if request := self.topologies.request(job["template"], role):
                pod_sets[-1]["topologyRequest"] = request
        workload = {
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
            "metadata": {
                "name": workload_name(jobset), "namespace": metadata["namespace"], "annotations": annotations,
                "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]}, "finalizers": [FINALIZER],
                "ownerReferences": [owner(jobset)],
            },
            "spec": {"podSets": pod_sets, "queueName": queue_of(jobset), "active": True},
        }  # fmt: skip
        code, found = self.api.post(f"{KUEUE}/namespaces/{metadata['namespace']}/workloads", workload)
        assert code < 300 or code == 409, found.get("message")
        self.api.event(jobset, "CreatedWorkload", f"Created Workload: {metadata['namespace']}/{workload_name(jobset)}")

    def _reserve(self, jobset, workload, workloads):
        rows = conditions(workload)
        uid = workload["metadata"]["uid"]
        if not jobset["spec"].get("suspend"):  # somebody un-suspended it by hand
            self._stop(jobset, workload, "Not admitted by cluster queue")
        if self.clock.now() < self.times.get((uid, "requeue"), 0.0):
            return
        requeued = conditions_of(workload).get("Requeued", {})
        if requeued.get("status") == "False" and requeued["reason"] != "Inadmissible":
            rows = with_condition(rows, "Requeued", True, "BackoffFinished", "The workload backoff was finished")
        reserved = [one for one in workloads if is_true(one, "QuotaReserved")]
        try:
            asked = claimed(self.api, workload, self.configuration or {}, self.gates)
        except NoFit as why:
            for kind in ("QuotaReserved", "Requeued"):
                rows = with_condition(rows, kind, False, why.reason, str(why))
            self._write(workload, {"conditions": rows})
            return
        try:
            queue, admission = assign(
                self.api, workload, reserved, hold=self.hold, claims=asked, own_keys=self.own_keys
            )
        except NoFit as why:
            rows = with_condition(rows, "QuotaReserved", False, why.reason, str(why))
            self._write(workload, {"conditions": rows})
            return
        checks = self.provisioning.checks(queue, admission)
        self.topologies.place(workload, admission, delayed=bool(checks))
        if (trouble := self.topologies.trouble(admission)) and not checks:
            rows = with_condition(rows, "QuotaReserved", False, "Pending", trouble)
            self._write(workload, {"conditions": rows})
            return
        name = queue["metadata"]["name"]
        rows = with_condition(rows, "QuotaReserved", True, "QuotaReserved", f"Quota reserved in ClusterQueue {name}")
        if "Evicted" in conditions_of(workload):
            words = conditions_of(workload)["Evicted"]["message"].removeprefix("Previously: ")
            rows = with_condition(rows, "Evicted", False, "QuotaReserved", f"Previously: {words}")
        old = {one["name"]: one for one in (workload.get("status") or {}).get("admissionChecks") or []}
        states = [old.get(check) or state(check, "Pending", "") for check in checks]
        self._write(workload, {"conditions": rows, "admission": admission, "admissionChecks": states})

    def _check(self, jobset, workload):
        """Checks, then the second pass of a topology that had to wait for them; then the JobSet runs."""
        states, evict = self.provisioning.step(jobset, workload)
        if states != ((workload.get("status") or {}).get("admissionChecks") or []):
            self._write(workload, {"admissionChecks": states})
        if evict is not None:
            reason, message, deactivate = evict
            if deactivate:
                self.api.merge(path_of(workload), {"spec": {"active": False}})
            self._evict(workload, reason, message)
            return
        rows = conditions(workload)
        if any(one["state"] != "Ready" for one in states):
            self._write(workload, {"conditions": with_condition(
                rows, "Admitted", False, "UnsatisfiedChecks", "The workload has not all checks ready")})  # fmt: skip
            return
        admission = copy.deepcopy(workload["status"]["admission"])
        if self.topologies.pending(admission):
            self.topologies.place(workload, admission, delayed=False)
            if (trouble := self.topologies.trouble(admission)) is not None:
                self._write(workload, {"conditions": with_condition(
                    rows, "Admitted", False, "PendingDelayedTopologyRequests", trouble)})  # fmt: skip
                return
        rows = with_condition(rows, "Admitted", True, "Admitted", "The workload is admitted")
        rows = with_condition(rows, "PodsReady", False, "WaitForStart", "Not all pods are ready or succeeded")
        self.times[workload["metadata"]["uid"], "start"] = self.clock.now()
        self._write(workload, {"conditions": rows, "admission": admission})
        self._start(jobset, workload, admission, states)

    # ---------------------------------------------------------------- running

    def _watch(self, jobset, workload):
        uid, name = workload["metadata"]["uid"], jobset["metadata"]["name"]
        admission, limits = workload["status"]["admission"], ready_limits(self.configuration or {})
        if name in self.wanted:
            self._evict(workload, *self.wanted.pop(name))
            return
        if jobset["spec"].get("suspend"):  # somebody suspended it by hand, or a start was interrupted
            self._start(jobset, workload, admission, (workload["status"].get("admissionChecks") or []))
            return
        if (why := self.provisioning.revoked(workload)) is not None:
            self.api.merge(path_of(workload), {"spec": {"active": False}})
            self._evict(workload, "DeactivatedDueToAdmissionCheck", why)
            return
        self.topologies.open_gates(jobset, workload)
        if (why := self.topologies.failed(workload, self.gates)) is not None:
            self._evict(workload, "NodeFailures", why)
            return
        counts = (jobset.get("status") or {}).get("replicatedJobsStatus") or []
        wanted = sum(role.get("replicas", 1) for role in jobset["spec"]["replicatedJobs"])
        ready = sum(row["ready"] + row["succeeded"] for row in counts) >= wanted
        rows, since = conditions(workload), self.times.setdefault((uid, "start"), self.clock.now())
        was = conditions_of(workload).get("PodsReady", {})
        if ready:
            self.times.pop((uid, "lost"), None)
            first = was.get("reason") in (None, "WaitForStart")
            if was.get("status") != "True":
                words = "All pods reached readiness and the workload is running"
                rows = with_condition(rows, "PodsReady", True, "Started" if first else "Recovered", words)
                self._write(workload, {"conditions": rows})
            return
        if was.get("status") == "True":
            self.times[uid, "lost"] = self.clock.now()
            words = "At least one pod has failed, waiting for recovery"
            self._write(workload, {"conditions": with_condition(rows, "PodsReady", False, "WaitForRecovery", words)})
            return
        lost = self.times.get((uid, "lost"))
        limit, since = (limits.start_s, since) if lost is None else (limits.recovery_s, lost)
        if limit > 0 and self.clock.now() >= since + limit:
            self._too_late(workload, limits)

    def _too_late(self, workload, limits):
        metadata, uid = workload["metadata"], workload["metadata"]["uid"]
        count = ((workload.get("status") or {}).get("requeueState") or {}).get("count", 0) + 1
        if limits.most_requeues is not None and count > limits.most_requeues:
            self.api.merge(path_of(workload), {"spec": {"active": False}})
            words = "exceeding the maximum number of re-queuing retries"
            self._evict(
                workload, "DeactivatedDueToRequeuingLimitExceeded", f"The workload is deactivated due to {words}"
            )
            return
        pause_s = min(limits.backoff_base_s * 2.0 ** (count - 1), limits.backoff_most_s)
        self.times[uid, "requeue"] = self.clock.now() + pause_s
        self._write(workload, {"requeueState": {"count": count, "requeueAt": stamp()}})
        words = f"Exceeded the PodsReady timeout {metadata['namespace']}/{metadata['name']}"
        self._evict(workload, "PodsReadyTimeout", words)

    # ---------------------------------------------------------------- out again

    def _evict(self, workload, reason, message):
        self._write(workload, {"conditions": with_condition(conditions(workload), "Evicted", True, reason, message)})

    def _leave(self, jobset, workload):
        """Suspended, its templates as they were; the quota is given back once no pod is active."""
        row = conditions_of(workload)["Evicted"]
        if not jobset["spec"].get("suspend"):
            self._stop(jobset, workload, row["message"])
            return
        counts = (jobset.get("status") or {}).get("replicatedJobsStatus") or []
        if any(one["active"] for one in counts):
            return
        rows = with_condition(conditions(workload), "QuotaReserved", False, "Pending", row["message"])
        if "Admitted" in conditions_of(workload):
            rows = with_condition(rows, "Admitted", False, "NoReservation", "The workload has no reservation")
        waits = self.clock.now() < self.times.get((workload["metadata"]["uid"], "requeue"), 0.0)
        rows = with_condition(rows, "Requeued", not waits, row["reason"], row["message"])
        states = self.provisioning.reset(workload, self.gates)
        if row["reason"] == "AdmissionCheck":
            self.times[workload["metadata"]["uid"], "requeue"] = self.provisioning.again_at(workload)
        for what in ("start", "lost"):
            self.times.pop((workload["metadata"]["uid"], what), None)
        self._write(
            workload, {"conditions": rows, "admission": None, "admissionChecks": states, "unhealthyNodes": None}
        )

    def _stop(self, jobset, workload, message):
        roles = copy.deepcopy(jobset["spec"]["replicatedJobs"])
        for role in roles:
            pod_sets = workload["spec"]["podSets"] if workload is not None else []
            before = next((one["template"] for one in pod_sets if one["name"] == role["name"]), None)
            if before is not None:
                put_back(role["template"]["spec"]["template"], before)
        self.api.merge(path_of(jobset), {"spec": {"suspend": True, "replicatedJobs": roles}})
        self.api.event(jobset, "Stopped", message)

    def _start(self, jobset, workload, admission, states):
        """What the admission says goes into the templates; a value that contradicts one there is for good."""
        roles = copy.deepcopy(jobset["spec"]["replicatedJobs"])
        for role in roles:
            given = next(one for one in admission["podSetAssignments"] if one["name"] == role["name"])
            template = role["template"]["spec"]["template"]
            conflict = inject(template, self._info(jobset, workload, given, states))
            if conflict is not None:
                words = f"in admission: {conflict}"
                rows = with_condition(conditions(workload), "Finished", True, "FailedToStart", words)
                self._write(workload, {"conditions": rows})
                return
        self.api.merge(path_of(jobset), {"spec": {"suspend": False, "replicatedJobs": roles}})
        self.api.event(jobset, "Started", f"Admitted by clusterQueue {admission['clusterQueue']}")

    def _info(self, jobset, workload, given, states):
        """Labels, annotations, selectors, tolerations and gates for one pod set."""
        info = {"labels": {}, "annotations": {}, "nodeSelector": {}, "tolerations": [], "schedulingGates": []}
        for name in sorted(set(given["flavors"].values())):
            spec = self.api.get(f"{KUEUE}/resourceflavors/{name}")["spec"]
            info["nodeSelector"] |= spec.get("nodeLabels") or {}
            info["tolerations"] += spec.get("tolerations") or []
        for update in (one for check in states for one in check.get("podSetUpdates") or []):
            if update["name"] == given["name"]:
                info["annotations"] |= update.get("annotations") or {}
                info["nodeSelector"] |= update.get("nodeSelector") or {}
        info["annotations"]["kueue.x-k8s.io/workload"] = workload["metadata"]["name"]
        info["labels"] |= {
            "kueue.x-k8s.io/podset": given["name"],
            "kueue.x-k8s.io/local-queue-name": queue_of(jobset),
            "kueue.x-k8s.io/cluster-queue-name": workload["status"]["admission"]["clusterQueue"]
            if (workload.get("status") or {}).get("admission")
            else "",
        }
        self.topologies.inject(given, workload, info)
        return info

    def _finished(self, jobset, workload):
        if workload is None or is_true(workload, "Finished"):
            return
        kind = "Completed" if is_true(jobset, "Completed") else "Failed"
        reason = {"Completed": "Succeeded", "Failed": "Failed"}[kind]
        message = conditions_of(jobset)[kind]["message"]
        self._write(workload, {"conditions": with_condition(conditions(workload), "Finished", True, reason, message)})
        self.provisioning.clear(workload)

    def _write(self, workload, change):
        """Changes the status on the server and in ``workload``."""
        status = workload.setdefault("status", {})
        if any(status.get(key) != value for key, value in change.items()):
            self.api.status(path_of(workload), change)
            status.update(change)


def conditions(workload):
    return (workload.get("status") or {}).get("conditions") or []


def state(check, value, message):
    return {"name": check, "state": value, "message": message, "lastTransitionTime": stamp()}


def workload_name(jobset):
    metadata = jobset["metadata"]
    text = "\n".join(("JobSet", "jobset.x-k8s.io", metadata["name"], metadata["uid"]))
    return f"jobset-{metadata['name']}"[:247] + "-" + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:5]


def inject(template, info):
    """Adds ``info``; what contradicts it, or None."""
    metadata, pod = template.setdefault("metadata", {}), template["spec"]
    for holder, key in ((metadata, "labels"), (metadata, "annotations"), (pod, "nodeSelector")):
        held = holder.get(key) or {}
        for name, value in info[key].items():
            if held.get(name, value) != value:
                return f"conflict for {key}: key={name}, value1={held[name]}, value2={value}"
        holder[key] = {**held, **info[key]}
    for key in ("tolerations", "schedulingGates"):
        held = pod.get(key) or []
        pod[key] = held + [one for one in info[key] if one not in held]
    return None


def put_back(template, before):
    metadata, pod = template.setdefault("metadata", {}), template["spec"]
    sources = ((metadata, before.get("metadata") or {}, ("labels", "annotations")),
               (pod, before["spec"], ("nodeSelector", "tolerations", "schedulingGates")))  # fmt: skip
    for holder, source, keys in sources:
        for key in keys:
            holder.pop(key, None)
            if source.get(key):
                holder[key] = copy.deepcopy(source[key])


def read(text):
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text) or {}
