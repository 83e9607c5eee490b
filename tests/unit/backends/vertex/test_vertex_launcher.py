"""The verbs on Vertex AI, the service played and the bucket in memory: what goes wrong on the way, at every request.

Hosts are played by what they write into the run's home; real ones are in ``tests/live/test_vertex_run_live.py``.
"""

import dataclasses
import json
import threading
import time
import uuid

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes import supervisor_words  # noqa: E402
from fakes.bucket import Bucket  # noqa: E402
from fakes.clock import VirtualClock  # noqa: E402
from fakes.google_wire import Fault, Killed, Wire, each_request_each_way  # noqa: E402
from fakes.secrets import API, FakeSecrets  # noqa: E402
from fakes.timeline import EPOCH, Timeline  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.service import APIS, FakeVertex  # noqa: E402
from vertex_cases import spec  # noqa: E402

from muster.app.inspect import status as status_app  # noqa: E402
from muster.app.run import stop as stop_app  # noqa: E402
from muster.app.run import submit as submit_app  # noqa: E402
from muster.backends.google.request_log import RequestLogFile, mark_of  # noqa: E402
from muster.backends.letters import Letters  # noqa: E402
from muster.backends.protocols import Terminal  # noqa: E402
from muster.backends.vertex.launcher import VertexLauncher  # noqa: E402
from muster.backends.vertex.on_host import presence  # noqa: E402
from muster.backends.vertex.on_host.presence import HostRecord  # noqa: E402
from muster.config.load import Loaded  # noqa: E402
from muster.core.errors import AccessError, BackendError, CapacityError, ConflictError, MusterError, UsageError  # noqa: E402
from muster.core.typed_json import encode  # noqa: E402
from muster.core.types import JobState  # noqa: E402
from muster.protocol.client import AskStatus  # noqa: E402
from muster.protocol.codec import encode as encode_message  # noqa: E402
from muster.protocol.lease import EndRecord, LeaseRecord  # noqa: E402
from muster.protocol.version import MINE  # noqa: E402
from muster.storage import run_registry  # noqa: E402
from muster.transport.secure_session import run_token  # noqa: E402

DOCUMENTS = discovery.Discovery(discovery.folder(), (*APIS, API))
REGIONS = ["us-central1", "us-east4"]
METRIC = "custom_model_training_nvidia_h100_gpus"
MISSING = "projects/example-project/secrets/none/versions/1"
SPEC = spec("a3-highgpu-8g", "on_demand", locations=REGIONS)


class Clock(VirtualClock):
    def wall_ns(self):
        return int((EPOCH.timestamp() + self.now_s) * 1e9)


class User:
    """One machine's, with its own folder of runs; ``at`` gives another one at the same project and bucket."""

    def __init__(self, manners=None, of=None, **service):
        if of is None:
            self.clock, self.bucket = Clock(), Bucket()
            self.home = f"gs://example-bucket/{uuid.uuid4().hex}/llama"  # the store is shared by all tests
            self.time = Timeline(self.clock)
            self.secrets = FakeSecrets(DOCUMENTS)
            limits = {(region, METRIC): 1000 for region in REGIONS}
            self.vertex = FakeVertex(discovery=DOCUMENTS, timeline=self.time, manners=manners or Manners(),
                                     limits=limits, elsewhere=self.secrets, **service)  # fmt: skip
        else:
            self.clock, self.bucket, self.home = of.clock, of.bucket, of.home
            self.time, self.secrets, self.vertex = of.time, of.secrets, of.vertex
        self.wire = Wire(self.vertex, self.clock)
        self.launcher = VertexLauncher(http=self.wire, store=self.bucket, clock=self.clock)

    def submit(self, spec=SPEC):
        spec = spec.model_copy(update={"run_dir": self.home})
        return submit_app.submit(Loaded(spec=spec, text="name: llama\n", source="run.yaml"))

    def status(self, run):
        self.time.settle()
        return self.launcher.poll(self.launcher.find(run.run_id) or handle_of(run))

    def until(self, run, *states, every_s=30.0):
        for _ in range(2000):
            if (found := self.status(run)).state in states:
                return found
            self.time.sleep(every_s)
        raise AssertionError(found)

    @property
    def job(self):
        (found,) = self.vertex.jobs.values()
        return found

    def going(self):
        return [job for job in self.vertex.jobs.values() if not job.final]

    def put(self, name, record):
        self.bucket.put(f"{self.home}/{name}", record if isinstance(record, bytes) else encode(record))

    def holds(self):
        """A host's supervisor has the run."""
        until = time.time_ns() + 10**12
        self.put("lease.json", LeaseRecord(version=MINE, term=1, address=("10.0.0.9", 7000), pid=1, machine="w",
                                           boot_id="b", expires_wall_ns=until, expires_mono_ns=until))  # fmt: skip

    def ends(self, code, submission="1"):
        record = EndRecord(job="x", submission=submission, term=1, outcome="x", exit_code=code, reason="all steps done",
                           wall_ns=1)  # fmt: skip
        self.put("end.json", record)


