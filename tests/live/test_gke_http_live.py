"""The real HTTP adapter against a server on loopback: credentials, refusals, logs, silence."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.kubernetes import FakeKubernetes, serve

from muster.backends.google.http import Call, GoogleHttp, Unreachable
from muster.core.errors import AccessError

pytest.importorskip("google.auth", reason="google-auth is not installed")
pytestmark = pytest.mark.live


class Credentials:
    valid = False
    token = None

    def refresh(self, request):
        self.valid, self.token = True, "a-token"


@pytest.fixture
def http(monkeypatch):
    import google.auth

    monkeypatch.setattr(google.auth, "default", lambda scopes: (Credentials(), "project"))
    return GoogleHttp(timeout_s=5)


def server_of(kubeconfig):
    import json

    return json.loads(kubeconfig)["clusters"][0]["cluster"]["server"]


def test_requests_and_refusals(http):
    fake = FakeKubernetes()
    with serve(fake) as kubeconfig:
        url = server_of(kubeconfig) + "/api/v1/namespaces/default/configmaps"
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
        assert http.send(Call(method="POST", url=url, body=config)).status == 201
        assert http.send(Call(method="POST", url=url, body=config)).status == 409
        assert http.send(Call(method="GET", url=f"{url}/a")).body["metadata"]["name"] == "a"
        missing = http.send(Call(method="GET", url=f"{url}/b"))
        assert missing.status == 404 and "not found" in missing.message
        assert http.send(Call(method="DELETE", url=f"{url}/a")).status == 200


def test_nobody_answers(http):
    with pytest.raises(Unreachable):
        http.send(Call(method="GET", url="http://127.0.0.1:9/"))


def test_no_credentials_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nothing.json"))
    with pytest.raises(AccessError, match="no Google credentials") as caught:
        GoogleHttp().send(Call(method="GET", url="http://127.0.0.1:9/"))
    assert "gcloud auth application-default login" in caught.value.hint
