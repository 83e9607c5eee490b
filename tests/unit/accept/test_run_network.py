"""What an acceptance makes of the events and the figures of its run's network."""

import pytest
from fakes.clock import VirtualClock

from muster import backends
from muster.accept import levels
from muster.accept.ladder import Meter, climb
from muster.accept.run_network import found, judged, waiting
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.core.event_details.network import NetworkFigure, NetworkMeasured
from muster.core.events import Event
from muster.core.types import JobHandle, JobState, JobStatus

GIB = 1 << 30


def events(*rows):
    """(host, attempt, kind, detail, step) each."""
    return [
        Event(run_id="r", attempt=attempt, seq=n, mono_ns=n, wall_ns=n, host=host, kind=kind, detail=detail, step=step)
        for n, (host, attempt, kind, detail, step) in enumerate(rows)
    ]


def began(*hosts):
    detail = {"world_size": 8, "layout": {"dp_shard": 8}, "hosts": {host: [0] for host in hosts}}
    return ("supervisor", 1, "attempt.started", detail, None)


def measured(*hosts):
    return ("h0", 1, "network.measured", {"hosts": list(hosts), "ranks": 16, "library": "NCCL 2.27.3"}, None)


ENDED = ("supervisor", 1, "run.finished", {"outcome": "failed", "exit_code": 1, "reason": "no memory"}, None)
STEP = ("h0", 1, "step", {"loss": 1.0}, 1)


def test_what_was_measured_is_found_whatever_came_after_it():
    assert found(events(began("h0", "h1"), measured("h0", "h1"), STEP, ENDED), hosts=2).hosts == ("h0", "h1")
    assert found(events(began("h0", "h1")), hosts=2) is None


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([began("h0", "h1"), measured("h0")], "only h0 measured, and 2 hosts were to"),
        ([began("h0", "h1"), measured("h0", "h0")], "only h0, h0 measured"),
        ([began("h0", "h1"), ENDED], "the run ended before its network was measured: no memory"),
        ([began("h0", "h1"), STEP], "it trains, and no rank has measured the network"),
        ([began("h0")], "it began with h0 alone"),
    ],
)
def test_what_will_not_be_measured_any_more_is_said(rows, says):
    with pytest.raises(MusterError, match=says):
        found(events(*rows), hosts=2)


def test_who_was_not_heard_of_is_said():
    heard = events(("h1", 0, "agent.started", {"pid": 1, "ranks": 8}, None))
    assert waiting(heard, hosts=2, status="runs") == "runs (heard of: h1, of 2)"
    assert waiting(heard, hosts=1, status="runs") == "runs"


def figures(*rows, hosts=("h0", "h1")):
    """(collective, bytes, GB/s of the whole output a second) each."""
    made = [
        NetworkFigure(collective=collective, size_bytes=size, seconds=size / gb_s / 1e9 if gb_s else 0.0)
        for collective, size, gb_s in rows
    ]
    return NetworkMeasured(hosts=hosts, ranks=16, library="NCCL 2.27.3", figures=tuple(made))


def test_the_largest_all_gather_is_judged_and_the_largest_of_others_said():
    """Of 16 ranks the bus bandwidth is 15/16 of it, of an all_reduce twice as much."""
    rows = [
        ("all_gather", GIB, 100.0), ("all_gather", 8 * GIB, 400.0), ("all_gather", 1 << 24, 1.0),
        ("all_reduce", 8 * GIB, 160.0), ("all_reduce", 1 << 24, 1.0),
    ]  # fmt: skip
    said = judged(figures(*rows), family="A4")
    assert "all_gather of 8192 MiB between 2 hosts: bus bandwidth 375 GB/s, as published" in said
    assert said.endswith("all_reduce 300")
    with pytest.raises(MusterError, match=r"bus bandwidth 234 GB/s, less than 70 %.*, all_reduce 300$"):
        judged(figures(*rows[:1], ("all_gather", 8 * GIB, 250.0), *rows[2:]), family="A4")


