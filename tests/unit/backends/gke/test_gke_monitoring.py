"""A run with a metrics page: what has the cluster's collector read it, and read no other secret."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import pytest
from cases import cases, placement, run_file_text, spec

from muster.backends.gke.manifests.jobset import MONITORING_API, MONITORING_KINDS, run_objects
from muster.backends.gke.manifests.placement import METRICS_PORT, resolved
from muster.backends.gke.manifests.render import run_manifests
from muster.backends.gke.manifests.yaml_text import dump
from muster.backends.gke.operate.submission import Submission
from muster.transport.secure_session import token_for_pages

PAGE = placement(spec("g2-standard-48", "spot", metrics={"port": 0}))
#: Of GoogleCloudPlatform/prometheus-engine, charts/operator/crds/monitoring.googleapis.com_podmonitorings.yaml (v1,
#: July 2026), as far as it is used: field -> the fields below it, or None for a value.
FIELDS = {
    "selector": {"matchLabels": None},
    "endpoints": {
        "port": None,
        "path": None,
        "interval": None,
        "authorization": {"type": None, "credentials": {"secret": {"name": None, "key": None}}},
    },
    "targetLabels": {"metadata": None},
}
TOKEN = "t" * 64


def unknown(given, known, path="spec"):
    """Paths of fields that the definition does not have."""
    rows = given if isinstance(given, list) else [given]
    found = []
    for row in rows:
        for key, value in row.items():
            if key not in known:
                found.append(f"{path}.{key}")
            elif known[key] is not None:
                found += unknown(value, known[key], f"{path}.{key}")
    return found


def by_kind(of):
    return {row["kind"]: row for row in run_objects(of, run_file_text(of), "{}")}


def test_the_page_is_where_the_collector_looks_for_it():
    found = by_kind(PAGE)
    monitoring = found["PodMonitoring"]
    assert monitoring["apiVersion"] == MONITORING_API and unknown(monitoring["spec"], FIELDS) == []
    (endpoint,) = monitoring["spec"]["endpoints"]
    page = resolved(PAGE).metrics
    assert (endpoint["port"], page.port, page.bind) == (METRICS_PORT, METRICS_PORT, "0.0.0.0")
    supervisor = found["JobSet"]["spec"]["replicatedJobs"][0]
    labels = supervisor["template"]["spec"]["template"]["metadata"]["labels"]
    selector = dict(monitoring["spec"]["selector"]["matchLabels"])
    assert selector.pop("jobset.sigs.k8s.io/replicatedjob-name") == supervisor["name"] == "supervisor"
    assert selector.items() <= labels.items()


def test_a_port_that_is_given_is_taken():
    given = placement(spec("g2-standard-48", "spot", metrics={"port": 9100}))
    (endpoint,) = by_kind(given)["PodMonitoring"]["spec"]["endpoints"]
    assert endpoint["port"] == resolved(given).metrics.port == 9100


def test_the_collector_may_read_one_secret_which_is_not_the_runs_token():
    found = by_kind(PAGE)
    (rule,) = found["Role"]["rules"]
    (endpoint,) = found["PodMonitoring"]["spec"]["endpoints"]
    secret = endpoint["authorization"]["credentials"]["secret"]
    assert rule["resourceNames"] == [secret["name"]] and rule["resources"] == ["secrets"]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    mounted = [
        volume["secret"]["secretName"]
        for role in found["JobSet"]["spec"]["replicatedJobs"]
        for volume in role["template"]["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert mounted and secret["name"] not in mounted


def test_without_a_page_nothing_of_it_is_rendered():
    kinds = {kind for _, kind, _ in MONITORING_KINDS}
    assert kinds <= by_kind(PAGE).keys()
    for name, of in cases().items():
        assert not kinds & by_kind(of).keys(), name


@pytest.fixture
def cluster():
    applied = []
    return SimpleNamespace(
        create=lambda row: applied.append(row) or row, get=lambda row: row, applied=applied, serves=lambda api: False
    )


def submission(of):
    return Submission(spec=of.spec, number="1", documents=run_manifests(of))


def test_the_secret_of_the_page_is_made_at_submission_and_is_in_no_file(cluster):
    submission(PAGE).create(cluster, TOKEN, {})
    secrets = {row["metadata"]["name"]: row for row in cluster.applied if row["kind"] == "Secret"}
    name = by_kind(PAGE)["PodMonitoring"]["spec"]["endpoints"][0]["authorization"]["credentials"]["secret"]["name"]
    assert base64.b64decode(secrets[name]["data"]["token"]).decode() == token_for_pages(TOKEN.encode())
    assert secrets[name]["metadata"]["labels"] == by_kind(PAGE)["JobSet"]["metadata"]["labels"]
    assert token_for_pages(TOKEN.encode()) not in dump(run_manifests(PAGE))
    cluster.applied.clear()
    plain = placement(spec("g2-standard-48", "spot"))
    submission(plain).create(cluster, TOKEN, {})
    assert len([row for row in cluster.applied if row["kind"] == "Secret"]) == 1


def test_a_cluster_without_managed_collection_gets_a_warning_and_the_run(cluster):
    asked = submission(PAGE)
    asked._without_unknown_monitoring(cluster)
    assert not {row["kind"] for row in asked.documents} & {kind for _, kind, _ in MONITORING_KINDS}
    assert "nothing scrapes the run" in asked.warnings[0]
    cluster.serves = lambda api: api == MONITORING_API
    asked = submission(PAGE)
    asked._without_unknown_monitoring(cluster)
    assert {kind for _, kind, _ in MONITORING_KINDS} <= {
        row["kind"] for row in asked.documents
    } and asked.warnings == []
