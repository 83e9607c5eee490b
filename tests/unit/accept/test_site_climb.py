"""A climb on a cluster of others: what it is counted in, and that each refusal of the site ends it in one sentence."""

import contextlib
from datetime import UTC, datetime

import pytest
from fakes.clock import VirtualClock

from muster import backends
from muster.accept import levels, record
from muster.accept.ladder import DOLLARS, HOST_HOURS, Meter, climb
from muster.app.cluster import preflight as preflight_
from muster.app.inspect.network import NetworkChecked
from muster.backends.backend import HeldHost, Looked
from muster.config.load import loads
from muster.core.errors import AccessError, CapacityError, MusterError
from muster.core.types import JobState, JobStatus
from muster.health.network.expected import judge_level
from muster.health.network.figures import SizeResult
from muster.health.network.search import assess
from tools import verified_page as page


def loaded(**resources):
    text = "{name: x, backend: slurm, command: [train.py], resources: {hosts: 2, device: cpu, ranks_per_host: 1"
    return loads(text + "".join(f", {key}: {value}" for key, value in resources.items()) + "}}", environment=False)


@pytest.mark.parametrize(
    ("resources", "unit", "per_host_hour"),
    [
        ({}, HOST_HOURS, 1.0),
        ({"provisioning_model": "owned"}, HOST_HOURS, 1.0),  # somebody waits for these nodes, whoever paid for them
        ({"usd_per_host_hour": 2.5}, DOLLARS, 2.5),
        ({"usd_per_host_hour": 0}, DOLLARS, 0.0),
    ],
)
def test_hours_are_counted_where_nobody_knows_a_price(resources, unit, per_host_hour):
    tried = levels.trial(loaded(**resources), None, 10.0)
    assert (tried.unit, tried.per_host_hour) == (unit, per_host_hour)
    assert tried.spec.slurm.time_limit == "1:00:00", "a job that ends by itself"
    assert tried.spec.limits.max_usd == (10.0 if per_host_hour and unit is DOLLARS else None)


class Site:
    """Two nodes that find nothing wrong, but for ``refuses``."""

    def __init__(self, *, kernels=("a", "b"), left=(), **refuses):
        self.kernels, self.what_is_left, self.refuses, self.held_s = kernels, list(left), refuses, 0.0

    def trial(self, spec):
        return spec

    def look(self, spec, wait):
        if "look" in self.refuses:
            raise self.refuses["look"]
        return Looked(said="n1, n2 import Muster", kernels=self.kernels)

    @contextlib.contextmanager
    def held(self, spec, wait):
        if "held" in self.refuses:
            raise self.refuses["held"]
        wait(lambda: "waits" not in self.refuses, "start of job 9", 1e9, lambda: "job 9 waits")
        lines = """echo '{"hello": null, "failed": "no torch there"}'"""
        yield {name: HeldHost(words=("sh", "-c", lines), python="python", peer="") for name in ("n1", "n2")}

    def python(self, spec):
        return "python"

    def left(self):
        return self.what_is_left


class Launcher:
    name = "slurm"

    def offers(self, spec):
        return []

    def resolve(self, spec):
        return spec


@pytest.fixture
def climbs(monkeypatch):
    """Climbs the rungs of these names on a site."""
    monkeypatch.setattr(backends, "load", lambda name: Launcher())
    done = JobStatus(state=JobState.SUCCEEDED, reason="done after step 2")
    monkeypatch.setattr(preflight_, "preflight", lambda *words, **more: done)

    def climbed(site, *names, budget=50.0, **resources):
        tried = levels.Trial(loaded=loaded(**resources), cluster=None, per_host_hour=1.0, unit=HOST_HOURS, site=site)
        meter = Meter(budget=budget, clock=VirtualClock(), unit=HOST_HOURS)
        some = [rung for rung in tried.levels() if rung.name in names]
        return tried, climb(some, tried.clearing(), meter, lambda text: None)

    return climbed


