"""The init program of pods: what it places in the run's folder, on a claim and in a pod's own."""

import json
import stat

import pytest
from cases import spec

from muster.backends import code_bundle, run_folder
from muster.backends.gke.pod.init_container import place
from muster.core import resolved_file
from muster.core.errors import AccessError, UsageError
from muster.storage import run_registry

SUBMITTED, CORRECTED = '{\n "name": "llama"\n}\n', '{\n "name": "corrected"\n}\n'
EVERYTHING = ["format", "run.yaml", "resolved.json", "run_id", "job.json", "submission"]


@pytest.fixture
def placed(tmp_path):
    """The run folder, and a function that does what a pod's init container does."""
    files, run = tmp_path / "files", tmp_path / "bucket" / "run"
    files.mkdir()
    (files / "run.yaml").write_text("name: llama")
    (files / "resolved.json").write_text(SUBMITTED)
    return run, lambda **home: place(run, run_id="llama", run_files=files, **home)


def test_places_once(placed):
    run, again = placed
    assert again() == EVERYTHING
    assert stat.S_IMODE((run / "resolved.json").stat().st_mode) == 0o600
    assert not (run / "token").exists(), "it comes from the Secret alone"
    assert run_registry.existing_id(run) == "llama" and json.loads((run / "job.json").read_text())["run_id"] == "llama"
    assert resolved_file.read(run) == SUBMITTED and "checksum" in (run / "resolved.json").read_text()
    resolved_file.write(run, CORRECTED)
    assert again() == []
    assert resolved_file.read(run) == CORRECTED, "what a restart made of it"


def test_a_damaged_run_file_gives_way_to_the_submitted_one(placed, capsys):
    run, again = placed
    again()
    (run / "resolved.json").write_text((run / "resolved.json").read_text().replace("llama", "llamb"))
    assert again() == ["resolved.json"] and resolved_file.read(run) == SUBMITTED
    assert "llamb" in (run / "resolved.json.damaged").read_text() and "is damaged" in capsys.readouterr().err
    resolved_file.write(run, CORRECTED)
    (run / "resolved.json").write_text((run / "resolved.json").read_text().replace("corrected", "corrupted"))
    assert again() == [], "what a restart wrote is known to the supervisor alone"


def test_a_folder_of_another_format_is_left_alone(placed):
    run, again = placed
    again()
    (run / "format").unlink()
    with pytest.raises(UsageError, match="format 1; this version reads format 4"):
        again()
    assert not (run / "format").exists()


def test_another_submission_brings_its_own_run_file(placed, tmp_path):
    run, again = placed
    again()
    (tmp_path / "files" / "submission").write_text("2")
    (tmp_path / "files" / "resolved.json").write_text(CORRECTED)
    assert again() == ["resolved.json", "submission"] and resolved_file.read(run) == CORRECTED
    assert again() == []


def test_the_users_code_comes_with_the_submission(placed, tmp_path):
    run, again = placed
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "train.py").write_text("import lib.net")
    (project / "lib" / "net.py").write_text("x = 1")
    own = spec("a4-highgpu-8g", "spot", model=None, data=None, command=[str(project / "train.py"), "--x"])
    shipped, code = code_bundle.pack(own, str(run))
    assert shipped.command == [f"{run}/code/train.py", "--x"] and code_bundle.pack(own, str(run))[1] == code
    (tmp_path / "files" / "code.tar.gz").write_bytes(code)
    again()
    assert (run / "code" / "lib" / "net.py").read_text() == "x = 1"
    (run / "code" / "train.py").write_text("what a restart shipped")
    again()
    assert (run / "code" / "train.py").read_text() == "what a restart shipped"


@pytest.fixture
def buckets(monkeypatch):
    """Homes that answer with what is in the list, each once: an error is raised."""
    answers, asked = [], []

    class Bucket:
        def __init__(self, local):
            asked.append((local / "home").read_text())

        def fetch(self):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(run_folder, "open_home", Bucket)
    monkeypatch.setattr(run_folder, "RETRY_S", 0.0)
    return answers, asked


def test_a_pods_own_folder_names_the_bucket_and_takes_what_a_restart_put_there(placed, buckets):
    _, again = placed
    answers, asked = buckets
    answers += [AccessError("403"), AccessError("403"), True]  # the account of a fresh pod is not known at once
    assert again(home="gs://example-bucket/runs/llama")[-1] == "what a restart changed"
    assert asked == ["gs://example-bucket/runs/llama\n"] * 3
    answers.append(False)
    assert again(home="gs://example-bucket/runs/llama") == []


def test_a_bucket_that_stays_closed_ends_the_pod(placed, buckets, monkeypatch):
    _, again = placed
    buckets[0].extend([AccessError("403")] * 2)
    monkeypatch.setattr(run_folder, "PATIENCE_S", -1.0)
    with pytest.raises(AccessError):
        again(home="gs://example-bucket/runs/llama")
