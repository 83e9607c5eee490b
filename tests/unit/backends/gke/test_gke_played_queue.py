"""Every rendering goes through the played queue of ``up``: hosts to their machines, supervisors to CPU nodes."""

import copy
import re

import pytest
from cases import cases, placement, run_objects, spec
from fakes.kubernetes import in_memory
from fakes.plane import Play, phase
from fakes.project import cloud_with_cluster, session, where

from muster.backends.gke.manifests import kueue_configuration as kueue
from muster.backends.gke.manifests.kueue_objects import CPU_FLAVOR, queue_objects
from muster.backends.gke.manifests.yaml_text import dump
from muster.backends.gke.operate.cluster_snapshot import take_snapshot
from muster.backends.gke.operate.status_reason import explain
from muster.backends.gke.provision.cluster_objects import Objects
from muster.core.types import JobState

QUEUED = {name: of for name, of in cases().items() if of.kueue}
CPU_POOL = {"cloud.google.com/gke-nodepool": "muster-cpu"}
PLACE = {"name": kueue.CONFIG_MAP, "namespace": kueue.NAMESPACE}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {}},
              "metadata": {"name": kueue.DEPLOYMENT, "namespace": kueue.NAMESPACE}}  # fmt: skip


def as_up_configures_kueue():
    text = dump([{"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration"}])
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": PLACE, "data": {kueue.KEY: text}}
    return kueue.configured([config, DEPLOYMENT])[0]


def as_before(objects):
    """A queue that an older ``up`` made: the hosts' flavour had no taint."""
    found = copy.deepcopy(objects)
    for one in found:
        if one["kind"] == "ResourceFlavor":
            one["spec"].pop("nodeTaints", None)
    return found


def play(of, objects=None):
    labels = next(one["spec"]["nodeLabels"] for one in queue_objects(of) if one["kind"] == "ResourceFlavor")
    return Play(as_up_configures_kueue(), *(objects or queue_objects(of)), *run_objects(of, "", ""),
                pools=[labels, CPU_POOL])  # fmt: skip


def admit(run):
    """Its queue, its DWS request answered where there is one, and its pods on nodes."""
    run.run()
    jobset = run.server.of_kind("JobSet")[-1]["metadata"]["name"]
    if (request := run.kueue.provisioning.newest(jobset)) is not None:
        run.kueue.provisioning.accept(request)
        run.kueue.provisioning.provision(request)
        run.run()


def assigned(workload):
    rows = workload["status"]["admission"]["podSetAssignments"]
    return {row["name"]: set(row["flavors"].values()) for row in rows}


def goes_right(run, of):
    assert assigned(run.one("Workload")) == {"supervisor": {CPU_FLAVOR}, "host": {of.queue_objects}}
    assert len(run.pods("supervisor")) == of.supervisors and len(run.pods("host")) == of.hosts
    assert all(pod["spec"]["nodeSelector"] == CPU_POOL for pod in run.pods("supervisor"))
    assert {phase(pod) for pod in run.pods()} == {"Running"}


@pytest.mark.parametrize("name", QUEUED)
def test_every_rendering_is_admitted_with_its_supervisor_on_cpu_nodes(name):
    run = play(QUEUED[name])
    admit(run)
    goes_right(run, QUEUED[name])


@pytest.mark.parametrize("name", ["a4-flex-start-queued", "g2-spot", "tpu-v5e-4x4-spot", "a4-spot-claims"])
def test_an_older_kueue_admits_it_the_same_way(name):
    """0.16.9, 0.17.5 and 0.18.1 compare labels in another way."""
    run = play(QUEUED[name])
    run.kueue.own_keys = False
    admit(run)
    goes_right(run, QUEUED[name])


# ---------------------------------------------------------------- a queue of an older ``up``


def seen(run, of, **more):
    found = take_snapshot(in_memory(run.server), of.options.namespace, of.run_id)
    return explain(type(found)(**{**vars(found), **more}))


def test_a_run_that_an_old_queue_has_admitted_wrongly_is_to_be_submitted_again_at_its_cost_so_far():
    of = QUEUED["g2-spot"]
    run = play(of, as_before(queue_objects(of)))
    run.run()
    run.run(50)
    found = seen(run, of, usd_per_host_hour=1.5)
    assert found.state is JobState.WAITING
    assert found.sentence == (
        "the run cannot start: Kueue gave the supervisor the hosts' flavour muster-l4-spot, and no node is of that and "
        "its own pool; 1 host node bills meanwhile, about $1.50 an hour"
    )  # the played node takes every pod
    assert found.hint.endswith(f"then submit again: muster down {of.run_id} && muster submit RUN.yaml")


