"""A run on the unkind Compute Engine from `muster submit` to `down`: what a person is told, and what is there."""

import base64
import dataclasses
import time
import uuid

import pytest
from fakes.bucket import Bucket
from fakes.compute_engine import instances
from fakes.compute_engine.operator import Operator
from fakes.compute_engine.run_of_hosts import Settling
from fakes.discovery import Discovery, folder
from fakes.google_wire import Fault, Killed, Wire, turning_points
from fakes.secrets import FakeSecrets
from gce_cases import spec
from thorough import usually

from muster.app.run import stop as stop_app
from muster.app.run import submit as submit_app
from muster.backends.gce import host, requests
from muster.backends.gce.compute import Compute
from muster.backends.gce.launcher import GceLauncher, submission_of
from muster.backends.gce.provision import Hosts
from muster.backends.google.request_log import RequestLogFile
from muster.backends.google.session import Session
from muster.backends.host.children import Finished
from muster.backends.host.state import Exit, Outcome, State
from muster.backends.letters import Letters
from muster.backends.protocols import Terminal
from muster.config.load import Loaded
from muster.core.errors import AccessError, CapacityError, MusterError, UsageError
from muster.core.typed_json import encode
from muster.core.types import JobState
from muster.protocol.client import AskStatus, HostStatus, SupervisorStatus
from muster.protocol.codec import encode as frame
from muster.protocol.lease import EndRecord, HomeStatus, LeaseRecord
from muster.protocol.version import MINE
from muster.storage import run_registry
from muster.storage.job_record import SUBMISSION

ZONES = ["us-central1-a", "us-central1-b"]
NEEDED, OVER = host.Fate.NEEDED, host.Fate.OVER


class Google:
    """Both services on one wire."""

    def __init__(self, **service):
        self.user = Operator(**service)
        self.cloud = self.user.cloud
        self.secrets = FakeSecrets(discovery=Discovery(folder(), ("secretmanager.v1",)))

    def send(self, call):
        return (self.secrets if "secretmanager" in call.url else self.cloud).send(call)

    def network_for(self, of):
        for zone in of.placement.zones:
            for request in requests.hosts(of.placement, zone, request_number=1):
                inner = request.body.get("instanceProperties") or request.body.get("properties") or {}
                for nic in inner.get("networkInterfaces", []):
                    self.cloud.store[f"compute/v1/{nic['subnetwork']}"] = {"name": nic["subnetwork"].split("/")[-1]}
        for account in ("muster-hosts", "muster-supervisor"):
            email = f"{account}@example-project.iam.gserviceaccount.com"
            self.cloud.store[f"iam/{account}/serviceAccounts/{email}"] = {}


