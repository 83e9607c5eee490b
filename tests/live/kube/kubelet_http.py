"""What a kubelet serves: logs and exec, for the API server; and what a test may do to a pod.

A test plays a fault with ``played(plane, pod, "fuse-dies")`` or ``played(plane, pod, "rotate-token")``.
"""

import contextlib
import http.client
import http.server
import json
import os
import ssl
import subprocess
import threading
import urllib.parse

import channels
import gcsfuse_volumes


def played(plane, pod, verb):
    """``fuse-dies``: the program that serves the pod's buckets is killed. ``rotate-token``: its account's token changes
    in its file, and the old one is refused (after 10 s at most: so long the API server remembers tokens)."""
    port = plane.ports[pod["spec"]["nodeName"]]
    trust = ssl._create_unverified_context()  # its own certificate, on this machine
    line = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=trust)
    with contextlib.closing(line):
        line.request("POST", f"/played/{verb}/{pod['metadata']['uid']}")
        status = line.getresponse().status
    assert status == 200, f"{verb} of {pod['metadata']['name']}: {status}"


class Handler(http.server.BaseHTTPRequestHandler):
    """For the API server. ``node``: the ``kubelet.Node`` it speaks for."""

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
        elif words[1:2] == ["played"] and len(words) == 4:
            self._played(words[2], words[3])
        else:
            self.send_error(404)
        self.close_connection = True

    do_POST = do_GET

    def _played(self, verb, uid):
        pod = self.node.pods.get(uid)
        if pod is None or verb not in ("rotate-token", "fuse-dies"):
            self.send_error(404)
            return
        if verb == "rotate-token":
            pod.volumes.rotate_token()
        else:
            gcsfuse_volumes.kill(uid)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

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
        found = self.node.pods.get(body["metadata"]["uid"]) if body else None
        held = found.held if found else {}
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