def test_a_supervisor_without_a_node_is_named_with_the_cost_of_the_hosts():
    of = QUEUED["g2-spot"]
    run = play(of)
    run.pools = run.pools[:1]  # no CPU pool
    run.run()
    run.run(50)
    assert seen(run, of, usd_per_host_hour=1.5).sentence == (
        "the supervisor has no node: no node fits (0/4 nodes are available: 4 node(s) didn't match Pod's node "
        "affinity/selector); 1 host node bills meanwhile, about $1.50 an hour"
    )


def test_a_supervisor_whose_node_is_being_made_is_none_of_these():
    of = QUEUED["g2-spot"]
    run = play(of)
    run.pools = run.pools[:1]
    run.run()
    name = run.pod("supervisor")["metadata"]["name"]
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": "default"},
             "reason": "TriggeredScaleUp", "involvedObject": {"name": name}}  # fmt: skip
    run.plane.call("POST", "/api/v1/namespaces/default/events", event)
    assert "a node is being created" in seen(run, of).sentence


def test_processors_of_one_flavour_whose_node_is_not_there_yet_are_only_waited_for():
    """A queue of their own, whose label the CPU pool's nodes carry too."""
    of = placement(spec(None, "owned", device="cpu", queue="research"))
    label = {"example.com/kind": "processors"}
    objects = copy.deepcopy([one for one in queue_objects(of) if one["metadata"]["name"] != CPU_FLAVOR])
    for one in objects:
        if one["kind"] == "ResourceFlavor":
            one["spec"] = {"nodeLabels": label}
        if one["kind"] == "ClusterQueue":
            del one["spec"]["resourceGroups"][0]["flavors"][1]
    run = Play(as_up_configures_kueue(), *objects, *run_objects(of, "", ""), pools=[])
    run.run()
    assert seen(run, of).sentence.startswith("waiting for 4 of 4 pods: no node fits")
    run.pools = [{**label, **CPU_POOL}]
    run.run()
    assert seen(run, of).state is JobState.RUNNING


def test_the_next_up_repairs_an_old_queue_for_what_waits_in_it():
    site = where(hosts=2)
    of = site.placement
    run = play(of, as_before(queue_objects(of)))
    run.kueue.hold = True
    run.run()
    google = cloud_with_cluster()
    google.kubernetes = run.server
    up = Objects(site=site, key="objects/queue", manifests=tuple(queue_objects(of)))
    assert up.look(session(google)).state == "absent", "another queue than it makes now"
    up.make(session(google))
    assert up.look(session(google)).state == "there"
    run.kueue.hold = False
    admit(run)
    goes_right(run, of)


def test_the_next_up_leaves_a_run_alone_that_it_has_admitted_before():
    site = where(hosts=2)
    of = site.placement
    run = play(of, as_before(queue_objects(of)))
    admit(run)
    before = copy.deepcopy(run.one("Workload")["status"]["admission"])
    google = cloud_with_cluster()
    google.kubernetes = run.server
    Objects(site=site, key="objects/queue", manifests=tuple(queue_objects(of))).make(session(google))
    run.run()
    assert run.one("Workload")["status"]["admission"] == before
    assert re.search(r"the run cannot start: .*; \d host nodes? bills? meanwhile$", seen(run, of).sentence)


# ---------------------------------------------------------------- waiting and too large


@pytest.mark.parametrize("own_keys", [True, False])
def test_a_run_behind_another_waits_in_every_release(own_keys):
    of = QUEUED["g2-spot"]
    run = play(of)
    run.kueue.own_keys = own_keys
    admit(run)
    second = placement(spec("g2-standard-48", "spot"))
    jobset = copy.deepcopy(run_objects(second, "", "")[-1])
    jobset["metadata"]["name"] = "next"
    jobset["metadata"]["labels"]["app.kubernetes.io/instance"] = "next"
    run.add(jobset)
    run.run()
    found = explain(take_snapshot(in_memory(run.server), "default", "next"))
    assert found.sentence == (
        "waiting for Kueue quota: couldn't assign flavors to pod set host: insufficient unused quota for "
        "nvidia.com/gpu in flavor muster-l4-spot, 8 more needed"
    )


@pytest.mark.parametrize("own_keys", [True, False])
def test_a_run_larger_than_its_queue_never_starts_in_any_release(own_keys):
    of = QUEUED["g2-spot"]
    objects = copy.deepcopy(queue_objects(of))
    (queue,) = (one for one in objects if one["kind"] == "ClusterQueue")
    queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][3]["nominalQuota"] = 4
    run = play(of, objects)
    run.kueue.own_keys = own_keys
    run.run()
    assert seen(run, of).sentence == (
        "Kueue can never admit the run, which is larger than its queue: couldn't assign flavors to pod set host: "
        "insufficient quota for nvidia.com/gpu in flavor muster-l4-spot, previously considered podsets requests (0) + "
        "current podset request (8) > maximum capacity (4)"
    )