class Stage:
    """The launcher of a person, and what happens in the project."""

    def __init__(self, spec, **service):
        self.google, self.bucket, self.spec = Google(**service), Bucket(), spec
        self.clock = Settling(self.google.user)
        self.launcher = self.person()

    def person(self, **faults):
        self.wire = Wire(self.google, self.google.user.clock, **faults)
        clock = dataclasses.replace(self.clock)
        return GceLauncher(http=self.wire, store=self.bucket, clock=clock)

    def submit(self):
        return submit_app.submit(Loaded(spec=self.spec, text="name: llama\n", source="run.yaml"))

    def request(self):
        """Of a run whose folder is there, as `submit` makes it."""
        run_id = run_registry.new_run_id("llama")
        path = run_registry.place(run_id, None)
        resolved = self.launcher.resolve(self.spec)
        text = resolved.model_dump_json(indent=1) + "\n"
        run_registry.create(run_id, path, run_file="name: llama\n", resolved=text)
        found = self.launcher.render(resolved, run_id=run_id, run_dir=str(path))
        self.google.network_for(submission_of(found))
        return dataclasses.replace(found, labels={**found.labels, "submission": "1"})

    def hosts(self, request):
        """What the supervisor's machine runs."""
        of = submission_of(request).placement
        session = Session(http=self.google, clock=self.clock)
        file = self.launcher._file(of)
        wall_s = lambda: self.clock.wall_ns() / 1e9  # noqa: E731
        return Hosts(placement=of, compute=Compute(session=session, project=of.project), file=file, wall_s=wall_s)

    def until_hosts(self, request, hosts=None):
        hosts = hosts or self.hosts(request)
        for _ in range(200):
            if hosts.step():
                return
            self.clock.sleep(10)
        raise AssertionError(self.launcher._file(hosts.placement).read())

    def names(self):
        return sorted(key.rpartition("/")[2] for key in self.google.cloud.store if "/instances/" in key)

    def tell(self, request, name, stage, words, boot="b1"):
        home = submission_of(request).placement.home
        line = f"{self.clock.wall_ns() // 10**9} {words}\n"
        self.bucket.put(f"{home}/machines/{name}/{boot}.{stage}", line.encode())

    def joined(self, request, *names):
        home = submission_of(request).placement.home
        known = {name: HostStatus(connected=True, ready=True, active=True, ranks=(0,)) for name in names}
        status = SupervisorStatus(phase="train", reason="", attempt=1, step=3, hosts=known)
        self.bucket.put(f"{home}/status.json", encode(HomeStatus(wall_ns=1, term=1, status=status)))


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))

    def make(mode="on_demand", machine="g2-standard-48", service=None, **changes):
        home = f"gs://example-bucket/{uuid.uuid4()}"
        found = Stage(spec(machine, mode, run_dir=home, locations=ZONES, **changes), **(service or {}))
        monkeypatch.setattr("muster.backends.load", lambda _: found.launcher)
        return found

    return make


def test_from_submit_to_down_in_words(stage):
    at = stage()
    request = at.request()
    handle = at.launcher.submit(request)
    stem = request.run_id
    said = []

    def look():
        found = at.launcher.poll(handle)
        said.append(found.reason)
        return found

    assert look().state is JobState.WAITING
    at.clock.sleep(40)
    for name in ("booted", "driver", "bundle", "started", "checked"):
        at.tell(request, f"{stem}-supervisor", name, "words")
    look()
    hosts = at.hosts(request)
    hosts.step()
    look()
    at.until_hosts(request, hosts)
    look()
    at.tell(request, f"{stem}-1-0", "booted", "as host")
    at.tell(request, f"{stem}-1-1", "booted", "as host")
    at.tell(request, f"{stem}-1-1", "failed", "gs://b/x is not what its name says")
    look()
    at.joined(request, f"{stem}-1-0")
    assert look().state is JobState.RUNNING
    at.joined(request, f"{stem}-1-0", f"{stem}-1-1")
    found = look()
    assert found.tasks["1-0"] == f"{stem}-1-0 in us-central1-a, RUNNING; joined"
    assert [line.replace(stem, "RUN") for line in said] == [
        "RUN-supervisor: booted for 25 s (limit 300 s)",
        "waiting for the supervisor to ask for hosts",
        "us-central1-a was asked for 2 x g2-standard-48 0 s ago",
        "RUN-1-0: booted for 35 s (limit 300 s) (and 1 more)",
        "RUN-1-1: driver failed: gs://b/x is not what its name says (and 1 more)",
        "1 of 2 hosts joined; RUN-1-1: driver failed: gs://b/x is not what its name says",
        "running: 2 hosts and the supervisor",
    ]
    left = at.launcher.remaining(handle)
    assert any("a day)" in line and line.startswith("instances/") for line in left)
    at.launcher.cancel(handle)
    assert at.launcher.remaining(handle) == [] and at.names() == []
    assert not at.google.secrets.versions and at.launcher.find(request.run_id) is None
    assert at.launcher.poll(handle).reason == "it was taken down"


def test_submitting_twice_is_one_supervisor_and_after_down_it_is_none(stage):
    at = stage()
    request = at.request()
    first = at.launcher.submit(request)
    assert at.launcher.submit(request) == first
    assert at.names() == [f"{request.run_id}-supervisor"]
    assert at.launcher.find(request.run_id) == first
    at.launcher.cancel(first)
    at.launcher.submit(request)
    assert at.names() == []


