"""The played controllers on the API server in memory: no processes, and a clock that a test turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes.kubernetes import FakeKubernetes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live" / "kube"))
from controllers import Controllers

Object = dict[str, Any]
READY = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastTransitionTime": "t"}]
NO_NODE = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector."
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_NODE}]


class PlaneInMemory:
    """What the controllers ask of a control plane."""

    def __init__(self, server: FakeKubernetes) -> None:
        self.server = server

    def call(self, method: str, path: str, body: Any = None, kind: str = "") -> tuple[int, Object]:
        status, found = self.server.handle(method, path, json.dumps(body).encode() if body is not None else b"")
        return status, json.loads(json.dumps(found))


class Play:
    """A cluster whose controllers are played; ``step`` lets them look, ``run`` does what nodes do meanwhile.

    ``pools``: labels of the node pools, which grow on demand; a pod whose selector none of them has stays unscheduled.
    None: a node for every pod.
    """

    def __init__(
        self,
        *objects: Object,
        nodes: int = 0,
        labels: dict[str, str] | None = None,
        pools: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self.pools = pools
        self.server = FakeKubernetes()
        self.plane = PlaneInMemory(self.server)
        self.time = 0.0
        self.controllers: Any = Controllers(self.plane, kueue_speed=1.0, source=lambda: self.time)
        self.kueue = self.controllers.kueue
        self.add_node("any", {})
        for number in range(nodes):
            self.add_node(f"node{number}", labels or {})
        for one in objects:
            self.add(one)

    def add(self, one: Object) -> None:
        """By server-side apply, through the webhooks."""
        from fakes.kubernetes import in_memory

        in_memory(self.server).apply(one)

    def add_node(self, name: str, labels: dict[str, str]) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {}}
        self.plane.call("POST", "/api/v1/nodes", node)
        self.plane.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": READY}})

    def step(self, seconds: float = 0.0, times: int = 8) -> None:
        """Let time pass, then let everybody look until nothing more follows."""
        self.time += seconds
        quiet = 0
        for _ in range(times):
            before = self._writes()
            self.controllers.step()
            quiet = quiet + 1 if self._writes() == before else 0
            if quiet == 2:
                break

    def _writes(self) -> int:
        return sum(method != "GET" for method, _ in self.server.log)

    def run(self, seconds: float = 0.0) -> None:
        """Steps, and every pod that may start runs on a node and is ready; what is to go goes with 75."""
        self.step(seconds, times=2)
        for _ in range(8):
            before, changed = self._writes(), False
            for pod in self.pods():
                if pod["metadata"].get("deletionTimestamp"):
                    self.end(pod, 75)
                    self.forget(pod)
                elif phase(pod) == "Pending" and (pod["spec"].get("nodeName") or self._free(pod)):
                    pod["spec"].setdefault("nodeName", "any")
                    pod.setdefault("status", {}).update({"phase": "Running", "conditions": READY})
                    changed = True
                elif phase(pod) == "Pending" and not pod["spec"].get("nodeName"):
                    pod.setdefault("status", {})["conditions"] = UNSCHEDULABLE
            self.step(times=2)
            if not changed and self._writes() == before:
                break

    def _free(self, pod: Object) -> bool:
        selector = pod["spec"].get("nodeSelector") or {}
        fits = self.pools is None or any(selector.items() <= labels.items() for labels in self.pools)
        return fits and pod["spec"].get("schedulerName") != "gated"

    def pods(self, role: str = "") -> list[Object]:
        """The server's own, to be changed in place."""
        mine = "jobset.sigs.k8s.io/replicatedjob-name"
        return [one for one in self.server.of_kind("Pod") if role in ("", one["metadata"]["labels"].get(mine))]

    def pod(self, role: str, index: int = 0) -> Object:
        """The one of this index that is not going and has not ended."""
        (found,) = [
            one
            for one in self.pods(role)
            if one["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"] == str(index)
            and not one["metadata"].get("deletionTimestamp")
            and phase(one) not in ("Succeeded", "Failed")
        ]
        return found

    def end(self, pod: Object, code: int, container: str = "") -> None:
        """Its container has ended."""
        name = container or pod["spec"]["containers"][0]["name"]
        ended = [{"name": name, "state": {"terminated": {"exitCode": code}}}]
        held = pod.setdefault("status", {})
        rows = [row for row in held.get("conditions", []) if row["type"] != "Ready"]
        held.update({"phase": "Failed" if code else "Succeeded", "containerStatuses": ended, "conditions": rows})

    def forget(self, pod: Object) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.controllers.step()  # the Job controller sees it before it is gone
        self.plane.call("DELETE", path, {"gracePeriodSeconds": 0})

    def delete(self, pod: Object) -> None:
        """As an eviction does: it is asked to end."""
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.plane.call("DELETE", path, {})

    def lose(self, node: str, *, deleted: bool = True) -> None:
        """The VM is gone, or hangs; its pods are asked to end after their toleration, and nobody ends them."""
        path = f"/api/v1/nodes/{node}"
        self.plane.call("PATCH", f"{path}/status", {"status": {"conditions": [{**READY[0], "status": "Unknown"}]}})
        for pod in self.pods():
            if pod["spec"].get("nodeName") == node:
                self.delete(pod)
        if deleted:
            self.plane.call("DELETE", path, {})

    def one(self, kind: str) -> Object:
        (found,) = self.server.of_kind(kind)
        return found

    def conditions(self, kind: str) -> dict[str, Object]:
        return {row["type"]: row for row in (self.one(kind).get("status") or {}).get("conditions") or []}

    def events(self, reason: str) -> list[str]:
        return [one["message"] for one in self.server.of_kind("Event") if one["reason"] == reason]


def phase(pod: Object) -> str:
    found: str = (pod.get("status") or {}).get("phase", "Pending")
    return found
