"""An incident kind of another package: reported for a host, treated by its traits, remembered by a takeover."""

import json
from types import SimpleNamespace

import pytest
from fakes import incident_kinds
from fakes.virtual_run import cluster, spec

from muster.app.planning.simulate import measure
from muster.core.errors import UsageError
from muster.core.event_details.training import Step
from muster.core.incidents import KINDS, traits_of
from muster.protocol.client import HealthReport
from muster.supervise.process.client_requests import health_of

PACKAGE = """
from muster.core.incidents import IncidentTraits, Treatment

FAN_FAILURE = IncidentTraits(
    kind="fan_failure", meaning="a fan stands still", blames_host=True, may_be_ignored=False,
    treatment=Treatment.REPLACE, simulated_as="host",
)
"""


@pytest.fixture
def fan_failure(tmp_path, monkeypatch):
    (tmp_path / "fans.py").write_text(PACKAGE)
    incident_kinds.install(tmp_path, monkeypatch, fan_failure="fans:FAN_FAILURE")


def report(of):
    message = HealthReport(host="host-1", kind="fan_failure", evidence="fan 3 stands still")
    of.give(health_of(message))


def logged(of, kind):
    return [log for _, log in of.log if log.kind == kind]


def test_a_kind_of_another_package_ends_in_a_swap(fan_failure):
    assert KINDS.names()[-1] == "fan_failure"
    of = cluster(spec(hosts=2, spare_hosts=1), steps=200)
    of.at(10.0, lambda: report(of))
    assert of.run().exit_code == 0
    (incident,) = logged(of, "incident.detected")
    assert (incident.detail["incident"], incident.host) == ("fan_failure", "host-1")
    assert incident.detail["evidence"] == "host-1: fan 3 stands still"
    assert [log.detail["action"] for log in logged(of, "incident.decided")] == ["swap"]
    assert list(logged(of, "attempt.started")[-1].detail["hosts"]) == ["host-0", "host-2"]
    assert logged(of, "host.quarantined")[0].host == "host-1"
    assert len(of.machine.state.hosts["host-1"].failures_ns) == 1, "the kind blames its host"


def test_a_kind_that_is_not_installed_is_refused():
    with pytest.raises(ValueError, match="no incident kind 'fan_failure'"):
        report(cluster(spec(hosts=2, spare_hosts=1), steps=200))
    with pytest.raises(UsageError, match="no incident kind 'fan_failure'"):
        traits_of("fan_failure")


def test_every_kind_stands_in_the_table_under_its_own_name(fan_failure):
    assert all(traits_of(kind).kind == kind for kind in KINDS.names())


def test_a_profile_is_measured_from_recoveries_of_the_kind(fan_failure, tmp_path, monkeypatch):
    from muster.app.planning import simulate

    stages = {"collected": 0.1, "started": 0.2, "first_step": 3.0}
    healed = SimpleNamespace(kind="fan_failure", detect_s=7.5, stages_s=stages)
    document = SimpleNamespace(incidents=[healed], goodput=SimpleNamespace(reference=None), steps=3)
    monkeypatch.setattr(simulate.api, "load", lambda run_dir: SimpleNamespace(document=document, damaged=()))
    events = tmp_path / "events"
    events.mkdir()
    taken = [
        {"run_id": "r", "attempt": 1, "seq": seq, "mono_ns": seq, "wall_ns": seq, "host": "host-0", "kind": "step",
         "detail": {**dict.fromkeys(Step.required()), "step_ns": 10**9}}
        for seq in range(4)
    ]  # fmt: skip
    monkeypatch.setattr(simulate.event_log, "merged", lambda folder: [simulate_event(line) for line in taken])
    profile = measure(tmp_path)
    assert profile.detect_s == {"host": (7.5,)}


def simulate_event(line):
    from muster.core.events import Event

    return Event.from_json(json.loads(json.dumps(line)))
