"""Requests that arrive after their answer was given up, after ``down`` and after another submission of the same run."""

# ruff: noqa: F401, F811

import copy
import dataclasses
import json

import msgspec
import pytest
from test_gke_launcher import JOBSETS, google, launcher, request_

from muster.backends.gke.kubernetes import connection
from muster.backends.gke.pod.continuation import queue_continuation
from muster.backends.google.http import Unreachable
from muster.core.errors import ConflictError
from muster.storage.job_record import SUBMISSION


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


def late_jobset(launcher, request_, writes):
    """The request for the JobSet of a submission that was taken back."""
    launcher.cancel(launcher.submit(request_))
    (late,) = [row for row in writes if row[0] == "POST" and "/jobsets" in row[1]]
    return late


def test_a_jobset_that_comes_after_down_is_not_taken_for_the_next_submissions(
    launcher,
    google,
    request_,
    writes,
    monkeypatch,
):
    late = late_jobset(launcher, request_, writes)
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
    late = late_jobset(launcher, request_, writes)
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
    launcher.submit(dataclasses.replace(request_, labels={**request_.labels, SUBMISSION: "2"}))
    (config,), (jobset,) = google.kubernetes.of_kind("ConfigMap"), google.kubernetes.of_kind("JobSet")
    assert json.loads(config["data"]["resolved.json"]) and config["metadata"]["uid"] not in old
    assert jobset["metadata"]["ownerReferences"] == config["metadata"]["ownerReferences"]


def together(launcher, google, request, other, before, monkeypatch):
    """``request`` is submitted, and ``other`` as a whole before the ``before``-th of its writes. What each said, and
    whether a JobSet is there with all it needs once Kubernetes has collected what has no owner."""
    plain, count, said, made, inside = google.kubernetes.handle, 0, [], [], False

    def submitted(which):
        try:
            launcher.submit(which)
            return True
        except ConflictError:
            return False

    def handle(method, target, body=b""):
        nonlocal count, inside
        if method != "GET" and "dryRun" not in target and not inside:
            count += 1
            if count == before:
                inside = True
                said.append(submitted(other))
                made.extend(one["metadata"]["uid"] for one in google.kubernetes.of_kind("JobSet") if said[0])
                inside = False
        return plain(method, target, body)

    with monkeypatch.context() as patched:
        patched.setattr(google.kubernetes, "handle", handle)
        said.append(submitted(request))
    settled(google)
    owned = [one for one in google.kubernetes.objects.values() if one.get("metadata", {}).get("ownerReferences")]
    jobsets, secrets = google.kubernetes.of_kind("JobSet"), google.kubernetes.of_kind("Secret")
    assert made in ([], [one["metadata"]["uid"] for one in jobsets]), "a run that was there is left alone"
    uids = {row["uid"] for one in owned for row in one["metadata"]["ownerReferences"] if row["kind"] == "Secret"}
    lives = len(jobsets) == 1 and len(uids) == 1 and uids <= {one["metadata"]["uid"] for one in secrets}
    return said, lives and {"ConfigMap", "JobSet"} <= {one["kind"] for one in owned}


@pytest.mark.parametrize("number", ["1", "2"])
@pytest.mark.parametrize("before", range(1, 8))
def test_of_two_clients_at_once_nobody_is_told_of_a_run_that_is_not_there(
    launcher, google, request_, number, before, monkeypatch
):
    """A lid closed in the middle of a submission, while another terminal submits or recovers the run."""
    other = dataclasses.replace(request_, labels={**request_.labels, SUBMISSION: number})
    said, lives = together(launcher, google, request_, other, before, monkeypatch)
    if len(said) == 1:  # the first had fewer writes
        assert said == [True] and lives
    elif number == "1":
        assert said == [True, True] and lives, "the same request twice is one job"
    else:
        assert lives or not any(said)
        assert lives, "one of them wins"


def test_who_lost_the_token_in_the_middle_is_told(launcher, google, request_, monkeypatch):
    plain = google.kubernetes.handle

    def handle(method, target, body=b""):
        if method == "POST" and "/jobsets" in target:
            (secret,) = [
                one for one in google.kubernetes.of_kind("Secret") if one["metadata"]["name"].endswith("-token")
            ]
            plain("DELETE", f"/api/v1/namespaces/default/secrets/{secret['metadata']['name']}")
        return plain(method, target, body)

    monkeypatch.setattr(google.kubernetes, "handle", handle)
    with pytest.raises(ConflictError, match="came between"):
        launcher.submit(request_)


def test_what_a_later_client_made_is_not_removed_by_one_that_comes_back(launcher, google, request_, writes):
    """By uid: nothing of a submission that lives is ever deleted."""
    launcher.submit(request_)
    assert not [row for row in writes if row[0] == "DELETE"]
    launcher.submit(dataclasses.replace(request_, labels={SUBMISSION: "2"}))
    assert not [row for row in writes if row[0] == "DELETE"]


def test_a_late_continuation_of_a_run_that_was_taken_back_costs_the_next_one_nothing(
    launcher, google, request_, writes, monkeypatch
):
    namespace = "default"
    launcher.submit(request_)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    cluster = launcher._known(request_.run_id)
    name = jobset["metadata"]["name"]
    queue_continuation(cluster, namespace, name)
    late = writes[-1]
    assert late[0] == "POST" and len(google.kubernetes.of_kind("JobSet")) == 2
    launcher.cancel(launcher.find(request_.run_id))
    settled(google)
    launcher.submit(request_)
    (living,) = google.kubernetes.of_kind("JobSet")
    monkeypatch.setattr(google.kubernetes, "_collect", lambda: None)  # Kubernetes takes its time
    google.kubernetes.handle(*late)
    assert len(google.kubernetes.of_kind("JobSet")) == 2
    monkeypatch.setattr(launcher.clock, "sleep", lambda _seconds: None, raising=False)
    launcher.submit(request_)
    assert google.kubernetes.of_kind("JobSet") == [living]


def test_who_may_not_read_secrets_is_not_told_that_a_run_was_taken_back(launcher, google, request_, monkeypatch):
    launcher.submit(request_)
    (before,) = google.kubernetes.of_kind("JobSet")
    plain = google.kubernetes.handle

    def handle(method, target, body=b""):
        if method == "GET" and "/secrets/" in target:
            refusal = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "no"}
            return 403, refusal
        return plain(method, target, body)

    monkeypatch.setattr(google.kubernetes, "handle", handle)
    launcher.submit(request_)
    assert google.kubernetes.of_kind("JobSet") == [before]


def test_only_an_answer_that_cannot_be_read_is_none():
    with pytest.raises(Unreachable, match="that can be read"):
        connection._reply(lambda: msgspec.json.decode(b'{"kind": "Jo'))
    with pytest.raises(ValueError, match="ours"):
        connection._reply(lambda: (_ for _ in ()).throw(ValueError("ours")))
