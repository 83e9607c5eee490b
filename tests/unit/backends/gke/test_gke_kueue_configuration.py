"""Kueue's Configuration: ``up`` installs one that lets a run without a host live; ``submit`` says where another is."""

import hashlib

import pytest
from cases import placement, run_objects, spec
from fakes.kubernetes import FakeKubernetes, in_memory
from fakes.kueue_config import gates_of, kueue_config_refusals, ready_limits
from fakes.project import PINS, SITES, TEXTS, cloud_with_cluster, session

from muster.backends.gke.manifests import kueue_configuration as kueue
from muster.backends.gke.manifests.jobset import jobset
from muster.backends.gke.manifests.kueue_objects import queue_objects
from muster.backends.gke.manifests.placement import Options, mode_of
from muster.backends.gke.manifests.yaml_text import dump
from muster.backends.gke.operate.kueue_check import kueue_warnings
from muster.backends.gke.provision.cluster_objects import Objects
from muster.backends.gke.provision.software import hashes, parsed, software
from muster.core.errors import BackendError, UsageError

RELEASED = """\
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
webhook:
  port: 9443
#waitForPodsReady:
#  timeout: 5m
controller:
  groupKindConcurrency:
    Pod: 5
integrations:
  frameworks:
  - "batch/job"
  - "jobset.x-k8s.io/jobset"
"""
"""With the keys of the release, and its block about pods commented out."""
PLACE = {"name": "kueue-manager-config", "namespace": "kueue-system"}
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": PLACE, "data": {kueue.KEY: RELEASED}}
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "kueue-controller-manager", "namespace": "kueue-system"},
    "spec": {
        "replicas": 1,
        "template": {
            "metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "manager"}},
            "spec": {"containers": [{"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.2"}]},
        },
    },
}
JOBSET = {"kind": "JobSet", "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "muster"}}}


def configuration(text=RELEASED):
    return kueue.parsed(text)


def installed(*documents):
    config, deployment = (row for row in kueue.configured(documents) if row["kind"] in ("ConfigMap", "Deployment"))
    return config["data"][kueue.KEY], deployment


def test_the_release_evicts_a_run_that_is_a_host_short_and_ours_does_not():
    assert ready_limits(configuration()).recovery_s == 1800
    text, _ = installed(CONFIG_MAP, DEPLOYMENT)
    after = configuration(text)
    assert kueue_config_refusals(after) == []
    limits = ready_limits(after)
    assert (limits.start_s, limits.recovery_s) == (8760 * 3600, 0)
    gates = gates_of(after)
    assert gates["FailureRecoveryPolicy"] and gates["TopologyAwareScheduling"]
    assert not any(on for name, on in gates.items() if name.startswith(("TASFailedNode", "TASReplaceNode")))
    assert after["integrations"] == configuration()["integrations"] and after["webhook"] == {"port": 9443}


def test_one_gate_alone_would_keep_kueue_from_starting():
    text, _ = installed(CONFIG_MAP, DEPLOYMENT)
    for name in ("TASFailedNodeReplacementFailFast", "TASReplaceNodeOnPodTermination"):
        gates = {one: on for one, on in configuration(text)["featureGates"].items() if one != name}
        assert kueue_config_refusals({**configuration(text), "featureGates": gates})


def test_every_pod_lets_kueue_remove_it_from_a_node_that_hangs():
    """The gate acts on pods that say so, and on no others."""
    placement = SITES["a4"].placement
    for role in jobset(placement, mode_of(placement))["spec"]["replicatedJobs"]:
        annotations = role["template"]["spec"]["template"]["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/safe-to-forcefully-delete"] == "true"


def test_another_configuration_restarts_the_deployment_and_the_same_does_not():
    text, deployment = installed(CONFIG_MAP, DEPLOYMENT)
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations[kueue.ANNOTATION] == hashlib.sha256(text.encode()).hexdigest()
    assert annotations["kubectl.kubernetes.io/default-container"] == "manager"
    assert installed(CONFIG_MAP, DEPLOYMENT)[1] == deployment
    other = {**CONFIG_MAP, "data": {kueue.KEY: RELEASED + "metrics: {bindAddress: ':8443'}\n"}}
    assert installed(other, DEPLOYMENT)[1] != deployment
    gates = {**CONFIG_MAP, "data": {kueue.KEY: RELEASED + "featureGates: {PriorityBoost: true}\n"}}
    assert configuration(installed(gates, DEPLOYMENT)[0])["featureGates"]["PriorityBoost"] is True


@pytest.mark.parametrize("config", [[], [{**CONFIG_MAP, "data": {"other.yaml": RELEASED}}],
                                    [{**CONFIG_MAP, "data": {kueue.KEY: "a: [b"}}]])  # fmt: skip
def test_kueue_without_a_configuration_to_change_is_refused(config):
    with pytest.raises(UsageError, match="no ConfigMap kueue-manager-config with a Configuration"):
        kueue.configured([*config, DEPLOYMENT])


def test_the_pin_is_of_the_released_bytes():
    texts = {**TEXTS, "kueue.yaml": dump([CONFIG_MAP, DEPLOYMENT])}
    pins = hashes(SITES["a4"], texts)
    assert pins != PINS and pins == {**PINS, next(url for url in PINS if "/kueue/" in url): hashlib.sha256(
        texts["kueue.yaml"].encode()).hexdigest()}  # fmt: skip
    rows = software(SITES["a4"], texts, pins=pins).documents["kueue.yaml"]
    assert configuration(rows[0]["data"][kueue.KEY])["waitForPodsReady"] == kueue.WAIT
    assert parsed(SITES["a4"], texts).documents["kueue.yaml"] == rows, "a dry run shows what would be sent"


# ---------------------------------------------------------------- on somebody else's cluster


def cluster_of(fake, *, config=RELEASED, image="v0.19.2", flags=(), topology=False):
    if config is not None:
        put(fake, "api/v1/namespaces/kueue-system/configmaps", {**CONFIG_MAP, "data": {kueue.KEY: config}})
    container = {"name": "manager", "image": f"registry/kueue:{image}", "args": list(flags)}
    put(fake, "apis/apps/v1/namespaces/kueue-system/deployments",
        {**DEPLOYMENT, "spec": {"template": {"spec": {"containers": [container]}}}})  # fmt: skip
    flavor = {"kind": "ResourceFlavor", "metadata": {"name": "a4"}, "spec": {"topologyName": "t"} if topology else {}}
    put(fake, "apis/kueue.x-k8s.io/v1beta2/resourceflavors", flavor)
    return in_memory(fake)


def put(fake, path, one):
    fake.objects[f"{path}/{one['metadata']['name']}"] = one


START = "pods are not all ready 30 minutes after its admission"
SHORT = "a host short for 30 minutes is evicted, also where a spare trains on"
FIRST = "evicted when a node is lost and no other is free at once"
SECOND = "evicted when a second node is lost before the first is replaced"
OURS = installed(CONFIG_MAP, DEPLOYMENT)[0]


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({}, [START, SHORT]),
        ({"config": OURS}, []),
        ({"config": OURS, "topology": True}, [SECOND]),
        ({"topology": True}, [START, SHORT, FIRST]),
        ({"config": RELEASED + "waitForPodsReady: {timeout: 0s}\n"}, [START, SHORT]),
        ({"config": RELEASED + "waitForPodsReady: {timeout: 24h}\n"}, ["all ready 24 hours", "short for 24 hours"]),
        ({"config": RELEASED + "waitForPodsReady: {timeout: 168h, recoveryTimeout: 0s}\n"}, ["all ready 168 hours"]),
        ({"config": RELEASED + "waitForPodsReady: {timeout: 5m, recoveryTimeout: 0s}\n"}, ["all ready 5 minutes"]),
        ({"config": RELEASED + "featureGates: {DisableWaitForPodsReady: true}\n"}, []),
        ({"flags": ["--feature-gates=DisableWaitForPodsReady=true,TASFailedNodeReplacementFailFast=false"],
          "topology": True}, [SECOND]),
        ({"config": RELEASED.replace("v1beta2", "v1beta1"), "image": "v0.18.1"}, []),
        ({"config": RELEASED.replace("v1beta2", "v1beta1") + "waitForPodsReady: {enable: true, timeout: 10m}\n"},
         ["all ready 10 minutes", "a host short for 10 minutes"]),
        ({"image": "v0.18.1"}, []),
        ({"image": "custom"}, [START, SHORT]),
        ({"config": None}, [START, SHORT]),
    ],
)  # fmt: skip
def test_submit_says_where_kueue_would_end_the_run(cluster, said):
    found = kueue_warnings(cluster_of(FakeKubernetes(), **cluster), JOBSET)
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True)), found


