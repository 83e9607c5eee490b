"""The played kubelet on a real API server: buckets by the double of gcsfuse, sidecars, what takes its time, tokens."""

import contextlib
import shlex
import sys
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kube"))
from cluster import Network, namespaces_work
from gcsfuse import why_not
from kubelet_http import played
from plane import Plane, programs

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"


@pytest.fixture(scope="module")
def fake():
    pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
    from fakes.gcs import GcsFake

    with GcsFake(host="0.0.0.0") as found:  # kind: what is slow here is the kubelet's doing
        yield found


@pytest.fixture(scope="module")
def plane(tmp_path_factory, fake):
    binaries, why_no_plane = programs()
    if binaries is None or why_not() or not namespaces_work():
        pytest.skip(why_no_plane or why_not() or "network namespaces need root and iproute2")
    folder = tmp_path_factory.mktemp("kubelet") / "plane"
    with Plane(binaries, folder, Network(["node1"])) as found:
        (found.dir / "bucket-server").write_text(fake.url_at(found.network.bridge))
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}}
        found.apply("/api/v1/namespaces/default/serviceaccounts/reader", account)
        yield found
    assert str(folder) not in Path("/proc/mounts").read_text()
    left = [one for one in Path("/proc").glob("[0-9]*/cmdline") if str(folder) in read(one)]
    assert not left, [read(one) for one in left]


def read(path):
    with contextlib.suppress(OSError):
        return path.read_text().replace("\0", " ")
    return ""


def pod(name, script, *, init=(), volumes=(), annotations=None, **spec):
    """One container that runs a shell script; ``init`` are (name, script, is a sidecar)."""
    mounts = [{"name": one["name"], "mountPath": f"/gcs/{one['name']}"} for one in volumes]
    sidecars = ",".join(one for one, _, native in init if native)

    def container(one, text):
        return {"name": one, "image": "i", "command": ["bash", "-c", text], "volumeMounts": mounts}

    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": {"gke-gcsfuse/volumes": "true", "played/native-sidecars": sidecars,
                                                   **(annotations or {})}},
        "spec": {
            "nodeName": "node1", "restartPolicy": "Never", "terminationGracePeriodSeconds": 4, "volumes": [*volumes],
            "initContainers": [container(one, text) for one, text, _ in init],
            "containers": [container("main", script)], **spec,
        },
    }  # fmt: skip


