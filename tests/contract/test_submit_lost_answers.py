"""``muster submit --backends A,B``: whatever answer of A is lost, and whatever A refuses from then on, two places never
hold the run at the same time, and what is left is found by ``muster down``.

The launchers are real, the services played; each changing request of A's goes wrong once in each way in which nobody
can tell whether it was carried out.
"""

import itertools
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden" / "gke"))
from fakes.clock import VirtualClock
from fakes.google_wire import LATE_S, PATIENCE_S, Fault, refuse
from fakes.project import cloud_with_cluster
from launcher_cases import PLACES, SLEEP, Bucket, GceCase, VertexCase
from thorough import THOROUGH

from muster.app import submit_places
from muster.app.run import stop
from muster.app.submit_places import Way, submit_to_first
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.google.http import Call, Reply, Unreachable
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.google.request_log import RequestLog, RequestLogFile
from muster.backends.vertex.custom_job import NONCE_LABEL
from muster.core import processes
from muster.core.errors import MusterError
from muster.core.typed_json import decode
from muster.storage import run_registry

TEXT = (
    PLACES
    + """\
name: llama
command: ["-m", "this"]
"""
)
OVERRIDES = {
    "gke": ("backend=gke", "resources.cluster=muster"),
    "vertex": ("backend=vertex", "resources.locations=[us-central1]"),
    "gce": ("backend=gce",),
}
RUN = "app.kubernetes.io/instance"
#: Nobody can tell whether they were carried out.
LOST = (Fault.LOST, Fault.DELAYED, Fault.TRUNCATED, Fault.INTERNAL_AFTER, Fault.DROPPED)
#: What the place refuses from then on.
NOTHING, RIGHTS, ROOM, ALL = "nothing", "creations, for want of rights", "creations, for want of room", "everything"
REFUSALS = {
    RIGHTS: {name: (403, "PERMISSION_DENIED", "denied") for name in OVERRIDES},
    ROOM: {
        "gke": (403, "Forbidden", "exceeded quota"),
        "vertex": (429, "RESOURCE_EXHAUSTED", "quota metrics exceed quota limits"),
        "gce": (403, "quotaExceeded", "Quota exceeded"),
    },
    ALL: {name: (401, "UNAUTHENTICATED", "no credentials any more") for name in OVERRIDES},
}  # fmt: skip

#: (what becomes of one change, what is refused after it).
WAYS = [
    *((Fault.LOST, then) for then in (NOTHING, *REFUSALS)), (Fault.DELAYED, NOTHING), (Fault.DELAYED, ROOM),
    (Fault.TRUNCATED, NOTHING),
]  # fmt: skip
if THOROUGH:
    WAYS = list(itertools.product(LOST, (NOTHING, *REFUSALS)))


@dataclass
class Unkind:
    """The way to one place: its change number ``at`` goes wrong by ``fault``, and what comes after it by ``then``."""

    name: str
    answer: Callable[[Call], Reply]
    clock: VirtualClock
    at: int = 0
    fault: Fault = Fault.LOST
    then: str = NOTHING
    changes: list = field(default_factory=list)
    late: list = field(default_factory=list)

    def send(self, call):
        self.deliver()
        after = 0 < self.at <= len(self.changes)
        if after and self.then == ALL:
            return refuse(*REFUSALS[ALL][self.name])
        if call.method == "GET" or "dryRun" in call.url:
            return self.answer(call)
        self.changes.append((call.method, call.url))
        if len(self.changes) == self.at:
            return self.wrong(call)
        if after and self.then in REFUSALS and call.method != "DELETE" and not call.url.endswith(":cancel"):
            return refuse(*REFUSALS[self.then][self.name])
        return self.answer(call)

    def wrong(self, call):
        if self.fault is Fault.DELAYED:
            self.late.append((self.clock.now_s + LATE_S, call))
        elif self.fault is not Fault.DROPPED:
            reply = self.answer(call)
        if self.fault is Fault.INTERNAL_AFTER:
            return refuse(500, "INTERNAL", "an internal error")
        if self.fault is Fault.TRUNCATED:
            return Reply(status=reply.status, body={}, text='{"na')
        self.clock.sleep(PATIENCE_S)
        raise Unreachable("no answer")

    def deliver(self, *, all_=False):
        due = [row for row in self.late if all_ or row[0] <= self.clock.now_s]
        self.late = [row for row in self.late if row not in due]
        for _, call in due:
            self.answer(call)


class AnyRun(dict):
    def __missing__(self, run_id):
        return (SLEEP,)


