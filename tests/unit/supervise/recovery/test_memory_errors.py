"""After an error of a GPU's memory no snapshot is restored that was taken later."""

from types import SimpleNamespace

import pytest
from fakes.joining_hosts import Run
from fakes.probe_output import SOUND
from fakes.virtual_run import events_of

from muster.core.snapshots import SnapshotCopy
from muster.protocol.to_agent import StartAttempt
from muster.protocol.to_supervisor import HostFault, RanksEnded
from muster.supervise.recovery.inputs import FromHost, Log, Send
from muster.supervise.replay.rebuild_state import rebuild_state

HOSTS = ("host-0", "host-1")


def held(host, rank, *steps, attempt=1):
    return tuple(
        SnapshotCopy(step=step, attempt=attempt, rank=rank, layout="r1s2t1p1c1e1", host=host, tier="memory")
        for step in steps
    )


def struck(verdict="reset", *, sound_step=40, spare_hosts=0, resettable=(4,)):
    """Two hosts train; on one a memory error; its ranks had taken ``sound_step`` (None: not known) before it."""
    run = Run(hosts=2, spare_hosts=spare_hosts)
    for number in range(2 + spare_hosts):
        run.join(f"host-{number}", *SOUND)
    fault = HostFault(
        verdict=verdict, evidence="Xid 48 on GPU 4", resettable=resettable, at_ns=7, sound_step=sound_step, attempt=1
    )
    run.give(FromHost(host="host-1", message=fault))
    return run


def ended(run, *steps, attempt=1, taken_in=1):
    for rank, host in enumerate(HOSTS):
        copies = held(host, rank, *steps, attempt=taken_in)
        run.give(FromHost(host=host, message=RanksEnded(attempt=attempt, snapshots=copies)))


def restored(run):
    """The step that the newest attempt starts from; None: not from memory."""
    orders = [one.message for one in run.effects if isinstance(one, Send) and isinstance(one.message, StartAttempt)]
    restore = orders[-1].contexts[0].restore
    return restore.step if restore is not None else None


def test_the_version_from_before_the_error_is_restored_though_a_newer_one_is_whole():
    run = struck()
    ended(run, 40, 41)
    assert run.actions() == ["reset"] and restored(run) == 40
    (told,) = run.kinds("host.health")
    assert (told.detail["sound_step"], told.detail["sound_attempt"]) == (40, 1)


def test_other_errors_cost_no_step():
    run = struck(sound_step=None)
    ended(run, 40, 41)
    assert restored(run) == 41


def test_without_one_from_before_the_checkpoint_is_read():
    run = struck()
    ended(run, 41)
    assert run.machine.state.attempt == 2 and restored(run) is None


def test_what_it_spoilt_is_not_taken_later_either():
    """The hosts still hold the newer version when the next attempt fails before it has one of its own."""
    run = struck()
    ended(run, 40, 41)
    run.give(FromHost(host="host-0", message=HostFault(verdict="reset", evidence="Xid 119", resettable=(1,), at_ns=9)))
    ended(run, 40, 41, attempt=2)
    assert run.machine.state.attempt == 3 and restored(run) == 40


def test_what_the_next_attempt_takes_is_sound_again():
    run = struck()
    ended(run, 40, 41)
    run.give(FromHost(host="host-0", message=HostFault(verdict="reset", evidence="Xid 119", resettable=(1,), at_ns=9)))
    ended(run, 42, attempt=2, taken_in=2)
    assert restored(run) == 42


@pytest.mark.parametrize(("verdict", "left"), [("reset", {1: 40}), ("drain", {})])
def test_a_new_supervisor_knows_it_and_an_error_that_is_passed_over_binds_nobody(verdict, left):
    run = struck(verdict, resettable=(4,) if verdict == "reset" else ())
    assert run.actions() == [{"reset": "reset", "drain": "ignore"}[verdict]]
    log = SimpleNamespace(log=[(0, one) for one in run.effects if isinstance(one, Log)], written=[])
    assert run.machine.state.saves.distrusted == rebuild_state(events_of(log)).saves.distrusted == left