def handle_of(run):
    from muster.core.types import JobHandle

    return JobHandle(run_id=run.run_id, backend="vertex", job_id="", run_dir=str(run.path))


@pytest.fixture
def user(tmp_path, monkeypatch):
    return made(tmp_path, monkeypatch)


def made(tmp_path, monkeypatch, **given):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = User(**given)
    monkeypatch.setattr("muster.backends.load", lambda _: found.launcher)
    return found


def test_a_submit_makes_one_job_and_what_its_hosts_need(user):
    found = user.submit()
    run = found.run
    assert found.handle.job_id == user.job.body["name"] and not found.handle.warnings
    words = user.job.spec["workerPoolSpecs"][0]["containerSpec"]["args"]
    sha256 = words[words.index("--run-file-sha256") + 1]
    assert f"{user.home}/run-files/{sha256}" in user.bucket.list(user.home)
    (secret,) = user.secrets.versions
    assert user.secrets.versions[secret] == [run_token(run.path)]
    (binding,) = user.secrets.policies[secret]["bindings"]
    assert binding["members"] == [f"serviceAccount:{SPEC.vertex.service_account}"]
    everything = json.dumps(user.job.body) + "".join(url for _, url in user.wire.log)
    assert run_token(run.path).decode() not in everything
    assert user.submit().again and len(user.vertex.jobs) == 1
    assert user.until(run, JobState.RUNNING).reason.startswith(f"custom job {user.job.number} in us-central1 runs")


def test_waiting_is_said_with_its_reason_and_another_region_is_asked_by_whoever_looks(tmp_path, monkeypatch):
    user = made(tmp_path, monkeypatch)
    user.vertex.used["us-central1", METRIC] = 990
    run = user.submit().run
    user.time.sleep(600)
    assert "waits for 10 min for quota or machines" in user.status(run).reason
    running = user.until(run, JobState.RUNNING, every_s=300)
    assert "in us-east4 runs" in running.reason and "us-central1: the region kept the request waiting" in running.reason
    assert user.clock.now_s > 7200 and [job.region for job in user.going()] == ["us-east4"]
    first = next(iter(user.vertex.jobs.values()))
    assert first.state == "JOB_STATE_CANCELLED", "one active request at a time"
    late = RequestLogFile(store=user.bucket, home=user.home).claim(mark_of(run.run_id, 1, 1), first.number, 0)
    assert late is None, "a host of it that wakes late does nothing"


def test_a_request_that_is_refused_everywhere_leaves_nothing(tmp_path, monkeypatch):
    user = made(tmp_path, monkeypatch)
    user.vertex.limits = {}
    with pytest.raises(CapacityError, match="us-central1: the quota is too small; us-east4: the quota"):
        user.submit()
    assert not user.vertex.jobs and not user.secrets.versions and not list(run_registry.registry())
    user.vertex.limits = {(region, METRIC): 1000 for region in REGIONS}
    assert user.submit().handle.job_id, "its home is free for the next try"


def test_no_machines_anywhere_is_an_end_with_every_reason(tmp_path, monkeypatch):
    user = made(tmp_path, monkeypatch, empty=set(REGIONS))
    run = user.submit().run
    end = user.until(run, JobState.FAILED, every_s=300)
    assert end.exit_code == 4 and end.reason.count("the region had no machines") == 2


@pytest.mark.parametrize("code, state", [(0, "succeeded"), (130, "stopped"), (1, "failed"), (75, "preempted")])
def test_the_runs_end_is_what_its_home_says_whatever_vertex_says(user, code, state):
    run = user.submit().run
    user.until(run, JobState.RUNNING)
    user.ends(code)
    going = user.status(run)
    if code == 75:
        assert going.state is JobState.RUNNING, "it is taken away, and its containers come back"
    else:
        assert going.state.value == state and "its hosts leave" in going.reason
    user.job.exit("workerpool0-0", 0)
    end = user.status(run)
    assert (end.state.value, end.exit_code) == (state, code) and "all steps done" in end.reason


