"""Topology-aware scheduling of Kueue 0.19.2: one node for each pod of a pod set, gates, nodes that are lost.

A pod set has a topology where its flavor has one. Nodes count that are Ready, match the flavor's labels and carry every
label of the Topology. Of the levels only the lowest is played: which node, not which block.

Lost nodes: the watch on nodes is behind the gate TASFailedNodeReplacement, but the watch on pods is not, so that a pod
that ends on a lost node brings the node in with the gate off as well; a second lost node beside one that has no
replacement yet evicts whatever the gates are.
"""

from objects import GATES, KUEUE, PODS, is_true, named, path_of
from quota import tolerates

ASKED = "kueue.x-k8s.io/podset-"
GATE = "kueue.x-k8s.io/topology"
HOSTNAME = "kubernetes.io/hostname"


class Topologies:
    def __init__(self, api):
        self.api = api
        self.nodes: dict[tuple[str, str], list[str]] = {}
        """(Workload's uid, pod set) -> the node of each pod, by its index."""
        self.unhealthy: dict[str, set[str]] = {}
        self.seen_ended: set[str] = set()

    def request(self, template, role):
        """A pod set's topologyRequest, from its annotations; None where it asks for none."""
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        found = {}
        for word in ("required", "preferred"):
            if value := annotations.get(f"{ASKED}{word}-topology"):
                found[word] = value
        if annotations.get(f"{ASKED}unconstrained-topology") == "true":
            found["unconstrained"] = True
        if not found:
            return None
        return {
            **found, "podIndexLabel": "batch.kubernetes.io/job-completion-index",
            "subGroupIndexLabel": "jobset.sigs.k8s.io/job-index", "subGroupCount": role.get("replicas", 1),
        }  # fmt: skip

    def topology(self, given):
        """The Topology of the flavors that a pod set was given; None without one."""
        for name in sorted(set(given["flavors"].values())):
            flavor = self.api.get(f"{KUEUE}/resourceflavors/{name}")
            if wanted := flavor["spec"].get("topologyName"):
                return flavor, self.api.get(f"{KUEUE}/topologies/{wanted}")
        return None

    def place(self, workload, admission, *, delayed):
        """Chooses nodes, or notes that this waits for the admission checks. What finds none stays Pending."""
        taken: set[str] = set()
        for given in admission["podSetAssignments"]:
            if (found := self.topology(given)) is None:
                continue
            free = [] if delayed else [name for name in self.fit(*found, workload, given) if name not in taken]
            if len(free) < given["count"]:
                given["delayedTopologyRequest"] = "Pending"
                continue
            if "delayedTopologyRequest" in given:
                given["delayedTopologyRequest"] = "Ready"
            chosen = self.nodes[workload["metadata"]["uid"], given["name"]] = free[: given["count"]]
            taken |= set(chosen)
            given["topologyAssignment"] = {
                "levels": [HOSTNAME],
                "slices": [{"domainCount": len(chosen), "podCounts": {"universal": 1},
                            "valuesPerLevel": [{"individual": {"roots": chosen}}]}],
            }  # fmt: skip

    def fit(self, flavor, topology, workload, given):
        """Names of the nodes on which a pod may be."""
        levels = [one["nodeLabel"] for one in topology["spec"]["levels"]] if topology else [HOSTNAME]
        template = next(one["template"] for one in workload["spec"]["podSets"] if one["name"] == given["name"])
        selector = {**(template["spec"].get("nodeSelector") or {}), **(flavor["spec"].get("nodeLabels") or {})}
        return [
            name
            for name, node in sorted(self._all_nodes().items())
            if is_true(node, "Ready")
            and all(label in node["metadata"]["labels"] for label in levels)
            and all(node["metadata"]["labels"].get(key) == value for key, value in selector.items())
            and not untolerated(node, template["spec"])
        ]

    def _all_nodes(self):
        return {one["metadata"]["name"]: one for one in self.api.items(f"{PODS}/nodes")}

    def pending(self, admission):
        return any(one.get("delayedTopologyRequest") == "Pending" for one in admission["podSetAssignments"])

    def trouble(self, admission):
        """What is said while nodes are missing; None where none is."""
        for given in admission["podSetAssignments"]:
            if given.get("delayedTopologyRequest") == "Pending":
                _, topology = self.topology(given)
                name = topology["metadata"]["name"] if topology else "?"
                return f'topology "{name}" doesn\'t allow to fit any of {given["count"]} pod(s)'
        return None

    def inject(self, given, workload, info):
        if "topologyAssignment" not in given:
            return
        info["schedulingGates"].append({"name": GATE})
        asked = next(one for one in workload["spec"]["podSets"] if one["name"] == given["name"]).get("topologyRequest")
        if not asked:
            info["annotations"][f"{ASKED}unconstrained-topology"] = "true"

    def open_gates(self, jobset, workload):
        """Binds each gated pod to the node of its index: its own node, also where a spare one is free."""
        for pod in map(named("Pod", "v1"), self.api.items(f"{PODS}/pods")):
            metadata = pod["metadata"]
            gates = (metadata.get("annotations") or {}).get(GATES, "")
            mine = (metadata.get("annotations") or {}).get("kueue.x-k8s.io/workload") == workload["metadata"]["name"]
            if GATE not in gates or not mine or pod["spec"].get("nodeName") or metadata.get("deletionTimestamp"):
                continue
            labels = metadata["labels"]
            nodes = self.nodes[workload["metadata"]["uid"], labels["kueue.x-k8s.io/podset"]]
            name = nodes[int(labels["jobset.sigs.k8s.io/job-index"])]
            node = self._all_nodes().get(name)
            if (
                node is None
                or not is_true(node, "Ready")
                or name in self.unhealthy.get(workload["metadata"]["uid"], ())
            ):
                continue
            target = {"apiVersion": "v1", "kind": "Node", "name": name}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
            self.api.post(f"{path_of(pod)}/binding", binding)

    def failed(self, workload, gates):
        """Why lost nodes evict the workload now; None where they do not."""
        uid = workload["metadata"]["uid"]
        mine = {key: nodes for key, nodes in self.nodes.items() if key[0] == uid}
        assigned = {name for nodes in mine.values() for name in nodes}
        if not assigned:
            return None
        lost, known = self._lost(workload, assigned, gates), self.unhealthy.setdefault(uid, set())
        known &= lost | (assigned - set(self._all_nodes()))
        for name in sorted(lost - known):
            if known:
                words = "Workload eviction triggered due to multiple TAS assigned node failures, including"
                return f"{words}: {', '.join([*sorted(known), name])}"
            known.add(name)
        for name in sorted(known):
            if not self._replace(workload, mine, name) and gates["TASFailedNodeReplacementFailFast"]:
                return f"Workload was evicted as there was no replacement for unhealthy node(s): {name}"
        return None

    def _replace(self, workload, mine, name):
        for (uid, pod_set), nodes in mine.items():
            if name not in nodes:
                continue
            given = next(o for o in workload["status"]["admission"]["podSetAssignments"] if o["name"] == pod_set)
            taken = {one for others in mine.values() for one in others}
            free = [one for one in self.fit(*self.topology(given), workload, given) if one not in taken]
            if not free:
                return False
            nodes[nodes.index(name)] = free[0]
            self.unhealthy[uid].discard(name)
        return True

    def _lost(self, workload, assigned, gates):
        """Assigned nodes that Kueue takes for unhealthy."""
        nodes = self._all_nodes()
        pods = [pod for pod in self.api.items(f"{PODS}/pods")
                if (pod["metadata"].get("annotations") or {}).get("kueue.x-k8s.io/workload")
                == workload["metadata"]["name"]]  # fmt: skip
        on = {name: [pod for pod in pods if pod["spec"].get("nodeName") == name] for name in assigned}
        for rows in on.values():
            self.seen_ended |= {pod["spec"]["nodeName"] for pod in rows if not progresses(pod)}
        found = set()
        for name in assigned:
            # With the gate off nothing but a pod's end brings a node in.
            if not gates["TASFailedNodeReplacement"] and name not in self.seen_ended:
                continue
            node = nodes.get(name)
            if node is None:
                found.add(name)
                continue
            tolerant = next((pod["spec"] for pod in on[name]), workload["spec"]["podSets"][-1]["template"]["spec"])
            ready = is_true(node, "Ready")
            tainted = gates["TASReplaceNodeOnNodeTaints"] and untolerated(node, tolerant)
            if ready and not tainted:
                self.seen_ended.discard(name)
                continue
            if not (gates["TASReplaceNodeOnPodTermination"] and any(progresses(pod) for pod in on[name])):
                found.add(name)
        return found


def progresses(pod):
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def untolerated(node, pod):
    """Taints that keep a pod away for good."""
    forever = [one for one in pod.get("tolerations") or [] if "tolerationSeconds" not in one]
    return [
        taint
        for taint in (node.get("spec") or {}).get("taints") or []
        if taint["effect"] in ("NoSchedule", "NoExecute") and not any(tolerates(one, taint) for one in forever)
    ]
