"""A small kubelet for tests: one node whose pods are local processes in namespaces of their own.

usage: python kubelet.py NAME PORT DIR --netns NS --ip ADDR [--label k=v ...]

It registers the node at the API server that DIR/api names, beats, runs the pods bound to it (``pod.py``: sidecars,
volumes, what takes its time), reports their status, serves logs and exec (``kubelet_http.py``), and ends pods as asked.
Buckets are mounts of the double of gcsfuse where DIR/bucket-server says where the played bucket is, with the options
of the volume and the defaults of the node's machine type (label ``node.kubernetes.io/instance-type``); else they are
folders below DIR/buckets. It mounts for itself and its pods alone: nothing is left when they are gone. SIGTERM takes
the pods along (a dead host); SIGKILL leaves them running (a dead kubelet). Standard library only; made for Kubernetes
1.20.
"""

import argparse
import http.client
import http.server
import json
import os
import signal
import ssl
import subprocess
import threading
import time
import urllib.parse
import uuid
from pathlib import Path

import fuse_wire
from kubelet_http import Handler
from output import Output
from pod import Pod
from server import Api, now

NODE_INFO = (
    "architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "machineID",
    "operatingSystem", "osImage", "systemUUID",
)  # fmt: skip
MACHINE = "node.kubernetes.io/instance-type"
#: How long a status is tried to be told.
PATIENCE_S = 30


