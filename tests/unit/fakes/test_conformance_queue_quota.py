"""Quota in the played Kueue is given as Kueue 0.19.2 gave it: flavour by flavour, by taints, and by resource claims."""

import copy

import pytest
from cases import placement, run_objects, spec
from fakes.kueue_config import CONFIG_MAP, kueue_config_refusals
from fakes.plane import Play, phase

from muster.backends.gke.manifests.kueue_objects import CPU_FLAVOR, queue_objects
from muster.backends.gke.manifests.placement import Options
from muster.backends.gke.manifests.yaml_text import dump

FLAVOR = "muster-l4-spot"
NIC = "example.com/nic"
DRA_OFF = dict.fromkeys(("KueueDRAIntegration", "KueueDRAIntegrationExtendedResource",
                         "KueueDRAIntegrationPartitionableDevices"), False)  # fmt: skip
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
CPU_POOL = {"cloud.google.com/gke-nodepool": "muster-cpu"}
GPU_POOL = {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-spot": "true"}


def play(*, taints=(TAINT,), claims=False, config=None, **changes):
    """A run of two hosts in a queue whose hosts' flavour has these taints; ``changes``: quotas of its flavours."""
    where = placement(spec("a4-highgpu-8g", "spot"), Options(network="claims")) if claims else placement(
        spec("g2-standard-48", "spot"))  # fmt: skip
    objects = copy.deepcopy(queue_objects(where))
    for one in objects:
        if one["kind"] == "ResourceFlavor" and one["metadata"]["name"] != CPU_FLAVOR:
            one["spec"]["nodeTaints"] = list(taints)
        if one["kind"] == "ClusterQueue":
            for row in one["spec"]["resourceGroups"][0]["flavors"]:
                for quota in row["resources"]:
                    quota["nominalQuota"] = changes.get(f"{row['name']} {quota['name']}", quota["nominalQuota"])
    run = Play(*([] if config is None else [configuration(**config)]), *objects, *run_objects(where, "", ""),
               pools=[CPU_POOL, GPU_POOL])  # fmt: skip
    run.objects = objects
    return run


def configuration(**changes):
    text = dump([{"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", **changes}])
    namespace, name, key = CONFIG_MAP
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace},
            "data": {key: text}}  # fmt: skip


def assigned(run):
    """Pod set -> its flavours."""
    rows = run.one("Workload")["status"]["admission"]["podSetAssignments"]
    return {row["name"]: set(row["flavors"].values()) for row in rows}


def reserved(run):
    row = run.conditions("Workload")["QuotaReserved"]
    return row["status"], row["reason"], row["message"]


# ---------------------------------------------------------------- flavours


def test_row_17_a_selector_counts_for_a_flavor_by_its_own_label_keys_alone():
    """0.17.6, 0.18.2, 0.19.0 and later (flavorassigner.go, checkFlavorForPodSets)."""
    run = play(taints=())
    run.run()
    assert assigned(run) == {"supervisor": {FLAVOR}, "host": {FLAVOR}}
    selector = run.pod("supervisor")["spec"]["nodeSelector"]
    assert selector == {**GPU_POOL, **CPU_POOL}, "injected, and no node has both"
    assert phase(run.pod("supervisor")) == "Pending" and phase(run.pod("host")) == "Running"
    (row,) = run.pod("supervisor")["status"]["conditions"]
    assert row["message"].endswith("node(s) didn't match Pod's node affinity/selector.")


def test_row_17_before_it_counted_by_those_of_all_flavors():
    """0.16.9, 0.17.5, 0.18.1."""
    run = play(taints=())
    run.kueue.own_keys = False
    run.run()
    assert assigned(run) == {"supervisor": {CPU_FLAVOR}, "host": {FLAVOR}}


@pytest.mark.parametrize("own_keys", [True, False])
def test_row_17_a_taint_of_the_hosts_flavor_keeps_the_supervisor_off_it_in_every_release(own_keys):
    run = play()
    run.kueue.own_keys = own_keys
    run.run()
    assert assigned(run) == {"supervisor": {CPU_FLAVOR}, "host": {FLAVOR}}
    assert run.pod("supervisor")["spec"]["nodeSelector"] == CPU_POOL
    assert {phase(pod) for pod in run.pods()} == {"Running"}


