"""The save after the last step fails: the hosts write it once more, and what stands nowhere is no success."""

import pytest
from fakes.virtual_run import cluster, events_of, kinds, machine, spec
from test_final_flush import committed, ended

from muster.core.events import Event
from muster.supervise.replay.rebuild_state import rebuild_state

FULL = "rank 0: No space left on device"


def a_run(*, disk_takes=True, said=("failed",), **checkpoint):
    """50 steps on two hosts; the ranks say how their last saves ended, then leave with 0."""
    of = spec(hosts=2)
    of = of.model_copy(update={"checkpoint": of.checkpoint.model_copy(update=checkpoint)})
    found = cluster(of, steps=50)
    found.disk_takes = disk_takes

    def tell():
        for what in said:
            detail = {"tier": "disk", "uri": "x", **({"reason": FULL} if what == "failed" else {})}
            found.receive_from(found.hosts["host-0"], found.event(f"checkpoint.{what}", 1, 50, detail))

    leave = found._leave

    def tell_and_leave(*words, **more):
        tell()
        leave(*words, **more)

    found._leave = tell_and_leave
    return found


def test_the_hosts_write_what_the_ranks_could_not():
    found = a_run()
    end = ended(found)
    assert (end.exit_code, end.outcome) == (0, "succeeded")
    assert committed(found) == found.disk_step == 50 and "step 50 was written from memory" in end.reason
    assert len(kinds(found, "run.ending")) == 1


def test_weights_that_stand_nowhere_are_no_success():
    found = a_run(disk_takes=False)
    end = ended(found)
    assert (end.exit_code, end.outcome) == (1, "failed")
    assert "step 50 was only in memory and was not written" in end.reason and "there is no checkpoint" in end.reason


def test_without_snapshots_it_is_said_at_once():
    end = ended(a_run(snapshot_every_steps=0))
    assert (end.exit_code, end.outcome) == (1, "failed")
    assert FULL in end.reason and "there is no checkpoint" in end.reason


@pytest.mark.parametrize("said", [("failed", "committed"), ("committed",), ()])
def test_a_save_that_stands_needs_nothing_more(said):
    found = a_run(said=said)
    end = ended(found)
    assert (end.exit_code, end.outcome) == (0, "succeeded") and not kinds(found, "run.ending")


def test_a_new_supervisor_knows_that_it_failed():
    found = a_run(disk_takes=False)
    ended(found)
    events = events_of(found)
    begun = Event(run_id="r", attempt=1, seq=0, mono_ns=0, wall_ns=1, host="host-0", kind="checkpoint.failed", step=50,
                  detail={"tier": "disk", "uri": "x", "reason": FULL})  # fmt: skip
    assert rebuild_state([*events[:3], begun]).saves.failed == FULL
    assert rebuild_state(events[:3]).saves.failed is None
    assert machine(spec()).state.saves.failed is None
