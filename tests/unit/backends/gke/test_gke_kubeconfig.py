"""Clusters by kubeconfig: which context, how one proves oneself, and what is said where that cannot be."""

import json

import pytest

from muster.backends.gke.kubernetes.kubeconfig import connect, named, own_cluster
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
    assert named("kubeconfig:~/.kube/config") and not named("kubeconfig") and not named(None)


def test_the_current_context_or_the_one_named(tmp_path):
    where = written(tmp_path, {"token": "t"})
    assert connect(where, None).endpoint == "https://127.0.0.1:1"
    assert connect(where + "#a", None).endpoint == "https://d"
    with pytest.raises(UsageError, match="no 'z' among its contexts") as caught:
        connect(where + "#z", None)
    assert "a, b" in caught.value.hint


def test_a_token_from_a_file_is_read_each_time(tmp_path):
    (tmp_path / "token").write_text("one\n")
    http = connect(written(tmp_path, {"tokenFile": str(tmp_path / "token")}), None).session.http
    assert http._headers() == {"authorization": "Bearer one"}
    (tmp_path / "token").write_text("two")
    assert http._headers() == {"authorization": "Bearer two"}


def test_a_program_that_proves_the_user_is_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="proves its user by exec"):
        connect(written(tmp_path, {"exec": {"command": "gke-gcloud-auth-plugin"}}), None)


def test_no_such_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read the kubeconfig"):
        connect(f"kubeconfig:{tmp_path}/nothing", None)


def test_outside_a_pod_there_is_no_own_cluster(tmp_path):
    with pytest.raises(AccessError, match="this is no pod"):
        own_cluster(None, {}, tmp_path)
    with pytest.raises(AccessError, match="this is no pod"):
        own_cluster(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