@pytest.mark.parametrize("fault", list(Fault))
def test_each_request_of_a_submit_may_go_wrong_in_each_way(stage, fault):
    whole = stage()
    whole.launcher.submit(whole.request())
    for number in turning_points(whole.wire.log)[:: usually(2, nightly=1)]:
        at = stage()
        request = at.request()
        at.launcher = at.person(faults={number: fault})
        try:
            at.launcher.submit(request)
        except MusterError:
            at.launcher.submit(request)
        at.clock.sleep(200)
        at.wire.deliver()
        at.clock.sleep(60)
        assert at.names() == [f"{request.run_id}-supervisor"], (number, whole.wire.log[number - 1])
        assert len(at.google.secrets.versions) == 1


def test_submit_killed_after_every_request(stage):
    whole = stage()
    whole.launcher = whole.person()
    whole.launcher.submit(whole.request())
    points = turning_points(whole.wire.log)
    assert len(points) > 3
    for number in points:
        at = stage()
        request = at.request()
        with pytest.raises(Killed):
            at.person(kill_at=number).submit(request)
        at.person().submit(request)
        assert at.names() == [f"{request.run_id}-supervisor"], number
        assert len(at.google.secrets.versions) == 1


def test_down_killed_after_every_request(stage):
    def started(at):
        request = at.request()
        handle = at.launcher.submit(request)
        at.until_hosts(request)
        return handle

    whole = stage()
    handle = started(whole)
    whole.person().cancel(handle)
    points = turning_points(whole.wire.log)
    assert len(points) > 3
    for number in points:
        at = stage()
        handle = started(at)
        with pytest.raises(Killed):
            at.person(kill_at=number).cancel(handle)
        at.launcher = at.person()
        at.launcher.cancel(handle)
        assert at.names() == [] and at.launcher.remaining(handle) == [], number


def test_no_room_for_the_supervisor_in_one_zone_and_then_in_none(stage):
    at = stage(service={"stock": {ZONES[0]: 0}})
    request = at.request()
    at.launcher.submit(request)
    (key,) = [key for key in at.google.cloud.store if "/instances/" in key]
    assert f"/{ZONES[1]}/" in key
    nowhere = stage(service={"stock": {ZONES[0]: 0, ZONES[1]: 0}})
    with pytest.raises(CapacityError, match=r"no zone has a machine for the supervisor: us-central1-a: the zone"):
        nowhere.launcher.submit(nowhere.request())
    assert nowhere.names() == []


def test_a_missing_grant_is_googles_own_sentence(stage):
    at = stage(service={"actors": {}})
    at.google.cloud.actors = {"muster-supervisor@example-project.iam.gserviceaccount.com": 1e9}
    with pytest.raises(AccessError, match=r"iam\.serviceAccountUser"):
        at.launcher.submit(at.request())


def test_a_new_submission_takes_the_place_of_the_old_one(stage):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    at.until_hosts(request)
    old = at.hosts(request)
    second = dataclasses.replace(request, labels={**request.labels, "submission": "2"})
    at.launcher.submit(second)
    assert at.names() == [f"{request.run_id}-supervisor"]
    assert old.step() is False and len(at.names()) == 1, "the old supervisor asks for nothing any more"
    at.until_hosts(second)
    assert at.names() == [f"{request.run_id}-2-0", f"{request.run_id}-2-1", f"{request.run_id}-supervisor"]


def test_an_orphan_is_found_by_its_label_in_any_zone(stage):
    at = stage()
    request = at.request()
    handle = at.launcher.submit(request)
    at.google.user.insert(f"{request.run_id}-7-0", "europe-west1-b", labels={"muster-run": request.run_id})
    at.clock.sleep(60)
    assert any("europe-west1-b" in line for line in at.launcher.remaining(handle))
    at.launcher.cancel(handle)
    assert at.names() == []


