"""What pods start with: the init program that places the run file, and the line that sources NCCL's script."""

import json
import stat
import subprocess
import sys

import pytest
from cases import spec

from muster.backends import code_bundle
from muster.backends.gke.manifests.pods import SOURCE_AND_RUN
from muster.backends.gke.pod.init_container import place
from muster.core.errors import UsageError
from muster.storage import run_registry

EVERYTHING = ["format", "run.yaml", "resolved.json", "token", "run_id", "job.json", "submission"]


@pytest.fixture
def placed(tmp_path):
    """The run folder, and a function that does what a pod's init container does."""
    files, run = tmp_path / "files", tmp_path / "bucket" / "run"
    files.mkdir()
    for name in ("run.yaml", "resolved.json"):
        (files / name).write_text(name)
    (tmp_path / "token").write_text("secret\n")
    return run, lambda: place(run, run_id="llama", run_files=files, token=tmp_path / "token")


def test_places_once(placed):
    run, again = placed
    assert again() == EVERYTHING
    assert (run / "token").read_text() == "secret" and stat.S_IMODE((run / "token").stat().st_mode) == 0o600
    assert run_registry.existing_id(run) == "llama" and json.loads((run / "job.json").read_text())["run_id"] == "llama"
    (run / "resolved.json").write_text("what a restart made of it")
    assert again() == []
    assert (run / "resolved.json").read_text() == "what a restart made of it"


def test_a_folder_of_another_format_is_left_alone(placed):
    run, again = placed
    again()
    (run / "format").unlink()
    with pytest.raises(UsageError, match="format 1; this version reads format 3"):
        again()
    assert not (run / "format").exists()


def test_another_submission_brings_its_own_run_file(placed, tmp_path):
    run, again = placed
    again()
    (tmp_path / "files" / "submission").write_text("2")
    (tmp_path / "files" / "resolved.json").write_text("corrected")
    assert again() == ["resolved.json", "submission"] and (run / "resolved.json").read_text() == "corrected"
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


def test_the_shell_line_sources_and_then_becomes_the_agent(tmp_path):
    script = tmp_path / "set env.sh"
    script.write_text("export NCCL_NET=gIB\n")
    program = "import os, sys; print(os.environ['NCCL_NET'], sys.argv[1:], os.getpid())"
    words = ["two words", "$HOME", '"quoted"']
    argv = ["/bin/bash", "-c", SOURCE_AND_RUN, str(script), sys.executable, "-c", program, *words]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    output, _ = started.communicate(timeout=30)
    assert output.strip() == f"gIB {words} {started.pid}", "signals reach the agent itself, not a shell above it"
    argv[3] = str(tmp_path / "missing.sh")
    assert subprocess.run(argv, capture_output=True, timeout=30).returncode == 1
