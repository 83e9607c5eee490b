"""Faults of hosts and networks: lost, stopped, bad and surplus hosts; cut, one-way and flapping links.

Every run's history is judged by the offline checker.
"""

import os
import signal
import subprocess
import time

import pytest
from chaos import Judged
from cluster import namespaces_work, spec_of

from muster.protocol.client import HealthReport, StopRun

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
#: Two hosts of one rank each, and one more that waits. 60 steps: faults come after ten.
SPARED = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1}
LONGER = {"training.steps": 120}
needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2 for network namespaces")


# ---------------------------------------------------------------- hosts


def test_a_host_that_was_stopped_and_wakes_up_late_writes_nothing(tmp_path, reference):
    """Fault 8: declared lost while stopped, replaced, then resumed: fenced."""
    with Judged(tmp_path, spec_of(**SPARED, **LONGER, **{"recovery.heartbeat_timeout_s": 1.0})) as run:
        run.under_way()
        name = run.ranks()[1][1]
        run.signal_host(name, signal.SIGSTOP)
        run.wait_until(lambda: run.events("incident.resolved"), "recovery")
        run.signal_host(name, signal.SIGCONT)
        run.ended()
        assert run.recoveries() == ["swap"], run.story()
        assert run.final_hash() == reference(2, 1, **LONGER)[0]


def test_a_preemption_notice_swaps_the_host_before_it_goes(tmp_path, reference):
    """Fault 38: SIGTERM to one host of two, as a scheduler would send it. No crash is counted."""
    with Judged(tmp_path, spec_of(**SPARED)) as run:
        run.under_way()
        name = run.ranks()[1][1]
        run.agents[name].send_signal(signal.SIGTERM)
        run.ended()
        assert run.recoveries()[0] == "swap", run.story()
        assert run.troubles()[0].detail["incident"] == "preemption_notice"
        assert run.events("termination.notice")
        assert name not in {host for _, host in run.ranks().values()}
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")), run.story()
        assert run.final_hash() == reference(2, 1)[0]


def test_a_spare_that_cannot_start_is_set_aside_and_an_extra_agent_is_parked(tmp_path, monkeypatch):
    """Faults 18 and 19."""
    broken_torch = tmp_path / "broken" / "torch"
    broken_torch.mkdir(parents=True)
    (broken_torch / "__init__.py").write_text("raise ImportError('this host has no torch')")
    changes = {"resources.hosts": 1, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 400}
    with Judged(tmp_path / "run", spec_of(**changes), extra_hosts=1) as run:
        run.start(["host-0"])
        run.wait_for_step(3)
        monkeypatch.setenv("PYTHONPATH", str(broken_torch.parent))
        run.start_agent("host-1")
        monkeypatch.undo()
        run.start_agent("host-2")
        run.wait_until(lambda: run.events("host.set_aside"), "the bad spare's note")
        run.wait_for_spare()
        assert run.troubles() == [], run.story()
        run.signal_host("host-0")
        run.wait_until(lambda: run.events("incident.resolved") or len(run.events("attempt.started")) > 1, "the swap")
        assert {host for _, host in run.ranks().values()} <= {"host-0", "host-2"}
        assert run.recoveries() == ["swap"], run.story()
        run.tell(StopRun(force=True))
        run.wait()


@pytest.mark.soak
def test_a_verdict_on_a_sound_host_costs_one_swap_and_a_host_that_keeps_failing_is_left_out(tmp_path, reference):
    """Faults 43 (a false alarm) and 39 (one host's rank dies three times, each time after a new step)."""
    with Judged(tmp_path, spec_of(**{**SPARED, "resources.spare_hosts": 2, "training.steps": 200})) as run:
        run.under_way()
        accused = run.ranks()[1][1]
        run.tell(HealthReport(host=accused, evidence="a detector that errs"))
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "recovery from the false alarm")
        bad = run.ranks()[0][1]
        for blow in range(3):
            run.wait_until(lambda blow=blow: len(run.events("incident.resolved")) > blow, "recovery")
            os.kill(next(pid for pid, host in run.ranks().values() if host == bad), signal.SIGKILL)
        run.ended()
        assert run.recoveries() == ["swap", "restart", "restart", "swap"], run.story()
        assert {event.host for event in run.events("host.quarantined")} == {accused, bad}
        assert not {host for _, host in run.ranks().values()} & {accused, bad}
        assert all(event.detail["redone_steps"] <= 2 for event in run.events("incident.resolved")), run.story()
        assert run.final_hash() == reference(2, 1, **{"training.steps": 200})[0]


def test_a_host_is_lost_while_the_ranks_are_being_replaced(tmp_path, reference):
    """Fault 16: the recovery restarts with the spare, and converges."""
    with Judged(tmp_path, spec_of(**SPARED)) as run:
        run.under_way()
        run.kill_rank(0)
        run.wait_until(lambda: run.troubles(), "the first incident")
        run.signal_host(run.ranks()[1][1])
        run.ended()
        assert run.recoveries() in (["restart", "swap"], ["swap"]), run.story()
        assert run.final_hash() == reference(2, 1)[0]


@pytest.mark.soak
def test_exact_sums_shrink_and_grow_without_changing_a_bit(tmp_path, reference):
    """Faults 14, 17 and 41 with ``exact: true``: 3 -> 2 -> 3 hosts, with the results of a run on 3 and of one on 2."""
    exact = {"training.exact": True, "training.steps": 120}
    changes = {"resources.hosts": 3, "resources.min_hosts": 2, "resources.ranks_per_host": 1, **exact}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(8)
        run.signal_host("host-2")
        run.wait_until(lambda: run.events("incident.resolved"), "recovery")
        run.start_agent("host-2")
        run.ended()
        assert run.recoveries() == ["shrink", "grow"], run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **exact)[:2]


# ---------------------------------------------------------------- networks


@pytest.mark.soak
@needs_namespaces
def test_a_flapping_link_below_the_limit_disturbs_nobody(tmp_path, reference):
    """Fault 24: half a second down, four times; the limit is two seconds."""
    with Judged(tmp_path, spec_of(**SPARED, **LONGER, **{"recovery.heartbeat_timeout_s": 2.5}), netns=True) as run:
        run.start()
        run.wait_for_step(10)
        for _ in range(4):
            run.network.cut("host-1")
            time.sleep(0.5)
            run.network.heal("host-1")
            time.sleep(1.0)
        run.ended()
        assert run.recoveries() == [], run.story()
        assert run.final_hash() == reference(2, 1, **LONGER)[0]


@needs_namespaces
def test_a_one_way_partition_is_silence_too(tmp_path, reference):
    """Fault 22: outbound traffic is dropped: the host receives but cannot send."""
    with Judged(tmp_path, spec_of(**SPARED, **{"recovery.heartbeat_timeout_s": 0.8}), netns=True) as run:
        run.under_way()
        name = run.ranks()[1][1]
        if not drop_everything_from(run.network, name):
            pytest.skip("this kernel has no token bucket (tc tbf)")
        run.ended()
        assert run.recoveries()[0] == "swap", run.story()
        assert "silent" in run.events("host.lost")[0].detail["evidence"]
        assert run.final_hash() == reference(2, 1)[0]


def drop_everything_from(network, name):
    """Drop outbound traffic by a token bucket smaller than any packet; False where the kernel has no tbf."""
    bucket = ["tbf", "rate", "8bit", "burst", "1b", "limit", "1b"]
    command = ["tc", "-n", network.namespace(name), "qdisc", "add", "dev", "eth0", "root", *bucket]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
