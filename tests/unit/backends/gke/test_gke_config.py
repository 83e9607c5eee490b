"""Clusters by kubeconfig: which context, how one proves oneself, and what is said where that cannot be."""

import base64
import http.server
import json
import ssl
import sys
import threading
from types import SimpleNamespace

import pytest
from fakes.clock import VirtualClock

pytest.importorskip("lightkube", reason="muster[gke] is not installed")

from muster.backends.gke.kubernetes import config
from muster.backends.gke.kubernetes.config import connect, own_cluster
from muster.backends.gke.operate.locate import by_kubeconfig
from muster.backends.google.http import Unreachable
from muster.core.errors import AccessError, UsageError


def written(tmp_path, user, *, current="b", server="https://127.0.0.1:1"):
    document = {
        "current-context": current,
        "clusters": [
            {"name": "c", "cluster": {"server": server + "/"}},
            {"name": "d", "cluster": {"server": "https://d"}},
        ],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "a", "context": {"cluster": "d", "user": "u"}},
            {"name": "b", "context": {"cluster": "c", "user": "u"}},
        ],
    }
    (tmp_path / "config").write_text(json.dumps(document))
    return f"kubeconfig:{tmp_path / 'config'}"


def test_named():
    def named(cluster):
        return by_kubeconfig(SimpleNamespace(resources=SimpleNamespace(cluster=cluster)))

    assert named("kubeconfig:~/.kube/config") and not named("kubeconfig") and not named(None)


def test_the_current_context_or_the_one_named(tmp_path):
    where = written(tmp_path, {"token": "t"})
    assert connect(where, None).connection.endpoint == "https://127.0.0.1:1"
    assert connect(where + "#a", None).connection.endpoint == "https://d"
    with pytest.raises(UsageError, match="no 'z' among its contexts") as caught:
        connect(where + "#z", None)
    assert "a, b" in caught.value.hint


@pytest.fixture
def server():
    """Takes the tokens in ``accepted``; keeps the credentials that were sent."""
    accepted, sent = ["Bearer one"], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            sent.append(self.headers.get("authorization"))
            body = json.dumps({"resources": [{"kind": "Pod", "name": "pods", "namespaced": True}]}).encode()
            self.send_response(200 if sent[-1] in accepted else 401)
            self.end_headers()
            self.wfile.write(body)

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}", accepted, sent
    found.shutdown()
    found.server_close()


POD = {"apiVersion": "v1", "kind": "Pod"}


def test_a_token_from_a_file_is_read_again_once_it_expires(tmp_path, server):
    url, accepted, sent = server
    (tmp_path / "token").write_text("one\n")
    cluster = connect(written(tmp_path, {"tokenFile": str(tmp_path / "token")}, server=url), None)
    assert cluster.knows(POD) and sent == ["Bearer one"]
    (tmp_path / "token").write_text("two")
    accepted[:] = ["Bearer two"]
    cluster._kinds.clear()
    assert cluster.knows(POD) and sent[1:] == ["Bearer one", "Bearer two"]


def test_a_program_that_gives_the_credentials(tmp_path, server):
    url, _, sent = server
    program = [sys.executable, "-c", """print('{"status": {"token": "one"}}')"""]
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": program[0], "args": program[1:]}}
    assert connect(written(tmp_path, user, server=url), None).knows(POD) and sent == ["Bearer one"]
    user["exec"]["args"] = ["-c", "raise SystemExit('not logged in')"]
    with pytest.raises(AccessError, match="not logged in"):
        connect(written(tmp_path, user, server=url), None).knows(POD)


def test_credentials_of_an_unknown_kind_are_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="auth-provider"):
        connect(written(tmp_path, {"auth-provider": {"name": "oidc"}}), None)


def test_a_context_without_its_cluster(tmp_path):
    where = written(tmp_path, {"token": "t"})
    path = tmp_path / "config"
    path.write_text(path.read_text().replace('"name": "c"', '"name": "gone"'))
    with pytest.raises(UsageError, match="cannot read the kubeconfig"):
        connect(where, None)


def test_certificates_of_the_server_and_of_the_user(tmp_path, monkeypatch):
    """The context is made by lightkube: what it loads is what the kubeconfig names."""
    loaded = []
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda self, *files: loaded.append(files))
    data = base64.b64encode(b"a certificate").decode()
    connect(written(tmp_path, {"client-certificate-data": data, "client-key": "key.pem"}), None)
    assert loaded[0][1] == tmp_path / "key.pem", "relative to the kubeconfig"
    path = tmp_path / "config"
    authority = f'"certificate-authority-data": "{data}", '
    path.write_text(path.read_text().replace('"name": "c", "cluster": {', '"name": "c", "cluster": {' + authority))
    with pytest.raises(UsageError, match="kubeconfig"):
        connect(f"kubeconfig:{path}", None)


def test_no_answer(tmp_path):
    with pytest.raises(Unreachable, match="no answer from api/v1"):
        connect(written(tmp_path, {"token": "t"}), VirtualClock()).knows(POD)


def test_no_such_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read the kubeconfig"):
        connect(f"kubeconfig:{tmp_path}/nothing", None)


def test_outside_a_pod_there_is_no_own_cluster(tmp_path):
    with pytest.raises(AccessError, match="not running in a pod"):
        own_cluster(None, {}, tmp_path)
    with pytest.raises(AccessError, match="not running in a pod"):
        own_cluster(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


def test_a_pods_own_account_is_read_again_when_its_token_was_exchanged(tmp_path, server, monkeypatch):
    """The kubelet exchanges it within the hour; the old one is refused from then on."""
    url, accepted, sent = server
    (tmp_path / "token").write_text("one")
    real = config.Server
    monkeypatch.setattr(config, "Server", lambda **given: real(server=url))
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    cluster = own_cluster(None, environ, tmp_path)
    assert cluster.knows(POD)
    (tmp_path / "token").write_text("two")
    accepted[:] = ["Bearer two"]
    cluster._kinds.clear()
    assert cluster.knows(POD) and sent == ["Bearer one", "Bearer one", "Bearer two"]