@pytest.mark.parametrize(("hours", "warned"), [(None, 1), (200, 1), (23.9, 1), (23, 0), (0.5, 0)])
def test_a_timer_counts_where_the_run_may_outlast_it(hours, warned):
    """A run that trains without a spare, or without the supervisor that stands by, is under it to its end."""
    cluster = cluster_of(FakeKubernetes(), config=RELEASED + "waitForPodsReady: {timeout: 24h, recoveryTimeout: 0s}\n")
    assert len(kueue_warnings(cluster, JOBSET, max_hours=hours)) == warned


def test_only_the_flavours_of_the_runs_own_queue_count():
    fake = FakeKubernetes()
    cluster = cluster_of(fake, config=OURS, topology=True)
    group = {"flavors": [{"name": "other"}]}
    api = "apis/kueue.x-k8s.io/v1beta2"
    queue = {"kind": "ClusterQueue", "metadata": {"name": "cq"}, "spec": {"resourceGroups": [group]}}
    put(fake, f"{api}/clusterqueues", queue)
    local = {"kind": "LocalQueue", "metadata": {"name": "muster"}, "spec": {"clusterQueue": "cq"}}
    put(fake, f"{api}/namespaces/default/localqueues", local)
    assert kueue_warnings(cluster, JOBSET) == []
    group["flavors"].append({"name": "a4"})
    (line,) = kueue_warnings(cluster, JOBSET)
    assert SECOND in line


