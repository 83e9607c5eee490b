"""The Helm chart: linted and installed by a real Helm, its objects those of the plain rendering."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import RUN_DIR, RUN_ID, Options, placement, spec
from fakes.kubernetes import FakeKubernetes, serve

from muster.backends.gke.manifests.helm_chart import chart
from muster.backends.gke.manifests.render import cluster_objects, run_manifests
from muster.config.load import loads
from muster.config.spec import RunSpec

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
pytestmark = pytest.mark.reads("tests/golden/helm/**")
B200 = spec("a4-highgpu-8g", "flex_start_queued")


@pytest.fixture(scope="module")
def helm():
    return pytest.importorskip("helm_sdkpy", reason="helm-sdkpy (a real Helm) is not installed")


def written(folder, of):
    for name, text in chart(of, run_id=RUN_ID, run_dir=RUN_DIR).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def installed(helm, path, values):
    """The manifest of a release, as Helm rendered it."""
    with serve(FakeKubernetes()) as kubeconfig:
        return release(helm, kubeconfig, path, values)


def configured(helm, path, kubeconfig, namespace="default"):
    path.write_text(kubeconfig)
    return helm.Configuration(kubeconfig=str(path), namespace=namespace)


def release(helm, kubeconfig, path, values, namespace="default"):
    action = helm.Install(configured(helm, Path(path).parent / "kubeconfig", kubeconfig, namespace))
    found = asyncio.run(action.run("run", path, values=values, wait=False))
    return named(yaml.load_all(found["manifest"], Loader=yaml.CSafeLoader))


def named(objects):
    return {(one["kind"], one["metadata"]["name"]): one for one in objects if one}


def plain(of):
    """Without the role that reads nodes: it is the cluster's own, and Helm lets one release own it."""
    where = placement(of)
    objects = named([*cluster_objects(where), *run_manifests(where)])
    return {name: one for name, one in objects.items() if not one["kind"].startswith("ClusterRole")}


def without_networks(objects):
    """Helm asks an API server at most five times a second: eighteen objects less are seconds less."""
    return {name: one for name, one in objects.items() if one["kind"] not in NETWORKS}


def comparable(objects):
    """The run file's two texts as data: Go writes the same JSON in other words (2.0 is 2)."""
    for one in objects.values():
        if one["kind"] == "ConfigMap":
            one["data"] = {
                "resolved.json": RunSpec.model_validate(json.loads(one["data"]["resolved.json"]), strict=False),
                "run.yaml": loads(one["data"]["run.yaml"], environment=False).spec,
            }
    return objects


PRIORITY = {"supervisorPriority": "muster-supervisor"}
QUEUE = {**PRIORITY, "createQueue": True, "createServiceAccount": True, "createSupervisorPriority": True}
NETWORKS = ("Network", "GKENetworkParamSet")
MACHINES = ["a4-highgpu-8g", "g2-standard-48"]


@pytest.mark.parametrize("machine", MACHINES)
def test_its_own_values_give_the_plain_objects(helm, tmp_path, machine):
    of = spec(machine, "flex_start_queued")
    everything = {**QUEUE, "createNetworks": True}
    assert comparable(installed(helm, written(tmp_path / "chart", of), everything)) == comparable(plain(of))


@pytest.mark.parametrize("mode", ["spot", "flex_start", "reservation", "calendar"])
def test_one_value_changes_the_mode(helm, tmp_path, mode):
    values, changes = {**QUEUE, "mode": mode}, {}
    if mode in ("reservation", "calendar"):
        changes["reservation"] = values["reservation"] = f"projects/example/reservations/{mode}/reservationBlocks/b1"
    found = installed(helm, written(tmp_path / "chart", B200), values)
    assert comparable(found) == comparable(without_networks(plain(spec("a4-highgpu-8g", mode, **changes))))


def test_a_model_that_is_copied_once(helm, tmp_path):
    model = {"source": "meta-llama/Llama-3.1-70B", "weights": "bucket"}
    of = spec("a4-highgpu-8g", "flex_start_queued", model=model)
    found = installed(helm, written(tmp_path / "chart", of), PRIORITY)
    assert found["JobSet", RUN_ID] == plain(of)["JobSet", RUN_ID]


