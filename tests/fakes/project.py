"""An empty project of the fake cloud's, the places of one run file in it, and what ``up`` needs besides."""

from contextlib import contextmanager

import pytest
from cases import placement, spec

from muster.backends.gke.provision.inventory.resource_names import site
from muster.backends.gke.provision.software import Software, hashes
from muster.backends.google.session import Session

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.clock import VirtualClock  # noqa: E402
from fakes.gcp import HOST, FakeGoogleCloud, Killed  # noqa: E402

DOCUMENTS = discovery.Discovery(discovery.folder())
NAMED = {"name": "kueue", "namespace": "default"}
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": NAMED, "data": {"a": "b"}}
INSTALLED = Software(documents={"kueue.yaml": (CONFIG,)}, hugging_face_token="hf_secret")
TEXTS = {
    name: f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n"
    for name in ("kueue.yaml", "jobset.yaml", "nccl-rdma-installer.yaml")
}
DAY = "2026-08-22"
CLUSTER = "v1/projects/example-project/locations/us-central1/clusters/muster"


def cloud(**faults):
    return FakeGoogleCloud(DOCUMENTS, **faults)


def cloud_with_cluster():
    """The project where the run file's cluster runs, with a queue for its machine."""
    found = FakeGoogleCloud(DOCUMENTS, enabled={"container.googleapis.com", "compute.googleapis.com"})
    found.store[CLUSTER] = {"name": "muster", "status": "RUNNING", "endpoint": HOST}
    found.kubernetes.queues.add("muster-b200-flex-start-queued")
    return found


@contextmanager
def killed(google, number):
    """The program in this block dies once the cloud has carried out its request ``number``; later ones live."""
    google.kill_at = number
    with pytest.raises(Killed):
        yield
    google.kill_at = None


def asks_for_pool(google):
    """Number of the first request for a node pool."""
    return next(n for n, (method, url) in enumerate(google.log, 1) if method == "POST" and url.endswith("/nodePools"))


def session(google, **more):
    return Session(http=google, clock=VirtualClock(), **more)


def where(machine="a4-highgpu-8g", mode="flex_start_queued", **changes):
    adopt = changes.pop("adopt", False)
    return site(placement(spec(machine, mode, project="example-project", **changes)), adopt=adopt, day=DAY)


def places(mode="reservation"):
    of = spec("a4-highgpu-8g", mode, project="example-project")
    return [site(placement(of), zone=zone, day=DAY) for zone in ("us-central1-a", "us-central1-b", "europe-west1-b")]


SITES = {"a4": where(), "a3-mega": where("a3-megagpu-8g", "spot"), "g2": where("g2-standard-48", "on_demand")}
PINS = hashes(SITES["a4"], TEXTS)


def everything(google):
    """What exists, in a form that can be compared: nothing of how it came about."""
    objects = {
        key: {name: value for name, value in one.items() if name != "metadata"}
        for key, one in google.kubernetes.objects.items()
    }
    bindings = {
        name: sorted(policy["bindings"], key=lambda row: row["role"]) for name, policy in google.policies.items()
    }
    return google.store, objects, bindings
