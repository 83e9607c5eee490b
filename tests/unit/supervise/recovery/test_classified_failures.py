"""Whose fault it was: the device's, the program's, the policy's, the snapshot's. In virtual time."""

from types import SimpleNamespace

import pytest
from fakes.virtual_run import actions, cluster, events_of, kinds, machine, spec

from muster.config.spec import Check
from muster.core.incidents import GPU_PROGRAM_ERROR, HOST_UNHEALTHY, RANK_EXCEPTION, RANK_EXIT, RANK_OOM
from muster.core.snapshots import SnapshotCopy
from muster.core.types import Action, Decision
from muster.policy.builtin import SHIPPED
from muster.policy.load import complete
from muster.protocol.to_agent import PeerMoved
from muster.protocol.to_supervisor import RankExit, RanksProgress, ReplicatorAddress
from muster.protocol.values import LastWords
from muster.simulate.fault_schedule import rot_snapshot
from muster.supervise.recovery.host_health import own_numbers
from muster.supervise.recovery.inputs import RestartRequest
from muster.supervise.recovery.phases import Running
from muster.supervise.recovery.rank_exits import classify_rank_exit
from muster.supervise.replay.rebuild_state import rebuild_state


def worlds(found):
    return [list(log.detail["hosts"]) for _, log in kinds(found, "attempt.started")]


def fails_at(found, step, *, last, host=None, rank=None, times=100):
    """The rank that works on ``step`` says ``last`` and leaves, each time (on ``host`` alone where it is named)."""
    left = [times]

    def watch():
        state = found.machine.state
        if found.result is None and left[0] and isinstance(state.phase, Running) and found.stepping:
            found.settle_steps()
            where = state.ranks.get(rank or 0) if host is None else host
            on = next((number for number, name in state.ranks.items() if name == where), None)
            if found._step == step - 1 and on is not None and found.hosts[where].ranks:
                left[0] -= 1
                owner = found.hosts[where]
                message = RankExit(attempt=owner.attempt, rank=on, pid=1, code=1, step=step, last=last)
                found.break_world(owner, message, 0.01)
        if found.result is None:
            found.after(0.05, watch)

    found.at(5.5, watch)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO)",
        "CUDA error: system not yet initialized",
        "CUDA error: unspecified launch failure\nNVRM: Xid (PCI:0000:3b:00): 94, Contained memory error",
        "CUDA error: device-side assert triggered\nNVRM: Xid (PCI:0000:3b:00): 999, of a later driver",
        "NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault\n"
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
    ],
)
def test_words_of_a_broken_device_or_network_are_the_hosts(text):
    message = RankExit(attempt=1, rank=3, pid=1, code=1, step=0, last=LastWords(exception="RuntimeError", message=text))
    assert classify_rank_exit("host-1", message)[0] is HOST_UNHEALTHY


@pytest.mark.parametrize(
    "text, kind",
    [
        ("NCCL error: unhandled system error, Connection reset by peer", RANK_EXIT),
        ("CUDA out of memory", RANK_OOM),
        ("CUDA error: device-side assert triggered", RANK_EXCEPTION),
        ("CUDA error: an illegal memory access was encountered", RANK_EXCEPTION),
        ("no column Xidentity", RANK_EXCEPTION),
        ("transaction Xid 79 is in doubt", RANK_EXCEPTION),
        (
            "CUDA error: unspecified launch failure\nNVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception",
            GPU_PROGRAM_ERROR,
        ),
        ("CUDA error: an illegal memory access\nNVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault", GPU_PROGRAM_ERROR),
        ("CUBLAS_STATUS_INTERNAL_ERROR; NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault", GPU_PROGRAM_ERROR),
        ("NVRM: Xid (PCI:0000:3b:00): 43, pid=7, Ch 00000010", GPU_PROGRAM_ERROR),
        ("CUDA error: an illegal memory access\nNVRM: Xid (PCI:0000:3b:00): 45, pid=7, Ch 10", RANK_EXCEPTION),
    ],
)
def test_words_that_only_look_so_are_not(text, kind):
    message = RankExit(attempt=1, rank=3, pid=1, code=1, step=0, last=LastWords(exception="RuntimeError", message=text))
    assert classify_rank_exit("host-1", message)[0] is kind


