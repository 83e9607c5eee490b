"""The network rung on GKE, Vertex AI and Compute Engine: the services are played, the hosts write what real ones write
into the run's home."""

import sys
import tarfile
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[3]
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
from fakes.compute_engine.run_of_hosts import Settling  # noqa: E402
from fakes.project import cloud_with_cluster  # noqa: E402
from fakes.secrets import API, FakeSecrets  # noqa: E402
from fakes.timeline import EPOCH, Timeline  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.service import APIS, FakeVertex  # noqa: E402

from muster.app.accept import record, run_network, rungs  # noqa: E402
from muster.app.accept.ladder import Meter, climb  # noqa: E402
from muster.backends.gce import requests  # noqa: E402
from muster.backends.gce.launcher import GceLauncher  # noqa: E402
from muster.backends.gke.launcher import GkeLauncher  # noqa: E402
from muster.backends.google.http import GoogleHttp  # noqa: E402
from muster.backends.google.stand_in import stand_in  # noqa: E402
from muster.backends.vertex.launcher import VertexLauncher  # noqa: E402
from muster.config.load import Loaded  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core.errors import MusterError  # noqa: E402
from muster.core.event_details.network import NetworkMeasured  # noqa: E402
from muster.health.network.expected import expected_bandwidth  # noqa: E402
from muster.storage.home import HOME_FILE, BucketHome  # noqa: E402
from muster.train.distributed import network  # noqa: E402

PRICE = 100.0
MEASURES = 8 << 30
#: Published for the machines below, and what is below 70 % of it: catalog/tables/health/busbw.yaml.
FAST, SLOW = {"gke": 370.0, "vertex": 185.0, "gce": 185.0}, {"gke": 250.0, "vertex": 120.0, "gce": 120.0}


class Elapsing(VirtualClock):
    """A program's clock: what is played goes on while it sleeps."""

    def __init__(self, act=lambda: None):
        super().__init__()
        self.act = act

    def wall_ns(self):
        return int((EPOCH.timestamp() + self.now_s) * 1e9)

    def sleep(self, seconds):
        super().sleep(seconds)
        self.act()


def gke(bucket):
    http = cloud_with_cluster()
    spec = cases.spec("a4-highgpu-8g", "flex_start_queued", project="example-project", run_dir=None)
    return spec, GkeLauncher(http=http, clock=VirtualClock(), store=bucket)


def vertex(bucket):
    clock = Elapsing()
    documents = discovery.Discovery(discovery.folder(), (*APIS, API))
    limits = {("us-central1", "custom_model_training_preemptible_nvidia_h100_mega_gpus"): 1000}
    service = FakeVertex(
        discovery=documents,
        timeline=Timeline(clock),
        manners=Manners(),
        limits=limits,
        elsewhere=FakeSecrets(documents),
    )
    spec = vertex_cases.spec("a3-megagpu-8g", "spot", run_dir=f"gs://example-bucket/{uuid.uuid4()}/llama")
    return spec, VertexLauncher(http=service, clock=clock, store=bucket)


class ComputeAndSecrets:
    def __init__(self):
        self.user = Operator()
        self.secrets = FakeSecrets(discovery=discovery.Discovery(discovery.folder(), ("secretmanager.v1",)))

    def send(self, call):
        return (self.secrets if "secretmanager" in call.url else self.user.cloud).send(call)


def gce(bucket):
    http = ComputeAndSecrets()
    spec = gce_cases.spec("a3-megagpu-8g", "spot", run_dir=f"gs://example-bucket/{uuid.uuid4()}")
    of = gce_cases.placement(spec)
    for request in requests.hosts(of, of.zones[0], turn=1):
        inner = request.body.get("instanceProperties") or request.body.get("properties") or {}
        for nic in inner.get("networkInterfaces", []):
            http.user.cloud.store[f"compute/v1/{nic['subnetwork']}"] = {"name": nic["subnetwork"].rpartition("/")[2]}
    for account in ("muster-hosts", "muster-supervisor"):
        http.user.cloud.store[f"iam/{account}/serviceAccounts/{account}@example-project.iam.gserviceaccount.com"] = {}
    return spec, GceLauncher(http=http, clock=Settling(http.user), store=bucket)


