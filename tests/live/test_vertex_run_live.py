"""A run on Vertex AI from submit to its end: the service is played, its containers are real.

Each worker is the real host program as process 1 of PID, mount and UTS namespaces, found by the others by its name,
with a metadata server, a Secret Manager that knows its account, and the run's home in an unkind bucket.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from cluster import SMALL, Network, namespaces_work  # noqa: E402
from fakes.discovery import Discovery  # noqa: E402
from fakes.metadata import metadata, token  # noqa: E402
from fakes.secrets import API, FakeSecrets  # noqa: E402
from fakes.vertex.containers import Containers, timeline  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.service import APIS, FakeVertex  # noqa: E402
from fakes.vertex.workers import Programs  # noqa: E402

from muster.app.inspect import status as status_app  # noqa: E402
from muster.app.run import exec as exec_app  # noqa: E402
from muster.app.run import stop as stop_app  # noqa: E402
from muster.app.run import submit as submit_app  # noqa: E402
from muster.backends.google.http import Call  # noqa: E402
from muster.backends.protocols import Terminal  # noqa: E402
from muster.backends.vertex.launcher import VertexLauncher  # noqa: E402
from muster.config.load import Loaded  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core import event_log, processes  # noqa: E402
from muster.core.errors import MusterError  # noqa: E402
from muster.core.types import JobState  # noqa: E402
from muster.protocol.client import AskStatus  # noqa: E402

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not namespaces_work(), reason="namespaces need root"),
]
ACCOUNT = "trainer@example-project.iam.gserviceaccount.com"
REGION = "us-central1"
NOTICE_S = 25.0
STEPS = 100_000  # more than the fastest machine makes until it is stopped
CONTAINER = ["unshare", "--uts", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]


class Place:
    """The played project: service, secrets, bucket; and its user."""

    def __init__(self, folder, network, secrets, urls):
        self.folder, self.network, self.secrets, self.urls = folder, network, secrets, urls
        self.clock, line = timeline(really=True)
        self.containers = Containers(self.command)
        manners = Manners(queue_s=0, machine_s=0.5, skew_s=2, shutdown_s=2, cancel_s=2, replace_s=5, error_late_s=1,
                          sigterm=lambda worker: NOTICE_S if worker.primary else None)  # fmt: skip
        self.vertex = self.containers.service = FakeVertex(
            discovery=Discovery(discovery.folder(), (*APIS, API)), timeline=line, manners=manners, log_late_s=0.0,
            elsewhere=secrets, programs=Programs(self.containers.start, self.containers.stop),
        )  # fmt: skip
        self.launcher = VertexLauncher(http=self.containers, clock=self.clock)
        self.hosts_file = folder / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n")
        self.over = threading.Event()
        threading.Thread(target=self.time_passes, daemon=True).start()

    def time_passes(self):
        while not self.over.wait(0.2):
            self.containers.settle()

    def command(self, job, worker, environment):
        """As Vertex starts it: the container's command and args, in the environment that it gives."""
        container = job.spec["workerPoolSpecs"][worker.pool]["containerSpec"]
        address = self.network.address(worker.name)
        named = dict(line.split()[::-1] for line in self.hosts_file.read_text().splitlines())
        named[worker.host] = address
        self.hosts_file.write_text("".join(f"{where} {name}\n" for name, where in named.items()))
        assert container["command"] == ["python", "-m", "muster.backends.vertex.host"]
        disk = self.folder / f"disk-{worker.name}-{worker.boots}"
        argv = [
            "ip", "netns", "exec", self.network.namespace(worker.name), *CONTAINER,
            sys.executable, str(HERE / "vertex_container.py"), str(self.hosts_file), worker.host,
            *container["args"], "--run-dir", str(disk),
        ]  # fmt: skip
        ours = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        own = {**environment, **ours, **self.urls, "MUSTER_BIND": address}
        return [argv], own

    def submit(self, name, steps, **resources):
        found = json.loads(json.dumps(SMALL))
        found["training"]["steps"] = steps
        found["recovery"] = {"warm_standby": False, "grace_s": 15.0, "heartbeat_timeout_s": 20.0}
        found |= {"name": name, "backend": "vertex", "run_dir": f"gs://bucket/runs/{name}"}
        found |= {"checkpoint": {"every_steps": 20}, "vertex": {"service_account": ACCOUNT, "web_access": True}}
        found["resources"] = {
            "hosts": 2, "ranks_per_host": 1, "device": "cpu", "threads_per_rank": 1, "machine": "n1-standard-4",
            "image": "us-docker.pkg.dev/example-project/muster/train:1", "project": "example-project",
            "locations": [REGION], **resources,
        }  # fmt: skip
        spec = RunSpec.model_validate(found)
        self.run = submit_app.submit(Loaded(spec=spec, text=json.dumps(found), source="run.yaml")).run
        return self.run

    @property
    def job(self):
        return next(iter(self.vertex.jobs.values()))

    def wait(self, look, what, limit_s=240):
        until = time.monotonic() + limit_s
        while True:
            try:
                if found := look():
                    return found
            except MusterError as error:
                found = error
            assert time.monotonic() < until, f"no {what}: {found}\n{self.story()}"
            time.sleep(1)

    def story(self):
        told = []
        for job in self.vertex.jobs.values():
            for worker in job.workers:
                told += [f"--- {job.number} {worker.name} {job.state}", *worker.lines[-60:]]
        return "\n".join([f"status: {self.launcher.poll(self.handle)}", *told])

    @property
    def handle(self):
        return status_app.job(self.run)[1]

    def steps(self):
        """Attempt and loss of every step so far, in order of time."""
        self.launcher.mirror(self.run.run_id, self.run.events)
        return [(one.step, one.attempt, one.detail["loss"]) for one in event_log.merged(self.run.events)
                if one.kind == "step" and one.step]  # fmt: skip

    def step(self):
        return max((step for step, _, _ in self.steps()), default=0)

    def state(self):
        return self.launcher.poll(self.handle)


