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
from muster.core.errors import BackendError, UsageError  # noqa: E402
from muster.storage import run_registry  # noqa: E402

stage = on_gce.stage
OLD = b'{"submission": {"of": "another version"}}'


#: What of a run's records is not as this version writes it.
OTHER_KEYS, AS_331955C5, NO_RECORD = "other keys", "as 331955c5 wrote it", "no record of its requests"
CASES = pytest.mark.parametrize("case", [OTHER_KEYS, AS_331955C5, NO_RECORD])


def aged(run, bucket, name, case):
    """The folder and the home as another version, or one that was killed, would have left them."""
    written = "3" if case == AS_331955C5 else "2"
    (run.path / "format").write_text(f"{written}\n")
    uri = f"{(run.path / 'home').read_text().strip()}/{name}"
    if case != AS_331955C5:
        path = run.path / "resolved.json"
        path.write_text(path.read_text().replace('"provisioning_model"', '"mode"').replace('"recovery"', '"repair"'))
    if case == OTHER_KEYS:
        bucket.put(uri, OLD)
    elif case == NO_RECORD:
        bucket.delete(uri)
    with pytest.raises(UsageError, match=f"format {written}; this version reads") as refused:
        run_registry.find(run.run_id)
    assert "commit" in str(refused.value.hint)


@CASES
def test_compute_engine(stage, case):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    at.until_hosts(request)
    run = run_registry.find(request.run_id)
    assert len(at.names()) > 1
    aged(run, at.bucket, "requests.json", case)
    assert stop.down(run.run_id).left == () and at.names() == []
    assert stop.down(run.run_id).left == (), "absent is success"


@CASES
def test_vertex_ai(tmp_path, monkeypatch, case):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    user = on_vertex.User()
    monkeypatch.setattr(backends, "load", lambda name: user.launcher)
    run = user.submit().run
    assert user.going()
    aged(run, user.bucket, "requests.json", case)
    assert stop.down(run.run_id).left == () and not user.going()


def test_a_run_whose_file_is_gone_is_ended_by_its_copy_or_is_not_called_down(stage):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    at.until_hosts(request)
    run = run_registry.find(request.run_id)
    run.resolved.unlink()
    held = (run.path / "resolved.copy.json").read_bytes()
    (run.path / "resolved.copy.json").unlink()
    with pytest.raises(BackendError, match="the project of the run's machines is not known"):
        stop.down(run.run_id)
    assert at.names()
    (run.path / "resolved.copy.json").write_bytes(held)
    assert stop.down(run.run_id).left == () and at.names() == []
