"""A back end of another package, added by an entry point alone: its rules, and the verbs through it."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """\
name: tiny
backend: mytest
command: [job.py]
resources: {hosts: 1, image: registry/image:1}
"""

PACKAGE = '''\
"""A back end that runs one plain process per job."""
import json, os, signal, subprocess, sys, time
from pathlib import Path

from muster.backends.backend import Backend, Checks
from muster.core.errors import Problem
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, TaskSpec
from muster.storage import run_registry


class Launcher:
    name = "mytest"
    follow = exec = attach = revive = remote = None

    def offers(self, spec):
        return []

    def resolve(self, spec):
        return spec

    def render(self, spec, *, run_id, run_dir):
        task = TaskSpec(name="job", argv=(sys.executable, "-u", *spec.command))
        return JobRequest(run_id=run_id, backend=self.name, run_dir=run_dir, tasks=(task,))

    def submit(self, request):
        folder = Path(request.run_dir)
        (folder / "logs").mkdir(exist_ok=True)
        with open(folder / "logs" / "job.log", "ab") as log:
            child = subprocess.Popen(request.tasks[0].argv, stdout=log, stderr=log, start_new_session=True)
        (folder / "job.json").write_text(json.dumps({"pid": child.pid, "submission": 1}))
        return self.find(request.run_id)

    def find(self, run_id):
        folder = run_registry.find(run_id).path
        if not (folder / "job.json").exists():
            return None
        pid = json.loads((folder / "job.json").read_text())["pid"]
        return JobHandle(run_id=run_id, backend=self.name, job_id=str(pid), run_dir=str(folder))

    def poll(self, handle):
        alive = self.remaining(handle) != []
        state = JobState.RUNNING if alive else JobState.STOPPED
        return JobStatus(state=state, reason=f"process {handle.job_id} " + ("runs" if alive else "has ended"))

    def logs(self, handle, *, after=None):
        text = (Path(handle.run_dir) / "logs" / "job.log").read_text()
        yield LogChunk(task="job", text=text[(after or {}).get("job", 0):], next_offset=len(text))

    def cancel(self, handle):
        if handle.job_id and self.remaining(handle):
            os.kill(int(handle.job_id), signal.SIGKILL)
            while self.remaining(handle):
                time.sleep(0.01)

    def remaining(self, handle):
        try:
            state = Path(f"/proc/{handle.job_id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return []
        return [] if state == "Z" else [f"process {handle.job_id}"]


def rules(spec):
    if spec.resources.hosts > 1:
        yield Problem(key="resources.hosts", message="mytest has one host", value=spec.resources.hosts)


def unused(spec):
    yield "resources.image", "mytest runs no images"


BACKEND = Backend(name="mytest", launcher=Launcher, checks=Checks(rules=rules, unused=unused))
'''


@pytest.fixture
def muster(tmp_path: Path):
    """The command line in processes of its own, with the other package on their path."""
    site = tmp_path / "site"
    (site / "mytest_backend-1.0.dist-info").mkdir(parents=True)
    (site / "mytest_backend.py").write_text(PACKAGE)
    (site / "mytest_backend-1.0.dist-info" / "METADATA").write_text("Name: mytest-backend\nVersion: 1.0\n")
    (site / "mytest_backend-1.0.dist-info" / "entry_points.txt").write_text(
        "[muster.backends]\nmytest = mytest_backend:BACKEND\n"
    )
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "job.py").write_text("import time\nprint('hello from the job')\ntime.sleep(60)\n")
    source = Path(__file__).parents[2] / "src"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{source}:{site}", "MUSTER_HOME": str(tmp_path / "home")}

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "muster.cli.main", *words]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done
        return done

    return run


def test_submit_status_logs_and_down_through_a_back_end_of_another_package(muster):
    done = muster("submit", "run.yaml")
    run_id = done.stdout.strip()
    assert "resources.image: has no effect: mytest runs no images" in done.stderr
    assert "process" in muster("status", run_id).stdout and "running" in muster("status", run_id).stdout
    for _ in range(100):
        if "job | hello from the job" in muster("logs", run_id).stdout:
            break
    else:
        pytest.fail("the job printed nothing")
    muster("train", "run.yaml", code=2)
    assert "is down" in muster("down", run_id).stderr
    assert "stopped" in muster("status", run_id).stdout


def test_its_own_rules_and_the_names_there_are(muster):
    assert "resources.hosts: mytest has one host" in muster("submit", "run.yaml", "resources.hosts=2", code=2).stderr
    refused = muster("submit", "run.yaml", "backend=nomad", code=2).stderr
    assert "backend: must be one of local, ssh, slurm, gke, vertex, gce, mytest" in refused
