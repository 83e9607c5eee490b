"""Before a hang's ranks are ended every host captures them; the incident names who holds the others up."""

import dataclasses

import pytest
from fakes.hang_captures import ASLEEP, IN_ALL_REDUCE, gloo_dump, spy_dump
from fakes.virtual_run import actions, cluster, events_of, kinds, spec

from muster.core.typed_json import encode
from muster.health.hang import flight_recorder, stacks
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.process_state import ProcessState
from muster.protocol.to_agent import GatherEvidence
from muster.protocol.to_supervisor import EvidenceReady
from muster.simulate.faults import hang_rank
from muster.supervise.recovery.inputs import Send
from muster.supervise.replay.rebuild_state import rebuild_state

CALLS = [("all_reduce", [4])] * 4


def captured(rank, *, late, state="S"):
    return RankEvidence(
        rank=rank,
        host=f"host-{rank}",
        process=ProcessState(state=state),
        recorder=flight_recorder.parse(gloo_dump(CALLS[: 3 if late else 4], done=3)),
        threads=stacks.parse(spy_dump(ASLEEP if late else IN_ALL_REDUCE)),
    )


def gathering(answering, *, late_s=0.1, hosts=3, state="S", **recovery):
    """A run whose hosts in ``answering`` answer; rank 2 is late, and rank 0 is reported."""
    of = spec(hosts=hosts, recovery=recovery)
    found = cluster(of)
    found.machine._ctx.settings = dataclasses.replace(found.machine.settings, gather_evidence_s=0.3)
    handle = found.machine.handle

    def answered(given, now_ns):
        effects = handle(given, now_ns)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, GatherEvidence) and effect.host in answering:
                rank = int(effect.host[-1])
                told = encode(captured(rank, late=rank == 2, state=state if rank == 2 else "S")).decode()
                answer = EvidenceReady(attempt=effect.message.attempt, ranks=(told,))
                found.receive_later(late_s, found.hosts[effect.host], answer)
        return effects

    found.machine.handle = answered
    return found


def hangs_at(found, *seconds):
    for second in seconds:
        found.at(second, lambda: hang_rank(found, 0, detect_s=0.5))


def test_the_incident_names_the_culprit_and_its_line_and_waits_for_the_last_answer():
    found = gathering({"host-0", "host-1", "host-2"})
    hangs_at(found, 10.0)
    assert found.run().exit_code == 0
    ((said_s, evidence),) = kinds(found, "evidence.gathered")
    ((named_s, incident),) = kinds(found, "incident.detected")
    assert (incident.rank, incident.host, incident.detail["culprit"]) == (2, "host-2", "code")
    assert incident.detail["evidence"].startswith("rank 2 on host-2 has not come to all_reduce number 4")
    assert incident.detail["evidence"].endswith("noticed as: rank 0: no progress")
    assert evidence.detail["incident_id"] == incident.detail["incident_id"]
    assert (evidence.detail["place"], evidence.detail["victims"]) == ("/home/u/train.py:31", 2)
    assert evidence.detail["ranks"][0].startswith("rank 2 on host-2:")
    assert evidence.detail["took_ns"] == pytest.approx(0.1e9, abs=1e6) and said_s == named_s
    assert actions(found) == ["restart"]


def test_hosts_that_do_not_answer_are_missing_and_cost_the_limit():
    found = gathering({"host-0"})
    hangs_at(found, 10.0)
    assert found.run().exit_code == 0
    ((_, evidence),) = kinds(found, "evidence.gathered")
    assert evidence.detail["took_ns"] == pytest.approx(0.3e9, abs=1e6)
    assert {"host-1 has not answered", "host-2 has not answered"} <= set(evidence.detail["missing"])


def test_without_any_answer_the_incident_is_the_report():
    found = gathering(set())
    hangs_at(found, 10.0)
    assert found.run().exit_code == 0
    assert kinds(found, "evidence.gathered") == []
    ((_, incident),) = kinds(found, "incident.detected")
    assert (incident.rank, incident.detail["evidence"]) == (0, "rank 0: no progress")
    assert "culprit" not in incident.detail


def test_an_answer_that_cannot_be_read_or_comes_late_changes_nothing():
    found = gathering({"host-0", "host-1", "host-2"}, late_s=5.0)
    found.at(10.6, lambda: found.receive_from(found.hosts["host-1"], EvidenceReady(attempt=1, ranks=("{}", "cut"))))
    hangs_at(found, 10.0)
    assert found.run().exit_code == 0
    ((_, evidence),) = kinds(found, "evidence.gathered")
    assert any(sentence.startswith("host-1: ") for sentence in evidence.detail["missing"])
    assert len(kinds(found, "incident.detected")) == 1


@pytest.mark.parametrize(("state", "counted"), [("S", 0), ("T", 0), ("", 2)], ids=["code", "stopped", "dead"])
def test_a_hosts_failures_count_what_another_host_may_mend(state, counted):
    """A takeover counts as the supervisor that logged it did."""
    found = gathering({"host-0", "host-1", "host-2"}, state=state)
    hangs_at(found, 10.0, 14.0)
    failures = []

    def count():
        for known in (found.machine.state, rebuild_state(events_of(found))):
            failures.append(len(known.hosts["host-2"].failures_ns))

    found.at(18.0, count)
    found.run()
    assert len(kinds(found, "incident.detected")) == 2
    assert failures == [counted, counted]
