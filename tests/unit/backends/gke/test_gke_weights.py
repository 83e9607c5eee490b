"""A model's copy in the run's bucket: made once, by whichever host comes first, and found by every reader."""

import json
import threading

import pytest
from cases import placement, spec
from fakes.clock import VirtualClock

from muster.backends.gke.manifests.placement import mode_of
from muster.backends.gke.manifests.pods import host_template
from muster.backends.gke.manifests.spec_rules import findings
from muster.backends.gke.pod import weights
from muster.backends.gke.pod.weights import CLAIM, STALE_S, Copy
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, UsageError
from muster.data.weights.model_files import fetch
from muster.storage.model_copies import COMPLETE, copy_name, find_copy
from muster.storage.store import open_store

SOURCE = "meta-llama/Llama-3.1-70B"
FILES = {"config.json": b"{}", "model-1.safetensors": b"one", "model-2.safetensors": b"two"}


class Hub:
    def __init__(self, files=FILES, fails_after=None):
        self.named, self.downloaded, self.fails_after = files, [], fails_after

    def files(self, source, revision):
        return "c0ffee", sorted(self.named)

    def download(self, source, commit, name, into):
        if len(self.downloaded) == self.fails_after:
            raise BackendError("gone")
        self.downloaded.append(name)
        path = into / name
        path.write_bytes(self.named[name])
        return path


@pytest.fixture
def copies(tmp_path):
    """A folder as GCSFuse would show the bucket's."""
    return tmp_path / "copies"


def copy(copies, hub, me="host-0", clock=None):
    return Copy(
        store=open_store(), hub=hub, copies=str(copies), source=SOURCE, revision=None, me=me,
        clock=clock or VirtualClock(),
    )  # fmt: skip


def test_the_first_host_copies_and_every_reader_finds_it(copies, monkeypatch):
    hub = Hub()
    assert copy(copies, hub).ensure() == "copied 3 files, 0 of them before"
    assert copy(copies, Hub(), me="host-1").ensure() == "there already"
    folder = find_copy(copies, SOURCE, None)
    assert {path.name: path.read_bytes() for path in folder.glob("[a-z]*")} == FILES
    monkeypatch.setenv("MUSTER_MODEL_COPIES", str(copies))
    assert fetch(SOURCE, None) == folder
    assert find_copy(copies, SOURCE, "v2") is None, "another revision is another model"
    (copies / copy_name(SOURCE, None) / COMPLETE).unlink()
    assert find_copy(copies, SOURCE, None) is None, "half a copy is none"


def test_of_many_hosts_one_copies(copies, monkeypatch):
    monkeypatch.setattr(weights, "LOOK_S", 0.05)
    hubs, said = [Hub() for _ in range(8)], []

    def arrive(number):
        said.append(copy(copies, hubs[number], me=f"host-{number}", clock=SystemClock()).ensure())

    hosts = [threading.Thread(target=arrive, args=(number,)) for number in range(8)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(60)
    assert sorted(said)[1:] == ["there already"] * 7 and sum(len(hub.downloaded) for hub in hubs) == 3


def test_who_copied_and_was_lost_is_followed_after_five_minutes_by_one_that_goes_on(copies):
    clock = VirtualClock()
    with pytest.raises(BackendError):
        copy(copies, Hub(fails_after=2), clock=clock).ensure()
    hub, before = Hub(), clock.wall_ns()
    assert copy(copies, hub, me="host-1", clock=clock).ensure() == "copied 3 files, 2 of them before"
    assert hub.downloaded == ["model-2.safetensors"]
    assert STALE_S <= (clock.wall_ns() - before) / 1e9 < STALE_S + 10
    assert json.loads((copies / copy_name(SOURCE, None) / CLAIM).read_text())["by"] == "host-1"


def test_a_model_without_safetensors_is_refused(copies):
    with pytest.raises(UsageError, match="no safetensors"):
        copy(copies, Hub({"config.json": b"{}"})).ensure()


def of(where="bucket", **changes):
    return spec("a4-highgpu-8g", "spot", model={"source": SOURCE, "revision": "v1", "weights": where}, **changes)


def test_hosts_copy_before_they_start_and_read_the_copy():
    where = placement(of())
    pod = host_template(where, mode_of(where))["spec"]
    copier = next(one for one in pod["initContainers"] if one["name"] == "weights")
    assert copier["command"][3:] == [
        "--source", SOURCE, "--revision", "v1", "--copies", "gs://example-bucket/muster-models"
    ]  # fmt: skip
    (container,) = pod["containers"]
    assert {"name": "MUSTER_MODEL_COPIES", "value": "/gcs/example-bucket/muster-models"} in container["env"]
    (volume,) = [one for one in pod["volumes"] if "csi" in one]
    assert volume["csi"]["readOnly"] and "ephemeral-storage" not in container["resources"]["requests"]


def test_what_is_downloaded_by_each_host_or_is_a_path_is_not_copied():
    for one in (of("hub"), spec("a4-highgpu-8g", "spot", model={"source": "gs://b/llama", "weights": "bucket"})):
        pod = host_template(placement(one), mode_of(placement(one)))["spec"]
        assert "weights" not in [container["name"] for container in pod["initContainers"]]


def test_a_copy_needs_a_bucket_of_googles():
    elsewhere = placement(of(checkpoint={"dir": "s3://b/c"}), run_dir="s3://b/r")
    assert [one.problem.key for one in findings(elsewhere) if one.error] == ["model.weights"]
