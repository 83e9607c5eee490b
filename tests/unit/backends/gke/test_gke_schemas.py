"""Every rendered object against an outside authority: Kubernetes' own schemas, and the CRDs of Kueue and JobSet."""

import copy

import pytest
from cases import cases, placement, spec, text

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

CASES = {**cases(), "g2-spot-metrics": placement(spec("g2-standard-48", "spot", metrics={"port": 0}))}
KUBERNETES = "1.34"
WITHOUT_A_SCHEMA = {"Network", "GKENetworkParamSet", "PodMonitoring"}
"""GKE's own kinds: the definitions of the first two are not published, so these follow Google's examples alone; the
third's fields are held against their list in test_gke_monitoring.py."""


def documents(name):
    found = []
    for content in text(CASES[name]).values():
        found += [one for one in yaml.load_all(content, Loader=yaml.CSafeLoader) if one]
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_object_fits_its_schema(name, definitions):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(name):
        if definitions.knows(document):
            assert definitions.errors(document) == []
        elif document["kind"] not in WITHOUT_A_SCHEMA:
            kubernetes.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "name",
    ["a4-flex-start-queued", "a3-mega-spot", "cpu-owned", "a4-spot-claims", "megatron-5b", "tpu-v6e-two-slices-spot"],
)
def test_child_jobs_are_jobs(name):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    (jobset,) = [one for one in documents(name) if one["kind"] == "JobSet"]
    for role in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": role["template"]["spec"]}
        kubernetes.validate(job, KUBERNETES, strict=True)
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(role["template"]["spec"]["template"])}
        pod["metadata"]["name"] = "pod"
        kubernetes.validate(pod, KUBERNETES, strict=True)


def test_the_checker_refuses_what_an_api_server_refuses(definitions):
    """The traps that a lenient apply swallows; a checker that accepts them proves nothing."""
    by_kind = {one["kind"]: one for one in documents("a4-flex-start-queued")}
    queue = copy.deepcopy(by_kind["ClusterQueue"])
    queue["spec"]["admissionChecks"] = ["muster-dws"]
    assert definitions.errors(queue) == ["ClusterQueue.spec.admissionChecks: unknown field"]
    flavor = copy.deepcopy(by_kind["ResourceFlavor"])
    flavor["spec"] = {"topologyName": "muster-gce"}
    assert definitions.errors(flavor)
    jobset = copy.deepcopy(by_kind["JobSet"])
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["imagee"] = "typo"
    assert any("imagee: unknown field" in error for error in definitions.errors(jobset))
    changed = copy.deepcopy(by_kind["JobSet"])
    changed["spec"]["successPolicy"]["operator"] = "All"
    assert any("immutable" in error for error in definitions.errors(changed, by_kind["JobSet"]))