def test_the_run_file_has_the_last_word_on_numbers():
    def kind(number, **check):
        own = own_numbers(SimpleNamespace(check=Check(**check)))
        words = LastWords(exception="RuntimeError", message=f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=7")
        message = RankExit(attempt=1, rank=3, pid=1, code=1, step=0, last=words)
        found, _, detail = classify_rank_exit("host-1", message, own)
        return found, detail["class"]

    assert kind(31) == (GPU_PROGRAM_ERROR, "app") and kind(31, xid_fatal=[31]) == (HOST_UNHEALTHY, "replace")
    assert kind(119) == (HOST_UNHEALTHY, "reset") and kind(119, xid_ignore=[119]) == (RANK_EXCEPTION, "note")
    assert kind(79, xid_ignore=[79], xid_fatal=[79]) == (HOST_UNHEALTHY, "replace")


OWN_ON_GPU = LastWords(
    exception="AcceleratorError",
    message="CUDA error: an illegal memory access was encountered\nNVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault",
)


def test_the_programs_own_error_on_a_gpu_never_costs_a_host():
    found = cluster(spec(hosts=2, spare_hosts=1))
    fails_at(found, 20, last=OWN_ON_GPU, host="host-1")
    end = found.run()
    assert end.exit_code == 1 and "illegal memory access" in end.reason
    assert actions(found) == ["restart", "stop"], "no host is swapped to see whether the error follows the ranks"
    host = found.machine.state.hosts["host-1"]
    assert not host.quarantined and not host.failures_ns


def test_a_run_file_that_calls_a_number_fatal_swaps_the_host():
    of = spec(hosts=2, spare_hosts=1)
    found = cluster(of.model_copy(update={"check": Check(xid_fatal=[31])}))
    fails_at(found, 20, last=OWN_ON_GPU, host="host-1")
    assert found.run().exit_code == 0
    assert actions(found) == ["swap"] and worlds(found)[-1] == ["host-0", "host-2"]


ECC = LastWords(exception="RuntimeError", message="CUDA error: uncorrectable ECC error encountered")


def test_no_room_for_snapshots_distrusts_none_of_them():
    for text in (
        "no room for snapshots in memory: 52.5 GB wanted, 8.1 GB free in /dev/shm/muster",
        "fetched.r1s2t1p1c1e1.0.ring of step 9 could not be fetched: no room for snapshots in memory: "
        "52.5 GB wanted, 8.1 GB free in /dev/shm/muster",
    ):
        message = RankExit(
            attempt=1, rank=3, pid=1, code=1, step=0, last=LastWords(exception="CheckpointError", message=text)
        )
        kind, evidence, detail = classify_rank_exit("host-1", message)
        assert kind is RANK_EXCEPTION and "snapshot_rejected" not in detail
        assert "rank 3 on host-1, its host's memory" in evidence and "8.1 GB" in evidence


def test_a_broken_device_costs_a_swap_and_no_verdict():
    found = cluster(spec(hosts=2, spare_hosts=1))
    fails_at(found, 20, last=ECC, host="host-1")
    assert found.run().exit_code == 0
    assert actions(found) == ["swap"] and worlds(found)[-1] == ["host-0", "host-2"]


def test_without_a_spare_it_is_tried_once_more_in_place_and_then_without_the_host():
    found = cluster(spec(hosts=3, min_hosts=2))
    fails_at(found, 20, last=ECC, host="host-1")
    assert found.run().exit_code == 0
    assert actions(found) == ["restart", "shrink"]


def test_hardwares_words_that_follow_the_ranks_are_the_programs():
    found = cluster(spec(hosts=2, spare_hosts=1))
    fails_at(
        found, 20, last=LastWords(exception="RuntimeError", message="CUDA error: unspecified launch failure"), rank=1
    )
    end = found.run()
    assert end.exit_code == 1 and "followed the ranks" in end.reason
    assert actions(found) == ["swap", "stop"]
    ((_, readmitted),) = kinds(found, "host.readmitted")
    assert readmitted.host == "host-1" and not found.machine.state.hosts["host-1"].quarantined
    logged = [event for event in events_of(found) if event.kind != "run.finished"]
    assert not rebuild_state(logged).hosts["host-1"].quarantined, "a takeover reads it from its own event"


OWN = LastWords(exception="ValueError", message="bad row 17")


def test_an_unnamed_error_that_repeats_gets_one_other_host_before_the_user_is_blamed():
    found = cluster(spec(hosts=2, spare_hosts=1))
    fails_at(found, 20, last=OWN, rank=1)
    end = found.run()
    assert end.exit_code == 1 and "bad row 17" in end.reason
    assert actions(found) == ["restart", "swap", "stop"]
    assert not found.machine.state.hosts["host-1"].quarantined, "the error followed the ranks"


def test_an_unnamed_error_of_one_host_is_healed_by_the_other():
    found = cluster(spec(hosts=2, spare_hosts=1))
    fails_at(found, 20, last=OWN, host="host-1")
    assert found.run().exit_code == 0
    assert actions(found) == ["restart", "swap"] and found.machine.state.hosts["host-1"].quarantined


# ---------------------------------------------------------------- takeover


def test_a_new_supervisor_remembers_errors_hosts_and_budgets():
    of = spec(hosts=2, spare_hosts=1)
    found = cluster(of, steps=400)
    fails_at(found, 20, last=OWN, rank=1, times=1)
    for second in (20.0, 24.0):
        found.at(second, lambda: found.kill_rank(0))
    found.run(24.04)
    old, new = found.machine.state, rebuild_state(events_of(found))
    assert new.errors == old.errors and new.errors.counts == {"20:ValueError:bad row #": 1}
    assert new.failures.without_progress == old.failures.without_progress
    successor = machine(of, state=new)
    successor.start(found.now_ns)
    for name, host in old.hosts.items():
        ages = [found.now_ns - at for at in host.failures_ns]
        kept = [found.now_ns - at for at in successor.state.hosts[name].failures_ns]
        assert len(ages) == len(kept) and all(abs(a - b) < 2e9 for a, b in zip(ages, kept, strict=True))


def test_errors_are_counted_over_takeovers():
    of = spec(hosts=1)
    found = cluster(of)
    fails_at(found, 20, last=OWN)

    def replace():
        if found.result is None:
            found.replace_supervisor(machine(of, state=rebuild_state(events_of(found))))
            found.after(0.3, replace)

    found.at(9.0, replace)
    end = found.run(200.0)
    assert end is not None and end.exit_code == 1 and "same error" in end.reason


def test_growing_is_no_restart_without_progress():
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of, steps=200)
    found.at(10.0, lambda: found.kill_host("host-2"))
    found.at(20.0, lambda: found.return_host("host-2"))
    found.run()
    events = [event for event in events_of(found) if event.kind != "run.finished"]
    for state in (rebuild_state(events), found.machine.state):
        assert state.failures.without_progress == 0


