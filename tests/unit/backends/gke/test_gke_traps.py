"""One test per trap of Google Cloud's GPU stack: the string that others got wrong, as ours has it.

The table in docs/how-to/gke.md has a row for each of these tests (checked below).
"""

import json
import re
from pathlib import Path

import pytest
from cases import placement, spec

from muster.backends.gke.manifests import pods
from muster.backends.gke.manifests.kueue_objects import queue_objects
from muster.backends.gke.manifests.placement import Options, resolved
from muster.backends.gke.manifests.pods import SOURCE_AND_RUN
from muster.backends.gke.manifests.render import cluster_objects, run_manifests
from muster.backends.gke.manifests.spec_rules import findings
from muster.catalog import gke as catalogue

DOCUMENT = Path(__file__).parents[4] / "docs" / "how-to" / "gke.md"
A4, A3U, MEGA, HIGH = "a4-highgpu-8g", "a3-ultragpu-8g", "a3-megagpu-8g", "a3-highgpu-8g"


def jobset(of, options=None):
    return run_manifests(placement(of, options))[-1]


def pod(of, role="host", options=None):
    (found,) = [one for one in jobset(of, options)["spec"]["replicatedJobs"] if one["name"] == role]
    return found["template"]["spec"]["template"]


def job(of, role):
    (found,) = [one for one in jobset(of)["spec"]["replicatedJobs"] if one["name"] == role]
    return found["template"]["spec"]


def environment(of, options=None):
    container = pod(of, options=options)["spec"]["containers"][0]
    return {row["name"]: row.get("value") for row in container["env"]}


def of_kind(kind, of):
    return [one for one in cluster_objects(placement(of)) if one["kind"] == kind]


def test_trap_admission_checks_strategy():
    (queue,) = of_kind("ClusterQueue", spec(A4, "flex_start_queued"))
    assert queue["apiVersion"] == "kueue.x-k8s.io/v1beta2" and "admissionChecks" not in queue["spec"]
    assert queue["spec"]["admissionChecksStrategy"]["admissionChecks"] == [
        {"name": "muster-dws", "onFlavors": ["muster-b200-flex-start-queued"]}
    ]


def test_trap_max_run_duration_on_the_object():
    key = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
    of = spec(A4, "flex_start_queued", limits={"max_hours": 10})
    assert jobset(of)["metadata"]["annotations"][key] == str(36_000 + 1800), "its own hours, and what is around them"
    assert key not in json.dumps(jobset(of)["spec"])


def test_trap_covered_resources():
    (queue,) = of_kind("ClusterQueue", spec(A4, "spot"))
    (group,) = queue["spec"]["resourceGroups"]
    requested = set()
    for role in ("host", "supervisor"):
        for container in [*pod(spec(A4, "spot"), role)["spec"]["containers"]]:
            requested |= set(container["resources"]["requests"])
    assert requested <= set(group["coveredResources"]) >= {"cpu", "memory", "ephemeral-storage", "nvidia.com/gpu"}
    for flavor in group["flavors"]:
        assert [row["name"] for row in flavor["resources"]] == group["coveredResources"]


