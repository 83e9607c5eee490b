"""Headers by whose credentials they are; what comes back of a request."""

import socket
import threading

import pytest

pytest.importorskip("google.auth", reason="google-auth is not installed")

from muster.backends.google import http
from muster.backends.google.http import Call, GoogleHttp, Reply, Unreachable
from muster.core.errors import AccessError

GOOGLE = Call(method="GET", url="https://serviceusage.googleapis.com/v1/projects/p/services")
BUCKET = Call(method="GET", url="https://storage.googleapis.com/storage/v1/b/bucket")
CLUSTER = Call(method="GET", url="https://10.0.0.2/api/v1/nodes")


class ServiceAccount:
    valid, token = True, "a-token"


def person(**more):
    from google.oauth2.credentials import Credentials

    return Credentials(token="a-token", refresh_token="r", **more)


@pytest.fixture
def headers(monkeypatch):
    import google.auth

    def of(credentials, call):
        sent = []
        monkeypatch.setattr(google.auth, "default", lambda scopes: (credentials, "its-project"))
        monkeypatch.setattr(http, "exchange", lambda call, headers, *_: sent.append(headers) or Reply(status=200))
        GoogleHttp().send(call)
        return sent[0]

    return of


def test_a_persons_requests_are_charged_to_the_project_that_they_are_about(headers):
    found = headers(person(), GOOGLE)
    assert found == {"authorization": "Bearer a-token", "x-goog-user-project": "p"}


def test_a_quota_project_of_the_credentials_own_goes_first(headers):
    assert headers(person(quota_project_id="own"), GOOGLE)["x-goog-user-project"] == "own"


def test_a_bucket_is_of_no_project(headers):
    assert "x-goog-user-project" not in headers(person(), BUCKET)
    assert headers(person(quota_project_id="own"), BUCKET)["x-goog-user-project"] == "own"


def test_a_service_account_needs_none(headers):
    assert headers(ServiceAccount(), GOOGLE) == {"authorization": "Bearer a-token"}


def test_a_clusters_own_api_is_told_nothing_of_it(headers):
    assert headers(person(), CLUSTER) == {"authorization": "Bearer a-token"}


def test_credentials_that_are_refused_come_with_the_way_out(monkeypatch):
    import google.auth
    from google.auth.exceptions import RefreshError

    class Expired:
        valid = False

        def refresh(self, request):
            raise RefreshError("Token has been expired or revoked.")

    monkeypatch.setattr(google.auth, "default", lambda scopes: (Expired(), None))
    with pytest.raises(AccessError, match="expired or revoked") as caught:
        GoogleHttp().send(GOOGLE)
    assert "gcloud auth application-default login" in caught.value.hint


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
def test_an_answer_that_is_cut_short_is_no_answer(status):
    def serve():
        line, _ = server.accept()
        line.recv(4096)
        line.sendall(f'HTTP/1.1 {status}\r\nContent-Length: 100\r\n\r\n{{"name": "a'.encode())
        line.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(Unreachable):
            http.exchange(Call(method="POST", url=url, body={}), {}, 10)
