"""The network rung on GKE, Vertex AI and Compute Engine: the services are played, the hosts write what real ones write
into the run's home."""

import functools
import json
import re
import sys
import tarfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "golden" / name) for name in ("gke", "vertex", "gce")]
discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

import cases  # noqa: E402
import gce_cases  # noqa: E402
import vertex_cases  # noqa: E402
from fakes.bucket import Bucket  # noqa: E402
from fakes.clock import VirtualClock  # noqa: E402
from fakes.compute_engine.operator import Operator  # noqa: E402
from fakes.project import cloud_with_cluster  # noqa: E402
from fakes.secrets import API, FakeSecrets  # noqa: E402
from fakes.timeline import EPOCH, Timeline  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.service import APIS, FakeVertex  # noqa: E402

from muster.accept import levels, record, run_network  # noqa: E402
from muster.accept.ladder import Meter, climb  # noqa: E402
from muster.backends.gce import requests  # noqa: E402
from muster.backends.gce.compute import Compute  # noqa: E402
from muster.backends.gce.launcher import GceLauncher, submission_of  # noqa: E402
from muster.backends.gce.provision import Hosts as Provision  # noqa: E402
from muster.backends.gce.provision import instances_of  # noqa: E402
from muster.backends.gke.launcher import GkeLauncher  # noqa: E402
from muster.backends.google.http import GoogleHttp  # noqa: E402
from muster.backends.google.request_log import RequestLogFile  # noqa: E402
from muster.backends.google.session import Session  # noqa: E402
from muster.backends.google.stand_in import stand_in  # noqa: E402
from muster.backends.vertex.launcher import VertexLauncher  # noqa: E402
from muster.config.load import Loaded  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core.errors import MusterError  # noqa: E402
from muster.core.event_details.network import NetworkMeasured  # noqa: E402
from muster.health.network.expected import expected_bandwidth  # noqa: E402
from muster.storage.home import HOME_FILE, BucketHome  # noqa: E402
from muster.train.distributed import network  # noqa: E402

PODS = "api/v1/namespaces/default/pods"
WORKLOADS = "apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
PRICE = 100.0
MEASURES = 8 << 30
#: Published for the machines below, and what is below 70 % of it: catalog/tables/health/busbw.yaml.
FAST, SLOW = {"gke": 370.0, "vertex": 185.0, "gce": 185.0}, {"gke": 250.0, "vertex": 120.0, "gce": 120.0}


class Elapsing:
    """A program's clock: what is played goes on while it sleeps."""

    def __init__(self, time, act=lambda: None):
        self.time, self.act = time, act

    def monotonic_ns(self):
        return self.time.clock.monotonic_ns()

    def wall_ns(self):
        return int((EPOCH.timestamp() + self.time.clock.now_s) * 1e9)

    def sleep(self, seconds):
        self.time.sleep(seconds)
        self.act()


@dataclass
class Played:
    """A place whose time passes where somebody sleeps. ``there``: whether a host's programs run by now."""

    spec: RunSpec
    launcher: object
    time: Timeline
    there: Callable[[str], bool]
    goes_on: Callable[[], None] = lambda: None
    """Is called as time passes."""


def gke(bucket):
    """Kueue admits the JobSet after a while, and its pods run."""
    time, cloud = Timeline(VirtualClock()), cloud_with_cluster()
    spec = cases.spec("a4-highgpu-8g", "flex_start_queued", project="example-project", run_dir=None)
    launcher = GkeLauncher(http=Slow(cloud, time), clock=Elapsing(time), store=bucket)
    server, running = cloud.kubernetes, []

    def put(folder, one):
        server.handle("PUT", f"/{folder}/{one['metadata']['name']}", json.dumps(one).encode())

    def admitted(jobset):
        name = jobset["metadata"]["name"]
        owners, jobset["spec"]["suspend"] = [{"name": name, "uid": jobset["metadata"]["uid"]}], False
        put(WORKLOADS, {
            "kind": "Workload", "metadata": {"name": f"w-{name}", "ownerReferences": owners},
            "status": {"conditions": [{"type": kind, "status": "True"} for kind in ("QuotaReserved", "Admitted")]},
        })  # fmt: skip
        for role in jobset["spec"]["replicatedJobs"]:
            for index in range(role["replicas"]):
                labels = {
                    **role["template"]["spec"]["template"]["metadata"]["labels"],
                    "jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": role["name"],
                    "jobset.sigs.k8s.io/job-index": str(index),
                }  # fmt: skip
                pod = f"{name}-{role['name']}-{index}"
                put(PODS, {
                    "kind": "Pod", "metadata": {"name": pod, "labels": labels, "ownerReferences": owners},
                    "spec": role["template"]["spec"]["template"]["spec"], "status": {"phase": "Running"},
                })  # fmt: skip
                running.append(pod)

    def goes_on():
        for jobset in server.of_kind("JobSet"):
            if jobset["metadata"]["name"] not in waiting:
                waiting.add(jobset["metadata"]["name"])
                time.after(10.0, lambda jobset=jobset: admitted(jobset))
        time.settle()

    waiting = set()
    return Played(spec, launcher, time, lambda host: bool(running), goes_on)


