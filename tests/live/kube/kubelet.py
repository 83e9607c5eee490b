"""A small kubelet for tests: one node whose pods are local processes in namespaces of their own.

usage: python kubelet.py NAME PORT DIR --netns NS --ip ADDR [--label k=v ...]

It registers the node at the API server that DIR/api names, beats, runs the pods bound to it (init containers in order,
then the containers; images and probes are ignored), reports their status, serves logs and exec (WebSocket), and ends
pods as asked (SIGTERM to process 1, grace period, SIGKILL). Volumes: config maps, secrets, the service account's
token, GCSFuse buckets (folders below DIR/buckets), empty ones. Environment: values, ``fieldRef``, ``secretKeyRef``,
``$(NAME)`` in commands. Not done: images, probes, restarts in place, sidecars, port-forward. SIGTERM takes the pods
along (a dead host); SIGKILL leaves them running (a dead kubelet). Standard library only; made for Kubernetes 1.20.
"""

import argparse
import base64
import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import channels
from output import Output
from server import Api, now

HERE = Path(__file__).parent
NODE_INFO = (
    "architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "machineID",
    "operatingSystem", "osImage", "systemUUID",
)  # fmt: skip
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Container:
    """One container: process 1 of its namespaces, and its log."""

    def __init__(self, node, pod, spec, folder):
        self.name, self.spec = spec["name"], spec
        self.log = node.logs / f"{pod['metadata']['namespace']}_{pod['metadata']['name']}_{self.name}.log"
        self.environment = node.environment(pod, spec)
        volumes = node.volumes(pod, spec, folder)
        words = [self._expanded(word) for word in [*spec.get("command", ["true"]), *spec.get("args", [])]]
        document = {"root": str(folder / f"root-{self.name}"), "hostname": pod["metadata"]["name"][:63],
                    "address": node.options.ip, "volumes": volumes,
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
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return None  # it has ended, or this kernel does not say (CONFIG_PROC_CHILDREN)

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.first(), number)

    def wait(self):
        code = self.process.wait()
        return 128 - code if code < 0 else code