def test_a_job_that_succeeded_without_an_end_of_the_run_did_not(user):
    run = user.submit().run
    user.until(run, JobState.RUNNING)
    user.job.exit("workerpool0-0", 0)
    end = user.status(run)
    assert end.state is JobState.FAILED and "no end of the run" in end.reason


def test_a_host_that_failed_says_why_before_vertex_does(user):
    run = user.submit().run
    user.until(run, JobState.RUNNING)
    mark = user.job.body["labels"]["muster-nonce"]
    failed = HostRecord(index=1, host="host-1-x", state="failed", said="the secret may not be read")
    presence.tell(user.bucket, user.home, mark, failed)
    user.job.exit("workerpool1-0", 1)
    user.time.sleep(60)
    found = user.status(run)
    assert "Vertex says why about a minute after the end; host 1: the secret may not be read" in found.reason
    user.time.sleep(120)
    end = user.status(run)
    assert end.state is JobState.FAILED and "workerpool1-0 with 1; host 1: the secret" in end.reason


def test_each_host_has_its_link(tmp_path, monkeypatch):
    user = made(tmp_path, monkeypatch)
    run = user.submit(spec("a3-highgpu-8g", "on_demand", vertex={"web_access": True})).run
    user.until(run, JobState.RUNNING)
    up = HostRecord(index=1, host="host-1-x", state="up", address="10.9.8.7")
    presence.tell(user.bucket, user.home, user.job.body["labels"]["muster-nonce"], up)
    tasks = user.status(run).tasks
    assert tasks["host-0"].startswith("shell: https://workerpool0-0-")
    assert tasks["host-1"].startswith("up at 10.9.8.7, shell: https://workerpool1-0-")


# ---------------------------------------------------------------- what goes wrong on the way


def trained(user):
    """The hosts of every job wake and ask whether they count; returns the jobs that train."""
    found = []
    for number, job in user.vertex.jobs.items():
        mark = job.body["labels"]["muster-nonce"]
        if RequestLogFile(store=user.bucket, home=user.home).claim(mark, number, 0):
            found.append(number)
        elif job.state == "JOB_STATE_RUNNING":
            job.exit("workerpool0-0", 0)  # its first host ends it: another job counts, or none
    return found


def until_submitted(user):
    for _ in range(4):
        try:
            return user.submit().run
        except MusterError:
            user.time.sleep(150)
    raise AssertionError("never submitted")


def requests_of_a_submit(tmp_path, monkeypatch):
    user = made(tmp_path / "counted", monkeypatch)
    user.submit()
    return len(user.wire.log)


def test_every_request_of_a_submit_may_go_wrong_in_every_way(tmp_path, monkeypatch):
    """Whatever came of it: submitted again, one job trains; and after `down` nothing goes on."""
    ways = each_request_each_way(requests_of_a_submit(tmp_path, monkeypatch))
    for number, faults in enumerate(ways):
        user = made(tmp_path / str(number), monkeypatch)
        user.wire.faults = dict(faults)
        run = until_submitted(user)
        user.time.sleep(200)
        user.wire.deliver()
        user.time.sleep(60)
        for _ in range(60):
            assert len(trained(user)) == 1, faults
            user.status(run)
            user.time.sleep(30)
        assert len(user.going()) == 1, f"{faults}: the other one was ended"
        assert stop_app.down(run.run_id).left == () and not user.going(), faults
        # A secret's creation may come after its run was given up: without a version it holds and costs nothing.
        assert not any(user.secrets.versions.values()), faults


def test_a_submit_killed_after_any_request_is_completed_by_the_next(tmp_path, monkeypatch):
    for number in range(1, requests_of_a_submit(tmp_path, monkeypatch) + 1):
        user = made(tmp_path / str(number), monkeypatch)
        user.wire.kill_at = number
        with pytest.raises(Killed):
            user.submit()
        user.wire.kill_at = None
        run = until_submitted(user)
        user.time.sleep(60)
        assert len(user.going()) == 1 == len(trained(user)), number
        assert stop_app.down(run.run_id).left == ()


