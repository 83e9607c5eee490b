"""What pods start with: the init program that places the run file, and the line that sources NCCL's script."""

import stat
import subprocess
import sys

from muster.backends.gke.place import place
from muster.backends.gke.pods import SOURCE_AND_RUN


def test_places_once(tmp_path):
    files, run = tmp_path / "files", tmp_path / "bucket" / "run"
    files.mkdir()
    for name in ("run.yaml", "resolved.json"):
        (files / name).write_text(name)
    (tmp_path / "token").write_text("secret\n")
    assert place(run, run_files=files, token=tmp_path / "token") == ["run.yaml", "resolved.json", "token"]
    assert (run / "token").read_text() == "secret" and stat.S_IMODE((run / "token").stat().st_mode) == 0o600
    (run / "resolved.json").write_text("what the first supervisor made of it")
    assert place(run, run_files=files, token=tmp_path / "token") == []
    assert (run / "resolved.json").read_text() == "what the first supervisor made of it"


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