def test_a_run_without_a_queue_asks_nothing():
    fake = FakeKubernetes()
    assert kueue_warnings(in_memory(fake), {"kind": "JobSet", "metadata": {}}) == [] and fake.log == []


def test_who_may_not_read_is_told_so():
    class Closed(FakeKubernetes):
        def handle(self, method, target, body=b""):
            if "kueue-system" in target:
                return 403, {"kind": "Status", "message": 'configmaps is forbidden: User "dev" cannot get', "code": 403}
            return super().handle(method, target, body)

    (line,) = kueue_warnings(in_memory(Closed()), JOBSET)
    assert "cannot be read" in line and 'User "dev" cannot get' in line
    (line,) = kueue_warnings(in_memory(FakeKubernetes()), JOBSET)
    assert "is not in kueue-system/kueue-manager-config" in line


# ---------------------------------------------------------------- resource claims, and whose nodes the supervisor gets

CLAIMED = placement(spec("a4-highgpu-8g", "spot"), Options(network="claims"))
NIC = "example.com/nic"
MAPPING = {"name": NIC, "deviceClassNames": ["mrdma.google.com"]}
MAPPED = RELEASED + dump([{"resources": {"deviceClassMappings": [MAPPING]}}])
OFF = dict.fromkeys(("KueueDRAIntegration", "KueueDRAIntegrationExtendedResource",
                     "KueueDRAIntegrationPartitionableDevices"), False)  # fmt: skip


def claims_of(of=CLAIMED):
    return [one for one in run_objects(of, "", "") if one["kind"] == "ResourceClaimTemplate"]


def with_gates(**gates):
    return RELEASED + dump([{"featureGates": gates}])


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ({}, "it counts resource claims, and its deviceClassMappings do not name device class mrdma.google.com"),
        ({"image": "v0.18.1"}, "do not name device class mrdma.google.com"),
        ({"config": with_gates(**OFF)}, "it refuses resource claims while its gate KueueDRAIntegration is off"),
        ({"flags": ["--feature-gates=KueueDRAIntegration=false"]}, "while its gate KueueDRAIntegration is off"),
        ({"config": MAPPED, "covered": ["cpu"]}, "counts device class mrdma.google.com as example.com/nic, which the "
                                                 "queue does not cover"),
        ({"image": "v0.17.8", "config": with_gates(DynamicResourceAllocation=True)}, "do not name device class"),
    ],
)  # fmt: skip
def test_a_run_whose_claims_kueue_never_admits_is_refused_before_it_is_made(cluster, reason):
    covered = cluster.pop("covered", [])
    fake = FakeKubernetes()
    kubernetes = cluster_of(fake, **cluster)
    queue_of(fake, covered=covered)
    with pytest.raises(UsageError) as caught:
        kueue_warnings(kubernetes, JOBSET, claims=claims_of())
    assert str(caught.value).startswith("Kueue of this cluster never admits the run: ") and reason in str(caught.value)
    assert "KueueDRARejectWorkloadsWhenDRADisabled: false" in caught.value.hint
    kueue_warnings(kubernetes, JOBSET)  # without claims there is nothing to refuse


