"""What hosts saw of their hardware before ranks use them: who starts, who is swapped, what is said. In virtual time."""

from types import SimpleNamespace

import pytest
from fakes.joining_hosts import Run
from fakes.probe_output import SOUND, gpu, output
from fakes.virtual_run import events_of

from muster.protocol.to_agent import EndAttempt
from muster.protocol.to_supervisor import RanksEnded
from muster.supervise.recovery.inputs import FromHost, Log, Send
from muster.supervise.recovery.phases import Running, Starting, Waiting
from muster.supervise.replay.rebuild_state import rebuild_state

BRAKED = gpu(3, clock_reasons=0x80)
PENDING = gpu(3, remap_pending=True)
FAILED = gpu(3, remap_failed=True)


def test_sound_hosts_start_and_nothing_is_decided():
    run = Run(hosts=2)
    run.join("host-0", *SOUND)
    assert isinstance(run.machine.state.phase, Starting)
    run.join("host-1", *SOUND)
    assert run.started() == ["host-0", "host-1"] and not run.actions()
    assert [one.detail["verdict"] for one in run.kinds("host.check")] == ["healthy", "healthy"]


@pytest.mark.parametrize("bad", [BRAKED, PENDING, FAILED], ids=["drain", "reset", "replace"])
def test_a_spare_takes_the_place_of_a_faulty_host_before_the_start(bad):
    run = Run(hosts=2, spare_hosts=1)
    run.join("host-0", *SOUND)
    run.join("host-1", bad)
    assert isinstance(run.machine.state.phase, Starting), "it is not used while a sound one may come"
    run.join("host-2", *SOUND)
    assert run.started() == ["host-0", "host-2"] and not run.actions()
    assert run.machine.state.hosts["host-1"].quarantined


def test_a_host_that_still_works_is_used_where_nobody_else_comes():
    run = Run(hosts=2)
    run.join("host-0", BRAKED)
    run.join("host-1", *SOUND)
    assert run.actions() == ["ignore"] and run.started() == ["host-0", "host-1"]


def test_gpus_that_a_reset_may_heal_are_reset_before_the_start():
    run = Run(hosts=1)
    run.join("host-0", PENDING)
    assert run.actions() == ["reset"] and not run.started()
    (order,) = [one.message for one in run.effects if isinstance(one, Send) and isinstance(one.message, EndAttempt)]
    assert order.reset == (3,)
    run.give(FromHost(host="host-0", message=RanksEnded(attempt=0)))
    assert run.started() == ["host-0"]


def test_without_a_spare_the_run_goes_on_with_fewer_or_waits():
    run = Run(hosts=3, min_hosts=2)
    run.join("host-0", *SOUND)
    run.join("host-1", FAILED)
    run.join("host-2", *SOUND)
    assert run.actions() == ["shrink"]
    for name in ("host-0", "host-1", "host-2"):
        run.give(FromHost(host=name, message=RanksEnded(attempt=0)))
    assert run.started() == ["host-0", "host-2"]
    alone = Run(hosts=1)
    alone.join("host-0", FAILED)
    alone.give(FromHost(host="host-0", message=RanksEnded(attempt=0)))
    assert alone.actions() == ["wait"] and isinstance(alone.machine.state.phase, Waiting)


def test_a_spare_that_arrives_later_and_is_faulty_is_not_kept():
    run = Run(hosts=1, spare_hosts=1)
    run.join("host-0", *SOUND)
    assert isinstance(run.machine.state.phase, Running)
    run.join("host-1", FAILED)
    assert run.machine.state.hosts["host-1"].quarantined and not run.actions()


def test_the_command_that_takes_it_out_names_the_machine():
    for backend, command in (("slurm", "scontrol update nodename=node-of-host-0 state=drain"), ("local", None)):
        run = Run(hosts=1)
        settings = run.machine.settings
        object.__setattr__(settings, "spec", settings.spec.model_copy(update={"backend": backend}))
        run.join("host-0", FAILED)
        (event,) = run.kinds("host.check")
        assert event.detail["findings"] == ["GPU 3: a memory row could not be remapped"]
        assert event.detail.get("command", "").startswith(command or "") and bool(command) == (
            "command" in event.detail
        )


@pytest.mark.parametrize("cut", [0, 40, -30], ids=["nothing", "its beginning", "no end"])
def test_what_could_not_be_seen_is_no_fault(cut):
    run = Run(hosts=1)
    run.join("host-0", *SOUND, output_of=lambda *gpus: output(*gpus)[:cut])
    (event,) = run.kinds("host.check")
    assert event.detail["verdict"] == "incomplete" and event.detail["findings"]
    assert run.started() == ["host-0"] and not run.actions() and not run.kinds("host.health")


def test_a_gpu_that_the_run_does_not_use_costs_no_host():
    run = Run(hosts=1)
    run.join("host-0", *SOUND[:3], FAILED, own=tuple(one.address for one in SOUND[:2]))
    (event,) = run.kinds("host.check")
    assert event.detail["verdict"] == "healthy" and run.started() == ["host-0"]


def test_a_new_supervisor_knows_the_fault_that_is_not_judged_yet():
    run = Run(hosts=2, spare_hosts=1)
    run.join("host-0", PENDING)
    live = run.machine.state.hosts["host-0"]
    log = SimpleNamespace(log=[(0, one) for one in run.effects if isinstance(one, Log)], written=[])
    rebuilt = rebuild_state(events_of(log)).hosts["host-0"]
    assert live.health.fault is not None and rebuilt.health.fault == live.health.fault