def test_a_down_killed_after_any_request_is_completed_by_the_next(tmp_path, monkeypatch):
    number = 0
    while True:
        number += 1
        user = made(tmp_path / str(number), monkeypatch)
        run = user.submit().run
        user.until(run, JobState.RUNNING)
        user.wire.kill_at = len(user.wire.log) + number
        try:
            stop_app.down(run.run_id)
        except Killed:
            user.wire.kill_at = None
            assert stop_app.down(run.run_id).left == () and not user.going() and not user.secrets.versions
        else:
            break
    assert number > 5


def test_two_who_submit_at_the_same_time_make_one_run(user, tmp_path, monkeypatch):
    """Another machine with the same run file: the bucket belongs to whoever was first."""
    run = user.submit().run
    other = User(of=user)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("muster.backends.load", lambda _: other.launcher)
    with pytest.raises(ConflictError, match=run.run_id):
        other.submit()
    assert len(user.vertex.jobs) == 1 and not list(run_registry.registry())
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    assert user.until(run, JobState.RUNNING) and len(trained(user)) == 1, "giving up has not ended the other run"


def test_a_bucket_that_may_not_be_written_leaves_nothing_and_says_so(user):
    user.bucket.closed = True
    with pytest.raises(AccessError, match="403"):
        user.submit()
    assert not user.vertex.jobs and not list(run_registry.registry())


def test_a_job_that_came_after_down_trains_never_and_is_ended(tmp_path, monkeypatch):
    """The answer was lost, and the request arrives two minutes later."""
    user = made(tmp_path, monkeypatch)
    create = next(n for n, (method, url) in enumerate(counted(tmp_path, monkeypatch), 1)
                  if method == "POST" and url.endswith("/customJobs"))  # fmt: skip
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("muster.backends.load", lambda _: user.launcher)
    user.wire.faults = {create: Fault.DELAYED, create + 1: Fault.DENIED}
    with pytest.raises(MusterError):
        user.submit()
    user.time.sleep(130)
    user.wire.deliver()
    assert len(user.vertex.jobs) == 1 and trained(user) == [], "whoever gave up has said so in the home"


def test_a_list_that_lags_longer_makes_two_jobs_and_one_of_them_trains(tmp_path, monkeypatch):
    """Longer than is waited for: what cannot be prevented is found, and the owner trains."""
    create = next(n for n, (_, url) in enumerate(counted(tmp_path, monkeypatch), 1) if url.endswith("/customJobs"))
    user = made(tmp_path, monkeypatch, manners=Manners(list_lag_s=90.0))
    user.wire.faults = {create: Fault.LOST}
    run = user.submit().run
    user.time.sleep(90)
    first, second = user.vertex.jobs
    file, mark = RequestLogFile(store=user.bucket, home=user.home), mark_of(run.run_id, 1, 1)
    assert file.claim(mark, second, 0) and not file.claim(mark, first, 0), "the host that wakes first, of either job"
    user.until(run, JobState.RUNNING)
    user.time.sleep(600)
    states = {number: job.state for number, job in user.vertex.jobs.items()}
    assert states == {first: "JOB_STATE_CANCELLED", second: "JOB_STATE_RUNNING"}


def counted(tmp_path, monkeypatch):
    user = made(tmp_path / "counted", monkeypatch)
    user.submit()
    return user.wire.log


def test_a_correction_is_another_submission_of_the_same_run(user):
    run = user.submit().run
    user.until(run, JobState.RUNNING)
    first = user.job
    stop_app.down(run.run_id)
    again = user.submit()
    assert again.run.run_id == run.run_id and not again.again and len(user.vertex.jobs) == 2
    second = next(job for job in user.vertex.jobs.values() if job is not first)
    assert second.body["labels"]["muster-nonce"] != first.body["labels"]["muster-nonce"]
    assert trained(user) == [second.number]


def test_a_secret_that_may_not_be_shared_is_a_warning(user, monkeypatch):
    def closed(self, version, account):
        raise AccessError("403: setIamPolicy")

    monkeypatch.setattr("muster.backends.google.secret_manager.SecretManager.allow", closed)
    (warning,) = user.submit().handle.warnings
    assert "has to be allowed already" in warning


@pytest.mark.parametrize("given", [{"secrets": {"KEY": MISSING}}, {"vertex": {"hugging_face_secret": MISSING}}])
def test_a_secret_that_is_not_there_is_said_before_a_machine_is_asked_for(user, given):
    with pytest.raises(UsageError, match=f"is to come from {MISSING}, which does not exist"):
        user.submit(spec("a3-highgpu-8g", "on_demand", locations=REGIONS, **given))
    assert not user.vertex.jobs and not user.secrets.versions and not list(run_registry.registry())