def test_trap_supervisor_is_never_asked_of_dws():
    of = spec(A4, "flex_start_queued")
    (queue,) = of_kind("ClusterQueue", of)
    (check,) = queue["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert "muster-cpu" not in check["onFlavors"]
    supervisor = pod(of, "supervisor")["spec"]
    assert supervisor["nodeSelector"] == {"cloud.google.com/gke-nodepool": "muster-cpu"}
    assert "nvidia.com/gpu" not in json.dumps(supervisor)


@pytest.mark.parametrize(
    ("of", "resource"),
    [(spec(A4, "flex_start_queued"), "nvidia.com/gpu"), (spec("ct6e-standard-8t", "spot", hosts=1, device="tpu"),
                                                         "google.com/tpu")],
)  # fmt: skip
def test_trap_flavours_differ_by_taints(of, resource):
    """Labels were enough up to Kueue 0.17.5 and 0.18.1; later ones compare by each flavour's own keys alone."""
    (queue,) = of_kind("ClusterQueue", of)
    (group,) = queue["spec"]["resourceGroups"]
    assert [row["name"] for row in group["flavors"]][1:] == ["muster-cpu"], "first, it hides what hosts wait for"
    flavors = {one["metadata"]["name"]: one["spec"] for one in of_kind("ResourceFlavor", of)}
    hosts, cpu = flavors.pop(group["flavors"][0]["name"]), flavors["muster-cpu"]
    (taint,) = hosts["nodeTaints"]
    assert taint == {"key": resource, "value": "present", "effect": "NoSchedule"} and "nodeTaints" not in cpu
    assert {**taint, "operator": "Equal"} in pod(of)["spec"]["tolerations"], "in the template: Kueue sees no pod"
    assert resource not in str(pod(of, "supervisor")["spec"]["tolerations"])
    assert cpu["nodeLabels"] == pod(of, "supervisor")["spec"]["nodeSelector"]
    assert hosts["nodeLabels"].items() <= pod(of)["spec"]["nodeSelector"].items()


def test_trap_queued_label_is_not_selected():
    selector = pod(spec(A4, "flex_start_queued"))["spec"]["nodeSelector"]
    assert "cloud.google.com/gke-queued" not in selector and selector["cloud.google.com/gke-flex-start"] == "true"
    tolerated = [row["key"] for row in pod(spec(A4, "flex_start_queued"))["spec"]["tolerations"]]
    assert "cloud.google.com/gke-queued" in tolerated


@pytest.mark.parametrize("mode", ["flex_start_queued", "flex_start", "spot", "reservation"])
def test_trap_tolerations(mode):
    rows = {row["key"]: row for row in pod(spec(A4, mode))["spec"]["tolerations"]}
    assert rows["nvidia.com/gpu"] == {
        "key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"
    }  # fmt: skip
    assert rows["cloud.google.com/impending-node-termination"]["effect"] == "NoSchedule"
    assert ("cloud.google.com/gke-spot" in rows) == (mode == "spot")
    assert rows["user-workload"]["value"] == "true"


def test_trap_spot_grace():
    assert pod(spec(A4, "spot"))["spec"]["terminationGracePeriodSeconds"] == 15
    assert pod(spec(A4, "flex_start"))["spec"]["terminationGracePeriodSeconds"] == 35


@pytest.mark.parametrize(
    ("machine", "label"),
    [
        (A4, "nvidia-b200"),
        (A3U, "nvidia-h200-141gb"),
        (MEGA, "nvidia-h100-mega-80gb"),
        (HIGH, "nvidia-h100-80gb"),
        ("g2-standard-48", "nvidia-l4"),
        ("a2-highgpu-8g", "nvidia-tesla-a100"),
        ("a2-ultragpu-8g", "nvidia-a100-80gb"),
        ("a4x-highgpu-4g", "nvidia-gb200"),
        ("a4x-maxgpu-4g-metal", "nvidia-gb300"),
        ("g4-standard-48", "nvidia-rtx-pro-6000"),
    ],
)
def test_trap_accelerator_labels(machine, label):
    assert catalogue.find(machine, None)[0].label == label


def test_trap_not_sold_on_demand():
    for name in ("a4", "a4x", "a3-ultra"):
        assert all("on_demand" not in machine.modes for machine in catalogue.families()[name].machines.values())
    for part in ("1g", "2g", "4g"):
        modes = catalogue.find(f"a3-highgpu-{part}", None)[1].modes
        assert {mode.removesuffix("_queued") for mode in modes} == {"spot", "flex_start"}


def test_trap_rdma_interfaces():
    annotations = pod(spec(A4, "spot"))["metadata"]["annotations"]
    assert annotations["networking.gke.io/default-interface"] == "eth0"
    found = json.loads(annotations["networking.gke.io/interfaces"])
    wanted = ["default", "gvnic-1", *(f"rdma-{n}" for n in range(8))]
    assert found == [{"interfaceName": f"eth{n}", "network": name} for n, name in enumerate(wanted)]


def test_trap_tcpxo_interfaces():
    found = json.loads(pod(spec(MEGA, "spot"))["metadata"]["annotations"]["networking.gke.io/interfaces"])
    wanted = ["default", *(f"vpc{n}" for n in range(1, 9))]
    assert found == [{"interfaceName": f"eth{n}", "network": name} for n, name in enumerate(wanted)]


def test_trap_network_device_modes():
    modes = {
        one["metadata"]["name"]: one["spec"]["deviceMode"] for one in of_kind("GKENetworkParamSet", spec(A4, "spot"))
    }
    assert modes == {"gvnic-1": "NetDevice", **{f"rdma-{n}": "RDMA" for n in range(8)}}
    for one in of_kind("Network", spec(A4, "spot")):
        reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": one["metadata"]["name"]}
        assert one["spec"] == {"type": "Device", "parametersRef": reference}


def test_trap_dranet_claims():
    of = spec("a4x-maxgpu-4g-metal", "reservation")
    manifests = run_manifests(placement(of))
    (claim,) = [one for one in manifests if one["kind"] == "ResourceClaimTemplate"]
    assert claim["apiVersion"] == "resource.k8s.io/v1"
    assert claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] == "mrdma.google.com"
    spec_of_pod = pod(of)["spec"]
    assert spec_of_pod["resourceClaims"][0]["resourceClaimTemplateName"] == claim["metadata"]["name"]
    assert spec_of_pod["containers"][0]["resources"]["claims"] == [{"name": "rdma"}]
    assert not any(key.startswith("networking.gke.io") for key in pod(of)["metadata"]["annotations"])
    assert not of_kind("Network", of)


