"""The shared verbs over GKE: submit, status, logs and down of a run file, with a cluster in memory."""

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.bucket import Bucket  # noqa: E402
from fakes.gcp import HOST, FakeGoogleCloud  # noqa: E402
from fakes.gke_run import on_gke  # noqa: E402

from muster.app.inspect import logs  # noqa: E402
from muster.app.inspect import status as look  # noqa: E402
from muster.app.run import stop  # noqa: E402
from muster.app.run import submit as use_case  # noqa: E402
from muster.backends import run_home  # noqa: E402
from muster.backends.google import launcher as google_launcher  # noqa: E402
from muster.config.load import loads  # noqa: E402
from muster.core.errors import BackendError, UsageError  # noqa: E402


@pytest.fixture
def google(tmp_path, monkeypatch):
    found = FakeGoogleCloud(discovery.Discovery(discovery.folder()), enabled={"container.googleapis.com"})
    cluster = {"name": "muster", "status": "RUNNING", "endpoint": HOST}
    found.store["v1/projects/example-project/locations/us-central1/clusters/muster"] = cluster
    found.kubernetes.queues.add("muster-l4-flex-start")
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(google_launcher, "GoogleHttp", lambda: found)
    bucket, open_of = Bucket(), run_home.open_of
    monkeypatch.setattr(run_home, "open_of", lambda local, store=None: open_of(local, store or bucket))
    return found


def loaded():
    return loads(on_gke(mode="flex_start"), (), environment=False)


def test_submit_status_logs_down(google):
    submitted = use_case.submit(loaded())
    run_id = submitted.run.run_id
    found = look.status(run_id)
    assert found.backend == "gke" and found.status.state == "waiting"
    assert found.status.reason.startswith("waiting for Kueue to create a Workload")
    assert list(logs.logs(run_id)) == []
    stop.down(run_id)
    assert not google.kubernetes.objects and look.status(run_id).status.state == "absent"


def test_down_ends_a_run_of_another_format(google):
    """Its keys are others, and its folder's format is one that this version does not read."""
    run = use_case.submit(loaded()).run
    (run.path / "format").write_text("2\n")
    (run.path / "resolved.json").write_text(run.resolved.read_text().replace('"recovery"', '"repair"'))
    with pytest.raises(UsageError, match="format 2"):
        look.status(run.run_id)
    assert google.kubernetes.objects
    assert stop.down(run.run_id).left == () and not google.kubernetes.objects


def test_without_a_cluster_nothing_is_left(google, tmp_path):
    google.store.clear()
    with pytest.raises(BackendError, match="no cluster muster"):
        use_case.submit(loaded())
    assert not google.kubernetes.objects and not list((tmp_path / "home" / "runs").glob("*"))


def test_a_preview_asks_nobody(google):
    assert "kind: JobSet" in use_case.preview(loaded()).files["run.yaml"]
    assert google.log == []