def test_the_supervisors_machine_is_gone_and_comes_again(stage):
    at = stage()
    request = at.request()
    handle = at.launcher.submit(request)
    at.until_hosts(request)
    instances.forget(at.google.cloud, at.google.user.at(f"{request.run_id}-supervisor"))
    found = at.launcher.poll(handle)
    assert "the supervisor's machine is gone, and 2 hosts are there and billed" in found.reason
    at.clock.sleep(4000)
    at.launcher.submit(request)
    assert len(at.names()) == 3


def test_the_end_stands_in_the_home(stage):
    at = stage()
    request = at.request()
    handle = at.launcher.submit(request)
    record = EndRecord(job=f"{request.run_id}-supervisor", submission="1", term=1, outcome="finished", exit_code=0,
                       reason="all steps are done", wall_ns=1)  # fmt: skip
    at.bucket.put(f"{submission_of(request).placement.home}/end.json", encode(record))
    found = at.launcher.poll(handle)
    assert (found.state, found.exit_code, found.reason) == (JobState.SUCCEEDED, 0, "finished: all steps are done")


def test_muster_submit_and_down_as_a_person_uses_them(stage):
    at = stage()
    at.google.network_for(submission_of(at.request()))
    found = submit_app.submit(Loaded(spec=at.spec, text="name: llama\n", source="run.yaml"))
    assert at.names() == [f"{found.run.run_id}-supervisor"]
    token = (found.run.path / "token").read_text().strip()
    assert len(token) == 64 and token not in str(at.google.cloud.store)
    assert not [uri for uri in at.bucket.list("gs://example-bucket/") if token.encode() in at.bucket.get(uri).data]
    assert stop_app.down(found.run.run_id).left == () and at.names() == []


def test_where_the_bucket_cannot_be_written_nothing_starts_and_nothing_is_kept(stage):
    at = stage()
    at.bucket.closed = True
    with pytest.raises(AccessError, match=r"storage\.objects"):
        submit_app.submit(Loaded(spec=at.spec, text="name: llama\n", source="run.yaml"))
    assert at.names() == [] and list(run_registry.registry()) == []


# ---------------------------------------------------------------- questions


@dataclasses.dataclass
class Programs:
    """What the machine runs for a question."""

    answer: bytes = b""
    asked: list = dataclasses.field(default_factory=list)

    def run(self, argv, env, *, line, timeout_s):
        self.asked.append((list(argv), line))
        return Finished(code=7, out=self.answer, err=b"no\n")


def serve(at, request, monkeypatch, programs, name):
    """The letters of a machine, in real time; the asker's clock is real, too."""
    monkeypatch.setattr("muster.backends.mailbox.LOOK_S", 0.02)
    monkeypatch.setattr("muster.backends.mailbox.LOOK_S", 0.02)
    from muster.core.clock import SystemClock

    at.launcher.clock = SystemClock()
    placement = submission_of(request).placement
    token = (run_registry.find(request.run_id).path / "token").read_bytes().strip()
    letters = Letters(store=at.bucket, home=placement.home, run_id=request.run_id, token=token, index=name,
                      children=programs, env={}, run_dir=None, holds=lambda: name.endswith("supervisor"))  # fmt: skip
    letters.start()
    return letters


def test_a_question_reaches_the_supervisor_through_the_bucket(stage, monkeypatch):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    home = submission_of(request).placement.home
    status = SupervisorStatus(phase="train", reason="", attempt=1, step=3)
    programs = Programs(answer=frame(status) + b"\n")
    letters = serve(at, request, monkeypatch, programs, f"{request.run_id}-supervisor")
    with pytest.raises(MusterError, match="no host supervises"):
        at.launcher.ask(request.run_id, AskStatus())
    lease = LeaseRecord(version=MINE, term=1, address=("10.0.0.3", 4000), pid=1, machine="m", boot_id="b",
                        expires_wall_ns=time.time_ns() + 10**12, expires_mono_ns=2**60)  # fmt: skip
    at.bucket.put(f"{home}/lease.json", encode(lease))
    assert at.launcher.ask(request.run_id, AskStatus()).step == 3
    assert "muster.app.remote_entrypoint" in programs.asked[0][0]
    letters.stop()