@pytest.mark.parametrize("machine", [A4, A3U])
def test_trap_gib_is_sourced_not_hard_coded(machine):
    command = pod(spec(machine, "spot"))["spec"]["containers"][0]["command"]
    assert command[:4] == ["/bin/bash", "-c", SOURCE_AND_RUN, "/usr/local/gib/scripts/set_nccl_env.sh"]
    assert 'source "$script";' in SOURCE_AND_RUN, "not &&: the script's last command may be false"
    assert set(environment(spec(machine, "spot"))) & {"NCCL_NET", "NCCL_IB_TC", "NCCL_TUNER_CONFIG_PATH"} == set()


@pytest.mark.parametrize(("machine", "tuner"), [(A4, "tuner_config_a4.txtpb"), (A3U, "tuner_config_a3u.txtpb")])
def test_trap_gib_values(machine, tuner):
    found = environment(spec(machine, "spot"), Options(nccl="catalogue"))
    assert found["NCCL_TUNER_CONFIG_PATH"] == f"/usr/local/gib/configs/{tuner}"
    assert (found["NCCL_NET"], found["NCCL_IB_TC"], found["NCCL_IB_FIFO_TC"]) == ("gIB", "52", "84")


def test_trap_tcpxo_variables():
    found = environment(spec(MEGA, "spot"), Options(nccl="catalogue"))
    assert found["NCCL_NVLSTREE_MAX_CHUNKSIZE"] == "131072"
    assert found["NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"] == "/dev/aperture_devices"
    assert not {"NCCL_ALGO", "NCCL_DYNAMIC_CHUNK_SIZE"} & set(found)
    for fabric in _fabrics().values():
        assert not set(fabric.forbidden_env) & {*fabric.env, *fabric.env_when_not_sourced}


def test_trap_tcpxo_sourced():
    command = pod(spec(MEGA, "spot"))["spec"]["containers"][0]["command"]
    assert command[3] == "/usr/local/nvidia/lib64/nccl-env-profile.sh"
    assert environment(spec(MEGA, "spot"))["NCCL_LIB_DIR"] == "/usr/local/nvidia/lib64"


def test_trap_tcpxo_daemon():
    found = pod(spec(MEGA, "spot"))
    daemon, _ = found["spec"]["initContainers"]
    assert daemon["restartPolicy"] == "Always", "a native sidecar, or the job never ends"
    assert daemon["image"].endswith("tcpgpudmarxd-dev:v1.0.21") and daemon["args"] == ["--num_hops=2"]
    assert not re.search(r"num_nics|--uid|alsologtostderr", json.dumps(daemon))
    assert daemon["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "NET_BIND_SERVICE"]
    devices = found["metadata"]["annotations"]["devices.gke.io/container.tcpxo-daemon"]
    assert devices.count("- path: /dev/nvidia") == 10 and "/dev/dmabuf_import_helper" in devices


def test_trap_tcpx_socket_and_preset():
    found = pod(spec(HIGH, "spot"))["spec"]
    daemon, _ = found["initContainers"]
    assert "a3vm" in daemon["args"] and '"--verbose 128 2 0 "' in daemon["args"]
    paths = {mount["name"]: mount["mountPath"] for mount in found["containers"][0]["volumeMounts"]}
    assert paths["tcpx-socket"] == "/tmp"
    # What is compiled must not go to that folder of the node: it is small, and outlives the pod.
    env = environment(spec(HIGH, "spot"))
    places = [env[name] for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME")]
    assert all(place.startswith(paths["scratch"]) for place in places)
    assert "TMPDIR" not in environment(spec(A4, "spot"))
    assert {"name": "tcpx-socket", "mountPath": "/run/tcpx"} in daemon["volumeMounts"]
    assert environment(spec(HIGH, "spot"))["NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"] == "eth1,eth2,eth3,eth4"


def test_trap_plugin_versions_are_coupled():
    images = {name: fabric.images for name, fabric in _fabrics().items() if fabric.images}
    assert images["tcpxo"]["plugin"].endswith(":v1.0.15") and images["tcpxo"]["daemon"].endswith(":v1.0.21")
    assert images["tcpx"]["plugin"].endswith(":v3.1.9") and images["tcpx"]["daemon"].endswith(":v2.0.12")
    assert images["gib"]["plugin"].endswith("nccl-plugin-gib:v1.1.1")


def _fabrics():
    return {m.fabric.name: m.fabric for family in catalogue.families().values() for m in family.machines.values()}


def test_trap_mtu():
    assert {name: fabric.mtu for name, fabric in _fabrics().items() if fabric.mtu} == {
        "gib": 8896, "gib-arm64": 8896, "tcpxo": 8244, "tcpx": 8244
    }  # fmt: skip


def test_trap_host_mounts_and_shared_memory():
    volumes = {one["name"]: one for one in pod(spec(A4, "spot"))["spec"]["volumes"]}
    assert volumes["nvidia"]["hostPath"]["path"] == "/home/kubernetes/bin/nvidia"
    assert volumes["gib"]["hostPath"]["path"] == "/home/kubernetes/bin/gib"
    # A share of the machine's memory: snapshots of a large model fill a fixed 250Gi.
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2579Gi"}


def test_trap_disruptions_are_not_charged():
    for role in ("host", "supervisor"):
        rules = job(spec(A4, "spot"), role)["podFailurePolicy"]["rules"]
        assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert job(spec(A4, "spot"), role)["template"]["spec"]["restartPolicy"] == "Never"


def test_trap_one_job_per_host():
    of = spec(A4, "spot", hosts=16, spare_hosts=2)
    (hosts,) = [one for one in jobset(of)["spec"]["replicatedJobs"] if one["name"] == "host"]
    assert hosts["replicas"] == 18 and hosts["template"]["spec"]["parallelism"] == 1
    rules = jobset(of)["spec"]["failurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJobSet"] and rules[0]["targetReplicatedJobs"] == ["supervisor"]
    assert hosts["template"]["spec"]["backoffLimit"] == 10_000, (
        "a failed host Job would end the run, or recreate it all"
    )
    assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) for rule in rules)
    assert "exclusive-topology" not in json.dumps(jobset(of))