# ---------------------------------------------------------------- letters


class Host:
    """The mailbox's end on a host; its programs answer at once."""

    def __init__(self, user, run, index=0, holds=True):
        self.asked, self.letters = [], Letters(
            store=user.bucket, home=user.home, run_id=run.run_id, token=run_token(run.path), index=index, children=self,
            env={}, run_dir=run.path, holds=lambda: holds,
        )  # fmt: skip

    def run(self, argv, env, *, line, timeout_s):
        from muster.backends.host.children import Finished

        self.asked.append((list(argv), line))
        if "remote_entrypoint" in " ".join(argv):
            return Finished(code=0, out=b"noise\n" + encode_message(supervisor_words.status()) + b"\n", err=b"")
        return Finished(code=7, out=b"o\xff", err=b"e")

    def __enter__(self):
        self.letters.start()
        return self

    def __exit__(self, *_):
        self.letters.stop()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("muster.backends.mailbox.LOOK_S", 0.02)
    monkeypatch.setattr("muster.backends.mailbox.LOOK_S", 0.02)


@pytest.fixture
def spoken(user, quick):
    """A running run, asked in real time."""
    run = user.submit().run
    user.until(run, JobState.RUNNING)
    from muster.core.clock import SystemClock

    user.launcher = dataclasses.replace(user.launcher, clock=SystemClock())
    return user, run


def test_a_question_reaches_whoever_holds_the_run(spoken):
    user, run = spoken
    with pytest.raises(BackendError, match="no host supervises"):
        user.launcher.ask(run.run_id, AskStatus())
    user.holds()
    with Host(user, run) as host:
        answer = user.launcher.ask(run.run_id, AskStatus())
        assert answer == supervisor_words.status()
        corrected = user.launcher.ask(run.run_id, AskStatus(), resolved=SPEC.model_dump_json())
    assert corrected == answer and b'"resolved":"{' in host.asked[-1][1].replace(b" ", b"")
    assert any("/run/1/resolved.json" in uri for uri in user.bucket.list(user.home)), "hosts that start anew find it"


def test_a_command_runs_on_the_host_that_was_meant(spoken):
    user, run = spoken
    out, err = bytearray(), bytearray()
    terminal = Terminal(out=out.extend, err=err.extend)
    with pytest.raises(BackendError, match="host 1 of"):
        user.launcher.exec(run.run_id, ["x"], terminal, host=1)
    up = HostRecord(index=1, host="host-1-x", state="up")
    presence.tell(user.bucket, user.home, user.job.body["labels"]["muster-nonce"], up)
    with Host(user, run, index=0), Host(user, run, index=1, holds=False) as second:
        assert user.launcher.exec(run.run_id, ["nvidia-smi", "-L"], terminal, host=1) == 7
    assert (bytes(out), bytes(err)) == (b"o\xff", b"e") and second.asked == [(["nvidia-smi", "-L"], b"")]
    with pytest.raises(UsageError, match="it has 2, counted from 0"):
        user.launcher.exec(run.run_id, ["x"], terminal, host=2)
    with pytest.raises(UsageError, match="no terminal"):
        user.launcher.exec(run.run_id, ["bash"], dataclasses.replace(terminal, tty=True))


def test_a_letter_of_somebody_without_the_token_is_not_read(spoken, monkeypatch):
    user, run = spoken
    user.holds()
    monkeypatch.setattr("muster.backends.bucket_launcher.ASK_S", 0.5)
    with Host(user, run) as host:
        host.letters.token = b"x" * 64
        stranger = Host(user, run)
        stranger.letters.token = b"y" * 64
        (run.path / "token").write_text("z" * 64 + "\n")
        with pytest.raises(BackendError, match="took the question"):
            user.launcher.ask(run.run_id, AskStatus(), timeout_s=0.5)
    assert host.asked == []


def test_status_prints_what_a_person_reads(user):
    before = threading.active_count()  # other tests' pools may still hold threads
    run = user.submit().run
    user.until(run, JobState.RUNNING)
    found = status_app.status(run.run_id)
    assert found.status.state is JobState.RUNNING and found.to_json()["backend"] == "vertex"
    assert threading.active_count() < before + 50