# ---------------------------------------------------------------- the user's policy


class Policy:
    def __init__(self, decide):
        self.decide = decide


def decision(**more):
    return lambda seen, found: Decision(**{"incident_id": found.incident_id, "reason": "mine", **more})


def raising(seen, found):
    raise KeyError("oops")


def leaving(seen, found):
    raise SystemExit(3)


@pytest.mark.parametrize(
    "decide",
    [
        raising,
        leaving,
        lambda seen, found: None,
        lambda seen, found: "restart",
        lambda seen: None,
        decision(action="reboot"),
        decision(action=Action.SWAP, host="host-1", replacement="host-7"),
        decision(action=Action.SWAP, host="host-1"),
        decision(action=Action.SHRINK, host="nobody"),
        decision(action=Action.IGNORE),
        decision(action=Action.WAIT, detail={"hosts": "many"}),
        decision(action=Action.RESTART, reason=None),
        decision(action=Action.RESTART, incident_id="i99"),
        decision(action=Action.RESTART, detail={"skip_steps": "all"}),
        decision(action=Action.RESTART, detail={"skip_steps": [-5]}),
        decision(action=Action.RESTART, detail={"skip_steps": [True]}),
        decision(action=Action.RESTART, detail={"skip_steps": [2**63]}),
        decision(action=Action.RESTART, exit_code=True),
        decision(action=Action.WAIT, detail={"hosts": "²"}),
    ],
)
def test_a_policy_without_a_decision_is_replaced_by_the_default_once(decide):
    found = cluster(spec(hosts=2), policy=complete(Policy(decide)))
    found.at(10.0, lambda: found.kill_rank(1))
    assert found.run().exit_code == 0
    assert actions(found) == ["restart"]
    notes = [
        log.detail["text"] for _, log in kinds(found, "run.message") if "no valid decision for i1" in log.detail["text"]
    ]
    assert len(notes) == 1