def vertex(bucket, skew_s=20.0):
    """A host's programs run as soon as it is there; the job is RUNNING when all are, the chief last."""
    time = Timeline(VirtualClock())
    documents = discovery.Discovery(discovery.folder(), (*APIS, API))
    service = FakeVertex(
        discovery=documents,
        timeline=time,
        manners=Manners(queue_s=10.0, machine_s=10.0, skew_s=skew_s),
        limits={("us-central1", "custom_model_training_preemptible_nvidia_h100_mega_gpus"): 1000},
        elsewhere=FakeSecrets(documents),
    )
    spec = vertex_cases.spec("a3-megagpu-8g", "spot", run_dir=f"gs://example-bucket/{uuid.uuid4()}/llama")
    launcher = VertexLauncher(http=Slow(service, time), clock=Elapsing(time), store=bucket)
    names = {"h0": "workerpool0-0", "supervisor": "workerpool0-0", "h1": "workerpool1-0"}

    def there(host):
        time.settle()
        return any(one.running and one.name == names[host] for job in service.jobs.values() for one in job.workers)

    return Played(spec, launcher, time, there)


class ComputeAndSecrets:
    def __init__(self):
        self.user = Operator()
        self.secrets = FakeSecrets(discovery=discovery.Discovery(discovery.folder(), ("secretmanager.v1",)))

    def send(self, call):
        return (self.secrets if "secretmanager" in call.url else self.user.cloud).send(call)


class Remembering(GceLauncher):
    """What was submitted last is what the supervisor's machine finds in its metadata."""

    request = None

    def submit(self, request):
        self.request = request
        return super().submit(request)


def gce(bucket):
    """The supervisor's machine asks for the hosts."""
    service = ComputeAndSecrets()
    cloud, time = service.user.cloud, service.user.time
    spec = gce_cases.spec("a3-megagpu-8g", "spot", run_dir=f"gs://example-bucket/{uuid.uuid4()}")
    of = gce_cases.placement(spec)
    for request in requests.hosts(of, of.zones[0], request_number=1):
        inner = request.body.get("instanceProperties") or request.body.get("properties") or {}
        for nic in inner.get("networkInterfaces", []):
            cloud.store[f"compute/v1/{nic['subnetwork']}"] = {"name": nic["subnetwork"].rpartition("/")[2]}
    for account in ("muster-hosts", "muster-supervisor"):
        cloud.store[f"iam/{account}/serviceAccounts/{account}@example-project.iam.gserviceaccount.com"] = {}
    launcher = Remembering(http=Slow(service, time), clock=Elapsing(time), store=bucket)
    living = []

    def goes_on():
        time.settle()
        guests = [guest for guest in cloud.guests.values() if guest.up]
        if launcher.request is None or not guests:
            return living.clear()
        placement = submission_of(launcher.request).placement
        hosts = Provision(
            placement=placement,
            compute=Compute(session=Session(http=service, clock=Elapsing(time)), project=of.project),
            report=lambda line: None, file=RequestLogFile(store=bucket, home=placement.home),
            wall_s=lambda: Elapsing(time).wall_ns() / 1e9,
        )  # fmt: skip
        hosts.step()
        names = [one.name for one in instances_of(hosts.compute, placement.stem) if one.request_number]
        living[:] = [name for name in names if any(guest.name == name for guest in guests)]

    def there(host):
        return len(living) > {"supervisor": -1, "h0": 0, "h1": 1}[host]

    return Played(spec, launcher, time, there, goes_on)


