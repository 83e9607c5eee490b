"""Plays what a cloud does to nodes: preemption with 15 s notice, a VM that is gone, one that hangs, repair.

And the pod garbage collector of Kubernetes 1.34: a pod whose node is gone becomes Failed with the condition
DisruptionTarget before it is deleted.
"""

from objects import PODS, named, path_of, stamp, with_condition

NOTICE_S = 15.0
IMPENDING = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule", "value": ""}


class Nodes:
    def __init__(self, api):
        self.api = api
        self.gone: set[str] = set()
        """Nodes whose VM is gone: the cloud's controller deletes the object once it is NotReady."""

    def step(self):
        nodes = {one["metadata"]["name"]: one for one in self.api.items(f"{PODS}/nodes")}
        for name in self.gone & nodes.keys():
            rows = {row["type"]: row for row in nodes[name]["status"].get("conditions") or []}
            if rows.get("Ready", {}).get("status") != "True":
                self.api.delete(f"{PODS}/nodes/{name}")
        for pod in map(named("Pod", "v1"), self.api.items(f"{PODS}/pods")):
            node = pod["spec"].get("nodeName")
            if node and node not in nodes:
                self._collect(pod)

    def _collect(self, pod):
        status = pod.get("status") or {}
        if status.get("phase") not in ("Succeeded", "Failed"):
            words = "PodGC: node no longer exists"
            rows = with_condition(status.get("conditions") or [], "DisruptionTarget", True, "DeletionByPodGC", words)
            self.api.status(path_of(pod), {"phase": "Failed", "conditions": rows})
            return  # seen once as Failed before it goes
        self.api.delete(path_of(pod), grace_s=0)

    def notify(self, node):
        """A preemption is announced: a taint, and the node's pods are asked to go within their share of 15 s."""
        self.api.merge(f"{PODS}/nodes/{node}", {"spec": {"taints": [{**IMPENDING, "timeAdded": stamp()}]}})
        for pod in map(named("Pod", "v1"), self.api.items(f"{PODS}/pods")):
            if pod["spec"].get("nodeName") == node:
                rows = (pod.get("status") or {}).get("conditions") or []
                words = "Pod was terminated in response to imminent node shutdown."
                rows = with_condition(rows, "DisruptionTarget", True, "TerminationByKubelet", words)
                self.api.status(path_of(pod), {"conditions": rows})
                self.api.delete(path_of(pod), grace_s=int(NOTICE_S))