def test_a_corrected_run_file_brings_its_policy():
    found = cluster(spec(hosts=1, recovery={"keep_hosts_after_failure_s": 100.0}), policy=SHIPPED["none"], steps=400)
    found.at(10.0, lambda: found.kill_rank(0, code=1, last=OWN))
    request = RestartRequest(settings=found.machine.settings, policy=SHIPPED["default"])
    found.at(20.0, lambda: found.give(request))
    counts = []
    for second in (15.0, 30.0):
        found.at(second, lambda: counts.append(len(rebuild_state(events_of(found)).errors.counts)))
    found.at(40.0, lambda: found.kill_rank(0))
    assert found.run().exit_code == 0
    assert counts == [1, 0], "a takeover reads the restart from its own event"
    assert actions(found) == ["stop", "restart"]


# ---------------------------------------------------------------- snapshots, replicators, first steps


def test_a_damaged_copy_is_not_chosen_again_not_even_by_a_new_supervisor_and_its_peer_is_used_first():
    of = spec(hosts=2)
    found = cluster(of)
    found.at(10.0, lambda: (found.settle_steps(), rot_snapshot(found, 0, "memory"), found.kill_rank(1)))
    found.at(10.4, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    assert found.run().exit_code == 0
    (rejected,) = [log for _, log in kinds(found, "snapshot.rejected")]
    copy = SnapshotCopy(**rejected.detail["copy"])
    assert (copy.rank, copy.tier, copy.host) == (0, "memory", "host-0") and found.machine.state.saves.rejected == {copy}
    starts = [log.detail for _, log in kinds(found, "attempt.started")]
    assert starts[1]["resume_step"] == starts[2]["resume_step"] == copy.step, "the other host has the same step"
    assert not found.hosts["host-0"].holds(copy), "it was told to drop it"


def test_versions_that_are_all_damaged_cost_no_allowance_and_leave_the_disk():
    """Each restart has fewer copies to choose from, so it ends: the allowance of restarts is not for them."""
    found = cluster(spec(hosts=1, recovery={"max_restarts_without_progress": 1}))
    found.disk_step = 3
    found.at(10.0, lambda: (found.settle_steps(), rot_snapshot(found, 0, "memory", versions=2), found.kill_rank(0)))
    assert found.run().exit_code == 0
    assert len(kinds(found, "snapshot.rejected")) == 2 and actions(found) == ["restart"] * 3
    assert kinds(found, "attempt.started")[-1][1].detail["resume_step"] == -1


def sent(found, message, host="host-0"):
    taken = []
    found.machine._ctx.now_ns = found.now_ns
    from muster.supervise.recovery.inputs import FromHost, Send

    for effect in found.machine.handle(FromHost(host=host, message=message), found.now_ns):
        if isinstance(effect, Send):
            taken.append((effect.host, effect.message))
    return taken


def test_the_hosts_that_copy_to_a_mover_hear_where_it_is_now():
    found = cluster(spec(hosts=3))
    found.run(10.0)
    said = sent(found, ReplicatorAddress(memory=("10.0.0.9", 77)), host="host-1")
    assert said == [("host-0", PeerMoved(peer=("10.0.0.9", 77)))]
    assert found.machine.state.hosts["host-1"].machine.memory == ("10.0.0.9", 77)


def test_progress_before_the_first_step_renews_the_time_to_it():
    from muster.simulate.stage_arithmetic import Stages

    found = cluster(spec(hosts=1), stages=Stages(start_s=150.0))
    for second in range(10, 150, 30):
        found.at(float(second), lambda: found.receive_from(found.hosts["host-0"], RanksProgress(attempt=1)))
    assert found.run().exit_code == 0 and actions(found) == []