@pytest.mark.parametrize(
    ("site", "rung", "outcome", "says"),
    [
        (
            Site(look=AccessError("c2 cannot start a run's programs: no muster")),
            "preflight",
            "failed",
            "c2 cannot start",
        ),
        (Site(held=CapacityError("sbatch: no such nodes")), "network", "failed", "sbatch: no such nodes"),
        (Site(held=MusterError("job 9 ended as CANCELLED")), "network", "failed", "job 9 ended as CANCELLED"),
        (Site(), "network", "failed", "no torch there"),
        (Site(waits=True), "network", "budget", "the budget is 1.50 host-hours"),
    ],
)
def test_each_refusal_ends_it_in_one_sentence_within_the_budget(climbs, site, rung, outcome, says):
    _, climbed = climbs(site, rung, budget=50.0 if outcome == "failed" else 1.5)
    assert [(one.name, one.outcome) for one in climbed] == [(rung, outcome), ("down", "passed")]
    assert says in climbed[0].said and "\n" not in climbed[0].said, climbed[0].said


def test_a_wait_for_nodes_is_ended_by_the_budget_before_it_is_passed(climbs):
    """Broken on purpose: the rung's longest time fits, and no node ever becomes free."""
    _, climbed = climbs(Site(waits=True), "network", budget=3.0)
    assert [one.outcome for one in climbed] == ["budget", "passed"]
    assert "waiting for start of job 9" in climbed[0].said and 1.9 < climbed[-1].spent <= 3.0


@pytest.mark.parametrize(
    ("machine", "size", "outcome"),
    [("a4-highgpu-8g", 64 << 20, "failed"), ("a4-highgpu-8g", 8 << 30, "passed"), ("", 64 << 20, "passed")],
)
def test_a_level_that_cannot_be_judged_is_not_passed(climbs, monkeypatch, machine, size, outcome):
    """Of a known family; gloo, for one, measures no message so large as the published figures'."""
    level = SizeResult(collective="all_gather", size_bytes=size, ranks=16, seconds=size / 400e9, spread=0.0, wrong=0)
    family = "A4" if machine else ""
    checked = NetworkChecked(
        findings=(judge_level(level, hosts=2, family=family),), assessment=assess(["n1", "n2"], ()), rounds=1
    )
    monkeypatch.setattr(levels, "check_network", lambda hosts, argv, test: checked if test.family == family else None)
    _, climbed = climbs(Site(), "network", **({"machine": machine} if machine else {}))
    assert climbed[0].outcome == outcome
    assert ("no expected value for A4 for all_gather of 64 MiB; not judged, so not passed" in climbed[0].said) is (
        outcome == "failed"
    )


def test_hosts_of_one_kernel_make_a_rehearsal_before_there_is_a_run(climbs):
    tried, climbed = climbs(Site(kernels=("a", "a")), "preflight")
    assert climbed[0].said == "n1, n2 import Muster; done after step 2" and tried.rehearsal == levels.ONE_MACHINE
    tried, _ = climbs(Site(), "preflight")
    assert tried.rehearsal is None


def test_what_the_site_cannot_end_is_a_failure_of_the_last_rung(climbs):
    _, climbed = climbs(Site(left=["job 9 (RUNNING)"]), "preflight")
    assert (climbed[-1].outcome, climbed[-1].said) == ("failed", "left: job 9 (RUNNING)")


def test_the_record_says_that_the_price_is_not_known(climbs):
    tried, climbed = climbs(Site(), "preflight")
    found = record.record(
        tried.spec, climbed, budget=50, unit=HOST_HOURS, began=datetime(2026, 8, 22, tzinfo=UTC), rehearsal=None
    )
    assert found["price"] == "not known: the budget counted host-hours" and found["budget_host_hours"] == 50
    assert not [key for key in found if "usd" in key] and "host_hours" in found["rungs"][0]
    assert page._spent(found) == "0.0 host-hours, price not known"
