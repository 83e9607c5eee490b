"""Before a hang's ranks are ended every host captures them; the incident names who holds the others up."""

import dataclasses

import pytest
from fakes.hang_captures import ASLEEP, IN_ALL_REDUCE, RAS_TEXT, gloo_dump, spy_dump
from fakes.virtual_run import actions, cluster, events_of, kinds, spec

from muster.core.typed_json import encode
from muster.health.hang import flight_recorder, stacks
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.process_state import GONE, CgroupState, ProcessState
from muster.health.verdicts import Finding, Verdict
from muster.protocol.to_agent import GatherEvidence
from muster.protocol.to_supervisor import EvidenceReady, RankExit, RankHang
from muster.simulate.fault_schedule import hang_rank
from muster.supervise.recovery import hangs
from muster.supervise.recovery.inputs import Send
from muster.supervise.recovery.phases import Gathering
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


def gathering(answering, *, late_s=0.1, hosts=3, spares=0, state="S", finding=None, **recovery):
    """A run whose hosts in ``answering`` answer; rank 2 is late, and rank 0 is reported."""
    of = spec(hosts=hosts, spare_hosts=spares, recovery=recovery)
    found = cluster(of)
    found.machine._ctx.settings = dataclasses.replace(found.machine.settings, gather_evidence_s=0.3)
    handle = found.machine.handle

    def answered(given, now_ns):
        effects = handle(given, now_ns)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, GatherEvidence) and effect.host in answering:
                rank = int(effect.host[-1])
                seen = captured(rank, late=rank == 2, state=state if rank == 2 else "S")
                if rank == 2 and finding is not None and effect.host == "host-2":
                    seen = dataclasses.replace(seen, findings=(finding,))
                told = encode(seen).decode()
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


XID = Finding(check="gpu.xid", verdict=Verdict.DRAIN, message="Xid 79 on GPU 1: fallen off the bus", gpu=1)
PORT = Finding(check="net.port", verdict=Verdict.REPLACE, message="mlx5_3 is down")


@pytest.mark.parametrize(
    ("finding", "spares", "does"),
    [(XID, 1, "swap"), (PORT, 1, "swap"), (XID, 0, "restart"), (None, 1, "restart")],
    ids=["gpu", "link", "gpu without a spare", "code"],
)
def test_a_host_is_swapped_at_once_for_its_hardware_alone(finding, spares, does):
    found = gathering({"host-0", "host-1", "host-2"}, spares=spares, finding=finding)
    hangs_at(found, 10.0)
    assert found.run().exit_code == 0
    ((_, decided),) = kinds(found, "incident.decided")
    assert (decided.detail["action"], decided.host) == (does, "host-2")


def exits_at(found, second, *, after_s, finding=None):
    """Rank 1 is killed; its host's evidence comes ``after_s`` later."""
    gone = RankEvidence(
        rank=1, host="host-1", process=ProcessState(state=GONE), cgroup=CgroupState(oom_kills=1),
        findings=(finding,) if finding else (),
    )  # fmt: skip

    def exit_now():
        host = found.hosts["host-1"]
        attempt = found.machine.state.attempt
        found.receive_from(
            host, RankExit(attempt=attempt, rank=1, pid=9, code=-9, step=found.machine.state.last_applied_step)
        )
        ranks = (encode(gone).decode(), encode(captured(0, late=False)).decode())
        found.receive_later(after_s, host, EvidenceReady(attempt=attempt, ranks=ranks, exited=1))

    found.at(second, exit_now)


@pytest.mark.parametrize("after_s", [0.001, 2.0], ids=["before the next attempt", "long after"])
def test_the_evidence_of_an_exit_follows_its_incident_and_nothing_waits_for_it(after_s):
    found, plain = gathering(set()), gathering(set())
    exits_at(found, 10.0, after_s=after_s)
    exits_at(plain, 10.0, after_s=1e6)
    assert found.run().exit_code == 0
    plain.run()
    ((_, incident),) = kinds(found, "incident.detected")
    ((_, evidence),) = kinds(found, "evidence.gathered")
    assert evidence.detail["incident_id"] == incident.detail["incident_id"]
    assert evidence.detail["culprit"] == "dead" and "killed for memory in its cgroup" in evidence.detail["summary"]
    assert len(evidence.detail["ranks"]) == 2 and not evidence.detail["missing"] and not evidence.detail["victims"]
    assert [at for at, _ in kinds(found, "attempt.started")] == [at for at, _ in kinds(plain, "attempt.started")]


def test_an_error_of_the_gpu_beside_an_exit_is_named():
    found = gathering(set())
    xid = Finding(check="gpu.xid", verdict=Verdict.REPLACE, message="Xid 79 on GPU 1: fallen off the bus", gpu=1)
    exits_at(found, 10.0, after_s=0.5, finding=xid)
    found.run()
    ((_, evidence),) = kinds(found, "evidence.gathered")
    assert evidence.detail["culprit"] == "gpu" and "Xid 79 on GPU 1" in evidence.detail["summary"]


def test_nccls_own_report_names_a_process_of_which_nothing_was_captured():
    report = RankHang(attempt=1, rank=0, evidence="rank 0: no progress", silent_s=1.0)
    found = Gathering(host="host-0", report=report, begun_ns=0, waiting={"host-0"})
    silent = encode(RankEvidence(rank=21, host="host-3", pid=3487984)).decode()
    assert found.add("host-0", EvidenceReady(attempt=1, ranks=(silent,), ras=RAS_TEXT))
    analysis, _ = hangs.conclude(found, 32)
    assert (21, "does not answer NCCL's RAS") in {(one.rank, one.because) for one in analysis.culprits}
    found.answers["host-0"] = EvidenceReady(attempt=1, ranks=(silent,), ras="x", missing=("NCCL's RAS: no end",))
    analysis, _ = hangs.conclude(found, 32)
    assert not analysis.culprits
    assert {"host-0: NCCL's RAS: no end", "host-0: no report of NCCL's RAS: it has no job summary"} <= set(
        analysis.missing
    )
