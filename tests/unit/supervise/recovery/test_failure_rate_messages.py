"""What the supervisor tells ranks about failures: the interval of saves rests on it (core.intervals)."""

from fakes.virtual_run import cluster, kinds, spec

from muster.supervise.recovery.attempts import start_message


def test_ranks_hear_how_often_the_run_has_failed_and_over_what_time():
    found = cluster(spec(hosts=2), steps=200)
    told = []

    def look():
        told.append(start_message(found.machine._ctx, "host-0", None, {}).contexts[0])

    for at_s, act in ((8.0, look), (10.0, lambda: found.kill_rank(1)), (20.0, look), (30.0, lambda: found.kill_rank(0)),
                      (40.0, look)):  # fmt: skip
        found.at(at_s, act)
    assert found.run().exit_code == 0
    assert [context.failures for context in told] == [0, 1, 2]
    seconds = [context.observed_s for context in told]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= 40


def test_a_step_that_was_heard_of_late_and_is_taken_again_counts_as_redone():
    found = cluster(spec(hosts=2), steps=200)

    def heard_late(log):
        if log.kind == "incident.detected":  # the survivor's report of its last step was still on its way
            late = found.machine.state.last_applied_step + 1
            event = found.event("step", found.machine.state.attempt, late, {})
            found.after(0.0, lambda: found.receive_from(found.hosts["host-0"], event))

    found.on_log = heard_late
    found.at(10.0, lambda: found.kill_rank(1))
    assert found.run().exit_code == 0
    ((_, recovered),) = kinds(found, "incident.resolved")
    assert recovered.detail["redone_steps"] == 1
