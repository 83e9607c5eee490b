"""One pod of the played kubelet, from its first status to its last.

Volumes first (events ``FailedMount`` until they are there), then an address, then images, init containers in order,
containers. A native sidecar (an init container with ``restartPolicy: Always``) is started and not waited for; it is
told to end when all containers have, in reverse order, within what is left of the grace period (two seconds at least).
A container that outlives the period takes the sidecars with it. Not done: restarts, probes, hooks.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gcsfuse_volumes
from server import now
from volumes import Volumes

HERE = Path(__file__).parent
#: Names of sidecars, comma-separated: API servers before 1.28 drop the field that says so.
SIDECARS = "played/native-sidecars"
LEFT_FOR_SIDECARS_S = 2.0


class Container:
    """One container: process 1 of its namespaces, and its log."""

    def __init__(self, node, pod, spec, folder, volumes):
        self.name, self.spec, self.since = spec["name"], spec, now()
        self.log = node.logs / f"{pod['metadata']['namespace']}_{pod['metadata']['name']}_{self.name}.log"
        self.environment = volumes.environment(spec)
        words = [self._expanded(word) for word in [*spec.get("command", ["true"]), *spec.get("args", [])]]
        document = {"root": str(folder / f"root-{self.name}"), "hostname": pod["metadata"]["name"][:63],
                    "address": node.options.ip, "volumes": volumes.of(spec),
                    "argv": words, "env": self.environment, "cwd": spec.get("workingDir")}  # fmt: skip
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(document))
        argv = [
            "nsenter", f"--net=/run/netns/{node.options.netns}", "unshare", "--mount", "--uts", "--pid", "--fork",
            "--kill-child", sys.executable, str(HERE / "container.py"), str(path),
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _expanded(self, word):
        return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: self.environment.get(found[1], found[0]), word)

    def first(self):
        """The pid of process 1, as the machine sees it; None once it is gone."""
        pid = self.process.pid  # nsenter and unshare exec in place; unshare forks process 1
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        except (OSError, IndexError):
            return None  # it has ended, or this kernel does not say (CONFIG_PROC_CHILDREN)

    def signal(self, number):
        try:
            os.kill(self.first(), number)
        except (ProcessLookupError, TypeError):
            pass

    @property
    def runs(self):
        return self.process.poll() is None

    def wait(self):
        code = self.process.wait()
        return 128 - code if code < 0 else code

    def wait_until(self, deadline):
        """Whether it ended in time."""
        while self.runs and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.runs


class Pod:
    """``run`` in a thread of its own; ``end`` in another once its deletion is asked for."""

    def __init__(self, node, manifest):
        self.node, self.manifest, self.spec = node, manifest, manifest["spec"]
        self.uid = manifest["metadata"]["uid"]
        self.folder = node.folder / "pods" / self.uid
        self.since, self.address = now(), ""
        self.held: dict[str, Container] = {}
        self.ending, self.over = threading.Event(), threading.Event()
        self.deadline = None
        self.volumes = Volumes(node, self)
        self.inits = [*gcsfuse_volumes.sidecar(manifest, self.folder), *self.spec.get("initContainers", [])]
        named = manifest["metadata"].get("annotations", {}).get(SIDECARS, "").split(",")
        self.sidecars = {one["name"] for one in self.inits if one.get("restartPolicy") == "Always"} | {*named} - {""}

    @property
    def path(self):
        metadata = self.manifest["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    # ---------------------------------------------------------------- its life

    def run(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            phase = self._life()
            self._end_sidecars()
            if phase:
                self.report(phase)
        finally:
            self.volumes.remove()
            self.over.set()
            self.node.pods.pop(self.uid, None)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _life(self):
        """The phase that it ends in; None where it was taken away before it had begun."""
        creating = "PodInitializing" if self.inits else "ContainerCreating"
        self.report("Pending", waiting=creating)
        if not self.volumes.mount() or self.ending.wait(self.node.options.address_s):
            return None
        self.address = self.node.options.ip
        self.report("Pending", waiting=creating)
        for spec in self.inits:
            container = self._start(spec)
            if container is None:
                return None
            if spec["name"] not in self.sidecars and container.wait():
                return "Failed"
            self.report("Pending", waiting="PodInitializing")
        mains = [self._start(spec) for spec in self.spec["containers"] if not self.ending.is_set()]
        if not mains or None in mains:
            return None
        self.report("Running")
        codes = [container.wait() for container in mains]
        return "Failed" if any(codes) else "Succeeded"

    def _start(self, spec):
        """The container, once its image and its environment are there; None where the pod ends before."""
        if not self.node.pulled(self, spec.get("image", "")):
            return None
        while not self.ending.is_set():
            try:
                container = Container(self.node, self.manifest, spec, self.folder, self.volumes)
            except (LookupError, OSError) as error:
                self.report("Pending", waiting="CreateContainerConfigError", why=str(error), of=spec["name"])
                self.ending.wait(1)
                continue
            self.held[spec["name"]] = container
            return container
        return None

    def end(self, grace_s):
        """SIGTERM, the grace period, SIGKILL; then the object goes."""
        self.deadline = time.monotonic() + grace_s
        self.ending.set()
        others = [one for name, one in list(self.held.items()) if name not in self.sidecars and one.runs]
        for one in others:
            one.signal(signal.SIGTERM)
        if not all([one.wait_until(self.deadline) for one in others]):
            for one in list(self.held.values()):  # the sidecars too
                one.signal(signal.SIGKILL)
        self._end_sidecars()
        self.over.wait(10)
        self.node.patiently("DELETE", self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})

    def _end_sidecars(self):
        grace_s = self.spec.get("terminationGracePeriodSeconds", 30)
        until = self.deadline or time.monotonic() + grace_s
        for spec in reversed(self.inits):
            one = self.held.get(spec["name"])
            if spec["name"] in self.sidecars and one is not None and one.runs:
                one.signal(signal.SIGTERM)
                if not one.wait_until(max(until, time.monotonic() + LEFT_FOR_SIDECARS_S)):
                    one.signal(signal.SIGKILL)
                    one.wait_until(time.monotonic() + 2)

    # ---------------------------------------------------------------- its status

    def report(self, phase, *, waiting="", why="", of=""):
        ready = {"type": "Ready", "status": str(phase == "Running"), "lastTransitionTime": now()}
        status = {
            "phase": phase, "hostIP": self.node.options.ip, "startTime": self.since, "conditions": [ready],
            "containerStatuses": [self._row(one, waiting, why, of) for one in self.spec["containers"]],
            "initContainerStatuses": [self._row(one, waiting, why, of) for one in self.inits],
        }  # fmt: skip
        if self.address:
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        self.node.patiently("PATCH", f"{self.path}/status", {"status": status}, "application/merge-patch+json")

    def _row(self, spec, waiting, why, of):
        one = self.held.get(spec["name"])
        row = {"name": spec["name"], "image": spec.get("image", ""), "imageID": "x", "restartCount": 0, "lastState": {},
               "ready": False, "started": False}  # fmt: skip
        if one is None:
            mine = not of or of == spec["name"]
            reason = (waiting if mine else "PodInitializing") or "PodInitializing"
            return row | {"state": {"waiting": {"reason": reason, **({"message": why} if why and mine else {})}}}
        if one.runs:
            return row | {"ready": True, "started": True, "state": {"running": {"startedAt": one.since}}}
        code = one.wait()
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": one.since,
                 "finishedAt": now()}  # fmt: skip
        return row | {"ready": not code and spec in self.inits, "state": {"terminated": ended}}

    def event(self, kind, reason, message):
        """As the kubelet's own; one more of a kind counts up."""
        self.node.event(self.manifest, kind, reason, message)