@pytest.mark.parametrize(
    ("mode", "hours"),
    [("flex_start_queued", 0.5), ("flex_start_queued", 10), ("flex_start_queued", 168), ("flex_start_queued", None),
     ("flex_start", 10), ("spot", 10)],
)  # fmt: skip
def test_hours_are_asked_for_and_left_alike(helm, tmp_path, mode, hours):
    of = spec("a4-highgpu-8g", "flex_start_queued", limits={"max_hours": hours})
    found = installed(helm, written(tmp_path / "chart", of), {**PRIORITY, "mode": mode})
    wanted = plain(spec("a4-highgpu-8g", mode, limits={"max_hours": hours}))["JobSet", RUN_ID]
    assert found["JobSet", RUN_ID] == wanted


def test_the_shortest_allocation_is_left_too(helm, tmp_path):
    found = installed(helm, written(tmp_path / "chart", B200), {"maxRunDurationSeconds": 600})
    pod = found["JobSet", RUN_ID]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    words = pod["containers"][0]["command"]
    assert words[words.index("--leave-after-s") + 1] == "300", "0 would be never"


def test_one_value_moves_the_run_and_its_checkpoints(helm, tmp_path):
    of = spec("a4-highgpu-8g", "flex_start_queued", checkpoint={}, run_dir="gs://b/here")
    found = installed(helm, written(tmp_path / "chart", of), {"home": "gs://b/there"})
    assert (
        json.loads(found["ConfigMap", f"{RUN_ID}-run"]["data"]["resolved.json"])["checkpoint"]["dir"]
        == "gs://b/there/checkpoints"
    )
    host = found["JobSet", RUN_ID]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    assert host["initContainers"][-1]["command"][-2:] == ["--home", "gs://b/there"]


def test_one_value_changes_the_number_of_nodes(helm, tmp_path):
    found = installed(helm, written(tmp_path / "chart", B200), {**QUEUE, "hosts": 5, "spareHosts": 1})
    wanted = spec("a4-highgpu-8g", "flex_start_queued", hosts=5, spare_hosts=1)
    assert comparable(found) == comparable(without_networks(plain(wanted)))


def test_one_value_makes_it_lora(helm, tmp_path):
    found = installed(helm, written(tmp_path / "chart", B200), {"tuning": "lora"})
    resolved = json.loads(found["ConfigMap", f"{RUN_ID}-run"]["data"]["resolved.json"])
    wanted = {
        "alpha": 32,
        "dora": False,
        "dropout": 0,
        "rank": 16,
        "rslora": False,
        "targets": "all-linear",
        "train_embeddings": None,
    }
    assert resolved["model"]["lora"] == wanted


def test_a_cluster_without_the_priority_class_takes_the_chart_as_it_is(helm, tmp_path):
    """A pod of a class that is not there is refused, and Kueue makes no Workload: nothing would say why."""
    of = spec("g2-standard-48", "spot")
    found = installed(helm, written(tmp_path / "chart", of), {"createServiceAccount": True})
    assert "priorityClassName" not in json.dumps(list(found.values()))
    assert ("ServiceAccount", "muster") in found and not [name for name in found if name[0] == "PriorityClass"]


def test_two_teams_install_it_in_two_namespaces(helm, tmp_path):
    """The class is the cluster's, so one release makes it; the account is each namespace's own."""
    of = spec("g2-standard-48", "spot")
    path = written(tmp_path / "chart", of)
    with serve(FakeKubernetes()) as kubeconfig:
        rank = {"supervisorPriority": "theirs"}
        one = release(helm, kubeconfig, path, {**rank, "createServiceAccount": True, "createSupervisorPriority": True})
        two = release(helm, kubeconfig, path, {**rank, "createServiceAccount": True}, "team")
    assert ("PriorityClass", "theirs") in one and ("PriorityClass", "theirs") not in two
    assert one["ServiceAccount", "muster"]["metadata"]["namespace"] == "default"
    assert two["ServiceAccount", "muster"]["metadata"]["namespace"] == "team"
    for found in (one, two):
        pod = found["JobSet", RUN_ID]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert pod["priorityClassName"] == "theirs"