@contextmanager
def serving(secrets):
    """Secret Manager over HTTP, as the run's account."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Authorization"] == "Bearer ya29.fake"
            reply = secrets.as_account(
                ACCOUNT, Call(method="GET", url=f"https://secretmanager.googleapis.com{self.path}")
            )
            data = json.dumps(reply.body).encode()
            self.send_response(reply.status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@contextmanager
def closing_network(network):
    try:
        yield
    finally:
        network.down()


@pytest.fixture
def place(tmp_path, monkeypatch):
    pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
    from fakes.gcs import GcsFake

    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    secrets = FakeSecrets(Discovery(discovery.folder(), (*APIS, API)), holds_after=1)
    network = Network(["workerpool0-0", "workerpool1-0"])
    network.up()
    everywhere = ("0.0.0.0", 0)
    given = token(ACCOUNT)
    with (
        GcsFake.unkind(host=everywhere[0]) as bucket, serving(secrets) as port,
        metadata(given, address=everywhere) as (server, _), closing_network(network),
    ):  # fmt: skip
        urls = {
            "STORAGE_EMULATOR_HOST": bucket.url_at(network.bridge),
            "MUSTER_TEST_SECRETS": f"http://{network.bridge}:{port}/v1",
            "MUSTER_METADATA": f"http://{network.bridge}:{server.server_address[1]}",
        }
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", urls["STORAGE_EMULATOR_HOST"])
        found = Place(tmp_path, network, secrets, urls)
        monkeypatch.setattr("muster.backends.load", lambda _: found.launcher)
        yield found
        found.over.set()
        for job in found.vertex.jobs.values():
            for worker in job.workers:
                found.containers.stop(worker, None)


def test_a_spot_run_is_taken_away_and_goes_on_from_its_bucket(place):
    run = place.submit("spot", STEPS, provisioning_model="spot")
    place.wait(lambda: place.step() >= 5, "fifth step")
    assert "shell: https://workerpool1-0" in place.state().tasks["host-1"]
    a_request_is_answered(place, run)
    a_second_job_of_the_same_request_trains_nothing(place)
    place.wait(lambda: place.step() >= 22, "first checkpoint")
    with place.containers.lock:
        place.job.preempt()
    before = place.step()
    assert not [one for one in processes.labelled(run.run_id)], "the machines are gone"
    place.wait(lambda: place.step() > before + 20, "steps after it came back", 400)
    stop_app.stop(run.run_id)
    assert place.state().state is JobState.STOPPED
    seen = place.steps()
    again = [step for step, count in Counter(step for step, _, _ in seen).items() if count > 1]
    print(f"taken away at step {before}; {len(again)} steps made again: {again}")
    assert {step for step, _, _ in seen} == set(range(1, place.step() + 1))
    assert not again or min(again) > 20, "not from the beginning"
    for step in again:
        assert len({loss for one, _, loss in seen if one == step}) == 1, "bit for bit"
    place.wait(lambda: place.job.state == "JOB_STATE_SUCCEEDED", "end of the job")
    assert place.job.preemptions == 1 and place.job.job_restarts == 0
    logs = Counter()
    for chunk in place.launcher.logs(place.handle):
        logs[chunk.task.partition("-")[0]] += len(chunk.text)
    assert logs["rank"] and logs["supervisor"] and logs["workerpool0"] and logs["workerpool1"], logs
    assert stop_app.down(run.run_id).left == () and not place.secrets.versions


def a_request_is_answered(place, run):
    answer = place.wait(lambda: place.launcher.ask(run.run_id, AskStatus()), "answer")
    assert answer.phase == "run" and len(answer.hosts) == 2
    out = bytearray()
    argv = ["cat", "/proc/1/cmdline"]
    code = exec_app.execute(run.run_id, argv, Terminal(out=out.extend, err=lambda data: None), host=1)
    assert code == 0 and b"vertex_container.py" in out, "the host program is process 1"


def a_second_job_of_the_same_request_trains_nothing(place):
    """As where an answer was lost and the request repeated too early."""
    first = place.job
    url = f"https://{REGION}-aiplatform.googleapis.com/v1/projects/example-project/locations/{REGION}/customJobs"
    body = {key: first.body[key] for key in ("displayName", "labels", "jobSpec")}
    made = place.containers.send(Call(method="POST", url=url, body=body))
    number = made.body["name"].rpartition("/")[2]
    place.wait(lambda: place.vertex.jobs[number].state == "JOB_STATE_SUCCEEDED", "end of the second job")
    said = [line for worker in place.vertex.jobs[number].workers for line in worker.lines]
    assert any("another job works for this run" in line for line in said), said
    assert first.state == "JOB_STATE_RUNNING"


def test_the_first_hosts_machine_dies_another_host_supervises_and_stop_saves(place):
    run = place.submit("lost", 100_000, provisioning_model="on_demand")
    place.wait(lambda: place.step() >= 22, "first checkpoint")
    attempt = max(attempt for _, attempt, _ in place.steps())
    began = time.monotonic()
    with place.containers.lock:
        place.job.lose_machine("workerpool0-0")
    place.wait(lambda: [one for one in event_log.merged(run.events) if one.kind == "supervisor.started"][1:]
               if place.steps() else None, "takeover")  # fmt: skip
    print(f"machine lost to takeover: {time.monotonic() - began:.0f} s")
    place.wait(lambda: max(attempt for _, attempt, _ in place.steps()) > attempt, "new attempt with the host that came")
    before = place.step()
    place.wait(lambda: place.step() > before + 3, "steps of both hosts")
    stop_app.stop(run.run_id)
    assert place.state().state is JobState.STOPPED
    place.wait(lambda: place.job.state == "JOB_STATE_SUCCEEDED", "end of the job: how the run ended is in its home")
    assert stop_app.down(run.run_id).left == () and not processes.labelled(run.run_id)
