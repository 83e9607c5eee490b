"""A run's folder whose ``run_id`` is damaged is still that run, by the registry of this machine."""

import pytest

from muster.core.errors import UsageError
from muster.storage import run_registry

RUN = "live-20261123-212931-7a2b"


@pytest.fixture(params=["elsewhere", "at home"])
def run(request, tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    path = run_registry.place(RUN, str(tmp_path / "there") if request.param == "elsewhere" else None)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return run_registry.create(RUN, path, run_file="", resolved="{}")


@pytest.mark.parametrize("damaged", [b"live-20261123--a7a2\n212931", b"\xff" + RUN.encode(), b""])
def test_a_damaged_name_is_looked_up(run, damaged):
    (run.path / "run_id").write_bytes(damaged)
    assert run_registry.existing_id(run.path) == RUN
    assert run_registry.find(str(run.path)) == run
    assert dict(run_registry.registry()) == {RUN: run.path} and run_registry.forgotten() == []


def test_another_folder_with_such_a_file_is_no_run(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "run_id").write_text("No Name")
    assert run_registry.existing_id(other) is None
    with pytest.raises(UsageError, match="holds no run"):
        run_registry.find(str(other))
