"""A step that is not finite: replayed once, then the run stops or leaves it out. In virtual time."""

import pytest
from fakes.virtual_run import actions, cluster, events_of, kinds, machine, spec
from test_classified_failures import fails_at

from muster.config.spec import RunSpec
from muster.core.types import Action, Incident
from muster.policy.builtin import SHIPPED
from muster.policy.cluster_state import ClusterState
from muster.protocol.to_agent import StartAttempt
from muster.protocol.to_supervisor import RankExit
from muster.protocol.values import LastWords
from muster.simulate.cluster import handle_message
from muster.supervise.replay.rebuild_state import rebuild_state


def nan(step):
    message = f"step {step}: loss is nan on rank 1, micro-batch 0 (sequences 17); the update was not applied"
    return LastWords(exception="NotFinite", message=message, exit_code=1, not_finite=True)


def exit_in(host, step, last):
    return RankExit(attempt=host.attempt, rank=0, pid=1, code=1, step=step, last=last)


def bad_batch(found, step):
    """Not finite each time, unless the ranks were told to leave the step out."""
    skipped = []

    def listen(cluster, name, message):
        if isinstance(message, StartAttempt):
            skipped[:] = message.contexts[0].skip_steps
        handle_message(cluster, name, message)

    def watch():
        host = found.hosts["host-0"]
        if found.result is None:
            found.settle_steps()
            if found.stepping and host.ranks and found._step == step - 1 and step not in skipped:
                # It was at the next step already when it looked at the numbers.
                found.break_world(host, exit_in(host, step + 1, nan(step)), 0.01)
            found.after(0.05, watch)

    found.at(5.5, watch)
    return listen


@pytest.fixture
def with_skips(monkeypatch):
    def start(found, step):
        monkeypatch.setattr("muster.simulate.cluster.handle_message", bad_batch(found, step))
        return found

    return start


def test_a_flipped_bit_costs_one_replay():
    found = cluster(spec(hosts=2))
    fails_at(found, 20, last=nan(20), times=1)
    assert found.run().exit_code == 0 and actions(found) == ["restart"]


def test_a_bad_batch_stops_the_run_by_default(with_skips):
    found = with_skips(cluster(spec(hosts=1)), 20)
    end = found.run()
    assert end.exit_code == 1 and "not finite again at the same step" in end.reason and "sequences 17" in end.reason
    assert actions(found) == ["restart", "stop"]


def test_with_skip_its_update_is_left_out_and_a_new_supervisor_knows(with_skips):
    of = spec(hosts=1, recovery={"on_nonfinite_step": "skip"})
    found = with_skips(cluster(of), 20)
    found.at(20.0, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    found.at(25.0, lambda: found.kill_rank(0))
    assert found.run().exit_code == 0
    assert actions(found) == ["restart", "restart", "restart"]
    assert [log.detail.get("skip_steps") for _, log in kinds(found, "incident.decided")] == [None, [20], None]
    starts = [log.detail.get("skip_steps") for _, log in kinds(found, "attempt.started")]
    assert starts == [None, None, [20], [20]]
    assert rebuild_state(events_of(found)).steps.skipped == {20}, "also in the run's next life"


def decide(step, skipped, repeats=2):
    incident = Incident(incident_id="i1", kind="not_finite", attempt=1, step=step, host="host-0")
    situation = ClusterState(
        active=("host-0",), spares=(), wanted_hosts=1, min_hosts=1, last_applied_step=step - 1,
        restarts_without_progress=1, max_restarts_without_progress=3, same_error_repeats=repeats,
        on_nonfinite_step="skip", skipped_steps=tuple(skipped),
    )  # fmt: skip
    return SHIPPED["default"].decide(situation, incident)


def test_never_two_in_a_row_and_no_more_than_ten():
    assert decide(20, []).detail == {"skip_steps": [20]}
    assert decide(20, [18]).action is Action.RESTART
    for skipped in ([19], [21], [20]):
        assert decide(20, skipped).action is Action.STOP
    assert decide(200, range(0, 18, 2)).action is Action.RESTART, "the tenth"
    assert decide(200, range(0, 20, 2)).action is Action.STOP, "an eleventh"


def test_the_key_is_checked():
    with pytest.raises(ValueError):
        RunSpec.model_validate({**spec(hosts=1).model_dump(), "recovery": {"on_nonfinite_step": "ignore"}})