UPGRADE = """
import asyncio, http.client, json, sys
import helm_sdkpy as helm
kubeconfig, old, new, values, server = sys.argv[1:]
configuration = helm.Configuration(kubeconfig=kubeconfig, namespace="default")
asyncio.run(helm.Install(configuration).run("run", old, values=json.loads(values), wait=False))
connection = http.client.HTTPConnection(server)
connection.request("GET", "/now-the-upgrade")
connection.getresponse()
asyncio.run(helm.Upgrade(configuration).run("run", new, values=json.loads(values), wait=False))
"""


def test_a_release_of_the_earlier_chart_upgrades_in_place(helm, tmp_path):
    """The chart that commit 331955c5 rendered, then today's: no object is made again, none goes. In a process of its
    own: Helm looks up where it keeps releases when that begins, and our API server keeps none."""
    old = Path(__file__).parents[3] / "golden" / "helm" / "chart_331955c5"
    new = written(tmp_path / "chart", spec("g2-standard-48", "flex_start_queued"))
    values, kubernetes = json.dumps({**QUEUE, "createNetworks": True}), FakeKubernetes()
    with serve(kubernetes) as kubeconfig:
        (tmp_path / "kubeconfig").write_text(kubeconfig)
        server = json.loads(kubeconfig)["clusters"][0]["cluster"]["server"].removeprefix("http://")
        argv = [sys.executable, "-c", UPGRADE, str(tmp_path / "kubeconfig"), str(old), new, values, server]
        done = subprocess.run(argv, env={**os.environ, "HELM_DRIVER": "memory"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    upgrade = kubernetes.log.index(("GET", "now-the-upgrade"))
    made = [int(one["metadata"]["uid"].removeprefix("uid-")) for one in kubernetes.objects.values()]
    assert len(made) > 10 and max(made) <= upgrade
    assert "DELETE" not in {method for method, _ in kubernetes.log}
    assert sum(method == "PATCH" for method, _ in kubernetes.log[upgrade:]) >= 5, "it changed nothing"


def test_more_environment(helm, tmp_path):
    found = installed(helm, written(tmp_path / "chart", B200), {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]})
    host = found["JobSet", RUN_ID]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert host["env"][-1] == {"name": "NCCL_DEBUG", "value": "INFO"}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"hostss": 3}, "hostss"),
        ({"hosts": 0}, "hosts"),
        ({"mode": "on_demand"}, "mode"),
        ({"tuning": "half"}, "tuning"),
        ({"runId": "Not A Name"}, "runId"),
        ({"runId": "a" * 43}, "runId"),
        ({"maxRunDurationSeconds": 604801}, "maxRunDurationSeconds"),
        ({"reservation": "projects/p/r"}, "reservation"),
        ({"home": "/gcs/b/r"}, "home"),
    ],
)
def test_the_schema_refuses(helm, tmp_path, values, complaint):
    with pytest.raises(helm.InstallError, match=complaint):
        installed(helm, written(tmp_path / "chart", B200), values)


def test_lint_has_no_complaint_but_the_icon(helm, tmp_path):
    found = asyncio.run(helm.Lint(helm.Configuration()).run(written(tmp_path / "chart", B200)))
    assert found["TotalChartsLinted"] == 1 and not found["Errors"]
    assert [(one["Severity"], one["Path"]) for one in found["Messages"]] == [(1, "Chart.yaml")]


def test_a_claim_has_no_home_to_choose():
    """Without a bucket the run lives on a volume, and the schema knows no ``home``."""
    of = spec("g2-standard-48", "spot")
    files = chart(of, run_id=RUN_ID, run_dir="/muster-runs/here", options=Options(run_claim="claim"))
    assert "home" not in json.loads(files["values.schema.json"])["properties"]
    assert "home" not in yaml.safe_load(files["values.yaml"]) and "@home@" not in files["files/objects.json"]