class Node:
    """The node and its pods, by uid."""

    def __init__(self, options):
        self.options, self.folder = options, Path(options.dir)
        self.labels = dict(one.split("=", 1) for one in options.label)
        self.machine = self.labels.get(MACHINE, "")
        self.api = Api(self.folder)
        self.logs = self.folder / options.name
        self.logs.mkdir(exist_ok=True)
        self.pods: dict[str, Pod] = {}
        self.images = {""}
        self.events: dict[tuple[str, str, str], list] = {}
        self.output = Output(self.writes)

    # ---------------------------------------------------------------- the node

    def beat(self):
        name = self.options.name
        labels = {"kubernetes.io/hostname": name, **self.labels}
        amount = {"cpu": "200", "memory": "1000Gi", "ephemeral-storage": "1000Gi", "pods": "110"}
        info = dict.fromkeys(NODE_INFO, "x") | {"kubeletVersion": "v1.20.2"}
        since = now()
        while True:
            try:
                ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ok",
                         "lastHeartbeatTime": now(), "lastTransitionTime": since}  # fmt: skip
                status = {
                    "conditions": [ready], "capacity": amount, "allocatable": amount, "nodeInfo": info,
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": int(self.options.port)}},
                }  # fmt: skip
                path = f"/api/v1/nodes/{name}/status"
                # As the real one (PatchNodeStatus): others' conditions stay, GKE's of Xids too.
                code, _ = self.api.call("PATCH", path, {"status": status}, "application/strategic-merge-patch+json")
                if code == 404:
                    self.api.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
                    continue
                lease = {
                    "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                    "metadata": {"name": name, "namespace": "kube-node-lease"},
                    "spec": {"holderIdentity": name, "leaseDurationSeconds": 8, "renewTime": now(True)},
                }  # fmt: skip
                at = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
                self.api.call("PATCH", f"{at}?fieldManager=kubelet&force=true", lease, "application/apply-patch+yaml")
            except OSError as error:
                print("beat:", error, flush=True)
            time.sleep(2)

    def watch(self):
        seen, ending = set(), set()
        selector = urllib.parse.quote(f"spec.nodeName={self.options.name}")
        path = f"/api/v1/pods?watch=1&timeoutSeconds=300&fieldSelector={selector}"
        while True:
            try:
                for line in self.api.call("GET", path, stream=True):
                    event = json.loads(line)
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._look(event["object"], seen, ending)
            except (OSError, ValueError, http.client.HTTPException) as error:
                print("watch:", error, flush=True)
                time.sleep(1)

    def _look(self, manifest, seen, ending):
        uid = manifest.get("metadata", {}).get("uid")
        if manifest["metadata"].get("deletionTimestamp"):
            if uid not in ending:
                ending.add(uid)
                grace_s = manifest["metadata"].get("deletionGracePeriodSeconds", 5)
                # A pod that this kubelet does not run has nothing to end: its object goes.
                pod = self.pods.get(uid) or _over(Pod(self, manifest))
                threading.Thread(target=pod.end, args=(grace_s,), daemon=True).start()
        elif uid not in seen and manifest.get("status", {}).get("phase") == "Pending":
            seen.add(uid)
            pod = self.pods[uid] = Pod(self, manifest)
            threading.Thread(target=pod.run, daemon=True).start()

    def rotate(self):
        """Tokens live for an hour and are renewed before; here faster."""
        while self.options.rotate_s:
            time.sleep(self.options.rotate_s)
            for pod in list(self.pods.values()):
                if "account" in pod.volumes.places and not pod.over.is_set():
                    try:
                        pod.volumes.rotate_token()
                    except (OSError, LookupError) as error:
                        print("token:", error, flush=True)

    # ---------------------------------------------------------------- for pods

    def patiently(self, method, path, body, kind="application/json"):
        """A call that is repeated while the API server is away."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.api.call(method, path, body, kind)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() > until:
                    print(method, path, error, flush=True)
                    return 0, {}
                time.sleep(0.5)

    def pulled(self, pod, image):
        """Once the image is on this node; False where the pod ends before."""
        if image not in self.images:
            pod.event("Normal", "Pulling", f'Pulling image "{image}"')
            if pod.ending.wait(self.options.pull_s):
                return False
            self.images.add(image)
            pod.event("Normal", "Pulled", f'Successfully pulled image "{image}"')
        return not pod.ending.is_set()

    def event(self, manifest, kind, reason, message):
        """As the kubelet writes it: the same once more counts up."""
        metadata = manifest["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        key = (metadata["uid"], reason, message)
        name, count = self.events.get(key, (f"{metadata['name'][:200]}.{uuid.uuid4().hex[:16]}", 0))
        self.events[key] = [name, count + 1]
        if count:
            change = {"count": count + 1, "lastTimestamp": now()}
            self.patiently("PATCH", f"{path}/{name}", change, "application/merge-patch+json")
            return
        about = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "namespace": metadata["namespace"],
                 "uid": metadata["uid"]}  # fmt: skip
        self.patiently("POST", path, {
            "metadata": {"name": name, "namespace": metadata["namespace"]}, "involvedObject": about, "type": kind,
            "reason": reason, "message": message, "count": 1, "firstTimestamp": now(), "lastTimestamp": now(),
            "source": {"component": "kubelet", "host": self.options.name},
        })  # fmt: skip

    def writes(self, log):
        """Whether the container of this log still runs."""
        held = [one for pod in list(self.pods.values()) for one in list(pod.held.values())]
        return any(one.log == log and one.runs for one in held)

    def die(self, *_):
        for pod in list(self.pods.values()):
            for one in list(pod.held.values()):
                one.signal(signal.SIGKILL)
        os._exit(0)


def _over(pod):
    pod.over.set()
    return pod


def main():
    parser = argparse.ArgumentParser()
    for name in ("name", "port", "dir"):
        parser.add_argument(name)
    parser.add_argument("--netns", required=True)
    parser.add_argument("--ip", required=True)
    parser.add_argument("--label", action="append", default=[])
    seconds = {
        "pull": (0.2, "that an image takes that the node has not yet"),
        "address": (0.3, "until a pod has an address"),
        "unauthenticated": (1.0, "for which a new pod may not see its buckets"),
        "gcsfuse-start": (1.5, "before the sidecar serves each bucket"),
        "rotate": (60.0, "between two tokens of a pod; 0: never"),
    }
    for name, (default, what) in seconds.items():
        parser.add_argument(f"--{name}-s", type=float, default=default, help=f"seconds {what}")
    parser.add_argument("--gcsfuse", default="3.11.2", help="its version")
    node = Node(parser.parse_args())
    signal.signal(signal.SIGTERM, node.die)
    if os.geteuid() == 0:
        fuse_wire.own_mounts()
    key, certificate = node.logs / "key.pem", node.logs / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate),
         "-subj", f"/CN={node.options.name}", "-days", "30"], check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for work in (node.beat, node.watch, node.rotate):
        threading.Thread(target=work, daemon=True).start()
    Handler.node = node
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(node.options.port)), Handler)
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(certificate, key)
    server.socket = trust.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