def test_trap_success_is_the_supervisors():
    policy = jobset(spec(A4, "spot", spare_hosts=1))["spec"]["successPolicy"]
    assert policy == {"operator": "Any", "targetReplicatedJobs": ["supervisor"]}, "one of two supervisors works"


def test_trap_pod_names_fit():
    long = "a-very-long-run-name-that-fills-it-20260822-1a2b3c"
    from muster.backends.gke.manifests.placement import place

    of = place(spec(A4, "spot", hosts=1024), run_id=long, run_dir="gs://b/r", options=Options())
    for role, index in (("host", 1023), ("supervisor", 0)):
        assert len(f"{of.name}-{role}-{index}-0-abcde") <= 63


def test_trap_suspended_with_queue_label():
    found = jobset(spec(A4, "spot"))
    assert found["spec"]["suspend"] is True
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "muster-b200-spot"
    free = jobset(spec(None, None, device="cpu"), Options(kueue=False))
    assert free["spec"]["suspend"] is False and "kueue.x-k8s.io/queue-name" not in free["metadata"]["labels"]


@pytest.mark.parametrize("mode", ["flex_start_queued", "reservation", "flex_start", "spot"])
def test_trap_topology_is_the_schedulers(mode):
    """Kueue's own would evict the run when a second node is lost before the first is replaced."""
    for found in queue_objects(placement(spec(A4, mode))):
        assert found["kind"] != "Topology" and "topologyName" not in found["spec"]
    wanted = pod(spec(A4, mode))
    assert not [key for key in wanted["metadata"]["annotations"] if "topology" in key]
    terms = wanted["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == [
        "cloud.google.com/gce-topology-block",
        "cloud.google.com/gce-topology-subblock",
    ]
    labels = wanted["metadata"]["labels"] | {"jobset.sigs.k8s.io/replicatedjob-name": "host"}
    for term in terms:
        assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()


def test_trap_topology_is_of_families_whose_nodes_have_it():
    assert "affinity" not in pod(spec("g2-standard-48", "flex_start"))["spec"]


def test_trap_provisioning_request_config():
    (config,) = of_kind("ProvisioningRequestConfig", spec(A4, "flex_start_queued"))
    assert config["spec"]["provisioningClassName"] == "queued-provisioning.gke.io"
    assert config["spec"]["managedResources"] == ["nvidia.com/gpu"]
    assert config["spec"]["podSetMergePolicy"] == "IdenticalWorkloadSchedulingRequirements"
    (check,) = of_kind("AdmissionCheck", spec(A4, "flex_start_queued"))
    assert check["spec"]["controllerName"] == "kueue.x-k8s.io/provisioning-request"
    for mode in ("flex_start", "spot", "reservation"):
        assert not of_kind("AdmissionCheck", spec(A4, mode))