class Hosts:
    """Of one run, from the moment at which it has a home; ``says``: what each look brings, (host, attempt, kind,
    detail, step)."""

    def __init__(self, tmp_path, bucket, says):
        self.folder, self.bucket, self.says, self.logs = tmp_path / "hosts", bucket, list(says), {}

    def act(self, run):
        if run is None:
            return
        for host, attempt, kind, detail, step in self.says.pop(0) if self.says else ():
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
    monkeypatch.setattr(rungs, "START_S", 300.0)

    def climbed(place, *says, budget=1000.0):
        bucket = Bucket()
        spec, launcher = place(bucket)
        monkeypatch.setattr("muster.backends.load", lambda _: launcher)
        document = spec.model_dump(mode="json")
        document["check"] |= {"network": True}
        spec = RunSpec.model_validate(document, strict=False)
        loaded = Loaded(spec=spec, text="name: llama\n", source="run.yaml")
        tried = rungs.Trial(loaded=loaded, cluster=None, per_host_hour=PRICE)
        hosts = Hosts(tmp_path, bucket, says)
        meter = Meter(budget=budget, clock=Elapsing(lambda: hosts.act(tried.run)))
        began = datetime.now(UTC)
        found = climb([one for one in tried.rungs() if one.name == "network"], tried.clearing(), meter, print)
        written = record.record(spec, found, budget=budget, began=began, rehearsal=tried.rehearsal)
        record.write(tmp_path / "acceptance", written)
        return tried, found[0], written

    return climbed


places = pytest.mark.parametrize("place", [gke, vertex, gce])


def evidence(tmp_path, tried):
    with tarfile.open(record.pack(tmp_path / "acceptance", tried.run)) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


@places
def test_a_network_as_published_passes_and_is_a_rehearsal(climbs, place):
    name = place.__name__
    tried, rung, written = climbs(place, started("h0"), started("h1", kernels="b") + attempt("h0", "h1"),
                                  measured(FAST[name]))  # fmt: skip
    assert rung.outcome == "passed", rung.said
    assert (
        f"bus bandwidth {FAST[name]:g} GB/s, as published (>= " in rung.said and "h0 and h1, NCCL 2.27.3" in rung.said
    )
    assert written["rehearsal"] == f"{type(tried_http(tried)).__name__} in place of Google's services"
    assert written["rungs"][0]["said"] == rung.said and 0 < rung.spent <= 1000
    # The seconds are those of the looks, at both hosts' price.
    assert rung.spent == pytest.approx(rung.seconds / 3600 * 2 * PRICE, abs=0.01) and rung.seconds == 15.0


def tried_http(tried):
    from muster import backends

    return backends.load(tried.spec.backend).http


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
    assert rung.outcome == "failed" and "it began with h0 alone (heard of: h0, of 2)" in rung.said and rung.seconds < 60


@places
def test_a_host_that_falls_silent_while_it_measures_ends_it_at_once(climbs, place):
    detail = {"incident_id": "i1", "incident": "host_lost", "evidence": "h1: no heartbeat for 20 s"}
    lost = [("supervisor", 1, "incident.detected", detail, None)]
    _, rung, _ = climbs(place, started("h0", "h1"), attempt("h0", "h1"), lost, attempt("h0", "h1", number=2))
    assert rung.outcome == "failed" and rung.seconds < 60
    assert "attempt 1 was lost before its network was measured: h1: no heartbeat for 20 s" in rung.said


@places
def test_the_budget_ends_the_wait_before_it_is_passed(climbs, place):
    """Broken on purpose: the rung's longest time fits, and its figures never come."""
    _, rung, written = climbs(place, started("h0", "h1"), budget=118.0)
    # 300 s and half an hour to clear up, at $200: $116.67, and a look at the end.
    assert rung.outcome == "failed", rung.said
    _, rung, written = climbs(place, started("h0", "h1"), budget=116.0)
    assert (rung.outcome, rung.spent) == ("budget", 0.0) and "the budget is $116.00" in rung.said
    assert written["usd_at_most"] == 0


def test_a_budget_that_is_used_up_while_figures_are_waited_for(climbs, monkeypatch):
    monkeypatch.setattr(rungs, "START_S", 1.0)

    _, rung, _ = climbs(vertex, budget=101.0)
    assert rung.outcome == "failed" and rung.spent <= 101.0, rung.said
    monkeypatch.setattr(rungs.Meter, "wait", waits_for_ever)
    _, rung, written = climbs(vertex, budget=150.0)
    assert rung.outcome == "budget" and 49 < rung.spent <= 50, rung
    assert written["usd_at_most"] <= 150.0


def waits_for_ever(meter, condition, awaited, limit_s, why=lambda: ""):
    while not condition():
        meter.allow(awaited, per_hour=meter.per_hour, for_s=5.0)
        meter.clock.sleep(5.0)


def test_only_google_itself_is_google():
    class Kinder(GoogleHttp):
        pass

    assert stand_in(VertexLauncher(http=GoogleHttp())) is None
    assert stand_in(VertexLauncher(http=Kinder())) == "Kinder in place of Google's services"
