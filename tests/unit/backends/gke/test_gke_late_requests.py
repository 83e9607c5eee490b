"""Requests that arrive after their answer was given up, after ``down`` and after another submission of the same run."""

# ruff: noqa: F401, F811

import copy
import json

import msgspec
import pytest
from test_gke_launcher import JOBSETS, google, launcher, request_

from muster.backends.gke.kubernetes import connection
from muster.backends.google.http import Unreachable
from muster.core.errors import ConflictError


@pytest.fixture
def writes(google, monkeypatch):
    """Every request but reads and dry runs, as it was sent."""
    sent, plain = [], google.kubernetes.handle

    def handle(method, target, body=b""):
        if method != "GET" and "dryRun" not in target:
            sent.append((method, target, body))
        return plain(method, target, body)

    monkeypatch.setattr(google.kubernetes, "handle", handle)
    return sent


def settled(google):
    for _ in range(5):
        google.kubernetes.handle("GET", "/api/v1/namespaces/default/pods")
    return copy.deepcopy(google.kubernetes.objects)


def test_what_comes_after_the_next_submission_changes_nothing(launcher, google, request_, writes):
    launcher.cancel(launcher.submit(request_))
    late = list(writes)
    assert {method for method, *_ in late} == {"POST", "DELETE"} and not google.kubernetes.of_kind("JobSet")
    launcher.submit(request_)
    before = settled(google)
    for method, target, body in late:
        google.kubernetes.handle(method, target, body)
        assert settled(google) == before, f"{method} {target}"


def test_a_jobset_that_comes_after_down_is_not_taken_for_the_next_submissions(
    launcher,
    google,
    request_,
    writes,
    monkeypatch,
):
    launcher.cancel(launcher.submit(request_))
    (late,) = [row for row in writes if row[0] == "POST" and "/jobsets" in row[1]]
    monkeypatch.setattr(google.kubernetes, "_collect", lambda: None)  # Kubernetes takes its time
    google.kubernetes.handle(*late)
    monkeypatch.setattr(launcher.clock, "sleep", lambda _seconds: None, raising=False)
    launcher.submit(request_)
    monkeypatch.undo()
    settled(google)
    (jobset,), secrets = google.kubernetes.of_kind("JobSet"), google.kubernetes.of_kind("Secret")
    assert jobset["metadata"]["ownerReferences"][0]["uid"] in [one["metadata"]["uid"] for one in secrets]


def test_a_jobset_that_comes_in_the_middle_of_a_submission_is_said_and_left(
    launcher,
    google,
    request_,
    writes,
    monkeypatch,
):
    launcher.cancel(launcher.submit(request_))
    (late,) = [row for row in writes if row[0] == "POST" and "/jobsets" in row[1]]
    plain = google.kubernetes.handle

    def handle(method, target, body=b""):
        if method == "POST" and "/jobsets" in target:
            monkeypatch.setattr(google.kubernetes, "_collect", lambda: None)
            plain(*late)
        return plain(method, target, body)

    monkeypatch.setattr(google.kubernetes, "handle", handle)
    with pytest.raises(ConflictError, match=r"JobSet/.* of another submission") as refused:
        launcher.submit(request_)
    assert "submit again" in refused.value.hint


def test_what_an_earlier_submission_left_is_replaced(launcher, google, request_):
    launcher.submit(request_)
    (path,) = [path for path, one in google.kubernetes.objects.items() if one.get("kind") == "JobSet"]
    google.kubernetes.objects.pop(path)  # as its time to live has it
    old = {one["metadata"]["uid"] for one in google.kubernetes.objects.values() if "ownerReferences" in one["metadata"]}
    (config,) = google.kubernetes.of_kind("ConfigMap")
    config["data"]["resolved.json"] = "an older one"
    launcher.submit(request_)
    (config,), (jobset,) = google.kubernetes.of_kind("ConfigMap"), google.kubernetes.of_kind("JobSet")
    assert json.loads(config["data"]["resolved.json"]) and config["metadata"]["uid"] not in old
    assert jobset["metadata"]["ownerReferences"] == config["metadata"]["ownerReferences"]


def test_only_an_answer_that_cannot_be_read_is_none():
    with pytest.raises(Unreachable, match="that can be read"):
        connection._reply(lambda: msgspec.json.decode(b'{"kind": "Jo'))
    with pytest.raises(ValueError, match="ours"):
        connection._reply(lambda: (_ for _ in ()).throw(ValueError("ours")))