def bucket(name="bucket", options="metadata-cache-ttl-secs=0"):
    attributes = {"bucketName": name, "mountOptions": options}
    return {"name": name, "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


class Seen:
    """A pod that was made, and what becomes of it."""

    def __init__(self, plane, manifest):
        self.plane, self.name = plane, manifest["metadata"]["name"]
        status, self.made = plane.call("POST", PODS, manifest)
        assert status == 201, self.made

    @property
    def object(self):
        return self.plane.get(f"{PODS}/{self.name}")

    @property
    def status(self):
        return self.object.get("status", {})

    def until(self, phase, timeout_s=60):
        self.plane.wait(lambda: self.status.get("phase") == phase, f"{phase} of {self.name}", timeout_s)
        return self.status

    def log(self, container="main"):
        path = self.plane.dir / "node1" / f"default_{self.name}_{container}.log"
        return path.read_text() if path.exists() else ""

    def says(self, text, container="main", timeout_s=30):
        self.plane.wait(lambda: text in self.log(container), f"{text!r} from {self.name}", timeout_s)

    def events(self, reason):
        mine = [one for one in self.plane.items(EVENTS) if one["involvedObject"]["uid"] == self.made["metadata"]["uid"]]
        return [one["message"] for one in mine if one["reason"] == reason]

    def fails_to_mount(self, code):
        wanted = f"code = {code}"
        self.plane.wait(lambda: any(wanted in one for one in self.events("FailedMount")), f"{code} of {self.name}")

    def delete(self, grace_s=4):
        self.plane.call("DELETE", f"{PODS}/{self.name}", {"gracePeriodSeconds": grace_s})

    def gone(self):
        self.plane.wait(lambda: self.plane.call("GET", f"{PODS}/{self.name}")[0] == 404, f"end of {self.name}", 30)


def test_a_bucket_is_mounted_once_the_account_may(plane, fake):
    began = time.monotonic()
    one = Seen(plane, pod("reads", "cat /gcs/bucket/in; echo made > /gcs/bucket/out; sleep 60", volumes=[bucket()]))
    fake.write("bucket", "in", b"from the bucket\n", {})
    plane.wait(lambda: one.status.get("containerStatuses"), "a status")
    first = one.status
    assert first["phase"] == "Pending" and "podIP" not in first
    assert first["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    status = one.until("Running")
    assert status["podIP"] and time.monotonic() - began > 1.0 + 0.3 + 0.2
    failed = one.events("FailedMount")
    assert 'failed for volume "bucket"' in failed[0] and "code = Unauthenticated" in failed[0]
    assert one.events("Pulled")
    one.says("from the bucket")
    assert [row["name"] for row in status["initContainerStatuses"]] == ["gke-gcsfuse-sidecar"]
    assert "running" in status["initContainerStatuses"][0]["state"]
    plane.wait(lambda: fake.buckets["bucket"].get("out"), "an object")
    assert fake.buckets["bucket"]["out"].data == b"made\n"
    one.delete()
    one.gone()


def test_what_cannot_be_mounted_keeps_the_pod_from_starting(plane):
    for name, volume, code in (
        ("no-bucket", bucket("missing"), "NotFound"),
        ("bad-option", bucket(options="metadata-cache-ttl=0"), "InvalidArgument"),
    ):
        one = Seen(plane, pod(name, "true", volumes=[volume]))
        one.fails_to_mount(code)
        assert one.status["phase"] == "Pending"
        one.delete()
        one.gone()
    one = Seen(plane, pod("no-sidecar", "true", volumes=[bucket()], annotations={"gke-gcsfuse/volumes": "false"}))
    one.fails_to_mount("FailedPrecondition")
    one.delete()
    one.gone()


def tells(path, word):
    """A script that writes ``word`` when it starts and "word ends" when it is told to end."""
    out = shlex.quote(str(path))
    return f"trap 'echo {word} ends >> {out}; exit 0' TERM; echo {word} >> {out}; while :; do sleep 0.05; done"


def words(path):
    return path.read_text().splitlines() if path.exists() else []


def test_sidecars_come_first_and_go_last(plane, tmp_path):
    told = tmp_path / "told"
    init = [("one", tells(told, "one"), True), ("two", tells(told, "two"), True), ("place", f"echo x >> {told}", False)]
    one = Seen(plane, pod("order", tells(told, "main"), init=init))
    one.until("Running")
    plane.wait(lambda: {"main", "one", "two"} <= {*words(told)}, "everybody")
    assert words(told).index("x") < words(told).index("main")
    one.delete()
    one.gone()
    assert words(told)[-3:] == ["main ends", "two ends", "one ends"]


def test_a_pod_ends_as_its_containers_do_and_takes_its_sidecars_along(plane, tmp_path):
    told = tmp_path / "told"
    init = [("one", tells(told, "one"), True)]
    one = Seen(plane, pod("done", f"until grep -q one {told}; do sleep 0.1; done; exit 3", init=init))
    ended = one.until("Failed")
    assert ended["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert "terminated" in ended["initContainerStatuses"][0]["state"] and words(told)[-1] == "one ends"
    one.delete()
    one.gone()


def test_who_outlives_the_grace_period_takes_the_sidecars_with_it(plane, tmp_path):
    told = tmp_path / "told"
    deaf = f"trap '' TERM; echo deaf >> {told}; while :; do sleep 0.1; done"
    one = Seen(plane, pod("deaf", deaf, init=[("one", tells(told, "one"), True)]))
    plane.wait(lambda: {"deaf", "one"} <= {*words(told)}, "everybody")
    one.delete(grace_s=1)
    one.gone()
    assert "one ends" not in words(told)


#: Not by a shell: each command that it starts closes a copy of the descriptor, which finishes the object.
HOLDS_OPEN = """exec python -uc '
import os, time
file = open("/gcs/bucket/{}", "w", 1)
print("x", file=file)
os.fsync(file.fileno())
print("started")
while True:
    time.sleep(0.2)
    try:
        os.listdir("/gcs/bucket")
    except OSError as error:
        print(error)'
"""


def test_a_dead_fuse_server_is_the_end_of_the_mount(plane, fake):
    one = Seen(plane, pod("enotconn", HOLDS_OPEN.format("open"), volumes=[bucket()]))
    one.says("started", timeout_s=60)
    played(plane, one.object, "fuse-dies")
    one.says("Transport endpoint is not connected")
    assert one.status["phase"] == "Running", "a dead sidecar neither ends nor fails a pod"
    assert "open" not in fake.buckets["bucket"]
    one.delete()
    one.gone()


def test_a_killed_pod_loses_what_it_had_open(plane, fake):
    one = Seen(plane, pod("killed", HOLDS_OPEN.format("lost"), volumes=[bucket()]))
    one.says("started", timeout_s=60)
    plane.kill_pod(one.object)
    one.until("Failed")
    assert "lost" not in fake.buckets["bucket"]
    one.delete()
    one.gone()


def test_a_token_rotates_and_the_old_one_is_refused(plane):
    script = "sleep 120"
    one = Seen(plane, pod("token", script, serviceAccountName="reader"))
    one.until("Running")
    file = plane.dir / "pods" / one.made["metadata"]["uid"] / "volumes" / "account" / "token"

    def asks(token):
        """The status that it gets; 403 is a known account that may not."""
        request = urllib.request.Request(f"{plane.url}{PODS}", headers={"authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=plane.trust) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    old = file.read_text()
    assert asks(old) == 403
    played(plane, one.object, "rotate-token")
    new = file.read_text()
    assert new != old and asks(new) == 403
    plane.wait(lambda: asks(old) == 401, "refusal of the old token", 30)
    assert asks(new) == 403
    one.delete(grace_s=1)
    one.gone()
    plane.wait(lambda: asks(new) == 401, "refusal of a token whose pod has gone", 30)
    assert not [each for each in plane.items("/api/v1/namespaces/default/secrets") if each["type"] == "played/token"]
