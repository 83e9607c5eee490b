"""Hosts that are told to go, alone and all at once; and hosts that come back. In virtual time."""

import pytest
from fakes.virtual_run import actions, cluster, events_of, kinds, machine, spec

from muster.policy.builtin import SHIPPED
from muster.protocol.to_supervisor import HostNotice, RanksEnded
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.replay.rebuild_state import rebuild_state


def notice(found, name, grace_s=30.0):
    message = HostNotice(notice="preemption", source="SIGTERM", grace_s=grace_s)
    found.receive_from(found.hosts[name], message)


def worlds(found):
    return [list(log.detail["hosts"]) for _, log in kinds(found, "attempt.started")]


@pytest.mark.parametrize("policy", ["default", "conservative", "none"])
def test_every_host_told_to_go_is_one_save_and_75(policy):
    found = cluster(spec(hosts=3, min_hosts=1), policy=SHIPPED[policy])
    for number in range(3):
        found.at(10.0 + number * 0.1, lambda number=number: notice(found, f"host-{number}"))
    end = found.run()
    assert (end.exit_code, end.outcome) == (75, "preempted") and "saved and left" in end.reason
    assert actions(found) == ["stop"] and len(worlds(found)) == 1


def test_some_hosts_told_to_go_are_replaced_in_one_attempt():
    found = cluster(spec(hosts=4, min_hosts=2, spare_hosts=1))
    for name in ("host-1", "host-2"):
        found.at(10.0, lambda name=name: notice(found, name))
    assert found.run().exit_code == 0
    assert worlds(found) == [["host-0", "host-1", "host-2", "host-3"], ["host-0", "host-4", "host-3"]]


def test_ranks_step_on_while_notices_are_gathered():
    found = cluster(spec(hosts=2, spare_hosts=1))
    found.at(10.0, lambda: notice(found, "host-1"))
    seen = []
    found.at(10.4, lambda: seen.append((found.stepping, found.machine.state.phase.name)))
    assert found.run().exit_code == 0 and actions(found) == ["swap"]
    assert seen == [(True, "run")]


def test_a_spare_that_is_told_to_go_is_not_taken():
    found = cluster(spec(hosts=2, min_hosts=1, spare_hosts=1))
    found.at(10.0, lambda: notice(found, "host-2"))
    found.at(12.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    assert actions(found) == ["shrink"]


def test_a_host_told_to_go_is_used_again_once_it_went_and_came_back():
    found = cluster(spec(hosts=3, min_hosts=2), steps=400)
    found.at(10.0, lambda: notice(found, "host-1"))
    found.at(40.0, lambda: found.kill_host("host-1"))
    found.at(60.0, lambda: found.return_host("host-1"))
    assert found.run().exit_code == 0
    assert actions(found) == ["shrink", "grow"] and "host-1" in worlds(found)[-1]


def test_a_new_supervisor_knows_who_was_told_to_go_and_who_came_back():
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of, steps=400)
    found.at(10.0, lambda: notice(found, "host-1"))
    found.at(20.0, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    usable = []
    found.at(30.0, lambda: usable.extend(found.machine._ctx.usable()))
    found.at(40.0, lambda: found.kill_host("host-1"))
    found.at(50.0, lambda: found.return_host("host-1"))
    assert found.run().exit_code == 0
    assert usable == ["host-0", "host-2"] and "host-1" in worlds(found)[-1]


def test_a_notice_while_ranks_are_being_replaced_counts():
    found = cluster(spec(hosts=3, min_hosts=1, spare_hosts=1), stages=Stages(end_ranks_s=2.0))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(11.0, lambda: notice(found, "host-1"))
    assert found.run().exit_code == 0
    assert worlds(found)[1:] == [["host-0", "host-3", "host-2"]]


def test_all_told_to_go_while_ranks_are_being_replaced_write_what_memory_holds():
    found = cluster(spec(hosts=2, min_hosts=1), stages=Stages(end_ranks_s=2.0))
    found.at(10.0, lambda: found.kill_rank(0))
    for name in ("host-0", "host-1"):
        found.at(11.0, lambda name=name: notice(found, name))
    end = found.run()
    assert end.exit_code == 75 and found.disk_step > 10, end


# ---------------------------------------------------------------- slow, flapping


def slow(found, name, by_s):
    """The host ends its ranks that much later than the others."""
    take = found.end_ranks

    def end_ranks(host, order):
        if host.name != name or found.now_s > 15:
            take(host, order)
        else:
            found.halt("restart")
            host.ranks = []
            message = RanksEnded(attempt=order.attempt, snapshots=host.list_snapshots())
            found.after(by_s, lambda: found.receive_from(host, message))

    found.end_ranks = end_ranks


def test_a_host_that_ends_its_ranks_too_late_is_taken_in_again():
    found = cluster(spec(hosts=3, min_hosts=2), steps=400)
    slow(found, "host-1", 20.0)
    found.at(10.0, lambda: found.kill_rank(0))
    assert found.run().exit_code == 0
    assert actions(found) == ["restart", "shrink", "grow"]
    assert sorted(worlds(found)[-1]) == ["host-0", "host-1", "host-2"]


def test_a_run_that_waits_for_a_slow_host_goes_on_when_it_answers():
    found = cluster(spec(hosts=2), steps=400)
    slow(found, "host-1", 60.0)
    found.at(10.0, lambda: found.kill_rank(0))
    assert found.run().exit_code == 0 and actions(found) == ["restart", "wait"]
    assert 65 < kinds(found, "attempt.started")[-1][0] < 75


def test_a_flapping_host_is_looked_at_again_after_its_hold_off():
    found = cluster(spec(hosts=3, min_hosts=2), steps=20_000)
    for number in range(3):
        found.at(10.0 + 30 * number, lambda: found.kill_host("host-2", silent=True))
        found.at(20.0 + 30 * number, lambda: found.return_host("host-2"))
    assert found.run().exit_code == 0
    assert actions(found) == ["shrink", "grow", "shrink", "grow", "shrink", "ignore", "grow"]
    at = kinds(found, "attempt.started")[-1][0]
    assert 3600 < at < 3700


def test_a_link_verdict_holds_a_host_off_and_ends_also_under_a_new_supervisor(tmp_path, monkeypatch):
    from fakes import incident_kinds

    from muster.supervise.recovery.incidents import report_incident

    incident_kinds.install(tmp_path, monkeypatch, link_flap="fakes.incident_kinds:LINK_FLAP")
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of, steps=30_000)

    def verdict():
        found.machine._ctx.now_ns = found.now_ns
        report_incident(
            found.machine._ctx, incident_kinds.LINK_FLAP, host="host-1", evidence="30 % of packets are lost"
        )
        found._effects(found.machine._taken())

    found.at(10.0, verdict)

    def take_over():
        state = rebuild_state(events_of(found), now_wall_ns=found.now_ns)
        found.replace_supervisor(machine(of, state=state))

    found.at(1000.0, take_over)
    assert found.run().exit_code == 0
    assert actions(found) == ["shrink", "grow"]
    assert 3610 < kinds(found, "attempt.started")[-1][0] < 3700, "an hour from the verdict on"