def test_a_command_reaches_a_host_through_the_bucket(stage, monkeypatch):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    with pytest.raises(UsageError, match="has no host now"):
        at.launcher.exec(request.run_id, ["true"], Terminal(out=print, err=print))
    at.until_hosts(request)
    programs = Programs(answer=b"GPU 0\n")
    letters = serve(at, request, monkeypatch, programs, f"{request.run_id}-1-1")
    heard = []
    terminal = Terminal(out=heard.append, err=heard.append)
    assert at.launcher.exec(request.run_id, ["nvidia-smi", "-L"], terminal, host=1) == 7
    assert heard == [b"GPU 0\n", b"no\n"] and programs.asked == [(["nvidia-smi", "-L"], b"")]
    with pytest.raises(UsageError, match="has no host 2: it has 2"):
        at.launcher.exec(request.run_id, ["true"], terminal, host=2)
    with pytest.raises(UsageError, match="no terminal"):
        at.launcher.exec(request.run_id, ["sh"], dataclasses.replace(terminal, tty=True))
    letters.stop()


def test_what_a_machine_is_told_is_what_was_submitted(stage, tmp_path):
    """The supervisor's machine asks for hosts with the digest that it was made with, also of a run with code."""
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    at = stage(command=[str(script)], data=None, model=None, training={})
    request = at.request()
    at.launcher.submit(request)
    (body,) = [one for key, one in at.google.cloud.store.items() if "/instances/" in key]
    values = {row["key"]: row["value"] for row in body["metadata"]["items"]}
    placement = submission_of(request).placement
    assert values["muster-files"] == placement.files_sha256
    machine = supervisors_machine(at, request, body)
    hosts = host.hosts_of(machine, at.bucket, Session(http=at.google, clock=at.clock))
    hosts.wall_s = lambda: at.clock.wall_ns() / 1e9
    at.until_hosts(request, hosts)
    for key, one in at.google.cloud.store.items():
        if "/instances/" in key:
            told = {row["key"]: row["value"] for row in one["metadata"]["items"]}
            assert told["muster-files"] == values["muster-files"]
    files = requests.run_files(placement.spec, placement)
    assert base64.b64encode(files.encoded())  # without the code it is another digest
    assert host.run_folder.digest(files.encoded()) != values["muster-files"]


def test_at_the_run_s_end_the_supervisor_s_machine_removes_everything_and_itself_last(stage):
    at = stage()
    request = at.request()
    at.launcher.submit(request)
    at.until_hosts(request)
    body = next(one for key, one in at.google.cloud.store.items() if key.endswith("-supervisor"))
    machine = supervisors_machine(at, request, body)
    hosts = host.hosts_of(machine, at.bucket, Session(http=at.google, clock=at.clock))
    place = host.GcePlace(home=None, machine=machine, hosts=hosts)
    assert len(at.names()) == 3 and at.google.secrets.versions
    assert place.leave(Exit(outcome=Outcome.END_UNWRITTEN, code=0), State()) == 1 and len(at.names()) == 3
    began_ns = at.clock.monotonic_ns()
    assert place.leave(Exit(outcome=Outcome.RUN_ENDED, code=0), State()) == 0
    assert at.clock.monotonic_ns() - began_ns > host.LINGER_S * 1e9, "hosts bring home the last of their logs"
    assert at.names() in ([], [machine.name])
    at.clock.sleep(300)
    assert not at.names() and not at.google.secrets.versions and hosts.file.read()[0].closed


def supervisors_machine(at, request, body):
    of = submission_of(request).placement
    return host.Machine(
        name=body["name"], zone=ZONES[0], address="10.0.0.3", boot="b", role="supervisor", run_id=request.run_id,
        home=of.home, files=of.files_sha256, submission="1", token_secret=of.token_secret,
    )  # fmt: skip