def test_trap_gcsfuse():
    """Data and weights alone are files; no option has a form that GCSFuse or its driver ignores or stumbles over."""
    assert not [one for one in pod(spec(A4, "spot"))["spec"]["volumes"] if "csi" in one], "the run is no mount's"
    model = {"source": "gs://example-models/llama"}
    files = [{"type": "file", "path": "/gcs/example-data/*.jsonl"}]
    of = spec(A4, "spot", model=model, data={"sources": files, "cache_dir": "gs://example-cache/c"})
    found = pod(of)
    for name in ("cpu", "memory", "ephemeral-storage"):
        assert found["metadata"]["annotations"][f"gke-gcsfuse/{name}-limit"] == "0"
    assert found["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    volumes = {
        one["csi"]["volumeAttributes"]["bucketName"]: one["csi"] for one in found["spec"]["volumes"] if "csi" in one
    }
    assert set(volumes) == {"example-models", "example-data", "example-cache"}
    assert [name for name, one in volumes.items() if not one.get("readOnly")] == ["example-cache"]
    for one in volumes.values():
        options = one["volumeAttributes"]["mountOptions"].split(",")
        assert one["driver"] == "gcsfuse.csi.storage.gke.io" and "implicit-dirs" in options
        assert not [option for option in options if ":" in option or option.endswith(("=true", "=false"))]
    assert volumes["example-models"]["volumeAttributes"]["fileCacheCapacity"] == "-1", "on the machine's local SSDs"
    small = [one for one in pod(spec("g2-standard-48", "spot", model=model))["spec"]["volumes"] if "csi" in one]
    assert "fileCacheCapacity" not in small[0]["csi"]["volumeAttributes"], "its boot disk would fill up"
    assert not any("csi" in one for one in pod(of, "supervisor")["spec"]["volumes"])
    told = resolved(placement(of))
    assert (told.model.source, told.data.cache_dir) == ("/gcs/example-models/llama", "/gcs/example-cache/c")


def test_trap_secrets_by_reference():
    text = json.dumps(run_manifests(placement(spec(A4, "spot"))))
    assert '"secretKeyRef": {"name": "muster-hugging-face"' in text and '"kind": "Secret"' not in text


@pytest.mark.parametrize(
    "named",
    [
        "gpus-in-august",
        "gpus-in-august/reservationBlocks/b1",
        "projects/example/reservations/gpus-in-august",
        "projects/org.com:example/reservations/gpus-in-august/reservationBlocks/b1",
    ],
)
def test_trap_reservation_label(named):
    """A label has no "/": the pool is tied to the block, its nodes carry the reservation's name."""
    of = spec(A4, "calendar", reservation=named)
    assert pod(of)["spec"]["nodeSelector"]["cloud.google.com/reservation-name"] == "gpus-in-august"
    assert not [one for one in findings(placement(of)) if one.error]


def test_trap_installers():
    found = {name: fabric.installers for name, fabric in _fabrics().items()}
    assert catalogue.installers_url().startswith("https://raw.githubusercontent.com/GoogleCloudPlatform/")
    assert found["gib"] == ("gpudirect-rdma/nccl-rdma-installer.yaml",)
    assert found["gib-arm64"] == ("gpudirect-rdma/nccl-rdma-installer-a4x.yaml",)
    assert found["tcpxo"][0] == "gpudirect-tcpxo/nccl-tcpxo-installer.yaml"
    # Both daemons' containers ask for no GPU: without the injector they have no /dev/nvidia*.
    injector = "nri_device_injector/nri-device-injector.yaml"
    assert injector in found["tcpxo"]
    assert found["tcpx"] == ("gpudirect-tcpx/nccl-tcpx-installer.yaml", "gpudirect-tcpx/nccl-config.yaml", injector)


def test_trap_no_stale_pins():
    text = json.dumps(catalogue.versions(), default=str) + json.dumps(
        [dict(fabric.images) for fabric in _fabrics().values()]
    )
    assert "v1beta1" not in text and "tcpgpudmarxd-dev:v1.0.12" not in text


def test_every_trap_has_a_row_in_the_documentation():
    rows = set(re.findall(r"`(test_trap_\w+)`", DOCUMENT.read_text()))
    tests = {name for name in globals() if name.startswith("test_trap_")}
    assert rows == tests


def test_nccl_environment_of_a_machine_without_gpus_is_empty():
    assert pods.nccl_environment(placement(spec(None, None, device="cpu"))) == {}