class Slow:
    """A service whose every answer takes ``seconds``."""

    def __init__(self, service, time):
        self.service, self.time, self.seconds = service, time, 0.0

    def send(self, call):
        self.time.sleep(self.seconds)
        return self.service.send(call)

    def __getattr__(self, name):
        return getattr(self.service, name)


class Hosts:
    """Of one run, from the moment at which it has a home; ``says``: what each look brings, (host, attempt, kind,
    detail, step), once the hosts that say it are there."""

    def __init__(self, tmp_path, bucket, played, says):
        self.folder, self.bucket, self.played, self.says, self.logs = tmp_path / "hosts", bucket, played, list(says), {}

    def act(self, run):
        if run is None:
            return
        self.played.goes_on()
        speak = self.says and all(self.played.there(host) for host, *_ in self.says[0])
        for host, attempt, kind, detail, step in self.says.pop(0) if speak else ():
            self.log(run, host, attempt).append(kind, detail=detail, step=step, rank=0 if step else None)
        for log in self.logs.values():
            log.sync()  # what the bucket refuses now is sent with the next look, as by a real host

    def log(self, run, host, attempt):
        local = self.folder / host
        if (host, attempt) not in self.logs:
            (local / "events").mkdir(parents=True, exist_ok=True)
            (local / "run_id").write_text(run.run_id)
            home = BucketHome(local, (run.path / HOME_FILE).read_text().strip(), store=self.bucket, bulk=self.bucket)
            self.logs[host, attempt] = home.open_log(run.run_id, host, attempt)
        return self.logs[host, attempt]


def started(*hosts, kernels="ab"):
    return [
        (host, 0, "agent.started", {"pid": 1, "ranks": 8, "boot_id": kernel}, None)
        for host, kernel in zip(hosts, kernels, strict=False)
    ]


def attempt(*hosts, number=1):
    detail = {"world_size": 8 * len(hosts), "layout": {"dp_shard": 8}, "hosts": {host: [0] for host in hosts}}
    return [("supervisor", number, "attempt.started", detail, None)]


def measured(gb_s, *, wrong=0, hosts=("h0", "h1"), size=MEASURES, library="NCCL 2.27.3", **end):
    """All ranks' all_gather of ``size`` at this bus bandwidth; ``end``: why it is the largest."""
    figure = {"collective": "all_gather", "size_bytes": size, "seconds": size * 15 / 16 / gb_s / 1e9, "wrong": wrong}
    ends = [{"collective": "all_gather", "reason": "all"} | end]
    detail = {"hosts": list(hosts), "ranks": 16, "library": library, "figures": [figure], "ends": ends}
    return [("h0", 1, "network.measured", detail, None)]


