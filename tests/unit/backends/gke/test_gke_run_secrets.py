"""The run file's secrets on GKE: a Secret made at submission, which hosts' pods name; no manifest holds a value."""

import base64
from types import SimpleNamespace

import pytest
from cases import placement, spec

from muster.backends.gke.manifests.render import run_manifests
from muster.backends.gke.manifests.yaml_text import dump
from muster.backends.gke.operate.submission import Submission
from muster.core.errors import UsageError

ASKED = placement(spec("g2-standard-48", "spot", secrets={"MY_KEY": "env", "HF_TOKEN": "env"}))
VALUES = {"MY_KEY": "a value", "HF_TOKEN": "another"}


def created(values):
    applied = []
    cluster = SimpleNamespace(create=lambda row: applied.append(row) or row, get=lambda row: row)
    Submission(spec=ASKED.spec, number="1", documents=run_manifests(ASKED)).create(cluster, "t" * 64, values)
    return applied


def references(role):
    (jobset,) = [row for row in run_manifests(ASKED) if row["kind"] == "JobSet"]
    (found,) = [row for row in jobset["spec"]["replicatedJobs"] if row["name"] == role]
    (container,) = found["template"]["spec"]["template"]["spec"]["containers"]
    keyed = [row for row in container["env"] if "secretKeyRef" in row.get("valueFrom", {})]
    return {row["name"]: row["valueFrom"]["secretKeyRef"] for row in keyed}


def test_hosts_name_the_secret_that_the_submission_makes():
    applied = created(VALUES)
    found = references("host")
    assert found.keys() == VALUES.keys()
    made = {row["metadata"]["name"]: row["data"] for row in applied if row["kind"] == "Secret"}
    for variable, reference in found.items():
        assert base64.b64decode(made[reference["name"]][reference["key"]]).decode() == VALUES[variable]
        assert "optional" not in reference  # a pod without it must not start
    text = dump([row for row in applied if row["kind"] != "Secret"])
    assert not any(value in text or base64.b64encode(value.encode()).decode() in text for value in VALUES.values())


def test_the_supervisor_gets_none_but_the_hubs_token():
    assert references("supervisor").keys() == {"HF_TOKEN"}


def test_a_value_that_is_not_here_stops_the_submission():
    with pytest.raises(UsageError, match=r"secrets\.MY_KEY is not here"):
        created({"HF_TOKEN": "another"})