@pytest.mark.parametrize("cluster", [
    {"config": OURS}, {"image": "v0.16.9"}, {"image": "v0.17.8"}, {"config": MAPPED, "covered": ["cpu", NIC]},
    {"config": MAPPED}, {"config": with_gates(**OFF, KueueDRARejectWorkloadsWhenDRADisabled=False)},
])  # fmt: skip
def test_claims_that_kueue_admits(cluster):
    covered = cluster.pop("covered", None)
    fake = FakeKubernetes()
    kubernetes = cluster_of(fake, **cluster)
    if covered:
        queue_of(fake, covered=covered)
    kueue_warnings(kubernetes, JOBSET, claims=claims_of())


def test_kueue_takes_the_configuration_with_claims_left_to_the_scheduler():
    gates = gates_of(configuration(OURS))
    assert not any(on for name, on in gates.items() if name.startswith("KueueDRA"))
    alone = {**configuration(OURS), "featureGates": {"KueueDRAIntegration": False}}
    assert kueue_config_refusals(alone), "one of the four alone keeps its manager from starting"


def queue_of(fake, covered=("cpu",), flavors=()):
    api = "apis/kueue.x-k8s.io/v1beta2"
    group = {"coveredResources": list(covered), "flavors": [{"name": one["metadata"]["name"]} for one in flavors]}
    put(fake, f"{api}/clusterqueues", {"kind": "ClusterQueue", "metadata": {"name": "cq"},
                                       "spec": {"resourceGroups": [group]}})  # fmt: skip
    put(fake, f"{api}/namespaces/default/localqueues",
        {"kind": "LocalQueue", "metadata": {"name": "muster"}, "spec": {"clusterQueue": "cq"}})  # fmt: skip
    for one in flavors:
        put(fake, f"{api}/resourceflavors", one)


GPU_RUN = placement(spec("g2-standard-48", "spot"))
FLAVORS = [one for one in queue_objects(GPU_RUN) if one["kind"] == "ResourceFlavor"]


def queued_run():
    found = jobset(GPU_RUN, mode_of(GPU_RUN))
    found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "muster"
    return found


def with_queue(flavors, **cluster):
    fake = FakeKubernetes()
    kubernetes = cluster_of(fake, config=OURS, **cluster)
    queue_of(fake, flavors=flavors)
    return fake, kubernetes


def untainted(flavor):
    return {**flavor, "spec": {"nodeLabels": flavor["spec"]["nodeLabels"]}}


def test_a_queue_that_sends_the_supervisor_to_the_hosts_nodes_is_refused():
    _, kubernetes = with_queue([untainted(FLAVORS[0]), FLAVORS[1]])
    with pytest.raises(UsageError, match="gives the supervisor the hosts' flavour muster-l4-spot") as caught:
        kueue_warnings(kubernetes, queued_run())
    assert "nodeTaints" in caught.value.hint and "muster up RUN.yaml" in caught.value.hint


def test_the_queue_of_up_and_an_older_kueue_are_not():
    assert kueue_warnings(with_queue(FLAVORS)[1], queued_run()) == []
    old = [untainted(FLAVORS[0]), FLAVORS[1]]
    for image in ("v0.16.9", "v0.17.5", "v0.18.1"):
        assert kueue_warnings(with_queue(old, image=image)[1], queued_run()) == []
    for image in ("v0.17.6", "v0.18.2", "v0.19.0"):
        with pytest.raises(UsageError, match="muster-l4-spot"):
            kueue_warnings(with_queue(old, image=image)[1], queued_run())
    assert kueue_warnings(with_queue(old[::-1])[1], queued_run()) == [], "the supervisor's own flavour comes first"


def test_a_node_of_both_kinds_is_enough():
    fake, kubernetes = with_queue([untainted(FLAVORS[0])])
    labels = {**FLAVORS[0]["spec"]["nodeLabels"], **FLAVORS[1]["spec"]["nodeLabels"]}
    put(fake, "api/v1/nodes", {"kind": "Node", "metadata": {"name": "n", "labels": labels}})
    assert kueue_warnings(kubernetes, queued_run()) == []


@pytest.mark.parametrize("cluster", [{"image": "custom"}, {"config": None}])
def test_claims_are_not_refused_on_a_guess(cluster):
    (*_, line) = kueue_warnings(cluster_of(FakeKubernetes(), **cluster), JOBSET, claims=claims_of())
    assert line.startswith("it may be that Kueue of this cluster never admits the run: it counts resource claims")