@pytest.fixture
def climbs(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(levels, "START_S", 300.0)

    def climbed(place, *says, budget=1000.0, answers_s=0.0):
        bucket = Bucket()
        played = place(bucket)
        played.launcher.http.seconds = answers_s
        monkeypatch.setattr("muster.backends.load", lambda _: played.launcher)
        document = played.spec.model_dump(mode="json")
        document["check"] |= {"network": True}
        spec = RunSpec.model_validate(document, strict=False)
        loaded = Loaded(spec=spec, text="name: llama\n", source="run.yaml")
        tried = levels.Trial(loaded=loaded, cluster=None, per_host_hour=PRICE)
        hosts = Hosts(tmp_path, bucket, played, says)
        meter = Meter(budget=budget, clock=Elapsing(played.time, lambda: hosts.act(tried.run)))
        began = datetime.now(UTC)
        found = climb([one for one in tried.levels() if one.name == "network"], tried.clearing(), meter, print)
        written = record.record(spec, found, budget=budget, began=began, rehearsal=tried.rehearsal)
        record.write(tmp_path / "acceptance", written)
        return tried, found[0], written

    return climbed


SOON_S = 120.0
"""At once, beside the time that hosts take to come."""

places = pytest.mark.parametrize("place", [gke, vertex, gce])


def evidence(tmp_path, tried):
    with tarfile.open(record.pack(tmp_path / "acceptance", tried.run)) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


@places
def test_a_network_as_published_passes_and_is_a_rehearsal(climbs, place):
    name = place.__name__
    _, rung, written = climbs(place, started("h0"), started("h1", kernels="b") + attempt("h0", "h1"),
                                  measured(FAST[name]))  # fmt: skip
    assert rung.outcome == "passed", rung.said
    assert (
        f"bus bandwidth {FAST[name]:g} GB/s, as published (>= " in rung.said and "h0 and h1, NCCL 2.27.3" in rung.said
    )
    assert written["rehearsal"] == "Slow in place of Google's services"
    assert written["rungs"][0]["said"] == rung.said and 0 < rung.spent <= 1000
    # The seconds are those of the looks, at both hosts' price.
    assert rung.spent == pytest.approx(rung.seconds / 3600 * 2 * PRICE, abs=0.01) and 15.0 <= rung.seconds < SOON_S


@places
def test_a_slow_network_ends_it_with_the_evidence(climbs, place, tmp_path):
    name = place.__name__
    tried, rung, written = climbs(place, started("h0", "h1"), attempt("h0", "h1"), measured(SLOW[name]))
    assert rung.outcome == "failed" and not written["accepted"]
    assert f"bus bandwidth {SLOW[name]:g} GB/s, less than 70 % of what was published" in rung.said
    found = evidence(tmp_path, tried)
    assert rung.said in found[record.RECORD].replace("\\u2026", "…")
    assert any('"network.measured"' in text for one, text in found.items() if one.startswith("events/")), [*found]


@places
def test_wrong_results_end_it_however_fast_they_are(climbs, place):
    _, rung, _ = climbs(place, started("h0", "h1"), attempt("h0", "h1"), measured(FAST[place.__name__], wrong=7))
    assert rung.outcome == "failed" and "7 wrong values" in rung.said


def test_hosts_of_vertex_speak_before_their_job_runs_and_not_before_it_has_machines(climbs, monkeypatch):
    """A worker's programs start as soon as its machine is there; the chief's is the last, and makes the job RUNNING."""
    looks, waiting = [], levels.waiting

    def shown(*words, **more):
        looks.append(re.sub(r"custom job \d+ in us-central1|for \d+ min ?", "", waiting(*words, **more)).split())
        return " ".join(looks[-1])

    monkeypatch.setattr(levels, "waiting", shown)
    _, rung, _ = climbs(vertex, started("h1"), started("h0", kernels="b"))
    assert list(dict.fromkeys(map(" ".join, looks))) == [
        "waits for quota or machines (heard of: no host, of 2)",
        "gets its machines (heard of: no host, of 2)",
        "gets its machines (heard of: h1, of 2)",
        "runs",
    ]
    assert rung.said == "no figures of the network within 300 s: runs"


def test_a_chief_that_gets_no_machine_leaves_the_job_without_its_machines(climbs):
    """The other host waits for it, and says so."""
    _, rung, _ = climbs(functools.partial(vertex, skew_s=600.0), started("h1"), started("h0", kernels="b"))
    assert rung.outcome == "failed" and rung.said.endswith("gets its machines for 5 min (heard of: h1, of 2)")


GIB = 1 << 30


@places
@pytest.mark.parametrize(
    ("largest", "says"),
    [
        (
            measured(2.0, size=GIB, reason="time", next_bytes=8 * GIB, needed=25.77, available=20.0),
            "bus bandwidth 2 GB/s; no expected value for {family} for all_gather of 1024 MiB; too slow for larger "
            "messages: 8192 MiB with the repeats would take 26 s, and 20 s is the most; not judged, so not passed",
        ),
        (
            measured(500.0, size=GIB, reason="memory", next_bytes=8 * GIB, needed=11.0 * GIB, available=6.5 * GIB),
            "no memory for larger messages: 8192 MiB take 11 GiB, and one rank has 6.5 GiB free: what else is on its "
            "GPU?; not judged, so not passed",
        ),
        (
            measured(0.5, size=64 << 20, library="gloo"),
            "no expected value for {family} for all_gather of 64 MiB; not judged, so not passed",
        ),
    ],
    ids=["time", "memory", "gloo"],
)
def test_what_cannot_be_judged_is_not_passed(climbs, place, largest, says):
    """The family's figure is known and is of larger messages than any that was measured."""
    family = {"gke": "A4", "vertex": "A3 Mega", "gce": "A3 Mega"}[place.__name__]
    _, rung, written = climbs(place, started("h0", "h1"), attempt("h0", "h1"), largest)
    assert rung.outcome == "failed" and not written["accepted"]
    assert rung.said.endswith(says.format(family=family)), rung.said


def of(**detail):
    return NetworkMeasured.of(measured(**detail)[0][3])


def test_without_a_published_figure_it_is_said_why_the_sizes_ended():
    end = {"reason": "time", "next_bytes": 8 * GIB, "needed": 51.5, "available": 20.0}
    said = run_network.judged(of(gb_s=1.0, size=GIB, **end), family="A2")
    assert "bus bandwidth 1 GB/s; no expected value for A2; too slow for larger messages" in said
    assert "too slow" not in run_network.judged(of(gb_s=1.0), family="A2")


def test_a_message_smaller_than_the_largest_is_judged_where_it_is_large_enough():
    """The figure of A3 High is of 512 MiB."""
    end = {"reason": "memory", "next_bytes": 8 * GIB, "needed": 11.0 * GIB, "available": 6.5 * GIB}
    said = run_network.judged(of(gb_s=70.0, size=GIB, **end), family="A3 High")
    assert "as published" in said and "no memory for larger messages" in said
    with pytest.raises(MusterError, match=r"less than 70 %.*no memory for larger messages"):
        run_network.judged(of(gb_s=40.0, size=GIB, **end), family="A3 High")


def test_what_has_so_little_time_is_below_every_published_figure():
    """So a figure whose sizes ended for want of time is never one that only looks slow."""
    worst = max(
        larger / (network.MOST_S / (network.REPEATS + 1)) / 1e9
        for larger in network.SIZES[1:]
    )  # fmt: skip
    families = [expected_bandwidth(name) for name in ("A3 High", "A3 Mega", "A3 Ultra", "A4")]
    assert all(row is not None and worst < row.bad_gb_s / 4 for row in families), worst


@places
def test_a_host_that_never_comes_is_missed_by_its_number(climbs, place):
    """It waits until the time is over, and says of whom it heard."""
    _, rung, _ = climbs(place, started("h0"))
    assert rung.outcome == "failed" and "no figures of the network within 300 s" in rung.said
    assert rung.said.endswith("(heard of: h0, of 2)"), rung.said


@places
def test_a_run_that_begins_with_the_hosts_that_came_has_no_network(climbs, place):
    """``resources.min_hosts`` is 1 in an acceptance: such a run trains, and would be paid for."""
    _, rung, _ = climbs(place, started("h0"), attempt("h0"))
    assert (
        rung.outcome == "failed"
        and "it began with h0 alone (heard of: h0, of 2)" in rung.said
        and rung.seconds < SOON_S
    )


@places
def test_a_host_that_falls_silent_while_it_measures_ends_it_at_once(climbs, place):
    detail = {"incident_id": "i1", "incident": "host_lost", "evidence": "h1: no heartbeat for 20 s"}
    lost = [("supervisor", 1, "incident.detected", detail, None)]
    _, rung, _ = climbs(place, started("h0", "h1"), attempt("h0", "h1"), lost, attempt("h0", "h1", number=2))
    assert rung.outcome == "failed" and rung.seconds < SOON_S
    assert "attempt 1 was lost before its network was measured: h1: no heartbeat for 20 s" in rung.said


@places
def test_a_rung_whose_longest_time_is_too_dear_is_not_begun(climbs, place):
    """300 s and half an hour to clear up, at $200 an hour, are $116.67."""
    tried, rung, written = climbs(place, started("h0", "h1"), budget=116.0)
    assert (rung.outcome, rung.spent, tried.run) == ("budget", 0.0, None) and "the budget is $116.00" in rung.said
    assert written["usd_at_most"] == 0
    _, rung, _ = climbs(place, started("h0", "h1"), budget=125.0)
    assert rung.outcome == "failed" and "no figures of the network within 300 s" in rung.said


@places
@pytest.mark.parametrize("answers_s", [10.0, 60.0])
def test_a_budget_that_is_used_up_while_figures_are_waited_for(climbs, place, answers_s):
    """Broken on purpose: the rung's longest time just fits, and the service is slow, so that the submission takes what
    was meant for the figures, and each look takes longer than it should; clearing up does, too."""
    tried, rung, written = climbs(place, started("h0", "h1"), budget=117.0, answers_s=answers_s)
    assert rung.outcome == "budget" and "waiting for figures of the network may come to $1" in rung.said, rung
    assert tried.run is not None and not written["accepted"]
    assert written["rungs"][1]["outcome"] == "passed" and written["usd_at_most"] <= 117.0


def test_only_google_itself_is_google():
    class Kinder(GoogleHttp):
        pass

    assert stand_in(VertexLauncher(http=GoogleHttp())) is None
    assert stand_in(VertexLauncher(http=Kinder())) == "Kinder in place of Google's services"
