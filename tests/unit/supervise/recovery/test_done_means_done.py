"""A run whose ranks leave with code 0 has succeeded only if the run file's last step was reached. In virtual time."""

from fakes.virtual_run import cluster, events_of, kinds, machine, spec
from test_final_flush import committed, ended

from muster.supervise.replay.rebuild_state import rebuild_state


def of_steps(steps, **more):
    of = spec(hosts=2)
    return of.model_copy(update={"training": of.training.model_copy(update={"steps": steps, "epochs": None}), **more})


def test_ranks_that_leave_early_have_failed_and_their_state_is_written():
    found = cluster(of_steps(80), steps=50)
    end = ended(found)
    assert (end.exit_code, end.outcome) == (1, "failed")
    assert end.reason.startswith("ranks ended at step 50 of 80") and committed(found) == 50
    assert kinds(found, "run.finished")[0][1].detail["final_step"] == 50


def test_the_last_step_is_done():
    end = ended(cluster(of_steps(50), steps=50))
    assert (end.exit_code, end.outcome, end.reason) == (0, "succeeded", "done after step 50")


def test_a_loop_of_the_users_own_ends_when_it_says_so():
    end = ended(cluster(of_steps(80, command=["train.py"]), steps=50))
    assert (end.exit_code, end.reason) == (0, "done after step 50")


def test_steps_that_no_log_has_are_known_from_the_ranks_that_leave():
    """Its hosts' logs were moved aside: the new supervisor knows of no step."""
    of = of_steps(50)
    found = cluster(of, steps=50)
    found.at(10.0, lambda: found.lose_supervisor())

    def takes_over():
        left = [event for event in events_of(found) if event.kind != "step"]
        found.replace_supervisor(machine(of, state=rebuild_state(left)))

    found.at(70.0, takes_over)
    end = ended(found)
    assert (end.exit_code, end.reason) == (0, "done after step 50")


def test_a_restored_step_was_applied():
    """A run of which every step was taken is recovered: its ranks restore the last one, leave, and take none."""
    found = cluster(of_steps(50), steps=50)

    def restored():
        detail = {"tier": "disk", "uri": "x", "bytes": 1, "seconds": 0.1}
        found.receive_from(found.hosts["host-0"], found.event("checkpoint.restored", 1, 50, detail))
        assert found.machine.state.last_applied_step == 50
        assert rebuild_state(events_of(found)).last_applied_step == 50

    found.at(10.0, restored)
    assert ended(found).reason == "done after step 50"
