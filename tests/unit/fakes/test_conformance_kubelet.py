"""The played kubelet: the order in which a pod begins and ends, and what it says meanwhile, without a process.

What needs processes, mounts and an API server is in ``tests/live/test_kubelet_live.py``.
"""

import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "live" / "kube"))
import gcsfuse_volumes
import pod as pods
import volumes


class PlayedContainer:
    """Ends when it is told to, unless it is deaf; "place" ends at once."""

    def __init__(self, node, pod, spec, folder, places):
        self.name, self.since, self.tell = spec["name"], "t", node.tell
        self.ended, self.code, self.deaf = threading.Event(), 0, spec.get("deaf", False)
        self.tell(self.name)
        places.environment(spec)
        if self.name == "place":
            self.ended.set()

    runs = property(lambda self: not self.ended.is_set())

    def signal(self, number):
        if number == signal.SIGKILL or not self.deaf:
            self.tell(f"{self.name} {signal.Signals(number).name}")
            self.code = 137 if number == signal.SIGKILL else 0
            self.ended.set()

    def wait(self):
        self.ended.wait()
        return self.code

    def wait_until(self, deadline):
        return self.ended.wait(max(0, deadline - time.monotonic()))


class PlayedNode:
    """The node and its API server, in memory."""

    def __init__(self, folder):
        self.folder, self.logs, self.machine = folder, folder, "e2-standard-4"
        self.options = SimpleNamespace(
            name="node1", ip="10.0.0.7", address_s=0.05, pull_s=0.05, unauthenticated_s=0.2, gcsfuse="3.11.2",
            gcsfuse_start_s=1.5, netns="n",
        )  # fmt: skip
        self.api, self.pods, self.images = self, {}, set()
        self.told, self.statuses, self.said, self.objects = [], [], [], {}
        (folder / "from-pods").write_text("10.0.0.1:443")
        (folder / "server.pem").write_text("")

    def tell(self, word):
        self.told.append(word)

    def event(self, manifest, kind, reason, message):
        self.said.append((reason, message))

    def pulled(self, pod, image):
        self.tell(f"pull {image}")
        return not pod.ending.wait(self.options.pull_s)

    def get(self, path):
        return self.objects.get(path)

    def call(self, method, path, body=None, kind=""):
        if method == "PATCH":
            self.statuses.append(body["status"])
        elif method == "POST" and path.endswith("/token"):
            return 201, {"status": {"token": body["spec"]["boundObjectRef"]["name"]}}
        elif method == "POST":
            self.objects[f"{path}/{body['metadata']['name']}"] = body
            return 201, {"metadata": {**body["metadata"], "uid": "u"}}
        elif method == "DELETE":
            self.tell(f"delete {path.rpartition('/')[2]}")
            self.objects.pop(path, None)
        return 200, {}

    patiently = call


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setattr(pods, "Container", PlayedContainer)
    monkeypatch.setattr(volumes, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(pods, "LEFT_FOR_SIDECARS_S", 0.3)
    return PlayedNode(tmp_path)


def manifest(*, inits=(), mains=("main",), annotations=None, **spec):
    def container(name):
        return {"name": name, "image": f"image-of-{name}", "deaf": name == "deaf"}

    native = {name: {"restartPolicy": "Always"} for name in inits if name.startswith("side")}
    return {
        "metadata": {"name": "a", "namespace": "default", "uid": "uid-1", "annotations": annotations or {}},
        "spec": {"initContainers": [container(name) | native.get(name, {}) for name in inits],
                 "containers": [container(name) for name in mains], **spec},
    }  # fmt: skip


class Running:
    def __init__(self, node, made):
        self.node, self.pod = node, pods.Pod(node, made)
        node.pods[self.pod.uid] = self.pod
        self.thread = threading.Thread(target=self.pod.run, daemon=True)
        self.thread.start()

    def until(self, test):
        limit = time.monotonic() + 10
        while not test():
            assert time.monotonic() < limit, (self.node.told, self.node.said, self.node.statuses[-1:])
            time.sleep(0.01)

    def phase(self):
        return self.node.statuses[-1]["phase"] if self.node.statuses else ""

    def end(self, grace_s):
        self.pod.end(grace_s)
        self.thread.join(10)


def test_row_17_sidecars_begin_first_and_end_last(node):
    one = Running(node, manifest(inits=("side1", "side2", "place")))
    one.until(lambda: one.phase() == "Running")
    assert [word for word in node.told if not word.startswith("pull")] == ["side1", "side2", "place", "main"]
    node.told.clear()
    one.end(5)
    assert node.told == ["main SIGTERM", "side2 SIGTERM", "side1 SIGTERM", "delete a"]
    assert not node.pods and one.phase() == "Succeeded"


def test_row_17_the_annotation_names_sidecars_where_the_api_server_drops_the_field(node):
    made = manifest(inits=("daemon", "place"), annotations={pods.SIDECARS: "daemon"})
    one = Running(node, made)
    one.until(lambda: one.phase() == "Running")
    node.told.clear()
    one.end(5)
    assert node.told == ["main SIGTERM", "daemon SIGTERM", "delete a"]


def test_row_17_the_grace_period_is_everybodys(node):
    one = Running(node, manifest(inits=("side1",), mains=("deaf",)))
    one.until(lambda: one.phase() == "Running")
    node.told.clear()
    began = time.monotonic()
    one.end(0.3)
    assert time.monotonic() - began < 2
    assert set(node.told) == {"deaf SIGKILL", "side1 SIGKILL", "delete a"}


def test_row_17_containers_decide_how_a_pod_ended(node):
    one = Running(node, manifest(inits=("side1",), mains=("main", "other")))
    one.until(lambda: one.phase() == "Running")
    one.pod.held["side1"].signal(signal.SIGKILL)
    time.sleep(0.1)
    assert one.phase() == "Running"
    for name in ("main", "other"):
        one.pod.held[name].signal(signal.SIGTERM)
    one.until(lambda: one.phase() == "Succeeded")


def test_row_17_a_pod_with_buckets_gets_the_sidecar_first(tmp_path):
    made = manifest(inits=("place",), annotations={"gke-gcsfuse/volumes": "true"}, volumes=[{"name": "b", "csi": {}}])
    (found,) = gcsfuse_volumes.sidecar(made, tmp_path)
    assert (found["name"], found["restartPolicy"]) == ("gke-gcsfuse-sidecar", "Always")
    assert gcsfuse_volumes.sidecar(manifest(volumes=[{"name": "b", "csi": {}}]), tmp_path) == []
    assert gcsfuse_volumes.sidecar(manifest(annotations={"gke-gcsfuse/volumes": "true"}), tmp_path) == []


def test_row_19_an_address_comes_late_and_images_take_their_time(node):
    one = Running(node, manifest(inits=("place",)))
    one.until(lambda: one.phase() == "Running")
    assert "podIP" not in node.statuses[0] and node.statuses[1]["podIP"] == "10.0.0.7"
    reasons = [row["state"]["waiting"]["reason"] for row in node.statuses[0]["containerStatuses"]]
    assert reasons == ["PodInitializing"]
    assert node.told.index("pull image-of-place") < node.told.index("place") < node.told.index("pull image-of-main")
    one.end(1)
    alone = Running(node, manifest())
    alone.until(lambda: alone.phase() == "Running")
    first = next(one for one in node.statuses if not one["initContainerStatuses"])
    assert first["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"


def test_row_19_volumes_that_are_not_there_yet_are_tried_again(node, monkeypatch):
    (node.folder / "bucket-server").write_text("http://127.0.0.1:1")
    csi = {"driver": "d", "volumeAttributes": {"bucketName": "bucket"}}
    wanted = [{"name": "b", "csi": csi}, {"name": "files", "configMap": {"name": "c"}}]
    made = []

    def mounted(*_, **options):
        if not made:
            made.append(None)
            raise gcsfuse_volumes.Refused("NotFound", "no bucket")
        made.append(options)
        return SimpleNamespace(remove=lambda: node.tell("unmounted"))

    monkeypatch.setattr(gcsfuse_volumes, "BucketVolume", mounted)
    monkeypatch.setattr(gcsfuse_volumes, "offer", lambda *_: node.tell("offered"))
    one = Running(node, manifest(annotations={"gke-gcsfuse/volumes": "true"}, volumes=wanted))
    one.until(lambda: len(made) > 1)
    time.sleep(0.2)
    assert one.phase() == "Pending"
    node.objects["/api/v1/namespaces/default/configmaps/c"] = {"data": {"k": "v"}}
    one.until(lambda: one.phase() == "Running")
    said = [message for reason, message in node.said if reason == "FailedMount"]
    assert any('volume "b" : rpc error: code = Unauthenticated' in message for message in said)
    assert any("code = NotFound desc = no bucket" in message for message in said)
    assert any('configmap "c" not found' in message for message in said)
    assert made[1]["machine"] == "e2-standard-4" and made[1]["hang_s"] == 1.5
    assert node.told.index("offered") < node.told.index("gke-gcsfuse-sidecar") < node.told.index("main")
    one.end(1)
    assert node.told[-2:] == ["unmounted", "delete a"]


def test_row_19_a_pod_that_is_deleted_before_it_began_goes_at_once(node):
    one = Running(node, manifest(volumes=[{"name": "files", "secret": {"secretName": "never"}}]))
    one.until(lambda: node.said)
    one.end(30)
    assert node.told == ["delete a"] and one.phase() == "Pending"


def test_row_19_a_secret_that_is_missing_in_the_environment_is_waited_for(node):
    made = manifest()
    source = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    made["spec"]["containers"][0]["env"] = [{"name": "X", **source}]
    one = Running(node, made)
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "s" not found'}
    one.until(lambda: any(each["containerStatuses"][0]["state"].get("waiting") == waiting for each in node.statuses))
    node.objects["/api/v1/namespaces/default/secrets/s"] = {"data": {"k": "dg=="}}
    one.until(lambda: one.phase() == "Running")
    one.end(1)


def test_row_20_a_token_rotates_in_its_file_and_the_old_one_is_worth_nothing(node):
    one = Running(node, manifest(serviceAccountName="muster"))
    one.until(lambda: one.phase() == "Running")
    file = Path(one.pod.volumes.places["account"]) / "token"
    old = file.read_text()
    assert f"/api/v1/namespaces/default/secrets/{old}" in node.objects  # what it is bound to
    one.pod.volumes.rotate_token()
    new = file.read_text()
    assert new != old and f"/api/v1/namespaces/default/secrets/{old}" not in node.objects
    one.end(1)
    assert not node.objects  # its last one goes with the pod