@pytest.mark.parametrize("rows", [[], [("all_reduce", 8 * GIB, 400.0)], [("all_gather", 8 * GIB, 0.0)]])
def test_without_a_figure_of_the_judged_collective_nothing_passes(rows):
    with pytest.raises(MusterError, match="h0 and h1 measured no all_gather"):
        judged(figures(*rows), family="")


SCRIPT = {"command": ["train.py"]}
TPU = {"resources": {"device": "tpu", "machine": "ct5lp-hightpu-4t"}}


class Launcher:
    """Of a run that has ended before anything was measured."""

    name, remote, http = "gke", None, None

    def __init__(self, *states):
        self.states = list(states)

    def poll(self, handle):
        return JobStatus(state=self.states.pop(0) if self.states else JobState.FAILED, reason="evicted")

    def resolve(self, spec):
        return spec


@pytest.mark.parametrize(("what", "says"), [(SCRIPT, "script of one's own"), (TPU, "chips' network")])
def test_who_measures_nothing_skips_the_rung_and_pays_nothing_for_it(what, says):
    spec = RunSpec.model_validate({"name": "x", "backend": "gke", **what})
    tried = levels.Trial(loaded=Loaded(spec=spec, text="", source=""), cluster=None, per_host_hour=100.0)
    (rung,) = (one for one in tried.levels() if one.name == "network")
    climbed = climb([rung], tried.clearing(), Meter(budget=1000.0, clock=VirtualClock()), lambda text: None)
    assert climbed[0].outcome == "skipped" and says in climbed[0].said and rung.per_hour == 0.0


@pytest.fixture
def network(monkeypatch):
    """Climbs the rung of a run whose events are ``rows``."""

    def climbed(launcher, *rows):
        spec = RunSpec.model_validate({"name": "x", "backend": "gke"})
        tried = levels.Trial(loaded=Loaded(spec=spec, text="", source=""), cluster=None, per_host_hour=0.0)
        tried.run = None
        heard = events(*rows)

        class Target:
            def events(self, kind=None):
                return [one for one in heard if kind in (None, one.kind)]

        handle = JobHandle(run_id="r", backend="gke", job_id="", run_dir="")
        monkeypatch.setattr(levels.Trial, "_submit", lambda self: None)
        monkeypatch.setattr(levels.Trial, "_run", lambda self: None)
        monkeypatch.setattr(levels.Trial, "_target", lambda self: Target())
        monkeypatch.setattr(levels, "job", lambda run: (launcher, handle))
        monkeypatch.setattr(levels, "mirror", lambda launcher, run: None)
        monkeypatch.setattr(backends, "load", lambda name: launcher)
        (rung,) = (one for one in tried.levels() if one.name == "network")
        return tried, climb([rung], tried.clearing(), Meter(budget=1.0, clock=VirtualClock()), lambda text: None)[0]

    return climbed


def test_a_run_that_ends_without_a_word_ends_the_rung(network):
    _, climbed = network(Launcher(JobState.WAITING, JobState.FAILED))
    assert (climbed.outcome, climbed.seconds) == ("failed", 5.0)
    assert climbed.said == "the run ended before its network was measured: evicted (heard of: no host, of 2)"


@pytest.mark.parametrize(("kernels", "rehearsal"), [("aa", levels.ONE_MACHINE), ("ab", None)])
def test_hosts_of_one_kernel_make_a_rehearsal_of_it(network, kernels, rehearsal):
    heard = [
        (host, 0, "agent.started", {"pid": 1, "ranks": 8, "boot_id": kernel}, None)
        for host, kernel in zip(("h0", "h1"), kernels, strict=True)
    ]
    figure = {"collective": "all_gather", "size_bytes": GIB, "seconds": 0.1}
    detail = {"hosts": ["h0", "h1"], "ranks": 16, "library": "gloo", "figures": [figure]}
    tried, climbed = network(Launcher(), *heard, began("h0", "h1"), ("h0", 1, "network.measured", detail, None))
    assert climbed.outcome == "passed" and tried.rehearsal == rehearsal