class Places:
    """GKE, Vertex AI and Compute Engine of one user."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.folder, self.said = folder, []
        self.vertex, self.gce = VertexCase(folder / "v"), GceCase(folder / "g")
        self.gce.argvs = self.vertex.argvs = AnyRun()
        self.gce.launcher.meanwhile = lambda request: None
        self.cloud, clock = cloud_with_cluster(), VirtualClock()
        self.cloud.kubernetes.queues.add("muster-l4-on-demand")
        gke = GkeLauncher(http=self.cloud, clock=clock, store=Bucket())
        self.launchers = {"gke": gke, "vertex": self.vertex.launcher, "gce": self.gce.launcher}
        self.ways = {
            "gke": Unkind("gke", self.cloud._answer, clock),
            "vertex": Unkind("vertex", self.vertex.containers.send, self.vertex.wire.clock),
            "gce": Unkind("gce", self.gce.send, self.gce.user.clock),
        }
        self.cloud._answer = self.ways["gke"].send
        self.vertex.wire.service, self.gce.wire.service = self.ways["vertex"], self.ways["gce"]

    def submit(self, *names, patience_s=None):
        (self.folder / "run.yaml").write_text(TEXT)
        return submit_to_first(
            self.folder / "run.yaml", names=names, patience_s=patience_s, tell=self.said.append, clock=VirtualClock()
        )

    def settle(self):
        """All that was on its way has arrived."""
        for way in self.ways.values():
            way.deliver(all_=True)
            way.clock.sleep(600.0)
        self.vertex.containers.settle()
        self.gce.user.time.settle()
        for _ in range(5):  # what collects garbage works between requests
            self.cloud.kubernetes.handle("GET", "/api/v1/namespaces/default/pods")

    def is_open(self, machine):
        (home,) = (one["value"] for one in machine["metadata"]["items"] if one["key"] == "muster-home")
        log, _ = RequestLogFile(store=self.gce.bucket, home=home).read()
        return log is not None and not log.closed

    def hold(self):
        """(place, run) of everything that may train. A custom job whose nonce the run's home does not name ends by
        itself; a supervisor's machine whose home has no open log asks for no hosts, and ends at its own limit."""
        store = self.vertex.launcher.store
        claimed = {
            log.mark
            for uri in store.list("gs://example-bucket") if uri.endswith(REQUESTS)
            if not (log := decode(RequestLog, store.get(uri).data)).closed
        }  # fmt: skip
        labels = [job.body["labels"] for job in self.vertex.vertex.jobs.values() if not job.final]
        mine = {one["muster-run"]: one[NONCE_LABEL] for one in labels if one[NONCE_LABEL] in claimed}
        machines = [one for key, one in self.gce.cloud.store.items() if "/instances/" in key and self.is_open(one)]
        return [
            *(("gke", one["metadata"]["labels"][RUN]) for one in self.cloud.kubernetes.of_kind("JobSet")),
            *(("vertex", run) for run in mine),  # of two jobs of one request the one trains whose host claims the run
            *(("gce", one["labels"]["muster-run"]) for one in machines),
        ]


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Submits to ``first`` and then to another place; (the places, what was submitted or raised)."""
    count = itertools.count()

    def submitted(first, *, patience_s, at=0, fault=Fault.LOST, then=NOTHING):
        folder = tmp_path / str(next(count))
        monkeypatch.setenv("MUSTER_HOME", str(folder / "home"))
        found = Places(folder)
        if patience_s is not None:
            found.vertex.vertex.empty = {"us-central1"}  # it waits; the others do by themselves
        way = found.ways[first]
        way.at, way.fault, way.then = at, fault, then
        monkeypatch.setattr("muster.backends.load", found.launchers.__getitem__)
        monkeypatch.setattr(submit_places, "ways", lambda *words, names, **more: (
            [Way(place=name, title=name, usd=1.0, overrides=OVERRIDES[name]) for name in names], []))  # fmt: skip
        try:
            outcome = found.submit(first, "gce" if first == "vertex" else "vertex", patience_s=patience_s)
        except MusterError as error:
            outcome = error
        found.settle()
        way.at = 0
        return found, outcome

    yield submitted
    for one in tmp_path.glob("*/home/index/*"):
        processes.send(processes.labelled(one.name), signal.SIGKILL)


@pytest.mark.parametrize("patience_s", [None, 120.0], ids=["taken", "waited-for"])
@pytest.mark.parametrize("first", ["gke", "vertex", "gce"])
def test_no_two_places_hold_the_run_whatever_answer_is_lost(tried, first, patience_s):
    """Whoever was asked second holds it only where the first holds nothing, now and when all that is late has come;
    else one error is all, and ``muster down`` ends what there is."""
    places, outcome = tried(first, patience_s=patience_s)
    assert (outcome.spec.backend == first) is (patience_s is None), "without a fault: taken by the first, or left"
    changes, seen = places.ways[first].changes, set()
    for at, (fault, then) in itertools.product(range(1, len(changes) + 1), WAYS):
        places, outcome = tried(first, patience_s=patience_s, at=at, fault=fault, then=then)
        held, what = places.hold(), f"{changes[at - 1]}, {fault.name}, then {then}: {outcome!r}"
        if isinstance(outcome, MusterError):
            assert len(held) <= 1, f"{held} after {what}"
            for run_id, _ in run_registry.registry():
                stop.down(run_id)
            assert not places.hold(), f"nobody knows {held} after {what}"
            seen.add("error")
        else:
            assert held == [(outcome.spec.backend, outcome.run.run_id)], f"{held} after {what}"
            seen.add(outcome.spec.backend)
    assert len(seen) >= 2, seen
