"""A real Kubernetes control plane on this machine for the time of a test: API server, controllers, scheduler, etcd,
and nodes whose pods are processes (``kubelet.py``). The programs come from ``build.sh``.

What it is not: it is 1.20 (no CEL, no strict field validation, and of Jobs it keeps the objects alone); Jobs, JobSet
and Kueue are played by ``controllers.py``, their webhooks and policy/v1 by ``beside.py``. Its own clocks are fast: a
node is NotReady after 8 s (a real one after 40 to 50 s), so nothing of Muster may rest on less than a minute.
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from ports import free_port

HERE = Path(__file__).parent


def programs():
    """(folder, None) with the control plane's programs as ``build.sh`` made them, or (None, why not)."""
    asked = subprocess.run([HERE / "build.sh", "--check"], capture_output=True, text=True, check=False)
    said = (asked.stdout.strip() or asked.stderr.strip()).splitlines()[-1]
    if asked.returncode != 0:
        return None, said
    return Path(said.removeprefix("a control plane is in ")) / "bin", None


class Plane:
    """Use as a context manager; leaves no process behind. ``network`` is ``cluster.Network`` over the nodes' names."""

    def __init__(self, binaries, folder, network, labels=()):
        self.binaries, self.dir, self.network, self.labels = Path(binaries), Path(folder), network, labels
        self.nodes = list(network.names)
        self.processes = {}
        self.token = secrets.token_hex(16)
        self.ports = {name: free_port() for name in ("api", "etcd", "peer", *self.nodes)}
        self.url = f"https://127.0.0.1:{self.ports['api']}"
        self.kept = threading.local()

    def __enter__(self):
        self.dir.mkdir(parents=True)
        try:
            self.network.up()
            self._files()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name, process in reversed(self.processes.items()):
            process.send_signal(signal.SIGTERM if name in self.nodes else signal.SIGKILL)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        self._end_pods()
        self.network.down()

    # ---------------------------------------------------------------- the API

    def call(self, method, path, body=None, kind="application/json"):
        """(status, body) of one request as the administrator; a thread keeps its connection."""
        data = None if body is None else json.dumps(body)
        headers = {"authorization": f"Bearer {self.token}", "content-type": kind}
        kept = getattr(self.kept, "connection", None)
        connection = kept or http.client.HTTPSConnection("127.0.0.1", self.ports["api"], timeout=20, context=self.trust)
        try:
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            answer = reply.read()
            kind_of = reply.headers.get("content-type", "")
            # A path of no API is answered in plain words.
            found = reply.status, json.loads(answer or b"{}") if "json" in kind_of else {"message": answer.decode()}
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self.kept.connection = None
            if kept is not None and method == "GET":  # the server has closed what was idle
                return self.call(method, path, body, kind)
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        self.kept.connection = connection
        return found

    def get(self, path):
        return self.call("GET", path)[1]

    def items(self, path):
        return self.get(path).get("items", [])

    def apply(self, path, body):
        status, found = self.call(
            "PATCH", f"{path}?fieldManager=tests&force=true", body, "application/apply-patch+yaml"
        )
        assert status < 300, (path, found.get("message"))
        return found

    def wait(self, condition, what, timeout_s=180):
        """What ``condition`` answers, once it is true. The limit is for what never comes: a busy machine is slow."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ConnectionError):  # the API server of a busy machine answers late
                if found := condition():
                    return found
            assert time.monotonic() < until, f"no {what} within {timeout_s} s\n{self.story()}"
            time.sleep(0.1)

    def install(self, definitions):
        """Apply CustomResourceDefinitions, as far as 1.20 understands them."""
        for one in definitions:
            one = stripped(one)
            one["spec"].pop("conversion", None)
            self.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{one['metadata']['name']}", one)
        for one in definitions:
            version = one["spec"]["versions"][-1]["name"]
            path = f"/apis/{one['spec']['group']}/{version}/{one['spec']['names']['plural']}"
            self.wait(lambda path=path: self.call("GET", path)[0] == 200, f"kind at {path}")

    def story(self):
        """The objects and logs that a failing test wants to see."""
        lines = []
        for pod in self.items("/api/v1/pods"):
            status = pod["status"]
            ends = [
                one.get("state")
                for one in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
            ]
            lines.append(f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')}: {status.get('phase')} {ends}")
        for path in sorted(self.dir.glob("node*/*.log")) + sorted(self.dir.glob("node*.log")):
            lines.append(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(lines)

    # ---------------------------------------------------------------- starting

    def _files(self):
        names = f"subjectAltName=IP:127.0.0.1,IP:{self.network.bridge},IP:10.96.0.1"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.pem",
             "-subj", "/CN=kube-apiserver", "-addext", names, "-days", "30"],
            check=True, stderr=subprocess.DEVNULL, cwd=self.dir,
        )  # fmt: skip
        make_key = ["openssl", "genrsa", "-out", "accounts.key", "2048"]
        subprocess.run(make_key, check=True, stderr=subprocess.DEVNULL, cwd=self.dir)
        self.trust = ssl.create_default_context(cafile=str(self.dir / "server.pem"))
        os.chmod(self.dir, 0o700)
        (self.dir / "tokens.csv").write_text(f"{self.token},admin,1000,system:masters")
        (self.dir / "api").write_text(f"127.0.0.1:{self.ports['api']} {self.token}")
        (self.dir / "from-pods").write_text(f"{self.network.bridge}:{self.ports['api']}")
        server = {"server": self.url, "certificate-authority": str(self.dir / "server.pem")}
        (self.dir / "kubeconfig").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        }))  # fmt: skip
        (self.dir / "buckets").mkdir()

    def _run(self, name, *argv):
        with open(self.dir / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(one) for one in argv], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.dir,
                start_new_session=True,
            )  # fmt: skip

    def _start(self):
        etcd, peer = (f"http://127.0.0.1:{self.ports[name]}" for name in ("etcd", "peer"))
        self._run(
            "etcd", self.binaries / "etcd", "--data-dir", self.dir / "etcd", "--listen-client-urls", etcd,
            "--advertise-client-urls", etcd, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self._run(
            "apiserver", self.binaries / "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=0.0.0.0",
            f"--secure-port={self.ports['api']}", "--tls-cert-file=server.pem", "--tls-private-key-file=server.key",
            f"--cert-dir={self.dir}/certs", "--token-auth-file=tokens.csv", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.local", "--service-account-signing-key-file=accounts.key",
            "--service-account-key-file=accounts.key", "--service-cluster-ip-range=10.96.0.0/16",
            "--advertise-address=127.0.0.1", "--disable-admission-plugins=ServiceAccount", "--allow-privileged=true",
        )  # fmt: skip
        self.wait(self._ready, "API server")
        common = [
            "--kubeconfig=kubeconfig", "--authentication-kubeconfig=kubeconfig",
            "--authorization-kubeconfig=kubeconfig", "--leader-elect=false", "--secure-port=0", "--port=0",
        ]  # fmt: skip
        self._run(
            "controllers", self.binaries / "kube-controller-manager", *common,
            "--service-account-private-key-file=accounts.key",
            "--controllers=*,-ttl,-route,-service,-cloud-node-lifecycle,-job",  # of 1.20: jobs.py plays today's
            "--pod-eviction-timeout=10s", "--node-monitor-grace-period=8s", f"--cert-dir={self.dir}/certs",
        )  # fmt: skip
        self._run("scheduler", self.binaries / "kube-scheduler", *common)
        for name in self.nodes:
            self.start_node(name)
        self.wait(lambda: self.ready_nodes() == set(self.nodes), "ready nodes")

    def start_node(self, name):
        labels = [word for label in self.labels for word in ("--label", label)]
        self._run(
            name, sys.executable, HERE / "kubelet.py", name, self.ports[name], self.dir, "--netns",
            self.network.namespace(name), "--ip", self.network.address(name), *labels,
        )  # fmt: skip

    def ready_nodes(self):
        return {
            node["metadata"]["name"]
            for node in self.items("/api/v1/nodes")
            for one in node["status"].get("conditions", [])
            if one["type"] == "Ready" and one["status"] == "True"
        }

    def kill_kubelet(self, name):
        """A machine nobody speaks for any more: its pods live on."""
        self.processes[name].kill()
        self.processes[name].wait(10)

    def kill_pod(self, pod):
        """Every process of the pod, at once."""
        self._kill(f"{self.dir}/pods/{pod['metadata']['uid']}/")

    def _ready(self):
        with contextlib.suppress(OSError):
            request = urllib.request.Request(self.url + "/readyz")
            request.add_header("authorization", f"Bearer {self.token}")
            with urllib.request.urlopen(request, timeout=2, context=self.trust) as reply:
                return reply.status == 200
        return False

    def _end_pods(self):
        """Process 1 of each pod ends with the kubelet's ``unshare``; whatever a dead kubelet left goes now."""
        self._kill(f"{self.dir}/pods/")
        shutil.rmtree(self.dir / "etcd", ignore_errors=True)

    def _kill(self, mark):
        import psutil

        for process in psutil.process_iter(["cmdline"]):
            if mark in " ".join(process.info["cmdline"] or []):
                with contextlib.suppress(psutil.Error):
                    for child in process.children(recursive=True):
                        child.kill()
                    process.kill()


def stripped(value):
    """Without what 1.20 does not know: pod templates become "any object"; CEL, selectable fields, empty defaults go."""
    if isinstance(value, dict):
        if "containers" in value.get("properties", {}).get("spec", {}).get("properties", {}):
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        return {
            key: stripped(inner)
            for key, inner in value.items()
            if key not in ("x-kubernetes-validations", "selectableFields") and (key, inner) != ("default", "")
        }
    return [stripped(one) for one in value] if isinstance(value, list) else value
