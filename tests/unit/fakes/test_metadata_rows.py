"""The played metadata server: a real HTTP server with the real one's manners, asked by hand and by google-auth."""

import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from fakes.metadata import change, metadata, token

V1 = "/computeMetadata/v1/"


def machine(**more):
    zone = "projects/123456789/zones/us-central1-a"
    return {"name": "h0", "zone": zone, "preempted": "FALSE", "project/project-id": "example-project", **more}


def ask(url, method="GET", data=None, headers=None):
    """(status, text, headers)"""
    request = urllib.request.Request(url, method=method, data=data)
    for name, value in ({"Metadata-Flavor": "Google"} if headers is None else headers).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_row_17_it_is_not_always_well():
    with metadata(machine()) as (server, url):
        server.unwell = 2
        assert [ask(f"{url}{V1}instance/name")[0] for _ in range(3)] == [503, 503, 200]
        server.unwell = 1
        assert ask(url)[0] == 503
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)  # as at boot: nobody is there


def test_row_17_the_zone_is_a_path_and_the_old_value_comes_in_time():
    with metadata(machine()) as (server, url):
        assert ask(f"{url}{V1}instance/zone")[1] == "projects/123456789/zones/us-central1-a"
        _, text, headers = ask(f"{url}{V1}instance/preempted")
        began = time.monotonic()
        again = ask(f"{url}{V1}instance/preempted?wait_for_change=true&timeout_sec=1&last_etag={headers['ETag']}")
        assert again[:2] == (200, text) and time.monotonic() - began > 0.9
        threading.Timer(0.3, lambda: change(server, "preempted", "TRUE")).start()
        assert ask(f"{url}{V1}instance/preempted?wait_for_change=true&timeout_sec=20")[1] == "TRUE"
        change(server, "preempted", "FALSE")
        change(server, "preempted", "TRUE")  # nobody sees what was in between
        last = ask(f"{url}{V1}instance/preempted")[2]["ETag"]
        assert ask(f"{url}{V1}instance/preempted?wait_for_change=true&timeout_sec=0&last_etag={last}")[1] == "TRUE"


def test_row_17_what_is_not_there():
    with metadata(machine()) as (_, url):
        assert ask(f"{url}{V1}instance/service-accounts/default/token")[0] == 404  # without an account
        status, text, _ = ask(f"{url}{V1}instance/upcoming-maintenance")
        assert status == 503 and "error" in json.loads(text)


def test_row_18_without_the_header_there_is_nothing():
    with metadata(machine()) as (_, url):
        assert ask(f"{url}{V1}instance/name", headers={})[0] == 403
        forwarded = {"Metadata-Flavor": "Google", "X-Forwarded-For": "10.0.0.1"}
        assert ask(f"{url}{V1}instance/name", headers=forwarded)[0] == 403
        status, _, headers = ask(f"{url}{V1}instance/name")
        assert status == 200 and headers["Metadata-Flavor"] == "Google"


def test_folders_and_what_lies_in_them():
    with metadata(machine(**{"attributes/muster-run": "r1", **token("a@b")})) as (_, url):
        assert ask(f"{url}{V1}instance/attributes/")[1].split() == ["muster-run"]
        for place, there in (("instance", {"muster-run": "r1"}), ("project", {})):
            assert json.loads(ask(f"{url}{V1}{place}/attributes/?recursive=true")[1]) == there
        assert "service-accounts/" in ask(f"{url}{V1}instance/")[1].split()
        both = ask(f"{url}{V1}instance/service-accounts/")[1].split()  # the docs' list: by name, and as "default"
        assert both == ["a@b/", "default/"]
        whole = json.loads(ask(f"{url}{V1}instance/?recursive=true&alt=json")[1])
        assert whole["attributes"] == {"muster-run": "r1"} and whole["serviceAccounts"]["default"]["email"] == "a@b"
        assert "projectId" not in json.dumps(whole)


def test_guest_attributes_are_off_unless_they_were_switched_on():
    with metadata(machine()) as (server, url):
        at = f"{url}{V1}instance/guest-attributes/muster/stage"
        assert ask(at, "PUT", b"driver")[0] == 403
        change(server, "attributes/enable-guest-attributes", "TRUE")
        assert ask(at, "PUT", b"driver")[0] == 200 and server.written == [("muster/stage", "driver")]
        assert [ask(at, "PUT", b"x")[0] for _ in range(10)] == [200] * 9 + [429]


def test_googles_own_library_takes_it_for_the_real_one(monkeypatch):
    pytest.importorskip("google.auth")
    requests = pytest.importorskip("google.auth.transport.requests", reason="needs requests")
    from google.auth.compute_engine import Credentials, _metadata

    with metadata(machine(**token("muster-hosts@example-project.iam.gserviceaccount.com", expires_in=200))) as (_, url):
        host = url.removeprefix("http://")
        for name in ("_GCE_METADATA_HOST", "_METADATA_ROOT", "_METADATA_IP_ROOT"):
            value = {"_GCE_METADATA_HOST": host, "_METADATA_ROOT": f"{url}{V1}", "_METADATA_IP_ROOT": url}[name]
            monkeypatch.setattr(_metadata, name, value, raising=False)
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("GCE_METADATA_ROOT", host)
        monkeypatch.setenv("GCE_METADATA_IP", host)
        transport = requests.Request()
        assert _metadata.ping(transport)
        assert _metadata.get_project_id(transport) == "example-project"
        credentials = Credentials()
        credentials.refresh(transport)
        assert credentials.token == "ya29.fake"
        assert credentials.service_account_email == "muster-hosts@example-project.iam.gserviceaccount.com"
