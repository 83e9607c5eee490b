"""`muster down` on a run of another format: what it has is found by its label, without its records."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
for folder in (
    TESTS,
    *(TESTS / "golden" / name for name in ("gce", "vertex")),
    TESTS / "unit/backends/gce",
    TESTS / "unit/backends/vertex",
):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import test_gce_launcher as on_gce  # noqa: E402
import test_vertex_launcher as on_vertex  # noqa: E402

from muster import backends  # noqa: E402
from muster.app.run import stop  # noqa: E402
from muster.core.errors import UsageError  # noqa: E402
from muster.core.typed_json import parse_object  # noqa: E402
from muster.storage import run_registry  # noqa: E402

stage = on_gce.stage
OLD = b'{"submission": {"of": "another version"}}'


def aged(run):
    """The folder as another version would have written it: its format, its keys, and no checksum."""
    (run.path / "format").write_text("2\n")
    path = run.path / "resolved.json"
    old = path.read_text().replace('"provisioning_model"', '"mode"').replace('"recovery"', '"repair"')
    path.write_text(old)
    assert "repair" in parse_object(old.encode())
    with pytest.raises(UsageError, match="format 2"):
        run_registry.find(run.run_id)


def test_compute_engine(stage):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    at.until_hosts(request)
    run = run_registry.find(request.run_id)
    assert len(at.names()) > 1
    aged(run)
    home = (run.path / "home").read_text().strip()
    at.bucket.put(f"{home}/gce.json", OLD)
    assert stop.down(run.run_id).left == () and at.names() == []
    assert stop.down(run.run_id).left == (), "absent is success"


def test_vertex_ai(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    user = on_vertex.User()
    monkeypatch.setattr(backends, "load", lambda name: user.launcher)
    run = user.submit().run
    assert user.going()
    aged(run)
    user.put("vertex-requests.json", OLD)
    assert stop.down(run.run_id).left == () and not user.going()