def test_where_the_release_or_the_nodes_cannot_be_read_it_is_a_warning():
    old = [untainted(FLAVORS[0]), FLAVORS[1]]
    (line,) = kueue_warnings(with_queue(old, image="custom")[1], queued_run())
    assert line.startswith("it may be that Kueue gives the supervisor the hosts' flavour muster-l4-spot")
    fake, _ = with_queue(old)
    (line,) = kueue_warnings(closed(fake, "/nodes"), queued_run())
    assert line.startswith("it may be that")


def test_a_user_of_one_namespace_learns_of_claims_from_status():
    fake, _ = with_queue([untainted(FLAVORS[0]), FLAVORS[1]])
    namespaced = closed(fake, "kueue-system", "clusterqueues", "resourceflavors", "/nodes")
    (line,) = kueue_warnings(namespaced, queued_run(), claims=claims_of())
    assert "or refuse this one's resource claims (muster status says so)" in line


def closed(fake, *parts):
    """The cluster as it is for a user without rights on these."""

    class Closed(FakeKubernetes):
        def handle(self, method, target, body=b""):
            if any(part in target for part in parts):
                return 403, {"kind": "Status", "message": f'{target} is forbidden: User "dev"', "code": 403}
            return fake.handle(method, target, body)

    return in_memory(Closed())


# ---------------------------------------------------------------- up waits for it


class Slow(FakeKubernetes):
    """A cluster whose controllers need some looks, and whose webhooks answer some requests later."""

    def __init__(self, *, looks=2, refusals=2):
        super().__init__()
        self.looks, self.refusals = looks, refusals

    def handle(self, method, target, body=b""):
        name = "kueue-controller-manager"
        path = f"apis/apps/v1/namespaces/kueue-system/deployments/{name}"
        if method == "GET" and path in target and path in self.objects:
            self.looks -= 1
            ready = "True" if self.looks < 0 else "False"
            message = "Deployment does not have minimum availability."
            rows = [{"type": "Available", "status": ready, "message": message}]
            self.objects[path]["status"] = {"conditions": rows, "updatedReplicas": 1, "replicas": 1}
        if "dryRun=All" in target and self.looks < 0 and self.refusals > 0:
            self.refusals -= 1
            message = 'Internal error occurred: failed calling webhook "v.kb.io": no endpoints available for service'
            return 500, {"kind": "Status", "message": message, "code": 500}
        return super().handle(method, target, body)


def objects():
    return Objects(site=SITES["a4"], key="software/kueue", manifests=(CONFIG_MAP, DEPLOYMENT))


def on(kubernetes):
    google = cloud_with_cluster()
    google.kubernetes = kubernetes
    return google


def test_controllers_and_their_webhooks_are_waited_for():
    kubernetes = Slow(looks=3, refusals=2)
    resource = objects()
    resource.make(session(on(kubernetes)))
    assert kubernetes.looks < 0 and kubernetes.refusals == 0
    assert "flavor" not in str(list(kubernetes.objects)), "the probe is a dry run"
    assert resource.look(session(on(kubernetes))).state == "there"


def test_what_is_not_ready_in_five_minutes_is_named():
    kubernetes = Slow(looks=10**6)
    watched = session(on(kubernetes))
    with pytest.raises(BackendError, match="kueue-system/kueue-controller-manager is not ready after 5 minutes: "
                       "Deployment does not have minimum availability"):  # fmt: skip
        objects().make(watched)
    assert 300 <= watched.clock.monotonic_ns() / 1e9 < 320
    kubernetes.looks = 3
    assert objects().look(watched).state == "changing", "an interrupted up waits for it the next time"
    objects().settle(watched)
    kubernetes.refusals = 10**6
    with pytest.raises(BackendError, match=r"is not ready after 5 minutes: .*failed calling webhook"):
        objects().settle(watched)


@pytest.mark.parametrize("status", [{"observedGeneration": 1}, {"updatedReplicas": 0}, {"replicas": 2}])
def test_pods_of_an_older_configuration_do_not_count(status):
    """Until the new pods run, the old ones are available, with the Configuration of before."""
    rows = [{"type": "Available", "status": "True"}]
    there = {"observedGeneration": 2, "updatedReplicas": 1, "replicas": 1, "conditions": rows}
    held = {**DEPLOYMENT, "metadata": {**DEPLOYMENT["metadata"], "generation": 2}, "status": there}

    def state(of):
        plain = FakeKubernetes()
        put(plain, "api/v1/namespaces/kueue-system/configmaps", CONFIG_MAP)
        put(plain, "apis/apps/v1/namespaces/kueue-system/deployments", {**held, "status": of})
        return objects().look(session(on(plain))).state

    assert (state(there), state({**there, **status})) == ("there", "changing")