class Node:
    """The node and its pods."""

    def __init__(self, options):
        self.options, self.folder = options, Path(options.dir)
        self.api = Api(self.folder)
        self.logs = self.folder / options.name
        self.logs.mkdir(exist_ok=True)
        self.containers: dict[str, dict[str, Container]] = {}
        self.ending: set[str] = set()
        self.output = Output(self.writes)

    # ---------------------------------------------------------------- the node

    def beat(self):
        name = self.options.name
        labels = {"kubernetes.io/hostname": name, **dict(one.split("=", 1) for one in self.options.label)}
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
                code, _ = self.api.call("PATCH", path, {"status": status}, "application/merge-patch+json")
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
        started = set()
        selector = urllib.parse.quote(f"spec.nodeName={self.options.name}")
        path = f"/api/v1/pods?watch=1&timeoutSeconds=300&fieldSelector={selector}"
        while True:
            try:
                for line in self.api.call("GET", path, stream=True):
                    event = json.loads(line)
                    pod = event["object"]
                    uid = pod.get("metadata", {}).get("uid")
                    if event["type"] not in ("ADDED", "MODIFIED"):
                        continue
                    if pod["metadata"].get("deletionTimestamp"):
                        if uid not in self.ending:
                            self.ending.add(uid)
                            threading.Thread(target=self.end, args=(pod,), daemon=True).start()
                    elif uid not in started and pod.get("status", {}).get("phase") == "Pending":
                        started.add(uid)
                        threading.Thread(target=self.run, args=(pod,), daemon=True).start()
            except (OSError, ValueError, http.client.HTTPException) as error:
                print("watch:", error, flush=True)
                time.sleep(1)

    # ---------------------------------------------------------------- pods

    def run(self, pod):
        uid, spec, since = pod["metadata"]["uid"], pod["spec"], now()
        folder = self.folder / "pods" / uid
        folder.mkdir(parents=True, exist_ok=True)
        base = [{"name": one["name"], "image": one["image"], "imageID": "x", "restartCount": 0, "lastState": {}}
                for one in spec["containers"]]  # fmt: skip
        held = self.containers[uid] = {}
        try:
            for one in spec.get("initContainers", []):
                held[one["name"]] = Container(self, pod, one, folder)
                if code := held[one["name"]].wait():
                    if uid not in self.ending:
                        ended = {"exitCode": code, "reason": "Error", "startedAt": since, "finishedAt": now()}
                        first = {**base[0], "name": one["name"], "ready": False, "state": {"terminated": ended}}
                        self.report(pod, "Failed", [], [first])
                    return
            for one in spec["containers"]:
                if uid not in self.ending:
                    held[one["name"]] = Container(self, pod, one, folder)
        except (OSError, LookupError) as error:
            print("pod:", pod["metadata"]["name"], repr(error), flush=True)
            waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            self.report(pod, "Pending", [row | {"ready": False, "state": waiting} for row in base])
            return
        running = {"running": {"startedAt": since}}
        self.report(pod, "Running", [row | {"ready": True, "started": True, "state": running} for row in base])
        codes = [held[one["name"]].wait() for one in spec["containers"] if one["name"] in held]
        ends = [{"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": since, "finishedAt": now()}
                for code in codes]  # fmt: skip
        rows = [row | {"ready": False, "started": False, "state": {"terminated": end}}
                for row, end in zip(base, ends, strict=False)]  # fmt: skip
        self.report(pod, "Failed" if any(codes) else "Succeeded", rows)
        self.containers.pop(uid, None)
        shutil.rmtree(folder, ignore_errors=True)

    def end(self, pod):
        grace = pod["metadata"].get("deletionGracePeriodSeconds", 5)
        uid = pod["metadata"]["uid"]
        for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 2)):
            living = [one for one in self.containers.get(uid, {}).values() if one.process.poll() is None]
            for one in living:
                one.signal(number)
            until = time.monotonic() + wait
            while time.monotonic() < until and any(one.process.poll() is None for one in living):
                time.sleep(0.05)
        time.sleep(0.2)  # the last status goes out before the pod does
        self.api.call("DELETE", pod_path(pod), {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})

    def report(self, pod, phase, containers, first=()):
        ready = {"type": "Ready", "status": str(phase == "Running"), "lastTransitionTime": now()}
        since = pod.setdefault("_since", now())
        status = {
            "phase": phase, "hostIP": self.options.ip, "podIP": self.options.ip, "startTime": since,
            "conditions": [ready], "containerStatuses": containers, "initContainerStatuses": list(first),
        }  # fmt: skip
        self.api.call("PATCH", pod_path(pod) + "/status", {"status": status}, "application/merge-patch+json")

    def environment(self, pod, container):
        found = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        found |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root"}
        host, _, port = (self.folder / "from-pods").read_text().strip().rpartition(":")
        found |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        for one in container.get("env", []):
            source = one.get("valueFrom")
            if source is None:
                found[one["name"]] = one.get("value", "")
            elif "fieldRef" in source:
                found[one["name"]] = self.field(pod, source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                wanted = source["secretKeyRef"]
                secret = self.api.get(self.beside(pod, "secrets", wanted["name"]))
                if secret is not None:
                    found[one["name"]] = base64.b64decode(secret["data"][wanted["key"]]).decode()
                elif not wanted.get("optional"):
                    raise LookupError(f"secret {wanted['name']!r} not found")
        return found

    def field(self, pod, path):
        if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return pod["metadata"].get(found[1], {}).get(found[2], "")
        return {
            "metadata.name": pod["metadata"]["name"], "metadata.namespace": pod["metadata"]["namespace"],
            "metadata.uid": pod["metadata"]["uid"], "spec.nodeName": self.options.name,
            "status.podIP": self.options.ip, "status.hostIP": self.options.ip,
        }[path]  # fmt: skip

    def volumes(self, pod, container, folder):
        """Path in the container -> folder on the machine."""
        sources = {one["name"]: one for one in pod["spec"].get("volumes", [])}
        found = {}
        for mount in container.get("volumeMounts", []):
            volume, place = sources[mount["name"]], folder / "volumes" / mount["name"]
            if "csi" in volume:
                place = self.folder / "buckets" / volume["csi"]["volumeAttributes"]["bucketName"]
            place.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                self._write(pod, "configmaps", volume["configMap"]["name"], place)
            elif "secret" in volume:
                self._write(pod, "secrets", volume["secret"]["secretName"], place)
            found[mount["mountPath"]] = str(place)
        if name := pod["spec"].get("serviceAccountName"):
            place = folder / "volumes" / "account"
            place.mkdir(parents=True, exist_ok=True)
            account = self.api.get(self.beside(pod, "serviceaccounts", name)) or {}
            for reference in account.get("secrets", []):
                self._write(pod, "secrets", reference["name"], place)
            if (place / "token").exists():
                shutil.copy(self.folder / "server.pem", place / "ca.crt")
                found[ACCOUNT] = str(place)
        return found

    def _write(self, pod, kind, name, place):
        one = self.api.get(self.beside(pod, kind, name))
        if one is None:
            raise LookupError(f"{kind[:-1]} {name!r} not found")
        for key, value in (one.get("data") or {}).items():
            (place / key).write_bytes(base64.b64decode(value) if kind == "secrets" else value.encode())

    def beside(self, pod, kind, name):
        return f"/api/v1/namespaces/{pod['metadata']['namespace']}/{kind}/{name}"

    def writes(self, log):
        """Whether the container of this log still runs."""
        held = [one for row in list(self.containers.values()) for one in list(row.values())]
        return any(one.log == log and one.process.poll() is None for one in held)

    def die(self, *_):
        for held in list(self.containers.values()):
            for one in held.values():
                one.signal(signal.SIGKILL)
        os._exit(0)


def pod_path(pod):
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Logs and exec, which the API server asks for."""

    node: Node
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        words, query = url.path.split("/"), urllib.parse.parse_qs(url.query)
        if words[1:2] == ["containerLogs"] and len(words) == 5:
            self._logs("_".join(words[2:5]), query)
        elif words[1:2] == ["exec"] and len(words) >= 5:
            self._exec(words[2], words[3], words[-1], query)
        else:
            self.send_error(404)
        self.close_connection = True

    do_POST = do_GET

    def _logs(self, name, query):
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("connection", "close")
        self.end_headers()
        for line in self.node.output.read(self.node.logs / f"{name}.log", query):
            self.wfile.write(line)
            self.wfile.flush()

    def _exec(self, namespace, pod, container, query):
        """The command in the container's own namespaces."""
        body = self.node.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        held = self.node.containers.get(body["metadata"]["uid"], {}) if body else {}
        if container not in held or (first := held[container].first()) is None:
            self.send_error(404, "no such container")
            return
        channels.accept(self)
        argv = ["nsenter", f"--target={first}", "--mount", "--uts", "--net", "--pid", "--root", "--wd=/"]
        process = subprocess.Popen(
            [*argv, *query["command"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=held[container].environment,
        )  # fmt: skip
        lock = threading.Lock()

        def pump(source, channel):
            while data := os.read(source.fileno(), 1 << 16):
                with lock:
                    channels.send(self, channel, data)

        def typed():
            for channel, data in channels.messages(self):
                if channel == 0:
                    with contextlib.suppress(OSError):
                        process.stdin.write(data)
                        process.stdin.flush()
            with contextlib.suppress(OSError):
                process.stdin.close()

        threading.Thread(target=typed, daemon=True).start()
        pumps = [threading.Thread(target=pump, args=each) for each in ((process.stdout, 1), (process.stderr, 2))]
        for each in pumps:
            each.start()
        for each in pumps:
            each.join()
        code = process.wait()
        status = {"metadata": {}, "status": "Success"}
        if code:
            causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "details": causes,
                      "message": f"command terminated with exit code {code}"}  # fmt: skip
        with lock:
            channels.send(self, 3, json.dumps(status).encode())
            channels.close(self)


def main():
    parser = argparse.ArgumentParser()
    for name in ("name", "port", "dir"):
        parser.add_argument(name)
    parser.add_argument("--netns", required=True)
    parser.add_argument("--ip", required=True)
    parser.add_argument("--label", action="append", default=[])
    node = Node(parser.parse_args())
    signal.signal(signal.SIGTERM, node.die)
    key, certificate = node.logs / "key.pem", node.logs / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate),
         "-subj", f"/CN={node.options.name}", "-days", "30"], check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    threading.Thread(target=node.beat, daemon=True).start()
    threading.Thread(target=node.watch, daemon=True).start()
    Handler.node = node
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(node.options.port)), Handler)
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(certificate, key)
    server.socket = trust.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
