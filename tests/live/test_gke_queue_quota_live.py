"""Two ``up`` at once on a real API server: each raises the queue's quota over the newest version; none takes any."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "kube"), str(HERE.parent)]
from cluster import Network, namespaces_work  # noqa: E402
from plane import Plane, programs  # noqa: E402

from muster.backends.gke.kubernetes.config import connect  # noqa: E402
from muster.backends.gke.manifests.kueue_objects import keeping_quota, queue_objects  # noqa: E402
from muster.backends.gke.manifests.placement import Options, place  # noqa: E402
from muster.backends.gke.provision.cluster_objects import raise_quota  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core.clock import SystemClock  # noqa: E402
from muster.core.errors import ConflictError  # noqa: E402
from muster.core.typed_json import changed  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    binaries, why_not = programs()
    if binaries is None:
        pytest.skip(why_not)
    if not namespaces_work():
        pytest.skip("network namespaces need root and iproute2")
    from fakes.crds import CRDS

    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    if not CRDS.is_dir():
        pytest.skip(f"no CustomResourceDefinitions at {CRDS}")
    found = [one for path in sorted(CRDS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text()) if one]
    with Plane(binaries, tmp_path_factory.mktemp("kube") / "plane", Network(["node1"]), []) as plane:
        plane.install(found)
        yield f"kubeconfig:{plane.dir / 'kubeconfig'}"


def queue(nodes):
    spec = RunSpec.model_validate(
        {"name": "a", "backend": "gke", "command": ["x"], "resources": {
            "machine": "a4-highgpu-8g", "provisioning_model": "flex_start", "image": "i", "hosts": nodes,
            "project": "example-project", "locations": ["us-central1-b"]}}
    )  # fmt: skip
    objects = queue_objects(place(spec, run_id="a", run_dir="/unused", options=Options()))
    return next(one for one in objects if one["kind"] == "ClusterQueue")


def quota(cluster):
    (group,) = cluster.get(queue(1))["spec"]["resourceGroups"]
    return {row["name"]: row["nominalQuota"] for row in group["flavors"][0]["resources"]}


def test_a_version_that_is_not_the_newest_is_refused(address):
    cluster = connect(address, SystemClock())
    raise_quota(cluster, queue(2))
    there = cluster.get(queue(2))
    raise_quota(cluster, queue(3))
    stale = changed(keeping_quota(queue(9), there), there["metadata"]["resourceVersion"], "metadata", "resourceVersion")
    with pytest.raises(ConflictError):
        cluster.apply(stale)
    assert int(quota(cluster)["nvidia.com/gpu"]) == 24


def test_of_any_number_at_once_the_largest_stays(address):
    clusters = [connect(address, SystemClock()) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: raise_quota(pair[0], queue(pair[1])), zip(clusters, (5, 7, 1, 6), strict=True)))
    assert int(quota(clusters[0])["nvidia.com/gpu"]) == 56
    raise_quota(clusters[0], queue(1))
    assert int(quota(clusters[0])["nvidia.com/gpu"]) == 56