def test_row_18_every_flavor_is_named_sorted():
    run = play(**{f"{FLAVOR} nvidia.com/gpu": 12})
    run.run()
    where = placement(spec("g2-standard-48", "spot", hosts=2, name="next"))
    second = copy.deepcopy(run_objects(where, "", "")[-1])
    second["metadata"]["name"] = "next"
    run.add(second)
    run.run()
    (waiting,) = [one for one in run.server.of_kind("Workload") if "next" in one["metadata"]["name"]]
    (row,) = [row for row in waiting["status"]["conditions"] if row["type"] == "QuotaReserved"]
    assert (row["status"], row["reason"]) == ("False", "Pending")
    assert row["message"].startswith("couldn't assign flavors to pod set host: insufficient quota for cpu in flavor "
                                     "muster-cpu, previously considered podsets requests (1) + current podset request "
                                     "(48) > maximum capacity (32), insufficient quota for memory in ")  # fmt: skip
    assert row["message"].endswith(
        "insufficient quota for nvidia.com/gpu in flavor muster-cpu, previously considered podsets requests (0) + "
        "current podset request (8) > maximum capacity (0), insufficient unused quota for nvidia.com/gpu in flavor "
        "muster-l4-spot, 4 more needed"
    )


def test_row_18_pod_sets_that_only_wait_are_named_one_by_one():
    run = play(**{f"{CPU_FLAVOR} cpu": "1", f"{FLAVOR} nvidia.com/gpu": 8})
    run.run()
    second = copy.deepcopy(run_objects(placement(spec("g2-standard-48", "spot")), "", "")[-1])
    second["metadata"]["name"] = "next"
    run.add(second)
    run.run()
    (waiting,) = [one for one in run.server.of_kind("Workload") if "next" in one["metadata"]["name"]]
    said = next(row["message"] for row in waiting["status"]["conditions"] if row["type"] == "QuotaReserved")
    assert said.startswith(
        "couldn't assign flavors to pod set supervisor: insufficient unused quota for cpu in flavor muster-cpu, 1 more "
        "needed, untolerated taint {nvidia.com/gpu present NoSchedule <nil>} in flavor muster-l4-spot; couldn't assign "
        "flavors to pod set host: insufficient quota for cpu in flavor muster-cpu"
    )


# ---------------------------------------------------------------- claims

UNMAPPED = (
    "spec.podSets[1].template.spec.resourceClaims[0].resourceClaimTemplateName: Not found: "
    '"DeviceClass mrdma.google.com is not mapped in DRA configuration for podset host"'
)
DISABLED = "Workload uses DRA resources but the KueueDRAIntegration feature gate is not enabled"
MAPPING = {"resources": {"deviceClassMappings": [{"name": NIC, "deviceClassNames": ["mrdma.google.com"]}]}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, UNMAPPED),
        ({"featureGates": DRA_OFF}, DISABLED),
        ({"resources": {"deviceClassMappings": [{"name": NIC, "deviceClassNames": ["other.example.com"]}]}}, UNMAPPED),
    ],
)
def test_row_19_a_claim_that_the_configuration_does_not_map_is_never_queued(config, said):
    """Kueue 0.19.2, run: the condition's message word for word."""
    run = play(claims=True, config=config)
    run.run(3600)
    assert run.kueue.refused == [] and not run.pods()
    assert reserved(run) == ("False", "Inadmissible", said)
    assert run.conditions("Workload")["Requeued"]["message"] == said


def test_row_19_one_of_the_gates_alone_keeps_kueue_from_starting():
    gates = {"KueueDRAIntegration": False}
    found = kueue_config_refusals({"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration",
                                   "featureGates": gates})  # fmt: skip
    assert "featureGates: KueueDRAIntegrationExtendedResource requires KueueDRAIntegration to be enabled" in found


def test_row_19_with_all_four_gates_off_claims_are_left_to_the_scheduler():
    run = play(claims=True, config={"featureGates": {**DRA_OFF, "KueueDRARejectWorkloadsWhenDRADisabled": False}})
    run.pools = None
    run.run()
    assert reserved(run)[0] == "True" and len(run.pods("host")) == 2
    assert run.pod("host")["spec"]["resourceClaims"]


def test_row_19_a_mapping_alone_is_not_enough_the_queue_has_to_cover_the_resource():
    run = play(claims=True, config=MAPPING)
    run.run()
    assert reserved(run) == ("False", "Pending", f"couldn't assign flavors to pod set host: resource {NIC} unavailable "
                             "in ClusterQueue")  # fmt: skip
    (group,) = run.one("ClusterQueue")["spec"]["resourceGroups"]
    group["coveredResources"].append(NIC)
    for number, flavor in enumerate(group["flavors"]):
        flavor["resources"].append({"name": NIC, "nominalQuota": 0 if number else 16})
    run.pools = None
    run.run()
    assert reserved(run)[0] == "True" and len(run.pods("host")) == 2
    (host,) = [row for row in run.one("Workload")["status"]["admission"]["podSetAssignments"] if row["name"] == "host"]
    assert host["resourceUsage"][NIC] == "16", "eight for each of two hosts"
