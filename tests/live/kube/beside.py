"""Servers beside the control plane that its API server asks: JobSet's and Kueue's webhooks, and policy/v1.

The webhooks answer with ``fakes.admission``, so that a dry run refuses what a real cluster refuses. policy/v1
(PodDisruptionBudgets) is younger than the control plane: it is an aggregated API of objects in memory, which nobody
enforces.
"""

import base64
import http.server
import json
import ssl
import threading

from fakes.admission import DEFAULT, defaulted, refusals
from fakes.kubernetes import FakeKubernetes


class Beside:
    """``with Beside(plane):``; what it registers stays registered with the plane."""

    def __init__(self, plane):
        self.plane, self.policies, self.gates = plane, FakeKubernetes(), DEFAULT
        self.ready = True
        """Whether the webhooks answer; a write of what they watch fails otherwise."""
        handler = type("Handler", (Handler,), {"beside": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trust.load_cert_chain(plane.dir / "server.pem", plane.dir / "server.key")
        self.server.socket = trust.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        bundle = base64.b64encode((self.plane.dir / "server.pem").read_bytes()).decode()
        for kind, verbs in (("Mutating", ["CREATE"]), ("Validating", ["CREATE", "UPDATE"])):
            self._hooks(kind, verbs, bundle)
        namespace, service = "/api/v1/namespaces/kube-system/services", "policies"
        self.plane.call("POST", namespace, {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": service},
            "spec": {"type": "ExternalName", "externalName": "localhost"}})  # fmt: skip
        self.plane.call("POST", "/apis/apiregistration.k8s.io/v1/apiservices", {
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "v1.policy"},
            "spec": {"group": "policy", "version": "v1", "groupPriorityMinimum": 2000, "versionPriority": 20,
                     "insecureSkipTLSVerify": True,
                     "service": {"namespace": "kube-system", "name": service, "port": self.port}}})  # fmt: skip
        self.plane.wait(lambda: self.plane.get("/apis/policy/v1").get("resources"), "policy/v1")
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def _hooks(self, kind, verbs, bundle):
        watched = (("jobset.x-k8s.io", ["jobsets"], "v1alpha2"),
                   ("kueue.x-k8s.io", ["clusterqueues", "resourceflavors"], "v1beta2"))  # fmt: skip
        rules = [
            {"apiGroups": [group], "apiVersions": [version], "resources": plurals, "operations": verbs, "scope": "*"}
            for group, plurals, version in watched
        ]
        hook = {
            "name": f"{kind.lower()}.played.example", "rules": rules, "failurePolicy": "Fail", "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "timeoutSeconds": 5,
            "clientConfig": {"url": f"https://127.0.0.1:{self.port}/{kind.lower()}", "caBundle": bundle},
        }  # fmt: skip
        body = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": f"{kind}WebhookConfiguration",
                "metadata": {"name": "played"}, "webhooks": [hook]}  # fmt: skip
        path = f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}webhookconfigurations"
        status, found = self.plane.call("POST", path, body)
        assert status < 300, found.get("message")


class Handler(http.server.BaseHTTPRequestHandler):
    beside: Beside
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path.startswith(("/mutating", "/validating")):
            code, found = (200, self.review(json.loads(body)["request"])) if self.beside.ready else (503, {})
        else:
            code, found = self.beside.policies.handle(self.command, self.path, body)
        data = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def review(self, request):
        response = {"uid": request["uid"], "allowed": True}
        new, old = request["object"], request.get("oldObject")
        if self.path.startswith("/validating"):
            if why := refusals(new, old=old, gates=self.beside.gates):
                response |= {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": "; ".join(why)}}
        elif new["kind"] == "JobSet" and (after := defaulted(new)) != new:
            patch = [{"op": "replace", "path": "/spec", "value": after["spec"]}]
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