@pytest.mark.parametrize("home_is_gone", [True, False])
def test_a_machine_that_comes_after_its_run_was_taken_back_goes_by_itself(stage, home_is_gone, monkeypatch):
    at = stage()
    request = at.request()
    handle = at.launcher.submit(request)
    body = next(one for key, one in at.google.cloud.store.items() if "/instances/" in key)
    machine = supervisors_machine(at, request, body)
    session, project = Session(http=at.google, clock=at.clock), lambda: "example-project\n"
    assert host.fate(machine, at.bucket) is NEEDED
    assert host.fate(dataclasses.replace(machine, run_id="another"), at.bucket) is OVER, (
        "of the run that had this home before"
    )
    at.launcher.cancel(handle)
    assert at.names() == []
    if home_is_gone:
        for uri in at.bucket.list(machine.home):
            at.bucket.delete(uri)
    late = requests.supervisor(submission_of(request).placement, ZONES[0], attempt=9)
    Compute(session=session, project="example-project").ok("POST", late.url, late.body)
    at.clock.sleep(120)
    assert at.names() == [machine.name]
    other = dataclasses.replace(machine, submission="2")
    assert (host.fate(other, at.bucket) is OVER) == home_is_gone, "the log is another submission's"
    assert host.fate(machine, at.bucket) is OVER
    at.bucket.put(f"{machine.home}/requests.json", b"no log")
    assert host.fate(machine, at.bucket) is NEEDED, "what cannot be read says nothing"
    asked = []
    monkeypatch.setattr(host.subprocess, "run", lambda argv, **_: asked.append(argv))
    assert host.leave(dataclasses.replace(machine, role="host"), OVER, session, project) == 1, "again, until it is off"
    assert asked == [["systemctl", "poweroff"]] and at.names() == [machine.name], "a host has no right to remove"
    assert host.leave(machine, OVER, session, project) == 0
    at.clock.sleep(300)
    assert at.names() == [] and len(asked) == 1


def test_a_supervisor_that_comes_after_a_later_submission_removes_itself_alone(stage):
    """Both have one name, in two zones: the first request, of zone a, was carried out after the run was given up there,
    taken back and submitted again."""
    at = stage()
    request = at.request()
    at.launcher.cancel(at.launcher.submit(request))
    again = dataclasses.replace(request, labels={**request.labels, SUBMISSION: "2"})
    at.launcher.submit(again)
    body = next(one for key, one in at.google.cloud.store.items() if "/instances/" in key)
    machine = supervisors_machine(at, request, body)
    assert host.fate(machine, at.bucket) is host.Fate.SUPERSEDED
    assert host.fate(dataclasses.replace(machine, submission="2"), at.bucket) is NEEDED
    assert host.fate(dataclasses.replace(machine, submission="3"), at.bucket) is NEEDED, "its own log comes"
    log, generation = (file := RequestLogFile(store=at.bucket, home=machine.home)).read()
    generation = file.write(dataclasses.replace(log, supervisor_zone="", requests=()), generation)
    assert host.fate(machine, at.bucket) is NEEDED, "the later submission failed before it asked for anything"
    file.write(log, generation)
    session = Session(http=at.google, clock=at.clock)
    late = requests.supervisor(submission_of(request).placement, ZONES[1], attempt=9)
    Compute(session=session, project="example-project").ok("POST", late.url, late.body)
    at.clock.sleep(120)
    assert at.names() == [machine.name, machine.name]
    there = dataclasses.replace(machine, zone=ZONES[1])
    assert host.leave(there, host.Fate.SUPERSEDED, session, lambda: "example-project\n") == 1
    at.clock.sleep(300)
    [left] = [key for key in at.google.cloud.store if "/instances/" in key]
    assert f"/{ZONES[0]}/" in left


@pytest.mark.parametrize("key", ["secrets", "gce"])
def test_a_secret_that_is_not_there_is_said_before_a_machine_is_made(stage, key):
    missing = "projects/example-project/secrets/none/versions/1"
    at = stage(**{key: {"KEY" if key == "secrets" else "hugging_face_secret": missing}})
    with pytest.raises(UsageError, match=f"is to come from {missing}, which does not exist"):
        at.submit()
    assert not at.names() and not at.google.secrets.versions and not list(run_registry.registry())
